"""Advantages of trees: their sums, those of a flat group without forks, and what a loss makes of them."""

import math
import warnings

import pytest
import torch
from helpers.collector_worlds import tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tensordict import lazy_stack
from torchrl.objectives.llm import GRPOLoss
from transformers import Qwen2Config, Qwen2ForCausalLM

from torchrl_agentic.collectors import Fork, Task, Trajectory, group_advantage, tree_advantage, tree_values
from torchrl_agentic.collectors.batching import collector_batch
from torchrl_agentic.rollout import training_policy
from torchrl_agentic.tokens.ledger import TokenLedger
from torchrl_agentic.trajectory.training_rows import training_rows

REWARDS = st.floats(-10, 10, width=32)


@st.composite
def trees(draw, rewards=REWARDS):
    """Return the rewards of the leaves of some trees, by path."""
    leaves = {}

    def grow(path, depth):
        if depth < 3 and draw(st.booleans()):
            for branch in range(draw(st.integers(2, 3))):
                grow((*path, branch), depth + 1)
        else:
            leaves[path] = draw(rewards)

    for tree in range(draw(st.integers(1, 3))):
        grow((tree,), 0)
    return leaves


@given(trees())
def test_siblings_add_up_to_zero_and_ways_to_the_advantage_of_their_reward(rewards):
    advantages, values = tree_advantage(rewards), tree_values(rewards)
    assert set(advantages) == set(values) - {()}
    siblings = {}
    for node, advantage in advantages.items():
        siblings.setdefault(node[:-1], []).append(advantage)
    for parent, found in siblings.items():
        assert math.fsum(found) == pytest.approx(0, abs=1e-6), parent
    spread = next(
        ((values[node] - values[node[:-1]]) / one for node, one in advantages.items() if abs(one) > 1e-9),
        None,
    )
    for leaf, reward in rewards.items():
        total = math.fsum(advantages[leaf[:size]] for size in range(1, len(leaf) + 1))
        assert total * (spread or 1.0) == pytest.approx(reward - values[()], abs=1e-5)


LARGEST = torch.finfo(torch.float32).max
FINITE = st.floats(-LARGEST, LARGEST)


@given(st.data(), FINITE)
def test_equal_rewards_have_no_advantage_in_a_tree(data, reward):
    rewards = data.draw(trees(rewards=st.just(reward)))
    assert set(tree_advantage(rewards).values()) == {0.0}
    assert set(tree_advantage(rewards, eps=0.0).values()) == {0.0}


@given(FINITE, st.integers(1, 64), st.integers(1, 3), st.sampled_from([torch.float32, torch.float64]))
def test_equal_rewards_have_no_advantage_in_a_group(reward, size, groups, dtype):
    rewards = torch.full((groups * size,), reward, dtype=dtype)
    assert not group_advantage(rewards, size).any()


@given(st.lists(FINITE, min_size=2, max_size=16))
def test_advantages_of_a_group_are_finite_and_say_whether_its_rewards_differ(rewards):
    found = group_advantage(torch.tensor(rewards, dtype=torch.float64), len(rewards))
    assert found.isfinite().all()
    assert found.abs().max() <= math.sqrt(len(rewards)) + 1e-3
    if max(rewards) - min(rewards) > 1e-30:
        assert found.any()


@pytest.mark.parametrize("reward", [1e39, -1e39, math.inf, math.nan])
def test_a_reward_that_a_batch_cannot_hold_is_refused_with_the_bound(reward):
    with pytest.raises(ValueError, match=r"at most 3\.4028e\+38 in size.*float32; got"):
        group_advantage(torch.tensor([0.0, reward], dtype=torch.float64), 2)
    with pytest.raises(ValueError, match=r"at most 3\.4028e\+38"):
        tree_advantage({(0,): 0.0, (1,): reward})


@given(st.lists(REWARDS, min_size=1, max_size=8))
def test_without_forks_it_is_the_advantage_of_the_group(rewards):
    wanted = group_advantage(torch.tensor(rewards, dtype=torch.float64), len(rewards)).flatten().tolist()
    found = tree_advantage({(number,): reward for number, reward in enumerate(rewards)})
    assert [found[(number,)] for number in range(len(rewards))] == pytest.approx(wanted, rel=1e-6)


@given(trees())
def test_squares_of_the_advantages_add_up_to_one_over_a_random_way(rewards):
    values, advantages = tree_values(rewards), tree_advantage(rewards, eps=0.0) if _differ(rewards) else {}
    if not advantages:
        return
    widths = {}
    for node in advantages:
        widths[node[:-1]] = widths.get(node[:-1], 0) + 1
    chance = {node: math.prod(1 / widths[node[:size]] for size in range(len(node))) for node in values}
    assert math.fsum(chance[node] * one**2 for node, one in advantages.items()) == pytest.approx(1, rel=1e-3)


def _differ(rewards):
    return max(rewards.values()) - min(rewards.values()) > 1e-3


def test_a_node_counts_as_one_branch_however_many_leaves_it_has():
    rewards = {(0, 0): 1.0, (0, 1, 0): 0.0, (0, 1, 1): 0.0, (0, 1, 2): 0.0}
    assert tree_values(rewards)[(0,)] == 0.5


@pytest.mark.parametrize("rewards", [{}, {(0,): 1.0, (0, 1): 0.0}])
def test_what_is_no_tree_is_refused(rewards):
    with pytest.raises(ValueError, match=r"leaves|leaf"):
        tree_advantage(rewards)


@st.composite
def groups(draw):
    """Return the trajectories of a group, which share prefixes, and the number of sampled tokens."""
    rewards = draw(trees())
    nodes = sorted({leaf[:size] for leaf in rewards for size in range(1, len(leaf) + 1)})
    pieces, n_sampled = {}, 0
    for node in nodes:
        sampled, injected = draw(st.integers(1, 3)), draw(st.integers(0, 2))
        pieces[node] = ([draw(st.integers(5, 90)) for _ in range(sampled)], [7] * injected)
        n_sampled += sampled
    found = []
    for leaf, reward in sorted(rewards.items()):
        ledger, forks = TokenLedger(), []
        ledger.add_prompt([3, 4])
        for size in range(1, len(leaf) + 1):
            sampled, injected = pieces[leaf[:size]]
            ledger.add_sampled(sampled, [-1.5] * len(sampled), version=0)
            ledger.add_prompt(injected)
            if size < len(leaf):
                forks.append(Fork(size, len(ledger), leaf[size]))
        task = Task("t", [{"role": "user", "content": "q"}])
        trajectory = Trajectory(
            str(leaf), task, leaf[0], (), ledger=ledger, reward=reward, forks=tuple(forks)
        )
        found.append(trajectory)
    return found, n_sampled


@given(groups())
def test_the_rows_of_a_batch_contain_each_sampled_token_once(group):
    trajectories, n_sampled = group
    segments = training_rows(trajectories)
    assert sum(segment.is_end for segment in segments) == len(trajectories)
    batch = collector_batch([(0, trajectories)], has_trees=True)
    assert len(batch) == len(segments) or not any(one.forks for one in trajectories)
    masks = [row["masks", "all_assistant_mask"] for row in batch.unbind(0)]
    assert sum(int(mask.sum()) for mask in masks) == n_sampled
    versions = torch.cat([row["collector", "policy_version"] for row in batch.unbind(0)])
    assert int((versions >= 0).sum()) == n_sampled
    paths = [row["collector", "path"] for row in batch.unbind(0)]
    assert len(set(paths)) == len(paths)


@pytest.mark.filterwarnings("ignore:size_average and reduce args:UserWarning")
@pytest.mark.parametrize("strategy", ["generic", "rlhf"])
def test_the_gradient_of_the_loss_is_that_of_the_tree(strategy):
    trajectories, nodes = [], {}
    rewards = {(0, 0): 1.0, (0, 1, 0): 0.0, (0, 1, 1): 0.5, (1,): 0.25}
    for leaf, reward in rewards.items():
        ledger, forks = TokenLedger(), []
        ledger.add_prompt([3, 4])
        for size in range(1, len(leaf) + 1):
            start = len(ledger)
            ledger.add_sampled([10 + sum(leaf[:size]), 20 + size, 30], [-5.0] * 3, version=0)
            nodes[leaf[:size]] = (tuple(ledger.ids), start)
            ledger.add_prompt([7] * size)
            if size < len(leaf):
                forks.append(Fork(size, len(ledger), leaf[size]))
        task = Task("t", [{"role": "user", "content": "q"}])
        trajectories.append(
            Trajectory(str(leaf), task, leaf[0], (), ledger=ledger, reward=reward, forks=tuple(forks))
        )
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer()),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = Qwen2ForCausalLM(config).eval()
    batch = collector_batch([(0, trajectories)], has_trees=True)
    loss_fn = GRPOLoss(
        training_policy(model, tokenizer()),
        masking_strategy=strategy,
        entropy_bonus=False,
        clip_epsilon=0.9999,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss_fn(lazy_stack(batch.tensordicts)).loss_objective.backward()
    found = [weight.grad.clone() for weight in model.parameters()]
    model.zero_grad()
    gains, n_tokens = 0.0, 0
    for node, advantage in tree_advantage(rewards).items():
        ids, start = nodes[node]
        log_probs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        for place in range(start, len(ids)):
            ratio = (log_probs[place - 1, ids[place]] + 5.0).exp()
            gain = torch.minimum(ratio * advantage, ratio.clamp(1 - 0.9999, 1 + 0.9999) * advantage)
            gains, n_tokens = gains + gain, n_tokens + 1
    (-gains / n_tokens).backward()
    assert n_tokens == 3 * len(nodes)
    assert sum(gradient.abs().sum() for gradient in found) > 0
    for gradient, weight in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, weight.grad, rtol=1e-4, atol=1e-6)
