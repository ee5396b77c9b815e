"""Details of each format, beyond the contract of parsers."""

import json
from pathlib import Path
from typing import Any

import pytest

from torchrl_agentic.messages import ParsedCall, ToolResult
from torchrl_agentic.parsers import (
    LIMITS,
    AnthropicToolUseParser,
    HermesParser,
    JSONToolCallParser,
    OpenAIToolCallParser,
    ToolCallParser,
    XMLToolCallParser,
    get_parser,
)

P = '{"name": "add", "arguments": {"a": 1}}'
ADD = ("add", {"a": 1})
EXAMPLE = Path(__file__).parents[2] / "examples" / "gsm8k_code_interpreter.json"


def T(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def _seen(parser: ToolCallParser, message: Any) -> list[Any]:
    return [call.error.code if call.error else (call.tool, call.args) for call in parser.parse(message).calls]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (T('{"name": "add", "arguments": {"a": "on'), ["invalid_json"]),
        ("<tool_call>", ["unclosed"]),
        (f"<tool_call>\n{P}", [ADD]),
        (f"<tool_call>\n{P}\n</tool_ca", [ADD]),
        (T('{"name": "add", "arguments": {"a": 1},}'), ["invalid_json"]),
        (T('{"name": "add", "arguments": {"a": "x\ny"}}'), ["invalid_json"]),
        (T('{"name": "add", "arguments": {"a": NaN}}'), ["invalid_json"]),
        (T('{"name": "add", "arguments": {"a": "\\ud800"}}'), ["invalid_json"]),
        (T('{"name": "add", "arguments": {"a": ' + "[" * 10_000 + "]" * 10_000 + "}}"), ["too_deep"]),
        (T('{"name": "add", "arguments": {"a": ' + "1" * 5000 + "}}"), ["invalid_json"]),
        (T('{"name": "f", "arguments": {"c": "x(</tool_call>)"}}'), [("f", {"c": "x(</tool_call>)"})]),
        (T('{"name": "f", "arguments": {"c": "<tool_call>{}"}}'), [("f", {"c": "<tool_call>{}"})]),
        (f"before {T(P)} after", [ADD]),
        (f"{T(P)} {T('{oops')}", [ADD, "invalid_json"]),
        (f"{T('{oops')} {T(P)}", ["invalid_json", ADD]),
        (T('{"name": "stop"}'), [("stop", {})]),
        (T('{"name": "stop", "arguments": null}'), [("stop", {})]),
        (T('{"name": "stop", "arguments": ""}'), [("stop", {})]),
        (T('{"name": "add", "arguments": "{\\"a\\": 1}"}'), [ADD]),
        (T('{"name": "add", "arguments": [1]}'), ["bad_arguments"]),
        (T('{"name": "add", "arguments": "x"}'), ["invalid_json"]),
        (T('{"name": "add", "parameters": {"a": 1}}'), [ADD]),
        (T(f'{{"type": "function", "function": {P}}}'), [ADD]),
        (T(f'[{P}, "x"]'), [ADD, "missing_name"]),
        (T('{"name": 3, "arguments": {}}'), ["missing_name"]),
        (T('{"name": " ", "arguments": {}}'), ["missing_name"]),
        (T('{"arguments": {}}'), ["missing_name"]),
        (T('{"name": "fly"}'), [("fly", {})]),
        (T('{"name": "add", "arguments": {"a": 2, "a": 1}}'), [ADD]),
        (T(P) + T(P), [ADD, ADD]),
        (T(""), ["empty"]),
        (T(f"{P} {P}"), ["extra_data"]),
        (f"<tool_call>{P}<tool_call>{P}</tool_call>", [ADD, ADD]),
        (f"<tool_call><tool_call>{P}</tool_call>", [ADD]),
        (T('{"name": "add", "arguments": {"a": "a &lt; b"}}'), [("add", {"a": "a &lt; b"})]),
        (f"<TOOL_CALL>{P}</TOOL_CALL>", []),
        (T("\ufeff" + P.replace(" ", "\r\n")), [ADD]),
        (f"<think>{T(P)}</think>", []),
        (f"<think>{T(P)}</think>{T(P)}", [ADD]),
        (f"<think>hm {T(P)}", [ADD]),
    ],
    ids=range(40),
)  # fmt: skip
def test_hermes_reads_each_class_of_message(message: str, expected: list[Any]):
    """The classes of facts/parsers.md, section 5.1."""
    assert _seen(HermesParser(), message) == expected


@pytest.mark.parametrize(
    ("message", "note"),
    [
        (f"<tool_call>{P}", "unclosed_tag"),
        (T('{"name": "add", "arguments": "{}"}'), "string_args"),
        (f"<tool_call><tool_call>{P}</tool_call>", "repeated_opener"),
        (T(f"[{P}]"), "list_of_calls"),
        (T(f'{{"function": {P}}}'), "openai_shape"),
    ],
)
def test_liberties_in_reading_are_noted(message: str, note: str):
    assert note in HermesParser().parse(message).calls[0].notes


def test_error_has_the_mistake_its_position_and_the_correct_form():
    (call,) = HermesParser().parse(T('{"name": "add", "arguments": {"a": 1},}')).calls
    for piece in ("call 1", "was not run", "character", '"name": "tool_name"'):
        assert piece in call.error.message


def test_text_around_calls_is_kept():
    result = HermesParser().parse(f"before {T(P)} after")
    assert result.text == "before  after"


def test_the_first_256_calls_are_read_however_they_are_written():
    """Two lists of 200 hold 400 calls; the limit is on the message."""
    calls = HermesParser().parse(T("[" + ",".join([P] * 200) + "]") * 2).calls
    assert len(calls) == 400
    assert sum(call.error is None for call in calls) == LIMITS.calls
    assert {call.error.code for call in calls if call.error} == {"over_limit"}


def test_recorded_message_with_unclosed_reasoning_has_a_call():
    """The first recorded turn has unclosed reasoning and a call; the second closed reasoning and no call."""
    turns = [m["content"] for m in json.loads(EXAMPLE.read_text())["messages"] if m["role"] == "assistant"]
    first, second = (HermesParser().parse(turn) for turn in turns)
    assert [call.tool for call in first.calls] == ["code_interpreter"]
    assert first.calls[0].args["executes"] == "True"
    assert "unclosed_reasoning" in first.notes
    assert second.calls == ()
    assert second.reasoning
    assert "#### 220000.0" in second.text


@pytest.mark.parametrize("parser", [HermesParser(), XMLToolCallParser(), OpenAIToolCallParser()])
def test_tool_calls_field_of_a_history_is_read(parser: ToolCallParser):
    calls = [
        {"id": "k", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
        json.loads(P),
    ]
    message = {"role": "assistant", "content": "text", "tool_calls": calls}
    result = parser.parse(message, turn=2)
    assert [(call.tool, call.args, call.call_id) for call in result.calls] == [
        (*ADD, "k"),
        (*ADD, "call_2_1"),
    ]
    assert result.text == "text"
    assert parser.parse({"content": "text", "tool_calls": []}).calls == ()


def test_ids_are_the_models_or_derived_and_never_the_same():
    with_id = '{"name": "f", "id": "mine"}'
    calls = HermesParser().parse(T(with_id) + T(with_id) + T(P), turn=4).calls
    assert [call.call_id for call in calls] == ["mine", "mine_2", "call_4_2"]
    assert calls[1].notes == ("missing_args", "duplicate_id")


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("<tool name='f' tag='A'>{\"a\": 1}</tool>", [("f", {"a": 1})]),
        ('<tool tag="A" name="f"></tool>', [("f", {})]),
        ('<tool name="f"/>', [("f", {})]),
        ('<tool name="f">{&quot;a&quot;: 1}</tool>', [("f", {"a": 1})]),
        ('<tool name="f">{"a": "x &amp; y"}</tool>', [("f", {"a": "x &amp; y"})]),
        ("<toolbox>", []),
        ("a <tool> is a thing", []),
        ('<tool name="f">{"a": 1}', ["unclosed"]),
    ],
)
def test_xml_reads_its_tags(message: str, expected: list[Any]):
    assert _seen(XMLToolCallParser(), message) == expected


def test_xml_results_are_elements():
    result = XMLToolCallParser().render_result("A", ToolResult.from_text("no", is_error=True))
    assert result["content"] == '<tool_result call_id="A">[error] no</tool_result>'


def test_json_reads_its_message():
    tools = '[{"tool": "f", "args": {"a": 1}, "id": "c9"}, {"tag": "t"}]'
    text = f'```json\n{{"message": "hi", "tools": {tools}}}\n```'
    result = JSONToolCallParser().parse(text)
    assert result.text == "hi"
    assert [(call.tool, call.call_id) for call in result.calls] == [("f", "c9"), ("", "t")]
    assert result.calls[1].error.code == "missing_name"


def test_openai_reads_message_choice_and_response():
    message = {
        "content": None,
        "tool_calls": [{"id": "1", "function": {"name": "add", "arguments": '{"a": 1}'}}],
    }
    for response in (message, {"message": message}, {"choices": [{"message": message}]}, json.dumps(message)):
        assert _seen(OpenAIToolCallParser(), response) == [ADD]


def test_anthropic_puts_all_results_into_one_user_message():
    parser = AnthropicToolUseParser()
    content = [
        {"type": "text", "text": "hm"},
        {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}},
        {"type": "tool_use", "id": "2", "name": "g", "input": {}},
    ]
    parsed = parser.parse({"content": content})
    assert parsed.text == "hm"
    assert [call.call_id for call in parsed.calls] == ["1", "2"]
    (message,) = parser.render(
        parsed.calls, [ToolResult.from_text("x"), ToolResult.from_text("y", is_error=True)]
    )
    assert message["role"] == "user"
    assert [
        (block["tool_use_id"], block["content"], block.get("is_error")) for block in message["content"]
    ] == [
        ("1", "x", None),
        ("2", "y", True),
    ]


class Foreign:
    """A parser that knows nothing of ours."""

    def parse(self, response: Any) -> Any:
        return HermesParser().parse(response)

    def render_call(self, call: ParsedCall) -> str:
        return "call"

    def render_result(self, call_id: str, result: ToolResult) -> dict[str, str]:
        return {"role": "tool", "content": f"{call_id}: {result.text}"}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("hermes", HermesParser),
        ("qwen3", HermesParser),
        ("xml", XMLToolCallParser),
        ("json", JSONToolCallParser),
        ("openai", OpenAIToolCallParser),
        ("anthropic", AnthropicToolUseParser),
        ("torchrl_agentic.parsers:XMLToolCallParser", XMLToolCallParser),
    ],
)
def test_a_parser_is_found_by_name(name: str, kind: type):
    assert type(get_parser(name)) is kind


def test_an_unknown_name_lists_the_known_and_the_nearest():
    with pytest.raises(ValueError, match=r"'hermse'; did you mean 'hermes'\?.*xml"):
        get_parser("hermse")
    for name in ("no.such.module:X", "torchrl_agentic.parsers:Nope"):
        with pytest.raises(ValueError, match="cannot be imported"):
            get_parser(name)


def test_foreign_parsers_are_adapted_and_other_objects_rejected():
    parser = HermesParser()
    assert get_parser(parser) is parser
    adapted = get_parser(Foreign())
    assert _seen(adapted, T(P)) == [ADD]
    assert adapted.parse(T(P), turn=3).calls
    assert adapted.render_call(ParsedCall("f", {}, "c")) == "call"
    assert adapted.render([ParsedCall("f", {}, "c")], [ToolResult.from_text("x")])[0]["content"] == "c: x"
    with pytest.raises(TypeError, match=r"write HermesParser\(\)"):
        get_parser(HermesParser)
    with pytest.raises(TypeError, match="lacks parse"):
        get_parser(3)
