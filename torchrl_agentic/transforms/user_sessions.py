"""Which interaction a row talks to, and what it is opened with."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase

from torchrl_agentic.dispatch import Dispatcher, Session
from torchrl_agentic.dispatch.event_loop import run
from torchrl_agentic.interactions.adapters import as_interaction
from torchrl_agentic.interactions.base import Interaction, Reply, name_of
from torchrl_agentic.interactions.user_tool import UserTool, final_score, reply, set_arguments, tool_name
from torchrl_agentic.messages import Message
from torchrl_agentic.transforms.dataset_rows import columns
from torchrl_agentic.transforms.runtime import Runtime, close_sessions


@dataclass(frozen=True, slots=True)
class Choice:
    """An interaction by its name, and what the row says to it."""

    name: str
    kwargs: Mapping[str, Any]


def named(items: Any) -> dict[str, Interaction]:
    """Give interactions by name: those of a mapping, of a list, or one alone.

    Raises:
        TypeError: an item is no interaction.
        ValueError: there is none, or two have one name.
    """
    if isinstance(items, Mapping):
        made = [(name, as_interaction(item, name=name)) for name, item in items.items()]
    else:
        found = [as_interaction(item) for item in (items if isinstance(items, list | tuple) else [items])]
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
    """Give what a row says to its user, in the column or in that of "extra_info"; None: nothing."""
    found = columns(source, row, [column, ("extra_info", column)])
    own = found.get(column)
    return found.get(("extra_info", column)) if own is None else own


def choice(known: Mapping[str, Interaction], row: int, column: str, said: Any) -> Choice:
    """Find out which interaction a row wants.

    Raises:
        ValueError: it names none of those that there are, or none at all, and there are several.
    """
    kwargs = {} if said is None else said
    if not isinstance(kwargs, dict):
        raise ValueError(f"{column!r} of row {row} is a mapping: {{'name': …, …}}; got {kwargs!r}")
    name: Any = kwargs.get("name")
    if name is None and len(known) == 1:
        name = next(iter(known))
    if not isinstance(name, str) or name not in known:
        met = "names no interaction" if name is None else f"names the interaction {name!r}"
        raise ValueError(f"{column!r} of row {row} {met}; known: {', '.join(known)}")
    return Choice(name, {key: value for key, value in kwargs.items() if key != "name"})


_closing: set[asyncio.Task[None]] = set()  # the event loop itself keeps no task alive


@dataclass(slots=True)
class UserTurn:
    """What becomes of one row in one step: first what is known of it, then what its user makes of it.

    messages: the conversation. is_asked: whether the user is to speak. is_done: whether the trajectory is
    over, before the user speaks or by what it says. final: what the trajectory is worth, once it is over.
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
        """Whether the user has ended the conversation."""
        return self.reply is not None and self.reply.is_over


@dataclass(slots=True)
class _Talk:
    """One row's conversation with its user, from its reset on. total: of the scores of its replies."""

    choice: Choice
    session: Session | None = None
    turns: int = 0
    total: float = 0.0
    is_over: bool = False


class Talks:
    """The conversations of all rows. Clones share interactions, limiters and threads, and no conversation.

    What belongs to a process is left behind by pickling, and made anew on first use. options: those of
    `Dispatcher`.
    """

    # What is known of trajectories, by row; see `_none`.
    _rows: dict[int, _Talk]

    def __init__(self, users: Mapping[str, Interaction], role: str, options: Mapping[str, Any]) -> None:
        self.role = role
        self._tools = [UserTool(item, tool_name(name)) for name, item in users.items()]
        self._options = dict(options)
        self._runtime: Runtime | None = None
        self._dispatcher: Dispatcher | None = None
        live = self._live()
        if not live.ready:
            run(live.setup())

    def __contains__(self, row: object) -> bool:
        return row in self._here

    @property
    def turns(self) -> dict[int, int]:
        """How often the user of each row has spoken."""
        return {row: talk.turns for row, talk in self._here.items()}

    @property
    def _here(self) -> dict[int, _Talk]:
        """The rows of this process: what another one held open is not to be touched after a fork."""
        self._live()
        return self._rows

    def begin(self, row: int, choice: Choice) -> None:
        """Begin a trajectory; `end` the one before it first."""
        self._here[row] = _Talk(choice)

    def take_up(self, row: int, trajectory: str) -> bool:
        """Take up the next turn of a row that has begun; return whether its conversation still goes on."""
        talk = self._here[row]
        if talk.session is None:
            talk.session = self._live().session(trajectory, row=row)
            set_arguments(talk.session, talk.choice.kwargs)
        return not talk.is_over

    def converse(self, turns: Iterable[UserTurn]) -> None:
        """Let all users that are asked speak at once, and judge and close what is over."""
        busy = [turn for turn in turns if turn.is_asked or turn.is_done]
        if busy:

            async def converse() -> None:
                await asyncio.gather(*map(self._converse, busy))

            run(converse())

    async def _converse(self, turn: UserTurn) -> None:
        talk = self._rows[turn.row]
        session, name = talk.session, talk.choice.name
        assert session is not None
        if turn.is_asked:
            turn.reply = said = await reply(session, name, turn.messages)
            turn.has_failed = said is None
            turn.is_done = said is None or said.is_over
            if said is not None:
                talk.turns += 1
                talk.total += said.score or 0.0
                if said.text:
                    turn.messages = (*turn.messages, Message(self.role, said.text))
        if turn.is_done:
            talk.is_over = True
            judged = None
            if not turn.has_failed:
                judged, could = await final_score(session, name, turn.messages)
                turn.has_failed = not could
            turn.final = talk.total if judged is None else judged
            closing = asyncio.create_task(session.close())
            if turn.has_failed:  # what hangs may hang in its closing too: the other rows do not wait for it
                _closing.add(closing)
                closing.add_done_callback(_closing.discard)
            else:
                await closing

    def finish(self, done: Sequence[bool]) -> None:
        """Close the conversations of these rows: others have ended them."""
        over = [talk for row, talk in self._here.items() if row < len(done) and done[row]]
        for talk in over:
            talk.is_over = True
        close_sessions(talk.session for talk in over if talk.session is not None)

    def end(self, rows: Iterable[int]) -> None:
        """Close the conversations of some rows."""
        known = self._here
        ended = [talk.session for row in rows if (talk := known.pop(row, None)) and talk.session]
        for session in ended:
            session.dispatcher.forget(session)
        close_sessions(ended)

    def close(self) -> None:
        """End all conversations and tear the interactions down; used again, they are set up anew."""
        if self._runtime is None or not self._runtime.is_ours:
            return
        self.end(list(self._rows))
        if self._own_runtime:
            run(self._live().close())

    def clone(self) -> Talks:
        """Make others, which share what may be shared."""
        live, clone = self._live(), Talks.__new__(Talks)
        clone.__dict__.update(self.__dict__, **_none(), _own_runtime=False, _dispatcher=live.fork())
        assert clone._runtime is not None
        assert clone._dispatcher is not None
        clone._runtime.close_sessions_with(clone, clone._dispatcher)
        return clone

    def _live(self) -> Dispatcher:
        """Our dispatcher, made anew after unpickling and after a fork."""
        if self._runtime is None or not self._runtime.is_ours:
            self._dispatcher = Dispatcher(self._tools, **self._options)
            self._runtime = Runtime(self._dispatcher, toolsets_open=True)
            self._runtime.close_sessions_with(self, self._dispatcher)
            self._own_runtime = True
            self.__dict__.update(_none())
        assert self._dispatcher is not None
        return self._dispatcher

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, **_none(), "_runtime": None, "_dispatcher": None}


def _none() -> dict[str, Any]:
    """What is known of trajectories before the first one."""
    return {"_rows": {}}
