"""Trajectories over a `ChatServer`: its engine, a tool, and one request."""

import asyncio

from helpers.limit import limit

from torchrl_agentic import ToolCompose, tool
from torchrl_agentic.engines import OpenAIEngine
from torchrl_agentic.rollout import rollout

QUESTION = ({"role": "user", "content": "How much is 2 + 3?"},)


def adder():
    """Return a tool that adds two integers."""

    @tool
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return a + b

    return add


def engine_of(server, model="m", **options):
    """Return an engine that asks the server, and does not wait long between tries."""
    return OpenAIEngine(model, base_url=server.base_url, **{"backoff_s": 0.001, **options})


async def ask(engine, key="task/0", messages=QUESTION, max_tokens=64):
    """Return the engine's answer."""
    async with asyncio.timeout(limit(60)):
        return await engine.chat(messages, tools=(), max_tokens=max_tokens, key=key)


async def rollout_of(server, questions, *, compose=None, engine=None, **options):
    """Return the trajectories of questions over a server that runs on this event loop."""
    chosen = engine or engine_of(server, **options)
    transforms = compose or ToolCompose([adder()], parser="openai")
    tasks = [{"query": question} for question in questions]
    found = await asyncio.to_thread(rollout, transforms, chosen, None, tasks, max_turns=4)
    if engine is None:
        await chosen.close()
    return found
