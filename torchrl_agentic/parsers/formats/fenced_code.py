"""Calls as Markdown code, as ReTool and its forks have them: the code of each fence is run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torchrl_agentic.messages import JSON, ParsedCall, ToolResult
from torchrl_agentic.parsers.engine.json_text import check_size
from torchrl_agentic.parsers.engine.partial_call import CallParseError, PartialCall
from torchrl_agentic.parsers.engine.reader import Incremental, Reader
from torchrl_agentic.parsers.engine.text_parser import TextParser

_FENCE = "```"


class FenceParser(TextParser):
    """A fence of one of some languages is a call of one tool, whose one argument is the code.

    A fence closes only at the start of a line. Fences of other languages are text. result: the tag around a
    result. `<code>` around the fence is left in the text.
    """

    name: ClassVar[str] = "fence"
    aliases = ("retool",)
    models = "ReTool and its forks"
    example = "```python … ```"
    stop = ("\n```\n",)
    openers = (_FENCE,)
    fences_are_text = False

    def __init__(
        self,
        *,
        tool: str = "python",
        argument: str = "code",
        languages: Sequence[str] = ("python", "py"),
        result: str = "interpreter",
        result_role: str = "user",
        **rules: Any,
    ) -> None:
        super().__init__(**rules)
        if not languages or isinstance(languages, str):
            raise ValueError("languages are several words, such as ('python', 'py')")
        self.tool, self.argument, self.languages = tool, argument, tuple(languages)
        self.result, self.result_role = result, result_role
        self.result_tags = (f"<{result}>", f"</{result}>")
        self.shape = f"{_FENCE}{self.languages[0]}\n{argument}\n{_FENCE}"

    def opens(self, reader: Reader, start: int) -> Incremental[bool]:
        """Step: whether a fence of one of our languages opens here."""
        if not reader.is_line_start(start):
            return False
        line_end = yield from reader.line_end(start)
        info = reader.text[start + len(_FENCE) : line_end]
        return info.strip() in self.languages

    def read(self, reader: Reader, start: int) -> Incremental[int]:
        """Read one fence."""
        begin = yield from reader.find("\n", start)
        if begin < 0:
            raise CallParseError(
                "unclosed", "the message ends before the code", len(reader.text), tool=self.tool
            )
        stop, end = yield from self._closing(reader, begin)
        if stop < 0:
            raise CallParseError("unclosed", f"the message ends before {_FENCE}", begin, tool=self.tool)
        code = reader.text[begin + 1 : stop]
        if not code.strip():
            raise CallParseError("empty", "there is no code in the fence", begin, tool=self.tool)
        check_size(reader.text, begin, stop, self.limits, tool=self.tool)
        reader.add(PartialCall(self.tool, {self.argument: code}), start, end)
        return end

    def _closing(self, reader: Reader, at: int) -> Incremental[tuple[int, int]]:
        """Step: give where the code ends and where the fence does; -1 if it never closes."""
        while (found := (yield from reader.find(f"\n{_FENCE}", at))) >= 0:
            end = found + 1 + len(_FENCE)
            line_end = yield from reader.line_end(end)
            if not reader.text[end:line_end].strip():
                return found, end
            at = end
        return -1, -1

    def end_of_malformed(self, reader: Reader, start: int, broke: int) -> Incremental[int]:
        """Step: give the end of the unreadable fence at `start`."""
        del broke
        _, end = yield from self._closing(reader, start)
        return len(reader.text) if end < 0 else end

    def write(self, call: ParsedCall) -> str:
        """Write a call as the model would.

        Raises:
            ValueError: it is a call of something else, or its code would close the fence.
        """
        code = call.args.get(self.argument)
        if call.tool != self.tool or list(call.args) != [self.argument] or not isinstance(code, str):
            raise ValueError(f"a fence holds {self.tool}({self.argument}=…) alone; got {call.tool!r}")
        if not code.strip() or any(
            not line.strip("`").strip() and line[:3] == _FENCE for line in code.split("\n")
        ):
            raise ValueError("the code would close its own fence, or is empty")
        return f"{_FENCE}{self.languages[0]}\n{code}\n{_FENCE}"

    def frame(self, name: str) -> None:
        """Give none: what stands inside is free text."""
        del name

    def render_result(self, call_id: str, result: ToolResult) -> Mapping[str, JSON]:
        """Write one result in its tag."""
        content = f"<{self.result}>\n{result.text}\n</{self.result}>"
        return {"role": self.result_role, "content": content, "tool_call_id": call_id}
