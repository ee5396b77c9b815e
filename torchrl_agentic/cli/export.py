"""`torchrl-agentic export`: a dump as data for supervised fine-tuning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from torchrl_agentic.text import printable


def export(
    dump: Path,
    out: Path,
    *,
    config: Path | None = None,
    min_score: float | None = None,
    best_per_task: int | None = None,
    complete_only: bool = True,
) -> int:
    """Write the conversations of a dump as JSON lines with "messages" and "tools".

    Args:
        dump: A folder with a file per step, or one file.
        out: The file.
        config: YAML configuration with the tools that the model sees; None: rows have no "tools".
        min_score: Lowest score of a conversation that is kept.
        best_per_task: Number of conversations of each task that are kept.
        complete_only: Whether conversations that did not end by themselves are left out.

    Returns:
        The exit code: 0, or 2 for a mistake of the user.
    """
    from torchrl_agentic.rollout.to_sft import to_sft

    try:
        data = to_sft(
            dump,
            tools=() if config is None else _tools(config),
            min_score=min_score,
            best_per_task=best_per_task,
            complete_only=complete_only,
        )
        data.save(out)
    except (ValueError, TypeError, ImportError, OSError) as error:
        Console(stderr=True).print(Text(f"torchrl-agentic: {printable(str(error))}", style="red"))
        return 2
    left_out = ", ".join(f"{count} {reason}" for reason, count in sorted(data.left_out.items()))
    print(f"{len(data)} conversations: {out}{f'; left out: {left_out}' if left_out else ''}")
    return 0


def _tools(config: Path) -> list[Any]:
    """Return the tools of a configuration."""
    from torchrl_agentic.cli.rollout_file import load_config, make_tools

    return make_tools(load_config(config), config.parent)
