"""`to_sft`: make data for supervised fine-tuning from finished conversations."""

# TensorDict border: TensorDict and TorchRL annotate few results.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, overload

from tensordict import LazyStackedTensorDict

from torchrl_agentic.collectors.task import Trajectory
from torchrl_agentic.errors import check_count
from torchrl_agentic.messages import JSON, Fields, Message, ParsedCall, ToolResult, fields_of
from torchrl_agentic.parsers.base import Tools, specs_of
from torchrl_agentic.records import BadLine, TrajectoryRecord, read_records
from torchrl_agentic.rollout.batch import trajectory_batch
from torchrl_agentic.rollout.replay import Conversation
from torchrl_agentic.text import read_json
from torchrl_agentic.tokens.ledger import SAMPLED, TokenLedger
from torchrl_agentic.tokens.writer import ChatEncoder

Finished: TypeAlias = Trajectory | TrajectoryRecord | Conversation
_WHOLE = frozenset({"no_calls", "stop_tool", "user", "terminated", ""})
"""Reasons of conversations that ended by themselves; a conversation without a reason counts as such."""
IGNORED_LABEL = -100


@dataclass(frozen=True, slots=True)
class SFTRow:
    """One conversation to train on.

    Attributes:
        name: Name of the trajectory.
        task: Name of the task, which all trajectories of a group share.
        score: Its score; None if unknown.
        reason: Why it ended; see `Trajectory.reason`.
        messages: The messages up to the last one of the model, as chat templates take them, with tool calls
            apart from the text.
        ledger: The tokens; None without a tokenizer.
    """

    name: str
    task: str
    score: float | None
    reason: str
    messages: tuple[dict[str, JSON], ...]
    ledger: TokenLedger | None = None

    @property
    def n_tokens(self) -> int:
        """Number of tokens up to the last one of the model; 0 without tokens."""
        if self.ledger is None:
            return 0
        return max((span.stop for span in self.ledger.spans() if span.source == SAMPLED), default=0)

    @property
    def token_row(self) -> dict[str, list[int]]:
        """The columns "input_ids", "assistant_masks" (1: train on it) and "labels" (-100: do not).

        Raises:
            ValueError: If there are no tokens.
        """
        if self.ledger is None:
            raise ValueError("these rows have no tokens: call to_sft(conversations, tokenizer)")
        ids = list(self.ledger.ids[: self.n_tokens])
        mask = [int(bit) for bit in self.ledger.mask[: self.n_tokens]]
        labels = [token if bit else IGNORED_LABEL for token, bit in zip(ids, mask, strict=True)]
        return {"input_ids": ids, "assistant_masks": mask, "labels": labels}


@dataclass(frozen=True, slots=True)
class SFTData(Sequence[SFTRow]):
    """Rows to train on.

    Attributes:
        rows: The rows.
        tools: Descriptions of the tools, as chat templates take them.
        left_out: Number of conversations that were left out, by reason.
    """

    rows: tuple[SFTRow, ...]
    tools: tuple[Fields, ...] = ()
    left_out: Mapping[str, int] = field(default_factory=dict[str, int])

    @overload
    def __getitem__(self, index: int) -> SFTRow: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[SFTRow, ...]: ...
    def __getitem__(self, index: int | slice) -> SFTRow | tuple[SFTRow, ...]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def message_rows(self) -> list[dict[str, JSON]]:
        """Return the columns "messages" and "tools", as TRL's SFTTrainer and other trainers take them."""
        tools = list(self.tools)
        return [{"messages": list(row.messages), **({"tools": tools} if tools else {})} for row in self.rows]

    def token_rows(self) -> list[dict[str, list[int]]]:
        """Return the columns "input_ids", "assistant_masks" and "labels", as TRL's SFTTrainer takes them.

        Raises:
            ValueError: If there are no tokens.
        """
        return [row.token_row for row in self.rows]

    def batch(self) -> LazyStackedTensorDict:
        """Return the tokens as a batch, [N]; see `trajectory_batch`.

        Raises:
            ValueError: If there are no tokens, or no rows.
        """
        ledgers = [row.ledger for row in self.rows if row.ledger is not None]
        if not ledgers or len(ledgers) < len(self.rows):
            raise ValueError(
                "there are no rows" if not self.rows else "these rows have no tokens: to_sft(..., tokenizer)"
            )
        return trajectory_batch(ledgers)

    def save(self, path: str | Path) -> None:
        """Write `message_rows` as JSON lines.

        Args:
            path: The file; an existing one is replaced.
        """
        lines = [json.dumps(row, ensure_ascii=False, default=str) for row in self.message_rows()]
        Path(path).write_text("".join(f"{line}\n" for line in lines), "utf-8", "replace")


def to_sft(
    conversations: Iterable[Finished] | str | Path,
    tokenizer: Any = None,
    *,
    tools: Tools = (),
    min_score: float | None = None,
    best_per_task: int | None = None,
    where: Callable[[Any], bool] | None = None,
    complete_only: bool = True,
    max_tokens: int | None = None,
    encode_anew: bool = False,
    tokenizer_options: Mapping[str, Any] | None = None,
) -> SFTData:
    """Make data for supervised fine-tuning from finished conversations.

    The tokens of a conversation are those of its ledger, if it has one; the loss mask is True where a token
    was sampled, the end of each answer included. Other conversations, such as those of a model behind an API,
    are encoded as a rollout with `tokenizer` would have written them, had the model sampled these answers.

    Args:
        conversations: Trajectories, records, recorded conversations (`Conversation`), or the path of a dump.
        tokenizer: Tokenizer of the model to train, with a chat template; None: rows have messages only.
        tools: The tools that the model sees.
        min_score: Lowest score of a conversation that is kept; None: all, those without a score too.
        best_per_task: Number of conversations of each task that are kept, by their score; None: all.
        where: Function of a conversation that returns whether it is kept.
        complete_only: Whether conversations are left out that a bound or a failure ended, that a refusal
            ended, that have a message which was cut off, or a call that could not be read. Otherwise
            `SFTRow.reason` marks them.
        max_tokens: Most tokens of a conversation that is kept; None: no bound. Longer ones are left out
            rather than cut.
        encode_anew: Whether conversations with a ledger are encoded anew, for a model with another tokenizer.
        tokenizer_options: Further arguments of `ChatEncoder`.

    Returns:
        The rows, in the order of the conversations.

    Raises:
        FileNotFoundError: If there is no such dump.
        TypeError: If a conversation is of none of these types.
        ValueError: If a ledger is of another tokenizer, or the chat template cannot write an answer.
    """
    check_count("best_per_task", best_per_task)
    check_count("max_tokens", max_tokens)
    if max_tokens is not None and tokenizer is None:
        raise ValueError("max_tokens= counts the tokens of a tokenizer: give tokenizer= too")
    encoder = None
    if tokenizer is not None:
        encoder = ChatEncoder(tokenizer, tools=tools, **(tokenizer_options or {}))
    left_out: Counter[str] = Counter()
    rows: list[SFTRow] = []
    for item in _each(conversations):
        if isinstance(item, BadLine):
            left_out["unreadable line"] += 1
            continue
        found = _Finished.of(item)
        if (problem := _problem(found, item, min_score, where, complete_only)) is not None:
            left_out[problem] += 1
            continue
        row = found.row
        if encoder is not None:
            keeps = found.ledger is not None and not encode_anew
            ledger = found.kept(encoder) if keeps else found.encoded(encoder)
            if ledger is None:
                left_out["control tokens in an answer"] += 1
                continue
            row = replace(row, ledger=ledger)
            if max_tokens is not None and row.n_tokens > max_tokens:
                left_out["too long"] += 1
                continue
        rows.append(row)
    if best_per_task is not None:
        kept = _best(rows, best_per_task)
        left_out["not among the best of its task"] += len(rows) - len(kept)
        rows = kept
    return SFTData(tuple(rows), tuple(specs_of(tools)), dict(+left_out))


def _each(conversations: Iterable[Finished] | str | Path) -> Iterator[Finished | BadLine]:
    if isinstance(conversations, str | Path):
        yield from read_records(conversations)
    else:
        yield from conversations


def _problem(
    found: _Finished,
    item: Any,
    min_score: float | None,
    where: Callable[[Any], bool] | None,
    complete_only: bool,
) -> str | None:
    """Return why a conversation is left out, or None."""
    if not found.turns:
        return "no answer"
    if complete_only:
        if found.reason not in _WHOLE:
            return found.reason
        if not all(turn.message.is_complete for turn in found.turns):
            return "cut off"
        if any(call.error is not None for turn in found.turns for call in turn.calls):
            return "unreadable call"
    if min_score is not None and (found.score is None or not found.score >= min_score):
        return "no score" if found.score is None else "low score"
    return None if where is None or where(item) else "where"


def _best(rows: Sequence[SFTRow], count: int) -> list[SFTRow]:
    """Return the rows with the best scores of each task, in their order; the earlier of equal ones."""
    groups: defaultdict[str, list[int]] = defaultdict(list)
    for number, row in enumerate(rows):
        groups[row.task].append(number)

    def rank(number: int) -> float:
        score = rows[number].score
        return float("inf") if score is None or score != score else -score

    kept = {number for group in groups.values() for number in sorted(group, key=rank)[:count]}
    return [row for number, row in enumerate(rows) if number in kept]


@dataclass(frozen=True, slots=True)
class _Turn:
    """A message of the model with its calls, what came before it since the last one, and what answers it."""

    before: tuple[Message, ...]
    message: Message
    text: str
    calls: tuple[ParsedCall, ...]
    results: tuple[ToolResult, ...]
    after: tuple[Message, ...]

    @property
    def is_structured(self) -> bool:
        """True if the message has its calls or its reasoning apart from the text."""
        return bool(self.message.tool_calls or self.message.reasoning)

    def answer(self) -> dict[str, JSON]:
        """Return the message with its calls apart from the text, unless they cannot be read."""
        said: dict[str, JSON] = {"role": "assistant", "content": self.message.text}
        if self.message.reasoning:
            said["reasoning_content"] = self.message.reasoning
        calls = [_call(call.call_id, call.tool, dict(call.args)) for call in self.calls]
        if self.message.tool_calls:
            known = {call.call_id for call in self.calls if call.error is None}
            raw = [_raw_call(call) for call in self.message.tool_calls if call.get("id") not in known]
            said["tool_calls"] = [call for call in calls if call["id"] in known] + raw
        elif calls and all(call.error is None for call in self.calls):
            said["content"] = self.text.strip()
            said["tool_calls"] = calls
        return said

    def results_said(self) -> list[dict[str, JSON]]:
        """Return the messages that answer the calls, of the role "tool"."""
        names = {call.call_id: call.tool for call in self.calls}
        if not self.calls or all(message.role == "tool" for message in self.after):
            made = [_plain(message) for message in self.after]
        else:  # a format whose results have a form of their own
            pairs = zip(self.calls, self.results, strict=True)
            made = [
                {"role": "tool", "content": result.text, "tool_call_id": call.call_id}
                for call, result in pairs
            ]
        for message in made:
            if name := names.get(str(message.get("tool_call_id"))):
                message["name"] = name
        return made


@dataclass(frozen=True, slots=True)
class _Finished:
    """The part that trajectories, records and conversations have in common."""

    name: str
    task: str
    score: float | None
    reason: str
    turns: tuple[_Turn, ...]
    ledger: TokenLedger | None

    @classmethod
    def of(cls, item: Any) -> _Finished:
        """Read a conversation."""
        if isinstance(item, Trajectory):
            score = item.reward if item.score is None else item.score.value
            reason = item.reason or ("truncated" if item.truncated else "")
            return cls(item.name, item.task.name, score, reason, tuple(_turns(item.turns)), item.ledger)
        if isinstance(item, TrajectoryRecord):
            ledger = None if item.tokens is None else item.tokens.ledger
            name = item.trajectory or item.request_id
            turns = tuple(_turns(item.turns))
            return cls(name, item.group, item.score, item.termination_reason, turns, ledger)
        if isinstance(item, Conversation):
            return cls(item.name, item.name, None, "", tuple(_recorded(item)), None)
        raise TypeError(f"expected a Trajectory, a TrajectoryRecord or a Conversation; got {type(item)}")

    @property
    def row(self) -> SFTRow:
        """The row, without tokens."""
        messages: list[dict[str, JSON]] = []
        for number, turn in enumerate(self.turns):
            messages += [_plain(message) for message in turn.before]
            messages.append(turn.answer())
            if number + 1 < len(self.turns):
                messages += turn.results_said()
        return SFTRow(self.name, self.task, self.score, self.reason, tuple(messages))

    def kept(self, encoder: ChatEncoder) -> TokenLedger:
        """Return the ledger, if it is of this tokenizer."""
        ledger = self.ledger
        assert ledger is not None
        spans = [span for span in ledger.spans() if span.source == SAMPLED]
        message = self.turns[0].message
        if spans and isinstance(message.content, str) and not message.tool_calls:
            ids = ledger.ids[spans[0].start : spans[0].stop]
            known = len(encoder.tokenizer)
            said = encoder.read_answer(ids).text if max(ids) < known else ""
            if said.strip() != message.content.strip():
                raise ValueError(
                    f"the tokens of {self.name!r} are of another tokenizer: they decode to {said!r:.80}, and "
                    f"the answer is {message.content!r:.80}; give its tokenizer, or encode_anew=True"
                )
        return ledger

    def encoded(self, encoder: ChatEncoder) -> TokenLedger | None:
        """Return the tokens as a rollout would have written them; None if an answer has control tokens."""
        first, *_ = self.turns
        is_structured = any(turn.is_structured for turn in self.turns)
        writer = encoder.begin([_plain(message) for message in first.before])
        for number, turn in enumerate(self.turns):
            ids = (
                _structured_ids(turn, encoder, writer.messages) if is_structured else _text_ids(turn, encoder)
            )
            if ids is None:
                return None
            writer.add_sampled(ids)
            if number + 1 < len(self.turns):
                after = turn.results_said() if is_structured else list(map(_plain, turn.after))
                said = turn.answer() if is_structured else _plain(turn.message)
                more = [_plain(message) for message in self.turns[number + 1].before]
                writer.add_messages(said, [*after, *more])
        return writer.ledger


def _turns(turns: Iterable[Any]) -> Iterator[_Turn]:
    for turn in turns:
        outcome = turn.outcome
        yield _Turn(
            turn.context, turn.message, outcome.cleaned_text, outcome.calls, outcome.results, turn.messages
        )


def _recorded(conversation: Conversation) -> Iterator[_Turn]:
    """Yield the turns of a recorded conversation, whose calls have not been read."""
    before = conversation.prompt
    for message, expected in zip(conversation.turns, conversation.expected, strict=True):
        ids = [str(call.get("id", "")) or None for call in message.tool_calls]
        ids += [None] * (len(expected or ()) - len(ids))
        after = [
            Message("tool", one.text, tool_call_id=call_id or f"call_{place}")
            for place, (one, call_id) in enumerate(zip(expected or (), ids, strict=False))
        ]
        yield _Turn(before, message, message.text, (), (), tuple(after))
        before = ()


def _plain(message: Message) -> dict[str, JSON]:
    """Return a message as chat templates take it."""
    made: dict[str, JSON] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        made["tool_calls"] = [_raw_call(call) for call in message.tool_calls]
        made["content"] = message.text
    if message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
    if message.reasoning:
        made["reasoning_content"] = message.reasoning
    return made


def _call(call_id: str, name: str, arguments: JSON) -> dict[str, JSON]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _raw_call(call: Mapping[str, Any]) -> dict[str, JSON]:
    """Return a call of a message with its arguments as an object, if they can be read."""
    function = fields_of(call.get("function")) or call
    arguments: Any = function.get("arguments")
    if isinstance(arguments, str):
        try:
            found = read_json(arguments)
        except ValueError:
            found = None
        arguments = arguments if fields_of(found) is None else found
    return _call(str(call.get("id", "")), str(function.get("name", "")), arguments)


def _text_ids(turn: _Turn, encoder: ChatEncoder) -> list[int] | None:
    """Return the ids of an answer that is text, and of the token that ends it."""
    return _ended(turn, encoder, turn.message.text)


def _ended(turn: _Turn, encoder: ChatEncoder, text: str) -> list[int] | None:
    """Return the ids of a text and of the token that ends it; None if the text would end the answer."""
    ids = encoder.encoder.encode_text(text)
    if not set(encoder.stop_token_ids).isdisjoint(ids):
        return None
    return [*ids, *encoder.stop_token_ids[:1]] if turn.message.is_complete else ids


def _structured_ids(
    turn: _Turn, encoder: ChatEncoder, before: Sequence[Mapping[str, Any]]
) -> list[int] | None:
    """Return the ids of an answer as the chat template writes its calls and its reasoning."""
    said = turn.answer()
    if not turn.is_structured:
        return _text_ids(turn, encoder)
    head = encoder.template.render(before)
    whole = encoder.template.render([*before, said])
    end, rest = encoder.template.delta([*before, said], [], [])
    tail = end + "".join(piece.text for piece in rest)
    if not (whole.startswith(head) and whole.endswith(tail) and len(head) + len(tail) <= len(whole)):
        raise ValueError(
            "the chat template does not write an answer with calls or reasoning behind the prompt that asks "
            'for it; pass another template: tokenizer_options={"chat_template": ...}'
        )
    return _ended(turn, encoder, whole[len(head) : len(whole) - len(tail)])
