"""`EvalFolder`: save an evaluation in a folder, so that it survives a crash of the program at any point.

`samples.jsonl` is the truth: one line per sample, on the disk before the next one is taken, in the form
of a dump. `eval.json` describes the evaluation, and repeats the results at its end.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrl_agentic.engines.usage import Usage
from torchrl_agentic.evaluation.eval_sample import (
    EvalSample,
    record_of,
    sample_from,
    usage_from,
    with_scores,
)
from torchrl_agentic.evaluation.locks import lock_file
from torchrl_agentic.messages import JSON, fields_of
from torchrl_agentic.records.dump import read_line
from torchrl_agentic.records.json_dump import Secrets, json_line
from torchrl_agentic.records.record import BadLine, TrajectoryRecord
from torchrl_agentic.records.recorder import SUFFIXES
from torchrl_agentic.text import read_json
from torchrl_agentic.tools.private_files import make_folders, open_file

SAMPLES, SUMMARY = "samples.jsonl", "eval.json"
FORMAT_VERSION = 1


class EvalFolderError(ValueError):
    """A folder cannot hold this evaluation: it holds another one, or is in use."""


@dataclass(frozen=True, slots=True)
class SavedEval:
    """An evaluation as it is saved in its folder.

    Attributes:
        summary: Content of `eval.json`.
        samples: Samples, failed ones included, each with the digest of its task.
        n_unreadable: Number of lines that could not be read, such as one that a crash cut off.
    """

    summary: Mapping[str, Any]
    samples: Sequence[tuple[EvalSample, str]]
    n_unreadable: int


class EvalFolder:
    """The folder of a running evaluation. Call `close` at its end.

    Args:
        path: The folder, which is created.
        summary: Description of the evaluation: its "settings", and names.
        resume: Whether the folder may hold this evaluation already.
        known: Digests of all tasks, by name; to check that earlier samples are of these tasks.
        decode: Decodes token ids, so that records have tokens; or None.

    Attributes:
        path: The folder.
        run: Id of the run, the same after it was resumed.
        samples: Samples of earlier programs that ended whole.
        unscored: Samples of earlier programs whose scorers failed, each with its record.
        usage: Usage of earlier programs.
        error: The first failure to write, or None.
        n_unsaved: Number of samples that could not be written.

    Raises:
        EvalFolderError: If the folder holds an evaluation or a dump, and `resume` is False; if its settings
            or tasks are others; or if another program writes to it.
        OSError: If the folder cannot be created.
    """

    def __init__(
        self,
        path: str | Path,
        summary: Mapping[str, JSON],
        *,
        resume: bool = False,
        known: Mapping[str, str],
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self.path = Path(path)
        self.run = uuid.uuid4().hex[:8]
        self.samples: list[EvalSample] = []
        self.unscored: list[tuple[EvalSample, TrajectoryRecord]] = []
        self.usage = Usage()
        self.error: OSError | None = None
        self.n_unsaved = 0
        self._digests, self._decode = known, decode
        self._secrets = Secrets()
        self._variables = self._secrets.variables()
        if self.path.exists() and not self.path.is_dir():
            raise EvalFolderError(f"{self.path} is a file; the results of an evaluation need a folder")
        begun = (self.path / SUMMARY).exists() or (self.path / SAMPLES).exists()
        if begun and not resume:
            raise EvalFolderError(
                f"{self.path} holds an evaluation already: continue it with resume=True (--resume), or "
                "choose another folder"
            )
        if not begun and self.path.is_dir() and any(map(_is_dump, self.path.iterdir())):
            raise EvalFolderError(f"{self.path} holds another dump: choose another folder")
        make_folders(self.path)
        self._file = open_file(self.path / SAMPLES, os.O_RDWR)
        try:
            self._lock()
            if begun:
                self._resume(summary, known)
            self._size = os.lseek(self._file, 0, os.SEEK_END)
            self._summary = {"version": FORMAT_VERSION, "run": self.run, "status": "running", **summary}
            _write_whole(self.path / SUMMARY, _pretty(self._summary))
        except BaseException:
            os.close(self._file)
            raise

    def _lock(self) -> None:
        if not lock_file(self._file):
            raise EvalFolderError(f"another program is writing to {self.path}")

    def _resume(self, summary: Mapping[str, JSON], known: Mapping[str, str]) -> None:
        """Read the samples of earlier programs, and rewrite the file without those to be taken again."""
        saved = read_eval(self.path)
        self.run = str(saved.summary.get("run") or self.run)
        self.usage = sum((sample.usage for sample, _ in saved.samples), Usage())
        if "usage" in saved.summary:  # it ended, and knows of failed trajectories too
            self.usage = usage_from(saved.summary["usage"])
        if differing := _differences(saved.summary.get("settings"), summary.get("settings")):
            raise EvalFolderError(
                f"{self.path} holds an evaluation with other settings: {'; '.join(differing)}. Use the same "
                "ones, or choose another folder"
            )
        changed = dict.fromkeys(
            sample.task for sample, digest in saved.samples if known.get(sample.task) != digest
        )
        if changed:
            shown = ", ".join(map(repr, list(changed)[:5])) + (", …" if len(changed) > 5 else "")
            raise EvalFolderError(
                f"{self.path} holds an evaluation of other tasks: {len(changed)} of its tasks are missing or "
                f"have changed ({shown}). Use the same tasks, or choose another folder"
            )
        self.samples = [sample for sample, _ in saved.samples if not sample.has_failed]
        if len(self.samples) == len(saved.samples) and not saved.n_unreadable:
            return
        kept: list[bytes] = []
        for line, record in _lines(self.path / SAMPLES):
            if record is None or (sample := sample_from(record)).failure:
                continue
            kept.append(line.rstrip(b"\n") + b"\n")
            if sample.score_errors:
                self.unscored.append((sample, record))
        self._rewrite(b"".join(kept))

    def _rewrite(self, data: bytes) -> None:
        """Replace the file of samples in one step."""
        _write_whole(self.path / SAMPLES, data)
        old, self._file = self._file, os.open(self.path / SAMPLES, os.O_RDWR)
        try:
            self._lock()
        finally:
            os.close(old)
        self._size = len(data)

    def rescore(self, samples: Iterable[EvalSample]) -> None:
        """Replace the scores of samples in the file; a failure to write is kept in `error`.

        Args:
            samples: Samples of `unscored` with new scores.
        """
        new = {(sample.task, sample.epoch): sample for sample in samples}
        lines: list[bytes] = []
        for line, record in _lines(self.path / SAMPLES):
            found = None if record is None else sample_from(record)
            scored = None if found is None else new.get((found.task, found.epoch))
            if record is not None and scored is not None:
                line = json_line(with_scores(record, scored), self._secrets, self._variables)
            lines.append(line)
        try:
            self._rewrite(b"".join(lines))
        except OSError as error:
            self.error = self.error or error
            self.n_unsaved += len(new)

    def append(self, sample: EvalSample) -> bool:
        """Write a sample to the disk. If that fails, the evaluation continues: see `error`.

        Args:
            sample: A sample with its trajectory.

        Returns:
            Whether it was written.
        """
        record = record_of(
            sample, run=self.run, digest=self._digests.get(sample.task, ""), decode=self._decode
        )
        line = json_line(record, self._secrets, self._variables)
        try:
            _write(self._file, line, self._size)
            self._size += len(line)
            return True
        except OSError as error:
            self.error = self.error or error
            self.n_unsaved += 1
            with contextlib.suppress(OSError):  # a part of the line would spoil the next one
                os.ftruncate(self._file, self._size)
            return False

    def finish(self, results: Mapping[str, JSON]) -> None:
        """Add the results to `eval.json`; a failure to write is kept in `error`.

        Args:
            results: The results, with their "status".
        """
        try:
            _write_whole(self.path / SUMMARY, _pretty({**self._summary, **results}))
        except OSError as error:
            self.error = self.error or error

    def close(self) -> None:
        """Close the file, so that another program may continue the evaluation."""
        os.close(self._file)


def read_eval(path: str | Path) -> SavedEval:
    """Read the folder of an evaluation, which may be running or have been killed.

    Args:
        path: The folder.

    Raises:
        FileNotFoundError: If it holds no evaluation.
        ValueError: If `eval.json` cannot be read.
    """
    folder = Path(path)
    summary_path = folder / SUMMARY
    if not summary_path.is_file():
        raise FileNotFoundError(f"{folder} holds no evaluation: it has no {SUMMARY}")
    summary = fields_of(read_json(summary_path.read_text("utf-8")))
    if summary is None or summary.get("version") != FORMAT_VERSION:
        raise ValueError(f"{summary_path} was not written by this version of the package")
    samples: list[tuple[EvalSample, str]] = []
    n_unreadable = 0
    if (folder / SAMPLES).exists():
        for _, record in _lines(folder / SAMPLES):
            if record is None:
                n_unreadable += 1
            else:
                samples.append((sample_from(record), str(record.extras.get("task_digest", ""))))
    return SavedEval(summary, samples, n_unreadable)


def is_eval(path: str | Path) -> bool:
    """Return True if a folder holds an evaluation.

    Args:
        path: A folder or file.
    """
    return (Path(path) / SUMMARY).is_file()


def _lines(path: Path) -> Iterator[tuple[bytes, TrajectoryRecord | None]]:
    """Yield the lines of a file, each with its record; None for a line that is not the record of a sample."""
    with path.open("rb") as file:
        for line in file:
            if not line.strip():
                continue
            record = read_line(line.rstrip(b"\n"))
            try:
                if isinstance(record, BadLine):
                    raise ValueError(record.reason)
                sample_from(record)
            except (KeyError, TypeError, ValueError, AttributeError):
                yield line, None
            else:
                yield line, record


def _differences(before: Any, now: Any) -> list[str]:
    """Return how settings differ, one string per key."""
    old, new = fields_of(before) or {}, fields_of(json.loads(json.dumps(now))) or {}
    missing = object()

    def shown(value: Any) -> str:
        return "nothing" if value is missing else json.dumps(value, ensure_ascii=False)[:200]

    return [
        f"{key} was {shown(old.get(key, missing))} and is {shown(new.get(key, missing))}"
        for key in sorted({*old, *new})
        if old.get(key, missing) != new.get(key, missing)
    ]


def _is_dump(path: Path) -> bool:
    return path.name.endswith(SUFFIXES)


def _write(file: int, data: bytes, offset: int) -> None:
    """Write data at an offset, and wait until the disk has it."""
    os.lseek(file, offset, os.SEEK_SET)
    done = 0
    while done < len(data):
        done += os.write(file, data[done:])
    os.fsync(file)


def _write_whole(path: Path, data: bytes) -> None:
    """Replace a file in one step, so that a crash leaves the old or the new one."""
    part = path.with_name(f".part-{path.name}")
    file = open_file(part, os.O_WRONLY | os.O_TRUNC)
    try:
        _write(file, data, 0)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    finally:
        os.close(file)
    part.replace(path)
    if sys.platform == "win32":  # which opens no folders
        return
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some file systems cannot sync a folder
            os.fsync(folder)
    finally:
        os.close(folder)


def _pretty(data: Mapping[str, JSON]) -> bytes:
    return (json.dumps(data, indent=2, ensure_ascii=True) + "\n").encode()
