"""Calls as JSON between `<tool_call>` tags: Hermes 2 and 3, Qwen2.5, Qwen3, QwQ. The default.

Format: https://github.com/NousResearch/Hermes-Function-Calling, and the chat templates of Qwen2.5 and Qwen3.
"""

from __future__ import annotations

from typing import ClassVar, cast

from torchrl_agentic.messages import JSON, ParsedCall
from torchrl_agentic.parsers.base import Attempt, Unreadable
from torchrl_agentic.parsers.jsontext import decode, dumps, read_call, skip_whitespace
from torchrl_agentic.parsers.text import Cursor, TextParser


class HermesParser(TextParser):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them, with text around.

    A missing closer is forgiven where the JSON is complete and the next block or the end follows. In one
    block a list of calls is read too.
    """

    name: ClassVar[str] = "hermes"
    stop: ClassVar[tuple[str, ...]] = ("<|im_end|>",)
    opener: ClassVar[str] = "<tool_call>"
    closer: ClassVar[str] = "</tool_call>"
    shape: str = '<tool_call>\n{"name": "tool name", "arguments": {"argument": "value"}}\n</tool_call>'

    def find_opener(self, cursor: Cursor, start: int) -> int:
        """Give the place of the next opener from `start` on, or -1."""
        return cursor.find(self.opener, start)

    def read(self, cursor: Cursor, start: int) -> tuple[list[Attempt], int]:
        """Read one block."""
        text, notes = cursor.text, ()
        at = skip_whitespace(text, start + len(self.opener))
        while text.startswith(self.opener, at):
            at, notes = skip_whitespace(text, at + len(self.opener)), ("repeated_opener",)
        if at == len(text):
            raise Unreadable("unclosed", "the message ends inside the call")
        if text.startswith(self.closer, at):
            raise Unreadable("empty", "there is nothing between the tags", at)
        value, end = decode(text, at)
        after = skip_whitespace(text, end)
        if text.startswith(self.closer, after):
            end = after + len(self.closer)
        elif after == len(text) or text.startswith(self.opener, after):
            notes = (*notes, "unclosed_tag")
        else:
            raise Unreadable("extra_data", f"after its JSON stands something else than {self.closer}", after)
        return self._calls(value, notes), end

    def render_call(self, call: ParsedCall) -> str:
        """Write a call as the model would."""
        body = dumps({"name": call.tool, "arguments": call.args})
        return f"{self.opener}\n{body}\n{self.closer}"

    def _calls(self, value: JSON, notes: tuple[str, ...]) -> list[Attempt]:
        from torchrl_agentic.parsers.structured import attempts_of

        items = cast("list[JSON]", value) if isinstance(value, list) and value else None
        if items is not None:
            return attempts_of(items, self.shape, ("list_of_calls", *notes))
        attempt = read_call(value)
        attempt.notes += notes
        return [attempt]
