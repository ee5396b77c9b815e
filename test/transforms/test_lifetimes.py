"""Sessions close when their trajectory ends for any reason, and when the environment is dropped."""

import contextlib
import gc
import threading

import pytest
from helpers.chat_envs import begin, call, chat_env, dataset_env, step
from helpers.limit import limit
from torchrl.envs import StepCounter

from torchrl_agentic import EndTrajectory, Tool, ToolCompose
from torchrl_agentic.testing import ScriptedPolicy


class Held(Tool):
    """Records when it is opened and closed."""

    name, description = "held", "Hold something open."

    def __init__(self) -> None:
        self.events: list[str] = []
        self.closed = threading.Event()

    @contextlib.asynccontextmanager
    async def session(self, trajectory):
        self.events.append("open")
        try:
            yield self
        finally:
            self.events.append("close")
            self.closed.set()

    async def run(self, args, ctx):
        return "ok"


def test_a_row_that_end_trajectory_ends_is_closed_at_once():
    held = Held()
    env = chat_env((1,), ToolCompose([held]), EndTrajectory(max_turns=1))
    assert step(env, begin(env), call("held"))["next", "done"].all()
    assert held.events == ["open", "close"]


def test_a_row_that_another_transform_ends_is_closed_before_its_reset():
    held = Held()
    env = dataset_env(1, ToolCompose([held]), StepCounter(1))
    env.step_and_maybe_reset(ScriptedPolicy([[call("held")]])(env.reset()))
    assert held.events == ["open", "close"]


@pytest.mark.parametrize("which", ["original", "clone"])
def test_sessions_of_a_dropped_environment_close_while_another_lives(which):
    held = Held()
    original = ToolCompose([held])
    other = original.clone()
    env = chat_env((1,), original if which == "original" else other)
    step(env, begin(env), call("held"))
    kept = other if which == "original" else original
    del env, original, other
    gc.collect()
    assert held.closed.wait(limit(5))
    assert len(kept) == 1


def test_a_toolset_that_the_original_has_closed_is_opened_again_by_a_clone():
    from torchrl_agentic import Toolset, tool

    events: list[str] = []

    class Set(Toolset):
        async def setup(self):
            events.append("open")

            @tool
            async def ask() -> str:
                return events[-1]

            return [ask]

        async def teardown(self):
            events.append("close")

    original = ToolCompose([])
    original.add_toolset(Set())
    env = chat_env((1,), original.clone())
    original.close()
    td = step(env, begin(env), call("ask"))
    assert td["next", "history"].prompt.content[0][-1] == "open"


def test_nested_dataset_answers_are_hidden_too():
    from tensordict import TensorDict

    seen = []

    class Looker(Tool):
        name, description, wants_state = "look", "Look.", True

        async def run(self, args, ctx):
            seen.append(set(ctx.state.keys(True)))
            return "ok"

    env = chat_env((1,), ToolCompose([Looker()], pass_state_to_tools=True))
    td = begin(env)
    td["data"] = TensorDict({"answer": 1, "level": 2}).expand(1)
    step(env, td, call("look"))
    assert ("data", "level") in seen[0]
    assert ("data", "answer") not in seen[0]


def test_a_flat_script_is_refused():
    with pytest.raises(TypeError, match="list of turns per row"):
        ScriptedPolicy(["hello"])
