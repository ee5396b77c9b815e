"""`Prompting`: the messages of a trajectory that samples; `EncodingStage`: the tokens of its next prompt."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from torchrl_agentic.errors import ContextExceeded, InvalidTask
from torchrl_agentic.messages import Message, StoredMessage
from torchrl_agentic.tokens.encoding import KINDS, opened, parts_of
from torchrl_agentic.tokens.ledger import TokenLedger
from torchrl_agentic.tokens.writer import ChatEncoder, TokenWriter
from torchrl_agentic.tools.base import Tool
from torchrl_agentic.trajectory.columns import KEY, TOKENS, Column
from torchrl_agentic.trajectory.episode import OpenTurn, Stage
from torchrl_agentic.trajectory.training_rows import Contexts

T = TypeVar("T")
OnIds = Callable[[Sequence[int]], None]
ChatMessage = Mapping[str, Any]
DRIFT = (KEY, "token_drift")
LONG_TEXT = 200_000
"""Characters of new messages above which they are encoded on a thread, so that other trajectories go on."""
LONG_LEDGER = 50_000
"""Tokens above which the check for drift runs on a thread."""


class Sampler(Protocol):
    """Makes the requests of a trajectory to an engine, with retries and resumed answers."""

    async def sample(
        self,
        writer: TokenWriter,
        *,
        max_tokens: int,
        key: str,
        on_ids: OnIds | None = None,
        media: Mapping[str, Sequence[Any]] | None = None,
    ) -> tuple[list[int], str]:
        """Sample one answer behind the tokens of a trajectory, and append it to them.

        Args:
            writer: Tokens of the trajectory.
            max_tokens: Upper bound on the tokens of the answer.
            key: Name of the trajectory.
            on_ids: Called with each piece of the answer, or None.
            media: Images and videos of the conversation by kind.

        Returns:
            Its ids, and "stop" or "length".
        """
        ...

    async def chat(self, ask: Callable[[Any], Awaitable[T]], key: str) -> T:
        """Make a request for a message.

        Args:
            ask: Makes the request to the engine that it is called with.
            key: Name of the trajectory.
        """
        ...


class Prompting(ABC):
    """The conversation of one trajectory that samples: the only truth about its messages and tokens.

    Args:
        sampler: Makes the requests.
        messages: The first messages.
        key: Name of the trajectory for the engine.
        max_new_tokens: Upper bound on the tokens of one answer.

    Attributes:
        messages: The messages so far.
        is_full: Whether the bound of the trajectory, not that of the answer, cut the last answer off.
        n_sampled: Number of tokens of the last answer.
        finish: Why the last answer ended.
    """

    def __init__(
        self,
        sampler: Sampler,
        messages: Iterable[StoredMessage],
        *,
        key: str,
        max_new_tokens: int,
    ) -> None:
        self._sampler, self._key, self._max_new_tokens = sampler, key, max_new_tokens
        self.messages = list(messages)
        self.is_full, self.n_sampled, self.finish = False, 0, ""

    @abstractmethod
    async def generate(self, on_ids: OnIds | None = None) -> Message:
        """Return the next message of the model; an empty, incomplete one if there is no room.

        Args:
            on_ids: Called with each piece of sampled ids, if there are any.

        Raises:
            InvalidTask: If the first prompt is too long already.
        """
        ...

    def open(self, turn: OpenTurn) -> None:
        """Prepare a turn for its stages."""
        turn.is_full = self.is_full

    def take(self, turn: OpenTurn) -> None:
        """Append a turn to the conversation, after its stages."""
        self.messages = turn.messages  # `turn.earlier` stays as it is

    @property
    def has_room(self) -> bool:
        """False if there is no room for another answer."""
        return True

    @property
    def ledger(self) -> TokenLedger | None:
        """The tokens of the trajectory; None without tokens."""
        return None

    @property
    def contexts(self) -> tuple[TokenLedger, ...]:
        """The contexts of a trajectory whose prompts are rendered anew; else empty."""
        return ()

    @property
    def written(self) -> TokenLedger | None:
        """The tokens up to the next answer, which a branch continues; None without tokens."""
        return None


class TokenPrompting(Prompting):
    """Prompts and answers are token ids.

    Args:
        sampler: Makes the requests.
        messages: The first messages.
        encoder: Encodes prompts.
        tools: Names of the tools that the template shows; None: all.
        context_length: Number of tokens that the engine takes; None: unknown.
        written: Tokens of `messages` that a branch continues, or None.
        **options: As for `Prompting`.
    """

    def __init__(
        self,
        sampler: Sampler,
        messages: Iterable[StoredMessage],
        *,
        encoder: ChatEncoder,
        tools: frozenset[str] | None,
        context_length: int | None,
        written: TokenLedger | None = None,
        **options: Any,
    ) -> None:
        super().__init__(sampler, messages, **options)
        self._encoder, self._context_length = encoder, context_length
        chat = [message.for_template() for message in self.messages]
        self._writer: TokenWriter = (
            encoder.begin(chat, tools=tools)
            if written is None
            else TokenWriter(encoder, written.copy(), messages=chat, tools=tools)
        )
        self._contexts = Contexts() if encoder.use_inference_chat_template else None
        self._media: dict[str, list[Any]] = {}
        self._see_media(chat)

    async def generate(self, on_ids: OnIds | None = None) -> Message:
        """Sample the next answer."""
        room = self._writer.room(self._context_length)
        ids: list[int] = []
        if room is None or room > 0:
            bound = self._max_new_tokens if room is None else min(self._max_new_tokens, room)
            size = len(self._writer.ledger)
            ids, self.finish = await self._sampler.sample(
                self._writer, max_tokens=bound, key=self._key, on_ids=on_ids, media=self._media
            )
            if self._contexts is not None and ids:
                self._contexts.note(self._writer.ledger, size)
        self.n_sampled = len(ids)
        self.is_full = room is not None and len(ids) >= room
        return self._encoder.read_answer(ids)

    def open(self, turn: OpenTurn) -> None:
        """Prepare a turn for its stages."""
        super().open(turn)
        turn.writer, turn.context_length = self._writer, self._context_length

    def take(self, turn: OpenTurn) -> None:
        """Append a turn to the conversation, after its stages."""
        super().take(turn)
        if turn.prompt is not None:
            self._see_media(turn.prompt.injected)

    def _see_media(self, messages: Sequence[ChatMessage]) -> None:
        """Keep the images and videos of messages for the engine, which takes them beside the ids."""
        if not any(isinstance(message["content"], list) for message in messages):
            return
        for kind in KINDS:
            if found := parts_of(messages, kind):
                self._media.setdefault(kind, []).extend(opened(part, kind) for part in found)

    @property
    def has_room(self) -> bool:
        """False if there is no room for another answer."""
        room = self._writer.room(self._context_length)
        return room is None or room > 0

    @property
    def ledger(self) -> TokenLedger | None:
        """The tokens of the trajectory, up to the bound; of the last prompt, if each is rendered anew."""
        room, ledger = self._writer.room(self._context_length), self._writer.ledger
        return ledger.copy(len(ledger) + room) if room is not None and room < 0 else ledger

    @property
    def contexts(self) -> tuple[TokenLedger, ...]:
        """The contexts of a trajectory whose prompts are rendered anew; else empty."""
        return () if self._contexts is None else tuple(self._contexts.ledgers)

    @property
    def written(self) -> TokenLedger | None:
        """The tokens up to the next answer."""
        return self._writer.ledger


class MessagePrompting(Prompting):
    """The engine takes messages and returns one.

    Args:
        sampler: Makes the requests.
        messages: The first messages.
        tools: Tools that requests list.
        is_first: Whether the trajectory begins with `messages`; False for a branch, which continues them.
        **options: As for `Prompting`.
    """

    def __init__(
        self,
        sampler: Sampler,
        messages: Iterable[StoredMessage],
        *,
        tools: Iterable[Tool],
        is_first: bool,
        **options: Any,
    ) -> None:
        super().__init__(sampler, messages, **options)
        self._is_first = is_first
        self._chat = [message.for_template() for message in self.messages]
        self._tools = [tool.spec() for tool in tools]

    async def generate(self, on_ids: OnIds | None = None) -> Message:
        """Ask for the next message."""
        del on_ids  # there are none
        try:
            message: Message = await self._sampler.chat(
                lambda engine: engine.chat(
                    self._chat, tools=self._tools, max_tokens=self._max_new_tokens, key=self._key
                ),
                self._key,
            )
        except ContextExceeded as error:
            if self._is_first:
                raise InvalidTask(f"the prompt leaves no room for an answer: {error}") from error
            message, self.is_full = Message("assistant", "", is_complete=False), True
        self._is_first = False
        self.finish = message.finish
        return message

    def take(self, turn: OpenTurn) -> None:
        """Append a turn to the conversation, after its stages."""
        super().take(turn)
        self._chat += [message.for_template() for message in (turn.answer, *turn.injected)]


class EncodingStage(Stage):
    """Writes the tokens of the messages behind an answer; the stage of `TurnTokenizer`.

    A trajectory whose next prompt would leave no room for an answer ends here.

    Args:
        encoder: Encodes prompts.
        raises_on_drift: Whether drift raises RuntimeError, instead of a warning for the first one.
    """

    name = "TurnTokenizer"
    reads_answer = False

    def __init__(self, encoder: ChatEncoder, *, raises_on_drift: bool = False) -> None:
        self.encoder, self.raises_on_drift = encoder, raises_on_drift
        self.has_warned = False

    @property
    def columns(self) -> Sequence[Column]:
        """The drift."""
        return TOKENS

    def run(self, turns: Sequence[OpenTurn]) -> Coroutine[Any, Any, None] | None:
        """Encode what follows each answer."""
        waiting: list[OpenTurn] = []
        for turn in turns:
            if turn.writer is None:
                continue
            if _size(turn.injected) > LONG_TEXT or turn.writer.size > LONG_LEDGER:
                waiting.append(turn)
            else:
                self._encode(turn)
        return self._encode_on_threads(waiting) if waiting else None

    async def _encode_on_threads(self, turns: Sequence[OpenTurn]) -> None:
        for turn in turns:
            await turn.episode.session.threads.run(lambda turn=turn: self._encode(turn))

    def _encode(self, turn: OpenTurn) -> None:
        writer = turn.writer
        assert writer is not None
        answer, injected = turn.behind_sampled()
        shown = [message.for_template() for message in injected]
        turn.prompt = writer.add_messages(answer.for_template(), shown, context_length=turn.context_length)
        for place, (old, new) in enumerate(zip(shown, turn.prompt.injected, strict=True)):
            if new is not old:
                turn.shorten(place, StoredMessage({**injected[place], "content": new["content"]}))
        room = writer.room(turn.context_length)
        if not turn.is_over and room is not None and room <= 0:
            turn.end("max_trajectory_tokens", truncated=True)
        if self.encoder.use_inference_chat_template:
            turn.drift = turn.prompt.n_replaced
        elif turn.is_over and self.encoder.drift_mode != "disable":
            turn.drift = self._drift(turn)

    def _drift(self, turn: OpenTurn) -> int:
        """Return how many tokens of a trajectory drift; warn of the first drift, or raise."""
        drift = turn.whole_writer(turn).find_drift()
        if drift is None:
            return 0
        if self.raises_on_drift:
            raise RuntimeError(str(drift))
        if not self.has_warned:
            self.has_warned = True
            warnings.warn(f"{drift}. Later ones are only counted, in {DRIFT}", stacklevel=2)
        return drift.tokens


def _size(messages: Sequence[StoredMessage]) -> int:
    """Return the number of characters of messages."""
    return sum(len(text) for one in messages if isinstance(text := one.field("content"), str))
