"""Reading what strangers send costs time in proportion to its length."""

from __future__ import annotations

import contextlib
import gc
import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from helpers.record_strategies import record, turn

from torchrl_agentic.engines.completion import Completion
from torchrl_agentic.messages import ParsedCall, ToolResult
from torchrl_agentic.parsers import PARSERS, get_parser
from torchrl_agentic.records import Secrets, read_line
from torchrl_agentic.records.json_dump import json_line
from torchrl_agentic.sandbox.inside.wire import BadMessage, Splitter, pack
from torchrl_agentic.text import printable, read_json
from torchrl_agentic.tools.mcp.server_config import count_json_values
from torchrl_agentic.tools.schema import secret_args

NOISE_S = 0.002
"""Processor time below which nothing is concluded."""
MOST = 3.0
"""Largest ratio of the costs of an input and of one twice as long: 2 if linear, 4 if quadratic."""

Run = Callable[[], Any]


def split(data: bytes, piece: int = 1 << 16) -> Run:
    """Split a stream of an interpreter's messages."""

    def run() -> None:
        splitter = Splitter(1 << 26)
        with contextlib.suppress(BadMessage):
            for start in range(0, len(data), piece):
                splitter.feed(data[start : start + piece])

    return run


def redact(n: int, *, declared: bool = False) -> Run:
    """Write a record whose call has many texts that are named like secrets, with a long result."""
    texts = [*(f"aaaaaaa{number:05d}" for number in range(n)), "aaaaaab00000"]
    said = f"<tool_call>{json.dumps({'token': texts})}</tool_call>"
    made = turn(said, args={"token": texts}, result=ToolResult.from_text("a" * 300 * n))
    (call,) = made.outcome.calls
    outcome = replace(made.outcome, calls=(replace(call, span=(0, len(said))),))
    made = record(replace(made, outcome=outcome, secret_args={"f": ("token",)} if declared else {}))
    return lambda: json_line(made, Secrets(), frozenset())


def many_secret_calls(n: int) -> Run:
    """Write a record with many calls in one message, of which each has a secret and says to be all of it."""
    made = turn("a" * 20 * n, result=ToolResult.from_text(""))
    calls = tuple(ParsedCall("f", {"token": "aaaaaaab"}, f"c{i}", span=(0, 20 * n)) for i in range(n))
    outcome = replace(made.outcome, calls=calls, results=made.outcome.results * n)
    made = record(replace(made, outcome=outcome))
    return lambda: json_line(made, Secrets(), frozenset())


def stream(n: int, piece: Callable[[int], Any]) -> Run:
    """Put an answer together from the events of a stream."""

    def run() -> None:
        completion = Completion()
        for number in range(n):
            delta = {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}, **piece(number)}]}
            completion.add({"choices": [{"delta": delta}]}, is_whole=False)
        completion.message([])

    return run


def dump(text: str) -> Run:
    """Read a line of a dump that has only texts."""
    line = json.dumps({"output": text}).encode()
    return lambda: read_line(line)


def refused(read: Callable[[], Any]) -> Run:
    """Read what may be refused."""

    def run() -> None:
        with contextlib.suppress(ValueError):
            read()

    return run


def parse(name: str, n: int) -> Run:
    """Parse a message of openings of calls that are never closed."""
    parser = get_parser(name)
    try:
        call = str(parser.render_calls([ParsedCall("f", {"a": "hello"}, "c1")]))
    except ValueError:  # a format for one tool
        call = "```python\nhello\n```"
    text = call[: len(call) * 2 // 3] * n
    return lambda: parser.parse(text, tools={"f": {"properties": {"a": {"type": "string"}}}})


def alternatives(n: int) -> dict[str, Any]:
    """Return a schema with a definition that refers to itself, and that all arguments refer to."""
    everyone = {"anyOf": [{"$ref": "#/$defs/all"}] * n}
    properties = {str(number): {"$ref": "#/$defs/all"} for number in range(n)}
    return {"properties": properties, "$defs": {"all": everyone}}


CALLED = '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n'
READERS: dict[str, tuple[int, Callable[[int], Run]]] = {
    "fields of an answer": (100_000, lambda n: split(pack(*[b""] * n))),
    "pieces of an answer": (4_000, lambda n: split(pack(b"x" * 1_000 * n), 1_000)),
    "answers": (20_000, lambda n: split(pack(b"{}") * n)),
    "secret names": (500, redact),
    "declared secrets": (500, lambda n: redact(n, declared=True)),
    "calls with secrets": (300, many_secret_calls),
    "streamed calls": (2_000, lambda n: stream(n, lambda i: {"index": i, "id": f"c{i}"})),
    "streamed calls without index": (2_000, lambda n: stream(n, lambda i: {"id": f"c{i}"})),
    "streamed names": (
        1_000,
        lambda n: stream(n, lambda i: {"index": 0, "function": {"name": f"{i:05}" * 1_000}}),
    ),
    "roles of a dump": (10_000, lambda n: dump("assistant\nhello\n" + "user\n" * n)),
    "roles of a dump with an answer": (
        10_000,
        lambda n: dump("assistant\n" + "tool\nx\n" * n + "assistant\n"),
    ),
    "results of a dump": (
        2_000,
        lambda n: dump(f"assistant\n{CALLED * 10}user\n{'<tool_response>' * n}\nassistant\nx"),
    ),
    "marks": (50_000, lambda n: lambda: printable("\u0301" * n)),
    "open lists": (200_000, lambda n: refused(lambda: read_json("[" * n))),
    "lists": (50_000, lambda n: refused(lambda: read_json("[" + "[]," * n + "0]"))),
    "quotes": (1_000_000, lambda n: lambda: count_json_values(b'"' * n, 0)),
    "backslashes": (1_000_000, lambda n: lambda: count_json_values(b'[,"' + b"\\" * n, 0)),
    "definitions": (200, lambda n: lambda: secret_args(alternatives(n))),
    **{f"parser {name}": (300, lambda n, name=name: parse(name, n)) for name in PARSERS},
}


def cost(run: Run) -> float:
    """Return the processor time of the quicker one of two runs; the garbage collector would add noise."""
    took: list[float] = []
    gc.disable()
    try:
        for _ in range(2):
            before = time.process_time()
            run()
            took.append(time.process_time() - before)
    finally:
        gc.enable()
    return min(took)


@pytest.mark.parametrize("reader", READERS)
def test_twice_the_input_takes_twice_the_time(reader: str):
    n, make = READERS[reader]
    ratios: list[float] = []
    while len(ratios) < 4:  # a ratio may be wrong by chance, and is that of the kind never four times
        once, twice = cost(make(n)), cost(make(2 * n))
        ratios.append(twice / max(once, NOISE_S))
        if ratios[-1] < MOST:
            return
    pytest.fail(f"twice the input takes {', '.join(f'{ratio:.1f}' for ratio in ratios)} times as long")
