"""The contract of every parser."""

from __future__ import annotations

import json
import pickle
import string
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, cast

from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from torchrl_agentic.messages import JSON, ParsedCall, ParseResult, Status, ToolResult
from torchrl_agentic.parsers import CallFailed, CallReady, TextDelta, ToolCallParser, get_parser
from torchrl_agentic.parsers.control_tokens import FAMILY_MARKERS
from torchrl_agentic.parsers.streaming import Event

_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
# Drawing from alphabets takes a tenth of the time of drawing from the regular expressions for the same names.
_FIRST = f"{string.ascii_letters}_"
_args = st.dictionaries(st.text(f"{string.ascii_lowercase}_", min_size=1, max_size=8), _json, max_size=3)
_names = st.builds("{}{}".format, st.sampled_from(_FIRST), st.text(f"{_FIRST}{string.digits}", max_size=20))
_rules = settings(
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),  # the phase "explain" takes minutes
    suppress_health_check=[
        HealthCheck.differing_executors,
        HealthCheck.filter_too_much,
        HealthCheck.too_slow,
    ],
)
_COMMON = (
    "<think>",
    "</think>",
    "```\n",
    "```",
    '{"a": 1}',
    "\\ud800",
    "NaN",
    "[",
    " ",
    "\n",
    "x",
    '"',
    "'",
    "\\",
    "}",
)


_CONTROL = (
    "<|im_start|>",
    "<|im_end|>",
    "<｜User｜>",
    "[INST]",
    "</s>",
    "]~b]",
    "<seed:bos>",
    "<start_of_turn>",
)


class ParserContract:
    """Tests of a `ToolCallParser`.

    Attributes:
        parser: The parser under test.
        malformed: Messages with at least one attempt to call a tool, none of which can be parsed.
        markers: Pieces of the format's syntax, for random messages.
        in_text: Calls are part of the text, so they have spans.
        at_line_start: Calls begin only at the start of a line.
        calls: Strategy of (tool, arguments) that the format can express.
    """

    parser: ClassVar[ToolCallParser]
    malformed: ClassVar[Sequence[str | Mapping[str, JSON]]] = ()
    markers: ClassVar[Sequence[str]] = ()
    in_text: ClassVar[bool] = True
    at_line_start: ClassVar[bool] = False
    calls: ClassVar[st.SearchStrategy[tuple[str, dict[str, Any]]]] = st.tuples(_names, _args)

    def check(self, text: str, result: ParseResult) -> None:
        """Check the properties of the result of any message.

        Args:
            text: The message.
            result: The result of the parser.
        """
        ids = [call.call_id for call in result.calls]
        assert len(set(ids)) == len(ids), "two calls have one id"
        assert [call.index for call in result.calls] == list(range(len(ids)))
        for call in result.calls:
            assert call.call_id
            assert isinstance(call.args, dict)
            assert call.error is None or (call.args == {} and call.error.message)
            assert call.error is not None or call.tool
        if self.in_text:
            at, outside = 0, ""
            for call in result.calls:
                assert call.span is not None
                assert at <= call.span[0] <= call.span[1] <= len(text), "spans overlap, or are not in order"
                outside += text[at : call.span[0]]
                at = call.span[1]
            assert outside + text[at:] == result.text, "text and spans do not make up the message"

    @_rules
    @given(
        data=st.data(),
        tools=st.none() | st.just({"f": {"type": "object", "properties": {"a": {"type": "string"}}}}),
    )
    def test_any_message_is_read_without_loss(self, data: st.DataObject, tools: Any) -> None:
        """As a whole, in pieces of any size, and as tokens that hold no marker of their own.

        The events of the pieces hold everything that the result holds.
        """
        text = self._message(data)
        whole = self.parser.parse(text, tools=tools, turn=3)
        assert self.parser.parse(text, tools=tools, turn=3) == whole, "the same message, another result"
        self.check(text, whole)
        self._check_tokens(text, tools, whole)
        size = data.draw(st.sampled_from([1, 2, 3, 5, 8, 13, 1000]))
        stream, events = self.parser.stream(tools=tools, turn=3), list[Event]()
        for start in range(0, len(text), size):
            events += stream.feed(text[start : start + size])
        assert stream.close() == whole
        _check_events([*events, *stream.last_events], whole)

    @_rules
    @given(data=st.data(), before=st.text("ab \n", max_size=5), turn=st.integers(0, 9))
    def test_rendered_calls_parse_back(self, data: st.DataObject, before: str, turn: int) -> None:
        """One or several; a single one also after some text, if calls are part of the text."""
        wanted = data.draw(st.lists(self.calls, min_size=1, max_size=3))
        schemas = {(name, repr(self.schema(args))) for name, args in wanted}
        assume(len(schemas) == len({name for name, _ in schemas}))
        calls = [ParsedCall(name, args, f"call_0_{index}") for index, (name, args) in enumerate(wanted)]
        try:
            text = self.parser.render_calls(calls) if len(calls) > 1 else self.parser.render_call(calls[0])
        except ValueError:  # the format cannot express it
            assume(False)
            raise
        if len(calls) == 1 and self.in_text:
            text = before + "\n" * (self.at_line_start and bool(before)) + text
        found = self.parser.parse(text, tools={name: self.schema(args) for name, args in wanted}, turn=turn)
        assert [(call.tool, call.args, call.error) for call in found.calls] == [
            (*call, None) for call in wanted
        ]

    @_rules
    @given(data=st.data())
    def test_a_message_cut_off_runs_nothing_else(self, data: st.DataObject) -> None:
        """A prefix of a call is parsed as that call, an error or nothing: never as other arguments."""
        name, args = data.draw(self.calls)
        try:
            text = self.parser.render_call(ParsedCall(name, args, "call_1"))
        except ValueError:  # the format cannot express it
            assume(False)
            raise
        cut = text[: data.draw(st.integers(0, len(text)))]
        for call in self.parser.parse(cut, tools={name: self.schema(args)}).calls:
            assert call.error is not None or (call.tool, call.args) == (name, args)

    def test_malformed_attempts_become_errors(self) -> None:
        for message in self.malformed:
            calls = self.parser.parse(message).calls
            assert calls, f"no attempt seen in {message!r}"
            assert all(call.error is not None for call in calls), f"a call was parsed from {message!r}"
            for call in calls:
                assert call.error is not None
                assert len(call.error.message) <= 500, "the model reads this"

    def test_empty_message_is_not_a_call(self) -> None:
        messages: list[str | Mapping[str, JSON]] = [
            "", "hello", {"role": "assistant", "content": None}, {"content": "hello", "tool_calls": []},
            {"content": [{"type": "text", "text": "hello"}]}, {"content": None, "tool_calls": None}, {},
        ]  # fmt: skip
        for message in messages:
            assert self.parser.parse(message).calls == ()

    def test_every_result_is_rendered(self) -> None:
        """Each has a role and a content that holds its text, in the order of the calls."""
        calls = [ParsedCall("a", {}, "call_0_0"), ParsedCall("b", {}, "call_0_1", index=1)]
        results = [ToolResult.from_text("text one"), ToolResult.from_text("text two", status=Status.ERROR)]
        messages = self.parser.render(calls, results)
        written = json.dumps(messages)
        assert 0 <= written.find("text one") < written.find("text two")
        for message in messages:
            assert isinstance(message["role"], str)
            assert "content" in message
        assert self.parser.render([], []) == []

    def test_output_of_a_tool_is_never_a_call(self) -> None:
        """A tool returns a call in the format itself; read as if a model had written it, it is text."""
        if not self.in_text or self.at_line_start:  # without an opening marker, a call is like text
            return
        name, args = self.example()
        forged = ToolResult.from_text(self.parser.render_call(ParsedCall(name, args, "call_0_0")))
        (message,) = self.parser.render([ParsedCall(name, args, "call_0_0")], [forged])
        assert self.parser.parse(message).calls == ()

    @_rules
    @given(pieces=st.lists(st.sampled_from(_CONTROL) | st.text(max_size=3), min_size=1, max_size=6))
    def test_output_of_a_tool_holds_no_control_token(self, pieces: list[str]) -> None:
        """Nor does the id of its call, whether results are written one by one or together."""
        name, parser = self.example()[0], get_parser(self.parser)
        written: list[str] = []
        for said in ("harmless", "".join(pieces)):
            calls = [ParsedCall(name, {}, f"{said}{index}", index=index) for index in range(2)]
            results = [ToolResult.from_text(said), ToolResult.from_text(said, is_error=True)]
            messages = [*parser.render(calls, results), parser.render_result(said, results[0])]
            written.append(json.dumps(messages, ensure_ascii=False))
        for marker in (*FAMILY_MARKERS, *_CONTROL):
            assert written[1].count(marker) == written[0].count(marker), f"{marker} came out of a tool"

    def test_calls_beyond_the_limit_are_errors_too(self) -> None:
        if not self.in_text:
            return
        most = self.parser.limits.calls
        name, args = self.example()
        one = self.parser.render_call(ParsedCall(name, args, ""))
        calls = self.parser.parse("\n".join([one] * (most + 2))).calls
        assert len(calls) == most + 2
        assert [call.error.code for call in calls if call.error] == ["over_limit"] * 2

    def test_parser_can_be_pickled_and_shared_by_threads(self) -> None:
        """A pickled parser is equal; eight threads on one parser get what one gets."""
        assert pickle.loads(pickle.dumps(self.parser)) == self.parser
        text = self.parser.render_call(ParsedCall(*self.example(), "call_1"))
        with ThreadPoolExecutor(8) as threads:
            assert len({repr(result) for result in threads.map(self.parser.parse, [text] * 64)}) == 1

    def example(self) -> tuple[str, dict[str, Any]]:
        """Return a call that the format can express."""
        return "t", {"a": "x" * 100}

    def schema(self, args: Mapping[str, JSON]) -> dict[str, JSON]:
        """Return a schema that accepts these arguments."""
        names: dict[type, str] = {
            str: "string",
            bool: "boolean",
            int: "integer",
            float: "number",
            list: "array",
            dict: "object",
        }
        kinds = {key: {"type": names.get(type(cast("object", value)), "null")} for key, value in args.items()}
        return {"type": "object", "properties": kinds}

    def _check_tokens(self, text: str, tools: Any, whole: ParseResult) -> None:
        """Check the calls that are read from tokens of one byte each."""
        from torchrl_agentic.testing.tokenizers import byte_tokenizer

        tokenizer = cast("Any", byte_tokenizer())
        result = self.parser.parse_tokens(tokenizer.encode(text), tokenizer, tools=tools, turn=3)
        assert list(map(_fields, result.calls)) == list(map(_fields, whole.calls))
        for call in result.calls:
            assert not self.in_text or call.token_span is not None

    def _message(self, data: st.DataObject) -> str:
        pieces = [*_COMMON, *self.markers]
        if self.in_text:
            name, args = self.example()
            pieces.append(self.parser.render_call(ParsedCall(name, args, "call_1")))
        return "".join(data.draw(st.lists(st.text(max_size=9) | st.sampled_from(pieces), max_size=14)))


def _check_events(events: Sequence[Event], whole: ParseResult) -> None:
    """Check that events hold what a result holds."""
    reported = [event.call for event in events if isinstance(event, CallReady | CallFailed)]
    if "unopened_reasoning" in whole.notes:  # known by the end of the reasoning, after drafts were reported
        begins = [call.span and call.span[0] for call in reported]
        assert all(call.span and call.span[0] in begins for call in whole.calls)
        return
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == whole.text
    assert [_fields(call) for call in reported] == [_fields(call) for call in whole.calls]
    for event in events:
        assert not isinstance(event, CallReady | CallFailed) or (event.call.error is None) is isinstance(
            event, CallReady
        )


def _fields(call: ParsedCall) -> tuple[Any, ...]:
    return call.tool, call.args, call.call_id, call.error, call.tag
