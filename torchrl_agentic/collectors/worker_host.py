"""`WorkerHost`: runs trajectories for a collector in another process, and talks to it in batches of bytes."""

from __future__ import annotations

import asyncio
import functools
import logging
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, cast

from torchrl_agentic.collectors.requests import Requests
from torchrl_agentic.collectors.trajectory_run import TrajectoryRun
from torchrl_agentic.collectors.worker_messages import (
    Answer,
    Ask,
    AskChat,
    Begin,
    Cancel,
    Doing,
    Ended,
    EngineMessage,
    Failed,
    FromWorker,
    News,
    Refuse,
    Sealed,
    StartedEarly,
    TokenChunk,
    WrittenTurns,
    gather_s,
    pack,
    portable_error,
    unpack,
)
from torchrl_agentic.collectors.worker_spec import WorkerSpec
from torchrl_agentic.engines.base import ContextExceeded, OnIds
from torchrl_agentic.messages import Message
from torchrl_agentic.tokens.ledger import TokenLedger
from torchrl_agentic.tokens.writer import TokenWriter
from torchrl_agentic.trajectory.span import Cause, Span
from torchrl_agentic.trajectory.spec import TrajectorySpec
from torchrl_agentic.trajectory.trajectory import Trajectory

logger = logging.getLogger(__name__)

CLOSE_LIMIT_S = 20.0
"""Seconds that cancelled trajectories may take to end."""


class EngineFailed(RuntimeError):
    """The engine of the collector failed; the collector knows the error."""


class _RemoteEngine:
    """The engine of the collector, as far as a trajectory sees it.

    Attributes:
        version: Policy version of the last answer.
        context_length: Number of tokens that it takes; None: unknown.
    """

    __slots__ = ("context_length", "version")

    def __init__(self, context_length: int | None) -> None:
        self.version, self.context_length = 0, context_length


class _ChatOf:
    """The engine that `MessagePrompting` asks for one message."""

    def __init__(self, hosted: _Hosted) -> None:
        self._hosted = hosted

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]],
        max_tokens: int,
        key: str,
    ) -> Message:
        """Return the next message of the model."""
        del key
        return await self._hosted.chat_with(messages, tools, max_tokens)


class _Hosted:
    """One trajectory: its run, its requests to the collector's engine, and what the collector knows of it.

    It takes the place of `Requests` and of the observer.
    """

    def __init__(
        self, begin: Begin, shared: TrajectorySpec, spec: WorkerSpec, engine: Any, post: Any
    ) -> None:
        self.engine: Any = engine
        self._post: Callable[[FromWorker], None] = post
        self._reply: asyncio.Future[Answer | EngineMessage] | None = None
        self._on_ids: OnIds | None = None
        self._spans: list[Span] = []
        self._n_said = 0  # messages that the collector knows, of an engine that takes messages
        self._n_seen: dict[str, int] = {}  # media that it knows, by kind
        self._n_messages = self._n_turns = self._n_tokens = 0
        self._ledger: TokenLedger | None = None
        self.run = TrajectoryRun(
            shared,
            cast("Requests", self),
            begin.task,
            name=begin.name,
            index=begin.row,
            max_new_tokens=spec.max_new_tokens,
            speculate=spec.speculate,
            observer=self,
            group_name=begin.group_name,
        )
        self.task = asyncio.get_running_loop().create_task(self.run.run())

    @property
    def version(self) -> int:
        """Policy version of the latest answer."""
        return int(self.engine.version)

    def doing(self, name: str, cause: Cause, detail: str = "") -> None:
        """Report what begins; the collector sees requests to the engine itself."""
        if cause != "engine":
            self._post(Doing(name, cause, detail))

    def started_early(self, name: str, count: int) -> None:
        """Report calls that started while the model wrote their message."""
        self._post(StartedEarly(name, count))

    def add(self, span: Span) -> None:
        """Keep a span for the next message."""
        if span.cause != "engine":
            self._spans.append(span)

    async def sample(
        self,
        writer: TokenWriter,
        *,
        max_tokens: int,
        key: str,
        on_ids: OnIds | None = None,
        media: Mapping[str, Sequence[Any]] | None = None,
    ) -> tuple[list[int], str]:
        """Sample an answer, as `Requests.sample` does."""
        fresh: dict[str, Sequence[Any]] = {}
        for kind, items in (media or {}).items():
            fresh[kind] = items[self._n_seen.get(kind, 0) :]
            self._n_seen[kind] = len(items)
        self._on_ids = on_ids
        answer = await self._asked(Ask(key, self._news(writer.ledger), max_tokens, on_ids is not None, fresh))
        assert isinstance(answer, Answer)
        ids = answer.ids.tolist()
        writer.add_sampled(ids)
        self._n_tokens += len(ids)
        return ids, answer.finish

    async def chat(self, ask: Callable[[Any], Awaitable[Message]], key: str) -> Message:
        """Request a message, as `Requests.chat` does."""
        del key
        return await ask(_ChatOf(self))

    async def chat_with(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], max_tokens: int
    ) -> Message:
        """Send the new messages, and return the answer."""
        said, self._n_said = messages[self._n_said :], len(messages)
        first = tools if len(said) == len(messages) else None
        found = await self._asked(AskChat(self.run.name, self._news(None), said, first, max_tokens))
        assert isinstance(found, EngineMessage)
        return found.message

    async def _asked(self, request: Ask | AskChat) -> Answer | EngineMessage:
        reply = self._reply = asyncio.get_running_loop().create_future()
        self._post(request)
        found = await reply
        self.engine.version = max(self.engine.version, found.version)
        return found

    def _news(self, ledger: TokenLedger | None) -> News:
        """Return what the collector does not know yet."""
        sealed, n_turns = None, self.run.n_turns - self._n_turns
        if n_turns:
            said = WrittenTurns(*self.run.since(self._n_messages, self._n_turns))
            self._n_messages += len(said.messages)
            self._n_turns += n_turns
            sealed = Sealed(said)
        spans, self._spans = self._spans, []
        if ledger is None:
            return News(sealed, n_turns, spans)
        if self._ledger is not None and ledger is not self._ledger:  # the prompt was rendered anew
            self._n_tokens = 0
        self._ledger, base = ledger, self._n_tokens
        ids, sources = ledger.since(base)
        self._n_tokens += len(ids)
        return News(sealed, n_turns, spans, base, ids, sources)

    def take(self, message: Answer | EngineMessage | TokenChunk | Refuse) -> None:
        """Take what the collector sends."""
        reply = self._reply
        if isinstance(message, TokenChunk):
            if self._on_ids is not None:
                self._on_ids(message.ids)
        elif reply is None or reply.done():
            return
        elif isinstance(message, Refuse):
            kind = ContextExceeded if message.is_too_long else EngineFailed
            reply.set_exception(kind(message.text))
        else:
            reply.set_result(message)

    def report(self) -> Ended | Failed:
        """Return the last message, once the task has ended."""
        name = self.run.name
        if self.task.cancelled():
            return Failed(name, asyncio.CancelledError(), self.run.phase)
        error = self.task.exception()
        if error is None:
            found: Trajectory = self.task.result()
            if found.ledger is not None:  # the same tokens as before, cut at the bound
                self._ledger = found.ledger
            return Ended(
                name,
                self._news(found.ledger),
                found.reason,
                found.terminated,
                found.truncated,
                found.columns,
            )
        sent = portable_error(error)
        if not isinstance(error, EngineFailed):
            sent.add_note("".join(traceback.format_exception(error)).rstrip())
        return Failed(name, sent, self.run.phase)


class WorkerHost:
    """Runs the trajectories of a worker on the event loop that is running when it is created.

    `deliver` takes batches from the collector, `collect` returns those for it.

    Args:
        shared: What the trajectories share.
        spec: What that was created from.
    """

    def __init__(self, shared: TrajectorySpec, spec: WorkerSpec) -> None:
        self._shared, self._spec = shared, spec
        self._engine = _RemoteEngine(spec.context_length)
        self._loop = asyncio.get_running_loop()
        self._hosted: dict[str, _Hosted] = {}
        self._outbox: list[FromWorker] = []
        self._filled = asyncio.Event()
        self._is_closed = False

    @property
    def running(self) -> int:
        """Number of trajectories that have not ended."""
        return len(self._hosted)

    def deliver(self, batch: bytes) -> None:
        """Take a batch of messages."""
        for message in unpack(batch)[1]:
            if isinstance(message, Begin):
                self._begin(message)
            elif (hosted := self._hosted.get(message.name)) is None:
                continue  # it has ended, and the collector will read so
            elif isinstance(message, Cancel):
                hosted.task.cancel()
            else:
                hosted.take(message)

    def _begin(self, message: Begin) -> None:
        if self._is_closed:
            return
        try:
            hosted = _Hosted(message, self._shared, self._spec, self._engine, self._post)
        except Exception as error:
            self._post(Failed(message.name, portable_error(error), "task"))
            return
        self._hosted[message.name] = hosted
        hosted.task.add_done_callback(functools.partial(self._ended, hosted))

    def _ended(self, hosted: _Hosted, _: object) -> None:
        self._hosted.pop(hosted.run.name, None)
        self._post(hosted.report())

    def _post(self, message: FromWorker) -> None:
        self._outbox.append(message)
        self._filled.set()

    async def collect(self) -> bytes:
        """Wait for messages, and return them."""
        await self._filled.wait()
        await asyncio.sleep(gather_s(len(self._hosted)))
        self._filled.clear()
        messages, self._outbox = self._outbox, []
        return pack(self._loop.time(), messages, self._refused)

    def _refused(self, message: FromWorker, error: Exception) -> Failed:
        """Fail a trajectory whose turn cannot travel."""
        if (hosted := self._hosted.get(message.name)) is not None:
            hosted.task.cancel()
        phase: Literal["trajectory"] = "trajectory"
        return Failed(message.name, TypeError(f"{message.name} cannot leave its worker: {error}"), phase)

    async def close(self) -> None:
        """Cancel all trajectories, close what they hold open, and tear the tools down."""
        self._is_closed = True
        tasks = [hosted.task for hosted in self._hosted.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=CLOSE_LIMIT_S)
            if late:
                logger.error("%d trajectories do not end although they were cancelled", len(late))
        await self._shared.close()
        await asyncio.to_thread(self._shared.compose.close)

    def abandon(self) -> list[asyncio.Task[Trajectory]]:
        """Cancel all trajectories and send nothing any more, as a process that dies; return their tasks."""
        self._is_closed = True
        tasks = [hosted.task for hosted in self._hosted.values()]
        for task in tasks:
            task.cancel()
        return tasks
