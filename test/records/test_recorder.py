"""Every trajectory is one line of the right file, with concurrent writers and after crashes."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import logging
import os
import pickle
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.limit import limit
from helpers.processes import run_program, started
from helpers.record_strategies import record, records, turn
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_agentic.errors import MissingExtra
from torchrl_agentic.messages import Message, ToolResult, Turn
from torchrl_agentic.records import (
    BadLine,
    Recorder,
    Recording,
    TrajectoryHook,
    TrajectoryRecord,
    as_hook,
    read_records,
)
from torchrl_agentic.records.line_writer import LineWriter
from torchrl_agentic.records.recorder import last_run

BOTH = pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst"])


def names(path: Path) -> list[str]:
    return [one.trajectory if isinstance(one, TrajectoryRecord) else one.reason for one in read_records(path)]


def finished(recorder: Recorder, name: str, *turns: Turn) -> None:
    recording = recorder.begin(name)
    for one in turns or (turn(trajectory=name),):
        recording.record_turn(one)
    recording.finish("no_calls")


@settings(deadline=None, max_examples=settings.default.max_examples // 2)
@given(some=st.lists(records(), max_size=4), suffix=st.sampled_from([".jsonl", ".jsonl.zst"]))
def test_file_of_trajectories_reads_back_unchanged(
    tmp_path_factory: pytest.TempPathFactory, some: list[TrajectoryRecord], suffix: str
):
    """One line each, for any line separators and surrogates; without secrets."""
    path = tmp_path_factory.mktemp("records") / f"all{suffix}"
    with Recorder(path, secrets=()) as recorder:
        for one in some:
            recorder.write(one)
    assert (list(read_records(path)) if some else []) == some


@BOTH
def test_a_trajectory_goes_to_the_file_of_the_step_in_which_it_began(tmp_path: Path, suffix: str):
    with Recorder(tmp_path / "dump", step=3, suffix=suffix) as recorder:
        early = recorder.begin("early")
        early.record_turn(turn(trajectory="early"))
        recorder.step = 10
        finished(recorder, "late")
        early.finish("reset")
    assert sorted(path.name for path in (tmp_path / "dump").iterdir()) == [f"10{suffix}", f"3{suffix}"]
    first, second = read_records(tmp_path / "dump")
    assert isinstance(first, TrajectoryRecord)
    assert isinstance(second, TrajectoryRecord)
    assert [(one.trajectory, one.step, one.termination_reason) for one in (first, second)] == [
        ("early", 3, "reset"), ("late", 10, "no_calls"),
    ]  # fmt: skip


def test_annotations_are_in_the_record(tmp_path: Path):
    with Recorder(tmp_path) as recorder:
        recording = recorder.begin("0.0", 2)
        recording.annotate(gts="4", difficulty="hard")
        for index, reward in enumerate((0.25, 0.5)):
            recording.record_turn(turn(index=index, row=2))
            recording.add_reward(reward)
        recording.add_messages([Message("user", "bye")])
        recording.finish("user")
    (found,) = read_records(tmp_path)
    assert isinstance(found, TrajectoryRecord)
    assert (found.rewards, found.score, found.gts, found.row) == ((0.25, 0.5), 0.75, "4", 2)
    assert found.extras == {"difficulty": "hard"}
    assert found.versions["torchrl-agentic"]
    assert found.started is not None
    assert [message.text for message in found.messages] == ["What?", "hello", "hello", "bye"]
    assert re.fullmatch("[0-9a-f]{32}", found.request_id)


@pytest.mark.parametrize(("noted", "score"), [(None, 3.0), (0.5, 0.5)])
def test_without_rewards_of_the_environment_the_score_is_that_of_the_tools(
    tmp_path: Path, noted: float | None, score: float
):
    with Recorder(tmp_path) as recorder:
        recording = recorder.begin("t")
        for index in range(2):
            result = ToolResult.from_value("x", reward=1.5)
            recording.record_turn(turn(index=index, trajectory="t", result=result))
        recording.annotate(score=noted)
        recording.finish("no_calls")
    (found,) = read_records(tmp_path)
    assert isinstance(found, TrajectoryRecord)
    assert found.score == score


def test_a_trajectory_without_a_turn_is_not_written(tmp_path: Path):
    with Recorder(tmp_path) as recorder:
        recorder.begin("t").finish("reset")
    assert list(tmp_path.iterdir()) == []


def test_an_extra_cannot_take_the_name_of_something_else(tmp_path: Path):
    with pytest.raises(ValueError, match="'turns' is a field of every record"):
        Recorder(tmp_path).begin("t").annotate(turns=[])
    with pytest.raises(ValueError, match="has none yet"):
        Recorder(tmp_path).begin("t").add_reward(1.0)


def test_ids_differ_where_names_do_not(tmp_path: Path):
    """Two environments name their trajectories alike."""
    with Recorder(tmp_path) as recorder:
        for _ in range(2):
            finished(recorder, "0.0")
    assert len({one.request_id for one in read_records(tmp_path) if isinstance(one, TrajectoryRecord)}) == 2


def test_recording_continues_after_a_truncated_line(tmp_path: Path):
    """The first trajectory after a crash must not be glued to the broken line, and lost with it."""
    with Recorder(tmp_path) as recorder:
        finished(recorder, "before")
    file = tmp_path / "0.jsonl"
    file.write_bytes(file.read_bytes() + file.read_bytes()[:50])
    with Recorder(tmp_path) as recorder:
        finished(recorder, "after")
    before, broken, after = names(tmp_path)
    assert (before, after) == ("before", "after")
    assert "cut off" in broken


def test_compressed_recording_continues_after_a_truncated_frame(tmp_path: Path):
    with Recorder(tmp_path, suffix=".jsonl.zst") as recorder:
        finished(recorder, "before")
        recorder.flush()
        whole = (tmp_path / "0.jsonl.zst").stat().st_size
        finished(recorder, "lost")
        recorder.flush()
        os.truncate(tmp_path / "0.jsonl.zst", whole + 40)
        finished(recorder, "after")
    found = names(tmp_path)
    assert (found[0], found[-1]) == ("before", "after")
    assert "lost" not in found


@BOTH
def test_a_file_can_be_read_while_it_grows(tmp_path: Path, suffix: str):
    with Recorder(tmp_path, suffix=suffix) as recorder:
        for count in range(3):
            finished(recorder, str(count))
            recorder.flush()
            assert names(tmp_path) == [str(n) for n in range(count + 1)]


def test_recorder_works_in_several_threads(tmp_path: Path):
    """Texts longer than a pipe or a page, so that lines written in pieces would mix."""
    with Recorder(tmp_path) as recorder, ThreadPoolExecutor(8) as threads:
        list(
            threads.map(
                lambda n: finished(recorder, str(n), turn("x" * 20_000, trajectory=str(n))), range(99)
            )
        )
    assert sorted(map(int, names(tmp_path))) == list(range(99))


WRITE = """
import sys
sys.path[:0] = [{here!r}]
from helpers.record_strategies import turn
from torchrl_agentic.records import Recorder

with Recorder({path!r}, suffix={suffix!r}) as recorder:
    for number in range(30):
        recording = recorder.begin(sys.argv[1])
        recording.record_turn(turn("x" * 100_000, trajectory=sys.argv[1]))
        recording.finish("no_calls")
"""


@pytest.mark.slow
@BOTH
def test_several_processes_write_to_one_file(tmp_path: Path, suffix: str):
    """Lines of 100 KB each: written in pieces, they would mix."""
    code = WRITE.format(here=str(Path(__file__).parents[1]), path=str(tmp_path), suffix=suffix)
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(started([sys.executable, "-c", code, name])) for name in "abc"]
        assert [process.wait(limit(60)) for process in running] == [0, 0, 0]
    assert sorted(names(tmp_path)) == ["a"] * 30 + ["b"] * 30 + ["c"] * 30


def test_pending_records_are_written_at_exit(tmp_path: Path):
    """The recorder is not closed."""
    code = WRITE.format(here=str(Path(__file__).parents[1]), path=str(tmp_path), suffix=".jsonl")
    code = code.replace("with Recorder", "recorder = Recorder").replace("') as recorder:", "')\nif True:")
    run_program([sys.executable, "-c", code, "a"], check=True, timeout=60)
    assert names(tmp_path) == ["a"] * 30


def test_a_killed_program_loses_at_most_its_last_line(tmp_path: Path):
    """Flushed lines are complete; of the others, only the last can be broken."""
    code = WRITE.format(here=str(Path(__file__).parents[1]), path=str(tmp_path), suffix=".jsonl")
    code = code.replace(
        'recording.finish("no_calls")', 'recording.finish("no_calls")\n        print(flush=True)'
    )
    with started([sys.executable, "-c", code, "a"], stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        for _ in range(10):
            running.stdout.readline()
        running.kill()
    found = list(read_records(tmp_path)) if list(tmp_path.iterdir()) else []
    assert not any(isinstance(one, BadLine) for one in found[:-1])


def test_a_recorder_pickles_and_opens_again_after_close(tmp_path: Path):
    with Recorder(tmp_path / "deep" / "r.jsonl", step=4) as recorder:
        finished(recorder, "a")
        recorder.flush()
        with pickle.loads(pickle.dumps(recorder)) as copy:
            finished(copy, "b")
        recorder.close()
        recorder.close()
        finished(recorder, "c")
    assert names(tmp_path / "deep" / "r.jsonl") == ["a", "b", "c"]
    assert copy.step == 4


def test_forked_child_records_only_its_trajectories(tmp_path: Path):
    """Neither what waited in the parent, nor on a thread that is not there."""
    recorder = Recorder(tmp_path)
    finished(recorder, "parent")
    recorder.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            finished(recorder, "child")
            recorder.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    recorder.close()
    assert sorted(names(tmp_path)) == ["child", "parent"]


def test_garbage_collected_recorder_writes_pending_records_and_ends_its_thread(tmp_path: Path):
    recorder = Recorder(tmp_path)
    finished(recorder, "a")
    del recorder
    gc.collect()
    assert names(tmp_path) == ["a"]
    assert not [thread for thread in threading.enumerate() if thread.name == "recorder"]


def test_the_environment_waits_while_too_much_is_waiting(tmp_path: Path):
    """The second line may come only once the first, which is kept from being written, is in the file."""
    writer, may_write, has_come = LineWriter(max_pending=100), threading.Event(), threading.Event()

    def slow() -> bytes:
        assert may_write.wait(limit(30))
        return b"{}\n"

    def put_second() -> None:
        writer.put(tmp_path / "f.jsonl", lambda: b"{}\n", 1)
        has_come.set()

    writer.put(tmp_path / "f.jsonl", slow, 101)
    thread = threading.Thread(target=put_second)
    thread.start()
    assert not has_come.wait(0.05)
    may_write.set()
    assert has_come.wait(limit(30))
    thread.join()
    writer.close()
    assert (tmp_path / "f.jsonl").read_bytes() == b"{}\n{}\n"


def test_trajectory_larger_than_the_queue_is_written(tmp_path: Path):
    with Recorder(tmp_path, max_pending=10) as recorder:
        finished(recorder, "a", turn("x" * 1000, trajectory="a"))
        finished(recorder, "b")
    assert names(tmp_path) == ["a", "b"]


def test_write_error_is_logged_and_raised_at_close(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """The rollout continues meanwhile; later records are written if possible."""
    (tmp_path / "0.jsonl").mkdir()
    recorder = Recorder(tmp_path)
    finished(recorder, "lost")
    recorder.flush()
    (tmp_path / "0.jsonl").rmdir()
    finished(recorder, "kept")
    with caplog.at_level(logging.ERROR), pytest.raises(IsADirectoryError):
        recorder.close()
    assert names(tmp_path) == ["kept"]
    recorder.close()


def test_an_earlier_line_that_was_lost_halfway_breaks_no_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A full disk takes a part of a line."""
    write = os.write

    def write_on_a_full_disk(descriptor: int, data: bytes) -> int:
        if data == b": 2}\n":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data[:4] if data.startswith(b'{"b"') else data)

    monkeypatch.setattr(os, "write", write_on_a_full_disk)
    writer = LineWriter(max_pending=100)
    for line in (b'{"a": 1}\n', b'{"b": 2}\n', b'{"c": 1}\n'):
        writer.put(tmp_path / "f.jsonl", lambda line=line: line, 1)
        writer.flush()
    writer.close()
    assert isinstance(writer.error, OSError)
    assert (tmp_path / "f.jsonl").read_bytes().splitlines() == [b'{"a": 1}', b'{"b"', b'{"c": 1}']


def test_a_file_can_be_for_all_steps(tmp_path: Path):
    with Recorder(tmp_path / "all.jsonl") as recorder:
        for step in (1, 2):
            recorder.step = step
            finished(recorder, str(step))
    assert [json.loads(line)["step"] for line in (tmp_path / "all.jsonl").read_text().splitlines()] == [1, 2]


@pytest.mark.parametrize(
    ("options", "said"), [({"suffix": ".json"}, ".jsonl, .jsonl.zst"), ({"max_pending": 0}, "1 or more")]
)
def test_invalid_options_are_rejected(tmp_path: Path, options: dict[str, object], said: str):
    with pytest.raises(ValueError, match=said):
        Recorder(tmp_path, **options)  # pyright: ignore[reportArgumentType]


def test_without_zstandard_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(MissingExtra, match=re.escape("torchrl-agentic[zstd]")):
        Recorder(tmp_path, suffix=".jsonl.zst")


class Told(TrajectoryHook):
    """Keeps its events."""

    def __init__(self) -> None:
        self.heard: list[object] = []

    def begin(self, trajectory: str, row: int = 0) -> Recording:
        heard = self.heard
        heard.append(("begin", trajectory, row))

        class Keeping(Recording):
            def record_turn(self, turn: Turn) -> None:
                heard.append(turn)

            def finish(self, reason: str) -> None:
                heard.append(reason)

        return Keeping()


def test_several_recorders_get_the_same_events():
    one, other, turns = Told(), Told(), []
    hook = as_hook([one, [other, None], turns.append])
    assert hook is not None
    recording, said = hook.begin("t", 3), turn()
    recording.record_turn(said)
    recording.add_reward(1.0)
    recording.annotate(score=1.0)
    recording.add_messages([])
    recording.finish("reset")
    assert one.heard == other.heard == [("begin", "t", 3), said, "reset"]
    assert turns == [said]
    assert as_hook([None]) is None


class Broken(TrajectoryHook):
    """Raises in the method of that name."""

    def __init__(self, method: str) -> None:
        self.method = method

    def begin(self, trajectory: str, row: int = 0) -> Recording:
        fail_in(self.method, "begin")
        method = self.method

        class Raising(Recording):
            def record_turn(self, turn: Turn) -> None:
                fail_in(method, "record_turn")

            def add_reward(self, value: float) -> None:
                fail_in(method, "add_reward")

            def add_messages(self, messages) -> None:
                fail_in(method, "add_messages")

            def annotate(self, **known) -> None:
                fail_in(method, "annotate")

            def finish(self, reason: str) -> None:
                fail_in(method, "finish")

        return Raising()


def fail_in(method: str, here: str) -> None:
    if method == here:
        raise ValueError("no disk")


@pytest.mark.parametrize(
    "method", ["begin", "record_turn", "add_reward", "add_messages", "annotate", "finish"]
)
def test_a_hook_that_raises_is_logged_once_and_keeps_nothing_from_the_others(method: str, caplog):
    other = Told()
    hook = as_hook([Broken(method), other])
    assert hook is not None
    said = turn()
    for number in range(2):
        recording = hook.begin("t", number)
        recording.record_turn(said)
        recording.add_reward(1.0)
        recording.annotate(score=1.0)
        recording.add_messages([])
        recording.finish("reset")
    assert other.heard == [("begin", "t", 0), said, "reset", ("begin", "t", 1), said, "reset"]
    (logged,) = caplog.records
    assert "trajectory t, row 0" in logged.getMessage()
    assert f" in {method} " in logged.getMessage()
    assert "no disk" in caplog.text


@pytest.mark.parametrize("wrong", ["rollouts", 3, {"a": 1}])
def test_unusable_hook_is_rejected(wrong: object):
    with pytest.raises(TypeError, match="a Recorder, a function of a Turn, or a list"):
        as_hook(wrong)  # pyright: ignore[reportArgumentType]


def test_a_record_by_hand_is_written_too(tmp_path: Path):
    with Recorder(tmp_path) as recorder:
        recorder.write(record(score=1.0))
        recorder.write(record(run="other"))
    assert list(read_records(tmp_path)) == [record(score=1.0, run=recorder.run), record(run="other")]


def added(path: Path, caplog: pytest.LogCaptureFixture, **options: object) -> list[str]:
    """Add a trajectory to a file with a new recorder; return its warnings."""
    caplog.clear()
    with Recorder(path, **options) as recorder:  # pyright: ignore[reportArgumentType]
        finished(recorder, "0.0")
    return [each.getMessage() for each in caplog.records]


@BOTH
def test_adding_to_the_dump_of_another_run_is_warned_of_once_with_both_ids(
    tmp_path: Path, suffix: str, caplog: pytest.LogCaptureFixture
):
    path = tmp_path / f"all{suffix}"
    assert added(path, caplog, run="first") == []
    assert added(path, caplog, run="first") == []
    (said,) = added(path, caplog, run="second")
    for words in (str(path), "run 'first'", "run 'second'", "another path", "Recorder(run='first')"):
        assert words in said
    assert added(path, caplog, run="second") == []
    assert [one.run for one in read_records(path) if isinstance(one, TrajectoryRecord)] == [
        "first", "first", "second", "second",
    ]  # fmt: skip


def test_one_recorder_warns_once_however_many_files_it_adds_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    for run in ("a", "b"):
        with Recorder(tmp_path, run=run) as recorder:
            for recorder.step in (0, 1, 0, 1):
                finished(recorder, "0.0")
                recorder.flush()
    assert len(caplog.records) == 1


def test_each_recorder_has_a_run_of_its_own_which_it_keeps_in_another_process(tmp_path: Path):
    first, second = Recorder(tmp_path), Recorder(tmp_path)
    assert first.run != second.run
    assert pickle.loads(pickle.dumps(first)).run == first.run


@pytest.mark.parametrize("run", [5, "", b"x"])
def test_invalid_run_id_is_rejected(tmp_path: Path, run: object):
    with pytest.raises(TypeError, match="run must be the id of a run"):
        Recorder(tmp_path, run=run)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "tail", ["", "\n", "\n\n", '\n{"schema_version": 3, "request_id": "r", "run": "torn", "st']
)
@pytest.mark.parametrize("size", [10, 4096, 65536, 200_000])
def test_the_run_of_the_last_record_is_found_however_long_it_is(tmp_path: Path, size: int, tail: str):
    path = tmp_path / "all.jsonl"
    lines = [json.dumps({"request_id": "r", "run": run, "input": "x" * size}) for run in ("first", "last")]
    path.write_text("\n".join(lines) + tail)
    assert last_run(path) == ("torn" if "torn" in tail else "last")


def test_a_dump_without_ids_has_no_known_run(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "all.jsonl"
    path.write_text("")
    assert last_run(path) is None
    path.write_text('{"output": "by another trainer"}\n')
    assert last_run(path) == ""
    (said,) = added(path, caplog)
    assert "an earlier run without an id" in said
