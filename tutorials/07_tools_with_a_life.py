"""
7 · Tools with a life
=====================

Some tools have to know a trajectory: what its right answer is, how often they were called, what the whole was
worth. Such a tool is created when a trajectory begins and released when it ends. This tutorial writes one in
the form of verl's ``BaseTool``, gives each row arguments and tools of its own, and turns what tools say into
rewards of turns, of trajectories and of tokens.
"""

# %%
# create, execute, calc_reward, release
# -------------------------------------
# One object serves all trajectories and keeps what it knows of each under its ``instance_id``. ``create`` may
# say something, which stands in the first prompt. ``execute`` gives a response, a reward of this call and
# metrics; ``calc_reward`` is asked once, at the end, for what the whole was worth. ``release`` comes last,
# whatever happened before. A file of such classes made for verl needs another import line, and no more.
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
# What a row says to its tools
# ----------------------------
# ``tools_kwargs`` holds, per tool, the arguments of each of the four methods; ``tool_selection`` names the
# tools that a row may use. As in verl's data sets they stand in ``extra_info``. A tool outside of the
# selection is not created, and a call to it is answered like one to a tool that is not there.
#
# `Gsm8kTool` comes with the package: it compares numbers, however they are written, and its ``create_kwargs``
# hold the right one. A tool that checks answers hides behind the same four methods as one that plays.
import json

from torch.utils.data import DataLoader
from torchrl.envs import Compose, TransformedEnv
from torchrl.envs.llm import DatasetChatEnv

from torchrl_agentic import collate_rows

from torchrl_agentic import EndTrajectory, LifecycleTool, ToolCompose, ToolRewardTransform
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
# `ToolRewardTransform` stands behind all that ends trajectories. With ``place="turn"`` each turn has what its
# calls were worth, and the last one what the trajectory was worth as well. With ``report_calls`` each call's
# own reward and metrics are there too, for rewards that you compute yourself.


def rollout(env: TransformedEnv, *, tell: bool = True) -> list[list[float]]:
    """Step until all rows are done; give the rewards of each turn."""
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
# Algorithms that compare whole answers want one reward per trajectory: ``place="end"`` gives the sum of all
# in the last turn. ``calls=`` and ``trajectories=`` weigh the two kinds.
at_end = rollout(env_of("end"), tell=False)
print("at the end:", at_end)
assert at_end == [[0.0] * 3, [0.0] * 3, [0.9, -0.2, 0.95]]

# %%
# Rewards on tokens
# -----------------
# Where a `TurnTokenizer` keeps the ids, ``place="tokens"`` puts the reward of each turn on the last token
# that the model sampled in it. That takes a model; a tiny one that calls ``python`` comes with the package. A
# wrapper pays for each of its calls here: that is how a tool which knows of no rewards gets one.
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
