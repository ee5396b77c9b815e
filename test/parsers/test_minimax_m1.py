"""Calls of MiniMax M1: one JSON object a line."""

from helpers.call_templates import ARGS, NAME, tokenizer_with

from torchrl_agentic.messages import ParsedCall
from torchrl_agentic.parsers import PARSERS, CallReady, check_parser, get_parser

PARSER = get_parser("minimax_m1")
ADD = '{"name": "add", "arguments": {"a": 1}}'
MUL = '{"name": "mul", "arguments": {"b": "}\\n{"}}'


def entries(text):
    return [
        call.error.code if call.error else (call.tool, dict(call.args)) for call in PARSER.parse(text).calls
    ]


def test_each_line_is_a_call():
    text = f"Two.\n<tool_calls>\n{ADD}\n{MUL}\n</tool_calls><end_of_sentence>"
    assert entries(text) == [("add", {"a": 1}), ("mul", {"b": "}\n{"})]
    assert PARSER.parse(text).text == "Two.\n<end_of_sentence>"


def test_a_list_in_their_place_is_read_and_noted():
    result = PARSER.parse(f"<tool_calls>\n[{ADD}]\n</tool_calls>")
    assert [(call.tool, call.notes) for call in result.calls] == [("add", ("list_of_calls",))]


def test_calls_in_front_of_a_broken_line_count():
    assert entries(f"<tool_calls>\n{ADD}\n{{oops}}\n</tool_calls>") == [("add", {"a": 1}), "invalid_json"]
    assert entries(f"<tool_calls>\n{ADD}\n{MUL[:-1]}") == [("add", {"a": 1}), "unclosed"]
    assert entries(f"<tool_calls>\n{ADD} and\n</tool_calls>") == ["extra_data"]


def test_missing_end_is_accepted_after_complete_json():
    assert PARSER.parse(f"<tool_calls>\n{ADD}").calls[0].notes == ("unclosed_tag",)


def test_stream_reports_a_line_when_the_next_one_begins():
    stream = PARSER.stream()
    assert stream.feed(f"<tool_calls>\n{ADD}\n") == []
    assert [type(event) for event in stream.feed(MUL[:5])] == [CallReady]
    assert [type(event) for event in stream.feed(f"{MUL[5:]}\n</tool_calls>")] == [CallReady]


def test_calls_are_written_one_a_line():
    written = PARSER.render_calls([ParsedCall("add", {"a": 1}, "x")] * 2)
    assert written == f"<tool_calls>\n{ADD}\n{ADD}\n</tool_calls>"


def test_auto_finds_it():
    written = f'<tool_calls>\n{{"name": "{NAME}", "arguments": {ARGS}}}\n</tool_calls><end_of_sentence>\n'
    tokenizer = tokenizer_with(written)
    assert get_parser("auto", tokenizer=tokenizer).name == "minimax_m1"
    assert check_parser(PARSER, {"add": {}}, tokenizer, parsers=PARSERS) == ["add"]
