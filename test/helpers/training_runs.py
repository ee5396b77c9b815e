"""Dumps of training runs, made by hand: groups with advantages, steps, timelines, and a trainer's log."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from helpers.viewer_dumps import trajectory

from torchrl_agentic.messages import Status
from torchrl_agentic.records import GroupMember, GroupRecord, Origin, Recorder
from torchrl_agentic.viewer.samples import advantages

SCORES = (0.0, 1.0, 0.5, 0.5)


def training_run(
    folder: Path, *, run: str = "run-a", steps: int = 3, n_groups: int = 2, spice: str = "", ahead: int = 1
) -> Path:
    """Write a run: in each step so many groups of four samples, which began `ahead` steps before.

    Args:
        folder: Its folder; the dump is in "trajectories", the trainer's log in "metrics.csv".
        run: Id of the run.
        steps: Number of steps.
        n_groups: Number of groups in a step.
        spice: Text that is in every text.
        ahead: Number of steps between the begin of a group and its batch.
    """
    with Recorder(folder / "trajectories", run=run) as recorder:
        for number in range(steps * n_groups):
            step = number // n_groups
            scores = [score + step / 10 for score in SCORES] if number % n_groups else [1.0] * 4
            names = [f"sum-{number}/{number}.{index}" for index in range(4)]
            recorder.step = max(0, step - ahead)
            for index, (name, score) in enumerate(zip(names, scores, strict=True)):
                one = trajectory(
                    f"{name}{spice}",
                    step=recorder.step,
                    score=score,
                    question=f"What is {number} × 7?{spice}",
                    answer=f"It is {7 * number if score >= 1 else index}.{spice}",
                    status=Status.TIMEOUT if score < 0.5 else Status.OK,
                    reason="max_turns" if index == 0 else "no_calls",
                    request_id=f"{run}-{number}-{index}{spice}",
                    tokens=True,
                )
                origin = Origin(f"sum-{number}{spice}", number, index, (max(0, step - ahead),), 2.0)
                recorder.write(replace(one, run=run, origin=origin))
            gains = [gain or 0.0 for gain in advantages(scores)]
            members = tuple(
                GroupMember(f"{name}{spice}", score, gain)
                for name, score, gain in zip(names, scores, gains, strict=True)
            )
            recorder.step = step
            recorder.group_left(GroupRecord(number, f"sum-{number}{spice}", step, step, members))
            if number % n_groups == n_groups - 1:
                recorder.weights_updated()
    rows = "".join(f"{step},{1 / (step + 1)}\n" for step in range(steps))
    (folder / "metrics.csv").write_text(f"step,loss{spice.replace(',', '')}\n{rows}", "utf-8", "replace")
    return folder
