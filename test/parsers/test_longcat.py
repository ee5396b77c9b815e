"""Calls of LongCat-Flash."""

from helpers.call_templates import ARGS, NAME, tokenizer_with

from torchrl_agentic.messages import ToolResult
from torchrl_agentic.parsers import PARSERS, CallReady, check_parser, get_parser

PARSER = get_parser("longcat")
ADD = '<longcat_tool_call>{"name": "add", "arguments": {"a": 1}}</longcat_tool_call>'


def entries(text):
    return [
        call.error.code if call.error else (call.tool, dict(call.args)) for call in PARSER.parse(text).calls
    ]


def test_several_calls_and_the_text_around_them():
    result = PARSER.parse(f"Let me add.\n{ADD}\n{ADD}\nDone.</longcat_s>")
    assert [(call.tool, call.args) for call in result.calls] == [("add", {"a": 1})] * 2
    assert result.text == "Let me add.\n\n\nDone.</longcat_s>"


def test_values_of_all_kinds_arrive_as_they_are():
    values = {
        "s": 'q "x" \\ \n é 🎉 </longcat_tool_call>',
        "n": 1.5,
        "b": True,
        "z": None,
        "l": [[]],
        "o": {"k": {}},
    }
    call = PARSER.parse(ADD).calls[0]
    assert entries(PARSER.render_call(type(call)("f", values, "x"))) == [("f", values)]


def test_draft_in_reasoning_does_not_run():
    assert entries(f"<longcat_think>\n{ADD}\n</longcat_think>\n{ADD}") == [("add", {"a": 1})]


def test_malformed_call_is_an_error():
    assert entries("<longcat_tool_call>add it") == ["invalid_json"]
    assert entries('<longcat_tool_call>{"name": "add", "arguments": {"a": ') == ["unclosed"]
    assert entries('<longcat_tool_call>{"name": "add", "arguments": "a = 1"}</longcat_tool_call>') == [
        "invalid_json"
    ]
    assert entries("<longcat_tool_call>add\n<longcat_arg_key>a</longcat_arg_key></longcat_tool_call>") == [
        "invalid_json"
    ]


def test_stream_reports_a_call_when_its_tag_closes():
    stream = PARSER.stream()
    assert not [event for event in stream.feed(ADD[:-1]) if isinstance(event, CallReady)]
    assert [type(event) for event in stream.feed(ADD[-1:])] == [CallReady]


def test_a_result_names_its_tool():
    calls = PARSER.parse(ADD, turn=4).calls
    (message,) = PARSER.render(calls, [ToolResult.from_text("2</longcat_s>")])
    assert message == {
        "role": "tool", "content": "2<\u200b/longcat_s>", "tool_call_id": "call_4_0", "name": "add",
    }  # fmt: skip


def test_auto_detects_the_format_and_whether_the_prompt_opens_reasoning():
    written = (
        f'<longcat_tool_call>\n{{"name": "{NAME}", "arguments": {ARGS}}}\n</longcat_tool_call>\n</longcat_s>'
    )
    tokenizer = tokenizer_with(written, "/think_on <longcat_think>\n")
    parser = get_parser("auto", tokenizer=tokenizer)
    assert (parser.name, parser.reasoning_open) == ("longcat", True)
    assert check_parser(parser, {"add": {}}, tokenizer, parsers=PARSERS) == ["add"]
