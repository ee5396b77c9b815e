"""`Weighted`: several scorers as one, with weights and conditions."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import cast

from torchrl_agentic.dispatch.event_loop import WorkerThreads
from torchrl_agentic.trajectory.score import Score, Scorer, score_with
from torchrl_agentic.trajectory.trajectory import Trajectory

THREADS = 64
"""Number of sync scorers that run at once."""


class Weighted:
    """Weighted sum of scorers, which run concurrently.

    ::

        reward = Weighted(
            {"answer": numeric_match(), "format": format_reward(), "style": ModelJudge(engine)},
            weights={"format": 0.1},
            requires={"style": "answer"},
        )

    The `Score` has the value of each scorer under its name in `parts`, before its weight; the answer of the
    first scorer that read one; and the explanations of all.

    Args:
        scorers: Scorers by name, sync or async.
        weights: Weights by name; a scorer that is not named has the weight 1. The weight 0 reports a scorer
            without counting it.
        requires: Names of scorers, and of the scorer that each of them depends on. One whose condition scores
            less than 1 is not called: its value is 0.

    Raises:
        TypeError: If a scorer cannot be called.
        ValueError: If there is no scorer, a name is unknown, a weight is no finite number, or scorers require
            each other.
    """

    def __init__(
        self,
        scorers: Mapping[str, Scorer],
        weights: Mapping[str, float] | None = None,
        *,
        requires: Mapping[str, str] | None = None,
    ) -> None:
        if not scorers:
            raise ValueError("Weighted needs a scorer: Weighted({'answer': numeric_match()})")
        for name, scorer in scorers.items():
            if not callable(cast("object", scorer)):
                raise TypeError(
                    f"the scorer {name!r} is a function of a Trajectory; got {type(scorer).__name__}"
                )
        self.scorers = dict(scorers)
        given, self.requires = dict(weights or {}), dict(requires or {})
        named = {*given, *self.requires, *self.requires.values()}
        if unknown := sorted(named - self.scorers.keys()):
            raise ValueError(f"no scorer is named {unknown[0]!r}; there are {', '.join(self.scorers)}")
        self.weights = {name: Score.of(given.get(name, 1.0)).value for name in self.scorers}
        self._order = self._in_order()
        self._threads = WorkerThreads(THREADS)

    def _in_order(self) -> list[str]:
        """Return the names, each behind the one that it requires."""
        order: list[str] = []
        for name in self.scorers:
            chain = [name]
            while (needed := self.requires.get(chain[-1])) is not None:
                if needed in chain:
                    raise ValueError(f"scorers require each other: {' → '.join((*chain, needed))}")
                chain.append(needed)
            order += [one for one in reversed(chain) if one not in order]
        return order

    async def __call__(self, trajectory: Trajectory) -> Score:
        """Run the scorers and return their weighted sum.

        Raises:
            Exception: That of the first scorer that fails; the others are cancelled.
        """
        tasks: dict[str, asyncio.Task[Score]] = {}
        for name in self._order:
            needed = self.requires.get(name)
            condition = None if needed is None else tasks[needed]
            tasks[name] = asyncio.create_task(self._part(name, trajectory, condition))
        try:
            await asyncio.gather(*tasks.values())
        except BaseException:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
            raise
        scores = {name: tasks[name].result() for name in self.scorers}
        return Score(
            sum(self.weights[name] * score.value for name, score in scores.items()),
            next((score.answer for score in scores.values() if score.answer is not None), None),
            "\n".join(f"{name}: {score.explanation}" for name, score in scores.items() if score.explanation),
            {name: score.value for name, score in scores.items()},
        )

    async def _part(self, name: str, trajectory: Trajectory, condition: asyncio.Task[Score] | None) -> Score:
        if condition is not None and (await asyncio.shield(condition)).value < 1:
            return Score(0.0, None, f"not called, since {self.requires[name]} is below 1")
        try:
            return await score_with(self.scorers[name], trajectory, self._threads.run)
        except Exception as error:
            error.add_note(f"raised by the scorer {name!r}")
            raise

    def __repr__(self) -> str:
        return f"Weighted({', '.join(f'{weight:g} * {name}' for name, weight in self.weights.items())})"
