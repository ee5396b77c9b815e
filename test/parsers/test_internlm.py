"""Calls of InternLM2 and Intern-S1."""

import pytest
from helpers.call_templates import NAME, tokenizer_with

from torchrl_agentic.messages import ParsedCall, ToolResult
from torchrl_agentic.parsers import PARSERS, CallReady, check_parser, get_parser

PARSER = get_parser("internlm")
ADD = '{"name": "add", "parameters": {"a": 1}}'
CALL = f"<|action_start|><|plugin|>\n{ADD}<|action_end|>"


def entries(text):
    return [
        call.error.code if call.error else (call.tool, dict(call.args)) for call in PARSER.parse(text).calls
    ]


@pytest.mark.parametrize("between", ["", " ", "\n"])
def test_white_space_between_the_markers_does_not_matter(between):
    result = PARSER.parse(
        f"I add. <|action_start|>{between}<|plugin|>{between}{ADD}{between}<|action_end|><|im_end|>\n"
    )
    assert [(call.tool, call.args, call.notes) for call in result.calls] == [("add", {"a": 1}, ())]
    assert result.text == "I add. <|im_end|>\n"


def test_several_calls_and_the_other_name_of_the_arguments():
    other = CALL.replace("parameters", "arguments")
    result = PARSER.parse(f"{CALL}{other}")
    assert [(call.args, call.notes) for call in result.calls] == [({"a": 1}, ()), ({"a": 1}, ("args_alias",))]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("<|action_start|><|interpreter|>\nprint(1)<|action_end|>", "wrong_dialect"),
        (f"<|action_start|>{ADD}<|action_end|>", "missing_name"),
        (f"<|action_start|>\n{ADD}\n<|action_end|>", "missing_name"),
        ("<|action_start|>", "unclosed"),
        ("<|action_start|><|plugin|>\n", "unclosed"),
        ("<|action_start|><|plugin|><|action_end|>", "empty"),
        (CALL[:-20], "unclosed"),
        (CALL.replace("}}", "}} then"), "extra_data"),
    ],
)
def test_call_without_a_tool_name_is_an_error(text, code):
    assert entries(text) == [code]


def test_error_for_interpreter_code_explains_the_remedy():
    (call,) = PARSER.parse("<|action_start|><|interpreter|>\nprint(1)<|action_end|>").calls
    assert "tools are called after <|plugin|>" in call.error.message


def test_draft_in_reasoning_does_not_run():
    assert entries(f"<think>{CALL}</think>{CALL}") == [("add", {"a": 1})]


def test_stream_reports_a_call_when_it_closes():
    stream = PARSER.stream()
    events = [event for character in CALL[:-1] for event in stream.feed(character)]
    assert not [event for event in events if isinstance(event, CallReady)]
    assert [type(event) for event in stream.feed(CALL[-1:])] == [CallReady]


def test_rendered_results_have_no_markers():
    message = PARSER.render_result("c", ToolResult.from_text("<|plugin|> <|action_start|>"))
    assert message["content"] == "<\u200b|plugin|> <\u200b|action_start|>"


def test_rendered_calls_match_those_of_the_model():
    written = PARSER.render_call(ParsedCall("add", {"a": 1}, "x"))
    assert written == f"<|action_start|><|plugin|>\n{ADD}\n<|action_end|>"


@pytest.mark.parametrize(
    "arguments", ["{{ c.function.arguments | tojson }}", "{{ c.function.arguments | string }}"]
)
def test_auto_finds_it_also_where_the_template_wants_arguments_as_a_string(arguments):
    """Such a template writes a mapping in Python's syntax, which is not JSON."""
    written = f'<|action_start|><|plugin|>\n{{"name": "{NAME}", "parameters": {arguments}}}<|action_end|>'
    tokenizer = tokenizer_with(written)
    parser = get_parser("auto", tokenizer=tokenizer)
    assert (parser.name, parser.result_role) == ("internlm", "tool")
    assert check_parser(parser, {"add": {}}, tokenizer, parsers=PARSERS) == ["add"]


def test_the_names_that_engines_have_for_it_mean_it():
    assert get_parser("interns1") == get_parser("internlm2") == PARSER
