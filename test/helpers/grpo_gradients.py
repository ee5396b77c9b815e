"""The gradient of an optimizer step of `examples/grpo.py`; as a program, it is one of several processes.

    torchrun --nproc-per-node 2 test/helpers/grpo_gradients.py FILE key=value...

Each process learns from its share of the same rows, which have unequal numbers of sampled
tokens; one has none.
"""

import importlib.util
import sys
from pathlib import Path

import torch
import yaml
from tensordict import TensorDict, lazy_stack
from torch import distributed

from torchrl_agentic import training_policy

SIZES = ((60, 40), (30, 2), (12, 1), (90, 70), (20, 0), (25, 5), (40, 12), (18, 3))
"""Number of tokens of each row, and of those that were sampled."""


def example():
    """Return `examples/grpo.py` as a module."""
    path = Path(__file__).parents[2] / "examples" / "grpo.py"
    spec = importlib.util.spec_from_file_location("grpo_example", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def rows(model, tokenizer):
    """Return trajectories, two of which have the advantage 0; their policy was a little different."""
    draws = torch.Generator().manual_seed(0)
    made = []
    for number, (size, n_sampled) in enumerate(SIZES):
        row = TensorDict({})
        row["tokens", "full"] = torch.randint(5, 800, (size,), generator=draws)
        row["masks", "all_attention_mask"] = torch.ones(size, dtype=torch.bool)
        row["masks", "all_assistant_mask"] = torch.arange(size) >= size - n_sampled
        row["advantage"] = torch.tensor([[(0.0, 1.3, -0.7, 0.4)[number % 4]]])
        made.append(row)
    with torch.no_grad():
        known = training_policy(model, tokenizer)(lazy_stack([row.copy() for row in made]))
    for row, other in zip(made, known.tensordicts, strict=True):
        near = other["log_probs", "full"] - 0.1 * torch.rand(len(row["tokens", "full"]), generator=draws)
        row["log_probs", "full"] = torch.where(row["masks", "all_assistant_mask"], near, torch.nan)
    return made


class KeepGradients(torch.optim.SGD):
    """Keeps the gradients of its first step instead of changing weights."""

    gradients = None

    def step(self, closure=None):
        if self.gradients is None:
            whole = [one.grad for one in self.param_groups[0]["params"] if one.grad is not None]
            whole = [one.full_tensor() if hasattr(one, "full_tensor") else one.clone() for one in whole]
            self.gradients = torch.cat([one.flatten() for one in whole])


def gradients(grpo, **values):
    """Return the gradient of an optimizer step of this process, and what it reports.

    Args:
        grpo: The example as a module.
        values: Settings.
    """
    fixed = {"model": "tiny", "train": "", "test": "", "max_norm": 1e9, "prompts": len(SIZES), "group": 1}
    settings = grpo.Settings(**{**fixed, **values})
    model, tokenizer = grpo.load_model(settings)
    share = rows(model, tokenizer)[grpo.RANK :: grpo.WORLD]
    learner = grpo.Learner(settings, model, tokenizer)
    with torch.no_grad():  # so that the divergence from the reference has a gradient
        for weight in model.parameters():
            weight.mul_(1.001)
    learner.optimizer = KeepGradients(model.parameters(), lr=0.0)
    learner.scheduler = torch.optim.lr_scheduler.ConstantLR(learner.optimizer)
    figures = learner.learn(lazy_stack(share))
    return learner.optimizer.gradients, figures


def main():
    """Save the gradient and what the step reports."""
    grpo = example()
    file, *overrides = sys.argv[1:]
    if grpo.WORLD > 1:
        distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    values = (one.split("=") for one in overrides)
    found = gradients(grpo, **{key: yaml.safe_load(value) for key, value in values})
    if grpo.RANK == 0:
        torch.save(found, file)
    if grpo.WORLD > 1:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
