"""What the page holds of a dump: an index for its list, and the trajectories in compressed chunks."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pydantic_core

from torchrl_agentic.errors import MissingExtra
from torchrl_agentic.messages import JSON
from torchrl_agentic.records import BadLine, Dump, DumpFile, TrajectoryRecord
from torchrl_agentic.records.distribution import Distribution
from torchrl_agentic.records.encode import plain
from torchrl_agentic.viewer.html.body import body, seconds
from torchrl_agentic.viewer.html.words import NOT_RUN, STATUS_WORDS

CHUNK_BYTES = 1 << 19
_LEVEL = 4  # a fifth of the time of the usual 6, for a file that is an eighth larger
_ROW_CHARS = 160
_MOST_PROBLEMS = 1000
_QUANTILES = (0.5, 0.9, 0.99, 1.0)
_STATUSES = {str(status): number for number, status in enumerate(STATUS_WORDS)}


def chunks(dump: Dump, index: Index) -> Iterator[bytes]:
    """Give all trajectories of a dump: compressed in base64, several at a time; tell the index of each."""
    lines: list[bytes] = []
    for name, file in enumerate(dump.files):
        index.files.append(file.name)
        for record in _records(file, name, index):
            try:
                line = _encoded(body(record))
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
        index.problem(name, None, f"the file could not be read to its end: {error}")
    finally:
        file.close()


def _encoded(value: JSON) -> bytes:
    """Write as JSON, without any newline; lone surrogates as escapes."""
    try:
        return pydantic_core.to_json(value, inf_nan_mode="strings")
    except (pydantic_core.PydanticSerializationError, ValueError):
        return json.dumps(value).encode()


@dataclass
class Index:
    """What the list and the charts show. It grows with each trajectory, by some hundred bytes."""

    name: str
    files: list[str] = field(default_factory=list[str])
    rows: list[bytes] = field(default_factory=list[bytes])
    chunk_sizes: list[int] = field(default_factory=list[int])
    problems: list[JSON] = field(default_factory=list[JSON])
    n_problems: int = 0
    tools: dict[str, int] = field(default_factory=dict[str, int])
    reasons: dict[str, int] = field(default_factory=dict[str, int])
    times: dict[str, tuple[Distribution, Distribution]] = field(default_factory=dict[str, Any])

    def add(self, record: TrajectoryRecord, file: int) -> None:
        """Add a trajectory."""
        summary = record.summary
        statuses = [[_STATUSES[status], count] for status, count in summary.statuses.items()]
        tools = [[_number(self.tools, name), count] for name, count in summary.tools.items()]
        reason = _number(self.reasons, summary.termination_reason)
        score = plain(summary.score)
        begin = [summary.request_id[:_ROW_CHARS], file, summary.step, score, reason, summary.n_turns]
        self.rows.append(_escaped([*begin, statuses, tools, _excerpt(record)]))
        for _, call, result in record.calls:
            if result.timing is not None and result.status not in NOT_RUN:
                queues, runs = self.times.setdefault(call.tool[:_ROW_CHARS], (Distribution(), Distribution()))
                queues.add(max(0.0, seconds(result.timing.queue_s) or 0.0))
                runs.add(max(0.0, seconds(result.timing.run_s) or 0.0))

    def problem(self, file: int, number: int | None, reason: str) -> None:
        """Add something that cannot be shown. number: of its line."""
        self.n_problems += 1
        if len(self.problems) < _MOST_PROBLEMS:
            self.problems.append([file, number, reason[:1000]])

    def chunk(self, lines: list[bytes]) -> bytes:
        """Compress the trajectories that were added last."""
        self.chunk_sizes.append(len(lines))
        return base64.b64encode(zlib.compress(b"\n".join(lines), _LEVEL))

    def parts(self) -> Iterator[bytes]:
        """Give the index as JSON that may stand inside of a script element."""
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
        }
        yield _escaped(whole)[:-1] + b',"rows":['
        for number, row in enumerate(self.rows):
            yield b",\n" + row if number else row
        yield b"]}"


def _number(table: dict[str, int], name: str) -> int:
    return table.setdefault(name[:_ROW_CHARS], len(table))


def _excerpt(record: TrajectoryRecord) -> str:
    """Give the beginning of what was asked: the last message of the prompt, or else the first there is."""
    first = next(reversed(record.prompt), None) or next(record.messages, None)
    return "" if first is None else " ".join(first.text[: 4 * _ROW_CHARS].split())[:_ROW_CHARS]


def _times(name: str, queues: Distribution, runs: Distribution) -> list[JSON]:
    """Write how many calls a tool had, and quantiles of their queue and run times."""
    return [name, len(runs), *([times.quantile(q) for q in _QUANTILES] for times in (queues, runs))]


def _escaped(value: JSON) -> bytes:
    """Write as JSON in ASCII, in which nothing can look like markup."""
    return json.dumps(value).replace("<", "\\u003c").encode()
