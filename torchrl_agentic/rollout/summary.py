"""What a rollout's turns add up to, per tool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torchrl_agentic.messages import Status, Turn


@dataclass(slots=True)
class ToolSummary:
    """The calls of one tool. run_s, queue_s: seconds, one number per call."""

    tool: str
    statuses: Counter[Status] = field(default_factory=Counter[Status])
    run_s: list[float] = field(default_factory=list[float])
    queue_s: list[float] = field(default_factory=list[float])

    @property
    def calls(self) -> int:
        """How many there were."""
        return self.statuses.total()

    @property
    def errors(self) -> int:
        """How many were not answered OK."""
        return self.calls - self.statuses[Status.OK]


def summarize(turns: Iterable[Turn]) -> list[ToolSummary]:
    """Add up turns, the tool with the most calls first.

    Calls that name no known tool count under their name.
    """
    found: dict[str, ToolSummary] = {}
    for turn in turns:
        for call, result in zip(turn.outcome.calls, turn.outcome.results, strict=True):
            name = call.tool or "(unreadable)"
            summary = found.setdefault(name, ToolSummary(name))
            summary.statuses[result.status or Status.OK] += 1
            if result.timing is not None:
                summary.run_s.append(result.timing.run_s)
                summary.queue_s.append(result.timing.queue_s)
    return sorted(found.values(), key=lambda summary: (-summary.calls, summary.tool))


def quantile(values: Sequence[float], q: float) -> float:
    """Give the value that a share `q` of the values does not exceed; 0.0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(q * (len(ordered) - 1)))] if ordered else 0.0
