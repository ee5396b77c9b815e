"""Whole trajectories out of steps: each counts once, and TorchRL's own GRPO parts train on them."""

import math
import re
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
from helpers.chat_envs import add, begin, call, chat_env, conversations, dataset_env
from helpers.model_families import FAMILIES
from helpers.token_rollouts import Says, sample
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import lazy_stack
from torch.utils.data import DataLoader
from torchrl.data import LazyStackStorage, ReplayBuffer, Unbounded
from torchrl.envs import Transform
from torchrl.envs.llm import DatasetChatEnv
from torchrl.objectives.llm import GRPOLoss, MCAdvantage
from transformers import Qwen2Config, Qwen2ForCausalLM

from torchrl_agentic import (
    AnswerRewardTransform,
    EndTrajectory,
    ToolCompose,
    ToolRewardTransform,
    TurnTokenizer,
    collate_rows,
)
from torchrl_agentic.messages import Message
from torchrl_agentic.rollout import (
    agent_policy,
    batch_metrics,
    group_advantage,
    group_batches,
    training_policy,
    trajectory_batch,
)
from torchrl_agentic.rollout.scripted import add_answers
from torchrl_agentic.transforms import history as border

with warnings.catch_warnings():  # TorchRL warns of classes of its own as they are defined
    warnings.filterwarnings("ignore", "Creating .*WeightUpdater", DeprecationWarning)
    from torchrl.collectors.llm import LLMCollector

# TorchRL computes log-probs with an argument that PyTorch deprecates, and warns of its own histories.
pytestmark = [
    pytest.mark.filterwarnings("ignore:size_average and reduce args:UserWarning"),
    pytest.mark.filterwarnings("ignore:(Prompt|Full) history should have one more batch dimension"),
    pytest.mark.filterwarnings("ignore:The env passed to LLMCollector is missing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:frames_per_batch .* is not exactly divisible"),
]
CALL = call("add", a=1, b=2)


@pytest.fixture(scope="module")
def tokenizer():
    return FAMILIES["qwen2_5"].tokenizer()


def steps_of(tokenizer, turns):
    """Step rows that end after so many turns, until all have ended; those that have ended are stepped on."""
    compose = ToolCompose([add])
    tokens = TurnTokenizer(tokenizer, tools=compose.tools, tokenization_sanity_check_mode="disable")
    env = chat_env((len(turns),), compose, EndTrajectory(when_no_calls=True), tokens)
    td, steps = begin(env), []
    while not td["done"].all():
        said = [Says(CALL if len(steps) + 1 < length else f"row {row}") for row, length in enumerate(turns)]
        steps.append(env.step(sample(td, tokenizer, said)))
        td = env.step_mdp(steps[-1])
    env.close()
    assert len(steps) == max(turns)
    return steps


def answers(batch, tokenizer):
    """The last answer of each trajectory, sorted."""
    found = []
    for row in batch.unbind(0):
        text = tokenizer.decode(row["tokens", "full"])
        found.append(text.rpartition("<|im_start|>assistant\n")[2].removesuffix("<|im_end|>"))
    return sorted(found)


@settings(deadline=None, max_examples=25)
@given(turns=st.lists(st.integers(1, 4), min_size=1, max_size=4), data=st.data())
def test_each_trajectory_counts_once_for_any_input(tokenizer, turns, data):
    """The plan is the oracle: in lists, with repeated, shuffled and flattened steps, with waiting rows."""
    steps = steps_of(tokenizer, turns)
    expected = [f"row {row}" for row in range(len(turns))]
    rows = [row for step in steps for row in border.leaves(step)[1]]
    repeated = data.draw(st.lists(st.sampled_from(range(len(rows))), max_size=6))
    shuffled = data.draw(st.permutations([*range(len(rows)), *repeated]))
    for form in (
        steps,
        [*steps, *steps],
        [rows[index] for index in shuffled],
        lazy_stack([rows[index] for index in shuffled]),
        waiting(steps),
        lazy_stack(waiting(steps), 1),
    ):
        assert answers(trajectory_batch(form), tokenizer) == expected


def test_the_entries_of_the_steps_add_up_in_the_row_of_a_trajectory(tokenizer):
    lengths = [1, 3, 2]
    batch = trajectory_batch(steps_of(tokenizer, lengths))
    rows = sorted(batch.unbind(0), key=lambda row: int(row["agentic", "turn"]))
    assert [int(row["agentic", "turn"]) for row in rows] == [1, 2, 3]
    assert [int(row["agentic", "n_calls"]) for row in rows] == [0, 1, 2]
    assert [bool(row["agentic", "any_tool_calls"]) for row in rows] == [False, True, True]
    assert all(row["agentic", "tool_seconds"].dtype is torch.float32 for row in rows)


def waiting(steps):
    """The steps as `env.rollout(break_when_all_done=True)` gives them: rows that wait repeat the last."""
    given, last = [], None
    for step in steps:
        rows = [
            row if last is None or not row["done"].any() else last[index]
            for index, row in enumerate(border.leaves(step)[1])
        ]
        given.append(lazy_stack([row.copy() for row in rows]))
        last = rows
    return given


def test_a_rollout_that_repeats_the_last_step_of_a_row_counts_it_once(tokenizer):
    """What `env.rollout` itself gives, where the rows end one turn apart."""

    def policy(td):
        turn = int(td["agentic", "turn"].max())
        return sample(td, tokenizer, [Says(f"row 0, turn {turn}"), Says(CALL if turn == 0 else "row 1")])

    compose = ToolCompose([add])
    tokens = TurnTokenizer(tokenizer, tools=compose.tools, tokenization_sanity_check_mode="disable")
    env = dataset_env(2, compose, EndTrajectory(when_no_calls=True), tokens)
    rollout = env.rollout(5, policy, break_when_any_done=False, break_when_all_done=True)
    env.close()
    assert rollout["next", "done"].squeeze(-1).sum() == 3
    assert answers(trajectory_batch(rollout), tokenizer) == ["row 0, turn 0", "row 1"]


def test_a_row_that_has_ended_stays_as_it_is_when_others_are_stepped():
    """Also where the policy talks on: `while not td["done"].all()` ends, and rewards count once."""
    right = AnswerRewardTransform(lambda answer, truth: answer == truth, column="query")
    env = chat_env((2,), ToolCompose([add]), EndTrajectory(when_no_calls=True), right)
    td, rewards = begin(env), []
    for said in (["q0", CALL], ["q0", CALL], [CALL, "q1"]):
        td = env.step(add_answers(td.to_lazystack(0), [Message("assistant", text) for text in said]))
        rewards.append(td["next", "reward"].flatten().tolist())
        td = env.step_mdp(td)
    env.close()
    assert rewards == [[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]]
    assert td["done"].all()
    assert [message.content for message in conversations(td)[0]] == ["q0", "q0"]


def small_model(tokenizer):
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=2048,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


class UserReward(Transform):
    """A reward of a user's own, in the shape of TorchRL's for language models, or of other environments."""

    def __init__(self, shape):
        super().__init__()
        self.shape = shape

    def _step(self, tensordict, next_tensordict):
        turn = next_tensordict["agentic", "turn"].float()
        noise = torch.arange(turn.numel()).reshape(turn.shape)
        return next_tensordict.set("reward", (turn + noise).reshape(*turn.shape[:-1], *self.shape))

    def transform_reward_spec(self, reward_spec):
        reward_spec["reward"] = Unbounded((*reward_spec.shape, *self.shape))
        return reward_spec


REWARDS = {
    "tools": lambda: [ToolRewardTransform(place="end")],
    "answers": lambda: [AnswerRewardTransform(lambda answer, truth: len(answer) % 2 == 0)],
    "a user's": lambda: [UserReward((1, 1))],
    "a user's, flat, and ours": lambda: [UserReward((1,)), ToolRewardTransform()],
}
GROUP = 4
GUIDE = Path(__file__).parents[2] / "docs" / "howto" / "training.md"


def collector_of(tokenizer, model, rewards, **options):
    """A collector over a data set with groups of the same question."""

    def lucky() -> str:
        """Say something."""
        return "."

    compose = ToolCompose([lucky])
    loader = DataLoader(
        [{"query": f"q{number}", "answer": "1"} for number in range(8) for _ in range(GROUP)],
        collate_fn=collate_rows,
        batch_size=2,
    )
    env = DatasetChatEnv.from_dataloader(loader, batch_size=(2,))
    tokens = TurnTokenizer(tokenizer, tools=compose.tools, tokenization_sanity_check_mode="disable")
    for transform in (compose, EndTrajectory(max_turns=2), tokens, *rewards):
        env.append_transform(transform)
    ends = {"forced_eos_token_id": tokenizer.eos_token_id}  # an answer that is cut off would end its row
    policy = agent_policy(model, tokenizer, max_new_tokens=6, generate_kwargs=ends)
    return LLMCollector(env, policy=policy, total_dialog_turns=32, dialog_turns_per_batch=8, **options)


def trained(model, tokenizer, batch, masking):
    """Take one optimizer step on a batch; return how much the weights moved."""
    loss = GRPOLoss(training_policy(model, tokenizer), masking_strategy=masking)(batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [weight.detach().clone() for weight in model.parameters()]
    loss.loss_objective.backward()
    optimizer.step()
    return sum((new - old).abs().sum().item() for new, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("reward", REWARDS)
def test_torchrl_trains_on_the_steps_of_a_collector(tokenizer, reward):
    """LLMCollector, replay buffer with MCAdvantage, GRPOLoss, an optimizer step: as TorchRL's own script."""
    rewards = REWARDS[reward]()
    collector = collector_of(tokenizer, small_model(tokenizer), rewards, yield_completed_trajectories=True)
    buffer = ReplayBuffer(storage=LazyStackStorage(64), batch_size=8, transform=MCAdvantage(GROUP))
    try:
        for data in collector:
            buffer.extend(data)
    finally:
        collector.shutdown()
    batch = buffer[:]
    assert batch["advantage"].shape == (len(buffer), 1, 1)
    for masking in ("rlhf", "sft"):
        moved = trained(small_model(tokenizer), tokenizer, batch, masking)
        assert (moved > 0) is bool(batch["advantage"].any()), masking
        assert moved > 0 or reward == "tools"  # whose tools give no rewards here


@pytest.mark.parametrize("reward", ["answers", "a user's, flat, and ours", "a user's"])
def test_torchrl_trains_on_whole_trajectories(tokenizer, reward):
    """The rows of `trajectory_batch` keep what MCAdvantage reads: question, reward, done."""
    model = small_model(tokenizer)
    collector = collector_of(tokenizer, model, REWARDS[reward](), yield_completed_trajectories=True)
    buffer = ReplayBuffer(storage=LazyStackStorage(64), batch_size=4, transform=MCAdvantage(GROUP))
    try:
        batch = trajectory_batch(list(collector), columns=[("agentic", "turn")])
    finally:
        collector.shutdown()
    assert len(batch) == 16
    assert [count for _, count in sorted(Counter(batch["query"]).items())][1:4] == [GROUP] * 3
    assert batch["answer"] == ["1"] * 16
    assert batch["next", "done"].all()
    assert batch["agentic", "turn"].flatten().tolist() == [1] * 16
    buffer.extend(batch)
    assert len(buffer) == 3 * GROUP
    assert trained(model, tokenizer, buffer[:], "rlhf") > 0


def test_rows_without_a_verdict_spoil_no_group_of_mc_advantage_with_the_program_of_the_guide(tokenizer):
    judged = []

    def is_right(answer, truth):
        judged.append(answer)
        return math.nan if len(judged) == 2 * GROUP else len(judged) % 2 == 0

    model = small_model(tokenizer)
    rewards = [AnswerRewardTransform(is_right)]
    collector = collector_of(tokenizer, model, rewards, yield_completed_trajectories=True)
    try:
        rows = trajectory_batch(list(collector))
    finally:
        collector.shutdown()
    spoilt = ReplayBuffer(storage=LazyStackStorage(64), batch_size=4, transform=MCAdvantage(GROUP))
    spoilt.extend(rows)
    assert spoilt[:]["advantage"].isnan().sum() == GROUP

    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text("utf-8"), re.S)
    (program,) = [block for block in blocks if "MCAdvantage" in block]
    names = {}
    exec(program, names)
    names["extend"](rows)
    names["extend"](rows[rows["next", "reward"].isnan().flatten()])
    kept = names["buffer"][:]
    assert len(kept) == len(spoilt) - GROUP
    assert kept["advantage"].isfinite().all()
    assert trained(model, tokenizer, kept, "rlhf") > 0


def test_the_reward_of_a_trajectory_is_the_sum_over_its_turns(tokenizer):
    collector = collector_of(
        tokenizer, small_model(tokenizer), [UserReward((1,))], yield_completed_trajectories=True
    )
    try:
        batch = trajectory_batch(list(collector))
    finally:
        collector.shutdown()
    assert batch["next", "reward"].shape == (16, 1, 1)
    assert set(batch["next", "reward"].flatten().tolist()) == {3.0, 5.0}  # turns 1 and 2, and twice the row
    assert group_advantage(batch["next", "reward"], GROUP).shape == (16, 1, 1)


def test_a_column_that_the_steps_lack_is_an_error(tokenizer):
    with pytest.raises(KeyError, match="'level'"):
        trajectory_batch(steps_of(tokenizer, [1]), columns=["level"])


def test_whole_groups_leave_a_collector_of_torchrl_as_batches(tokenizer):
    """With rewards and advantages like those of `AgentCollector`, as the loss takes them."""
    model = small_model(tokenizer)
    collector = collector_of(tokenizer, model, [UserReward((1,))], yield_completed_trajectories=True)
    try:
        batches = list(group_batches(collector, group_size=GROUP, groups_per_batch=2))
    finally:
        collector.shutdown()
    assert [len(batch) for batch in batches] == [2 * GROUP]  # of three whole groups
    for batch in batches:
        questions = batch["query"]
        assert [len(set(questions[at : at + GROUP])) for at in (0, GROUP)] == [1, 1]
        assert batch["reward"].tolist() == batch["next", "reward"].tolist()
        assert batch["advantage"].tolist() == group_advantage(batch["reward"], GROUP).tolist()
        assert batch["advantage"].any()
        assert trained(model, tokenizer, batch, "rlhf") > 0
        assert batch["collector", "group"].flatten().tolist() == [0] * GROUP + [1] * GROUP
        metrics = batch_metrics(batch)
        assert metrics["reward/mean"] == pytest.approx(batch["reward"].mean().item())
        assert metrics["groups/mixed"] == 1.0
        assert metrics["tokens/sampled"] == batch["masks", "all_assistant_mask"].sum().item() / len(batch)


@pytest.mark.parametrize("right", [1.0, 0.7, 1234.56])
def test_equal_rewards_of_a_collector_of_torchrl_have_no_advantages(tokenizer, right):
    rewards = AnswerRewardTransform(lambda answer, truth: True, right=right)
    collector = collector_of(tokenizer, small_model(tokenizer), [rewards], yield_completed_trajectories=True)
    try:
        batch = next(group_batches(collector, group_size=GROUP))
    finally:
        collector.shutdown()
    assert batch["reward"].flatten().tolist() == pytest.approx([right] * GROUP)
    assert not batch["advantage"].any()
    assert batch_metrics(batch)["groups/mixed"] == 0.0


class HugeReward(UserReward):
    """A reward of a user's own that is infinite in float32."""

    def _step(self, tensordict, next_tensordict):
        next_tensordict = super()._step(tensordict, next_tensordict)
        return next_tensordict.set("reward", next_tensordict["reward"] * 1e39)


def test_a_reward_that_float32_cannot_hold_makes_no_batch(tokenizer):
    with pytest.raises(ValueError, match=r"right must be finite and at most 3\.4028e\+38"):
        AnswerRewardTransform(lambda answer, truth: True, right=1e39)
    rewards = HugeReward((1, 1))
    collector = collector_of(tokenizer, small_model(tokenizer), [rewards], yield_completed_trajectories=True)
    try:
        with pytest.raises(ValueError, match=r"at most 3\.4028e\+38 in size"):
            next(group_batches(collector, group_size=GROUP))
    finally:
        collector.shutdown()


def test_steps_without_rewards_make_no_groups(tokenizer):
    with pytest.raises(ValueError, match="no rewards: append a reward transform"):
        list(group_batches([steps_of(tokenizer, [1, 2])], group_size=2))
