"""`torchrl-agentic check`: sandboxes and their conformance cases, the tools of a file, load tests."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import time
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from torchrl_agentic.cli.common_options import AsJson
from torchrl_agentic.cli.show import complain, mistakes_end_it, printable_lines, progress_bar
from torchrl_agentic.messages import JSON, Fields, ParsedCall, Status, ToolResult, fields_of
from torchrl_agentic.text import printable, read_json

if TYPE_CHECKING:
    from torchrl_agentic.config import LoadedTools
    from torchrl_agentic.dispatch.dispatcher import Dispatcher
    from torchrl_agentic.sandbox import Sandbox
    from torchrl_agentic.sandbox.conformance import Case, CaseOutcome
    from torchrl_agentic.tools.base import Tool

ARGS: dict[str, dict[str, Any]] = {
    "sandbox_fusion": {"code": "print(1)"},
    "search": {"query_list": ["what is written here"]},
    "python": {"code": "1"},
    "shell": {"argv": ["true"]},
}
"""Default arguments of the calls in a load test, by tool."""
_SERVED = {
    "sandbox_fusion": ("sandbox_fusion_url", "torchrl_agentic.serve.sandbox_app:sandbox_app", ""),
    "search": ("retrieval_service_url", "torchrl_agentic.cli.check:example_search", "/retrieve"),
}
"""Tools whose service is started unless their options name one: option of the URL, application, path."""


def example_search() -> Any:
    """Create a search server with three documents."""
    from torchrl_agentic.serve.search_app import Document, search_app

    texts = ("what is written here", "what is written there", "nothing of the kind")
    return search_app([Document(str(n), f"Note {n}", text) for n, text in enumerate(texts)])


def check_load(
    tool: Annotated[
        str, typer.Option(help="Tool as in a YAML file: sandbox_fusion, search, python, or file.py:function.")
    ] = "sandbox_fusion",
    concurrency: Annotated[int, typer.Option(min=1, help="Number of trajectories that call at once.")] = 16,
    calls: Annotated[int, typer.Option(min=1, help="Total number of calls.")] = 500,
    options: Annotated[str, typer.Option(help="Options of the tool, as a JSON object.")] = "{}",
    args: Annotated[str | None, typer.Option(help="Arguments of each call, as a JSON object.")] = None,
) -> None:
    """Load-test a tool: measure calls per second, queue times, run times and errors.

    If the options name no URL of a service, the service is started on this machine.
    """
    from torchrl_agentic.cli.rollout_file import RolloutConfig, make_tools
    from torchrl_agentic.dispatch.dispatcher import Dispatcher
    from torchrl_agentic.tools.tool_adapter import ensure_tool

    console = Console()
    with mistakes_end_it():
        tool_options = fields_of(read_json(options))
        call_args = fields_of(read_json(args) if args is not None else ARGS.get(tool, {}))
        if tool_options is None or call_args is None:
            raise ValueError(
                "--options and --args must be JSON objects, such as --options '{\"timeout\": 5}'"
            )
        with _served(tool, tool_options) as (served, where):
            entry: Any = tool if ":" not in tool else {"function": tool}
            entry = {tool: served} if served else entry
            (made,) = make_tools(RolloutConfig(tools=[entry]), Path())
            made = ensure_tool(made)
            console.print(f"{calls} calls of {made.name}, {concurrency} at once{where}")
            with progress_bar(console) as bar:
                task = bar.add_task("calls", total=calls)

                async def run() -> LoadResult:
                    dispatcher = Dispatcher([made])
                    try:
                        return await run_load_test(
                            dispatcher,
                            made.name,
                            call_args,
                            calls=calls,
                            concurrency=concurrency,
                            on_result=lambda _: bar.advance(task),
                        )
                    finally:
                        await dispatcher.close()

                found = asyncio.run(run())
    _show_load(console, found)
    raise typer.Exit(1 if found.errors else 0)


@contextlib.contextmanager
def _served(tool: str, options: Fields) -> Generator[tuple[Fields, str]]:
    """Yield the options with the URL of a running service; start one if the options name none."""
    if tool not in _SERVED or _SERVED[tool][0] in options:
        yield options, ""
        return
    from torchrl_agentic.serve.serving import serving

    option, app, path = _SERVED[tool]
    with serving(app) as url:
        yield {**options, option: url + path}, ", against a server started here"


def _show_load(console: Console, found: LoadResult) -> None:
    from torchrl_agentic.records.call_stats import Distribution
    from torchrl_agentic.viewer.report.statistics import milliseconds

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


MAX_REASON = 400
_SHOWN = {"passed": ("passed", "green"), "excused": ("declared", "yellow"), "failed": ("FAILED", "bold red")}


def show_tiers(console: Console) -> bool:
    """Print the sandboxes of this machine, from strong to weak; return whether any of them works."""
    from torchrl_agentic.sandbox.tiers import tiers, why_not_enforced

    table = Table(title="Sandboxes, from strong to weak", title_justify="left", box=box.SIMPLE)
    for column in ("sandbox", "here", "enforced", "not enforced"):
        table.add_column(column, no_wrap=column == "sandbox")
    used, reasons = None, dict[str, list[str]]()
    for kind, reason in tiers():
        if reason is not None:
            table.add_row(kind.name, Text(f"does not work: {reason}", style="red"), "", "")
            continue
        made = kind()
        held = made.limits_enforced
        for limit in held:
            if reason := why_not_enforced(made, limit):
                reasons.setdefault(f"{limit} is not enforced: {reason}", []).append(kind.name)
        table.add_row(
            kind.name,
            Text("used", style="bold green")
            if used is None
            else Text("works, but a stronger one comes first"),
            ", ".join(name for name in held if held[name]),
            ", ".join(name for name in held if not held[name]),
        )
        used = used or kind.name
    console.print(table)
    for reason, names in reasons.items():
        console.print(Text(f"{', '.join(names)}: {reason}", style="yellow"))
    if used is None:
        console.print(Text("No sandbox works here, so model-written code cannot be run.", style="red"))
    else:
        console.print(f"To run its conformance cases: torchrl-agentic check sandbox {used}")
    return used is not None


def check_sandbox(
    name: Annotated[str, typer.Argument(help="Name of the sandbox, such as bubblewrap, or module:Class.")],
    only: Annotated[str, typer.Option(help="Run only the cases whose name or group contains this.")] = "",
) -> None:
    """Run the conformance cases of a sandbox, which include attacks."""
    from torchrl_agentic.errors import MissingExtra, SandboxError
    from torchrl_agentic.repl import repl_cases as interpreters
    from torchrl_agentic.sandbox.conformance import CASES

    console = Console()
    try:
        kind = _kind(name)
        cases = [case for case in (*CASES, *interpreters.CASES) if only in str(case)]
        if not cases:
            raise ValueError(f"no case has {only!r} in its name or its group")
        outcomes = asyncio.run(_outcomes(kind, cases, console))
    except ValueError as error:
        complain(error)
        raise typer.Exit(2) from None
    except (SandboxError, MissingExtra) as error:
        complain(f"{name} does not work here: {error}")
        raise typer.Exit(1) from None
    for group in dict.fromkeys(outcome.case.group for outcome in outcomes):
        console.print(_table(group, [outcome for outcome in outcomes if outcome.case.group == group]))
    failed = sum(outcome.status == "failed" for outcome in outcomes)
    console.print(_verdict(kind.name, outcomes), style="red" if failed else "green")
    raise typer.Exit(1 if failed else 0)


def _kind(name: str) -> type[Sandbox]:
    """Return the class of a sandbox with this name, or named as module:Class.

    Raises:
        ValueError: If there is no such class.
    """
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"no sandbox {name!r}: {error}") from None
    kinds = _kinds()
    if name not in kinds:
        raise ValueError(
            f"no sandbox is named {name!r}; available: {', '.join(sorted(kinds))}, or module:Class"
        )
    return kinds[name]


def _kinds() -> Mapping[str, type[Sandbox]]:
    from torchrl_agentic import sandbox

    found: list[Any] = [getattr(sandbox, name) for name in sandbox.__all__]
    kinds = [each for each in found if isinstance(each, type) and issubclass(each, sandbox.Sandbox)]
    return {kind.name: kind for kind in kinds if kind.name}


async def _outcomes(kind: type[Sandbox], cases: list[Case], console: Console) -> list[CaseOutcome]:
    """Run the cases, with a progress bar.

    Raises:
        SandboxError: If the sandbox does not work here.
        MissingExtra: If the package of the sandbox is not installed.
    """
    from torchrl_agentic.sandbox.conformance import check

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        async with kind():
            pass
    with progress_bar(console, transient=True) as progress:
        task = progress.add_task(kind.name, total=len(cases))

        def on_outcome(outcome: CaseOutcome) -> None:
            progress.update(task, advance=1, description=outcome.case.group)
            if outcome.status == "failed":
                progress.console.print(Text(f"FAILED  {outcome.case}", style="bold red"))

        return await check(kind, cases, on_outcome=on_outcome)


def _table(group: str, outcomes: list[CaseOutcome]) -> Table:
    table = Table(title=group, title_justify="left", box=box.SIMPLE, show_header=False)
    for outcome in outcomes:
        word, style = _SHOWN[outcome.status]
        reason = printable(outcome.reason)[:MAX_REASON]
        more = [("\n" + reason, style)] if reason else []
        table.add_row(Text(word, style=style, no_wrap=True), Text.assemble(outcome.case.name, *more))
    return table


def _verdict(name: str, outcomes: list[CaseOutcome]) -> str:
    counts = {status: sum(outcome.status == status for outcome in outcomes) for status in _SHOWN}
    parts = [f"{counts['passed']} passed"]
    if counts["excused"]:
        parts.append(f"{counts['excused']} declared as not enforced")
    if counts["failed"]:
        parts.append(f"{counts['failed']} FAILED")
    seconds = sum(outcome.seconds for outcome in outcomes)
    return f"{name}: {', '.join(parts)} of {len(outcomes)} cases, in {seconds:.0f} s"


@dataclass(frozen=True, slots=True)
class CheckedTool:
    """A tool of a checked file.

    Attributes:
        tool: The tool.
        place: File and line that name the tool.
        defined: File and line of its code.
    """

    tool: Tool
    place: str
    defined: str

    def as_json(self) -> dict[str, Any]:
        """Return name, place, source, effects and specification as a JSON object."""
        from torchrl_agentic.tools.base import effects_of

        effects = effects_of(self.tool)
        return {
            "name": self.tool.name,
            "place": self.place,
            "source": self.defined,
            "effects": {
                "reads": sorted(effects.reads),
                "writes": sorted(effects.writes),
                "exclusive": effects.exclusive,
            },
            "spec": self.tool.spec(),
        }


def check_tools(
    file: Annotated[
        Path, typer.Argument(help="YAML file of tools (this package's form, or verl's) or of a rollout.")
    ],
    as_json: AsJson = False,
) -> None:
    """Show the tools of a YAML file as the model sees them, or its first mistake.

    The classes and functions of the file are imported, and its MCP servers are asked for their tools.
    """
    errors = Console(stderr=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with mistakes_end_it(code=1):
            loaded = _load(file)
            found = asyncio.run(_offered(loaded))
            specs = [item.as_json() for item in found]
            _check_schemas(found)
    for warning in caught:
        errors.print(Text(printable_lines(str(warning.message)), style="yellow"), soft_wrap=True)
    if others := loaded.beyond_tools():
        words = f"{file}: not applied by ToolCompose; add {', '.join(others)}"
        errors.print(Text(printable_lines(words), style="yellow"), soft_wrap=True)
    if as_json:
        Console().print_json(json.dumps({"tools": specs}), indent=2)
    else:
        _show(Console(), found, specs)


def _load(path: Path) -> LoadedTools:
    """Load the tools of a file of tools or of a rollout."""
    from torchrl_agentic.config import load_tools
    from torchrl_agentic.config.document import read_yaml

    data, _ = read_yaml(path)
    if isinstance(data, dict) and {"conversations", "questions"} & data.keys():
        from torchrl_agentic.cli.rollout_file import load_config, load_rollout_tools

        return load_rollout_tools(load_config(path), path.parent)
    return load_tools(path)


async def _offered(loaded: LoadedTools) -> list[CheckedTool]:
    """Return all tools; set up each toolset to list its tools, and tear it down again."""
    found = [
        CheckedTool(tool, source.place, source.defined)
        for tool, source in zip(loaded.tools, loaded.sources.values(), strict=True)
    ]
    for toolset in loaded.toolsets:
        source: str = getattr(toolset, "source", repr(toolset))
        try:
            found += [CheckedTool(tool, source, source) for tool in await toolset.setup()]
        finally:
            await toolset.teardown()
    return found


def _check_schemas(found: Sequence[CheckedTool]) -> None:
    from torchrl_agentic.tools.schema import Validator

    for item in found:
        try:
            Validator(item.tool.input_schema)
        except ValueError as error:
            raise ValueError(f"{item.place}: tool {item.tool.name!r}: {error}") from None


def _show(console: Console, found: Sequence[CheckedTool], specs: Sequence[dict[str, Any]]) -> None:
    from torchrl_agentic.tools.base import effects_of

    table = Table(title=f"{len(found)} tools", title_justify="left", box=box.SIMPLE)
    for column in ("tool", "source", "effects", "description"):
        table.add_column(column, no_wrap=column == "tool", overflow="fold")
    for item in found:
        lines = item.tool.description.strip().splitlines() or [""]
        words = (item.tool.name, item.defined, str(effects_of(item.tool)), lines[0])
        table.add_row(*(Text(printable(word)) for word in words))
    console.print(table)
    for spec in specs:
        console.print(Text(printable(f"{spec['name']}, {spec['place']}"), style="bold"))
        text = printable_lines(json.dumps(spec["spec"], indent=2, ensure_ascii=False))
        console.print(Syntax(text, "json", background_color="default", word_wrap=True))


SHOWN_ERRORS = 3


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Result of a load test.

    Attributes:
        seconds: Time from the first call to the last result.
        queue_s: Queue times of the calls in seconds, ascending.
        run_s: Run times of the calls in seconds, ascending.
        statuses: Number of calls by status.
        errors: Texts of the first different errors, at most `SHOWN_ERRORS`.
    """

    seconds: float
    queue_s: tuple[float, ...]
    run_s: tuple[float, ...]
    statuses: Counter[Status]
    errors: tuple[str, ...]

    @property
    def per_second(self) -> float:
        """Number of calls per second."""
        return self.statuses.total() / self.seconds


async def run_load_test(
    dispatcher: Dispatcher,
    tool: str,
    args: Mapping[str, JSON],
    *,
    calls: int,
    concurrency: int,
    on_result: Callable[[ToolResult], None] | None = None,
) -> LoadResult:
    """Call a tool from several trajectories at once; each one waits for its result before its next call.

    Args:
        dispatcher: Dispatcher that has the tool.
        tool: Name of the tool.
        args: Arguments of each call.
        calls: Total number of calls.
        concurrency: Number of trajectories.
        on_result: Function that is called with each result.

    Raises:
        ValueError: If `calls` or `concurrency` is below 1.
    """
    if calls < 1 or concurrency < 1:
        raise ValueError(f"calls and concurrency must be 1 or more; got {calls} and {concurrency}")
    numbers = iter(range(calls))
    results: list[ToolResult] = []

    async def trajectory(name: str) -> None:
        async with dispatcher.session(name) as session:
            for number in numbers:
                (result,) = await session.run([ParsedCall(tool, args, f"call_{number}")])
                results.append(result)
                if on_result is not None:
                    on_result(result)

    await dispatcher.setup()
    began = time.perf_counter()
    await asyncio.gather(*(trajectory(f"load-{index}") for index in range(min(concurrency, calls))))
    seconds = time.perf_counter() - began
    timings = [result.timing for result in results if result.timing is not None]
    errors = dict.fromkeys(result.text for result in results if result.is_error)
    return LoadResult(
        seconds,
        tuple(sorted(timing.queue_s for timing in timings)),
        tuple(sorted(timing.run_s for timing in timings)),
        Counter(result.status or Status.OK for result in results),
        tuple(errors)[:SHOWN_ERRORS],
    )
