"""Read Python literals that a model wrote, without compiling or running anything."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from typing import NoReturn

from torchrl_agentic.messages import JSON, is_encodable
from torchrl_agentic.parsers.base import Limits
from torchrl_agentic.parsers.engine.partial_call import CallParseError

_SPACE = re.compile("[ \\t\\r\\n\\f\\ufeff]*+")
_WORD = re.compile(r"[^\W\d]\w*+(?:\.[^\W\d]\w*+)*+")
_NUMBER = re.compile(
    r"[-+]?(?:(?:0|[1-9][0-9_]*+)(?:\.[0-9_]*+)?+|\.[0-9][0-9_]*+)(?:[eE][-+]?[0-9]++)?+(?![\w.])"
)
STRING_BODIES = {
    "'": r"(?:[^'\\\n]|\\.)*+",
    '"': r'(?:[^"\\\n]|\\.)*+',
    # No possessive group: before 3.11.5, Python misses matches of those with a lookahead (gh-106052).
    "'''": r"[^'\\]*+(?:(?:\\.|'(?!''))[^'\\]*+)*",
    '"""': r'[^"\\]*+(?:(?:\\.|"(?!""))[^"\\]*+)*',
}
"""Patterns of the text between quotes, by quotes of Python's strings."""
_STRINGS = {quote: re.compile(f"{quote}({body}){quote}", re.DOTALL) for quote, body in STRING_BODIES.items()}
_ESCAPE = re.compile(
    r"\\(?:\r?\n|[\\'\"abfnrtv]|[0-7]{1,3}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|N\{[^{}]+\})"
)
_SIMPLE = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_WORDS: dict[str, JSON] = {
    "True": True, "False": False, "None": None, "true": True, "false": False, "null": None,
}  # fmt: skip


class LiteralReader:
    """A strict reader of Python literals, and of calls with literals as keyword arguments.

    Args:
        text: Text of the message.
        limits: Bounds on size and depth.
    """

    def __init__(self, text: str, limits: Limits) -> None:
        self._text = text
        self._limits = limits

    def call(self, at: int) -> tuple[str, dict[str, JSON], int]:
        """Read `name(key=value, …)` at a place; return the name, the arguments and the end.

        Raises:
            CallParseError: If there is no such call.
        """
        name = _WORD.match(self._text, at)
        if name is None:
            self._refuse("expecting the name of a tool", at)
        args: dict[str, JSON] = {}
        at = self._after(self.skip(name.end()), "(", "expecting '('", name[0])
        while not self._text.startswith(")", at):
            key = _WORD.match(self._text, at)
            if key is None or "." in key[0]:
                self._refuse("expecting argument=value", at, name[0])
            at = self._after(self.skip(key.end()), "=", "expecting argument=value", name[0], key.start())
            try:
                args[key[0]], at = self.argument(at, name[0], args)
            except CallParseError as error:
                error.tool = name[0]
                raise
            at = self.skip(at)
            if self._text.startswith(",", at):
                at = self.skip(at + 1)
            elif not self._text.startswith(")", at):
                self._refuse("arguments must be literals, expecting ',' or ')'", at, name[0])
        return name[0], args, at + 1

    def argument(self, at: int, name: str, args: Mapping[str, JSON]) -> tuple[JSON, int]:
        """Read the value of the next argument; return it and its end.

        Args:
            at: Index where the value begins.
            name: Name of the tool.
            args: Arguments that have been read.
        """
        del name, args
        return self.value(at)

    def value(self, at: int, depth: int = 1) -> tuple[JSON, int]:  # noqa: RET503  _refuse raises
        """Read a literal at a place; return it and its end.

        Args:
            at: Index where the literal begins.
            depth: Number of brackets around it, plus 1.

        Raises:
            CallParseError: If there is not a literal, or it is beyond the limits.
        """
        text = self._text
        at = self.skip(at)
        first = text[at : at + 1]
        if depth > self._limits.depth:
            raise CallParseError("too_deep", f"its values are nested deeper than {self._limits.depth}", at)
        if first in ("'", '"'):
            return self._string(at)
        if first == "[" or first == "(":
            return self._list(at, "]" if first == "[" else ")", depth)
        if first == "{":
            return self._dict(at, depth)
        if word := _WORD.match(text, at):
            if word[0] in _WORDS:
                return _WORDS[word[0]], word.end()
            self._refuse(f"{word[0][:20]} is not a literal", at)
        if number := _NUMBER.match(text, at):
            return self._number(number[0], at), number.end()
        self._refuse("expecting a literal", at)

    def skip(self, at: int) -> int:
        """Return the place of the next character that is not white space."""
        match = _SPACE.match(self._text, at)
        return at if match is None else match.end()

    def _after(self, at: int, sign: str, reason: str, tool: str, begin: int | None = None) -> int:
        if not self._text.startswith(sign, at):
            self._refuse(reason, at if begin is None else begin, tool)
        return self.skip(at + len(sign))

    def _closed_string(self, at: int) -> re.Match[str] | None:
        """Match the string that opens at a place; its group is the text between the quotes."""
        quote = self._text[at]
        return _STRINGS[quote * 3 if self._text.startswith(quote * 3, at) else quote].match(self._text, at)

    def _string(self, at: int) -> tuple[str, int]:
        match = self._closed_string(at)
        if match is None:
            self._refuse("the string is not closed on its line", at)
        try:
            value = _ESCAPE.sub(_unescaped, match[1]) if "\\" in match[1] else match[1]
        except (KeyError, ValueError, OverflowError):
            self._refuse("the string has an invalid escape", at)
        if "\\" in match[1] and not is_encodable(value):
            self._refuse("an unpaired surrogate", at)
        return value, match.end()

    def _number(self, text: str, at: int) -> int | float:
        try:
            number = int(text) if text.lstrip("+-").replace("_", "").isdigit() else float(text)
        except ValueError:
            self._refuse("the number is malformed", at)
        if number in (float("inf"), float("-inf")):
            self._refuse(f"the number {text[:20]} is too large", at)
        return number

    def _list(self, at: int, closer: str, depth: int) -> tuple[JSON, int]:
        items: list[JSON] = []
        at = self.skip(at + 1)
        while not self._text.startswith(closer, at):
            item, end = self.value(at, depth + 1)
            items.append(item)
            at = self._next(end, closer)
            if closer == ")" and len(items) == 1 and self._text[end:at].find(",") < 0:
                return item, at + 1  # brackets around one value, not a tuple
        return items, at + 1

    def _dict(self, at: int, depth: int) -> tuple[dict[str, JSON], int]:
        items: dict[str, JSON] = {}
        at = self.skip(at + 1)
        while not self._text.startswith("}", at):
            if self._text[at : at + 1] not in ("'", '"'):
                self._refuse("expecting a string as key", at)
            key, at = self._string(at)
            at = self.skip(at)
            if not self._text.startswith(":", at):
                self._refuse("expecting ':'", at)
            items[key], at = self.value(at + 1, depth + 1)
            at = self._next(at, "}")
        return items, at + 1

    def _next(self, at: int, closer: str) -> int:
        at = self.skip(at)
        if self._text.startswith(",", at):
            return self.skip(at + 1)
        if not self._text.startswith(closer, at):
            self._refuse(f"expecting ',' or {closer!r}", at)
        return at

    def _refuse(self, reason: str, at: int, tool: str = "") -> NoReturn:
        raise CallParseError("not_literal", reason, at, tool=tool)


def _unescaped(match: re.Match[str]) -> str:
    body = match[0][1:]
    if body[-1] == "\n":
        return ""
    if body[0] in "xuU":
        return chr(int(body[1:], 16))
    if body[0] == "N":
        return unicodedata.lookup(body[2:-1])
    if body[0].isdigit():
        return chr(int(body, 8))
    return _SIMPLE.get(body, body)
