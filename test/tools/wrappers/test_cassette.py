"""Recorded results, errors and timeouts are replayed unchanged; missing calls raise."""

import asyncio
import json
import multiprocessing
import pickle
import threading
from dataclasses import replace

import pytest
from helpers.wrapper_tools import Gated, Notes, Scripted, add, by_hand, ctx, write_calls
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic.dispatch import Dispatcher
from torchrl_agentic.errors import InfrastructureError, StopSignal, ToolError
from torchrl_agentic.messages import (
    FileRefPart,
    ImagePart,
    JsonPart,
    ParsedCall,
    Status,
    TextPart,
    Timing,
    ToolResult,
    VideoPart,
)
from torchrl_agentic.testing import VirtualClock
from torchrl_agentic.text import canonical_json
from torchrl_agentic.tools import Cassette, CassetteMiss, Recorded, Renamed, Replayed, Retrying
from torchrl_agentic.tools.wrappers.cassette import Entry, outcome_from_json, outcome_to_json


@pytest.fixture
def path(tmp_path):
    return tmp_path / "deep" / "cassette.jsonl"


class Odd(Exception):
    """A bug with a name of its own."""


def entry(trajectory="t", tool="x", call_id="c", *, args=None, outcome):
    """Make an entry as a cassette does."""
    return Entry(trajectory, tool, call_id, canonical_json(args or {}), 0.0, outcome_to_json(outcome))


OUTCOMES = [
    "text", None, [1, {"a": [2.5, None, True]}], ("value", 0.5, {"tries": 2}), "\ud800 half a pair", "",
    ToolResult.from_text("no", status=Status.SKIPPED),
    ToolResult.from_text("lost", status=Status.INFRA),
    ToolResult.from_text("late", status=Status.TIMEOUT, meta={"odd": object()}),
    ToolResult(
        (TextPart("a"), ImagePart(b"\x89PNG\0"), VideoPart(b"v"), FileRefPart("f"), JsonPart({"k": 1})),
        stop=True, reward=-1.0, metrics={"m": [1]}, notes=("n",), meta={"k": 1}, timing=Timing(1.0, 0.0, 3.0),
    ),
    ToolResult((JsonPart(object()),)),
    ToolError("wrong", {"k": 1}), StopSignal("enough"), InfrastructureError("429"), TimeoutError("late"),
    TimeoutError(), Odd("a bug"),
]  # fmt: skip


async def answers(tool, number, trajectory="t", **options):
    """Make so many calls, one a turn, with arguments that are all the same."""
    dispatcher = Dispatcher([tool], **options)
    async with dispatcher.session(trajectory) as session:
        found = [(await session.run([ParsedCall(tool.name, {"q": 1}, f"c{n}")]))[0] for n in range(number)]
    await dispatcher.close()
    return found


def told(result):
    """What of a result follows from the tool, and reaches model, reward or record."""
    return (result.text, result.status, result.stop, result.reward, result.metrics, result.notes)


async def test_all_that_can_come_of_a_call_comes_back(path):
    """Values without a JSON form, such as some in `meta`, may become text; the rest is equal."""
    live = await answers(Recorded(Scripted(*OUTCOMES), path), len(OUTCOMES))
    replayed = await answers(Replayed(Scripted(), path), len(OUTCOMES))
    assert [told(r) for r in replayed] == [told(r) for r in live]
    assert replayed[9].parts == live[9].parts
    assert replayed[9].meta == {"k": 1}
    assert replayed[11].meta == {"k": 1}
    assert {r.status for r in live} == {
        Status.OK, Status.ERROR, Status.SKIPPED, Status.INFRA, Status.TIMEOUT, Status.CRASH,
    }  # fmt: skip


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
parts = st.one_of(
    st.builds(TextPart, st.text()),
    st.builds(JsonPart, json_values),
    st.builds(ImagePart, st.binary(), st.just("image/jpeg")),
    st.builds(VideoPart, st.binary()),
    st.builds(FileRefPart, st.text(), st.none() | st.text()),
)


@given(
    st.builds(
        ToolResult,
        st.lists(parts, max_size=3).map(tuple),
        status=st.sampled_from(Status),
        stop=st.booleans(),
        reward=st.none() | st.floats(allow_nan=False),
        metrics=st.none() | st.dictionaries(st.text(), json_values, max_size=2),
        meta=st.none() | st.dictionaries(st.text(), json_values, max_size=2),
        notes=st.lists(st.text(), max_size=2).map(tuple),
    )
)
def test_result_reads_back_unchanged(result):
    assert outcome_from_json(json.loads(json.dumps(outcome_to_json(result)))) == result


async def test_a_call_whose_time_was_over_is_replayed_as_that_at_once(path):
    """Its words come from the dispatcher, which stopped it; the replay has no bound of time at all."""
    (live,) = await answers(Recorded(Gated(), path), 1, per_call_timeout=0.01)
    (replayed,) = await answers(Replayed(Gated(), path), 1, per_call_timeout=None)
    assert told(replayed) == told(live)
    assert "did not finish within 0.01 s" in replayed.text
    outcome = Cassette(path)[0].outcome
    assert isinstance(outcome, ToolResult)
    assert outcome.timing is None  # the dispatcher measures each run itself


async def test_a_call_that_was_stopped_with_all_the_rest_is_not_recorded(path):
    inner = Gated()
    running = asyncio.create_task(answers(Recorded(inner, path), 1))
    await inner.begun.acquire()
    running.cancel()
    await asyncio.wait([running])
    assert len(Cassette(path)) == 0


async def test_calls_are_found_by_id_else_in_their_order(path):
    tool = Recorded(Scripted("a", "b", "c"), path)
    for call_id in ("c0", "c1", "c2"):
        await by_hand(tool, call_id)
    again = Replayed(Scripted(), path)
    assert [(await by_hand(again, call_id)).text for call_id in ("c2", "x", "y")] == ["c", "a", "b"]
    with pytest.raises(CassetteMiss):
        await by_hand(again, "z")


async def test_each_trajectory_begins_at_the_start_each_time(path):
    await answers(Recorded(Scripted("a", "b"), path), 2)
    tool = Replayed(Scripted(), path)
    for _ in range(2):
        assert [r.text for r in await answers(tool, 2)] == ["a", "b"]


async def test_trajectories_tools_and_scopes_are_separate(path):
    for trajectory, scope in (("t", ""), ("u", ""), ("t", "s")):
        tool = Recorded(Scripted(trajectory + scope), Cassette(path, scope=scope))
        await by_hand(tool, "c", trajectory)
    await by_hand(Recorded(Renamed(Scripted("other"), "other"), path), "c", "t")
    found = [
        await by_hand(Replayed(Scripted(), Cassette(path, scope=scope)), "c", trajectory)
        for trajectory, scope in (("t", "s"), ("u", ""), ("t", ""))
    ]
    assert [result.text for result in found] == ["ts", "u", "t"]
    assert (await by_hand(Replayed(Renamed(Scripted(), "other"), path), "c", "t")).text == "other"


async def test_miss_names_the_nearest_call_and_gives_infra(path):
    recorder = Recorded(add, path)
    for a, trajectory in ((1, "t"), (222, "t"), (221, "u")):
        await recorder.run({"a": a}, ctx("c0", trajectory))
    tool = Retrying(Replayed(add, path), first_s=1000, longest_s=1000)
    dispatcher = Dispatcher([tool])
    (result,) = await dispatcher.session("t").run([ParsedCall("add", {"a": 221}, "c9")])
    assert result.status is Status.INFRA
    assert """add({"a":221}), id 'c9', trajectory 't'""" in result.text
    assert """nearest: add({"a":222}), id 'c0', trajectory 't'""" in result.text
    await dispatcher.close()


async def test_a_miss_on_an_empty_cassette_says_so(path):
    Cassette(path).path.parent.mkdir()
    path.touch()
    with pytest.raises(CassetteMiss, match="it is empty"):
        await by_hand(Replayed(add, path), a=1)


async def test_strict_replays_open_and_set_up_nothing(path):
    notes = Notes()
    await answers_of_notes(Recorded(notes, path), "a")
    notes.diary.clear()
    assert await answers_of_notes(Replayed(notes, path), "a") == ["a"]
    assert notes.diary == []


async def answers_of_notes(tool, *texts):
    dispatcher = Dispatcher([tool])
    async with dispatcher.session("t") as session:
        calls = [ParsedCall("note", {"text": text}, f"c{n}") for n, text in enumerate(texts)]
        found = [(await session.run([call]))[0].text for call in calls]
    await dispatcher.close()
    return found


async def test_a_description_is_enough_to_replay_a_tool(path):
    await by_hand(Recorded(add, path), a=1)
    tool = Replayed(json.loads(json.dumps(add.spec())), path)
    assert tool.spec() == add.spec()
    assert (await by_hand(tool, a=1)).text == "1"
    with pytest.raises(TypeError, match="a spec cannot run"):
        Replayed(add.spec(), path, strict=False)


async def test_missing_calls_can_be_run_and_recorded(path):
    inner = Scripted("a", "b", "c")
    tool = Replayed(inner, path, strict=False)
    assert [r.text for r in await answers(tool, 2)] == ["a", "b"]
    assert [r.text for r in await answers(tool, 3)] == ["a", "b", "c"]
    assert [r.text for r in await answers(Replayed(inner, path), 3)] == ["a", "b", "c"]
    assert len(inner.seen) == 3


async def test_a_tool_with_memory_runs_only_where_nothing_was_replayed(path):
    """A note that was replayed is not in the notebook: what comes after it cannot be run for real."""
    await answers_of_notes(Recorded(Notes(), path), "a")
    found = await answers_of_notes(Replayed(Notes(), path, strict=False), "a", "b")
    assert found[0] == "a"
    assert "not on the cassette" in found[1]
    fresh = path.with_name("fresh.jsonl")
    assert await answers_of_notes(Replayed(Notes(), fresh, strict=False), "a", "b") == ["a", "a b"]


async def test_stateful_tool_that_has_run_keeps_running(path):
    await answers_of_notes(Recorded(Notes(), path), "x", "b")
    assert await answers_of_notes(Replayed(Notes(), path, strict=False), "a", "b") == ["a", "a b"]


async def test_calls_take_the_time_they_took_if_that_is_wanted(path):
    cassette = Cassette(path)
    cassette.append("t", "add", "c1", {"a": 1}, ToolResult.from_value(1), 40.0)
    for latency, seconds in ((True, 40.0), (0.25, 10.0)):
        clock = VirtualClock()
        tool = Replayed(add, cassette, latency=latency, call_later=clock.call_later)
        call = asyncio.create_task(by_hand(tool, a=1))
        while not clock.due:
            await asyncio.sleep(0)
        clock.advance(seconds - 0.1)
        await asyncio.sleep(0)
        assert not call.done()
        clock.advance(0.2)
        assert (await call).text == "1"


async def test_broken_line_is_skipped_and_later_lines_are_read(path, caplog):
    recorder = Recorded(add, path)
    await by_hand(recorder, "c1", a=1)
    await recorder.teardown()
    with path.open("ab") as file:
        file.write(b'{"schema_version": 2, "traj')
    await by_hand(recorder, "c2", a=2)
    assert [(await by_hand(Replayed(add, path), a=a)).text for a in (1, 2)] == ["1", "2"]
    assert "line 2, skipped" in caplog.text


async def test_trajectories_that_replay_one_call_share_nothing_that_can_be_changed(path):
    recorder = Recorded(Scripted(ToolResult((JsonPart({"a": []}),), meta={"seen": []})), path)
    await by_hand(recorder, q=1)
    await recorder.teardown()
    cassette = Cassette(path)
    for _ in range(2):
        found = await by_hand(Replayed(Scripted(), cassette), q=1)
        assert (found.meta, found.parts) == ({"seen": []}, (JsonPart({"a": []}),))
        found.meta["seen"].append(1)
        found.parts[0].data["a"].append(1)


@pytest.mark.parametrize(
    "field",
    ['"seconds":"1"', '"seconds":-1', '"seconds":true', '"seconds":null', '"seconds":1e999', '"id":5',
     '"tool":[1]', '"trajectory":null', '"result":5', '"error":{"kind":"tool","type":"T","text":7}'],
)  # fmt: skip
async def test_a_line_with_a_field_of_another_kind_is_skipped(path, field, caplog):
    """It would be a crash in the middle of a replay, or a wait without end."""
    await by_hand(Recorded(add, path), a=1)
    line, name = json.loads(path.read_text()), field.partition(":")[0].strip('"')
    if name == "error":
        del line["result"]
    text = json.dumps({**line, name: "FIELD"}).replace(f'"{name}": "FIELD"', field)
    with path.open("a") as file:
        file.write(text + "\n")
    assert len(Cassette(path)) == 1
    assert "line 2, skipped" in caplog.text


def nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


def test_arguments_and_results_of_200_levels_are_read_back(path):
    args, result = {"a": nested(199)}, ToolResult((JsonPart(nested(200)),), meta={"a": nested(199)})
    with Cassette(path) as tape:
        tape.append("t", "add", "c1", args, result, 0.0)
    with Cassette(path) as tape:
        number = tape.find("t", "add", "c1", args)
        assert number is not None
        assert tape[number].outcome == result


@pytest.mark.parametrize("depth", [230, 300])
def test_deeper_results_are_read_back_as_text_without_their_meta(path, depth):
    result = ToolResult((JsonPart(nested(depth)),), meta={"a": nested(depth)})
    with Cassette(path) as tape:
        tape.append("t", "add", "c1", {}, result, 0.0)
    with Cassette(path) as tape:
        (entry,) = [tape[number] for number in range(len(tape))]
        assert entry.outcome.text == result.text
        assert entry.outcome.meta in (None, result.meta)


def test_too_deep_line_is_skipped_and_reported(path, caplog):
    path.parent.mkdir()
    write_calls(Cassette(path), "t", 1)
    deep = "[" * 300 + "]" * 300
    line = path.read_bytes()
    path.write_bytes(line + line.replace(b'"args":{"a":0}', b'"args":{"a":%s}' % deep.encode()))
    assert len(Cassette(path)) == 1
    assert "nested more than 255 levels deep" in caplog.text


async def test_an_entry_of_a_later_version_is_passed_over(path, caplog):
    await by_hand(Recorded(add, path), a=1)
    path.write_text(path.read_text().replace('"schema_version":2', '"schema_version":3'))
    assert len(Cassette(path)) == 0
    assert "version 2; got 3" in caplog.text


@pytest.mark.parametrize(
    "args", [{"a": 10**9999}, {"a": "\ud800"}, {"a": float("nan")}], ids=["long", "half", "nan"]
)
async def test_arguments_of_any_kind_can_be_recorded(path, args):
    await Recorded(Scripted("x"), path).run(args, ctx())
    assert (await Replayed(Scripted(), path).run(args, ctx())).text == "x"


@given(st.dictionaries(st.text(), json_values, max_size=3), json_values)
def test_a_call_is_found_by_arguments_as_they_were_before_they_were_written(args, meta):
    line = entry(args=args, outcome=ToolResult(meta={"m": meta})).line()
    found = Entry.from_json(json.loads(line))
    assert line.find(b"\n") == len(line) - 1
    assert found.args == canonical_json(args)
    assert found.outcome == ToolResult(meta={"m": meta})


@pytest.mark.parametrize("place", range(4), ids=["trajectory", "tool", "id", "text"])
def test_lone_surrogate_is_escaped_at_any_position(place):
    names = ["t", "x", "c", "text"]
    names[place] = "\ud800"
    trajectory, tool, call_id, text = names
    line = entry(trajectory, tool, call_id, outcome=ToolResult.from_text(text)).line()
    found = Entry.from_json(json.loads(line))
    assert (found.trajectory, found.tool, found.call_id) == (trajectory, tool, call_id)
    assert found.outcome == ToolResult.from_text(text)


@pytest.mark.parametrize(
    "more",
    [
        {"status": Status.ERROR}, {"stop": True}, {"reward": 0.0}, {"metrics": {}}, {"meta": {}},
        {"notes": ("n",)}, {"timing": Timing(1.0, 0.0, 3.0)}, {"parts": ()}, {"parts": (JsonPart("x"),)},
        {"parts": (TextPart("x"), TextPart("y"))},
    ],
    ids=str,
)  # fmt: skip
def test_fields_of_a_result_besides_its_text_are_read_back(more):
    result = replace(ToolResult.from_text("x"), **more)
    assert Entry.from_json(json.loads(entry(outcome=result).line())).outcome == result


@pytest.mark.parametrize("where", ["metrics", "meta"])
async def test_numbers_that_json_lacks_are_replaced_alone(path, where, caplog):
    await by_hand(Recorded(Scripted(ToolResult.from_text("x")), path), "c0")
    await by_hand(Recorded(Scripted(ToolResult((TextPart("9" * 5000),), **{where: {"n": 10**9999}})), path))
    found = await by_hand(Replayed(Scripted(), path))
    assert (found.text, getattr(found, where)) == ("9" * 5000, None)
    assert "call 'c1': meta, metrics or detail is not JSON" in caplog.text


async def test_meta_that_cannot_be_written_is_left_out(path):
    loop: list = []
    loop.append(loop)
    await by_hand(Recorded(Scripted(ToolResult.from_text("x", meta={"loop": loop})), path), q=1)
    found = await by_hand(Replayed(Scripted(), path), q=1)
    assert (found.text, found.meta) == ("x", None)


def test_threads_and_processes_may_write_to_one_file(path):
    """Each line is whole, and each writer's come in their order."""
    shared = Cassette(path)
    context = multiprocessing.get_context("spawn")
    writers = [
        *(threading.Thread(target=write_calls, args=(shared, f"thread {n}", 200)) for n in range(2)),
        *(context.Process(target=write_calls, args=(shared, f"process {n}", 200)) for n in range(2)),
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    cassette = Cassette(path)
    found = [cassette[n] for n in range(len(cassette))]
    assert len(found) == 800
    for name in ("thread 0", "thread 1", "process 0", "process 1"):
        assert [e.call_id for e in found if e.trajectory == name] == [f"c{n}" for n in range(200)]


async def test_calls_recorded_after_reading_are_found(path):
    cassette = Cassette(path)
    assert len(cassette) == 0
    await by_hand(Recorded(add, cassette), a=1)
    assert len(cassette) == 1
    assert repr(pickle.loads(pickle.dumps(cassette))) == repr(cassette)


def test_without_a_file_there_is_nothing_to_replay(path):
    with pytest.raises(FileNotFoundError, match="record one with Recorded"):
        Replayed(add, path)


@pytest.mark.parametrize("latency", [-1, float("nan")])
def test_invalid_latency_is_rejected(path, latency):
    with pytest.raises(ValueError, match="expected latency"):
        Replayed(add, path, strict=False, latency=latency)
