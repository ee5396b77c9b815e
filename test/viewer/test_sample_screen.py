"""The samples of a prompt in the terminal, and queries of a step."""

import asyncio

import pytest
from helpers.limit import limit
from helpers.viewer_dumps import trajectory, write
from helpers.viewer_screen import opened

from torchrl_agentic.messages import Status
from torchrl_agentic.records import GroupMember, GroupRecord, Origin, Recorder
from torchrl_agentic.viewer.library import Library, read_all, text_of
from torchrl_agentic.viewer.query import parse
from torchrl_agentic.viewer.sample_screen import samples_of
from torchrl_agentic.viewer.state import ViewerState


def of_group(name, index, *, number=0, run="run-a", **more):
    one = trajectory(name, **more)
    fields = {field: getattr(one, field) for field in type(one).__dataclass_fields__}
    return type(one)(**{**fields, "origin": Origin("sum", number, index), "run": run})


def one_group(folder, gains=()):
    """Write a group of four samples; the group is recorded if there are advantages."""
    with Recorder(folder, run="run-a") as recorder:
        for index, (name, score) in enumerate({"a": 0.0, "b": 1.0, "c": None, "d": 0.5}.items()):
            answer = "It is 42." if name in "bd" else f"Perhaps {index}."
            status = Status.TIMEOUT if name == "a" else Status.OK
            recorder.write(of_group(name, index, score=score, answer=answer, status=status))
        recorder.write(trajectory("other", question="Who?"))
        if gains:
            members = tuple(GroupMember(name, 0.0, gain) for name, gain in zip("abcd", gains, strict=True))
            recorder.group_left(GroupRecord(0, "sum", 0, 0, members))
            recorder.step = 3
            recorder.weights_updated()
    return folder


def rows_of(folder):
    library = Library(folder)
    return library, read_all(library, parse(""), "none")


def test_samples_are_listed_best_first_with_computed_advantages(tmp_path):
    library, rows = rows_of(one_group(tmp_path))
    found = samples_of(library, rows[0])
    assert [sample.summary.trajectory for sample in found.rows] == ["b", "d", "a", "c"]
    assert [sample.advantage for sample in found.rows] == pytest.approx([1.2244, 0, -1.2244, None], abs=1e-3)
    assert "computed from the scores" in found.facts
    assert "4 samples · step 0 · score 0.5 ± 0.4082" in found.facts
    assert found.question == "What is 6 × 7?"
    assert [sample.answer for sample in found.rows] == ["It is 42.", "It is 42.", "Perhaps 0.", "Perhaps 2."]
    best, same, other, _ = (sample.difference for sample in found.rows)
    assert best is None
    assert same is None
    assert (other.turn, other.text, other.other) == (1, "Perhaps 0.", "It is 42.")
    library.close()


def test_advantages_of_the_batch_and_its_step_are_shown(tmp_path):
    library, rows = rows_of(one_group(tmp_path, gains=(-1.0, 2.0, 0.5, -1.5)))
    found = samples_of(library, rows[0])
    assert [sample.advantage for sample in found.rows] == [2.0, -1.5, -1.0, 0.5]
    assert "advantages of the batch" in found.facts
    assert "step 3" in found.facts
    assert "advantage -1" in "\n".join(text_of(library, rows[0]))
    library.close()


async def test_the_list_shows_questions_and_samples_open_from_it(tmp_path):
    async with opened(one_group(tmp_path), size=(140, 40)) as screen:
        assert "What is 6 × 7?" in screen.lines[2]
        assert "Who?" in screen.text
        await screen.press("S")
        assert "4 samples" in screen.text
        assert "+1.22" in screen.text
        await screen.press("p", "p", "p", "n", "n")
        assert "differs from the best sample in turn 1: the assistant says" in screen.text
        assert "best: It is 42." in screen.text
        assert "here: Perhaps 0." in screen.text
        await screen.press("enter")
        assert screen.name == "0 a"
        await screen.press("S", "p", "p", "p", "n", "c")
        assert screen.app.state.page.view == "compare"
        assert screen.name == "0 b"
        assert "┃" in screen.text
        await screen.press("S", "escape")
        assert screen.name == "0 b"


async def test_a_query_of_a_step_lists_all_files(tmp_path):
    dump = write(tmp_path, *(trajectory(f"of-{step}", step=step) for step in (0, 1, 2)))
    async with opened(dump) as screen:
        assert screen.names == ["of-0"]
        await screen.press("slash")
        await screen.type("step:2")
        assert screen.names == ["of-2"]
        await screen.press("slash", "escape")
        assert screen.names == ["of-2"]
    state = ViewerState(Library(dump))
    state.list.query_by("step:1")
    while state.library.work():
        state.catch_up()
    assert [row.summary.trajectory for row in state.list.shown] == ["of-1"]
    state.library.close()


async def test_a_step_is_that_of_the_batch_also_if_it_is_known_later(tmp_path):
    with Recorder(tmp_path, run="run-a") as recorder:
        for index, name in enumerate("ab"):
            recorder.write(of_group(name, index))
        recorder.flush()
        async with opened(tmp_path) as screen:
            await screen.press("slash")
            await screen.type("step:9")
            assert screen.names == []
            recorder.group_left(GroupRecord(0, "sum", 0, 0, (GroupMember("b", 1.0, 0.0),)))
            recorder.step = 9
            recorder.weights_updated()
            recorder.flush()
            async with asyncio.timeout(limit(20)):
                await screen.until(lambda: screen.names == ["b"])


async def test_two_runs_in_a_dump_are_told_apart(tmp_path):
    write(tmp_path, *(of_group("0.0", 0, run=run, request_id=run) for run in ("run-a", "b-run")))
    async with opened(tmp_path, size=(120, 24)) as screen:
        assert screen.names == ["0.0", "0.0"]
        assert [line[:5].strip() for line in screen.lines[2:4]] == ["run-", "b-ru"]
        await screen.press("S")
        assert "1 sample ·" in screen.text
        await screen.press("escape", "slash")
        await screen.type("run:b")
        assert len(screen.names) == 1


def test_queries_of_origin_find_trajectories(tmp_path):
    folder = write(
        tmp_path,
        of_group("a", 0, number=7),
        of_group("b", 0, number=8, score=0.1),
        trajectory("c", extras={"task": "gsm"}),
    )
    library, _ = rows_of(folder)

    def names(query):
        return [row.summary.trajectory for row in read_all(library, parse(query, library.extras), "none")]

    assert names("group:7") == ["a"]
    assert names("task:sum") == ["a", "b"]
    assert names("task:gsm") == ["c"]
    assert names("run:run-a") == ["a", "b"]
    assert names("advantage:none score<0.2") == ["b"]
    library.close()
