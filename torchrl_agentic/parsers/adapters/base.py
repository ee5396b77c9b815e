"""What all adapters share: the guard that lets no attempt get lost, ids, spans, and text put back."""

from __future__ import annotations

import logging
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from torchrl_agentic.messages import JSON, Fields, ParsedCall, ParseResult, ToolResult
from torchrl_agentic.parsers.base import LIMITS, Limits, ToolCallParser, Tools, message_text, specs_of
from torchrl_agentic.parsers.control_tokens import AddedTokens
from torchrl_agentic.parsers.engine.decoded_calls import read_message_calls
from torchrl_agentic.parsers.engine.json_text import fits, read_arguments
from torchrl_agentic.parsers.engine.partial_call import (
    CallParseError,
    PartialCall,
    assign_ids,
    call_error,
    over_limit_error,
)
from torchrl_agentic.parsers.engine.text_parser import TextParser

logger = logging.getLogger(__name__)

# What opens a call in most formats: a tag whose name tells of tools, and the odd ones.
_TAG = r"<[|\uff5c]?[\w:\u2581.-]*?(?:tool|function|action|invoke)[\w:\u2581.-]*+[|\uff5c]?[=>\s]"
_ATTEMPT = re.compile(rf"{_TAG}|\[TOOL_CALLS\]|functools\[")


@dataclass(frozen=True, slots=True)
class Found:
    """A call as another parser gives it. arguments: JSON as text, or the object itself."""

    name: object
    arguments: object


class EngineParser(ToolCallParser):
    """Another package's parser of one format.

    An attempt of which that parser says nothing becomes one error entry, and so does a crash in it; ids are
    ours. Where a parser of ours has the same format, it writes calls and results. Streams are read whole.

    engine: the name of the package. format: the parser's name there. native: ours of the same format.
    """

    engine: ClassVar[str] = ""

    def __init__(self, format: str, *, native: ToolCallParser | None = None, limits: Limits = LIMITS) -> None:
        self.format = format
        self.native = native
        self.limits = limits
        if native is not None:
            self.stop, self.result_role = native.stop, native.result_role

    @abstractmethod
    def extract(self, text: str, specs: Sequence[Fields]) -> tuple[str | None, list[Found]]:
        """Let the other parser read: what it takes for text, and for calls. It may raise what it likes."""

    def prepare(self) -> None:
        """Import what is needed.

        Raises:
            MissingExtra: it is not installed.
            ValueError: there is no such format.
        """

    def parse(
        self, response: str | Mapping[str, JSON], *, tools: Tools | None = None, turn: int = 0
    ) -> ParseResult:
        """Read one assistant message.

        Raises:
            MissingExtra: the package is not installed.
            ValueError: it has no such format.
        """
        self.prepare()
        text = message_text(response)
        attempts, begin, end = self._attempts(text, [] if tools is None else specs_of(tools))
        if not attempts:
            structured = [] if isinstance(response, str) else read_message_calls(response, self.limits)
            return ParseResult(text, assign_ids(structured, turn), response)
        for index, attempt in enumerate(attempts):
            attempt.span = (begin, end) if index == 0 else (end, end)
        return ParseResult(text[:begin] + text[end:], assign_ids(attempts, turn), response)

    def _attempts(self, text: str, specs: Sequence[Fields]) -> tuple[list[PartialCall], int, int]:
        """Read a text; give its attempts, and what part of it they stand in."""
        openers = self._openers(text)
        reason = "nothing readable was found"
        try:
            content, found = self.extract(text, specs)
        except Exception as error:
            logger.debug("%s:%s failed", self.engine, self.format, exc_info=True)
            content, found, reason = None, [], f"its reader failed with {type(error).__name__}"
        attempts = [self._attempt(item, index, text) for index, item in enumerate(found)]
        inside = sum(self._openers_in(item.args) for item in attempts)
        if len(openers) - inside > 0 and (not attempts or self._lost(openers, len(attempts), inside)):
            error = CallParseError("dropped", f"{self.engine} could not read it: {reason}")
            attempts.append(PartialCall(error=call_error(len(attempts), error, text, self._shape)))
        if not attempts:
            return [], 0, 0
        begin = openers[0] if openers else self._after_content(text, content)
        return attempts, begin, self._end(text, begin)

    def _attempt(self, found: Found, index: int, text: str) -> PartialCall:
        if index >= self.limits.calls:
            return PartialCall(error=over_limit_error(index, self.limits.calls))
        name = found.name if isinstance(found.name, str) else ""
        try:
            if not name.strip():
                raise CallParseError("missing_name", "the call has no name")
            if isinstance(found.arguments, str) and not fits(
                found.arguments, 0, len(found.arguments), self.limits
            ):
                raise CallParseError("too_large", f"a call has at most {self.limits.argument_bytes} bytes")
            args, _ = read_arguments(found.arguments)
        except CallParseError as error:
            error.at = None  # a place in what the other parser made, not in the message
            return PartialCall(name, error=call_error(index, error, text, self._shape))
        return PartialCall(name.strip(), args)

    @property
    def _shape(self) -> str:
        return getattr(self.native, "shape", "") or f"the format {self.format!r} has it"

    def _markers(self) -> tuple[str, ...]:
        if not isinstance(self.native, TextParser):
            return ()
        return tuple(opener for opener in self.native.openers if len(opener) > 1)

    def _openers(self, text: str) -> list[int]:
        """Where something opens a call, as far as can be template_kwargs."""
        pattern = "|".join(map(re.escape, self._markers()))
        return [match.start() for match in (re.compile(pattern) if pattern else _ATTEMPT).finditer(text)]

    def _openers_in(self, args: Mapping[str, JSON]) -> int:
        return sum(len(self._openers(value)) for value in args.values() if isinstance(value, str))

    def _lost(self, openers: Sequence[int], read: int, inside: int) -> bool:
        """Whether there are more openers than calls, where each opener of the format is one call's."""
        return bool(self._markers()) and len(openers) - inside > read

    def _after_content(self, text: str, content: str | None) -> int:
        before = (content or "").rstrip()
        return len(before) if before and text.startswith(before) else 0

    def _end(self, text: str, begin: int) -> int:
        """Where the last call ends: behind the last closer, as far as it is known."""
        if not isinstance(self.native, TextParser):
            return len(text)
        closers = [closer for closer in (self.native.closer, self.native.section[1]) if closer]
        ends = [at + len(closer) for closer in closers if (at := text.rfind(closer, begin)) >= 0]
        return max(ends, default=len(text))

    def render_result(self, call_id: str, result: ToolResult) -> Mapping[str, JSON]:
        """Write one result as our own parser of the format does, or plainly."""
        if self.native is not None:
            return self.native.render_result(call_id, result)
        return super().render_result(call_id, result)

    def with_tokenizer(self, tokenizer: AddedTokens, **template_kwargs: Any) -> Self:
        """Return a parser of the same format that escapes the control tokens of a tokenizer."""
        made = super().with_tokenizer(tokenizer, **template_kwargs)
        made.native = (
            None if self.native is None else self.native.with_tokenizer(tokenizer, **template_kwargs)
        )
        return made

    def render(self, calls: Sequence[ParsedCall], results: Sequence[ToolResult]) -> list[Mapping[str, JSON]]:
        """Write all results of a turn as our own parser of the format does."""
        return super().render(calls, results) if self.native is None else self.native.render(calls, results)

    def render_call(self, call: ParsedCall) -> str:
        """Write a call as our own parser of the format does.

        Raises:
            ValueError: there is none.
        """
        if self.native is None:
            raise ValueError(f"{self.engine}:{self.format} reads calls, and cannot write them")
        return self.native.render_call(call)
