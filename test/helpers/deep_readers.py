"""Feed deeply nested input to every reader of untrusted text, in a process that a stack overflow may end."""

import contextlib
import json
import resource
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from helpers.record_strategies import record, turn

from torchrl_agentic.cli.rollout_file import RolloutConfig, load_config, load_conversations
from torchrl_agentic.config import ConfigError, load_interactions, load_tools
from torchrl_agentic.messages import JsonPart, ParsedCall, ToolResult
from torchrl_agentic.parsers import PARSERS, get_parser
from torchrl_agentic.records import BadLine, Secrets, read_line
from torchrl_agentic.records.json_dump import json_line
from torchrl_agentic.serve.search_app import read_documents
from torchrl_agentic.text import MAX_DEPTH, count_values, read_json
from torchrl_agentic.tools import Cassette
from torchrl_agentic.tools.mcp.servers_file import mcp_servers
from torchrl_agentic.tools.schema import SchemaValidationError, Validator, validate_args
from torchrl_agentic.tools.schema_simplify import simplify_schema

FOLDER = Path(tempfile.mkdtemp())
STACK_BYTES = 1 << 20
DEEPEST = 40_000
"""Levels of nesting that overflow such a stack if each takes 27 bytes of it; each level costs time, too."""
OPENERS = {"[": "[", "{": '{"a":', "n": '{"not":', "p": '{"properties":{"a":', "-": "- ", "?": "? "}
CLOSERS = {"[": "]", "{": "}", "n": "}", "p": "}}", "-": "", "?": ""}
RECURSIVE = {
    "properties": {"a": {"$ref": "#/$defs/N"}},
    "$defs": {"N": {"items": {"$ref": "#/$defs/N"}, "additionalProperties": {"$ref": "#/$defs/N"}}},
}


def nested(depth: int, brackets: str, *, is_closed: bool) -> str:
    """Return a text of nested lists and mappings."""
    kinds = (brackets * (depth // len(brackets) + 1))[:depth]
    closing = "".join(CLOSERS[kind] for kind in reversed(kinds)) if is_closed else ""
    return "".join(OPENERS[kind] for kind in kinds) + "1" + closing


def value_of(depth: int, brackets: str) -> Any:
    """Return the value of such a text."""
    value: Any = 1
    for index in reversed(range(depth)):
        kind = brackets[index % len(brackets)]
        value = [value] if kind == "[" else {"not": value} if kind == "n" else {"a": value}
    return value


def written(name: str, text: str) -> Path:
    """Write a file and return its path."""
    path = FOLDER / name
    path.write_text(text)
    return path


def call(parser: Any, text: str) -> str:
    """Return a call of a format with a text in the place of its argument."""
    try:
        said = parser.render_calls([ParsedCall("f", {"a": "MARK"}, "c1")])
    except ValueError:  # a format for one tool
        said = "```python\nMARK\n```<python>MARK</python>"
    quoted = json.dumps(text)[1:-1]
    for mark, put in ((r"\"MARK\"", quoted), ('"MARK"', text), ("'MARK'", text), ("MARK", text)):
        said = said.replace(mark, put)
    return said


def parse(name: str) -> Callable[[str], Any]:
    """Return a function that reads with a parser; parsers never raise."""
    parser = get_parser(name)

    def read(text: str) -> None:
        for said in (text, call(parser, text), f"{text}{call(parser, text)}"):
            calls = parser.parse(said, tools={"f": {"properties": {"a": {}}}}).calls
            for found in calls:
                count_values(dict(found.args), max_depth=MAX_DEPTH + 1)

    return read


def dump(text: str) -> None:
    """Read lines of dumps, of both kinds."""
    for raw in (text, f'{{"request_id":"r","messages":{text}}}', f'{{"schema_version":3,"turns":{text}}}'):
        read_line(raw.encode())


def cassette(text: str) -> None:
    """Read a cassette, which skips lines that it cannot read."""
    len(Cassette(written("c.jsonl", f'{text}\n{{"schema_version":2,"args":{text},"result":{text}}}\n')))


def yaml(load: Callable[[Path], Any]) -> Callable[[str], Any]:
    """Return a function that reads YAML, both alone and in places where something else is expected."""

    def read(text: str) -> None:
        refusals = 0
        for whole in (text, f"tools:\n  {text}", f"tools: [{{stop: {text}}}]", f"interaction: {text}"):
            try:
                load(written("t.yaml", whole))
            except (ConfigError, ValueError) as error:
                if isinstance(error, RecursionError):
                    raise
                refusals += 1
        if refusals == 4:
            raise ConfigError("refused")

    return read


def aliases(depth: int) -> str:
    """Return YAML that is flat itself but has a nested value."""
    steps = [f"  - &a{n} [*a{n - 1}]" for n in range(1, depth)]
    return "\n".join(["stop:", "  - &a0 [1]", *steps])


TEXTS: dict[str, tuple[Callable[[str], Any], tuple[type[Exception], ...]]] = {
    "read_json": (read_json, (ValueError,)),
    "tools": (yaml(load_tools), (ConfigError,)),
    "config": (yaml(load_config), (ConfigError,)),
    "interactions": (yaml(load_interactions), (ValueError,)),
    "conversations": (
        lambda text: [
            load_conversations(RolloutConfig(conversations=[written(name, text).name]), FOLDER)
            for name in ("c.json", "d.jsonl")
        ],
        (ConfigError,),
    ),
    "documents": (
        lambda text: read_documents(written("e.jsonl", f'{{"text":"t","id":{text}}}')),
        (ValueError,),
    ),
    "mcp_servers": (lambda text: mcp_servers(written("mcp.json", text)), (ValueError,)),
    "dump": (dump, ()),
    "cassette": (cassette, ()),
    **{f"parser {name}": (parse(name), ()) for name in PARSERS},
}
VALUES: dict[str, tuple[Callable[[Any], Any], tuple[type[Exception], ...]]] = {
    "simplify_schema": (lambda value: simplify_schema({"items": value}), (ValueError,)),
    "default": (lambda value: Validator({"properties": {"a": {"default": value}}}), (ValueError,)),
    "enum": (lambda value: Validator({"properties": {"a": {"enum": [value]}}}), (ValueError,)),
    "schema": (lambda value: Validator({"items": value}), (ValueError,)),
    "validate_args": (lambda value: validate_args({"a": 1}, {"items": value}), (ValueError,)),
    "arguments": (lambda value: Validator(RECURSIVE).check({"a": value}), (SchemaValidationError,)),
    "wrong arguments": (
        lambda value: Validator({"properties": {"a": {"type": "string"}}}).check({"a": value}),
        (SchemaValidationError,),
    ),
    "result": (lambda value: ToolResult.from_value({"a": value}).text, (TypeError,)),
    "part": (lambda value: JsonPart(value).__str__(), ()),
    "openai": (lambda value: get_parser("openai").parse({"content": value, "tool_calls": [value]}), ()),
    "anthropic": (
        lambda value: get_parser("anthropic").parse(
            {"content": [{"type": "tool_use", "name": "f", "input": {"a": value}}, value]}
        ),
        (),
    ),
    "record": (
        lambda value: isinstance(
            read_line(json_line(record(turn("a"), extras={"a": value}), Secrets(()), frozenset())), BadLine
        ),
        (),
    ),
}


def outcome(reader: str, depth: int, brackets: str, *, is_closed: bool) -> str:
    """Read, and return "value" or "refused"."""
    if reader == "aliases":
        read, refusals = load_tools, (ConfigError,)
        given: Any = written("a.yaml", aliases(depth))
    elif reader in TEXTS:
        read, refusals = TEXTS[reader]
        given = nested(depth, brackets, is_closed=is_closed)
    else:
        read, refusals = VALUES[reader]
        given = value_of(depth, brackets)
    try:
        read(given)
    except refusals as error:
        if isinstance(error, RecursionError):
            raise
        return "refused"
    return "value"


READERS = (*TEXTS, *VALUES, "aliases")


def answer(pipe: Connection) -> None:
    """Receive (reader, depth, brackets, is_closed) from a pipe until it is closed.

    Send for each "value", "refused" if the reader raised an exception that it documents, or the name and
    message of any other exception.
    """
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, resource.getrlimit(resource.RLIMIT_STACK)[1]))
    with contextlib.suppress(EOFError):
        while True:
            name, depth, brackets, is_closed = pipe.recv()
            try:
                pipe.send(outcome(name, depth, brackets, is_closed=is_closed))
            except BaseException as error:
                pipe.send(f"{type(error).__name__}: {error}"[:300])
