"""TorchRL's own tags: `<tool name="f" tag="A">{"a": 1}</tool>`."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from typing import ClassVar, cast

from torchrl_agentic.messages import JSON, ParsedCall, ToolResult
from torchrl_agentic.parsers.base import Attempt, Unreadable
from torchrl_agentic.parsers.jsontext import decode, skip_whitespace
from torchrl_agentic.parsers.text import Cursor, TextParser

# Possessive quantifiers (`++`, `*+`) take what they match for good, so that a failed match costs linear time.
_ATTRIBUTE = re.compile(r"""\s++([\w:-]++)\s*+=\s*+("[^"<>]*+"|'[^'<>]*+')""")
_TAG_END = re.compile(r"\s*+(/?)>")
_AFTER_NAME = tuple(" \t\r\n/")


class XMLToolCallParser(TextParser):
    """`<tool name="f" tag="A">{json}</tool>`, with attributes in any order and either kind of quotes.

    An empty body stands for no arguments. The tag is the call's id too. `<tool name="f"/>` is a call without
    arguments. Results come as `<tool_result>`.
    """

    name: ClassVar[str] = "xml"
    stop: ClassVar[tuple[str, ...]] = ()
    closer: ClassVar[str] = "</tool>"
    shape: str = '<tool name="tool name">{"argument": "value"}</tool>'

    def find_opener(self, cursor: Cursor, start: int) -> int:
        """Give the place of the next `<tool` that is the whole name of a tag, or -1.

        A bare `<tool>` that nothing closes is prose about tools.
        """
        while (start := cursor.find("<tool", start)) >= 0:
            after = start + len("<tool")
            if cursor.text.startswith(_AFTER_NAME, after):
                return start
            if cursor.text.startswith(">", after) and cursor.find(self.closer, after) >= 0:
                return start
            start = after
        return -1

    def read(self, cursor: Cursor, start: int) -> tuple[list[Attempt], int]:
        """Read one element."""
        text, at = cursor.text, start + len("<tool")
        attributes: dict[str, str] = {}
        while match := _ATTRIBUTE.match(text, at):
            attributes[match[1]] = html.unescape(match[2][1:-1])
            at = match.end()
        end_of_tag = _TAG_END.match(text, at)
        if end_of_tag is None:
            raise Unreadable("unclosed", "its opening tag cannot be read", at)
        name, tag = attributes.get("name", "").strip(), attributes.get("tag") or None
        if not name:
            raise Unreadable("missing_name", "its tag has no name attribute", start)
        if end_of_tag[1]:
            return [Attempt(name, {}, call_id=tag, tag=tag)], end_of_tag.end()
        args, end = self._body(cursor, end_of_tag.end())
        return [Attempt(name, args, call_id=tag, tag=tag)], end

    def _body(self, cursor: Cursor, start: int) -> tuple[Mapping[str, JSON], int]:
        text, at = cursor.text, skip_whitespace(cursor.text, start)
        if text.startswith(self.closer, at):
            return {}, at + len(self.closer)
        try:
            value, end = decode(text, at)
        except Unreadable as error:
            value, end = self._escaped(cursor, at, error)
        after = skip_whitespace(text, end)
        if not text.startswith(self.closer, after):
            if after == len(text):
                raise Unreadable("unclosed", f"the message ends before {self.closer}")
            raise Unreadable("extra_data", f"after its JSON stands something else than {self.closer}", after)
        if not isinstance(value, dict):
            raise Unreadable("bad_arguments", "its body must be a JSON object", at)
        return cast("dict[str, JSON]", value), after + len(self.closer)

    def _escaped(self, cursor: Cursor, start: int, error: Unreadable) -> tuple[JSON, int]:
        """Read a body that is JSON once its entities are resolved, as models write that learned XML well."""
        closer = cursor.find(self.closer, start)
        if closer < 0:
            raise (
                Unreadable("unclosed", f"the message ends before {self.closer}")
                if error.code != "too_deep"
                else error
            )
        body = cursor.text[start:closer]
        if "&quot;" not in body and "&#" not in body:
            raise error
        plain = html.unescape(body)
        try:
            value, end = decode(plain, 0)
        except Unreadable:
            raise error from None
        if plain[end:].strip():
            raise error
        return value, closer

    def render_call(self, call: ParsedCall) -> str:
        """Write a call; `<`, `>` and `&` inside the JSON become escapes."""
        import json

        body = json.dumps(call.args, ensure_ascii=False)
        for character in "<>&":
            body = body.replace(character, f"\\u{ord(character):04x}")
        tag = f' tag="{html.escape(call.tag)}"' if call.tag else ""
        return f'<tool name="{html.escape(call.tool)}"{tag}>{body}</tool>'

    def render_result(self, call_id: str, result: ToolResult) -> Mapping[str, JSON]:
        """Write one result as a `<tool_result>` element, errors marked."""
        mark = "[error] " if result.is_error else ""
        # A zero-width space keeps a tool from closing its element and forging another.
        text = result.text.replace("</tool_result", "<\u200b/tool_result")
        content = f'<tool_result call_id="{html.escape(call_id)}">{mark}{text}</tool_result>'
        return {"role": "tool", "content": content, "tool_call_id": call_id}
