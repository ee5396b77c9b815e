"""A server that searches documents of this machine, in the wire format of verl's retrieval services."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, Field

from torchrl_agentic.serve.access import Access
from torchrl_agentic.serve.admission import Admission
from torchrl_agentic.serve.documents import Document
from torchrl_agentic.serve.ranking import Ranking
from torchrl_agentic.serve.refusals import BadRequest

if TYPE_CHECKING:
    from starlette.applications import Starlette

TOPK = 3
MAX_TOPK = 1000
MAX_QUERIES = 1024
MAX_RESULTS = 16384
"""How many documents may be asked for by all queries of a request."""
MAX_QUERY = 8192
"""What a query has beyond so many characters is left out of the search."""
MAX_QUEUE = 256
MAX_BODY_BYTES = 4 << 20
MAX_TOTAL_BODY_BYTES = 64 << 20
MAX_ANSWER_BYTES = 16 << 20
BODY_TIMEOUT_S = 60.0


class Retrieve(BaseModel):
    """What is searched for. topk: how many documents for each query. return_scores: whether with scores."""

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
    """Make the server: `POST /retrieve`, `GET /v1/ping`.

    The answer has a list for each query, in their order: the documents that share a word with it, the best
    first, so perhaps fewer than `topk`, or none. Of a query, the first 8192 characters count. A search that
    nobody waits for any more ends after the query that it is at.

    Args:
        documents: what is searched; see `read_documents`.
        topk: how many are given if a request does not say.
        access: who is served; None: programs that ask a name of loopback, without a token.
        max_concurrency: how many requests are searched for at once; None: as many as there are processors.
        max_queue: how many more wait, or send their bodies; others are answered with status 429.
        max_body_bytes: longer requests are answered with status 413.
        max_total_body_bytes: what requests take together; those that come besides get status 429.
        body_timeout_s: seconds that a body may take; then the answer is status 408.
        max_answer_bytes: a request that would be answered with more text than this gets status 422.

    Raises:
        MissingExtra: Starlette or bm25s is not installed.
        ValueError: a number makes no sense.
    """
    from torchrl_agentic.serve.http import BodyLimits, Post, json_app

    if not 1 <= topk <= MAX_TOPK:
        raise ValueError(f"topk must be from 1 to {MAX_TOPK}; got {topk}")
    if max_answer_bytes < 1:
        raise ValueError(f"max_answer_bytes must be above 0; got {max_answer_bytes}")
    concurrency = (os.cpu_count() or 1) if max_concurrency is None else max_concurrency
    admission = Admission(max_concurrency=concurrency, max_queue=max_queue)
    limits = BodyLimits(max_body_bytes, max_total_body_bytes, body_timeout_s)
    ranking = Ranking(documents)
    threads = ThreadPoolExecutor(concurrency, thread_name_prefix="torchrl_agentic-search")

    async def retrieve(request: Retrieve) -> dict[str, Any]:
        request.topk = request.topk or topk
        if request.topk * len(request.queries) > MAX_RESULTS:
            raise BadRequest(
                f"{len(request.queries)} queries with {request.topk} documents each are more than "
                f"{MAX_RESULTS} results"
            )
        search = _Search(ranking, request, max_answer_bytes)
        try:
            found = await asyncio.get_running_loop().run_in_executor(threads, search.run)
        finally:
            search.is_over.set()
        return {"result": found}

    async def start() -> None:
        """There is nothing to start."""

    return json_app(
        {"/retrieve": Post(Retrieve, retrieve)},
        access=access or Access(),
        admission=admission,
        limits=limits,
        start=start,
    )


class _Search:
    """The search for one request. is_over: set where nobody waits for it any more."""

    def __init__(self, ranking: Ranking, request: Retrieve, max_bytes: int) -> None:
        self._ranking, self._request, self._max_bytes = ranking, request, max_bytes
        self.is_over = threading.Event()

    def run(self) -> list[list[Any]]:
        """Search for one query after the other.

        Raises:
            BadRequest: so much is found that it is not sent.
        """
        found: list[list[Any]] = []
        size = 0
        for query in self._request.queries:
            if self.is_over.is_set():
                break
            best = self._ranking.best(query[:MAX_QUERY], self._request.topk or TOPK)
            size += sum(len(document.text.encode("utf-8", "replace")) for document, _ in best)
            if size > self._max_bytes:
                raise BadRequest(
                    f"the documents for this have more than {self._max_bytes} bytes, which is the most that "
                    "is sent; ask for fewer, or with fewer queries at once"
                )
            found.append([_shown(document, score, self._request) for document, score in best])
        return found


def _shown(document: Document, score: float, request: Retrieve) -> dict[str, Any]:
    shown = {"id": document.id, "contents": document.contents}
    return {"document": shown, "score": score} if request.return_scores else shown
