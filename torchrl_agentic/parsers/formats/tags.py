"""Parser of plain tags, as in Search-R1, RAGEN and verl-agent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torchrl_agentic.messages import ParsedCall
from torchrl_agentic.parsers.engine.json_text import check_size
from torchrl_agentic.parsers.engine.partial_call import CallParseError, PartialCall
from torchrl_agentic.parsers.engine.reader import Incremental, Reader, finish
from torchrl_agentic.parsers.engine.text_format import TextFormat
from torchrl_agentic.parsers.engine.text_parser import TextParser

SEARCH = {"search": ("search", "query")}


class TagsParser(TextParser):
    """One tag per tool, whose only argument is the text inside, without surrounding white space.

        <search>capital of France</search>

    Source: Jin et al., Search-R1, arXiv:2503.09516.

    Args:
        tags: (tool, argument) by tag; by default `<search>` calls `search(query)`.
        result: Name of the tag around a result.
        answer: Name of the tag of the final answer, which also ends sampling.
        result_role: Role of the messages that carry results; "user" for models without a role of tools.
        **rules: Options of `TextParser`.
    """

    name = "tags"
    aliases = ("search_r1",)
    models = "Search-R1, RAGEN"
    example = "<search>query</search>"
    format = TextFormat(openers_may_be_words=False, has_grammar=False)

    def __init__(
        self,
        tags: Mapping[str, tuple[str, str]] | None = None,
        *,
        result: str = "information",
        answer: str = "answer",
        result_role: str = "user",
        **rules: Any,
    ) -> None:
        super().__init__(**rules)
        self.tags = dict(SEARCH if tags is None else tags)
        if not self.tags or not all(tag.replace("_", "").replace("-", "").isalnum() for tag in self.tags):
            raise ValueError(f"tags must be words, one per tool; got {list(self.tags)}")
        first, (_, argument) = next(iter(self.tags.items()))
        self.format = replace(
            type(self).format,
            openers=tuple(f"<{tag}>" for tag in self.tags),
            result_tags=(f"<{result}>", f"</{result}>"),
            shape=f"<{first}>{argument}</{first}>",
        )
        self.stop = (*(f"</{tag}>" for tag in self.tags), f"</{answer}>")
        self.result_around = (f"<{result}>", f"</{result}>")
        self.result_role = result_role

    def read(self, reader: Reader, start: int) -> Incremental[int]:
        """Read one tag.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.
        """
        opener = yield from reader.which(self.format.openers, start)
        tool, argument = self.tags[opener[1:-1]]
        begin = yield from reader.past_repeated(opener, start + len(opener))
        end = yield from self._content_end(reader, begin, opener)
        value = reader.text[begin:end].strip()
        if not value:
            raise CallParseError("empty", f"there is nothing in {opener}", begin, tool=tool)
        check_size(reader.text, begin, end, self.limits, tool=tool)
        end += len(opener) + 1
        reader.add(PartialCall(tool, {argument: value}), start, end)
        return end

    def _content_end(self, reader: Reader, begin: int, opener: str) -> Incremental[int]:
        """Return the place of the closing tag, which must precede the next tag of a tool."""
        tool, closer = self.tags[opener[1:-1]][0], f"</{opener[1:]}"
        end = yield from reader.find(closer, begin)
        if end < 0:
            raise CallParseError("unclosed", f"the message ends before {closer}", begin, tool=tool)
        following, _ = reader.first(self.format.openers, begin)
        if 0 <= following < end:
            reason = f"another tag begins before {closer}"
            raise CallParseError("unclosed", reason, following, end=following, tool=tool)
        return end

    def end_of_malformed(self, reader: Reader, start: int, broke: int) -> Incremental[int]:
        """Return the end of the malformed tag at `start`.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.
            broke: Index where reading failed.
        """
        opener = yield from reader.which(self.format.openers, start)
        closer = f"</{opener[1:]}"
        end = yield from reader.find(closer, start)
        return len(reader.text) if end < 0 else end + len(closer)

    def write(self, call: ParsedCall) -> str:
        """Write a call as the model would.

        Raises:
            ValueError: If no tag expresses the tool and its arguments, or the text contains the closing tag.
        """
        for tag, (tool, argument) in self.tags.items():
            if tool == call.tool and list(call.args) == [argument]:
                value = call.args[argument]
                if not isinstance(value, str) or not self._can_contain(tag, value):
                    raise ValueError(f"<{tag}> cannot contain {value!r}")
                return f"<{tag}>{value}</{tag}>"
        raise ValueError(f"no tag for {call.tool!r} with {', '.join(call.args) or 'no arguments'}")

    def _can_contain(self, tag: str, value: str) -> bool:
        opener, written = f"<{tag}>", f"{value}</{tag}>"
        try:
            end = finish(self._content_end(Reader(written), 0, opener))
        except CallParseError:
            return False
        return bool(value) and value == value.strip() and end == len(value)
