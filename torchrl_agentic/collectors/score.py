"""`Score`: the reward of a trajectory with its parts and its reason."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from torchrl_agentic.errors import check_reward

if TYPE_CHECKING:
    from torchrl_agentic.collectors.task import Trajectory


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
        if isinstance(value, cls):
            score = value
        elif value is None or isinstance(value, str | bytes):
            raise TypeError(f"a reward is a number, a bool or a Score; got {value!r:.80}")
        else:
            try:
                score = cls(float(value.item() if hasattr(value, "item") else value))
            except (TypeError, ValueError, RuntimeError) as error:  # an array of several numbers
                kind = type(value).__name__
                raise TypeError(f"a reward is a number, a bool or a Score; got {kind}: {error}") from error
        for name, number in (("a score", score.value), *score.parts.items()):
            check_reward(name, number)
        return score


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
