"""Interactions as a dispatcher runs them: like tools, with its deadlines, limits, threads and sessions."""

from __future__ import annotations

import logging
import weakref
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

from torchrl_agentic.dispatch import Session
from torchrl_agentic.interactions.base import Interaction, Reply, current_threads
from torchrl_agentic.messages import JSON, Message, ParsedCall, Status, ToolResult
from torchrl_agentic.tools.base import Tool, ToolContext, current_session

logger = logging.getLogger(__name__)

_LOGGED = (Status.CRASH, Status.INFRA)
_arguments: weakref.WeakKeyDictionary[object, Mapping[str, Any]] = weakref.WeakKeyDictionary()


class UserTool(Tool):
    """An interaction in the place of a tool; no model calls it."""

    def __init__(self, interaction: Interaction, name: str) -> None:
        self.interaction = interaction
        self.name = name

    @asynccontextmanager
    async def session(self, trajectory: str) -> AsyncGenerator[Tool]:
        """Open the interaction with the arguments of its row."""
        session = current_session.get()
        if isinstance(session, Session):
            current_threads.set(session.dispatcher.threads)
        kwargs = _arguments.get(session, {})
        async with self.interaction.session(trajectory, **kwargs) as live:
            yield UserTool(live, self.name)

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> ToolResult:
        """Let it reply, or judge."""
        current_threads.set(ctx.threads)
        messages: Sequence[Message] = args["messages"]
        if args["judges"]:
            value = await self.interaction.score(messages)
            return ToolResult(meta={"value": None if value is None else float(value)})
        return ToolResult(meta={"value": Reply.of(await self.interaction.respond(messages))})

    async def setup(self) -> None:
        """Set the interaction up."""
        await self.interaction.setup()

    async def teardown(self) -> None:
        """Tear the interaction down."""
        await self.interaction.teardown()


def tool_name(name: str) -> str:
    """Give the name that an interaction has in a dispatcher, and in what that logs."""
    return f"user:{name}"


def hand_over(session: Session, kwargs: Mapping[str, Any]) -> None:
    """Say what the interaction of this trajectory is opened with."""
    _arguments[session] = kwargs


async def reply(session: Session, name: str, messages: Sequence[Message]) -> Reply | None:
    """Let the user of a trajectory answer; None: it could not, which is logged."""
    result = await _ask(session, name, messages, judges=False)
    if result.stop:
        return Reply(is_over=True)
    return None if result.is_error else cast("Mapping[str, Any]", result.meta)["value"]


async def judgement(session: Session, name: str, messages: Sequence[Message]) -> tuple[float | None, bool]:
    """Let the user of a trajectory judge it; and whether it could."""
    result = await _ask(session, name, messages, judges=True)
    if result.is_error or result.meta is None:
        return None, not result.is_error
    return result.meta["value"], True


async def _ask(session: Session, name: str, messages: Sequence[Message], *, judges: bool) -> ToolResult:
    call = ParsedCall(tool_name(name), {"messages": messages, "judges": judges}, f"user_{session.turn}")
    result = (await session.run([call]))[0]
    if result.is_error and result.status not in _LOGGED:
        logger.error("%s (trajectory %s): %s", call.tool, session.trajectory, result.text)
    return result
