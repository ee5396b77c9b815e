"""Calls of Apertus: the name of the tool is the key."""

import pytest
from helpers.call_templates import ARGS, NAME, tokenizer_with

from torchrl_agentic.messages import ParsedCall
from torchrl_agentic.parsers import PARSERS, CallReady, check_parser, get_parser

PARSER = get_parser("apertus")
ADD = '{"add": {"a": 1}}'
CALL = f"<|tools_prefix|>[{ADD}]<|tools_suffix|>"


def entries(text):
    return [
        call.error.code if call.error else (call.tool, dict(call.args)) for call in PARSER.parse(text).calls
    ]


def test_each_item_of_the_list_is_a_call():
    text = (
        f'Two. <|tools_prefix|>[{ADD}, {{"name": {{}}}},\n {{"f": {{"x": [-2e-3, 1.5e3]}}}}]<|tools_suffix|> '
    )
    assert entries(text) == [("add", {"a": 1}), ("name", {}), ("f", {"x": [-0.002, 1500.0]})]
    assert PARSER.parse(text).text == "Two.  "


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("[]", "empty"),
        ("[{}]", "missing_name"),
        ('[{"f": {}, "g": {}}]', "missing_name"),
        ('[{"f": [1]}]', "bad_arguments"),
        ('["f"]', "missing_name"),
        (f"[{ADD}", "invalid_json"),
        (f"[{ADD}] and more", "extra_data"),
    ],
)
def test_malformed_call_is_an_error(body, code):
    (call,) = PARSER.parse(f"<|tools_prefix|>{body}<|tools_suffix|>").calls
    assert call.error.code == code
    assert '[{"tool_name": {"argument": "value"}}]' in call.error.message


def test_other_shapes_of_a_call_are_read_and_noted():
    usual = '{"name": "add", "arguments": {"a": 1}}'
    result = PARSER.parse(
        f"<|tools_prefix|>[{usual}, {ADD}]<|tools_suffix|><|tools_prefix|>{ADD}<|tools_suffix|>"
    )
    assert [(call.tool, call.args, call.notes) for call in result.calls] == [
        ("add", {"a": 1}, ("named_call",)), ("add", {"a": 1}, ()), ("add", {"a": 1}, ("no_list",)),
    ]  # fmt: skip
    shaped_as_hermes = PARSER.parse(f"<|tools_prefix|>\n{usual}\n<|tools_suffix|>")
    assert shaped_as_hermes.calls[0].notes == ("no_list", "named_call")


def test_call_in_unclosed_reasoning_runs_and_one_in_closed_reasoning_does_not():
    assert entries(f"<|inner_prefix|>I need a sum.{CALL}") == [("add", {"a": 1})]
    result = PARSER.parse(f"<|inner_prefix|>Perhaps {CALL}<|inner_suffix|>No.")
    assert (result.calls, result.reasoning, result.notes) == ((), f"Perhaps {CALL}", ("call_in_reasoning",))


def test_missing_end_is_accepted_but_a_truncated_list_is_not():
    assert entries(f"<|tools_prefix|>[{ADD}]") == [("add", {"a": 1})]
    assert entries(f"<|tools_prefix|>[{ADD}") == ["unclosed"]


def test_stream_reports_calls_when_the_list_closes():
    stream = PARSER.stream()
    events = [event for character in CALL[:-1] for event in stream.feed(character)]
    assert events == []
    assert [type(event) for event in stream.feed(CALL[-1:])] == [CallReady]


def test_calls_are_written_as_one_list():
    assert PARSER.render_calls([ParsedCall("add", {"a": 1}, "x")] * 2) == CALL.replace(ADD, f"{ADD}, {ADD}")


def test_auto_finds_it():
    written = '<|tools_prefix|>[{"' + NAME + '": ' + ARGS + "}]<|tools_suffix|>"
    tokenizer = tokenizer_with(written)
    parser = get_parser("auto", tokenizer=tokenizer)
    assert (parser.name, parser.result_role) == ("apertus", "tool")
    assert check_parser(parser, {"add": {}}, tokenizer, parsers=PARSERS) == ["add"]
