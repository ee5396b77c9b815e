"""What an answer is worth: numbers are compared as numbers, so that 220000.0 is 220000."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from tensordict import TensorDictBase
from torchrl.envs import Compose, Transform, TransformedEnv
from torchrl.envs.llm import ChatEnv

from torchrl_agentic.errors import MissingExtra
from torchrl_agentic.limits import Limiter
from torchrl_agentic.messages import Message
from torchrl_agentic.parsers import ToolCallParser, get_parser, with_tools_message
from torchrl_agentic.records import Recorders, Recording, TrajectoryHook, as_hook
from torchrl_agentic.rollout.generate import Trajectory, roll_out
from torchrl_agentic.rollout.policies import Mode, agent_policy
from torchrl_agentic.tools.base import Toolset
from torchrl_agentic.tools.verl.graders import numbers
from torchrl_agentic.transforms import EndTrajectory, RecordTransform, ToolCompose, TurnTokenizer
from torchrl_agentic.transforms import history as border


def answer_reward(text: str, answer: str) -> float:
    """Give 1.0 for a right answer, else 0.0.

    Where the expected answer has numbers, the last ones of the text must be these; else it must occur in the
    text, whatever the case. Reasoning up to `</think>` is left out.
    """
    text = text.rpartition("</think>")[2]
    wanted = numbers(answer)
    if wanted:
        return float(numbers(text)[-len(wanted) :] == wanted)
    return float(answer.strip().casefold() in text.casefold())


Engine = Literal["transformers", "vllm"]


@dataclass(frozen=True, slots=True)
class Question:
    """What a model is asked. answer: the right one, where it is known; see `answer_reward`."""

    name: str
    messages: tuple[Message, ...]
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a question. reward: None where no right answer is known."""

    question: Question
    trajectory: Trajectory

    @property
    def reward(self) -> float | None:
        """1.0 if the model's last message is right, 0.0 if not."""
        if self.question.answer is None:
            return None
        return answer_reward(self.trajectory.answer, self.question.answer)


def load_model(path: str, engine: Engine = "transformers") -> tuple[Any, Any]:
    """Load a model and its tokenizer. path: a folder, or a name on the Hugging Face hub.

    Raises:
        MissingExtra: vLLM is not installed.
        OSError: there is no such model.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # ours says how far it is
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    if engine == "transformers":
        return AutoModelForCausalLM.from_pretrained(path, dtype="auto").float().eval(), tokenizer
    try:
        from vllm import LLM  # pyright: ignore[reportMissingImports]  in .venv-vllm alone
    except ImportError:
        raise MissingExtra("engine: vllm", "vllm", "vllm") from None
    return LLM(model=path, enforce_eager=True), tokenizer


def ask(
    questions: Sequence[Question],
    tools: Sequence[Any],
    model: Any,
    tokenizer: Any,
    *,
    parser: str = "hermes",
    rows: int = 16,
    max_turns: int = 8,
    max_new_tokens: int = 512,
    temperature: float = 1.0,
    mode: Mode = "tokens",
    tool_choice: Literal["auto", "required"] | None = None,
    toolsets: Sequence[Toolset] = (),
    rate_limits: Mapping[str, Limiter] | None = None,
    per_call_timeout: float | None = 30.0,
    per_turn_timeout: float | None = None,
    max_calls_per_turn: int | None = None,
    tokenizer_options: Mapping[str, Any] | None = None,
    recorder: Recorders = None,
) -> Iterator[Answer]:
    """Ask a model all questions, `rows` at a time; give the answers as they come, in their order.

    A trajectory ends with a message that calls no tool, or a tool that stops it. tokenizer_options: more
    arguments of the `TurnTokenizer` that the mode "tokens" uses. recorder: as for
    `ToolCompose`; trajectories have the names of the questions, right answers and scores, and in the mode
    "tokens" their tokens.
    """
    rows = min(rows, len(questions))
    found_parser = get_parser(parser, tokenizer=tokenizer)
    asked = _Asked(as_hook(recorder))
    compose = ToolCompose(
        tools,
        found_parser,
        rate_limits=rate_limits,
        per_call_timeout=per_call_timeout,
        per_turn_timeout=per_turn_timeout,
        max_calls_per_turn=max_calls_per_turn,
        recorder=asked.hook and asked,
    ).with_toolsets(toolsets)
    shows_tools = "tools" in (tokenizer.chat_template or "")
    transforms: list[Any] = [compose, EndTrajectory(max_turns=max_turns, when_no_calls=True)]
    if mode == "tokens":
        shown = compose.tools if shows_tools else ()
        transforms.append(TurnTokenizer(tokenizer, tools=shown, **(tokenizer_options or {})))
    if recorder is not None:
        transforms += [_Judge(asked), RecordTransform(tokens=mode == "tokens")]
    env = TransformedEnv(ChatEnv(batch_size=(rows,)), Compose(*transforms))
    policy = agent_policy(
        model,
        tokenizer,
        compose.tools if shows_tools or tool_choice else (),
        mode=mode,
        parser=found_parser,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        tool_choice=tool_choice,
    )
    try:
        for batch in range(math.ceil(len(questions) / rows)):
            some = questions[batch * rows : (batch + 1) * rows]
            filled = [*some, *[some[-1]] * (rows - len(some))]
            asked.questions = some
            chats = [list(question.messages) for question in filled]
            if not shows_tools:
                chats = [_told(chat, compose.tools, found_parser) for chat in chats]
            found = roll_out(env, policy, chats, max_turns=max_turns)
            yield from map(Answer, some, found)
    finally:
        env.close()


class _Asked(TrajectoryHook):
    """Records trajectories under the names of their questions. Rows that only fill the batch have none."""

    def __init__(self, hook: TrajectoryHook | None) -> None:
        self.hook = hook
        self.questions: Sequence[Question] = ()
        self._open: dict[int, Recording] = {}

    def begin(self, trajectory: str, row: int = 0) -> Recording:
        """Begin, with the right answer."""
        if self.hook is None or row >= len(self.questions):
            return Recording()
        self._open[row] = self.hook.begin(self.questions[row].name, row)
        self._open[row].annotate(gts=self.questions[row].answer)
        return self._open[row]

    def judge(self, row: int, said: str) -> None:
        """Record what the answer of a row is worth, where that is known."""
        recording = self._open.pop(row, None)
        if recording is not None and (right := self.questions[row].answer) is not None:
            recording.annotate(score=answer_reward(said, right))


class _Judge(Transform):
    """Has answers judged at the end of their trajectories."""

    def __init__(self, asked: _Asked) -> None:
        super().__init__()
        self._asked = asked

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        conversations = border.prompts(next_tensordict)
        for row, over in enumerate(next_tensordict.get("done").reshape(-1).tolist()):
            if over:
                self._asked.judge(row, border.read_message(border.messages(conversations[row])[-1]).text)
        return next_tensordict


def _told(chat: Sequence[Message], tools: Sequence[Any], parser: ToolCallParser) -> list[Message]:
    """Tell a model of the tools whose chat template shows none."""
    plain = [{"role": message.role, "content": message.content} for message in chat]
    told = with_tools_message(plain, tools, parser)
    return [Message(str(message["role"]), cast("Any", message["content"])) for message in told]
