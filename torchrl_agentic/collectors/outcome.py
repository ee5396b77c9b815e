"""`Outcome`: the record and the reward of one trajectory."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import replace

from torchrl_agentic.collectors.agent import Agent
from torchrl_agentic.collectors.requests import is_cancelling
from torchrl_agentic.errors import InfrastructureError, InvalidTask, check_reward
from torchrl_agentic.messages import JSON, Turn
from torchrl_agentic.records import Origin, Recording, TokenRecord
from torchrl_agentic.trajectory.score import Score
from torchrl_agentic.trajectory.task import Task, lookup
from torchrl_agentic.trajectory.trajectory import Trajectory

Reward = Callable[[Trajectory], Awaitable[Score]]


class RewardError(RuntimeError):
    """A reward function raised, or returned no number."""


class Outcome:
    """Records the turns of a trajectory, and computes its reward when it has ended.

    Args:
        agent: Rewards and recorder.
        task: Task of the trajectory.
        name: Name of the trajectory.
        index: Number in its group.
        group: Number of the group; None without one.
        reward: Returns a score that is added to the rewards of the transforms, or None.

    Attributes:
        tool_reward: Sum of the rewards of the tool calls so far.
    """

    def __init__(
        self,
        agent: Agent,
        task: Task,
        *,
        name: str,
        index: int = 0,
        group: int | None = None,
        reward: Reward | None = None,
    ) -> None:
        self._agent, self._task, self._reward = agent, task, reward
        self._name, self._index = name, index
        self._origin = Origin(task.name, group, index)
        self._recording: Recording = Recording()
        self._has_turns = False
        self._of_turn = self._of_earlier = 0.0  # rewards of the last turn, and of those before
        self.tool_reward = 0.0

    def record(self, turn: Turn) -> None:
        """Add the reward of a turn, and pass both to the recorder."""
        hook = self._agent.hook
        if hook is not None:
            if not self._has_turns:
                self._recording = hook.begin(self._name, self._index)
                self._recording.set_origin(self._origin)
            self._recording.record_turn(turn)
        reward = sum(result.reward or 0.0 for result in turn.outcome.results)
        self.tool_reward += reward
        self._has_turns = True
        self._of_earlier, self._of_turn = self._of_earlier + self._of_turn, 0.0
        self._add_to_turn(sum(one.calls * reward for one in self._agent.tool_rewards))

    def record_reply(self, score: float) -> None:
        """Add the score of a reply of the user to the reward of the last turn.

        Args:
            score: The score.
        """
        self._add_to_turn(sum(one.replies * score for one in self._agent.user_rewards))

    def _add_to_turn(self, reward: float) -> None:
        self._of_turn += reward
        if self._of_turn:
            self._recording.add_reward(self._of_turn)

    async def rewarded(self, trajectory: Trajectory) -> Trajectory:
        """Return a trajectory with the rewards of its tools, for its answer, and of the reward function.

        Raises:
            InfrastructureError: If the reward function raises it.
            InvalidTask: If the reward function raises it.
            RewardError: If the reward function raises another error, or the reward is not finite in float32.
        """
        of_tools = sum(
            one.calls * trajectory.tool_reward + one.trajectories * trajectory.final_reward
            for one in self._agent.tool_rewards
        )
        trajectory = replace(trajectory, reward=of_tools)
        added = sum(self._answer_rewards(trajectory))
        added += sum(
            one.replies * trajectory.replies_score + one.trajectories * trajectory.user_score
            for one in self._agent.user_rewards
        )
        score: Score | None = None
        if self._reward is not None:
            try:
                score = await self._reward(trajectory)
                added += float(score)
            except (InfrastructureError, InvalidTask):
                raise
            except BaseException as error:  # SystemExit too: it would end the loop that all share
                if isinstance(error, GeneratorExit) or is_cancelling():
                    raise
                raise RewardError(f"the reward of {self._name}: {type(error).__name__}: {error}") from error
        reward = of_tools + added
        parts = {
            "reward": reward,
            "tool_reward": trajectory.tool_reward,
            "final_reward": trajectory.final_reward,
        }
        for name, value in parts.items():
            try:
                check_reward(name, value)  # it would spoil the advantages of its whole group
            except ValueError as error:
                raise RewardError(f"{self._name}: {error}") from None
        return replace(trajectory, reward=reward, score=score)

    def _answer_rewards(self, trajectory: Trajectory) -> Iterator[float]:
        said = (message.text for message in reversed(trajectory.messages) if message.role == "assistant")
        answer = next(said, "")
        for one in self._agent.answer_rewards:
            only = one.columns[0] if len(one.columns) == 1 else None
            truth = self._task.truth if only is None else lookup(self._task.data, only)
            if truth is None:
                raise RewardError(f"task {self._task.name!r} has no right answer")
            yield one.reward_of(answer, str(truth))

    def record_again(self, trajectory: Trajectory) -> None:
        """Record a trajectory that ended in an earlier process.

        Args:
            trajectory: The trajectory.
        """
        for turn in trajectory.turns:
            self.record(turn)
        self.finish(trajectory)

    def fail(self) -> None:
        """End the record of a trajectory that failed."""
        self._recording.finish("failed")

    def finish(self, trajectory: Trajectory) -> None:
        """Complete the record of a trajectory that has its reward.

        Args:
            trajectory: The trajectory.
        """
        agent, record = self._agent, self._agent.record
        if agent.hook is None or not self._has_turns:
            return
        if self._reward or agent.has_rewards:
            self._recording.add_reward(trajectory.reward - self._of_earlier)
        self._recording.annotate(gts=self._task.truth)
        versions = set[int]() if trajectory.ledger is None else {*trajectory.ledger.versions} - {-1}
        self._recording.set_origin(
            replace(self._origin, policy_versions=tuple(sorted(versions)), seconds=trajectory.seconds)
        )
        if record is not None:
            extras = {name: lookup(self._task.data, key) for name, key in record.extras.items()}
            tokens = self._token_record(trajectory) if record.tokens else None
            self._recording.annotate(tokens=tokens, **extras)
        if trajectory.forks:
            self._recording.annotate(
                branch=".".join(map(str, trajectory.path)),
                forked_after_turns=[fork.n_turns for fork in trajectory.forks],
            )
        if trajectory.score is not None:
            self._recording.annotate(**_score_extras(trajectory.score))
        self._recording.add_messages(trajectory.messages[n_recorded(trajectory.turns) :])
        self._recording.finish(trajectory.reason)

    def _token_record(self, trajectory: Trajectory) -> TokenRecord | None:
        encoder, ledger = self._agent.encoder, trajectory.ledger
        if encoder is None or ledger is None:
            return None
        ids = ledger.ids
        decode = encoder.tokenizer.decode
        return TokenRecord(ledger, tuple(decode(ids[span.start : span.stop]) for span in ledger.spans()))


def n_recorded(turns: Iterable[Turn]) -> int:
    """Return the number of messages of a trajectory that the records of its turns contain."""
    return sum(len(turn.context) + 1 + len(turn.messages) for turn in turns)


def _score_extras(score: Score) -> dict[str, JSON]:
    """Return the fields of the record that show how a score came about."""
    fields: dict[str, JSON] = {f"score_{name}": float(value) for name, value in score.parts.items()}
    if score.answer is not None:
        fields["extracted_answer"] = score.answer
    if score.explanation:
        fields["score_explanation"] = score.explanation
    return fields
