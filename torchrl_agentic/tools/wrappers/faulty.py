"""`Faulty`, a tool with reproducible faults."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.messages import JSON, TextPart, ToolResult
from torchrl_agentic.tools.base import ToolContext
from torchrl_agentic.tools.row_data import local_name
from torchrl_agentic.tools.wrappers.base import CallLater, Wrapped, pause

Latency: TypeAlias = Callable[[random.Random], float]
"""Draws a number of seconds, as in `lambda rng: rng.expovariate(1 / 0.05)`."""

GARBAGE = "\x00\ufffd{}[]<>\"'\\\n\t\u202e\ud7ff\U0010ffff<tool_call></think>0aé漢"


class Faulty(Wrapped):
    """A tool that fails with given probabilities, to test how prompts and training cope.

    The fault of a call depends on the seed, the name of its trajectory within its environment, its tool, its
    id, and the number of the try: retries of a call draw again, and neither time nor the order of calls
    matters.

    Args:
        tool: The tool.
        seed: Seed of all draws.
        timeouts: Probability that a call does not run and times out.
        overloads: Probability that a call does not run because the service is overloaded, as with HTTP 429.
        truncations: Probability that a call runs and its text is cut at a random place.
        garbage: Probability that a call runs and its text is replaced by nonsense of about the same length.
        latency: Draws the seconds that pass before each call; None: no time.
        call_later: Clock that this time passes on, for tests; None: that of the event loop.

    Raises:
        ValueError: If a probability is not in [0, 1], or their sum is above 1.
    """

    keeps_state = True

    def __init__(
        self,
        tool: Any,
        seed: int,
        *,
        timeouts: float = 0.0,
        overloads: float = 0.0,
        truncations: float = 0.0,
        garbage: float = 0.0,
        latency: Latency | None = None,
        call_later: CallLater | None = None,
    ) -> None:
        super().__init__(tool)
        self.chances = {
            "timeout": timeouts, "overload": overloads, "truncation": truncations, "garbage": garbage
        }  # fmt: skip
        if not all(0 <= chance <= 1 for chance in self.chances.values()) or sum(self.chances.values()) > 1:
            raise ValueError(f"expected probabilities in [0, 1] whose sum is at most 1; got {self.chances}")
        self.seed, self.latency, self.call_later = seed, latency, call_later
        self.begin("", None)

    def begin(self, trajectory: str, source: Any) -> None:
        """Count the tries of each call from 0, in a branch too."""
        self._tries: dict[str, int] = {}

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> ToolResult:
        """Run the call with the fault that was picked for it, if any."""
        tries = self._tries[ctx.call_id] = self._tries.get(ctx.call_id, 0) + 1
        name = f"{self.seed}/{local_name(ctx.trajectory)}/{self.name}/{ctx.call_id}/{tries}"
        fault = pick_fault(name, self.chances)
        rng = random.Random(name) if fault or self.latency else None
        if rng is not None and self.latency is not None:
            await pause(self.latency(rng), self.call_later)
        if fault == "timeout":
            raise TimeoutError("no response in time (injected)")
        if fault == "overload":
            raise InfrastructureError("429 Too Many Requests (injected)")
        result = await self.result(args, ctx)
        if rng is None or fault is None:
            return result
        spoiled = tuple(
            TextPart(_spoiled(part.text, fault, rng)) if isinstance(part, TextPart) else part
            for part in (TextPart(str(p)) if p.kind == "json" else p for p in result.parts)
        )
        return replace(result, parts=spoiled, meta={**(result.meta or {}), "injected": fault})


def pick_fault(name: str, chances: Mapping[str, float]) -> str | None:
    """Pick the fault for a call deterministically from its name.

    Args:
        name: Name of the call, different for each try.
        chances: Probability of each fault.

    Returns:
        The fault, or None.
    """
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    place = int.from_bytes(digest) / 2.0**64
    for fault, chance in chances.items():
        if place < chance:
            return fault
        place -= chance
    return None


def _spoiled(text: str, fault: str, rng: random.Random) -> str:
    if fault == "truncation":
        return text[: rng.randrange(len(text))] if text else text
    return "".join(rng.choices(GARBAGE, k=max(1, len(text))))
