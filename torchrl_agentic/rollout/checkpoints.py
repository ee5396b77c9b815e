"""`Checkpoints`: the whole state of a training run, one folder per step; `ModelState`, a part of it."""

# torch annotates few results.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Collection, Generator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import distributed
from torch.distributed.checkpoint import state_dict as shards
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from torchrl_agentic.collectors.timeline import BatchTimeline
from torchrl_agentic.errors import check_count
from torchrl_agentic.records import GroupRecord, read_groups
from torchrl_agentic.records.dump import TIMELINE
from torchrl_agentic.records.group_record import GROUPS

logger = logging.getLogger(__name__)
_SETTINGS, _COMPLETE, _UNFINISHED = "settings.json", ".metadata", ".unfinished"


class CheckpointMismatch(ValueError):
    """A checkpoint belongs to another model, or to other settings."""


class ModelState:
    """State of a model and its optimizer, by the names of the parameters: a part of `Checkpoints`.

    With FSDP, each process has the state of its shards.

    Args:
        model: The model.
        optimizer: Its optimizer.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def weights(self) -> dict[str, Any]:
        """Return all weights by name, on each process: what `update_policy_weights_` takes."""
        options = shards.StateDictOptions(full_state_dict=True)
        return shards.get_model_state_dict(self.model, options=options)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the model and the optimizer."""
        model, optimizer = shards.get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`."""
        shards.set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )


class _Packed:
    """Saves the state of a part as one value, because its keys may change between saving and loading."""

    def __init__(self, part: Any) -> None:
        self._part = part

    def state_dict(self) -> dict[str, Any]:
        file = io.BytesIO()
        torch.save(self._part.state_dict(), file)
        return {"state": file.getvalue()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        # Pickled values are those of this run, as all values of torch.distributed.checkpoint.
        self._part.load_state_dict(torch.load(io.BytesIO(state_dict["state"]), weights_only=False))


class Checkpoints:
    """Saves and loads the parts of a training run with `torch.distributed.checkpoint`.

    With several processes, all of them call `save` and `load`, each with its own parts; FSDP models save and
    load their shards, also on another number of processes. A folder appears under its name when it is
    complete, so that a process which is killed while it saves leaves the older checkpoints as they were.

    ::

        checkpoints = Checkpoints("runs/a/checkpoints", settings={"model": "Qwen/Qwen3-0.6B"})
        parts = {"model": ModelState(model, optimizer), "collector": collector, "random": GlobalRNGState()}
        start = checkpoints.load(parts)
        for step in range(start, 1000):
            ...
            checkpoints.save(step + 1, parts)

    Args:
        folder: Folder of the checkpoints.
        keep: Number of checkpoints to keep; older ones are deleted.
        settings: Values, as JSON, that a run keeps: a checkpoint with others is not loaded.
    """

    def __init__(
        self, folder: str | Path, *, keep: int = 2, settings: Mapping[str, Any] | None = None
    ) -> None:
        check_count("keep", keep, optional=False)
        self.folder, self.keep = Path(folder), keep
        self._settings = cast("dict[str, Any]", json.loads(json.dumps(dict(settings or {}), default=str)))

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, in order."""
        return sorted(
            int(path.parent.name)
            for path in self.folder.glob(f"*/{_COMPLETE}")
            if path.parent.name.isdecimal()
        )

    def save(self, step: int, parts: Mapping[str, Any]) -> bool:
        """Save all parts as the checkpoint of a step, and delete the oldest ones.

        A failure, such as a full disk, is logged; the older checkpoints stay.

        Args:
            step: Number of steps that are done.
            parts: Objects with `state_dict` and `load_state_dict`. `ModelState` is saved in shards, the
                others as they are; those that differ between processes have names with the rank.

        Returns:
            True if the checkpoint is complete.
        """
        unfinished = self.folder / f"{step:06d}{_UNFINISHED}"
        is_first = _is_alone() or distributed.get_rank() == 0

        def succeeds(work: Callable[[], None]) -> bool:
            """Run a part of the work; return True if it succeeded in all processes."""
            try:
                work()
                is_done = True
            except (OSError, RuntimeError, CheckpointException) as error:
                logger.error("no checkpoint of step %d in %s: %s", step, self.folder, _reason(error))
                is_done = False
            return _holds_everywhere(is_done)

        def prepare() -> None:
            if is_first:
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir(parents=True)
                (unfinished / _SETTINGS).write_text(json.dumps(self._settings, indent=1))

        def write() -> None:
            with _one_process():
                save(_stateful(parts), checkpoint_id=unfinished, no_dist=_is_alone())

        def complete() -> None:
            if is_first:
                _sync(unfinished)
                shutil.rmtree(self._path(step), ignore_errors=True)
                unfinished.rename(self._path(step))
                _sync_folder(self.folder)

        is_complete = succeeds(prepare) and succeeds(write) and succeeds(complete)
        if is_first and not is_complete:
            shutil.rmtree(unfinished, ignore_errors=True)
        for old in self.steps()[: -self.keep] if is_first and is_complete else ():
            shutil.rmtree(self._path(old), ignore_errors=True)
        return is_complete

    def load(self, parts: Mapping[str, Any], *, step: int | None = None) -> int:
        """Load the parts from a checkpoint.

        Args:
            parts: The same parts as in `save`, which get their states.
            step: Step of the checkpoint; None for the newest one.

        Returns:
            The step; 0 if there is no checkpoint and none was asked for.

        Raises:
            FileNotFoundError: If there is no checkpoint of this step.
            CheckpointMismatch: If it has other settings, lacks a part, or its tensors have other shapes.
        """
        known = self.steps()
        if step is None and not known:
            return 0
        step = known[-1] if step is None else step
        folder = self._path(step)
        if step not in known:
            raise FileNotFoundError(f"no checkpoint of step {step} in {self.folder}; there are: {known}")
        self._check_settings(folder)
        try:
            with _one_process():
                load(_stateful(parts), checkpoint_id=folder, no_dist=_is_alone())
        except (RuntimeError, ValueError, KeyError, CheckpointException) as error:
            raise CheckpointMismatch(f"{folder} does not fit this run: {_reason(error)}") from error
        return step

    def _check_settings(self, folder: Path) -> None:
        saved = cast("dict[str, Any]", json.loads((folder / _SETTINGS).read_text()))
        names = sorted({*saved, *self._settings})
        other = [name for name in names if saved.get(name) != self._settings.get(name)]
        if other:
            lines = (f"{name}: {saved.get(name)!r} there, {self._settings.get(name)!r} now" for name in other)
            raise CheckpointMismatch(f"{folder} was saved with other settings: {'; '.join(lines)}")

    def _path(self, step: int) -> Path:
        return self.folder / f"{step:06d}"


def _stateful(parts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: part if isinstance(part, ModelState) else _Packed(part) for name, part in parts.items()}


def _is_alone() -> bool:
    return not distributed.is_initialized()


def _holds_everywhere(value: bool) -> bool:
    """Return True if the value is true in all processes, which must all call this."""
    if _is_alone():
        return value
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, value)
    return all(found)


def discard_steps(folder: str | Path, first: int) -> None:
    """Remove the records and logs of the steps that a resumed run repeats.

    Args:
        folder: Folder of the run. Files named after their step, as `Recorder` writes them, are deleted. Lines
            of CSV files that begin with the step, as TorchRL's `CSVLogger` writes them, groups of batches,
            the timelines beside them, and trajectories of earlier steps that had not left in a batch are
            removed. See `open_logger` for other loggers.
        first: The first step that is repeated.
    """
    for path in Path(folder).rglob("*.jsonl*"):
        step = path.name.partition(".")[0]
        if step.isdecimal() and int(step) >= first:
            path.unlink()
    for path in Path(folder).rglob(GROUPS):
        groups = [
            one for one in read_groups(path.parent) if isinstance(one, GroupRecord) and one.step < first
        ]
        path.write_text("".join(f"{json.dumps(group.to_json())}\n" for group in groups), "utf-8")
        members = {(group.run, one.name) for group in groups for one in group.members}
        _keep_members(path.parent, members)
        _keep_batches(path.parent / TIMELINE, members)
    for path in Path(folder).glob("**/scalars/**/*.csv"):
        lines = path.read_text("utf-8").splitlines(keepends=True)
        path.write_text("".join(line for line in lines if _is_row_before(line, first)), "utf-8")


def _is_row_before(line: str, first: int) -> bool:
    """Check that a line of a CSV file is whole, and of an earlier step."""
    step = line.partition(",")[0]
    return line.endswith("\n") and "," in line and step.isdecimal() and int(step) < first


def _keep_members(folder: Path, members: Collection[tuple[str, str]]) -> None:
    """Remove the records of trajectories that are not among `members`: they begin again."""
    for path in folder.glob("*.jsonl"):
        if path.name.partition(".")[0].isdecimal():
            lines = path.read_text("utf-8").splitlines(keepends=True)
            kept = (line for line in lines if _origin(line) in members)
            path.write_text("".join(kept), "utf-8")


def _keep_batches(path: Path, members: Collection[tuple[str, str]]) -> None:
    """Remove the timelines of batches with trajectories that are not among `members`."""
    if not path.exists():
        return
    kept: list[str] = []
    for line in path.read_text("utf-8").splitlines(keepends=True):
        with contextlib.suppress(ValueError):  # the end of a file that was cut off, or another format
            batch = BatchTimeline.from_json(json.loads(line))
            if all((batch.run, row.name) in members for row in batch.rows):
                kept.append(line)
    path.write_text("".join(kept), "utf-8")


def _origin(line: str) -> tuple[str, str]:
    """Return the run and the name of a recorded trajectory."""
    try:
        fields = json.loads(line)
    except ValueError:  # the end of a file that was cut off
        return ("", "")
    return (str(fields.get("run", "")), str(fields.get("trajectory", "")))


@contextlib.contextmanager
def _one_process() -> Generator[None]:
    """Silence torch's warning about a single process, which is intended here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _reason(error: BaseException) -> str:
    """Return the first line of the innermost cause."""
    failures = getattr(error, "failures", None)
    if failures:  # of CheckpointException: by rank
        error = next(iter(failures.values()))[0]
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _sync(folder: Path) -> None:
    """Write the files of a folder to the disk."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    if sys.platform == "win32":  # which opens no folders
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
