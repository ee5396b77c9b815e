"""`UserTool`: runs an interaction like a tool, with the deadlines, limits, threads and sessions of one."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from torchrl_agentic.dispatch import Session
from torchrl_agentic.errors import InvalidTask, UserFailed
from torchrl_agentic.interactions.base import Interaction, Reply, current_threads
from torchrl_agentic.messages import JSON, Message, ParsedCall, Status, ToolResult, finite_number
from torchrl_agentic.tools.base import Tool, ToolContext, current_session

logger = logging.getLogger(__name__)

_LOGGED = (Status.CRASH, Status.INFRA)
_users: weakref.WeakKeyDictionary[object, _User] = weakref.WeakKeyDictionary()


@dataclass(slots=True)
class _User:
    """The user of a trajectory.

    Attributes:
        kwargs: Arguments of the row.
        tools: Session of the tools of the trajectory, or None.
        error: What the interaction has raised in the current call, or None.
    """

    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tools: Session | None = None
    error: BaseException | None = None

    @contextmanager
    def keeping_error(self) -> Generator[None]:
        """Store what the interaction raises, since its result has only the text; a cancellation is ours."""
        try:
            yield
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.error = error
            raise


class UserTool(Tool):
    """An interaction behind the `Tool` interface; no model calls it.

    Args:
        interaction: The interaction.
        name: Name of the tool in the dispatcher and its logs.
        user: The user of a trajectory, for the interaction in its session; None outside of one.
    """

    def __init__(self, interaction: Interaction, name: str, user: _User | None = None) -> None:
        self.interaction = interaction
        self.name = name
        self._user = user or _User()

    @asynccontextmanager
    async def session(self, trajectory: str) -> AsyncGenerator[Tool]:
        """Open the session of the interaction with the arguments of its row."""
        session = current_session.get()
        if isinstance(session, Session):
            current_threads.set(session.dispatcher.threads)
        user = _users.get(session) or _User()
        kwargs = user.kwargs
        async with AsyncExitStack() as stack:
            with user.keeping_error():
                if user.tools is not None and self.interaction.takes_worlds:
                    kwargs = {**kwargs, "worlds": await user.tools.worlds()}
                live = await stack.enter_async_context(self.interaction.session(trajectory, **kwargs))
            yield UserTool(live, self.name, user)

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> ToolResult:
        """Reply to the conversation, or score it."""
        current_threads.set(ctx.threads)
        messages: Sequence[Message] = args["messages"]
        with self._user.keeping_error():
            if not args["is_final"]:
                return ToolResult(meta={"value": Reply.of(await self.interaction.respond(messages))})
            value = await self.interaction.score(messages)
            return ToolResult(
                meta={"value": None if value is None else finite_number(value, "a user's score")}
            )

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
    _users[session] = _User(kwargs, tools)


async def reply(session: Session, name: str, messages: Sequence[Message]) -> Reply:
    """Return the reply of the user of a trajectory.

    Args:
        session: Session of the trajectory.
        name: Name of the interaction.
        messages: The conversation.

    Raises:
        InvalidTask: If the interaction raises it.
        UserFailed: If the interaction raises anything else, which is the cause, or takes too long, or
            returns no reply.
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
        InvalidTask: If the interaction raises it.
        UserFailed: If the interaction raises anything else, which is the cause, or takes too long, or
            returns no finite number.
    """
    result = await _ask(session, name, messages, is_final=True)
    return None if result.meta is None else result.meta["value"]


async def _ask(session: Session, name: str, messages: Sequence[Message], *, is_final: bool) -> ToolResult:
    """Run one call of the interaction; failures are logged, too."""
    call = ParsedCall(tool_name(name), {"messages": messages, "is_final": is_final}, f"user_{session.turn}")
    user = _users.setdefault(session, _User())
    try:
        result = (await session.run([call]))[0]
        error = user.error
    finally:
        user.error = None  # its frames hold the session, which must not keep itself alive
    if result.is_error:
        if result.status not in _LOGGED:
            logger.error("%s (trajectory %s): %s", call.tool, session.trajectory, result.text)
        if isinstance(error, InvalidTask):
            raise error
        said = result.text if error is None else f"{type(error).__name__}: {error}"
        raise UserFailed(f"{call.tool}: {said}") from error
    return result
