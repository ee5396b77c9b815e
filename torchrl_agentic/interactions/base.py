"""What a simulated user is, and what it says."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ParamSpec, Self, TypeVar, cast

from torchrl_agentic.messages import Message, encodable
from torchrl_agentic.tools.base import Threads

P = ParamSpec("P")
T = TypeVar("T")

current_threads: ContextVar[Threads | None] = ContextVar("current_threads", default=None)
"""While an interaction opens, answers or closes: where its blocking functions run."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a user says to a message of the model.

    score: what the message was worth, None where it is not judged. is_over: whether the conversation ends
    here; the text, if any, is then its last message. metadata: for whoever asks the interaction by hand.
    """

    text: str = ""
    score: float | None = None
    is_over: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def of(cls, value: Reply | str | None) -> Reply:
        """Make a reply of what an interaction returned: a text goes on, None ends the conversation.

        Raises:
            TypeError, ValueError: it is none of these, or its text or score are none.
        """
        if value is None:
            return cls(is_over=True)
        reply: Any = cls(value) if isinstance(value, str) else value
        if not isinstance(reply, Reply) or not isinstance(cast("Any", reply.text), str):
            said: Any = reply.text if isinstance(reply, Reply) else reply
            raise TypeError(f"a user says a Reply, a text, or None to leave; got {type(said).__name__}")
        score = None if reply.score is None else float(reply.score)
        return cls(encodable(reply.text), score, bool(reply.is_over), dict(reply.metadata))


class Interaction(ABC):
    """A simulated user, or whatever else answers a model that calls no tool.

    name: what a data set's `interaction_kwargs` call it; "" means the class's, without `Interaction`, in
    lower case.
    """

    name: str = ""

    @abstractmethod
    async def respond(self, messages: Sequence[Message]) -> Reply | str | None:
        """Answer the last message of a conversation: with a `Reply`, a text, or None to leave."""

    async def score(self, messages: Sequence[Message]) -> float | None:
        """Judge a whole conversation, once, at its end, however it ended.

        None: what the replies were scored with adds up to it.
        """
        del messages
        return None

    def session(self, trajectory: str, **kwargs: Any) -> AbstractAsyncContextManager[Interaction]:
        """Open what talks in this trajectory alone.

        The interaction itself if it keeps nothing, a fresh one if it does. Opened before its first reply and
        closed exactly once, both in the same task, however the trajectory ends. kwargs: what the data set's
        `interaction_kwargs` say of this row, without the name; an interaction that takes none defines no
        session. With state it looks like this::

            @contextlib.asynccontextmanager
            async def session(self, trajectory, *, goal):
                yield Shopper(goal)  # an interaction for this trajectory alone; clean up behind the yield

        Raises:
            TypeError: the row says what this interaction does not take.
        """
        del trajectory
        if kwargs:
            raise TypeError(
                f"{type(self).__name__} takes no interaction_kwargs, and the row has {', '.join(kwargs)}: "
                "define session(trajectory, **kwargs)"
            )
        return self._itself()

    @asynccontextmanager
    async def _itself(self) -> AsyncGenerator[Self]:
        yield self

    async def setup(self) -> None:  # noqa: B027  most interactions own nothing
        """Make ready what the process owns; called once before the first use. An error stops the program."""

    async def teardown(self) -> None:  # noqa: B027  most interactions own nothing
        """Give back what `setup` made."""


def name_of(interaction: Interaction) -> str:
    """Give the name by which rows choose an interaction."""
    return interaction.name or default_name(type(interaction).__name__)


def default_name(class_name: str) -> str:
    """Give the name of an interaction that has none of its own."""
    return (class_name.removesuffix("Interaction") or class_name).lower()


async def in_thread(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a blocking function of an interaction off the event loop, on the simulator's own threads."""
    threads = current_threads.get()
    if threads is None:
        return await asyncio.to_thread(function, *args, **kwargs)
    return await threads.run(lambda: function(*args, **kwargs))
