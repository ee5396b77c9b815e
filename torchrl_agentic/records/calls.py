"""What the calls of turns add up to, per tool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from torchrl_agentic.messages import DispatchResult, Status, ToolResult, Turn
from torchrl_agentic.records.distribution import Distribution

UNREADABLE = "(unreadable)"
"""Calls count under this name where not even that of their tool could be read."""
_LONGEST_NAME = 100


@dataclass(slots=True)
class ToolSummary:
    """The calls of one tool. run_s, queue_s: seconds in it, and until it ran."""

    tool: str
    statuses: Counter[Status] = field(default_factory=Counter[Status])
    run_s: Distribution = field(default_factory=Distribution)
    queue_s: Distribution = field(default_factory=Distribution)

    @property
    def calls(self) -> int:
        """How many there were."""
        return self.statuses.total()

    @property
    def infra(self) -> int:
        """How many went wrong without the model's fault."""
        return self.statuses[Status.INFRA]

    @property
    def errors(self) -> int:
        """How many were answered neither OK nor INFRA."""
        return self.calls - self.statuses[Status.OK] - self.infra

    def add(self, result: ToolResult) -> None:
        """Add a call, by its result."""
        self.statuses[result.status or Status.OK] += 1
        if result.timing is not None:
            self.run_s.add(result.timing.run_s)
            self.queue_s.add(result.timing.queue_s)

    def merge(self, other: ToolSummary) -> None:
        """Add all calls of another one."""
        self.statuses.update(other.statuses)
        self.run_s.merge(other.run_s)
        self.queue_s.merge(other.queue_s)


def add_calls(tools: dict[str, ToolSummary], outcome: DispatchResult) -> None:
    """Add the calls of a turn to what is known of each tool; those that name no tool count by that name."""
    for call, result in zip(outcome.calls, outcome.results, strict=True):
        name = call.tool[:_LONGEST_NAME] or UNREADABLE
        tools.setdefault(name, ToolSummary(name)).add(result)


def most_called(tools: Iterable[ToolSummary]) -> list[ToolSummary]:
    """Order tools, that with the most calls first."""
    return sorted(tools, key=lambda summary: (-summary.calls, summary.tool))


def summarize(turns: Iterable[Turn]) -> list[ToolSummary]:
    """Add up turns, the tool with the most calls first.

    Calls that name no known tool count under their name.
    """
    found: dict[str, ToolSummary] = {}
    for turn in turns:
        add_calls(found, turn.outcome)
    return most_called(found.values())
