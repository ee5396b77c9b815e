"""`rollout` over the tiny model and scripts: every task is answered once, in the order of the tasks."""

import asyncio

import pytest
from torchrl.envs import Compose

from torchrl_agentic import EndTrajectory, PythonTool, ToolCompose
from torchrl_agentic.dispatch import event_loop
from torchrl_agentic.engines import Engine, ScriptedEngine, TransformersEngine
from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.rollout import Task, rollout, tasks_of
from torchrl_agentic.testing import load_tiny, tiny_questions

SYSTEM = "You solve problems with a Python tool."


@pytest.fixture(scope="module")
def tiny():
    return load_tiny()


class Counting(Engine):
    """Counts the requests to another engine."""

    def __init__(self, engine):
        self.engine, self.keys = engine, []
        self.version, self.max_concurrent = engine.version, engine.max_concurrent

    async def sample(self, ids, *, max_tokens, key, on_ids=None):
        self.keys.append(key)
        return await self.engine.sample(ids, max_tokens=max_tokens, key=key, on_ids=on_ids)

    async def update(self, weights):
        return await self.engine.update(weights)

    async def close(self):
        await self.engine.close()


def test_trajectories_that_have_ended_are_not_asked_again(tiny):
    model, tokenizer = tiny
    engine = Counting(TransformersEngine(model, tokenizer, temperature=0))
    asked = tiny_questions(12, seed=4)  # two of which take two calls in turn
    transforms = Compose(ToolCompose([PythonTool()]), EndTrajectory(max_turns=4, when_no_calls=True))
    found = rollout(transforms, engine, tokenizer, tasks_of(asked, SYSTEM), max_turns=4, max_new_tokens=64)
    event_loop.run(engine.close())
    assert [one.task.name for one in found] == [str(number) for number in range(12)]
    assert [one.task.answer for one in found] == [one["answer"] for one in asked]
    assert len(engine.keys) == sum(len(one.turns) for one in found)
    assert len(set(engine.keys)) == 12
    assert all(one.has_ended for one in found)
    assert not any(one.token_drift for one in found)
    assert not any(one.ledger.mask[-1] for one in found), "the boundary behind the last answer"


def test_a_crash_of_the_engine_or_the_tasks_is_raised(tiny):
    _, tokenizer = tiny

    def script(key, turn, ids):
        raise ZeroDivisionError("of the engine")

    def broken():
        yield {"query": "q"}
        raise LookupError("of the tasks")

    engine = ScriptedEngine(script, tokenizer)
    with pytest.raises(InfrastructureError, match="of the engine"):
        rollout(ToolCompose([PythonTool()]), engine, tokenizer, tasks_of(["q"]))
    with pytest.raises(LookupError, match="of the tasks"):
        rollout(ToolCompose([PythonTool()]), ScriptedEngine([["a"]], tokenizer), tokenizer, broken())


def test_a_rollout_works_inside_a_running_event_loop(tiny):
    _, tokenizer = tiny
    engine = ScriptedEngine([["one"], ["two"]], tokenizer)

    async def main():
        return rollout(ToolCompose([PythonTool()]), engine, tokenizer, tasks_of(["q", "r"]))

    assert [one.answer for one in asyncio.run(main())] == ["one", "two"]


def test_results_come_in_the_order_of_the_tasks_whatever_ends_first(tiny):
    _, tokenizer = tiny
    ended, last = [], asyncio.Event()

    async def reward(trajectory):
        if trajectory.task.name == "0":
            await last.wait()
        if trajectory.task.name == "2":
            last.set()
        ended.append(trajectory.task.name)
        return 0.0

    engine = ScriptedEngine(lambda key, turn, ids: key.partition("/")[0], tokenizer)
    tasks = (task for task in tasks_of(["q", "r", "s"]))
    found = rollout(ToolCompose([PythonTool()]), engine, tokenizer, tasks, reward=reward)
    assert ended[-1] == "0"
    assert [one.answer for one in found] == ["0", "1", "2"]


def test_a_task_bounds_its_own_turns(tiny):
    _, tokenizer = tiny
    say = '<tool_call>\n{"name": "python", "arguments": {"code": "1"}}\n</tool_call>'
    engine = ScriptedEngine(lambda key, turn, ids: say, tokenizer)
    message = [{"role": "user", "content": "q"}]
    tasks = [Task("a", message, max_turns=1), Task("b", message), Task("c", message, max_turns=9)]
    found = rollout(ToolCompose([PythonTool()]), engine, tokenizer, tasks, max_turns=3)
    assert [(len(one.turns), one.reason) for one in found] == [(1, "max_turns")] + 2 * [(3, "max_turns")]
    with pytest.raises(ValueError, match="max_turns"):
        rollout(ToolCompose([]), engine, tokenizer, [Task("a", message, max_turns=0)])
