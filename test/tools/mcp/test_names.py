import re

from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic.tools.mcp.toolset import MAX_NAME, clean, shown_names

FIT = re.compile(r"[A-Za-z0-9_-]{1,64}")


def test_characters_that_models_cannot_write_become_underscores():
    assert clean("files.read/all now") == "files_read_all_now"


def test_names_that_differ_far_back_stay_different():
    assert clean("a" * 80 + "b") != clean("a" * 80 + "c")


def test_valid_name_is_kept_after_any_other_names():
    assert shown_names(["a.b", "a_b"]) == {"a.b": "a_b_2", "a_b": "a_b"}


def test_a_prefix_comes_before_every_name():
    assert shown_names(["read", "write"], "fs_") == {"read": "fs_read", "write": "fs_write"}


@given(st.lists(st.text(max_size=80)), st.text(max_size=10))
def test_all_names_can_be_written_and_no_two_are_equal(names, prefix):
    shown = shown_names(names, prefix)
    assert list(shown) == list(dict.fromkeys(names))
    assert len(set(shown.values())) == len(shown)
    assert all(FIT.fullmatch(name) and len(name) <= MAX_NAME for name in shown.values())
