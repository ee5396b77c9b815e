"""The GRPO example with vLLM on the CPU: `make test-vllm-servers`, since CI has no time for two engines."""

import os
import sys
from pathlib import Path

import pytest
from helpers.limit import limit
from helpers.processes import run_program

pytestmark = [pytest.mark.engines, pytest.mark.timeout(limit(300)), pytest.mark.filterwarnings("default")]
ROOT = Path(__file__).parents[1]


def test_the_example_trains_with_vllm_and_resumes(tmp_path):
    env = {
        **os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "TORCH_COMPILE_DISABLE": "1",
    }  # fmt: skip
    words = [
        "engine=vllm", "engine_args={enforce_eager: true, max_model_len: 1024, max_num_seqs: 8}", "prompts=4",
        "group=4", "minibatch=8", "save_every=1", "evaluate_tasks=2", "evaluate_every=2", f"out={tmp_path}",
    ]  # fmt: skip
    for more in (["steps=1"], ["steps=2", "--resume"]):
        command = [sys.executable, "examples/grpo.py", "examples/grpo.yaml", *words, *more]
        found = run_program(command, cwd=ROOT, env=env, text=True, capture_output=True, timeout=140)
        assert found.returncode == 0, found.stderr[-3000:]
    lines = (tmp_path / "scalars" / "reward" / "mean.csv").read_text().splitlines()
    assert [line.partition(",")[0] for line in lines] == ["0", "1"]
    (closeness,) = (tmp_path / "scalars" / "loss" / "kl_approx.csv").read_text().splitlines()[:1]
    assert abs(float(closeness.partition(",")[2])) < 1e-3  # both compute the same log-probabilities
