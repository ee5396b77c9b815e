"""Print errors, panels, summaries and progress bars."""

from __future__ import annotations

import itertools
import textwrap
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console, Group
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.records.call_stats import UNREADABLE
from torchrl_agentic.text import printable

if TYPE_CHECKING:
    from torchrl_agentic.evaluation import EvalResult
    from torchrl_agentic.messages import Message
    from torchrl_agentic.records import TrajectoryRecord
    from torchrl_agentic.rollout import Difference

_ROLE_STYLE = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "yellow"}


def complain(error: object, *, style: str = "red") -> None:
    """Print an error to stderr, or a warning in another style.

    Args:
        error: The error, or its text.
        style: Style of the text.
    """
    text = printable_lines(f"torchrl-agentic: {error}")
    Console(stderr=True).print(Text(text, style=style), soft_wrap=True)


@contextmanager
def mistakes_end_it(path: Path | None = None, *more: type[Exception], code: int = 2) -> Generator[None]:
    """Print errors that the user can cause, and end the command with an exit code.

    Args:
        path: File that the command reads; named before errors that do not name it.
        more: Additional types of such errors.
        code: The exit code.
    """
    try:
        yield
    except (InfrastructureError, ValueError, TypeError, ImportError, OSError, *more) as error:
        complain(error if path is None or str(path) in str(error) else f"{path}: {error}")
        raise typer.Exit(code) from None


def printable_lines(text: str) -> str:
    """Return text with its control characters escaped, except the newlines."""
    return "\n".join(map(printable, text.split("\n")))


def conversation_panel(record: TrajectoryRecord, lines: int, width: int) -> Panel:
    """Return a panel with a conversation: its prompt, then each turn with its calls and results.

    Args:
        record: The trajectory.
        lines: Number of lines to show of each message.
        width: Width of the text, in characters.
    """
    parts: list[Text] = [_message(message, lines, width) for message in record.prompt]
    for turn in record.turns:
        parts.append(_message(turn.message, lines, width))
        for call, result in zip(turn.outcome.calls, turn.outcome.results, strict=True):
            seconds = result.timing.run_s if result.timing is not None else 0.0
            tool = call.tool or UNREADABLE
            head = printable(f"{tool} · {result.status} · {1000 * seconds:.0f} ms · {call.call_id}")
            style = "bold red" if result.is_error else "bold yellow"
            parts.append(Text.assemble((f"{head}\n", style), _clip(result.text, lines, width)))
    return Panel(Group(*parts), title=Text(printable(record.trajectory)), title_align="left")


def _message(message: Message, lines: int, width: int) -> Text:
    style = f"bold {_ROLE_STYLE.get(message.role, '')}"
    return Text.assemble((f"{printable(message.role)}\n", style), _clip(message.text.strip(), lines, width))


def _clip(text: str, lines: int, width: int) -> str:
    """Wrap a text, and return its first lines."""
    wrapped = [piece for line in text.split("\n") for piece in textwrap.wrap(printable(line), width) or [""]]
    more = [f"… {len(wrapped) - lines} more lines"] if len(wrapped) > lines + 1 else []
    return "\n".join("  " + line for line in [*(wrapped[:lines] if more else wrapped), *more])


def replay_summary(
    compared: int, differences: Sequence[Difference], *, show: int = -1, lines: int = 8, width: int = 100
) -> Group | Text:
    """Return which calls have other results than the recorded ones.

    Args:
        compared: Number of turns with recorded results.
        differences: The differing results.
        show: Number of differences to show; -1 for all.
        lines: Number of lines to show of each result.
        width: Width of the text, in characters.
    """
    if not differences:
        return Text(f"Results of {compared} turns equal the recorded ones.", style="green")
    changed = Counter(_statuses(item) for item in differences if item.is_status)
    texts = len(differences) - changed.total()
    by_count = sorted(changed.items(), key=lambda item: (-item[1], item[0]))
    kinds = [f"{count} in status ({words})" for words, count in by_count]
    kinds += [f"{texts} in text alone"] if texts else []
    head = f"Results of {len(differences)} calls in {compared} turns differ from the recorded ones: "
    shown = differences if show < 0 else differences[:show]
    more = [Text(f"  … {len(differences) - len(shown)} more")] if len(shown) < len(differences) else []
    parts = [part for item in shown for part in _difference(item, lines, width)]
    return Group(*parts, *more, Text(head + ", ".join(kinds), style="red"))


def _statuses(item: Difference) -> str:
    before, now = (one and str(one.status or "recorded") for one in (item.recorded, item.now))
    return f"{before or 'no call'} → {now or 'no call'}"


def _difference(item: Difference, lines: int, width: int) -> Iterator[Text]:
    """Yield both results, from the first line in which they differ."""
    place = (
        f"{printable(item.conversation)}, turn {item.turn}, call {item.call} {printable(item.tool)}".rstrip()
    )
    yield Text(f"{place}: {_statuses(item)}" if item.is_status else f"{place}: another text", style="bold")
    before, now = ((one.text if one else "").split("\n") for one in (item.recorded, item.now))
    same = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, now, strict=False))))
    if before == now:
        return
    where = f", from line {same + 1}" if same else ""
    for name, answer, text in (("recorded", item.recorded, before), ("now", item.now, now)):
        if answer is not None:
            yield Text.assemble((f" {name}{where}\n", "yellow"), _clip("\n".join(text[same:]), lines, width))


def answer_summary(result: EvalResult) -> Group:
    """Return how many answers are correct, how many tokens per second were sampled, and what failed.

    Args:
        result: The evaluation of the answers.
    """
    scores = [sample.score for sample in result.samples if sample.score is not None]
    lines: list[Text] = []
    if scores:
        share = sum(scores) / len(scores)
        lines.append(
            Text(f"{sum(scores):.0f} of {len(scores)} answers are correct ({share:.0%}).", style="green")
        )
    if sampled := result.usage.completion:
        rate = sampled / result.seconds
        lines.append(
            Text(f"{sampled} tokens sampled in {result.seconds:.1f} s with tool calls: {rate:.0f}/s.")
        )
    for sample in result.failed:
        lines.append(Text(printable(f"{sample.task} failed ({sample.failure}): {sample.error}"), style="red"))
    return Group(*lines)


def progress_bar(console: Console, *columns: ProgressColumn, transient: bool = False) -> Progress:
    """Return a progress bar, which prints nothing permanent unless the console is a terminal.

    Args:
        console: Where it is shown.
        columns: Additional columns.
        transient: Leave no trace in a terminal either.
    """
    usual = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*usual, *columns, console=console, transient=transient or not console.is_terminal)
