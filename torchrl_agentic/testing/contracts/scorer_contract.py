"""The contract of every scorer and reward function."""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import pytest

from torchrl_agentic.collectors.agent_collector import AgentCollector
from torchrl_agentic.dispatch.event_loop import WorkerThreads
from torchrl_agentic.engines.recorded_engine import RecordedEngine
from torchrl_agentic.messages import Message, Status
from torchrl_agentic.testing.finished import finished_trajectory
from torchrl_agentic.trajectory.score import Score, Scorer, score_with
from torchrl_agentic.trajectory.trajectory import Trajectory
from torchrl_agentic.transforms import ToolCompose

ODD_TEXTS = (
    "",
    " ",
    "\n",
    "\ud800",
    "é\x00\x1b[31m",
    "<think>",
    "</think>",
    "```python\n",
    "9" * 5000,
    "(" * 2000,
)


class ScorerContract:
    """Tests of a scorer: a function of a finished `Trajectory`, sync or async.

    Attributes:
        is_deterministic: The same trajectory always has the same score.
        least: Least score that it may return; None: no bound.
        most: Largest score that it may return; None: no bound.
        patience_s: Time limit for a score, in seconds.
    """

    is_deterministic: ClassVar[bool] = True
    least: ClassVar[float | None] = None
    most: ClassVar[float | None] = None
    patience_s: ClassVar[float] = 60.0

    def make(self) -> Scorer:
        """Return the scorer to test."""
        raise NotImplementedError

    def trajectories(self) -> Sequence[Trajectory]:
        """Return trajectories that the scorer can score, with different scores if possible."""
        return [
            finished_trajectory("It is 42.", answer="42"),
            finished_trajectory("<think>6 * 7</think>\n\\boxed{41}", answer="42"),
            finished_trajectory(
                "Let me see.", "42", answer="42", calls=[("f", Status.OK), ("g", Status.INFRA)]
            ),
        ]

    async def score(self, scorer: Scorer, trajectory: Trajectory) -> Score:
        """Score a trajectory within the time limit, as a collector does, and check the score.

        Args:
            scorer: The scorer.
            trajectory: The trajectory.
        """
        async with asyncio.timeout(self.patience_s):
            found = await score_with(scorer, trajectory, WorkerThreads(1).run)
        assert math.isfinite(found.value)
        assert self.least is None or found.value >= self.least
        assert self.most is None or found.value <= self.most
        assert isinstance(found.explanation, str)
        assert found.answer is None or isinstance(found.answer, str)
        assert all(isinstance(name, str) and name for name in found.parts)
        return found

    @pytest.mark.asyncio
    async def test_it_returns_a_finite_number_or_score(self) -> None:
        scorer = self.make()
        for trajectory in self.trajectories():
            await self.score(scorer, trajectory)

    @pytest.mark.asyncio
    async def test_it_leaves_the_trajectory_unchanged(self) -> None:
        scorer = self.make()
        for trajectory in self.trajectories():
            before = copy.deepcopy(replace(trajectory, ledger=None))
            ids = None if trajectory.ledger is None else list(trajectory.ledger.ids)
            await self.score(scorer, trajectory)
            assert replace(trajectory, ledger=None) == before
            assert ids is None or (trajectory.ledger is not None and list(trajectory.ledger.ids) == ids)

    @pytest.mark.asyncio
    async def test_it_scores_whatever_the_model_wrote(self) -> None:
        """An exception would fail the trajectory, and be taken for a mistake in the reward function."""
        scorer = self.make()
        for trajectory in self.trajectories()[:1]:
            for text in ODD_TEXTS:
                said = Message("assistant", text)
                messages = (*trajectory.messages[:-1], said)
                turns = tuple(replace(turn, message=said) for turn in trajectory.turns[-1:])
                await self.score(
                    scorer, replace(trajectory, messages=messages, turns=(*trajectory.turns[:-1], *turns))
                )

    @pytest.mark.asyncio
    async def test_scores_asked_for_at_the_same_time_are_those_of_one_after_the_other(self) -> None:
        scorer, trajectories = self.make(), [*self.trajectories()] * 4
        together = await asyncio.gather(*(self.score(scorer, one) for one in trajectories))
        if self.is_deterministic:
            assert [one.value for one in together] == [
                (await self.score(scorer, one)).value for one in trajectories
            ]

    def test_it_works_on_one_event_loop_after_the_other(self) -> None:
        scorer = self.make()
        for trajectory in self.trajectories():
            asyncio.run(self.score(scorer, trajectory))

    def test_a_collector_gets_its_scores(self) -> None:
        scorer = self.make()
        for trajectory in self.trajectories():
            if trajectory.calls:
                continue  # a replay has no tools
            said = [Message("assistant", text) for text in trajectory.texts]
            collector = AgentCollector(
                ToolCompose([]),
                engine=RecordedEngine({trajectory.task.name: said}),
                tasks=[trajectory.task],
                reward=scorer,
                on_failure="raise",
            )
            with collector:
                ((found,),) = list(collector.trajectories())
            assert found.score is not None
            assert found.reward == found.score.value
            if self.is_deterministic:
                alone = asyncio.run(self.score(scorer, replace(found, score=None, reward=0.0)))
                assert found.score.value == alone.value
