"""Figures of one run of a peer: time, processor time and memory of its processes, and lost tokens."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from load import LIMIT_S, MEASURES, Script

TICK = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


def processes() -> list[int]:
    """Return the ids of this process and all below it."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        parents[int(path.parent.name)] = int(fields[1])
    found = [os.getpid()]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def cpu_s() -> float:
    """Return the processor seconds of this process and all below it, ended ones included."""
    total = 0.0
    for pid in processes():
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(map(int, fields[11:15])) / TICK
    return total


def memory() -> int:
    """Return the resident bytes of this process and all below it, after what can be freed is."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    total = 0
    for pid in processes():
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
        except OSError:
            continue
    return total


def server_state(url: str) -> dict[str, Any]:
    """Return what the server of the engine has counted."""
    with urllib.request.urlopen(f"{url}/state", timeout=30) as response:
        found = json.load(response)
    found["sampled"] = {int(number): tokens for number, tokens in found["sampled"].items()}
    return found


class Run:
    """One run: a measure of a peer, from `begin` to `end`.

    Args:
        arguments: The measure, the file for the figures, and the URL of the engine's server or "".

    Attributes:
        measure: Name of the measure.
        load: Its load.
        script: Answers of the load.
        url: URL of the engine's server, without a path; "" if the engine is in this process.
    """

    def __init__(self, arguments: Sequence[str], tokenizer: Any) -> None:
        self.measure, out, self.url = arguments[0], Path(arguments[1]), arguments[2]
        self.load = MEASURES[self.measure]
        self.script = Script(self.load, tokenizer)
        self._out = out
        self._found: dict[int, list[int]] = {}
        self.figures: dict[str, Any] = {"measure": self.measure}
        self.count: Callable[[], Mapping[str, Any]] = lambda: server_state(self.url)

    @property
    def limit_s(self) -> float:
        """Seconds after which the run ends, whatever it has."""
        return LIMIT_S[self.measure]

    def begin(self) -> None:
        """Begin to count."""
        self._rss = memory() if self.measure == "memory" else 0
        self._before = dict(self.count())
        self._cpu, self._began = cpu_s(), time.monotonic()
        self._last = self._began

    @property
    def elapsed_s(self) -> float:
        """Seconds since the begin."""
        return time.monotonic() - self._began

    def deliver(self, number: int, sampled: list[int]) -> None:
        """Count a trajectory that the trainer would get, with the ids that it marks as sampled."""
        if number < self.load.count:
            self._last = time.monotonic()
            self._found[number] = sampled

    @property
    def is_complete(self) -> bool:
        """Whether all trajectories were delivered."""
        return len(self._found) == self.load.count

    @property
    def delivered(self) -> int:
        """Number of trajectories that were delivered."""
        return len(self._found)

    def hold(self) -> bool:
        """Measure the memory if all trajectories wait in the call that never returns.

        Returns:
            Whether they do.
        """
        turn = self.load.stuck_turn
        if turn is None or self.count()["answered"] - self._before["answered"] < self.load.count * (turn + 1):
            return False
        time.sleep(1.0)  # for what the last answers bring about in other threads and processes
        self.figures["memory_kb"] = round((memory() - self._rss) / self.load.count / 1024, 1)
        return True

    def end(self, engine_cpu_s: float = 0.0, **more: Any) -> None:
        """Write the figures.

        Args:
            engine_cpu_s: Processor seconds of the engine for one answer, if it is in this process.
            more: Further figures.
        """
        cpu = cpu_s() - self._cpu
        seconds = (self._last if self.is_complete else time.monotonic()) - self._began
        after = self.count()
        answers = after["answered"] - self._before["answered"]
        sampled = after["sampled"]
        kept = {number: len(ids) for number, ids in self._found.items()}
        wrong = sum(ids != self.script.sampled(number) for number, ids in self._found.items())
        self.figures |= {
            "seconds": round(seconds, 2),
            "makespan_s": round(self._last - self._began, 2) if self.is_complete else None,
            "cpu_s": round(cpu, 2),
            "answers": answers,
            "answers_per_s": round(answers / seconds, 1),
            "cpu_ms_per_answer": round(1e3 * (cpu / answers - engine_cpu_s), 3) if answers else None,
            "engine_cpu_ms": round(1e3 * engine_cpu_s, 3),
            "asked": after["asked"] - self._before["asked"],
            "trajectories": len(kept),
            "of": self.load.count,
            "tokens_lost": sum(sampled.get(number, 0) - size for number, size in kept.items()),
            "tokens_kept": sum(kept.values()),
            "wrong": wrong,
            "limit_s": self.limit_s,
            **more,
        }
        self._out.write_text(json.dumps(self.figures))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # threads and processes of a peer that never end do not matter any more
