"""`examples/grpo.py`: killed and resumed, it has the same curve; it trains over both collectors."""

import csv
import signal
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from helpers.forked import Forked, forked, process_group
from helpers.limit import limit
from helpers.processes import run_program
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from torchrl_agentic.collectors.timeline import read_timelines
from torchrl_agentic.records import read_groups

ROOT = Path(__file__).parents[1]
SMALL = [
    "prompts=2", "group=2", "steps=3", "save_every=1", "evaluate_every=3", "evaluate_tasks=2", "minibatch=2",
    "warmup=2", "kl=0.01", "max_turns=2", "max_new_tokens=48",
]  # fmt: skip
SYNC = [*SMALL, "staleness=0", "deterministic=true"]
MEASURED = {"seconds/sample", "seconds/train", "agentic/tool_seconds"}
"""Scalars that differ from run to run."""


def start(out: Path, *words: str, **env: str) -> AbstractContextManager[Forked]:
    """Start the script, which ends with the context."""
    return forked("examples/grpo.py", "examples/grpo.yaml", f"out={out}", *words, cwd=ROOT, env=env)


def output(process: Forked) -> str:
    """Return the output of a script that ends well."""
    stdout, stderr = process.communicate(timeout=limit(110))
    assert process.returncode == 0, stderr
    return stdout


def ended(out: Path, *words: str) -> str:
    """Run the script to its end, which is a good one, and return its output."""
    with start(out, *words) as process:
        return output(process)


def curves(out: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the scalars of a run, by name."""
    found: dict[str, list[tuple[int, float]]] = {}
    for path in (out / "scalars").rglob("*.csv"):
        rows = csv.reader(path.read_text().splitlines())
        found[str(path.relative_to(out / "scalars").with_suffix(""))] = [
            (int(step), float(value)) for step, value in rows
        ]
    return {name: values for name, values in found.items() if name not in MEASURED}


def test_a_run_that_was_killed_continues_bit_for_bit(tmp_path: Path):
    """Killed after the second step, before its checkpoint or while that is saved."""
    with start(tmp_path / "whole", *SYNC) as whole:
        with start(tmp_path / "killed", *SYNC) as killed:
            for line in killed.stdout:
                if line.startswith("step 1"):
                    killed.send_signal(signal.SIGKILL)
                    break
            killed.communicate(timeout=limit(60))
        assert killed.returncode == -signal.SIGKILL
        with start(tmp_path / "killed", *SYNC) as again:
            assert "holds a run: continue it with --resume" in again.communicate(timeout=limit(60))[1]
        assert again.returncode == 1
        assert ended(tmp_path / "killed", *SYNC, "--resume").startswith(("step 1", "step 2"))
        output(whole)
    expected = curves(tmp_path / "whole")
    assert [step for step, _ in expected["reward/mean"]] == [0, 1, 2]
    assert any(value for _, value in expected["loss/kl_to_ref"])
    assert curves(tmp_path / "killed") == expected
    weights = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "killed")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    initial = load_file(ROOT / "torchrl_agentic" / "rollout" / "tiny" / "model.safetensors")
    assert any(not torch.equal(weights[0][name], initial[name]) for name in initial)
    steps = {path.name for path in (tmp_path / "killed" / "trajectories").glob("[0-9]*.jsonl")}
    assert steps >= {"0.jsonl", "1.jsonl", "2.jsonl"}


def test_batches_ahead_survive_a_resume_and_tensorboard_shows_each_step_once(tmp_path: Path):
    words = [*SMALL, "staleness=2", "logger=tensorboard"]
    ended(tmp_path, *words, "steps=2", "save_every=1")
    ended(tmp_path, *words, "steps=4", "--resume")
    shown = EventAccumulator(str(tmp_path)).Reload().Scalars("reward/mean")
    logged = curves(tmp_path)["reward/mean"]
    assert [one.step for one in shown] == [step for step, _ in logged] == [0, 1, 2, 3]
    assert [one.value for one in shown] == pytest.approx([value for _, value in logged])
    assert max(age for _, age in curves(tmp_path)["age/max"]) <= 2
    batches = list(read_timelines(tmp_path / "trajectories"))
    assert [batch.number for batch in batches] == [0, 1, 2, 3]
    names = [row.name for batch in batches for row in batch.rows]
    assert len(set(names)) == len(names) == 4 * 2 * 2
    groups = list(read_groups(tmp_path / "trajectories"))
    assert sorted(one.name for group in groups for one in group.members) == sorted(names)


def test_it_trains_over_the_collector_of_torchrl(tmp_path: Path):
    printed = ended(tmp_path, *SMALL, "collector=llm", "steps=2", "accumulate=2", "staleness=1")
    assert [line.split()[1] for line in printed.splitlines()] == ["0", "1"]
    assert len(curves(tmp_path)["reward/mean"]) == 2
    assert (tmp_path / "checkpoints" / "000002" / ".metadata").is_file()


def test_wrong_settings_are_named(tmp_path: Path):
    def mistake(out: str, *words: str) -> tuple[int, str]:
        with start(tmp_path / out, *SMALL, *words) as process:
            message = process.communicate(timeout=limit(60))[1]
        return process.returncode, message

    _, message = mistake("c", "evaluate_every=0", "dtype=float3")
    assert "dtype: Input should be 'float32'" in message
    assert "evaluate_every: Input should be greater than 0" in message
    code, message = mistake("a", "kl=much", "trian=x.jsonl")
    assert code == 2
    assert "kl: Input should be a valid number" in message
    assert "trian: Extra inputs are not permitted" in message
    code, message = mistake("b", "train=missing.jsonl")
    assert code == 1
    assert "missing.jsonl" in message
    assert "Traceback" not in message


def test_two_processes_share_a_model_and_resume(tmp_path: Path):
    """Started by torchrun, as programs of their own; resumed with the variables that it sets."""
    words = [*SMALL, "steps=2", "kl=0"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "examples/grpo.py", "examples/grpo.yaml", f"out={tmp_path}", *words, "steps=1"]
    found = run_program(command, cwd=ROOT, text=True, capture_output=True, timeout=110)
    assert found.returncode == 0, found.stderr
    resumed = (start(tmp_path, *words, "--resume", **env) for env in process_group(2))
    with next(resumed) as first, next(resumed) as second:
        output(first)
        output(second)
    assert [step for step, _ in curves(tmp_path)["reward/mean"]] == [0, 1]
    assert (tmp_path / "model" / "model.safetensors").is_file()
