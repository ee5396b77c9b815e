"""Toolsets with a world: what several tools share in one trajectory, in the order of their calls."""

import asyncio
import contextlib
import json

import pytest
from helpers.chat_envs import advance, begin, call, chat_env, flags, results, step
from helpers.model_families import FAMILIES
from helpers.token_rollouts import sample
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch.utils.data import DataLoader
from torchrl.envs.llm import DatasetChatEnv

from torchrl_agentic import (
    EndTrajectory,
    Injected,
    Tool,
    ToolCompose,
    Toolset,
    TurnTokenizer,
    collate_rows,
    tool,
)
from torchrl_agentic.dispatch import Dispatcher
from torchrl_agentic.dispatch.event_loop import run
from torchrl_agentic.messages import ParsedCall
from torchrl_agentic.testing import call_tool
from torchrl_agentic.tools import Renamed
from torchrl_agentic.tools.base import Effects


class Ledger(Toolset):
    """An account per trajectory; records openings and closings with their rows."""

    name = "account"

    def __init__(self):
        self.diary = []
        self.more = []

    async def setup(self):
        @tool
        async def add(n: int, world: Injected[list]) -> int:
            """Add a number."""
            await asyncio.sleep(0)
            world.append(n)
            return sum(world)

        @tool
        def double(world: Injected[list]) -> int:
            """Double the last number."""
            world.append(world[-1] if world else 0)
            return sum(world)

        @tool(effects=Effects.PURE)
        def free() -> str:
            """Say that it needs no account."""
            return "free"

        return [add, double, free, *self.more]

    async def teardown(self):
        self.diary.append(("teardown",))

    @contextlib.asynccontextmanager
    async def session(self, trajectory, row):
        task = asyncio.current_task()
        self.diary.append(("open", trajectory, row.columns.get("start")))
        world = [row.columns["start"]] if "start" in row.columns else []
        yield world
        assert asyncio.current_task() is task
        self.diary.append(("close", trajectory, tuple(world)))

    @contextlib.asynccontextmanager
    async def branch(self, world, trajectory):
        yield [*world]

    async def final_reward(self, world):
        return float(sum(world))


def env_of(toolset, rows=2, *more):
    compose = ToolCompose([])
    compose.add_toolset(toolset)
    return chat_env((rows,), compose, *more)


def test_all_tools_of_a_toolset_share_the_world_of_their_trajectory():
    ledger = Ledger()
    env = env_of(ledger)
    td = advance(env, begin(env), call("add", n=1) + call("double"), call("add", n=5))
    td = advance(env, td, call("double"), "nothing")
    assert results(td) == [["1", "2", "3"], ["5"]]
    assert [entry[0] for entry in ledger.diary] == ["open", "open"]
    env.close()
    closed = sorted(entry[2] for entry in ledger.diary if entry[0] == "close")
    assert closed == [(1, 1, 1), (5,)]
    assert ledger.diary[-1] == ("teardown",)


def test_world_closes_once_at_the_end_of_its_trajectory_and_returns_its_reward():
    ledger = Ledger()
    env = env_of(ledger, 2, EndTrajectory(when_no_calls=True))
    td = advance(env, begin(env), call("add", n=3), call("add", n=4))
    td = step(env, td, "end", call("add", n=1))["next"]
    assert [entry[2] for entry in ledger.diary if entry[0] == "close"] == [(3,)]
    assert flags(td, "trajectory_reward") == [3.0, 0.0]
    env.close()
    assert len([entry for entry in ledger.diary if entry[0] == "close"]) == 2


def test_a_trajectory_that_calls_none_of_its_tools_opens_no_world():
    ledger = Ledger()
    env = env_of(ledger)
    step(env, begin(env), "hello", "hello")
    env.close()
    assert ledger.diary == [("teardown",)]


def test_world_is_opened_with_the_data_of_its_row():
    ledger = Ledger()
    compose = ToolCompose([])
    compose.add_toolset(ledger)
    loader = DataLoader([{"query": "q", "start": n} for n in (7, 8)], collate_fn=collate_rows, batch_size=2)
    env = DatasetChatEnv.from_dataloader(loader, batch_size=(2,))
    env.append_transform(compose)
    td = step(env, env.reset(), call("double"), call("add", n=1))["next"]
    assert results(td) == [["14"], ["9"]]
    env.close()


def test_a_session_need_not_take_the_row():
    class Plain(Ledger):
        @contextlib.asynccontextmanager
        async def session(self, trajectory):
            yield []

    env = env_of(Plain())
    assert results(step(env, begin(env), call("add", n=2), "x")["next"]) == [["2"], []]
    env.close()


def test_a_look_alike_of_a_toolset_has_a_world_too():
    class Look:
        """No `Toolset`, but with all its methods."""

        name, diary, more = "account", [], ()
        setup, teardown, session = Ledger.setup, Ledger.teardown, Ledger.session
        final_reward = Ledger.final_reward

    env = env_of(Look(), 1, EndTrajectory(when_no_calls=True))
    td = advance(env, begin(env), call("add", n=3) + call("double"))
    assert results(td) == [["3", "6"]]
    assert flags(step(env, td, "end")["next"], "trajectory_reward") == [6.0]
    env.close()


def test_a_toolset_of_a_configuration_keeps_its_world(tmp_path, monkeypatch):
    (tmp_path / "worlds_of_a_file.py").write_text(
        "import contextlib\n"
        "from torchrl_agentic import Injected, Toolset\n"
        "def look(world: Injected[str]) -> str:\n"
        "    'Look.'\n"
        "    return world\n"
        "class World(Toolset):\n"
        "    name = 'w'\n"
        "    async def setup(self): return [look]\n"
        "    async def teardown(self): pass\n"
        "    @contextlib.asynccontextmanager\n"
        "    async def session(self, trajectory): yield 'all of it'\n"
        "    async def final_reward(self, world): return 2.0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = tmp_path / "tools.yaml"
    config.write_text("tools:\n  - {class_name: worlds_of_a_file.World, config: {}}\n")
    env = chat_env((1,), ToolCompose.from_config(config), EndTrajectory(when_no_calls=True))
    td = advance(env, begin(env), call("look"))
    assert results(td) == [["all of it"]]
    assert flags(step(env, td, "end")["next"], "trajectory_reward") == [2.0]
    env.close()


def test_a_selection_of_the_data_set_is_not_late_where_others_write_into_the_first_step():
    compose = ToolCompose([])
    compose.add_toolset(Ledger())
    tokenizer = FAMILIES["qwen2_5"].tokenizer()
    rows = [{"query": "q", "start": 1, "tool_selection": ["add"]}]
    env = DatasetChatEnv.from_dataloader(DataLoader(rows, collate_fn=collate_rows), batch_size=(1,))
    for transform in (compose, TurnTokenizer(tokenizer, tools=compose.tools)):
        env.append_transform(transform)
    td = sample(env.reset(), tokenizer, [call("add", n=2)])
    td.set_non_tensor("policy_version", "v1")
    assert results(env.step(td)["next"]) == [["3"]]
    env.close()


def test_columns_that_are_given_by_hand_reach_the_world():
    env = env_of(Ledger(), 1)
    td = begin(env)
    td.set_non_tensor("start", 7)
    assert results(step(env, td, call("double"))["next"]) == [["14"]]
    env.close()


def test_call_tool_opens_the_world():
    assert call_tool(Ledger(), {"n": 4}, name="add").text == "4"


def test_world_that_opens_too_late_for_its_call_has_a_reward():
    class Late(Ledger):
        @contextlib.asynccontextmanager
        async def session(self, trajectory):
            await may_open.wait()
            yield [100]

    may_open = asyncio.Event()
    compose = ToolCompose([], per_call_timeout=0.05)
    compose.add_toolset(Late())
    env = chat_env((1,), compose, EndTrajectory(when_no_calls=True))
    td = advance(env, begin(env), call("add", n=1))
    assert "did not finish" in results(td)[0][0]
    run(set_event(may_open))
    assert flags(step(env, td, "end")["next"], "trajectory_reward") == [100.0]
    env.close()


async def set_event(event):
    event.set()


def test_branch_continues_with_a_copy_of_the_world():
    ledger = Ledger()
    env = env_of(ledger)
    td = advance(env, begin(env), call("add", n=1), "x")
    env.transform.branch(0, [1])
    td = step(env, td, call("add", n=10), call("add", n=100))["next"]
    assert [row[-1] for row in results(td)] == ["11", "101"]
    env.close()


def test_worlds_of_two_environments_have_different_trajectory_names():
    """The names of trajectories are unique in a process: one dict of worlds serves several environments."""
    worlds = {}

    class Named(Tool):
        name = "visit"

        @contextlib.asynccontextmanager
        async def session(self, trajectory):
            live = Named()
            live.world = worlds.setdefault(trajectory, [])
            yield live

        async def run(self, args, ctx):
            self.world.append(1)
            return len(self.world)

    for env in [chat_env((2,), ToolCompose([Named()])) for _ in range(2)]:
        td = step(env, begin(env), call("visit"), call("visit"))["next"]
        assert results(td) == [["1"], ["1"]]
        td = step(env, begin(env), call("visit"), call("visit"))["next"]
        assert results(td) == [["1"], ["1"]]
        env.close()
    assert len(worlds) == 8


def test_a_wrapper_around_a_tool_of_the_toolset_keeps_its_order():
    @tool
    def last(world: Injected[list]) -> int:
        """Return the last number."""
        return world[-1]

    signalled = asyncio.Event()

    @tool
    async def wait(world: Injected[list]) -> str:
        """Wait for the signal."""
        await signalled.wait()
        return "signalled"

    @tool(effects=Effects.PURE)
    async def signal() -> str:
        """Give the signal, without waiting for a call that uses the account."""
        signalled.set()
        return "given"

    ledger = Ledger()
    ledger.more = [Renamed(last, "latest"), wait, signal]
    compose = ToolCompose([])
    compose.add_toolset(ledger)
    env = chat_env((1,), compose)
    td = advance(env, begin(env), 2 * (call("add", n=1) + call("latest") + call("add", n=2) + call("latest")))
    assert results(td) == [["1", "1", "3", "2", "4", "1", "6", "2"]]
    td = advance(env, td, call("wait") + call("signal"))
    assert results(td)[0][-2:] == ["signalled", "given"]
    env.close()


class Steps(Toolset):
    """A world of one list that tools change in ways that do not commute, after a moment or at once."""

    def __init__(self):
        self.ends = {}

    async def setup(self):
        def make(name, change):
            async def run(n: int, waits: int, world: Injected[list]) -> str:
                seen = list(world)
                for _ in range(waits):
                    await asyncio.sleep(0)
                change(world, n, seen)
                return json.dumps(world)

            run.__name__, run.__doc__ = name, f"{name}."
            return tool(run)

        return [make(name, change) for name, change in CHANGES.items()]

    async def teardown(self):
        pass

    @contextlib.asynccontextmanager
    async def session(self, trajectory):
        world = []
        yield world
        self.ends[trajectory] = world


CHANGES = {
    "push": lambda world, n, seen: world.append(n),
    "reverse": lambda world, n, seen: world.reverse(),
    "rewrite": lambda world, n, seen: world.__setitem__(slice(None), [*seen, -n]),
    "drop": lambda world, n, seen: world.__delitem__(slice(n % 3, n % 3 + 1)),
}
calls = st.tuples(st.sampled_from(sorted(CHANGES)), st.integers(0, 9), st.integers(0, 3))
programs = st.lists(st.lists(st.lists(calls, max_size=5), min_size=1, max_size=3), min_size=1, max_size=3)


@settings(deadline=None)
@given(programs=programs)
def test_the_world_ends_as_if_the_calls_had_run_one_by_one_in_their_order(programs):
    """programs: per trajectory its turns, per turn its calls. All trajectories of a turn run at once."""
    toolset = Steps()

    async def run():
        dispatcher = Dispatcher()
        for one in await toolset.setup():
            dispatcher.add(one, toolset=toolset)
        sessions = [dispatcher.session(str(number)) for number in range(len(programs))]
        for turn in range(max(map(len, programs))):
            batch = [
                (session, [ParsedCall(name, {"n": n, "waits": waits}, f"{turn}.{index}")
                           for index, (name, n, waits) in enumerate(turns[turn])], None)
                for session, turns in zip(sessions, programs, strict=True) if turn < len(turns)
            ]  # fmt: skip
            await dispatcher.run(batch)
        await dispatcher.close()

    asyncio.run(run())
    for number, turns in enumerate(programs):
        expected = []
        for name, n, _ in (one for turn in turns for one in turn):
            CHANGES[name](expected, n, list(expected))
        assert toolset.ends.get(str(number), []) == expected


def select_env(selection, **options):
    def hidden(n: int) -> int:
        """Return a number."""
        return n

    def shown(n: int) -> int:
        """Return a number too."""
        return n

    rows = [{"query": "q"} if selection is None else {"query": "q", "tool_selection": selection}]
    env = DatasetChatEnv.from_dataloader(DataLoader(rows, collate_fn=collate_rows), batch_size=(1,))
    env.append_transform(ToolCompose([hidden, shown], **options))
    return env


BOTH = call("hidden", n=1) + call("shown", n=2)


def statuses(env, turns=4):
    """Of each turn, which of the two calls ran."""
    td, found = env.reset(), []
    for _ in range(turns):
        td = advance(env, td, BOTH)
        found.append([text.isdigit() for text in results(td)[0][-2:]])
    env.close()
    return found


def test_a_row_gets_other_tools_from_a_later_turn_on():
    env = select_env({"0": ["shown"], "2": ["shown", "hidden"]})
    assert statuses(env) == [[False, True], [False, True], [True, True], [True, True]]


def test_a_callback_chooses_the_tools_of_each_turn_before_the_row():
    seen = []

    def choose(trajectory, turn, row):
        seen.append((trajectory, turn, row.columns.get("query")))
        return {1: ["hidden"], 2: []}.get(turn)

    env = select_env(["shown"], tool_selection=choose)
    assert statuses(env) == [[False, True], [True, False], [False, False], [False, True]]
    assert [turn for _, turn, _ in seen] == [0, 1, 2, 3]
    assert len({trajectory for trajectory, _, _ in seen}) == 1


def test_failing_callback_does_not_lose_a_step(caplog):
    env = select_env(None, tool_selection=lambda trajectory, turn, row: ["shown", "showm"])
    assert statuses(env, 1) == [[False, True]]
    assert "tool_selection names the tool 'showm', which does not exist" in caplog.text
    env = select_env(["hidden"], tool_selection=lambda trajectory, turn, row: 1 / 0)
    assert statuses(env, 1) == [[True, False]]
    assert "division by zero" in caplog.text


@pytest.mark.parametrize("selection", ["shown", {"first": ["shown"]}, {"0": "shown"}, 3])
def test_a_selection_of_another_shape_is_refused_at_the_reset(selection):
    env = select_env(selection)
    with pytest.raises(ValueError, match=r"expected tool_selection as a list of tool names, or as a mapping"):
        env.reset()


def by_hand(env, **columns):
    td = TensorDict({"query": ["q"]}, batch_size=(1,))
    for name, value in columns.items():
        td.set_non_tensor(name, value)
    return env.reset(td)


def test_columns_passed_to_reset_reach_the_tools():
    def shown(n: int, start: Injected[int] = 0) -> int:
        """Return a number."""
        return n + start

    @tool
    def free() -> str:
        """Say something."""
        return "free"

    env = chat_env((1,), ToolCompose([shown, free]))
    kwargs = {"shown": {"execute_kwargs": {"start": 5}}}
    td = by_hand(env, tools_kwargs=kwargs, tool_selection=["shown"])
    td = step(env, td, call("shown", n=2) + call("free"))["next"]
    assert results(td)[0][0] == "7"
    assert "no tool named 'free'" in results(td)[0][1]
    env.close()


def test_columns_passed_after_the_reset_are_an_error():
    class Eager(Tool):
        name, open_at_reset = "eager", True

        async def run(self, args, ctx):
            return "x"

    env = chat_env((1,), ToolCompose([Eager()]))
    td = by_hand(env, tools_kwargs={"eager": {"create_kwargs": {"start": 7}}})
    with pytest.raises(ValueError, match=r"create_kwargs of 'eager' came with env.reset"):
        step(env, td, "hello")
    env = chat_env((1,), ToolCompose([Eager()]))
    with pytest.raises(ValueError, match=r"tools_kwargs names the tool 'eagre'.*did you mean 'eager'"):
        step(env, by_hand(env, tools_kwargs={"eagre": {"create_kwargs": {}}}), "hello")
