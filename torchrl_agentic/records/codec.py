"""Convert trajectories to JSON objects and back. Lines of verl's dumps can be read too."""

from __future__ import annotations

import base64
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from torchrl_agentic.messages import (
    JSON,
    CallError,
    Content,
    DispatchResult,
    Fields,
    FileRefPart,
    ImagePart,
    JsonPart,
    Message,
    ParsedCall,
    Status,
    TextPart,
    Timing,
    ToolResult,
    ToolResultPart,
    Turn,
    VideoPart,
    fields_of,
)
from torchrl_agentic.records.record import (
    Origin,
    Summary,
    TokenRecord,
    TrajectoryRecord,
    group_of,
    plain_text,
    question_in,
)
from torchrl_agentic.records.text_dump import turns_of_text
from torchrl_agentic.tokens.ledger import SAMPLED, TokenLedger

SCHEMA_VERSION = 2

HEAD = (
    "schema_version", "request_id", "run", "step", "score", "termination_reason", "trajectory", "row",
    "started", "group", "n_turns", "statuses", "tools",
)  # fmt: skip
"""Fields at the beginning of a line, so that a list of trajectories can be shown without reading the rest."""
BODY = ("gts", "input", "output", "rewards", "messages", "turns", "tool_calls", "tokens", "versions")
RESERVED = frozenset((*HEAD, *BODY, "origin"))
"""Names that extras cannot have."""


def record_to_json(record: TrajectoryRecord) -> dict[str, JSON]:
    """Convert a trajectory to JSON.

    Messages are kept whole, with the images and videos that the model was shown. Results keep their text, in
    which images, videos and files appear by name; their `meta` is left out, because it may hold anything.

    Args:
        record: The trajectory.

    Returns:
        The object of one line, as `json_schema` describes it.
    """
    statuses, tools = record.counts
    prompt, messages = plain_text(record.prompt), list(record.messages)
    return {
        "schema_version": SCHEMA_VERSION,
        "request_id": record.request_id,
        "run": record.run,
        "step": record.step,
        "score": record.score,
        "termination_reason": record.termination_reason,
        "trajectory": record.trajectory,
        "row": record.row,
        "started": record.started,
        "group": group_of(prompt),
        "n_turns": len(record.turns),
        "statuses": statuses,
        "tools": tools,
        "origin": _origin_to_json(record.origin, record.question),
        **record.extras,
        "gts": record.gts,
        "input": prompt,
        "output": plain_text(messages[len(record.prompt) :]),
        "rewards": list(record.rewards),
        **turns_to_json(record.turns),
        "tokens": None if record.tokens is None else _tokens_to_json(record.tokens),
        "versions": dict(record.versions),
    }


def record_from_json(data: JSON) -> TrajectoryRecord:
    """Read an object that `record_to_json` wrote, or a line of a dump that has only input and output.

    Args:
        data: The parsed JSON of one line.

    Returns:
        The trajectory.

    Raises:
        ValueError: If another version wrote it, or it is neither of the two.
        KeyError: If a field is missing.
        TypeError: If a field has another type.
    """
    fields = _object(data)
    version = fields.get("schema_version")
    if version is None:
        return _from_input_output(fields)
    if version != SCHEMA_VERSION:
        raise ValueError(f"the record has version {version}; this package reads version {SCHEMA_VERSION}")
    tokens = fields["tokens"]
    rewards: Sequence[JSON] = fields["rewards"]
    return TrajectoryRecord(
        str(fields["request_id"]),
        tuple(turns_from_json(fields, trajectory=fields["trajectory"], row=int(fields["row"]))),
        _step(fields["step"]),
        str(fields["trajectory"]),
        int(fields["row"]),
        tuple(_number(value) for value in rewards),
        _number(fields["score"]),
        fields["gts"],
        _extras(fields),
        str(fields["termination_reason"]),
        None if tokens is None else _tokens_from_json(tokens),
        _number(fields["started"]),
        fields["versions"],
        str(fields["run"]),
        _origin_from_json(fields),
    )


def summary_from_json(data: JSON) -> Summary | None:
    """Read the fields that lists of trajectories show from the beginning of a line.

    Args:
        data: The object of a line, of which the end may be missing.

    Returns:
        The summary, or None if the beginning is not one that `record_to_json` writes or is too short.

    Raises:
        ValueError: If another version wrote it.
        TypeError: If a field has another type.
    """
    fields = _object(data)
    version = fields.get("schema_version")
    if isinstance(version, int) and version != SCHEMA_VERSION:
        raise ValueError(f"the record has version {version}; this package reads version {SCHEMA_VERSION}")
    if version is None or "gts" not in fields or any(name not in fields for name in HEAD):
        return None
    return Summary(
        request_id=str(fields["request_id"]),
        step=_step(fields["step"]),
        score=_number(fields["score"]),
        termination_reason=str(fields["termination_reason"]),
        trajectory=str(fields["trajectory"]),
        group=str(fields["group"]),
        n_turns=int(fields["n_turns"]),
        statuses=_object(fields["statuses"]),
        tools=_object(fields["tools"]),
        extras=_extras(fields),
        run=str(fields["run"]),
        question=_question(fields),
        origin=_origin_from_json(fields),
    )


def _extras(fields: Fields) -> dict[str, JSON]:
    """Return the fields of other names; older lines may have a column "origin" of a data set."""
    is_column = "origin" in fields and fields_of(fields["origin"]) is None
    return {
        name: value
        for name, value in fields.items()
        if name not in RESERVED or (name == "origin" and is_column)
    }


def _origin_to_json(origin: Origin, question: str) -> dict[str, JSON]:
    """Convert an origin to JSON, without what is unknown; the question is for lists."""
    data: dict[str, JSON] = {"question": question}
    if origin.task:
        data["task"] = origin.task
    if origin.group is not None:
        data["group"] = origin.group
    if origin.index is not None:
        data["index"] = origin.index
    if origin.policy_versions:
        data["policy_versions"] = list(origin.policy_versions)
    if origin.seconds is not None:
        data["seconds"] = origin.seconds
    return data


def _origin_from_json(fields: Fields) -> Origin:
    data = fields_of(fields.get("origin"))
    if data is None:
        return Origin()
    group, index = data.get("group"), data.get("index")
    return Origin(
        str(data.get("task", "")),
        None if group is None else int(group),
        None if index is None else int(index),
        tuple(int(version) for version in data.get("policy_versions", ())),
        _number(data.get("seconds")),
    )


def _question(fields: Fields) -> str:
    """Return the question of a line, which older lines have only in their prompt."""
    data = fields_of(fields.get("origin"))
    if data is not None:
        return str(data.get("question", ""))
    prompt = fields.get("input")
    return question_in(prompt) if isinstance(prompt, str) else ""


def _object(data: JSON) -> Fields:
    if not isinstance(data, Mapping):
        raise TypeError(f"a record must be a JSON object; got {type(data).__name__}")
    return cast("Fields", data)


def _text(value: JSON) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a string; got {type(value).__name__}")
    return value


def _step(value: JSON) -> int:
    step = int(value)
    if abs(step) >= 1 << 63:
        raise ValueError("a step must be an integer of 64 bits")
    return step


def _number(value: JSON) -> float | None:
    """Return a number or None; NaN and the infinities are written as text."""
    return None if value is None else float(value)


def message_to_json(message: Message) -> dict[str, JSON]:
    """Convert a message to JSON; fields with their default are left out."""
    data: dict[str, JSON] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        data["tool_calls"] = list(message.tool_calls)
    if message.tool_call_id is not None:
        data["tool_call_id"] = message.tool_call_id
    if not message.is_complete:
        data["is_complete"] = False
    if message.reasoning:
        data["reasoning_content"] = message.reasoning
    if message.refusal:
        data["refusal"] = message.refusal
    return data


def message_from_json(data: Mapping[str, Any]) -> Message:
    """Read a message that `message_to_json` wrote.

    Raises:
        KeyError: If a field is missing.
        TypeError: If a field has another type.
    """
    content: JSON = data["content"]
    if not (content is None or isinstance(content, str | list)):
        raise TypeError(f"the content of a message must be a string or a list; got {content!r:.50}")
    return Message(
        _text(data["role"]),
        cast("Content", content),
        tuple(data.get("tool_calls", ())),
        data.get("tool_call_id"),
        data.get("is_complete", True),
        reasoning=_text(data.get("reasoning_content", "")),
        refusal=_text(data.get("refusal", "")),
    )


def turns_to_json(turns: Sequence[Turn], *, is_exact: bool = False) -> dict[str, JSON]:
    """Convert turns to JSON: "messages", "turns" and "tool_calls".

    Args:
        turns: Turns of one trajectory.
        is_exact: Whether the parts and the `meta` of results are kept too, for programs that continue the
            trajectory; `meta` must then be JSON. Otherwise results keep their text.
    """
    pairs = (
        (turn.index, call, result)
        for turn in turns
        for call, result in zip(turn.outcome.calls, turn.outcome.results, strict=True)
    )
    return {
        "messages": [
            message_to_json(one) for turn in turns for one in (*turn.context, turn.message, *turn.messages)
        ],
        "turns": list(map(_turn_to_json, turns)),
        "tool_calls": [
            {**_call_to_json(*pair), **(_exact_to_json(*pair[1:]) if is_exact else {})} for pair in pairs
        ],
    }


def turns_from_json(data: Mapping[str, Any], *, trajectory: str, row: int = 0) -> Iterator[Turn]:
    """Yield the turns that `turns_to_json` wrote.

    Args:
        data: The object with "messages", "turns" and "tool_calls".
        trajectory: Name of the trajectory.
        row: Place of the trajectory in its batch.

    Raises:
        KeyError: If a field is missing.
        TypeError: If a field has another type.
        ValueError: If the turns count more messages or calls than there are.
    """
    messages = iter([message_from_json(message) for message in data["messages"]])
    calls = iter(data["tool_calls"])
    for fields in data["turns"]:
        context = _taken(messages, fields["n_context"])
        (message,) = _taken(messages, 1)
        added = _taken(messages, fields["n_messages"])
        outcome = _outcome(fields["text"], _taken(calls, fields["n_calls"]))
        notes = tuple(fields["notes"])
        yield Turn(trajectory, int(fields["turn"]), message, outcome, added, context, notes, row)


def _turn_to_json(turn: Turn) -> dict[str, JSON]:
    """Convert the fields of a turn that are neither messages nor calls."""
    return {
        "turn": turn.index,
        "n_context": len(turn.context),
        "n_messages": len(turn.messages),
        "n_calls": len(turn.outcome.calls),
        "text": turn.outcome.cleaned_text,
        "notes": list(turn.notes),
    }


def _taken(items: Iterator[Any], count: int) -> tuple[Any, ...]:
    """Return the next `count` items; raise ValueError if there are fewer."""
    taken = tuple(itertools.islice(items, count))
    if len(taken) != count:
        raise ValueError("the turns count more messages or calls than the record has")
    return taken


def _call_to_json(turn: int, call: ParsedCall, result: ToolResult) -> dict[str, JSON]:
    timing, text = result.timing, result.text
    data: dict[str, JSON] = {
        "turn": turn,
        "id": call.call_id,
        "name": call.tool,
        "arguments": call.args,
        "status": str(result.status),  # pydantic_core takes ten times as long to encode an enum
        "result": text,
        "bytes": len(text) if text.isascii() else len(text.encode("utf-8", "replace")),
        "start": None if timing is None else timing.start,
        "queue_s": None if timing is None else timing.queue_s,
        "run_s": None if timing is None else timing.run_s,
        "reward": result.reward,
    }
    if result.metrics is not None:
        data["metrics"] = result.metrics
    if result.stop:
        data["stop"] = True
    if result.notes:
        data["notes"] = result.notes
    if call.error is not None:
        data["error"] = {"code": call.error.code, "message": call.error.message}
    if call.tag is not None:
        data["tag"] = call.tag
    if call.notes:
        data["call_notes"] = call.notes
    if call.span is not None:
        data["span"] = call.span
    return data


def _exact_to_json(call: ParsedCall, result: ToolResult) -> dict[str, JSON]:
    """Return the fields of a call and its result that records leave out."""
    data: dict[str, JSON] = {}
    if result.parts != (TextPart(result.text),):
        data["parts"] = list(map(_part_to_json, result.parts))
    if result.meta is not None:
        data["meta"] = result.meta
    if call.index:
        data["index"] = call.index
    if call.token_span is not None:
        data["token_span"] = call.token_span
    return data


def _part_to_json(part: ToolResultPart) -> dict[str, JSON]:
    fields = {one.name: getattr(part, one.name) for one in dataclasses.fields(part)}
    if isinstance(part, ImagePart | VideoPart):
        fields["data"] = base64.b64encode(part.data).decode()
    return fields


_PARTS = {"text": TextPart, "json": JsonPart, "image": ImagePart, "video": VideoPart, "file_ref": FileRefPart}


def _part_from_json(data: Mapping[str, Any]) -> ToolResultPart:
    fields, kind = dict(data), data["kind"]
    if kind not in _PARTS:
        raise ValueError(f"the kind of a part is one of {', '.join(_PARTS)}; got {kind!r}")
    if kind in {"image", "video"}:
        fields["data"] = base64.b64decode(fields["data"])
    return _PARTS[kind](**fields)


def _outcome(text: str, calls: Iterable[Mapping[str, Any]]) -> DispatchResult:
    pairs = [_call_from_json(number, call) for number, call in enumerate(calls)]
    return DispatchResult(text, tuple(call for call, _ in pairs), tuple(result for _, result in pairs))


def _call_from_json(index: int, data: Mapping[str, Any]) -> tuple[ParsedCall, ToolResult]:
    error, span, start = data.get("error"), data.get("span"), data["start"]
    tokens, parts = data.get("token_span"), data.get("parts")
    call = ParsedCall(
        _text(data["name"]),
        _object(data["arguments"]),
        _text(data["id"]),
        data.get("tag"),
        None if error is None else CallError(error["code"], error["message"]),
        index=data.get("index", index),
        span=None if span is None else (span[0], span[1]),
        token_span=None if tokens is None else (tokens[0], tokens[1]),
        notes=tuple(data.get("call_notes", ())),
    )
    result = ToolResult(
        (TextPart(_text(data["result"])),) if parts is None else tuple(map(_part_from_json, parts)),
        meta=data.get("meta"),
        status=Status(data["status"]),
        stop=data.get("stop", False),
        reward=_number(data["reward"]),
        metrics=data.get("metrics"),
        timing=None if start is None else Timing(float(start), float(data["queue_s"]), float(data["run_s"])),
        notes=tuple(data.get("notes", ())),
    )
    return call, result


def _tokens_to_json(tokens: TokenRecord) -> dict[str, JSON]:
    """Convert ids, spans as [source, length], and the log-probabilities of sampled tokens, if known."""
    ledger = tokens.ledger
    log_probs = [
        None if math.isnan(value) else round(value, 6)
        for value, source in zip(ledger.log_probs, ledger.sources, strict=True)
        if source == SAMPLED
    ]
    return {
        "ids": ledger.ids,
        "spans": [[span.source, span.stop - span.start] for span in ledger.spans()],
        "texts": tokens.texts,
        "log_probs": log_probs if any(value is not None for value in log_probs) else None,
    }


def _tokens_from_json(data: Mapping[str, Any]) -> TokenRecord:
    ledger, ids = TokenLedger(), list(data["ids"])
    log_probs = data["log_probs"]
    start = known = 0
    for source, count in data["spans"]:
        some = ids[start : start + count]
        if source == SAMPLED:
            likely: Iterable[float] | None = None
            if log_probs is not None:
                likely = [math.nan if p is None else p for p in log_probs[known : known + count]]
            ledger.add_sampled(some, likely)
            known += count
        else:
            ledger.add_injected(some, [source] * count)
        start += count
    if len(ledger) != len(ids):
        raise ValueError(f"the spans cover {len(ledger)} of {len(ids)} token ids")
    return TokenRecord(ledger, tuple(data["texts"]))


_FOREIGN_IDS = ("request_id", "uid", "index")


def _from_input_output(data: Fields) -> TrajectoryRecord:
    """Read a line that has only texts, as verl's trainer writes it.

    Turns, calls and results are read from the texts if these contain roles.
    """
    if "output" not in data:
        raise ValueError('a record needs a "schema_version", or at least an "output"')
    prompt, output = str(data.get("input", "")), str(data["output"])
    known = {"input", "output", "gts", "score", "step", "schema_version"}
    name = next((str(data[key]) for key in _FOREIGN_IDS if data.get(key) is not None), "")
    turns = turns_of_text(name, prompt, output)
    if turns is None:
        context = (Message("input", prompt),) if prompt else ()
        turns = (Turn(name, 0, Message("output", output), DispatchResult(output), (), context),)
    score, step = data.get("score"), data.get("step")
    return TrajectoryRecord(
        name,
        turns,
        step=_step(step) if isinstance(step, int) else 0,
        trajectory=name,
        score=_number(score) if isinstance(score, int | float | str) else None,
        gts=data.get("gts"),
        extras={key: value for key, value in data.items() if key not in known},
    )
