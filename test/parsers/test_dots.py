"""Calls of dots: invoke elements in a section, or one JSON object."""

import pytest

from torchrl_agentic import tool
from torchrl_agentic.messages import ParsedCall, ToolResult
from torchrl_agentic.parsers import PARSERS, CallReady, check_parser, get_parser
from torchrl_agentic.testing.tokenizers import byte_tokenizer

PARSER = get_parser("dots")
TOOLS = {"seek": {"type": "object", "properties": {"text": {"type": "string"}, "page": {"type": "integer"}}}}


def invoke(**values):
    parameters = "".join(f'<parameter name="{key}">{value}</parameter>' for key, value in values.items())
    return f'<invoke name="seek">{parameters}</invoke>'


def section(*calls):
    return f"<dots_function_call>{''.join(calls)}</dots_function_call>"


def read(text, parser=PARSER):
    result = parser.parse(text, tools=TOOLS)
    return [call.error.code if call.error else dict(call.args) for call in result.calls]


def test_several_sections_with_several_calls():
    lines = section(invoke(text="a\nb"))
    text = f"So {section(invoke(text='5', page=5), invoke())} and {lines}."
    assert read(text) == [{"text": "5", "page": 5}, {}, {"text": "a\nb"}]
    assert PARSER.parse(text, tools=TOOLS).text == "So  and ."


@pytest.mark.parametrize(
    ("inside", "notes"),
    [
        ('{"name": "seek", "arguments": {"page": 1}}', ()),
        ('\n{"name": "seek", "parameters": {"page": 1}}\n', ("args_alias",)),
        ("<invoke name='seek'><parameter name='page'>1</parameter></invoke>", ()),
    ],
)
def test_a_section_may_hold_json_or_single_quotes(inside, notes):
    text = f"{section(inside)}{section(invoke(page=2))} end"
    assert read(text) == [{"page": 1}, {"page": 2}]
    result = PARSER.parse(text, tools=TOOLS)
    assert (result.text, result.calls[0].notes) == (" end", notes)
    stream = PARSER.stream(tools=TOOLS)
    told = [event for character in text for event in stream.feed(character)]
    assert [event.call.args for event in told if isinstance(event, CallReady)] == [{"page": 1}, {"page": 2}]
    assert stream.close() == result


@pytest.mark.parametrize(
    ("inside", "code"),
    [
        ("nothing", "wrong_dialect"), ("", "empty"), ("{}", "missing_name"),
        ('{"name": "seek"', "invalid_json"), ('{"name": "seek", "arguments": [1]}', "bad_arguments"),
        ('{"name": "seek"} {"name": "seek"}', "extra_data"),
        ('<invoke name="seek">page 1</invoke>', "extra_data"), ("<invoke></invoke>", "missing_name"),
        ('<invoke name="seek"><parameter name="page">1</invoke>', "unclosed"),
    ],
)  # fmt: skip
def test_malformed_call_is_an_error_and_the_next_call_runs(inside, code):
    assert read(section(inside)) == [code]
    assert read(f"{section(inside)}\n{section(invoke(page=2))}") == [code, {"page": 2}]


def test_truncated_call_does_not_run():
    whole = section('{"name": "seek", "arguments": {"page": 12}}')
    for cut in range(len("<dots_function_call>"), whole.index("</")):
        result = PARSER.parse(whole[:cut], tools=TOOLS)
        assert read(whole[:cut]) in (["unclosed"], [{"page": 12}])
        assert result.calls[0].error or result.calls[0].notes == ("unclosed_tag",)
    assert read(section(invoke(page=12))[:-50]) == ["unclosed"]


def test_call_in_reasoning_does_not_run():
    result = PARSER.parse(f"<think>{section(invoke(page=1))}</think>No.", tools=TOOLS)
    assert (result.calls, result.notes) == ((), ("call_in_reasoning",))


def test_rendered_tool_output_has_no_tags():
    (message,) = PARSER.render([ParsedCall("seek", {}, "c")], [ToolResult.from_text(section(invoke()))])
    assert message["role"] == "tool"
    assert not [
        marker for marker in (*PARSER.format.section, "<invoke", "</invoke>") if marker in message["content"]
    ]
    assert PARSER.structural_tag(TOOLS) is None


@tool
def add(first: int, second: float, *, note: str = "a") -> float:
    """Add two numbers."""
    return first + second


TEMPLATE = """\
{% for m in messages %}{% if m.role == "assistant" %}<|response|>{{ m.content }}
{%- if m.tool_calls %}<dots_function_call>{% for c in m.tool_calls %}
<invoke name="{{ c.function.name }}">{% for k, v in c.function.arguments.items() %}
<parameter name="{{ k }}">{{ v if v is string else v | tojson }}</parameter>{% endfor %}
</invoke>{% endfor %}
</dots_function_call>{% endif %}<|endofresponse|>
{%- else %}<|userprompt|>{{ m.content }}<|endofuserprompt|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|response|>{% endif %}"""


def test_auto_finds_it_by_the_chat_template():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    parser = get_parser("auto", tokenizer=tokenizer)
    assert (parser.name, parser.reasoning_open) == ("dots", False)
    assert check_parser(parser, [add], tokenizer, parsers=PARSERS) == ["add"]
