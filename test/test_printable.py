"""Nothing that a dump holds reaches the terminal as anything but a visible character."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic.printable import printable

_hostile = st.text(
    st.characters() | st.sampled_from("\x1b\x9b\r\t\x00\x7f\u202e\u2066\u200b\u0301\ufe0f\ud800漢한👍 \n"),
    max_size=80,
)


@given(_hostile)
def test_no_control_format_or_half_character_is_left(text: str):
    kinds = {unicodedata.category(character) for character in printable(text)}
    assert not kinds & {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


@given(st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E)))
def test_plain_text_stays(text: str):
    assert printable(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred", "␛[31mred"),
        ("a\rb\tc\x00\x7f", "a␍b␉c␀␡"),
        ("\x9b2J", "‹9B›2J"),
        ("safe\u202eevil\u2069", "safe‹202E›evil‹2069›"),
        ("a\u00a0b\u3000c", "a b c"),
        ("half \udce9", "half ‹DCE9›"),
        ("⚠\ufe0f é 漢 👍", "⚠ é 漢 👍"),
        ("z" + "\u0301" * 500, "z\u0301\u0301\u0301‹+497 marks›"),
        ("[bold]no markup[/] :smile:", "[bold]no markup[/] :smile:"),
    ],
)
def test_what_cannot_be_seen_stands_as_what_can(text: str, shown: str):
    assert printable(text) == shown
