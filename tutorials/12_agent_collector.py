"""
12 · Trajectories that do not wait
==================================

In an environment, a batch takes its turns together, and each turn waits for the slowest tool. With
`AgentCollector`, each trajectory is a coroutine over an asynchronous engine: while one waits for its tool,
others sample. Whole groups leave as batches that `GRPOLoss` takes as they are. This tutorial trains a tiny
model with it, for two updates. :doc:`/howto/collector` has the details, :doc:`/howto/collector_choice` says
when TorchRL's collectors are the better choice.
"""

# %%
# Tasks, tools and a reward
# -------------------------
#
# A task holds the first messages of a group and the right answer. Any iterable works, such as a data set
# whose rows have ``messages`` or ``query``; it is read as tasks are needed. `Faulty` makes the tool slow, now
# and then very slow, as tools in a network are.

import asyncio
import copy

import torch
from torchrl.objectives.llm import GRPOLoss

from torchrl_agentic import Faulty, PythonTool, ToolCompose, training_policy
from torchrl_agentic.collectors import AgentCollector, Task, Trajectory
from torchrl_agentic.engines import TransformersEngine
from torchrl_agentic.rollout import answer_reward
from torchrl_agentic.testing import load_tiny, tiny_questions

SYSTEM = {"role": "system", "content": "You solve problems with a Python tool."}
python = Faulty(PythonTool(timeout=5), seed=0, latency=lambda rng: rng.lognormvariate(-2, 1))
tasks = [
    Task(f"problem-{number}", [SYSTEM, {"role": "user", "content": row["query"]}], answer=row["answer"])
    for number, row in enumerate(tiny_questions(6, seed=3))
]


def reward(trajectory: Trajectory) -> float:
    """Return 1.0 for the right answer; it runs on a thread, or write `async def`."""
    return answer_reward(trajectory.answer, trajectory.task.answer)


# %%
# Two copies of the model
# -----------------------
#
# The engine samples with one copy while the trainer changes the other. `TransformersEngine` runs small models
# in this process; `VLLMEngine` and `HTTPEngine` take its place without another change.

trained, tokenizer = load_tiny()
TEMPERATURE = 1.3
engine = TransformersEngine(copy.deepcopy(trained), tokenizer, temperature=TEMPERATURE, seed=0)

# %%
# The collector
# -------------
#
# Two groups of four trajectories make a batch. ``max_staleness=1`` lets the next groups begin while the
# trainer works on this batch, and none is ever more than one update old. ``max_staleness=0`` would give the
# batches of a synchronous script.

collector = AgentCollector(
    ToolCompose([python], parser="hermes"),
    engine=engine,
    tokenizer=tokenizer,
    tasks=tasks,
    group_size=4,
    groups_per_batch=2,
    max_staleness=1,
    max_turns=4,
    max_new_tokens=48,
    reward=reward,
)

# %%
# The loop
# --------
#
# A row is one trajectory: its ids, the mask of sampled tokens, their log-probs at the time of sampling, and
# the advantage within its group. `update_policy_weights_` aborts the answers that the engine is sampling;
# they continue under the new weights, and each token keeps the version that sampled it.

loss_fn = GRPOLoss(
    training_policy(trained, tokenizer, temperature=TEMPERATURE), masking_strategy="rlhf", entropy_bonus=False
)
optimizer = torch.optim.AdamW(trained.parameters(), lr=2e-4)
rows = []
for number, batch in enumerate(collector):
    ages = collector.policy_version - torch.cat([row["collector", "policy_version"] for row in batch])
    sampled = torch.cat([row["masks", "all_assistant_mask"] for row in batch])
    print(
        f"batch {number}: {len(batch)} trajectories, {int(sampled.sum())} sampled tokens,",
        f"reward {batch['reward'].mean():.2f}, oldest token {int(ages[sampled].max())} updates old",
    )
    assert int(ages[sampled].max()) <= 1
    rows += batch.tensordicts
    if number == 2:
        break
    objective = loss_fn(batch).loss_objective
    objective.backward()
    optimizer.step()
    optimizer.zero_grad()
    collector.update_policy_weights_(trained)

# %%
# Versions
# --------
#
# A trajectory that ran during an update has tokens of two versions. -1 marks tokens that nobody sampled: the
# prompt, and the results of tools.

for row in rows:
    versions, counts = row["collector", "policy_version"].unique(return_counts=True)
    found = dict(zip(versions.tolist(), counts.tolist(), strict=True))
    print(row["collector", "name"], row["collector", "reason"], f"tokens by version: {found}")

# %%
# Why did the trainer wait?
# -------------------------
#
# Each wait is divided among the trajectories that were missing, and among what they were doing. The same
# figures are curves for a logger (``collector.stats.scalars()``), a panel in the terminal
# (``collector.stats.live()``), and a time line in the viewer (``AgentCollector(timeline=…)``).

print(collector.stats)
print({name: round(value, 2) for name, value in collector.stats.scalars().items() if "wait/" in name})

# %%
# A rule of your own
# ------------------
#
# A transform has its rule in a `Stage`, which the collector runs after each message, and an environment for
# all rows of a step. This one costs a reward per turn, counts letters in a column, and ends a trajectory
# whose program fails. :doc:`/howto/extending` says what else a stage may do, and how to test it.

from torchrl.envs import Compose

from torchrl_agentic import Column, Stage, TurnTransform
from torchrl_agentic.rollout import rollout


class Frugal(Stage):
    gives_rewards = True
    columns = (Column("n_letters", int, "sum", lambda turn: len(turn.message.text)),)

    def run(self, turns):
        for turn in turns:
            turn.give(-0.1)
            if any(result.is_error for result in turn.results):
                turn.end("program_failed", terminated=True)


transforms = Compose(ToolCompose([python], parser="hermes"), TurnTransform(Frugal()))
for one in rollout(transforms, engine, tokenizer, tasks, max_turns=4, max_new_tokens=48):
    print(one.name, one.reason, f"{one.columns['n_letters']} letters, reward {one.reward:.1f}")
    assert round(one.reward, 6) == round(-0.1 * len(one.turns), 6)

# %%
# The end
# -------
#
# ``shutdown`` cancels what runs and closes interpreters and connections; ``with collector:`` does it too. The
# engine belongs to its creator: other collectors, such as one for evaluation, may use it.

collector.shutdown()
asyncio.run(engine.close())
