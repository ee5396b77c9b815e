"""Calls in a history: arguments as OpenAI's API has them, JSON texts, or objects, for every template."""

import json

import pytest
from helpers.trl_templates import NAMES, stop_ids_of, tokenizer_of
from hypothesis import given
from hypothesis import strategies as st
from torchrl.envs import Compose

from torchrl_agentic import EndTrajectory, ToolCompose
from torchrl_agentic.engines import ScriptedEngine
from torchrl_agentic.rollout import rollout
from torchrl_agentic.testing import byte_tokenizer
from torchrl_agentic.tokens.chat_template import ChatTemplate

TEXT_ONLY = """\
{%- for m in messages %}
{%- if m.tool_calls %}
{%- for c in m.tool_calls %}<|call|>{{ c.function.name + ' ' + c.function.arguments }}{%- endfor %}<|end|>
{%- else %}<|start|>{{ m.role + ' ' + m.content }}<|end|>{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}<|start|>assistant {% endif %}
"""
"""A template in the style of DeepSeek V3, which takes arguments only as text."""


def history(arguments, content=""):
    function = {"name": "get", "arguments": arguments}
    return [
        {"role": "user", "content": "q"},
        {
            "role": "assistant", "content": content,
            "tool_calls": [{"id": "call00000", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call00000", "content": "sunny"},
        {"role": "user", "content": "and then?"},
    ]  # fmt: skip


def template(name):
    return ChatTemplate(tokenizer_of(name), probe=False)


def text_only():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEXT_ONLY
    return ChatTemplate(tokenizer, ends=["<|end|>"], special=["<|end|>"])


@pytest.mark.parametrize("name", NAMES)
def test_json_text_and_objects_are_the_same_arguments_for_every_template(name):
    arguments = {"city": "Rome"}
    try:
        expected = template(name).render(history(arguments))
    except Exception:  # a template of a model without tools rejects both
        with pytest.raises(Exception):  # noqa: B017, PT011
            template(name).render(history(json.dumps(arguments), None))
        return
    assert template(name).render(history(json.dumps(arguments), None)) == expected
    assert '\\"city' not in expected


@given(st.dictionaries(st.text(min_size=1), st.integers() | st.text() | st.lists(st.booleans()), max_size=3))
def test_any_arguments_read_the_same_as_text_and_as_an_object(arguments):
    found = template("qwen2_5")
    assert found.render(history(json.dumps(arguments))) == found.render(history(arguments))


@pytest.mark.parametrize("nothing", ["", " ", None, "{}"])
def test_a_call_without_arguments_has_an_empty_object(nothing):
    found = template("qwen3_6")
    assert found.render(history(nothing)) == found.render(history({}))


@pytest.mark.parametrize("arguments", ['{"city": "Rome"}', {"city": "Rome"}])
@pytest.mark.parametrize("content", ["", None])
def test_a_template_that_takes_only_text_gets_text(arguments, content):
    assert '<|call|>get {"city": "Rome"}<|end|>' in text_only().render(history(arguments, content))


def test_a_template_that_takes_any_text_gets_unreadable_arguments_as_they_are():
    assert '<|call|>get {"city": "Ro<|end|>' in text_only().render(history('{"city": "Ro'))


@pytest.mark.parametrize("arguments", ['{"city": "Ro', "[1]", "Rome"])
def test_a_template_that_rejects_unreadable_arguments_names_the_message(arguments):
    with pytest.raises(
        ValueError, match=r"message 1 of it calls 'get' with arguments that are no JSON object"
    ):
        template("qwen3_6").render(history(arguments))


def test_a_task_with_a_history_in_the_shape_of_an_api_runs():
    tokenizer, stops = tokenizer_of("qwen3_6"), stop_ids_of("qwen3_6")
    said = [*tokenizer.encode("Done."), tokenizer.eos_token_id]
    engine = ScriptedEngine(lambda key, turn, ids: said, tokenizer=tokenizer, stop_token_ids=stops)
    env = Compose(ToolCompose([], parser="qwen3_coder"), EndTrajectory(max_turns=4, when_no_calls=True))
    task = {"messages": history('{"city": "Rome"}', None)}
    (found,) = rollout(env, engine, tokenizer, [task])
    assert found.reason == "no_calls"
    assert "<parameter=city>\nRome\n</parameter>" in tokenizer.decode(found.ledger.ids)
