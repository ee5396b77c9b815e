"""The state of a collector that runs: plain values, with which another collector continues."""

import asyncio
import copy
import io
import itertools
import json
import random
import threading
from collections import Counter

import pytest
import torch
from helpers import record_strategies as some
from helpers.collector_worlds import WildEngine, looks, numbered_tasks, rows_of, tokenizer
from helpers.collector_worlds import collector_of as wild_collector
from helpers.limit import limit
from helpers.resumed_runs import N_TASKS, collector_of, figures_of, notes_of, pauses
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_agentic import Recorder, ToolCompose
from torchrl_agentic.codec import from_json, to_json
from torchrl_agentic.collectors import Branching, CollectorError, Score, Task, Trajectory
from torchrl_agentic.collectors.admission import GroupAdmission
from torchrl_agentic.collectors.collector_state import CollectorState, GroupState
from torchrl_agentic.messages import (
    FileRefPart,
    ImagePart,
    JsonPart,
    Message,
    TextPart,
    ToolResult,
    Turn,
    VideoPart,
)
from torchrl_agentic.records import read_records
from torchrl_agentic.rollout.checkpoints import Checkpoints
from torchrl_agentic.testing import InProcessWorkers, run_skipping

numbers = st.floats(-1e6, 1e6)
counts = st.integers(0, 100)


@st.composite
def trajectories(draw, task, index):
    """Draw a trajectory that has ended."""
    name = draw(some.text)
    return Trajectory(
        name,
        Task(task, ()),
        index,
        tuple(draw(st.lists(some.messages, max_size=2))),
        tuple(draw(some.turns(name, turn, index)) for turn in range(draw(st.integers(0, 2)))),
        draw(some.text),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.none() | some.ledgers()),
        tuple(draw(st.lists(some.ledgers(), max_size=2))),
        draw(st.dictionaries(some.text, numbers | counts | st.booleans(), max_size=3)),
        tuple(draw(st.lists(numbers, max_size=3))),
        draw(numbers),
        draw(numbers),
        score=draw(st.none() | st.builds(Score, numbers, st.none() | some.text, some.text)),
    )


@st.composite
def states(draw):
    """Draw the state of a collector."""
    version = draw(counts)
    groups = []
    for label in draw(st.lists(counts, unique=True, max_size=2)):
        task, size = draw(some.text), draw(st.integers(0, 3))
        n_done = draw(st.integers(0, size))
        groups.append(
            GroupState(
                label,
                task,
                draw(st.integers(0, version)),
                draw(counts),
                tuple(draw(trajectories(task, index)) for index in range(n_done)),
                {index: draw(counts) for index in range(n_done, size)},
            )
        )
    return CollectorState(version, tuple(groups))


@settings(max_examples=40)
@given(states())
def test_a_state_is_the_same_after_json_and_after_torch_save(state):
    data = state.to_json()
    assert CollectorState.from_json(json.loads(json.dumps(data))) == state
    file = io.BytesIO()
    torch.save(data, file)
    file.seek(0)
    assert CollectorState.from_json(torch.load(file, weights_only=True)) == state


PARTS = (
    JsonPart({"a": [1, None]}),
    ImagePart(b"\x00\xff"),
    VideoPart(b"v"),
    FileRefPart("a.txt"),
    TextPart("x"),
)


@pytest.mark.parametrize("parts", [PARTS, PARTS[:1], (), (TextPart("a\nb"),), (TextPart("a"), TextPart("b"))])
def test_turns_keep_the_parts_and_the_data_of_results_exactly(parts):
    turn = some.turn(result=ToolResult(parts, meta={"rank": 1}), args={"n": 1})
    assert from_json(Turn, json.loads(json.dumps(to_json(turn)))) == turn


def test_a_trajectory_that_holds_other_values_is_left_out_and_begins_again(caplog):
    task = Task("t", ())
    odd = Trajectory("t/0.0", task, 0, (Message("user", [{"type": "image", "image": object()}]),))
    turn = some.turn(result=ToolResult((TextPart("x"),), meta={"image": object()}))
    ended = Trajectory("t/0.1", task, 1, (), (turn,))
    group = GroupState(0, "t", 0, 0, (odd, ended))
    (found,) = CollectorState.from_json(CollectorState(0, (group,)).to_json()).groups
    assert (
        "the state leaves t/0.0 out, so that it begins again: it holds a value of type object" in caplog.text
    )
    assert [one.index for one in found.finished] == [1]
    assert found.finished[0].calls[0][1] == ToolResult((TextPart("x"),))  # without what only programs see


def coherent(collector, n_batches):
    """Return the state of a collector as it comes back from a file, if no batch is on its way; else None."""
    state = json.loads(json.dumps(collector.state_dict()))
    return state if state["tasks_before"] + len(state["tasks_done"]) == 2 * n_batches else None


async def abandoned(folder, seed, n_lives, *, n_workers=0, **options):
    """Train over several collectors; each but the last is abandoned, some time after its state was taken.

    Returns:
        The figures of the batches.
    """
    odds, wait = random.Random(seed), pauses(seed, 1.0)
    saved, curve, weights = None, [], 0
    for life in range(n_lives):
        more = {"workers": InProcessWorkers(n_workers)} if n_workers else {}
        engine, collector = collector_of(folder, wait, **options, **more)
        if saved is not None:
            state, curve, weights = copy.deepcopy(saved)
            collector.load_state_dict(state)
            await collector.update_weights(weights)
            assert collector.policy_version == weights

        async def consume(collector=collector, engine=engine, curve=curve):
            async for batch in collector:
                curve.append([*figures_of(batch), collector.policy_version])
                await collector.update_weights(engine.weights + 1)

        consumer = asyncio.create_task(consume())
        if life < n_lives - 1:
            await asyncio.wait({consumer}, timeout=odds.random() * 6)
            if (state := coherent(collector, len(curve))) is not None:
                saved = copy.deepcopy((state, curve, engine.weights))
            await asyncio.wait({consumer}, timeout=odds.random())
            consumer.cancel()
        await asyncio.wait({consumer})
        await collector.aclose()
    consumer.result()
    return curve


@pytest.mark.parametrize("n_workers", [0, 2])
def test_random_schedules_of_abandoned_collectors_have_one_curve(tmp_path, n_workers: int):
    expected = run_skipping(abandoned(tmp_path, 0, 1))
    for seed in range(8):
        folder = tmp_path / str(seed)
        folder.mkdir()
        assert run_skipping(abandoned(folder, seed, 3, n_workers=n_workers)) == expected, seed
        assert max(Counter(notes_of(folder)).values()) == 1, seed


@pytest.mark.parametrize("staleness", [1, 2, None])
def test_random_schedules_keep_their_tasks_and_their_ages(tmp_path, staleness: int | None):
    for seed in range(4):
        folder = tmp_path / str(seed)
        folder.mkdir()
        curve = run_skipping(abandoned(folder, seed, 3, max_staleness=staleness))
        tasks = Counter(name for figures, *_ in curve for name, _ in figures)
        assert tasks == {f"t{number}": 2 for number in range(N_TASKS)}, seed
        assert max(Counter(notes_of(folder)).values()) == 1, seed
        ages = [version - oldest for _, _, oldest, version in curve]
        assert all(0 <= age <= (8 if staleness is None else staleness) for age in ages), seed


def test_no_call_with_effects_of_a_tree_runs_twice_under_one_name(tmp_path):
    """One state is loaded twice, so that groups that had begun after it begin in three collectors."""
    options = {"tools": ("note", "look"), "max_staleness": 3, "branching": Branching(at=(1,))}

    async def live(folder, seed, state, until):
        engine, collector = collector_of(folder, pauses(seed, 1.0), **options)
        if state is not None:
            collector.load_state_dict(copy.deepcopy(state))
            await collector.update_weights(0)
        figures = []

        async def consume():
            async for batch in collector:
                figures.append(figures_of(batch)[0])
                await collector.update_weights(engine.weights + 1)

        consuming = asyncio.create_task(consume())
        await asyncio.wait({consuming}, timeout=0.01)
        saved = collector.state_dict()
        await asyncio.wait({consuming}, timeout=until)
        is_over = consuming.done()
        consuming.cancel()
        await asyncio.gather(consuming, return_exceptions=True)
        await collector.aclose()
        return saved, figures if is_over else None

    async def lives(folder, until):
        saved, _ = await live(folder, 1, None, until)
        await live(folder, 2, saved, until)
        return (await live(folder, 3, saved, None))[1]

    for until in (4, 14):
        folder = tmp_path / str(until)
        folder.mkdir()
        figures = run_skipping(lives(folder, until))
        assert {task for batch in figures for task, _ in batch} == {f"t{n}" for n in range(N_TASKS)}
        notes = notes_of(folder)
        assert max(Counter(notes).values()) == 1
        assert any("/" in name and "@run+" in name for name in (place.split(".")[1] for place, _ in notes))


@pytest.mark.parametrize("seed", range(50))
def test_restored_groups_keep_every_age_within_its_bound(seed: int):
    odds = random.Random(seed)
    size, staleness = odds.randint(1, 3), odds.randint(0, 3)
    admission = GroupAdmission(size, staleness, odds.choice([0, 7]))
    is_trained = True
    groups, n_left = {}, 0  # (version, whether it is finished) by number
    for _ in range(2_000):
        move = odds.random()
        if move < 0.4 and admission.can_begin:
            groups[admission.begin()] = (admission.version, False)
        elif move < 0.8:
            if running := [number for number, (_, is_finished) in groups.items() if not is_finished]:
                number = odds.choice(running)
                admission.finish(number)
                groups[number] = (groups[number][0], True)
        elif move < 0.95:
            for number in admission.take() or ():
                assert admission.version - groups.pop(number)[0] <= staleness
                n_left += 1
                is_trained = False
            if not is_trained and odds.random() < 0.5:
                admission.update(admission.version + 1)  # at most one per batch
                is_trained = True
        else:
            again = GroupAdmission(size, staleness, admission.version)
            groups = {again.restore(version): (version, done) for version, done in groups.values()}
            for number, (_, is_finished) in groups.items():
                if is_finished:
                    again.finish(number)
            admission, is_trained = again, True  # a run that resumes asks for a batch first
    assert n_left > 50
    with pytest.raises(ValueError, match="has at most the version"):
        admission.restore(admission.version + 1)


def hanging(index, **options):
    """Return a collector whose trajectories with one index never end their second answer."""
    engine = WildEngine(looks(0), fate=lambda key: "hang" if f".{index}@" in key else "ok")
    return engine, wild_collector(engine, tasks=numbered_tasks(2), group_size=2, name="train", **options)


async def until_finished(collector, count):
    """Return the state once so many trajectories have ended."""
    while True:
        state = collector.state_dict()
        if sum(len(group["finished"]) for group in state["groups"]) == count:
            return state
        await asyncio.sleep(0.1)


async def hung_state(collector, count=2):
    """Return the state of a collector of which no batch ever leaves."""
    async with collector, asyncio.timeout(limit(100)):
        batches = aiter(collector)
        waiting = asyncio.ensure_future(anext(batches))
        state = await until_finished(collector, count)
        waiting.cancel()
        await asyncio.wait({waiting})
    return state


def test_trajectories_that_had_ended_stay_and_are_recorded_again(tmp_path):
    asked = []

    async def score(trajectory):
        asked.append(trajectory.name)
        return float(len(asked))

    _, first = hanging(1, reward=score)
    state = run_skipping(hung_state(first))
    assert asked == ["t0/0.0@train", "t1/1.0@train"]
    again = WildEngine(looks(0))
    with Recorder(tmp_path / "new") as recorder:
        second = wild_collector(
            again, transforms=ToolCompose([], recorder=recorder), tokenizer=tokenizer(), reward=score,
            tasks=numbered_tasks(2), group_size=2, name="train",
        )  # fmt: skip
        second.load_state_dict(state)
        with second:
            rows = rows_of(second)
    suffixes = {row["collector", "name"].partition("+")[2] for row in rows}
    assert len(suffixes) == 2  # of those that had ended, "", and of those that began again
    (suffix,) = suffixes - {""}
    assert [(row["collector", "name"], row["reward"].item()) for row in rows] == [
        ("t0/0.0@train", 1.0), (f"t0/0.1@train+{suffix}", 3.0),
        ("t1/1.0@train", 2.0), (f"t1/1.1@train+{suffix}", 4.0),
    ]  # fmt: skip
    assert {key for key, *_ in again.asked} == {"t0/0.1@train", "t1/1.1@train"}
    records = {record.trajectory: record for record in read_records(tmp_path / "new")}
    assert len(records) == 4
    old = records["t0/0.0@train"]
    assert old.score == 1.0
    assert [message.text for message in old.messages] == ["q0", "done t0/0.0@train"]


def test_a_state_can_be_taken_on_any_thread_and_on_the_loop_itself():
    async def scenario():
        _, collector = hanging(1)
        async with collector, asyncio.timeout(limit(60)):
            waiting = asyncio.ensure_future(anext(aiter(collector)))
            on_loop = await until_finished(collector, 2)
            on_thread = await asyncio.to_thread(collector.state_dict)
            waiting.cancel()
            await asyncio.wait({waiting})
        return on_loop, on_thread

    on_loop, on_thread = asyncio.run(scenario())
    assert on_loop == on_thread
    assert [group["label"] for group in on_loop["groups"]] == [0, 1]

    _, collector = hanging(1)
    found = []

    def watch():
        while not found:
            state = collector.state_dict()
            if sum(len(group["finished"]) for group in state.get("groups", ())) == 2:
                found.append(state)
        collector.shutdown()

    watcher = threading.Thread(target=watch)
    watcher.start()
    with pytest.raises(CollectorError, match="shut down"):
        list(collector)
    watcher.join()
    for state in (on_loop, *found):
        for ended in itertools.chain.from_iterable(group["finished"] for group in state["groups"]):
            del ended["seconds"]
    assert found == [on_loop]


def test_a_state_that_was_loaded_is_saved_again_before_and_while_it_is_taken_over():
    _, first = hanging(1)
    state = run_skipping(hung_state(first))

    async def taken_over():
        _, second = hanging(1)
        second.load_state_dict(state)
        assert second.state_dict() == state
        seen = []

        def rows():
            for task in numbered_tasks(2):
                seen.append(second.state_dict())
                yield task

        second = wild_collector(WildEngine(looks(0)), tasks=rows(), group_size=2, name="train")
        second.load_state_dict(state)
        await hung_state_of(second)
        return seen

    async def hung_state_of(collector):
        async with collector, asyncio.timeout(limit(100)):
            async for _ in collector:
                pass

    seen = asyncio.run(taken_over())
    assert [[group["label"] for group in one["groups"]] for one in seen] == [[0, 1], [0, 1]]


def mutations():
    """Return states that are none, by what is wrong with them."""
    _, first = hanging(1)
    good = run_skipping(hung_state(first))
    changes = {
        "a text as version": lambda state: state.update(policy_version="3"),
        "a group of the future": lambda state: state["groups"][0].update(version=5),
        "a ledger of other lengths": lambda state: state["groups"][0]["finished"][0]["ledger"]["runs"].pop(),
        "another format": lambda state: state.update(format=9),
        "an index twice": lambda state: state["groups"][0]["running"][0].update(index=0),
        "no groups": lambda state: state.pop("groups"),
        "groups as a text": lambda state: state.update(groups="abc"),
        "no reward": lambda state: state["groups"][1]["finished"][0].pop("reward"),
        "one label twice": lambda state: state["groups"][1].update(label=0),
        "running as None": lambda state: state["groups"][1].update(running=None),
    }
    made = {}
    for name, change in changes.items():
        made[name] = copy.deepcopy(good)
        change(made[name])
    return made


def test_what_is_no_state_is_refused():
    for name, state in mutations().items():
        _, collector = hanging(1)
        with pytest.raises(ValueError, match=r"no state of an AgentCollector|has the format 9"):
            collector.load_state_dict(state)
        assert collector.state_dict() == hanging(1)[1].state_dict(), name
    with pytest.raises(ValueError, match=r"result of AgentCollector\.state_dict\(\); got list"):
        collector.load_state_dict([])


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        (
            [Task("x", [{"role": "user", "content": "q"}])],
            "task 0, 't0', but that task is now 'x'",
        ),
        (numbered_tasks(1), "a group of task 1, 't1', but the tasks ended before it"),
    ],
    ids=["another", "fewer"],
)
def test_other_tasks_than_those_of_the_state_are_found_when_they_are_read(tasks, said: str):
    _, first = hanging(1)
    state = run_skipping(hung_state(first))
    second = wild_collector(WildEngine(looks(0)), tasks=tasks, group_size=2, name="train")
    second.load_state_dict(state)
    with pytest.raises(CollectorError, match=said):
        list(second)


def test_checkpoints_take_the_state_of_a_collector_that_runs(tmp_path):
    folder = Checkpoints(tmp_path)

    async def scenario():
        _, collector = hanging(1)
        async with collector, asyncio.timeout(limit(60)):
            waiting = asyncio.ensure_future(anext(aiter(collector)))
            await until_finished(collector, 2)
            assert folder.save(1, {"collector": collector})
            waiting.cancel()
            await asyncio.wait({waiting})

    asyncio.run(scenario())
    engine = WildEngine(looks(0))
    second = wild_collector(engine, tasks=numbered_tasks(2), group_size=2, name="train")
    assert folder.load({"collector": second}) == 1
    with second:
        assert len(rows_of(second)) == 4
    assert {key for key, *_ in engine.asked} == {"t0/0.1@train", "t1/1.1@train"}
