"""`torchrl-agentic export`: a dump as data for supervised fine-tuning."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from torchrl_agentic.cli.common_options import Dump
from torchrl_agentic.cli.show import mistakes_end_it


def export(
    dump: Dump,
    out: Annotated[Path, typer.Option(help="File for the rows, as JSON lines.")],
    config: Annotated[
        Path | None, typer.Option(help="YAML configuration, whose tools become the column tools.")
    ] = None,
    min_score: Annotated[
        float | None, typer.Option(help="Lowest score of a conversation that is kept.")
    ] = None,
    best_per_task: Annotated[
        int | None, typer.Option(min=1, help="Number of conversations of each task that are kept.")
    ] = None,
    keep_incomplete: Annotated[
        bool, typer.Option("--keep-incomplete", help="Also keep conversations that a bound or failure ended.")
    ] = False,
) -> None:
    """Write recorded conversations as rows of messages and tools, for supervised fine-tuning."""
    from torchrl_agentic.cli.rollout_file import load_config, make_tools
    from torchrl_agentic.rollout.to_sft import to_sft

    with mistakes_end_it():
        data = to_sft(
            dump,
            tools=() if config is None else make_tools(load_config(config), config.parent),
            min_score=min_score,
            best_per_task=best_per_task,
            complete_only=not keep_incomplete,
        )
        data.save(out)
    left_out = ", ".join(f"{count} {reason}" for reason, count in sorted(data.left_out.items()))
    print(f"{len(data)} conversations: {out}{f'; left out: {left_out}' if left_out else ''}")
