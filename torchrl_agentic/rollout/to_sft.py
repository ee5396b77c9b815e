"""`to_sft`: make data for supervised fine-tuning from finished conversations."""

# TensorDict border: TensorDict and TorchRL annotate few results.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, overload

from tensordict import LazyStackedTensorDict

from torchrl_agentic.errors import check_count
from torchrl_agentic.messages import JSON, Fields, Message, ParsedCall, ToolResult, fields_of
from torchrl_agentic.parsers.base import ToolCallParser, Tools, specs_of
from torchrl_agentic.records import BadLine, TrajectoryRecord, read_records
from torchrl_agentic.rollout.answer_writer import (
    AnswerWriter,
    UnwritableAnswer,
    template_errors,
    with_reasoning,
)
from torchrl_agentic.rollout.batch import trajectory_batch
from torchrl_agentic.rollout.replay import Conversation
from torchrl_agentic.text import one_line, read_json
from torchrl_agentic.tokens.ledger import SAMPLED, TokenLedger
from torchrl_agentic.tokens.writer import ChatEncoder
from torchrl_agentic.trajectory.trajectory import Trajectory

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
    keep_reasoning: bool = True,
    on_unwritable: Literal["raise", "leave_out"] = "raise",
    tokenizer_options: Mapping[str, Any] | None = None,
) -> SFTData:
    """Make data for supervised fine-tuning from finished conversations.

    The tokens of a conversation are those of its ledger, if it has one; the loss mask is True where a token
    was sampled, the end of each answer included. Other conversations, such as those of a model behind an API,
    are encoded as a rollout with `tokenizer` would have written them, had the model sampled these answers:
    each answer as the chat template writes it, its calls, its reasoning and the token that ends it included.
    Control tokens in the text of an answer are encoded as plain characters. Calls inside of a text
    are written by the template too, unless it shows no `tools`; then the prompt explains their format.

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
        keep_reasoning: Whether answers keep the reasoning that a server returned apart from the content.
        on_unwritable: What to do with a conversation that the chat template cannot write: "raise", or
            "leave_out", which counts it.
        tokenizer_options: Additional arguments of `ChatEncoder`.

    Returns:
        The rows, in the order of the conversations.

    Raises:
        FileNotFoundError: If there is no such dump.
        TypeError: If a conversation is of none of these types.
        ValueError: If a ledger is of another tokenizer; or if the chat template cannot write an answer,
            because it omits or changes a call, the reasoning or the text, or ends the answer with a token
            that is not a stop token.
    """
    if on_unwritable not in ("raise", "leave_out"):
        raise ValueError(f"on_unwritable is raise or leave_out; got {on_unwritable!r}")
    check_count("best_per_task", best_per_task)
    check_count("max_tokens", max_tokens)
    if max_tokens is not None and tokenizer is None:
        raise ValueError("max_tokens= counts the tokens of a tokenizer: give tokenizer= too")
    options = dict(tokenizer_options or {})
    specs = tuple(specs_of(tools))
    answers = None
    if tokenizer is not None:
        encoder = ChatEncoder(tokenizer, tools=specs, **options)
        answers = AnswerWriter(encoder, tool_role=options.get("tool_role", "tool"))
    left_out: Counter[str] = Counter()
    rows: list[SFTRow] = []
    for item in _each(conversations):
        if isinstance(item, BadLine):
            left_out["unreadable line"] += 1
            continue
        found = _Finished.of(item) if keep_reasoning else _Finished.of(item).without_reasoning()
        if (problem := _problem(found, item, min_score, where, complete_only)) is not None:
            left_out[problem] += 1
            continue
        row = found.row
        if answers is not None:
            keeps = found.ledger is not None and not encode_anew
            try:
                ledger = (
                    found.kept(answers.encoder) if keeps else found.encoded(answers, shows_tools=bool(specs))
                )
            except UnwritableAnswer as error:
                if on_unwritable == "raise":
                    raise ValueError(
                        f"the chat template cannot write {found.name!r}: {error}; or leave such "
                        'conversations out: to_sft(..., on_unwritable="leave_out")'
                    ) from error
                left_out["the chat template cannot write it"] += 1
                continue
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
    return SFTData(tuple(rows), specs, dict(+left_out))


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
    if any(turn.is_empty for turn in found.turns):
        return "empty answer"
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
class _SFTTurn:
    """A message of the model with its calls, the messages since the previous one, and the tool results."""

    before: tuple[Message, ...]
    message: Message
    text: str
    calls: tuple[ParsedCall, ...]
    results: tuple[ToolResult, ...]
    after: tuple[Message, ...]

    @property
    def is_empty(self) -> bool:
        """True if the message has neither text nor calls nor reasoning."""
        message = self.message
        return not (message.tool_calls or message.text.strip() or message.reasoning.strip())

    @property
    def has_unread_calls(self) -> bool:
        """True if results follow calls that are still text, as in recorded messages."""
        return not self.message.tool_calls and not self.calls and bool(self.after)

    def with_calls_read(self, parser: ToolCallParser | None, *, shows_tools: bool) -> _SFTTurn:
        """Return the turn with the calls that a parser reads in its text.

        Args:
            parser: Parser of the format of the model to train; None if there is none.
            shows_tools: Whether the chat template shows tools. If not, calls that cannot be read stay text.

        Raises:
            UnwritableAnswer: If the parser does not read one call for each result.
        """
        found = None if parser is None else parser.parse(self.text)
        if found is None or len(found.calls) != len(self.after) or any(call.error for call in found.calls):
            if not shows_tools:
                return self
            raise UnwritableAnswer(
                f"{len(self.after)} results follow {one_line(self.text, 80)!r}, in which its format has not "
                "as many calls; give the calls of messages in tool_calls"
            )
        pairs = zip(found.calls, self.after, strict=True)
        calls = tuple(replace(call, call_id=message.tool_call_id or call.call_id) for call, message in pairs)
        return replace(self, text=found.text, calls=calls)

    def has_text_calls(self, *, shows_tools: bool) -> bool:
        """Return whether the calls of the message stay a part of its text.

        Args:
            shows_tools: Whether the chat template shows tools, so that it has a form for calls.
        """
        if self.message.tool_calls or not self.calls:
            return False
        if any(call.error is not None for call in self.calls):
            return True
        return not shows_tools and all(call.span is not None for call in self.calls)

    def answer(self) -> dict[str, JSON]:
        """Return the message with its calls apart from the text, unless they cannot be read."""
        said: dict[str, JSON] = {"role": "assistant", "content": self.message.text}
        if self.message.reasoning:
            said["reasoning_content"] = self.message.reasoning
        calls = [_call(call.call_id, call.tool, dict(call.args)) for call in self.calls]
        if self.message.tool_calls:
            known = {call.call_id for call in self.calls if call.error is None}
            raw = [
                _raw_call(call, place)
                for place, call in enumerate(self.message.tool_calls)
                if call.get("id") not in known
            ]
            said["tool_calls"] = [call for call in calls if call["id"] in known] + raw
        elif calls and all(call.error is None for call in self.calls):
            said["content"] = self.text.strip()
            said["tool_calls"] = calls
        return said

    def results_said(self, role: str = "tool") -> list[dict[str, JSON]]:
        """Return the messages that answer the calls.

        Args:
            role: Their role.
        """
        raw = [_raw_call(call, place) for place, call in enumerate(self.message.tool_calls)]
        names = {str(call["id"]): str(call["function"]["name"]) for call in raw}
        names |= {call.call_id: call.tool for call in self.calls}
        if not self.calls or all(message.role == "tool" for message in self.after):
            made = [_plain(message) for message in self.after]
        else:  # a format whose results have a form of their own
            pairs = zip(self.calls, self.results, strict=True)
            made = [
                {"role": "tool", "content": result.text, "tool_call_id": call.call_id}
                for call, result in pairs
            ]
        for message in made:
            if message["role"] == "tool":
                message["role"] = role
            if name := names.get(str(message.get("tool_call_id"))):
                message["name"] = name
        return made


@dataclass(frozen=True, slots=True)
class _Finished:
    """The fields that trajectories, records and conversations have in common."""

    name: str
    task: str
    score: float | None
    reason: str
    turns: tuple[_SFTTurn, ...]
    ledger: TokenLedger | None

    @classmethod
    def of(cls, item: Any) -> _Finished:
        """Read a conversation."""
        if isinstance(item, Trajectory):
            score = item.reward if item.score is None else item.score.value
            reason = item.reason or ("truncated" if item.truncated else "")
            ledger = None if item.contexts else item.ledger  # each context has other tokens
            return cls(item.name, item.task.name, score, reason, tuple(_turns(item.turns)), ledger)
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
        """Return the ledger; raise ValueError if it is of another tokenizer."""
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

    def without_reasoning(self) -> _Finished:
        """Return the conversation without the reasoning that was returned apart from the content."""
        turns = (replace(turn, message=replace(turn.message, reasoning="")) for turn in self.turns)
        return replace(self, turns=tuple(turns))

    def encoded(self, answers: AnswerWriter, *, shows_tools: bool) -> TokenLedger | None:
        """Return the tokens as a rollout would have written them; None if an answer has a stop token inside.

        Raises:
            UnwritableAnswer: If the chat template cannot write the conversation.
        """
        first, *_ = self.turns
        with template_errors():
            writer = answers.encoder.begin([_plain(message) for message in first.before])
        for number, turn in enumerate(self.turns):
            is_last = number + 1 == len(self.turns)
            if turn.has_unread_calls:
                turn = turn.with_calls_read(answers.parser, shows_tools=shows_tools)
            if turn.has_text_calls(shows_tools=shows_tools):
                said, after = _plain(turn.message), [_plain(message) for message in turn.after]
                markup = [call.span for call in turn.calls if call.span is not None]
            else:
                said, after, markup = turn.answer(), turn.results_said(answers.tool_role), []
            if answers.holds_end(said):
                return None
            said = with_reasoning(said)
            written = answers.write(
                writer.ids,
                writer.messages,
                said,
                is_complete=turn.message.is_complete,
                markup=markup,
            )
            writer.ledger = writer.ledger.copy(len(writer.ledger) - written.n_replaced)
            writer.add_sampled(written.ids)
            if not is_last:
                more = [_plain(message) for message in self.turns[number + 1].before]
                with template_errors():
                    writer.add_messages(said, [*after, *more])
        return writer.ledger


def _turns(turns: Iterable[Any]) -> Iterator[_SFTTurn]:
    for turn in turns:
        outcome = turn.outcome
        yield _SFTTurn(
            turn.context, turn.message, outcome.cleaned_text, outcome.calls, outcome.results, turn.messages
        )


def _recorded(conversation: Conversation) -> Iterator[_SFTTurn]:
    """Yield the turns of a recorded conversation, whose calls have not been read."""
    before = conversation.prompt
    for message, expected in zip(conversation.turns, conversation.expected, strict=True):
        ids = [str(call.get("id", "")) or None for call in message.tool_calls]
        ids += [None] * (len(expected or ()) - len(ids))
        after = [
            Message("tool", one.text, tool_call_id=call_id or f"call_{place}")
            for place, (one, call_id) in enumerate(zip(expected or (), ids, strict=False))
        ]
        yield _SFTTurn(before, message, message.text, (), (), tuple(after))
        before = ()


def _plain(message: Message) -> dict[str, JSON]:
    """Return a message as chat templates take it."""
    made: dict[str, JSON] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        made["tool_calls"] = [_raw_call(call, place) for place, call in enumerate(message.tool_calls)]
        made["content"] = message.text
    if message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
    if message.reasoning:
        made["reasoning_content"] = message.reasoning
    return made


def _call(call_id: str, name: str, arguments: JSON) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _raw_call(call: Mapping[str, Any], place: int) -> dict[str, Any]:
    """Return a call of a message, with its arguments as an object if they are valid JSON."""
    function = fields_of(call.get("function")) or call
    arguments: Any = function.get("arguments")
    if arguments is None or arguments == "":  # servers write so if a tool has no arguments
        arguments = {}
    if isinstance(arguments, str):
        try:
            found = read_json(arguments)
        except ValueError:
            found = None
        arguments = arguments if fields_of(found) is None else found
    return _call(str(call.get("id") or f"call_{place}"), str(function.get("name", "")), arguments)
