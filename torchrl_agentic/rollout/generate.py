"""Run a model with tools on tasks, one trajectory per task."""

# TensorDict border: TensorDict and TorchRL annotate few results.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

from tensordict import TensorDictBase

from torchrl_agentic.collectors.agent_collector import AgentCollector
from torchrl_agentic.collectors.rollout_loop import CollectorError
from torchrl_agentic.engines.base import ChatEngine, Engine
from torchrl_agentic.tokens.encoding import opened, parts_of
from torchrl_agentic.trajectory.task import Task
from torchrl_agentic.trajectory.task_columns import TaskColumns
from torchrl_agentic.trajectory.trajectory import Trajectory
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
    return [[opened(part, kind) for part in parts_of(chat, kind)] for chat in chats]


def rollout(
    transforms: Any,
    engine: Engine | ChatEngine,
    tokenizer: Any,
    tasks: Iterable[Any],
    *,
    max_in_flight: int | Literal["auto"] = "auto",
    max_turns: int = 8,
    max_new_tokens: int = 512,
    max_trajectory_tokens: int | None = None,
    reward: Callable[[Trajectory], Any] | None = None,
    trajectory_timeout: float | None = None,
    tokenizer_options: Mapping[str, Any] | None = None,
) -> list[Trajectory]:
    """Run one trajectory per task over an engine, with the loop of `AgentCollector`.

    Trajectories advance independently. For training while trajectories run, use `AgentCollector` itself.

    Args:
        transforms: A `ToolCompose`, or the `Compose` of one with other transforms, as in `AgentCollector`.
        engine: Samples the answers; the caller closes it.
        tokenizer: Tokenizer of the engine; None for an engine that takes messages, or with a `TurnTokenizer`.
        tasks: `Task` objects or rows of a data set (see `Task.of`), read as they are needed.
        max_in_flight: Number of trajectories that run at once, or "auto" to keep the engine busy.
        max_turns: Upper bound on the messages of the model in a trajectory.
        max_new_tokens: Upper bound on the tokens of one message.
        max_trajectory_tokens: Upper bound on the tokens of a trajectory; None: the context length of the
            engine.
        reward: Function of a finished `Trajectory` that returns a number, a bool or a `Score`, as in
            `AgentCollector`; the package `rewards` has some.
        trajectory_timeout: Seconds that a trajectory may take; None: no limit.
        tokenizer_options: Additional arguments of `ChatEncoder`.

    Returns:
        The trajectories, in the order of the tasks.

    Raises:
        InfrastructureError: If the engine is lost.
        TimeoutError: If a trajectory takes too long.
        RewardError: If the reward function raises.
        InvalidTask: If a prompt leaves no room for an answer, or a reward says so.
        ValueError: If a task is invalid, or a number is out of range.
    """
    return list(
        in_order(
            transforms,
            engine,
            tokenizer,
            tasks,
            max_in_flight=max_in_flight,
            max_turns=max_turns,
            max_new_tokens=max_new_tokens,
            max_trajectory_tokens=max_trajectory_tokens,
            reward=reward,
            trajectory_timeout=trajectory_timeout,
            tokenizer_options=tokenizer_options,
        )
    )


def in_order(
    transforms: Any, engine: Engine | ChatEngine, tokenizer: Any, tasks: Iterable[Any], **options: Any
) -> Generator[Trajectory]:
    """Yield one trajectory per task in the order of the tasks, each as soon as the earlier ones have ended.

    Args:
        transforms: As in `rollout`.
        engine: Samples the answers.
        tokenizer: Tokenizer of the engine, or None.
        tasks: Tasks or rows, read as they are needed.
        options: Additional arguments of `AgentCollector`.
    """
    places: dict[int, int] = {}  # of the tasks that run, by id

    def numbered() -> Iterator[Task]:
        for number, row in enumerate(tasks):
            task = Task.of(row, number)
            if id(task) in places:  # the same object again
                task = replace(task)
            places[id(task)] = number
            yield task

    collector = AgentCollector(
        transforms,
        engine=engine,
        tokenizer=tokenizer,
        tasks=numbered(),
        max_staleness=None,
        on_failure="raise",
        **options,
    )
    waiting: dict[int, Trajectory] = {}
    following = 0
    with collector:
        try:
            for batch in collector.trajectories():
                for trajectory in batch:
                    waiting[places.pop(id(trajectory.task))] = trajectory
                while following in waiting:
                    yield waiting.pop(following)
                    following += 1
        except CollectorError as error:
            raise error.__cause__ or error from None


def tasks_of(questions: Iterable[str | Mapping[str, Any]], system_prompt: str | None = None) -> list[Task]:
    """Return a task for each question, named by its number.

    Args:
        questions: Texts of the user, or rows of a data set, see `Task.of`.
        system_prompt: Text of a system message for questions that begin without one; None: no such message.
    """
    columns = TaskColumns(system_prompt=system_prompt)
    tasks: list[Task] = []
    for number, one in enumerate(questions):
        parts = columns.read({"query": one} if isinstance(one, str) else one)
        tasks.append(Task.from_parts(parts, str(number if parts.name is None else parts.name)))
    return tasks
