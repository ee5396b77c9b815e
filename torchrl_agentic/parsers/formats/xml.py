"""Parser of TorchRL's own tags."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from typing import cast

from torchrl_agentic.messages import JSON, ParsedCall, ToolResult
from torchrl_agentic.parsers.engine.json_text import decode, skip_whitespace
from torchrl_agentic.parsers.engine.partial_call import CallParseError, PartialCall
from torchrl_agentic.parsers.engine.reader import Incremental, Reader
from torchrl_agentic.parsers.engine.text_format import TextFormat
from torchrl_agentic.parsers.engine.text_parser import TextParser

# Possessive quantifiers (`++`, `*+`) never backtrack, so a failed match takes linear time.
_ATTRIBUTE = re.compile(r"""\s++([\w:-]++)\s*+=\s*+("[^"<>]*+"|'[^'<>]*+')""")
_TAG_END = re.compile(r"\s*+(/?)>")
_TAG = "<tool"


class XMLToolCallParser(TextParser):
    """TorchRL's own tags, with attributes in any order and either kind of quotes.

        <tool name="f" tag="A">{"a": 1}</tool>

    An empty body or `<tool name="f"/>` is a call without arguments. The tag is also the call's id. Results
    are written as `<tool_result>` elements. Source: `XMLToolCallParser` of TorchRL.
    """

    name = "xml"
    models = "TorchRL's own"
    example = '<tool name="f">{…}</tool>'
    format = TextFormat(
        openers=("<tool ", "<tool>", "<tool\n", "<tool\t", "<tool\r", "<tool/"),
        closer="</tool>",
        result_tags=("<tool_result", "</tool_result>"),
    )

    def opens(self, reader: Reader, start: int) -> Incremental[bool]:
        """Return whether the tag begins a call; a bare `<tool>` that is never closed is prose.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.
        """
        if not reader.at("<tool>", start):
            return True
        return (yield from reader.find(self.format.closer, start)) >= 0

    def read(self, reader: Reader, start: int) -> Incremental[int]:
        """Read one element.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.
        """
        at = start + len(_TAG)
        yield from reader.find(">", at)
        attributes: dict[str, str] = {}
        while match := _ATTRIBUTE.match(reader.text, at):
            if match[1] in attributes:
                raise CallParseError("missing_name", f"its tag has the attribute {match[1]} twice", at)
            attributes[match[1]] = html.unescape(match[2][1:-1])
            at = match.end()
        end_of_tag = _TAG_END.match(reader.text, at)
        if end_of_tag is None:
            raise CallParseError("unclosed", "its opening tag is malformed", at)
        name, tag = attributes.get("name", "").strip(), attributes.get("tag") or None
        if not name:
            raise CallParseError("missing_name", "its tag has no name attribute", start, call_id=tag)
        args: Mapping[str, JSON] = {}
        end = end_of_tag.end()
        if not end_of_tag[1]:
            reader.header = name, tag
            args, end = yield from self._body(reader, end)
        reader.add(PartialCall(name, args, call_id=tag, tag=tag), start, end)
        return end

    def _body(self, reader: Reader, start: int) -> Incremental[tuple[Mapping[str, JSON], int]]:
        format = self.format
        at = yield from reader.skip(start)
        if (yield from reader.which((format.closer,), at)):
            return {}, at + len(format.closer)
        try:
            value, end = yield from reader.json(at, (format.closer,))
        except CallParseError as error:
            value, end = yield from self._escaped(reader, at, error)
        after = yield from reader.skip(end)
        if not (yield from reader.which((format.closer,), after)):
            if after == len(reader.text) or (yield from reader.which(format.openers, after)):
                reason = (
                    "the message ends before" if after == len(reader.text) else "the next call begins before"
                )
                error = CallParseError("unclosed", f"{reason} {format.closer}", after)
                error.end = after
                raise error
            raise CallParseError(
                "extra_data", f"unexpected text after the JSON, expecting {format.closer}", after
            )
        end = after + len(format.closer)
        if not isinstance(value, dict):
            error = CallParseError("bad_arguments", "its body must be a JSON object", at)
            error.end = end
            raise error
        return cast("dict[str, JSON]", value), end

    def _escaped(self, reader: Reader, start: int, error: CallParseError) -> Incremental[tuple[JSON, int]]:
        """Read a body that is JSON once its XML entities are resolved, and return it with its end.

        Raises:
            CallParseError: If it is not.
        """
        closer = yield from reader.find(self.format.closer, start)
        body = reader.text[start : max(start, closer)]
        if "&quot;" not in body and "&#" not in body:
            raise error
        plain = html.unescape(body)
        try:
            value, end = decode(plain, skip_whitespace(plain, 0), self.limits)
        except CallParseError:
            raise error from None
        if plain[end:].strip():
            raise error
        return value, closer

    def write(self, call: ParsedCall) -> str:
        """Write a call; `<`, `>` and `&` inside the JSON become escapes."""
        import json

        body = json.dumps(call.args, ensure_ascii=False)
        for character in "<>&":
            body = body.replace(character, f"\\u{ord(character):04x}")
        tag = f' tag="{html.escape(call.tag)}"' if call.tag else ""
        return f'<tool name="{html.escape(call.tool)}"{tag}>{body}</tool>'

    def render_result(self, call_id: str, result: ToolResult) -> Mapping[str, JSON]:
        """Write one result as a `<tool_result>` element, errors marked.

        Args:
            call_id: Id of the call, control tokens escaped.
            result: Result of the call, control tokens escaped.
        """
        mark = "[error] " if result.is_error else ""
        content = f'<tool_result call_id="{html.escape(call_id)}">{mark}{result.text}</tool_result>'
        return {"role": "tool", "content": content, "tool_call_id": call_id}
