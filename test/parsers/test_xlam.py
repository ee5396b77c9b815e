"""Calls of xLAM: a bare JSON list."""

import pytest
from helpers.call_templates import NAME, tokenizer_with

from torchrl_agentic.messages import ParsedCall, ToolResult
from torchrl_agentic.parsers import PARSERS, CallReady, Limits, check_parser, get_parser

PARSER = get_parser("xlam")
ADD = '{"name": "add", "arguments": {"a": 1}}'
LIST = f"[{ADD}]"


def entries(text):
    return [
        call.error.code if call.error else (call.tool, dict(call.args)) for call in PARSER.parse(text).calls
    ]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", ""),
        ("Let me add.\n", "\n"),
        ("<think>Add.</think>", "<|im_end|>"),
        ("Sure:\n```json\n", "\n```"),
        ("\n  ", ""),
    ],
)
def test_list_on_its_own_line_is_read_as_calls(before, after):
    result = PARSER.parse(f"{before}[{ADD}, {ADD}]{after}")
    assert [(call.tool, call.args, call.notes) for call in result.calls] == [("add", {"a": 1}, ())] * 2
    assert result.text == before + after


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "[1, 2]",
        '[{"name": "Ada", "age": 36}]',
        f"As in {LIST}.",
        '[{"type": "text", "text": "arguments"}]',
        ADD,
        "[{",
        f"Like this:\n```text\n{LIST}\n```\nso.",
        f"~~~\n{LIST}\n~~~",
        '["name", "arguments"]',
        "[see above] and [TOOL",
        '[{"name": "Ada",]',
    ],
)
def test_json_data_is_not_a_call(text):
    result = PARSER.parse(text)
    assert (result.calls, result.text) == ((), text)


@pytest.mark.parametrize(
    ("before", "after"),
    [("[TOOL_CALLS]", ""), ("[TOOL_CALLS] ", "\n"), ("<tool_call>", "</tool_call>"), ("<tool_call>\n", "")],
)
def test_a_wrapper_opens_a_list_anywhere_and_is_noted(before, after):
    result = PARSER.parse(f"I add.{before}{LIST}{after}")
    assert [(call.tool, call.args, call.notes) for call in result.calls] == [
        ("add", {"a": 1}, ("foreign_wrapper",))
    ]
    assert result.text.strip() == "I add."


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        (LIST[:-1], ["unclosed"]),
        ('[{"name": "add", "arguments": {"a": ', ["unclosed"]),
        ('[{"name": "add", "arguments": {a: 1}}]', ["invalid_json"]),
        ('[{"name": "add", "arguments": 1}]', ["bad_arguments"]),
        (f'[{ADD}, {{"name": "f"}}, 3]', [("add", {"a": 1}), ("f", {}), "missing_name"]),
        ('[{"name": "add", "arguments": {"a": NaN}}]', ["invalid_json"]),
        ('[{"name": "add", "arguments": {"a": NaN, ', ["unclosed"]),
        ("[TOOL_CALLS]", ["unclosed"]),
        ("[TOOL_CALLS][]", ["missing_name"]),
        ("<tool_call>add</tool_call>", ["invalid_json"]),
        ("[TOOL_CALLS][TOOL_CALLS]" + LIST, [("add", {"a": 1})]),
    ],
)
def test_text_that_begins_like_a_call_is_an_entry(text, codes):
    assert entries(text) == codes


def test_a_good_list_behind_a_broken_one_runs():
    assert entries(f'[{{"name": "add", "arguments": {{a}}}}]\n{LIST}') == ["invalid_json", ("add", {"a": 1})]
    assert entries(f"<tool_call>oops</tool_call>\n{LIST}") == ["invalid_json", ("add", {"a": 1})]


def test_draft_in_reasoning_does_not_run():
    result = PARSER.parse(f"<think>\n{LIST}\n</think>\n{LIST}")
    assert len(result.calls) == 1
    assert result.notes == ("call_in_reasoning",)


def test_a_list_larger_than_one_call_may_be_is_measured_by_its_calls():
    large = '{"name": "f", "arguments": {"a": "' + "x" * 80 + '"}}'
    calls = get_parser("xlam", limits=Limits(argument_bytes=60)).parse(f"[{ADD}, {large}]").calls
    assert [call.error and call.error.code for call in calls] == [None, "too_large"]


def test_a_bracket_that_may_yet_be_a_wrapper_waits():
    stream = PARSER.stream()
    events = [event for character in f"[TOOL_CALLS]{LIST}\n" for event in stream.feed(character)]
    assert [type(event) for event in events][:1] == [CallReady]
    assert stream.close() == PARSER.parse(f"[TOOL_CALLS]{LIST}\n")


def test_calls_are_rendered_as_one_list_and_results_keep_brackets():
    assert PARSER.render_calls([ParsedCall("add", {"a": 1}, "x")] * 2) == f"[{ADD}, {ADD}]"
    assert PARSER.render_result("c", ToolResult.from_text("[1]"))["content"] == "[1]"
    assert PARSER.structural_tag({"add": {}}) is None


@pytest.mark.parametrize("arguments", ["{{ c.function.arguments | tojson }}", "{{ c.function.arguments }}"])
def test_auto_finds_it(arguments):
    tokenizer = tokenizer_with(f'[{{"name": "{NAME}", "arguments": {arguments}}}]')
    parser = get_parser("auto", tokenizer=tokenizer)
    assert (parser.name, parser.result_role) == ("xlam", "tool")
    assert check_parser(parser, {"add": {}}, tokenizer, parsers=PARSERS) == ["add"]
