"""`GroupRecord`, a group of trajectories that left in a batch, and `Groups`, those of a dump."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from torchrl_agentic.codec import line_from_json, to_json
from torchrl_agentic.json_fields import AsFinite, AsTuple
from torchrl_agentic.messages import JSON
from torchrl_agentic.records.record import BadLine, Summary

GROUPS = "groups.jsonl"
"""Name of the file beside a dump that has the groups as they left in batches, and no trajectories."""
SCHEMA_VERSION = 2


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A trajectory of a group.

    Attributes:
        name: Name of the trajectory.
        reward: Its reward.
        advantage: Its advantage.
    """

    name: str
    reward: Annotated[float, AsFinite]
    advantage: Annotated[float, AsFinite]


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """A group of trajectories, as it left its collector in a batch.

    Attributes:
        number: Number of the group in the collector.
        task: Name of its task.
        batch: Number of the batch, counted from 0.
        policy_version: Version of the weights when the batch left.
        members: Its trajectories, in the order of the batch.
        step: Training step of the batch.
        run: Id of the run.
    """

    number: int
    task: str
    batch: int
    policy_version: int
    members: Annotated[Sequence[GroupMember], AsTuple]
    step: int = 0
    run: str = ""

    def to_json(self) -> dict[str, JSON]:
        """Return the JSON of a line."""
        return {"schema_version": SCHEMA_VERSION, "run": self.run, "step": self.step, **to_json(self)}

    @classmethod
    def from_json(cls, value: JSON) -> GroupRecord:
        """Read the JSON of a line.

        Raises:
            ValueError: If it has another form.
        """
        return line_from_json(cls, value, SCHEMA_VERSION)


class Groups:
    """The groups of a dump, by the names of their trajectories, read as the file grows.

    Args:
        dump: The dump: a folder, or one file.

    Attributes:
        path: The file of the groups; dumps of other programs have none.
        runs: Ids of the runs that have groups.
    """

    def __init__(self, dump: str | Path) -> None:
        dump = Path(dump)
        self.path = (dump if dump.is_dir() else dump.parent) / GROUPS
        self._inode, self._offset = 0, 0
        self._places: dict[tuple[str, str], tuple[GroupRecord, GroupMember]] = {}
        self.runs: set[str] = set()

    def refresh(self) -> bool:
        """Read the lines that were added since the last time. Lines that cannot be read are skipped.

        Returns:
            Whether there were any.
        """
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._inode, self._offset, self._places, self.runs = status.st_ino, 0, {}, set()
                if status.st_size == self._offset:
                    return False
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        break  # still being written
                    self._offset += len(line)
                    if isinstance(group := _group_of(line), GroupRecord):
                        self.add(group)
        except OSError:
            return False
        return True

    def add(self, group: GroupRecord) -> None:
        """Add a group."""
        self.runs.add(group.run)
        for member in group.members:
            self._places[group.run, member.name] = group, member

    def place(self, run: str, trajectory: str) -> tuple[GroupRecord, GroupMember] | None:
        """Return the group in which a trajectory left, with its reward and advantage there.

        Args:
            run: Id of its run.
            trajectory: Its name.

        Returns:
            The group and the member; None if it left in no batch, or that is unknown.
        """
        return self._places.get((run, trajectory))

    def located(self, summary: Summary) -> Summary:
        """Return a summary with the step and the advantage of the batch in which its trajectory left."""
        found = self.place(summary.run, summary.trajectory)
        if found is None:
            return summary
        group, member = found
        return replace(summary, step=group.step, advantage=member.advantage)

    def __len__(self) -> int:
        """Return the number of trajectories that left in batches."""
        return len(self._places)


def read_groups(dump: str | Path) -> Iterator[GroupRecord | BadLine]:
    """Read the groups of a dump, in the order in which they left.

    Args:
        dump: The dump: a folder, or one file. If there is no file of groups beside it, nothing is yielded.

    Returns:
        An iterator over the groups; `BadLine` for a line that cannot be read.

    Raises:
        OSError: If the file cannot be read.
    """
    path = Groups(dump).path
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                found = _group_of(line)
                yield found if isinstance(found, GroupRecord) else BadLine(number, found)


def _group_of(line: bytes) -> GroupRecord | str:
    """Read a line; return the reason if it cannot be read."""
    try:
        return GroupRecord.from_json(json.loads(line))
    except (ValueError, RecursionError) as error:
        return str(error)
