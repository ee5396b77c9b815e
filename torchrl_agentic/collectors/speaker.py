"""Speakers: one trajectory's way to the next message of the model, through tokens or through messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torchrl_agentic.collectors.agent import Agent
from torchrl_agentic.collectors.requests import Requests
from torchrl_agentic.engines.base import ContextExceeded, OnIds
from torchrl_agentic.errors import InvalidTask
from torchrl_agentic.messages import Message
from torchrl_agentic.tokens.ledger import TokenLedger
from torchrl_agentic.tokens.writer import TokenWriter

ChatMessage = Mapping[str, Any]


class Speaker(Protocol):
    """Says the messages of the model in one trajectory, and hears the others.

    Attributes:
        cut_by: The bound that cut the last answer off, "max_new_tokens" or "max_trajectory_tokens"; "" if
            none.
        n_sampled: Number of tokens of the last answer.
        finish: Why the last answer ended.
    """

    cut_by: str
    n_sampled: int
    finish: str

    async def answer(self, on_ids: OnIds | None = None) -> Message:
        """Return the next message of the model."""
        ...

    def hear(self, answer: ChatMessage, injected: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
        """Append a turn to the conversation.

        Args:
            answer: The assistant's message.
            injected: Messages that follow it.

        Returns:
            The injected messages as the model will see them.
        """
        ...

    @property
    def is_full(self) -> bool:
        """True if there is no room for another answer."""
        ...

    @property
    def ledger(self) -> TokenLedger | None:
        """The tokens of the trajectory; None without tokens."""
        ...

    @property
    def written(self) -> TokenLedger | None:
        """The tokens up to the next answer, with which a speaker can continue; None without tokens."""
        ...

    def token_drift(self) -> int:
        """Return how many ids differ from those of the whole conversation, encoded at once."""
        ...


class TokenSpeaker:
    """A speaker over an engine that takes and returns token ids.

    Args:
        agent: The encoder of prompts.
        requests: Requests to the engine.
        messages: The first messages.
        tools: Names of the tools that the template shows; None: all.
        key: Name of the trajectory.
        max_new_tokens: Upper bound on the tokens of one answer.
        written: Tokens of `messages` as another speaker wrote them, which this one continues; or None.
        is_first: Whether the trajectory begins with `messages`, and no other speaker has answered in it.
    """

    def __init__(
        self,
        agent: Agent,
        requests: Requests,
        messages: Sequence[ChatMessage],
        *,
        tools: frozenset[str] | None,
        key: str,
        max_new_tokens: int,
        written: TokenLedger | None = None,
        is_first: bool = True,
    ) -> None:
        del is_first
        assert agent.encoder is not None
        self._encoder = agent.encoder
        self._requests, self._key = requests, key
        self._max_new_tokens = max_new_tokens
        self._writer: TokenWriter = (
            agent.encoder.begin(messages, tools=tools)
            if written is None
            else TokenWriter(agent.encoder, written.copy(), messages=messages, tools=tools)
        )
        self._context_length: int | None = requests.engine.context_length
        self._media: dict[str, list[Any]] = {}
        self._see_media(messages)
        self.cut_by, self.n_sampled, self.finish = "", 0, ""

    async def answer(self, on_ids: OnIds | None = None) -> Message:
        """Sample the next answer; an empty, incomplete one if there is no room.

        Args:
            on_ids: Called with each piece of sampled ids.
        """
        room = self._writer.room(self._context_length)
        ids: list[int] = []
        if room is None or room > 0:
            bound = self._max_new_tokens if room is None else min(self._max_new_tokens, room)
            ids, self.finish = await self._requests.sample(
                self._writer, max_tokens=bound, key=self._key, on_ids=on_ids, media=self._media
            )
        self.n_sampled = len(ids)
        message = self._encoder.read_answer(ids)
        is_full = room is not None and len(ids) >= room
        self.cut_by = "" if message.is_complete else "max_trajectory_tokens" if is_full else "max_new_tokens"
        return message

    def hear(self, answer: ChatMessage, injected: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
        """Append a turn to the tokens.

        Args:
            answer: The assistant's message that the sampled ids stand for.
            injected: Messages that follow it.

        Returns:
            The injected messages as they were encoded: long results truncated, media replaced by text where
            the processor rejects it.
        """
        heard = self._writer.add_messages(answer, injected, context_length=self._context_length).injected
        self._see_media(heard)
        return heard

    def _see_media(self, messages: Sequence[ChatMessage]) -> None:
        """Keep the images and videos of messages for the engine, which takes them beside the ids."""
        if not any(isinstance(message["content"], list) for message in messages):
            return
        from torchrl_agentic.tokens.media import KINDS, opened, parts_of  # it opens images

        for kind in KINDS:
            if found := parts_of(messages, kind):
                self._media.setdefault(kind, []).extend(opened(part, kind) for part in found)

    @property
    def is_full(self) -> bool:
        """True if there is no room for another answer."""
        room = self._writer.room(self._context_length)
        return room is not None and room <= 0

    @property
    def ledger(self) -> TokenLedger | None:
        """The tokens of the trajectory, up to the bound.

        None if each prompt is rendered anew, which keeps no earlier ids.
        """
        if self._encoder.use_inference_chat_template:
            return None
        room, ledger = self._writer.room(self._context_length), self._writer.ledger
        return ledger.copy(len(ledger) + room) if room is not None and room < 0 else ledger

    @property
    def written(self) -> TokenLedger | None:
        """The tokens up to the next answer."""
        return self._writer.ledger

    def token_drift(self) -> int:
        """Return how many ids differ from those of the whole conversation, encoded at once."""
        if self._encoder.use_inference_chat_template:
            return 0
        drift = self._writer.find_drift()
        return 0 if drift is None else drift.tokens


class MessageSpeaker:
    """A speaker over an engine that takes and returns messages.

    Args:
        agent: Tools and parser.
        requests: Requests to the engine.
        messages: The first messages.
        tools: Names of the tools that requests list; None: all.
        key: Name of the trajectory.
        max_new_tokens: Upper bound on the tokens of one answer.
        written: Tokens of `messages` as another speaker wrote them, which this one continues; or None.
        is_first: Whether the trajectory begins with `messages`, and no other speaker has answered in it.
    """

    def __init__(
        self,
        agent: Agent,
        requests: Requests,
        messages: Sequence[ChatMessage],
        *,
        tools: frozenset[str] | None,
        key: str,
        max_new_tokens: int,
        written: TokenLedger | None = None,
        is_first: bool = True,
    ) -> None:
        self._messages = list(messages)
        self._requests, self._key = requests, key
        self._max_new_tokens = max_new_tokens
        shown = [tool for tool in agent.compose.tools if tools is None or tool.name in tools]
        self._tools = [tool.spec() for tool in shown]
        self._is_first = is_first
        self.cut_by, self.n_sampled, self.finish = "", 0, ""

    async def answer(self, on_ids: OnIds | None = None) -> Message:
        """Ask for the next message; an empty, incomplete one if the conversation is too long for the model.

        Args:
            on_ids: Not called, since there are no ids.

        Raises:
            InvalidTask: If the first prompt is too long already.
        """
        del on_ids
        self.cut_by = ""
        try:
            message: Message = await self._requests.chat(
                lambda engine: engine.chat(
                    self._messages, tools=self._tools, max_tokens=self._max_new_tokens, key=self._key
                ),
                self._key,
            )
        except ContextExceeded as error:
            if self._is_first:
                raise InvalidTask(f"the prompt leaves no room for an answer: {error}") from error
            self.cut_by = "max_trajectory_tokens"
            message = Message("assistant", "", is_complete=False)
        self._is_first = False
        self.finish = message.finish
        if self.finish == "length":
            self.cut_by = self.cut_by or "max_new_tokens"
        return message

    def hear(self, answer: ChatMessage, injected: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
        """Append a turn to the messages.

        Args:
            answer: The assistant's message.
            injected: Messages that follow it.

        Returns:
            The injected messages, unchanged.
        """
        self._messages += [answer, *injected]
        return injected

    @property
    def is_full(self) -> bool:
        """False: the length of a conversation without tokens is unknown."""
        return False

    @property
    def ledger(self) -> TokenLedger | None:
        """None: there are no tokens."""
        return None

    @property
    def written(self) -> TokenLedger | None:
        """None: there are no tokens."""
        return None

    def token_drift(self) -> int:
        """Return 0: there are no tokens."""
        return 0
