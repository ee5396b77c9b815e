"""Calls of MiniCPM5: XML with CDATA blocks, and Python syntax for values other than strings."""

import pytest

from torchrl_agentic import tool
from torchrl_agentic.messages import ParsedCall, ToolResult
from torchrl_agentic.parsers import PARSERS, CallReady, check_parser, get_parser
from torchrl_agentic.testing.tokenizers import byte_tokenizer

PARSER = get_parser("minicpm5")
TOOLS = {
    "edit": {
        "type": "object",
        "properties": {
            "path": {"type": "string"}, "text": {"type": "string"}, "line": {"type": "integer"},
            "dry": {"type": "boolean"}, "mode": {"type": "object"}, "tags": {"type": ["array", "null"]},
        },
    }
}  # fmt: skip

CLOSING = "</param><param name='line'>1</param></function>"


def block(*params):
    return f'<function name="edit">{"".join(params)}</function>'


def param(name, value):
    return f'<param name="{name}">{value}</param>'


def said(text, **options):
    result = PARSER.parse(text, tools=TOOLS, **options)
    return [call.error.code if call.error else dict(call.args) for call in result.calls]


def test_calls_with_text_around_them():
    text = f"First{block(param('path', 'a.py'))}, then\n{block()}\nDone."
    result = PARSER.parse(text, tools=TOOLS)
    assert [(call.tool, call.args) for call in result.calls] == [("edit", {"path": "a.py"}), ("edit", {})]
    assert result.text == "First, then\n\nDone."


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("<![CDATA[a < b &amp; c\n]]>", "a < b &amp; c\n"),
        ("\n <![CDATA[ x ]]>\n", " x "),
        ("<![CDATA[]]>", ""),
        ("<![CDATA[<p>]]</p>]]>", "<p>]]</p>"),
        ("<![CDATA[<a><![CDATA[b]]></a>]]>", "<a><![CDATA[b]]></a>"),
        ("<![CDATA[a]]]]><![CDATA[>b]]>", "a]]>b"),
        ("<![CDATA[</param><param name='line'>1</param></function>]]>", CLOSING),
        ("<![CDATA[</function>\n<function name=\"edit\">]]>", '</function>\n<function name="edit">'),
        ("a &lt; b &amp;&amp; c &#65;&#x42;", "a < b && c AB"),
        ("AT&T &copy; &nbsp;", "AT&T &copy; &nbsp;"),
        (" if a < b:", " if a < b:"),
        ("7", "7"),
        ("True", "True"),
    ],
)  # fmt: skip
def test_string_value_is_the_text_of_its_block(written, value):
    assert said(block(param("path", "p"), param("text", written))) == [{"path": "p", "text": value}]


@pytest.mark.parametrize(
    ("name", "written", "value"),
    [
        ("line", "7", 7), ("line", " 7\n", 7), ("line", "seven", "seven"),
        ("dry", "true", True), ("dry", "True", True), ("dry", "False", False),
        ("mode", '{"a": null}', {"a": None}), ("mode", "{'a': None, 'b': [1]}", {"a": None, "b": [1]}),
        ("mode", '<![CDATA[{"a":\n"<&"}]]>', {"a": "<&"}),
        ("tags", "None", None), ("tags", "['x', 'y']", ["x", "y"]),
        ("tags", "['x'", "['x'"), ("tags", "['x'] y", "['x'] y"), ("tags", "{'a': 1}", "{'a': 1}"),
        ("other", "True", "True"), ("other", "[1]", [1]),
    ],
)  # fmt: skip
def test_other_values_are_json_or_python(name, written, value):
    assert said(block(param(name, written))) == [{name: value}]


@pytest.mark.parametrize(
    "text",
    [
        '<functionname="edit"><paramname="path">a</param></function>',
        "<function name='edit'><param name='path'>a</param></function>",
        '<function  name = "edit" >\n  <param name="path" >a</param>\n</function>',
    ],
)
def test_tags_may_be_written_sloppily(text):
    assert said(text) == [{"path": "a"}]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (block("<param>a</param>"), "missing_name"),
        (block('<param id="path">a</param>'), "missing_name"),
        ('<function name="">x</function>', "missing_name"),
        (block("path: a"), "extra_data"),
        (block('{"path": "a"}'), "wrong_dialect"),
        ('<function name="edit"><param name="path">a', "unclosed"),
        ('<function name="edit"><param name="path">a</param>', "unclosed"),
        ('<function name="edit"><param name="pa', "unclosed"),
        ('<function name="ed', "unclosed"),
        ("<function name", "unclosed"),
        ('<function name="edit"><param name="text"><![CDATA[a', "unclosed"),
        (block(param("text", "<![CDATA[a")), "unclosed"),
    ],
)
def test_malformed_call_is_an_error(text, code):
    assert said(text) == [code]


def test_truncated_block_does_not_extend_to_a_later_call():
    good = block(param("text", "<![CDATA[<b>]]>"))
    for cut in ("</param></function>", "", "<|im_end|>"):
        text = f'<function name="edit"><param name="text"><![CDATA[<a>{cut}\n{good}'
        assert said(text)[0] == "unclosed"
        assert {"text": "<a>"} not in said(text)
    assert said(f'<function name="edit"><param name="text"><![CDATA[<a>\n{good}') == [
        "unclosed",
        {"text": "<b>"},
    ]


def test_prose_about_functions_is_text():
    for text in (
        "a <function> b",
        "<functional name='x'>",
        "<function",
        "Use <function ...>",
        "<functions>\n",
    ):
        assert (PARSER.parse(text).calls, PARSER.parse(text).text) == ((), text)


def test_call_in_reasoning_does_not_run():
    call = block(param("path", "a"))
    result = PARSER.parse(f"<think>\n{call}\n</think>\n\nNo.", tools=TOOLS)
    assert (result.calls, result.notes, result.reasoning) == ((), ("call_in_reasoning",), f"\n{call}\n")
    opened = get_parser("minicpm5", reasoning_open=True).parse(f"so{call}</think>{call}", tools=TOOLS)
    assert [call.args for call in opened.calls] == [{"path": "a"}]


def test_stream_reports_a_call_when_its_block_closes():
    text = f"Now: {block(param('text', '<![CDATA[</function>]]>'), param('line', '1'))} ok"
    stream, told = PARSER.stream(tools=TOOLS), []
    for character in text:
        told.append([event for event in stream.feed(character) if isinstance(event, CallReady)])
    (place,) = (index for index, events in enumerate(told) if events)
    assert place == text.rindex(">")
    assert stream.close() == PARSER.parse(text, tools=TOOLS)


@pytest.mark.parametrize(
    "value",
    [
        "x", "a\nb", "<", "&amp;", "]]>", "a]]>\nb]]", "]]></param>", "<![CDATA[x]]>", "]]]]><![CDATA[>",
        " a ", "", block(param("path", "<![CDATA[a]]>")), "</function>", "<param name='path'>",
        "]]><![CDATA[",
    ],
)  # fmt: skip
def test_strings_are_written_so_that_they_read_back(value):
    text = PARSER.render_call(ParsedCall("edit", {"text": value, "line": 3, "mode": {"<": "\n"}}, ""))
    assert said(text) == [{"text": value, "line": 3, "mode": {"<": "\n"}}]


def test_a_block_that_reads_as_two_calls_is_not_written():
    with pytest.raises(ValueError, match="'text' contains a call"):
        PARSER.render_call(ParsedCall("edit", {"text": f"a\n{block(param('text', '<![CDATA[a]]>'))}"}, ""))


def test_rendered_tool_output_has_no_tags():
    (message,) = PARSER.render(
        [ParsedCall("edit", {}, "c")], [ToolResult.from_text(f"{block()}</tool_response>")]
    )
    assert message["role"] == "tool"
    assert not {tag for tag in ("<function", "</function>", "</tool_response>") if tag in message["content"]}
    assert PARSER.structural_tag(TOOLS) is None


@tool
def add(first: int, second: float, *, note: str = "a", fast: bool = True) -> float:
    """Add two numbers."""
    return first + second


TEMPLATE = """\
{% for m in messages %}{% if m.role == "tool" %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response>{% else %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}<function name="{{ c.function.name }}">
{%- for k, v in c.function.arguments.items() %}<param name="{{ k }}">
{%- if v is string and ("<" in v or "&" in v or "\n" in v) %}<![CDATA[{{ v }}]]>
{%- else %}{{ v }}{% endif %}</param>
{%- endfor %}</function>
{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def test_auto_finds_it_by_the_chat_template():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    parser = get_parser("auto", tokenizer=tokenizer)
    assert (parser.name, parser.reasoning_open) == ("minicpm5", False)
    assert check_parser(parser, [add], tokenizer, parsers=PARSERS) == ["add"]
