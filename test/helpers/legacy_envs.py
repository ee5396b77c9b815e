"""Environments with tool transforms of TorchRL, stepped row by row."""

import asyncio
import time

import torch
from helpers.limit import limit
from helpers.processes import runs
from tensordict import NonTensorData, TensorDict
from torchrl.envs import TransformedEnv
from torchrl.envs.llm import ChatEnv

from torchrl_agentic import Message, ToolCompose, ToolContext
from torchrl_agentic.testing import ScriptedPolicy
from torchrl_agentic.transforms import history as border


def run(tool, args, row=0, **context):
    """Run one call outside any session."""
    return asyncio.run(tool.run(args, ToolContext(call_id="c", batch_index=row, **context)))


def call(name, **args):
    return Message("assistant", None, tool_calls=[{"name": name, "arguments": args}])


def calls(name, *many):
    return Message("assistant", None, tool_calls=[{"name": name, "arguments": args} for args in many])


class LegacyEnv:
    """A chat environment with tools; each row says something of its own in a step."""

    def __init__(self, rows, *tools, **options):
        self.compose = ToolCompose(tools, **options)
        self.env = TransformedEnv(ChatEnv(batch_size=(rows,)), self.compose)
        self.td = self.env.reset(TensorDict({"query": ["q"] * rows}, batch_size=(rows,))).to_lazystack(0)

    def step(self, *said):
        """Make one step and return the tool messages of each row."""
        before = [len(row.messages) for row in border.prompts(self.td)]
        stepped = self.env.step(ScriptedPolicy([[text] * 20 for text in said])(self.td))
        self.td = self.env.step_mdp(stepped)
        rows = zip(border.prompts(self.td), before, strict=True)
        return [[m.read().content for m in row.messages[n + 1 :]] for row, n in rows]

    def reset(self, *mask):
        self.td["query"] = NonTensorData("again").expand(len(mask))
        self.td["_reset"] = torch.tensor(mask).unsqueeze(-1)
        self.td = self.env.reset(self.td)

    def errors(self):
        return self.td["agentic", "n_errors"].flatten().tolist()


def gone(pid):
    """Check that a process ends; a zombie has ended."""
    end = time.monotonic() + limit(20)
    while time.monotonic() < end:
        if not runs(pid):
            return True
        time.sleep(0.02)
    return False


def divide(a: float, b: float):
    """Divide a by b."""
    return {"quotient": a / b}
