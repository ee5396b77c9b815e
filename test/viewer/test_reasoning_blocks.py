"""Reasoning in a message is found by the tags of models."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic.viewer.render_record import thoughts

TAGS = ["<think>", "<thinking>", "<seed:think>", "<reasoning>", "[THINK]"]


def _end(tag: str) -> str:
    return f"{tag[0]}/{tag[1:]}"


@pytest.mark.parametrize("tag", TAGS)
def test_each_tag_that_models_write(tag: str):
    end = _end(tag)
    assert [*thoughts(f"a{tag}b{end}c")] == [(1, 2 + len(tag + end), "b", True)]
    assert [*thoughts(f"a{tag}b")] == [(1, 2 + len(tag), "b", False)]


def test_a_prompt_may_have_opened_the_tag():
    assert [*thoughts("so far</think>then")] == [(0, 14, "so far", True)]
    assert [*thoughts("a</think>b<think>c</think>d")] == [(0, 9, "a", True), (10, 26, "c", True)]


def test_a_tag_ends_with_its_own_kind():
    assert [*thoughts("<think>a</reasoning>b</think>c")] == [(0, 29, "a</reasoning>b", True)]
    assert [*thoughts("[THINK]a</think>b")] == [(0, 17, "a</think>b", False)]


def test_text_without_tags_has_no_reasoning():
    assert not [*thoughts("a < b > c [think] <Think>")]


@given(st.lists(st.sampled_from([*TAGS, *map(_end, TAGS), "a", "\n"]), max_size=12).map("".join))
def test_reasoning_blocks_are_disjoint_and_in_order(text: str):
    end = 0
    for thought in thoughts(text):
        assert end <= thought.start < thought.stop <= len(text)
        assert thought.text in text[thought.start : thought.stop]
        end = thought.stop
