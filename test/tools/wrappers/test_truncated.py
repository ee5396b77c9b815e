"""Text is cut at the side that was asked for, to the bound and never beyond it."""

import pytest
from helpers.wrapper_tools import Scripted, ask, by_hand
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic.errors import StopSignal, ToolError
from torchrl_agentic.messages import FileRefPart, ImagePart, JsonPart, Status, TextPart, ToolResult
from torchrl_agentic.text import truncate
from torchrl_agentic.tools import Truncated
from torchrl_agentic.tools.wrappers.truncated import MARKS

IMAGE, REF = ImagePart(b"png"), FileRefPart("out/f")
sides = pytest.mark.parametrize("side", ["left", "right", "middle"])


@pytest.mark.parametrize(
    ("side", "expected"),
    [
        ("left", "(truncated)...uvwxyz"),
        ("right", "abcdef...(truncated)"),
        ("middle", "ab...(truncated)...z"),
    ],
)
async def test_the_side_that_was_named_is_lost(side, expected):
    result = await by_hand(Truncated(Scripted("abcdefghijklmnopqrstuvwxyz"), 20, side))
    assert result.text == expected
    assert result.meta == {"truncated": True, "original_chars": 26}


@sides
@given(text=st.text(), bound=st.integers(17, 60))
def test_truncated_text_has_the_length_of_the_bound_and_both_ends(side, text, bound):
    left = truncate(text, bound, side=side, mark=MARKS[side])
    if len(text) <= bound:
        assert left == text
    else:
        assert len(left) == bound
        head, _, tail = left.partition(MARKS[side])
        assert text.startswith(head)
        assert text.endswith(tail)


async def test_short_text_is_unchanged():
    whole = ToolResult((TextPart("x" * 20), IMAGE), meta={"truncated": False})
    assert await by_hand(Truncated(Scripted(whole), 20)) is whole


async def test_text_and_json_become_one_text_and_the_rest_stays_in_its_place():
    parts = (IMAGE, TextPart("a" * 30), REF, JsonPart([1, 2]), IMAGE)
    result = await by_hand(Truncated(Scripted(ToolResult(parts, reward=1.0, stop=True)), 20, "left"))
    assert result.parts == (IMAGE, TextPart("(truncated)...\n[1, 2]"[:14] + "[1, 2]"), REF, IMAGE)
    assert (result.reward, result.stop) == (1.0, True)
    assert result.meta is not None
    assert result.meta["original_chars"] == 37


@given(st.lists(st.sampled_from([TextPart("a" * 9), JsonPart("b" * 9), TextPart(""), IMAGE, REF])))
async def test_the_text_of_any_parts_stays_within_the_bound(parts):
    """The separators between parts count as well."""
    result = await by_hand(Truncated(Scripted(ToolResult(tuple(parts))), 21))
    texts = [str(part) for part in result.parts if isinstance(part, TextPart | JsonPart)]
    assert len("\n".join(texts)) <= 21
    assert [p for p in result.parts if p in (IMAGE, REF)] == [p for p in parts if p in (IMAGE, REF)]


@pytest.mark.parametrize(
    ("error", "status"), [(ToolError("e" * 99, {"k": 1}), Status.ERROR), (StopSignal("s" * 99), Status.OK)]
)
async def test_error_text_for_the_model_is_truncated_too(error, status):
    (result,) = await ask(Truncated(Scripted(error), 20, "right"), {})
    assert len(result.text) == 20
    assert result.status is status
    assert result.stop is isinstance(error, StopSignal)
    assert result.meta is not None
    assert result.meta.get("k") == (1 if status is Status.ERROR else None)


@sides
def test_a_bound_has_room_for_the_mark(side):
    assert Truncated(Scripted(""), len(MARKS[side]), side)
    with pytest.raises(ValueError, match="the length of the mark"):
        Truncated(Scripted(""), len(MARKS[side]) - 1, side)


def test_an_unknown_side_names_those_that_there_are():
    with pytest.raises(ValueError, match="left, right, middle; got 'top'"):
        Truncated(Scripted(""), 100, "top")
