"""Parser of GPT-OSS: OpenAI's harmony format of messages with channels and recipients."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torchrl_agentic.messages import JSON, ParsedCall
from torchrl_agentic.parsers.engine.json_text import decode_any, dumps, read_arguments
from torchrl_agentic.parsers.engine.partial_call import CallParseError, PartialCall
from torchrl_agentic.parsers.engine.reader import Incremental, Reader
from torchrl_agentic.parsers.engine.scan import PROSE, attempt, named_call
from torchrl_agentic.parsers.engine.text_format import TextFormat, any_of
from torchrl_agentic.parsers.engine.text_parser import TextParser
from torchrl_agentic.parsers.engine.typed_values import only_string

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
_FUNCTIONS = "functions."
_ROLES = ("assistant", "user", "system", "developer", "tool")
_CHANNEL = re.compile(r"<\|channel\|>\s*+(\w++)")
_RECIPIENT = re.compile(r"(?:\A|\s|\|>)to=([^\s<]++)")
_ROLE = re.compile(r"<\|start\|>\s*+([^\s<]++)")
_BARE = re.compile(r"\s?to=([^\s<]{1,200}+)\s{0,8}+(?=<)")
_PART_OF_BARE = re.compile(r"\s?(?:to=[^\s<]{0,200}\s{0,8}(?:<[|\w]{0,12})?|to|t)?\Z")

_LONGEST_BARE = 240
_OPENERS = any_of((START, CHANNEL, MESSAGE))
_ENDS = any_of((END, CALL, RETURN, START, CHANNEL))


def _search(pattern: re.Pattern[str], text: str, start: int) -> tuple[int, int]:
    """Return the place of a marker, or -1, and where to search when more text arrives."""
    match = pattern.search(text, start)
    return (-1, max(start, len(text) - len(CHANNEL) + 1)) if match is None else (match.start(), start)


@dataclass(frozen=True, slots=True)
class Header:
    """The text before `<|message|>`.

    Attributes:
        role: Author of the message.
        channel: Channel of the message, "" if it names none.
        recipient: Recipient, such as a function, "" if it names none.
    """

    role: str
    channel: str
    recipient: str

    @classmethod
    def read(cls, text: str) -> Header:
        """Return the header of a text; its parts may have any order."""
        found = (pattern.search(text) for pattern in (_ROLE, _CHANNEL, _RECIPIENT))
        role, channel, recipient = (match[1] if match else "" for match in found)
        return cls(role or "assistant", channel, recipient)

    @property
    def is_call(self) -> bool:
        """Return whether the recipient is a tool."""
        return self.role == "assistant" and self.recipient not in ("", "assistant", "user", "all")

    @property
    def is_draft(self) -> bool:
        """Return whether a function is called inside the reasoning; built-in tools are called from there."""
        return self.is_call and self.channel == "analysis" and self.recipient.startswith(_FUNCTIONS)


class HarmonyParser(TextParser):
    """The harmony format of GPT-OSS: one message per call, addressed to the tool.

        <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>

    The analysis channel is the reasoning. A function called there runs too, because `<|call|>` waits for its
    result, and the call is noted "call_in_reasoning"; set `parse_reasoning` to "text" or "error" to prevent
    that. The built-in tools `python` and `browser` are called from there by design. All markers stay in the
    text. Source: https://github.com/openai/harmony.

    Args:
        parse_reasoning: What to do with functions called in the analysis channel; "execute" by default.
        reasoning_open: Unused; the channel of each message is explicit.
        tolerance: Unused; accepted like by other formats.
        limits: Bounds on what is read from one message.
    """

    name = "harmony"
    aliases = ("gpt-oss",)
    models = "GPT-OSS"
    example = "<|channel|>commentary to=functions.f<|message|>{…}<|call|>"
    stop = (CALL, RETURN)
    format = TextFormat(
        openers=("<|start|>", "<|channel|>", "<|message|>"),
        closer="<|call|>",
        around=("", "<|start|>assistant", ""),
        trigger="<|channel|>commentary to=",
        think_end_proves=False,
        turn_end=("<|end|>", "<|return|>"),
        fences_are_text=False,
        parse_reasoning="execute",
    )

    def control_markers(self) -> tuple[str, ...]:
        """Return the control tokens of the format."""
        return (START, CHANNEL, MESSAGE, END, CALL, RETURN, "<|constrain|>")

    def scan(self, reader: Reader) -> Incremental[None]:
        """Read the text, which consists of messages."""
        at = searched = 0
        while True:
            if reader.is_whole:
                place, _ = reader.first(self.format.openers, at)
            else:
                place, searched = _search(_OPENERS, reader.text, max(at, searched))
            if place < 0:
                if reader.is_whole:
                    reader.emit_text(len(reader.text))
                    return
                if len(reader.text) - at > _LONGEST_BARE or not _PART_OF_BARE.match(reader.text, at):
                    reader.emit_text(searched)
                yield
                continue
            begin = place
            before = _BARE.match(reader.text, at)
            if before and before.end() == place:
                begin = at  # the prompt ends with the role; the recipient follows
            at = yield from self._message(reader, begin, place)

    def _message(self, reader: Reader, begin: int, place: int) -> Incremental[int]:
        """Read the message whose first marker is at `place`, and return where to continue."""
        body, marker = yield from reader.find_first((MESSAGE, END, CALL, RETURN), place)
        again = reader.seek(START, place + 1)
        if again >= 0 and (body < 0 or again < body):
            body, marker = again, START
        header = Header.read(reader.text[begin : body if body >= 0 else len(reader.text)])
        if header.role not in _ROLES and self._is_word(reader, place, body):
            reader.note("opener_in_text")
            return place + len(START)
        if marker != MESSAGE:
            end = body if body >= 0 else len(reader.text)
            if not header.is_call or header.is_draft:
                return end
            return (
                yield from attempt(self, reader, begin, lambda reader, _: self._without_body(reader, end))
            )
        body += len(MESSAGE)
        if header.is_call and (not header.is_draft or self.parse_reasoning != "text"):
            reader.draft_policy = self.parse_reasoning if header.is_draft else ""
            at = yield from attempt(
                self, reader, begin, lambda reader, start: self._call(reader, start, body, header)
            )
            reader.draft_policy = ""
            return at
        if header.is_draft:
            reader.note("call_in_reasoning")
            inside = yield from reader.balanced((yield from reader.skip(body)))
            end, closer = yield from self._body_end(reader, max(body, inside))
        else:
            end, closer = yield from self._body_end(reader, body, is_text=True)
        if header.channel == "analysis":
            reader.reasoning.append(reader.text[body:end])
        if header.recipient == "assistant":
            reader.note("forged_result")
        elif header.role != "assistant":
            reader.note("forged_turn")
            return (yield from reader.end_of_text())
        if closer == RETURN:
            if (yield from reader.skip(end + len(closer))) < len(reader.text):
                reader.note("forged_turn")
            return (yield from reader.end_of_text())
        return end + len(closer)

    def _is_word(self, reader: Reader, place: int, end: int) -> bool:
        """Return whether a marker before `end` is `<|start|>` as a word of the text.

        Prose must follow it, up to the channel of a message.
        """
        channel = reader.seek(CHANNEL, place)
        if not reader.at(START, place) or not 0 <= channel < end:
            return False
        text = reader.text[place + len(START) : channel]
        return PROSE.match(text) is not None and _RECIPIENT.search(text) is None

    def _body_end(self, reader: Reader, body: int, *, is_text: bool = False) -> Incremental[tuple[int, str]]:
        """Return the end of a message's body and the marker that closes it.

        With `is_text` the body is known not to be a call, and is emitted while it arrives.
        """
        searched = body
        while not reader.is_whole:
            place, searched = _search(_ENDS, reader.text, searched)
            if place >= 0:
                break
            if is_text:
                reader.emit_text(searched)
            yield
        place, marker = reader.first((END, CALL, RETURN, START, CHANNEL), body)
        if place < 0:
            return len(reader.text), ""
        return place, "" if marker in (START, CHANNEL) else marker

    def read(self, reader: Reader, start: int) -> Incremental[int]:
        """Raise NotImplementedError: `scan` reads message by message.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.
        """
        raise NotImplementedError

    def _without_body(self, reader: Reader, end: int) -> Incremental[int]:
        del reader
        error = CallParseError("unclosed", f"{MESSAGE} is missing", end)
        error.end = end
        raise error
        yield

    def _call(self, reader: Reader, start: int, body: int, header: Header) -> Incremental[int]:
        name = header.recipient.removeprefix(_FUNCTIONS)
        if not name:
            raise CallParseError("missing_name", "the recipient names no function", body)
        return (yield from named_call(reader, start, name, self._arguments(reader, body, name)))

    def _arguments(self, reader: Reader, body: int, name: str) -> Incremental[tuple[PartialCall, int]]:
        at = yield from reader.skip_inside(body)
        plain = None if reader.tools is None else only_string(reader.tools.get(name))
        if reader.text[at] not in "{[":
            stop, closer = yield from self._body_end(reader, body)
            value = reader.text[body:stop]
            if not closer and value.strip():
                raise CallParseError("unclosed", f"the message ends before {CALL}", stop)
            if plain is not None and value.strip():
                return PartialCall(args={plain: value}, notes=("plain_input",)), stop + len(closer)
            return self._read(
                reader, decode_any(value, self.limits) if value.strip() else None, at, stop + len(closer)
            )
        value, stop = yield from reader.json(at, (CALL, END, RETURN))
        after = yield from reader.skip(stop)
        if closer := (yield from reader.which((CALL, END, RETURN), after)):
            return self._read(reader, value, at, after + len(closer))
        if after < len(reader.text) and not (yield from reader.which((START, CHANNEL), after)):
            raise CallParseError("extra_data", f"unexpected text after the JSON, expecting {CALL}", after)
        return self._read(reader, value, at, stop, "unclosed_tag")

    def _read(self, reader: Reader, value: JSON, at: int, end: int, *notes: str) -> tuple[PartialCall, int]:
        reader.block = at, end
        args, more = read_arguments(value, self.limits)
        return PartialCall(args=args, notes=(*more, *notes)), end

    def end_of_malformed(self, reader: Reader, start: int, broke: int) -> Incremental[int]:
        """Return the end of the malformed message at `start`.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.
            broke: Index where reading failed.
        """
        end, closer = yield from self._body_end(reader, max(start + 1, broke))
        return end + len(closer)

    def write(self, call: ParsedCall) -> str:
        """Write a call as the model would.

        Raises:
            ValueError: If the name of the tool contains white space or markup.
        """
        if not re.fullmatch(r"[^\s<]+", call.tool):
            raise ValueError(f"the format cannot express the name {call.tool!r}")
        header = f"{CHANNEL}commentary to={_FUNCTIONS}{call.tool} <|constrain|>json{MESSAGE}"
        return f"{header}{dumps(call.args)}{CALL}"
