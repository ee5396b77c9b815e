"""Lines of a file are those that its bytes say, however it grows, shrinks, or is compressed."""

from __future__ import annotations

from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_agentic.records.lines import Lines

pieces = st.lists(st.binary(max_size=12) | st.sampled_from([b"\n", b"a\n", b"\n\nb"]), max_size=8)


def known(lines: Lines) -> list[bytes]:
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
    with Lines(path) as lines:
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
    with Lines(path) as lines:
        for frame in frames:
            with path.open("ab") as file:
                file.write(zstandard.compress(frame))
            while lines.scan(budget):
                pass
        assert known(lines) == [line for _, line in wanted(b"".join(frames))]


@given(cut=st.integers(1, 400), budget=st.none() | st.integers(1, 100))
def test_a_frame_that_a_crash_has_cut_costs_only_its_own_lines(
    tmp_path_factory: pytest.TempPathFactory, cut: int, budget: int | None
):
    """The frames around it are read whole."""
    path = tmp_path_factory.mktemp("lines") / "f.jsonl.zst"
    whole = [
        zstandard.ZstdCompressor(write_checksum=True).compress(b"%d " % n * 500 + b"\n") for n in range(3)
    ]
    path.write_bytes(whole[0] + whole[1][: min(cut, len(whole[1]) - 1)] + whole[2])
    with Lines(path) as lines:
        while lines.scan(budget):
            pass
        found = known(lines)
    assert found[0] == b"0 " * 500
    assert found[-1] == b"2 " * 500


def test_a_file_that_is_cut_off_is_read_anew(tmp_path: Path):
    path = tmp_path / "f.jsonl"
    path.write_bytes(b"one\ntwo\nthree\n")
    with Lines(path) as lines:
        lines.scan()
        path.write_bytes(b"four\n")
        assert lines.scan()
        assert known(lines) == [b"four"]


def test_the_beginning_of_a_line_is_read_alone(tmp_path: Path):
    path = tmp_path / "f.jsonl"
    path.write_bytes(b"x" * 100 + b"\nshort\n")
    with Lines(path) as lines:
        lines.scan()
        assert lines.read(0, 10) == b"x" * 10
        assert lines.read(1, 10) == b"short"
        assert (lines.size(0), lines.size(1)) == (100, 5)


def test_how_much_was_looked_at_is_known(tmp_path: Path):
    path = tmp_path / "f.jsonl"
    path.write_bytes(b"1234567\n" * 10)
    with Lines(path) as lines:
        assert lines.scanned == 0
        lines.scan(40)
        assert lines.scanned == 0.5
        assert len(lines) == 5
