"""`Recorder`, which writes each trajectory as a line of JSON, and `last_run`, the last run in a file."""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import time
import uuid
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import pydantic_core

from torchrl_agentic.errors import MissingExtra
from torchrl_agentic.messages import JSON, Message, Turn, fields_of
from torchrl_agentic.records.group_record import GROUPS, GroupRecord
from torchrl_agentic.records.hooks import Recording, TrajectoryHook
from torchrl_agentic.records.json_dump import SECRET_NAMES, Secrets, json_line
from torchrl_agentic.records.jsonl_index import JsonlIndex
from torchrl_agentic.records.line_writer import ZSTD, LineWriter, require_zstd
from torchrl_agentic.records.record import Origin, TokenRecord, TrajectoryRecord
from torchrl_agentic.records.record_json import RESERVED
from torchrl_agentic.tools.private_files import PRIVATE, check_mode

logger = logging.getLogger(__name__)

_HEAD = 4096  # bytes of a line that contain its run
_CHUNK = 1 << 16


def last_run(path: Path) -> str | None:
    """Return the id of the run that wrote the last record of a file.

    Args:
        path: A file of records. A compressed one is unpacked completely; of others, only the end is read.

    Returns:
        The id; empty if the record has none; None if the file has no record.

    Raises:
        OSError: If the file cannot be read.
    """
    line = _last_of_compressed(path) if path.suffix == ZSTD else _last(path)
    try:
        fields = fields_of(pydantic_core.from_json(line, allow_partial="trailing-strings"))
    except ValueError:
        return None
    run = (fields or {}).get("run")
    return run if isinstance(run, str) else ""


def _last(path: Path) -> bytes:
    """Return the beginning of the last line that is not blank."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        start, tail = end, b""
        while start > 0 and b"\n" not in tail.rstrip(b"\n"):
            start = max(0, start - _CHUNK)
            file.seek(start)
            tail = (file.read(min(_CHUNK, end - start)) + tail)[: _HEAD + _CHUNK]
            end = start
        return tail.rstrip(b"\n").rpartition(b"\n")[2][:_HEAD]


def _last_of_compressed(path: Path) -> bytes:
    lines = JsonlIndex(path)
    try:
        lines.scan()
        return lines.read(len(lines) - 1, _HEAD) if len(lines) else b""
    finally:
        lines.close()


SUFFIXES = (".jsonl", ".jsonl.zst")


class Recorder(TrajectoryHook):
    """Writes each trajectory, when it ends, as one line of JSON: `ToolCompose(recorder=Recorder("dump"))`.

    A background thread writes; a file can be read while it grows. Several environments and processes may
    share one recorder, or write to the same folder. Lines are appended to existing files. Use it as a context
    manager, or close it; pending lines are also written when the program ends. `records.json_schema()`
    describes the form of a line.

    Put `RecordTransform` last in the environment to record rewards, right answers and tokens.

    >>> recorder = Recorder("rollouts")
    >>> recorder.step = 3  # from now on, trajectories that begin go to rollouts/3.jsonl

    A collector that records here also writes "groups.jsonl": the groups of each batch with their rewards and
    advantages, and the `step` at which the weights are updated with them.

    Each record has the id of its run. A recorder that appends to a file whose last record belongs to another
    run logs one warning, because statistics of such a file mix the two runs.

    Args:
        path: A folder, which gets a file per step; or one file for all steps, with its suffix.
        step: Training step. Set the attribute as training goes on.
        suffix: Suffix of the files in a folder: ".jsonl", or ".jsonl.zst" for compressed files.
        secrets: Names of arguments, and endings of names of environment variables, whose values are never
            written; see `Secrets`.
        max_pending: Largest number of characters that wait to be written; the environment waits when there
            are more.
        run: Id of the run, for programs that continue one; None for a random one.
        mode: Permissions of created files, regardless of the umask; users who may read a file may enter the
            folders that are created for it. Existing files and folders keep their permissions.

    Raises:
        TypeError: If `run` is not a text, or `mode` not an integer.
        ValueError: If `suffix` is unknown, `max_pending` is below 1, or `mode` is not a file mode.
        MissingExtra: If the files are compressed and zstandard is not installed.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        step: int = 0,
        suffix: str = ".jsonl",
        secrets: Iterable[str] = SECRET_NAMES,
        max_pending: int = 64 << 20,
        run: str | None = None,
        mode: int = PRIVATE,
    ) -> None:
        if not isinstance(cast("object", run), str | None) or run == "":
            raise TypeError(
                f"run must be the id of a run, a non-empty string, or None for a random one; got {run!r}"
            )
        if suffix not in SUFFIXES:
            raise ValueError(f"suffix must be one of {', '.join(SUFFIXES)}; got {suffix!r}")
        if max_pending < 1:
            raise ValueError(f"max_pending must be 1 or more; got {max_pending}")
        check_mode("mode", mode)
        self.path = Path(path)
        self.step = step
        self.mode = mode
        self.suffix = suffix
        self.secrets = Secrets(secrets)
        self.max_pending = max_pending
        self.run = run or uuid.uuid4().hex[:8]
        self._writer: LineWriter | None = None
        self._variables = frozenset[str]()
        self._left: list[GroupRecord] = []
        if self.file.suffix == ZSTD:
            require_zstd(f"A dump in {suffix}")

    @property
    def file(self) -> Path:
        """The file of trajectories that begin now."""
        if self.path.name.endswith(SUFFIXES):
            return self.path
        return self.path / f"{self.step}{self.suffix}"

    def begin(self, trajectory: str, row: int = 0) -> FileRecording:
        """Start to record a trajectory."""
        return FileRecording(self, trajectory, row)

    def write(self, record: TrajectoryRecord, file: Path | None = None) -> None:
        """Write a whole trajectory, as one of this run unless it has a run of its own.

        Args:
            record: The trajectory.
            file: File to write to; `self.file` by default.
        """
        writer = self._live()
        record = record if record.run else replace(record, run=self.run)
        make = functools.partial(json_line, record, self.secrets, self._variables)
        writer.put(file or self.file, make, sum(len(message.text) for message in record.messages))

    def group_left(self, group: GroupRecord) -> None:
        """Write a group that left in a batch to "groups.jsonl", beside the trajectories.

        The step of the batch is that of the next weight update, which is what the trainer logs under that
        step, wherever the loop sets `step`. Without an update before the next batch, it is the step at which
        the batch left.
        """
        if self._left and self._left[0].batch != group.batch:
            self._write_groups(self._left)
            self._left = []
        self._left.append(replace(group, step=self.step))

    def weights_updated(self) -> None:
        """Write the groups that left since the last update, as those of the current step."""
        left, self._left = self._left, []
        self._write_groups([replace(group, step=self.step) for group in left])

    def _write_groups(self, groups: Sequence[GroupRecord]) -> None:
        for group in groups:
            line = replace(group, run=group.run or self.run)
            make = functools.partial(_group_line, line)
            self._live().put(self.file.parent / GROUPS, make, 100 * len(group.members))

    def flush(self) -> None:
        """Wait until all ended trajectories, and all groups that left, are written."""
        left, self._left = self._left, []
        self._write_groups(left)
        if self._writer is not None and self._writer.pid == os.getpid():
            self._writer.flush()

    def close(self) -> None:
        """Write the pending trajectories, and close the file. A trajectory that ends later opens it again.

        Raises:
            OSError: If a trajectory could not be written. It was also logged at that time.
        """
        left, self._left = self._left, []
        self._write_groups(left)
        if self._writer is not None and self._writer.pid == os.getpid():
            self._writer.close()
            error, self._writer.error = self._writer.error, None
            if error is not None:
                raise error

    def _live(self) -> LineWriter:
        """Return our writer; create it again after unpickling and after a fork."""
        if self._writer is None or self._writer.pid != os.getpid():
            self._writer = LineWriter(self.max_pending, _OtherRuns(self.run), self.mode)
            self._variables = self.secrets.variables()
            weakref.finalize(self, self._writer.close)
        return self._writer

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_writer": None, "_variables": frozenset(), "_left": []}

    def __repr__(self) -> str:
        return f"Recorder({str(self.file)!r})"


class _OtherRuns:
    """Logs a warning, once, about a file that has records of another run."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._has_warned = False

    def __call__(self, path: Path) -> None:
        """Check a file that is about to be appended to."""
        if self._has_warned:
            return
        try:
            other = last_run(path)
        except (OSError, MissingExtra):
            return
        if other is not None and other != self._run:
            self._has_warned = True
            logger.warning(
                "%s holds records of %s, and run %r appends to it: record to another path, or pass"
                " Recorder(run=%r) if this program continues that run",
                path,
                f"run {other!r}" if other else "an earlier run without an id",
                self._run,
                other or self._run,
            )


class FileRecording(Recording):
    """A trajectory that a `Recorder` will write when it ends.

    Args:
        recorder: The recorder.
        trajectory: Name of the trajectory in its environment.
        row: Its place in the batch.

    Attributes:
        request_id: Unique id of the record.
    """

    __slots__ = (
        "_extras", "_file", "_gts", "_origin", "_recorder", "_rewards", "_row", "_score", "_started", "_step",
        "_tokens", "_trajectory", "_turns", "request_id",
    )  # fmt: skip

    def __init__(self, recorder: Recorder, trajectory: str, row: int) -> None:
        self.request_id = uuid.uuid4().hex
        self._recorder, self._file, self._step = recorder, recorder.file, recorder.step
        self._trajectory, self._row, self._started = trajectory, row, time.time()
        self._turns: list[Turn] = []
        self._rewards: list[float | None] = []
        self._score: float | None = None
        self._gts: JSON = None
        self._tokens: TokenRecord | None = None
        self._extras: dict[str, JSON] = {}
        self._origin = Origin()

    def record_turn(self, turn: Turn) -> None:
        """Keep a turn."""
        self._turns.append(turn)
        self._rewards.append(None)

    def add_reward(self, value: float) -> None:
        """Keep the reward of the last turn. Without a score, the score is the sum of the rewards.

        NaN means that there is no verdict: reward and score are unknown, and `no_verdict` is recorded.

        Raises:
            ValueError: If there is no turn yet.
        """
        if not self._rewards:
            raise ValueError("add_reward() belongs to a turn, and the trajectory has none yet")
        self._rewards[-1] = value

    def add_messages(self, messages: Sequence[Message]) -> None:
        """Append messages to those of the last turn."""
        if self._turns and messages:
            last = self._turns[-1]
            self._turns[-1] = replace(last, messages=(*last.messages, *messages))

    def annotate(
        self,
        *,
        score: float | None = None,
        gts: JSON = None,
        tokens: TokenRecord | None = None,
        **extras: JSON,
    ) -> None:
        """Keep facts about the whole trajectory.

        Raises:
            ValueError: If an extra has the name of another field of the record.
        """
        if taken := RESERVED & extras.keys():
            raise ValueError(f"{min(taken)!r} is a field of every record: use another name")
        self._score = self._score if score is None else score
        self._gts = self._gts if gts is None else gts
        self._tokens = self._tokens if tokens is None else tokens
        self._extras.update(extras)

    def set_origin(self, origin: Origin) -> None:
        """Keep where the trajectory comes from."""
        self._origin = origin

    def finish(self, reason: str) -> None:
        """Write the trajectory, if it has a turn."""
        if not self._turns:
            return
        known = [reward for reward in self._rewards if reward is not None]
        score = self._score
        if score is None:
            score = sum(known) if known else self._tool_reward()
        if score is not None and math.isnan(score):
            score, self._extras["no_verdict"] = None, True
        rewards = (None if reward is None or math.isnan(reward) else reward for reward in self._rewards)
        record = TrajectoryRecord(
            self.request_id,
            tuple(self._turns),
            self._step,
            self._trajectory,
            self._row,
            tuple(rewards),
            score,
            self._gts,
            self._extras,
            reason,
            self._tokens,
            self._started,
            versions(),
            self._recorder.run,
            self._origin,
        )
        self._recorder.write(record, self._file)

    def _tool_reward(self) -> float | None:
        """Return the sum of the rewards of its tool calls, or None if no call has one."""
        rewards = [result.reward for turn in self._turns for result in turn.outcome.results]
        known = [reward for reward in rewards if reward is not None]
        return sum(known) if known else None


def _group_line(group: GroupRecord) -> bytes:
    return json.dumps(group.to_json(), separators=(",", ":")).encode() + b"\n"


_PACKAGES = ("torchrl-agentic", "torchrl", "tensordict", "torch", "transformers", "vllm")


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of the installed packages that influence a rollout."""
    found: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
