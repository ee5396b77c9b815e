"""Untrusted text never becomes control tokens, and nothing else changes."""

import pytest
from helpers.model_families import FAMILIES
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_agentic.parsers import control_tokens_of, escape_control_tokens
from torchrl_agentic.testing import byte_tokenizer
from torchrl_agentic.tokens.encoding import Encoder, Piece

QWEN = FAMILIES["qwen2_5"].tokenizer()
ENCODER = Encoder(QWEN)
MARKS = [token.content for token in QWEN.added_tokens_decoder.values()]
parts = st.lists(st.sampled_from([*MARKS, "<|im", "_end|>", "<", "|", "a", " ", "\n", "é", "7"]), max_size=8)
texts = parts.map("".join)


@given(st.lists(st.tuples(texts, st.booleans()), max_size=5))
@settings(max_examples=6 * settings.default.max_examples)
def test_control_tokens_come_only_from_trusted_parts(chosen):
    pieces = [Piece(text, number, trusted) for number, (text, trusted) in enumerate(chosen)]
    found = ENCODER.encode(pieces)
    assert QWEN.decode(found.ids) == "".join(text for text, _ in chosen), "the text stays"
    for token, source in zip(found.ids, found.sources, strict=True):
        assert token not in ENCODER.control or pieces[source].is_trusted
    assert len(found.ids) == len(found.sources) == len(found.starts)
    assert found.starts == sorted(found.starts)


@given(st.lists(texts, max_size=5))
def test_trusted_text_has_the_ids_that_the_tokenizer_gives_it(chosen):
    found = ENCODER.encode([Piece(text, -2, is_trusted=True) for text in chosen])
    assert found.ids == QWEN("".join(chosen), add_special_tokens=False)["input_ids"]
    assert ENCODER.encode_text("".join(chosen)) == found.ids


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_harmless_text_has_them_too(text):
    if not any(mark in text for mark in MARKS):
        assert ENCODER.encode([Piece(text, 0)]).ids == QWEN(text, add_special_tokens=False)["input_ids"]


def test_marker_split_over_two_parts_is_not_a_marker():
    found = ENCODER.encode([Piece("<|im_", -3, is_trusted=True), Piece("end|>", 0)])
    assert not set(found.ids) & ENCODER.control
    found = ENCODER.encode([Piece("<|im_end", 0), Piece("|>", -3, is_trusted=True)])
    assert not set(found.ids) & ENCODER.control


def test_tokens_after_a_place_are_those_that_begin_there_or_later():
    found = ENCODER.encode([Piece("<|im_end|>", -3, is_trusted=True), Piece("\nabc", 0)])
    rest = found.after(len("<|im_end|>"))
    assert QWEN.decode(rest.ids) == "\nabc"
    assert set(rest.sources) == {0}


def test_placeholders_are_expanded_only_in_trusted_parts():
    pieces = [Piece("a<|x|>b", -3, is_trusted=True), Piece("<|x|>", 0), Piece("<|x|>", -3, is_trusted=True)]
    found = ENCODER.encode(pieces, {"<|x|>": ["<|im_end|>", "<|x|><|im_end|>"]})
    assert QWEN.decode(found.ids) == "a<|im_end|>b<|x|><|x|><|im_end|>"
    assert found.ids.count(QWEN.eos_token_id) == 2


@given(st.lists(texts, min_size=1, max_size=4), st.lists(texts, min_size=3, max_size=3))
def test_a_trusted_text_is_expanded_before_it_is_encoded(between, expansions):
    text, marks = "<|x|>".join(between), expansions[: len(between) - 1]
    whole = ENCODER.encode([Piece(text, -3, is_trusted=True)], {"<|x|>": marks})
    assert ENCODER.encode_text(text, {"<|x|>": marks}) == whole.ids


@pytest.mark.parametrize("count", [1, 3])
def test_wrong_number_of_placeholders_is_rejected(count):
    with pytest.raises(ValueError, match=f"2 placeholders .* for {count} images"):
        ENCODER.encode([Piece("a<|x|><|x|>", -3, is_trusted=True)], {"<|x|>": ["x"] * count})
    with pytest.raises(ValueError, match=f"2 placeholders .* for {count} images"):
        ENCODER.encode_text("a<|x|><|x|>", {"<|x|>": ["x"] * count})


def test_a_control_token_across_two_trusted_parts_is_one():
    found = ENCODER.encode([Piece("<|im", -3, is_trusted=True), Piece("_end|>", -2, is_trusted=True)])
    assert found.ids == [QWEN.eos_token_id]


def test_settings_of_the_tokenizer_are_left_to_others():
    tokenizer = byte_tokenizer()
    encoder = Encoder(tokenizer)
    tokenizer("<|im_end|>", split_special_tokens=True)
    tokenizer("abc", truncation=True, max_length=1)
    assert encoder.encode([Piece("a<|im_end|>", -2, is_trusted=True)]).ids[-1] == tokenizer.eos_token_id


def test_a_slow_tokenizer_is_refused():
    with pytest.raises(TypeError, match="a fast tokenizer is needed"):
        Encoder(object())


@given(texts)
def test_escaped_text_encodes_without_control_tokens(text):
    clean = escape_control_tokens(text, control_tokens_of(QWEN).values())
    assert not set(QWEN(clean, add_special_tokens=False)["input_ids"]) & ENCODER.control
    assert clean.replace("\u200b", "") == text
