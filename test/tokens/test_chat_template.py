"""Deltas of real chat templates are what these write, or the template is refused with the reason."""

import importlib.util
import re
from pathlib import Path

import pytest
from helpers.model_families import trl_template

from torchrl_agentic.testing import byte_tokenizer
from torchrl_agentic.tokens.chat_template import ChatTemplate

ALL = sorted(
    path.stem
    for path in (Path(importlib.util.find_spec("trl").origin).parent / "chat_templates").glob("*.jinja")
)
ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|call|>",
    "<|return|>",
    "<|observation|>",
    "</s>",
    "<end_of_turn>",
    "<turn|>",
    "<｜end▁of▁sentence｜>",
    "<|END_OF_TURN_TOKEN|>",
    "<|end|>",
    "<|eot|>",
)
# Templates of models that know no tools, or whose results stand elsewhere than behind the call.
REFUSED = re.compile(r"cohere|deepseek|gemma|phi3|llava|idefics|smolvlm|llama3$")
SPEC = {
    "type": "function",
    "function": {"name": "tool", "description": "d", "parameters": {"type": "object"}},
}


def made(source, **options):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = source
    special = re.findall(r"<\|[^<>| ]+\|>|<turn\|>|<\|turn>|</s>", source)
    ends = [end for end in ENDS if end in source]
    return ChatTemplate(tokenizer, tools=[SPEC], ends=ends, special=sorted(set(special)), **options)


def answer(text, *ids):
    calls = [
        {"id": i, "type": "function", "function": {"name": "tool", "arguments": {"x": "1"}}} for i in ids
    ]
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}


def result(text, call_id):
    return {"role": "tool", "content": text, "tool_call_id": call_id, "name": "tool"}


@pytest.mark.parametrize("name", ALL)
def test_deltas_equal_the_text_of_the_template_late_in_a_conversation(name):
    """Of conversations whose calls the template is told of, as it wants them."""
    try:
        template = made(trl_template(name))
    except ValueError as error:
        assert REFUSED.search(name), error
        assert "cannot be continued token by token" in str(error)
        return
    chat = [{"role": "user", "content": "q"}]
    for index, text in enumerate(("42", "two\nlines", '{"a": "b"}')):
        call_id = f"call0000{index}"
        chat.append(answer("", call_id))
        before, new = list(chat), [result(text, call_id)]
        chat += new
        end, pieces = template.delta(before, new, [index])
        rendered = template.render(chat)
        assert rendered.endswith(end + "".join(piece.text for piece in pieces))
        assert [piece.source for piece in pieces if not piece.is_trusted] == [index]


@pytest.mark.parametrize("name", ["qwen2_5", "llama3_1", "lfm2", "qwen3_instruct_2507"])
def test_conversations_that_only_grow_are_known_as_such(name):
    template = made(trl_template(name))
    assert template.method == "fixed_base"
    assert template.appends
    assert template.keeps_reasoning


def test_a_template_that_drops_reasoning_is_known_as_such():
    template = made(trl_template("qwen3"))
    assert (template.appends, template.keeps_reasoning) == (True, False)


def test_delta_does_not_depend_on_the_length_of_earlier_messages():
    """It is rendered once, however long the conversation, and however the results read."""
    template = made(trl_template("qwen2_5"))
    renderings = []
    render = template._renderer.apply_chat_template
    template._renderer.apply_chat_template = lambda chat, **options: (
        renderings.append(len(chat)), render(chat, **options)
    )[1]  # fmt: skip
    long = [{"role": "user", "content": "q"}, answer("a")] * 50
    for text in ("one", "two"):
        template.delta(long, [result(text, "call00000")], [0])
    assert max(renderings, default=0) <= 3
    assert len(renderings) <= 2


def test_results_in_user_messages_can_be_continued_too():
    template = made(trl_template("gemma3"), tool_role="user")
    end, pieces = template.delta([{"role": "user", "content": "q"}, answer("a")], [
        {"role": "user", "content": "R", "tool_call_id": "c"},
    ], [0])  # fmt: skip
    assert end + "".join(piece.text for piece in pieces) == (
        "<end_of_turn>\n<start_of_turn>user\nR<end_of_turn>\n<start_of_turn>model\n"
    )


WRITES_IDS = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}"
    "{%- if m.tool_call_id is defined %} {{ m.tool_call_id }}{% endif %}\n{{ m.content }}<|im_end|>\n"
    "{%- endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WANTS_SHORT_IDS = WRITES_IDS.replace(" {{ m.tool_call_id }}", "").replace(
    "{%- if m.tool_call_id is defined %}",
    "{%- if m.tool_call_id is defined and m.tool_call_id | length > 3 %}{{ raise_exception('long') }}",
)


def text_behind(template, call_id):
    end, pieces = template.delta([answer("a", call_id)], [result("r", call_id)], [0])
    return end + "".join(piece.text for piece in pieces)


def test_a_template_that_writes_ids_gets_those_of_each_result():
    template = made(WRITES_IDS)
    for call_id in ("vjq000000", "call00001", "call00002", "vjq000000", "call00001"):
        assert f"tool {call_id}r<|im_end|>" in text_behind(template, call_id)


def test_ids_that_a_template_does_not_write_cost_no_rendering(monkeypatch):
    template = made(WRITES_IDS.replace(" {{ m.tool_call_id }}", ""))
    first = text_behind(template, "call00001")
    monkeypatch.setattr(template, "render", None)
    assert {text_behind(template, call_id) for call_id in ("call00002", "another", "call00001")} == {first}


def test_two_results_of_one_call_are_not_those_of_two_calls():
    """A template may write the second result of a call elsewhere than the result of a second call."""
    source = WRITES_IDS.replace(
        " {{ m.tool_call_id }}",
        "{%- set last = loop.previtem %}"
        "{%- if last and last.tool_call_id == m.tool_call_id %} again{% endif %}",
    )
    template = made(source)
    for ids, wanted in ((("1", "2"), 0), (("3", "4"), 0), (("5", "5"), 1), (("6", "6"), 1)):
        new = [result("r", ids[0]), result("s", ids[1])]
        _, pieces = template.delta([answer("a", *ids)], new, [0, 1])
        assert "".join(piece.text for piece in pieces).count("again") == wanted


def test_a_template_that_rejects_some_ids_still_gets_the_others():
    template = made(WANTS_SHORT_IDS, probe=False)
    for call_id in ("1", "2"):
        assert "r<|im_end|>" in text_behind(template, call_id)
    with pytest.raises(ValueError, match="long"):
        text_behind(template, "call00001")
