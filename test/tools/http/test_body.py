"""Bodies, decompressed within bounds."""

import asyncio
import gzip
import random
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic.errors import ToolError
from torchrl_agentic.tools.http.exchange import BodyEnd, inflater_for, read_body
from torchrl_agentic.tools.http.http_client import WireLimit


def deflate_raw(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


async def read(pieces: Iterable[bytes], encoding: str, most: int = 1 << 20) -> tuple[bytes, BodyEnd]:
    async def chunks() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    into = bytearray()
    ended = await read_body(chunks(), inflater_for(encoding), most, into)
    return bytes(into), ended


PACKERS = {
    "": bytes,
    "identity": bytes,
    "gzip": gzip.compress,
    "X-GZIP": gzip.compress,
    "deflate": zlib.compress,
    " deflate ,": deflate_raw,
}


@pytest.mark.parametrize("encoding", PACKERS)
@given(data=st.binary(max_size=5000), seed=st.integers(0, 1000), most=st.integers(1, 6000))
def test_a_body_comes_out_as_it_went_in_however_it_is_cut(encoding: str, data: bytes, seed: int, most: int):
    packed, rng = PACKERS[encoding](data), random.Random(seed)
    pieces: list[bytes] = []
    while packed:
        size = rng.randint(1, 40)
        pieces, packed = [*pieces, packed[:size]], packed[size:]
    out, ended = asyncio.run(read(pieces, encoding, most))
    assert out == data[:most]
    assert ended == BodyEnd(truncated=len(data) > most)


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "compress", "gzip,br", "x" * 500])
def test_unrequested_content_encoding_is_rejected(encoding: str):
    with pytest.raises(ToolError, match="gzip and deflate can be read"):
        inflater_for(encoding)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_decompression_bomb_stops_at_the_bound(encoding: str):
    packer = zlib.compressobj(wbits=31 if encoding == "gzip" else 15)
    packed = b"".join([*(packer.compress(bytes(1 << 20)) for _ in range(200)), packer.flush()])
    pieces = [packed[at : at + 65536] for at in range(0, len(packed), 65536)]
    tracemalloc.start()
    out, ended = await read(pieces, encoding)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (len(out), ended.truncated) == (1 << 20, True)
    assert peak < 6 << 20


async def test_gzip_of_several_members_is_read_and_padding_ignored():
    packed = gzip.compress(b"one ") + gzip.compress(b"two") + b"\0" * 100 + b"\x1f\x8b"
    assert await read([packed], "gzip") == (b"one two", BodyEnd())


async def test_members_without_end_are_not_read_for_ever():
    out, ended = await read([gzip.compress(b"") * 3000], "gzip")
    assert out == b""
    assert ended.problem is not None


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_broken_body_keeps_its_readable_part(encoding: str):
    text = bytes(random.Random(0).randbytes(40_000))
    packed = PACKERS[encoding](text)
    out, ended = await read([packed[:20_000]], encoding)
    assert text.startswith(out)
    assert len(out) > 10_000
    assert ended == BodyEnd(problem="the compressed data ends too early")
    _, ended = await read([b"this is no compressed data"], encoding)
    assert ended == BodyEnd(problem="the rest is not compressed as announced")


async def test_too_much_on_the_wire_cuts_the_body():
    def pieces() -> Iterable[bytes]:
        yield b"abc"
        raise WireLimit

    assert await read(pieces(), "") == (b"abc", BodyEnd(truncated=True))
