"""A `TaskStream` goes through epochs, and continues from any state as if it had never stopped."""

import asyncio
import itertools
import json
from collections import Counter

import pytest
from helpers.collector_worlds import LONG_S, WildEngine, collector_of, looks, numbered_tasks, tasks_of
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic.collectors import CollectorError, Progress, Task, TaskStream
from torchrl_agentic.collectors.task_stream import KEPT_GROUPS
from torchrl_agentic.testing import run_skipping


def names(tasks):
    """Return the names of tasks."""
    return [task.name for task in tasks]


def by_the_dice(progress):
    """Drop, repeat and reorder tasks at random; what was right may drop out."""
    rng = progress.rng
    chosen = [task for task in progress.tasks if rng.random() < 0.8 and progress.mean_reward(task) != 1.0]
    return rng.sample(chosen, len(chosen)) + chosen[:1]


CURRICULA = {
    "none": {},
    "reversed": {"curriculum": lambda progress: progress.tasks[::-1]},
    "unchanged": {"curriculum": lambda progress: None, "every": 2},
    "dice": {"curriculum": by_the_dice},
    "dice, often": {"curriculum": by_the_dice, "every": 3},
}


@given(
    n=st.integers(1, 9),
    epochs=st.integers(1, 4),
    seed=st.integers(),
    given_seed=st.booleans(),
    data=st.data(),
)
def test_each_epoch_is_a_permutation(n: int, epochs: int, seed: int, given_seed: bool, data: st.DataObject):
    stream = TaskStream(numbered_tasks(n), epochs=epochs, seed=seed if given_seed else None)
    found = names(stream)
    orders = [tuple(found[place : place + n]) for place in range(0, len(found), n)]
    assert [sorted(order) for order in orders] == [sorted(names(numbered_tasks(n)))] * epochs
    if not given_seed:
        assert set(orders) == {tuple(names(numbered_tasks(n)))}
    assert stream.n_read == n * epochs


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = set()
    for seed in range(3):
        found = names(itertools.islice(TaskStream(numbered_tasks(30), seed=seed), 90))
        orders |= {tuple(found[place : place + 30]) for place in (0, 30, 60)}
    assert len(orders) == 9
    again = names(itertools.islice(TaskStream(numbered_tasks(30), seed=2), 90))
    assert tuple(again[60:]) in orders


@given(
    n=st.integers(1, 6),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 99),
    kind=st.sampled_from(sorted(CURRICULA)),
    data=st.data(),
)
def test_a_stream_continues_from_any_position_as_if_it_had_not_stopped(
    n: int, epochs: int, seed: int, kind: str, data: st.DataObject
):
    def stream(seed=seed):
        return TaskStream(numbered_tasks(n), epochs=epochs, seed=seed, **CURRICULA[kind])

    def read(source, count=None):
        """Read tasks, with a reward for each that depends on its name alone."""
        found = []
        for task in itertools.islice(source, count):
            found.append(task.name)
            source.record(task.name, [1.0, float(len(found) % 2 or ord(task.name[-1]) % 2)])
        return found

    whole = read(stream())
    first = stream()
    cut = data.draw(st.integers(0, len(whole)), label="cut")
    before = []
    for task in itertools.islice(first, cut):
        before.append(task.name)
        first.record(task.name, [1.0, float(len(before) % 2 or ord(task.name[-1]) % 2)])
    state = json.loads(json.dumps(first.state_dict()))
    second = stream(seed=seed + 1)  # the state brings its own
    second.load_state_dict(state)
    rest = []
    for task in second:
        rest.append(task.name)
        place = len(before) + len(rest)
        second.record(task.name, [1.0, float(place % 2 or ord(task.name[-1]) % 2)])
    assert before + rest == whole
    assert second.state_dict() == {**stream_state(stream(), whole), "seed": seed}


def stream_state(stream, whole):
    """Return the state of a stream that was read to its end."""
    for place, task in enumerate(stream, 1):
        stream.record(task.name, [1.0, float(place % 2 or ord(task.name[-1]) % 2)])
    return stream.state_dict()


@given(n=st.integers(1, 5), epochs=st.integers(1, 3), data=st.data())
def test_what_a_reader_took_and_has_not_left_comes_again_first(n: int, epochs: int, data: st.DataObject):
    """Tasks leave in any order; with the resumed stream, each leaves as often as there are epochs."""
    whole = names(TaskStream(numbered_tasks(n), epochs=epochs))
    stream = TaskStream(numbered_tasks(n), epochs=epochs)
    reader = stream.reader()
    taken = data.draw(st.integers(0, len(whole)), label="taken")
    assert names(itertools.islice(reader, taken)) == whole[:taken]
    left = data.draw(st.sets(st.sampled_from(range(taken)) if taken else st.nothing()), label="left")
    for place in sorted(left, key=lambda place: data.draw(st.integers())):
        reader.leave(place, [0.5])
    rest = [name for place, name in enumerate(whole) if place not in left]
    state = stream.state_dict()
    for way in ("a new reader", "a state", "a state without a reader"):
        if way == "a new reader":
            found = names(stream.reader())
        else:
            resumed = TaskStream(numbered_tasks(n), epochs=epochs)
            resumed.load_state_dict(state)
            assert resumed.state_dict() == state
            found = names(resumed.reader() if way == "a state" else resumed)
        assert found == rest, way


def test_a_curriculum_sees_how_far_the_training_is():
    seen: list[Progress] = []

    def curriculum(progress):
        seen.append(progress)
        return [task for task in progress.tasks if progress.mean_reward(task) != 1.0]

    stream = TaskStream(numbered_tasks(3), epochs=3, seed=None, curriculum=curriculum)
    found = []
    for task in stream:
        found.append(task.name)
        stream.record(task.name, [1.0, 1.0] if task.name == "t1" else [0.0, 1.0])
    assert found == ["t0", "t1", "t2", "t0", "t2", "t0", "t2"]
    assert [(one.epoch, one.n_read, names(one.tasks)) for one in seen] == [
        (0, 0, ["t0", "t1", "t2"]),
        (1, 3, ["t0", "t1", "t2"]),
        (2, 5, ["t0", "t1", "t2"]),
    ]
    assert seen[2].rewards["t0"] == [[0.0, 1.0], [0.0, 1.0]]
    assert seen[0].mean_reward(seen[0].tasks[0]) is None
    assert seen[2].mean_reward(seen[2].tasks[0]) == 0.5


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), max_size=40),
    st.integers(0, 40),
    st.booleans(),
)
def test_the_mean_is_that_of_all_groups_though_only_the_last_ones_are_kept(groups, cut, is_taken_back):
    seen: list[Progress] = []
    task = numbered_tasks(1)[0]

    def curriculum(progress):
        seen.append(progress)

    stream = TaskStream([task], epochs=None, seed=None, curriculum=curriculum)
    for group in groups[:cut]:
        stream.record("t0", group)
    state = json.loads(json.dumps(stream.state_dict()))
    assert sum(map(len, state["rewards"].values())) <= KEPT_GROUPS
    stream = TaskStream([task], epochs=None, seed=None, curriculum=curriculum)
    stream.load_state_dict(state)
    for group in groups[cut:]:
        stream.record("t0", group)
    reader = stream.reader()
    next(reader)
    if is_taken_back and len(groups) < KEPT_GROUPS:  # an interrupted consumer did not get this group
        reader.leave(0, [7.0])
        reader.take_back(0, "t0", [7.0])
        assert [number for number, _ in stream.state_dict()["unfinished"]] == [0]
    next(reader)
    rewards = [reward for group in groups for reward in group]
    assert seen[-1].mean_reward(task) == (sum(rewards) / len(rewards) if rewards else None)
    kept = [[float(one) for one in group] for group in groups[-KEPT_GROUPS:]]
    assert seen[-1].rewards == ({"t0": kept} if groups else {})


def test_a_curriculum_may_be_asked_within_an_epoch():
    places = []

    def curriculum(progress):
        places.append((progress.n_read, len(progress.tasks)))
        return progress.tasks[1:] if progress.n_read == 4 else None

    assert len(names(TaskStream(numbered_tasks(7), epochs=1, curriculum=curriculum, every=2))) == 6
    assert places == [(0, 7), (2, 5), (4, 3)]


def test_a_stream_ends_when_its_curriculum_leaves_nothing(caplog: pytest.LogCaptureFixture):
    stream = TaskStream(
        numbered_tasks(2), curriculum=lambda progress: progress.tasks if progress.epoch == 0 else []
    )
    assert len(names(stream)) == 2
    assert "epoch 1: the curriculum left no task; the stream ends" in caplog.text
    assert names(stream) == []
    resumed = TaskStream(numbered_tasks(2), curriculum=lambda progress: None, epochs=2)
    resumed.load_state_dict(stream.state_dict())
    assert len(names(resumed)) == 2


def test_rows_of_a_data_set_will_do():
    assert names(TaskStream([{"question": "a"}, {"question": "b", "name": "n"}], epochs=1, seed=None)) == [
        "0",
        "n",
    ]


@pytest.mark.parametrize(
    ("error", "words", "arguments", "options"),
    [
        (ValueError, "there are no tasks", [], {}),
        (ValueError, "two tasks are named 't0'; load_tasks makes names distinct", numbered_tasks(1) * 2, {}),
        (ValueError, "epochs must be 1 or more", numbered_tasks(1), {"epochs": 0}),
        (ValueError, "every= is for a curriculum", numbered_tasks(1), {"every": 2}),
        (
            TypeError,
            "curriculum is a function of a Progress; got list",
            numbered_tasks(1),
            {"curriculum": []},
        ),
        (TypeError, "tasks is an iterable of tasks or rows; got str", "rows.jsonl", {}),
        (TypeError, "a task is a Task or a mapping", [3], {}),
    ],
)
def test_a_wrong_argument_is_named(error, words, arguments, options):
    with pytest.raises(error, match=words):
        TaskStream(arguments, **options)


def test_a_task_of_elsewhere_is_refused():
    stranger = Task("x", [{"role": "user", "content": "?"}])
    with pytest.raises(ValueError, match="a task that is not in the stream: Task"):
        next(iter(TaskStream(numbered_tasks(2), curriculum=lambda progress: [stranger])))
    with pytest.raises(ValueError, match="there is no task 'x' in this stream"):
        TaskStream(numbered_tasks(2)).record("x", [1.0])


def test_a_state_of_other_tasks_is_refused():
    state = TaskStream(numbered_tasks(3)).state_dict()
    with pytest.raises(ValueError, match="saved with 3 tasks, and there are 2"):
        TaskStream(numbered_tasks(2)).load_state_dict(state)
    with pytest.raises(ValueError, match="or their names or their order differ"):
        TaskStream(numbered_tasks(3)[::-1]).load_state_dict(state)
    with pytest.raises(ValueError, match="this is no state of a TaskStream: it lacks asked_at, epoch"):
        TaskStream(numbered_tasks(3)).load_state_dict({"tasks_before": 3})


def stream_of(**options):
    """Return a stream of 5 tasks in 3 epochs."""
    return TaskStream(numbered_tasks(5), epochs=3, seed=4, **options)


def collector(stream, **options):
    """Return a collector over a stream, with a tool that takes no time."""
    return collector_of(WildEngine(looks(0)), tasks=stream, **{"group_size": 2, **options})


def one_per_group(batches):
    """Return the names of the tasks in batches, one per group."""
    return tasks_of(batches)[::2]


@pytest.mark.parametrize("n_batches", range(8))
def test_a_synchronous_collector_continues_with_the_same_batches(n_batches: int):
    """With `max_staleness=0` a resumed run has the batches that the uninterrupted one has."""
    options = {"groups_per_batch": 2, "max_staleness": 0}
    with collector(stream_of(), **options) as whole:
        expected = [sorted(one_per_group([batch])) for batch in whole]
    first = collector(stream_of(), **options)
    with first:
        before = list(itertools.islice(first, n_batches))
        state = json.loads(json.dumps(first.state_dict()))
    second = collector(stream_of(), **options)
    second.load_state_dict(state)
    with second:
        found = [*before, *second]
    assert [sorted(one_per_group([batch])) for batch in found] == expected


@pytest.mark.parametrize("order", ["collector first", "collector only", "stream first"])
@pytest.mark.parametrize("n_batches", [1, 4, 6])
def test_nothing_is_skipped_or_trained_twice_though_the_collector_reads_ahead(n_batches: int, order: str):
    options = {"groups_per_batch": 2, "max_staleness": None, "max_in_flight": 6}
    stream = stream_of()
    first = collector(stream, **options)
    with first:
        before = list(itertools.islice(first, n_batches))
        states = [json.loads(json.dumps(one.state_dict())) for one in (first, stream)]
    assert stream.n_read >= 2 * n_batches
    stream = stream_of()
    second = collector(stream, **options)
    loads = [(second, states[0]), (stream, states[1])]
    for target, state in {"collector only": loads[:1], "stream first": loads[::-1]}.get(order, loads):
        target.load_state_dict(state)
    with second:
        found = Counter(one_per_group([*before, *second]))
    assert found == Counter({f"t{number}": 3 for number in range(5)})


def test_groups_that_run_when_the_state_is_saved_begin_again_first():
    whole = names(stream_of())

    async def scenario():
        stream = stream_of()
        engine = WildEngine(looks(0), fate=lambda key: "ok" if key.startswith(f"{whole[0]}/0.") else "hang")
        first = collector_of(engine, tasks=stream, group_size=2, max_staleness=None, max_in_flight=6)
        async with first, asyncio.timeout(LONG_S):
            async for _ in first:
                break
            while stream.n_read < 4:
                await asyncio.sleep(1)
            return first.state_dict()["tasks"]

    state = run_skipping(scenario())
    assert [number for number, _ in state["unfinished"]] == [1, 2, 3]
    again = stream_of()
    again.load_state_dict(state)
    assert names(again) == whole[1:]


def test_a_second_collector_in_the_same_process_continues_where_the_first_one_was_closed():
    stream = stream_of()
    with collector(stream, max_in_flight=6) as first:
        before = list(itertools.islice(first, 3))
    with collector(stream, max_in_flight=6) as second:
        found = Counter(one_per_group([*before, *second]))
    assert found == Counter({f"t{number}": 3 for number in range(5)})


def test_the_curriculum_gets_the_rewards_of_groups_that_left():
    seen = []

    def curriculum(progress):
        seen.append({name: [[*group] for group in groups] for name, groups in progress.rewards.items()})
        return [task for task in progress.tasks if progress.mean_reward(task) != 1.0]

    stream = TaskStream(numbered_tasks(3), epochs=3, seed=None, curriculum=curriculum)

    async def reward(trajectory):
        return 1.0 if trajectory.task.name == "t1" else float(trajectory.index)

    with collector(stream, max_staleness=0, reward=reward) as batches:
        found = one_per_group(list(batches))
    assert found == ["t0", "t1", "t2", "t0", "t2", "t0", "t2"]
    assert seen[1] == {"t0": [[0.0, 1.0]], "t1": [[1.0, 1.0]], "t2": [[0.0, 1.0]]}
    assert seen[2]["t0"] == [[0.0, 1.0], [0.0, 1.0]]


def test_a_group_that_is_dropped_is_done_and_has_no_rewards():
    async def reward(trajectory):
        if trajectory.task.name == "t1":
            raise RuntimeError("no reward")
        return 0.0

    stream = TaskStream(numbered_tasks(3), epochs=1, seed=None)
    with collector(stream, reward=reward, on_failure="drop") as batches:
        assert one_per_group(list(batches)) == ["t0", "t2"]
        state = batches.state_dict()["tasks"]
    assert state["unfinished"] == []
    assert sorted(state["rewards"]) == ["t0", "t2"]


def test_a_curriculum_that_raises_ends_the_collector_with_its_error():
    def curriculum(progress):
        raise RuntimeError("no order")

    with (
        collector(TaskStream(numbered_tasks(2), curriculum=curriculum)) as batches,
        pytest.raises(CollectorError, match="no order"),
    ):
        list(batches)


def test_a_state_of_tasks_of_another_kind_is_refused():
    state = collector(stream_of()).state_dict()
    with pytest.raises(ValueError, match=r"the state has the keys tasks, .*, while tasks= is no TaskStream"):
        collector(numbered_tasks(5)).load_state_dict(state)
    with pytest.raises(ValueError, match=r"the state has the keys tasks_before, tasks_done, .*, while"):
        collector(stream_of()).load_state_dict(collector(numbered_tasks(5)).state_dict())
