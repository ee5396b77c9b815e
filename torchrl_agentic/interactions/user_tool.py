"""`UserTool`: runs an interaction like a tool, with the deadlines, limits, threads and sessions of one."""

from __future__ import annotations

import logging
import weakref
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, cast

from torchrl_agentic.dispatch import Session
from torchrl_agentic.errors import UserFailed
from torchrl_agentic.interactions.base import Interaction, Reply, current_threads
from torchrl_agentic.messages import JSON, Message, ParsedCall, Status, ToolResult, finite_number
from torchrl_agentic.tools.base import Tool, ToolContext, current_session

logger = logging.getLogger(__name__)

_LOGGED = (Status.CRASH, Status.INFRA)
_arguments: weakref.WeakKeyDictionary[object, _Arguments] = weakref.WeakKeyDictionary()


class _Arguments(NamedTuple):
    """Arguments of the row, and the session of the tools, for the interaction of a trajectory."""

    kwargs: Mapping[str, Any]
    tools: Session | None


class UserTool(Tool):
    """An interaction behind the `Tool` interface; no model calls it.

    Args:
        interaction: The interaction.
        name: Name of the tool in the dispatcher and its logs.
    """

    def __init__(self, interaction: Interaction, name: str) -> None:
        self.interaction = interaction
        self.name = name

    @asynccontextmanager
    async def session(self, trajectory: str) -> AsyncGenerator[Tool]:
        """Open the session of the interaction with the arguments of its row."""
        session = current_session.get()
        if isinstance(session, Session):
            current_threads.set(session.dispatcher.threads)
        kwargs, tools = _arguments.get(session, _Arguments({}, None))
        if tools is not None and self.interaction.takes_worlds:
            kwargs = {**kwargs, "worlds": await tools.worlds()}
        async with self.interaction.session(trajectory, **kwargs) as live:
            yield UserTool(live, self.name)

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> ToolResult:
        """Reply to the conversation, or score it."""
        current_threads.set(ctx.threads)
        messages: Sequence[Message] = args["messages"]
        if args["is_final"]:
            value = await self.interaction.score(messages)
            return ToolResult(
                meta={"value": None if value is None else finite_number(value, "a user's score")}
            )
        return ToolResult(meta={"value": Reply.of(await self.interaction.respond(messages))})

    async def setup(self) -> None:
        """Set up the interaction."""
        await self.interaction.setup()

    async def teardown(self) -> None:
        """Tear down the interaction."""
        await self.interaction.teardown()


def tool_name(name: str) -> str:
    """Return the name of an interaction in a dispatcher and its logs."""
    return f"user:{name}"


def set_arguments(session: Session, kwargs: Mapping[str, Any], tools: Session | None = None) -> None:
    """Set the arguments with which the interaction of a trajectory opens.

    Args:
        session: Session of the trajectory.
        kwargs: The row's `interaction_kwargs`, without the name.
        tools: Session of the tools of the trajectory, for interactions that act on their worlds; or None.
    """
    _arguments[session] = _Arguments(kwargs, tools)


async def reply(session: Session, name: str, messages: Sequence[Message]) -> Reply:
    """Return the reply of the user of a trajectory.

    Args:
        session: Session of the trajectory.
        name: Name of the interaction.
        messages: The conversation.

    Raises:
        UserFailed: If the interaction raises, takes too long, or returns no reply; this is logged, too.
    """
    result = await _ask(session, name, messages, is_final=False)
    if result.stop:
        return Reply(is_over=True)
    return cast("Mapping[str, Any]", result.meta)["value"]


async def final_score(session: Session, name: str, messages: Sequence[Message]) -> float | None:
    """Return the score of a whole conversation by its user; None if the interaction has none.

    Args:
        session: Session of the trajectory.
        name: Name of the interaction.
        messages: The conversation.

    Raises:
        UserFailed: If the interaction raises, takes too long, or returns no finite number; this is logged,
            too.
    """
    result = await _ask(session, name, messages, is_final=True)
    return None if result.meta is None else result.meta["value"]


async def _ask(session: Session, name: str, messages: Sequence[Message], *, is_final: bool) -> ToolResult:
    call = ParsedCall(tool_name(name), {"messages": messages, "is_final": is_final}, f"user_{session.turn}")
    result = (await session.run([call]))[0]
    if result.is_error:
        if result.status not in _LOGGED:
            logger.error("%s (trajectory %s): %s", call.tool, session.trajectory, result.text)
        raise UserFailed(f"{call.tool}: {result.text}")
    return result
