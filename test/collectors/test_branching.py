"""Trajectories fork into trees: at the chosen turns, with tokens and sessions of their own, and whole."""

import asyncio
import collections
import contextlib
import logging
import random

import pytest
from helpers.collector_worlds import (
    LONG_S,
    CountedTool,
    WildEngine,
    call,
    check_nothing_left,
    collector_of,
    drained,
    looks,
    n_answers,
    numbered_tasks,
    rows_of,
    tokenizer,
)
from torchrl.envs import Compose

from torchrl_agentic import (
    Injected,
    PythonTool,
    Recorder,
    ScriptedUser,
    ToolCompose,
    Toolset,
    UserSimulator,
    read_records,
    tool,
)
from torchrl_agentic.collectors import AgentCollector, Branching, BranchPoint, CollectorError
from torchrl_agentic.engines import ChatEngine, ContextExceeded, ScriptedEngine
from torchrl_agentic.errors import FilesNotCopied, InfrastructureError
from torchrl_agentic.messages import Message
from torchrl_agentic.records import read_groups
from torchrl_agentic.rollout import batch_metrics
from torchrl_agentic.testing import run_skipping


class Branched(CountedTool):
    """A counted tool whose live copies remember the keys of their trajectory."""

    def __init__(self, act=None, keys=(), owner=None):
        super().__init__(act)
        self.keys, self.owner = list(keys), owner or self

    @contextlib.asynccontextmanager
    async def session(self, trajectory):
        async with super().session(trajectory):
            yield Branched(self.act, owner=self.owner)

    @contextlib.asynccontextmanager
    async def branch(self, live, trajectory):
        async with super().session(trajectory):
            yield Branched(self.act, live.keys, self.owner)

    async def run(self, args, ctx):
        self.owner.ran[args["key"]] += 1
        self.keys.append(args["key"])
        if self.act is not None:
            await self.act(args["key"])
        return " ".join(self.keys)


@tool
def pure(key: str) -> str:
    """Look something up.

    Args:
        key: What.
    """
    return f"found {key}"


def place(key):
    """Return the place of a trajectory in its group: "0", "0/1", "0/0.1"; without the attempt."""
    return key.split("@")[0].split("~")[0].split(".", 1)[1]


def engine_of(turns, name="look"):
    """Return an engine that calls a tool in so many turns; its texts say which trajectory sampled them."""

    def script(key, turn, ids):
        n = n_answers(ids)
        return call(name, key=f"{place(key)}#{n}") if n < turns else f"done {place(key)}"

    return ScriptedEngine(script, tokenizer(), log_prob=-1.0, token_s=0.0001)


def tree_of(*, turns=3, tools=None, engine=None, **options):
    """Return a collector whose trajectories fork."""
    given = [Branched()] if tools is None else tools
    return collector_of(engine or engine_of(turns), tools=given, **options)


def names_of(batch):
    """Return the name of each row."""
    return [row["collector", "name"] for row in batch.tensordicts]


def trajectories_of(collector):
    with collector:
        return [one for batch in collector.trajectories() for one in batch]


def test_a_trajectory_forks_after_the_chosen_turns_and_its_branches_have_names():
    collector = tree_of(branching=Branching(at=(1, 3), width=2), name="c")
    found = trajectories_of(collector)
    assert [one.path for one in found] == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]
    assert [one.name for one in found] == ["t0/0.0@c", "t0/0.0/0.1@c", "t0/0.0/1@c", "t0/0.0/1.1@c"]
    assert {one.index for one in found} == {0}
    assert all([fork.n_turns for fork in one.forks] == [1, 3] for one in found)
    sampled_by = [[text.rsplit("/", 1)[-1] for text in one.texts[-1:]] for one in found]
    assert sampled_by == [["done 0"], ["0.1"], ["1"], ["1.1"]]


def test_branches_share_their_tokens_up_to_the_fork_and_none_after_it():
    collector = tree_of(branching=Branching(at=(1, 2), width=2))
    found = {one.path: one for one in trajectories_of(collector)}
    for path, one in found.items():
        for other_path, other in found.items():
            n_common = next((n for n in range(3) if path[n] != other_path[n]), 3)
            if n_common == 3:
                continue
            shared = one.forks[n_common - 1].n_tokens
            assert shared == other.forks[n_common - 1].n_tokens
            assert one.ledger.ids[:shared] == other.ledger.ids[:shared]
            assert one.ledger.versions[:shared] == other.ledger.versions[:shared]
            assert one.ledger.ids[shared:] != other.ledger.ids[shared:]
            assert one.messages[:3] == other.messages[:3]
    assert all(len(one.turns) == 4 and one.token_drift == 0 for one in found.values())
    assert all(turn.trajectory == one.name for one in found.values() for turn in one.turns)


def test_the_leaves_that_may_grow_are_divided_evenly():
    point = BranchPoint(1, None)
    assert Branching(at=(1, 2), width=3).n_leaves == 9
    assert Branching(width=3).shares(point, 8) == [3, 3, 2]
    assert Branching(width=3).shares(point, 2) == [1, 1]
    assert Branching(width=3).shares(point, 1) == [1]
    assert Branching(at=(2,)).shares(point, 2) == [2]
    found = trajectories_of(tree_of(branching=Branching(at=(1, 2, 3), max_leaves=5)))
    assert len(found) == 5


def test_a_function_decides_by_the_last_message_and_its_log_probabilities():
    points = []

    def at(point):
        points.append(point)
        return point.n_turns == 2

    collector = tree_of(branching=Branching(at=at, max_leaves=2))
    found = trajectories_of(collector)
    assert [one.path for one in found] == [(0, 0), (0, 1)]
    assert [point.n_turns for point in points] == [1, 2]
    assert points[1].turn.outcome.calls[0].args == {"key": "0#1"}
    sampled = tokenizer().encode(points[1].turn.message.text, add_special_tokens=False)
    assert list(points[1].log_probs) == [-1.0] * (len(sampled) + 1)
    assert points[1].n_forks == 0


def test_each_branch_continues_with_a_copy_of_the_state_of_its_tools():
    looked = Branched()
    found = trajectories_of(tree_of(tools=[looked], branching=Branching(at=(2,), width=2), name="c"))
    texts = [[result.text for _, result in one.calls] for one in found]
    assert texts == [
        ["0#0", "0#0 0#1", "0#0 0#1 0#2"],
        ["0#0", "0#0 0#1", "0#0 0#1 0/1#2"],
    ]
    assert all(count == 1 for count in looked.ran.values())
    assert looked.is_all_closed


def test_worlds_and_interpreters_fork_too():
    class Bank(Toolset):
        name = "bank"
        n_open = 0

        async def setup(self):
            async def deposit(world: Injected[dict], name: str = "") -> int:
                """Deposit one coin; return the balance.

                Args:
                    name: Any text.
                """
                world["balance"] += 1
                return world["balance"]

            return [deposit]

        async def teardown(self):
            pass

        @contextlib.asynccontextmanager
        async def session(self, trajectory):
            Bank.n_open += 1
            yield {"balance": 0}
            Bank.n_open -= 1

        @contextlib.asynccontextmanager
        async def branch(self, world, trajectory):
            Bank.n_open += 1
            yield dict(world)
            Bank.n_open -= 1

    def script(key, turn, ids):
        n = n_answers(ids)
        codes = ["x = [0]", f"x.append({place(key)!r}); x", "x.append(2); x"]
        if n == 3:
            return "done"
        return call("python", code=codes[n]) + call("deposit")

    compose = ToolCompose([PythonTool()])
    compose.add_toolset(Bank())
    collector = AgentCollector(
        compose,
        engine=ScriptedEngine(script, tokenizer()),
        tokenizer=tokenizer(),
        tasks=numbered_tasks(1),
        branching=Branching(at=(1,)),
    )
    with contextlib.closing(compose):
        found = trajectories_of(collector)
    last = [[result.text for call, result in one.calls][-2:] for one in found]
    assert last == [["[0, '0', 2]", "3"], ["[0, '0/1', 2]", "3"]]
    assert Bank.n_open == 0


def test_a_batch_has_a_row_per_segment_and_counts_each_sampled_token_once():
    rewards = {(0, 0): 1.0, (0, 1): 0.0, (1, 0): 0.0, (1, 1): 0.0}
    collector = tree_of(
        group_size=2, branching=Branching(at=(2,)), reward=lambda trajectory: rewards[trajectory.path]
    )
    with collector:
        (batch,) = collector
    rows = rows_of([batch])
    assert [row["collector", "path"] for row in rows] == ["0", "0.0", "0.1", "1", "1.0", "1.1"]
    assert [row["next", "done"].item() for row in rows] == [False, True, True] * 2
    assert [row["reward"].item() for row in rows] == [0.5, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert [row["agentic", "turn"].item() for row in rows] == [2, 4, 4] * 2
    assert [row["agentic", "n_calls"].item() for row in rows] == [2, 3, 3] * 2
    assert [row["collector", "reason"] for row in rows] == ["", "no_calls", "no_calls"] * 2
    spread = 3**0.5 / 4 + 1e-4
    wanted = [0.25 / spread, 0.5 / spread, -0.5 / spread, -0.25 / spread, 0, 0]
    assert [row["advantage"].item() for row in rows] == pytest.approx(wanted)
    assert all(row["advantage"].shape == (1, 1) for row in rows)
    for trunk, *leaves in (rows[:3], rows[3:]):
        assert not trunk["collector", "shared"].any()
        size = len(trunk["tokens", "full"])
        for leaf in leaves:
            shared = leaf["collector", "shared"]
            n_shared = int(shared.sum())
            assert shared[:n_shared].all()
            assert size <= n_shared
            assert (leaf["tokens", "full"][:size] == trunk["tokens", "full"]).all()
            assert not (leaf["masks", "all_assistant_mask"] & shared).any()
    for row in rows:
        mask = row["masks", "all_assistant_mask"]
        assert mask.any()
        assert (row["log_probs", "full"].isfinite() == mask).all()
        assert ((row["collector", "policy_version"] >= 0) == mask).all()
    n_sampled = sum(int(row["masks", "all_assistant_mask"].sum()) for row in rows)
    figures = collector.stats.snapshot()
    assert figures["tokens"] == {**figures["tokens"], "sampled": n_sampled, "trained": n_sampled}
    assert figures["batches"]["trajectories"] == 4


def test_a_group_that_never_forks_has_the_rows_of_a_flat_group():
    values = [1.0, 0.25, 0.5]

    def batch_of(**options):
        collector = tree_of(
            turns=1, group_size=3, name="c", reward=lambda trajectory: values[trajectory.index], **options
        )
        with collector:
            (batch,) = collector
        return rows_of([batch])

    flat, tree = batch_of(), batch_of(branching=Branching(at=(9,)))
    for one, other in zip(flat, tree, strict=True):
        assert not other["collector", "shared"].any()
        for key in (("tokens", "full"), ("masks", "all_assistant_mask"), "advantage", "reward"):
            assert (one[key] == other[key]).all()


def test_branches_keep_to_the_capacity_and_open_sessions_wait_with_them():
    most = 0
    open_now = collections.Counter()

    async def act(key):
        nonlocal most
        open_now[key] += 1
        most = max(most, open_now.total())
        await asyncio.sleep(1.0)
        open_now[key] -= 1

    looked = Branched(act)
    found = run_skipping(
        drained(tree_of(tools=[looked], branching=Branching(at=(1, 2)), max_in_flight=2, tasks=2))
    )
    assert most == 2
    assert [len(batch) for batch in found] == [7, 7]
    assert looked.is_all_closed


@pytest.mark.parametrize("moment", [0.5, 3.0, 5.0])
def test_nothing_stays_open_when_a_collector_is_closed_while_branches_wait(moment):
    async def main():
        looked = Branched(lambda key: asyncio.sleep(1.0))
        engine = WildEngine(looks(3))
        collector = collector_of(
            engine, tools=[looked], branching=Branching(at=(1, 2), width=3), max_in_flight=1
        )
        consumer = asyncio.create_task(drained(collector))
        await asyncio.sleep(moment)
        await collector.aclose()
        await asyncio.wait({consumer})
        for _ in range(20):
            await asyncio.sleep(0)
        check_nothing_left(collector, engine, looked)
        return len(looked.opened)

    assert run_skipping(main()) > 0


def failing_once(path):
    """Return a reward that fails for the first trajectory at a path."""
    failed = []

    async def reward(trajectory):
        if trajectory.path == path and not failed:
            failed.append(trajectory.name)
            raise InfrastructureError("lost")
        return 1.0

    return reward, failed


def test_a_branch_that_fails_begins_again_at_its_fork_if_its_tools_held_nothing_open():
    reward, failed = failing_once((0, 1))
    engine = engine_of(2, name="pure")
    collector = tree_of(tools=[pure], engine=engine, branching=Branching(at=(1,)), reward=reward, name="c")
    found = trajectories_of(collector)
    assert failed == ["t0/0.0/1@c"]
    assert [one.name for one in found] == ["t0/0.0@c", "t0/0.0/1~1@c"]
    assert (
        found[0].ledger.ids[: found[0].forks[0].n_tokens] == found[1].ledger.ids[: found[1].forks[0].n_tokens]
    )
    assert collector.stats.snapshot()["events"]["replaced"] == 1


def test_a_trajectory_that_forked_and_fails_leaves_its_branches_alone():
    reward, failed = failing_once((0, 0))
    engine = engine_of(2, name="pure")
    collector = tree_of(tools=[pure], engine=engine, branching=Branching(at=(1,)), reward=reward, name="c")
    found = trajectories_of(collector)
    assert failed == ["t0/0.0@c"]
    assert [one.name for one in found] == ["t0/0.0/0~1@c", "t0/0.0/1@c"]
    assert [one.texts[0] for one in found] == [call("pure", key="0#0")] * 2


def test_a_trajectory_whose_files_cannot_be_copied_goes_on_without_a_fork(caplog):
    """A policy that could have its trajectory replaced by what its code leaves would learn to do so."""

    class Full(Branched):
        @contextlib.asynccontextmanager
        async def branch(self, live, trajectory):
            raise FilesNotCopied("there are too many files")
            yield

    collector = tree_of(tools=[Full()], group_size=2, branching=Branching(at=(1, 2)))
    found = trajectories_of(collector)
    assert [one.path for one in found] == [(0,), (1,)]
    assert collector.stats.snapshot()["events"] == {}
    assert [one.message.count("too many files") for one in caplog.records] == [1, 1]


def test_a_tree_whose_tools_held_something_open_begins_again_as_a_whole():
    reward, failed = failing_once((0, 0, 1))
    looked = Branched()
    collector = tree_of(tools=[looked], branching=Branching(at=(1, 2)), reward=reward, name="c", group_size=2)
    found = trajectories_of(collector)
    assert failed == ["t0/0.0/0.1@c"]
    assert [one.path for one in found] == [
        (tree, a, b) for tree in range(2) for a in range(2) for b in range(2)
    ]
    assert all("~1@" in one.name for one in found if one.index == 0)
    assert all("~" not in one.name for one in found if one.index == 1)
    assert looked.is_all_closed


def test_a_tree_that_begins_again_too_often_is_dropped():
    async def reward(trajectory):
        raise InfrastructureError("lost")

    looked = Branched()
    collector = tree_of(tools=[looked], branching=Branching(at=(1,)), reward=reward, max_replacements=2)
    with pytest.raises(CollectorError, match="lost"):
        trajectories_of(collector)
    figures = collector.stats.snapshot()
    assert figures["events"] == {"replaced": 2, "dropped": 1}
    assert looked.is_all_closed


def test_records_say_where_a_trajectory_forked(tmp_path):
    with Recorder(tmp_path) as recorder:
        compose = ToolCompose([Branched()], recorder=recorder)
        collector = collector_of(
            engine_of(2), transforms=compose, tokenizer=tokenizer(), branching=Branching(at=(1,)), name="c"
        )
        with collector:
            list(collector)
    records = {record.trajectory: record for record in read_records(tmp_path)}
    assert {name: record.extras["branch"] for name, record in records.items()} == {
        "t0/0.0@c": "0.0",
        "t0/0.0/1@c": "0.1",
    }
    assert [record.extras["forked_after_turns"] for record in records.values()] == [[1], [1]]
    assert all(len(record.turns) == 3 for record in records.values())


def test_groups_are_recorded_with_their_leaves_and_metrics_count_tokens_once(tmp_path):
    with Recorder(tmp_path) as recorder:
        compose = ToolCompose([Branched()], recorder=recorder)
        collector = collector_of(
            engine_of(2),
            transforms=compose,
            tokenizer=tokenizer(),
            branching=Branching(at=(1,)),
            reward=lambda trajectory: float(trajectory.path[1]),
            name="c",
        )
        with collector:
            (batch,) = collector
    (group,) = read_groups(tmp_path)
    assert [(one.name, one.reward) for one in group.members] == [("t0/0.0@c", 0.0), ("t0/0.0/1@c", 1.0)]
    assert [one.advantage for one in group.members] == pytest.approx([-0.5 / 0.5001, 0.5 / 0.5001])
    metrics = batch_metrics(batch, version=0)
    sampled = sum(int(row["masks", "all_assistant_mask"].sum()) for row in rows_of([batch]))
    assert metrics["tokens/sampled"] == sampled / 2
    assert (metrics["reward/mean"], metrics["agentic/turn"], metrics["ended/no_calls"]) == (0.5, 3.0, 1.0)


class Silent(ChatEngine):
    """An engine that takes messages."""

    version, max_concurrent = 0, 4

    async def chat(self, messages, *, tools, max_tokens, key):
        n = sum(message["role"] == "assistant" for message in messages)
        return Message("assistant", call("pure", key=place(key)) if n < 2 else f"done {place(key)}")

    async def update(self, weights):
        return 0

    async def close(self):
        pass


def test_trajectories_without_tokens_fork_too():
    collector = AgentCollector(
        ToolCompose([pure], parser="hermes"),
        engine=Silent(),
        tasks=numbered_tasks(1),
        branching=Branching(at=(1,)),
    )
    found = trajectories_of(collector)
    assert [one.answer for one in found] == ["done 0", "done 0/1"]
    assert [one.forks[0].n_tokens for one in found] == [0, 0]


def test_a_branch_of_a_chat_that_is_too_long_is_truncated_behind_the_messages_before_the_fork():
    asked = collections.defaultdict(list)

    class Short(Silent):
        async def chat(self, messages, *, key, **more):
            asked[place(key)].append([message["role"] for message in messages])
            if place(key) == "0/1":
                raise ContextExceeded("too many tokens")
            return await super().chat(messages, key=key, **more)

    collector = AgentCollector(
        ToolCompose([pure], parser="hermes"),
        engine=Short(),
        tasks=numbered_tasks(1),
        branching=Branching(at=(1,)),
    )
    first, branch = trajectories_of(collector)
    assert (first.reason, branch.reason, branch.truncated) == ("no_calls", "max_trajectory_tokens", True)
    assert asked["0/1"] == [["user", "assistant", "tool"]] == asked["0"][1:2]
    assert branch.messages[:3] == first.messages[:3]


def unbranched(**more):
    return collector_of(WildEngine(looks(1)), branching=Branching(), **more)


class Closed(Toolset):
    """A world that cannot be copied."""

    async def setup(self):
        return [pure]

    async def teardown(self):
        pass

    @contextlib.asynccontextmanager
    async def session(self, trajectory):
        yield {}


def test_contradictions_are_refused_at_construction():
    from torchrl_agentic.tools import Truncated

    with pytest.raises(TypeError, match="'look' cannot fork, since CountedTool has sessions and defines no"):
        unbranched(tools=[CountedTool()])
    with pytest.raises(TypeError, match="'look' cannot fork"):
        unbranched(tools=[Truncated(CountedTool(), max_chars=50)])
    compose = ToolCompose([])
    compose.add_toolset(Closed())
    with pytest.raises(TypeError, match="toolset 'Closed' cannot fork"):
        unbranched(transforms=compose, tokenizer=tokenizer())
    users = Compose(ToolCompose([pure]), UserSimulator(ScriptedUser(["yes"])))
    with pytest.raises(TypeError, match="simulated users have no branch"):
        unbranched(transforms=users, tokenizer=tokenizer())
    with pytest.raises(TypeError, match="branching is a Branching; got int"):
        collector_of(WildEngine(looks(1)), tools=[pure], branching=3)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"at": ()}, TypeError, "tuple of numbers"),
        ({"at": [1]}, TypeError, "tuple of numbers"),
        ({"at": (0,)}, ValueError, "each number in at"),
        ({"at": (2, 1)}, ValueError, "ascend"),
        ({"at": (1, 1)}, ValueError, "ascend"),
        ({"at": lambda point: True}, ValueError, "pass max_leaves"),
        ({"max_leaves": 1}, ValueError, "max_leaves"),
        ({"width": 1}, ValueError, "width"),
    ],
)
def test_options_out_of_range_are_refused(options, error, words):
    with pytest.raises(error, match=words):
        Branching(**options)


def test_a_function_that_returns_no_bool_ends_the_collector():
    collector = tree_of(branching=Branching(at=lambda point: 2, max_leaves=4), on_failure="raise")
    with pytest.raises(CollectorError, match="returns True or False; got 2"):
        trajectories_of(collector)


def whole(paths):
    """Return whether the branches of each fork are all there."""
    nodes = {path[:size] for path in paths for size in range(1, len(path) + 1)}
    children = collections.defaultdict(set)
    for node in nodes:
        children[node[:-1]].add(node[-1])
    return all(
        found == set(range(len(found))) and len(found) > (node != ()) for node, found in children.items()
    )


@pytest.mark.parametrize("chunk", range(4))
def test_trees_are_whole_and_nothing_is_left_whatever_happens(chunk, caplog):
    caplog.set_level(logging.CRITICAL)

    async def schedule(seed):
        rng = random.Random(seed)
        looked = Branched(lambda key: asyncio.sleep(rng.choice([0.0, 0.5, 5.0])))
        fault = rng.choice([0.0, 0.05, 0.1])

        def fate(key):
            return rng.choice(["abort", "lost", "broken", "hang"]) if rng.random() < fault else "ok"

        async def reward(trajectory):
            await asyncio.sleep(rng.random())
            if rng.random() < fault:
                raise InfrastructureError("lost")
            return rng.random()

        engine = WildEngine(looks(3), fate=fate, delay=lambda key: rng.random() / 10)
        tools = [looked] if rng.random() < 0.6 else [tool(look)]
        collector = collector_of(
            engine,
            tools=tools,
            tasks=rng.choice([1, 3]),
            group_size=rng.choice([1, 2]),
            max_in_flight=rng.choice([1, 3, "auto"]),
            max_staleness=rng.choice([0, 1, None]),
            branching=Branching(
                at=rng.choice([(1,), (1, 2)]), width=rng.choice([2, 3]), max_leaves=rng.choice([None, 4])
            ),
            reward=reward,
            trajectory_timeout=60.0,
            engine_retries=rng.choice([0, 1]),
            on_failure=rng.choice(["replace", "drop"]),
            speculate=rng.random() < 0.3,
        )
        batches = []

        async def consume():
            with contextlib.suppress(CollectorError):
                async for batch in collector:
                    batches.append(batch)
                    for _ in range(rng.choice([0, 1, 2])):
                        await collector.update_weights()

        async with asyncio.timeout(LONG_S):
            consumer = asyncio.create_task(consume())
            if rng.random() < 0.4:
                await asyncio.wait({consumer}, timeout=rng.random() * 20)
                if rng.random() < 0.5:
                    consumer.cancel()
                    await asyncio.wait({consumer})
            else:
                await asyncio.wait({consumer})
            await collector.aclose()
            await asyncio.wait({consumer})
        if not consumer.cancelled():
            consumer.result()
        for _ in range(20):
            await asyncio.sleep(0)
        check_nothing_left(collector, engine, looked)
        for batch in batches:
            rows = [row for row in batch.unbind(0) if row["next", "done"].item()]
            groups = collections.defaultdict(list)
            for row in rows:
                path = tuple(map(int, row["collector", "path"].split(".")))
                groups[row["collector", "group"].item()].append(path)
            assert all(whole(paths) and len(set(paths)) == len(paths) for paths in groups.values())
        return len(batches)

    async def schedules():
        return sum([await schedule(seed) for seed in range(chunk, 60, 4)])

    assert run_skipping(schedules()) > 4


def look(key: str) -> str:
    """Look something up.

    Args:
        key: What.
    """
    return f"found {key}"


async def test_trees_that_had_begun_begin_again_in_a_run_that_is_resumed():
    asked = asyncio.Event()

    async def act(key):
        if "#2" in key:  # behind the fork
            asked.set()
            await asyncio.Event().wait()

    options = {"tasks": numbered_tasks(2), "group_size": 1, "branching": Branching(at=(1,)), "name": "c"}
    async with tree_of(tools=[Branched(act)], **options) as first:
        waiting = asyncio.create_task(anext(aiter(first)))
        await asked.wait()
        state = first.state_dict()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    begun = {group["task"] for group in state["groups"]}
    assert begun
    names = []
    async with tree_of(**options) as second:
        second.load_state_dict(state)
        async for batch in second:
            names += sorted(names_of(batch))
    (suffix,) = {name.partition("+")[2] for name in names}
    assert suffix
    assert {name.partition("+")[0] for name in names} == {
        f"t{task}/{task}.0{place}@c" for task in range(2) for place in ("", "/1")
    }
    assert len(names) == 2 * 3  # each task once: a segment before the fork, and two behind it
