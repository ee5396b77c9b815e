"""From a dump to its figures, one trajectory at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torchrl_agentic.records import BadLine, Dump
from torchrl_agentic.report.tally import Tally
from torchrl_agentic.report.values import Report


def read_tally(path: str | Path, watch: Callable[[int, int], object] | None = None) -> Tally:
    """Add up a dump, a folder or a file. watch: told now and then how many bytes are read, and of how many.

    A trajectory that does not say its step began in that which its file is named for.

    Raises:
        OSError: there is no such folder or file, or it cannot be read.
        ValueError: it is a folder without any .jsonl or .jsonl.zst, or nothing in it can be read.
        MissingExtra: it is compressed, and zstandard is not installed.
    """
    tally = Tally()
    with Dump(path) as dump:
        sizes = [file.path.stat().st_size for file in dump.files]
        for number, file in enumerate(dump.files):
            if watch is not None:
                watch(sum(sizes[:number]), sum(sizes))
            for record in file.records():
                if isinstance(record, BadLine):
                    tally.complain(f"{file.path.name}, line {record.number}: {record.reason}")
                else:
                    tally.add(record, record.step or file.step or 0)
            file.close()
    if tally.broken and not tally.steps:
        raise ValueError(f"{path} is no dump of trajectories: {tally.report().complaints[0]}")
    return tally


def read_report(path: str | Path, *, by: int = 1) -> Report:
    """Give the figures of a dump, a folder or a file; raises what `read_tally` does."""
    return read_tally(path).report(str(path), by=by)
