"""`Interaction`, the base class of simulated users, and `Reply`."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ParamSpec, Self, TypeVar, cast

from torchrl_agentic.messages import Message, encodable, finite_number
from torchrl_agentic.tools.base import Threads
from torchrl_agentic.tools.signatures import keywords_of

P = ParamSpec("P")
T = TypeVar("T")

current_threads: ContextVar[Threads | None] = ContextVar("current_threads", default=None)
"""Threads for blocking functions of the interaction that opens, replies or closes in this context."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply of a user to a message of the model.

    Attributes:
        text: Text of the reply.
        score: Score of the model's message; None if it is not scored. See `UserRewardTransform`.
        is_over: Whether the conversation ends here; a text is then its last message.
        metadata: Further values, for programs that call the interaction themselves.
    """

    text: str = ""
    score: float | None = None
    is_over: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def of(cls, value: Reply | str | None) -> Reply:
        """Convert the value of `respond`: a text continues the conversation, None ends it.

        Args:
            value: A `Reply`, a text, or None.

        Raises:
            TypeError: If it has another type, its text is not a str, or its score is not a number.
            ValueError: If its score is NaN or infinite.
        """
        if value is None:
            return cls(is_over=True)
        reply: Any = cls(value) if isinstance(value, str) else value
        if not isinstance(reply, Reply) or not isinstance(cast("Any", reply.text), str):
            got: Any = reply.text if isinstance(reply, Reply) else reply
            raise TypeError(f"expected a Reply, a text, or None to leave; got {type(got).__name__}")
        score = None if reply.score is None else finite_number(reply.score, "the score of a reply")
        return cls(encodable(reply.text), score, bool(reply.is_over), dict(reply.metadata))


class Interaction(ABC):
    """A simulated user, or another program that replies to messages without tool calls.

    Attributes:
        name: Name by which the `interaction_kwargs` of a data set choose it; "" means the name of the class
            in lower case, without `Interaction`.
    """

    name: str = ""

    @abstractmethod
    async def respond(self, messages: Sequence[Message]) -> Reply | str | None:
        """Reply to the last message of a conversation.

        Args:
            messages: The conversation so far.

        Returns:
            A `Reply`, a text, or None to leave.

        Raises:
            InvalidTask: If the task cannot be used; a collector drops its group.
        """

    async def score(self, messages: Sequence[Message]) -> float | None:
        """Score a whole conversation; called once at its end.

        `UserRewardTransform` makes it a reward.

        Args:
            messages: The conversation.

        Returns:
            The score, or None to use the sum of the scores of the replies.
        """
        del messages
        return None

    def session(self, trajectory: str, **kwargs: Any) -> AbstractAsyncContextManager[Interaction]:
        """Open the session of a trajectory: the live interaction that replies in it.

        The default returns the interaction itself. An interaction with state yields a new one for each
        trajectory::

            @contextlib.asynccontextmanager
            async def session(self, trajectory, *, goal):
                yield Shopper(goal)  # an interaction for this trajectory alone; clean up behind the yield

        The session opens before the first reply and closes exactly once, both in the same task.

        A user that acts on what the tools of the model act on takes the worlds of the trajectory, which open
        if no call has opened them::

            @contextlib.asynccontextmanager
            async def session(self, trajectory, *, worlds):
                yield Caller(worlds["phone"])  # by the name of the toolset, see `Toolset.session`

        Args:
            trajectory: Name of the trajectory, unique in a process.
            kwargs: The row's `interaction_kwargs`, without the name; and `worlds`, a mapping, if the method
                has a parameter of this name.

        Raises:
            TypeError: If the row has arguments that this interaction does not take.
        """
        del trajectory
        if kwargs:
            raise TypeError(
                f"{type(self).__name__} takes no interaction_kwargs, and the row has {', '.join(kwargs)}: "
                "define session(trajectory, **kwargs)"
            )
        return self._itself()

    @property
    def takes_worlds(self) -> bool:
        """True if `session` takes the worlds of the trajectory."""
        return "worlds" in keywords_of(self.session).names

    @asynccontextmanager
    async def _itself(self) -> AsyncGenerator[Self]:
        yield self

    async def setup(self) -> None:  # noqa: B027  most interactions own nothing
        """Open what the process owns; called once before the first use. An error stops the program."""

    async def teardown(self) -> None:  # noqa: B027  most interactions own nothing
        """Close what `setup` opened; called once."""


def name_of(interaction: Interaction) -> str:
    """Return the name by which rows choose an interaction."""
    return interaction.name or default_name(type(interaction).__name__)


def default_name(class_name: str) -> str:
    """Return the name of an interaction without a `name`, from its class."""
    return (class_name.removesuffix("Interaction") or class_name).lower()


async def in_thread(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a blocking function of an interaction on a thread, of the user simulator if there is one.

    Args:
        function: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        The result of the function.
    """
    threads = current_threads.get()
    if threads is None:
        return await asyncio.to_thread(function, *args, **kwargs)
    return await threads.run(lambda: function(*args, **kwargs))
