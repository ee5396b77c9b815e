"""Parsers of Gemma 4 and FunctionGemma, whose values have a grammar of their own."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, cast

from torchrl_agentic.messages import JSON, Fields, ParsedCall
from torchrl_agentic.parsers.base import Limits
from torchrl_agentic.parsers.engine.json_blocks import past_closer, past_opener
from torchrl_agentic.parsers.engine.json_text import check_size, decode_any
from torchrl_agentic.parsers.engine.partial_call import CallParseError, PartialCall
from torchrl_agentic.parsers.engine.python_literals import LiteralReader
from torchrl_agentic.parsers.engine.reader import Incremental, Reader, end_of
from torchrl_agentic.parsers.engine.scan import named_call
from torchrl_agentic.parsers.engine.text_format import TextFormat
from torchrl_agentic.parsers.engine.text_parser import TextParser

# Text without delimiters of a string: the name of an argument, a number, a constant.
_BARE = re.compile(r"""[^:,{}\[\]<>"'\r\n]*+""")
_NUMBER = re.compile(r"-?+(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?+(?:[eE][-+]?+[0-9]++)?+")
_CONSTANTS: Mapping[str, JSON] = {"true": True, "false": False, "null": None}
_PYTHON: Mapping[str, JSON] = {"True": True, "False": False, "None": None}
_NAME = re.compile(r"[^\s<>{}\[\]():,\"']++")
_PLAIN_KEY = re.compile(r"[\w.$-]++")
_CALL = "call:"
_Inside: TypeAlias = "dict[str, JSON] | list[JSON]"


@dataclass(frozen=True, kw_only=True)
class GemmaFormat(TextFormat):
    """Description of a format with Gemma's grammar of values; see `TextFormat` for the markers.

    Attributes:
        quote: Delimiter before and after a string.
        thought: Name of the channel after the opening tag of reasoning.
    """

    quote: str
    thought: str = ""


class GemmaParser(TextParser):
    """A format with Gemma's grammar of values; the formats differ in their markers."""

    format: GemmaFormat  # pyright: ignore[reportIncompatibleVariableOverride]  a frozen value

    def read(self, reader: Reader, start: int) -> Incremental[int]:
        """Read one call.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.
        """
        at, notes = yield from past_opener(self, reader, start)
        name, brace, more = yield from self._header(reader, at)
        return (yield from named_call(reader, start, name, self._call(reader, brace, (*notes, *more))))

    def _header(self, reader: Reader, at: int) -> Incremental[tuple[str, int, tuple[str, ...]]]:
        """Read the name of the tool; return it, the place of the arguments, and notes."""
        format = self.format
        markers = ("{", format.closer, *format.openers, *format.turn_end)
        brace, marker = yield from reader.find_first(markers, at)
        if brace < 0 or marker in format.turn_end:
            raise CallParseError("unclosed", "the message ends inside the call", at)
        if brace == at and marker == format.closer:
            raise CallParseError("empty", "there is nothing between the tags", at)
        prefix, colon, name = reader.text[at:brace].partition(":")
        if not colon or prefix.strip() not in ("call", ""):
            raise CallParseError("wrong_dialect", f"a call must be {_CALL}tool_name{{…}}", at)
        name = name.strip()
        if marker != "{" or not _NAME.fullmatch(name):
            code = "missing_name" if not name or marker == "{" else "bad_arguments"
            raise CallParseError(code, f"expecting the name of the tool and {{ after {_CALL}", at)
        return name, brace, () if prefix.strip() else ("missing_call_prefix",)

    def _call(
        self, reader: Reader, brace: int, notes: tuple[str, ...]
    ) -> Incremental[tuple[PartialCall, int]]:
        inner = yield from reader.skip_inside(brace + 1)
        is_doubled = reader.text[inner] == "{"
        args, end, more = yield from self._arguments(reader, inner if is_doubled else brace)
        if is_doubled:
            end = yield from reader.skip_inside(end)
            if reader.text[end] != "}":
                raise CallParseError("not_literal", "expecting '}', as two braces open the arguments", end)
            end, more = end + 1, (*more, "doubled_braces")
        check_size(reader.text, brace, end, self.limits)
        end, unclosed = yield from past_closer(self, reader, end)
        return PartialCall(args=args, notes=(*notes, *more, *unclosed)), end

    # The grammar of values, read in one pass without recursion; a list holds the open objects and lists.

    def _arguments(self, reader: Reader, brace: int) -> Incremental[tuple[Fields, int, tuple[str, ...]]]:
        """Read the object that opens at a place; return it, its end, and notes."""
        root: dict[str, JSON] = {}
        opened: list[_Inside] = [root]
        notes: dict[str, None] = {}
        at, is_next = brace + 1, False
        while True:
            at = yield from reader.skip_inside(at)
            inside, key = opened[-1], ""
            if is_next or reader.text[at] != _end(inside):
                if isinstance(inside, dict):
                    key, at, note = yield from self._key(reader, at)
                    notes.update(dict.fromkeys(note))
                if reader.text[at] in "{[":
                    if len(opened) >= self.limits.depth:
                        reason = f"its values are nested deeper than {self.limits.depth}"
                        raise CallParseError("too_deep", reason, at)
                    opened.append({} if reader.text[at] == "{" else [])
                    _put(inside, key, opened[-1])
                    at, is_next = at + 1, False
                    continue
                value, at, note = yield from self._scalar(reader, at)
                _put(inside, key, value)
                notes.update(dict.fromkeys(note))
                at = yield from reader.skip_inside(at)
            while reader.text[at] == _end(opened[-1]):
                opened.pop()
                at += 1
                if not opened:
                    return root, at, tuple(notes)
                at = yield from reader.skip_inside(at)
            if reader.text[at] != ",":
                raise CallParseError("not_literal", f"expecting ',' or '{_end(opened[-1])}'", at)
            at, is_next = at + 1, True

    def _key(self, reader: Reader, at: int) -> Incremental[tuple[str, int, tuple[str, ...]]]:
        """Read the name of an argument; return it, the start of its value, and notes."""
        quoted = yield from self._quoted(reader, at)
        end = quoted[1] if quoted else (yield from self._bare_end(reader, at))
        notes = quoted[2] if quoted else ()
        sign = yield from reader.skip_inside(end)
        if reader.text[sign] != ":":
            # A name without quotes may contain the sign, so it ends there only if no colon follows it.
            sign = reader.text.find("=", end if quoted else at, sign + 1)
            notes = (*notes, "equals_sign")
        key = quoted[0] if quoted else reader.text[at : min(sign, end)].strip()
        if sign < 0 or not (quoted or key):
            raise CallParseError("not_literal", "expecting the name of an argument and ':' after it", end)
        return key, (yield from reader.skip_inside(sign + 1)), notes

    def _scalar(self, reader: Reader, at: int) -> Incremental[tuple[JSON, int, tuple[str, ...]]]:
        """Read a string, a number or a constant; return it, its end, and notes."""
        quoted = yield from self._quoted(reader, at)
        if quoted is not None:
            return quoted
        end = yield from self._bare_end(reader, at)
        word = reader.text[at:end].strip()
        if word in _CONSTANTS:
            return _CONSTANTS[word], end, ()
        if word in _PYTHON:
            return _PYTHON[word], end, ("python_literals",)
        if _NUMBER.fullmatch(word):
            return _number(word, at), end, ()
        if not word:
            raise CallParseError("not_literal", "expecting a value", at)
        if self.tolerance == "lenient":
            return word, end, ("bare_string",)
        raise CallParseError(
            "not_literal", f"expecting a string between {self.format.quote} and {self.format.quote}", at
        )

    def _quoted(self, reader: Reader, at: int) -> Incremental[tuple[str, int, tuple[str, ...]] | None]:
        """Read a string; return it, its end, and notes, or None if no string begins at the place."""
        if (yield from reader.which((self.format.quote,), at)):
            return (*(yield from self._string(reader, at)), ())
        if reader.text[at] in "\"'":
            return (*(yield from self._plain_string(reader, at)), ("plain_quotes",))
        return None

    def _plain_string(self, reader: Reader, at: int) -> Incremental[tuple[str, int]]:
        """Read a string in the quotes of JSON or Python; return it and its end.

        A marker ends the search, so that an apostrophe does not hide the calls behind it.
        """
        format = self.format
        quote, end, is_escaped = reader.text[at], at, True
        markers = (quote, format.closer, *format.openers, *format.turn_end)
        while is_escaped:
            begin = end + 1
            end, marker = yield from reader.find_first(markers, begin)
            if marker != quote:
                raise CallParseError("unclosed", f"a string has no {quote} at its end", at)
            between = reader.text[begin:end]
            is_escaped = (len(between) - len(between.rstrip("\\"))) % 2 == 1
        text = reader.text[at : end + 1]
        try:
            read = decode_any if quote == '"' else _python_string
            return cast("str", read(text, self.limits)), end + 1
        except CallParseError:
            reason = (
                f"a string in plain quotes has an invalid escape or a line break, expecting {format.quote}"
            )
            raise CallParseError("not_literal", reason, at) from None

    def _string(self, reader: Reader, at: int) -> Incremental[tuple[str, int]]:
        """Read a string; return it and its end."""
        format = self.format
        begin = at + len(format.quote)
        # A marker that was sampled as one token is not part of a string; other spellings may be.
        ends = [
            marker for marker in (format.closer, *format.openers, *format.turn_end) if marker in reader.exact
        ]
        end, marker = yield from reader.find_first((format.quote, *ends), begin)
        if marker != format.quote:
            rest = None if marker else len(reader.text)  # calls quoted in the string do not count
            raise CallParseError("unclosed", f"a string has no {format.quote} at its end", begin, end=rest)
        return reader.text[begin:end], end + len(format.quote)

    def _bare_end(self, reader: Reader, at: int) -> Incremental[int]:
        """Return the end of a name, number or constant."""
        while (at := end_of(_BARE.match(reader.text, at), at)) == len(reader.text) and not reader.is_whole:
            yield
        return at

    def begin_reasoning(self, reader: Reader, inside: int) -> Incremental[int]:
        """Return where the text of reasoning begins, after the name of its channel."""
        format = self.format
        inside = yield from reader.past_repeated(format.think[0], inside)
        if format.thought and (yield from reader.which((format.thought,), inside)):
            inside += len(format.thought)
            inside += len((yield from reader.which(("\n",), inside)))
        return inside

    # Writing

    def write(self, call: ParsedCall) -> str:
        """Write a call as the model would.

        Raises:
            ValueError: If the format cannot express the tool's name, or a string contains the delimiter.
        """
        if not _NAME.fullmatch(call.tool):
            raise ValueError(f"the format cannot express the name {call.tool!r}")
        return f"{self.format.openers[0]}{_CALL}{call.tool}{self._written(call.args)}{self.format.closer}"

    def _written(self, value: JSON) -> str:
        format = self.format
        if isinstance(value, str):
            if format.quote in value:
                raise ValueError(f"a string contains {format.quote}, and the format has no escapes")
            return f"{format.quote}{value}{format.quote}"
        if isinstance(value, Mapping):
            fields = cast("Fields", value).items()
            return (
                "{"
                + ",".join(f"{self._written_key(key)}:{self._written(item)}" for key, item in fields)
                + "}"
            )
        if isinstance(value, list | tuple):
            return "[" + ",".join(map(self._written, cast("Sequence[JSON]", value))) + "]"
        return json.dumps(value, allow_nan=False)

    def _written_key(self, key: str) -> str:
        return key if _PLAIN_KEY.fullmatch(key) else self._written(key)


class Gemma4Parser(GemmaParser):
    """The format of Gemma 4.

        <|tool_call>call:f{k:<|"|>text<|"|>,n:3,more:{flag:true}}<tool_call|>

    Strings have no escapes between their delimiters; names of arguments need no delimiters. `None` is read as
    null and noted, because older chat templates write it. Three deviations that the models write are read and
    noted too: strings in the quotes of JSON or Python, `=` after the name of an argument, and doubled braces
    around the arguments. With `tolerance="lenient"` a bare word is read as a string. Source: the chat
    templates of Gemma 4.
    """

    name = "gemma4"
    aliases = ("gemma-4", "diffusion_gemma")
    models = "Gemma 4, DiffusionGemma"
    example = '<|tool_call>call:f{k:<|"|>v<|"|>}<tool_call|>'
    stop = ("<|tool_response>", "<turn|>")
    format = GemmaFormat(
        openers=("<|tool_call>",),
        closer="<tool_call|>",
        around=("", "", ""),
        think=("<|channel>", "<channel|>"),
        think_end_proves=False,
        turn_end=("<turn|>", "<eos>", "<|tool_response>"),
        result_tags=("<|tool_response>", "<tool_response|>"),
        more_markers=('<|"|>',),
        shape='<|tool_call>call:tool_name{argument:<|"|>text<|"|>,other:3}<tool_call|>',
        quote='<|"|>',
        thought="thought",
        has_grammar=False,
    )


class FunctionGemmaParser(GemmaParser):
    """The format of FunctionGemma: that of Gemma 4 with other markers.

        <start_function_call>call:f{k:<escape>text<escape>,n:3}<end_function_call>

    Source: https://ai.google.dev/gemma/docs/functiongemma.
    """

    name = "functiongemma"
    aliases = ("function_gemma",)
    models = "FunctionGemma"
    example = "<start_function_call>call:f{k:<escape>v<escape>}<end_function_call>"
    stop = ("<start_function_response>", "<end_of_turn>")
    format = replace(
        Gemma4Parser.format,
        openers=("<start_function_call>",),
        closer="<end_function_call>",
        turn_end=("<end_of_turn>", "<eos>", "<start_function_response>"),
        result_tags=("<start_function_response>", "<end_function_response>"),
        more_markers=("<escape>",),
        shape=(
            "<start_function_call>call:tool_name{argument:<escape>text<escape>,other:3}<end_function_call>"
        ),
        quote="<escape>",
        thought="",
        think=("<think>", "</think>"),
        think_end_proves=True,
    )


def _end(inside: _Inside) -> str:
    return "}" if isinstance(inside, dict) else "]"


def _put(inside: _Inside, key: str, value: JSON) -> None:
    if isinstance(inside, dict):
        inside[key] = value
    else:
        inside.append(value)


def _python_string(text: str, limits: Limits) -> JSON:
    return LiteralReader(text, limits).value(0)[0]


def _number(word: str, at: int) -> int | float:
    try:
        number = int(word) if word.lstrip("-").isdigit() else float(word)
    except ValueError:  # an integer of more digits than Python converts
        raise CallParseError("not_literal", "the number has too many digits", at) from None
    if number in (float("inf"), float("-inf")):
        raise CallParseError("not_literal", f"the number {word[:20]} is too large", at)
    return number
