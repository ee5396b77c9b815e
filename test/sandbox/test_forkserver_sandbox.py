"""Attacks on the fork server below the interpreter: commands, files, zygotes, and their users."""
# ruff: noqa: E501  code for inside is easier to read in few long lines

import asyncio
import contextlib
import os
import resource
import threading

import pytest
from helpers.limit import limit

from torchrl_agentic.repl import ForkServerRepl
from torchrl_agentic.sandbox import ForkServerSandbox, ResourceLimits, SandboxError
from torchrl_agentic.sandbox.forkserver_sandbox import cannot_work
from torchrl_agentic.sandbox.zygote_pool import close_pools

pytestmark = pytest.mark.skipif(cannot_work() is not None, reason=f"no fork server here: {cannot_work()}")
_numbers = iter(range(1000))


def of_its_own(**limits: object) -> ForkServerSandbox:
    """Return a sandbox with settings that no other test uses, so that it has its own zygotes."""
    return ForkServerSandbox(ResourceLimits(disk_total_bytes=(8 << 20) + 4096 * next(_numbers), **limits))


async def up(sandbox: ForkServerSandbox) -> None:
    async with asyncio.timeout(limit(20)):
        assert (await sandbox.run(["echo", "up"])).stdout == "up\n"


# Commands and paths that a model may send.


@pytest.mark.parametrize(
    "path", ["x" * 5000, "d/" * 3000 + "f", "\x01\x7f", "a\nb", "é💥", "-rf", "dev/null/x"]
)
async def test_odd_paths_are_answered(path: str) -> None:
    async with of_its_own() as sandbox:
        for ask in (sandbox.read_file(path), sandbox.write_file(path, b"x")):
            with contextlib.suppress(OSError):
                await ask
        await up(sandbox)


@pytest.mark.parametrize("op", ["read", "write"])
async def test_a_path_with_half_a_surrogate_pair_is_answered(op: str) -> None:
    async with of_its_own() as sandbox:
        with pytest.raises((OSError, ValueError)):
            await (sandbox.read_file("\ud800") if op == "read" else sandbox.write_file("\ud800", b"x"))
        await up(sandbox)


@pytest.mark.parametrize(
    "argv",
    [["x" * 5000], ["/"], ["./"], ["echo", "x" * 200_000], ["true", *(["x"] * 100_000)], ["true", *["x" * 90_000] * 40],
     ["true", "\x01", "\udc80"[:0], "é💥"], ["/proc/self/exe", "-c", ""]],
    ids=["long name", "root", "folder", "long", "many", "long and many", "odd", "exe"],
)  # fmt: skip
async def test_odd_commands_are_answered(argv: list[str]) -> None:
    async with of_its_own() as sandbox:
        assert isinstance((await sandbox.run(argv)).exit_code, int)
        await up(sandbox)


@pytest.mark.parametrize(("argv", "cwd"), [([""], None), (["true"], "\ud800")], ids=["no name", "cwd"])
async def test_odd_commands_show_no_traceback_of_ours(argv: list[str], cwd: str | None) -> None:
    async with of_its_own() as sandbox:
        try:
            result = await sandbox.run(argv, cwd=cwd)
        except (OSError, ValueError):
            return
        assert "Traceback" not in result.stderr


async def test_too_long_command_is_rejected() -> None:
    async with of_its_own() as sandbox:
        with contextlib.suppress(ValueError):
            assert (await sandbox.run(["echo", "x" * (81 << 20)])).exit_code
        await up(sandbox)


async def test_a_large_output_that_was_allowed_comes_back() -> None:
    async with of_its_own(output_bytes=8 << 20) as sandbox:
        code = "head -c 8000000 /dev/zero | tr '\\0' '\\377' | tee /dev/stderr"
        assert len((await sandbox.run(["sh", "-c", code])).stdout) == 8_000_000


async def test_files_that_change_while_they_are_read_are_answered() -> None:
    async with of_its_own() as sandbox:
        code = "while :; do mkdir -p d; echo x > d/f; rm -r d; ln -s /etc d; rm d; done"
        task = asyncio.create_task(sandbox.run(["sh", "-c", code], limits=ResourceLimits(wall_seconds=1)))
        while not task.done():
            with contextlib.suppress(OSError):
                assert (await sandbox.read_file("d/f")) in (b"", b"x\n")
        assert task.result().timed_out


# Races with processes that are being created.

RACE = """
import os, time
def race(name, flags, data, seconds):
    won, until, opened = [], time.time() + seconds, os.open
    while time.time() < until and not won:
        top = max(int(p) for p in os.listdir('/proc') if p.isdigit())
        path = '/proc/%d/%s' % (top + 1, name)
        for _ in range(3000):
            try: fd = opened(path, flags)
            except OSError: continue
            try:
                if data: os.write(fd, data)
                if data or '/ns/' in path or os.read(fd, 9): won.append(path)  # what has ended reads as empty
            except OSError: pass
            os.close(fd); break
    return won
"""


async def test_writing_the_identity_of_a_new_command_gains_nothing() -> None:
    """Code may write it as the same user; the command then starts again, with all others stopped."""
    async with ForkServerRepl(of_its_own()) as repl:
        await repl.execute(RACE)
        task = asyncio.create_task(
            repl.execute("race('uid_map', os.O_WRONLY, b'0 1000 1', 5)", timeout=limit(20))
        )
        while not task.done():
            await up(repl.sandbox)
        assert (await task).status == "ok"


@pytest.mark.parametrize("name", ["environ", "maps", "ns/user", "ns/mnt", "stack"])
async def test_a_new_command_cannot_be_looked_into(name: str) -> None:
    """Its user would allow it for a moment; Landlock denies it."""
    async with ForkServerRepl(of_its_own()) as repl:
        await repl.execute(RACE)
        task = asyncio.create_task(repl.execute(f"race({name!r}, os.O_RDONLY, b'', 0.7)", timeout=limit(20)))
        while not task.done():
            await up(repl.sandbox)
        assert (await task).value == "[]"


async def test_code_in_the_interpreter_cannot_signal_commands() -> None:
    async with ForkServerRepl(of_its_own()) as repl:
        task = asyncio.create_task(repl.sandbox.run(["sleep", "0.6"]))
        await asyncio.sleep(0.1)
        code = (
            "import os, signal\nhit = []\nfor p in os.listdir('/proc'):\n"
            "    if p.isdigit() and int(p) != os.getpid() and p != '1':\n"
            "        try: os.kill(int(p), signal.SIGKILL); hit.append(p)\n        except PermissionError: pass\nhit"
        )
        assert (await repl.execute(code)).value == "[]"
        assert (await task).exit_code == 0


async def test_command_cannot_kill_its_supervisor() -> None:
    async with of_its_own() as sandbox:
        result = await sandbox.run(["sh", "-c", "kill -9 1; kill -STOP 1; kill -9 -1; echo here; exit 5"])
        assert result.exit_code in (5, -9)
        await up(sandbox)


# Memory that is not counted elsewhere.


async def test_memory_files_count_as_memory() -> None:
    async with ForkServerRepl(of_its_own(memory_total_bytes=128 << 20)) as repl:
        code = (
            "import os, time\nfds = [os.memfd_create('m') for _ in range(6)]\n"
            "for fd in fds:\n    for _ in range(50): os.write(fd, bytes(1 << 20))\ntime.sleep(0.6)"
        )
        result = await repl.execute(code, timeout=limit(10))
        assert result.status in ("limit", "error")


async def test_files_in_dev_count() -> None:
    async with ForkServerRepl(of_its_own()) as repl:
        code = (
            "import os\ntry:\n    open('/dev/b', 'wb').write(bytes(60 << 20))\nfinally: os.unlink('/dev/b')"
        )
        assert (await repl.execute(code, timeout=limit(10))).status == "error"


async def test_memory_of_background_processes_is_bounded_between_cells() -> None:
    async with ForkServerRepl(of_its_own(memory_total_bytes=128 << 20)) as repl:
        code = (
            "import os, time\nfor _ in range(3):\n    if os.fork() == 0:\n"
            "        time.sleep(0.2); x = bytearray(90 << 20); time.sleep(1000)"
        )
        await repl.execute(code, timeout=limit(5))
        await asyncio.sleep(1)
        code = "import os; sum(int(open('/proc/%s/statm' % p).read().split()[1]) << 12 for p in os.listdir('/proc') if p.isdigit())"
        assert int((await repl.execute(code)).value or 0) < 200 << 20


# Resources that all processes of a user share.

IN_FLIGHT = """
import array, os, socket
kept, fd = [], os.open('/dev/null', os.O_RDONLY)
try:
    for _ in range(400):
        pair = socket.socketpair(); kept.append(pair)
        for _ in range(10): pair[0].sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [fd] * 100))])
except OSError: pass
"""


async def test_file_descriptors_in_flight_of_one_trajectory_do_not_affect_others() -> None:
    """The trainer's limit of open files is the usual default.

    The spares of other settings, from earlier tests in this process, would use it up.
    """
    close_pools()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    try:
        sandbox = of_its_own()
        async with ForkServerRepl(sandbox) as one, ForkServerRepl(sandbox.fresh()) as other:
            await one.execute(IN_FLIGHT, timeout=limit(5))
            try:
                await other.sandbox.write_file("f", b"x")
                (clone,) = await other.sandbox.clones(1)
                await clone.close()
            except SandboxError as error:
                pytest.fail(str(error))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_a_zygote_that_cannot_fork_keeps_its_trajectories() -> None:
    uid = os.geteuid() or 65534
    running = 0
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid in (uid, 0):
                with open(f"/proc/{name}/status") as file:
                    found = dict(line.split(":", 1) for line in file if ":" in line)
                running += int(found["Threads"]) if int(found["Uid"].split()[0]) == uid else 0
        except OSError:
            pass
    before = resource.getrlimit(resource.RLIMIT_NPROC)
    # Tests that run beside this one start and end processes of the same user meanwhile.
    resource.setrlimit(resource.RLIMIT_NPROC, (running + 300, before[1]))
    opened: list[ForkServerSandbox] = []
    try:
        first = of_its_own()
        async with first:
            for _ in range(400):
                sandbox = first.fresh()
                try:
                    await sandbox.open()
                    opened.append(sandbox)
                except SandboxError:
                    break
            else:
                pytest.fail("no limit was reached")
            for sandbox in (first, *opened):
                await sandbox.write_file("f", b"x")
    finally:
        resource.setrlimit(resource.RLIMIT_NPROC, before)
        for sandbox in opened:
            await sandbox.close()


# The host's side.


async def test_a_forked_trainer_can_open_sandboxes() -> None:
    async with of_its_own() as first:
        pid = os.fork()
        if pid == 0:
            try:
                done = threading.Event()

                def go() -> None:
                    async def use() -> None:
                        async with first.fresh() as sandbox:
                            await up(sandbox)
                        done.set()

                    asyncio.run(use())

                threading.Thread(target=go, daemon=True).start()
                fine = done.wait(limit(10))
                if fine:
                    close_pools()
            finally:
                os._exit(0 if fine else 7)
        _, status = await asyncio.to_thread(os.waitpid, pid, 0)
        await up(first)
        assert os.WEXITSTATUS(status) == 0


async def test_two_event_loops_use_one_pool() -> None:
    first, found = of_its_own(), []

    def use() -> None:
        async def all_of_them() -> None:
            for _ in range(10):
                async with ForkServerRepl(first.fresh()) as repl:
                    found.append((await repl.execute("6 * 7")).value)

        asyncio.run(all_of_them())

    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    assert found == ["42"] * 30
