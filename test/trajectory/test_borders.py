"""An environment and a collector report the same of the same transforms, answers, tasks and faults."""

import contextlib
import inspect
from typing import ClassVar

import pytest
from helpers.borders import MAX_TURNS, Answer, Script, Seen, differences, in_collector, in_environment
from helpers.chat_envs import call
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.envs import Compose, TransformedEnv
from torchrl.envs.llm import ChatEnv

from torchrl_agentic import (
    AgentCollector,
    AnswerRewardTransform,
    EndTrajectory,
    Injected,
    RecordTransform,
    StopTool,
    Tool,
    ToolCompose,
    ToolResult,
    ToolRewardTransform,
    Toolset,
    TurnTokenizer,
    UserRewardTransform,
    UserSimulator,
    tool,
)
from torchrl_agentic.errors import InfrastructureError, ToolError
from torchrl_agentic.interactions import Interaction, Reply
from torchrl_agentic.testing import ScriptedPolicy, load_tiny

TOKENIZER = load_tiny()[1]
FAULTS = (
    "",
    "raise",
    "infra",
    "error",
    "reward nan",
    "final raises",
    "final nan",
    "cannot open",
    "message raises",
)
USERS = ("", "polite", "leaves", "crashes", "cannot score", "reply nan")


class Task(Tool):
    """A tool of each trajectory, with a fault that the row of the data set names."""

    name, description = "work", "Work."
    input_schema: ClassVar = {"type": "object", "properties": {"n": {"type": "integer"}}}
    needs_row = True

    def __init__(self, fault, opens_at_reset):
        self.fault, self.open_at_reset = fault, opens_at_reset

    @contextlib.asynccontextmanager
    async def session(self, trajectory):
        if self.fault == "cannot open":
            raise ConnectionError("no machine")
        live = Task(self.fault, self.open_at_reset)
        live.calls = 0
        yield live

    async def initial_message(self):
        if self.fault == "message raises":
            raise RuntimeError("no message")
        return "ready"

    async def run(self, args, ctx):
        self.calls += 1
        if self.fault == "raise":
            raise RuntimeError("a bug")
        if self.fault == "infra":
            raise InfrastructureError("away")
        if self.fault == "error":
            raise ToolError("try again")
        reward = float("nan") if self.fault == "reward nan" else 0.5 * self.calls
        return ToolResult.from_value(f"{args.get('n')}: {self.calls} calls", reward=reward)

    async def final_reward(self):
        if self.fault == "final raises":
            raise RuntimeError("no verdict")
        return float("nan") if self.fault == "final nan" else float(self.calls)


class World(Toolset):
    """A number that two tools and the user change."""

    name = "number"

    def __init__(self, opens_at_reset):
        self.open_at_reset = opens_at_reset

    async def setup(self):
        @tool
        def grow(world: Injected[list]) -> int:
            """Grow."""
            world.append(1)
            return len(world)

        return [grow]

    async def teardown(self): ...

    @contextlib.asynccontextmanager
    async def session(self, trajectory):
        yield []

    async def initial_message(self, world):
        return "nothing yet"

    async def final_reward(self, world):
        return 10.0 * len(world)


class User(Interaction):
    """Replies, with a fault that its name tells."""

    name = "user"

    def __init__(self, kind):
        self.kind, self.turns = kind, 0

    @contextlib.asynccontextmanager
    async def session(self, trajectory, **kwargs):
        yield User(self.kind)

    async def respond(self, messages):
        self.turns += 1
        if self.kind == "crashes" and self.turns == 2:
            raise RuntimeError("down")
        if self.kind == "leaves" and self.turns == 2:
            return Reply("Thanks.", score=0.25, is_over=True)
        return Reply(f"go on {self.turns}", score=float("nan") if self.kind == "reply nan" else 0.5)

    async def score(self, messages):
        if self.kind == "cannot score":
            raise RuntimeError("down")


@st.composite
def cases(draw):
    """Draw transforms in an order that both borders allow, tasks, and answers."""
    fault, user = (draw(st.sampled_from(["", "", "", "", *kinds])) for kinds in (FAULTS, USERS))
    opens = draw(st.booleans()), draw(st.booleans())
    max_turns = draw(st.integers(1, MAX_TURNS))
    bound = draw(st.sampled_from([None, None, 1000, 1500]))
    rewards = draw(st.lists(st.sampled_from(["turn", "end", "answer", "user"]), max_size=2, unique=True))
    weight = draw(st.sampled_from([0.0, 1.0, 2.0]))
    context = draw(st.sampled_from([None, None, None, 1200]))
    piece = st.sampled_from(
        ["Done.", "42", call("work", n=1), call("work", n=2) * 2, call("grow"), call("stop"), call("nothing"),
         "<tool_call>{", "word " * 300]
    )  # fmt: skip
    turn = st.builds(Answer, st.lists(piece, max_size=2).map("".join), st.sampled_from([False] * 12 + [True]))
    scripts = draw(st.lists(st.lists(turn, min_size=1, max_size=MAX_TURNS), min_size=2, max_size=2))
    row = st.fixed_dictionaries(
        {"query": st.sampled_from([*["Work."] * 5, "word " * 400]),
         "answer": st.sampled_from(["42", "43", None]),
         "tool_selection": st.sampled_from([None, None, ["work", "stop"], ["grow"]])}
    )  # fmt: skip
    rows = draw(st.lists(row, min_size=2, max_size=2))

    def make(hook):
        compose = ToolCompose([Task(fault, opens[0]), StopTool()], recorder=hook)
        compose.add_toolset(World(opens[1]))
        parts = {
            "turn": lambda: ToolRewardTransform(calls=weight, trajectories=1.0),
            "end": lambda: ToolRewardTransform(place="end", trajectories=weight or 0.5),
            "answer": lambda: AnswerRewardTransform(lambda answer, truth: truth in answer),
            "user": UserRewardTransform if user else ToolRewardTransform,
        }
        return Compose(
            compose,
            EndTrajectory(max_turns=max_turns, when_no_calls=not user),
            *([UserSimulator(User(user), max_turns=3)] if user else []),
            TurnTokenizer(TOKENIZER, tools=compose.tools, max_trajectory_tokens=bound),
            *(parts[name]() for name in rewards),
            RecordTransform(tokens=True),
        )

    return make, rows, scripts, context, bool(rewards)


def failure_of(env: Seen) -> str:
    """Return the kind of failure that a collector makes of what an environment flags."""
    if env.columns["not_begun"]:
        return "tool"
    if (
        env.reason == "max_trajectory_tokens"
        and env.columns["cut"]
        and not any(source == -1 for source in env.tokens[1])
    ):
        return "task"
    if env.columns.get("user_error"):
        return "user"
    return "reward" if env.columns["no_verdict"] else ""


@settings(
    max_examples=2 * settings.default.max_examples, deadline=None, suppress_health_check=list(HealthCheck)
)
@given(cases())
@pytest.mark.filterwarnings("ignore")
def test_both_borders_report_the_same(case):
    make, rows, scripts, context, has_rewards = case
    seen = zip(
        in_environment(make, rows, scripts, context=context),
        in_collector(make, rows, scripts, context=context),
        strict=True,
    )
    for env, collector in seen:
        failure = failure_of(env)
        assert collector.failure == failure
        if not failure:
            found = differences(env, collector)
            if not has_rewards:
                assert found.pop("reward", None) in (None, (None, 0.0))
            assert not found


class Looks(Tool):
    """Returns what a call sees of the state of its row."""

    name, description, wants_state = "work", "Look.", True
    input_schema: ClassVar = {"type": "object", "properties": {"n": {"type": "integer"}}}

    async def run(self, args, ctx):
        extra = None if ctx.state is None else ctx.state.get("extra_info", None)
        secret = getattr(extra, "get", lambda name: None)("answer")
        return (
            f"state {ctx.state is not None}, level {ctx.state is not None and 'level' in ctx.state}, {secret}"
        )


@tool
def work(n: int = 0) -> str:
    """Work.

    Args:
        n: A number.
    """
    return f"{n} " + "a long result " * 30


ROW = {"query": "Work.", "answer": "42", "level": "hard"}
WORK, STOP = Answer(call("work", n=1)), Answer(call("stop"))


class LetterByLetter(Answer):
    """An answer whose letters were sampled one by one, which no tokenizer does."""

    def ids(self):
        return [token for letter in self.text for token in Answer(letter, is_cut=True).ids()] + [
            TOKENIZER.eos_token_id
        ]


class Guest(Interaction):
    """Replies with its name."""

    def __init__(self, name):
        self.name = name

    @contextlib.asynccontextmanager
    async def session(self, trajectory, **kwargs):
        yield self

    async def respond(self, messages):
        return Reply(f"{self.name} says go on", score=0.5)


def build(hook, *, first=(), last=(), user=None, **options):
    """Return the transforms with options by the name of their class."""
    chosen = {name: dict(options.get(name, {})) for name in PARAMETERS}
    tools = chosen["ToolCompose"].pop("tools", [work, StopTool()])
    compose = ToolCompose(tools, recorder=hook, **chosen["ToolCompose"])
    writer = {"tools": compose.tools, **chosen["TurnTokenizer"]}
    ends = {"max_turns": MAX_TURNS, "when_no_calls": user is None, **chosen["EndTrajectory"]}
    users = [] if user is None else [UserSimulator(user, **chosen["UserSimulator"])]
    scores = [] if user is None else [UserRewardTransform(**chosen["UserRewardTransform"])]
    return Compose(
        compose,
        EndTrajectory(**ends),
        *users,
        TurnTokenizer(TOKENIZER, **writer),
        ToolRewardTransform(**chosen["ToolRewardTransform"]),
        AnswerRewardTransform(
            **{"is_right": lambda answer, truth: truth in answer, **chosen["AnswerRewardTransform"]}
        ),
        *scores,
        RecordTransform(**chosen["RecordTransform"]),
    )


PARAMETERS = {
    kind.__name__: list(inspect.signature(kind).parameters)
    for kind in (
        ToolCompose, EndTrajectory, UserSimulator, TurnTokenizer, ToolRewardTransform, AnswerRewardTransform,
        UserRewardTransform, RecordTransform,
    )
}  # fmt: skip


class Paid(Task):
    """Gives each call and each trajectory a reward."""

    def __init__(self):
        super().__init__("", False)


def slow(n: int = 0) -> str:
    """Wait.

    Args:
        n: A number.
    """
    import time

    time.sleep(0.3)
    return "late"


slow.__name__ = "work"
ANSWER = Answer("It is 42.")
# Class, parameter, and options that differ from the default; None: another test shows the parameter.
OPTIONS = {
    "ToolCompose": {
        "tools": {"tools": [Paid(), StopTool()]},
        "parser": {"parser": "pythonic"},
        "rate_limits": None,  # test/dispatch: order and waiting, not what is reported
        "per_call_timeout": {"tools": [slow, StopTool()], "per_call_timeout": 0.01},
        "per_turn_timeout": {"tools": [slow, StopTool()], "per_turn_timeout": 0.01},
        "pass_state_to_tools": {"tools": [Looks(), StopTool()], "pass_state_to_tools": True},
        "tool_role": {"tool_role": "user"},
        "media": None,  # test/collectors/test_media.py
        "validate_inputs": {"validate_inputs": False},
        "max_threads": None,  # how many calls run at once
        "max_calls_per_turn": {"max_calls_per_turn": 1},
        "tool_selection": {"tool_selection": lambda trajectory, turn, row: ["stop"]},
        "report_calls": {"report_calls": True},
        "recorder": None,  # all of these have one
        "eos_strings": {"eos_strings": ["42."]},
        "tokenizer": {"tokenizer": TOKENIZER},
        "template_kwargs": {"tokenizer": TOKENIZER, "template_kwargs": {"enable_thinking": False}},
    },
    "EndTrajectory": {"max_turns": {"max_turns": 1}, "when_no_calls": {"when_no_calls": False}},
    "UserSimulator": {
        "interactions": {},
        "max_turns": {"max_turns": 1},
        "role": {"role": "system"},
        "per_reply_timeout": {"per_reply_timeout": 1e-6},
        "rate_limits": None,
        "max_threads": None,
        "column": {"column": "guest"},
    },
    "TurnTokenizer": {
        "tokenizer": {},
        "tools": {"tools": []},
        "chat_template": {"chat_template": TOKENIZER.chat_template.replace("system", "developer")},
        "template_kwargs": {"template_kwargs": {"enable_thinking": False}},
        "tool_role": {"tool_role": "tool"},
        "stop_token_ids": None,  # the policy has them, too: test/collectors/test_ledgers.py
        "processor": None,  # test/collectors/test_media.py
        "max_trajectory_tokens": {"max_trajectory_tokens": 800},
        "max_tool_response_tokens": {"max_tool_response_tokens": 40},
        "max_tool_response_chars": {"max_tool_response_chars": 60},
        "tool_response_truncate_side": {"max_tool_response_chars": 60, "tool_response_truncate_side": "left"},
        "use_inference_chat_template": {"use_inference_chat_template": True},
        "tokenization_sanity_check_mode": {"tokenization_sanity_check_mode": "disable"},
        "raise_on_drift": None,  # below
    },
    "ToolRewardTransform": {
        "place": {"place": "end"},
        "calls": {"calls": 2.0},
        "trajectories": {"trajectories": 3.0},
    },
    "AnswerRewardTransform": {
        "is_right": {"is_right": lambda answer, truth: False},
        "column": {"column": "level"},
        "right": {"right": 5.0},
        "wrong": {"wrong": -1.0},
    },
    "UserRewardTransform": {"replies": {"replies": 2.0}, "trajectories": {"trajectories": 3.0}},
    "RecordTransform": {
        "gts": {"gts": "level"},
        "extras": {"extras": {"level": "level"}},
        "tokens": {"tokens": True},
    },
}


def test_every_option_of_a_transform_is_in_the_table():
    assert {kind: list(options) for kind, options in OPTIONS.items()} == PARAMETERS


def cases_of_options():
    for kind, options in OPTIONS.items():
        for name, chosen in options.items():
            if chosen is not None:
                yield pytest.param(kind, chosen, id=f"{kind}({name})")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "chosen"), list(cases_of_options()))
def test_an_option_is_honoured_at_both_borders(kind, chosen):
    has_user = kind.startswith("User")
    guests = {"a": Guest("a"), "b": Guest("b")}
    script = [WORK, Answer(call("work", n="x") * 2), Answer("It is 42. [work(n=7)]"), STOP]
    row = {**ROW, "interaction_kwargs": {"name": "a"}, "guest": {"name": "b"}}

    def make(hook):
        return build(hook, user=guests if has_user else None, **{kind: chosen})

    (env,) = in_environment(make, [row], [script])
    (collector,) = in_collector(make, [row], [script])
    failure = failure_of(env)
    assert collector.failure == failure
    assert failure or not differences(env, collector)


def test_a_collector_refuses_rewards_on_tokens_by_name():
    transforms = build(None, ToolRewardTransform={"place": "tokens"})
    with pytest.raises(ValueError, match=r'place="turn"'):
        AgentCollector(transforms, engine=Script({}, None), tokenizer=None, tasks=[])


def same(make, row, script, **options):
    """Assert that both borders report the same of one trajectory."""
    (env,), (collector,) = (run(make, [row], [script], **options) for run in (in_environment, in_collector))
    assert collector.failure == failure_of(env)
    assert not differences(env, collector)


def test_the_column_of_the_right_answer_may_be_named_answer():
    same(lambda hook: build(hook, AnswerRewardTransform={"column": "answer"}), ROW, [ANSWER])


def test_the_right_answer_of_gsm8k_is_the_same():
    row = {**ROW, "answer": "6 x 7 = 42\n#### 42"}
    graded = {"is_right": lambda answer, truth: truth == "42"}
    same(lambda hook: build(hook, AnswerRewardTransform=graded), row, [ANSWER])


def test_an_answer_is_graded_where_the_transform_stands():
    def make(hook):
        compose = ToolCompose([work], recorder=hook)
        graded = AnswerRewardTransform(lambda answer, truth: truth in answer)
        writer = TurnTokenizer(TOKENIZER, tools=compose.tools)
        return Compose(compose, graded, EndTrajectory(when_no_calls=True), writer, RecordTransform())

    same(make, ROW, [ANSWER])


def test_a_user_in_front_of_the_bound_replies_to_the_last_message():
    def make(hook):
        compose = ToolCompose([work], recorder=hook)
        writer = TurnTokenizer(TOKENIZER, tools=compose.tools)
        users = UserSimulator(Guest("a")), EndTrajectory(max_turns=1)
        return Compose(compose, *users, writer, UserRewardTransform(replies=1.0), RecordTransform())

    same(make, {**ROW, "interaction_kwargs": {"name": "a"}}, [ANSWER])


def test_an_entry_of_the_step_is_recorded():
    same(lambda hook: build(hook, RecordTransform={"extras": {"turns": ("agentic", "turn")}}), ROW, [ANSWER])


def test_drift_raises_where_it_is_asked_for():
    make = lambda hook: build(hook, TurnTokenizer={"raise_on_drift": True})  # noqa: E731
    script = [WORK, LetterByLetter("It is 42.")]
    with pytest.raises(RuntimeError, match="tokens differ"):
        in_environment(make, [ROW], [script])
    (collector,) = in_collector(make, [ROW], [script])
    assert collector.failure == "crash"


@pytest.mark.filterwarnings("ignore:Inconsistent training")
def test_drift_is_counted_alike():
    same(build, ROW, [WORK, LetterByLetter("It is 42.")])


def test_a_row_with_an_unknown_user_costs_itself_only():
    rows = [{**ROW, "interaction_kwargs": {"name": name}} for name in ("a", "nobody")]
    make = lambda hook: build(hook, user={"a": Guest("a")})  # noqa: E731
    known, unknown = in_collector(make, rows, [[ANSWER]] * 2)
    assert (known.failure, unknown.failure) == ("", "task")
    known, unknown = in_environment(make, rows, [[ANSWER]] * 2)
    assert (known.reason, unknown.reason) == ("max_turns", "not_begun")


def test_tools_do_not_see_the_answer_in_extra_info():
    row = {**ROW, "extra_info": {"answer": "SECRET"}}
    make = lambda hook: build(hook, ToolCompose={"tools": [Looks()], "pass_state_to_tools": True})  # noqa: E731
    for run in (in_environment, in_collector):
        (seen,) = run(make, [row], [[WORK, ANSWER]])
        assert not any("SECRET" in text for _, text, _ in seen.messages)


def test_a_repeated_step_runs_no_call_again():
    runs = []

    @tool
    def count() -> str:
        """Count."""
        runs.append(1)
        return f"run {len(runs)}"

    env = TransformedEnv(ChatEnv(batch_size=(1,)), Compose(ToolCompose([count]), EndTrajectory(max_turns=4)))
    td = ScriptedPolicy([[call("count"), "x"]])(env.reset(TensorDict({"query": ["q"]}, batch_size=(1,))))
    env.step(td.copy())
    env.step(td.copy())
    env.close()
    assert len(runs) == 1
