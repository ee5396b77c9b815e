"""DeepSeek V4.1, and calls in the syntax of one version read by the parser of another."""

import pytest

from torchrl_agentic.messages import ParsedCall, ToolResult
from torchrl_agentic.parsers import PARSERS, CallFailed, CallReady, TextDelta, check_parser, get_parser
from torchrl_agentic.testing.tokenizers import byte_tokenizer

V41 = get_parser("deepseek_v41")
DIALECTS = ("deepseek_v32", "deepseek_v4", "deepseek_v41")
CALLS = [ParsedCall("look", {"city": "Jena", "days": 3}, "a"), ParsedCall("stop", {}, "b")]
SEEN = [("look", {"city": "Jena", "days": 3}), ("stop", {})]
SECTION = """\
<｜DSML｜ calls>
<｜DSML｜ invoke name="look">
<｜DSML｜ parameter name="city" string="true">Jena</｜DSML｜ parameter>
<｜DSML｜ parameter name="days" string="false">3</｜DSML｜ parameter>
</｜DSML｜ invoke>
<｜DSML｜ invoke name="stop">
</｜DSML｜ invoke>
</｜DSML｜ calls>"""


def read(parser, text):
    """Return the calls of a message, read as a whole and a character at a time."""
    result, stream = parser.parse(text), parser.stream()
    for character in text:
        stream.feed(character)
    assert stream.close() == result
    return [call.error.code if call.error else (call.tool, call.args) for call in result.calls], result


def test_calls_share_one_section_with_a_space_before_each_name():
    assert V41.render_calls(CALLS) == SECTION
    found, result = read(V41, f"<think>I look.</think>Let me see.\n\n{SECTION}<｜end▁of▁sentence｜>")
    assert found == SEEN
    assert result.reasoning == "I look."
    assert result.text == "<think>I look.</think>Let me see.\n\n\n<｜end▁of▁sentence｜>"
    assert read(V41, SECTION.replace("\n", ""))[0] == SEEN


def test_values_and_bodies_are_those_of_the_other_versions():
    body = '{"city": "Jena", "days": [1, null]}'
    found, _ = read(
        V41, f'<｜DSML｜ calls><｜DSML｜ invoke name="look">{body}</｜DSML｜ invoke></｜DSML｜ calls>'
    )
    assert found == [("look", {"city": "Jena", "days": [1, None]})]
    cut = SECTION[: SECTION.index("3<")]
    assert read(V41, cut)[0] == ["unclosed"]
    assert read(V41, f"<think>{SECTION}</think>no")[0] == []


def test_stream_reports_a_call_when_it_is_closed():
    stream = V41.stream()
    first = SECTION.index("\n<｜DSML｜ invoke", 20)
    assert stream.feed(f"So:{SECTION[: first - 1]}") == [TextDelta("So:")]
    (ready,) = stream.feed(SECTION[first - 1 : first])
    assert isinstance(ready, CallReady)
    assert ready.call.args == CALLS[0].args


@pytest.mark.parametrize("written", DIALECTS)
@pytest.mark.parametrize("named", DIALECTS)
@pytest.mark.parametrize("on_one_line", [False, True])
def test_calls_of_another_version_are_read_or_are_an_error(written, named, on_one_line):
    """They used to be text without a note."""
    text = get_parser(written).render_calls(CALLS)
    found, result = read(get_parser(named), "So: " + (text.replace("\n", "") if on_one_line else text))
    if "deepseek_v41" in (written, named) and written != named:
        assert found == ["wrong_dialect"]
        assert "another DeepSeek version" in result.calls[0].error.message
        assert result.text == "So: "
    else:
        assert found == SEEN
        assert result.notes == (("other_dialect",) if written != named else ())


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("deepseek_v4", '<｜DSML｜ invoke name="f"></｜DSML｜ invoke> so', ["wrong_dialect"]),
        ("deepseek_v41", '<｜DSML｜invoke name="f"></｜DSML｜invoke> so', ["wrong_dialect"]),
        ("deepseek_v4", 'Use <｜DSML｜ invoke name="f"> for it. so', []),
        ("deepseek_v4", "<｜DSML｜ calls>", ["wrong_dialect"]),
        ("deepseek_v4", "<｜DSML｜function_calls>{}</｜DSML｜function_calls> so", ["wrong_dialect"]),
        ("deepseek_v4", '<｜DSML｜tool_calls><｜DSML｜ invoke name="f">', ["wrong_dialect"]),
        ("deepseek_v4", "```\n<｜DSML｜ calls>\n```", []),
        ("deepseek_v4", "<think><｜DSML｜ calls></think>", []),
    ],
)
def test_only_the_beginning_of_a_call_is_an_attempt(name, text, expected):
    found, result = read(get_parser(name), text)
    assert found == expected
    if text.endswith(" so"):
        assert result.text.endswith(" so")


def test_another_versions_call_is_an_event_too():
    stream = get_parser("deepseek_v4").stream()
    (text, failed) = stream.feed(f"So:{SECTION}")
    assert (text, type(failed)) == (TextDelta("So:"), CallFailed)


def test_stream_holds_back_text_that_may_begin_a_call_of_another_version():
    stream = get_parser("deepseek_v4").stream()
    events = [event for character in f"<think>hm {SECTION}" for event in stream.feed(character)]
    assert "".join(event.text for event in events) == "<think>hm "
    assert stream.close().calls[0].error.code == "wrong_dialect"
    assert [type(event) for event in stream.last_events] == [CallFailed]


def test_a_grammar_describes_the_calls():
    (section,) = V41.structural_tag({"f": {}})["format"]["tags"]
    (call,) = section["content"]["tags"]
    assert call["begin"] == '<｜DSML｜ invoke name="f">\n'
    assert call["content"]["style"] == "deepseek_v4_1_xml"


def test_rendered_results_have_no_tags():
    (message,) = V41.render([CALLS[0]], [ToolResult.from_text(f"{SECTION}</tool_result>")])
    assert message["role"] == "tool"
    assert not any(marker in message["content"] for marker in ("｜DSML｜", "</tool_result>"))


TEMPLATE = """\
{%- for m in messages -%}
{%- if m.role == "user" -%}<｜User｜>{{ m.content }}
{%- elif m.role == "tool" -%}<｜User｜><tool_result>{{ m.content }}</tool_result>
{%- else -%}<｜Assistant｜></think>{{ m.content }}
{%- if m.tool_calls -%}{{ "\n\n<｜DSML｜ calls>\n" }}
{%- for c in m.tool_calls -%}
<｜DSML｜ invoke name="{{ c.function.name }}">{{ "\n" }}
{%- for k, v in c.function.arguments.items() -%}
<｜DSML｜ parameter name="{{ k }}" string="{{ "true" if v is string else "false" }}">
{{- v if v is string else v | tojson }}</｜DSML｜ parameter>{{ "\n" }}
{%- endfor -%}
</｜DSML｜ invoke>{{ "\n" }}
{%- endfor -%}
</｜DSML｜ calls>
{%- endif -%}<｜end▁of▁sentence｜>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<｜Assistant｜>{{ "<think>" if thinking else "</think>" }}{%- endif -%}
"""


def test_auto_detects_its_chat_template():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    parser = get_parser("auto", tokenizer=tokenizer)
    assert (parser.name, parser.reasoning_open) == ("deepseek_v41", False)
    assert get_parser("auto", tokenizer=tokenizer, thinking=True).reasoning_open
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
    assert check_parser(parser, {"look": schema}, tokenizer, parsers=PARSERS) == ["look"]
