"""A tool that a trajectory may use so much and no more."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torchrl_agentic.errors import InfrastructureError, StopSignal, ToolError
from torchrl_agentic.messages import JSON, Status, ToolResult
from torchrl_agentic.tools.base import ToolContext
from torchrl_agentic.tools.wrap.base import Wrapped, result_of
from torchrl_agentic.tools.wrap.budget import Budget, Purse

Cost = Callable[[ToolResult], float]


class Budgeted(Wrapped):
    """A tool that each trajectory may call so often, for so long, or at such a cost; then it gets SKIPPED.

    A call that has begun is not broken off: seconds and cost may be exceeded by what overlaps, the number of
    calls never is. A call that failed for no fault of the model's (INFRA) is not counted, its time and cost
    are. What is left stands in the last line of each result, and in its metrics as "calls_left",
    "seconds_left" and "cost_left".

    Args:
        tool: the tool.
        calls, seconds, max_cost: what a trajectory has of each; None: no bound.
        cost: result → its cost; it needs `max_cost`, of this tool or of the shared budget.
        budget: in place of the three, one for several tools: share the object, and each trajectory has one
            purse for all of them.
        tell: whether the model reads what is left.

    Raises:
        ValueError: no budget, or two; a cost without a maximum, or a maximum without a cost.
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
            raise ValueError("give calls, seconds and max_cost to the shared Budget, not beside it")
        self.budget = Budget(calls, seconds, max_cost) if budget is None else budget
        if cost is not None and self.budget.max_cost is None:
            raise ValueError("a cost needs a max_cost")
        if max_cost is not None and cost is None:
            raise ValueError("max_cost needs a cost: a function of the result")
        self.cost, self.tell, self.clock = cost, tell, clock
        self.purse: Purse = self.budget.by_hand

    def begin(self, trajectory: str, source: Any) -> None:
        """Take the trajectory's purse, which other tools may have as well."""
        self._key = self.budget.key(trajectory)
        self.purse = self.budget.take(self._key, None if source is None else source.purse)

    def end(self) -> None:
        """Give it back."""
        self.budget.give_back(self._key)

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> ToolResult:
        """Run it if there is enough left, and say what is left then."""
        purse = self.purse
        if (used_up := purse.used_up()) is not None:
            text = f"Error: this call was not run: {used_up}; answer with what you have"
            return replace(ToolResult.from_text(text, status=Status.SKIPPED), metrics=purse.left())
        spent, clock = purse.spent, self.clock
        spent["calls"] += 1
        began, cost, status = clock(), 0.0, None
        try:
            try:  # as `result` does, without the price of a coroutine more
                result = ToolResult.from_value(await self.tool.run(args, ctx))
            except (ToolError, StopSignal) as error:
                result = result_of(error, self.name)
            status = result.status
            if self.cost is not None:
                cost = price(self.cost(result))
        except InfrastructureError:
            status = Status.INFRA
            raise
        finally:
            if status is Status.INFRA:
                spent["calls"] -= 1
            spent["seconds"] += clock() - began
            spent["cost"] += cost
        left = purse.left()
        parts = (*result.parts, purse.told(left)) if self.tell else result.parts
        return replace(result, parts=parts, metrics={**result.metrics, **left} if result.metrics else left)


def price(cost: float) -> float:
    """Give a cost.

    Raises:
        ValueError: it is no number of 0 or more.
    """
    if not 0 <= cost < math.inf:
        raise ValueError(f"the cost of a result must be a number of 0 or more; got {cost}")
    return float(cost)
