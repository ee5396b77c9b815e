"""What fails at the edges of a trajectory is a flag, or a failure in a collector, and never a number."""

import asyncio
import contextlib
import math
from typing import ClassVar

import numpy as np
import pytest
import torch
from helpers.borders import Answer, differences, in_collector, in_environment
from helpers.chat_envs import call
from torchrl.envs import Compose

from torchrl_agentic import (
    AnswerRewardTransform,
    EndTrajectory,
    Injected,
    InvalidTask,
    LifecycleTool,
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
from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.interactions import Interaction, Reply
from torchrl_agentic.testing import load_tiny
from torchrl_agentic.tokens.ledger import SAMPLED

TOKENIZER = load_tiny()[1]
PLAY = Answer(call("play"))
DONE = Answer("Done.")


class Game(Tool):
    """A game of each trajectory; `verdict` gives its final reward."""

    name, description = "play", "Play."
    input_schema: ClassVar = {"type": "object", "properties": {}}

    def __init__(self, verdict=lambda: 1.0, opens_at_reset=False, opening=lambda: None, says=lambda: None):
        self.verdict, self.open_at_reset, self.opening, self.says = verdict, opens_at_reset, opening, says

    @contextlib.asynccontextmanager
    async def session(self, trajectory):
        self.opening()
        yield self

    async def run(self, args, ctx):
        return "moved"

    async def initial_message(self):
        return self.says()

    async def final_reward(self):
        return self.verdict()


class Board(Toolset):
    """A world of each trajectory, the number of moves."""

    name = "board"

    def __init__(
        self,
        verdict=lambda moves: float(len(moves)),
        opens_at_reset=False,
        opening=lambda: None,
        says=lambda: None,
    ):
        self.verdict, self.open_at_reset, self.opening, self.says = verdict, opens_at_reset, opening, says

    async def setup(self):
        @tool
        def play(world: Injected[list]) -> str:
            """Play."""
            world.append("move")
            return f"{len(world)} moves"

        return [play]

    async def teardown(self): ...

    @contextlib.asynccontextmanager
    async def session(self, trajectory):
        self.opening()
        yield []

    async def initial_message(self, world):
        return self.says()

    async def final_reward(self, world):
        return self.verdict(world)


def verl(name, method):
    """Return a tool of verl's kind in which one method is another."""

    class Verl:
        tool_schema: ClassVar = {
            "type": "function",
            "function": {"name": name, "description": "Play.", "parameters": {}},
        }

        async def create(self, instance_id=None, **kwargs):
            return instance_id, None

        async def execute(self, instance_id, parameters, **kwargs):
            return "moved", 0.0, {}

        async def calc_reward(self, instance_id, **kwargs):
            return 1.0

        async def release(self, instance_id, **kwargs): ...

    target = Verl()
    setattr(target, method.__name__, method)
    return LifecycleTool(target)


def parts_of(item, *more, tokens=True, **options):
    """Return a factory of the transforms around a tool or toolset, with rewards and records."""

    def make(hook):
        compose = ToolCompose([] if isinstance(item(), Toolset) else [item()], recorder=hook, **options)
        if isinstance(item(), Toolset):
            compose.add_toolset(item())
        writer = TurnTokenizer(TOKENIZER, tools=compose.tools)
        return Compose(
            compose,
            EndTrajectory(max_turns=4, when_no_calls=True),
            writer,
            *(one() for one in more or (ToolRewardTransform,)),
            RecordTransform(),
        )

    return make


def both(make, answers, row=None, **options):
    """Return what an environment and a collector report of one trajectory."""
    rows = [{"query": "Play.", **(row or {})}]
    (first,) = in_environment(make, rows, [answers], **options)
    (second,) = in_collector(make, rows, [answers], **options)
    return first, second


def fails(error):
    def verdict(*_):
        raise error

    return verdict


async def raising(self_or_id, **kwargs):
    raise ConnectionError("the verifier is away")


raising.__name__ = "calc_reward"


async def text_reward(instance_id, **kwargs):
    return "good"


text_reward.__name__ = "calc_reward"

NO_VERDICTS = {
    "raises": lambda: Game(fails(RuntimeError("no verdict"))),
    "raises that a service is away": lambda: Game(fails(InfrastructureError("away"))),
    "wants to end the program": lambda: Game(fails(SystemExit(3))),
    "is a text": lambda: Game(lambda: "good"),
    "is NaN": lambda: Game(lambda: math.nan),
    "is infinite": lambda: Game(lambda: np.inf),
    "is finite only in float64": lambda: Game(lambda: 1e39),
    "is a tensor of two elements": lambda: Game(lambda: torch.ones(2)),
    "of a world raises": lambda: Board(fails(RuntimeError("no verdict"))),
    "of a world is a list": lambda: Board(lambda world: [1.0]),
    "of verl raises": lambda: verl("play", raising),
    "of verl is a text": lambda: verl("play", text_reward),
}


@pytest.mark.parametrize("answers", [[PLAY, DONE], [DONE]], ids=["a call", "no call"])
@pytest.mark.parametrize("kind", NO_VERDICTS)
def test_a_final_reward_that_fails_is_no_verdict(kind, answers):
    env, collector = both(parts_of(NO_VERDICTS[kind]), answers)
    assert (env.columns["no_verdict"], env.reward, env.columns["trajectory_reward"]) == (True, None, None)
    assert (env.reason, env.terminated) == ("no_calls", True)
    assert env.record["rewards"][-1] is None
    assert collector.failure == "reward"


@pytest.mark.parametrize("item", [Game, Board])
def test_a_final_reward_that_never_comes_is_no_verdict(item):
    async def hang(*_):
        await asyncio.Event().wait()

    class Hangs(item):
        final_reward = hang

    env, collector = both(parts_of(Hangs, per_call_timeout=0.05), [PLAY, DONE])
    assert (env.columns["no_verdict"], env.reward, collector.failure) == (True, None, "reward")


@pytest.mark.parametrize(
    ("value", "number"),
    [(True, 1.0), (False, 0.0), (np.bool_(True), 1.0), (np.float32(0.5), 0.5), (torch.tensor(0.25), 0.25),
     (torch.tensor([3]), 3.0), (2, 2.0), (None, 0.0)],
    ids=str,
)  # fmt: skip
def test_a_reward_is_any_number_everywhere(value, number):
    """As a final reward, as the reward of a call, and of verl's execute and calc_reward."""

    class Graded(Game):
        async def run(self, args, ctx):
            return ToolResult.from_value("moved", reward=value)

    for seen in both(parts_of(lambda: Graded(lambda: value)), [PLAY, DONE]):
        assert (seen.reward, seen.columns["n_errors"], seen.failure) == (2 * number, 0, "")

    async def execute(instance_id, parameters, **kwargs):
        return "moved", value, {}

    for seen in both(parts_of(lambda: verl("play", execute)), [PLAY, DONE]):
        assert (seen.reward, seen.columns["n_errors"]) == (number + 1.0, 0)


def test_a_synchronous_final_reward_or_initial_message_is_refused_by_name():
    class Blocking(Game):
        def final_reward(self):
            return 1.0

    class Greeting(Board):
        def initial_message(self, world):
            return "hello"

    with pytest.raises(TypeError, match=r"Blocking.final_reward .* 'async def final_reward'"):
        ToolCompose([Blocking()])
    with pytest.raises(TypeError, match=r"Greeting.initial_message .* 'async def initial_message'"):
        ToolCompose([]).add_toolset(Greeting())


@pytest.mark.parametrize("reward", [math.inf, -math.inf, math.nan, 1e39])
def test_a_reward_of_a_call_that_is_not_finite_is_no_verdict(reward):
    class Endless(Game):
        async def run(self, args, ctx):
            return ToolResult.from_value("moved", reward=reward)

    env, collector = both(parts_of(lambda: Endless(lambda: None)), [PLAY, DONE])
    assert (env.columns["no_verdict"], env.reward, collector.failure) == (True, None, "reward")


def opens_sometimes(failures):
    """Return an opening that raises at its first calls, and counts them."""
    count = [0]

    def opening():
        count[0] += 1
        if count[0] <= failures:
            raise ConnectionError("no machine")

    return opening


NOT_BEGUN = {
    "a tool cannot open": lambda: Game(opens_at_reset=True, opening=fails(ConnectionError("no machine"))),
    "a world cannot open": lambda: Board(opens_at_reset=True, opening=fails(ConnectionError("no machine"))),
    "an initial message raises": lambda: Game(opens_at_reset=True, says=fails(RuntimeError("no board"))),
    "an initial message of a world raises": lambda: Board(opens_at_reset=True, says=fails(KeyError("board"))),
    "an initial message cannot be JSON": lambda: Game(opens_at_reset=True, says=lambda: object()),
}


@pytest.mark.parametrize("kind", NOT_BEGUN)
def test_a_trajectory_that_could_not_begin_ends_at_once_without_a_call(kind):
    env, collector = both(parts_of(NOT_BEGUN[kind]), [PLAY, DONE])
    assert (env.reason, env.truncated, env.terminated) == ("not_begun", True, False)
    assert (env.columns["not_begun"], env.columns["n_calls"], env.reward) == (True, 0, None)
    assert collector.failure == "tool"


def test_a_world_that_opens_at_the_second_try_costs_its_call_only():
    for seen in both(parts_of(lambda: Board(opening=opens_sometimes(1))), [PLAY, PLAY, DONE]):
        assert (seen.columns["n_errors"], seen.columns["n_calls"], seen.reward) == (1, 2, 1.0)


@pytest.mark.parametrize(
    "item", [Game, lambda: Board(lambda moves: float(moves == []))], ids=["tool", "world"]
)
def test_what_no_call_has_opened_has_its_final_reward(item):
    for seen in both(parts_of(item), [DONE]):
        assert (seen.reward, seen.columns["n_calls"], seen.columns["no_verdict"]) == (1.0, 0, False)


@pytest.mark.parametrize(
    "answers", [[DONE], [Answer(call("stop"))]], ids=["an answer", "a tool that ends it"]
)
def test_two_worlds_of_one_name_are_both_counted(answers):
    def make(hook):
        compose = ToolCompose([], recorder=hook)
        compose.add_toolset(Board(lambda moves: 1.0))

        class Other(Board):
            async def setup(self):
                @tool
                def look(world: Injected[list]) -> str:
                    """Look."""
                    return "empty"

                return [look]

        compose.add_toolset(Other(lambda moves: 10.0))
        compose.append_tool(StopTool())
        writer = TurnTokenizer(TOKENIZER, tools=compose.tools)
        return Compose(compose, EndTrajectory(when_no_calls=True), writer, ToolRewardTransform(place="end"))

    for seen in both(make, answers):
        assert seen.reward == 11.0


@pytest.mark.parametrize("item", [Game, Board])
def test_a_world_or_tool_that_opens_at_the_reset_has_an_initial_message(item):
    for seen in both(parts_of(lambda: item(opens_at_reset=True, says=lambda: "the board is empty")), [DONE]):
        assert ("tool", "the board is empty") in [(role, text) for role, text, _ in seen.messages]
        assert seen.reason == "no_calls"


def test_a_tool_that_a_row_may_not_use_owes_it_nothing():
    for seen in both(
        parts_of(lambda: Game(fails(RuntimeError("never asked")))), [DONE], {"tool_selection": []}
    ):
        assert (seen.reward, seen.failure) == (0.0, "")


@pytest.mark.parametrize("when_no_calls", [True, False])
@pytest.mark.parametrize("text", ["Let me think", call("play") + "and then"], ids=["a text", "a whole call"])
def test_a_cut_answer_is_truncated_and_runs_no_call(text, when_no_calls):
    def make(hook):
        compose = ToolCompose([Game()], recorder=hook)
        ends = EndTrajectory(max_turns=4, when_no_calls=when_no_calls)
        return Compose(compose, ends, TurnTokenizer(TOKENIZER, tools=compose.tools), ToolRewardTransform())

    for seen in both(make, [Answer(text, is_cut=True)]):
        assert (seen.reason, seen.terminated, seen.truncated) == ("max_new_tokens", False, True)
        assert (seen.columns["cut"], seen.columns["n_calls"], seen.columns["turn"]) == (True, 0, 1)


@pytest.mark.parametrize("context", [None, 700])
def test_an_answer_that_the_bound_of_the_trajectory_cuts_has_that_reason(context):
    def make(hook):
        compose = ToolCompose([Game()], recorder=hook)
        bound = None if context else 700
        writer = TurnTokenizer(TOKENIZER, tools=compose.tools, max_trajectory_tokens=bound)
        ends = EndTrajectory(when_no_calls=True)
        return Compose(compose, ends, writer, ToolRewardTransform(), RecordTransform())

    for seen in both(make, [Answer("word " * 700)], context=context):
        assert (seen.reason, seen.truncated, seen.columns["cut"]) == ("max_trajectory_tokens", True, True)
        assert len(seen.tokens[0]) == 700


@pytest.mark.parametrize("context", [None, 2000])
def test_no_row_is_longer_than_its_bound_after_a_long_result(context):
    class Wordy(Game):
        async def run(self, args, ctx):
            return "word " * 9000

    def make(hook):
        compose = ToolCompose([Wordy()], recorder=hook)
        bound = None if context else 2000
        writer = TurnTokenizer(TOKENIZER, tools=compose.tools, max_trajectory_tokens=bound)
        ends = EndTrajectory(when_no_calls=True)
        return Compose(compose, ends, writer, ToolRewardTransform(), RecordTransform())

    env, collector = both(make, [PLAY, DONE], context=context)
    assert not differences(env, collector)
    assert (env.reason, len(env.tokens[0])) == ("max_trajectory_tokens", 2000)


@pytest.mark.parametrize("excess", [-1, 0, 1, 500])
@pytest.mark.parametrize("is_context", [True, False])
def test_a_prompt_without_room_fails_its_task_only(excess, is_context):
    """At the bound exactly there is no room; one token below it there is room for one."""

    def make_with(bound):
        def make(hook):
            compose = ToolCompose([Game()], recorder=hook)
            writer = TurnTokenizer(TOKENIZER, tools=compose.tools, max_trajectory_tokens=bound)
            ends = EndTrajectory(when_no_calls=True)
            return Compose(compose, ends, writer, ToolRewardTransform(), RecordTransform())

        return make

    rows = [{"query": "word " * 300}, {"query": "Play."}]
    (long, _) = in_collector(make_with(None), rows, [[DONE], [DONE]])
    size = long.tokens[1].index(SAMPLED)
    bound = size - excess
    options = {"context": bound} if is_context else {}
    make = make_with(None if is_context else bound)
    env, _ = in_environment(make, rows, [[DONE], [DONE]], **options)
    collector, other = in_collector(make, rows, [[DONE], [DONE]], **options)
    assert (env.reason, env.truncated) == ("max_trajectory_tokens", True)
    assert other.reason == "no_calls"
    if excess < 0:
        assert not differences(env, collector)
    else:
        assert collector.failure == "task"


class Crashing(Interaction):
    """Raises in one of its methods."""

    name = "user"

    def __init__(self, where, error=RuntimeError):
        self.where, self.error = where, error

    @contextlib.asynccontextmanager
    async def session(self, trajectory, **kwargs):
        if self.where == "session":
            raise self.error("down")
        yield self

    async def respond(self, messages):
        if self.where == "respond":
            raise self.error("down")
        return {"reply": 42, "score of a reply": Reply("go on", score=math.nan)}.get(self.where, "go on")

    async def score(self, messages):
        if self.where == "score":
            raise self.error("down")
        return {"no finite score": math.inf, "no score": "much"}.get(self.where, 0.75)


def talk(user, *more, max_turns=2):
    def make(hook):
        compose = ToolCompose([], recorder=hook)
        return Compose(
            compose,
            EndTrajectory(max_turns=max_turns),
            UserSimulator(user()),
            TurnTokenizer(TOKENIZER, tools=compose.tools),
            UserRewardTransform(),
            *(one() for one in more),
            RecordTransform(),
        )

    return make


@pytest.mark.parametrize("where", ["session", "respond", "reply", "score of a reply"])
def test_a_user_that_fails_to_reply_has_its_own_reason(where):
    env, collector = both(talk(lambda: Crashing(where)), [DONE])
    assert (env.reason, env.truncated, env.terminated) == ("user_failed", True, False)
    assert (env.columns["user_error"], env.columns["user_final_score"], env.reward) == (True, None, None)
    assert collector.failure == "user"


@pytest.mark.parametrize("where", ["score", "no finite score", "no score"])
def test_a_user_that_fails_to_score_leaves_no_number(where):
    env, collector = both(talk(lambda: Crashing(where)), [DONE])
    assert (env.reason, env.columns["user_error"], env.reward) == ("max_turns", True, None)
    assert collector.failure == "user"


@pytest.mark.parametrize("where", ["session", "respond", "score"])
def test_a_user_says_that_a_task_is_invalid(where):
    env, collector = both(talk(lambda: Crashing(where, InvalidTask)), [DONE])
    reason = "max_turns" if where == "score" else "user_failed"
    assert (env.reason, env.columns["user_error"], env.reward) == (reason, True, None)
    assert collector.failure == "task"


@pytest.mark.parametrize("kind", ["function", "coroutine", "verl"])
def test_a_user_of_any_form_says_that_a_task_is_invalid(kind):
    def respond(messages):
        raise InvalidTask("no solution")

    async def respond_later(messages):
        raise InvalidTask("no solution")

    class Verl:
        async def start_interaction(self, instance_id=None, **kwargs):
            raise InvalidTask("no solution")

        async def generate_response(self, instance_id, messages, **kwargs): ...

        async def finalize_interaction(self, instance_id): ...

    user = {"function": respond, "coroutine": respond_later, "verl": Verl()}[kind]
    env, collector = both(talk(lambda: user), [DONE])
    assert (env.reason, collector.failure) == ("user_failed", "task")


def test_the_scores_of_a_user_are_columns_and_a_reward_at_both_borders():
    env, collector = both(talk(lambda: Crashing("")), [DONE])
    assert not differences(env, collector)
    assert (env.columns["user_turn"], env.columns["user_final_score"], env.reward) == (1, 0.75, 0.75)


@pytest.mark.parametrize("is_async", [True, False])
def test_a_user_acts_on_the_worlds_of_the_tools(is_async):
    """Also on a world that no call has opened."""

    class Helper(Interaction):
        name = "helper"

        @contextlib.asynccontextmanager
        async def session(self, trajectory, *, worlds):
            live = Helper()
            live.moves = worlds["board"]
            yield live

        async def respond(self, messages):
            self.moves.append("the user's")

    def helper(messages, worlds):
        worlds["board"].append("the user's")

    def make(hook):
        compose = ToolCompose([], recorder=hook)
        compose.add_toolset(Board())
        user = UserSimulator(Helper() if is_async else helper)
        return Compose(compose, user, TurnTokenizer(TOKENIZER, tools=compose.tools), ToolRewardTransform())

    for seen in both(make, [DONE]):
        assert (seen.reason, seen.reward) == ("user", 1.0)


def test_a_reward_says_that_a_task_is_invalid():
    env, collector = both(parts_of(lambda: Game(fails(InvalidTask("no solution")))), [PLAY, DONE])
    assert (env.columns["no_verdict"], env.reward) == (True, None)
    assert collector.failure == "task"


@pytest.mark.parametrize("is_right", [fails(RuntimeError("no")), lambda answer, truth: torch.ones(2)])
def test_a_grader_that_fails_gives_no_verdict(is_right):
    parts = parts_of(Game, lambda: AnswerRewardTransform(is_right))
    env, collector = both(parts, [DONE], {"answer": "42"})
    assert (env.columns["no_verdict"], env.reward, collector.failure) == (True, None, "reward")


def test_a_row_without_a_right_answer_costs_itself_only():
    rows = [{"query": "a", "answer": "42"}, {"query": "b", "answer": None}]
    parts = parts_of(Game, lambda: AnswerRewardTransform(lambda answer, truth: answer == truth))
    right, unknown = in_environment(parts, rows, [[Answer("42")], [Answer("42")]])
    assert (right.reward, unknown.reward, unknown.columns["no_verdict"]) == (1.0, None, True)
    right, unknown = in_collector(parts, rows, [[Answer("42")], [Answer("42")]])
    assert (right.reward, unknown.failure) == (1.0, "reward")


@pytest.mark.parametrize(
    "answers", [[PLAY, Answer(call("stop"))], [Answer(call("stop"))]], ids=["later", "at once"]
)
def test_a_user_scores_the_world_that_the_tools_used_also_after_a_stop(answers):
    """The world closes behind the user, and gives its final reward once."""
    opened = []

    class Judge(Interaction):
        name = "judge"

        @contextlib.asynccontextmanager
        async def session(self, trajectory, *, worlds):
            live = Judge()
            live.moves = worlds["board"]
            yield live

        async def respond(self, messages):
            return "go on"

        async def score(self, messages):
            return float(len(self.moves))

    def make(hook):
        compose = ToolCompose([StopTool()], recorder=hook)
        compose.add_toolset(Board(lambda moves: 10.0 * len(moves) + 1, opening=lambda: opened.append(1)))
        return Compose(
            compose,
            EndTrajectory(max_turns=4),
            UserSimulator(Judge()),
            TurnTokenizer(TOKENIZER, tools=compose.tools),
            ToolRewardTransform(place="end"),
        )

    moves = len(answers) - 1
    for seen in both(make, answers):
        assert (seen.reason, seen.columns["user_final_score"], seen.reward) == (
            "stop_tool",
            moves,
            10.0 * moves + 1,
        )
    assert len(opened) == 2


@pytest.mark.parametrize("value", [None, math.nan, 2, "yes"])
def test_a_grader_says_yes_or_no_or_gives_no_verdict(value):
    parts = parts_of(Game, lambda: AnswerRewardTransform(lambda answer, truth: value))
    env, collector = both(parts, [DONE], {"answer": "42"})
    assert (env.columns["no_verdict"], env.reward, collector.failure) == (True, None, "reward")


def test_an_asynchronous_grader_is_refused():
    async def is_right(answer, truth):
        return False

    with pytest.raises(TypeError, match="ordinary function"):
        AnswerRewardTransform(is_right)


def test_a_row_that_could_not_begin_has_no_reward_for_its_answer():
    parts = parts_of(NOT_BEGUN["an initial message raises"], lambda: AnswerRewardTransform(lambda a, t: True))
    env, collector = both(parts, [DONE], {"answer": "42"})
    assert (env.reason, env.reward, collector.failure) == ("not_begun", None, "tool")
