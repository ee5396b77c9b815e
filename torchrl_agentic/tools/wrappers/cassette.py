"""`Recorded` writes the calls of a tool to a `Cassette`, a file of JSON lines; `Replayed` answers from it."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import difflib
import json
import logging
import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeAlias, cast

from torchrl_agentic.codec import from_json, to_json
from torchrl_agentic.errors import InfrastructureError, StopSignal, ToolError
from torchrl_agentic.messages import JSON, JsonPart, Status, TextPart, ToolResult, ToolResultPart
from torchrl_agentic.text import MAX_LINE_DEPTH, canonical_json, count_values, read_json, truncate_middle
from torchrl_agentic.tools.base import Tool, ToolContext, effects_of
from torchrl_agentic.tools.private_files import PRIVATE, check_mode, make_folders, open_file
from torchrl_agentic.tools.row_data import local_name
from torchrl_agentic.tools.tool_adapter import ensure_tool
from torchrl_agentic.tools.wrappers.base import CallLater, Wrapped, pause

logger = logging.getLogger(__name__)

_MOST_LOGGED = 5  # lines that cannot be read
SCHEMA_VERSION = 2
_ERRORS: Mapping[str, type[Exception]] = {
    "stop": StopSignal, "tool": ToolError, "infra": InfrastructureError, "timeout": TimeoutError
}  # fmt: skip
_SHOWN, _COMPARED = 200, 200
_FREE = ("meta", "metrics")
"""Fields of a result that hold any values of the tool."""
_OF_ANY_DEPTH = (*_FREE, "detail")
_LINE_LEVELS = 2
"""Number of mappings around these values in a line."""
_encode = json.JSONEncoder(separators=(",", ":"), default=str).encode

Arguments: TypeAlias = Mapping[str, JSON]
Outcome: TypeAlias = ToolResult | Exception


class CassetteMiss(InfrastructureError):
    """A call is not on the cassette; the message names the most similar one."""

    is_transient = False


@dataclass(frozen=True, slots=True)
class Entry:
    """One recorded call.

    Attributes:
        trajectory: Name of the trajectory within its environment, after the scope of the cassette.
        tool: Name of the tool.
        call_id: Id of the call.
        args: Arguments as `canonical_json` writes them; None if they are not JSON.
        seconds: Run time in seconds.
        data: The outcome, as `outcome_to_json` returns it.
    """

    trajectory: str
    tool: str
    call_id: str
    args: str | None
    seconds: float
    data: Mapping[str, JSON]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read an entry; raise ValueError, KeyError or TypeError if it is not an entry of our version."""
        if (version := data["schema_version"]) != SCHEMA_VERSION:
            raise ValueError(f"expected an entry of version {SCHEMA_VERSION}; got {version}")
        args = None if data["args"] is None else canonical_json(data["args"])
        outcome = {name: data[name] for name in ("result", "error") if name in data}
        outcome_from_json(outcome)  # raises while the file is read, instead of at the replay
        where = data["trajectory"], data["tool"], data["id"]
        if not all(isinstance(one, str) for one in (*where, *_texts(outcome))):
            raise TypeError("trajectory, tool, id, and the type and text of an error are texts")
        seconds = data["seconds"]
        if not (isinstance(seconds, int | float) and 0 <= seconds < math.inf) or isinstance(seconds, bool):
            raise ValueError(f"seconds is a number of 0 or more; got {seconds!r:.80}")
        return cls(*where, args, seconds, outcome)

    @property
    def outcome(self) -> Outcome:
        """The result, or the error that the tool raised."""
        return outcome_from_json(copy.deepcopy(self.data))  # trajectories share the entry

    def line(self) -> bytes:
        """Return the line of the entry; `meta`, metrics and details that are not JSON are left out."""
        data: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "trajectory": self.trajectory,
            "tool": self.tool,
            "id": self.call_id,
            "seconds": self.seconds,
            **self.data,
        }
        outcome: dict[str, Any] = data.get("result", data.get("error", {}))
        try:
            for name in _OF_ANY_DEPTH:
                if name in outcome:
                    count_values(outcome[name], max_depth=MAX_LINE_DEPTH - _LINE_LEVELS)
            text = _encode(data)
        except (ValueError, TypeError, RecursionError):
            for name in _OF_ANY_DEPTH:
                outcome.pop(name, None)
            logger.warning("call %r: meta, metrics or detail is not JSON and is not recorded", self.call_id)
            text = _encode(data)
        return f'{text[:-1]},"args":{self.args or "null"}}}\n'.encode()

    def __str__(self) -> str:
        args = truncate_middle(self.args or "(not JSON)", _SHOWN)
        return f"{self.tool}({args}), id {self.call_id!r}, trajectory {self.trajectory!r}"


class Cassette:
    """A file of recorded calls, one JSON object per line: appended by `Recorded`, read by `Replayed`.

    Several tools, threads and processes may append to one file: each line is written in one piece. A crash
    loses at most one incomplete line, which readers skip. Existing lines are kept; delete the file to start
    over. The first read loads the whole file into memory. Trajectories are recorded under their name within
    their environment, so that another environment can replay them.

    Args:
        path: The file.
        scope: Distinguishes environments that share a file; a replay needs the same scope.
        mode: Permissions of the file if it is created, independent of the umask. Users who may read it may
            enter the folders that are created for it. An existing file keeps its permissions.

    Raises:
        TypeError: If `mode` is not an integer.
        ValueError: If `mode` is not the permissions of a file.
    """

    def __init__(self, path: str | Path, *, scope: str = "", mode: int = PRIVATE) -> None:
        check_mode("mode", mode)
        self.path, self.scope, self.mode = Path(path), scope, mode
        self._lock = threading.Lock()
        self._file: int | None = None
        self._entries: list[Entry] | None = None  # None: not read yet
        self._numbers: defaultdict[tuple[str, str, str | None], list[int]] = defaultdict(list)

    def append(
        self, trajectory: str, tool: str, call_id: str, args: Arguments, outcome: Outcome, seconds: float
    ) -> None:
        """Write a call and its outcome.

        Args:
            trajectory: Name of the trajectory.
            tool: Name of the tool.
            call_id: Id of the call.
            args: Arguments of the call.
            outcome: Its result, or the exception that it raised.
            seconds: Run time in seconds.
        """
        name, key = self._named(trajectory), canonical_json(args)
        line = Entry(name, tool, call_id, key, seconds, outcome_to_json(outcome)).line()
        with self._lock:
            if self._file is None:
                self._file = _open(self.path, self.mode)
            _write(self._file, line)
            if self._entries is not None:
                self._add(self._entries, Entry.from_json(json.loads(line)))

    def find(
        self, trajectory: str, tool: str, call_id: str, args: Arguments, used: Collection[int] = ()
    ) -> int | None:
        """Find an unused entry of a call with these arguments, if possible with this id, else the first one.

        Args:
            trajectory: Name of the trajectory.
            tool: Name of the tool.
            call_id: Id of the call.
            args: Arguments of the call.
            used: Numbers of the entries that were used.

        Returns:
            The number of the entry, or None.
        """
        entries = self._read()
        found = self._numbers.get((self._named(trajectory), tool, canonical_json(args)), ())
        numbers = [number for number in found if number not in used]
        own = (number for number in numbers if entries[number].call_id == call_id)
        return next(own, numbers[0] if numbers else None)

    def nearest(self, trajectory: str, tool: str, args: Arguments) -> Entry | None:
        """Return the entry that is most similar: by tool, then by trajectory, then by arguments.

        Args:
            trajectory: Name of the trajectory.
            tool: Name of the tool.
            args: Arguments of the call.

        Returns:
            The entry, or None if the cassette is empty.
        """
        name, text = self._named(trajectory), (canonical_json(args) or "")[:_COMPARED]

        def likeness(entry: Entry) -> tuple[bool, bool, float]:
            matcher = difflib.SequenceMatcher(None, text, (entry.args or "")[:_COMPARED])
            return entry.tool == tool, entry.trajectory == name, matcher.quick_ratio()

        return max(self._read(), key=likeness, default=None)

    def __getitem__(self, number: int) -> Entry:
        return self._read()[number]

    def __len__(self) -> int:
        return len(self._read())

    def close(self) -> None:
        """Close the file; the next `append` opens it again."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _named(self, trajectory: str) -> str:
        name = local_name(trajectory)
        return f"{self.scope}/{name}" if self.scope else name

    def _read(self) -> list[Entry]:
        """Return all entries; skip lines that cannot be read, and log the first ones."""
        with self._lock:
            if self._entries is not None:
                return self._entries
            lines = self.path.read_bytes().split(b"\n") if self.path.exists() else []
            entries = self._entries = []
            skipped = 0
            for number, line in enumerate(lines, 1):
                try:
                    if line.strip():
                        self._add(entries, Entry.from_json(read_json(line, max_depth=MAX_LINE_DEPTH)))
                except (ValueError, KeyError, TypeError, RecursionError) as error:
                    kind = type(error).__name__
                    if skipped < _MOST_LOGGED:
                        logger.warning("%s, line %s, skipped: %s: %s", self.path, number, kind, error)
                    skipped += 1
            if skipped > _MOST_LOGGED:
                logger.warning("%s: %s lines in all are skipped", self.path, skipped)
            return entries

    def _add(self, entries: list[Entry], entry: Entry) -> None:
        self._numbers[entry.trajectory, entry.tool, entry.args].append(len(entries))
        entries.append(entry)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return (partial(Cassette, self.path, scope=self.scope, mode=self.mode), ())

    def __repr__(self) -> str:
        return f"Cassette({os.fspath(self.path)!r}, scope={self.scope!r})"


class Recorded(Wrapped):
    """A tool whose calls are written to a cassette with their outcomes, results or errors.

    A call that the dispatcher stopped because its time was over is recorded with the TIMEOUT result. A call
    that was cancelled for another reason is not recorded.

    Args:
        tool: The tool.
        cassette: The cassette, which several tools may share, or the path of its file.
    """

    def __init__(self, tool: Any, cassette: Cassette | str | Path) -> None:
        super().__init__(tool)
        self.cassette = cassette if isinstance(cassette, Cassette) else Cassette(cassette)

    async def run(self, args: Arguments, ctx: ToolContext) -> ToolResult:
        """Run the tool, and write the call."""
        began, outcome = time.monotonic(), None
        try:
            outcome = ToolResult.from_value(await self.tool.run(args, ctx))
            return outcome
        except asyncio.CancelledError as stopped:
            reason = stopped.args[0] if stopped.args else None  # the dispatcher's result for a timed-out call
            if isinstance(reason, ToolResult) and reason.status is Status.TIMEOUT:
                outcome = replace(reason, timing=None, notes=())
            raise
        except Exception as error:
            outcome = error
            raise
        finally:
            if outcome is not None:
                seconds = time.monotonic() - began
                self.cassette.append(ctx.trajectory, self.name, ctx.call_id, args, outcome, seconds)

    async def teardown(self) -> None:
        """Tear down the tool, and close the file."""
        await self.tool.teardown()
        self.cassette.close()


class Replayed(Wrapped):
    """A tool whose answers come from a cassette that `Recorded` has written in the same place.

    A call is found by its trajectory, tool, arguments and id. If no id matches, calls with these arguments
    are answered in the order in which they were recorded. Each trajectory starts from the beginning.

    Args:
        tool: The tool. For a strict replay its spec is enough: a dict in the form for chat templates.
        cassette: The cassette, or the path of its file.
        strict: Fail a call that is not on the cassette, with INFRA. Otherwise run and record it; a tool that
            changes things then runs only in trajectories of which nothing was replayed, because the replayed
            calls changed nothing.
        latency: Whether a replayed call takes the recorded time, or a factor on that time.
        call_later: Clock that this time passes on, for tests; None: that of the event loop.

    Raises:
        FileNotFoundError: If `strict` is set and the file does not exist.
        TypeError: If `strict` is not set and the tool is only a spec.
        ValueError: If the latency is below 0 or NaN.
    """

    keeps_state = True

    def __init__(
        self,
        tool: Any,
        cassette: Cassette | str | Path,
        *,
        strict: bool = True,
        latency: bool | float = False,
        call_later: CallLater | None = None,
    ) -> None:
        self.cassette = cassette if isinstance(cassette, Cassette) else Cassette(cassette)
        if strict and not (path := self.cassette.path).exists():
            raise FileNotFoundError(f"no cassette at {path}: record one with Recorded(tool, path)")
        if isinstance(tool, Mapping) and not strict:
            raise TypeError("a spec cannot run: pass the tool itself, or strict=True")
        if not float(latency) >= 0:
            raise ValueError(f"expected latency as True, False, or a factor of 0 or more; got {latency}")
        super().__init__(_Described(cast("Any", tool)) if strict else Recorded(tool, self.cassette))
        self.strict, self.latency, self.call_later = strict, float(latency), call_later
        effects = effects_of(self)
        self._changes_things = effects.exclusive or bool(effects.writes)
        self.begin("", None)

    def begin(self, trajectory: str, source: Any) -> None:
        """Start from the beginning, in a branch too, because a branch is a new trajectory."""
        self._used: set[int] = set()
        self._replays, self._runs = (False, False) if source is None else (source._replays, source._runs)

    async def run(self, args: Arguments, ctx: ToolContext) -> Any:
        """Return or raise the recorded outcome; if there is none, run the tool or fail."""
        where = (ctx.trajectory, self.name, ctx.call_id, args)
        number = self.cassette.find(*where, self._used)
        if number is None or (self._changes_things and self._runs):
            if self.strict or (self._changes_things and self._replays):
                raise CassetteMiss(self._missed(args, ctx))
            self._runs = True
            try:
                return await self.tool.run(args, ctx)
            finally:  # the new entry must not answer a later call
                if (number := self.cassette.find(*where, self._used)) is not None:
                    self._used.add(number)
        self._used.add(number)
        self._replays = True
        entry = self.cassette[number]
        if self.latency:
            await pause(entry.seconds * self.latency, self.call_later)
        outcome = entry.outcome
        if isinstance(outcome, ToolResult):
            return outcome
        raise outcome

    def _missed(self, args: Arguments, ctx: ToolContext) -> str:
        near = self.cassette.nearest(ctx.trajectory, self.name, args)
        hint = "it is empty" if near is None else f"nearest: {near}"
        call = Entry(ctx.trajectory, self.name, ctx.call_id, canonical_json(args), 0.0, {})
        return f"not on the cassette {self.cassette.path}: {call}; {hint}. Record it, or pass strict=False"


class _Described(Tool):
    """A tool that has a description, but never runs."""

    def __init__(self, tool: Any) -> None:
        self._spec: dict[str, JSON] | None = None
        if isinstance(tool, Mapping):
            function = cast("Mapping[str, Any]", tool).get("function", tool)
            self.name, self.description = function["name"], function.get("description", "")
            self.input_schema = function.get("parameters", {"type": "object"})
            return
        known = ensure_tool(tool)
        self.name, self.description = known.name, known.description
        self.input_schema, self.output_schema = known.input_schema, known.output_schema
        self.effects, self._spec = effects_of(known), known.spec()

    async def run(self, args: Arguments, ctx: ToolContext) -> Any:
        """Raise CassetteMiss, because there is no tool to run."""
        raise CassetteMiss(f"{self.name!r} is replayed from a cassette and cannot run")

    def spec(self) -> dict[str, JSON]:
        """Return the spec of the tool."""
        return super().spec() if self._spec is None else self._spec


def outcome_to_json(outcome: Outcome) -> dict[str, JSON]:
    """Return an outcome as JSON, except for the values of `meta` and metrics, which may be anything."""
    if isinstance(outcome, ToolResult):
        made = to_json(replace(outcome, parts=tuple(map(_readable, outcome.parts))), exclude=set(_FREE))
        free = {name: dict(found) for name in _FREE if (found := getattr(outcome, name)) is not None}
        return {"result": {**made, **free}}
    kind = next((kind for kind, known in _ERRORS.items() if isinstance(outcome, known)), "crash")
    error: dict[str, JSON] = {"kind": kind, "type": type(outcome).__name__, "text": str(outcome)}
    if isinstance(outcome, ToolError):
        error.update(text=outcome.message, detail=outcome.detail)
    return {"error": error}


def outcome_from_json(data: Mapping[str, Any]) -> Outcome:
    """Return the outcome that `outcome_to_json` has converted; an exception has no traceback."""
    if "result" in data:
        return from_json(ToolResult, data["result"])
    error: Mapping[str, Any] = data["error"]
    crash = cast("type[Exception]", type(error["type"], (RuntimeError,), {}))  # the model has read this name
    detail = [error["detail"]] if "detail" in error else []
    return _ERRORS.get(error["kind"], crash)(error["text"], *detail)


def _texts(data: Mapping[str, Any]) -> list[Any]:
    """Return the values of an outcome that must be texts."""
    return [data["error"].get(name) for name in ("kind", "type", "text")] if "result" not in data else []


def _readable(part: ToolResultPart) -> ToolResultPart:
    """Return a part that reads back equal: JSON of other values, or too deep, becomes text."""
    if not isinstance(part, JsonPart):
        return part
    text = str(part)
    with contextlib.suppress(ValueError):
        if str(found := JsonPart(read_json(text))) == text:
            return found
    return TextPart(text)


def _open(path: Path, mode: int) -> int:
    """Open a file to append to, after a newline if a crash has left its last line incomplete."""
    make_folders(path.parent, mode)
    file = open_file(path, os.O_RDWR | os.O_APPEND, mode)
    size = os.fstat(file).st_size
    if size and os.pread(file, 1, size - 1) != b"\n":
        _write(file, b"\n")
    return file


def _write(file: int, data: bytes) -> None:
    written = os.write(file, data)
    while written < len(data):
        written += os.write(file, data[written:])
