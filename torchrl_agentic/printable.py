"""Foreign text as a terminal may show it: it moves no cursor, sets no colours, turns no writing."""

from __future__ import annotations

import re
import unicodedata

_ODD = re.compile("[^ -~]+")
_MARKS = 3  # as many as a letter of a living script carries
_SELECTORS = "\ufe0e\ufe0f"  # ask for a picture, or for none: terminals do not agree on the width


def printable(text: str) -> str:
    """Make one line of a text, in which each character that cannot be seen stands as one that can.

    Control characters are their pictures (escape is ␛, a newline ␊); other characters without a shape of
    their own (bidi overrides, zero width, halves of surrogate pairs) are written as ‹202E›; spaces of all
    kinds are plain ones. Of marks above and below a letter, what is more than a few is counted.
    """
    if text.isascii() and text.isprintable():
        return text
    return _ODD.sub(lambda found: _shown(found[0]), text)


def _shown(run: str) -> str:
    shown: list[str] = []
    marks = 0
    for character in run:
        category = unicodedata.category(character)
        if category in ("Mn", "Me"):
            marks += 1
            if marks <= _MARKS and character not in _SELECTORS:
                shown.append(character)
            continue
        if marks > _MARKS:
            shown.append(f"‹+{marks - _MARKS} marks›")
        marks = 0
        shown.append(character if character.isprintable() else _symbol(character, category))
    if marks > _MARKS:
        shown.append(f"‹+{marks - _MARKS} marks›")
    return "".join(shown)


def _symbol(character: str, category: str) -> str:
    code = ord(character)
    if category == "Zs":
        return " "
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else f"‹{code:02X}›"
