"""
5 · Training on CPU
===================

Reinforcement learning with tools on two CPU cores: a tiny model samples answers, its calls run in the
sandbox, and `GRPOLoss` raises the probability of the tokens that led to right answers.
``examples/grpo.py`` is the whole program. This tutorial shows its parts and one training step.
"""

# %%
# The agent
# ---------
#
# Three transforms, in this order: the tools, the condition that ends a trajectory, and the transform that
# writes the ids of the next prompt. Each trajectory is a conversation with its own interpreter.

import torch
from tensordict import lazy_stack
from torchrl.envs import Compose
from torchrl.objectives.llm import GRPOLoss

from torchrl_agentic import (
    EndTrajectory,
    PythonTool,
    ToolCompose,
    TurnTokenizer,
    training_policy,
    trajectory_batch,
)
from torchrl_agentic.dispatch import event_loop
from torchrl_agentic.engines import TransformersEngine
from torchrl_agentic.rollout import answer_reward, group_advantage, rollout, tasks_of
from torchrl_agentic.testing.tiny import load_tiny, tiny_questions

model, tokenizer = load_tiny()
compose = ToolCompose([PythonTool(timeout=5)], parser="hermes")
turns = TurnTokenizer(tokenizer, tools=compose.tools, tokenization_sanity_check_mode="disable")
transforms = Compose(compose, EndTrajectory(max_turns=4, when_no_calls=True), turns)
print(turns.template.method, turns.template.appends)

# %%
# Sampling
# --------
#
# A group consists of several answers to one question, which GRPO compares with each other. `rollout` runs
# one trajectory per task over an engine, and returns conversations with their ledgers.

TEMPERATURE = 1.3
engine = TransformersEngine(model, tokenizer, temperature=TEMPERATURE, seed=0)
asked = [one for one in tiny_questions(2, seed=3) for _ in range(4)]
tasks = tasks_of(asked, "You solve problems with a Python tool.")
found = rollout(transforms, engine, tokenizer, tasks, max_turns=4, max_new_tokens=48)
event_loop.run(engine.close())
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
    again = training_policy(model, tokenizer, temperature=TEMPERATURE)(batch.copy())
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
loss = GRPOLoss(
    training_policy(model, tokenizer, temperature=TEMPERATURE), masking_strategy="rlhf", entropy_bonus=False
)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
objective = loss(lazy_stack(batch.tensordicts)).loss_objective
objective.backward()
optimizer.step()
print("rewards", rewards.tolist(), "objective", round(objective.item(), 4))

# %%
# The whole loop
# --------------
#
# `AgentCollector` does the same for a stream of tasks: groups, rewards, advantages and batches, and with
# ``max_staleness=1`` it samples the next batch while this one is trained on.
