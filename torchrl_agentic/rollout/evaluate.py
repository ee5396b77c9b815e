"""Evaluate a model with tools on samples that have known answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torchrl.envs import Compose

from torchrl_agentic.collectors import Task, Trajectory
from torchrl_agentic.dispatch.event_loop import run
from torchrl_agentic.errors import MissingExtra
from torchrl_agentic.limits import Limiter
from torchrl_agentic.messages import Message
from torchrl_agentic.parsers import ToolCallParser, get_parser, with_tools_message
from torchrl_agentic.records import Recorders, Recording, TrajectoryHook, as_hook
from torchrl_agentic.rollout.generate import as_engine, finished_trajectories
from torchrl_agentic.rollout.policies import Mode
from torchrl_agentic.tools.base import Toolset
from torchrl_agentic.tools.verl.graders import numbers
from torchrl_agentic.transforms import EndTrajectory, RecordTransform, ToolCompose


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
    seed: int | None = None,
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
    """Run a model on all samples, many at once, and yield the completions in the order of the samples.

    A trajectory ends with a message without tool calls, or with a tool that stops it.

    Args:
        samples: The samples.
        tools: Tools that the model may call, as in `ToolCompose`.
        model: A transformers model, a vLLM engine or an `Engine`, as in `as_engine`.
        tokenizer: The tokenizer of the model.
        parser: Name of the format in which the model calls tools.
        rows: Number of samples that run at once.
        max_turns: Upper bound on the model's messages in a trajectory.
        max_new_tokens: Upper bound on the tokens of one message.
        temperature: Sampling temperature; 0 takes the most likely token.
        seed: Seed of sampling with a transformers model; None: not reproducible.
        mode: "tokens" keeps the sampled ids; "history" renders the conversation anew each turn.
        tool_choice: Constraint on tool calls, as in `agent_policy`.
        toolsets: Toolsets whose tools the model may call too.
        rate_limits: Limiter of each tool, by name.
        per_call_timeout: Time limit of a tool call in seconds; None: no limit.
        per_turn_timeout: Time limit of all calls of a turn in seconds; None: no limit.
        max_calls_per_turn: Upper bound on the tool calls that run in a turn; None: no bound.
        tokenizer_options: Further arguments of `ChatEncoder` in the mode "tokens".
        recorder: Records trajectories, as in `ToolCompose`, with the names, expected answers and scores of
            the samples, and in the mode "tokens" with their tokens.
    """
    found_parser = get_parser(parser, tokenizer=tokenizer)
    hook = as_hook(recorder)
    compose = ToolCompose(
        tools,
        found_parser,
        rate_limits=rate_limits,
        per_call_timeout=per_call_timeout,
        per_turn_timeout=per_turn_timeout,
        max_calls_per_turn=max_calls_per_turn,
        recorder=None if hook is None else RenamedHook(hook),
    ).with_toolsets(toolsets)
    shows_tools = "tools" in (tokenizer.chat_template or "")
    transforms: list[Any] = [compose, EndTrajectory(max_turns=max_turns, when_no_calls=True)]
    if recorder is not None:
        transforms.append(RecordTransform(tokens=mode == "tokens"))
    options = {"tools": compose.tools if shows_tools else ()}
    if mode == "tokens":
        options |= tokenizer_options or {}
    else:
        options |= {"use_inference_chat_template": True, "tokenization_sanity_check_mode": "disable"}
    constraint: dict[str, Any] = {}
    if tool_choice is not None:
        if isinstance(model, torch.nn.Module):
            raise ValueError("structural tags need vLLM; transformers generates without constraints")
        constraint = {"tool_choice": tool_choice, "parser": found_parser, "tools": compose.tools}
    engine = as_engine(
        model, tokenizer, temperature=temperature, max_concurrent=rows, seed=seed, **constraint
    )
    tasks: list[Task] = []
    for place, sample in enumerate(samples):
        chat = (
            list(sample.messages)
            if shows_tools
            else _with_tools(sample.messages, compose.tools, found_parser)
        )
        messages = [{"role": one.role, "content": one.content} for one in chat]
        tasks.append(Task(f"{place}:{sample.name}", messages, sample.answer))
    waiting: dict[int, Trajectory] = {}
    following = 0
    try:
        for trajectory in finished_trajectories(
            Compose(*transforms),
            engine,
            tokenizer,
            tasks,
            max_in_flight=rows,
            max_turns=max_turns,
            max_new_tokens=max_new_tokens,
            reward=_reward,
            tokenizer_options=options,
        ):
            waiting[int(trajectory.task.name.partition(":")[0])] = trajectory
            while following in waiting:
                yield Completion(samples[following], waiting.pop(following))
                following += 1
    finally:
        compose.close()
        if engine is not model:
            run(engine.close())


def _reward(trajectory: Trajectory) -> float | None:
    """Return the reward of an answer; None if the right one is unknown."""
    answer = trajectory.task.answer
    return None if answer is None else answer_reward(trajectory.answer, answer)


class RenamedHook(TrajectoryHook):
    """Records trajectories under the names of their samples instead of the collector's names.

    Args:
        hook: Receives the trajectories.
    """

    def __init__(self, hook: TrajectoryHook) -> None:
        self.hook = hook

    def begin(self, trajectory: str, row: int = 0) -> Recording:
        """Begin a record.

        Args:
            trajectory: Name that the collector gave: "place:name/group.index@collector".
            row: Not used: the place of the sample replaces it.
        """
        del row
        place, _, name = trajectory.rpartition("/")[0].partition(":")
        return self.hook.begin(name, int(place))


def _with_tools(chat: Sequence[Message], tools: Sequence[Any], parser: ToolCallParser) -> list[Message]:
    """Describe the tools in the system message, for a chat template that does not show them."""
    plain = [{"role": message.role, "content": message.content} for message in chat]
    shown = with_tools_message(plain, tools, parser)
    return [Message(str(message["role"]), message["content"]) for message in shown]
