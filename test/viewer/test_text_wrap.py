"""Text of any kind becomes lines that fit the screen, and loses nothing."""

from hypothesis import example, given
from hypothesis import strategies as st
from rich.cells import cell_len

from torchrl_agentic.text import printable
from torchrl_agentic.viewer.text_wrap import fit, padded, painted, plain, wrapped

_hostile = st.text(
    st.characters() | st.sampled_from("\x1b\x9b\r\t\x00\x7f\u202e\u2066\u200b\u0301\ufe0f\ud800漢한👍 \n"),
    max_size=80,
)


@given(_hostile, st.integers(2, 40))
def test_lines_fit_their_width_and_lose_nothing(text: str, width: int):
    """With wide, narrow and zero-width characters, no line exceeds the width."""
    lines = [plain(line) for line, _ in wrapped([(text, "")], width)]
    assert all(cell_len(line) <= width for line in lines)
    assert "".join(lines) == "".join(printable(part) for part in text.split("\n"))


@given(_hostile, st.integers(0, 80), st.integers(0, 80))
def test_paints_change_styles_and_no_text(text: str, one: int, other: int):
    start, stop = sorted((min(one, len(text)), min(other, len(text))))
    pieces = list(painted(text, "", [(start, stop, "match")] if start < stop else []))
    assert "".join(piece for piece, _ in pieces) == text
    assert "".join(piece for piece, style in pieces if style == "match") == text[start:stop]


@given(_hostile, st.integers(1, 40))
@example("⺀0000", 8)
def test_a_title_is_cut_to_its_width(text: str, width: int):
    line = fit([(text, "a"), (text, "b")], width)
    assert cell_len(plain(line)) <= width
    assert cell_len(plain(padded(line, width))) == width


def test_lines_break_between_words():
    lines = [plain(line) for line, _ in wrapped([("several words of a text", "")], 12)]
    assert lines == ["several ", "words of a ", "text"]
