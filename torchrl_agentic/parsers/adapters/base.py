"""The base class of adapters: each attempted call becomes an entry with an id and a span."""

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

# Openers of most formats: tags whose name mentions tools, and two others.
_TAG = r"<[|\uff5c]?[\w:\u2581.-]*?(?:tool|function|action|invoke)[\w:\u2581.-]*+[|\uff5c]?[=>\s]"
_ATTEMPT = re.compile(rf"{_TAG}|\[TOOL_CALLS\]|functools\[")


@dataclass(frozen=True, slots=True)
class Found:
    """A call as another package's parser returns it.

    Attributes:
        name: Name of the tool, unchecked.
        arguments: Arguments as JSON text or as the decoded object, unchecked.
    """

    name: object
    arguments: object


class EngineParser(ToolCallParser):
    """Another package's parser of one format.

    If that parser drops a call or raises, the message gets one error entry. Ids are assigned here. If this
    package has a parser of the same format, that parser writes calls and results. Streams are read at their
    end.

    Args:
        format: Name of the parser in its package.
        native: This package's parser of the same format, or None.
        limits: Bounds on what is read from one message.

    Attributes:
        engine: Name of the package.
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
        """Run the other parser on a text. Any exception it raises becomes an error entry.

        Args:
            text: Text of the message.
            specs: Tools as specs of API servers.

        Returns:
            The text outside of calls, or None, and the calls.
        """

    def prepare(self) -> None:
        """Import the package and look up the format.

        Raises:
            MissingExtra: If the package is not installed.
            ValueError: If the package has no such format.
        """

    def parse(
        self, response: str | Mapping[str, JSON], *, tools: Tools | None = None, turn: int = 0
    ) -> ParseResult:
        """Read one assistant message.

        Raises:
            MissingExtra: If the package is not installed.
            ValueError: If it has no such format.
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
        """Read a text; return its calls and the bounds of the part of the text that contains them."""
        openers = self._openers(text)
        reason = "it found no call"
        try:
            content, found = self.extract(text, specs)
        except Exception as error:
            logger.debug("%s:%s failed", self.engine, self.format, exc_info=True)
            content, found, reason = None, [], f"it raised {type(error).__name__}"
        attempts = [self._attempt(item, index, text) for index, item in enumerate(found)]
        inside = sum(self._openers_in(item.args) for item in attempts)
        if len(openers) - inside > 0 and (not attempts or self._lost(openers, len(attempts), inside)):
            error = CallParseError("dropped", f"the parser of {self.engine} could not read it: {reason}")
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
                raise CallParseError(
                    "too_large", f"a call may have at most {self.limits.argument_bytes} bytes"
                )
            args, _ = read_arguments(found.arguments)
        except CallParseError as error:
            error.at = None  # an index in the other parser's result, not in the message
            return PartialCall(name, error=call_error(index, error, text, self._shape))
        return PartialCall(name.strip(), args)

    @property
    def _shape(self) -> str:
        return getattr(self.native, "shape", "") or f"the format {self.format!r} requires"

    def _markers(self) -> tuple[str, ...]:
        if not isinstance(self.native, TextParser):
            return ()
        return tuple(opener for opener in self.native.format.openers if len(opener) > 1)

    def _openers(self, text: str) -> list[int]:
        """Return the places where a call probably opens."""
        pattern = "|".join(map(re.escape, self._markers()))
        return [match.start() for match in (re.compile(pattern) if pattern else _ATTEMPT).finditer(text)]

    def _openers_in(self, args: Mapping[str, JSON]) -> int:
        return sum(len(self._openers(value)) for value in args.values() if isinstance(value, str))

    def _lost(self, openers: Sequence[int], read: int, inside: int) -> bool:
        """Return whether there are more openers than calls, in a format with one opener per call."""
        return bool(self._markers()) and len(openers) - inside > read

    def _after_content(self, text: str, content: str | None) -> int:
        before = (content or "").rstrip()
        return len(before) if before and text.startswith(before) else 0

    def _end(self, text: str, begin: int) -> int:
        """Return the end of the last call: behind the last known closer, else the end of the text."""
        if not isinstance(self.native, TextParser):
            return len(text)
        format = self.native.format
        closers = [closer for closer in (format.closer, format.section[1]) if closer]
        ends = [at + len(closer) for closer in closers if (at := text.rfind(closer, begin)) >= 0]
        return max(ends, default=len(text))

    def render_result(self, call_id: str, result: ToolResult) -> Mapping[str, JSON]:
        """Write one result as the parser of this package does, or as a plain message."""
        if self.native is not None:
            return self.native.render_result(call_id, result)
        return super().render_result(call_id, result)

    def with_tokenizer(self, tokenizer: AddedTokens, **template_kwargs: Any) -> Self:
        """Return a copy of the parser that escapes the control tokens of a tokenizer."""
        made = super().with_tokenizer(tokenizer, **template_kwargs)
        made.native = (
            None if self.native is None else self.native.with_tokenizer(tokenizer, **template_kwargs)
        )
        return made

    def render(self, calls: Sequence[ParsedCall], results: Sequence[ToolResult]) -> list[Mapping[str, JSON]]:
        """Write all results of a turn as the parser of this package does, or as plain messages."""
        return super().render(calls, results) if self.native is None else self.native.render(calls, results)

    def render_call(self, call: ParsedCall) -> str:
        """Write a call as the parser of this package does.

        Raises:
            ValueError: If this package has no parser of the format.
        """
        if self.native is None:
            raise ValueError(f"{self.engine}:{self.format} can read calls but not write them")
        return self.native.render_call(call)
