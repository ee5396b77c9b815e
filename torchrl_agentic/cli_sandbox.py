"""`torchrl-agentic check` about sandboxes: which work here, and whether they keep what they promise."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from torchrl_agentic.printable import printable

if TYPE_CHECKING:
    from torchrl_agentic.sandbox import Sandbox
    from torchrl_agentic.sandbox.conformance import Case, Outcome

MAX_REASON = 400
_SHOWN = {"passed": ("passed", "green"), "excused": ("declared", "yellow"), "failed": ("FAILED", "bold red")}


def show_tiers(console: Console) -> bool:
    """List the sandboxes for this machine, from strong to weak; False if none of them works here."""
    from torchrl_agentic.sandbox import cgroups
    from torchrl_agentic.sandbox.default import tiers

    table = Table(title="Sandboxes, from strong to weak", title_justify="left", box=box.SIMPLE)
    for column in ("sandbox", "here", "enforced", "not enforced"):
        table.add_column(column, no_wrap=column == "sandbox")
    used, unheld = None, False
    for kind, reason in tiers():
        if reason is not None:
            table.add_row(kind.name, Text(f"does not work: {reason}", style="red"), "", "")
            continue
        held = kind().limits_enforced
        table.add_row(
            kind.name,
            Text("used", style="bold green") if used is None else Text("works, a stronger one does too"),
            ", ".join(name for name in held if held[name]),
            ", ".join(name for name in held if not held[name]),
        )
        used = used or kind.name
        unheld = unheld or held.get("memory_total") is False
    console.print(table)
    if unheld and (reason := cgroups.why_not()) is not None:
        console.print(Text(f"memory_total is not enforced: {reason}", style="yellow"))
    if used is None:
        console.print(
            Text("No sandbox works here, and model-written code is not run without one.", style="red")
        )
    else:
        console.print(f"To see it keep its promises: torchrl-agentic check sandbox {used}")
    return used is not None


def try_cases(name: str, only: str, console: Console) -> int:
    """Put the sandbox of this name through the cases, and show what came of them; give the exit code."""
    from torchrl_agentic.errors import MissingExtra, SandboxError
    from torchrl_agentic.repl import conformance as interpreters
    from torchrl_agentic.sandbox.conformance import CASES

    try:
        kind = _kind(name)
        cases = [case for case in (*CASES, *interpreters.CASES) if only in str(case)]
        if not cases:
            raise ValueError(f"no case has {only!r} in its name or group")
        outcomes = asyncio.run(_outcomes(kind, cases, console))
    except ValueError as error:
        Console(stderr=True).print(Text(f"torchrl-agentic: {error}", style="red"))
        return 2
    except (SandboxError, MissingExtra) as error:
        Console(stderr=True).print(Text(f"torchrl-agentic: {name} does not work here: {error}", style="red"))
        return 1
    for group in dict.fromkeys(outcome.case.group for outcome in outcomes):
        console.print(_table(group, [outcome for outcome in outcomes if outcome.case.group == group]))
    failed = sum(outcome.status == "failed" for outcome in outcomes)
    console.print(_verdict(kind.name, outcomes), style="red" if failed else "green")
    return 1 if failed else 0


def _kind(name: str) -> type[Sandbox]:
    """Find a kind of sandbox by its name, or as module:Class.

    Raises:
        ValueError: there is none.
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
            f"no sandbox is named {name!r}; there are {', '.join(sorted(kinds))}, and module:Class"
        )
    return kinds[name]


def _kinds() -> Mapping[str, type[Sandbox]]:
    from torchrl_agentic import sandbox

    found: list[Any] = [getattr(sandbox, name) for name in sandbox.__all__]
    kinds = [each for each in found if isinstance(each, type) and issubclass(each, sandbox.Sandbox)]
    return {kind.name: kind for kind in kinds if kind.name}


async def _outcomes(kind: type[Sandbox], cases: list[Case], console: Console) -> list[Outcome]:
    """Try the cases, with a line that shows how far we are.

    Raises:
        SandboxError, MissingExtra: it does not work at all.
    """
    import warnings

    from torchrl_agentic.sandbox.conformance import check

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        async with kind():
            pass
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(kind.name, total=len(cases))

        def on_outcome(outcome: Outcome) -> None:
            progress.update(task, advance=1, description=outcome.case.group)
            if outcome.status == "failed":
                progress.console.print(Text(f"FAILED  {outcome.case}", style="bold red"))

        return await check(kind, cases, on_outcome=on_outcome)


def _table(group: str, outcomes: list[Outcome]) -> Table:
    table = Table(title=group, title_justify="left", box=box.SIMPLE, show_header=False)
    for outcome in outcomes:
        word, style = _SHOWN[outcome.status]
        reason = printable(outcome.reason)[:MAX_REASON]
        more = [("\n" + reason, style)] if reason else []
        table.add_row(Text(word, style=style, no_wrap=True), Text.assemble(outcome.case.name, *more))
    return table


def _verdict(name: str, outcomes: list[Outcome]) -> str:
    counts = {status: sum(outcome.status == status for outcome in outcomes) for status in _SHOWN}
    parts = [f"{counts['passed']} passed"]
    if counts["excused"]:
        parts.append(f"{counts['excused']} declared as not kept")
    if counts["failed"]:
        parts.append(f"{counts['failed']} FAILED")
    seconds = sum(outcome.seconds for outcome in outcomes)
    return f"{name}: {', '.join(parts)} of {len(outcomes)} cases, in {seconds:.0f} s"
