"""No text of a model makes a parser raise, whatever values its calls have."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_agentic.messages import ParsedCall, ToolResult
from torchrl_agentic.parsers import PARSERS, TextParser, get_parser

ONE_ARGUMENT: dict[str, tuple[str, str]] = {"tags": ("search", "query"), "fence": ("python", "code")}
"""Formats that express one tool with one argument, a string."""
NAMES = [name for name in PARSERS if isinstance(get_parser(name), TextParser)]
VALUES: list[Any] = [
    0, -1, 10**40, 1.5, True, None, "", "x", "é日本\U0001f600", "NaN", "null", "[1]", [], {}, [[]], [{}],
    [None],
    [{"a": [{"b": None}]}], {"a": {"b": [1, "2", {"c": []}]}}, {"item": [1, {"item": 2}]}, {"": 1},
    [{"x y": 1, "é": "[]"}], "a\nb\\n'\"", {"$ref": "#/x"},
]  # fmt: skip
LITERALS = [
    "NaN", "-Infinity", "Infinity", "1e999", "1" * 5000, "-" + "9" * 4301, "0x1F", "1_000", "007", "٣", "²",
    '{"a": 1, "a": 2}', '[{"a": [{"b": NaN}]}]', "{'a': (1,)}", '{"a":' * 9, "[" * 300, "\\ud800", "\ud800",
    "\\N{x}", "\\U00110000", "&#x110000;", "&#xD800;", "\x00", "\u2028", "\ufeff", "True", "<a>", "</a>",
    "a=1, a=2", "functions.", ":0", "{", "}", "]", '"', "'", "\n", " ",
]  # fmt: skip
SCHEMAS: list[Any] = [
    {}, {"type": "integer"}, {"type": "float"}, {"type": ["array", "null"]}, {"type": "tuple"},
    {"enum": [1, "a"]},
    {"type": "array", "items": {"type": "dict"}}, {"type": "object"}, {"type": "string"},
    {"$ref": "#/properties"},
]  # fmt: skip


def markers(name: str) -> list[str]:
    parser: Any = get_parser(name)
    found = (
        *parser.control_markers(),
        *parser.format.openers,
        parser.format.closer,
        *parser.format.section,
        *parser.format.reasoning_tags,
    )
    return sorted(filter(None, found))


@st.composite
def messages(draw: st.DrawFn, name: str) -> str:
    """Return the calls of a format with any values, damaged at up to four places."""
    tool, key = ONE_ARGUMENT.get(name, ("f", ""))
    values = st.sampled_from(VALUES)
    drawn = (
        st.builds(str, values).map(lambda value: {key: value})
        if key
        else st.fixed_dictionaries({"a": values}, optional={"b": values, "item": values})
    )
    try:
        text = get_parser(name).render_calls(
            [ParsedCall(tool, draw(drawn), "functions.f:0")] * draw(st.integers(1, 2))
        )
    except ValueError:  # the format cannot express the values
        text = get_parser(name).render_calls([ParsedCall(tool, {key or "a": "x"}, "functions.f:0")])
    pieces = st.sampled_from([*markers(name), *LITERALS])
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, len(text)))
        text = text[:place] + draw(pieces) + text[place + draw(st.sampled_from([0, 1, 4])) :]
    return text


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=settings.default.max_examples // 3, deadline=None)
@given(data=st.data(), tolerance=st.sampled_from(["strict", "lenient"]))
def test_any_text_is_read_into_json_and_answered(name: str, data: st.DataObject, tolerance: str):
    """Arguments are finite JSON, each call has a result to render, and a stream agrees."""
    text = data.draw(messages(name))
    tool, _ = ONE_ARGUMENT.get(name, ("f", ""))
    properties = data.draw(st.dictionaries(st.sampled_from(["a", "b", "item"]), st.sampled_from(SCHEMAS)))
    tools = data.draw(st.sampled_from([None, {tool: {"type": "object", "properties": properties}}]))
    parser = get_parser(name, tolerance=tolerance)
    result, stream = parser.parse(text, tools=tools), parser.stream(tools=tools)
    for start in range(0, len(text), 5):
        stream.feed(text[start : start + 5])
    assert stream.close() == result
    calls = result.calls
    for call in calls:
        json.dumps(call.args, allow_nan=False)
        assert not (call.error and call.args)
    written = json.dumps(parser.render(calls, [ToolResult.from_text("the answer")] * len(calls)))
    assert written.count("the answer") == len(calls)
