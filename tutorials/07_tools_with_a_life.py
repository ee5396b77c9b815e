"""
7 · Tools with a lifecycle
==========================

Some tools must know their trajectory: its right answer, the number of earlier calls, the value of the whole.
Such a tool is created when a trajectory starts and released when it ends. This tutorial writes one in the
form of verl's ``BaseTool``, gives each row its own arguments and tools, and turns rewards of tools into
rewards of turns, trajectories and tokens.
"""

# %%
# create, execute, calc_reward, release
# -------------------------------------
# One object serves all trajectories and stores the state of each under its ``instance_id``. ``create`` runs
# when a trajectory starts; its response is added to the first prompt. ``execute`` returns a response, the
# reward of this call, and metrics. ``calc_reward`` returns the final reward of the trajectory, once, at its
# end. ``release`` is always called last. A file of such classes written for verl needs only another import
# line.
from torchrl_agentic.tools.verl import BaseTool, OpenAIFunctionToolSchema, ToolResponse

SCHEMA = OpenAIFunctionToolSchema.model_validate(
    {
        "function": {
            "name": "guess",
            "description": "Guess the number.",
            "parameters": {
                "type": "object",
                "properties": {"number": {"type": "integer", "description": "Your guess."}},
                "required": ["number"],
            },
        }
    }
)


class GuessTool(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema) -> None:
        super().__init__(config, tool_schema)
        self.secrets: dict[str, int] = {}
        self.found: set[str] = set()

    async def create(self, instance_id=None, secret=0, **kwargs):
        print(f"  create: the secret is {secret}")
        self.secrets[instance_id] = secret
        return instance_id, ToolResponse(text=f"I think of a number from 1 to {self.config['most']}.")

    async def execute(self, instance_id, parameters, **kwargs):
        number, secret = parameters["number"], self.secrets[instance_id]
        if number == secret:
            self.found.add(instance_id)
            return ToolResponse(text="That is it."), 0.0, {"off_by": 0}
        text = "It is larger." if number < secret else "It is smaller."
        return ToolResponse(text=text), self.config["cost"], {"off_by": abs(number - secret)}

    async def calc_reward(self, instance_id, **kwargs):
        return float(instance_id in self.found)

    async def release(self, instance_id, **kwargs):
        print(f"  release: the secret was {self.secrets.pop(instance_id)}")
        self.found.discard(instance_id)


# %%
# Arguments and tools of a row
# ----------------------------
# ``tools_kwargs`` holds, for each tool, the arguments of each of the four methods; ``tool_selection`` names
# the tools that a row may use. As in verl's data sets, both are in ``extra_info``. A tool outside the
# selection is not created, and a call to it is answered like a call to an unknown tool.
#
# `Gsm8kTool` is part of the package. It compares numbers in any notation, and its ``create_kwargs`` contain
# the right one. A tool that checks answers and a tool that plays a game have the same four methods.
import json

from torch.utils.data import DataLoader
from torchrl.envs import Compose, TransformedEnv
from torchrl.envs.llm import DatasetChatEnv

from torchrl_agentic import EndTrajectory, LifecycleTool, ToolCompose, ToolRewardTransform, collate_rows
from torchrl_agentic.testing import ScriptedPolicy
from torchrl_agentic.tools import Gsm8kTool

CHECK = "calc_gsm8k_reward"


def row(query: str, tool: str, **create_kwargs: object) -> dict:
    kwargs = {tool: {"create_kwargs": create_kwargs}}
    return {"query": query, "extra_info": {"tool_selection": [tool], "tools_kwargs": kwargs}}


rows = [
    row("Play.", "guess", secret=7),
    row("Play.", "guess", secret=3),
    row("What is 800 + 234?", CHECK, ground_truth="#### 1,034"),
]


def env_of(place: str) -> TransformedEnv:
    loader = DataLoader(rows, batch_size=1, collate_fn=collate_rows)
    base = DatasetChatEnv.from_dataloader(loader, batch_size=(len(rows),))
    guess = LifecycleTool(GuessTool({"most": 10, "cost": -0.1}, SCHEMA))
    tools = ToolCompose([guess, LifecycleTool(Gsm8kTool())], report_calls=True)
    ending = EndTrajectory(when_no_calls=True, max_turns=3)
    return TransformedEnv(base, Compose(tools, ending, ToolRewardTransform(place=place)))


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


SCRIPT = [
    [call("guess", number=5), call("guess", number=7), "It was 7."],
    [call("guess", number=5), call("guess", number=4), "I give up."],
    [call(CHECK, answer="1,134") + call("guess", number=1), call(CHECK, answer="1034"), "1034"],
]

# %%
# Rewards of calls, turns and trajectories
# ----------------------------------------
# `ToolRewardTransform` comes after every transform that ends trajectories. With ``place="turn"`` the reward
# of each turn is the sum over its calls, and the last turn also gets the final rewards of the trajectory.
# With ``report_calls`` the TensorDict also holds the reward and the metrics of each call, for rewards that
# you compute yourself.


def rollout(env: TransformedEnv, *, tell: bool = True) -> list[list[float]]:
    """Step until all rows are done, and return the rewards of each turn."""
    policy, td, rewards = ScriptedPolicy(SCRIPT), env.reset(), []
    for turn in range(3):
        after = env.step(policy(td))["next"]
        rewards.append([round(reward, 2) for reward in after["reward"].flatten().tolist()])
        for number, calls in enumerate(after["agentic", "calls"]):
            for one in calls if tell else ():
                print(f"  turn {turn}, row {number}:", *map(one.get, ("tool", "status", "reward", "metrics")))
        td = after
    for number, shown in enumerate(td["history"].prompt):
        told = [text for role, text in zip(shown.role, shown.content, strict=True) if role == "tool"]
        if tell:
            print(f"  row {number} was told: {told}")
    env.close()
    return rewards


by_turn = rollout(env_of("turn"))
print("by turn:", by_turn)
assert by_turn == [[-0.1, -0.1, -0.05], [0.0, -0.1, 0.0], [1.0, 0.0, 1.0]]

# %%
# Algorithms that compare whole answers need one reward per trajectory: with ``place="end"`` the last turn
# gets the sum. ``calls=`` and ``trajectories=`` weight the two kinds of rewards.
at_end = rollout(env_of("end"), tell=False)
print("at the end:", at_end)
assert at_end == [[0.0] * 3, [0.0] * 3, [0.9, -0.2, 0.95]]

# %%
# Rewards on tokens
# -----------------
# With a `TurnTokenizer`, ``place="tokens"`` puts the reward of each turn on the last token that the model
# sampled in that turn. This needs a model; the package contains a tiny one that calls ``python``. Here a
# wrapper adds a reward to each call of a tool that returns none.
from dataclasses import replace

import torch
from tensordict import TensorDict
from torchrl.envs.llm import ChatEnv

from torchrl_agentic import PythonTool, TurnTokenizer, agent_policy
from torchrl_agentic.testing import load_tiny, tiny_questions
from torchrl_agentic.tools import Wrapped


class Paid(Wrapped):
    async def run(self, args, ctx):
        return replace(await self.result(args, ctx), reward=0.25)


model, tokenizer = load_tiny()
compose = ToolCompose([Paid(PythonTool(timeout=5))])
turns = TurnTokenizer(tokenizer, tools=compose.tools)
ending = EndTrajectory(when_no_calls=True, max_turns=2)
env = TransformedEnv(
    ChatEnv(batch_size=(1,)), Compose(compose, ending, turns, ToolRewardTransform(place="tokens"))
)
td = env.reset(TensorDict({"query": [tiny_questions(1)[0]["query"]]}, batch_size=(1,)))
policy = agent_policy(model, tokenizer, max_new_tokens=96, temperature=0.0)
with torch.no_grad():
    for _ in range(2):
        td = env.step(policy(td))["next"]
ids, rewards = td[0]["tokens", "prompt"], td[0]["ledger", "rewards"]
print(tokenizer.decode(ids[td[0]["ledger", "mask"]]))
for place in rewards.nonzero().flatten().tolist():
    print(f"token {place} of {len(ids)}, {tokenizer.decode(ids[place])!r}: {rewards[place]:.2f}")
env.close()
assert rewards.sum() == 0.25
