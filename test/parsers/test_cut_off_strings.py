"""A call that a string quotes does not run when the message ends inside that string."""

import pytest

from torchrl_agentic.messages import ParsedCall
from torchrl_agentic.parsers import get_parser
from torchrl_agentic.parsers.engine.text_parser import TextParser
from torchrl_agentic.parsers.registry import FORMATS

_FORMATS = sorted(parser.name for parser in FORMATS if issubclass(parser, TextParser))


@pytest.mark.parametrize("name", _FORMATS)
@pytest.mark.parametrize(
    "between", ["", *(pytest.param(text, marks=pytest.mark.slow) for text in ("\n", " and "))]
)
def test_call_in_a_truncated_string_does_not_run(name, between):
    parser = get_parser(name)
    tools = {"g": {"type": "object", "properties": {"a": {"type": "string"}}}, "f": {"type": "object"}}
    for args in ({"a": 1}, {"a": "x"}, {"a": "it's"}):
        try:
            inner = parser.render_call(ParsedCall("f", args, "call_0"))
            quoted = {"a": f"{between}{inner}{between}{inner}"}
            text = parser.render_call(ParsedCall("g", quoted, "call_0"))
        except ValueError:
            continue
        for known in (None, tools):
            calls = parser.parse(text, tools=known).calls
            assert [(call.tool, call.args) for call in calls] == [("g", quoted)]
            for end in range(len(text)):
                for call in parser.parse(text[:end], tools=known).calls:
                    assert call.error is not None or (call.tool, call.args) == ("g", quoted), text[:end]
