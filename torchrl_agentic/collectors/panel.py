"""`collector_panel`: the statistics of a collector in the terminal, while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from torchrl_agentic.collectors.stats_table import (
    ages_of,
    busy_trainer_of,
    capacity_of,
    duration,
    name_of,
    short_name,
)
from torchrl_agentic.messages import JSON
from torchrl_agentic.text import one_line

if TYPE_CHECKING:
    from torchrl_agentic.collectors.stats import CollectorStats

_BAR = 24
_MOST_CAUSES = 6
_STYLES = {"engine": "blue", "reward": "green", "user": "magenta", "update": "cyan", "admission": "yellow"}


def collector_panel(
    stats: CollectorStats, *, refresh_per_second: float = 4.0, console: Console | None = None
) -> Live:
    """Return a panel that shows statistics while it is open.

    On a console that is not a terminal, it prints the panel once, at the end.

    >>> with collector_panel(collector.stats):
    ...     train(collector)

    Args:
        stats: The statistics.
        refresh_per_second: How often the panel is drawn.
        console: The console; None for standard error, so that the output of a program can be piped.
    """
    return Live(
        console=console or Console(stderr=True),
        refresh_per_second=refresh_per_second,
        get_renderable=lambda: panel_of(stats.snapshot()),
    )


def panel_of(snapshot: Mapping[str, JSON]) -> Panel:
    """Return the panel of one snapshot.

    Args:
        snapshot: What `CollectorStats.snapshot` returns.
    """
    parts: list[RenderableType] = [_facts(snapshot), Text(), _waits(snapshot)]
    if snapshot["stragglers"]:
        parts += [Text(), _stragglers(snapshot)]
    title = f"collector · {duration(snapshot['seconds'])} · version {snapshot['version']}"
    return Panel(Group(*parts), title=title, title_align="left", border_style="dim")


def _facts(snapshot: Mapping[str, JSON]) -> Table:
    tokens, engine, batches = snapshot["tokens"], snapshot["engine"], snapshot["batches"]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True, min_width=10)
    table.add_column(overflow="ellipsis", no_wrap=True)
    table.add_row("in flight", f"{snapshot['in_flight']} trajectories")
    table.add_row("tokens/s", f"{tokens['per_s']:,.0f}, {tokens['per_s_total']:,.0f} since the start")
    most = engine["max_concurrent"]
    use = Text(f"{engine['requests']} requests" if most is None else "")
    if most is not None:
        use = _bar(engine["requests"] / max(1, most), "blue")
        use.append(f" {engine['requests']} of {most}")
    queued = f", {engine['queued']} queued" if engine["queued"] else ""
    use.append(f"{queued}; idle {engine['idle']:.0%} of the time")
    table.add_row("engine", use)
    if capacity := capacity_of(snapshot["capacity"]):
        table.add_row("capacity", capacity)
    ready = f"{batches['complete_groups']} of {batches['groups_per_batch']} groups of the next one complete"
    table.add_row("batches", f"{batches['n']}; {ready}")
    if busy := busy_trainer_of(snapshot):
        table.add_row("trainer", busy)
    if ages := snapshot["ages"]["last"]:
        table.add_row("token ages", f"{ages_of(ages)} (updates)")
    for title in ("failures", "events"):
        if counts := snapshot[title]:
            words = ", ".join(f"{count} {one_line(kind, 40)}" for kind, count in counts.items())
            table.add_row(title, Text(words, style="red" if title == "failures" else ""))
    return table


def _waits(snapshot: Mapping[str, JSON]) -> Table:
    wait, seconds = snapshot["wait"], snapshot["seconds"]
    share = wait["seconds"] / seconds if seconds > 0 else 0.0
    now = f" · waiting for {duration(wait['now'])} now" if wait["now"] > 0 else ""
    title = f"the trainer waited {duration(wait['seconds'])}, {share:.0%} of the time{now}"
    table = _titled(title)
    table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    table.add_column(no_wrap=True, width=_BAR)
    table.add_column(no_wrap=True, justify="right", width=9)
    table.add_column(no_wrap=True, justify="right", width=4)
    causes = list(wait["causes"].items())
    total = sum(wait["causes"].values()) or 1.0
    shown = causes[:_MOST_CAUSES]
    if rest := sum(spent for _, spent in causes[_MOST_CAUSES:]):
        shown.append((f"{len(causes) - _MOST_CAUSES} other causes", rest))
    for cause, spent in shown:
        style = _STYLES.get(cause, "dark_orange" if cause.startswith("tool") else "bright_black")
        table.add_row(
            Text(name_of(cause)), _bar(spent / total, style), duration(spent), f"{spent / total:.0%}"
        )
    return table


def _stragglers(snapshot: Mapping[str, JSON]) -> Table:
    table = _titled("the next batch waits for")
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right", width=9)
    table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    for late in snapshot["stragglers"]:
        doing = f"turn {late['turn'] + 1}, {one_line(late['doing'], 22)} for {duration(late['doing_s'])}"
        table.add_row(Text(short_name(late["name"])), duration(late["seconds"]), Text(doing))
    return table


def _titled(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        expand=True,
        show_header=False,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )


def _bar(share: float, style: str) -> Text:
    """Return a bar; its length, not only its color, shows the share."""
    filled = round(_BAR * share)
    return Text.assemble(("█" * filled, style), ("░" * (_BAR - filled), "dim"))
