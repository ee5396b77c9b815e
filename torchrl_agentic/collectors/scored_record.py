"""Score a trajectory that has ended, and complete its record: the same here and for one from a worker."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

from torchrl_agentic.collectors.requests import is_cancelling
from torchrl_agentic.errors import InfrastructureError, InvalidTask, RewardError, check_reward
from torchrl_agentic.messages import JSON
from torchrl_agentic.records import Origin
from torchrl_agentic.tools.row_data import RIGHT_ANSWERS
from torchrl_agentic.trajectory.columns import KEY
from torchrl_agentic.trajectory.episode import EpisodeRecording
from torchrl_agentic.trajectory.recording import RecordStage, token_record
from torchrl_agentic.trajectory.score import Score
from torchrl_agentic.trajectory.spec import TrajectorySpec
from torchrl_agentic.trajectory.task import Task, lookup
from torchrl_agentic.trajectory.trajectory import Trajectory

Reward = Callable[[Trajectory], Awaitable[Score]]


def task_columns(task: Task, names: Iterable[Any], columns: Mapping[str, Any]) -> dict[Any, Any]:
    """Return the named columns of a task, and of a step, as the row of a data set has them.

    Args:
        task: The task.
        names: Names of columns; a tuple leads into nested mappings, or as ("agentic", name) to an entry of
            the step.
        columns: Entries under "agentic".
    """
    found: dict[Any, Any] = {}
    for name in names:
        if isinstance(name, tuple) and name[:1] == (KEY,):
            found[name] = columns.get(cast("tuple[str, ...]", name)[1])
        else:
            found[name] = lookup(task.data, name)
            if found[name] is None and name in RIGHT_ANSWERS:
                found[name] = task.answer  # which was moved from one of these columns
    return found


async def scored(trajectory: Trajectory, reward: Reward | None) -> Trajectory:
    """Return a trajectory with the reward of its transforms and of the reward function.

    Args:
        trajectory: The trajectory, whose `reward` is that of its transforms.
        reward: The reward function, or None.

    Raises:
        InfrastructureError: If the reward function raises it.
        InvalidTask: If the reward function raises it.
        RewardError: If the reward function raises another error, or the reward is not finite in float32.
    """
    total, score = trajectory.reward, None
    if reward is not None:
        try:
            score = await reward(trajectory)
            total += float(score)
        except (InfrastructureError, InvalidTask):
            raise
        except BaseException as error:  # SystemExit too: it would end the loop that all share
            if isinstance(error, GeneratorExit) or is_cancelling():
                raise
            what = f"the reward of {trajectory.name}"
            raise RewardError(f"{what}: {type(error).__name__}: {error}") from error
    parts = {
        "reward": total,
        "tool_reward": trajectory.tool_reward,
        "final_reward": trajectory.final_reward,
    }
    for name, value in parts.items():
        try:
            check_reward(name, value)  # it would spoil the advantages of its whole group
        except ValueError as error:
            raise RewardError(f"{trajectory.name}: {error}") from None
    return replace(trajectory, reward=total, score=score)


def finish_record(
    recording: EpisodeRecording,
    trajectory: Trajectory,
    spec: TrajectorySpec,
    *,
    origin: Origin,
    has_reward: bool,
    is_annotated: bool = False,
) -> None:
    """Complete the record of a trajectory that has its reward.

    Args:
        recording: The record.
        trajectory: The trajectory.
        spec: What the trajectories share.
        origin: Where it comes from.
        has_reward: Whether a transform or a function gave a reward.
        is_annotated: Whether the stage of a `RecordTransform` has seen its last turn here.
    """
    if not recording.is_open:
        return
    if has_reward:
        recording.add_reward(trajectory.reward - sum(trajectory.turn_rewards[:-1]))
    stage = spec.stage_of(RecordStage)
    if stage is None:
        recording.annotate(gts=trajectory.task.truth)
    else:
        if not is_annotated:
            columns = trajectory.columns
            stage.annotate(recording, lambda names: task_columns(trajectory.task, names, columns))
        if stage.tokens and spec.encoder is not None and trajectory.ledger is not None:
            recording.annotate(tokens=token_record(trajectory.ledger, spec.encoder.tokenizer))
    versions = set[int]() if trajectory.ledger is None else {*trajectory.ledger.versions} - {-1}
    recording.set_origin(replace(origin, policy_versions=tuple(sorted(versions)), seconds=trajectory.seconds))
    if trajectory.forks:
        recording.annotate(
            branch=".".join(map(str, trajectory.path)),
            forked_after_turns=[fork.n_turns for fork in trajectory.forks],
        )
    if trajectory.score is not None:
        recording.annotate(**_score_extras(trajectory.score))
    recording.add_rest(trajectory.messages)
    recording.finish(trajectory.reason)


def record_again(trajectory: Trajectory, spec: TrajectorySpec, *, origin: Origin, has_reward: bool) -> None:
    """Record a trajectory that ended in an earlier process.

    Args:
        trajectory: The trajectory.
        spec: What the trajectories share.
        origin: Where it comes from.
        has_reward: Whether a transform or a function gave a reward.
    """
    recording = EpisodeRecording(spec.hook, trajectory.name, trajectory.index, origin)
    rewards = [*trajectory.turn_rewards, *[0.0] * len(trajectory.turns)]
    for turn, reward in zip(trajectory.turns, rewards, strict=False):
        recording.record(turn)
        if reward:
            recording.add_reward(reward)
    finish_record(recording, trajectory, spec, origin=origin, has_reward=has_reward)


def _score_extras(score: Score) -> dict[str, JSON]:
    """Return the fields of the record that show how a score came about."""
    fields: dict[str, JSON] = {f"score_{name}": float(value) for name, value in score.parts.items()}
    if score.answer is not None:
        fields["extracted_answer"] = score.answer
    if score.explanation:
        fields["score_explanation"] = score.explanation
    return fields
