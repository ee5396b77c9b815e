"""Calls of LFM2 and LFM2.5, like Python or as JSON. Formats: their chat templates and model cards."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar, cast

from torchrl_agentic.messages import JSON
from torchrl_agentic.parsers.engine.attempts import Attempt, Unreadable
from torchrl_agentic.parsers.engine.jsontext import fits, read_call
from torchrl_agentic.parsers.engine.raw_strings import RawCallReader
from torchrl_agentic.parsers.engine.reader import Reader, Steps
from torchrl_agentic.parsers.engine.structured import attempts_of
from torchrl_agentic.parsers.formats.pythonic import CallListParser

_JSON = re.compile(r"\[?+\s*+\{")
_PART_OF_JSON = re.compile(r"\[\s*+\Z")


class LFM2Parser(CallListParser):
    """`<|tool_call_start|>[f(a='x')]<|tool_call_end|>`, as LFM2 and LFM2.5 write it.

    LFM2.5's chat template puts quotes around a string and escapes nothing in it. A string that is no Python
    literal is read as such a raw one, character by character, and noted as "raw_string"; if it could end at
    more than one place the call is an error. `RawCallReader` says how its end is found.
    In place of calls like Python a list of JSON calls is read, or a single one.
    """

    name: ClassVar[str] = "lfm2"
    models = "LFM2, LFM2.5"
    example = "<|tool_call_start|>[f(a='x')]<|tool_call_end|>"
    stop = ("<|im_end|>",)
    openers = ("<|tool_call_start|>",)
    closer = "<|tool_call_end|>"
    around = ("<|tool_call_start|>[", ", ", "]<|tool_call_end|>")
    turn_end = ("<|im_end|>",)
    forged = ("<|tool_response_start|>", "<|tool_response_end|>")
    shape = "<|tool_call_start|>[tool_name(argument='value')]<|tool_call_end|>"

    def read(self, reader: Reader, start: int) -> Steps[int]:
        """Read one list, or one JSON call."""
        opener = self.openers[0]
        begin = yield from reader.past_repeated(opener, start + len(opener))
        at = yield from reader.skip(begin)
        while not reader.is_whole and _PART_OF_JSON.match(reader.text, at):
            yield
        if _JSON.match(reader.text, at):
            return (yield from self._json_calls(reader, start, at))
        error: Unreadable | None = None
        inside, end, notes, attempts = (begin, begin), begin, (), list[Attempt]()
        try:
            inside, end, notes = yield from self._list(reader, begin)
            attempts = self._attempts(reader, inside)
        except Unreadable as unreadable:
            error = unreadable
        if error is not None or any(attempt.error for attempt in attempts):
            stop = (
                reader.seek(self.closer, at) if error is None else (yield from reader.find(self.closer, at))
            )
            raw = self._raw_attempts(reader, at, stop) if error is not None or stop < end else None
            if raw is not None:
                end = stop + len(self.closer)
                error, notes, attempts = None, (), raw
        if error is not None:
            raise error
        self._refuse_open_string(reader, begin, end, attempts)
        self._add(reader, start, inside, attempts, end, notes)
        return end

    def _raw_attempts(self, reader: Reader, at: int, stop: int) -> Sequence[Attempt] | None:
        """Read the list at a place with raw strings, up to the closer; None if it cannot be read."""
        if stop < 0 or not reader.text.startswith("[", at):
            return None
        try:
            return RawCallReader(reader.text, stop, self.limits, reader.tools).calls(at)
        except Unreadable:
            return None

    def _json_calls(self, reader: Reader, start: int, at: int) -> Steps[int]:
        """Step: read calls as JSON; return where their block ends."""
        value, end = yield from reader.json(at, (self.closer,))
        after, notes = (yield from reader.skip(end)), ()
        if (yield from reader.which((self.closer,), after)):
            end = after + len(self.closer)
        elif after == len(reader.text) or (yield from reader.which((*self.openers, *self.turn_end), after)):
            notes = ("unclosed_tag",)
        else:
            raise Unreadable("extra_data", f"after its JSON comes something else than {self.closer}", after)
        try:
            found = self._of_json(value, notes, len(reader.calls), fits(reader.text, at, end, self.limits))
        except Unreadable as error:
            error.at, error.end = at, end
            raise
        self._add(reader, start, (at, end), found, end)
        return end

    def _of_json(self, value: JSON, notes: tuple[str, ...], first: int, is_small: bool) -> Sequence[Attempt]:
        notes = ("json_call", *notes)
        if isinstance(value, list):
            items = cast("list[JSON]", value)
            return attempts_of(items, self.shape, notes, self.limits, first, is_checked=is_small)
        attempt = read_call(value, limits=self.limits)
        attempt.notes += notes
        return [attempt]
