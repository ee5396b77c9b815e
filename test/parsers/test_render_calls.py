"""`parse` reads back the calls that `render_calls` writes: ids, tags, any number of calls."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_agentic.messages import ParsedCall
from torchrl_agentic.parsers import PARSERS, get_parser

_text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
_word = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_.-]{0,12}", fullmatch=True)
_values = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=12)
_args = st.dictionaries(_text, _values | st.lists(_values, max_size=3), max_size=3)


def _seen(calls: Any) -> list[Any]:
    return [(call.tool, dict(call.args), call.call_id, call.tag, call.error) for call in calls]


@settings(deadline=None)
@given(
    calls=st.lists(
        st.tuples(_word, _args, _word, st.none() | _word), max_size=5, unique_by=lambda call: call[2]
    )
)
def test_calls_in_one_json_message_keep_ids_tags_and_order(calls: list[tuple[str, Any, str, str | None]]):
    parser = get_parser("json")
    made = [ParsedCall(tool, args, call_id, tag) for tool, args, call_id, tag in calls]
    result = parser.parse(parser.render_calls(made), turn=4)
    assert _seen(result.calls) == _seen(made)
    assert [call.index for call in result.calls] == list(range(len(made)))
    assert result.text == ""


def test_calls_without_ids_are_numbered():
    parser = get_parser("json")
    text = parser.render_calls([ParsedCall("a", {}, ""), ParsedCall("b", {"x": 1}, "", tag="t")])
    assert _seen(parser.parse(text, turn=2).calls) == [
        ("a", {}, "call_2_0", None, None),
        ("b", {"x": 1}, "t", "t", None),
    ]


def test_single_call_is_a_message():
    parser, call = get_parser("json"), ParsedCall("a", {"x": "{}"}, "c1")
    assert parser.render_call(call) == parser.render_calls([call])
    assert _seen(parser.parse(parser.render_call(call)).calls) == _seen([call])


@pytest.mark.parametrize("name", PARSERS)
def test_no_calls_read_back_as_none(name: str):
    parser = get_parser(name)
    result = parser.parse(parser.render_calls([]))
    assert result.calls == ()
    assert not result.text or name in ("openai", "anthropic"), "structured messages have an empty list"


NAMES = ["", " ", "a\n", "\ta", "\u2028a", "<tool_call>", "[ARGS]", "a<b", "a>b", "a(b"]
KEYS = ["<parameter=", "a<b", "<function=", "<tool/", "</arg_key>", "a=b"]


@pytest.mark.parametrize("name", PARSERS)
def test_a_name_that_cannot_be_read_back_is_refused(name: str):
    """Names of tools and of arguments."""
    parser = get_parser(name)
    for tool, key in [*((tool, "a") for tool in NAMES), *(("f", key) for key in KEYS)]:
        try:
            text = parser.render_call(ParsedCall(tool, {key: "x"}, "call_0"))
        except ValueError:
            continue
        schema = {"type": "object", "properties": {key: {"type": "string"}}}
        found = parser.parse(text, tools={tool: schema})
        assert [(call.tool, dict(call.args)) for call in found.calls] == [(tool, {key: "x"})]
