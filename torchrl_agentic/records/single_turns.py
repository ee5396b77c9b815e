"""Trajectories whose turns have a line each, as version 1 wrote them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from torchrl_agentic.records.record import BadLine, TrajectoryRecord


def whole(records: Iterable[TrajectoryRecord | BadLine]) -> Iterator[TrajectoryRecord | BadLine]:
    """Put turns that have a line each together to their trajectories; give all else as it comes.

    Trajectories of one name are told apart by their first turns.
    """
    parts: dict[str, list[TrajectoryRecord]] = {}
    for record in records:
        if isinstance(record, BadLine) or not _is_single(record):
            yield record
            continue
        if record.turns[0].index == 0 and record.trajectory in parts:
            yield _together(parts.pop(record.trajectory))
        parts.setdefault(record.trajectory, []).append(record)
    yield from map(_together, parts.values())


def _is_single(record: TrajectoryRecord) -> bool:
    """Whether it is a turn of version 1: see `codec`, which names them so."""
    return len(record.turns) == 1 and record.request_id == f"{record.trajectory}:{record.turns[0].index}"


def _together(parts: list[TrajectoryRecord]) -> TrajectoryRecord:
    turns = sorted((part.turns[0] for part in parts), key=lambda turn: turn.index)
    return replace(parts[0], request_id=parts[0].trajectory, turns=tuple(turns))
