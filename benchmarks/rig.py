"""Environments, tools and messages that several benchmarks use."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any, ClassVar

from tensordict import TensorDict, TensorDictBase
from torchrl.data.llm import History
from torchrl.envs import TransformedEnv
from torchrl.envs.llm import ChatEnv
from torchrl.envs.llm.transforms import ExecuteToolsInOrder, ToolRegistry, XMLBlockParser
from torchrl.envs.transforms import Compose

from torchrl_agentic import RateLimiter, ToolCompose, tool
from torchrl_agentic.transforms.history import as_history

NAP_S = 0.05


@tool
async def noop(a: int = 0) -> str:
    """Do nothing."""
    return "ok"


@tool
async def nap(a: int = 0) -> str:
    """Wait like a call to a service."""
    await asyncio.sleep(NAP_S)
    return "ok"


@tool
def blocking_nap(a: int = 0) -> str:
    """Wait like a call to a service, and block the thread."""
    import time

    time.sleep(NAP_S)
    return "ok"


async def bare() -> str:
    """Do what asyncio alone has to do for a no-op call."""
    return "ok"


def limits() -> dict[str, RateLimiter]:
    """Return a limiter that admits every call, at its full cost."""
    return {"noop": RateLimiter(max_concurrent=1_000_000)}


def message(calls: int, name: str = "noop") -> str:
    """Return an assistant message with `calls` calls that TorchRL's parser and ours can read."""
    return "".join(f'<tool name="{name}">{json.dumps({"a": index})}</tool>\n' for index in range(calls))


class Service:
    """A tool as `ExecuteToolsInOrder` takes it."""

    schema_in: ClassVar[dict[str, Any]] = {}
    schema_out: ClassVar[dict[str, Any]] = {}

    def __init__(self, name: str, seconds: float) -> None:
        self.name = name
        self.seconds = seconds

    def __call__(self, **_: Any) -> dict[str, Any]:
        """Wait and return a result."""
        if self.seconds:
            import time

            time.sleep(self.seconds)
        return {"result": "ok"}


@dataclass
class Rig:
    """An environment, and a TensorDict with the answers of a policy."""

    env: TransformedEnv
    td: TensorDictBase

    def at_the_transform(self) -> tuple[TensorDictBase, TensorDictBase]:
        """Return a fresh result of the base environment, the input of `transform._step`."""
        following = self.env.base_env._step(self.td)
        self.env.base_env._complete_done(self.env.base_env.full_done_spec, following)
        return self.td, following


def rig(which: str, rows: int, messages: int, calls: int, name: str = "noop") -> Rig:
    """Create an environment with our tools, with TorchRL's transform, or without tools."""
    base = ChatEnv(batch_size=(rows,))
    if which == "ToolCompose":
        compose = ToolCompose([noop, nap, blocking_nap], "xml", rate_limits=limits())
        env = TransformedEnv(base, compose)
    elif which == "ExecuteToolsInOrder":
        registry = ToolRegistry([Service("noop", 0.0), Service("nap", NAP_S)])
        env = TransformedEnv(base, Compose(ExecuteToolsInOrder(registry, XMLBlockParser())))
    else:
        env = TransformedEnv(base, Compose())
    chat = [
        {"role": ("user", "assistant")[index % 2], "content": f"message {index}"}
        for index in range(messages - 1)
    ]
    said = {"role": "assistant", "content": message(calls, name)}
    td = env.reset(TensorDict({}, batch_size=[rows]).set("query", as_history([chat] * rows)))
    history = td["history"]
    full = as_history([[*chat, said]] * rows)
    # TorchRL's own transforms cannot extend ragged histories: they get a plain one.
    history.full = full if which == "ToolCompose" else History.from_chats([[*chat, said]] * rows)
    td["history"] = history
    if which == "ToolCompose":
        del td["agentic", "turn"]  # by which a repeated step is known, which runs no call again
    return Rig(env, td)
