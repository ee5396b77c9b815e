"""Convert trajectories to JSON objects and back. Lines of verl's dumps can be read too."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from torchrl_agentic.codec import adapter, from_json, json_schema_of, list_to_json, to_json
from torchrl_agentic.messages import JSON, DispatchResult, Fields, Message, TextPart, Turn, fields_of
from torchrl_agentic.records.record import Summary, TrajectoryRecord, group_of, plain_text
from torchrl_agentic.records.text_dump import turns_of_text

SCHEMA_VERSION = 3

HEAD = (
    "schema_version", "request_id", "run", "step", "score", "termination_reason", "trajectory", "row",
    "started", "group", "n_turns", "statuses", "tools", "redactions", "origin",
)  # fmt: skip
"""Fields at the beginning of a line, so that a list of trajectories can be shown without reading the rest."""
BODY = ("gts", "input", "output", "rewards", "tokens", "versions", "turns")
RESERVED = frozenset((*HEAD, *BODY))
"""Names that extras cannot have."""
_DIGITS = 6  # of log-probabilities in dumps


def record_to_json(record: TrajectoryRecord) -> dict[str, JSON]:
    """Convert a trajectory to JSON.

    Messages are kept whole, with the images and videos that the model was shown. Results keep their text, in
    which images, videos and files appear by name; their `meta` is left out, because it may hold anything.

    Args:
        record: The trajectory.

    Returns:
        The object of one line, as `json_schema` describes it.
    """
    return {**fields_to_json(record), "turns": list_to_json(Turn, [*map(_shown, record.turns)])}


def fields_to_json(record: TrajectoryRecord) -> dict[str, JSON]:
    """Convert a trajectory to JSON, without its turns."""
    statuses, tools = record.counts
    prompt, messages = plain_text(record.prompt), list(record.messages)
    tokens = record.tokens
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
        "redactions": record.redactions,
        "origin": {"question": record.question, **to_json(record.origin)},
        **record.extras,
        "gts": record.gts,
        "input": prompt,
        "output": plain_text(messages[len(record.prompt) :]),
        "rewards": list(record.rewards),
        "tokens": None
        if tokens is None
        else {"ledger": tokens.ledger.to_json(_DIGITS), "texts": tokens.texts},
        "versions": dict(record.versions),
    }


def message_to_json(message: Message) -> dict[str, JSON]:
    """Convert a message to JSON; fields with their default are left out."""
    return to_json(message)


def turns_to_bytes(turns: Sequence[Turn]) -> bytes:
    """Return the JSON text of turns, as `record_to_json` has them; other values are written by their `str`.

    Raises:
        ValueError: If a text has lone surrogates, or a value contains itself or is nested too deeply.
    """
    return adapter(Turn).dump_json([*map(_shown, turns)], exclude_defaults=True, fallback=str, warnings=False)


def _shown(turn: Turn) -> Turn:
    """Return the turn with one text per result, without data for programs."""
    outcome = turn.outcome
    if all(
        one.meta is None and len(one.parts) == 1 and one.parts[0].kind == "text" for one in outcome.results
    ):
        return turn
    results = (replace(one, parts=(TextPart(one.text),), meta=None) for one in outcome.results)
    return replace(turn, outcome=replace(outcome, results=tuple(results)))


def record_from_json(data: JSON) -> TrajectoryRecord:
    """Read an object that `record_to_json` wrote, or a line of a dump that has only input and output.

    Args:
        data: The parsed JSON of one line.

    Returns:
        The trajectory.

    Raises:
        ValueError: If another version wrote it, it is neither of the two, or a field is missing or has
            another type.
    """
    fields = _fields(data)
    if "schema_version" not in fields:
        return _from_input_output(fields)
    record = from_json(TrajectoryRecord, {**fields, "extras": _extras(fields)})
    for turn in record.turns:
        calls, results = turn.outcome.calls, turn.outcome.results
        if len(calls) != len(results):
            raise ValueError(f"turn {turn.index} has {len(calls)} calls and {len(results)} results")
    _check_step(record.step)
    return record


def summary_from_json(data: JSON) -> Summary | None:
    """Read the fields that lists of trajectories show from the beginning of a line.

    Args:
        data: The object of a line, of which the end may be missing.

    Returns:
        The summary, or None if the beginning is not one that `record_to_json` writes or is too short.

    Raises:
        ValueError: If another version wrote it, or a field has another type.
    """
    fields = _fields(data)
    if "gts" not in fields or any(name not in fields for name in HEAD):
        return None
    question = (fields_of(fields["origin"]) or {}).get("question", "")
    own = {"extras": _extras(fields), "question": question, "advantage": None}
    found = from_json(Summary, {**fields, **own})
    _check_step(found.step)
    return found


def _fields(data: JSON) -> Fields:
    """Return the fields of a line; raise ValueError if another version wrote it."""
    fields = fields_of(data)
    if fields is None:
        raise ValueError(f"a record must be a JSON object; got {type(data).__name__}")
    if (version := fields.get("schema_version", SCHEMA_VERSION)) != SCHEMA_VERSION:
        raise ValueError(f"the record has version {version}; this package reads version {SCHEMA_VERSION}")
    return fields


def _extras(fields: Fields) -> dict[str, JSON]:
    """Return the fields of other names."""
    return {name: value for name, value in fields.items() if name not in RESERVED}


def _check_step(step: int) -> None:
    if abs(step) >= 1 << 63:
        raise ValueError("a step must be an integer of 64 bits")


@functools.cache
def json_schema() -> Fields:
    """Return the JSON Schema (draft 2020-12) of a line that a `Recorder` writes.

    The file "trajectory.schema.json" of this package holds it too.
    """
    made, head = json_schema_of(TrajectoryRecord), json_schema_of(Summary)
    definitions: dict[str, JSON] = {**made["$defs"], **head["$defs"]}
    line, summary = definitions.pop("TrajectoryRecord"), definitions.pop("Summary")
    known = {**line["properties"], **summary["properties"]}
    known |= {
        "schema_version": {"const": SCHEMA_VERSION},
        "n_turns": {"type": "integer", "minimum": 1},
        "input": {"type": "string", "description": "The prompt as text."},
        "output": {"type": "string", "description": "The messages behind the prompt, as text."},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Trajectory",
        "description": "One line of a dump: one trajectory. Fields of other names are extras.",
        "type": "object",
        "required": [*HEAD, *BODY],
        "properties": {name: known[name] for name in (*HEAD, *BODY)},
        "$defs": definitions,
    }


_FOREIGN_IDS = ("request_id", "uid", "index")


def _from_input_output(data: Fields) -> TrajectoryRecord:
    """Read a line that has only texts, as verl's trainer writes it.

    Turns, calls and results are read from the texts if these contain roles.
    """
    if "output" not in data:
        raise ValueError('a record needs a "schema_version", or at least an "output"')
    prompt, output = str(data.get("input", "")), str(data["output"])
    known = {"input", "output", "gts", "score", "step"}
    name = next((str(data[key]) for key in _FOREIGN_IDS if data.get(key) is not None), "")
    turns = turns_of_text(name, prompt, output)
    if turns is None:
        context = (Message("input", prompt),) if prompt else ()
        turns = (Turn(name, 0, Message("output", output), DispatchResult(output), (), context),)
    score, step = data.get("score"), data.get("step")
    found = TrajectoryRecord(
        name,
        turns,
        step=step if isinstance(step, int) else 0,
        trajectory=name,
        score=float(score) if isinstance(score, int | float | str) else None,
        gts=data.get("gts"),
        extras={key: value for key, value in data.items() if key not in known},
    )
    _check_step(found.step)
    return found
