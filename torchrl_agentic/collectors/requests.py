"""`Requests`: the requests of a collector to its engine, with retries, updates and resumed answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Literal, TypeVar, cast, get_args

from torchrl_agentic.collectors.failure_log import FailureLog
from torchrl_agentic.collectors.failures import OUTAGE_S
from torchrl_agentic.collectors.request_permits import RequestPermits
from torchrl_agentic.collectors.stats import CollectorStats, Event
from torchrl_agentic.engines.base import ChatEngine, Engine, EngineUnusable, Finish, OnIds, Sampled
from torchrl_agentic.engines.request_gate import RequestGate
from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.limits.backoff import backoff_pause_s
from torchrl_agentic.tokens.ledger import SAMPLED, TokenLedger
from torchrl_agentic.tokens.writer import TokenWriter

T = TypeVar("T")
logger = logging.getLogger(__name__)

OnUpdate = Literal["resume", "finish"]
_ROUNDING = 1e-3  # by which a log-probability may be above 0
MAX_EMPTY_ABORTS = 100
"""Number of times in a row that an engine may abort a request without any token."""


class WrongAnswer(InfrastructureError):
    """An engine broke its protocol: unknown ids, too many tokens, log-probabilities of another length."""


class EngineCrash(InfrastructureError):
    """An engine raised an exception that its protocol does not know; the request is not made again."""


def is_cancelling() -> bool:
    """Return True if the running task was cancelled; False if a CancelledError came from what it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


_gates: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, RequestGate]]
_gates = weakref.WeakKeyDictionary()


def _gate_of(engine: Any) -> RequestGate:
    """Return the gate of an engine on the running event loop, which all collectors over it share."""
    try:
        gates = _gates.setdefault(engine, weakref.WeakKeyDictionary())
    except TypeError:  # the engine has no weak references, or no hash
        return RequestGate()
    return gates.setdefault(asyncio.get_running_loop(), RequestGate())


class Requests:
    """The requests of a collector to its engine.

    Args:
        engine: The engine.
        stop_ids: Ids that end an answer.
        vocabulary: Number of token ids; None: unknown.
        retries: Number of times that a request is made again after an InfrastructureError.
        backoff_s: Seconds before the first retry; doubled before each further one.
        on_update: What an update does to running answers. "resume": they are aborted, and go on under the new
            weights. "finish": they end under the old ones first, while new ones wait; also if the engine
            cannot resume (`can_resume`), and for the updates of other collectors over the same engine.
        is_pushed: Whether weights are loaded from outside the engine, so that no request may be open then.
        permits: Holds requests back while the engine has no room for them; None: all go to the engine.
        stats: Counts requests, aborted and resumed answers; None: nothing is counted.
        version_base: Policy version at which the engine counts 0: that of a run that is resumed.
    """

    def __init__(
        self,
        engine: Engine | ChatEngine,
        *,
        stop_ids: Sequence[int] = (),
        vocabulary: int | None = None,
        retries: int = 3,
        backoff_s: float = 0.5,
        on_update: OnUpdate = "resume",
        is_pushed: bool = False,
        permits: RequestPermits | None = None,
        stats: CollectorStats | None = None,
        version_base: int = 0,
    ) -> None:
        self._version_base = version_base
        self.engine: Any = engine
        self._stop_ids = frozenset(stop_ids)
        self._vocabulary = vocabulary
        self._retries, self._backoff_s = retries, backoff_s
        self._on_update: OnUpdate = on_update
        self._is_pushed = is_pushed
        self.permits = permits
        self._stats = stats
        self._gate = _gate_of(engine)
        self._knows_log_probs = True
        self._failure: str | None = None
        self._log = FailureLog(logger)
        self._failing_since: float | None = None  # without an answer in between
        self._n_failed = 0  # since then

    @property
    def version(self) -> int:
        """Policy version of the weights of the engine."""
        return self._version_base + int(self.engine.version)

    async def sample(
        self,
        writer: TokenWriter | TokenLedger,
        *,
        max_tokens: int,
        key: str,
        on_ids: OnIds | None = None,
        media: Mapping[str, Sequence[Any]] | None = None,
    ) -> tuple[list[int], Finish]:
        """Sample one answer behind the tokens of a trajectory, and append it to them.

        An answer that an update aborts goes on behind the ids that it has, under the new weights, within the
        same bound. Its tokens carry the versions that sampled them.

        Args:
            writer: Tokens of the trajectory.
            max_tokens: Upper bound on the tokens of the answer.
            key: Name of the trajectory.
            on_ids: Called with each piece of the answer; no longer once a request has failed of which it got
                pieces, since another answer follows.
            media: Images and videos of the conversation by kind, in the order of their placeholders.

        Returns:
            The ids of the whole answer, and "stop" or "length".

        Raises:
            InfrastructureError: If the engine fails more often than `retries` allows, or breaks its protocol.
            EngineUnusable: If it fails, and has answered no request for `OUTAGE_S` seconds.
            ValueError: If the engine cannot take the prompt.
        """
        if self.permits is None or self.permits.is_over:
            async with self._answering():
                return await self._sample(writer, max_tokens, key, on_ids, media)
        ledger = writer if isinstance(writer, TokenLedger) else writer.ledger
        is_new = SAMPLED not in ledger.sources
        async with self.permits.hold(len(ledger), is_new=is_new), self._answering():
            found = await self._sample(writer, max_tokens, key, on_ids, media)
        self.permits.answered(len(found[0]))
        return found

    async def answer(
        self, tokens: TokenLedger | TokenWriter, *, max_tokens: int, key: str
    ) -> tuple[list[int], Finish]:
        """Sample one answer as `sample` does, but hold no request back for the KV cache.

        Args:
            tokens: Tokens of the trajectory, to which the answer is appended.
            max_tokens: Upper bound on the tokens of the answer.
            key: Name of the trajectory.
        """
        async with self._answering():
            return await self._sample(tokens, max_tokens, key, None, None)

    def _answering(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Return the context of one answer, its retries and resumed parts included."""
        return self._gate.request() if self._drains else contextlib.nullcontext()

    @property
    def _drains(self) -> bool:
        return self._on_update == "finish" or not self.engine.can_resume

    async def _sample(
        self,
        writer: TokenLedger | TokenWriter,
        max_tokens: int,
        key: str,
        on_ids: OnIds | None,
        media: Mapping[str, Sequence[Any]] | None,
    ) -> tuple[list[int], Finish]:
        answer: list[int] = []
        n_empty = 0
        heard = None if on_ids is None else _Heard(on_ids)
        if media and not self.engine.takes_media:
            raise ValueError(
                f"{self.engine.describe()} takes no {' or '.join(media)}: takes_media is not set"
            )
        more = {"media": media} if media else {}

        def ask(engine: Any) -> Awaitable[Sampled]:
            listener = None if heard is None else heard.next_request()
            left = max_tokens - len(answer)
            return engine.sample(writer.ids, max_tokens=left, key=key, on_ids=listener, **more)

        while True:
            found, version = await self._request(ask, key)
            if heard is not None:
                heard.is_open = False
            ids, log_probs = self._checked(found, max_tokens - len(answer))
            if found.version is not None:
                version = self._version_base + found.version
            writer.add_sampled(ids, log_probs, version=version)
            answer += ids
            if found.finish != "aborted":
                return answer, found.finish
            self._count("aborted")
            if ids and ids[-1] in self._stop_ids:
                return answer, "stop"
            if len(answer) >= max_tokens:
                return answer, "length"
            self._count("resumed")
            n_empty = 0 if ids else n_empty + 1
            if n_empty > MAX_EMPTY_ABORTS:
                raise InfrastructureError(f"the engine aborted {key} {n_empty} times without a token")
            await asyncio.sleep(0 if ids else min(1.0, 0.01 * 2**n_empty))

    async def chat(self, ask: Callable[[Any], Awaitable[T]], key: str) -> T:
        """Make a request for a message.

        Args:
            ask: Makes the request to the engine that it is called with.
            key: Name of the trajectory.

        Raises:
            InfrastructureError: If the engine fails more often than `retries` allows.
        """
        async with self._answering():
            return (await self._request(ask, key))[0]

    async def _request(self, ask: Callable[[Any], Awaitable[T]], key: str) -> tuple[T, int]:
        """Make a request, and again after an InfrastructureError; count it while it is open.

        One coroutine does all of it, since each request that waits keeps its coroutines alive.

        Returns:
            What the engine returned, and the policy version when the request was made.
        """
        for attempt in range(self._retries + 1):
            if self._stats is not None:
                self._stats.request_began()
            try:
                # If answers drain before an update, `_answering` has entered the gate.
                is_held = self._is_pushed and not self._drains
                async with self._gate.request() if is_held else contextlib.nullcontext():
                    if self._failure is not None:
                        raise InfrastructureError(self._failure)
                    version = self.version
                    found = await ask(self.engine), version
                    self._failing_since = None
                    return found
            except asyncio.CancelledError as error:
                if is_cancelling():
                    raise
                failure = InfrastructureError(f"{self.engine.describe()} cancelled a request")
                failure.__cause__ = error
            except (WrongAnswer, EngineCrash):
                raise
            except InfrastructureError as error:
                failure = error
            except (EngineUnusable, ValueError):
                raise
            except (Exception, SystemExit, KeyboardInterrupt) as error:
                raise EngineCrash(f"{self.engine.describe()} raised {error!r}") from error
            finally:
                if self._stats is not None:
                    self._stats.request_ended()
            self._check_outage(failure)
            if attempt == self._retries:
                raise failure
            self._log.add(logging.WARNING, f"the engine failed ({key}): {failure}; asking again", failure)
            await asyncio.sleep(backoff_pause_s(attempt + 1, self._backoff_s))
        raise AssertionError("unreachable")

    def _check_outage(self, failure: InfrastructureError) -> None:
        """Raise EngineUnusable if the engine fails and has answered nothing for a long time."""
        now = asyncio.get_running_loop().time()
        if self._failing_since is None:
            self._failing_since, self._n_failed = now, 0
        self._n_failed += 1
        passed = now - self._failing_since
        if passed >= OUTAGE_S and self._n_failed > self._retries:
            raise EngineUnusable(
                f"{self.engine.describe()} has answered no request for {passed:.0f} s; check that it "
                f"runs and can be reached. The last error: {failure}"
            ) from failure

    def _count(self, event: Event) -> None:
        if self._stats is not None:
            self._stats.count(event)

    def _checked(self, found: Sampled, max_tokens: int) -> tuple[list[int], list[float] | None]:
        """Return ids and log-probabilities; raise WrongAnswer if they break the protocol of engines."""
        if not isinstance(cast("object", found), Sampled):
            raise WrongAnswer(f"the engine returned {type(found).__name__} instead of Sampled")
        ids, log_probs = _list_of(found.ids, Integral, "token ids"), None
        if found.log_probs is not None:
            log_probs = _list_of(found.log_probs, Real, "log-probabilities")
        if len(ids) > max_tokens:
            raise WrongAnswer(
                f"the engine sampled {len(ids)} tokens, but at most {max_tokens} were asked for"
            )
        if found.finish not in get_args(Finish):
            raise WrongAnswer(f"finish is one of {', '.join(get_args(Finish))}; got {found.finish!r}")
        if log_probs is None:
            if ids and self._knows_log_probs:
                self._knows_log_probs = False
                logger.warning(
                    "%s returns no log-probabilities: those of the batches are NaN, and losses with "
                    "importance weights too",
                    self.engine.describe(),
                )
        elif len(log_probs) != len(ids):
            raise WrongAnswer(f"the engine returned {len(ids)} ids and {len(log_probs)} log-probabilities")
        elif log_probs and not (math.isfinite(sum(log_probs)) and max(log_probs) <= _ROUNDING):
            raise WrongAnswer("the engine returned log-probabilities that are not finite numbers up to 0")
        bound = self._vocabulary
        if ids and bound is not None and not 0 <= min(ids) <= max(ids) < bound:
            raise WrongAnswer(
                f"the engine returned ids from {min(ids)} to {max(ids)}, but the tokenizer has {bound} ids: "
                "is it the tokenizer of this model?"
            )
        if found.finish == "stop" and ids and self._stop_ids and ids[-1] not in self._stop_ids:
            raise WrongAnswer(
                f"the engine stopped at id {ids[-1]}, which does not end an answer here; those that do: "
                f"{sorted(self._stop_ids)}. Give the collector the engine's stop ids, as "
                "tokenizer_options={'stop_token_ids': [...]}"
            )
        return ids, log_probs

    async def update(self, weights: Any, push: Callable[[], object] | None = None) -> int:
        """Update the weights of the engine, once answers that must not contain an update have ended.

        Args:
            weights: As `Engine.update` takes them.
            push: Loads the weights instead of the engine, on a thread, while no request is open; or None.

        A `push` that has begun ends before another request begins, even if the caller is cancelled. After one
        that failed, requests raise InfrastructureError until an update succeeds.

        Returns:
            The new policy version.
        """
        update = self._update(weights, push)
        return await (update if push is None else self._gate.complete(update))

    async def _update(self, weights: Any, push: Callable[[], object] | None) -> int:
        async with self._gate.closed_for_update():
            aborts = push is not None and not self._drains
            if aborts:  # the engine counts the update, and ends what runs
                await self.engine.update(None)
            await self._gate.drained()
            if push is None:
                return self._version_base + await self.engine.update(weights)
            try:
                await asyncio.to_thread(push)
            except Exception as error:
                self._failure = (
                    f"an update of the weights failed, and the engine may have part of them: {error}"
                )
                raise
            self._failure = None
            return self.version if aborts else self._version_base + await self.engine.update(None)


class _Heard:
    """Passes the pieces of one answer on, until a request fails of which there were pieces."""

    __slots__ = ("_on_ids", "_was_lost", "is_open")

    def __init__(self, on_ids: OnIds) -> None:
        self._on_ids = on_ids
        self._was_lost = False
        self.is_open = False
        """Whether pieces of a request were passed on that has not ended well."""

    def next_request(self) -> OnIds | None:
        """Return the listener of the next request; None after a request that was lost with its pieces."""
        self._was_lost = self._was_lost or self.is_open
        return None if self._was_lost else self._hear

    def _hear(self, ids: Sequence[int]) -> None:
        self.is_open = True
        self._on_ids(ids)


def _list_of(values: Any, kind: type, name: str) -> list[Any]:
    """Return values as a list; raise WrongAnswer if they are not of one kind."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, Sequence):
        found = list(cast("Sequence[Any]", values))
        if all(issubclass(one, kind) for one in set(map(type, found))):
            return found
    raise WrongAnswer(f"the engine returned {values!r:.80} instead of a list of {name}")
