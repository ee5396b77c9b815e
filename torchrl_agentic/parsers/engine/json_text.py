"""Read JSON written by a model: strictly and in linear time, or with a fixed list of repairs.

Repairs are only for blocks with a closer: nothing is added to a block that was cut off.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from json.decoder import JSONDecodeError
from typing import Any, NoReturn, cast

from torchrl_agentic.messages import JSON, is_encodable
from torchrl_agentic.parsers.base import LIMITS, Limits
from torchrl_agentic.parsers.engine.partial_call import EXCERPT, CallParseError, PartialCall
from torchrl_agentic.parsers.engine.python_literals import LiteralReader
from torchrl_agentic.text import one_line

_WHITESPACE = re.compile("[ \t\n\r\ufeff]*+")
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[{\]}]', re.DOTALL)
_FENCE = re.compile(r"\s*+```[a-z]*+\s*+(?P<body>.*)```\s*+\Z", re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_STRING_OR_TRAILING_COMMA = re.compile(r'("(?:[^"\\]|\\.)*+")|,(?=\s*+[}\]])', re.DOTALL)
_STRING_OR_EMPTY_ITEM = re.compile(r'"(?:[^"\\]|\\.)*+"|[\[{,]\s*+,', re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f]")
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
_FAR, _PIECE, _LONGEST_TOKEN = 1 << 16, 1 << 12, 16
_BEGIN, _END = ("{", "["), ("}", "]")


def _no_constant(name: str) -> NoReturn:
    raise CallParseError("invalid_json", f"{name} is not valid JSON")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):  # 1e999 does not reach `parse_constant`
        raise CallParseError("invalid_json", f"the number {text[:20]} is too large")
    return value


_decoder: Any = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)
_odd_decoder: Any = json.JSONDecoder(parse_int=str)
scan_once: Callable[[str, int], tuple[JSON, int]] = _decoder.scan_once
"""Like `decode`, without its checks and with the errors of `json`."""


def _scan_piece(
    text: str, at: int, scan: Callable[[str, int], tuple[JSON, int]] = scan_once
) -> tuple[JSON, int]:
    """Read a value like `scan_once`, at a cost independent of the text before it.

    `json` counts newlines from the beginning of the text to report an error, so many errors in a long text
    would take quadratic time. Far into a text, `json` gets a slice of it, and the rest only if the slice may
    have caused the error.
    """
    if at < _FAR:
        return scan(text, at)
    piece = text[at : at + _PIECE]
    try:
        value, end = scan(piece, 0)
    except StopIteration as stop:
        place, error = stop.value, StopIteration(at + stop.value)
    except JSONDecodeError as broken:
        is_cut = broken.msg.startswith("Unterminated")
        place = len(piece) if is_cut else broken.pos
        error = JSONDecodeError(broken.msg, "", at + broken.pos)
    else:
        return value, at + end
    if place < len(piece) - _LONGEST_TOKEN:
        raise error
    return scan(text, at)


def end_of_odd_value(text: str, at: int) -> tuple[int, int]:
    """Return the end (-1 if malformed) of a value with numbers such as NaN, and the place of the error.

    Args:
        text: Text of the message.
        at: Index where the value begins.
    """
    try:
        end = _scan_piece(text, at, _odd_decoder.scan_once)[1]
    except StopIteration as error:
        return -1, max(error.value, at + 1)
    except JSONDecodeError as error:
        return -1, max(error.pos, at + 1)
    except RecursionError:
        return -1, at + 1
    return end, end


def skip_whitespace(text: str, at: int) -> int:
    """Return the place of the next character that is not white space.

    Args:
        text: Text of the message.
        at: Index to start from.
    """
    if text[at : at + 1] > " " and text[at] != "\ufeff":  # by far the most frequent case
        return at
    found = _WHITESPACE.match(text, at)
    return found.end() if found is not None else at


def decode(text: str, at: int, limits: Limits = LIMITS) -> tuple[JSON, int]:
    """Read the JSON object or array that begins at `at`; return its value and its end.

    Args:
        text: Text of the message.
        at: Index where the value begins.
        limits: Bounds on size and depth.

    Raises:
        CallParseError: If there is no valid JSON object or array, or it is beyond the limits.
    """
    if text[at : at + 1] not in _BEGIN:
        raise CallParseError("invalid_json", "invalid JSON, expecting an object", at)
    try:
        value, end = _scan_piece(text, at)
    except StopIteration as error:
        raise _broken(text, at, "expecting value", error.value, limits) from None
    except JSONDecodeError as error:
        raise _broken(text, at, error.msg.lower(), error.pos, limits) from None
    except RecursionError:
        raise CallParseError("too_deep", f"its JSON is nested deeper than {limits.depth}", at) from None
    except CallParseError as error:
        error.at = at
        raise
    except ValueError:  # an integer of more digits than Python converts
        raise CallParseError("invalid_json", "invalid JSON, a number has too many digits", at) from None
    check(value, text, at, end, limits)
    return value, end


def decode_any(text: str, limits: Limits = LIMITS) -> JSON:
    """Read a text that is one JSON value of any type, white space aside.

    Args:
        text: The JSON.
        limits: Bounds on size and depth.

    Raises:
        CallParseError: If the text is not valid JSON or is beyond the limits.
    """
    start = skip_whitespace(text, 0)
    try:
        value, end = scan_once(text, start)
        check(value, text, start, end, limits)
    except CallParseError:
        raise
    except (StopIteration, ValueError, RecursionError):
        raise CallParseError("invalid_json", "invalid JSON", start) from None
    if skip_whitespace(text, end) != len(text):
        raise CallParseError("extra_data", "unexpected text after the JSON", end)
    return value


def check(value: JSON, text: str, start: int, end: int, limits: Limits) -> None:
    """Check that a decoded value is within the limits and has no unpaired surrogates.

    Args:
        value: The decoded value.
        text: The text it was read from.
        start: Index where it begins.
        end: Index where it ends.
        limits: Bounds on size and depth.

    Raises:
        CallParseError: If the check fails.
    """
    # Deep nesting takes as many characters, and only an escape can hide an unpaired surrogate.
    if end - start > limits.depth and _is_too_deep(text, start, end, limits):
        raise CallParseError("too_deep", f"its JSON is nested deeper than {limits.depth}", start)
    if not isinstance(value, list):
        check_size(text, start, end, limits)
    escape = text.find("\\u", start, end)
    if (
        escape >= 0
        and _HALF.search(text, escape, end)
        and not is_encodable(json.dumps(value, ensure_ascii=False))
    ):
        raise CallParseError("invalid_json", "invalid JSON, an unpaired surrogate", start)


def check_data(value: JSON, limits: Limits) -> None:
    """Check that a value that did not come as text is valid JSON and within the limits.

    Args:
        value: The value.
        limits: Bounds on size and depth.

    Raises:
        CallParseError: If the check fails.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise CallParseError("too_deep", f"its JSON is nested deeper than {limits.depth}") from None
    except (TypeError, ValueError) as error:
        raise CallParseError("invalid_json", f"invalid JSON, {error}") from None
    if _is_too_deep(text, 0, len(text), limits):
        raise CallParseError("too_deep", f"its JSON is nested deeper than {limits.depth}")
    if not is_encodable(text):
        raise CallParseError("invalid_json", "invalid JSON, an unpaired surrogate")
    try:
        check_size(text, 0, len(text), limits)
    except CallParseError as error:
        error.at = None  # an index in the dumped JSON, not in the message
        raise


def check_size(text: str, start: int, end: int, limits: Limits, *, tool: str = "") -> None:
    """Check that the arguments of one call are within the limit on bytes.

    Args:
        text: Text of the message.
        start: Index where they begin.
        end: Index where they end.
        limits: Bounds on the message.
        tool: Name of the tool, for the error.

    Raises:
        CallParseError: If they are too large.
    """
    if not fits(text, start, end, limits):
        raise CallParseError(
            "too_large", f"a call may have at most {limits.argument_bytes} bytes", start, tool=tool
        )


def fits(text: str, start: int, end: int, limits: Limits) -> bool:
    """Return whether a part of the text has at most `limits.argument_bytes` bytes in UTF-8.

    Args:
        text: Text of the message.
        start: Index where the part begins.
        end: Index where it ends.
        limits: Bounds on the message.
    """
    size = end - start
    if size * 4 <= limits.argument_bytes or text.isascii():
        return size <= limits.argument_bytes
    return len(text[start:end].encode("utf-8", "surrogatepass")) <= limits.argument_bytes


def _broken(text: str, start: int, reason: str, at: int, limits: Limits) -> CallParseError:
    """Return the error for malformed JSON.

    Python versions differ in how deep they read before they fail; the error must not.
    """
    if at - start > limits.depth and _is_too_deep(text, start, at, limits):
        return CallParseError("too_deep", f"its JSON is nested deeper than {limits.depth}", start)
    before = len(text[start:at].rstrip()) + start - 1 if text[at : at + 1] in _END else at
    if text[before : before + 1] == ",":  # newer versions of Python report this at the comma
        return CallParseError("invalid_json", "invalid JSON, a comma too many", before)
    return CallParseError("invalid_json", f"invalid JSON, {reason}", at)


def _is_too_deep(text: str, start: int, end: int, limits: Limits) -> bool:
    if text.count("[", start, end) + text.count("{", start, end) <= limits.depth:
        return False
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(text, start, end):
        if match[0] in "[{":
            depth += 1
            if depth > limits.depth:
                return True
        elif match[0] in "]}":
            depth -= 1
    return False


def dumps(value: JSON) -> str:
    r"""Write JSON without closing tags: `</` in strings becomes `<\/`, which is equal."""
    return json.dumps(value, ensure_ascii=False).replace("</", "<\\/")


def read_call(value: JSON, key: str = "arguments", limits: Limits = LIMITS) -> PartialCall:
    """Read a decoded call: `{"name", "arguments"}`, or the same under "function" as OpenAI writes it.

    Args:
        value: The decoded JSON.
        key: Key of the arguments in the format; "arguments" and "parameters" are read in any case.
        limits: Bounds on size and depth.

    Raises:
        CallParseError: If it has no name, or its arguments are not an object.
    """
    if not isinstance(value, dict):
        raise CallParseError("missing_name", f'a call is an object with "name" and "{key}"')
    fields: dict[str, Any] = cast("dict[str, Any]", value)
    notes: tuple[str, ...] = ()
    inner = fields.get("function")
    call_id = text_of(fields.get("id"))
    if isinstance(inner, dict) and "name" not in fields:
        fields, notes = cast("dict[str, Any]", inner), ("openai_shape",)
    try:
        name = read_name(fields)
    except CallParseError as error:
        error.call_id = call_id
        raise
    used = key
    if key not in fields:
        used = next((other for other in ("arguments", "parameters") if other in fields), key)
    try:
        args, more = read_arguments(fields.get(used), limits)
    except CallParseError as error:
        error.tool, error.call_id = name, call_id
        raise
    alias: tuple[str, ...] = () if used == key else ("args_alias",)
    return PartialCall(name, args, call_id=call_id, notes=notes + more + alias)


def text_of(value: JSON) -> str | None:
    """Return the value if it is a string and not empty, else None."""
    return value if isinstance(value, str) and value else None


def read_name(fields: Mapping[str, JSON], key: str = "name") -> str:
    """Return the name of the called tool.

    Args:
        fields: The decoded call.
        key: Key of the name.

    Raises:
        CallParseError: If there is no name.
    """
    name = fields.get(key)
    if not isinstance(name, str) or not name.strip():
        raise CallParseError("missing_name", f'the call has no "{key}"')
    return name.strip()


def read_arguments(value: JSON, limits: Limits = LIMITS) -> tuple[Mapping[str, JSON], tuple[str, ...]]:
    """Return the arguments, given as an object, as a JSON string of one or not at all, and notes.

    Args:
        value: The decoded arguments.
        limits: Bounds on size and depth.

    Raises:
        CallParseError: If they have another type.
    """
    if isinstance(value, dict):
        return cast("dict[str, JSON]", value), ()
    if value is None or value == "":
        return {}, ("missing_args",)
    if isinstance(value, str):
        start = skip_whitespace(value, 0)
        try:
            decoded, end = decode(value, start, limits)
        except CallParseError as error:
            near = one_line(value[error.at or 0 :][:EXCERPT], EXCERPT)
            raise CallParseError(
                error.code, f'in the string with its arguments: {error}, near "{near}"'
            ) from None
        if isinstance(decoded, dict) and skip_whitespace(value, end) == len(value):
            return cast("dict[str, JSON]", decoded), ("string_args",)
    raise CallParseError("bad_arguments", '"arguments" must be an object')


def repair_json(body: str, limits: Limits) -> tuple[JSON, tuple[str, ...]] | None:
    """Read the body of a block that is not valid JSON; return its value and a note per repair, or None.

    The repairs: drop a code fence around it, escape raw control characters in strings, drop commas before
    closing brackets, add one missing brace at the end, read Python literals.

    Args:
        body: Text of the block, up to its closer.
        limits: Bounds on size and depth.
    """
    notes: tuple[str, ...] = ()
    if match := _FENCE.match(body):
        body, notes = match["body"], ("fenced_json",)
    for ending in ("", "}"):
        found = _fixed(f"{body}{ending}", limits, notes)
        if found is not None:
            return found if not ending else (found[0], (*found[1], "missing_brace"))
    return None


def _fixed(body: str, limits: Limits, notes: tuple[str, ...]) -> tuple[JSON, tuple[str, ...]] | None:
    value = _whole(body, limits)
    if value is not None:
        return value, notes
    for note, fix in _FIXES:
        fixed = fix(body)
        if fixed != body:
            body, notes = fixed, (*notes, note)
            value = _whole(body, limits)
            if value is not None:
                return value, notes
    return _python(body, limits, notes)


def _whole(body: str, limits: Limits) -> JSON | None:
    try:
        value, end = decode(body, skip_whitespace(body, 0), limits)
    except CallParseError:
        return None
    return value if skip_whitespace(body, end) == len(body) else None


def _python(body: str, limits: Limits, notes: tuple[str, ...]) -> tuple[JSON, tuple[str, ...]] | None:
    if not fits(body, 0, len(body), limits):
        return None
    reader = LiteralReader(body, limits)
    try:
        value, end = reader.value(0)
    except CallParseError:
        return None
    if reader.skip(end) != len(body) or not isinstance(value, dict | list):
        return None
    return cast("JSON", value), (*notes, "python_literals")


def _escape_control(body: str) -> str:
    return _STRING.sub(lambda string: _CONTROL.sub(lambda c: f"\\u{ord(c[0]):04x}", string[0]), body)


def _drop_commas(body: str) -> str:
    if any(match[0][0] != '"' for match in _STRING_OR_EMPTY_ITEM.finditer(body)):
        return body  # an item is missing before the comma
    return _STRING_OR_TRAILING_COMMA.sub(lambda match: match[1] or "", body)


_FIXES: tuple[tuple[str, Callable[[str], str]], ...] = (
    ("raw_control_characters", _escape_control),
    ("trailing_comma", _drop_commas),
)
