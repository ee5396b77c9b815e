"""`UserSessions`: the simulated users of an environment's rows, and their conversations."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from tensordict import TensorDictBase

from torchrl_agentic.dispatch import Dispatcher, Session, SessionRows
from torchrl_agentic.dispatch.event_loop import run
from torchrl_agentic.errors import InvalidTask, UserFailed
from torchrl_agentic.interactions.adapters import as_interaction
from torchrl_agentic.interactions.base import Interaction, Reply, name_of
from torchrl_agentic.interactions.user_tool import UserTool, final_score, reply, set_arguments, tool_name
from torchrl_agentic.messages import Message
from torchrl_agentic.transforms.dataset_rows import columns


@dataclass(frozen=True, slots=True)
class Choice:
    """The interaction that a row asks for.

    Attributes:
        name: Name of the interaction.
        kwargs: Arguments that its session is opened with.
    """

    name: str
    kwargs: Mapping[str, Any]


def named(items: object) -> dict[str, Interaction]:
    """Return interactions by name, given a mapping, a list, or one interaction.

    Raises:
        TypeError: If an item is not an interaction.
        ValueError: If there is none, or two have one name.
    """
    if isinstance(items, Mapping):
        by_key = cast("Mapping[str, object]", items)
        made = [(name, as_interaction(item, name=name)) for name, item in by_key.items()]
    else:
        several = cast("Sequence[object]", items) if isinstance(items, list | tuple) else [items]
        found = [as_interaction(item) for item in several]
        made = [(name_of(item), item) for item in found]
    if not made:
        raise ValueError("at least one interaction is needed")
    by_name = dict(made)
    if len(by_name) < len(made):
        names = [name for name, _ in made]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two interactions are named {twice!r}; give them by name: {{'a': …, 'b': …}}")
    return by_name


def said(source: TensorDictBase, row: int, column: str) -> Any:
    """Return a column of one row, or of its "extra_info"; None if both lack it.

    Args:
        source: The batch, [*B].
        row: Index in the flattened batch.
        column: Name of the column.
    """
    found = columns(source, row, [column, ("extra_info", column)])
    own = found.get(column)
    return found.get(("extra_info", column)) if own is None else own


def choice(known: Mapping[str, Interaction], row: int, column: str, said: object) -> Choice:
    """Return the interaction that a row asks for.

    Args:
        known: Interactions by name.
        row: Index in the flattened batch, for messages.
        column: Name of the column, for messages.
        said: Value of the column: a mapping with "name" and arguments, or None.

    Raises:
        ValueError: If it names an unknown interaction, or none although there are several.
    """
    if not isinstance(said, dict | None):
        raise ValueError(f"{column!r} of row {row} is a mapping: {{'name': …, …}}; got {said!r}")
    kwargs = cast("dict[str, Any] | None", said) or {}
    name: object = kwargs.get("name")
    if name is None and len(known) == 1:
        name = next(iter(known))
    if not isinstance(name, str) or name not in known:
        met = "names no interaction" if name is None else f"names the interaction {name!r}"
        raise ValueError(f"{column!r} of row {row} {met}; known: {', '.join(known)}")
    return Choice(name, {key: value for key, value in kwargs.items() if key != "name"})


_closing: set[asyncio.Task[None]] = set()  # the event loop itself keeps no task alive


@dataclass(slots=True)
class UserTurn:
    """One row in one step; the conversation with the user fills in the later fields.

    Attributes:
        row: Index in the flattened batch.
        messages: The conversation.
        is_asked: Whether the user replies in this step.
        is_done: Whether the trajectory has ended, before the reply or by it.
        reply: Reply of the user, if it was asked and did not fail.
        final: Score of the whole trajectory, once it has ended.
        has_failed: Whether the user raised or took too long, so that it has no final score.
    """

    row: int
    messages: Sequence[Message]
    is_asked: bool
    is_done: bool
    reply: Reply | None = None
    final: float = 0.0
    has_failed: bool = False

    @property
    def is_left(self) -> bool:
        """True if the user has ended the conversation."""
        return self.reply is not None and self.reply.is_over and not self.has_failed


@dataclass(slots=True)
class _Conversation:
    """The conversation of one row with its user, from its reset on."""

    choice: Choice
    session: Session | None = None
    turns: int = 0
    total: float = 0.0
    is_over: bool = False


class UserSessions:
    """The conversations of all rows with their simulated users.

    Clones share interactions, limiters and threads, and no conversation. After a fork and after unpickling
    there are no conversations.

    Args:
        users: Interactions by name.
        role: Role of the users' messages.
        options: Keyword arguments of `Dispatcher`.
    """

    def __init__(self, users: Mapping[str, Interaction], role: str, options: Mapping[str, Any]) -> None:
        self.role = role
        tools = [UserTool(item, tool_name(name)) for name, item in users.items()]
        self._rows: SessionRows[dict[int, _Conversation]] = SessionRows(tools, options, dict)

    def __contains__(self, row: object) -> bool:
        return row in self._rows.state

    def new_dispatcher(self) -> Dispatcher:
        """Return a dispatcher with these interactions, limiters and threads, and sessions of its own."""
        return self._rows.dispatcher.fork()

    @property
    def turns(self) -> dict[int, int]:
        """How often the user of each row has replied."""
        return {row: conversation.turns for row, conversation in self._rows.state.items()}

    def begin(self, row: int, choice: Choice) -> None:
        """Begin a conversation; `end` the one before it first.

        Args:
            row: Index in the flattened batch.
            choice: The interaction.
        """
        self._rows.state[row] = _Conversation(choice)

    def continue_row(self, row: int, tools: Session) -> bool:
        """Prepare the next turn of a row that has begun; return False if its conversation is over.

        Args:
            row: Index in the flattened batch.
            tools: Session of the tools of the trajectory.
        """
        conversation = self._rows.state[row]
        if conversation.session is None:
            conversation.session = self._rows.session(row, tools.trajectory)
            set_arguments(conversation.session, conversation.choice.kwargs, tools)
        return not conversation.is_over

    def converse(self, turns: Iterable[UserTurn]) -> None:
        """Ask all users concurrently, and score and close the conversations that are over."""
        busy = [turn for turn in turns if turn.is_asked or turn.is_done]
        if busy:
            state = self._rows.state

            async def converse() -> None:
                await asyncio.gather(*(self._converse(turn, state[turn.row]) for turn in busy))

            run(converse())

    async def _converse(self, turn: UserTurn, conversation: _Conversation) -> None:
        session, name = conversation.session, conversation.choice.name
        assert session is not None
        try:
            if turn.is_asked:
                turn.reply = said = await reply(session, name, turn.messages)
                turn.is_done = said.is_over
                conversation.turns += 1
                conversation.total += said.score or 0.0
                if said.text:
                    turn.messages = (*turn.messages, Message(self.role, said.text))
            if turn.is_done:
                judged = await final_score(session, name, turn.messages)
                turn.final = conversation.total if judged is None else judged
        except (UserFailed, InvalidTask):
            turn.has_failed = turn.is_done = True
            turn.final = math.nan
        if turn.is_done:
            conversation.is_over = True
            closing = asyncio.create_task(session.close())
            if turn.has_failed:  # its closing may hang too, and the other rows must not wait for it
                _closing.add(closing)
                closing.add_done_callback(_closing.discard)
            else:
                await closing

    def finish(self, done: Sequence[bool]) -> None:
        """Close the conversations of rows that other transforms have ended.

        Args:
            done: For each row of the flattened batch whether it is done.
        """
        over = [row for row in self._rows.state if row < len(done) and done[row]]
        for row in over:
            self._rows.state[row].is_over = True
        self._rows.finish_rows(over)

    def end(self, rows: Iterable[int]) -> None:
        """Close the conversations of some rows, and forget them."""
        rows = list(rows)
        for row in rows:
            self._rows.state.pop(row, None)
        self._rows.end(rows)

    def close(self) -> None:
        """End all conversations and tear the interactions down; a later use sets them up again."""
        if self._rows.is_open:
            self._rows.state.clear()
            self._rows.close()

    def clone(self) -> UserSessions:
        """Return sessions with the same interactions, limiters and threads, and without conversations."""
        clone = UserSessions.__new__(UserSessions)
        clone.role, clone._rows = self.role, self._rows.clone()
        return clone
