"""Finds the documents that fit a query best, by BM25 over their words."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

from torchrl_agentic.errors import MissingExtra
from torchrl_agentic.serve.documents import Document

_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
)
"""Scripts written without spaces, or with words that are joined: each of their letters counts as a word."""
_WORD = re.compile(rf"[{_UNSPACED}\U00020000-\U0003ffff]|[^\W{_UNSPACED}\U00020000-\U0003ffff]+")


def words(text: str) -> list[str]:
    """Split a text into words that compare equal however they are written: in capitals, composed or not."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return _WORD.findall(folded)


class Ranking:
    """An index of documents that does not change. For any thread.

    Raises:
        MissingExtra: bm25s is not installed.
    """

    def __init__(self, documents: Sequence[Document]) -> None:
        try:
            import bm25s
        except ImportError:
            raise MissingExtra("a search server", "bm25s", "serve") from None
        self.documents = list(documents)
        self._known: set[str] = set()
        self._index: Any = None
        found = [words(document.contents) for document in self.documents]
        self._known.update(*found)
        if self._known:
            self._index = bm25s.BM25()
            self._index.index(found, show_progress=False)

    def best(self, query: str, count: int) -> list[tuple[Document, float]]:
        """Give at most so many documents, the best first, with their scores; each has a word of the query."""
        known = [word for word in words(query) if word in self._known]
        if not known:
            return []
        rows, scores = self._index.retrieve(
            [known], k=min(count, len(self.documents)), show_progress=False, backend_selection="numpy"
        )
        pairs = zip(rows[0].tolist(), scores[0].tolist(), strict=True)
        return [(self.documents[row], score) for row, score in pairs if score > 0]
