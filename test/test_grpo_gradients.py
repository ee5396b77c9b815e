"""An optimizer step of `examples/grpo.py` is the mean over its tokens, however they are split."""

import contextlib
import math
import warnings
from pathlib import Path

import pytest
import torch
from helpers.forked import forked, process_group
from helpers.grpo_gradients import example, gradients, rows
from helpers.limit import limit
from tensordict import lazy_stack
from torchrl.objectives.llm import GRPOLoss

from torchrl_agentic import training_policy
from torchrl_agentic.engines import ScriptedEngine
from torchrl_agentic.testing import load_tiny

pytestmark = pytest.mark.filterwarnings("ignore:size_average and reduce args:UserWarning")
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def grpo():
    with warnings.catch_warnings():  # TorchRL warns of classes of its own as they are defined
        warnings.filterwarnings("ignore", "Creating .*WeightUpdater", DeprecationWarning)
        return example()


def error(found, expected):
    """Return the size of a difference, relative to the expected value."""
    return ((found - expected).norm() / expected.norm()).item()


@pytest.fixture(scope="module")
def one_pass(grpo):
    """The gradient of one pass over all rows, and what it reports."""
    return gradients(grpo, minibatch=8, kl=0.1)


@pytest.mark.parametrize(("minibatch", "accumulate"), [(3, 3), (1, 8), (5, 4)])
def test_passes_that_accumulate_have_the_gradient_of_one_pass(grpo, one_pass, minibatch, accumulate):
    """The last pass is smaller, and one may have no sampled tokens."""
    expected, reported = one_pass
    found, figures = gradients(grpo, minibatch=minibatch, accumulate=accumulate, kl=0.1)
    assert error(found, expected) < 1e-5
    for name in reported.keys() - {"loss/ESS"}:  # which is no mean over tokens
        assert figures[name] == pytest.approx(reported[name], rel=1e-4, abs=1e-7)
    assert all(math.isfinite(value) for value in figures.values())


def test_the_gradient_is_that_of_the_mean_over_all_sampled_tokens(grpo):
    """Rows with the advantage 0 are among these tokens."""
    found, figures = gradients(grpo, minibatch=2, accumulate=4)
    model, tokenizer = load_tiny()
    batch = lazy_stack(rows(model, tokenizer))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.001)
    policy = training_policy(model, tokenizer)
    clip = (0.2, 0.28)
    loss = GRPOLoss(policy, masking_strategy="rlhf", clip_epsilon=clip, entropy_bonus=False)(batch)
    loss.loss_objective.backward()
    parameters = [one.grad.flatten() for one in model.parameters() if one.grad is not None]
    assert error(found, torch.cat(parameters)) < 1e-5
    assert figures["loss/loss_objective"] == pytest.approx(loss.loss_objective.item(), rel=1e-5)


def test_two_processes_have_the_gradient_of_one(one_pass, tmp_path: Path):
    """Their shares have unequal numbers of sampled tokens."""
    program = ROOT / "test/helpers/grpo_gradients.py"
    words = [str(tmp_path / "gradient"), "kl=0.1", "minibatch=3", "accumulate=2"]
    with contextlib.ExitStack() as stack:
        for process in [stack.enter_context(forked(program, *words, env=env)) for env in process_group(2)]:
            _, errors = process.communicate(limit(110))
            assert process.returncode == 0, errors
    found, _ = torch.load(tmp_path / "gradient")
    assert error(found, one_pass[0]) < 1e-5


@pytest.mark.parametrize(
    ("context", "asked", "bound"), [(1024, None, 960), (100, None, 50), (None, None, None), (1024, 300, 300)]
)
def test_prompts_leave_room_for_an_answer(grpo, context, asked, bound):
    engine = ScriptedEngine([["x"]], context_length=context)
    settings = grpo.Settings(model="tiny", train="", test="", max_new_tokens=64, max_prompt_tokens=asked)
    assert grpo.longest_prompt(settings, engine) == bound
