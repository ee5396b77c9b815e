"""Parser of calls written as Markdown code, as in ReTool: the code of each fence is run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torchrl_agentic.messages import ParsedCall
from torchrl_agentic.parsers.engine.json_text import check_size
from torchrl_agentic.parsers.engine.partial_call import CallParseError, PartialCall
from torchrl_agentic.parsers.engine.reader import Incremental, Reader
from torchrl_agentic.parsers.engine.text_format import TextFormat
from torchrl_agentic.parsers.engine.text_parser import TextParser

_FENCE = "```"


class FenceParser(TextParser):
    """Fenced code in given languages is a call of one tool, with the code as its only argument.

        ```python
        print(1)
        ```

    A fence closes only at the start of a line. Fences of other languages are text, and so are `<code>` tags
    around a fence. Source: Feng et al., ReTool, arXiv:2504.11536.

    Args:
        tool: Name of the tool.
        argument: Name of its argument.
        languages: Words after the opening fence that mark a call.
        result: Name of the tag around a result.
        result_role: Role of the messages that carry results.
        **rules: Options of `TextParser`.
    """

    name = "fence"
    aliases = ("retool",)
    models = "ReTool and its forks"
    example = "```python … ```"
    stop = ("\n```\n",)
    format = TextFormat(
        openers=(_FENCE,), fences_are_text=False, openers_may_be_words=False, has_grammar=False
    )

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
            raise ValueError("languages must be a sequence of words, such as ('python', 'py')")
        self.tool, self.argument, self.languages = tool, argument, tuple(languages)
        self.result_role = result_role
        self.result_around = (f"<{result}>\n", f"\n</{result}>")
        self.format = replace(
            type(self).format,
            result_tags=(f"<{result}>", f"</{result}>"),
            shape=f"{_FENCE}{self.languages[0]}\n{argument}\n{_FENCE}",
        )

    def opens(self, reader: Reader, start: int) -> Incremental[bool]:
        """Return whether a fence in one of the languages opens here.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.
        """
        if not reader.is_line_start(start):
            return False
        line_end = yield from reader.line_end(start)
        info = reader.text[start + len(_FENCE) : line_end]
        return info.strip() in self.languages

    def read(self, reader: Reader, start: int) -> Incremental[int]:
        """Read one fence.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.
        """
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
        """Return the end of the code and of its fence; (-1, -1) if it never closes."""
        while (found := (yield from reader.find(f"\n{_FENCE}", at))) >= 0:
            end = found + 1 + len(_FENCE)
            line_end = yield from reader.line_end(end)
            if not reader.text[end:line_end].strip():
                return found, end
            at = end
        return -1, -1

    def end_of_malformed(self, reader: Reader, start: int, broke: int) -> Incremental[int]:
        """Return the end of the malformed fence at `start`.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.
            broke: Index where reading failed.
        """
        del broke
        _, end = yield from self._closing(reader, start)
        return len(reader.text) if end < 0 else end

    def write(self, call: ParsedCall) -> str:
        """Write a call as the model would.

        Raises:
            ValueError: If it calls another tool, or its code would close the fence.
        """
        code = call.args.get(self.argument)
        if call.tool != self.tool or list(call.args) != [self.argument] or not isinstance(code, str):
            raise ValueError(f"a fence can only express {self.tool}({self.argument}=…); got {call.tool!r}")
        if not code.strip() or any(
            not line.strip("`").strip() and line[:3] == _FENCE for line in code.split("\n")
        ):
            raise ValueError("the code is empty or contains a line that closes the fence")
        return f"{_FENCE}{self.languages[0]}\n{code}\n{_FENCE}"
