"""Messages between a collector and its workers: names, ids, texts and states, in pickled batches."""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from torchrl_agentic.collectors.span import Cause, Span
from torchrl_agentic.collectors.task import Task
from torchrl_agentic.collectors.trajectory_state import TrajectoryState
from torchrl_agentic.engines.base import Finish
from torchrl_agentic.messages import Message

M = TypeVar("M")

GATHER_S = (0.002, 0.05)
"""Least and largest number of seconds for which messages are gathered before a batch leaves."""
GATHER_PER_TRAJECTORY_S = 4e-5
"""Seconds by which this time grows with each trajectory on the worker."""


class Begin(NamedTuple):
    """To a worker: run a trajectory, or continue it from a state."""

    name: str
    task: Task
    row: int
    state: TrajectoryState | None


class Answer(NamedTuple):
    """To a worker: the sampled ids of an answer, under a policy version."""

    name: str
    ids: array[int]
    finish: Finish
    version: int


class Reply(NamedTuple):
    """To a worker: the message of an engine that takes messages."""

    name: str
    message: Message
    version: int


class Piece(NamedTuple):
    """To a worker: sampled ids of an answer that goes on."""

    name: str
    ids: Sequence[int]


class Refuse(NamedTuple):
    """To a worker: the engine failed; or the conversation is too long for it, which ends a trajectory."""

    name: str
    text: str
    is_too_long: bool


class Cancel(NamedTuple):
    """To a worker: end a trajectory, and close what it holds open."""

    name: str


class News(NamedTuple):
    """Changes of a trajectory since the last message about it.

    Attributes:
        state: Its new messages and turns, with the current values of everything else; None: no new turn.
        spans: Spans that have ended, by the clock of the worker.
        base: Number of tokens that stay, from the first on.
        ids: Ids of the tokens behind them.
        sources: Sources of these tokens.
    """

    state: TrajectoryState | None
    spans: Sequence[Span]
    base: int = 0
    ids: array[int] = array("q")
    sources: array[int] = array("q")


class Ask(NamedTuple):
    """From a worker: sample an answer behind the tokens of a trajectory."""

    name: str
    news: News
    max_tokens: int
    streams: bool
    media: Mapping[str, Sequence[Any]]


class AskChat(NamedTuple):
    """From a worker: request a message; only new messages travel, and the tools with the first request."""

    name: str
    news: News
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    max_tokens: int


class Doing(NamedTuple):
    """From a worker: what a trajectory does from now on."""

    name: str
    cause: Cause
    detail: str


class StartedEarly(NamedTuple):
    """From a worker: calls of a trajectory started while the model wrote their message."""

    name: str
    n_calls: int


class Ended(NamedTuple):
    """From a worker: a trajectory has ended, and holds nothing open."""

    name: str
    news: News
    final_reward: float
    token_drift: int


class Failed(NamedTuple):
    """From a worker: a trajectory failed or was cancelled, and holds nothing open."""

    name: str
    error: BaseException
    phase: Literal["task", "trajectory", "reward"]


ToWorker: TypeAlias = Begin | Answer | Reply | Piece | Refuse | Cancel
FromWorker: TypeAlias = Ask | AskChat | Doing | StartedEarly | Ended | Failed


def gather_s(n_trajectories: int) -> float:
    """Return for how long messages are gathered before a batch leaves.

    A batch costs the same time whatever it holds, so that many trajectories should share one. Each message
    waits a little longer then: 50 ms with 1,250 trajectories, where a turn takes seconds.

    Args:
        n_trajectories: Number of trajectories on the worker.
    """
    least, most = GATHER_S
    return min(most, least + GATHER_PER_TRAJECTORY_S * n_trajectories)


def pack(time: float, messages: Sequence[M], refuse: Callable[[M, Exception], M | None]) -> bytes:
    """Pickle a batch of messages.

    Args:
        time: Time of the sender's event loop.
        messages: The messages.
        refuse: Called with a message that cannot be pickled, and with the error; returns the message that
            takes its place, or None.
    """
    try:
        return pickle.dumps((time, messages), 5)
    except Exception:
        return pickle.dumps((time, [one for one in (_portable(m, refuse) for m in messages) if one]), 5)


def _portable(message: M, refuse: Callable[[M, Exception], M | None]) -> M | None:
    try:
        pickle.dumps(message, 5)
    except Exception as error:
        return refuse(message, error)
    return message


def unpack(batch: bytes) -> tuple[float, list[Any]]:
    """Return the time and the messages of a batch that `pack` made."""
    return pickle.loads(batch)


def portable_error(error: BaseException) -> BaseException:
    """Return an error that survives pickling: itself, or one of the nearest base class with its text."""
    try:
        again = pickle.loads(pickle.dumps(error, 5))
        if type(again) is type(error):
            return error
    except Exception:  # an exception whose arguments are not those of its constructor, or cannot be pickled
        pass
    from torchrl_agentic.errors import InfrastructureError

    text = f"{type(error).__name__}: {error}"
    for kind in (InfrastructureError, TimeoutError, ValueError):
        if isinstance(error, kind):
            return kind(text)
    return RuntimeError(text)
