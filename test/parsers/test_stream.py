"""A message is read while it is being written."""

import pytest

from torchrl_agentic.messages import ParsedCall
from torchrl_agentic.parsers import PARSERS, CallFailed, CallReady, TextDelta, get_parser

ONE = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
STREAMED = sorted(PARSERS.keys() - {"openai", "anthropic", "json", "xml", "fence", "tags", "react"})


@pytest.mark.parametrize("name", STREAMED)
def test_stream_reports_a_call_as_soon_as_its_block_closes(name):
    """One character earlier there is no event; only formats without a closer need more text."""
    parser = get_parser(name)
    call = ParsedCall("f", {"a": "x"}, "call_0_0")
    text = parser.render_call(call)
    ending = parser.format.closer if parser.format.closer in text else parser.write(call)
    closed = text.index(ending) + len(ending)
    stream = parser.stream()
    early = stream.feed(text[: closed - 1])
    assert not [event for event in early if isinstance(event, CallReady | CallFailed)]
    later = stream.feed(f"{text[closed - 1 :]}\n")
    (call,) = (event.call for event in later if isinstance(event, CallReady))
    assert (call.tool, call.args) == ("f", {"a": "x"})


def test_stream_reports_text_at_once_except_possible_markers():
    stream = get_parser("hermes").stream()
    said = "".join(
        event.text
        for event in stream.feed("Let me think about it for a while. <tool_")
        if isinstance(event, TextDelta)
    )
    assert "Let me think about it" in said
    assert "<tool_" not in said
    events = stream.feed(f"box> is a word. {ONE}")
    assert [type(event) for event in events] == [TextDelta, CallReady]


def test_event_of_a_failed_call_has_the_reason():
    stream = get_parser("hermes").stream()
    (event,) = stream.feed("<tool_call>{oops}</tool_call>")
    assert isinstance(event, CallFailed)
    assert event.call.error.code == "invalid_json"


def test_stream_holds_back_a_call_in_open_reasoning():
    closing, never = get_parser("hermes").stream(), get_parser("hermes").stream()
    for stream in (closing, never):
        assert not [event for event in stream.feed(f"<think>{ONE}") if isinstance(event, CallReady)]
    closing.feed("</think>")
    assert closing.close().calls == ()
    assert len(never.close().calls) == 1
    assert [type(event) for event in never.last_events] == [CallReady]


def test_a_closed_stream_takes_no_more():
    stream = get_parser("hermes").stream()
    stream.feed(ONE)
    result = stream.close()
    assert stream.close() == result
    with pytest.raises(ValueError, match="closed"):
        stream.feed("x")


def test_formats_parsed_as_a_whole_can_stream():
    stream = get_parser("json").stream(turn=2)
    assert stream.feed('{"message": "hi", "tools": [{"tool": "f", ') == []
    assert stream.feed('"args": {}}]}') == []
    result = stream.close()
    assert result.calls[0].call_id == "call_2_0"
    assert [type(event) for event in stream.last_events] == [TextDelta, CallReady]
