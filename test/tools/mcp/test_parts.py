import base64

from hypothesis import given
from hypothesis import strategies as st
from mcp_types import AudioContent, CallToolResult, ImageContent, TextContent

from torchrl_agentic.messages import JsonPart, Status, TextPart
from torchrl_agentic.tools.mcp.mcp_tool import mcp_result, part_of, with_structured

JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def texts(*contents):
    return [TextContent(type="text", text=text) for text in contents]


def test_structured_content_replaces_equal_text():
    result = mcp_result(CallToolResult(content=texts("a", '{ "n" : 1 }', "b"), structured_content={"n": 1}))
    assert result.parts == (TextPart("a"), JsonPart({"n": 1}), TextPart("b"))
    assert result.meta == {"structured": {"n": 1}}


def test_structured_content_that_no_text_says_comes_last():
    result = mcp_result(CallToolResult(content=texts("see there"), structured_content={"n": 1}))
    assert result.parts == (TextPart("see there"), JsonPart({"n": 1}))


def test_true_and_1_are_different_content():
    parts = with_structured([TextPart('{"n": 1}')], {"n": True})
    assert parts == [TextPart('{"n": 1}'), JsonPart({"n": True})]


def test_wrapped_value_equal_to_the_text_is_not_repeated():
    for text, value in (("hello", "hello"), ("5", 5), ("[1, 2]", [1, 2])):
        result = mcp_result(CallToolResult(content=texts(text), structured_content={"result": value}))
        assert result.parts == (TextPart(text),)
    several = mcp_result(CallToolResult(content=texts("a", "2"), structured_content={"result": ["a", 2]}))
    assert several.parts == (TextPart("a"), TextPart("2"))


@given(JSONS, st.lists(st.text()))
def test_structured_content_is_never_lost_and_texts_keep_their_order(value, others):
    parts = [TextPart(text) for text in others]
    found = with_structured(list(parts), value)
    said = [part for part in found if isinstance(part, JsonPart)]
    assert said == [JsonPart(value)] or found == parts
    kept = [part for part in found if isinstance(part, TextPart)]
    assert all(part in parts for part in kept)
    assert len(found) - len(parts) in (0, 1)


def test_an_error_of_the_server_is_one_with_all_its_parts():
    result = mcp_result(CallToolResult(content=texts("no such file", "try /tmp"), is_error=True))
    assert result.status is Status.ERROR
    assert result.text == "no such file\ntry /tmp"


def test_no_content_is_an_empty_result():
    assert mcp_result(CallToolResult(content=[])).parts == ()


def test_an_image_whose_base64_is_broken_is_named():
    part = part_of(ImageContent(type="image", data="???", mime_type="image/png"))
    assert part == TextPart("[image image/png with invalid base64]")


def test_audio_is_named_and_kept_for_programs():
    data = base64.b64encode(b"123456").decode()
    result = mcp_result(
        CallToolResult(content=[AudioContent(type="audio", data=data, mime_type="audio/wav")])
    )
    assert result.text == "[audio audio/wav, 6 bytes]"
    assert result.meta == {"audio": [{"media_type": "audio/wav", "data": data}]}


def test_further_content_of_the_server_is_kept():
    result = mcp_result(CallToolResult.model_validate({"content": [], "_meta": {"cost": 2}}))
    assert result.meta == {"server_meta": {"cost": 2}}
