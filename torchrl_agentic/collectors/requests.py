"""`Requests`: the requests of a collector to its engine, with retries, updates and resumed answers."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from torchrl_agentic.collectors.stats import CollectorStats, Event
from torchrl_agentic.engines.base import ChatEngine, Engine, Finish, OnIds, Sampled
from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.tokens.writer import TokenWriter

T = TypeVar("T")
logger = logging.getLogger(__name__)

OnUpdate = Literal["resume", "finish"]
MAX_EMPTY_ABORTS = 100
"""Number of times in a row that an engine may abort a request without any token."""


class WrongAnswer(InfrastructureError):
    """An engine broke its protocol: unknown ids, too many tokens, log-probabilities of another length."""


class Requests:
    """The requests of a collector to its engine.

    Args:
        engine: The engine.
        stop_ids: Ids that end an answer.
        vocabulary: Number of token ids; None: unknown.
        retries: Number of times that a request is made again after an InfrastructureError.
        backoff_s: Seconds before the first retry; doubled before each further one.
        stats: Counts requests, aborted and resumed answers; None: nothing is counted.
    """

    def __init__(
        self,
        engine: Engine | ChatEngine,
        *,
        stop_ids: Sequence[int] = (),
        vocabulary: int | None = None,
        retries: int = 3,
        backoff_s: float = 0.5,
        stats: CollectorStats | None = None,
    ) -> None:
        self.engine: Any = engine
        self._stop_ids = frozenset(stop_ids)
        self._vocabulary = vocabulary
        self._retries, self._backoff_s = retries, backoff_s
        self._stats = stats
        self._n_open = 0
        self._admits = asyncio.Event()
        self._admits.set()
        self._idle = asyncio.Event()
        self._idle.set()

    async def sample(
        self,
        writer: TokenWriter,
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
            on_ids: Called with each piece of the answer.
            media: Images and videos of the conversation by kind, in the order of their placeholders.

        Returns:
            The ids of the whole answer, and "stop" or "length".

        Raises:
            InfrastructureError: If the engine fails more often than `retries` allows, or breaks its protocol.
            ValueError: If the engine cannot take the prompt.
        """
        answer: list[int] = []
        n_empty = 0
        while True:
            left = max_tokens - len(answer)
            ask = functools.partial(self._ask, writer.ids, left, key, on_ids, media)
            found = await self._with_retries(ask, key)
            ids = list(found.ids)
            self._check(ids, found.log_probs, left)
            writer.add_sampled(ids, found.log_probs, version=found.version)
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
            await asyncio.sleep(0 if ids else 0.01)

    async def chat(self, ask: Callable[[Any], Awaitable[T]], key: str) -> T:
        """Make a request for a message.

        Args:
            ask: Makes the request to the engine that it is called with.
            key: Name of the trajectory.

        Raises:
            InfrastructureError: If the engine fails more often than `retries` allows.
        """
        return await self._with_retries(lambda: self._counted(lambda: ask(self.engine)), key)

    async def _ask(
        self,
        ids: Sequence[int],
        max_tokens: int,
        key: str,
        on_ids: OnIds | None,
        media: Mapping[str, Sequence[Any]] | None,
    ) -> Sampled:
        if media and not getattr(self.engine, "takes_media", False):
            raise ValueError(
                f"{type(self.engine).__name__} takes no {' or '.join(media)}: takes_media is not set"
            )
        more = {"media": media} if media else {}

        async def ask() -> Sampled:
            version = self.engine.version
            found: Sampled = await self.engine.sample(
                ids, max_tokens=max_tokens, key=key, on_ids=on_ids, **more
            )
            if found.version is not None:
                return found
            return Sampled(found.ids, found.log_probs, found.finish, version)

        return await self._counted(ask)

    async def _counted(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Wait until requests may be made, make one, and count it while it is open."""
        await self._admits.wait()
        self._n_open += 1
        self._idle.clear()
        if self._stats is not None:
            self._stats.request_began()
        try:
            return await ask()
        finally:
            self._n_open -= 1
            if not self._n_open:
                self._idle.set()
            if self._stats is not None:
                self._stats.request_ended()

    async def _with_retries(self, ask: Callable[[], Awaitable[T]], key: str) -> T:
        for attempt in range(self._retries + 1):
            try:
                return await ask()
            except WrongAnswer:
                raise
            except InfrastructureError as error:
                if attempt == self._retries:
                    raise
                logger.warning("the engine failed (%s): %s; asking again", key, error)
                await asyncio.sleep(self._backoff_s * 2**attempt)
        raise AssertionError("unreachable")

    def _count(self, event: Event) -> None:
        if self._stats is not None:
            self._stats.count(event)

    def _check(self, ids: Sequence[int], log_probs: Sequence[float] | None, max_tokens: int) -> None:
        """Raise WrongAnswer if an answer breaks the protocol of engines."""
        if len(ids) > max_tokens:
            raise WrongAnswer(
                f"the engine sampled {len(ids)} tokens, but at most {max_tokens} were asked for"
            )
        if log_probs is not None and len(log_probs) != len(ids):
            raise WrongAnswer(f"the engine returned {len(ids)} ids and {len(log_probs)} log-probabilities")
        bound = self._vocabulary
        if ids and bound is not None and not 0 <= min(ids) <= max(ids) < bound:
            raise WrongAnswer(
                f"the engine returned ids from {min(ids)} to {max(ids)}, but the tokenizer has {bound} ids: "
                "is it the tokenizer of this model?"
            )

    async def update(
        self, weights: Any, on_update: OnUpdate, push: Callable[[], object] | None = None
    ) -> int:
        """Update the weights of the engine.

        Args:
            weights: As `Engine.update` takes them.
            on_update: "resume": running requests are aborted and go on under the new weights. "finish": they
                end under the old ones first, while new requests wait.
            push: Loads the weights instead of the engine, on a thread, while no request is open; or None.

        Returns:
            The new policy version.
        """
        if on_update == "resume" and push is None:
            return await self.engine.update(weights)
        self._admits.clear()
        try:
            version: int | None = None
            if on_update == "resume":
                version = await self.engine.update(None)  # to abort what runs
            await self._idle.wait()
            if push is not None:
                await asyncio.to_thread(push)
                weights = None
            return await self.engine.update(weights) if version is None else version
        finally:
            self._admits.set()
