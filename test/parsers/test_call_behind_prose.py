"""Calls without an opener after prose on their line do not run, and are noted."""

import pytest

from torchrl_agentic.messages import ToolResult
from torchrl_agentic.parsers import get_parser
from torchrl_agentic.testing.tokenizers import byte_tokenizer

TOOLS = {"edit": {"type": "object", "properties": {"expr": {"type": "string"}}}}
NOTED = ("call_behind_prose",)


def notes(name, text, tools):
    """Return the notes on a message without calls, read as a whole and as a stream."""
    parser = get_parser(name)
    result = parser.parse(text, tools=tools)
    assert (result.calls, result.text) == ((), text)
    for size in (1, 5):
        stream = parser.stream(tools=tools)
        for start in range(0, len(text), size):
            stream.feed(text[start : start + size])
        assert stream.close() == result
    tokenizer = byte_tokenizer()
    assert parser.parse_tokens(tokenizer.encode(text), tokenizer, tools=tools).notes == result.notes
    return result.notes


PYTHONIC = "[edit(expr='a')]"
LLAMA = '{"name": "edit", "parameters": {"expr": "a"}}'


@pytest.mark.parametrize("tools", [TOOLS, None], ids=["known", "unknown"])
@pytest.mark.parametrize(("name", "call"), [("pythonic", PYTHONIC), ("llama3_json", LLAMA)])
def test_a_call_behind_prose_is_noted(name, call, tools):
    assert notes(name, f"Let me check: {call}", tools) == NOTED
    assert notes(name, f"See a[0] and {{x}}: {call} and so on\n", tools) == NOTED
    assert notes(name, f"Two:\nfirst {call}, then {call}.", tools) == NOTED
    assert notes(name, f"In words `{call}` is an example.", tools) == ()
    assert notes(name, f"```\nx {call}\n```\n", tools) == ("call_in_fence",)
    assert notes(name, f"<think>x {call}</think>Done.", tools) == ("call_in_reasoning",)
    (run,) = get_parser(name).parse(f"Now {call}\n{call}", tools=tools).calls
    assert (run.tool, run.error) == ("edit", None)


@pytest.mark.parametrize("tools", [TOOLS, None], ids=["known", "unknown"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pythonic", "See [a(b)] and [link](http://x.y/z(1)) or x[f(0)], or [main()]."),
        ("pythonic", "It is [edit(expr='a' and so on"),
        ("pythonic", "It is [edit(expr=a+1)] there"),
        ("pythonic", "It is [edit"),
        ("llama3_json", 'The person is {"name": "edit", "age": 3}.'),
        ("llama3_json", 'Write {"name": "edit", "parameters": {"expr"'),
        ("llama3_json", 'Of {"type": "object", "properties": {}} and {x} and {"name"'),
    ],
)
def test_prose_with_brackets_is_not_noted(name, text, tools):
    assert notes(name, text, tools) == ()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pythonic", "Look: [other(expr='a')]"),
        ("pythonic", "Look: [other(expr='a'), edit(expr='b')]"),
        ("llama3_json", 'Look: {"name": "other", "parameters": {}}'),
    ],
)
def test_a_call_of_no_known_tool_behind_prose_is_prose(name, text):
    assert notes(name, text, TOOLS) == ()
    assert notes(name, text, None) == NOTED


@pytest.mark.parametrize("name", ["pythonic", "llama3_json"])
def test_bracket_in_reasoning_or_an_example_is_not_a_call(name):
    text = "x[0], [f, {y: 1} and {'z': 2}\n[see: a]\n{3}"
    assert notes(name, f"<think>{text}</think>Done.", TOOLS) == ()
    assert notes(name, f"```\n{text}\n```\n", TOOLS) == ()
    assert notes(name, f"<think>{text}", TOOLS) == ()


class OneTokenPerPiece:
    """A tokenizer with `{` and `[` as tokens, and others that begin with them, as those of Llama."""

    pieces = ("{", '{"', "[", "[f", "x")

    def decode(self, ids, *, skip_special_tokens=False):
        return "".join(self.pieces[index] if index < 5 else chr(index) for index in ids)

    def convert_tokens_to_ids(self, token):
        return self.pieces.index(token) if token in self.pieces else None

    def convert_ids_to_tokens(self, index):
        return self.pieces[index]


def test_brackets_open_calls_as_part_of_any_token():
    for name, ids, rest in (
        ("llama3_json", [1], 'name": "f", "parameters": {}}'),
        ("pythonic", [3], "(a=1)]"),
    ):
        found = get_parser(name).parse_tokens([*ids, *map(ord, rest)], OneTokenPerPiece())
        assert [call.tool for call in found.calls] == ["f"]


@pytest.mark.parametrize("name", ["pythonic", "llama3_json", "phi4_mini", "lfm2", "olmo3"])
def test_brackets_of_results_stay_as_they_are(name):
    data = '{"a": [1, {"b": []}]}'
    assert data in str(get_parser(name).render_result("1", ToolResult.from_text(data))["content"])
