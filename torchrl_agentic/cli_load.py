"""`torchrl-agentic check load`: what a tool, and the service behind it, can take."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from torchrl_agentic.cli_show import progress
from torchrl_agentic.nesting import read_json
from torchrl_agentic.printable import printable

if TYPE_CHECKING:
    from torchrl_agentic.dispatch.load import Load

ARGS: dict[str, dict[str, Any]] = {
    "sandbox_fusion": {"code": "print(1)"},
    "search": {"query_list": ["what is written here"]},
    "python": {"code": "1"},
    "shell": {"argv": ["true"]},
}
"""What a tool is called with if nothing else is said."""
_SERVED = {
    "sandbox_fusion": ("sandbox_fusion_url", "torchrl_agentic.serve.sandbox_app:sandbox_app", ""),
    "search": ("retrieval_service_url", "torchrl_agentic.cli_load:example_search", "/retrieve"),
}
"""Tools whose service is started here unless their options name one: the option, what to serve, the path."""


def example_search() -> Any:
    """Serve a few documents."""
    from torchrl_agentic.serve.documents import Document
    from torchrl_agentic.serve.search_app import search_app

    texts = ("what is written here", "what is written there", "nothing of the kind")
    return search_app([Document(str(n), f"Note {n}", text) for n, text in enumerate(texts)])


def check_load(
    console: Console, tool: str, options: str, args: str | None, *, calls: int, concurrency: int
) -> int:
    """Put a tool under load, and show what came of it; give the exit code."""
    from torchrl_agentic.adapt import ensure_tool
    from torchrl_agentic.config import RolloutConfig, make_tools
    from torchrl_agentic.dispatch import Dispatcher
    from torchrl_agentic.dispatch.load import put_under_load
    from torchrl_agentic.errors import InfrastructureError

    try:
        chosen = read_json(options)
        words = read_json(args) if args is not None else ARGS.get(tool, {})
        if not isinstance(chosen, dict) or not isinstance(words, dict):
            raise ValueError("options and arguments are JSON objects, e.g. --options '{\"timeout\": 5}'")
        with _served(tool, chosen) as (served, where):
            entry: Any = tool if ":" not in tool else {"function": tool}
            entry = {tool: served} if served else entry
            (made,) = make_tools(RolloutConfig(tools=[entry]), Path())
            made = ensure_tool(made)
            console.print(f"{calls} calls of {made.name}, {concurrency} at once{where}")
            with progress(console) as bar:
                task = bar.add_task("calls", total=calls)

                async def run() -> Load:
                    dispatcher = Dispatcher([made])
                    try:
                        return await put_under_load(
                            dispatcher,
                            made.name,
                            words,
                            calls=calls,
                            concurrency=concurrency,
                            on_result=lambda _: bar.advance(task),
                        )
                    finally:
                        await dispatcher.close()

                found = asyncio.run(run())
    except (ValueError, TypeError, OSError, ImportError, InfrastructureError) as error:
        Console(stderr=True).print(Text(f"torchrl-agentic: {error}", style="red"))
        return 2
    _show(console, found)
    return 1 if found.errors else 0


@contextlib.contextmanager
def _served(tool: str, options: dict[str, Any]) -> Generator[tuple[dict[str, Any], str]]:
    """Give the options with a service that runs; start one if they name none."""
    if tool not in _SERVED or _SERVED[tool][0] in options:
        yield options, ""
        return
    from torchrl_agentic.testing.servers.embedded import serving

    option, app, path = _SERVED[tool]
    with serving(app) as url:
        yield {**options, option: url + path}, ", against a server started here"


def _show(console: Console, found: Load) -> None:
    from torchrl_agentic.records.distribution import Distribution
    from torchrl_agentic.report.words import milliseconds

    console.print(Text(f"{found.per_second:.1f} calls/s, in {found.seconds:.2f} s", style="bold"))
    table = Table(box=box.SIMPLE)
    for name in ("ms", "p50", "p99", "longest"):
        table.add_column(name, justify="right")
    for name, seconds in (("queue", found.queue_s), ("run", found.run_s)):
        known = Distribution(seconds)
        table.add_row(name, *map(milliseconds, (known.quantile(0.5), known.quantile(0.99), seconds[-1])))
    console.print(table)
    statuses = ", ".join(f"{count} {status}" for status, count in found.statuses.most_common())
    console.print(Text(statuses, style="red" if found.errors else "green"))
    for error in found.errors:
        console.print(Text(printable(error)[:400], style="red"))
