"""
5 · Training on CPU
===================

Reinforcement learning with tools on two CPU cores: a tiny model samples answers, its calls run in the
sandbox, and `GRPOLoss` raises the probability of the tokens that led to right answers.
``examples/grpo_tools.py`` is the whole program; it takes a weak model from 21.9% to 83.6% right answers on
held-out problems (curve: ``examples/grpo_curve.png``). This tutorial shows its parts and one training step.
"""

# %%
# The environment
# ---------------
#
# Three transforms, in this order: the tools, the condition that ends a trajectory, and the transform that
# writes the ids of the next prompt. Each row of the batch is a conversation with its own interpreter.

import torch
from tensordict import lazy_stack
from torchrl.envs import Compose, TransformedEnv
from torchrl.envs.llm import ChatEnv
from torchrl.objectives.llm import GRPOLoss

from torchrl_agentic import (
    EndTrajectory,
    PythonTool,
    ToolCompose,
    TurnTokenizer,
    agent_policy,
    training_policy,
    trajectory_batch,
)
from torchrl_agentic.rollout import answer_reward, chats_of, group_advantage, rollout
from torchrl_agentic.testing.tiny import load_tiny, tiny_questions

model, tokenizer = load_tiny()
compose = ToolCompose([PythonTool(timeout=5)], parser="hermes")
turns = TurnTokenizer(tokenizer, tools=compose.tools, tokenization_sanity_check_mode="disable")
env = TransformedEnv(
    ChatEnv(batch_size=(8,)), Compose(compose, EndTrajectory(max_turns=4, when_no_calls=True), turns)
)
print(turns.template.method, turns.template.appends)

# %%
# Sampling
# --------
#
# A group consists of several answers to one question, which GRPO compares with each other. `rollout` samples
# until all rows have ended, and returns conversations with their ledgers.

torch.manual_seed(0)
policy = agent_policy(model, tokenizer, max_new_tokens=48, temperature=1.3)
asked = [one for one in tiny_questions(2, seed=3) for _ in range(4)]
chats = chats_of([one["query"] for one in asked], "You solve problems with a Python tool.")
found = rollout(env, policy, chats, max_turns=4)
for message in found[0].messages:
    print(message.role, "|", message.text.strip().replace("\n", " ")[:100])
print(found[0].ledger)

# %%
# Sampled and injected tokens
# ---------------------------
#
# The ledger records the source of each token. Training uses only sampled tokens: ``mask`` is the assistant
# mask of `GRPOLoss` with ``masking_strategy="rlhf"``. The log-probabilities are those at sampling time; the
# model computes the same ones for these ids now.

batch = trajectory_batch([one.ledger for one in found])
with torch.no_grad():
    again = training_policy(model, tokenizer)(batch.copy())
row, other = batch[0], again[0]
sampled = row["masks", "all_assistant_mask"]
print(f"{int(sampled.sum())} of {len(sampled)} tokens were sampled")
difference = (row["log_probs", "full"] - other["log_probs", "full"])[sampled].abs().max()
print(f"log-probs differ by {difference:.1e} nats at most")
assert difference < 1e-4

# %%
# One step
# --------
#
# One reward per trajectory, one advantage per group, one row per trajectory: no reward is spread over turns,
# and no turn is trained on twice.

rewards = torch.tensor([answer_reward(one.answer, q["answer"]) for one, q in zip(found, asked, strict=True)])
for row, advantage in zip(batch.tensordicts, group_advantage(rewards, 4), strict=True):
    row["advantage"] = advantage
loss = GRPOLoss(training_policy(model, tokenizer), masking_strategy="rlhf", entropy_bonus=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
objective = loss(lazy_stack(batch.tensordicts)).loss_objective
objective.backward()
optimizer.step()
print("rewards", rewards.tolist(), "objective", round(objective.item(), 4))
env.close()
