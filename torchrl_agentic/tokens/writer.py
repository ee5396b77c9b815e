"""Write the tokens of one trajectory: each prompt is exactly the ids so far plus the ids of new messages.

`ChatEncoder` holds what all trajectories of a model share; `TokenWriter` holds the tokens of one trajectory.
Both take and return plain Python values.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from torchrl_agentic.errors import MissingExtra, check_count
from torchrl_agentic.messages import Message
from torchrl_agentic.parsers.base import Tools, escaper, specs_of
from torchrl_agentic.parsers.control_tokens import control_tokens_of
from torchrl_agentic.tokens.chat_template import Chat, ChatTemplate
from torchrl_agentic.tokens.drift import Drift, Mode, find_drift
from torchrl_agentic.tokens.encoding import Encoded, Encoder, Expander, Piece, decode, escaped, kind_of
from torchrl_agentic.tokens.ledger import BOUNDARY, PROMPT, SAMPLED, TokenLedger

logger = logging.getLogger(__name__)

Side = Literal["left", "middle", "right"]
CountTokens = Callable[[str], int]

ChatMessage = Mapping[str, Any]
"""A message as chat templates take it: "role", "content", and where they exist "name", "tool_call_id"."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """A bound on the text of a tool result, in tokens or characters.

    Args:
        max_tokens: Upper bound in tokens, marker included; None: no bound.
        max_chars: Upper bound in characters, marker included; None: no bound.
        side: The part that is kept, as in verl up to 0.7: "left" keeps the head, "right" the tail, "middle"
            both ends.
        marker: Replaces the omitted text; `{omitted}` becomes the number of omitted characters.

    Raises:
        ValueError: If a bound is below 1, the side is unknown, or the marker alone exceeds `max_chars`.
    """

    max_tokens: int | None = None
    max_chars: int | None = None
    side: Side = "middle"
    marker: str = "[… {omitted} characters left out …]"

    def __post_init__(self) -> None:
        if self.side not in ("left", "middle", "right"):
            raise ValueError(f"the side is left, middle or right; got {self.side!r}")
        for name, bound in (("max_tokens", self.max_tokens), ("max_chars", self.max_chars)):
            if bound is not None and bound < 1:
                raise ValueError(f"{name} must be 1 or more; got {bound}")
        longest = len(self.longest_marker)
        if self.max_chars is not None and self.max_chars < longest:
            raise ValueError(
                f"max_chars={self.max_chars} leaves no room for the marker, which takes {longest}: "
                f"{self.marker!r}"
            )

    @property
    def longest_marker(self) -> str:
        """Return the marker of a billion omitted characters, which must fit into a bound."""
        return self.marker.format(omitted=10**9)

    def apply(self, text: str, count: CountTokens) -> str:
        """Return a text, truncated if it exceeds a bound.

        Args:
            text: The text of a tool result.
            count: Returns the number of tokens of a text.
        """
        return self.apply_together([text], count)[0]

    def apply_together(self, texts: Sequence[str], count: CountTokens) -> list[str]:
        """Return texts that are truncated as if they were one, such as the texts between images.

        Args:
            texts: Texts of one tool result, in order.
            count: Returns the number of tokens of a text.

        Returns:
            As many texts; some may be empty.
        """
        if self._fits(texts, count):
            return list(texts)
        size = sum(map(len, texts))
        most = size if self.max_chars is None else min(size, self.max_chars)
        low, high = 0, min(most, self.max_tokens or most)  # numbers of characters to keep; `low` fits
        while high < most and self._fits(self._cut(texts, high), count):
            low, high = high, min(most, 2 * high)
        while low < high:
            middle = (low + high + 1) // 2
            if self._fits(self._cut(texts, middle), count):
                low = middle
            else:
                high = middle - 1
        return self._cut(texts, low)

    def _fits(self, texts: Sequence[str], count: CountTokens) -> bool:
        if self.max_chars is not None and sum(map(len, texts)) > self.max_chars:
            return False
        if self.max_tokens is None:
            return True
        if sum(len(text.encode("utf-8", "surrogatepass")) for text in texts) <= self.max_tokens:
            return True  # no tokenizer makes more tokens than there are bytes
        return sum(map(count, texts)) <= self.max_tokens

    def _cut(self, texts: Sequence[str], kept: int) -> list[str]:
        omitted = sum(map(len, texts)) - kept
        start = {"left": kept, "middle": (kept + 1) // 2, "right": 0}[self.side]
        stop, marker = start + omitted, self.marker.format(omitted=omitted)
        made: list[str] = []
        for text in texts:  # start and stop count from the beginning of this text
            is_here = bool(marker) and start <= len(text)
            made.append(text[: max(0, start)] + (marker if is_here else "") + text[max(0, stop) :])
            marker = "" if is_here else marker
            start, stop = start - len(text), stop - len(text)
        return made


class ChatEncoder:
    """Encodes the conversations of one model; shared by all of its trajectories.

    Args:
        tokenizer: A fast tokenizer of transformers with a chat template, whose pad token is not a stop token.
        tools: Tools that the template shows.
        chat_template: Replaces the tokenizer's own template.
        template_kwargs: Further arguments of the template, such as `enable_thinking`.
        tool_role: Role of messages with tool results.
        stop_token_ids: Ids that end an answer besides `eos_token`, such as Llama's `<|eom_id|>`.
        processor: Processor of a model that takes images or videos. It renders the template, and expands the
            placeholders of media.
        max_trajectory_tokens: Upper bound on the tokens of a trajectory, prompts and answers together; None:
            no bound.
        max_tool_response_tokens: Upper bound on the text of a tool result in tokens; None: no bound.
        max_tool_response_chars: The same bound in characters.
        tool_response_truncate_side: The part that is kept: "left" the head, "right" the tail, "middle" both.
        use_inference_chat_template: Render the whole conversation anew for each prompt, as in production.
        tokenization_sanity_check_mode: Mode of the drift check: "strict", "ignore_strippable" or "disable".

    Attributes:
        encoder: Encodes texts.
        template: Renders conversations and deltas.
        media: Expands the placeholders of images and videos.
        stop_token_ids: Ids that end an answer, the end-of-sequence token first.

    Raises:
        ValueError: If the pad token also ends answers, a bound leaves no room for the marker, or the template
            cannot be continued token by token.
        TypeError: If the tokenizer is not a fast tokenizer with a chat template.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        tools: Tools = (),
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        tool_role: str = "tool",
        stop_token_ids: Sequence[int] = (),
        processor: Any = None,
        max_trajectory_tokens: int | None = None,
        max_tool_response_tokens: int | None = None,
        max_tool_response_chars: int | None = None,
        tool_response_truncate_side: Side = "middle",
        use_inference_chat_template: bool = False,
        tokenization_sanity_check_mode: Mode = "strict",
    ) -> None:
        if tokenization_sanity_check_mode not in ("strict", "ignore_strippable", "disable"):
            raise ValueError(
                "tokenization_sanity_check_mode is strict, ignore_strippable or disable; "
                f"got {tokenization_sanity_check_mode!r}"
            )
        check_count("max_trajectory_tokens", max_trajectory_tokens)
        check_tokenizer(tokenizer)
        self.tokenizer = tokenizer
        self.max_trajectory_tokens = max_trajectory_tokens
        self.use_inference_chat_template = use_inference_chat_template
        self.drift_mode: Mode = tokenization_sanity_check_mode
        self.stop_token_ids = stop_ids(tokenizer, stop_token_ids)
        self.encoder = Encoder(tokenizer)
        self.media = Expander(processor)
        self._control = escaper(tuple(control_tokens_of(tokenizer).values()))
        self._truncation = Truncation(
            max_tool_response_tokens, max_tool_response_chars, tool_response_truncate_side
        )
        marker_size = self.count_tokens(self._truncation.longest_marker)
        if max_tool_response_tokens is not None and marker_size > max_tool_response_tokens:
            raise ValueError(
                f"max_tool_response_tokens={max_tool_response_tokens} leaves no room for the marker, which "
                f"takes {marker_size}"
            )
        added = tokenizer.added_tokens_decoder
        self._new_template = functools.partial(
            ChatTemplate,
            processor if processor is not None else tokenizer,
            chat_template=chat_template,
            tools=specs_of(tools),
            tool_role=tool_role,
            kwargs=template_kwargs,
            special=[token.content for token in added.values() if token.special],
            control=self._control,
            probe=not use_inference_chat_template,
        )
        self.template = self._new_template(ends=self._ends())

    def _ends(self) -> list[str]:
        """Return the texts of the stop ids, without those that are words of the vocabulary."""
        eos, *others = self.stop_token_ids
        ids = [eos, *(one for one in others if one in self.encoder.control)]
        return [self.tokenizer.convert_ids_to_tokens(one) for one in ids]

    def with_stop_ids(self, ids: Sequence[int]) -> ChatEncoder:
        """Return an encoder whose answers also end with these ids; the same object if they do already.

        Args:
            ids: Ids that end an answer, such as those of an engine.

        Raises:
            ValueError: If the pad token is among them, or the template cannot be continued with them.
        """
        if set(ids) <= set(self.stop_token_ids):
            return self
        made = copy.copy(self)
        made.stop_token_ids = stop_ids(self.tokenizer, (*self.stop_token_ids, *ids))
        made.template = self._new_template(ends=made._ends())
        return made

    @property
    def reads_whole_chat(self) -> bool:
        """Check whether a prompt depends on the earlier messages: the template has no delta of its own."""
        return self.use_inference_chat_template or self.template.method == "prefix"

    def begin(self, messages: Sequence[ChatMessage], *, tools: Collection[str] | None = None) -> TokenWriter:
        """Encode the first prompt of a trajectory.

        Args:
            messages: The first messages.
            tools: Names of the tools that the template shows to this trajectory; None: all.

        Returns:
            The writer of the trajectory; its ledger holds the prompt.

        Raises:
            Exception: If the chat template rejects the messages; templates raise any type.
        """
        ledger = TokenLedger()
        ledger.add_prompt(self.encode_chat(messages, tools=tools))
        return TokenWriter(self, ledger, messages=messages, tools=tools)

    def encode_chat(self, messages: Chat, *, tools: Collection[str] | None = None) -> list[int]:
        """Encode a whole conversation, up to the header of the next answer.

        Control tokens in tool results are escaped.

        Args:
            messages: The conversation.
            tools: Names of the tools that the template shows; None: all.
        """
        chat = [escaped(message, self._control) for message in messages]
        return self.encoder.encode_text(self.template.showing(tools).render(chat), self.media(chat))

    def encode_delta(
        self,
        before: Chat,
        injected: Chat,
        *,
        next_call: int,
        last_sampled: int | None = None,
        tools: Collection[str] | None = None,
    ) -> Encoded:
        """Encode what follows an answer: the end of the turn, injected messages, the next answer's header.

        Args:
            before: The conversation so far, the answer included; read only if `reads_whole_chat`.
            injected: Messages that follow the answer.
            next_call: Number of the first tool result among them, as in `TokenLedger`.
            last_sampled: Last token id of the answer; None if nothing was sampled.
            tools: Names of the tools that the template shows; None: all.
        """
        sources: list[int] = []
        for message in injected:
            is_result = "tool_call_id" in message
            sources.append(next_call if is_result else PROMPT)
            next_call += is_result
        end, pieces = self.template.showing(tools).delta(before, injected, sources)
        found = self.encoder.encode([Piece(end, BOUNDARY, is_trusted=True), *pieces], self.media(injected))
        return found.after(len(end)) if self._has_ended(last_sampled, end, pieces) else found

    def _has_ended(self, last_sampled: int | None, end: str, pieces: Sequence[Piece]) -> bool:
        """Check whether the model ended its turn, so that the template's end is not needed."""
        if last_sampled not in self.stop_token_ids:
            return False
        sampled = self.tokenizer.convert_ids_to_tokens(last_sampled)
        if sampled == end:
            return True
        if sampled in self.template.call_end:
            return False  # it ended a call, and not the turn
        # The model sampled another stop token than the template writes. If the template's end is also the
        # header of the next message, it must stay.
        header = pieces[0].text.lstrip() if pieces else ""
        return header.startswith(self.template.special)

    def read_answer(self, ids: Sequence[int]) -> Message:
        """Return sampled ids as the assistant's message; it is incomplete if no stop token ended it.

        Args:
            ids: Sampled token ids.
        """
        return read_answer(self.tokenizer, ids, self.stop_token_ids)

    def fit(self, message: ChatMessage) -> ChatMessage:
        """Truncate a tool result that is too long, and replace media that the processor rejects by text.

        Args:
            message: A message.

        Returns:
            The same object if it fits or is not a tool result.
        """
        if "tool_call_id" not in message:
            return message
        content = self._fit_content(message["content"])
        return message if content == message["content"] else {**message, "content": content}

    def shorten(self, message: ChatMessage, room: int) -> ChatMessage:
        """Cut a text that cannot have a place in the trajectory, so that it is not encoded as a whole.

        The trajectory ends truncated with either text, since what is left of it does not fit either.

        Args:
            message: A message.
            room: Number of tokens that the bounds leave.

        Returns:
            The same object if its text may fit.
        """
        longest, text = self.encoder.longest_token, message["content"]
        if (
            longest is None
            or not isinstance(text, str)
            or len(text) <= (most := longest * (max(room, 0) + 1))
        ):
            return message
        return {**message, "content": text[:most]}

    def _fit_content(self, content: Any) -> Any:
        if isinstance(content, str):
            return self._truncation.apply(content, self.count_tokens)
        if not isinstance(content, list):
            return content
        parts = [self._fit_part(part) for part in cast("list[dict[str, Any]]", content)]
        texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
        cut = iter(self._truncation.apply_together(texts, self.count_tokens))
        parts = [{**part, "text": next(cut)} if isinstance(part.get("text"), str) else part for part in parts]
        return [part for part in parts if part.get("text") != ""]

    def _fit_part(self, part: dict[str, Any]) -> dict[str, Any]:
        """Return a part unchanged, or a text if the processor rejects it."""
        kind = kind_of(part)
        if kind is None:
            return part
        try:
            self.media.text(part, kind)
        except MissingExtra:
            raise
        except Exception as error:  # processors raise any type
            if not self.media.takes(kind):
                raise
            logger.warning("the processor rejects the %s of a tool: %s", kind, error)
            return {"type": "text", "text": f"[{kind} that cannot be shown: {str(error)[:200]}]"}
        return part

    def count_tokens(self, text: str) -> int:
        """Return the number of tokens of a text, encoded on its own without control tokens."""
        return len(self.encoder.encode([Piece(text, 0)]).ids)


@dataclass(frozen=True, slots=True)
class NextPrompt:
    """The prompt of the next turn, as `TokenWriter.add_messages` wrote it.

    Attributes:
        injected: The injected messages as they were encoded: long tool results truncated, media that the
            processor rejects replaced by text. The conversation must hold these.
        size: Number of tokens of the whole prompt.
        n_replaced: Number of earlier tokens, counted from the first difference, that the prompt does not
            keep; 0 unless `use_inference_chat_template` is set.
    """

    injected: tuple[ChatMessage, ...]
    size: int
    n_replaced: int = 0


class TokenWriter:
    """Writes the ledger of one trajectory: prompt, sampled answer, injected messages, answer, ...

    `ChatEncoder.begin` makes a writer with the first prompt. Then each turn calls `add_sampled`, once or in
    several pieces, and `add_messages`. Sampled ids are kept as sampled; only injected messages are encoded.

    If the tokens are kept elsewhere, such as in a TensorDict, a new writer can continue a trajectory and hold
    only the tokens of one turn: `preceding` counts the others.

    Args:
        encoder: What all trajectories share.
        ledger: Tokens so far; None: an empty ledger.
        messages: Conversation so far. May be empty for a writer that continues a trajectory, unless
            `encoder.reads_whole_chat` or the drift is to be checked.
        tools: Names of the tools that the template shows to this trajectory; None: all.
        preceding: Number of tokens of the trajectory that come before `ledger` and are kept elsewhere.
        next_call: Number of the next call; by default the one that follows in `ledger`.

    Attributes:
        ledger: Tokens that were written, with source, mask and log-probabilities.
        messages: The conversation.
    """

    def __init__(
        self,
        encoder: ChatEncoder,
        ledger: TokenLedger | None = None,
        *,
        messages: Sequence[ChatMessage] = (),
        tools: Collection[str] | None = None,
        preceding: int = 0,
        next_call: int | None = None,
    ) -> None:
        self.encoder = encoder
        self.ledger = TokenLedger() if ledger is None else ledger
        self.messages = list(messages)
        self.tools = tools
        self._preceding = preceding
        self._next_call = self.ledger.next_call if next_call is None else next_call
        self._last_sampled: int | None = None

    @property
    def ids(self) -> Sequence[int]:
        """Token ids so far, [T]: the prompt to sample from; without those that are kept elsewhere."""
        return self.ledger.ids

    @property
    def size(self) -> int:
        """Number of tokens of the trajectory so far."""
        return self._preceding + len(self.ledger)

    def room(self, context_length: int | None = None) -> int | None:
        """Return how many tokens the bounds leave for the next answer.

        Args:
            context_length: Number of tokens that the engine takes, prompt and answer together; None: unknown.

        Returns:
            The smaller room of `max_trajectory_tokens` and `context_length`; 0 or less if the trajectory must
            end; None without any bound.
        """
        bounds = [
            bound for bound in (self.encoder.max_trajectory_tokens, context_length) if bound is not None
        ]
        return min(bounds) - self.size if bounds else None

    def add_sampled(
        self, ids: Sequence[int], log_probs: Sequence[float] | None = None, *, version: int | None = None
    ) -> None:
        """Append tokens of the current answer.

        Args:
            ids: Sampled token ids, the stop token included.
            log_probs: One log-probability per id, in nats, or None if they are unknown.
            version: Policy version that sampled them; None: unknown.

        Raises:
            ValueError: If `ids` and `log_probs` differ in length, or a log-probability is above 0.
        """
        self.ledger.add_sampled(ids, log_probs, version=version)
        if ids:
            self._last_sampled = ids[-1]

    def add_messages(
        self, answer: ChatMessage, injected: Sequence[ChatMessage], *, context_length: int | None = None
    ) -> NextPrompt:
        """Append the messages that follow an answer, and the header of the next answer.

        Args:
            answer: The assistant's message that the sampled ids stand for.
            injected: Messages that follow it: tool results, a user's message.
            context_length: As in `room`; what cannot fit is not encoded as a whole.

        Returns:
            The messages as they were encoded, and the size of the prompt.

        Raises:
            ValueError: If the messages hold media that the model does not take.
        """
        if (room := self.room(context_length)) is not None:
            injected = [self.encoder.shorten(message, room) for message in injected]
        injected = tuple(self.encoder.fit(message) for message in injected)
        n_replaced = 0
        self.messages.append(answer)
        if self.encoder.use_inference_chat_template:
            self.messages += injected
            n_replaced = self._encode_anew()
        else:
            delta = self.encoder.encode_delta(
                self.messages,
                injected,
                next_call=self._next_call,
                last_sampled=self._last_sampled,
                tools=self.tools,
            )
            self.messages += injected
            self.ledger.add_injected(delta.ids, delta.sources)
            self._next_call = max(self._next_call, max(delta.sources, default=SAMPLED) + 1)
        self._last_sampled = None
        return NextPrompt(injected, self.size, n_replaced)

    def _encode_anew(self) -> int:
        """Replace the ledger by a prompt of the whole conversation; return how many tokens it replaces."""
        ids, self.ledger = self.ledger.ids, TokenLedger()
        self.ledger.add_prompt(self.encoder.encode_chat(self.messages, tools=self.tools))
        new = self.ledger.ids
        shorter = min(len(ids), len(new))
        return len(ids) - next((i for i in range(shorter) if ids[i] != new[i]), shorter)

    def find_drift(self) -> Drift | None:
        """Compare the ids with those of the whole conversation, rendered and encoded at once.

        Returns:
            The difference, or None if there is none or the check is disabled.

        Raises:
            RuntimeError: If some of the tokens are kept elsewhere.
        """
        if self._preceding:
            raise RuntimeError("the drift check needs the tokens of the whole trajectory")
        encoder = self.encoder
        return find_drift(
            self.ledger,
            self.messages,
            template=encoder.template.showing(self.tools),
            encoder=encoder.encoder,
            tokenizer=encoder.tokenizer,
            mode=encoder.drift_mode,
        )


def check_tokenizer(tokenizer: Any) -> None:
    """Raise TypeError if an object lacks the members of a tokenizer that `ChatEncoder` uses."""
    needed = (
        "apply_chat_template",
        "backend_tokenizer",
        "added_tokens_decoder",
        "eos_token_id",
        "pad_token_id",
    )
    missing = [name for name in needed if not hasattr(tokenizer, name)]
    if missing:
        raise TypeError(
            "tokenizer must be a fast tokenizer of transformers with a chat template, as"
            f" AutoTokenizer.from_pretrained(...) returns it; got {type(tokenizer).__name__}, which has no"
            f" {', '.join(missing)}"
        )


def stop_ids(tokenizer: Any, more: Sequence[int] = (), *, generation_config: Any = None) -> tuple[int, ...]:
    """Return the ids that end an answer, the end-of-sequence token first.

    Args:
        tokenizer: A tokenizer of transformers.
        more: Further ids that end an answer.
        generation_config: The model's, a mapping or an object of transformers, whose `eos_token_id` ends
            answers too; see `end_ids`.

    Raises:
        ValueError: If the tokenizer has no end-of-sequence token, no pad token, or pads with a stop token.
    """
    known = (tokenizer.eos_token_id, *more, *end_ids(generation_config, tokenizer))
    ids = tuple(dict.fromkeys(i for i in known if i is not None))
    if not ids:
        raise ValueError("the tokenizer has no eos_token: nothing would end an answer")
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id in ids:
        pad = tokenizer.pad_token
        raise ValueError(
            f"the pad token {pad!r} is missing or also ends answers, so TorchRL would drop the end of an "
            "answer as padding. Set another pad token: "
            'tokenizer.pad_token = "<|endoftext|>", or add_special_tokens({"pad_token": "<pad>"}) and '
            "model.resize_token_embeddings(len(tokenizer))"
        )
    return ids


def end_ids(generation_config: Any, tokenizer: Any) -> tuple[int, ...]:
    """Return the ids that end the answers of a model by its `generation_config.eos_token_id`.

    The pad token, which some models name there, is left out: it is never sampled, because losses drop it.

    Args:
        generation_config: A mapping or an object of transformers; None: unknown.
        tokenizer: The tokenizer of the model.
    """
    if isinstance(generation_config, Mapping):
        found: Any = cast("Mapping[str, Any]", generation_config).get("eos_token_id")
    else:
        found = getattr(generation_config, "eos_token_id", None)
    ids = cast("Sequence[Any]", found if isinstance(found, list | tuple) else [found])
    return tuple(one for one in ids if isinstance(one, int) and 0 <= one != tokenizer.pad_token_id)


def read_answer(tokenizer: Any, ids: Sequence[int], stops: Collection[int]) -> Message:
    """Return sampled ids as the assistant's message; it is incomplete if no stop token ended it.

    Args:
        tokenizer: A tokenizer of transformers.
        ids: Sampled token ids.
        stops: Ids that end an answer.
    """
    stop = next((index for index, token in enumerate(ids) if token in stops), None)
    return Message("assistant", decode(tokenizer, ids[:stop]), is_complete=stop is not None)
