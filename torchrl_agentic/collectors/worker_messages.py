"""Messages between a collector and its workers: names, ids, texts and turns, in pickled batches."""

from __future__ import annotations

import copyreg
import dataclasses
import io
import operator
import pickle
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar

from torchrl_agentic.engines.base import Finish
from torchrl_agentic.messages import (
    CallError,
    DispatchResult,
    JsonPart,
    Message,
    ParsedCall,
    TextPart,
    Timing,
    ToolResult,
    Turn,
)
from torchrl_agentic.trajectory.span import Cause, Span
from torchrl_agentic.trajectory.task import Task

M = TypeVar("M")
T = TypeVar("T")

GATHER_S = (0.002, 0.05)
"""Least and largest number of seconds for which messages are gathered before a batch leaves."""
GATHER_PER_TRAJECTORY_S = 4e-5
"""Seconds by which this time grows with each trajectory on the worker."""


class Begin(NamedTuple):
    """To a worker: run a trajectory."""

    name: str
    task: Task
    row: int
    group_name: str


class Answer(NamedTuple):
    """To a worker: the sampled ids of an answer, under a policy version."""

    name: str
    ids: array[int]
    finish: Finish
    version: int


class EngineMessage(NamedTuple):
    """To a worker: the message of an engine that takes messages."""

    name: str
    message: Message
    version: int


class TokenChunk(NamedTuple):
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


class Sealed(Generic[T]):
    """A value that is pickled on its own, and unpickled when it is read.

    A collector holds turns as bytes, which its garbage collector need not visit, until the trajectory has
    ended or a recorder reads them.

    Args:
        value: The value, on the side of the sender.
        pickled: The pickled value, on the side of the receiver, where `value` is None.
    """

    __slots__ = ("_pickled", "_value")

    def __init__(self, value: T | None, pickled: bytes = b"") -> None:
        self._value, self._pickled = value, pickled

    def __reduce__(self) -> tuple[Any, ...]:
        return Sealed, (None, self._pickled or _pickled(self._value))

    def open(self) -> T:
        """Return the value."""
        return pickle.loads(self._pickled) if self._value is None else self._value


class WrittenTurns(NamedTuple):
    """The fields of the messages of some turns, their records, and the rewards of the transforms."""

    messages: Sequence[Mapping[str, Any]]
    turns: Sequence[Turn]
    rewards: Sequence[float]


class News(NamedTuple):
    """Changes of a trajectory since the last message about it.

    Attributes:
        said: Its new messages and turns; None: no new turn.
        n_turns: Number of new turns.
        spans: Spans that have ended, by the clock of the worker.
        base: Number of tokens that stay, from the first on.
        ids: Ids of the tokens behind them.
        sources: Sources of these tokens.
    """

    said: Sealed[WrittenTurns] | None
    n_turns: int
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
    reason: str
    terminated: bool
    truncated: bool
    columns: Mapping[str, Any]


class Failed(NamedTuple):
    """From a worker: a trajectory failed or was cancelled, and holds nothing open."""

    name: str
    error: BaseException
    phase: Literal["task", "trajectory", "reward"]


ToWorker: TypeAlias = Begin | Answer | EngineMessage | TokenChunk | Refuse | Cancel
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


_KINDS: tuple[type[Any], ...] = (
    *(Task, Span),
    *(Turn, Message, DispatchResult, ParsedCall, CallError, ToolResult, Timing, TextPart, JsonPart),
)


def _names(kind: type[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _reducer(number: int, kind: type[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """Return how a frozen dataclass is pickled: as its number and its values, in the order of its fields.

    What `dataclasses` writes looks the fields up for each object: a third of the time that a message took.
    """
    values_of = operator.attrgetter(*_names(kind))
    return lambda value: (_restored, (number, *values_of(value)))


def _restored(number: int, *values: Any) -> Any:
    made = object.__new__(_KINDS[number])
    for assign, value in zip(_SETTERS[number], values, strict=True):
        assign(made, value)
    return made


_REDUCERS = {kind: _reducer(number, kind) for number, kind in enumerate(_KINDS)}
_SETTERS = [[getattr(kind, name).__set__ for name in _names(kind)] for kind in _KINDS]


def _pickled(value: Any) -> bytes:
    file = io.BytesIO()
    pickler = pickle.Pickler(file, 5)
    pickler.dispatch_table = {**copyreg.dispatch_table, **_REDUCERS}
    pickler.dump(value)
    return file.getvalue()


def pack(time: float, messages: Sequence[M], refuse: Callable[[M, Exception], M | None]) -> bytes:
    """Pickle a batch of messages.

    Args:
        time: Time of the sender's event loop.
        messages: The messages.
        refuse: Called with a message that cannot be pickled, and with the error; returns the message that
            takes its place, or None.
    """
    try:
        return _pickled((time, messages))
    except Exception:
        return _pickled((time, [one for one in (_portable(m, refuse) for m in messages) if one]))


def _portable(message: M, refuse: Callable[[M, Exception], M | None]) -> M | None:
    try:
        _pickled(message)
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
    from torchrl_agentic.errors import InfrastructureError, InvalidTask, ToolFailed, UserFailed

    text = f"{type(error).__name__}: {error}"
    for kind in (ToolFailed, UserFailed, InfrastructureError, InvalidTask, TimeoutError, ValueError):
        if isinstance(error, kind):
            return kind(text)
    return RuntimeError(text)
