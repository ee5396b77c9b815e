"""The tool `search`: passages from a retrieval service, in the wire format of Search-R1 and verl."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torchrl_agentic.errors import ToolError
from torchrl_agentic.messages import JSON, TextPart, Timing, ToolResult, fields_of
from torchrl_agentic.tools.base import Tool, ToolContext
from torchrl_agentic.tools.schema import Schema
from torchrl_agentic.tools.service import Patience, ServiceClient, ServiceError, bearer, shared_limiter
from torchrl_agentic.tools.text import middle_out

BETWEEN_QUERIES = "\n---\n"


class SearchTool(Tool):
    """Searches documents for several queries at once.

    The result is the JSON that models trained with verl know: `{"result": "Doc 1 (Title: …) …"}`, with `---`
    between queries.

    Args:
        retrieval_service_url: what takes `{queries, topk, return_scores}`, e.g. http://localhost:8000/retrieve;
            `torchrl-agentic serve search FOLDER` starts one here.
        topk: passages per query.
        num_workers, rate_limit, enable_global_rate_limit, patience, headers, token_file: as for
            `SandboxFusionTool`.
        timeout: seconds for one try.
        max_queries: more in one call are refused.
        output_max_chars: longer output loses its middle.

    Raises:
        ValueError: no URL, a number that is not above 0, or no token in the file.
        OSError: the token cannot be read.
    """

    name: str = "search"
    description: str = "Searches for passages that tell about the given queries."
    input_schema: Schema = {  # noqa: RUF012  read only
        "type": "object",
        "properties": {
            "query_list": {
                "type": "array",
                "items": {"type": "string"},
                "minItems": 1,
                "description": "What to search for; each query gets passages of its own.",
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
                "retrieval_service_url is the URL of a retrieval service, e.g. "
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
        self._service: ServiceClient | None = None

    async def setup(self) -> None:
        """Join those that share the limit of the service."""
        self._service = ServiceClient(
            "the retrieval service",
            await shared_limiter("search", self.url, self.rate_limit, self.enable_global_rate_limit),
            max_connections=self.num_workers,
            patience=self.patience,
            headers=self._headers,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_service": None}  # it is set up anew where it arrives

    async def teardown(self) -> None:
        """Close the connections."""
        if self._service is not None:
            await self._service.close()

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> ToolResult:
        """Search, and show what was found for each query."""
        queries = [str(query) for query in cast("list[JSON]", args["query_list"])]
        if not all(query.strip() for query in queries):
            raise ToolError("a query is empty; write what to search for")
        if len(queries) > self.max_queries:
            raise ToolError(f"{len(queries)} queries are too many; {self.max_queries} at most")
        if self._service is None:
            await self.setup()
        assert self._service is not None
        payload = {"queries": queries, "topk": self.topk, "return_scores": True}
        answer = await self._service.post(self.url, payload, timeout=self.timeout, ctx=ctx)
        if answer.status >= 400:
            raise ServiceError(
                f"the retrieval service refused the request ({answer.status}): {str(answer.data)[:300]}",
                "refused",
                status=answer.status,
            )
        found = _passages(answer.data, len(queries))
        text = BETWEEN_QUERIES.join(_told(passages) for passages in found)
        shown = middle_out(text, self.output_max_chars)
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
    """Read the texts of an answer.

    Raises:
        ServiceError: it has another form.
    """
    fields = fields_of(data)
    result: JSON = None if fields is None else fields.get("result")
    if not isinstance(result, list) or len(cast("list[JSON]", result)) != count:
        raise ServiceError(
            f'the retrieval service answered no {{"result": [...]}} of {count} lists: {str(data)[:300]}',
            "garbage",
        )
    return [[_contents(item) for item in _list(passages)] for passages in cast("list[JSON]", result)]


def _contents(item: JSON) -> str:
    fields = fields_of(item) or {}
    document = fields_of(fields.get("document")) or fields  # without scores, some give the document itself
    contents = document.get("contents")
    if not isinstance(contents, str):
        raise ServiceError(f"the retrieval service sent no contents: {str(item)[:300]}", "garbage")
    return contents


def _list(value: JSON) -> list[JSON]:
    if not isinstance(value, list):
        raise ServiceError(f"the retrieval service sent no list: {str(value)[:300]}", "garbage")
    return cast("list[JSON]", value)


def _told(passages: list[str]) -> str:
    if not passages:
        return "No search results found."
    lines: list[str] = []
    for number, contents in enumerate(passages, 1):
        title, _, text = contents.partition("\n")
        lines.append(f"Doc {number} (Title: {title.strip()})\n{text.strip()}\n")
    return "\n".join(lines).strip()
