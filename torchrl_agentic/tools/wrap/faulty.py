"""A tool that fails now and then, the same way each time it is asked."""

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
from torchrl_agentic.tools.wrap.base import CallLater, Wrapped, pause

Latency: TypeAlias = Callable[[random.Random], float]
"""Draws seconds: `lambda rng: rng.expovariate(1 / 0.05)`."""

GARBAGE = "\x00\ufffd{}[]<>\"'\\\n\t\u202e\ud7ff\U0010ffff<tool_call></think>0aé漢"


class Faulty(Wrapped):
    """A tool that fails with given probabilities, to see what training and prompts make of it.

    The fault of a call follows from the seed, its trajectory's name within its environment, its tool, its id,
    and how often that id has come: tries of one call differ, and neither time nor the order of calls has any
    say.

    Args:
        tool: the tool.
        seed: of all that is drawn.
        timeouts: how probable it is that it is not run, and times out.
        overloads: that it is not run, and not available: what a service means by 429.
        truncations: that it is run, and its text ends somewhere before its end.
        garbage: that it is run, and its text is nonsense of about that length.
        latency: draws the seconds that pass before all that; None: none.
        call_later: where that time comes from, for tests; None: the event loop.

    Raises:
        ValueError: a probability outside of [0, 1], or more than 1 in all.
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
            raise ValueError(f"probabilities are in [0, 1], and 1 at most in all; got {self.chances}")
        self.seed, self.latency, self.call_later = seed, latency, call_later
        self.begin("", None)

    def begin(self, trajectory: str, source: Any) -> None:
        """Count the tries of each call from the start; a branch has calls of its own."""
        self._tries: dict[str, int] = {}

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> ToolResult:
        """Draw what befalls the call."""
        tries = self._tries[ctx.call_id] = self._tries.get(ctx.call_id, 0) + 1
        name = f"{self.seed}/{local_name(ctx.trajectory)}/{self.name}/{ctx.call_id}/{tries}"
        fault = drawn(name, self.chances)
        rng = random.Random(name) if fault or self.latency else None
        if rng is not None and self.latency is not None:
            await pause(self.latency(rng), self.call_later)
        if fault == "timeout":
            raise TimeoutError("no answer in time (injected)")
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


def drawn(name: str, chances: Mapping[str, float]) -> str | None:
    """Draw what befalls what is called so; the same name draws the same."""
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
