"""Reading JSON that a model wrote: strict, in linear time, with the surprises of `json` taken out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from json.decoder import JSONDecodeError
from typing import Any, NoReturn, cast

from torchrl_agentic.messages import JSON, is_encodable
from torchrl_agentic.parsers.base import Attempt, Unreadable

MAX_DEPTH = 200
_WHITESPACE = re.compile("[ \t\n\r\ufeff]*+")


def _no_constant(name: str) -> NoReturn:
    raise Unreadable("invalid_json", f"{name} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):  # 1e999, about which `parse_constant` is not asked
        raise Unreadable("invalid_json", f"the number {text[:20]} is too large")
    return value


_decoder: Any = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)
_scan_once = _decoder.scan_once


def skip_whitespace(text: str, at: int) -> int:
    """Give the place of the next character that is no white space."""
    if text[at : at + 1] > " " and text[at] != "\ufeff":  # by far the most frequent, and cheap to see
        return at
    found = _WHITESPACE.match(text, at)
    return found.end() if found is not None else at


def decode(text: str, at: int) -> tuple[JSON, int]:
    """Read the JSON value that begins at `at`; give it and where it ends.

    Raises:
        Unreadable: there is none, or it is nested too deep, or holds what JSON cannot say.
    """
    try:
        value, end = _scan_once(text, at)
    except StopIteration as error:
        raise Unreadable("invalid_json", "invalid JSON, expecting value", error.value) from None
    except JSONDecodeError as error:
        raise Unreadable("invalid_json", f"invalid JSON, {error.msg.lower()}", error.pos) from None
    except RecursionError:
        raise Unreadable("too_deep", "its JSON is nested too deep", at) from None
    except Unreadable as error:
        error.at = at
        raise
    except ValueError:  # an integer of more digits than Python converts
        raise Unreadable("invalid_json", "invalid JSON, a number has too many digits", at) from None
    # Only text with as many brackets can be nested as deep, and only an escape can hide a lone surrogate.
    if text.count("[", at, end) + text.count("{", at, end) > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        raise Unreadable("too_deep", f"its JSON is nested deeper than {MAX_DEPTH}", at)
    if (text.find("\\ud", at, end) >= 0 or text.find("\\uD", at, end) >= 0) and not is_encodable(
        json.dumps(value, ensure_ascii=False)
    ):
        raise Unreadable("invalid_json", "invalid JSON, half of a surrogate pair", at)
    return value, end


def _depth(value: JSON) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        below: list[JSON] = []
        for item in level:
            if isinstance(item, dict):
                below += cast("dict[str, JSON]", item).values()
            elif isinstance(item, list):
                below += cast("list[JSON]", item)
        level = below
    return depth


def dumps(value: JSON) -> str:
    r"""Write JSON that nobody takes for markup: `</` inside strings becomes `<\/`, which means the same."""
    return json.dumps(value, ensure_ascii=False).replace("</", "<\\/")


def read_call(value: JSON) -> Attempt:
    """Read a decoded call: `{"name", "arguments"}`, or the same under "function" as OpenAI has it.

    Raises:
        Unreadable: it has no name, or its arguments are no object.
    """
    if not isinstance(value, dict):
        raise Unreadable("missing_name", 'a call is an object with "name" and "arguments"')
    fields, notes = cast("dict[str, Any]", value), ()
    inner = fields.get("function")
    call_id = fields.get("id")
    if isinstance(inner, dict) and "name" not in fields:
        fields, notes = cast("dict[str, Any]", inner), ("openai_shape",)
    name = read_name(fields)
    raw = fields.get("arguments", fields.get("parameters"))
    args, more = read_arguments(raw)
    return Attempt(name, args, call_id=text_of(call_id), notes=(*notes, *more))


def text_of(value: JSON) -> str | None:
    """Give a value that is a string and not empty, such as an id or a tag that counts."""
    return value if isinstance(value, str) and value else None


def read_name(fields: Mapping[str, JSON], key: str = "name") -> str:
    """Read the name of the tool that a call is for.

    Raises:
        Unreadable: it has none.
    """
    name = fields.get(key)
    if not isinstance(name, str) or not name.strip():
        raise Unreadable("missing_name", f'the call has no "{key}"')
    return name.strip()


def read_arguments(value: JSON) -> tuple[Mapping[str, JSON], tuple[str, ...]]:
    """Read arguments: an object, an object as a JSON string, or nothing at all for no arguments.

    Raises:
        Unreadable: anything else.
    """
    if isinstance(value, dict):
        return cast("dict[str, JSON]", value), ()
    if value is None or value == "":
        return {}, ()
    if isinstance(value, str):
        start = skip_whitespace(value, 0)
        decoded, end = decode(value, start)
        if isinstance(decoded, dict) and skip_whitespace(value, end) == len(value):
            return cast("dict[str, JSON]", decoded), ("string_args",)
    raise Unreadable("bad_arguments", '"arguments" must be an object')
