"""The whole state of a training run is saved or not at all, and fits only the run that it came from."""

import contextlib
import json
import logging
from pathlib import Path

import pytest
import torch
from helpers.forked import forked, process_group, run_forked
from helpers.limit import limit
from torchrl.checkpoint import GlobalRNGState

from torchrl_agentic.collectors.timeline import (
    BatchTimeline,
    TimelineRow,
    TimelineWriter,
    read_timelines,
)
from torchrl_agentic.records import GroupMember, GroupRecord, Recorder, read_groups
from torchrl_agentic.rollout import CheckpointMismatch, Checkpoints, ModelState, discard_steps

FOLDERS = [str(path) for path in Path(__file__).parents[:2]]
"""Folders of the modules that these tests import."""


def program(folder: Path, code: str) -> Path:
    """Write a program that may import this module, and return its path."""
    path = folder / "program.py"
    path.write_text(f"import sys\nsys.path[:0] = {FOLDERS}\n{code}")
    return path


class Run:
    """A training run of a linear model, with dropout, so that random states matter."""

    def __init__(self, folder: Path, *, features: int = 4, **options) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(features, 3), torch.nn.Dropout(0.5))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        self.features = features
        self.checkpoints = Checkpoints(folder, **options)
        state = ModelState(self.model, self.optimizer)
        self.parts = {"model": state, "schedule": self.schedule, "random": GlobalRNGState()}

    def step(self) -> list[float]:
        """Take a step; return the losses of its elements."""
        losses = self.model(torch.rand(5, self.features)).square()
        losses.sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        return losses.flatten().tolist()


def test_a_resumed_run_continues_bit_for_bit(tmp_path):
    whole = Run(tmp_path / "whole")
    expected = [whole.step() for _ in range(6)]
    begun = Run(tmp_path / "begun")
    assert begun.checkpoints.load(begun.parts) == 0
    found = [begun.step() for _ in range(3)]
    assert begun.checkpoints.save(3, begun.parts)
    resumed = Run(tmp_path / "begun")
    assert resumed.checkpoints.load(resumed.parts) == 3
    found += [resumed.step() for _ in range(3)]
    assert found == expected


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    run = Run(tmp_path, keep=2)
    for step in (1, 5, 10, 100_000_000):
        assert run.checkpoints.save(step, run.parts)
    assert run.checkpoints.steps() == [10, 100_000_000]
    assert run.checkpoints.load(run.parts, step=10) == 10
    assert run.checkpoints.save(10, run.parts)  # again, over the old one
    assert run.checkpoints.steps() == [10, 100_000_000]


def test_a_checkpoint_that_is_not_complete_does_not_count(tmp_path):
    run = Run(tmp_path)
    run.checkpoints.save(1, run.parts)
    (tmp_path / "000002").mkdir()
    (tmp_path / "000003.unfinished").mkdir()
    (tmp_path / "000003.unfinished" / ".metadata").write_bytes(b"half")
    assert run.checkpoints.steps() == [1]
    assert run.checkpoints.save(3, run.parts)
    assert run.checkpoints.steps() == [1, 3]
    with pytest.raises(FileNotFoundError, match=r"step 2 in .*there are: \[1, 3\]"):
        run.checkpoints.load(run.parts, step=2)


FULL = """
import resource, signal, sys, logging
logging.basicConfig(format="%(message)s")
from test_checkpoints import Run
from pathlib import Path
run = Run(Path(sys.argv[1]))
assert run.checkpoints.save(1, run.parts)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (256, resource.RLIM_INFINITY))
assert not run.checkpoints.save(2, run.parts)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert run.checkpoints.steps() == [1] and run.checkpoints.load(run.parts) == 1
assert run.checkpoints.save(2, run.parts)
print(*run.checkpoints.steps())
"""


def test_a_disk_that_is_full_costs_the_checkpoint_and_not_the_run(tmp_path):
    found = run_forked(program(tmp_path, FULL), str(tmp_path / "c"))
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == ["1", "2"]
    assert "no checkpoint of step 2" in found.stderr
    assert "File too large" in found.stderr
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["000001", "000002"]


TWO = """
import os, sys
from datetime import timedelta
from pathlib import Path
from torch import distributed
from test_checkpoints import Run
rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
distributed.init_process_group("gloo", timeout=timedelta(seconds=600))
if rank == 0:
    folder.write_text("")  # where the folder of checkpoints should be
distributed.barrier()
run = Run(folder)
assert not run.checkpoints.save(1, run.parts)
distributed.barrier()
if rank == 0:
    folder.unlink()
distributed.barrier()
assert run.checkpoints.save(2, run.parts)
assert run.checkpoints.load(run.parts) == 2
distributed.destroy_process_group()
"""


def test_a_failure_of_the_first_process_fails_the_checkpoint_in_all_and_stops_none(tmp_path):
    words = program(tmp_path, TWO), str(tmp_path / "c")
    with contextlib.ExitStack() as stack:
        for process in [stack.enter_context(forked(*words, env=env)) for env in process_group(2)]:
            _, messages = process.communicate(limit(90))
            assert process.returncode == 0, messages


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    run = Run(tmp_path)
    run.checkpoints.save(1, run.parts)
    other = Run(tmp_path, features=7)
    with pytest.raises(CheckpointMismatch, match=r"000001 does not fit this run: .*Size mismatch"):
        other.checkpoints.load(other.parts)


def test_a_part_that_was_not_saved_is_named(tmp_path):
    run = Run(tmp_path)
    run.checkpoints.save(1, {"random": GlobalRNGState()})
    with pytest.raises(CheckpointMismatch, match=r"does not fit this run: .*model"):
        run.checkpoints.load(run.parts)


def test_other_settings_are_refused_and_listed(tmp_path):
    run = Run(tmp_path, settings={"model": "a", "out": Path("x"), "lr": 0.1})
    run.checkpoints.save(1, run.parts)
    same = Run(tmp_path, settings={"lr": 0.1, "model": "a", "out": "x"})
    assert same.checkpoints.load(same.parts) == 1
    other = Run(tmp_path, settings={"model": "b", "out": "x", "lr": 0.1, "kl": 1})
    with pytest.raises(CheckpointMismatch, match="other settings: kl: None there, 1 now; model: 'a' there"):
        other.checkpoints.load(other.parts)


def test_what_is_no_checkpoint_folder_cannot_be_saved_to_and_says_so(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    run = Run(tmp_path / "file")
    with caplog.at_level(logging.ERROR):
        assert not run.checkpoints.save(1, run.parts)
    assert "no checkpoint of step 1" in caplog.text
    assert "Not a directory" in caplog.text


def test_at_least_one_checkpoint_is_kept(tmp_path):
    with pytest.raises(ValueError, match="keep"):
        Checkpoints(tmp_path, keep=0)


def test_steps_that_a_resumed_run_repeats_are_discarded(tmp_path):
    scalars = tmp_path / "scalars" / "reward"
    scalars.mkdir(parents=True)
    (scalars / "mean.csv").write_text("0,0.5\n1,0.25\n2,0.75\n1")  # its last line was cut off
    (scalars / "cut.csv").write_bytes(b"0,0.5\n\0\0\0\0")
    trajectories = tmp_path / "trajectories"
    trajectories.mkdir()
    for name in ("2.jsonl", "10.jsonl.zst", "timeline.jsonl"):
        (trajectories / name).write_text("{}\n")
    named = [{"run": "r", "trajectory": name} for name in ("t0", "t1", "t2", "left in no batch")]
    (trajectories / "0.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in named) + '{"run": "r')
    with Recorder(trajectories, run="r") as recorder:
        for step in range(4):
            recorder.step = step
            recorder.group_left(GroupRecord(step, "t", step, step, (GroupMember(f"t{step}", 1.0, 0.5),)))
            recorder.weights_updated()
    timelines = TimelineWriter.beside(recorder)
    timelines.path.unlink()
    for step in range(4):
        timelines.write(BatchTimeline(step, 0.0, 1.0, rows=[TimelineRow(f"t{step}", "t", 0.0, 1.0)]))
    timelines.close()
    with timelines.path.open("a") as file:
        file.write('{"batch": 4')
    discard_steps(tmp_path, 2)
    assert [batch.number for batch in read_timelines(trajectories)] == [0, 1]
    assert (scalars / "mean.csv").read_text() == "0,0.5\n1,0.25\n"
    assert (scalars / "cut.csv").read_text() == "0,0.5\n"
    kept = ["0.jsonl", "groups.jsonl", "timeline.jsonl"]
    assert sorted(path.name for path in trajectories.iterdir()) == kept
    lines = (trajectories / "0.jsonl").read_text().splitlines()
    assert [json.loads(line)["trajectory"] for line in lines] == ["t0", "t1"]
    assert [(group.step, group.members[0].advantage) for group in read_groups(trajectories)] == [
        (0, 0.5),
        (1, 0.5),
    ]
