"""A folder of an evaluation survives kills, cut lines and full disks: nothing is lost or asked twice."""

import json
import re
import resource
import signal

import pytest
from helpers.forked import forked
from helpers.limit import limit
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_agentic import Message, Task, evaluate
from torchrl_agentic.engines import ChatEngine, Usage
from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.evaluation import EvalFolderError, EvalResult
from torchrl_agentic.records import read_records

PROGRAM = """
import asyncio, json, sys
from pathlib import Path

from torchrl_agentic import Message, Task, evaluate
from torchrl_agentic.engines import ChatEngine


class Slow(ChatEngine):
    version, max_concurrent = 0, 3

    async def chat(self, messages, *, tools, max_tokens, key):
        with open("asked", "a") as log:
            log.write(key.partition("/")[0] + "\\n")
        await asyncio.sleep(0.2)
        return Message("assistant", "yes")

    async def update(self, weights):
        return 0

    async def close(self):
        pass


def progress(state):
    print(state.done, flush=True)


tasks = [Task(f"t{n}", [{"role": "user", "content": str(n)}], "yes" if n % 3 else "no") for n in range(12)]
result = evaluate(tasks, [], Slow(), epochs=2, out="out", resume=True, progress=progress)
print("whole", result.is_whole, flush=True)
"""


def test_a_killed_evaluation_goes_on_where_it_ended(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    kills = 0
    for kill_at in (4, 9, None):
        with forked(program, cwd=tmp_path) as child:
            for line in child.stdout:
                if kill_at is not None and line.strip().isdecimal() and int(line) >= kill_at:
                    child.send_signal(signal.SIGKILL)
                    kills += 1
                    break
            else:
                assert line == "whole True\n"
            child.communicate(limit(60))
    assert (child.returncode, kills) == (0, 2)
    result = EvalResult.read(tmp_path / "out")
    assert (result.is_whole, len(result.samples), result.score) == (True, 24, pytest.approx(2 / 3))
    assert len(list(read_records(tmp_path / "out"))) == 24
    asked = (tmp_path / "asked").read_text().split()
    # Those that ran when it was killed are asked again, and no others: three at once, and the next two.
    assert 24 <= len(asked) <= 24 + kills * (3 + 2)


class Replies(ChatEngine):
    version, max_concurrent = 0, 2

    def __init__(self, reply=lambda name: "yes"):
        self.reply, self.asked = reply, []

    async def chat(self, messages, *, tools, max_tokens, key):
        name = key.partition("/")[0]
        self.asked.append(name)
        found = self.reply(name)
        if isinstance(found, BaseException):
            raise found
        return Message("assistant", found)

    async def update(self, weights):
        return 0

    async def close(self):
        pass


def tasks(names="abcd", answer="yes"):
    return [Task(name, [{"role": "user", "content": f"question {name} \u2028 é"}], answer) for name in names]


def run(folder, engine=None, given=None, **options):
    options = {"engine_retries": 0, "retries": 0, "resume": True, "fail_above": 1.0, **options}
    return evaluate(given or tasks(), [], engine or Replies(), out=folder, **options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "out"
    result = run(folder, epochs=2)
    return result, (folder / "samples.jsonl").read_bytes(), (folder / "eval.json").read_bytes()


@settings(max_examples=25, deadline=None)
@given(share=st.floats(0, 1))
def test_a_file_that_ends_anywhere_is_completed(tmp_path_factory, whole, share):
    result, data, summary = whole
    folder = tmp_path_factory.mktemp("cut")
    cut = round(share * len(data))
    (folder / "samples.jsonl").write_bytes(data[:cut])
    (folder / "eval.json").write_bytes(summary)
    kept = data[:cut].count(b"\n") + (data[cut : cut + 1] == b"\n")  # without its newline, a line is whole
    assert len(EvalResult.read(folder).samples) == kept
    engine = Replies()
    again = run(folder, engine, epochs=2)
    assert len(engine.asked) == 8 - kept
    assert again.is_whole
    assert {(one.task, one.epoch, one.score) for one in again.samples} == {
        (one.task, one.epoch, one.score) for one in result.samples
    }
    lines = (folder / "samples.jsonl").read_bytes().splitlines(keepends=True)
    assert all(line.endswith(b"\n") for line in lines)
    assert len({(json.loads(line)["task"], json.loads(line)["epoch"]) for line in lines}) == len(lines) == 8


def test_a_damaged_line_is_asked_again(tmp_path, whole):
    _, data, summary = whole
    lines = data.splitlines(keepends=True)
    (tmp_path / "samples.jsonl").write_bytes(b"".join([*lines[:3], b'{"task": 3}\n', *lines[4:]]))
    (tmp_path / "eval.json").write_bytes(summary)
    engine = Replies()
    assert run(tmp_path, engine, epochs=2).is_whole
    assert len(engine.asked) == 1


def test_samples_that_failed_are_asked_again_and_their_records_replaced(tmp_path):
    out = tmp_path / "out"
    broken = Replies(lambda name: InfrastructureError("down") if name in "bc" else "yes")
    first = run(out, broken)
    assert [one.task for one in first.failed] == ["b", "c"]
    assert [one.has_failed for one in EvalResult.read(out).samples] == [False, True, True, False]
    mended = Replies()
    second = run(out, mended)
    assert (sorted(mended.asked), second.is_whole) == (["b", "c"], True)
    assert sorted(record.trajectory for record in read_records(out)) == ["a", "b", "c", "d"]


def test_trajectories_whose_scorers_failed_are_scored_again_and_the_model_is_not_asked(tmp_path):
    calls = []

    def scorer(trajectory):
        calls.append(trajectory.task.name)
        if len(calls) == 1:
            raise LookupError("once")
        return 1

    first = run(tmp_path / "out", scorers=scorer)
    assert first.failures == {"scorer": 1}
    engine = Replies()
    again = run(tmp_path / "out", engine, scorers=scorer)
    assert (again.is_whole, engine.asked, len(calls)) == (True, [], 5)
    assert calls[-1] == first.failed[0].task
    assert [sample.answer for sample in again.samples] == ["yes"] * 4
    assert EvalResult.read(tmp_path / "out").samples == again.samples
    assert all(record.score == 1.0 for record in read_records(tmp_path / "out"))


def test_a_whole_evaluation_asks_nothing_again_and_more_epochs_or_tasks_only_what_is_new(tmp_path):
    run(tmp_path / "out", limit=2)
    engine = Replies()
    assert run(tmp_path / "out", engine, limit=2).is_whole
    assert engine.asked == []
    assert run(tmp_path / "out", engine, epochs=2).is_whole
    assert sorted(engine.asked) == sorted("ab" + "ccdd")
    assert len(run(tmp_path / "out", engine, limit=1).samples) == 1


def test_what_earlier_programs_spent_counts_for_the_limits(tmp_path):
    class Metered(Replies):
        def __init__(self):
            super().__init__()
            self.usage = Usage()

        def usage_of(self, key):
            return Usage(1, completion=10)

        async def chat(self, *arguments, **options):
            self.usage += Usage(1, completion=10)
            return await super().chat(*arguments, **options)

    first = run(tmp_path / "out", Metered(), max_total_tokens=20, max_in_flight=1)
    assert (first.stopped, first.usage.tokens) == ("tokens", 10 * len(first.samples))
    engine = Metered()
    second = run(tmp_path / "out", engine, max_total_tokens=20, max_in_flight=1)
    assert (second.stopped, engine.asked) == ("tokens", [])
    third = run(tmp_path / "out", Metered(), max_total_tokens=1000)
    assert (third.stopped, third.usage.tokens) == ("", 40)


def test_a_folder_that_holds_an_evaluation_or_a_dump_is_refused(tmp_path):
    run(tmp_path / "out")
    with pytest.raises(EvalFolderError, match=r"resume=True \(--resume\), or choose another folder"):
        run(tmp_path / "out", resume=False)
    (tmp_path / "dump").mkdir()
    (tmp_path / "dump" / "0.jsonl").touch()
    with pytest.raises(EvalFolderError, match="another dump"):
        run(tmp_path / "dump")
    (tmp_path / "file").touch()
    with pytest.raises(EvalFolderError, match="is a file"):
        run(tmp_path / "file")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"max_turns": 3}, "max_turns was 8 and is 3"),
        ({"scorers": {"mine": lambda one: 1}}, r'scorers was \["answer"\] and is \["mine"\]'),
        ({"settings": {"model": "b"}}, 'model was nothing and is "b"'),
        ({"given": tasks("xyz")}, "other tasks: 4 of its tasks are missing or have changed"),
        ({"given": tasks("abcd", "no")}, "4 of its tasks are missing or have changed"),
        ({"given": tasks("abc")}, "1 of its tasks are missing or have changed \\('d'\\)"),
    ],
)
def test_only_the_same_evaluation_is_resumed(tmp_path, change, problem):
    run(tmp_path / "out")
    before = (tmp_path / "out" / "samples.jsonl").read_bytes()
    engine = Replies()
    with pytest.raises(EvalFolderError, match=problem):
        run(tmp_path / "out", engine, **change)
    assert engine.asked == []
    assert (tmp_path / "out" / "samples.jsonl").read_bytes() == before


def test_an_engine_with_other_options_of_sampling_does_not_continue(tmp_path):
    cold, warm = Replies(), Replies()
    cold.sampling, warm.sampling = {"temperature": 0.0}, {"temperature": 0.9}
    run(tmp_path / "out", cold)
    with pytest.raises(EvalFolderError, match=r"sampling was .*0\.0.* and is .*0\.9"):
        run(tmp_path / "out", warm)
    assert warm.asked == []


def test_two_programs_do_not_write_to_one_folder(tmp_path):
    refused = []

    def progress(state):
        if state.done == 1:
            with pytest.raises(EvalFolderError, match="another program"):
                run(tmp_path / "out")
            refused.append(True)

    assert run(tmp_path / "out", progress=progress).is_whole
    assert refused


def test_results_are_returned_although_the_disk_is_full(tmp_path, caplog):
    size = len((run(tmp_path / "like").out / "samples.jsonl").read_bytes())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2 + 100, limits[1]))
        result = run(tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(result.samples) == 4
    assert result.score == 1.0
    assert 1 <= result.n_unsaved <= 3
    assert not result.is_whole
    assert "File too large" in result.error
    assert f"{result.n_unsaved} samples are not saved" in str(result)
    assert "cannot be saved" in caplog.text
    saved = EvalResult.read(tmp_path / "out")
    assert len(saved.samples) == 4 - result.n_unsaved, "a part of a line is cut off again"
    engine = Replies()
    assert run(tmp_path / "out", engine).is_whole
    assert len(engine.asked) == result.n_unsaved


def test_an_evaluation_that_runs_or_was_killed_can_be_read(tmp_path):
    seen = []

    def progress(state):
        if state.done == 2:
            seen.append(EvalResult.read(tmp_path / "out"))

    run(tmp_path / "out", progress=progress)
    (partial,) = seen
    assert (len(partial.samples), partial.n_missing, partial.stopped) == (2, 2, "running")
    assert "its program was killed" in str(partial)
    with pytest.raises(FileNotFoundError, match="holds no evaluation"):
        EvalResult.read(tmp_path)
    (tmp_path / "eval.json").write_text('{"version": 99}')
    with pytest.raises(ValueError, match="not written by this version"):
        EvalResult.read(tmp_path)


def test_a_folder_of_a_version_that_did_not_count_absent_usage_is_read(tmp_path):
    result = run(tmp_path / "out")
    for name in ("eval.json", "samples.jsonl"):
        text = (tmp_path / "out" / name).read_text()
        older = re.sub(r',\s*"(uncounted|unpriced)":\s*0', "", text)
        assert older != text
        (tmp_path / "out" / name).write_text(older)
    found = EvalResult.read(tmp_path / "out")
    assert (found.samples, found.usage) == (result.samples, result.usage)
