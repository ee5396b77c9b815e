"""`Budgeted`, a tool that each trajectory may use up to a bound, and `Budget`, which tools can share."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.messages import JSON, Status, TextPart, ToolResult
from torchrl_agentic.tools.base import ToolContext
from torchrl_agentic.tools.per_trajectory import PerTrajectory
from torchrl_agentic.tools.wrappers.base import Wrapped

Cost: TypeAlias = Callable[[ToolResult], float]
Spent: TypeAlias = dict[str, float]
"""Use of one trajectory so far: "calls", "seconds" and "cost"."""


def _nothing() -> Spent:
    return {"calls": 0, "seconds": 0.0, "cost": 0.0}


@dataclass(eq=False)
class Budget:
    """Bounds on what each trajectory may spend on the tools that share this object.

    Attributes:
        calls: Most calls of all these tools together; None: no bound.
        seconds: Most time spent inside these tools, in seconds; None: no bound.
        max_cost: Highest sum of costs, in the unit of their `cost`; None: no bound.

    Raises:
        ValueError: If there is no bound, or one is below 0 or NaN.
    """

    calls: int | None = None
    seconds: float | None = None
    max_cost: float | None = None
    bounds: Mapping[str, float] = field(init=False, repr=False)
    line_format: str = field(init=False, repr=False)
    """Format of the line about what is left, with one number per bound."""
    by_trajectory: PerTrajectory[Spent] = field(init=False, repr=False, default_factory=PerTrajectory[Spent])
    by_hand: Spent = field(init=False, repr=False, default_factory=_nothing)
    """Use outside of any trajectory."""

    def __post_init__(self) -> None:
        bounds = {"calls": self.calls, "seconds": self.seconds, "cost": self.max_cost}
        self.bounds = {name: bound for name, bound in bounds.items() if bound is not None}
        if not self.bounds:
            raise ValueError("expected a bound on calls, seconds or max_cost; all of them are None")
        for name, bound in self.bounds.items():
            if not bound >= 0:
                raise ValueError(f"a bound must be 0 or more, or None for no bound; got {bound} {name}")
        items = (f"%.4g of {bound:g} {name}" for name, bound in self.bounds.items())
        self.line_format = f"[budget left: {', '.join(items)}]"

    def exhausted(self, spent: Spent) -> str | None:
        """Return the name of a bound that is reached, or None."""
        for name, bound in self.bounds.items():
            if spent[name] >= bound:
                return name
        return None

    def left(self, spent: Spent) -> dict[str, JSON]:
        """Return what is left of each bound, as metrics of a result."""
        return {f"{name}_left": max(0, bound - spent[name]) for name, bound in self.bounds.items()}

    def line(self, left: Mapping[str, JSON]) -> str:
        """Return a line that tells the model what is left, as `left` returns it."""
        return self.line_format % tuple(left.values())


class Budgeted(Wrapped):
    """A tool with a budget per trajectory; calls beyond it do not run and get the status SKIPPED.

    Concurrent calls never exceed the number of calls. They may exceed seconds and cost, because a running
    call is not stopped. A call that fails through no fault of the model (INFRA) does not count as a call, but
    its time and cost do. The last line of each result shows the model what is left; the metrics "calls_left",
    "seconds_left" and "cost_left" are for rewards.

    Args:
        tool: The tool.
        calls: Bound on the calls of a trajectory.
        seconds: Bound on the seconds that a trajectory spends in the tool.
        cost: Returns the cost of a result; it needs a `max_cost`, here or in the shared budget.
        max_cost: Bound on the summed cost.
        budget: A budget in place of these bounds, for several tools that share it.
        tell: Whether results show the model what is left.
        clock: Returns the time in seconds.

    Raises:
        ValueError: If there is no budget, or two; a cost without a maximum, or a maximum without a cost.
    """

    keeps_state = True

    def __init__(
        self,
        tool: Any,
        calls: int | None = None,
        seconds: float | None = None,
        cost: Cost | None = None,
        *,
        max_cost: float | None = None,
        budget: Budget | None = None,
        tell: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(tool)
        if budget is not None and (calls, seconds, max_cost) != (None, None, None):
            raise ValueError("pass calls, seconds and max_cost to the shared Budget, not beside it")
        self.budget = Budget(calls, seconds, max_cost) if budget is None else budget
        if cost is not None and self.budget.max_cost is None:
            raise ValueError("a cost needs a max_cost")
        if max_cost is not None and cost is None:
            raise ValueError("max_cost needs a cost: a function of the result")
        self.cost, self.tell, self.clock = cost, tell, clock
        self.spent = self.budget.by_hand

    def begin(self, trajectory: str, source: Any) -> None:
        """Join the tools that share the budget in this trajectory; a branch copies the use of its source."""
        self._member = self.budget.by_trajectory.join(
            trajectory, lambda: _nothing() if source is None else dict(source.spent)
        )
        self.spent = self._member.value

    def end(self) -> None:
        """Leave the tools that share the budget."""
        self._member.leave()

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> ToolResult:
        """Run the tool if its budget allows, and add what is left to the result."""
        spent, budget = self.spent, self.budget
        if name := budget.exhausted(spent):
            text = (
                f"Error: this call was not run: the budget of {budget.bounds[name]:g} {name} is used up; "
                "answer with what you have"
            )
            return replace(ToolResult.from_text(text, status=Status.SKIPPED), metrics=budget.left(spent))
        spent["calls"] += 1
        began = self.clock()
        try:
            result = await self.result(args, ctx)
            if result.status is Status.INFRA:
                spent["calls"] -= 1
            if self.cost is not None:
                spent["cost"] += checked_cost(self.cost(result))
        except InfrastructureError:
            spent["calls"] -= 1
            raise
        finally:
            spent["seconds"] += self.clock() - began
        left = budget.left(spent)
        parts = (*result.parts, TextPart(budget.line(left))) if self.tell else result.parts
        return replace(result, parts=parts, metrics={**(result.metrics or {}), **left})


def checked_cost(cost: float) -> float:
    """Return a cost; raise ValueError if it is not a number of 0 or more."""
    if not 0 <= cost < math.inf:
        raise ValueError(f"the cost of a result must be a number of 0 or more; got {cost}")
    return float(cost)
