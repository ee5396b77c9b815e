"""A tool that is tried again when it failed for no fault of the model's."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from typing import Any

from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.messages import JSON, Status, ToolResult, altered
from torchrl_agentic.tool import ToolContext, effects_of
from torchrl_agentic.tools.wrap.base import CallLater, Wrapped, pause

logger = logging.getLogger(__name__)

Outcome = ToolResult | InfrastructureError | TimeoutError
IdempotencyKey = str | Callable[[Mapping[str, JSON], ToolContext], JSON]


class Retrying(Wrapped):
    """A tool that is tried again after it was not available or timed out (INFRA, TIMEOUT), for a while.

    The pause after the first try is `first_s` seconds and doubles, up to `longest_s`; each is longer by a
    random part, and as long as the service asked for. No try begins after the deadline of the call. Where
    it took more than one, `metrics["retries"]` says how many more.

    A tool that changes anything is tried again only with an `idempotency_key`, by which its service knows
    that two tries are one call: the name of the argument that carries it, filled in here unless the model
    has; or a function of arguments and context that gives it, None for a call that must not be repeated.

    Args:
        tool: the tool.
        attempts: tries at most, the first one included.
        first_s, longest_s: the first pause in seconds, and the longest.
        idempotency_key: see above. The same for all tries of a call, different for each call.
        call_later: where pauses come from, for tests; None: the event loop.

    Raises:
        ValueError: the tool changes things and there is no key; the key names no argument of the tool; a
            number that means nothing.
    """

    def __init__(
        self,
        tool: Any,
        attempts: int = 3,
        *,
        first_s: float = 0.2,
        longest_s: float = 10.0,
        idempotency_key: IdempotencyKey | None = None,
        call_later: CallLater | None = None,
    ) -> None:
        super().__init__(tool)
        if attempts < 1 or not 0 < first_s <= longest_s:
            raise ValueError(
                "expected attempts of 1 or more and 0 < first_s <= longest_s;"
                f" got attempts={attempts}, first_s={first_s}, longest_s={longest_s}"
            )
        effects = effects_of(self)
        if idempotency_key is None and (effects.writes or effects.exclusive):
            raise ValueError(
                f"{self.name!r} may change things ({effects}): a second try could do them twice. Give an"
                " idempotency_key that tells its service so, or declare the tool's effects if it only reads"
            )
        known = self.input_schema.get("properties", {})
        if isinstance(idempotency_key, str) and idempotency_key not in known:
            raise ValueError(f"{self.name!r} has no argument {idempotency_key!r}; it has: {', '.join(known)}")
        self.attempts, self.first_s, self.longest_s = attempts, first_s, longest_s
        self.idempotency_key, self.call_later = idempotency_key, call_later

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> ToolResult:
        """Run it until it answers, or there is no try or no time left."""
        args, tries = self._keyed(args, ctx)
        retries, outcome = 0, await self._try(args, ctx)
        while is_transient(outcome) and retries + 1 < tries:
            seconds = pause_s(retries, outcome, self.first_s, self.longest_s, random.random())
            if ctx.deadline is not None and asyncio.get_running_loop().time() + seconds >= ctx.deadline:
                break
            await pause(seconds, self.call_later)
            retries, outcome = retries + 1, await self._try(args, ctx)
        if not retries:
            if isinstance(outcome, ToolResult):
                return outcome
            raise outcome
        if not isinstance(outcome, ToolResult):
            where = f"(trajectory {ctx.trajectory}, turn {ctx.turn}, call {ctx.call_id})"
            logger.warning("tool %s: %s after %s tries %s", self.name, outcome, retries + 1, where)
            outcome = ToolResult.from_error(outcome, self.name) or ToolResult(status=Status.INFRA)
        metrics = dict(outcome.metrics or {})
        metrics["retries"] = retries + metrics.get("retries", 0)
        return altered(outcome, metrics=metrics)

    async def _try(self, args: Mapping[str, JSON], ctx: ToolContext) -> Outcome:
        try:
            return await self.result(args, ctx)
        except (InfrastructureError, TimeoutError) as error:
            return error

    def _keyed(self, args: Mapping[str, JSON], ctx: ToolContext) -> tuple[Mapping[str, JSON], int]:
        """Give the arguments with their key, and how many tries they may have."""
        key = self.idempotency_key
        if isinstance(key, str):
            return {key: f"{ctx.trajectory}/{ctx.call_id}", **args}, self.attempts
        return args, 1 if key is not None and key(args, ctx) is None else self.attempts


def is_transient(outcome: Outcome) -> bool:
    """Whether it may go well next time."""
    if isinstance(outcome, ToolResult):
        return outcome.is_error and outcome.status in (Status.INFRA, Status.TIMEOUT)
    return bool(getattr(outcome, "is_transient", True))


def pause_s(retries: int, outcome: Outcome, first_s: float, longest_s: float, chance: float) -> float:
    """Say how long to wait after so many retries; chance, in [0, 1): what keeps many callers apart."""
    seconds = min(longest_s, first_s * 2.0 ** min(retries, 64))
    return max(seconds, getattr(outcome, "retry_after", None) or 0.0) + first_s * chance
