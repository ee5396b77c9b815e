"""The summary describes the trajectory, and states no more than the dump."""

import pytest
from helpers.record_strategies import record, turn
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic.messages import DispatchResult, Message, ParsedCall, Status, ToolResult, Turn
from torchrl_agentic.viewer.html.summary import (
    STATUS_WORDS,
    MessagePiece,
    contains,
    final_answer,
    pieces,
    said_text,
    summary_lines,
)


def _told(one):
    return "\n".join(line.text for line in summary_lines(one))


def _said(text, *spans):
    calls = tuple(ParsedCall("f", {}, f"c{n}", span=span) for n, span in enumerate(spans))
    results = tuple(ToolResult.from_text("x") for _ in spans)
    return Turn("t", 0, Message("assistant", text), DispatchResult("", calls, results))


def test_reasoning_that_a_server_returned_apart_is_a_piece_of_its_own():
    turn = Turn("t", 0, Message("assistant", "5", reasoning="2 and 3"), DispatchResult("5"))
    assert list(pieces(turn)) == [MessagePiece("thought", "2 and 3"), MessagePiece("text", "5")]
    assert said_text(turn) == "5"


class TestStory:
    @pytest.mark.parametrize(
        ("reason", "words"),
        [
            ("no_calls", "counts as its final answer"),
            ("max_turns", "largest number of turns"),
            ("refused", "refused to answer"),
            ("closed", "before the trajectory had ended"),
            ("", "was not recorded"),
            ("my_reason", "my_reason"),
        ],
    )
    def test_it_says_why_a_trajectory_ended(self, reason, words):
        assert words in _told(record(termination_reason=reason))

    @pytest.mark.parametrize("status", [status for status in Status if status is not Status.OK])
    def test_story_lists_failed_calls_with_meaning_and_result(self, status):
        good, bad = ToolResult.from_text("42"), ToolResult.from_text("the reason", status=status)
        lines = summary_lines(record(turn(result=good), turn(index=1, result=bad)))
        (failed,) = [line for line in lines if line.call is not None]
        assert (failed.call, failed.tone, failed.quote) == (1, "bad", "the reason")
        assert failed.text.startswith(" of f, in turn 2: ")
        assert all(words in failed.text for words in STATUS_WORDS[status])
        assert any("2 tool calls, of which 1 failed" in line.text for line in lines)

    def test_long_result_is_quoted_by_beginning_and_end(self):
        """The last line of a traceback has the error."""
        bad = ToolResult.from_text("\n".join(f"line {n}" for n in range(10)) + "\n", is_error=True)
        (quote,) = [line.quote for line in summary_lines(record(turn(result=bad))) if line.call is not None]
        assert quote.split("\n") == ["line 0", "line 1", "…", "line 8", "line 9"]

    def test_it_says_if_the_same_tool_was_answered_later(self):
        good, bad = ToolResult.from_text("42"), ToolResult.from_text("no", is_error=True)
        assert "A later call of this tool succeeded" in _told(
            record(turn(result=bad), turn(index=1, result=good))
        )
        assert "A later call" not in _told(record(turn(result=good), turn(index=1, result=bad)))

    def test_first_failed_calls_are_named_and_the_rest_counted(self):
        bad = ToolResult.from_text("no", is_error=True)
        lines = summary_lines(record(*(turn(index=n, result=bad) for n in range(20))))
        assert sum(line.call is not None for line in lines) == 12
        assert lines[-1].text == "… and 8 more."

    def test_a_message_that_was_cut_off_is_named(self):
        cut = Turn("t", 2, Message("assistant", "abc", is_complete=False), DispatchResult("abc"))
        assert "turn 3 was cut off" in _told(record(cut))

    def test_redactions_are_counted_if_there_are_any(self):
        assert "removed from 2 places" in _told(record(turn(), redactions=2))
        assert "removed" not in _told(record(turn()))

    def test_it_compares_the_last_message_with_the_right_answer(self):
        assert "contains the right answer" in _told(record(turn("It is 42."), gts="42"))
        assert "does not contain the right answer" in _told(record(turn("It is 43."), gts="42"))
        assert "right answer" not in _told(record(turn("It is 43.")))

    def test_each_status_has_a_description(self):
        assert list(STATUS_WORDS) == list(Status)


@pytest.mark.parametrize(
    ("text", "wanted", "found"),
    [
        ("It is 1,014.", "1014", True),
        ("It is 1014.", 1014, True),
        ("It is 11014", "1014", False),
        ("It is 1014.5", "1014", False),
        ("It is 3.14", "14", False),
        ("PARIS\n it is", "paris it", True),
        ("Parisian", "Paris", False),
        ("a+b", "a+b", True),
        ("true", True, None),
        ("x", ["x"], None),
        ("x", " ", None),
        ("x", "x" * 20_000, None),
    ],
)
def test_answer_is_found_in_a_text_as_a_separate_word(text, wanted, found):
    assert contains(text, wanted) is found


class TestPieces:
    def test_reasoning_and_calls_are_separated_from_text(self):
        text = "<think>hm</think>Let me see.[call]Done"
        assert list(pieces(_said(text, (28, 34)))) == [
            MessagePiece("thought", "hm"),
            MessagePiece("text", "Let me see."[:11]),
            MessagePiece("call", "[call]", 0),
            MessagePiece("text", "Done"),
        ]

    @pytest.mark.parametrize(
        ("text", "thought", "said"),
        [
            ("the prompt opened it</think>42", "the prompt opened it", "42"),
            ("<think>without an end", "without an end", ""),
            ("<seed:think>a</seed:think>42", "a", "42"),
            ("42", None, "42"),
        ],
    )
    def test_reasoning_may_be_opened_by_the_prompt_or_stay_open(self, text, thought, said):
        found = list(pieces(_said(text)))
        assert [piece.text for piece in found if piece.kind == "thought"] == (
            [] if thought is None else [thought]
        )
        assert said_text(_said(text)) == said

    @given(st.text(), st.lists(st.tuples(st.integers(-3, 30), st.integers(-3, 30)), max_size=4))
    def test_spans_that_overlap_or_lie_outside_lose_no_text(self, text, spans):
        found = list(pieces(_said(text, *spans)))
        assert "".join(piece.text for piece in found) == text

    def test_last_message_is_shown_without_reasoning_and_calls(self):
        assert final_answer(record(turn("first"), turn("<think>hm</think> 42 ", index=1))) == "42"
