"""`failure_hook`: each dropped task is reported with its error and conversation; others go on."""

import pytest
from helpers.collector_worlds import call, collector_of, drained, tasks_of, tokenizer

from torchrl_agentic import Task, tool
from torchrl_agentic.collectors import CollectorError
from torchrl_agentic.engines import ScriptedEngine
from torchrl_agentic.testing import run_skipping

GOOD = {"query": "hi"}


@tool
def look(key: str) -> str:
    """Look something up.

    Args:
        key: The key.
    """
    return key


def run(**options):
    """Return the batches and the failed tasks of a collector on the skip clock."""
    failed = []

    async def main():
        engine = ScriptedEngine(lambda key, turn, ids: "end" if turn else call("look", key="k"), tokenizer())
        given = {"failure_hook": failed.append, "on_failure": "drop", **options}
        return await drained(collector_of(engine, tools=[look], **given))

    return run_skipping(main()), failed


def test_a_dropped_task_is_reported_with_its_error_and_its_conversation_so_far():
    def reward(trajectory):
        if trajectory.task.name == "1":
            raise LookupError("no such key")
        return 1.0

    batches, (failed,) = run(tasks=[GOOD, GOOD, GOOD], reward=reward)
    assert tasks_of(batches) == ["0", "2"]
    assert (failed.number, failed.task.name, failed.kind) == (1, "1", "reward")
    assert "no such key" in str(failed.error)
    assert failed.trajectory.reason == "failed"
    assert [message.role for message in failed.trajectory.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert len(failed.trajectory.turns) == 2


def test_a_task_is_reported_once_its_replacements_are_used_up():
    tried = []

    def reward(trajectory):
        tried.append(trajectory.name)
        raise LookupError

    batches, failed = run(tasks=[GOOD], reward=reward, on_failure="replace", max_replacements=2)
    assert (batches, len(tried), len(failed)) == ([], 3, 1)


def test_rows_that_are_no_tasks_are_reported_without_one():
    batches, failed = run(tasks=[{}, GOOD])
    assert tasks_of(batches) == ["1"]
    assert [(one.number, one.task, one.kind, one.trajectory) for one in failed] == [(0, None, "task", None)]


def test_a_collector_without_a_bound_goes_on_however_many_tasks_are_dropped():
    def reward(trajectory):
        if trajectory.task.name != "149":
            raise LookupError
        return 1.0

    batches, failed = run(
        tasks=[Task(str(n), [{"role": "user", "content": "q"}]) for n in range(150)],
        reward=reward,
        max_failures=None,
    )
    assert (tasks_of(batches), len(failed)) == (["149"], 149)


def test_an_exception_of_the_hook_ends_the_collector():
    def hook(failed):
        raise ZeroDivisionError("mine")

    def reward(trajectory):
        raise LookupError

    with pytest.raises(CollectorError, match="mine"):
        run(tasks=[GOOD], reward=reward, failure_hook=hook)
    with pytest.raises(CollectorError, match="mine"):
        run(tasks=[{}], failure_hook=hook)


def test_a_hook_that_is_no_function_is_refused():
    with pytest.raises(TypeError, match="failure_hook is a function of a FailedTask; got int"):
        run(tasks=[], failure_hook=3)
