"""A server that searches documents of this machine, in the wire format of verl's retrieval services."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, Field

from torchrl_agentic.serve.documents import Document
from torchrl_agentic.serve.ranking import Ranking

if TYPE_CHECKING:
    from starlette.applications import Starlette

TOPK = 3
MAX_TOPK = 1000
MAX_QUERIES = 1024
MAX_BODY_BYTES = 4 << 20


class Retrieve(BaseModel):
    """What is searched for. topk: how many documents for each query. return_scores: whether with scores."""

    queries: list[str] = Field(max_length=MAX_QUERIES)
    topk: Annotated[int, Field(ge=1, le=MAX_TOPK)] | None = None
    return_scores: bool = False


def search_app(
    documents: Sequence[Document], *, topk: int = TOPK, max_body_bytes: int = MAX_BODY_BYTES
) -> Starlette:
    """Make the server: `POST /retrieve`, `GET /v1/ping`.

    The answer has a list for each query, in their order: the documents that share a word with it, the best
    first, so perhaps fewer than `topk`, or none.

    Args:
        documents: what is searched; see `read_documents`.
        topk: how many are given if a request does not say.
        max_body_bytes: longer requests are answered with status 413.

    Raises:
        MissingExtra: Starlette or bm25s is not installed.
        ValueError: a number makes no sense.
    """
    from torchrl_agentic.serve.http import Post, json_app

    if not 1 <= topk <= MAX_TOPK:
        raise ValueError(f"topk must be from 1 to {MAX_TOPK}; got {topk}")
    ranking = Ranking(documents)
    threads = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="torchrl_agentic-search")

    async def retrieve(request: Retrieve) -> dict[str, Any]:
        found = await asyncio.get_running_loop().run_in_executor(threads, _found, ranking, request, topk)
        return {"result": found}

    async def start() -> None:
        """There is nothing to start."""

    return json_app({"/retrieve": Post(Retrieve, retrieve)}, max_body_bytes=max_body_bytes, start=start)


def _found(ranking: Ranking, request: Retrieve, topk: int) -> list[list[Any]]:
    return [
        [_shown(document, score, request) for document, score in ranking.best(query, request.topk or topk)]
        for query in request.queries
    ]


def _shown(document: Document, score: float, request: Retrieve) -> dict[str, Any]:
    shown = {"id": document.id, "contents": document.contents}
    return {"document": shown, "score": score} if request.return_scores else shown
