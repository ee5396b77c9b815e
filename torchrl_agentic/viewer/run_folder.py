"""`RunFolder`: where the dump and the metrics of a training run are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torchrl_agentic.records import Dump
from torchrl_agentic.viewer.curves import Curve, read_metrics

TRAJECTORIES = "trajectories"
"""Folder of a training run for its dump; others are found too if there is only one."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The files of a training run.

    Attributes:
        dump: The dump: a folder, or one file.
        metrics: Folder of "metrics.csv" or of a CSVLogger.
        name: Name of the run.
    """

    dump: Path
    metrics: Path
    name: str

    @classmethod
    def of(cls, path: Path) -> RunFolder:
        """Find the dump of a path: the path itself, or a folder in it.

        Args:
            path: A dump (a folder or a file), or the folder of a training run with its dump in
                "trajectories", or in its only folder that has .jsonl files.

        Raises:
            FileNotFoundError: If the path does not exist.
            ValueError: If several folders in it have .jsonl files.
        """
        if path.stat() and not path.is_dir():
            return cls(path, path.parent, path.name)
        if _has_records(path) or not (inner := _dump_in(path)):
            is_inner = path.name == TRAJECTORIES
            root = path.absolute().parent if is_inner else path
            return cls(path, root, f"{root.name}/{path.name}" if is_inner else path.absolute().name)
        return cls(inner, path, path.absolute().name)

    def curves(self) -> list[Curve]:
        """Return the curves of the trainer's own log."""
        return read_metrics(self.metrics)


def _dump_in(folder: Path) -> Path | None:
    inner = folder / TRAJECTORIES
    if inner.is_dir():
        return inner
    found = [one for one in sorted(folder.iterdir()) if one.is_dir() and _has_records(one)]
    if len(found) > 1:
        raise ValueError(
            f"{folder} has several dumps: {', '.join(one.name for one in found)}; name one of them"
        )
    return found[0] if found else None


def _has_records(folder: Path) -> bool:
    try:
        with Dump(folder):
            return True
    except (ValueError, OSError):
        return False
