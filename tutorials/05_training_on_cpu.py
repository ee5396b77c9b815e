"""
5 · Training on CPU
===================

Reinforcement learning with tools in the loop, on two CPU cores: a tiny model samples answers, its calls run
in the sandbox, and `GRPOLoss` raises the probability of what led to right answers. The whole program, which
takes a weak model from 21.9% to 83.6% right answers on held-out problems, is
``examples/grpo_tools.py``; its curve is ``examples/grpo_curve.png``. Here are its parts, and one step of it.
"""

# %%
# The environment
# ---------------
#
# Three transforms, in this order: the tools; what ends a trajectory; and, last, what writes the ids of the
# next prompt. Each row of the batch is a conversation with an interpreter of its own.

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
# A group is several answers to one question; GRPO compares them with each other. `rollout` asks each row
# until all have ended, and gives conversations with their ledgers.

torch.manual_seed(0)
policy = agent_policy(model, tokenizer, max_new_tokens=48, temperature=1.3)
asked = [one for one in tiny_questions(2, seed=3) for _ in range(4)]
chats = chats_of([one["query"] for one in asked], "You solve problems with a Python tool.")
found = rollout(env, policy, chats, max_turns=4)
for message in found[0].messages:
    print(message.role, "|", message.text.strip().replace("\n", " ")[:100])
print(found[0].ledger)

# %%
# What was sampled, and what was put in
# -------------------------------------
#
# The ledger has the source of each token. Only what the model sampled is trained on: ``mask`` is the
# assistant mask of `GRPOLoss` with ``masking_strategy="rlhf"``. The log-probs are those of the moment of
# sampling; the model gives these ids the same ones now.

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
# A reward per trajectory, an advantage per group, one row per trajectory: no reward is spread over turns,
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
