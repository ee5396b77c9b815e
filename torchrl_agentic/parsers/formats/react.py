"""Parser of ReAct prompts: `Action:` and `Action Input:` lines."""

from __future__ import annotations

from torchrl_agentic.messages import JSON, ParsedCall
from torchrl_agentic.parsers.engine.json_text import decode_any, dumps, read_arguments
from torchrl_agentic.parsers.engine.partial_call import CallParseError, PartialCall
from torchrl_agentic.parsers.engine.reader import Incremental, Reader
from torchrl_agentic.parsers.engine.scan import named_call
from torchrl_agentic.parsers.engine.text_format import TextFormat
from torchrl_agentic.parsers.engine.text_parser import TextParser
from torchrl_agentic.parsers.engine.typed_values import only_string

_ACTION, _INPUT, _OBSERVATION = "Action:", "Action Input:", "Observation:"
_LINES = (f"\n{_OBSERVATION}", "\nThought:", f"\n{_ACTION}", "\nFinal Answer:")


class ReActParser(TextParser):
    r"""The format of ReAct prompts.

        Action: f
        Action Input: {"a": 1}

    For a tool with one string argument the input may be plain text, up to `\nObservation:`. If the model
    writes an observation itself, the rest of the message is text. Source: Yao et al., ReAct,
    arXiv:2210.03629, with the JSON input of later agents.
    """

    name = "react"
    models = "ReAct prompts"
    example = "Action: f … Action Input: {…}"
    result_role = "user"
    result_around = (f"{_OBSERVATION} ", "")
    format = TextFormat(
        openers=("Action:",),
        turn_end=("\nObservation:",),
        more_markers=("Action Input:",),
        openers_may_be_words=False,
    )

    def opens(self, reader: Reader, start: int) -> Incremental[bool]:
        """Return whether the marker is at the start of a line.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.
        """
        return reader.is_line_start(start)
        yield

    def read(self, reader: Reader, start: int) -> Incremental[int]:
        """Read one action and its input.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.
        """
        line_end = yield from reader.find("\n", start)
        if line_end < 0:
            raise CallParseError("unclosed", f"the message ends before {_INPUT}", len(reader.text))
        name = reader.text[start + len(_ACTION) : line_end].strip()
        if not name:
            raise CallParseError("missing_name", f"{_ACTION} names no tool", start)
        at = yield from reader.skip(line_end)
        if not (yield from reader.which((_INPUT,), at)):
            code = "unclosed" if at == len(reader.text) else "extra_data"
            raise CallParseError(code, f"expecting {_INPUT}", line_end, tool=name)
        read = self._input(reader, at + len(_INPUT), name)
        return (yield from named_call(reader, start, name, read))

    def _input(self, reader: Reader, begin: int, name: str) -> Incremental[tuple[PartialCall, int]]:
        at = yield from reader.skip(begin)
        plain = None if reader.tools is None else only_string(reader.tools.get(name))
        if at == len(reader.text):
            raise CallParseError("unclosed", "the message ends before the input", at)
        if plain is not None and reader.text[at] != "{":
            end = yield from reader.find(f"\n{_OBSERVATION}", begin)
            if end < 0:
                raise CallParseError("unclosed", f"plain input must end with {_OBSERVATION}", at)
            return PartialCall(args={plain: reader.text[at:end].strip()}, notes=("plain_input",)), end
        if reader.text[at] in 'n"':  # null, or an object as a JSON string
            end = yield from reader.line_end(at)
            value = decode_any(reader.text[at:end], self.limits)
        else:
            value, end = yield from self._json(reader, at)
        line_end = yield from reader.line_end(end)
        if reader.text[end:line_end].strip():
            raise CallParseError("extra_data", "unexpected text after the input, on the same line", end)
        args, notes = read_arguments(value, self.limits)
        return PartialCall(args=args, notes=notes), end

    def _json(self, reader: Reader, at: int) -> Incremental[tuple[JSON, int]]:
        try:
            return (yield from reader.json(at, _LINES))
        except CallParseError as error:
            if error.code != "unclosed" or (yield from reader.balanced(at)) < 0:
                raise
            raise CallParseError("invalid_json", "invalid JSON", error.at) from None

    def end_of_malformed(self, reader: Reader, start: int, broke: int) -> Incremental[int]:
        """Return the end of the malformed action at `start`: the line where another part begins.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.
            broke: Index where reading failed.
        """
        place, _ = yield from reader.find_first(_LINES, max(start + 1, broke - 1))
        return len(reader.text) if place < 0 else place

    def write(self, call: ParsedCall) -> str:
        """Write a call as the model would.

        Raises:
            ValueError: If the name of the tool has several lines or surrounding white space.
        """
        if "\n" in call.tool or call.tool != call.tool.strip() or not call.tool:
            raise ValueError(f"the format cannot express the name {call.tool!r}")
        return f"{_ACTION} {call.tool}\n{_INPUT} {dumps(call.args)}"
