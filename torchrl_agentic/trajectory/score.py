"""`Score`: the reward of a trajectory with its parts and its reason."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from torchrl_agentic.messages import as_number, finite_number

if TYPE_CHECKING:
    from torchrl_agentic.trajectory.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Score:
    """Value of a trajectory, as a reward in training and as a score in an evaluation.

    Functions that need no parts and no explanation return a number instead.

    Attributes:
        value: The value; a reward must be finite, also in float32.
        answer: The answer that was read from the trajectory; None: none was found, or none was looked for.
        explanation: Why it has this value, in one line or more; "" if the value says it.
        parts: Values of which it is composed, by name, before their weights.
    """

    value: float
    answer: str | None = None
    explanation: str = ""
    parts: Mapping[str, float] = field(default_factory=dict[str, float])

    def __float__(self) -> float:
        return float(self.value)

    @classmethod
    def of(cls, value: Any) -> Score:
        """Convert what a scorer returned to a score.

        Args:
            value: A number, a bool, an array or tensor with one number, or a `Score`.

        Raises:
            TypeError: If it is something else.
            ValueError: If its value or a part is NaN, infinite, or larger than float32 can hold.
        """
        score = value if isinstance(value, cls) else cls(as_number(value))
        parts = {name: finite_number(part, name) for name, part in score.parts.items()}
        return replace(score, value=finite_number(score.value, "a score"), parts=parts)


Scorer: TypeAlias = "Callable[[Trajectory], float | bool | Score | Awaitable[Any]]"
"""A function of a finished trajectory, sync or async: `reward=` of a collector, scorer of an evaluation."""


def is_async(scorer: Scorer) -> bool:
    """Return True if calling a scorer creates a coroutine at once, so that no thread is needed."""
    return inspect.iscoroutinefunction(scorer) or inspect.iscoroutinefunction(type(scorer).__call__)


async def score_with(
    scorer: Scorer, trajectory: Trajectory, in_thread: Callable[[Callable[[], Any]], Awaitable[Any]]
) -> Score:
    """Call a scorer, sync or async, and return its score.

    Args:
        scorer: The scorer.
        trajectory: The finished trajectory.
        in_thread: Runs a function on a thread, such as `WorkerThreads.run`; for sync scorers.

    Raises:
        TypeError: If the scorer returns no number.
        ValueError: If the number is NaN, infinite, or larger than float32 can hold.
    """
    found: Any
    if is_async(scorer):
        found = scorer(trajectory)
    else:
        found = await in_thread(lambda: scorer(trajectory))
    return Score.of(await found if inspect.isawaitable(found) else found)
