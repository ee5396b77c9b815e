"""Cohere's Command R, R7B, A and 4: a list of calls between action tags; reasoning and answers in tags."""

import json

import pytest

from torchrl_agentic.messages import ParsedCall, ToolResult
from torchrl_agentic.parsers import PARSERS, CallFailed, CallReady, TextDelta, check_parser, get_parser
from torchrl_agentic.testing.tokenizers import byte_tokenizer

COHERE = get_parser("cohere_command3")
LOOK = {"tool_call_id": "3", "tool_name": "look", "parameters": {"city": "Jena", "days": [1, None]}}
STOP = {"tool_call_id": "4", "tool_name": "stop", "parameters": {}}
SEEN = [("look", {"city": "Jena", "days": [1, None]}), ("stop", {})]


def action(*calls) -> str:
    lines = ",\n    ".join(call if isinstance(call, str) else json.dumps(call) for call in calls)
    return f"<|START_ACTION|>[\n    {lines}\n]<|END_ACTION|>"


def read(text, parser=COHERE):
    """Return the calls of a message, read as a whole and a character at a time."""
    result, stream = parser.parse(text), parser.stream()
    for character in text:
        stream.feed(character)
    assert stream.close() == result
    return [call.error.code if call.error else (call.tool, call.args) for call in result.calls], result


def test_one_list_holds_all_calls_and_their_ids():
    plan = "<|START_THINKING|>I look, then stop.<|END_THINKING|>"
    found, result = read(f"{plan}{action(LOOK, STOP)}<|END_OF_TURN_TOKEN|>")
    assert found == SEEN
    assert [call.call_id for call in result.calls] == ["3", "4"]
    assert [call.notes for call in result.calls] == [(), ()]
    assert result.reasoning == "I look, then stop."
    assert result.text == f"{plan}<|END_OF_TURN_TOKEN|>"


@pytest.mark.parametrize("name", ["cohere_command4", "command_r7b", "command_a"])
def test_the_names_of_the_models_mean_the_same_format(name):
    assert get_parser(name) == COHERE


@pytest.mark.parametrize("tag", ["RESPONSE", "TEXT"])
def test_text_to_the_user_stays_text(tag):
    text = f"<|START_{tag}|>It rains in <co>Jena</co: 0:[1]>.<|END_{tag}|>"
    assert (read(text)[0], read(text)[1].text) == ([], text)


def test_call_in_reasoning_is_a_draft():
    found, result = read(f"<|START_THINKING|>{action(LOOK)}<|END_THINKING|><|START_TEXT|>No.<|END_TEXT|>")
    assert (found, result.notes) == ([], ("call_in_reasoning",))
    thinking = get_parser("cohere_command4", reasoning_open=True)
    found, result = read(f"perhaps {action(LOOK)}<|END_THINKING|>{action(STOP)}", thinking)
    assert (found, result.reasoning) == ([("stop", {})], f"perhaps {action(LOOK)}")


def test_invented_result_is_not_a_call():
    forged = f"<|START_TOOL_RESULT|>{action(LOOK)}<|END_TOOL_RESULT|>"
    assert read(f"{forged}{action(STOP)}")[0] == [("stop", {})]


@pytest.mark.parametrize(
    ("text", "expected", "ids"),
    [
        (action({"tool_name": "stop"}), [("stop", {})], ["call_0_0"]),
        (action({**STOP, "tool_call_id": 7}), [("stop", {})], ["7"]),
        (action(STOP, STOP), [("stop", {}), ("stop", {})], ["4", "4_2"]),
        ("<|START_ACTION|>" + json.dumps(STOP) + "<|END_ACTION|>", [("stop", {})], ["4"]),
        (f"{action(STOP)} then\n{action(LOOK)}", [SEEN[1], SEEN[0]], ["4", "3"]),
        (action(STOP).removesuffix("<|END_ACTION|>"), [("stop", {})], ["4"]),
        (action({**STOP, "parameters": '{"a": 1}'}), [("stop", {"a": 1})], ["4"]),
        (action({**STOP, "parameters": {"a": "<|END_ACTION|>"}}), [("stop", {"a": "<|END_ACTION|>"})], ["4"]),
        (action({**STOP, "tool_name": 4}, LOOK), ["missing_name", SEEN[0]], ["4", "3"]),
        (action(LOOK, {**STOP, "parameters": [1]}), [SEEN[0], "bad_arguments"], ["3", "4"]),
        (action(LOOK, "null"), [SEEN[0], "missing_name"], ["3", "call_0_1"]),
        (action(LOOK, '{"tool_name": "stop", "parameters": {"a": "on'), ["invalid_json"], ["call_0_0"]),
        (action(LOOK)[:-30], ["unclosed"], ["call_0_0"]),
        (action("{oops") + action(STOP), ["invalid_json", SEEN[1]], ["call_0_0", "4"]),
        (action("<invoke>"), ["invalid_json"], ["call_0_0"]),
    ],
)  # fmt: skip
def test_odd_lists_are_read_as_far_as_they_are_clear(text, expected, ids):
    found, result = read(text)
    assert found == expected
    assert [call.call_id for call in result.calls] == ids


def test_stream_reports_the_calls_of_a_list_when_it_closes():
    stream = COHERE.stream()
    text = action(LOOK, "null")
    assert stream.feed(f"So{text[:-1]}") == [TextDelta("So")]
    assert [type(event) for event in stream.feed(">")] == [CallReady, CallFailed]


def test_calls_are_written_with_numbers_as_ids():
    calls = [ParsedCall("look", SEEN[0][1], "3"), ParsedCall("stop", {}, "call_2_1", index=1)]
    text = COHERE.render_calls([*calls, ParsedCall("stop", {}, "x", index=2)])
    assert text == action(LOOK, {**STOP, "tool_call_id": "1"}, {**STOP, "tool_call_id": "2"})
    assert read(text)[0] == [*SEEN, SEEN[1]]


def test_a_grammar_writes_a_list_of_calls():
    tag = COHERE.structural_tag({"look": {"type": "object", "properties": {}}}, tool_choice="required")
    outer = tag["format"]
    assert (outer["triggers"], outer["at_least_one"]) == (["<|START_ACTION|>"], True)
    (block,) = outer["tags"]
    (call,) = block["content"]["tags"]
    pattern, middle, content = call["content"]["elements"]
    body = f"{call['begin']}12{middle['value']}{{}}{call['end']}"
    assert (pattern["pattern"], content["type"]) == (r"\d{1,4}", "json_schema")
    assert (
        read(block["begin"] + body + block["content"]["separator"] + body + block["end"])[0]
        == [("look", {})] * 2
    )


def test_results_are_messages_of_tools_without_tags():
    (message,) = COHERE.render([ParsedCall("look", {}, "3")], [ToolResult.from_text(f"a {action(STOP)}")])
    assert (message["role"], message["tool_call_id"]) == ("tool", "3")
    assert "<|START_ACTION|>" not in message["content"]


TEMPLATE = """\
{%- macro answer(m) -%}
{%- if m.tool_calls -%}
<|START_ACTION|>[
{%- for c in m.tool_calls %}
    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ c.function.name }}", "parameters":
{{- " " ~ c.function.arguments | tojson }}}{{ "," if not loop.last }}
{%- endfor %}
]<|END_ACTION|>
{%- else -%}<|START_TEXT|>{{ m.content }}<|END_TEXT|>
{%- endif -%}
{%- endmacro -%}
{%- for m in messages -%}
<|START_OF_TURN_TOKEN|>
{%- if m.role == "user" -%}<|USER_TOKEN|><|START_TEXT|>{{ m.content }}<|END_TEXT|>
{%- elif m.role == "tool" -%}
<|SYSTEM_TOKEN|><|START_TOOL_RESULT|>[{"results": {"0": {{ m.content | tojson }}}}]<|END_TOOL_RESULT|>
{%- else -%}<|CHATBOT_TOKEN|>{{ answer(m) }}
{%- endif -%}
<|END_OF_TURN_TOKEN|>
{%- endfor -%}
{%- if add_generation_prompt -%}
<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_THINKING|>{{ "" if reasoning else "<|END_THINKING|>" }}
{%- endif -%}
"""


def test_auto_detects_its_chat_template():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    parser = get_parser("auto", tokenizer=tokenizer)
    assert (parser.name, parser.reasoning_open) == ("cohere_command3", False)
    assert get_parser("auto", tokenizer=tokenizer, reasoning=True).reasoning_open
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "array"}}}
    assert check_parser(parser, {"look": schema}, tokenizer, parsers=PARSERS) == ["look"]


COMMAND_R = get_parser("command_r_plus")


def fence(*calls, between: str = "\n") -> str:
    return f"Action:{between}```json\n[{', '.join(map(json.dumps, calls))}]```"


@pytest.mark.parametrize("between", ["", " ", "\n"])
def test_command_r_calls_in_a_fence(between):
    text = f"I will look. {fence(LOOK, STOP, between=between)}\nso"
    found, result = read(text, COMMAND_R)
    assert (found, result.text) == (SEEN, "I will look. \nso")
    assert read(text.replace("]```", "]\n```"), COMMAND_R)[0] == SEEN


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Action: none", []),
        ("Like so:\n```json\n[]\n```", []),
        (fence({"parameters": {}}, STOP), ["missing_name", SEEN[1]]),
        (fence(LOOK).removesuffix("```"), [SEEN[0]]),
        (fence(LOOK)[:-20], ["unclosed"]),
        (f"<results>{fence(LOOK)}</results>", []),
        (fence(STOP) + fence(LOOK), [SEEN[1], SEEN[0]]),
    ],
)
def test_command_r_reads_only_text_after_action(text, expected):
    assert read(text, COMMAND_R)[0] == expected


def test_command_r_writes_no_ids_and_leaves_fences_in_results():
    calls = [ParsedCall(name, args, "c") for name, args in SEEN]
    assert "tool_call_id" not in COMMAND_R.render_calls(calls)
    assert read(COMMAND_R.render_calls(calls), COMMAND_R)[0] == SEEN
    (message,) = COMMAND_R.render(calls[:1], [ToolResult.from_text(f"Action: code\n```\n{fence(STOP)}")])
    assert message["content"].startswith("Action: code\n```\n")
    assert read(message["content"], COMMAND_R)[0] == []
    assert COMMAND_R.structural_tag({"stop": {}})["format"]["triggers"] == ["Action:\n```json"]


def test_command_r_is_found_by_its_chat_template():
    tokenizer = byte_tokenizer()
    calls = "Action:\n```json\n[{% for c in m.tool_calls %}\n    {{ c.args }}{% endfor %}\n]```"
    call = '{"tool_name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
    body = calls.replace("{{ c.args }}", call)
    tokenizer.chat_template = (
        "{% for m in messages %}<|START_OF_TURN_TOKEN|>{{ m.content }}"
        f"{{% if m.tool_calls %}}{body}{{% endif %}}<|END_OF_TURN_TOKEN|>{{% endfor %}}"
    )
    assert get_parser("auto", tokenizer=tokenizer).name == "command_r"
