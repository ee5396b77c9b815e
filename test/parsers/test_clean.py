"""The fast path for well-formed messages returns the same results as the general reader."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_agentic.messages import ParseResult
from torchrl_agentic.parsers import HermesParser, Limits, TextParser

PARSER = HermesParser(limits=Limits(calls=3, argument_bytes=200, depth=6))
ONE = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TIGHT = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
PIECES = (
    ONE, f"\n{ONE}", TIGHT, TIGHT.replace("}}<", "}}\n<"), TIGHT.replace(">{", ">\n\n{"),
    "<tool_call>", "<think>", "</think>", "hm", "\n", "<tool_call>\n", "\n</tool_call>", "```\n",
    "<|im_end|>",
    '{"name": "f", "arguments": {}}', "<tool_response>", ONE.replace("1", "[[[[[[[1]]]]]]]"),
    '<tool_call>\n{"name": "f", "arguments": {"a": "\\ud800"}}\n</tool_call>', ONE.replace("1", "NaN"),
    ONE.replace('"f"', '" f"'), ONE.replace('"f"', '""'), ONE.replace("}}", '}, "id": "x"}'),
    '<tool_call>\n{"name": "f", "arguments": "{}"}\n</tool_call>', ONE.replace("1", f'"{"x" * 300}"'),
    ONE.replace("1", '"</think><tool_call>\\n{}</tool_call>"'),
)  # fmt: skip


def thorough(text: str, tools: object) -> ParseResult:
    return TextParser.parse(PARSER, text, tools=tools, turn=2)


@settings(max_examples=12 * settings.default.max_examples, deadline=None)
@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=6), tools=st.sampled_from([None, {"f": {}}, {"g": {}}])
)
def test_both_ways_agree_on_any_message(pieces: list[str], tools: object):
    text = "".join(pieces)
    assert PARSER.parse(text, tools=tools, turn=2) == thorough(text, tools)


def test_clean_messages_take_the_quick_way(monkeypatch: pytest.MonkeyPatch):
    """Otherwise the two could agree only because the quick path is never taken."""
    read: list[str] = []
    monkeypatch.setattr(TextParser, "parse", lambda parser, text, **_: read.append(text))
    calls = "\n".join([ONE] * 3)
    beginnings = ("", "Let me see.\n", "<think>\nhm\n</think>\n\n")
    for text in (
        f"{beginning}{rest}" for beginning in beginnings for rest in (calls, ONE + ONE, TIGHT + ONE)
    ):
        PARSER.parse(text)
        assert not read
    other = json.dumps({"name": "f"})
    PARSER.parse(other)
    assert read == [other]
