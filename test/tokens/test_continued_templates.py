"""Prompts over call, result, answer and user turn are the text that every template of trl writes itself."""

import re

import pytest
from helpers.trl_templates import NAMES, end_of, stop_ids_of, stops_of, tokenizer_of

from torchrl_agentic.testing import chat_tokenizer
from torchrl_agentic.tokens.writer import ChatEncoder

# Templates of models that know no tools, or that write results elsewhere than behind the call.
REFUSED = re.compile(
    r"cohere|deepseek|gemma3?$|gemma3?_training|diffusion|phi3|llava|idefics|smolvlm|llama3$|llama3_training"
)
SPEC = {
    "type": "function",
    "function": {"name": "get", "description": "d", "parameters": {"type": "object", "properties": {}}},
}
WORD = "vjqwordqvj"
CALL = {"id": "call00000", "type": "function", "function": {"name": "get", "arguments": {"city": WORD}}}
QUESTION = {"role": "user", "content": "what?"}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "sunny", "tool_call_id": "call00000", "name": "get"}
DONE = {"role": "assistant", "content": "Done."}
ASKED = {"role": "user", "content": "and then?"}


def encoder_of(name, stops=None):
    """The encoder of a template, or None if it is refused at construction, with the reason."""
    given = stop_ids_of(name) if stops is None else stops
    try:
        return ChatEncoder(tokenizer_of(name), tools=[SPEC], stop_token_ids=given)
    except ValueError as error:
        assert "this chat template cannot be continued token by token" in str(error)
        assert REFUSED.search(name), error
        return None


def rendered(name, *chat, ready=True):
    """The text of a conversation; some templates want the contents in parts."""
    for in_parts in (False, True):
        messages = [
            {**one, "content": [{"type": "text", "text": one["content"]}]} if in_parts else one
            for one in chat
        ]
        try:
            text = tokenizer_of(name).apply_chat_template(
                messages, tools=[SPEC], add_generation_prompt=ready, tokenize=False
            )
        except Exception:  # templates raise any type
            continue
        if QUESTION["content"] in text:
            return text
    return None


def said_in(name, whole):
    """The text of a call up to where its turn ends, and its ends: the template's, and none if it was cut.

    Where the turn ends is read from the conversation that ends with the call.
    """
    prompt = rendered(name, QUESTION)
    alone = rendered(name, QUESTION, CALLED, ready=False).rpartition(WORD)[2].rstrip()
    ends = [end for end in (end_of(name), *stops_of(name)) if alone.endswith(end)]
    head = whole.rpartition(WORD)[0].removeprefix(prompt) if whole.startswith(prompt) else ""
    return head + WORD + alone.removesuffix("".join(ends)), [None, *ends]


def ids_of(name, text, end=None):
    ids = tokenizer_of(name).encode(text, add_special_tokens=False)
    return ids if end is None else [*ids, tokenizer_of(name).convert_tokens_to_ids(end)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("has_stops", [True, False])
def test_prompts_over_calls_and_results_are_the_text_of_the_template(name, has_stops):
    encoder = encoder_of(name, None if has_stops else ())
    if encoder is None:
        return
    tokenizer, prompt = tokenizer_of(name), rendered(name, QUESTION)
    whole = rendered(name, QUESTION, CALLED, RESULT)
    if whole is None or WORD not in whole:
        check_without_calls(name, encoder)
        return
    text, ends = said_in(name, whole)
    for end in ends:
        if end is not None and tokenizer.convert_tokens_to_ids(end) not in encoder.stop_token_ids:
            continue  # the model's turn would not end here
        writer = encoder.begin([QUESTION])
        writer.add_sampled(ids_of(name, text, end))
        writer.add_messages(CALLED, [RESULT])
        second = tokenizer.decode(writer.ids)
        assert second.startswith(prompt + text)
        assert second.rpartition(WORD)[2] == whole.rpartition(WORD)[2]
        writer.add_sampled(ids_of(name, "Done."))
        writer.add_messages(DONE, [ASKED])
        third = tokenizer.decode(writer.ids)
        assert third.startswith(second + "Done.")
        later = rendered(name, QUESTION, CALLED, RESULT, DONE, ASKED)
        assert third.rpartition("Done.")[2] == later.rpartition("Done.")[2]


@pytest.mark.parametrize("name", ["gemma4", "gemma4_v5", "diffusion_gemma"])
@pytest.mark.parametrize("has_stops", [True, False])
def test_the_header_of_results_stays_behind_an_end_that_the_template_does_not_write(name, has_stops):
    encoder = ChatEncoder(tokenizer_of(name), stop_token_ids=stop_ids_of(name) if has_stops else ())
    writer = encoder.begin([QUESTION])
    start = writer.size
    writer.add_sampled(ids_of(name, "call", "<turn|>"))
    writer.add_messages(CALLED, [RESULT])
    assert (
        tokenizer_of(name).decode(writer.ids[start:]).startswith("call<turn|><|tool_response>response:get{")
    )


@pytest.mark.parametrize(
    ("name", "closer"), [("qwen2_5", "</tool_call>"), ("glm4moe", "</tool_call>"), ("gemma4", "<tool_call|>")]
)
def test_a_stop_token_that_ends_a_call_is_followed_by_the_end_of_the_turn(name, closer):
    tokenizer = tokenizer_of(name)
    encoder = ChatEncoder(tokenizer, stop_token_ids=tokenizer.convert_tokens_to_ids([closer]))
    whole = rendered(name, QUESTION, CALLED, RESULT)
    for end, between in ((closer, ""), (None, closer)):
        writer = encoder.begin([QUESTION])
        start = writer.size
        writer.add_sampled(ids_of(name, f"call{between}", end))
        writer.add_messages(CALLED, [RESULT])
        behind = whole.rpartition(WORD)[2].partition(closer)[2]
        assert tokenizer.decode(writer.ids[start:]) == f"call{closer}{behind}"


QUOTING = """\
{%- for m in messages %}
{%- if m.tool_calls %}
{%- if m.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{{- '<|call|>' + m.tool_calls[0].function.arguments.values() | first }}<|q|><|endcall|>
{%- else %}<|start|>{{ m.role + ' ' + m.content }}<|end|>{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}<|start|>assistant {% endif %}
"""
"""A template that quotes values with a special token, and ends calls otherwise than other answers."""


def test_a_template_whose_end_of_calls_is_unknown_is_refused_and_the_end_is_named():
    tokenizer = chat_tokenizer(
        QUOTING, eos="<|end|>", control=("<|call|>", "<|q|>", "<|endcall|>", "<|start|>"), added=()
    )
    with pytest.raises(ValueError, match=r"in stop_token_ids, perhaps '<\|endcall\|>'"):
        ChatEncoder(tokenizer)
    known = ChatEncoder(tokenizer, stop_token_ids=tokenizer.convert_tokens_to_ids(["<|endcall|>"]))
    end, pieces = known.template.delta([CALLED], [RESULT], [0])
    assert (end, pieces[0].text) == ("<|endcall|>", "<|start|>tool ")


def check_without_calls(name, encoder):
    """Check a template that writes no calls: models call in the text of their answers."""
    writer = encoder.begin([QUESTION])
    writer.add_sampled(ids_of(name, "Done."))
    writer.add_messages(DONE, [RESULT])
    whole = rendered(name, QUESTION, DONE, RESULT)
    assert tokenizer_of(name).decode(writer.ids).rpartition("Done.")[2] == whole.rpartition("Done.")[2]
