"""Cached searches return the same results as fresh ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic.parsers import get_parser
from torchrl_agentic.parsers.engine.python_source import bracket_end
from torchrl_agentic.parsers.engine.reader import Reader, finish

MARKERS = ("<think>", "</think>", "<tool_call>", "[TOOL_CALLS]", "[/THINK]")
PIECES = st.lists(st.sampled_from([*MARKERS, "<", "[", "<t", "x" * 700, "y " * 1500]), max_size=12)


@given(PIECES, st.lists(st.tuples(st.sampled_from(MARKERS), st.integers(0, 9000)), max_size=12))
def test_marker_in_a_long_text_is_found_after_other_searches(
    pieces: list[str], asked: list[tuple[str, int]]
) -> None:
    reader = Reader(text := "".join(pieces))
    for marker, start in asked:
        assert reader.seek(marker, start) == text.find(marker, start)


@given(PIECES, PIECES)
def test_a_marker_that_comes_later_is_found(before: list[str], after: list[str]) -> None:
    reader = Reader(first := "".join(before), is_whole=False)
    assert [reader.seek(marker, 0) for marker in MARKERS] == [first.find(marker) for marker in MARKERS]
    reader.append(second := "".join(after))
    assert [reader.seek(marker, 0) for marker in MARKERS] == [(first + second).find(one) for one in MARKERS]


@given(st.text(alphabet="[]()'\"\\\na", max_size=60))
def test_a_bracket_that_is_known_to_stay_open_stays_open(text: str) -> None:
    reader = Reader(text)
    for place, sign in enumerate(text):
        if sign in "[(":
            assert finish(bracket_end(reader, place)) == finish(bracket_end(Reader(text), place))


def test_lists_that_never_close_are_text_if_no_tool_has_their_name() -> None:
    text = "\n[f(" * 200 + "]"
    result = get_parser("pythonic").parse(text, tools={"other": {}})
    assert (result.text, result.calls) == (text, ())


def test_end_of_reasoning_after_a_call_proves_that_the_prompt_opened_it() -> None:
    parser = get_parser("hermes")
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "%s"}}\n</tool_call>'
    assert parser.parse(f"{call % 'x'}\n</think>\nDone.").notes == ("unopened_reasoning", "call_in_reasoning")
    assert parser.parse(f"{call % '</think>'}\nDone.").notes == ()
    assert parser.parse(f"{call % '</think>'}\n</think>\nDone.").notes == ()
