"""Draw reports: a page of small charts over the steps of one run, or of two."""

from __future__ import annotations

import importlib
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torchrl_agentic.errors import MissingExtra
from torchrl_agentic.text import printable
from torchrl_agentic.viewer.report.statistics import Average, Report, StepReport

_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#999999", "#000000")
"""Colours by Okabe and Ito, which colour-blind people can tell apart."""
_DASHES = ("-", "--")
_MARKERS = {"-": ".", "--": "x"}
_RUNS = ("first run", "second run")
_MOST_TOOLS = 8
_MOST_NAMES = 8
Figure = Any
Axes = Any


def draw(reports: Sequence[Report], path: str | Path) -> None:
    """Draw one run, or two over each other, as a PNG file.

    Args:
        reports: One or two reports.
        path: The file.

    Raises:
        MissingExtra: If matplotlib is not installed.
        OSError: If the file cannot be written.
    """
    figure = make_figure(reports)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # models can invent any name
        figure.savefig(str(path), format="png", dpi=110)


def require_matplotlib() -> Any:
    """Return the module `matplotlib.figure`.

    Raises:
        MissingExtra: If matplotlib is not installed.
    """
    try:
        return importlib.import_module(
            "matplotlib.figure"
        )  # not pyplot, which opens windows and keeps global state
    except ImportError:
        raise MissingExtra("A chart of a report", "matplotlib", "report") from None


def make_figure(reports: Sequence[Report]) -> Figure:
    """Return a figure of all charts; of two runs, the first has solid lines and the second dashed ones."""
    figure = require_matplotlib().Figure(figsize=(15, 8.5), layout="constrained")
    names = [_plain(report.name, 60) for report in reports]
    if len(names) > 1:
        lines = ("first, solid lines", "second, dashed lines")
        names = [f"{name} ({line})" for name, line in zip(names, lines, strict=True)]
    figure.suptitle(" and ".join(names), fontsize=11, parse_math=False)
    axes = figure.subplots(2, 4)
    _means(axes[0, 0], "Score", reports, {"mean": "score", "share > 0": "positive", "right": "right"})
    _means(axes[0, 1], "Per trajectory", reports, {"turns": "turns", "calls": "calls"})
    _means(axes[0, 2], "Tokens per trajectory", reports, {"sampled": "sampled", "injected": "injected"})
    _means(axes[0, 3], "Share of calls", reports, {"errors": "errors", "infra": "infra"})
    _parts(axes[1, 0], "Errors, as shares of calls", reports, _errors, lambda step: step.n_calls)
    _parts(axes[1, 1], "How trajectories ended", reports, _reasons, lambda step: step.trajectories)
    _times(axes[1, 2], reports)
    _latency(axes[1, 3], reports)
    return figure


def _means(axes: Axes, title: str, reports: Sequence[Report], measures: Mapping[str, str]) -> None:
    """Draw means over the steps with a band of one standard error. `measures` maps labels to attributes."""
    for report, dashes in zip(reports, _DASHES, strict=False):
        for place, (name, attribute) in enumerate(measures.items()):
            points: list[tuple[int, Average]] = [
                (step.first, getattr(step, attribute)) for step in report.steps
            ]
            known = [(x, one.mean, one.error or 0.0) for x, one in points if one.mean is not None]
            if not known:
                continue
            xs, color = [x for x, _, _ in known], _COLORS[place]
            width = 1.2 if place else 2.4  # a line does not hide the one below it
            axes.plot(
                xs,
                [y for _, y, _ in known],
                dashes,
                color=color,
                label=name if dashes == _DASHES[0] else None,
                marker=_MARKERS[dashes],
                linewidth=width,
            )
            low, high = [y - error for _, y, error in known], [y + error for _, y, error in known]
            axes.fill_between(xs, low, high, color=color, alpha=0.12 / len(reports), linewidth=0)
    _finish(axes, title)
    _over_steps(axes, reports)


def _over_steps(axes: Axes, reports: Sequence[Report]) -> None:
    """Configure the axis of the steps, which are whole numbers."""
    axes.set_xlabel("step")
    steps = [step.first for report in reports for step in report.steps] or [0]
    axes.set_xlim(min(steps) - 0.5, max(steps) + 0.5)
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)


def _parts(
    axes: Axes,
    title: str,
    reports: Sequence[Report],
    counts: Callable[[StepReport], Mapping[str, int]],
    whole: Callable[[StepReport], int],
) -> None:
    """Draw stacked shares over the steps; of two runs, only the totals, side by side."""
    totals = [counts(report.total) for report in reports]
    names = list(dict.fromkeys(name for total in totals for name in total))[:_MOST_NAMES]
    if len(reports) == 1:
        bars = [(step.first, step) for step in reports[0].steps]
        _over_steps(axes, reports)
    else:
        bars = list(enumerate(report.total for report in reports))
        axes.set_xticks(range(len(reports)), _RUNS)
    xs = [x for x, _ in bars]
    width = 0.8 * min((b - a for a, b in itertools.pairwise(xs)), default=1)
    bottom = [0.0] * len(bars)
    for name, color in zip(names, _COLORS, strict=False):
        shares = [counts(step).get(name, 0) / (whole(step) or 1) for _, step in bars]
        axes.bar(xs, shares, width, bottom=bottom, color=color, label=_plain(name))
        bottom = [low + share for low, share in zip(bottom, shares, strict=True)]
    axes.set_ylim(0, 1.05 * max(bottom, default=0) or 1)
    _finish(axes, title)


def _errors(step: StepReport) -> Mapping[str, int]:
    return {name: count for name, count in step.statuses.items() if name not in ("ok", "infra")}


def _reasons(step: StepReport) -> Mapping[str, int]:
    return step.reasons


def _times(axes: Axes, reports: Sequence[Report]) -> None:
    """Draw the run times of calls over the steps."""
    for report, dashes in zip(reports, _DASHES, strict=False):
        for q, color in zip(("p50", "p95", "p99"), _COLORS, strict=False):
            known = [(step.first, getattr(step.run, q)) for step in report.steps if step.run.count]
            label = q if dashes == _DASHES[0] else None
            xs, ys = [x for x, _ in known], [_positive(1000 * y) for _, y in known]
            if known:
                axes.plot(xs, ys, dashes, color=color, label=label, marker=_MARKERS[dashes])
                _logarithmic(axes, "y")
    _finish(axes, "Run time of calls, ms")
    _over_steps(axes, reports)


def _latency(axes: Axes, reports: Sequence[Report]) -> None:
    """Draw the run times of each tool from p50 to p99, with a mark at p95; thin lines are queue times."""
    names = list(dict.fromkeys(tool.tool for report in reports for tool in report.tools))[:_MOST_TOOLS]
    for number, (report, color) in enumerate(zip(reports, _COLORS, strict=False)):
        for tool in report.tools:
            if tool.tool not in names:
                continue
            for times, shift, width in ((tool.run, 0.0, 4), (tool.queue, 0.14, 1.5)):
                y = names.index(tool.tool) + shift + 0.3 * number
                known = [_positive(1000 * q) for q in (times.p50, times.p95, times.p99) if q is not None]
                if known:
                    axes.plot(
                        [known[0], known[-1]], [y, y], color=color, linewidth=width, solid_capstyle="butt"
                    )
                    axes.plot(known[1], y, "|", color="black", markersize=8)
        if len(reports) > 1:
            axes.plot([], [], color=color, linewidth=4, label=_RUNS[number])
    axes.set_yticks(range(len(names)), [_plain(name) for name in names], parse_math=False)
    axes.invert_yaxis()
    if names:
        _logarithmic(axes, "x")
    _finish(axes, "p50 to p99 per tool, ms; thin: queue")


def _logarithmic(axes: Axes, which: Literal["x", "y"]) -> None:
    """Make an axis logarithmic, with plain numbers."""
    axes.set(**{f"{which}scale": "log"})
    axis, ticker = getattr(axes, f"{which}axis"), importlib.import_module("matplotlib.ticker")
    axis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(ticker.LogFormatter(minor_thresholds=(1, 0.5)))


def _positive(value: float) -> float:
    """Return a value that a logarithmic axis can show."""
    return max(value, 0.001)


def _finish(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    handles, _ = axes.get_legend_handles_labels()
    if handles:
        legend = axes.legend(
            fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.12), frameon=False
        )
        for text in legend.get_texts():
            text.set_parse_math(False)
    elif not axes.lines:
        axes.text(0.5, 0.5, "not recorded", ha="center", transform=axes.transAxes, color="gray")


def _plain(name: str, longest: int = 24) -> str:
    said = printable(name)
    return said if len(said) <= longest else f"…{said[-longest + 1 :]}"
