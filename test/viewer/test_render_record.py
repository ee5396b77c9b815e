"""A trajectory becomes lines with messages, reasoning, calls and results."""

import re
from dataclasses import replace

from helpers.viewer_dumps import call, trajectory
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic.messages import DispatchResult, Message, Status, Turn
from torchrl_agentic.records import TrajectoryRecord
from torchrl_agentic.viewer.layout import Look, Needle, beside, count, page
from torchrl_agentic.viewer.render_record import MASK, Block, conversation, masked, table, tokens
from torchrl_agentic.viewer.text_wrap import plain

NO_MASK = re.compile("(?!)")


def _lines(blocks: list[Block], **look: object) -> list[str]:
    return [plain(line).rstrip() for line in page(blocks, Look(**{"width": 100, **look})).lines]


def _of(message: str) -> TrajectoryRecord:
    return TrajectoryRecord("x", (Turn("t", 0, Message("assistant", message), DispatchResult()),))


def test_a_call_is_shown_with_status_times_arguments_and_result():
    lines = _lines(conversation(trajectory("a", status=Status.TIMEOUT, result="too long"), NO_MASK))
    at = lines.index("✗ python · timeout · queued 0.5 ms · ran 25.1 ms · call_0")
    assert lines[at + 1 : at + 6] == ["▎ code:", "▎ x = 6", "▎ x * 7", "result", "▎ too long"]


def test_an_unreadable_call_says_why():
    lines = _lines(conversation(trajectory("a", status=Status.MALFORMED), NO_MASK))
    at = lines.index("✗ python · malformed · queued 0.5 ms · ran 25.1 ms · call_0 · json")
    assert lines[at + 1 : at + 4] == ["▎ it is no JSON", "result", "▎ 42"]
    said = trajectory("a", status=Status.MALFORMED, result="Error: it is no JSON.")
    assert "▎ it is no JSON" not in _lines(conversation(said, NO_MASK))


def test_a_result_is_shown_once_and_again_only_where_the_message_says_it_otherwise():
    parsed, result = call(0, "1", "42")
    same = Turn("t", 0, Message("assistant", ""), DispatchResult("", (parsed,), (result,)))
    for said, times in (("42", 1), ("<response>42</response>", 2)):
        told = Turn(**{**_fields(same), "messages": (Message("tool", said, tool_call_id="call_0"),)})
        lines = _lines(conversation(TrajectoryRecord("x", (told,)), NO_MASK))
        assert sum("42" in line for line in lines) == times


def _fields(turn: Turn) -> dict[str, object]:
    return {name: getattr(turn, name) for name in turn.__slots__}


def test_redactions_are_counted_at_the_top():
    lines = _lines(conversation(replace(trajectory("a"), redactions=1), NO_MASK), width=300)
    assert " · 1 call · 1 redaction · " in lines[0]
    assert "redaction" not in _lines(conversation(trajectory("a"), NO_MASK), width=300)[0]


def test_rewards_are_shown_with_their_turns():
    lines = _lines(conversation(trajectory("a"), NO_MASK))
    assert any(line.startswith("── turn 0 · reward 0.25 ─") for line in lines)
    assert any(line.startswith("── turn 1 ─") for line in lines)


def test_reasoning_and_refusals_that_a_server_returned_apart_are_shown():
    said = Message("assistant", "", is_complete=False, reasoning="not harmless", refusal="I will not.")
    blocks = conversation(TrajectoryRecord("x", (Turn("t", 0, said, DispatchResult()),)), NO_MASK)
    folded = _lines(blocks)
    assert "assistant refuses" in folded
    assert not any("cut off" in line for line in folded)
    assert any("I will not." in line for line in folded)
    assert any("assistant thinks · 12 characters" in line for line in folded)
    assert [block.text for block in blocks if block.is_folded] == ["not harmless"]


def test_reasoning_is_folded_until_it_is_unfolded():
    blocks = conversation(trajectory("a"), NO_MASK)
    folded, unfolded = _lines(blocks), _lines(blocks, is_unfolded=True)
    assert "assistant thinks · 50 characters · e unfolds" in folded
    assert not any("compute the product" in line for line in folded)
    assert "▎ <think>First I should compute the product.</think>" in unfolded


def test_reasoning_may_have_been_opened_by_the_prompt_or_never_end():
    assert "not closed" in _lines(conversation(_of("<think>on and on"), NO_MASK))[-1]


def test_the_message_and_its_reasoning_lose_no_text():
    message = "before<think>thought</think>after<think>more"
    blocks = conversation(_of(message), NO_MASK)
    assert "".join(block.text for block in blocks) == message


def test_words_in_folded_reasoning_unfold_it():
    blocks = conversation(trajectory("a"), NO_MASK)
    needle = Needle("THE PRODUCT")
    made = page(blocks, Look(100, needle))
    assert "the product" in plain(made.lines[made.matches[0]])


@given(st.text(st.sampled_from("ab \n<think>/"), max_size=60), st.integers(4, 30))
def test_each_match_is_on_the_line_that_the_page_says(text: str, width: int):
    blocks = conversation(_of(text), NO_MASK)
    needle = Needle("a")
    made = page(blocks, Look(width, needle))
    assert len(made.matches) == count(blocks, needle) == sum(block.text.count("a") for block in blocks)
    assert all(("a", "match") in made.lines[line] for line in made.matches)


def test_long_text_is_cut_and_later_matches_are_shown_with_context():
    blocks = [Block((), "x" * 50_000 + "needle" + "y" * 50_000)]
    needle = Needle("needle")
    unseen = page(blocks, Look(80, needle, most=1000))
    assert unseen.matches == [-1]
    assert "99,006 more characters" in plain(unseen.lines[-1])
    seen = page(blocks, Look(80, needle, focus=0, most=1000))
    assert "needle" in plain(seen.lines[seen.matches[0]])
    assert any("49,600 characters from its beginning" in plain(line) for line in seen.lines)


def test_pages_of_many_long_messages_stay_short():
    blocks = [Block((("m", ""),), "word " * 10_000) for _ in range(1000)]
    assert len(page(blocks, Look(80)).lines) < 12_000


def test_masked_text_becomes_a_star():
    blocks = conversation(_of("see <|image_pad|><|image_pad|> here"), re.compile(MASK))
    assert blocks[-1].text == "see ** here"
    block = masked(Block((), "aXXXbXXXc", "", ((4, 5, "b"), (8, 9, "c"))), re.compile("X+"))
    assert (block.text, block.paints) == ("a*b*c", ((2, 3, "b"), (4, 5, "c")))


def test_tokens_show_their_source_and_log_prob():
    lines = _lines(tokens(trajectory("a", tokens=True), NO_MASK))
    assert lines == [
        "9 tokens, 3 of them sampled (33%) ·  sampled  prompt  boundary  call",
        "prompt · 3 tokens [0, 3) · mask 0",
        "▎ What is it?",
        "sampled · 2 tokens [3, 5) · mask 1 · log-prob mean -0.375, min -0.500",
        "▎ python, please",
        "boundary · 1 token [5, 6) · mask 0",
        "▎ <|im_end|>",
        "call 0 (python) · 2 tokens [6, 8) · mask 0",
        "▎ 42",
        "sampled · 1 token [8, 9) · mask 1",
        "▎ It is 42.",
    ]


def test_without_tokens_the_token_view_says_so():
    assert "not recorded" in _lines(tokens(trajectory("a"), NO_MASK))[0]


def test_the_table_has_all_fields_or_the_chosen_one():
    record = trajectory("a", extras={"note": "mine"})
    lines = _lines(table(record, NO_MASK))
    for name in ("request_id", "score", "gts", "note", "rewards", "input", "output"):
        assert any(name in line for line in lines), name
    assert _lines(table(record, NO_MASK, "note")) == ["▎ note               mine"]
    assert "no such" in _lines(table(record, NO_MASK, "such"))[0]


def test_two_trajectories_are_shown_side_by_side():
    one = conversation(trajectory("a"), NO_MASK)
    other = conversation(trajectory("b", answer="It is 43."), NO_MASK)
    lines = [plain(line) for line in beside(one, other, Look(100))]
    assert any(line.startswith("turn 0: same in both") for line in lines)
    at = next(place for place, line in enumerate(lines) if line.startswith("turn 1: different"))
    assert any("It is 42." in line and "┃ ▎ It is 43." in line for line in lines[at:])
