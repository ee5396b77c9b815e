"""Transforms of an environment act in a collector as they do in the environment."""

import asyncio
import json
from contextlib import asynccontextmanager
from typing import ClassVar

import pytest
from helpers.chat_envs import Counter, add, call, echo
from helpers.simulated_users import Shopper
from torchrl.envs import Compose, StepCounter

from torchrl_agentic import (
    AnswerRewardTransform,
    EndTrajectory,
    Recorder,
    RecordTransform,
    Renamed,
    StopTool,
    Task,
    Tool,
    ToolCompose,
    ToolResult,
    ToolRewardTransform,
    Toolset,
    TurnTokenizer,
    UserSimulator,
    read_records,
)
from torchrl_agentic.collectors import AgentCollector
from torchrl_agentic.engines import ScriptedEngine
from torchrl_agentic.testing import load_tiny

TOKENIZER = load_tiny()[1]
NOTHING = {"type": "object", "properties": {}}


async def lengthy() -> str:
    """Return a long text."""
    return "long " * 300


def collect(transforms, script, tasks=None, **options):
    """Return the batches of a collector over a script, as lists of trajectories."""
    tasks = [Task("t", [{"role": "user", "content": "q0"}])] if tasks is None else tasks
    if not isinstance(transforms, ToolCompose):
        transforms = Compose(*transforms)
    has_writer = "TurnTokenizer" in str(transforms)
    collector = AgentCollector(
        transforms,
        engine=ScriptedEngine(script, TOKENIZER),
        tokenizer=None if has_writer else TOKENIZER,
        tasks=tasks,
        **{"on_failure": "raise", "max_staleness": None, **options},
    )
    with collector:
        return [trajectory for batch in collector.trajectories() for trajectory in batch]


def texts(trajectory, role):
    return [message.text for message in trajectory.messages if message.role == role]


def test_a_simulated_user_replies_and_scores():
    shopper = Shopper(judged=0.75)
    user = UserSimulator(shopper, max_turns=3)
    tasks = [Task("t", [{"role": "user", "content": "q"}], data={"interaction_kwargs": {"goal": "rice"}})]
    (found,) = collect(
        [ToolCompose([add]), EndTrajectory(max_turns=9), user],
        [["one", call("add", a=1, b=2), "two", "sold"]],
        tasks,
    )
    assert texts(found, "user") == ["q", "rice 1", "rice 2", "Thanks."]
    assert (found.reason, found.terminated, found.user_score) == ("user", True, 0.75)
    assert len(shopper.events("open")) == len(shopper.events("close")) == 1


def test_replies_beyond_the_users_bound_end_a_trajectory():
    user = UserSimulator(Shopper(), max_turns=2)
    (found,) = collect([ToolCompose([add]), user], [["one", "two", "three", "four"]])
    assert texts(found, "user") == ["q0", "tea 1", "tea 2"]
    assert (found.reason, found.truncated, found.user_score) == ("max_turns", True, 0.5)


def test_a_user_that_fails_costs_its_own_group_only(caplog):
    failed = []
    (kind,) = collect(
        [ToolCompose([add]), EndTrajectory(max_turns=5), UserSimulator(Shopper())],
        {"a": ["crash"], "b": ["hello", "bye"]},
        [Task("a", [{"role": "user", "content": "q"}]), Task("b", [{"role": "user", "content": "q"}])],
        on_failure="drop",
        failure_hook=failed.append,
    )
    assert kind.terminated
    assert [(one.task.name, one.kind) for one in failed] == [("a", "user")]
    assert "no more tea" in caplog.text


def test_tool_rewards_and_the_answers_reward_are_added():
    class Graded(Tool):
        name, description = "grade", "Grade."
        input_schema: ClassVar = NOTHING

        @asynccontextmanager
        async def session(self, trajectory):
            yield Graded()

        async def run(self, args, ctx):
            return ToolResult(reward=0.5)

        async def final_reward(self):
            return 4.0

    script = [[call("grade"), call("grade"), "The answer is 49."]]
    (found,) = collect(
        [
            ToolCompose([Graded()]),
            EndTrajectory(max_turns=5, when_no_calls=True),
            ToolRewardTransform(calls=2.0, trajectories=0.25),
            AnswerRewardTransform(right=10.0),
        ],
        script,
        [Task("t", [{"role": "user", "content": "q"}], "49")],
        reward=lambda trajectory: 100.0,
    )
    assert (found.tool_reward, found.final_reward) == (1.0, 4.0)
    assert found.reward == 2.0 * 1.0 + 0.25 * 4.0 + 10.0 + 100.0


def test_rewards_on_tokens_and_foreign_transforms_are_refused():
    with pytest.raises(ValueError, match="one reward per trajectory"):
        collect([ToolCompose([add]), ToolRewardTransform(place="tokens")], [["a"]])
    with pytest.raises(TypeError, match="StepCounter works on TensorDict steps"):
        collect([ToolCompose([add]), StepCounter()], [["a"]])
    with pytest.raises(TypeError, match="transforms is a ToolCompose"):
        collect([StepCounter()], [["a"]])
    with pytest.raises(ValueError, match="2 transforms of the class ToolCompose"):
        collect([ToolCompose([add]), ToolCompose([echo])], [["a"]])


def test_records_have_turns_rewards_answers_and_tokens(tmp_path):
    with Recorder(tmp_path / "r.jsonl") as recorder:
        collect(
            [
                ToolCompose([add], recorder=recorder),
                EndTrajectory(max_turns=5, when_no_calls=True),
                AnswerRewardTransform(),
                RecordTransform(tokens=True, extras={"level": "level"}),
            ],
            [[call("add", a=1, b=2), "3"]],
            [Task("t", [{"role": "user", "content": "1 + 2?"}], "3", {"level": "easy"})],
        )
    (record,) = read_records(tmp_path / "r.jsonl")
    assert [turn.outcome.results[0].text for turn in record.turns[:1]] == ["3"]
    assert (record.score, record.gts, record.termination_reason) == (1.0, "3", "no_calls")
    assert record.extras["level"] == "easy"
    assert "".join(record.tokens.texts).startswith("<|im_start|>")
    assert [message.text for message in record.prompt] == ["1 + 2?"]


def test_a_bound_on_tokens_truncates_before_the_engine_sees_the_prompt():
    compose = ToolCompose([lengthy])
    writer = TurnTokenizer(TOKENIZER, tools=compose.tools, max_trajectory_tokens=400)
    script = [[call("lengthy"), "never"]]
    (found,) = collect([compose, EndTrajectory(max_turns=5, when_no_calls=True), writer], script)
    assert (found.reason, found.truncated) == ("max_trajectory_tokens", True)
    assert len(found.turns) == 1


def test_long_results_are_shortened_in_the_conversation_too():
    (found,) = collect(
        ToolCompose([lengthy]),
        [[call("lengthy"), "done"]],
        tokenizer_options={"max_tool_response_tokens": 40},
    )
    (result,) = texts(found, "tool")
    assert "characters left out" in result


def test_a_task_selects_its_tools_and_the_prompt_shows_no_other():
    prompts = {}

    class Seen(ScriptedEngine):
        async def sample(self, ids, *, key, **options):
            prompts.setdefault(key.partition("/")[0], TOKENIZER.decode(ids))
            return await super().sample(ids, key=key, **options)

    tasks = [
        Task("some", [{"role": "user", "content": "q"}], data={"tool_selection": ["echo"]}),
        Task("all", [{"role": "user", "content": "q"}]),
    ]
    with AgentCollector(
        ToolCompose([add, echo]),
        engine=Seen([[call("add", a=1, b=1), "end"]], TOKENIZER),
        tokenizer=TOKENIZER,
        tasks=tasks,
        groups_per_batch=2,
    ) as collector:
        some, every = next(collector.trajectories())
    assert some.turns[0].outcome.results[0].status.name == "UNKNOWN_TOOL"
    assert every.turns[0].outcome.results[0].text == "2"
    assert '"add"' not in prompts["some"]
    assert '"add"' in prompts["all"]


def test_a_task_that_names_an_unknown_tool_is_dropped_and_reported():
    tasks = [
        Task("bad", [{"role": "user", "content": "q"}], data={"tool_selection": ["nothing"]}),
        Task("good", [{"role": "user", "content": "q"}]),
    ]
    found = collect(ToolCompose([echo]), [["end"]], iter(tasks), on_failure="replace")
    assert [one.task.name for one in found] == ["good"]


def test_tools_that_open_at_the_start_add_to_the_prompt_and_get_their_row():
    class Greeter(Tool):
        name, description = "greet", "Greet."
        input_schema: ClassVar = NOTHING
        open_at_reset = needs_row = True
        opened: ClassVar = []

        @asynccontextmanager
        async def session(self, trajectory):
            Greeter.opened.append(trajectory)
            yield self

        async def initial_message(self):
            return "Welcome."

        async def run(self, args, ctx):
            return ctx.row.columns["place"]

    tasks = [Task("t", [{"role": "user", "content": "q"}], data={"place": "Rome"})]
    (found,) = collect(ToolCompose([Greeter()]), [[call("greet"), "end"]], tasks)
    assert [message.text for message in found.messages[:2]] == ["q", "Welcome."]
    assert found.turns[0].outcome.results[0].text == "Rome"
    assert len(Greeter.opened) == 1


def test_state_shows_the_row_without_its_answers():
    class Reader(Tool):
        name, description = "read", "Read."
        input_schema: ClassVar = NOTHING
        wants_state = True

        async def run(self, args, ctx):
            return sorted(ctx.state.keys())

    data = {"place": "Rome", "ground_truth": "secret"}
    tasks = [Task("t", [{"role": "user", "content": "q"}], "secret", data)]
    compose = ToolCompose([Reader()], pass_state_to_tools=True)
    (found,) = collect(compose, [[call("read"), "end"]], tasks)
    assert json.loads(found.turns[0].outcome.results[0].text) == ["place"]


def test_each_trajectory_has_a_world_and_a_session_of_its_own():
    class Shop(Toolset):
        opened = 0

        async def setup(self):
            class Take(Tool):
                name, description = "take", "Take one."
                input_schema: ClassVar = NOTHING

                async def run(self, args, ctx):
                    ctx.world.append(1)
                    return len(ctx.world)

            return [Take()]

        async def teardown(self):
            pass

        @asynccontextmanager
        async def session(self, trajectory):
            Shop.opened += 1
            yield []

    counter = Counter()
    compose = ToolCompose([counter]).with_toolsets([Shop()])
    script = [[call("take") + call("count"), call("take") + call("count"), "end"]]
    found = collect(compose, script, group_size=3)
    for one in found:
        said = [[result.text for result in turn.outcome.results] for turn in one.turns[:2]]
        assert said == [["1", "1"], ["2", "2"]]
    assert Shop.opened == 3
    opened, closed = ([name for kind, name in counter.diary if kind == event] for event in ("open", "close"))
    assert sorted(opened) == sorted(closed) == sorted(one.name for one in found)


def test_a_stop_ends_a_trajectory_and_max_turns_bounds_it():
    compose = ToolCompose([Renamed(StopTool(), "halt"), echo])
    (stopped,) = collect(compose, [[call("halt"), "never"]])
    assert (stopped.reason, stopped.terminated, len(stopped.turns)) == ("stop_tool", True, 1)
    (bounded,) = collect(compose, [[call("echo", text="a")] * 9], max_turns=3)
    assert (bounded.reason, bounded.truncated, len(bounded.turns)) == ("max_turns", True, 3)


def test_an_async_reward_runs_while_others_generate():
    async def judge(trajectory):
        await asyncio.sleep(0)
        return len(trajectory.answer)

    found = collect(ToolCompose([echo]), {"a": ["x"], "b": ["xyz"]}, [
        Task(name, [{"role": "user", "content": "q"}]) for name in "ab"
    ], groups_per_batch=2, reward=judge)  # fmt: skip
    assert [one.reward for one in found] == [1.0, 3.0]
