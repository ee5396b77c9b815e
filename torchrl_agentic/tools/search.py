"""The tool `search`: passages from a retrieval service, in the wire format of Search-R1 and verl."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from torchrl_agentic.errors import ToolError
from torchrl_agentic.limits.process_bound import ProcessBound
from torchrl_agentic.messages import JSON, TextPart, Timing, ToolResult, fields_of
from torchrl_agentic.text import truncate_middle
from torchrl_agentic.tools.base import Tool, ToolContext
from torchrl_agentic.tools.schema import Schema
from torchrl_agentic.tools.service import Patience, ServiceClient, ServiceError, bearer, shared_limiter

BETWEEN_QUERIES = "\n---\n"


class SearchTool(Tool):
    """Search documents for several queries at once.

    The result is the JSON that models trained with verl know: `{"result": "Doc 1 (Title: …) …"}`, with `---`
    between queries.

    Args:
        retrieval_service_url: URL that takes `{queries, topk, return_scores}`, such as
            http://localhost:8000/retrieve; `torchrl-agentic serve search FOLDER` starts such a service.
        name: The name that the model calls.
        description: The description that the model reads; None: the default one.
        topk: Number of passages per query.
        num_workers: Number of connections of this process at most.
        rate_limit: Number of requests at a time at most; None: no limit.
        timeout: Seconds for one try.
        enable_global_rate_limit: Whether all processes that use this URL share the rate limit.
        patience: How long to go on trying.
        max_queries: Number of queries in one call at most.
        output_max_chars: Longer output loses its middle.
        headers: Headers of each request.
        token_file: File with a bearer token for the service.

    Raises:
        ValueError: If the URL is not one, a number is not above 0, or the file has no token.
        OSError: If the token cannot be read.
    """

    name: str = "search"
    description: str = "Search documents for passages that are relevant to the given queries."
    input_schema: Schema = {  # noqa: RUF012  read only
        "type": "object",
        "properties": {
            "query_list": {
                "type": "array",
                "items": {"type": "string"},
                "minItems": 1,
                "description": "Search queries. Each query returns its own passages.",
            }
        },
        "required": ["query_list"],
    }

    def __init__(
        self,
        retrieval_service_url: str,
        *,
        name: str = "search",
        description: str | None = None,
        topk: int = 3,
        num_workers: int = 120,
        rate_limit: int | None = 120,
        timeout: float = 30.0,
        enable_global_rate_limit: bool = True,
        patience: Patience | None = None,
        max_queries: int = 16,
        output_max_chars: int = 8192,
        headers: Mapping[str, str] | None = None,
        token_file: str | Path | None = None,
    ) -> None:
        if not retrieval_service_url.startswith(("http://", "https://")):
            raise ValueError(
                "expected retrieval_service_url as the URL of a retrieval service, e.g. "
                f"http://localhost:8000/retrieve; got {retrieval_service_url!r}"
            )
        numbers = {"topk": topk, "num_workers": num_workers, "timeout": timeout, "rate_limit": rate_limit}
        for what, number in numbers.items():
            if number is not None and not number > 0:
                raise ValueError(f"{what} must be above 0; got {number}")
        self.name = name
        self.description = self.description if description is None else description
        self.url = retrieval_service_url
        self.topk, self.timeout, self.max_queries = topk, timeout, max_queries
        self.num_workers, self.rate_limit = num_workers, rate_limit
        self.enable_global_rate_limit = enable_global_rate_limit
        self.patience = patience or Patience()
        self.output_max_chars = output_max_chars
        self._headers = {**(headers or {}), **bearer(token_file)}
        self._service = ProcessBound[ServiceClient]()  # set up anew in each process

    async def setup(self) -> None:
        """Create the client, under the limit that all clients of the service share."""
        await self._set_up()

    async def _set_up(self) -> ServiceClient:
        client = ServiceClient(
            "the retrieval service",
            await shared_limiter("search", self.url, self.rate_limit, self.enable_global_rate_limit),
            max_connections=self.num_workers,
            patience=self.patience,
            headers=self._headers,
        )
        return self._service.set(client)

    async def teardown(self) -> None:
        """Close the connections."""
        if (service := self._service.get()) is not None:
            await service.close()

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> ToolResult:
        """Search, and return the passages found for each query."""
        queries = [str(query) for query in cast("list[JSON]", args["query_list"])]
        if not all(query.strip() for query in queries):
            raise ToolError("a query is empty; write at least one word into each query")
        if len(queries) > self.max_queries:
            raise ToolError(
                f"'query_list' has {len(queries)} queries; pass at most {self.max_queries} in one call"
            )
        service = self._service.get() or await self._set_up()
        payload = {"queries": queries, "topk": self.topk, "return_scores": True}
        answer = await service.post(self.url, payload, timeout=self.timeout, ctx=ctx)
        if answer.status >= 400:
            raise ServiceError(
                f"the retrieval service refused the request ({answer.status}): {str(answer.data)[:300]}",
                "refused",
                status=answer.status,
            )
        found = _passages(answer.data, len(queries))
        text = BETWEEN_QUERIES.join(_told(passages) for passages in found)
        shown = truncate_middle(text, self.output_max_chars)
        metrics = {
            "query_count": len(queries),
            "status": "success",
            "total_results": sum(map(len, found)),
            "api_request_error": None,
        }
        return ToolResult(
            (TextPart(json.dumps({"result": shown}, ensure_ascii=False)),),
            meta={"tries": answer.tries, "truncated": shown != text},
            metrics=metrics,
            timing=Timing(0.0, answer.queue_s, answer.run_s),
        )


def _passages(data: JSON, count: int) -> list[list[str]]:
    """Return the texts of an answer; raise ServiceError if it has another form."""
    fields = fields_of(data)
    result: JSON = None if fields is None else fields.get("result")
    if not isinstance(result, list) or len(cast("list[JSON]", result)) != count:
        raise ServiceError(
            f'expected {{"result": [...]}} with {count} lists from the retrieval service; '
            f"got {str(data)[:300]}",
            "garbage",
        )
    return [[_contents(item) for item in _list(passages)] for passages in cast("list[JSON]", result)]


def _contents(item: JSON) -> str:
    fields = fields_of(item) or {}
    document = fields_of(fields.get("document")) or fields  # without scores, some services send it unwrapped
    contents = document.get("contents")
    if not isinstance(contents, str):
        raise ServiceError(
            f"expected a text 'contents' from the retrieval service; got {str(item)[:300]}", "garbage"
        )
    return contents


def _list(value: JSON) -> list[JSON]:
    if not isinstance(value, list):
        raise ServiceError(f"expected a list from the retrieval service; got {str(value)[:300]}", "garbage")
    return cast("list[JSON]", value)


def _told(passages: list[str]) -> str:
    if not passages:
        return "No search results found."
    lines: list[str] = []
    for number, contents in enumerate(passages, 1):
        title, _, text = contents.partition("\n")
        lines.append(f"Doc {number} (Title: {title.strip()})\n{text.strip()}\n")
    return "\n".join(lines).strip()
