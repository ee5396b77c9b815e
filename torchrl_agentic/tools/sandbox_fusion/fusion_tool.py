"""`SandboxFusionTool`: runs the model's code in a Sandbox Fusion service."""

from __future__ import annotations

import base64
import itertools
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from torchrl_agentic.limits.process_bound import ProcessBound
from torchrl_agentic.messages import (
    JSON,
    FileRefPart,
    ImagePart,
    Status,
    TextPart,
    Timing,
    ToolResult,
    ToolResultPart,
    image_type,
)
from torchrl_agentic.repl.supervised import KINDS
from torchrl_agentic.text import truncate_middle
from torchrl_agentic.tools.base import Tool, ToolContext
from torchrl_agentic.tools.sandbox_fusion.fusion_client import (
    LANGUAGES,
    Outcome,
    RunResult,
    SandboxFusionClient,
    service_url,
)
from torchrl_agentic.tools.schema import Schema
from torchrl_agentic.tools.service import Patience, bearer, shared_limiter

_STATUS = {
    Outcome.SUCCESS: Status.OK,
    Outcome.COMPILE_TIMEOUT: Status.TIMEOUT,
    Outcome.RUN_TIMEOUT: Status.TIMEOUT,
}


class SandboxFusionTool(Tool):
    """Run each call from scratch in a Sandbox Fusion service; the model chooses nothing but the code.

    Args:
        sandbox_fusion_url: URL of the service, or of its `/run_code`; None: that in SANDBOX_FUSION_ENDPOINT.
            `torchrl-agentic serve sandbox` starts such a service.
        name: The name that the model calls.
        description: The description that the model reads; None: the default one.
        num_workers: Number of running calls of this process at most.
        rate_limit: Number of running calls of all processes at most, or of this one with
            `enable_global_rate_limit=False`; None: no limit. The limit belongs to the service: tools with the
            same URL share it.
        default_timeout: Seconds for running the code, and as many for compiling it; less if the
            `per_call_timeout` of the ToolCompose would end the call earlier: raise that too for longer runs.
        default_language: One of the languages of the service.
        enable_global_rate_limit: Whether all processes share the rate limit.
        memory_limit_mb: Memory of the code, in megabytes; -1: no limit.
        files: Contents of files by path, put beside the code.
        fetch_files: Paths of files to return, as `FileRefPart`s and, for images, as `ImagePart`s.
        jupyter: Whether to run the code as a cell, whose last value and figures are shown.
        cap_output: Keep long output of Python from blocking the service; see `capped`.
        patience: How long to go on if the service is busy or fails; `per_call_timeout` bounds it.
        output_max_chars: Longer output loses its middle.
        strict: The key `strict` of the tool's spec; None: left out.
        headers: Headers of each request.
        token_file: File with the token of the service, as of `serve sandbox --token-file`; it is read once.

    Raises:
        ValueError: If the URL or the language is invalid, a number is out of range, or the file has no token.
        OSError: If the token cannot be read.
    """

    name: str = "code_interpreter"
    description: str = "A tool for executing code."  # that of verl, which models were trained with
    input_schema: Schema = {  # noqa: RUF012  read only
        "type": "object",
        "properties": {"code": {"type": "string", "description": "The code to execute."}},
        "required": ["code"],
    }

    def __init__(
        self,
        sandbox_fusion_url: str | None = None,
        *,
        name: str = "code_interpreter",
        description: str | None = None,
        num_workers: int = 10,
        rate_limit: int | None = 10,
        default_timeout: float = 30.0,
        default_language: str = "python",
        enable_global_rate_limit: bool = True,
        memory_limit_mb: int = 1024,
        files: Mapping[str, bytes] | None = None,
        fetch_files: Sequence[str] = (),
        jupyter: bool = False,
        cap_output: bool = True,
        patience: Patience | None = None,
        output_max_chars: int = 8192,
        strict: bool | None = False,
        headers: Mapping[str, str] | None = None,
        token_file: str | Path | None = None,
    ) -> None:
        if not default_timeout > 0:
            raise ValueError(f"default_timeout must be above 0 seconds; got {default_timeout}")
        if default_language not in LANGUAGES:
            raise ValueError(f"unknown language {default_language!r}; known: {', '.join(LANGUAGES)}")
        if not (memory_limit_mb > 0 or memory_limit_mb == -1):
            raise ValueError(f"memory_limit_mb must be above 0, or -1 for none; got {memory_limit_mb}")
        for what, number in (("num_workers", num_workers), ("rate_limit", rate_limit)):
            if number is not None and number < 1:
                raise ValueError(f"{what} must be 1 or more; got {number}")
        self.name = name
        self.description = self.description if description is None else description
        self.url = service_url(sandbox_fusion_url)
        self.num_workers, self.rate_limit = num_workers, rate_limit
        self.default_timeout, self.default_language = default_timeout, default_language
        self.enable_global_rate_limit = enable_global_rate_limit
        self.memory_limit_mb = memory_limit_mb
        self.files, self.fetch_files = dict(files or {}), tuple(fetch_files)
        self.jupyter, self.cap_output = jupyter, cap_output
        self.patience = patience or Patience()
        self.output_max_chars = output_max_chars
        self.is_strict = strict
        self._headers = {**(headers or {}), **bearer(token_file)}
        self._client = ProcessBound[SandboxFusionClient]()  # set up anew in each process

    async def setup(self) -> None:
        """Create the client, under the limit that all clients of the service share."""
        limiter = await shared_limiter(
            "sandbox_fusion", self.url, self.rate_limit, self.enable_global_rate_limit
        )
        self._client.set(
            SandboxFusionClient(
                self.url,
                limiter=limiter,
                max_connections=self.num_workers,
                patience=self.patience,
                headers=self._headers,
            )
        )

    async def teardown(self) -> None:
        """Close the connections."""
        if (client := self._client.get()) is not None:
            await client.close()

    @property
    def client(self) -> SandboxFusionClient:
        """The client of the service, for rewards under the same limit.

        Raises:
            RuntimeError: If the tool is not set up.
        """
        client = self._client.get()
        if client is None:
            raise RuntimeError(f"{self.name!r} is not set up: await tool.setup() first")
        return client

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> ToolResult:
        """Run the code, and return its output and how it ended."""
        if self._client.get() is None:
            await self.setup()
        code = str(args["code"])
        if self.jupyter:
            result = await self.client.run_jupyter(
                [code],
                total_timeout=self.default_timeout,
                memory_limit_mb=self.memory_limit_mb,
                files=self.files,
                fetch_files=self.fetch_files,
                ctx=ctx,
            )
        else:
            result = await self.client.run_code(
                code,
                language=self.default_language,
                run_timeout=self.default_timeout,
                memory_limit_mb=self.memory_limit_mb,
                files=self.files,
                fetch_files=self.fetch_files,
                cap_output=self.cap_output,
                ctx=ctx,
            )
        return self._shown(result)

    def _shown(self, result: RunResult) -> ToolResult:
        images = [_images(item) for item in result.display]
        text = self._text(result, images)
        shown = truncate_middle(text, self.output_max_chars)
        parts: list[ToolResultPart] = [TextPart(shown)]
        parts += itertools.chain.from_iterable(images)
        for path, data in result.files.items():
            kind = image_type(data)
            parts.append(FileRefPart(path, kind))
            if kind in KINDS:
                parts.append(ImagePart(data, kind))
        meta = {
            "outcome": str(result.outcome),
            "exit_code": result.exit_code,
            "signal": _signal(result.exit_code),
            "run_seconds": result.seconds,
            "compile_seconds": result.compile_seconds,
            "tries": result.tries,
            "pod": result.pod,
            "truncated": shown != text,
            "undecodable": result.undecodable,
        }
        status = _STATUS.get(result.outcome, Status.ERROR)
        return ToolResult(
            tuple(parts), meta=meta, status=status, timing=Timing(0.0, result.queue_s, result.run_s)
        )

    def _text(self, result: RunResult, images: Sequence[Sequence[ImagePart]]) -> str:
        lines = [result.stdout.rstrip("\n")] if result.stdout.strip() else []
        for item, pictures in zip(result.display, images, strict=True):
            if item.get("text/plain") and not pictures:
                lines.append(str(item["text/plain"]))
        if result.stderr.strip():
            lines.append(f"[stderr]\n{result.stderr.rstrip()}")
        for error in result.errors:
            trace: JSON = error.get("traceback") or [f"{error.get('ename')}: {error.get('evalue')}"]
            lines.append(trace if isinstance(trace, str) else "\n".join(map(str, trace)))
        if result.outcome in (Outcome.COMPILE_FAILED, Outcome.COMPILE_TIMEOUT):
            lines.append(f"[compilation failed]\n{result.compile_output.rstrip()}".rstrip())
        seconds = f"{self.default_timeout if result.timeout_s is None else result.timeout_s:.3g} s"
        if result.outcome is Outcome.COMPILE_TIMEOUT:
            lines.append(f"[compilation was stopped after {seconds}]")
        elif result.outcome is Outcome.RUN_TIMEOUT:
            lines.append(f"[stopped after {seconds}]")
        elif name := _signal(result.exit_code):
            lines.append(f"[killed by {name}]")
        elif result.outcome is Outcome.RUN_FAILED and not result.errors:
            lines.append(f"[exit {result.exit_code}]")
        return "\n".join(lines) or "[no output]"


def _signal(exit_code: int | None) -> str | None:
    if exit_code is None or exit_code >= 0:
        return None
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


def _images(item: Mapping[str, JSON]) -> list[ImagePart]:
    """Return the images of a displayed object whose bytes match their media type."""
    found: list[ImagePart] = []
    for kind in KINDS:
        try:
            data = base64.b64decode(str(item[kind])) if kind in item else b""
        except ValueError:
            continue
        if image_type(data) == kind:
            found.append(ImagePart(data, kind))
    return found
