"""Looking for words: in texts, and first in the bytes of lines, most of which need not be read further."""

from __future__ import annotations

import re

# JSON writers leave these as they are; i, k and s have relatives beyond ASCII that equal them without case.
_CERTAIN = re.compile("[0-9A-HJLM-RT-Za-hjlm-rt-z _,.]+")


class Needle:
    """Words that are looked for, whether written large or small."""

    def __init__(self, words: str) -> None:
        self.words = words
        self._pattern = re.compile(re.escape(words), re.IGNORECASE)
        certain = max(_CERTAIN.findall(words), key=len, default="")
        self._bytes = certain.lower().encode()

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Say where in a text they stand."""
        return [found.span() for found in self._pattern.finditer(text)]

    def may_be_in(self, line: bytes) -> bool:
        """Whether a line of a dump may hold them, in a fraction of the time that reading it takes."""
        return self._bytes in line.lower()
