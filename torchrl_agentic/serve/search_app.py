"""`search_app`: a search server over text files of a folder, or lines of a JSONL file, by BM25."""

from __future__ import annotations

import asyncio
import os
import re
import threading
import unicodedata
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, Field

from torchrl_agentic.errors import MissingExtra
from torchrl_agentic.messages import JSON, fields_of
from torchrl_agentic.serve.access import Access, BadRequest, RequestQueue
from torchrl_agentic.text import read_json

if TYPE_CHECKING:
    from starlette.applications import Starlette

SUFFIXES = (".txt", ".md", ".markdown", ".rst")
MAX_TITLE = 120
"""Maximum characters of a title; a longer first line is text."""
MAX_NAMED = 5
"""Maximum number of bad lines that an error names."""


@dataclass(frozen=True, slots=True)
class Document:
    """A document.

    Attributes:
        id: Its id in the source: the "id" or the number of a line, or the path of a file in the folder.
        title: Its title; "" for none.
        text: Its text.
    """

    id: str
    title: str
    text: str

    @property
    def contents(self) -> str:
        """Title and text as retrieval services send them: the title is the first line."""
        return f"{self.title}\n{self.text}"


def read_documents(path: Path) -> list[Document]:
    """Read the documents of a folder, recursively, or of a JSONL file.

    Raises:
        ValueError: If lines or files are invalid; the message names them.
        OSError: If it cannot be read.
    """
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
        return [found for file in files for found in _in_file(file, file.relative_to(path).as_posix())]
    if path.suffix.lower() not in (".jsonl", ".json", ".ndjson"):
        raise ValueError(f"{path}: expected a folder of {', '.join(SUFFIXES)} files, or a .jsonl file")
    return _in_lines(path)


def _in_file(file: Path, name: str) -> Iterator[Document]:
    """Yield a file as a document, unless it is empty."""
    try:
        whole = file.read_text("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8: {error.reason} at byte {error.start}") from None
    if not whole:
        return
    first, _, rest = whole.partition("\n")
    title = first.lstrip("#").strip() if first.startswith("#") else first.strip()
    if title and len(title) <= MAX_TITLE and rest.strip():
        yield Document(name, title, rest.strip())
    else:
        yield Document(name, file.stem, whole)


def _in_lines(path: Path) -> list[Document]:
    documents: list[Document] = []
    bad: list[str] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                documents.append(_from_json(read_json(line), str(number)))
            except ValueError as error:
                bad.append(f"line {number}: {error}")
    if bad:
        more = f" … and {len(bad) - MAX_NAMED} more" if len(bad) > MAX_NAMED else ""
        raise ValueError(f"{path}: {'; '.join(bad[:MAX_NAMED])}{more}")
    return documents


def _from_json(value: JSON, number: str) -> Document:
    found = fields_of(value)
    if found is None:
        raise ValueError(
            f'expected an object with "contents", or "title" and "text"; got {type(value).__name__}'
        )
    fields = {key: found.get(key) for key in ("contents", "title", "text")}
    for key, value in fields.items():
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{key!r} must be text; got {type(value).__name__}")
    name = str(found.get("id", number))
    if fields["contents"] is not None:
        title, _, text = fields["contents"].partition("\n")
        return Document(name, title, text)
    if fields["text"] is None:
        raise ValueError(
            f'expected "contents", or "title" and "text"; got {", ".join(map(str, found)) or "nothing"}'
        )
    return Document(name, fields["title"] or "", fields["text"])


_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
)
"""Scripts without spaces, or with joined words: each letter counts as a word."""
_WORD = re.compile(rf"[{_UNSPACED}\U00020000-\U0003ffff]|[^\W{_UNSPACED}\U00020000-\U0003ffff]+")


def tokenize(text: str) -> list[str]:
    """Split a text into words, normalised so that case and Unicode composition do not matter."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return _WORD.findall(folded)


class BM25Index:
    """An immutable index of documents. Thread-safe.

    Args:
        documents: The documents.

    Raises:
        MissingExtra: If bm25s is not installed.
    """

    def __init__(self, documents: Sequence[Document]) -> None:
        try:
            import bm25s
        except ImportError:
            raise MissingExtra("a search server", "bm25s", "serve") from None
        self.documents = list(documents)
        self._known: set[str] = set()
        self._index: Any = None
        found = [tokenize(document.contents) for document in self.documents]
        self._known.update(*found)
        if self._known:
            self._index = bm25s.BM25()
            self._index.index(found, show_progress=False)

    def search(self, query: str, count: int) -> list[tuple[Document, float]]:
        """Return the best documents with their scores, best first; each has a word of the query.

        Args:
            query: The query.
            count: Maximum number of documents.
        """
        known = [word for word in tokenize(query) if word in self._known]
        if not known:
            return []
        rows, scores = self._index.retrieve(
            [known], k=min(count, len(self.documents)), show_progress=False, backend_selection="numpy"
        )
        pairs = zip(rows[0].tolist(), scores[0].tolist(), strict=True)
        return [(self.documents[row], score) for row, score in pairs if score > 0]


TOPK = 3
MAX_TOPK = 1000
MAX_QUERIES = 1024
MAX_RESULTS = 16384
"""Maximum number of documents that all queries of a request may ask for."""
MAX_QUERY = 8192
"""Number of characters of a query that are used."""
MAX_QUEUE = 256
MAX_BODY_BYTES = 4 << 20
MAX_TOTAL_BODY_BYTES = 64 << 20
MAX_ANSWER_BYTES = 16 << 20
BODY_TIMEOUT_S = 60.0


class RetrieveRequest(BaseModel):
    """A search request.

    Attributes:
        queries: The queries.
        topk: Number of documents for each query.
        return_scores: True to return scores.
    """

    queries: list[str] = Field(max_length=MAX_QUERIES)
    topk: Annotated[int, Field(ge=1, le=MAX_TOPK)] | None = None
    return_scores: bool = False


def search_app(
    documents: Sequence[Document],
    *,
    topk: int = TOPK,
    access: Access | None = None,
    max_concurrency: int | None = None,
    max_queue: int = MAX_QUEUE,
    max_body_bytes: int = MAX_BODY_BYTES,
    max_total_body_bytes: int = MAX_TOTAL_BODY_BYTES,
    body_timeout_s: float = BODY_TIMEOUT_S,
    max_answer_bytes: int = MAX_ANSWER_BYTES,
) -> Starlette:
    """Return the server: `POST /retrieve`, `GET /v1/ping`.

    The response has a list for each query, in their order: the documents that share a word with it, best
    first, so possibly fewer than `topk`, or none. The first 8192 characters of a query are used. If the
    client disconnects, a search ends after the current query.

    Args:
        documents: The documents; see `read_documents`.
        topk: Number of documents for each query, if a request does not specify it.
        access: Who may use it; None for programs that use a loopback name, without a token.
        max_concurrency: Number of concurrent searches; None for the number of processors.
        max_queue: Number of requests that wait or send their bodies; others get status 429.
        max_body_bytes: Maximum bytes of a request; a longer one gets status 413.
        max_total_body_bytes: Maximum bytes of all current requests together; others get status 429.
        body_timeout_s: Maximum seconds to receive a body; a slower one gets status 408.
        max_answer_bytes: Maximum bytes of text of a response; a request for more gets status 422.

    Raises:
        MissingExtra: If Starlette or bm25s is not installed.
        ValueError: If a number is invalid.
    """
    from torchrl_agentic.serve.http_app import BodyLimits, PostRoute, json_app

    if not 1 <= topk <= MAX_TOPK:
        raise ValueError(f"topk must be from 1 to {MAX_TOPK}; got {topk}")
    if max_answer_bytes < 1:
        raise ValueError(f"max_answer_bytes must be above 0; got {max_answer_bytes}")
    concurrency = (os.cpu_count() or 1) if max_concurrency is None else max_concurrency
    admission = RequestQueue(max_concurrency=concurrency, max_queue=max_queue)
    limits = BodyLimits(max_body_bytes, max_total_body_bytes, body_timeout_s)
    ranking = BM25Index(documents)
    threads = ThreadPoolExecutor(concurrency, thread_name_prefix="torchrl_agentic-search")

    async def retrieve(request: RetrieveRequest) -> dict[str, Any]:
        request.topk = request.topk or topk
        if request.topk * len(request.queries) > MAX_RESULTS:
            raise BadRequest(
                f"{len(request.queries)} queries with {request.topk} documents each exceed the maximum of "
                f"{MAX_RESULTS} results"
            )
        search = _Search(ranking, request, max_answer_bytes)
        try:
            found = await asyncio.get_running_loop().run_in_executor(threads, search.run)
        finally:
            search.is_over.set()
        return {"result": found}

    async def start() -> None:
        """Do nothing: there is nothing to start."""

    return json_app(
        {"/retrieve": PostRoute(RetrieveRequest, retrieve)},
        access=access or Access(),
        admission=admission,
        limits=limits,
        start=start,
    )


class _Search:
    """The search for one request.

    Attributes:
        is_over: Set when its client has disconnected.
    """

    def __init__(self, ranking: BM25Index, request: RetrieveRequest, max_bytes: int) -> None:
        self._index, self._request, self._max_bytes = ranking, request, max_bytes
        self.is_over = threading.Event()

    def run(self) -> list[list[Any]]:
        """Run one query after another.

        Raises:
            BadRequest: If the documents are too large to be sent.
        """
        found: list[list[Any]] = []
        size = 0
        for query in self._request.queries:
            if self.is_over.is_set():
                break
            hits = self._index.search(query[:MAX_QUERY], self._request.topk or TOPK)
            size += sum(len(document.text.encode("utf-8", "replace")) for document, _ in hits)
            if size > self._max_bytes:
                raise BadRequest(
                    f"the documents found have more than {self._max_bytes} bytes, which is the maximum; ask "
                    "for fewer documents, or send fewer queries at once"
                )
            found.append([_shown(document, score, self._request) for document, score in hits])
        return found


def _shown(document: Document, score: float, request: RetrieveRequest) -> dict[str, Any]:
    shown = {"id": document.id, "contents": document.contents}
    return {"document": shown, "score": score} if request.return_scores else shown
