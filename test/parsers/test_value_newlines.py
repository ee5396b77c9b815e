"""Newlines at the ends of a value: they are data, or belong to the format."""

from typing import Any

import pytest

from torchrl_agentic.messages import ParsedCall
from torchrl_agentic.parsers import check_parser, get_parser
from torchrl_agentic.testing.tokenizers import byte_tokenizer
from torchrl_agentic.tools.function import tool

TEMPLATE = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for c in m.tool_calls %}
<TAG>
<function={{ c.function.name }}>
{% for k, v in c.function.arguments.items() -%}
<parameter={{ k }}>{{ v if v is string else v | tojson }}</parameter>
{% endfor -%}
</function>
</TAG>
{%- endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
WRAPPERS = {"qwen3_coder": "tool_call", "mimo": "tool_call", "seed_oss": "seed:tool_call"}


def _written(name: str, body: str) -> str:
    tag = WRAPPERS[name]
    return f"<{tag}>\n<function=save>\n{body}</function>\n</{tag}>"


def _read(name: str, value: str) -> Any:
    text = _written(name, f"<parameter=body>{value}</parameter>\n")
    result = get_parser(name).parse(text)
    stream = get_parser(name).stream()
    for character in text:
        stream.feed(character)
    assert stream.close() == result
    (call,) = result.calls
    return call.args["body"]


@pytest.mark.parametrize(
    ("written", "qwen", "mimo", "seed"),
    [
        ("one", "one", "one", "one"),
        ("\none\n", "one", "\none\n", "one"),
        ("one\n", "one", "one\n", "one\n"),
        ("\none", "one", "\none", "\none"),
        ("\n\none\n\n", "\none\n", "\n\none\n\n", "\none\n"),
        ("\r\none\r\n", "one", "\r\none\r\n", "one"),
        ("\r\none\n", "one\n", "\r\none\n", "\r\none\n"),
        ("", "", "", ""),
        ("\n", "", "\n", "\n"),
        ("\n\n", "", "\n\n", ""),
    ],
)
def test_newlines_around_a_value_belong_to_the_format_or_to_the_value(written, qwen, mimo, seed):
    assert [_read(name, written) for name in ("qwen3_coder", "mimo", "seed_oss")] == [qwen, mimo, seed]


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize(
    "value",
    ["a", "", "\n", "\n\n", "\r\n", "a\n", "\na", "\na\n", "\n\na\n\n", "\r\na\r\n", "\n\r\n", " a ", "\ra"],
)
def test_any_newlines_of_a_value_read_back(name: str, value: str):
    parser, schema = get_parser(name), {"properties": {"body": {"type": "string"}}}
    (call,) = parser.parse(
        parser.render_call(ParsedCall("save", {"body": value}, "c")), tools={"save": schema}
    ).calls
    assert call.args == {"body": value}


def test_a_call_is_written_as_the_chat_template_writes_it():
    call = ParsedCall("save", {"body": "a\n", "n": 2}, "c")
    compact = "<parameter=body>a\n</parameter>\n<parameter=n>2</parameter>\n"
    for name in ("mimo", "seed_oss"):
        assert get_parser(name).render_call(call) == _written(name, compact)
    spread = "<parameter=body>\na\n\n</parameter>\n<parameter=n>\n2\n</parameter>\n"
    assert get_parser("qwen3_coder").render_call(call) == _written("qwen3_coder", spread)


@pytest.mark.parametrize("name", WRAPPERS)
def test_newline_before_the_next_tag_is_not_data_if_a_closing_tag_is_missing(name: str):
    body = "<parameter=body>one\n<parameter=n>2</parameter>\n"
    schema = {"properties": {"body": {"type": "string"}, "n": {"type": "integer"}}}
    (call,) = get_parser(name).parse(_written(name, body), tools={"save": schema}).calls
    assert call.args == {"body": "one", "n": 2}
    assert call.notes == ("unclosed_parameter",)


@tool
def save(body: str, n: int) -> str:
    """Save some text."""
    return body * n


@pytest.mark.parametrize("name", ["mimo", "seed_oss"])
def test_auto_recognises_a_template_that_writes_values_verbatim(name: str):
    tag = WRAPPERS[name]
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace("TAG", tag)
    parser = get_parser("auto", tokenizer=tokenizer)
    assert parser.name == name
    assert check_parser(parser, [save], tokenizer) == ["save"]


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("granite_thinking", "qwen3_coder"),
        ("granite4", "hermes"),
        ("mimo", "mimo"),
        ("step3p5", "qwen3_coder"),
    ],
)
def test_names_of_models_lead_to_their_format(alias: str, name: str):
    assert get_parser(alias).name == name
