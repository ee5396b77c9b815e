"""Turns as JSON lines: one line per turn, versioned, readable while the file grows."""

from __future__ import annotations

import io
import json
import os
import threading
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from torchrl_agentic.messages import (
    JSON,
    CallError,
    DispatchResult,
    Message,
    ParsedCall,
    Status,
    TextPart,
    Timing,
    ToolResult,
    Turn,
)

SCHEMA_VERSION = 1


def turn_to_json(turn: Turn) -> dict[str, JSON]:
    """Write a turn as plain data.

    Of results the text is kept; images, videos and files appear in it by name. Their `meta` is left out: it
    may hold anything. Messages are kept whole, with the images and videos that the model was shown.
    """
    outcome = turn.outcome
    return {
        "schema_version": SCHEMA_VERSION,
        "trajectory": turn.trajectory,
        "turn": turn.index,
        "row": turn.row,
        "context": [_message_to_json(message) for message in turn.context],
        "message": _message_to_json(turn.message),
        "text": outcome.cleaned_text,
        "calls": [
            _call_to_json(call, result) for call, result in zip(outcome.calls, outcome.results, strict=True)
        ],
        "messages": [_message_to_json(message) for message in turn.messages],
        "notes": list(turn.notes),
    }


def turn_from_json(data: Mapping[str, Any]) -> Turn:
    """Read back what `turn_to_json` wrote.

    Raises:
        ValueError: it was written by a later version.
    """
    if data["schema_version"] > SCHEMA_VERSION:
        raise ValueError(
            f"a record of version {data['schema_version']}; this package reads up to {SCHEMA_VERSION}"
        )
    pairs = [_call_from_json(index, call) for index, call in enumerate(data["calls"])]
    outcome = DispatchResult(
        data["text"], tuple(call for call, _ in pairs), tuple(result for _, result in pairs)
    )
    return Turn(
        data["trajectory"],
        data["turn"],
        _message_from_json(data["message"]),
        outcome,
        tuple(map(_message_from_json, data["messages"])),
        tuple(map(_message_from_json, data["context"])),
        tuple(data["notes"]),
        data["row"],
    )


def _message_to_json(message: Message) -> dict[str, JSON]:
    data: dict[str, JSON] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        data["tool_calls"] = list(message.tool_calls)
    if message.tool_call_id is not None:
        data["tool_call_id"] = message.tool_call_id
    if not message.is_complete:
        data["is_complete"] = False
    return data


def _message_from_json(data: Mapping[str, Any]) -> Message:
    return Message(
        data["role"],
        data["content"],
        tuple(data.get("tool_calls", ())),
        data.get("tool_call_id"),
        data.get("is_complete", True),
    )


def _call_to_json(call: ParsedCall, result: ToolResult) -> dict[str, JSON]:
    timing = result.timing or Timing(0.0, 0.0, 0.0)
    text = result.text
    return {
        "id": call.call_id,
        "tool": call.tool,
        "args": dict(call.args),
        "tag": call.tag,
        "error": None if call.error is None else {"code": call.error.code, "message": call.error.message},
        "status": result.status,
        "result": text,
        "stop": result.stop,
        "reward": result.reward,
        "start": timing.start,
        "queue_s": timing.queue_s,
        "run_s": timing.run_s,
        "bytes": len(text.encode("utf-8", "replace")),
        "metrics": None if result.metrics is None else dict(result.metrics),
        "notes": list(result.notes),
        "call_notes": list(call.notes),
        "span": call.span,
    }


def _call_from_json(index: int, data: Mapping[str, Any]) -> tuple[ParsedCall, ToolResult]:
    error = None if data["error"] is None else CallError(data["error"]["code"], data["error"]["message"])
    span = None if data["span"] is None else (data["span"][0], data["span"][1])
    notes = tuple(data["call_notes"])
    call = ParsedCall(
        data["tool"], data["args"], data["id"], data["tag"], error, index=index, span=span, notes=notes
    )
    result = ToolResult(
        (TextPart(data["result"]),),
        status=Status(data["status"]),
        stop=data["stop"],
        reward=data["reward"],
        metrics=data["metrics"],
        timing=Timing(data["start"], data["queue_s"], data["run_s"]),
        notes=tuple(data["notes"]),
    )
    return call, result


class Recorder:
    """Appends each turn to a file of JSON lines, which may be there already: `ToolCompose(recorder=…)`.

    A line is written in one piece, so that readers of a growing file meet only whole ones, save perhaps the
    last after a crash. Lone surrogates of model text are written as escapes. One recorder may serve several
    environments. Use it as a context manager, or close it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._file: TextIO | None = None

    def __call__(self, turn: Turn) -> None:
        """Record a turn."""
        line = _line(turn_to_json(turn))
        with self._lock:
            if self._file is None:
                self._file = self._open()
            self._file.write(line + "\n")
            self._file.flush()

    def _open(self) -> TextIO:
        """Open the file, behind a newline if a crash has left its last line without one."""
        file = self.path.open("ab+")
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        return io.TextIOWrapper(file, encoding="utf-8")

    def close(self) -> None:
        """Close the file; a turn that comes later opens it again."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return (Recorder, (os.fspath(self.path),))


def _line(data: dict[str, JSON]) -> str:
    try:
        line = json.dumps(data, ensure_ascii=False, default=str)
        line.encode()
    except UnicodeEncodeError:
        return json.dumps(data, default=str)
    except (ValueError, RecursionError):  # arguments that no JSON can hold; the rest of the turn is kept
        calls: list[JSON] = [
            {**call, "args": {}, "notes": [*call["notes"], "args left out"]} for call in data["calls"]
        ]
        return json.dumps({**data, "calls": calls}, default=str)
    return line


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line of a record file that cannot be read, and why."""

    number: int
    reason: str


def read_records(path: str | Path) -> Generator[Turn | BadLine]:
    """Read a file of records, turn by turn; a line that cannot be read is reported in its place."""
    with Path(path).open(encoding="utf-8", errors="surrogateescape") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield turn_from_json(json.loads(line))
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                yield BadLine(number, f"{type(error).__name__}: {error}")
