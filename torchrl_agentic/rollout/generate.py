"""Run one trajectory per task over an engine."""

# TensorDict border: TensorDict and TorchRL annotate few results.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from tensordict import TensorDictBase

from torchrl_agentic.collectors import AgentCollector, Task, Trajectory
from torchrl_agentic.engines import ChatEngine, Engine, LockStep, TransformersEngine, VLLMEngine
from torchrl_agentic.rollout.policies import agent_policy
from torchrl_agentic.tokens import media
from torchrl_agentic.transforms import history as border


def media_of(td: TensorDictBase, kind: Literal["image", "video"] = "image") -> list[list[Any]]:
    """Return all images or videos of each row's ("history", "prompt"), in the order of their placeholders.

    ("tokens", "prompt") holds their placeholders already, so a transformers model takes
    `processor.image_processor(images=media_of(td)[row])` beside the ids. An engine that inserts the
    placeholders itself, as vLLM does, takes the rendered text and these images instead.

    Args:
        td: A batch, [*B].
        kind: "image" or "video".

    Returns:
        A list per row, rows counted through the flattened batch. Images that came as data are opened as
        `PIL.Image` in RGB, videos that came as data are bytes; paths, URLs and objects are unchanged.

    Raises:
        MissingExtra: If an image must be opened and Pillow is not installed.
    """
    chats = [
        [message.for_template() for message in conversation.messages] for conversation in border.prompts(td)
    ]
    return [[media.opened(part, kind) for part in media.parts_of(chat, kind)] for chat in chats]


def rollout(
    transforms: Any,
    engine: Engine | ChatEngine,
    tokenizer: Any,
    tasks: Sequence[Any],
    *,
    max_in_flight: int | Literal["auto"] = "auto",
    max_turns: int = 8,
    max_new_tokens: int = 512,
    **options: Any,
) -> list[Trajectory]:
    """Run one trajectory per task, and return them in the order of the tasks.

    Args:
        transforms: A `ToolCompose`, or a `Compose` of it and others, as `AgentCollector` takes it.
        engine: Samples the answers; see `as_engine` for a model.
        tokenizer: Tokenizer of the engine, or None if there is a `TurnTokenizer`.
        tasks: `Task` objects, or rows as `Task.of` reads them.
        max_in_flight: Number of trajectories that run at once.
        max_turns: Upper bound on the model's messages in a trajectory.
        max_new_tokens: Upper bound on the tokens of one message.
        options: Further arguments of `AgentCollector`, such as `reward` and `tokenizer_options`.

    Raises:
        CollectorError: If a trajectory fails; its cause is the failure.
    """
    given = [Task.of(task, number) for number, task in enumerate(tasks)]
    places = {id(task): place for place, task in enumerate(given)}
    found: list[Trajectory | None] = [None] * len(given)
    for trajectory in finished_trajectories(
        transforms,
        engine,
        tokenizer,
        given,
        max_in_flight=max_in_flight,
        max_turns=max_turns,
        max_new_tokens=max_new_tokens,
        **options,
    ):
        found[places[id(trajectory.task)]] = trajectory
    return [one for one in found if one is not None]


def finished_trajectories(
    transforms: Any, engine: Engine | ChatEngine, tokenizer: Any, tasks: Iterable[Task], **options: Any
) -> Iterator[Trajectory]:
    """Run one trajectory per task, and yield each soon after it has ended.

    Args:
        transforms: As `AgentCollector` takes them.
        engine: Samples the answers.
        tokenizer: Tokenizer of the engine, or None.
        tasks: Tasks, read as they are needed.
        options: Further arguments of `AgentCollector`.

    Raises:
        CollectorError: If a trajectory fails; its cause is the failure.
    """
    given: dict[str, Any] = {"max_staleness": None, "on_failure": "raise", **options}
    collector = AgentCollector(transforms, engine=engine, tokenizer=tokenizer, tasks=tasks, **given)
    with collector:
        for batch in collector.trajectories():
            yield from batch


def as_engine(
    model: Any,
    tokenizer: Any,
    *,
    temperature: float = 1.0,
    max_concurrent: int = 64,
    seed: int | None = None,
    **options: Any,
) -> Engine | ChatEngine:
    """Return an engine that samples from a model.

    Args:
        model: An engine, which is returned as it is; a transformers model; a `vllm.LLM`, or vLLM's `AsyncLLM`
            or TorchRL's `AsyncVLLM`.
        tokenizer: Tokenizer of the model.
        temperature: Sampling temperature; 0 takes the most likely token.
        max_concurrent: Number of requests that a transformers model works on at once.
        seed: Seed of a transformers model's sampling; None: not reproducible.
        options: Further arguments of `VLLMEngine` or `TransformersEngine`.

    Raises:
        TypeError: If the model is of another type.
    """
    if isinstance(model, Engine | ChatEngine):
        return model
    if isinstance(model, torch.nn.Module) and hasattr(model, "generate"):
        return TransformersEngine(
            model, tokenizer, temperature=temperature, max_concurrent=max_concurrent, seed=seed, **options
        )
    kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(model).__mro__}
    if ("vllm", "LLM") in kinds:
        return LockStep(agent_policy(model, tokenizer, temperature=temperature, **options), tokenizer)
    if kinds & {("vllm", "AsyncLLM"), ("torchrl", "AsyncVLLM")}:
        return VLLMEngine(model, tokenizer=tokenizer, temperature=temperature, **options)
    raise TypeError(f"a transformers model, a vLLM engine or an Engine is needed; got {type(model).__name__}")


def tasks_of(rows: Iterable[Any], system_prompt: str | None = None) -> list[Task]:
    """Return tasks, named by their numbers.

    Args:
        rows: Questions, or rows of a data set as `Task.of` reads them.
        system_prompt: Text of a system message in front of each task; None: no system message.
    """
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    found = [
        Task.of({"query": row} if isinstance(row, str) else row, number) for number, row in enumerate(rows)
    ]
    return [replace(task, messages=[*system, *task.messages]) for task in found]
