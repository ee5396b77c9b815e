"""Read what MCP servers send, over any transport: leniently, part by part, and never one message for another.

A response that cannot be read ends its request at once. Requests are found by the id in the response or, over
HTTP, by the response that it is in.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

from mcp.shared.message import SessionMessage
from mcp_types import (
    JSONRPCMessage,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
    jsonrpc_message_adapter,
)
from mcp_types.jsonrpc import INTERNAL_ERROR, PARSE_ERROR
from mcp_types.methods import validate_server_result
from pydantic import ValidationError

from torchrl_agentic.text import MAX_DEPTH, MAX_INT_BITS, TooDeepError, count_values
from torchrl_agentic.tools.mcp.server_config import TOO_MANY, has_too_many_values, split_at_quotes, too_large

Fields = dict[str, Any]
Number = int | str

NO_RESPONSE = object()
"""The `data` of errors that stand for a response which did not come or cannot be read."""
ENDS = 1024
"""Bytes at each end of a message that are searched for the id of its request."""
_MAX_DIGITS = int(MAX_INT_BITS * 0.3)
_MAX_OPEN = 10_000
_TICKET_S = 600.0
_MAX_PART_LINE = 1 << 20
_SHOWN = 200

_BLANK = " \t\r\n\0\ufeff"
_GAP = re.compile(r"[\s,\0\ufeff]*")
_MESSAGE = re.compile(r'\{\s*"(?:jsonrpc|id|result|error|method)"\s*:')  # behind a stray print
_ID = rb'"id"\s*:\s*(-?\d{1,18}|"(?:[^"\\]|\\.){1,200}")'
_FIRST_ID = re.compile(rb'\{\s*(?:"\w{1,40}"\s*:\s*(?:"[^"\\]{0,200}"|[-\w.]{1,40})\s*,\s*)*?' + _ID)
_LAST_ID = re.compile(_ID + rb'\s*(?:,\s*"jsonrpc"\s*:\s*"2\.0"\s*)?\}\s*$')
_IS_REQUEST = re.compile(rb'\{[^{\[]*"method"\s*:')
_IS_RESPONSE = re.compile(rb'"(?:jsonrpc|result|error)"\s*:')

_BLOCKS = {
    "text": ("text",),
    "image": ("data", "mimeType"),
    "audio": ("data", "mimeType"),
    "resource_link": ("uri",),
}
_FALSE = (None, False, 0, "", "false", "False")
_HINTS = ("readOnlyHint", "destructiveHint", "idempotentHint", "openWorldHint")


class TooLong(NamedTuple):
    """A line of more bytes than allowed: its first and last bytes, and their number, if known."""

    head: bytes
    tail: bytes
    size: int | None


class Lines:
    """Splits a stream into lines; of one that is too long it keeps both ends.

    Args:
        max_bytes: Most bytes of a line.
    """

    def __init__(self, max_bytes: int) -> None:
        self.skipped = 0
        self._max_bytes = max_bytes
        self._head = b""
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes | TooLong]:
        """Add data, and return the lines that it completes."""
        self._rest += data
        if b"\n" in data:
            *lines, self._rest = self._rest.split(b"\n")
            for line in lines:
                size, head = self.skipped + len(line), self._head
                self._head, self.skipped = b"", 0
                if size > self._max_bytes:
                    yield TooLong(head or bytes(line[:ENDS]), bytes(line[-ENDS:]), size)
                else:
                    yield bytes(line)
        if self.skipped + len(self._rest) > self._max_bytes and len(self._rest) > ENDS:
            self._head = self._head or bytes(self._rest[:ENDS])
            self.skipped += len(self._rest) - ENDS
            del self._rest[:-ENDS]


class MessageReader:
    """Turns what a server sends over one connection into messages for the SDK.

    Args:
        max_bytes: Most bytes of a message.

    Attributes:
        left_out: Tools of the last listing that are not offered, with the reason.
        tickets: Messages that the SDK has not read yet, if it reads tickets.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.left_out: dict[str, str] = {}
        self.tickets = Tickets()
        self._open: dict[Number, str] = {}  # methods of the requests without a response, by id
        self._part: list[bytes] = []  # lines of a message over several lines
        self._depth, self._in_string, self._size = 0, False, 0

    def sent(self, message: JSONRPCMessage) -> None:
        """Note a message for the server, before it is sent."""
        if isinstance(message, JSONRPCRequest):
            self._open[message.id] = message.method
            if len(self._open) > _MAX_OPEN:  # servers do not answer requests that were cancelled
                del self._open[next(iter(self._open))]

    def read(self, data: bytes, wanted: Number | None = None) -> list[Fields]:
        """Return the messages of an event or a body.

        Args:
            data: The bytes. They may have several messages, and other output.
            wanted: Id of the only request that they may answer; None: any.

        Returns:
            Valid messages. An error stands for a response that cannot be read.
        """
        if has_too_many_values(data):
            return self._refused(data[:ENDS], data[-ENDS:], TOO_MANY, wanted)
        found, rest, why = self._read(data, wanted)
        return found + (self.failed(rest, why, wanted) if why else [])

    def _read(self, data: bytes, wanted: Number | None) -> tuple[list[Fields], bytes, str]:
        """Return the messages, and where and why reading has failed."""
        found: list[Fields] = []
        text = data.decode(json.detect_encoding(data), "replace").strip(_BLANK)
        at, is_behind = 0, False  # is_behind: other output is before the message
        while at < len(text):
            if is_behind or text[at] not in "{[":
                start = _MESSAGE.search(text, at)
                if start is None:
                    break
                at, is_behind = start.start(), True
            try:
                value, end = _decoded(text, at)
            except ValueError as error:
                if text[at] == "[":  # such as "[INFO] …"
                    at, is_behind = at + 1, True
                    continue
                return found, text[at:].encode("utf-8", "replace"), str(error)
            for item in cast("list[Any]", value) if isinstance(value, list) else [value]:
                if isinstance(item, dict):
                    found += self._messages(cast("Fields", item), wanted, is_behind=is_behind)
            at, is_behind = cast("re.Match[str]", _GAP.match(text, end)).end(), False
        return found, b"", ""

    def read_line(self, line: bytes) -> list[Fields]:
        """Return the messages of a line, which may be one of several lines of a message."""
        is_long = len(line) > _MAX_PART_LINE  # then it is no part, because looking at it takes too long
        if not self._part:
            if has_too_many_values(line):
                return self._refused(line[:ENDS], line[-ENDS:], TOO_MANY, None)
            found, rest, why = self._read(line, None)
            if not why:
                return found
            opened, in_string = (0, False) if found or is_long else _opened(line, in_string=False)
            if opened <= 0 and not in_string:
                return found + self.failed(rest, why)
        elif is_long or (line.startswith(b"{") and b'"jsonrpc"' in line[:ENDS] + line[-ENDS:]):
            return self.read_part() + self.read_line(line)  # the next message
        else:
            opened, in_string = _opened(line, in_string=self._in_string)
        self._part.append(line)
        self._in_string = in_string
        self._depth += opened
        self._size += len(line) + 1
        is_open = (self._depth > 0 or in_string) and self._size <= self.max_bytes
        return [] if is_open else self.read_part()

    @property
    def has_part(self) -> bool:
        """True while the end of a message over several lines is missing."""
        return bool(self._part)

    def read_part(self) -> list[Fields]:
        """Return the messages of an unfinished message, of which no more lines are expected."""
        data = b"\n".join(self._part)
        self._part, self._depth, self._in_string, self._size = [], 0, False, 0
        if len(data) > self.max_bytes:
            return self.too_long(TooLong(data[:ENDS], data[-ENDS:], len(data)))
        return self.read(data)

    def too_long(self, line: TooLong, wanted: Number | None = None) -> list[Fields]:
        """Return an error response in place of a response that is too long, if its request is found.

        Args:
            line: What is left of the response.
            wanted: Id of the only request that it may answer; None: any.
        """
        return self._refused(line.head, line.tail, too_large(line.size, self.max_bytes), wanted)

    def _refused(self, head: bytes, tail: bytes, why: str, wanted: Number | None) -> list[Fields]:
        number = self._number(head, tail, wanted)
        return [] if number is None else self._error(number, INTERNAL_ERROR, why)

    def failed(self, data: bytes, why: str, wanted: Number | None = None) -> list[Fields]:
        """Return an error in place of a response that cannot be read, if its request is found.

        Args:
            data: The bytes.
            why: Why they cannot be read.
            wanted: Id of the only request that they may answer; None: any.
        """
        number = self._number(data[:ENDS], data[-ENDS:], wanted)
        return (
            [] if number is None else self.no_response(number, f"sent a response that cannot be read: {why}")
        )

    def no_response(self, number: Number, why: str) -> list[Fields]:
        """Return an error in place of the response to a request.

        Args:
            number: Id of the request.
            why: Why there is no response, as the end of a sentence about the server.
        """
        return self._error(number, PARSE_ERROR, why, NO_RESPONSE)

    def _error(self, number: Number, code: int, message: str, data: Any = None) -> list[Fields]:
        self._open.pop(number, None)
        return [{"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": message, "data": data}}]

    def _number(self, head: bytes, tail: bytes, wanted: Number | None) -> Number | None:
        """Return the id of the open request that a broken message answers."""
        begin = max(head.find(b"{"), 0)
        if _IS_REQUEST.match(head, begin):
            return None
        if wanted is not None:
            return wanted
        found = _FIRST_ID.match(head, begin) or _LAST_ID.search(tail)
        if found is not None:
            raw = json.loads(found[1].decode("utf-8", "replace"), strict=False)
            number = raw if raw in self._open else _as_id(raw)
            return number if number in self._open else None
        return self._only() if head[begin : begin + 1] == b"{" and _IS_RESPONSE.search(head) else None

    def _only(self) -> Number | None:
        return next(iter(self._open)) if len(self._open) == 1 else None

    def _messages(self, value: Fields, wanted: Number | None, *, is_behind: bool) -> list[Fields]:
        """Return the message that a JSON object is, if it is one."""
        method, error, result = value.get("method"), value.get("error"), value.get("result")
        if isinstance(method, str) and error is None and result is None:
            raw = value.get("id")
            number = raw if isinstance(raw, int | str) and not isinstance(raw, bool) else None
            if is_behind and number is not None:
                return []  # the server has printed a request
            params = value.get("params")
            message: Fields = {"jsonrpc": "2.0", "method": method}
            if isinstance(params, dict):
                message["params"] = _params(cast("Fields", params))
            return [message if number is None else {**message, "id": number}]
        number = _as_id(value.get("id"))
        is_known = number is not None and (number == wanted if wanted is not None else number in self._open)
        if number is None and (value.keys() & {"jsonrpc", "error", "result"}):
            number = wanted if wanted is not None else self._only()
            is_known = number is not None
        if number is None or not is_known:
            return []  # an answer to nobody, or a value that the server has printed
        if error not in (None, False, "", [], {}) or (error is not None and "result" not in value):
            return self._error(number, *_error(error))
        if result in (None, []):
            result = {}
        if not isinstance(result, dict) or "result" not in value:
            why = (
                "it has neither a result nor an error" if "result" not in value else "its result is no object"
            )
            return self.no_response(number, f"sent a response that cannot be read: {why}")
        mended = self._mended(self._open.pop(number, ""), cast("Fields", result))
        return [{"jsonrpc": "2.0", "id": number, "result": mended}]

    def _mended(self, method: str, result: Fields) -> Fields:
        """Return a result without the odd parts that the SDK would refuse with the rest."""
        if method == "tools/call":
            return _call_result(result)
        if method == "initialize":
            return _initialized(result)
        if method != "tools/list" or not isinstance(result.get("tools"), list | None):
            return result
        page = {name: value for name, value in result.items() if name not in ("tools", "nextCursor")}
        tools: list[Fields] = []
        for index, item in enumerate(result.get("tools") or []):
            tool = _tool(item)
            name = tool.get("name")
            why = _flaw(tool, page)
            if why:
                self.left_out[name if isinstance(name, str) else f"number {index + 1}"] = why
            else:
                self.left_out.pop(cast("str", name), None)
                tools.append(tool)
        cursor = result.get("nextCursor")
        is_more = isinstance(cursor, str | int) and cursor not in _FALSE
        return {**page, "tools": tools, **({"nextCursor": str(cursor)} if is_more else {})}


class Tickets:
    """Keeps messages while the SDK reads a short ticket in place of each, which passes its bounds."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[Fields, asyncio.TimerHandle]] = {}
        self._issued = 0

    def issue(self, message: Fields) -> bytes:
        """Return a short message in place of a message; `redeemed` returns it from what the SDK reads."""
        self._issued += 1
        number = self._issued
        forget = asyncio.get_running_loop().call_later(_TICKET_S, self._held.pop, number, None)
        self._held[number] = (message, forget)
        stub: Fields = {"jsonrpc": "2.0"}
        if "method" in message:
            stub |= {"method": message["method"], "params": {"ticket": number}}
        else:
            stub |= {"id": message["id"], "result": {"ticket": number}}
        return json.dumps(stub).encode()

    def redeemed(self, item: object) -> object:
        """Return the message for a ticket that the SDK has read, and other items unchanged."""
        message = item.message if isinstance(item, SessionMessage) else None
        held: Any = None
        if isinstance(message, JSONRPCResponse):
            held = message.result.get("ticket")
        elif isinstance(message, JSONRPCNotification):
            held = (message.params or {}).get("ticket")
        if not isinstance(held, int) or held not in self._held:
            return item
        found, forget = self._held.pop(held)
        forget.cancel()
        return as_session_message(found)


def as_session_message(message: Fields) -> SessionMessage:
    """Return a valid message as the SDK has it."""
    return SessionMessage(jsonrpc_message_adapter.validate_python(message, by_name=False))


def _opened(line: bytes, *, in_string: bool) -> tuple[int, bool]:
    """Return how many more brackets a line opens than it closes, and whether it ends inside a string."""
    pieces = split_at_quotes(line)
    outside = b"".join(pieces[in_string::2])
    opened = sum(map(outside.count, (b"{", b"["))) - sum(map(outside.count, (b"}", b"]")))
    return opened, in_string != (len(pieces) % 2 == 0)


def _integer(digits: str) -> int | str:
    """Return an integer, or its digits if Python's json can neither read nor write it."""
    return int(digits) if len(digits) <= _MAX_DIGITS else digits


_DECODER = json.JSONDecoder(strict=False, parse_int=_integer)


def _decoded(text: str, at: int) -> tuple[Any, int]:
    """Return the JSON value at a position, and the position behind it."""
    try:
        value, end = _DECODER.raw_decode(text, at)
    except RecursionError:
        raise TooDeepError from None
    if text.count("[", at, end) + text.count("{", at, end) > MAX_DEPTH:
        count_values(value)
    is_odd = text.find("\\u", at, end) >= 0 and re.search(r"\\u[dD][89a-fA-F]", text[at:end])
    return (_encodable(value) if is_odd else value), end


def _encodable(value: Any) -> Any:
    """Return a value without halves of surrogate pairs in its texts."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in cast("Fields", value).items()}
    return [_encodable(item) for item in cast("list[Any]", value)] if isinstance(value, list) else value


def _as_id(value: Any) -> Number | None:
    """Return an id as we have sent it: "7" and 7.0 are 7."""
    if isinstance(value, str):
        return int(value) if value.isascii() and value.isdigit() and len(value) < 19 else value
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _params(params: Fields) -> Fields:
    """Leave out integers too large for a float, to which the SDK converts the numbers of progress."""
    return {
        name: value
        for name, value in params.items()
        if not (isinstance(value, int) and value.bit_length() > 1000)
    }


def _error(error: Any) -> tuple[int, str, Any]:
    """Return the code, the message and the data of an error."""
    fields = cast("Fields", error) if isinstance(error, dict) else {"message": error}
    code, message = fields.get("code"), fields.get("message", error)
    return (
        code if isinstance(code, int) and not isinstance(code, bool) else INTERNAL_ERROR,
        message if isinstance(message, str) else json.dumps(message)[:_SHOWN],
        fields.get("data"),
    )


def _call_result(result: Fields) -> Fields:
    content = result.get("content")
    unfit = ""
    if result.get("resultType") == "input_required":
        unfit = "the tool needs input from a user, which is not available; call it differently"
    elif isinstance(result.get("task"), dict) and content is None:
        unfit = "the tool has started a task, and tasks are not supported"
    if unfit:
        asked = [
            _dict(_dict(each).get("params")).get("message")
            for each in _dict(result.get("inputRequests")).values()
        ]
        text = ": ".join([unfit, *(each[:_SHOWN] for each in asked if isinstance(each, str))])
        result = {"content": [{"type": "text", "text": text}], "isError": True, "resultType": "complete"}
        content = result["content"]
    if isinstance(content, list):
        content = [_block(block) for block in cast("list[Any]", content)]
    kept: Fields = {
        "content": [] if content is None else content,
        "isError": result.get("isError") not in _FALSE,
    }
    if isinstance(result.get("_meta"), dict):
        kept["_meta"] = result["_meta"]
    if isinstance(result.get("resultType"), str):
        kept["resultType"] = result["resultType"]
    structured = result.get("structuredContent")
    if structured is not None:
        # Protocols before 2026 allow objects only; servers wrap other values so.
        is_allowed = isinstance(structured, dict) or "resultType" in kept
        kept["structuredContent"] = structured if is_allowed else {"result": structured}
    return kept


def _block(block: Any) -> Fields:
    """Return a block of content with the fields that are used, or a text in its place."""
    fields = cast("Fields", block) if isinstance(block, dict) else {"type": "text", "text": block}
    kind, text = fields.get("type"), fields.get("text")
    if kind == "text" and not isinstance(text, str):
        return {"type": "text", "text": "" if text is None else json.dumps(text, ensure_ascii=False)}
    needed = _BLOCKS.get(kind, ()) if isinstance(kind, str) else ()
    kept: Fields = _strings(fields, (*needed, "name", "mimeType"))
    if needed and kept.keys() >= set(needed):
        return {"type": kind, "name": kept.get("uri", ""), **kept}
    resource: Any = fields.get("resource")
    if kind == "resource" and isinstance(resource, dict):
        held = _strings(cast("Fields", resource), ("uri", "mimeType", "text", "blob"))
        if "uri" in held and ("text" in held or "blob" in held):
            return {"type": kind, "resource": held}
        text = held.get("text")
    if isinstance(text, str):
        return {"type": "text", "text": text if kind is None else f"[{str(kind)[:_SHOWN]}]\n{text}"}
    what = (
        f"{kind} without its {' or '.join(needed) or 'content'}"
        if needed or kind == "resource"
        else (f"content of the unknown type {kind!r:.{_SHOWN}}")
    )
    return {"type": "text", "text": f"[{what}]"}


def _strings(fields: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, str]:
    return {name: fields[name] for name in names if isinstance(fields.get(name), str)}


def _initialized(result: Fields) -> Fields:
    info, offered = result.get("serverInfo"), result.get("capabilities")
    kept = {name: value for name, value in result.items() if name not in ("instructions", "_meta")}
    kept["serverInfo"] = {"name": "", "version": "", **_strings(_dict(info), ("name", "version", "title"))}
    kept["capabilities"] = {
        name: _dict(value)
        for name, value in _dict(offered).items()
        if value is not None and value is not False
    }
    return {**kept, **_strings(result, ("instructions",))}


def _dict(value: Any) -> Fields:
    return cast("Fields", value) if isinstance(value, dict) else {}


def _tool(item: Any) -> Fields:
    """Return the description of a tool without optional parts that are odd."""
    fields = _dict(item)
    kept: Fields = _strings(fields, ("name", "title", "description"))
    schema = fields.get("inputSchema")
    if isinstance(schema, dict):
        whole: Fields = {"type": "object", **cast("Fields", schema)}
        if not whole.get("properties", True):  # null, or [] of PHP
            whole["properties"] = {}
        schema = whole
    kept["inputSchema"] = schema or {"type": "object"}
    if isinstance(fields.get("outputSchema"), dict):
        kept["outputSchema"] = fields["outputSchema"]
    notes = _dict(fields.get("annotations"))
    hints = {name: notes[name] for name in _HINTS if isinstance(notes.get(name), bool)}
    if hints or isinstance(notes.get("title"), str):
        kept["annotations"] = {**hints, **_strings(notes, ("title",))}
    if _dict(fields.get("execution")).get("taskSupport") == "required":
        kept["execution"] = {"taskSupport": "required"}
    return kept


def _flaw(tool: Fields, page: Fields) -> str:
    """Return why a tool cannot be offered, or ""; an output schema that is invalid is removed."""
    if "execution" in tool:
        return "it runs as a task only (taskSupport 'required'), and tasks are not supported"
    version = "2026-07-28" if "resultType" in page else "2025-11-25"
    why = ""
    for _ in range(2):
        try:
            validate_server_result("tools/list", version, {**page, "tools": [tool]})
        except ValueError as error:
            first: Any = (
                error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": error}
            )
            at = ".".join(str(part) for part in first["loc"] if part not in ("tools", 0))
            why = f"its description is invalid: {at}: {first['msg']}"
            if tool.pop("outputSchema", None) is None:
                return why
        else:
            return ""
    return why
