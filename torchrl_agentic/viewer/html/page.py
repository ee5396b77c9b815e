"""Write the page: an index for its list and charts, and trajectories and batches in compressed chunks."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
import shutil
import tempfile
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import IO, Any

import pydantic_core

from torchrl_agentic.collectors.timeline import read_timelines
from torchrl_agentic.errors import MissingExtra
from torchrl_agentic.messages import JSON
from torchrl_agentic.records import BadLine, Dump, DumpFile, Groups, TrajectoryRecord, question_of
from torchrl_agentic.records.call_stats import Distribution
from torchrl_agentic.records.dump import TIMELINE
from torchrl_agentic.records.json_dump import plain
from torchrl_agentic.tools.private_files import PRIVATE, open_file
from torchrl_agentic.viewer.curves import Curve, curves, group_curves
from torchrl_agentic.viewer.html.payload import batch_payload, batch_row, seconds, trajectory_payload
from torchrl_agentic.viewer.html.summary import NOT_RUN, STATUS_WORDS
from torchrl_agentic.viewer.report.tally import Tally, rows_of
from torchrl_agentic.viewer.samples import SampleGroup, SampleGroups

CHUNK_BYTES = 1 << 19
MOST_BATCHES = 200
"""Number of batches whose timelines a page has: the last ones."""
_LEVEL = 4  # takes a fifth of the time of level 6, and makes the file an eighth larger
_ROW_CHARS = 160
_MOST_PROBLEMS = 1000
_QUANTILES = (0.5, 0.9, 0.99, 1.0)
_STATUSES = {str(status): number for number, status in enumerate(STATUS_WORDS)}


MOST_RUNS = 20
"""Number of runs of a dump that have a page: the first ones."""
MOST_STEPS = 400
"""Number of points of a curve; more steps are averaged."""


def chunks(dump: Dump, index: Index) -> Iterator[bytes]:
    """Yield all trajectories of a dump, in compressed base64 chunks.

    Args:
        dump: The dump.
        index: Index that each trajectory and each problem is added to.
    """
    lines: list[bytes] = []
    for name, file in enumerate(dump.files):
        index.files.append(file.name)
        for record in _records(file, name, index):
            try:
                line = _encoded(trajectory_payload(record))
                index.add(record, name)
            except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
                index.problem(name, None, f"{record.request_id!r:.60}: {type(error).__name__}: {error}")
                continue
            lines.append(line)
            if sum(map(len, lines)) >= CHUNK_BYTES:
                yield index.chunk(lines)
                lines.clear()
    if lines:
        yield index.chunk(lines)


def timelines(dump: Dump, index: Index) -> Iterator[bytes]:
    """Yield the timelines of the last batches of a dump, each compressed in base64.

    Args:
        dump: The dump.
        index: Index that has all trajectories; each batch and each problem is added to it.
    """
    if not (dump.path / TIMELINE).is_file():
        return
    last: deque[tuple[list[JSON], bytes]] = deque(maxlen=MOST_BATCHES)
    n_batches, file = 0, len(index.files)
    index.files.append("timeline")
    try:
        for batch in read_timelines(dump.path):
            if isinstance(batch, BadLine):
                index.problem(file, batch.number, batch.reason)
                continue
            n_batches += 1
            last.append((batch_row(batch), _packed([_encoded(batch_payload(batch, index.numbers))])))
    except OSError as error:
        index.problem(file, None, f"the timelines cannot be read: {error}")
    index.n_batches_omitted = n_batches - len(last)
    for row, packed in last:
        index.batches.append(row)
        yield packed


def _packed(lines: list[bytes]) -> bytes:
    return base64.b64encode(zlib.compress(b"\n".join(lines), _LEVEL))


def _records(file: DumpFile, name: int, index: Index) -> Iterator[TrajectoryRecord]:
    try:
        file.scan()
        if not len(file):
            index.problem(name, None, "the file holds no trajectory")
        for number in range(len(file)):
            record = file.record(number)
            if isinstance(record, BadLine):
                index.problem(name, record.number, record.reason)
            else:
                yield record
    except (OSError, MissingExtra) as error:
        index.problem(name, None, f"the file cannot be read to its end: {error}")
    finally:
        file.close()


def _encoded(value: JSON) -> bytes:
    """Return a value as JSON without newlines; lone surrogates become escapes."""
    try:
        return pydantic_core.to_json(value, inf_nan_mode="strings")
    except (pydantic_core.PydanticSerializationError, ValueError):
        return json.dumps(value).encode()


@dataclass
class Index:
    """The data of the list and the charts, some hundred bytes per trajectory.

    Attributes:
        name: Name of the dump.
        files: Names of the files.
        rows: A JSON array per trajectory.
        chunk_sizes: Number of trajectories in each chunk.
        problems: The first problems: number of the file, number of the line or None, reason.
        n_problems: Number of all problems.
        tools: Number of each tool, by name.
        reasons: Number of each reason of an end.
        times: Queue and run times by tool, in seconds.
        numbers: Number of each trajectory, by its name in its environment; None if several have that name.
        batches: A row of the list of batches for each.
        n_batches_omitted: Number of earlier batches, which the page does not have.
        groups: The groups of the dump, with the batch in which each was yielded.
        samples: The trajectories by prompt.
        runs: Number of each run, by its id.
        tallies: Statistics of the first runs; where batches are known, of the trajectories in batches.
        unused: Number of the other trajectories by run.
        metrics: Curves that the trainer wrote.
    """

    name: str
    files: list[str] = field(default_factory=list[str])
    rows: list[bytes] = field(default_factory=list[bytes])
    chunk_sizes: list[int] = field(default_factory=list[int])
    problems: list[JSON] = field(default_factory=list[JSON])
    n_problems: int = 0
    tools: dict[str, int] = field(default_factory=dict[str, int])
    reasons: dict[str, int] = field(default_factory=dict[str, int])
    times: dict[str, tuple[Distribution, Distribution]] = field(default_factory=dict[str, Any])
    numbers: dict[str, int | None] = field(default_factory=dict[str, Any])
    batches: list[JSON] = field(default_factory=list[JSON])
    n_batches_omitted: int = 0
    groups: Groups | None = None
    samples: SampleGroups = field(default_factory=SampleGroups)
    runs: dict[str, int] = field(default_factory=dict[str, int])
    tallies: dict[str, Tally] = field(default_factory=dict[str, Tally])
    unused: Counter[str] = field(default_factory=Counter[str])
    metrics: Sequence[Curve] = ()

    def add(self, record: TrajectoryRecord, file: int) -> None:
        """Add a trajectory.

        Args:
            record: The trajectory.
            file: Number of its file.
        """
        summary = record.summary
        left = None if self.groups is None else self.groups.place(record.run, record.trajectory)
        if self.groups is not None:
            summary = self.groups.located(summary)
        self.samples.add(len(self.rows), summary)
        if self.groups is not None and record.run in self.groups.runs and left is None:
            self.unused[record.run] += 1
        elif record.run in self.tallies or len(self.tallies) < MOST_RUNS:
            version = None if left is None else left[0].policy_version
            self.tallies.setdefault(record.run, Tally()).add(record, summary.step, version)
        run = self.runs.setdefault(record.run, len(self.runs))
        statuses = [[_STATUSES[status], count] for status, count in summary.statuses.items()]
        tools = [[_number(self.tools, name), count] for name, count in summary.tools.items()]
        reason = _number(self.reasons, summary.termination_reason)
        score = plain(summary.score)
        begin = [summary.request_id[:_ROW_CHARS], file, summary.step, score, reason, summary.n_turns]
        self.rows.append(
            _escaped([*begin, statuses, tools, _excerpt(record), run, record.origin.task[:_ROW_CHARS]])
        )
        self.numbers[record.trajectory] = None if record.trajectory in self.numbers else len(self.rows) - 1
        for _, call, result in record.calls:
            if result.timing is not None and result.status not in NOT_RUN:
                queues, runs = self.times.setdefault(call.tool[:_ROW_CHARS], (Distribution(), Distribution()))
                queues.add(max(0.0, seconds(result.timing.queue_s) or 0.0))
                runs.add(max(0.0, seconds(result.timing.run_s) or 0.0))

    def problem(self, file: int, number: int | None, reason: str) -> None:
        """Add a problem.

        Args:
            file: Number of the file.
            number: Number of the line, or None.
            reason: Why the line cannot be shown.
        """
        self.n_problems += 1
        if len(self.problems) < _MOST_PROBLEMS:
            self.problems.append([file, number, reason[:1000]])

    def chunk(self, lines: list[bytes]) -> bytes:
        """Compress the trajectories that were added last."""
        self.chunk_sizes.append(len(lines))
        return _packed(lines)

    def parts(self) -> Iterator[bytes]:
        """Yield the index as JSON that is safe inside of a script element."""
        whole = {
            "name": self.name,
            "files": self.files,
            "chunks": self.chunk_sizes,
            "problems": self.problems,
            "n_problems": self.n_problems,
            "tools": list(self.tools),
            "reasons": list(self.reasons),
            "statuses": [[status, *words, status not in NOT_RUN] for status, words in STATUS_WORDS.items()],
            "times": [_times(name, *times) for name, times in self.times.items()],
            "batches": self.batches,
            "n_batches_omitted": self.n_batches_omitted,
            "run_names": [run[:_ROW_CHARS] for run in self.runs],
            "runs": self._runs(),
            "groups": [_group(group, self.runs) for group in self.samples if len(group.numbers) > 1],
        }
        yield _escaped(whole)[:-1] + b',"rows":['
        for number, row in enumerate(self.rows):
            yield b",\n" + row if number else row
        yield b"]}"

    def _runs(self) -> list[JSON]:
        """Return the data of the pages of runs; the metrics of the trainer belong to the last run."""
        of_run: dict[str, list[SampleGroup]] = {}
        for group in self.samples:
            of_run.setdefault(group.key[0], []).append(group)
        last = next(reversed(self.runs), None)
        return [
            {
                **run_page(run, tally, of_run.get(run, ()), self.metrics if run == last else ()),
                "unused": self.unused[run],
            }
            for run, tally in self.tallies.items()
        ]


def run_page(
    run: str, tally: Tally, groups: Iterable[SampleGroup], metrics: Iterable[Curve] = ()
) -> dict[str, JSON]:
    """Return the data of the page of a run: curves, endings by step, and tools.

    Args:
        run: Id of the run.
        tally: Its statistics.
        groups: Its groups.
        metrics: Curves that its trainer wrote.
    """
    report = tally.report(run, by=rows_of(tally, most=MOST_STEPS))
    reasons = list(report.total.reasons)
    return {
        "id": run[:_ROW_CHARS],
        "count": report.total.trajectories,
        "curves": [_curve(curve) for curve in (*curves(report), *group_curves(groups))],
        "metrics": [_curve(curve) for curve in metrics],
        "steps": [[step.first, step.last, step.trajectories] for step in report.steps],
        "reasons": reasons,
        "endings": [[step.reasons.get(reason, 0) for reason in reasons] for step in report.steps],
        "tools": [
            [
                tool.tool[:_ROW_CHARS],
                tool.calls,
                tool.errors,
                tool.infra,
                tool.run.p50,
                tool.run.p95,
                tool.run.p99,
                tool.queue.p50,
            ]
            for tool in report.tools
        ],
    }


def _curve(curve: Curve) -> list[JSON]:
    return [curve.name[:_ROW_CHARS], curve.unit, [list(point) for point in curve.points]]


def _group(group: SampleGroup, runs: dict[str, int]) -> list[JSON]:
    """Return the data of a group, without the rows of its trajectories."""
    return [
        group.step,
        runs[group.key[0]],
        group.key[2],
        group.is_recorded,
        group.mean,
        group.spread,
        list(group.numbers),
        [None if one is None else round(one, 6) for one in group.advantages],
    ]


def _number(table: dict[str, int], name: str) -> int:
    return table.setdefault(name[:_ROW_CHARS], len(table))


def _excerpt(record: TrajectoryRecord) -> str:
    """Return the beginning of the question, or else of the first message."""
    asked = record.question or question_of(tuple(record.messages)[:1])
    return asked[:_ROW_CHARS]


def _times(name: str, queues: Distribution, runs: Distribution) -> list[JSON]:
    """Return the number of calls of a tool, and quantiles of their queue and run times."""
    return [name, len(runs), *([times.quantile(q) for q in _QUANTILES] for times in (queues, runs))]


def _escaped(value: JSON) -> bytes:
    """Return a value as ASCII JSON that cannot look like markup."""
    return json.dumps(value).replace("<", "\\u003c").encode()


_SCRIPTS = (
    "data.js",
    "charts.js",
    "list.js",
    "trajectory.js",
    "timeline.js",
    "samples.js",
    "run.js",
    "page.js",
)
_MARK = re.compile(r"\{\{(\w+)\}\}")


def write_page(
    dump: Dump,
    path: Path,
    *,
    mode: int = PRIVATE,
    name: str | None = None,
    metrics: Sequence[Curve] = (),
) -> None:
    """Write a dump as one HTML file, which needs no other file and no network.

    Only one trajectory is in memory at a time. The page says how much of a very long text is omitted, and
    lists what cannot be read, with the reason.

    Args:
        dump: The dump.
        path: The file. An existing file is overwritten.
        mode: Permissions of the file if it is created, regardless of the umask.
        name: Name of the page; that of the dump by default.
        metrics: Curves that the trainer wrote, as `read_metrics` finds them.

    Raises:
        OSError: If the file cannot be written.
    """
    groups = Groups(dump.path)
    groups.refresh()
    index = Index(dump.path.name if name is None else name, groups=groups, metrics=metrics)
    with tempfile.TemporaryFile() as bodies:
        for kind, pieces in ((b"chunk", chunks(dump, index)), (b"batch", timelines(dump, index))):
            for number, piece in enumerate(pieces):
                bodies.write(b'<script type="application/octet-stream" id="%s-%d">' % (kind, number))
                bodies.write(piece + b"</script>\n")
        bodies.seek(0)
        with open(open_file(path, os.O_WRONLY | os.O_TRUNC, mode), "wb") as file:
            _assemble(file, index, bodies)


def _assemble(file: IO[bytes], index: Index, bodies: IO[bytes]) -> None:
    """Write the list before the trajectories, so that a browser shows it while it reads the rest."""
    style, script = _asset("page.css"), "\n".join(map(_asset, _SCRIPTS))
    for kind, text in _pieces(_asset("page.html")):
        if kind == "index":
            file.writelines(index.parts())
        elif kind == "bodies":
            shutil.copyfileobj(bodies, file)
        else:
            known = {"style": style, "script": script, "policy": policy(style, script)}
            known["title"] = html.escape(index.name.encode("utf-8", "replace").decode())
            file.write((known[kind] if kind else text).encode())


def policy(style: str, script: str) -> str:
    """Return the Content-Security-Policy: only this style and this script, and no HTML made from text.

    Args:
        style: The style sheet.
        script: The script.
    """
    return "; ".join(
        (
            "default-src 'none'",
            f"style-src {_hash(style)}",
            f"script-src {_hash(script)}",
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


def _pieces(template: str) -> Iterator[tuple[str, str]]:
    """Split a template at its {{marks}}: yield the name of each mark, or "" and the text between."""
    at = 0
    for mark in _MARK.finditer(template):
        yield "", template[at : mark.start()]
        yield mark[1], ""
        at = mark.end()
    yield "", template[at:]


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _asset(name: str) -> str:
    return resources.files("torchrl_agentic.viewer.html").joinpath("assets", name).read_text("utf-8")
