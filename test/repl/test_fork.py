"""Clones of an interpreter continue from its state, and share nothing with it and each other."""

import asyncio
import os
import warnings
from collections.abc import Sequence

import pytest
from helpers.limit import limit

from torchrl_agentic.errors import FilesNotCopied, InfrastructureError, SandboxError
from torchrl_agentic.repl import ForkServerRepl, Repl, SubprocessRepl
from torchrl_agentic.sandbox import BubblewrapSandbox, ForkServerSandbox, ResourceLimits, Sandbox
from torchrl_agentic.sandbox.bubblewrap import why_not
from torchrl_agentic.sandbox.forkserver_sandbox import cannot_work
from torchrl_agentic.sandbox.inside import files
from torchrl_agentic.sandbox.zygote_pool import ZygotePool

KINDS = [
    pytest.param(
        lambda: ForkServerRepl(),
        marks=pytest.mark.skipif(cannot_work() is not None, reason=str(cannot_work())),
        id="forkserver",
    ),
    pytest.param(
        lambda: SubprocessRepl(BubblewrapSandbox()),
        marks=pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
        id="replayed",
    ),
]
native = pytest.mark.skipif(cannot_work() is not None, reason=f"no fork server here: {cannot_work()}")


async def _all_close(repls: list[Repl]) -> None:
    await asyncio.gather(*(repl.close() for repl in repls))


@pytest.mark.parametrize("make", KINDS)
async def test_clones_have_state_and_files_and_go_their_own_ways(make):
    async with make() as repl:
        await repl.execute("import os\nx = [0]\nos.makedirs('d/e')\nopen('d/e/f', 'w').write('a')")
        clones = await repl.fork(3)
        for number, one in enumerate([repl, *clones]):
            result = await one.execute(
                f"x.append({number}); open('d/e/f', 'a').write('{number}'); x, open('d/e/f').read()"
            )
            assert result.value == f"([0, {number}], 'a{number}')"
        for number, one in enumerate([repl, *clones]):
            assert (await one.execute("x, open('d/e/f').read()")).value == f"([0, {number}], 'a{number}')"
        await _all_close(clones)
        assert (await repl.execute("x")).value == "[0, 0]"


@pytest.mark.parametrize("make", KINDS)
async def test_clones_outlive_the_original_and_can_be_cloned(make):
    repl = make()
    await repl.open()
    await repl.execute("x = 1")
    (clone,) = await repl.fork()
    await repl.close()
    await clone.execute("x += 1")
    (grandchild,) = await clone.fork()
    await clone.close()
    assert (await grandchild.execute("x")).value == "2"
    await grandchild.close()
    assert not grandchild.sandbox.is_open


@pytest.mark.parametrize("make", KINDS)
async def test_random_numbers_continue_equally_in_clones(make):
    async with make() as repl:
        await repl.execute("import random; random.random()")
        clones = await repl.fork(2)
        numbers = {(await one.execute("random.random()")).value for one in [repl, *clones]}
        assert len(numbers) == 1
        await _all_close(clones)


@native
async def test_state_that_cannot_be_replayed_is_cloned():
    """A clock, and a counter in a closure: cells that run again would have other values."""
    async with ForkServerRepl() as repl:
        seen = (await repl.execute("import time; t = time.time_ns(); t")).value
        (clone,) = await repl.fork()
        assert (await clone.execute("t")).value == seen
        assert clone.sandbox.has_live_clone
        await clone.close()


@native
async def test_open_file_continues_in_the_copy_of_the_clone():
    async with ForkServerRepl() as repl:
        await repl.execute("f = open('log', 'w+'); f.write('one '); f.flush()")
        (clone,) = await repl.fork()
        await clone.execute("f.write('clone'); f.flush()")
        await repl.execute("f.write('original'); f.flush()")
        assert (await clone.execute("open('log').read()")).value == "'one clone'"
        assert (await repl.execute("open('log').read()")).value == "'one original'"
        await clone.close()


@native
async def test_neither_sees_a_process_of_the_other():
    async with ForkServerRepl() as repl:
        await repl.execute("import os, subprocess")
        clones = await repl.fork(2)
        for one in [repl, *clones]:
            code = "p = subprocess.Popen(['sleep', '100']); [n for n in os.listdir('/proc') if n.isdigit()]"
            assert (await one.execute(code)).value == "['1', '2', '3']"
        await _all_close(clones)


@native
@pytest.mark.parametrize(
    "code",
    [
        "import mmap; m = mmap.mmap(-1, 4096)",
        "import os; fd = os.memfd_create('m'); import mmap; m = mmap.mmap(os.dup(fd), 0) if 0 else None",
        "open('f', 'wb').write(bytes(4096)); import mmap; f = open('f', 'r+b'); m = mmap.mmap(f.fileno(), 0)",
    ],
    ids=["anonymous", "none", "file"],
)
async def test_shared_memory_is_never_shared_by_clones(code: str):
    """It cannot be cloned, so the cells run again."""
    async with ForkServerRepl() as repl:
        await repl.execute(code)
        (clone,) = await repl.fork()
        assert (await clone.execute("1 + 1")).value == "2"
        assert clone.sandbox.has_live_clone is ("memfd" in code)
        if "memfd" not in code:
            await repl.execute("m[0:1] = b'x'")
            assert (await clone.execute("m[0:1]")).value == "b'\\x00'"
        await clone.close()
        assert (await repl.execute("1 + 1")).value == "2"


@native
async def test_pipes_and_sockets_are_closed_in_clones():
    async with ForkServerRepl() as repl:
        await repl.execute("import os, socket; r, w = os.pipe(); a, b = socket.socketpair()")
        (clone,) = await repl.fork()
        await clone.execute("os.write(w, b'secret'); a.send(b'secret') if 0 else None")
        result = await repl.execute("os.set_blocking(r, False); os.read(r, 10)", timeout=2)
        assert "secret" not in result.text
        await clone.close()


@native
async def test_clone_can_be_interrupted_killed_and_restarted():
    async with ForkServerRepl() as repl:
        await repl.execute("x = 1")
        (clone,) = await repl.fork()
        assert (await clone.execute("x")).value == "1"  # it exists now, so that its time is that of the cells
        assert (await clone.execute("while True: pass", timeout=0.2)).message.endswith("state is kept")
        assert (await clone.execute("x")).value == "1"
        hard = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
        assert (await clone.execute(hard, timeout=limit(0.5))).state_lost
        assert (await clone.execute("'x' in globals()")).value == "False"
        died = await clone.execute("import os; os._exit(3)")
        assert (died.status, died.state_lost) == ("died", True)
        await clone.close()


class _Held(ForkServerSandbox):
    """Makes clones only after an event."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.let = asyncio.Event(), asyncio.Event()

    async def clones(self, n: int) -> Sequence[Sandbox]:
        self.asked.set()
        await self.let.wait()
        return await super().clones(n)


async def _held() -> tuple[ForkServerRepl, _Held]:
    sandbox = _Held()
    repl = ForkServerRepl(sandbox)
    await repl.open()
    await repl.execute("x = 1; open('f', 'w').write('old'); None")
    return repl, sandbox


@native
async def test_fork_returns_before_the_copies_exist_and_their_first_use_waits():
    repl, sandbox = await _held()
    clones = await repl.fork(2)
    uses = [repl.execute("x += 1; x"), *(clone.execute("x") for clone in clones)]
    uses += [repl.sandbox.write_file("f", b"new"), clones[0].sandbox.read_file("f")]
    uses += [clones[1].sandbox.run(["cat", "f"])]
    waiting = [asyncio.create_task(use) for use in uses]
    await sandbox.asked.wait()
    assert clones[0].sandbox.is_open
    assert not any(task.done() for task in waiting)
    sandbox.let.set()
    original, first, second, _, read, ran = await asyncio.gather(*waiting)
    assert (original.value, first.value, second.value) == ("2", "1", "1")
    assert (read, ran.stdout) == (b"old", "old")
    assert await repl.sandbox.read_file("f") == b"new"
    assert clones[0].sandbox.has_live_clone
    await _all_close([repl, *clones])


@native
async def test_waiting_for_a_copy_counts_against_the_time_of_a_cell():
    repl, sandbox = await _held()
    (clone,) = await repl.fork()
    for one in (repl, clone):
        late = await one.execute("x", timeout=0.01)
        assert (late.status, late.execution_count) == ("timeout", -1)
    sandbox.let.set()
    assert (await clone.execute("x")).value == "1"
    await _all_close([repl, clone])


@native
@pytest.mark.parametrize("first", ["original", "clone"])
async def test_closing_waits_for_copies_and_leaves_nothing(first: str):
    repl, sandbox = await _held()
    (clone,) = await repl.fork()
    one, other = (repl, clone) if first == "original" else (clone, repl)
    closing = asyncio.create_task(one.close())
    await sandbox.asked.wait()
    assert not closing.done()
    sandbox.let.set()
    await closing
    assert not one.sandbox.is_open
    assert (await other.execute("x")).value == "1"
    await other.close()
    assert not other.sandbox.is_open


@native
async def test_use_of_a_failed_copy_raises_with_the_reason():
    class Failing(ForkServerSandbox):
        async def clones(self, n: int) -> Sequence[Sandbox]:
            raise SandboxError("no room")

    async with ForkServerRepl(Failing()) as repl:
        await repl.execute("x = 1")
        (clone,) = await repl.fork()
        with pytest.raises(InfrastructureError, match="a copy could not be made: no room"):
            await clone.execute("x")
        with pytest.raises(InfrastructureError, match="no room"):
            await clone.sandbox.run(["true"])
        with pytest.raises(InfrastructureError, match="no room"):
            await clone.sandbox.open()
        assert not clone.sandbox.is_open
        await clone.close()
        assert (await repl.execute("x")).value == "1"


@native
@pytest.mark.parametrize("how", ["once", "twice", "two at once"])
async def test_a_cancelled_close_leaves_nothing(how: str):
    repl, sandbox = await _held()
    (clone,) = await repl.fork()
    closing = [asyncio.create_task(clone.close()) for _ in range(2 if how == "two at once" else 1)]
    await sandbox.asked.wait()
    closing[-1].cancel()
    if how == "twice":
        await asyncio.sleep(0)
        closing[-1].cancel()
    await asyncio.sleep(0)
    sandbox.let.set()
    await asyncio.wait(closing)
    while clone.sandbox.is_open and how == "twice":  # it continues without the cancelled caller
        await asyncio.sleep(0.01)
    assert not clone.sandbox.is_open
    await repl.close()


@native
async def test_waiting_for_copies_includes_later_ones():
    """Otherwise it would use the old connection of the original, and be lost."""
    repl, sandbox = await _held()
    clones = await repl.fork()
    writing = asyncio.create_task(repl.sandbox.write_file("f", b"new"))
    forking = asyncio.create_task(repl.fork())
    await sandbox.asked.wait()
    sandbox.let.set()
    clones += await forking
    await writing
    assert await repl.sandbox.read_file("f") == b"new"
    assert [await clone.sandbox.read_file("f") for clone in clones] == [b"old", b"old"]
    await _all_close([repl, *clones])


@native
@pytest.mark.parametrize("begun", [False, True])
async def test_cancelled_copies_report_the_cancellation(begun: bool):
    repl, sandbox = await _held()
    (clone,) = await repl.fork()
    if begun:
        await sandbox.asked.wait()
    assert sandbox.cloning is not None
    sandbox.cloning.cancel()
    for use in (clone.execute("x"), clone.sandbox.open(), clone.sandbox.read_file("f")):
        with pytest.raises(InfrastructureError, match="could not be made: cancelled"):
            await use
    assert not clone.sandbox.is_open
    await clone.close()
    assert (await repl.execute("x")).value == "1"
    await repl.close()


@native
async def test_an_original_that_may_be_gone_is_lost():
    """A copying that is cancelled after its request may have completed."""
    async with ForkServerRepl() as repl:
        await repl.execute("x = 1")
        cloning = asyncio.create_task(repl.sandbox.clones(1))
        await asyncio.sleep(0)
        cloning.cancel()
        with pytest.raises(InfrastructureError):
            await repl.execute("x")


@native
async def test_the_interpreter_of_a_copy_that_is_not_there_yet_is_taken():
    repl, sandbox = await _held()
    (clone,) = await repl.fork()
    assert clone.cells == repl.cells
    with pytest.raises(SandboxError, match="in use"):
        await ForkServerRepl(clone.sandbox).open()
    sandbox.let.set()
    await _all_close([repl, clone])


@native
async def test_failed_fork_leaves_no_copies(monkeypatch):
    """Of nine, eight are made at once."""
    prepare, made = ZygotePool.prepare, []

    class Remembered(ForkServerSandbox):
        def fresh(self):
            made.append(super().fresh())
            return made[-1]

    def prepare_eight(pool, zygote, n, handed):
        if n == 2:  # the ninth, and the original
            raise OSError("no room")
        return prepare(pool, zygote, n, handed)

    monkeypatch.setattr(ZygotePool, "prepare", prepare_eight)
    async with ForkServerRepl(Remembered()) as repl:
        clones = await repl.fork(9)
        with pytest.raises(InfrastructureError, match="no room"):
            await clones[0].execute("1")
        assert len(made) == 8 + len(clones)
        assert not any(one.is_open for one in [*made, *(clone.sandbox for clone in clones)])
        await _all_close(clones)


@native
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize(
    ("bound", "value", "words"),
    [("MAX_COPIED", 30, "more than 30 files"), ("MAX_COPY_S", 0, "longer than 0 s")],
)
async def test_files_that_do_not_fit_are_the_fault_of_the_code(monkeypatch, bound, value, words):
    monkeypatch.setattr(files, bound, value)
    async with SubprocessRepl(BubblewrapSandbox()) as repl:
        await repl.execute("for n in range(20): open(f'f{n}', 'w').close(); __import__('os').mkdir(f'd{n}')")
        with pytest.raises(FilesNotCopied, match=words):
            await repl.fork()
        assert (await repl.execute("1 + 1")).value == "2"
    large = SubprocessRepl(BubblewrapSandbox(ResourceLimits(disk_total_bytes=1 << 20)))
    monkeypatch.undo()
    async with large as repl:
        await repl.execute("open('big', 'wb').write(bytes(2 << 20))")
        with pytest.raises(FilesNotCopied, match="larger than disk_total_bytes"):
            await repl.fork()


@native
async def test_a_copy_whose_files_do_not_fit_says_that_the_code_is_at_fault():
    async with ForkServerRepl() as repl:
        await repl.execute("import mmap; shared = mmap.mmap(-1, 4096)")  # so that only files can be copied
        await repl.execute("import os; open('big', 'wb').write(os.urandom(40 << 20))")
        (copy,) = await repl.fork()
        with pytest.raises(FilesNotCopied, match="could not be made: files cannot be copied"):
            await copy.execute("1")
        assert (await repl.execute("1 + 1")).value == "2"
        await copy.close()


async def test_invalid_number_of_copies_is_rejected():
    async with ForkServerRepl() as repl:
        with pytest.raises(TypeError):
            await repl.fork("2")  # pyright: ignore[reportArgumentType]
        assert (await repl.execute("1")).value == "1"


@native
async def test_an_interrupt_while_copies_are_made_does_not_wait_for_the_next_cell():
    repl, sandbox = await _held()
    (clone,) = await repl.fork()
    running = asyncio.create_task(repl.execute("x"))
    await sandbox.asked.wait()
    await asyncio.wait_for(repl.interrupt(), limit(5))
    sandbox.let.set()
    assert (await running).value == "1"
    await _all_close([repl, clone])


@native
async def test_a_copy_can_be_forked_before_it_is_there():
    repl, sandbox = await _held()
    (clone,) = await repl.fork()
    forking = asyncio.create_task(clone.fork())
    sandbox.let.set()
    (grandchild,) = await forking
    assert (await grandchild.execute("x")).value == "1"
    await _all_close([repl, clone, grandchild])


@native
async def test_cloning_works_beyond_the_nesting_limit_of_namespaces():
    async with ForkServerRepl() as repl:
        await repl.execute("x = 0")
        for _ in range(22):
            (clone,) = await repl.fork()
            await repl.execute("x += 1")
            await clone.close()
        assert (await repl.execute("x")).value == "22"


def test_the_file_descriptors_of_clones_come_back():
    async def many() -> None:
        async with ForkServerRepl() as repl:
            await repl.execute("x = 1")
            for _ in range(5):
                await _all_close(await repl.fork(4))

    if cannot_work() is not None:
        pytest.skip(f"no fork server here: {cannot_work()}")
    asyncio.run(many())
    before = len(os.listdir("/proc/self/fd"))
    with warnings.catch_warnings():
        asyncio.run(many())
    assert len(os.listdir("/proc/self/fd")) <= before
