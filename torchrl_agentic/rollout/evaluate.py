"""Evaluate a model with tools on samples that have known answers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torchrl.envs import Compose

from torchrl_agentic.collectors.task import Task, Trajectory
from torchrl_agentic.dispatch import event_loop
from torchrl_agentic.engines.base import ChatEngine, Engine
from torchrl_agentic.engines.lock_step import LockStep
from torchrl_agentic.engines.transformers_engine import TransformersEngine
from torchrl_agentic.engines.vllm_engine import VLLMEngine
from torchrl_agentic.errors import check_count
from torchrl_agentic.limits import Limiter
from torchrl_agentic.messages import JSON, Message, Turn
from torchrl_agentic.parsers import ToolCallParser, get_parser, with_tools_message
from torchrl_agentic.records import Recorders, Recording, as_hook
from torchrl_agentic.rollout.generate import in_order
from torchrl_agentic.rollout.policies import Mode, agent_policy
from torchrl_agentic.rollout.task_records import TaskRecords
from torchrl_agentic.tools.base import Toolset
from torchrl_agentic.tools.verl.graders import numbers
from torchrl_agentic.transforms import EndTrajectory, RecordTransform, ToolCompose
from torchrl_agentic.transforms.conversation import StoredMessage


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


EngineName = Literal["transformers", "vllm"]


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


def load_model(path: str, engine: EngineName = "transformers") -> tuple[Any, Any]:
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
    return VLLMEngine.from_model(
        path, tokenizer=tokenizer, engine_args={"enforce_eager": True}
    ).llm, tokenizer


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
    """Run a model on all samples, and yield the completions in the order of the samples.

    A trajectory ends with a message without tool calls, or with a tool that stops it.

    Args:
        samples: The samples.
        tools: Tools that the model may call, as in `ToolCompose`.
        model: A transformers model; vLLM's `AsyncLLM` or `LLM`, or TorchRL's `AsyncVLLM`; or an `Engine` or
            `ChatEngine`, which stays open.
        tokenizer: The tokenizer of the model.
        parser: Name of the format in which the model calls tools.
        rows: Number of samples that run at the same time.
        max_turns: Upper bound on the model's messages in a trajectory.
        max_new_tokens: Upper bound on the tokens of one message.
        temperature: Sampling temperature; 0 takes the most likely token. An `Engine` has its own.
        mode: "tokens" keeps the sampled ids; "history" renders the conversation anew each turn, and its
            trajectories have no ledger.
        tool_choice: Constraint on tool calls, as in `agent_policy`; only vLLM.
        toolsets: Toolsets whose tools the model may call too.
        rate_limits: Limiter of each tool, by name.
        per_call_timeout: Time limit of a tool call in seconds; None: no limit.
        per_turn_timeout: Time limit of all calls of a turn in seconds; None: no limit.
        max_calls_per_turn: Upper bound on the tool calls that run in a turn; None: no bound.
        tokenizer_options: Further arguments of `ChatEncoder` in the mode "tokens".
        recorder: Records trajectories, as in `ToolCompose`, with the names, expected answers and scores of
            the samples, and in the mode "tokens" with their tokens.

    Raises:
        ValueError: If `mode` is unknown, or a constraint on tool calls is not available.
        TypeError: If the model is of another type.
    """
    if mode not in ("tokens", "history"):
        raise ValueError(f"mode is 'tokens' or 'history'; got {mode!r}")
    check_count("rows", rows, optional=False)
    found_parser = get_parser(parser, tokenizer=tokenizer)
    hook = as_hook(recorder)
    compose = ToolCompose(
        tools,
        found_parser,
        rate_limits=rate_limits,
        per_call_timeout=per_call_timeout,
        per_turn_timeout=per_turn_timeout,
        max_calls_per_turn=max_calls_per_turn,
        recorder=None if hook is None else TaskRecords(hook, _finish_record),
    ).with_toolsets(toolsets)
    shows_tools = "tools" in (tokenizer.chat_template or "")
    transforms: list[Any] = [compose, EndTrajectory(max_turns=max_turns, when_no_calls=True)]
    if hook is not None:
        transforms.append(RecordTransform(tokens=mode == "tokens"))
    options: dict[str, Any] = {} if shows_tools else {"tools": ()}
    options |= (tokenizer_options or {}) if mode == "tokens" else {"use_inference_chat_template": True}
    engine = _engine_of(
        model,
        tokenizer,
        max_new_tokens=max_new_tokens,
        max_concurrent=rows,
        temperature=temperature,
        constraint={"tool_choice": tool_choice, "parser": found_parser, "tools": compose.tools},
    )

    def tasks() -> Iterator[Task]:
        for sample in samples:
            messages = sample.messages
            if not shows_tools:
                messages = _with_tools(messages, compose.tools, found_parser)
            yield Task(sample.name, [*map(StoredMessage.of, messages)], sample.answer)

    try:
        found = in_order(
            Compose(*transforms),
            engine,
            tokenizer,
            tasks(),
            max_in_flight=rows,
            max_turns=max_turns,
            max_new_tokens=max_new_tokens,
            tokenizer_options=options,
        )
        with contextlib.closing(found):
            for sample, trajectory in zip(samples, found, strict=True):
                yield Completion(sample, trajectory if mode == "tokens" else replace(trajectory, ledger=None))
    finally:
        if engine is not model:
            event_loop.run(engine.close())


def _engine_of(
    model: Any,
    tokenizer: Any,
    *,
    max_new_tokens: int,
    max_concurrent: int,
    temperature: float,
    constraint: Mapping[str, Any],
) -> Engine | ChatEngine:
    """Return an engine over a model, or the model if it is one."""
    kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(model).__mro__}
    if kinds & {("vllm", "AsyncLLM"), ("torchrl", "AsyncVLLM")}:
        return VLLMEngine(model, tokenizer=tokenizer, temperature=temperature, **constraint)
    if ("vllm", "LLM") in kinds:  # which works on one batch at a time
        policy = agent_policy(
            model, tokenizer, max_new_tokens=max_new_tokens, temperature=temperature, **constraint
        )
        return LockStep(policy, tokenizer, max_concurrent=max_concurrent)
    if constraint["tool_choice"] is not None:
        raise ValueError("structural tags need vLLM; other engines constrain answers by their own options")
    if isinstance(model, Engine | ChatEngine):
        return model
    if callable(getattr(model, "generate", None)) and hasattr(model, "get_input_embeddings"):
        seed = int(torch.randint(2**62, ()).item())  # so that torch.manual_seed makes runs repeat
        return TransformersEngine(
            model, tokenizer, temperature=temperature, max_concurrent=max_concurrent, seed=seed
        )
    raise TypeError(f"a transformers model, a vLLM engine or an Engine is needed; got {type(model).__name__}")


def _finish_record(recording: Recording, last: Turn, answer: JSON, reason: str) -> None:
    """End the record of a sample with its score, if the right answer is known."""
    if answer is not None:
        text = "" if last.outcome.results else last.message.text
        recording.annotate(score=answer_reward(text, str(answer)))
    recording.finish(reason)


def _with_tools(chat: Sequence[Message], tools: Sequence[Any], parser: ToolCallParser) -> list[Message]:
    """Describe the tools in the system message, for a chat template that does not show them."""
    plain = [{"role": message.role, "content": message.content} for message in chat]
    shown = with_tools_message(plain, tools, parser)
    return [Message(str(message["role"]), message["content"]) for message in shown]
