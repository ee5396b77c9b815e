"""What a chat completions API is asked, and what it answers in pieces."""

import base64
import io
import json

import pytest
from fakes.chat_server import call, completion, pieces_of
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from torchrl_agentic.engines.completion import Completion, InvalidCompletion, api_messages
from torchrl_agentic.messages import Message

TEXTS = st.text(max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(st.builds(call, TEXTS, JSON | TEXTS, TEXTS), max_size=3)


def read(response):
    whole = Completion()
    whole.add(response, is_whole=True)
    return whole


def streamed(pieces):
    made = Completion()
    for piece in pieces:
        made.add(piece, is_whole=False)
    return made


@given(TEXTS, CALLS, TEXTS, st.sampled_from(["stop", "length", "content_filter"]), st.integers(1, 9))
def test_the_pieces_of_a_stream_make_the_whole_message(text, calls, reasoning, finish, size):
    response = completion(text, calls, finish, reasoning_content=reasoning)
    whole, made = read(response), streamed(pieces_of(response, size))
    assert made.message([]) == whole.message([])
    assert (made.finish, made.usage) == (whole.finish, whole.usage) == (finish, response["usage"])


@given(st.dictionaries(TEXTS, JSON) | JSON, st.booleans())
def test_nonsense_is_an_invalid_completion_or_a_message(data, is_whole):
    made = Completion()
    try:
        made.add(data, is_whole=is_whole)
    except InvalidCompletion:
        return
    assert isinstance(made.message([]), Message)


@given(
    st.fixed_dictionaries(
        {}, optional={"content": JSON, "tool_calls": JSON, "refusal": JSON, "reasoning": JSON}
    ),
    st.booleans(),
)
def test_fields_of_a_message_with_wrong_types_never_raise_anything_else(said, is_whole):
    made = Completion()
    name = "message" if is_whole else "delta"
    try:
        made.add({"choices": [{name: said, "finish_reason": "stop"}]}, is_whole=is_whole)
    except InvalidCompletion:
        return
    message = made.message([{"role": "user", "content": "x"}])
    json.dumps([*message.tool_calls], allow_nan=False).encode()  # it can be recorded and sent
    assert len({one["id"] for one in message.tool_calls}) == len(message.tool_calls)


@pytest.mark.parametrize(
    "deltas",
    [
        [[{"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}"}}],
         [{"index": 1, "id": "b", "function": {"name": "g", "arguments": "{}"}}]],
        [[{"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}"}}],
         [{"index": 0, "id": "b", "function": {"name": "g", "arguments": "{}"}}]],
        [[{"id": "a", "function": {"name": "f", "arguments": "{}"}},
          {"id": "b", "function": {"name": "g", "arguments": "{}"}}]],
        [[{"index": 0, "id": "a", "function": {"name": "f", "arguments": "{"}}],
         [{"index": 0, "id": "a", "function": {"name": "f", "arguments": "}"}}],
         [{"index": 1, "id": "b", "function": {"name": "g", "arguments": {}}}]],
    ],
    ids=["by index", "one index for all", "no index", "name and id repeated"],
)  # fmt: skip
def test_servers_that_number_their_calls_otherwise_are_understood(deltas):
    pieces = [{"choices": [{"delta": {"tool_calls": calls}, "finish_reason": None}]} for calls in deltas]
    found = streamed(pieces).message([])
    assert [(one["id"], one["function"]) for one in found.tool_calls] == [
        ("a", {"name": "f", "arguments": "{}"}),
        ("b", {"name": "g", "arguments": "{}"}),
    ]


def test_a_content_in_parts_is_split_into_text_and_reasoning():
    thinking = {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}
    found = read(completion([thinking, {"type": "text", "text": "5"}])).message([])
    assert (found.text, found.reasoning) == ("5", "hm")


def test_half_a_surrogate_pair_becomes_a_question_mark():
    found = read(completion("a\ud800b", [call("f", '"\ud800"')])).message([])
    assert found.text == "a?b"
    assert found.tool_calls[0]["function"]["arguments"] == '"?"'


# Requests


def png(color):
    buffer = io.BytesIO()
    Image.new("RGB", (2, 2), color).save(buffer, "PNG")
    return buffer.getvalue()


def url_of(data):
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def test_images_of_all_forms_become_urls(tmp_path):
    data = png("red")
    file = tmp_path / "a.png"
    file.write_bytes(data)
    own = {"type": "image_url", "image_url": {"url": "https://example.com/a.png", "detail": "low"}}
    parts = [
        {"type": "text", "text": "which?"},
        {"type": "image", "base64": base64.b64encode(data).decode(), "media_type": "image/png"},
        {"type": "image", "image": data},
        {"type": "image", "path": str(file)},
        {"type": "image", "url": "https://example.com/a.png"},
        own,
    ]
    (found,) = api_messages([{"role": "user", "content": parts}])
    urls = [part["image_url"]["url"] for part in found["content"][1:]]
    assert found["content"][0] == parts[0]
    assert urls == [url_of(data)] * 3 + ["https://example.com/a.png"] * 2
    assert found["content"][-1] == own
    (opened,) = api_messages(
        [{"role": "user", "content": [{"type": "image", "image": Image.new("RGB", (2, 2))}]}]
    )
    assert opened["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")


@pytest.mark.parametrize(
    "part",
    [{"type": "image"}, {"type": "image", "image": 5}, {"type": "image", "path": "none.png"}],
    ids=range(3),
)
def test_an_image_that_cannot_be_read_is_a_value_error(part):
    with pytest.raises(ValueError, match="image"):
        api_messages([{"role": "user", "content": [part]}])


def test_images_of_results_follow_them_in_a_message_of_the_user():
    """Tool messages of the API hold text only, and must follow their calls without a gap."""
    image = {"type": "image", "base64": "aGk=", "media_type": "image/png"}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call("f", {}, "a"), call("f", {}, "b")]},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "see: "}, image]},
        {"role": "tool", "tool_call_id": "b", "content": "nothing"},
        {"role": "user", "content": "go on"},
    ]
    made = api_messages(messages)
    assert [one["role"] for one in made] == ["assistant", "tool", "tool", "user", "user"]
    assert made[1]["content"] == "see: [image]"
    assert made[3]["content"] == [
        {"type": "text", "text": "Images of a:"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}},
    ]
    assert [one["role"] for one in api_messages(messages[:2])] == ["assistant", "tool", "user"]


def test_calls_without_results_are_not_sent_and_results_without_calls_are_the_users():
    messages = [
        {"role": "tool", "tool_call_id": "open", "content": "a note"},
        {"role": "assistant", "content": "half", "tool_calls": [call("f", "{", "a")]},
        {"role": "user", "content": "go on"},
    ]
    assert api_messages(messages) == [
        {"role": "user", "content": "a note"},
        {"role": "assistant", "content": "half"},
        {"role": "user", "content": "go on"},
    ]
