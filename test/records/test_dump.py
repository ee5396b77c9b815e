"""A dump is listed by its beginnings, read where it is looked at, and may change while it is open."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zstandard
from helpers.record_strategies import record, turn

from torchrl_agentic.messages import Message, ToolResult
from torchrl_agentic.records import (
    BadLine,
    Dump,
    DumpFile,
    DumpTooLarge,
    Recorder,
    Summary,
    TrajectoryRecord,
    read_records,
)

Scan = Callable[[Path], DumpFile]


def write(path: Path, *names: str, **fields: object) -> None:
    with Recorder(path) as recorder:
        for name in names:
            recorder.write(record(request_id=name, **fields))


@pytest.fixture
def scanned() -> Iterator[Callable[[Path], DumpFile]]:
    with contextlib.ExitStack() as files:

        def scan(path: Path) -> DumpFile:
            file = DumpFile(path)
            files.callback(file.close)
            file.scan()
            return file

        yield scan


def ids(file: DumpFile) -> list[str]:
    found = [file.summary(index) for index in range(len(file))]
    return [one.request_id if isinstance(one, Summary) else one.reason for one in found]


def test_files_come_in_the_order_of_their_steps(tmp_path: Path):
    for name in ("10.jsonl", "9.jsonl.zst", "2.jsonl", "validation.jsonl", "notes.txt"):
        (tmp_path / name).touch()
    (tmp_path / "3.jsonl").mkdir()
    with Dump(tmp_path) as dump:
        assert [(file.name, file.step) for file in dump.files] == [
            ("2", 2), ("9", 9), ("10", 10), ("validation", None),
        ]  # fmt: skip


def test_a_dump_may_be_one_file(tmp_path: Path):
    write(tmp_path / "all.jsonl", "a", "b")
    with Dump(tmp_path / "all.jsonl") as dump:
        (file,) = dump.files
        file.scan()
        assert ids(file) == ["a", "b"]


def test_a_folder_without_a_dump_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match=r"holds no \.jsonl or \.jsonl\.zst files"):
        Dump(tmp_path)
    with pytest.raises(FileNotFoundError):
        Dump(tmp_path / "nowhere")


def test_a_summary_reads_only_the_beginning(tmp_path: Path, scanned: Scan):
    """What follows is not even JSON."""
    write(tmp_path / "0.jsonl", "a", turns=(turn("x" * 5000),))
    line = (tmp_path / "0.jsonl").read_bytes()
    (tmp_path / "0.jsonl").write_bytes(line[:5000] + b'\xff"' * 1_000_000)
    file = scanned(tmp_path / "0.jsonl")
    assert ids(file) == ["a"]
    assert isinstance(file.record(0), BadLine)


def test_a_summary_is_found_behind_extras_of_any_length(tmp_path: Path, scanned: Scan):
    write(tmp_path / "0.jsonl", "a", extras={"long": "é" * 100_000})
    summary = scanned(tmp_path / "0.jsonl").summary(0)
    assert isinstance(summary, Summary)
    assert summary.extras == {"long": "é" * 100_000}


@pytest.mark.parametrize("length", range(3900, 4200, 7))
def test_a_summary_is_right_wherever_its_beginning_is_cut(tmp_path: Path, scanned: Scan, length: int):
    """The last extra that can be seen may lack its end."""
    write(tmp_path / "0.jsonl", "a", extras={"long": "x" * length, "n": 123456})
    summary = scanned(tmp_path / "0.jsonl").summary(0)
    assert isinstance(summary, Summary)
    assert summary.extras == {"long": "x" * length, "n": 123456}


def test_lines_of_different_kinds_can_be_mixed(tmp_path: Path, scanned: Scan):
    write(tmp_path / "0.jsonl", "a")
    with (tmp_path / "0.jsonl").open("ab") as file:
        file.write(
            b'\n{"input": "q", "output": "a", "score": 1, "uid": "u"}\n{"schema_version": 4}\nnonsense\n'
        )
        file.write(b'{"output": "cut')
    file = scanned(tmp_path / "0.jsonl")
    assert ids(file)[:2] == ["a", "u"]
    assert "version 4" in ids(file)[2]
    assert "cut off" in ids(file)[4]
    bad = file.record(3)
    assert isinstance(bad, BadLine)
    assert bad.number == 5  # the blank line counts


def test_equal_ids_are_two_trajectories(tmp_path: Path, scanned: Scan):
    write(tmp_path / "0.jsonl", "a", "a")
    assert ids(scanned(tmp_path / "0.jsonl")) == ["a", "a"]


def test_a_line_that_grows_is_read_again(tmp_path: Path, scanned: Scan):
    """Its first half was listed as broken."""
    write(tmp_path / "0.jsonl", "a")
    line = (tmp_path / "0.jsonl").read_bytes()
    (tmp_path / "0.jsonl").write_bytes(line[:50])
    file = scanned(tmp_path / "0.jsonl")
    assert "cut off" in ids(file)[0]
    with (tmp_path / "0.jsonl").open("ab") as growing:
        growing.write(line[50:])
    assert file.scan()
    assert ids(file) == ["a"]


def test_replaced_file_is_read_again(tmp_path: Path, scanned: Scan):
    """Even one that is as long."""
    write(tmp_path / "0.jsonl", "a")
    file = scanned(tmp_path / "0.jsonl")
    assert ids(file) == ["a"]
    write(tmp_path / "new.jsonl", "b")
    os.replace(tmp_path / "new.jsonl", tmp_path / "0.jsonl")
    assert file.scan()
    assert ids(file) == ["b"]


def test_replaced_or_truncated_file_reports_a_restart(tmp_path: Path, scanned: Scan):
    """Each time, in any order: readers that keep line numbers notice the change."""
    path = tmp_path / "0.jsonl"
    write(path, "a", "b")
    file = scanned(path)
    whole = path.read_bytes()
    seen = [file.beginnings]
    assert not file.scan()
    assert file.beginnings == seen[0]
    path.write_bytes(whole[: len(whole) // 2])
    file.scan()
    seen.append(file.beginnings)
    write(tmp_path / "new.jsonl", "c")
    os.replace(tmp_path / "new.jsonl", path)
    file.scan()
    seen.append(file.beginnings)
    file.close()
    file.scan()
    seen.append(file.beginnings)
    assert len(set(seen)) == 4


def test_line_replaced_by_one_of_equal_length_is_summarised_again(tmp_path: Path, scanned: Scan):
    path = tmp_path / "0.jsonl"
    write(path, "a", "b")
    file = scanned(path)
    assert ids(file) == ["a", "b"]
    path.write_bytes(path.read_bytes().split(b"\n")[1].replace(b'"b"', b'"c"') + b"\n")
    file.scan()
    assert ids(file) == ["c"]


def test_the_bytes_of_a_line_can_be_read(tmp_path: Path, scanned: Scan):
    (tmp_path / "0.jsonl").write_bytes(b"\nfirst\n\nsecond, cut")
    file = scanned(tmp_path / "0.jsonl")
    assert [file.line(0), file.line(1, 6)] == [b"first", b"second"]


def test_a_file_that_vanishes_says_so_and_can_still_be_read(tmp_path: Path, scanned: Scan):
    write(tmp_path / "0.jsonl", "a")
    file = scanned(tmp_path / "0.jsonl")
    (tmp_path / "0.jsonl").unlink()
    assert isinstance(file.record(0), TrajectoryRecord)
    with pytest.raises(FileNotFoundError):
        file.scan()


def test_a_dump_finds_files_that_came_and_forgets_those_that_went(tmp_path: Path):
    write(tmp_path / "1.jsonl", "a")
    with Dump(tmp_path) as dump:
        first = dump.files[0]
        assert not dump.refresh()
        write(tmp_path / "0.jsonl", "b")
        assert dump.refresh()
        assert [file.name for file in dump.files] == ["0", "1"]
        assert dump.files[1] is first
        (tmp_path / "1.jsonl").unlink()
        assert dump.refresh()
        assert [file.name for file in dump.files] == ["0"]


def test_all_trajectories_of_all_steps_are_read(tmp_path: Path):
    write(tmp_path / "10.jsonl", "c")
    write(tmp_path / "2.jsonl", "a", "b")
    found = [one.request_id for one in read_records(tmp_path) if isinstance(one, TrajectoryRecord)]
    assert found == ["a", "b", "c"]


def test_trajectories_that_began_alike_are_a_group():
    alike = [record(turn("one")), record(turn("two")), record(turn("one", index=1)), record(step=1)]
    groups = [(one.summary.step, one.summary.group) for one in alike]
    assert [groups.index(group) for group in groups] == [0, 0, 2, 3]


def test_a_summary_counts_calls():
    good, bad = ToolResult.from_text("1"), ToolResult.from_text("no", is_error=True)
    found = record(turn(result=good), turn(index=1, result=bad), turn(index=2)).summary
    assert (found.n_turns, found.n_calls, found.n_errors) == (3, 2, 1)
    assert (dict(found.statuses), dict(found.tools)) == ({"ok": 1, "error": 1}, {"f": 2})


def test_too_long_line_is_reported_and_others_are_read(tmp_path: Path):
    write(tmp_path / "0.jsonl", "short")
    write(tmp_path / "0.jsonl", "long", turns=(turn("x" * 100_000),))
    short, long = read_records(tmp_path, max_line_bytes=50_000)
    assert isinstance(short, TrajectoryRecord)
    assert isinstance(long, BadLine)
    assert "more than max_line_bytes=50,000" in long.reason
    assert all(isinstance(one, TrajectoryRecord) for one in read_records(tmp_path))


def test_limit_of_unpacked_bytes_is_configurable(tmp_path: Path):
    write(tmp_path / "0.jsonl.zst", "a", turns=(turn("x" * 100_000),))
    with pytest.raises(DumpTooLarge, match="more than 50,000"):
        list(read_records(tmp_path, max_unpacked_bytes=50_000))
    assert len(list(read_records(tmp_path, max_unpacked_bytes=500_000))) == 1


def test_arguments_of_200_levels_are_read_back(tmp_path: Path):
    args: dict[str, object] = {"a": 1}
    for _ in range(199):
        args = {"a": args}
    calls = ({"function": {"name": "f", "arguments": args}},)
    told = dataclasses.replace(
        turn(args=args, result=ToolResult.from_text("found")), message=Message("assistant", "", calls)
    )
    write(tmp_path / "0.jsonl", "a", turns=(told,))
    (found,) = read_records(tmp_path)
    assert isinstance(found, TrajectoryRecord)
    assert found.turns[0].outcome.calls[0].args == args
    assert found.turns[0].message.tool_calls == calls


@pytest.mark.parametrize("depth", [300, 900, 100_000])
def test_too_deep_line_is_reported_as_bad(tmp_path: Path, depth: int):
    write(tmp_path / "0.jsonl", "a")
    deep = b'{"request_id":"b","extra":%s%s}\n' % (b"[" * depth, b"]" * depth)
    with open(tmp_path / "0.jsonl", "ab") as file:
        file.write(deep)
    _, bad = read_records(tmp_path)
    assert bad == BadLine(2, "nested more than 255 levels deep; make it flatter")


def packed(path: Path, megabytes: int) -> int:
    """Write a compressed file of so many MB, and say how large it is."""
    path.write_bytes(zstandard.compress(b"x" * (megabytes << 20)))
    return path.stat().st_size


def scan_all(dump: Dump) -> list[str]:
    """Scan each file of a dump, and say which were refused."""
    refused: list[str] = []
    for file in dump.files:
        try:
            file.scan()
        except DumpTooLarge as error:
            assert "together" in str(error)
            refused.append(file.name)
    return refused


def test_files_of_a_folder_may_unpack_to_so_much_together(tmp_path: Path):
    for number in range(4):
        packed(tmp_path / f"{number}.jsonl.zst", 3)
    with Dump(tmp_path, max_unpacked_bytes=10 << 20) as dump:
        assert scan_all(dump) == ["3"]
        for file in dump.files:
            file.close()
        dump.files[3].scan()  # what was closed does not count
        assert len(dump.files[3]) == 1
    assert len(list(read_records(tmp_path, max_unpacked_bytes=4 << 20))) == 4  # one after the other


def test_rewritten_or_deleted_files_do_not_count(tmp_path: Path):
    for number in range(3):
        packed(tmp_path / f"{number}.jsonl.zst", 3)
    with Dump(tmp_path, max_unpacked_bytes=7 << 20) as dump:
        assert scan_all(dump) == ["2"]
        packed(tmp_path / "0.jsonl.zst", 0)
        dump.files[0].scan()
        (tmp_path / "1.jsonl.zst").unlink()
        dump.refresh()
        packed(tmp_path / "3.jsonl.zst", 6)
        dump.refresh()
        dump.files[1].close()
        dump.files[2].scan()
        assert len(dump.files[2]) == 1


def test_by_default_a_folder_may_unpack_to_as_much_as_a_file_of_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("torchrl_agentic.records.jsonl_index.UNPACKED_BYTES", 5 << 20)
    monkeypatch.setattr("torchrl_agentic.records.jsonl_index.UNPACKED_TIMES", 100)
    for number in range(4):
        assert packed(tmp_path / f"{number}.jsonl.zst", 3) < 1000
    with Dump(tmp_path) as dump:
        assert scan_all(dump) == ["1", "2", "3"]
    monkeypatch.setattr("torchrl_agentic.records.jsonl_index.UNPACKED_TIMES", 1 << 20)
    with Dump(tmp_path) as dump:
        assert scan_all(dump) == []


@pytest.mark.parametrize("name", ["max_unpacked_bytes", "max_line_bytes"])
def test_unenforceable_bound_is_rejected(tmp_path: Path, name: str):
    with pytest.raises(ValueError, match=f"{name} must be 1 or more; got 0"):
        Dump(tmp_path, **{name: 0})
