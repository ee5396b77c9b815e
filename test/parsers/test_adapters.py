"""Adapters lose no call and no text: that of transformers, and one of a fake engine."""

import pickle

import pytest
from helpers.call_outcomes import outcomes

from torchrl_agentic.errors import MissingExtra
from torchrl_agentic.parsers import get_parser
from torchrl_agentic.parsers.adapters.base import EngineParser, Found

P = '{"name": "add", "arguments": {"a": 1}}'
T = f"<tool_call>\n{P}\n</tool_call>"
ADD = ("add", {"a": 1})
TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text"},
    },
}


class Engine(EngineParser):
    """An engine with a given answer."""

    engine = "engine"

    def __init__(self, answer, **options):
        super().__init__("hermes", **options)
        self.answer = answer

    def extract(self, text, specs):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        (T, (None, [Found("add", '{"a": 1}')]), [ADD]),
        (T, (None, [Found("add", {"a": 1})]), [ADD]),
        (T, (None, [Found("add", "{oops")]), ["invalid_json"]),
        (T, (None, [Found("add", "[1]")]), ["bad_arguments"]),
        (T, (None, [Found("", "{}")]), ["missing_name"]),
        (T, (None, [Found(3, "{}")]), ["missing_name"]),
        (T, ("", []), ["dropped"]),
        (T, RuntimeError("boom"), ["dropped"]),
        (T + T, (None, [Found("add", '{"a": 1}')]), [ADD, "dropped"]),
        ("hello", ("hello", []), []),
        ("hello", RuntimeError("boom"), []),
        (T, (None, [Found("f", {"code": "<tool_call>"})]), [("f", {"code": "<tool_call>"})]),
    ],
)
def test_call_lost_by_an_engine_becomes_one_error(text, answer, expected):
    assert outcomes(Engine(answer, native=get_parser("hermes")).parse(text)) == expected


def test_text_behind_the_last_call_is_put_back_and_ids_are_ours():
    parser = Engine(("before", [Found("add", {}), Found("add", {})]), native=get_parser("hermes"))
    result = parser.parse(f"before {T}{T} after", turn=3)
    assert result.text == "before  after"
    assert [call.call_id for call in result.calls] == ["call_3_0", "call_3_1"]
    spans = [call.span for call in result.calls]
    assert spans[0] == (7, 7 + 2 * len(T))


def test_attempts_of_an_unknown_format_are_found_by_their_tags():
    assert outcomes(Engine(("", [])).parse("<|tool_call_x|>oops")) == ["dropped"]
    assert outcomes(Engine(("", [])).parse("a < b, and <b>bold</b>")) == []
    with pytest.raises(ValueError, match="not write"):
        Engine(("", [])).render_call(None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [(T, [ADD]), (f"{T}\n{T}", [ADD, ADD]), ("hello", []), ("<tool_call>{oops</tool_call>", ["dropped"])],
)
def test_a_response_template_of_transformers_reads(text, expected):
    parser = get_parser("transformers:hermes", template=TEMPLATE)
    assert outcomes(parser.parse(text)) == expected
    assert pickle.loads(pickle.dumps(parser)) == parser


def test_good_call_that_transformers_loses_is_reported():
    assert outcomes(
        get_parser("transformers:hermes", template=TEMPLATE).parse(f"{T}<tool_call>{{oops</tool_call>")
    ) == ["dropped"]


def test_missing_parts_are_named():
    with pytest.raises(ValueError, match="response_template"):
        get_parser("transformers:")
    with pytest.raises(TypeError, match="tokenizer"):
        get_parser("vllm:hermes")
    with pytest.raises(MissingExtra, match="sglang"):
        get_parser("sglang:qwen25").parse("hello")
