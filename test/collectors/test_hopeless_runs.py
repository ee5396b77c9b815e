"""A mistake that every trajectory makes, and an engine that is gone, end a run soon and are named first."""

import asyncio
import contextlib
import logging
import math
from collections import Counter
from dataclasses import replace

import pytest
from helpers.collector_worlds import (
    CountedTool,
    WildEngine,
    collector_of,
    drained,
    looks,
    numbered_tasks,
    tasks_of,
    tokenizer,
)
from torchrl.envs import Compose

from torchrl_agentic import InvalidTask, ToolCompose, TurnTokenizer, UserSimulator, evaluate
from torchrl_agentic.collectors import CollectorError, Task, TaskStream
from torchrl_agentic.dispatch.user_code import is_users_file
from torchrl_agentic.engines import Engine, ScriptedEngine
from torchrl_agentic.engines.base import EngineUnusable
from torchrl_agentic.errors import InfrastructureError, UserFailed
from torchrl_agentic.interactions import Interaction
from torchrl_agentic.testing import load_tiny, run_skipping

RIGHT = {"tasks": 500, "group_size": 8, "groups_per_batch": 4, "max_in_flight": 64}


def run(reward=lambda one: 1.0, *, engine=None, **more):
    """Return the batches of a collector on the skip clock."""

    async def main():
        collector = collector_of(
            engine or WildEngine(looks(1)),
            **{"tools": [CountedTool()], "reward": reward, "max_staleness": None, **more},
        )
        return await drained(collector)

    return run_skipping(main())


def lines_of(caplog):
    """Return the log of the package as texts."""
    return [one.getMessage() for one in caplog.records if one.name.startswith("torchrl_agentic")]


@pytest.mark.parametrize("on_failure", ["replace", "drop"])
def test_a_reward_that_always_raises_ends_the_run_soon_and_its_line_is_the_first_of_the_log(
    on_failure, caplog
):
    calls = []

    def reward(trajectory):
        calls.append(trajectory.name)
        return trajectory.final_text  # no such attribute

    with pytest.raises(CollectorError) as caught:
        run(reward, on_failure=on_failure, **RIGHT)
    place = f"{__file__}:{reward.__code__.co_firstlineno + 2}, in reward: AttributeError: "
    assert place in str(caught.value)
    assert "16 trajectories failed with AttributeError, and none succeeded" in str(caught.value)
    assert isinstance(caught.value.__cause__.__cause__, AttributeError)
    assert len(calls) <= 16 + RIGHT["max_in_flight"]
    first, *others = lines_of(caplog)
    assert first.startswith(place)
    assert "return trajectory.final_text  # no such attribute" in first
    assert f"{ToolCompose.__module__}" not in first
    assert len(others) <= 8


class Guest(Interaction):
    """A simulated user that raises in one of its methods, or returns no number as its score."""

    name = "guest"

    def __init__(self, place):
        self.place = place

    @contextlib.asynccontextmanager
    async def session(self, trajectory, **kwargs):
        self.visit("session")
        yield self

    async def respond(self, messages):
        self.visit("respond")

    async def score(self, messages):
        self.visit("score")
        return math.nan

    def visit(self, place):
        if place == self.place:
            raise LookupError(f"no {place}")


@pytest.mark.parametrize("place", ["session", "respond", "score", "number"])
@pytest.mark.parametrize(
    ("on_failure", "why"), [("raise", "on_failure is 'raise'"), ("drop", "all groups were dropped")]
)
def test_what_a_simulated_user_raises_is_the_cause_and_its_line_is_in_error_and_log(
    place, on_failure, why, caplog
):
    transforms = Compose(ToolCompose([]), UserSimulator(Guest(place)), TurnTokenizer(tokenizer()))
    with pytest.raises(CollectorError, match=f"^the collector ended: {why}. ") as caught:
        run(transforms=transforms, tools=[], tasks=1, on_failure=on_failure)
    failed = caught.value.__cause__
    assert isinstance(failed, UserFailed)
    if place == "number":
        assert isinstance(failed.__cause__, ValueError)
        assert "a user's score must be finite" in str(caught.value)
        return
    line = Guest.visit.__code__.co_firstlineno + 2
    said = f"{__file__}:{line}, in visit: LookupError: no {place}"
    assert said in str(caught.value)
    assert isinstance(failed.__cause__, LookupError)
    assert on_failure == "raise" or any(one.startswith(said) for one in lines_of(caplog))


def test_a_single_type_of_mistake_has_few_lines_and_their_number(caplog):
    def reward(trajectory):
        if int(trajectory.task.name[1:]) % 2:
            raise LookupError(trajectory.task.name)
        return 1.0

    assert len(run(reward, on_failure="drop", tasks=200)) == 100
    lines = lines_of(caplog)
    assert ["(64 such failures so far)" in line for line in lines] == [False] * 6 + [True]
    assert "Traceback" in lines[0]


def test_a_task_that_always_fails_ends_nothing_though_its_whole_group_fails_first():
    def reward(trajectory):
        if trajectory.task.name == "t0":
            raise LookupError
        return 1.0

    batches = run(reward, tasks=4, group_size=16, max_staleness=0)
    assert sorted(set(tasks_of(batches))) == ["t1", "t2", "t3"]


def test_bad_tasks_that_all_fail_before_a_good_one_can_end_end_nothing():
    def tasks():
        for number, task in enumerate(numbered_tasks(100)):
            yield replace(task, data={"tool_selection": ["lok"]}) if number % 3 else task

    batches = run(tasks=tasks(), max_in_flight=40)
    assert len(batches) == 34


def misspelt(place, value):
    """Return tasks of which the one at a place names a tool that does not exist."""
    rows = [{"query": f"q{number}", "answer": "1", "tool_selection": ["look"]} for number in range(5)]
    return [*rows[:place], {**rows[place], **value}, *rows[place + 1 :]]


@pytest.mark.parametrize(
    "value",
    [
        {"tool_selection": ["lok"]},
        {"tool_selection": {"0": ["look"], "3": ["lok"]}},
        {"tool_selection": None, "extra_info": {"tool_selection": ["lok"]}},
        {"tools_kwargs": {"lok": {"create_kwargs": {}}}},
    ],
)
def test_a_tool_that_a_task_misspells_is_named_before_anything_runs(value):
    rows = misspelt(3, value)
    said = r"task 3: tool\w+ names the tool 'lok', which does not exist; tools: look.*'look'"
    for tasks in (rows, tuple(rows), [Task.of(row, number) for number, row in enumerate(rows)]):
        for given in (tasks, TaskStream(tasks)):
            with pytest.raises(ValueError, match=said):
                collector_of(WildEngine(looks(1)), tools=[CountedTool()], tasks=given)
        with pytest.raises(ValueError, match=said):
            evaluate(tasks, [CountedTool()], WildEngine(looks(1)), load_tiny()[1])


def test_a_tool_that_a_row_of_an_iterator_misspells_costs_that_task(caplog):
    batches = run(tasks=iter(misspelt(3, {"tool_selection": ["lok"]})), reward=lambda one: 1.0)
    assert tasks_of(batches) == ["0", "1", "2", "4"]
    assert "tool_selection names the tool 'lok', which does not exist" in caplog.text


def test_tasks_that_are_all_invalid_end_the_run():
    def reward(trajectory):
        raise InvalidTask(f"{trajectory.task.name} has no answer")

    with pytest.raises(CollectorError, match=r"16 trajectories failed with InvalidTask.* has no answer"):
        run(reward, tasks=100)
    with pytest.raises(CollectorError, match=r"16 trajectories failed with (Type|Value|Key)Error.*Task 15"):
        run(tasks=[3] * 100)


def test_the_bound_is_a_matter_of_choice():
    def reward(trajectory):
        raise LookupError

    with pytest.raises(CollectorError, match="100 trajectories failed with LookupError"):
        run(reward, tasks=200, max_failures=100)
    with pytest.raises(ValueError, match="max_failures must be 1 or more"):
        run(max_failures=0)


class Dead(WildEngine):
    """An engine whose requests all fail from some number on."""

    def __init__(self, n_good=0):
        super().__init__(looks(1), delay=lambda key: 1.0)
        self.n_good = n_good
        self.max_concurrent = 4

    async def sample(self, *args, **more):
        self.n_good -= 1
        if self.n_good < 0:
            raise InfrastructureError("connection refused")
        return await super().sample(*args, **more)


@pytest.mark.parametrize("n_good", [0, 40])
def test_an_engine_that_is_gone_ends_the_run_after_two_minutes(n_good, caplog):
    async def main():
        collector = collector_of(
            Dead(n_good), tools=[CountedTool()], tasks=None, group_size=2, reward=lambda one: 1.0
        )
        with pytest.raises(CollectorError, match=r"no request for 12\d s.*connection refused") as caught:
            await drained(collector)
        return caught.value, asyncio.get_running_loop().time()

    error, seconds = run_skipping(main())
    assert isinstance(error.__cause__, EngineUnusable)
    assert isinstance(error.__cause__.__cause__, InfrastructureError)
    assert 120 <= seconds < 150 + 3 * n_good
    assert len(lines_of(caplog)) < 40


@pytest.mark.parametrize("n_failures", [3, 4])
def test_an_engine_is_not_gone_before_a_request_has_used_up_its_tries(n_failures):
    """Each try fails after a minute, so two minutes pass with the third failure."""
    failures = []

    class Slow(WildEngine):
        async def sample(self, *args, **more):
            if len(failures) < n_failures:
                failures.append(await asyncio.sleep(60))
                raise InfrastructureError("no answer within 60 s")
            return await super().sample(*args, **more)

    options = {"engine": Slow(looks(0)), "tasks": 1, "engine_retries": 3}
    if n_failures == 3:
        assert len(run(**options)) == 1
    else:
        with pytest.raises(CollectorError, match=r"no request for 18\d s"):
            run(**options)


def test_an_engine_that_answers_now_and_then_is_not_gone():
    class Flaky(Dead):
        def __init__(self):
            super().__init__()
            self.n_asked = Counter()

        async def sample(self, *args, key, **more):
            self.n_asked[key] += 1
            self.n_good = self.n_asked[key] % 4 == 0  # the others fail
            return await super().sample(*args, key=key, **more)

    assert len(run(engine=Flaky(), tasks=100, max_in_flight=4)) == 100


def test_an_evaluation_keeps_what_it_has_when_its_engine_is_gone(monkeypatch):
    monkeypatch.setattr("torchrl_agentic.collectors.requests.OUTAGE_S", 0.2)
    tokenizer = load_tiny()[1]
    scripted = ScriptedEngine(lambda *_: "It is 1.", tokenizer)

    class Gone(Engine):
        version, max_concurrent, context_length = 0, 1, 4096

        def __init__(self, n_good):
            self.n_good = n_good

        async def sample(self, *args, **more):
            self.n_good -= 1
            if self.n_good < 0:
                raise InfrastructureError("connection refused")
            return await scripted.sample(*args, **more)

        async def update(self, weights):
            return 0

        async def close(self):
            pass

    tasks = [{"query": f"q{number}", "answer": "1"} for number in range(20)]
    result = evaluate(tasks, [], Gone(3), tokenizer, max_in_flight=1)
    assert (len(result.samples), result.stopped) == (3, "engine")
    assert "connection refused" in result.error
    with pytest.raises(EngineUnusable, match="connection refused"):
        evaluate(tasks, [], Gone(0), tokenizer, max_in_flight=1)


@pytest.mark.parametrize(
    ("name", "is_users"),
    [
        ("/home/me/train.py", True),
        ("/tmp/ipykernel_7/123.py", True),
        ("<stdin>", True),
        ("<frozen importlib._bootstrap>", False),
        (logging.__file__, False),
        (pytest.__file__, False),
        (CollectorError.__module__.replace(".", "/"), True),
        (ToolCompose.__init__.__code__.co_filename, False),
    ],
)
def test_the_users_files_are_told_from_libraries(name, is_users):
    assert is_users_file(name) == is_users
