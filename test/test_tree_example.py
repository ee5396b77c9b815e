"""`examples/tree_grpo.py`: tokens are counted once, trees fork as promised, and a policy learns from them."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLE = Path(__file__).parents[1] / "examples" / "tree_grpo.py"


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    """Import the example."""
    spec = importlib.util.spec_from_file_location("tree_grpo", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tree_grpo"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["tree_grpo"]


def rows_of(example: Any, kind: str) -> list[Any]:
    """Return the rows of one batch of an untrained policy."""
    words = example.tokenizer()
    engine = example.PolicyEngine(example.Policy(words), words.eos_token_id, seed=0)
    with example.collector_of(engine, words, kind, seed=0) as collector:
        return next(iter(collector)).tensordicts


@pytest.mark.parametrize("number", [0, 1])
def test_rows_are_those_of_the_groups_and_their_loss_is_finite(example: Any, number: int):
    kind = list(example.KINDS)[number]
    group, branching = example.KINDS[kind]
    rows = rows_of(example, kind)
    is_leaf = [row["next", "done"].item() for row in rows]
    n_leaves = 1 if branching is None else branching.n_leaves
    assert sum(is_leaf) == len(example.CODES) * group * n_leaves
    per_tree = 1 if branching is None else sum(branching.width**level for level in range(4))
    assert len(rows) == len(example.CODES) * group * per_tree
    for row in rows:
        row["advantage"].fill_(1.0)
    loss = example.loss_of(example.Policy(example.tokenizer()), rows)
    assert torch.isclose(loss.detach(), torch.tensor(-1.0), atol=1e-3), "fresh samples have the ratio 1"


def test_the_notes_of_a_tree_are_sampled_once(example: Any):
    flat, tree = list(example.KINDS)
    sampled = {
        kind: sum(int(row["masks", "all_assistant_mask"].sum()) for row in rows_of(example, kind))
        for kind in (flat, tree)
    }
    n_answers = sum(3**level for level in (1, 2, 3))
    assert sampled[tree] < len(example.CODES) * (example.N_NOTES * 3 + 4 * n_answers)
    assert sampled[flat] > sampled[tree], "27 leaves cost less than 8 trajectories"


def test_the_rewards_of_leaves_reach_their_roots(example: Any):
    rows = rows_of(example, list(example.KINDS)[1])
    leaves = [row["reward"].item() for row in rows if row["next", "done"].item()]
    roots = example.root_rewards(rows)
    assert len(roots) == len(example.CODES)
    assert sum(roots) / len(roots) == pytest.approx(sum(leaves) / len(leaves))


def test_trees_open_more_vaults_after_few_tokens(example: Any):
    words = example.tokenizer()
    flat, tree = (list(example.train(kind, words, budget=12_000, lr=0.4, seed=1)) for kind in example.KINDS)
    (after_flat,), (after_tree,) = (example.opened_at(run, [12_000], 3_000) for run in (flat, tree))
    assert after_tree > 20 + after_flat


def test_shares_are_means_of_the_steps_before(example: Any):
    run = [{"tokens": tokens, "opened": tokens / 1000} for tokens in (100, 200, 300)]
    assert example.opened_at(run, [300, 249, 250], 150) == pytest.approx([25.0, 15.0, 20.0])
    assert example.opened_at(run, [299], 10) == pytest.approx([20.0]), "at least the last step"
