"""The cost of an interpreter per trajectory: opening, a cell, a clone, and a thousand at once."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchrl_agentic.repl import ForkServerRepl, Repl, SubprocessRepl
from torchrl_agentic.sandbox import BubblewrapSandbox, ForkServerSandbox, ResourceLimits, zygote_pool
from torchrl_agentic.sandbox.forkserver_sandbox import cannot_work

pytestmark = pytest.mark.skipif(cannot_work() is not None, reason=f"no fork server here: {cannot_work()}")
LIBRARIES = ("numpy", "pandas")
IMPORT = "import numpy, pandas"
LIVE, CELLS = 1000, 4
FLOOD = "head -c 1073741824 /dev/zero"


def _forked(preload: tuple[str, ...] = ()) -> Repl:
    return ForkServerRepl(ForkServerSandbox(preload=preload))


def _alone() -> Repl:
    return SubprocessRepl(BubblewrapSandbox())


async def _live(make: Callable[[], Repl], code: str) -> Repl:
    repl = make()
    await repl.open()
    result = await repl.execute(code)
    assert result.status == "ok", result
    return repl


CONTENDERS: dict[str, tuple[Callable[[], Repl], int]] = {
    "fork server": (_forked, 0),
    "fork server, one stands ready": (_forked, 4),
    "bubblewrap and Python each": (_alone, 0),
}


@pytest.mark.parametrize("which", CONTENDERS)
def test_open(benchmark: Any, monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    benchmark.group = "REPL: until the first cell has run"
    _measure_open(benchmark, monkeypatch, *CONTENDERS[which], "1")


@pytest.mark.parametrize("code", ["1", IMPORT], ids=["plain", "libraries"])
def test_start_of_a_bare_one(benchmark: Any, code: str) -> None:
    """The lower bound of other designs: bubblewrap around a Python process per cell."""
    benchmark.group = "REPL: until the first cell has run" + (", with numpy and pandas" * (code == IMPORT))
    benchmark.extra_info["which"] = "bubblewrap around a Python that only runs it"
    argv = [shutil.which("bwrap") or "bwrap", "--unshare-all", "--ro-bind", "/", "/", "--dev", "/dev"]
    argv += ["--proc", "/proc", "--", sys.executable, "-c", code]
    benchmark.pedantic(lambda: subprocess.run(argv, check=True), rounds=40, warmup_rounds=2)


@pytest.mark.parametrize("which", CONTENDERS)
def test_open_with_libraries(benchmark: Any, monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    benchmark.group = "REPL: until the first cell has run, with numpy and pandas"
    make, spares = CONTENDERS[which]
    loaded = _alone if make is _alone else lambda: _forked(LIBRARIES)
    _measure_open(benchmark, monkeypatch, loaded, spares, IMPORT)


def _measure_open(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, make: Callable[[], Repl], spares: int, code: str
) -> None:
    monkeypatch.setattr(zygote_pool, "SPARES", spares)
    repls: list[Repl] = []

    async def close() -> None:
        while repls:
            await repls.pop().close()
        await asyncio.sleep(0.05)  # until the next ones stand ready

    with asyncio.Runner() as runner:
        for _ in range(8):  # the zygote is up, and what stood ready from before is used up
            repls.append(runner.run(_live(make, code)))
        runner.run(close())
        benchmark.pedantic(
            lambda: repls.append(runner.run(_live(make, code))),
            setup=lambda: runner.run(close()),
            rounds=40,
        )
        runner.run(close())


@pytest.mark.parametrize("which", ["fork server", "bubblewrap and Python each"])
def test_cell(benchmark: Any, which: str) -> None:
    benchmark.group = "REPL: one cell, x = 1"
    with asyncio.Runner() as runner:
        repl = runner.run(_live(_forked if which == "fork server" else _alone, "1"))
        benchmark.pedantic(lambda: runner.run(repl.execute("x = 1")), rounds=500, warmup_rounds=20)
        runner.run(repl.close())


@pytest.mark.parametrize("until", ["fork() has returned", "a first cell has run in each"])
@pytest.mark.parametrize("which", ["1 clone", "each of 8 clones", "cells run again in 1 fresh one"])
def test_fork(benchmark: Any, which: str, until: str) -> None:
    benchmark.group = f"REPL: go on in a copy, from a state of 20 MB, until {until}"
    n = 8 if "8" in which else 1
    benchmark.extra_info |= {"which": which, "divide": n}
    clones: list[Repl] = []

    async def close() -> None:
        await asyncio.gather(*(clone.execute("1") for clone in clones))
        while clones:
            await clones.pop().close()

    async def fork(repl: Repl) -> None:
        clones.extend(await repl.fork(n))
        if "cell" in until:
            await asyncio.gather(*(clone.execute("1") for clone in clones))

    with asyncio.Runner() as runner:
        make = _alone if "again" in which else _forked
        repl = runner.run(_live(make, "state = [bytes(1 << 20) for _ in range(20)]; None"))
        rounds = 8  # each moves the original one namespace deeper
        benchmark.pedantic(
            lambda: runner.run(fork(repl)),
            setup=lambda: runner.run(close()),
            rounds=rounds,
        )
        runner.run(close())
        runner.run(repl.close())


def test_bare_fork(benchmark: Any) -> None:
    """The cost of a fork that shares namespaces and files with the original, without isolation."""
    benchmark.group = "REPL: a state of 20 MB, in a cell"
    fork = "import os\npid = os.fork()\nif not pid: os._exit(0)\nos.waitpid(pid, 0); None"
    with asyncio.Runner() as runner:
        repl = runner.run(_live(_forked, "state = [bytes(1 << 20) for _ in range(20)]; None"))
        benchmark.pedantic(lambda: runner.run(repl.execute(fork)), rounds=40, warmup_rounds=2)
        runner.run(repl.close())


def test_a_thousand_at_once(benchmark: Any) -> None:
    """Open 1,000, run 4,000 cells, close all, and check that no file or process is left."""
    benchmark.group = f"REPL: {LIVE} live ones"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    async def run() -> float:
        repls = [_forked() for _ in range(LIVE)]
        await asyncio.gather(*(repl.open() for repl in repls))
        loop = asyncio.get_running_loop()
        began = loop.time()

        async def work(repl: Repl) -> None:
            for _ in range(CELLS):
                assert (await repl.execute("x = 1")).status == "ok"

        await asyncio.gather(*map(work, repls))
        seconds = loop.time() - began
        await asyncio.gather(*(repl.close() for repl in repls))
        return LIVE * CELLS / seconds

    try:
        files, processes = _open_files(), _processes()
        with asyncio.Runner() as runner:
            rate = benchmark.pedantic(lambda: runner.run(run()), rounds=1)
        benchmark.extra_info["cells per second"] = round(rate)
        zygote_pool.close_pools()
        assert _open_files() <= files
        assert _processes() <= processes
        print(f"\n{LIVE} live, {LIVE * CELLS} cells: {rate:.0f} cells/s")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("preload", [(), LIBRARIES], ids=["plain", "libraries"])
def test_memory_of_an_idle_one(benchmark: Any, preload: tuple[str, ...]) -> None:
    """Measure the proportional set size of 100 more, supervisor and worker, after their first cell."""
    benchmark.group = "REPL: memory"

    async def run() -> float:
        first = await _live(lambda: _forked(preload), "1")
        before = _memory()
        more = [await _live(lambda: _forked(preload), "1") for _ in range(100)]
        each = (_memory() - before) / len(more)
        await asyncio.gather(*(repl.close() for repl in [first, *more]))
        return each

    with asyncio.Runner() as runner:
        each = benchmark.pedantic(lambda: runner.run(run()), rounds=1)
    benchmark.extra_info["MiB"] = round(each / 2**20, 2)
    print(f"\n{preload or 'nothing'} loaded: {each / 2**20:.2f} MiB each")


@pytest.mark.parametrize("which", ["fork server", "bubblewrap"])
def test_flood(benchmark: Any, which: str) -> None:
    """Check that 1 GiB of output costs the trainer only the memory of the part that is kept."""
    benchmark.group = "sandbox: 1 GiB of output"
    make = ForkServerSandbox if which == "fork server" else BubblewrapSandbox

    async def run() -> int:
        async with make(ResourceLimits(wall_seconds=60)) as sandbox:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            result = await sandbox.run(["sh", "-c", FLOOD])
            assert result.exit_code == 0
            assert result.truncated
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before

    with asyncio.Runner() as runner:
        grown = benchmark.pedantic(lambda: runner.run(run()), rounds=1)
    benchmark.extra_info["MiB of the trainer's"] = round(grown / 1024, 1)
    print(f"\n{which}: the trainer grew by {grown / 1024:.1f} MiB")


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _descendants() -> list[int]:
    above = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            above[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = {os.getpid()}
    while more := {pid for pid, parent in above.items() if parent in found} - found:
        found |= more
    return sorted(found)


def _processes() -> int:
    return len(_descendants())


def _memory() -> int:
    """Return the proportional set size of all descendants of this process, in bytes."""
    total = 0
    for pid in _descendants()[1:]:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024
    return total
