"""What the command line shows of rollouts."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from torchrl_agentic.report.words import printable

if TYPE_CHECKING:
    from torchrl_agentic.messages import Message
    from torchrl_agentic.records import TrajectoryRecord
    from torchrl_agentic.rollout import Difference
    from torchrl_agentic.rollout.ask import Answer

_ROLE_STYLE = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "yellow"}


def conversation(record: TrajectoryRecord, lines: int, width: int) -> Panel:
    """Show a conversation: what it began with, then each turn with its calls and results."""
    parts: list[Text] = [_message(message, lines, width) for message in record.prompt]
    for turn in record.turns:
        parts.append(_message(turn.message, lines, width))
        for call, result in zip(turn.outcome.calls, turn.outcome.results, strict=True):
            seconds = result.timing.run_s if result.timing is not None else 0.0
            head = (
                f"{call.tool or '(unreadable)'} · {result.status} · {1000 * seconds:.0f} ms · {call.call_id}"
            )
            head = printable(head)
            style = "bold red" if result.is_error else "bold yellow"
            parts.append(Text.assemble((f"{head}\n", style), _clip(result.text, lines, width)))
    return Panel(Group(*parts), title=Text(printable(record.trajectory)), title_align="left")


def _message(message: Message, lines: int, width: int) -> Text:
    style = f"bold {_ROLE_STYLE.get(message.role, '')}"
    return Text.assemble((f"{printable(message.role)}\n", style), _clip(message.text.strip(), lines, width))


def _clip(text: str, lines: int, width: int) -> str:
    """Show the first lines of a text, wrapped."""
    wrapped = [piece for line in text.split("\n") for piece in textwrap.wrap(printable(line), width) or [""]]
    more = [f"… {len(wrapped) - lines} more lines"] if len(wrapped) > lines + 1 else []
    return "\n".join("  " + line for line in [*(wrapped[:lines] if more else wrapped), *more])


def verdict(compared: int, differences: Sequence[Difference]) -> Group | Text:
    """Say where tools answer otherwise than recorded."""
    if not differences:
        return Text(f"Results of {compared} turns equal the recorded ones.", style="green")
    lines = [
        Text(f"Results of {len(differences)} of {compared} turns differ from the recorded ones:", style="red")
    ]
    for item in differences:
        name = printable(item.conversation)
        lines.append(Text(f"  {name}, turn {item.turn}: {item.recorded!r} was recorded, now {item.now!r}"))
    return Group(*lines)


def score(answers: Sequence[Answer], seconds: float) -> Group:
    """Say how many answers are right, and how fast the model was."""
    rewards = [answer.reward for answer in answers if answer.reward is not None]
    ledgers = [answer.trajectory.ledger for answer in answers if answer.trajectory.ledger is not None]
    lines: list[Text] = []
    if rewards:
        share = sum(rewards) / len(rewards)
        lines.append(
            Text(f"{sum(rewards):.0f} of {len(rewards)} answers are right ({share:.0%}).", style="green")
        )
    if ledgers:
        sampled = sum(sum(ledger.mask) for ledger in ledgers)
        lines.append(
            Text(f"{sampled} tokens sampled in {seconds:.1f} s, tools included: {sampled / seconds:.0f}/s.")
        )
    return Group(*lines)


def progress(console: Console) -> Progress:
    """Make a bar that says how far it is."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=not console.is_terminal)
