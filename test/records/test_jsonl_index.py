"""JsonlIndex of a file are those that its bytes say, however it grows, shrinks, or is compressed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import zstandard
from helpers.processes import run_program
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_agentic.records import DumpTooLarge
from torchrl_agentic.records.jsonl_index import Allowance, JsonlIndex

pieces = st.lists(st.binary(max_size=12) | st.sampled_from([b"\n", b"a\n", b"\n\nb"]), max_size=8)


def known(lines: JsonlIndex) -> list[bytes]:
    return [lines.read(index) for index in range(len(lines))]


def wanted(data: bytes) -> list[tuple[int, bytes]]:
    return [(number, line) for number, line in enumerate(data.split(b"\n"), 1) if line]


@settings(deadline=None)
@given(grown=pieces, budget=st.none() | st.integers(1, 5))
def test_a_file_that_grows_has_the_lines_of_its_bytes(
    tmp_path_factory: pytest.TempPathFactory, grown: list[bytes], budget: int | None
):
    """After each piece, read to the end or in steps of a few bytes."""
    path = tmp_path_factory.mktemp("lines") / "f.jsonl"
    path.touch()
    with JsonlIndex(path) as lines:
        for count in range(len(grown)):
            with path.open("ab") as file:
                file.write(grown[count])
            while lines.scan(budget):
                pass
            data = b"".join(grown[: count + 1])
            assert [(lines.number(i), lines.read(i)) for i in range(len(lines))] == wanted(data)
            assert lines.scanned == 1.0


@settings(deadline=None)
@given(frames=st.lists(st.binary(max_size=200), max_size=5), budget=st.none() | st.integers(1, 50))
def test_a_compressed_file_has_the_lines_that_were_compressed(
    tmp_path_factory: pytest.TempPathFactory, frames: list[bytes], budget: int | None
):
    """Each piece is a frame of its own, and comes while the file is open."""
    path = tmp_path_factory.mktemp("lines") / "f.jsonl.zst"
    path.touch()
    with JsonlIndex(path) as lines:
        for frame in frames:
            with path.open("ab") as file:
                file.write(zstandard.compress(frame))
            while lines.scan(budget):
                pass
        assert known(lines) == [line for _, line in wanted(b"".join(frames))]


@given(cut=st.integers(1, 400), budget=st.none() | st.integers(1, 100))
def test_truncated_frame_loses_only_its_lines(
    tmp_path_factory: pytest.TempPathFactory, cut: int, budget: int | None
):
    """The frames around it are read whole."""
    path = tmp_path_factory.mktemp("lines") / "f.jsonl.zst"
    whole = [
        zstandard.ZstdCompressor(write_checksum=True).compress(b"%d " % n * 500 + b"\n") for n in range(3)
    ]
    path.write_bytes(whole[0] + whole[1][: min(cut, len(whole[1]) - 1)] + whole[2])
    with JsonlIndex(path) as lines:
        while lines.scan(budget):
            pass
        found = known(lines)
    assert found[0] == b"0 " * 500
    assert found[-1] == b"2 " * 500


def test_truncated_file_is_read_again(tmp_path: Path):
    path = tmp_path / "f.jsonl"
    path.write_bytes(b"one\ntwo\nthree\n")
    with JsonlIndex(path) as lines:
        lines.scan()
        path.write_bytes(b"four\n")
        assert lines.scan()
        assert known(lines) == [b"four"]


def test_beginning_of_a_line_can_be_read_alone(tmp_path: Path):
    path = tmp_path / "f.jsonl"
    path.write_bytes(b"x" * 100 + b"\nshort\n")
    with JsonlIndex(path) as lines:
        lines.scan()
        assert lines.read(0, 10) == b"x" * 10
        assert lines.read(1, 10) == b"short"
        assert (lines.size(0), lines.size(1)) == (100, 5)


def test_how_much_was_looked_at_is_known(tmp_path: Path):
    path = tmp_path / "f.jsonl"
    path.write_bytes(b"1234567\n" * 10)
    with JsonlIndex(path) as lines:
        assert lines.scanned == 0
        lines.scan(40)
        assert lines.scanned == 0.5
        assert len(lines) == 5


def bomb(megabytes: int) -> bytes:
    """Make a frame of blocks that repeat one byte, 128 KiB from 4 bytes, as no honest compressor would."""
    # RFC 8878: no checksum, no size, a window of 128 KiB; blocks of type 1 (RLE) of the byte "x"; the last.
    frame = b"\x28\xb5\x2f\xfd\x00\x38"
    block = ((1 << 17) << 3 | 1 << 1).to_bytes(3, "little") + b"x"
    return frame + block * (megabytes * 8) + b"\x01\x00\x00"


def test_unpacking_is_bounded_in_memory_and_on_disk(tmp_path: Path):
    """98 kB that unpack to 3 GiB, in a process that may have 512 MiB more than it starts with."""
    path = tmp_path / "0.jsonl.zst"
    path.write_bytes(bomb(3 << 10))
    assert path.stat().st_size < 100_000
    code = f"""
import os, resource, zstandard
from pathlib import Path
from torchrl_agentic.records import DumpTooLarge, read_records
began = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (began + (512 << 20),) * 2)
resource.setrlimit(resource.RLIMIT_FSIZE, ((1 << 30) + 1,) * 2)
try:
    list(read_records({str(path)!r}))
except DumpTooLarge as error:
    print(error)
"""
    done = run_program([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "unpack to more than 1,073,741,824" in done.stdout, done.stderr
    assert "'zstd -d'" in done.stdout
    assert "max_unpacked_bytes" in done.stdout
    assert str(path) in done.stdout


def test_file_that_unpacks_to_too_much_is_rejected_until_it_changes(tmp_path: Path):
    path = tmp_path / "0.jsonl.zst"
    path.write_bytes(zstandard.compress(b"a\n" * 500) + zstandard.compress(b"b\n" * 501))
    with JsonlIndex(path, Allowance(2000)) as lines:
        for _ in range(2):
            with pytest.raises(DumpTooLarge, match="more than 2,000"):
                lines.scan()
        path.write_bytes(zstandard.compress(b"c\n"))
        lines.scan()
        assert known(lines) == [b"c"]


@settings(deadline=None)
@given(
    frames=st.lists(st.binary(max_size=60).map(lambda some: some * 40 + b"\n"), min_size=1, max_size=5),
    cut=st.none() | st.integers(0, 400),
    most=st.integers(1, 4000),
    budget=st.none() | st.integers(1, 50),
    step=st.integers(1, 300),
)
def test_a_bound_is_kept_to_the_byte_however_the_file_is_framed_cut_grown_and_read(
    tmp_path_factory: pytest.TempPathFactory,
    frames: list[bytes],
    cut: int | None,
    most: int,
    budget: int | None,
    step: int,
):
    """With the last frame cut or whole, and the file written so many bytes at a time."""
    path = tmp_path_factory.mktemp("lines") / "f.jsonl.zst"
    path.touch()
    packed = [zstandard.ZstdCompressor(write_checksum=True).compress(frame) for frame in frames]
    last = packed[-1] if cut is None else packed[-1][: min(cut, len(packed[-1]) - 1)]
    data = b"".join(packed[:-1]) + last
    whole = b"".join(frames if cut is None else frames[:-1])
    with JsonlIndex(path, Allowance(most)) as lines:
        try:
            for begin in range(0, len(data), step):
                with path.open("ab") as file:
                    file.write(data[begin : begin + step])
                while lines.scan(budget):
                    pass
        except DumpTooLarge:
            assert len(b"".join(frames)) > most
        else:
            assert len(whole) <= most
            sure = [line for _, line in wanted(whole)]
            assert known(lines)[: len(sure)] == sure
        assert sum(lines.size(index) for index in range(len(lines))) <= most


def test_beginnings_of_frames_without_end_are_passed_over_in_one_go(tmp_path: Path, monkeypatch):
    """Each read of the file serves all of the broken frames in it."""
    path = tmp_path / "f.jsonl.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd" * 10_000 + zstandard.compress(b"whole\n"))
    reads: list[int] = []
    pread = os.pread

    def counted(file: int, size: int, offset: int) -> bytes:
        reads.append(size)
        return pread(file, size, offset)

    monkeypatch.setattr(os, "pread", counted)
    with JsonlIndex(path) as lines:
        lines.scan()
        assert known(lines) == [b"whole"]
    assert len(reads) < 20


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst"])
def test_lines_without_end_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str):
    """Where each begins is kept in memory."""
    monkeypatch.setattr("torchrl_agentic.records.jsonl_index.MAX_LINES", 1000)
    path, data = tmp_path / f"f{suffix}", b"x\n" * 1001
    path.write_bytes(data if suffix == ".jsonl" else zstandard.compress(data))
    with JsonlIndex(path) as lines, pytest.raises(DumpTooLarge, match="more than 1,000 lines: split it"):
        lines.scan()
