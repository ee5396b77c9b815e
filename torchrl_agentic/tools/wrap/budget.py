"""What a trajectory may spend, and what it has spent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from torchrl_agentic.messages import JSON, TextPart
from torchrl_agentic.tools.base import current_session

_purses: dict[tuple[int, object], Purse] = {}
"""The purses of the trajectories under way, by the identity of their budget, which their tools keep alive."""

_KEPT = 1000
"""How many lines for the model are kept, of budgets of no more calls than that."""


@dataclass(eq=False)
class Budget:
    """What each trajectory may spend on the tools that share this object; None: no bound.

    calls: of all these tools together. seconds: inside of them, summed up. max_cost: in the unit of their
    `cost`.

    Raises:
        ValueError: it bounds nothing, or a bound is below 0 or NaN.
    """

    calls: int | None = None
    seconds: float | None = None
    max_cost: float | None = None
    by_hand: Purse = field(init=False, repr=False)
    """What was spent outside of any trajectory."""

    def __post_init__(self) -> None:
        bounds = self.bounds()
        if not bounds:
            raise ValueError("a budget bounds calls, seconds or max_cost; got none of them")
        for name, bound in bounds.items():
            if not bound >= 0:
                raise ValueError(f"a bound must be 0 or more, or None for none; got {bound} {name}")
        self.by_hand = Purse(self)

    def bounds(self) -> dict[str, float]:
        """Give what is bounded, by name."""
        bounds = {"calls": self.calls, "seconds": self.seconds, "cost": self.max_cost}
        return {name: bound for name, bound in bounds.items() if bound is not None}

    def key(self, trajectory: str) -> tuple[int, object]:
        """Give what stands for a trajectory while a session opens."""
        return (id(self), current_session.get() or trajectory)

    def take(self, key: tuple[int, object], source: Purse | None) -> Purse:
        """Give the purse of a trajectory to one tool more; a branch has spent what its source has."""
        purse = _purses.get(key)
        if purse is None:
            purse = _purses[key] = Purse(self, source)
        purse.users += 1
        return purse

    def give_back(self, key: tuple[int, object]) -> None:
        """Take note that one tool needs it no more."""
        purse = _purses[key]
        purse.users -= 1
        if purse.users == 0:
            del _purses[key]


class Purse:
    """What one trajectory has spent of a budget: calls, seconds, cost. users: tools that have it."""

    def __init__(self, budget: Budget, source: Purse | None = None) -> None:
        self.bounds = budget.bounds()
        self._left = [(name, f"{name}_left", bound) for name, bound in self.bounds.items()]
        told = ", ".join(f"%.4g of {bound:g} {name}" for name, bound in self.bounds.items())
        self._told = f"[budget left: {told}]"
        self._few = [*self.bounds] == ["calls"] and self.bounds["calls"] <= _KEPT
        self.spent: dict[str, float] = {"calls": 0, "seconds": 0.0, "cost": 0.0}
        if source is not None:
            self.spent.update(source.spent)
        self.users = 0

    def used_up(self) -> str | None:
        """Say what there is no more of; None: something is left of all."""
        for name, bound in self.bounds.items():
            if self.spent[name] >= bound:
                return f"the budget of {bound:g} {name} is used up"
        return None

    def left(self) -> dict[str, JSON]:
        """Say what is left of each, for rewards."""
        spent = self.spent
        left: dict[str, JSON] = {}
        for name, key, bound in self._left:
            rest = bound - spent[name]
            left[key] = rest if rest > 0 else 0
        return left

    def told(self, left: Mapping[str, JSON]) -> TextPart:
        """Say the same for the model."""
        return (_kept_line if self._few else _line)(self._told, *left.values())


def _line(told: str, *left: float) -> TextPart:
    return TextPart(told % left)


@lru_cache(maxsize=_KEPT)
def _kept_line(told: str, left: float) -> TextPart:
    """The same; each trajectory of a budget of a few calls has the same few lines."""
    return _line(told, left)
