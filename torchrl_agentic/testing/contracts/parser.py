"""What every parser promises."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchrl_agentic.messages import JSON, ParsedCall, Status, ToolResult
from torchrl_agentic.parsers import ToolCallParser
from torchrl_agentic.parsers.base import MAX_CALLS

_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)  # fmt: skip
_args = st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), _json, max_size=4)
_names = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_.-]{0,20}", fullmatch=True)


class ParserContract:
    """Promises of a `ToolCallParser`.

    parser: the one under test. malformed: messages that hold at least one attempt, none of which can be read.
    markers: pieces of the format's syntax, which random messages are made of. in_text: whether calls stand in
    the text, so that spans apply. at_line_start: whether they do so only at the start of a line.
    """

    parser: ClassVar[ToolCallParser]
    malformed: ClassVar[Sequence[str | Mapping[str, JSON]]] = ()
    markers: ClassVar[Sequence[str]] = ()
    in_text: ClassVar[bool] = True
    at_line_start: ClassVar[bool] = False

    def check(self, text: str) -> None:
        """What holds for any message."""
        result = self.parser.parse(text, turn=3)
        assert self.parser.parse(text, turn=3) == result, "the same message, another result"
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

    @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
    @given(data=st.data())
    def test_any_message_is_read_without_loss(self, data: st.DataObject) -> None:
        """Random text, and random text made of the format's own markers."""
        pieces = st.text(max_size=20)
        if self.markers:
            pieces |= st.sampled_from(
                [*self.markers, "<think>", "</think>", '{"a": 1}', "\\ud800", "NaN", "["]
            )
        self.check("".join(data.draw(st.lists(pieces, max_size=12))))

    @settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
    @given(name=_names, args=_args, before=st.text("ab \n", max_size=5), turn=st.integers(0, 9))
    def test_what_is_rendered_reads_back(
        self, name: str, args: dict[str, Any], before: str, turn: int
    ) -> None:
        """Also behind some text, where calls stand in the text."""
        text = self.parser.render_call(ParsedCall(name, args, "call_1"))
        if before and self.at_line_start:
            before += "\n"
        result = self.parser.parse(before + text if self.in_text else text, turn=turn)
        assert [(call.tool, call.args, call.error) for call in result.calls] == [(name, args, None)]

    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
    @given(args=_args, data=st.data())
    def test_a_message_cut_off_runs_nothing_else(self, args: dict[str, Any], data: st.DataObject) -> None:
        """A prefix of a call gives that call, an error or nothing: never other arguments."""
        text = self.parser.render_call(ParsedCall("tool", args, "call_1"))
        cut = text[: data.draw(st.integers(0, len(text)))]
        for call in self.parser.parse(cut).calls:
            assert call.error is not None or (call.tool, call.args) == ("tool", args)

    def test_malformed_attempts_become_errors(self) -> None:
        for message in self.malformed:
            calls = self.parser.parse(message).calls
            assert calls, f"no attempt seen in {message!r}"
            assert all(call.error is not None for call in calls), f"something could be read in {message!r}"

    def test_nothing_to_say_is_no_call(self) -> None:
        messages: list[str | Mapping[str, JSON]] = [
            "", "hello", {"role": "assistant", "content": None}, {"content": "hello", "tool_calls": []},
            {"content": [{"type": "text", "text": "hello"}]}, {"content": None, "tool_calls": None}, {},
        ]  # fmt: skip
        for message in messages:
            assert self.parser.parse(message).calls == ()

    def test_every_result_is_rendered(self) -> None:
        """All ids are in the messages, and so is every text."""
        calls = [ParsedCall("a", {}, "id_one"), ParsedCall("b", {}, "id_two")]
        results = [ToolResult.from_text("text one"), ToolResult.from_text("text two", status=Status.ERROR)]
        written = json.dumps(self.parser.render(calls, results))
        for piece in ("text one", "text two", "id_one", "id_two"):
            assert piece in written
        for message in self.parser.render(calls, results):
            assert isinstance(message["role"], str)
            assert "content" in message
        assert self.parser.render([], []) == []

    def test_calls_beyond_the_limit_are_errors_too(self) -> None:
        if not self.in_text:
            return
        calls = self.parser.parse(
            self.parser.render_call(ParsedCall("t", {"a": 1}, "")) * (MAX_CALLS + 2)
        ).calls
        assert len(calls) == MAX_CALLS + 2
        assert [call.error.code for call in calls if call.error] == ["over_limit"] * 2

    def test_it_travels_and_is_shared(self) -> None:
        """A pickled parser is equal; eight threads on one parser get what one gets."""
        assert pickle.loads(pickle.dumps(self.parser)) == self.parser
        text = self.parser.render_call(ParsedCall("t", {"a": "x" * 1000}, "call_1"))
        with ThreadPoolExecutor(8) as threads:
            assert len({repr(result) for result in threads.map(self.parser.parse, [text] * 64)}) == 1
