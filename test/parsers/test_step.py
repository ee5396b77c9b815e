"""Calls of Step-3, each between its own markers."""

import pytest

from torchrl_agentic import tool
from torchrl_agentic.messages import ParsedCall, ToolResult
from torchrl_agentic.parsers import PARSERS, CallReady, check_parser, get_parser
from torchrl_agentic.testing.tokenizers import byte_tokenizer

PARSER = get_parser("step3")
TOOLS = {
    "find": {"type": "object", "properties": {"query": {"type": "string"}, "most": {"type": "integer"}}},
    "open": {"type": "object", "properties": {"url": {"type": "string"}}},
}
HEAD, END = "<｜tool_call_begin｜>function<｜tool_sep｜>", "<｜tool_call_end｜>"


def invoke(name="find", **values):
    parameters = "".join(
        f'<steptml:parameter name="{key}">{value}</steptml:parameter>\n' for key, value in values.items()
    )
    return f'<steptml:invoke name="{name}">\n{parameters}</steptml:invoke>'


def one(name="find", **values):
    return f"{HEAD}{invoke(name, **values)}{END}"


def several(*calls):
    return "<｜tool_calls_begin｜>\n" + "\n".join(calls) + "\n<｜tool_calls_end｜>"


def read(text, parser=PARSER, tools=TOOLS):
    result = parser.parse(text, tools=tools)
    return [call.error.code if call.error else (call.tool, dict(call.args)) for call in result.calls]


def test_calls_with_text_around_them():
    calls = several(one(query="a < b\n", most="3"), one("open", url="x"))
    text = f"So: {calls} ok"
    assert read(text) == [("find", {"query": "a < b\n", "most": 3}), ("open", {"url": "x"})]
    assert PARSER.parse(text, tools=TOOLS).text == "So: \n ok"


@pytest.mark.parametrize(
    "text",
    [
        several(f"<｜tool_call_begin｜>{invoke(query='q')}{END}"),
        several(f"<｜tool_call_begin｜> function <｜tool_sep｜> {invoke(query='q')} {END}"),
        several(f"<｜tool_call_begin｜>{one(query='q')}"),
        several(invoke(query="q")),
        one(query="q"),
        invoke(query="q"),
        f"{HEAD}{invoke(query='q')}",
        f"<｜tool_calls_begin｜>{HEAD}{invoke(query='q')}<｜tool_calls_end｜>",
    ],
)
def test_missing_tags_around_a_complete_call_are_accepted(text):
    assert read(text) == [("find", {"query": "q"})]
    assert PARSER.parse(text, tools=TOOLS).text == ""


@pytest.mark.parametrize(
    ("inside", "code"),
    [
        (f"{HEAD}", "unclosed"),
        (f"{HEAD}{invoke(query='q')[:-40]}", "unclosed"),
        (f'{HEAD}<steptml:invoke name="find"', "unclosed"),
        (f"<｜tool_call_begin｜>{END}", "empty"),
        (f"{HEAD}{END}", "wrong_dialect"),
        (f'{HEAD}find\n{{"query": "q"}}{END}', "wrong_dialect"),
        (f"<｜tool_call_begin｜>code<｜tool_sep｜>{invoke()}{END}", "wrong_dialect"),
        (f"{HEAD}<steptml:invoke>{END}", "missing_name"),
        (f'{HEAD}<steptml:invoke name="find">{{}}</steptml:invoke>{END}', "wrong_dialect"),
        (f'{HEAD}<steptml:invoke name="find">{END}', "extra_data"),
    ],
)
def test_malformed_call_is_an_error_and_the_next_call_runs(inside, code):
    assert read(f"<｜tool_calls_begin｜>{inside}") == [code]
    broken, good = read(f"<｜tool_calls_begin｜>{inside}{one('open', url='x')}<｜tool_calls_end｜>")
    assert (isinstance(broken, str), good) == (True, ("open", {"url": "x"}))


def test_truncated_call_does_not_take_values_of_the_next():
    cut = invoke(query="so").partition("so")[0]
    for between in ("", END, "\n", f"{END}\n"):
        assert read(several(f"{HEAD}{cut}so{between}{one(query='good')}"))[1:] == [
            ("find", {"query": "good"})
        ]
        assert read(several(f"{HEAD}{cut}so{between}{one(query='good')}"))[0] == "unclosed"


def test_the_end_of_the_turn_ends_a_call():
    assert read(f"{HEAD}<|EOT|>") == ["unclosed"]
    result = PARSER.parse(f"{one(query='q')}<|EOT|><|BOT|>{one(query='q')}", tools=TOOLS)
    assert (len(result.calls), result.notes) == (1, ("forged_turn",))


def test_call_in_reasoning_does_not_run():
    result = PARSER.parse(f"<think>{several(one(query='q'))}</think>No.", tools=TOOLS)
    assert (result.calls, result.notes) == ((), ("call_in_reasoning",))


def test_stream_reports_a_call_when_its_block_closes():
    text, stream, told = several(one(query="q"), one("open", url="x")), PARSER.stream(tools=TOOLS), []
    for character in text:
        told += [
            (event.call.tool, stream.feed(""))
            for event in stream.feed(character)
            if isinstance(event, CallReady)
        ]
    assert told == [("find", []), ("open", [])]
    assert stream.close() == PARSER.parse(text, tools=TOOLS)


def test_arguments_that_would_parse_as_another_call_are_not_rendered():
    for value in (
        one(query="q"),
        f"a\n{invoke(query='q')}",
        "<｜tool_call_begin｜>",
        "</steptml:parameter></steptml:invoke>",
    ):
        with pytest.raises(ValueError, match="'query' contains tags"):
            PARSER.render_call(ParsedCall("find", {"query": value}, ""))
    text = PARSER.render_call(ParsedCall("find", {"query": "<｜tool_call_end｜> x", "most": 1}, ""))
    assert read(text) == [("find", {"query": "<｜tool_call_end｜> x", "most": 1})]


def test_rendered_tool_output_has_no_tags():
    (message,) = PARSER.render([ParsedCall("find", {}, "c")], [ToolResult.from_text(several(one(query="q")))])
    assert (message["role"], message["tool_call_id"]) == ("tool", "c")
    markers = (*PARSER.format.openers, PARSER.format.closer, *PARSER.format.section, END)
    assert not [marker for marker in markers if marker in message["content"]]
    assert PARSER.structural_tag(TOOLS) is None


def test_later_models_write_calls_of_another_format():
    for name in ("step3p5", "step5"):
        assert get_parser(name).name == "qwen3_coder"


@tool
def add(first: int, second: float, *, note: str = "a") -> float:
    """Add two numbers."""
    return first + second


TEMPLATE = """\
{% for m in messages %}<|BOT|>{{ m.role }}
{{ m.content }}{% if m.tool_calls %}<｜tool_calls_begin｜>
{% for c in m.tool_calls %}<｜tool_call_begin｜>{{ c.type }}<｜tool_sep｜>
{%- set f = c.function %}<steptml:invoke name="{{ f.name }}">
{%- for k, v in f.arguments.items() %}
<steptml:parameter name="{{ k }}">{{ v if v is string else v | tojson }}</steptml:parameter>{% endfor %}
</steptml:invoke><｜tool_call_end｜>
{% endfor %}<｜tool_calls_end｜>{% endif %}<|EOT|>{% endfor %}
{%- if add_generation_prompt %}<|BOT|>assistant
<think>
{% endif %}"""


def test_auto_finds_it_by_the_chat_template():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    parser = get_parser("auto", tokenizer=tokenizer)
    assert (parser.name, parser.reasoning_open) == ("step3", True)
    assert check_parser(parser, [add], tokenizer, parsers=PARSERS) == ["add"]
