"""A trajectory as a table of its fields, with all that was noted of it."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping

from torchrl_agentic.messages import JSON
from torchrl_agentic.records import TrajectoryRecord, plain_text
from torchrl_agentic.viewer.blocks import Block, masked


def fields_of(record: TrajectoryRecord) -> dict[str, JSON]:
    """Give the fields by name, extras among them; input and output as verl's dumps have them."""
    summary = record.summary
    begin = len(record.prompt)
    messages = tuple(record.messages)
    started = record.started
    return {
        "request_id": record.request_id,
        "trajectory": record.trajectory,
        "run": record.run or None,
        "step": record.step,
        "row": record.row,
        "group": summary.group,
        "score": record.score,
        "rewards": list(record.rewards),
        "termination_reason": record.termination_reason,
        "started": None if started is None else _time(started),
        "statuses": dict(summary.statuses),
        "tools": dict(summary.tools),
        "gts": record.gts,
        **record.extras,
        "input": plain_text(messages[:begin]),
        "output": plain_text(messages[begin:]),
        "versions": dict(record.versions),
    }


def table(record: TrajectoryRecord, mask: re.Pattern[str], chosen: str | None = None) -> list[Block]:
    """Show the fields, or the chosen one alone."""
    found = fields_of(record)
    return [
        masked(field(name, value), mask) for name, value in found.items() if chosen is None or name == chosen
    ] or [Block(((f"This trajectory has no {chosen}.", "faint"),))]


def beginning(fields: Mapping[str, JSON], size: int) -> list[Block]:
    """Show what is known of a trajectory of which only the first bytes were read."""
    told = f"This trajectory has {size / 1e6:,.1f} MB. Here is its beginning; L loads all of it."
    return [Block((), told, "error"), *(field(name, value) for name, value in fields.items())]


def field(name: str, value: JSON) -> Block:
    """Show one field, beside its name if there is room."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    if len(text) <= 60 and "\n" not in text:
        return Block((), f"{name:<18} {text}", "value", ((0, len(name), "key"),))
    if not isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False, indent=1, default=str)
    return Block(((name, "key"),), text, "value")


def _time(started: float) -> str:
    try:
        return datetime.datetime.fromtimestamp(started, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S.%f UTC")
    except (ValueError, OverflowError, OSError):
        return str(started)
