"""Token ids tell markers from text that only looks like one."""

import pytest

from torchrl_agentic.messages import ParsedCall
from torchrl_agentic.parsers import get_parser
from torchrl_agentic.testing.tokenizers import byte_tokenizer

ONE = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'
TOKENIZER = byte_tokenizer(added=("<tool_call>", "</tool_call>"))
PLAIN = byte_tokenizer()


def ids_of(*pieces: str) -> list[int]:
    """A piece in capitals' brackets is one token, all others are spelled byte by byte."""
    ids: list[int] = []
    for piece in pieces:
        token = TOKENIZER.convert_tokens_to_ids(piece)
        ids += [token] if token is not None else PLAIN.encode(piece, add_special_tokens=False)
    return ids


BODY = '\n{"name": "f", "arguments": {"a": "é"}}\n'


def test_a_marker_that_is_a_token_opens_a_call_and_the_same_characters_do_not():
    ids = ids_of("say <tool_call>{}</tool_call> ", "<tool_call>", BODY, "</tool_call>", " bye")
    assert len(get_parser("hermes").parse(TOKENIZER.decode(ids)).calls) == 2
    result = get_parser("hermes").parse_tokens(ids, TOKENIZER, turn=1)
    (call,) = result.calls
    assert (call.tool, call.args, call.call_id) == ("f", {"a": "é"}, "call_1_0")
    assert result.text == "say <tool_call>{}</tool_call>  bye"
    begin, end = call.token_span
    assert TOKENIZER.decode(ids[begin:end]) == ONE


def test_closing_tag_spelled_out_does_not_close():
    ids = ids_of("<tool_call>", '\n{"name": "f", "arguments": {}}\n', "</tool_call", ">")
    (call,) = get_parser("hermes").parse_tokens(ids_of("<tool_call>", "{oops"), TOKENIZER).calls
    assert call.error.code == "unclosed"
    (call,) = get_parser("hermes").parse_tokens(ids, TOKENIZER).calls
    assert call.error.code == "extra_data"


def test_without_such_tokens_the_text_is_all_there_is():
    ids = PLAIN.encode(f"é {ONE}", add_special_tokens=False)
    (call,) = get_parser("hermes").parse_tokens(ids, PLAIN).calls
    begin, end = call.token_span
    assert PLAIN.decode(ids[begin:end]) == ONE


@pytest.mark.parametrize("spelled", [0, 1, 2])
def test_token_spans_are_right_after_any_text(spelled):
    before = "<tool_call> é" * spelled
    ids = ids_of(before, "<tool_call>", BODY, "</tool_call>", "<tool_call>", "{oops", "</tool_call>")
    calls = get_parser("hermes").parse_tokens(ids, TOKENIZER).calls
    assert [TOKENIZER.decode(ids[slice(*call.token_span)]) for call in calls] == [
        ONE,
        "<tool_call>{oops</tool_call>",
    ]


def test_structured_formats_read_the_text():
    ids = PLAIN.encode('{"tools": [{"tool": "f"}]}', add_special_tokens=False)
    assert get_parser("json").parse_tokens(ids, PLAIN).calls[0].tool == "f"


@pytest.mark.parametrize(
    ("name", "token"),
    [("minimax_m3", "]<]minimax[>["), ("deepseek_v32", "｜DSML｜"), ("deepseek_v41", "｜DSML｜")],
)
def test_a_marker_of_which_a_part_is_a_token_counts_where_that_was_sampled(name, token):
    """Spelled out it is text."""
    parser, tokenizer = get_parser(name), byte_tokenizer(added=(token,))
    call = parser.render_call(ParsedCall("f", {"a": "VALUE"}, "c"))
    spelled = PLAIN.encode(call, add_special_tokens=False)
    assert tokenizer.decode(spelled) == call
    assert parser.parse_tokens(spelled, tokenizer).calls == ()
    sampled = tokenizer.encode(call, add_special_tokens=False)
    result = parser.parse_tokens([*spelled, *sampled], tokenizer)
    (found,) = result.calls
    assert (found.args, result.text) == ({"a": "VALUE"}, call)
    assert found.token_span == (len(spelled), len(spelled) + len(sampled))


def test_tags_of_minimax_m3_that_are_spelled_in_a_value_are_data():
    parser, tokenizer = get_parser("minimax_m3"), byte_tokenizer(added=("]<]minimax[>[",))
    call = parser.render_call(ParsedCall("f", {"a": "VALUE"}, "c"))
    before, _, after = call.partition("VALUE")
    ids = [tokenizer.encode(piece, add_special_tokens=False) for piece in (before, after)]
    spelled = PLAIN.encode(call, add_special_tokens=False)
    (found,) = parser.parse_tokens([*ids[0], *spelled, *ids[1]], tokenizer).calls
    assert (found.error, found.args) == (None, {"a": call})
