"""A user who says what is written down."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from torchrl_agentic.interactions.base import Interaction, Reply
from torchrl_agentic.messages import Message


class ScriptedUser(Interaction):
    """A user who gives the same replies, in order, in every conversation, and leaves when there are no more.

    A row's `interaction_kwargs` may bring replies of its own: `{"replies": ["…", "…"]}`.
    """

    def __init__(self, replies: Sequence[Reply | str] = (), *, name: str = "") -> None:
        if isinstance(replies, str):
            raise TypeError("replies is a list: ScriptedUser(['first reply', 'second reply'])")
        self.replies = tuple(map(Reply.of, replies))
        self.name = name
        self._said = 0

    @asynccontextmanager
    async def session(
        self, trajectory: str, *, replies: Sequence[Reply | str] | None = None, **kwargs: Any
    ) -> AsyncGenerator[Interaction]:
        """Begin the script."""
        del trajectory, kwargs
        yield ScriptedUser(self.replies if replies is None else replies, name=self.name)

    async def respond(self, messages: Sequence[Message]) -> Reply | None:
        """Give the next reply, whatever was said."""
        del messages
        self._said += 1
        return self.replies[self._said - 1] if self._said <= len(self.replies) else None
