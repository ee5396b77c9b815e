"""Evaluate a model with tools on samples that have known answers."""

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
from torchrl_agentic.rollout.generate import Trajectory, rollout
from torchrl_agentic.rollout.policies import Mode, agent_policy
from torchrl_agentic.tools.base import Toolset
from torchrl_agentic.tools.verl.graders import numbers
from torchrl_agentic.transforms import EndTrajectory, RecordTransform, ToolCompose, TurnTokenizer
from torchrl_agentic.transforms import history as border


def answer_reward(text: str, answer: str) -> float:
    """Return 1.0 for a correct answer, else 0.0.

    If the expected answer has numbers, the last numbers of the text must equal them as numbers, so that
    220000.0 is 220000. Otherwise the text must contain the answer, in upper or lower case. Reasoning up to
    `</think>` does not count.

    Args:
        text: The last message of the model.
        answer: The expected answer.
    """
    text = text.rpartition("</think>")[2]
    wanted = numbers(answer)
    if wanted:
        return float(numbers(text)[-len(wanted) :] == wanted)
    return float(answer.strip().casefold() in text.casefold())


Engine = Literal["transformers", "vllm"]


@dataclass(frozen=True, slots=True)
class Sample:
    """A task for a model.

    Attributes:
        name: Name of the sample, and of its trajectory in records.
        messages: Messages that the conversation begins with.
        answer: The expected answer, see `answer_reward`; None if it is unknown.
    """

    name: str
    messages: tuple[Message, ...]
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """The trajectory of a sample.

    Attributes:
        sample: The sample.
        trajectory: The conversation, and its tokens in the mode "tokens".
    """

    sample: Sample
    trajectory: Trajectory

    @property
    def reward(self) -> float | None:
        """Return 1.0 if the model's last message is correct, 0.0 if not, None without an expected answer."""
        if self.sample.answer is None:
            return None
        return answer_reward(self.trajectory.answer, self.sample.answer)


def load_model(path: str, engine: Engine = "transformers") -> tuple[Any, Any]:
    """Load a model and its tokenizer.

    Args:
        path: A folder, or a name on the Hugging Face hub.
        engine: Engine that runs the model: "transformers", in float32 on the CPU, or "vllm".

    Raises:
        MissingExtra: If vLLM is not installed.
        OSError: If there is no such model.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # the command line has a progress bar of its own
    tokenizer = cast("Any", AutoTokenizer).from_pretrained(path, padding_side="left")
    if engine == "transformers":
        model = cast("Any", AutoModelForCausalLM).from_pretrained(path, dtype="auto")
        return model.float().eval(), tokenizer
    try:
        import vllm  # pyright: ignore[reportMissingImports]  only in .venv-vllm
    except ImportError:
        raise MissingExtra("engine: vllm", "vllm", "vllm") from None
    return cast("Any", vllm).LLM(model=path, enforce_eager=True), tokenizer


def evaluate(
    samples: Sequence[Sample],
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
) -> Iterator[Completion]:
    """Run a model on all samples, in batches, and yield the completions in the order of the samples.

    A trajectory ends with a message without tool calls, or with a tool that stops it.

    Args:
        samples: The samples.
        tools: Tools that the model may call, as in `ToolCompose`.
        model: A transformers model or a vLLM engine, as in `agent_policy`.
        tokenizer: The tokenizer of the model.
        parser: Name of the format in which the model calls tools.
        rows: Number of samples in a batch.
        max_turns: Upper bound on the model's messages in a trajectory.
        max_new_tokens: Upper bound on the tokens of one message.
        temperature: Sampling temperature; 0 takes the most likely token.
        mode: "tokens" keeps the sampled ids with a `TurnTokenizer`; "history" renders the conversation anew
            each turn.
        tool_choice: Constraint on tool calls, as in `agent_policy`.
        toolsets: Toolsets whose tools the model may call too.
        rate_limits: Limiter of each tool, by name.
        per_call_timeout: Time limit of a tool call in seconds; None: no limit.
        per_turn_timeout: Time limit of all calls of a turn in seconds; None: no limit.
        max_calls_per_turn: Upper bound on the tool calls that run in a turn; None: no bound.
        tokenizer_options: Further arguments of the `TurnTokenizer` of the mode "tokens".
        recorder: Records trajectories, as in `ToolCompose`, with the names, expected answers and scores of
            the samples, and in the mode "tokens" with their tokens.
    """
    rows = min(rows, len(samples))
    found_parser = get_parser(parser, tokenizer=tokenizer)
    records = _SampleRecords(as_hook(recorder))
    compose = ToolCompose(
        tools,
        found_parser,
        rate_limits=rate_limits,
        per_call_timeout=per_call_timeout,
        per_turn_timeout=per_turn_timeout,
        max_calls_per_turn=max_calls_per_turn,
        recorder=records.hook and records,
    ).with_toolsets(toolsets)
    shows_tools = "tools" in (tokenizer.chat_template or "")
    transforms: list[Any] = [compose, EndTrajectory(max_turns=max_turns, when_no_calls=True)]
    if mode == "tokens":
        shown = compose.tools if shows_tools else ()
        transforms.append(TurnTokenizer(tokenizer, tools=shown, **(tokenizer_options or {})))
    if recorder is not None:
        transforms += [_ScoreTransform(records), RecordTransform(tokens=mode == "tokens")]
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
        for batch in range(math.ceil(len(samples) / rows)):
            some = samples[batch * rows : (batch + 1) * rows]
            filled = [*some, *[some[-1]] * (rows - len(some))]
            records.samples = some
            chats = [list(sample.messages) for sample in filled]
            if not shows_tools:
                chats = [_with_tools(chat, compose.tools, found_parser) for chat in chats]
            found = rollout(env, policy, chats, max_turns=max_turns)
            yield from map(Completion, some, found)
    finally:
        env.close()


class _SampleRecords(TrajectoryHook):
    """Records trajectories under the names of their samples, but not rows that only fill the batch."""

    def __init__(self, hook: TrajectoryHook | None) -> None:
        self.hook = hook
        self.samples: Sequence[Sample] = ()
        self._open: dict[int, Recording] = {}

    def begin(self, trajectory: str, row: int = 0) -> Recording:
        """Begin a record that has the expected answer."""
        if self.hook is None or row >= len(self.samples):
            return Recording()
        self._open[row] = self.hook.begin(self.samples[row].name, row)
        self._open[row].annotate(gts=self.samples[row].answer)
        return self._open[row]

    def score(self, row: int, text: str) -> None:
        """Record the score of the last message of a row, if the expected answer is known."""
        recording = self._open.pop(row, None)
        if recording is not None and (answer := self.samples[row].answer) is not None:
            recording.annotate(score=answer_reward(text, answer))


class _ScoreTransform(Transform):
    """Records the scores of trajectories when they end."""

    def __init__(self, records: _SampleRecords) -> None:
        super().__init__()
        self._records = records

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        conversations = border.prompts(next_tensordict)
        done: list[bool] = cast("Any", next_tensordict).get("done").reshape(-1).tolist()
        for row, is_done in enumerate(done):
            if is_done:
                self._records.score(row, conversations[row].messages[-1].read().text)
        return next_tensordict


def _with_tools(chat: Sequence[Message], tools: Sequence[Any], parser: ToolCallParser) -> list[Message]:
    """Describe the tools in the system message, for a chat template that does not show them."""
    plain = [{"role": message.role, "content": message.content} for message in chat]
    shown = with_tools_message(plain, tools, parser)
    return [Message(str(message["role"]), message["content"]) for message in shown]
