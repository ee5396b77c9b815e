"""Calls as plain tags, as Search-R1, RAGEN and verl-agent have them: `<search> query </search>`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torchrl_agentic.messages import JSON, ParsedCall, ToolResult
from torchrl_agentic.parsers.engine.json_text import check_size
from torchrl_agentic.parsers.engine.partial_call import CallParseError, PartialCall
from torchrl_agentic.parsers.engine.reader import Incremental, Reader
from torchrl_agentic.parsers.engine.text_parser import TextParser

SEARCH = {"search": ("search", "query")}


class TagsParser(TextParser):
    """One tag per tool, whose one argument is the text inside, without the white space around it.

    tags: tag → (tool, argument). result: the tag around a result. answer: the tag of the final answer, at
    whose end the model stops too. result_role: results are messages of the user, for models that know no
    other role.
    """

    name: ClassVar[str] = "tags"
    aliases = ("search_r1",)
    models = "Search-R1, RAGEN"
    example = "<search>query</search>"

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
            raise ValueError(f"tags are words, one per tool; got {list(self.tags)}")
        self.openers = tuple(f"<{tag}>" for tag in self.tags)
        self.stop = (*(f"</{tag}>" for tag in self.tags), f"</{answer}>")
        self.result_tags = (f"<{result}>", f"</{result}>")
        self.result = result
        self.result_role = result_role
        first, (_, argument) = next(iter(self.tags.items()))
        self.shape = f"<{first}>{argument}</{first}>"

    def read(self, reader: Reader, start: int) -> Incremental[int]:
        """Read one tag."""
        opener = yield from reader.which(self.openers, start)
        tool, argument = self.tags[opener[1:-1]]
        closer, begin = f"</{opener[1:]}", start + len(opener)
        begin = yield from reader.past_repeated(opener, begin)
        end = yield from reader.find(closer, begin)
        if end < 0:
            raise CallParseError("unclosed", f"the message ends before {closer}", begin, tool=tool)
        value = reader.text[begin:end].strip()
        if not value:
            raise CallParseError("empty", f"there is nothing in {opener}", begin, tool=tool)
        check_size(reader.text, begin, end, self.limits, tool=tool)
        reader.add(PartialCall(tool, {argument: value}), start, end + len(closer))
        return end + len(closer)

    def end_of_malformed(self, reader: Reader, start: int, broke: int) -> Incremental[int]:
        """Step: give the end of the unreadable tag at `start`."""
        opener = yield from reader.which(self.openers, start)
        closer = f"</{opener[1:]}"
        end = yield from reader.find(closer, start)
        return len(reader.text) if end < 0 else end + len(closer)

    def write(self, call: ParsedCall) -> str:
        """Write a call as the model would.

        Raises:
            ValueError: no tag stands for that tool and its arguments, or the text holds the tag.
        """
        for tag, (tool, argument) in self.tags.items():
            if tool == call.tool and list(call.args) == [argument]:
                value = call.args[argument]
                if not isinstance(value, str) or not value or value != value.strip() or f"</{tag}>" in value:
                    raise ValueError(f"<{tag}> cannot hold {value!r}")
                return f"<{tag}>{value}</{tag}>"
        raise ValueError(f"no tag stands for {call.tool!r} with {', '.join(call.args) or 'no arguments'}")

    def frame(self, name: str) -> None:
        """Give none: what stands inside is free text."""
        del name

    def render_result(self, call_id: str, result: ToolResult) -> Mapping[str, JSON]:
        """Write one result in its tag."""
        content = f"<{self.result}>{result.text}</{self.result}>"
        return {"role": self.result_role, "content": content, "tool_call_id": call_id}
