"""The limits: code that exceeds them is stopped, at no cost to the trainer.

Each attack is bounded itself. An unbounded one comes after a case that has proved its limit.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Awaitable, Callable
from dataclasses import replace

from torchrl_agentic.sandbox.base import Sandbox, SandboxResult
from torchrl_agentic.sandbox.conformance.attack_cases import check_attacks_stopped, python
from torchrl_agentic.sandbox.conformance.base import HANG_S, CaseGroup
from torchrl_agentic.sandbox.conformance.host_cases import (
    check_gone,
    forget_peak_memory,
    new_mark,
    peak_memory,
)
from torchrl_agentic.sandbox.resource_limits import ResourceLimits

group = CaseGroup("limits")
MIB = 1 << 20
TOGETHER = ResourceLimits(memory_bytes=200 * MIB, memory_total_bytes=256 * MIB, wall_seconds=15)
HELD_S = 3
"""Seconds for which a process keeps memory that it should not have got."""


@group.case("cpu", limits=ResourceLimits(cpu_seconds=1, wall_seconds=30))
async def processor_time_is_bounded(sandbox: Sandbox) -> None:
    result = await python(
        sandbox, "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    )
    assert not result.timed_out, result
    assert result.exit_code < 0, result


@group.case("cpu", limits=ResourceLimits(cpu_seconds=1, wall_seconds=30))
async def processor_time_of_a_child_is_bounded(sandbox: Sandbox) -> None:
    code = "import os\npid = os.fork()\nwhile not pid: pass\nprint(os.waitpid(pid, 0)[1] & 127)"
    result = await python(sandbox, code)
    assert not result.timed_out, result
    assert result.exit_code < 0 or int(result.stdout) > 0, result


@group.case("memory", limits=ResourceLimits(memory_bytes=256 * MIB))
async def memory_of_a_process_is_bounded(sandbox: Sandbox) -> None:
    code = """
        import mmap
        attempt('heap', lambda: bytearray(400 << 20))
        attempt('private', lambda: mmap.mmap(-1, 400 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        attempt('shared', lambda: mmap.mmap(-1, 400 << 20, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS))
        attempt('pieces', lambda: [bytes(1 << 20) for _ in range(400)])
    """
    await check_attacks_stopped(sandbox, code)


def _stopped(result: SandboxResult, at_most: int) -> None:
    """Assert that a command was stopped, or printed that few of its parts got their memory."""
    assert not result.timed_out, result
    assert result.exit_code != 0 or int(result.stdout) <= at_most, result


@group.case("memory", limits=TOGETHER, needs=["memory_total"])
async def memory_of_all_processes_together_is_bounded(sandbox: Sandbox) -> None:
    """Six of 100 MB each, under 256 MiB."""
    code = """
        import os, time
        children = []
        for _ in range(6):
            pid = os.fork()
            if pid == 0:
                block = b'x' * (100 << 20); time.sleep(held_s); os._exit(0)
            children.append(pid)
        print(sum(os.waitpid(pid, 0)[1] == 0 for pid in children))
    """
    _stopped(await python(sandbox, code, held_s=HELD_S), at_most=2)
    assert (await sandbox.run(["true"])).exit_code == 0


@group.case("memory", limits=TOGETHER, needs=["memory_total"])
async def memory_of_all_commands_together_is_bounded(sandbox: Sandbox) -> None:
    code = "import time; block = b'x' * (100 << 20); time.sleep(held_s)"
    results = await asyncio.gather(*(python(sandbox, code, held_s=HELD_S) for _ in range(6)))
    assert sum(result.exit_code == 0 for result in results) <= 2, [result.exit_code for result in results]


@group.case("memory", limits=TOGETHER, needs=["memory_total", "linux"])
async def memory_in_files_without_a_name_counts(sandbox: Sandbox) -> None:
    """It belongs to no address space, and to no file system with a quota."""
    code = """
        import os, time
        fds = []
        for _ in range(8):
            fds.append(os.memfd_create('x'))
            for _ in range(50): os.write(fds[-1], bytes(1 << 20))
        time.sleep(held_s); print(len(fds))
    """
    _stopped(await python(sandbox, code, held_s=HELD_S), at_most=5)


HIDDEN = """
import ctypes, mmap, os, socket, time
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
SIZE = 8 << 20
def semaphores():
    for _ in range(4):
        expect(libc.semget(0, 32000, 0o1600))
def queues():
    for _ in range(512):
        number = expect(libc.msgget(0, 0o1600))
        expect(libc.msgsnd(number, ctypes.create_string_buffer(b'x' * 8200), 8192, 0o4000))
        expect(libc.msgsnd(number, ctypes.create_string_buffer(b'x' * 8200), 8000, 0o4000))
def named_queues():
    class Attributes(ctypes.Structure):
        _fields_ = [(name, ctypes.c_long) for name in ('flags', 'most', 'size', 'now', 'a', 'b', 'c', 'd')]
    for number in range(100):
        name = b'/q%d-%d' % (os.getpid(), time.monotonic_ns())
        queue = expect(libc.mq_open(name, 0o102, 0o600, ctypes.byref(Attributes(0, 10, 8192))))
        for _ in range(10): expect(libc.mq_send(queue, b'x' * 8192, 8192, 0))
def segments():
    number = expect(libc.shmget(0, ctypes.c_size_t(SIZE), 0o600))
    address = libc.shmat(number, None, 0)
    ctypes.memset(address, 1, SIZE); libc.shmdt(ctypes.c_void_p(address))
kept = []
def dropped():
    kept.append(mmap.mmap(-1, SIZE))
    for at in range(0, SIZE, 4096): kept[-1][at] = 1
    kept[-1].madvise(mmap.MADV_DONTNEED)
def unmapped():
    area = mmap.mmap(-1, SIZE)
    for at in range(0, SIZE, 4096): area[at] = 1
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    kept.append(area)
    expect(libc.munmap(ctypes.c_void_p(address + 4096), ctypes.c_size_t(SIZE - 4096)))
class Iovec(ctypes.Structure):
    _fields_ = [('base', ctypes.c_void_p), ('length', ctypes.c_size_t)]
def pinned():
    area = mmap.mmap(-1, 4 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(14)
    for at in range(0, 4 << 20, 4096): area[at] = 1
    address = -(-ctypes.addressof(ctypes.c_char.from_buffer(area)) // (2 << 20)) * (2 << 20)
    for at in range(0, SIZE, 2 << 20):
        pipe = os.pipe(); kept.append((pipe, area))
        expect(libc.vmsplice(pipe[1], ctypes.byref(Iovec(address, 4096)), 1, 0))
def sent():
    size = 0
    while size < SIZE:
        pair = socket.socketpair(); kept.append(pair)
        for one in pair:
            one.setblocking(False)
            try:
                while True: size += one.send(bytes(65536))
            except BlockingIOError: pass
def huge():
    libc.mmap.restype = ctypes.c_void_p
    address = libc.mmap(None, ctypes.c_size_t(SIZE), 3, 0x40022, -1, 0)
    expect(-1 if address == ctypes.c_void_p(-1).value else 0)
    ctypes.memset(address, 1, SIZE)
def expect(found):
    if found < 0: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found
taken = 0
try:
    while taken < 400 << 20:
        globals()[way]()
        taken += SIZE
except (OSError, AttributeError): pass
if taken > 256 << 20: time.sleep(held_s)
print(taken >> 20)
"""
"""Ways to take up to 400 MiB, in pieces of 8 MiB, that the sizes of processes do not show."""


def _hides(way: str) -> Callable[[Sandbox], Awaitable[None]]:
    async def case(sandbox: Sandbox) -> None:
        _stopped(await python(sandbox, HIDDEN, way=way, held_s=HELD_S), at_most=256)

    return case


for _way, _name in {
    "semaphores": "sets of semaphores",
    "queues": "queues of messages",
    "named_queues": "queues of messages with a name",
    "segments": "unattached segments",
    "dropped": "pages of shared memory that were dropped",
    "unmapped": "pages of shared memory that were unmapped",
    "pinned": "huge pages that pipes hold",
    "sent": "buffers of sockets",
    "huge": "pages that the administrator reserved",
}.items():
    _case = _hides(_way)
    _case.__name__ = f"memory_in_{_name.replace(' ', '_')}_counts"
    group.case("memory", limits=TOGETHER, needs=["memory_total", "linux"])(_case)


@group.case("memory", needs=["linux"])
async def shared_memory_is_bounded(sandbox: Sandbox) -> None:
    code = """
        import os
        size = 0
        try:
            for number in range(20):
                with open(f'/dev/shm/{number}', 'wb', buffering=0) as file:
                    for _ in range(10): size += file.write(bytes(1 << 20))
        except OSError: pass
        for number in range(20):
            if os.path.exists(f'/dev/shm/{number}'): os.unlink(f'/dev/shm/{number}')
        print(size)
    """
    result = await python(sandbox, code)
    assert int(result.stdout) <= 128 * MIB, result


FORKS = """
import os, time
made = 0
for _ in range(40):
    try:
        pid = os.fork()
    except BlockingIOError:
        break
    if pid == 0:
        time.sleep(30); os._exit(0)
    made += 1
print(made)
"""
FEW = ResourceLimits(max_processes=16, wall_seconds=10)


@group.case("processes", limits=FEW)
async def processes_are_bounded(sandbox: Sandbox) -> None:
    """Starts 40 sleeping children, of which some, and at most 16, can be created."""
    result = await python(sandbox, FORKS)
    assert 4 < int(result.stdout) < 16, result


@group.case("processes", limits=FEW)
async def threads_are_bounded(sandbox: Sandbox) -> None:
    code = """
        import threading, os
        made = 0
        end = threading.Event()
        try:
            for _ in range(200): threading.Thread(target=end.wait, daemon=True).start(); made += 1
        except RuntimeError: pass
        print(made, flush=True); os._exit(0)
    """
    result = await python(sandbox, code)
    assert 4 < int(result.stdout) < 16, result


@group.case("processes", limits=FEW)
async def a_fork_bomb_ends_with_its_command(sandbox: Sandbox) -> None:
    await processes_are_bounded(sandbox)
    mark = new_mark()
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    limits = replace(FEW, wall_seconds=0.7)
    result = await sandbox.run([*sandbox.python_argv, "-c", bomb, mark], limits=limits)
    assert result.timed_out, result
    await check_gone(mark)
    result = await python(sandbox, FORKS)
    assert int(result.stdout) > 4, f"no more processes can be started: {result}"


@group.case("file_size", limits=ResourceLimits(disk_bytes=MIB))
async def the_size_of_a_file_is_bounded(sandbox: Sandbox) -> None:
    code = """
        import signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        def write(place):
            with open(place + '/big', 'wb', buffering=0) as file:
                for _ in range(30): expect(file.write(bytes(100_000)) == 100_000)
        for place in ('.', '/tmp', '/dev/shm'):
            attempt('write ' + place, lambda: write(place))
            attempt('truncate ' + place, lambda: open(place + '/long', 'wb').truncate(3_000_000))
            allocate = lambda: os.posix_fallocate(os.open(place + '/full', 66), 0, 3_000_000)
            attempt('allocate ' + place, allocate)
    """
    await check_attacks_stopped(sandbox, code)
    await sandbox.run(["sh", "-c", "head -c 3000000 /dev/zero > big"])
    if sandbox.files:
        assert len(await sandbox.read_file("big")) <= MIB


@group.case("file_size", limits=ResourceLimits(disk_total_bytes=2 * MIB), needs=["disk_total"])
async def all_files_together_are_bounded(sandbox: Sandbox) -> None:
    """Fills each writable place, the first one in part."""
    code = """
        import os
        def fill(place, name, files):
            size = 0
            try:
                for number in range(files):
                    with open(f'{place}/{name}{number}', 'wb', buffering=0) as file:
                        size += file.write(bytes(100_000))
            except OSError: pass
            return size
        print('part', fill('/work', 'part', 12))
        for place in ('/tmp', '/dev/shm', '/dev', '/var/tmp', '/run', '/work'):
            print(place, fill(place, 'rest', 200))
    """
    result = await python(sandbox, code)
    sizes = {line.split()[0]: int(line.split()[1]) for line in result.stdout.splitlines()}
    assert sizes["part"] > MIB, result
    assert sum(sizes.values()) <= 2.2 * MIB, f"under 2 MiB: {sizes}"


@group.case("file_size", limits=ResourceLimits(disk_total_bytes=2 * MIB), needs=["disk_total"])
async def the_number_of_files_is_bounded(sandbox: Sandbox) -> None:
    code = """
        import os
        for place in ('/work', '/tmp', '/dev/shm', '/dev'):
            made = 0
            try:
                for _ in range(20_000): open(f'{place}/n{made}', 'w').close(); made += 1
            except OSError: pass
            for number in range(made): os.unlink(f'{place}/n{number}')
            print(place, made)
    """
    result = await python(sandbox, code)
    made = {line.split()[0]: int(line.split()[1]) for line in result.stdout.splitlines()}
    over = {place: number for place, number in made.items() if number >= 20_000}
    assert "/work" in made, result
    assert not over, f"unlimited files: {over}"


@group.case(needs=["seccomp"])
async def open_files_of_a_process_are_bounded(sandbox: Sandbox) -> None:
    code = """
        import os
        made = 0
        try:
            while made < 20_000: os.dup(0); made += 1
        except OSError: pass
        print(made)
    """
    result = await python(sandbox, code)
    assert int(result.stdout) < 20_000, result


@group.case()
async def the_maximum_of_open_files_disturbs_nobody(sandbox: Sandbox) -> None:
    code = """
        import os
        made = []
        try:
            while len(made) < 100_000: made.extend(os.pipe())
        except OSError: pass
        print(len(made) > 10)
    """
    result = await python(sandbox, code)
    assert result.stdout == "True\n", result
    assert (await sandbox.run(["true"])).exit_code == 0


@group.case()
async def recursion_without_end_is_a_signal(sandbox: Sandbox) -> None:
    code = "import ctypes, sys\nsys.setrecursionlimit(1 << 30)\ndef f(x): return sorted([1, 2], key=f)\nf(0)"
    result = await python(sandbox, code)
    assert result.exit_code != 0, result
    assert not result.timed_out, result


@group.case()
async def the_wall_limit_ends_a_command_and_its_children(sandbox: Sandbox) -> None:
    mark = new_mark()
    command = ["sh", "-c", f"trap '' TERM INT HUP; echo begun; sleep {mark} & sleep 60"]
    for wall_s in (0.3, 1, 5, 20):  # on a busy machine, a command may need long to begin
        result = await sandbox.run(command, limits=ResourceLimits(wall_seconds=wall_s))
        if result.stdout:
            break
    assert result.timed_out, result
    assert result.exit_code != 0, result
    assert result.stdout == "begun\n", result
    await check_gone(mark)


@group.case()
async def the_wall_limit_ends_output_without_end(sandbox: Sandbox) -> None:
    limits = ResourceLimits(wall_seconds=0.4, output_bytes=5000)
    async with asyncio.timeout(HANG_S):
        result = await sandbox.run(["sh", "-c", "yes & yes error >&2"], limits=limits)
    assert result.timed_out
    assert result.truncated
    assert max(len(result.stdout), len(result.stderr)) < 6000


@group.case(needs=["linux"])
async def a_flood_on_both_streams_costs_the_trainer_no_memory(sandbox: Sandbox) -> None:
    """1 GiB, of which 1 MiB of each stream is kept."""
    flood = f"head -c {512 * MIB} /dev/zero >&2 & yes | head -c {512 * MIB}; wait"
    await sandbox.run(["sh", "-c", "yes | head -c 3000000; yes | head -c 3000000 >&2"])
    forget_peak_memory()
    before = peak_memory()
    result = await sandbox.run(["sh", "-c", flood], limits=ResourceLimits(wall_seconds=50))
    grown = peak_memory() - before
    assert not result.timed_out
    assert result.truncated
    assert max(len(result.stdout), len(result.stderr)) < 2 * MIB
    assert grown < 20 * MIB, f"the trainer grew by {grown >> 20} MiB"


@group.case("memory", limits=ResourceLimits(memory_bytes=256 * MIB, output_bytes=1000, wall_seconds=5))
async def a_call_cannot_widen_its_limits(sandbox: Sandbox) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        wide = ResourceLimits(memory_bytes=None, output_bytes=1 << 30, wall_seconds=None)
        result = await python(sandbox, "print('x' * 10_000); y = bytearray(400 << 20)", limits=wide)
    assert "MemoryError" in result.stderr, result
    assert len(result.stdout) < 2000, result


@group.case("file_size")
async def limits_of_one_call_are_not_those_of_the_next(sandbox: Sandbox) -> None:
    write = ["sh", "-c", "head -c 3000000 /dev/zero > big; wc -c < big"]
    narrow = replace(sandbox.limits, disk_bytes=MIB)
    assert int((await sandbox.run(write, limits=narrow)).stdout) <= MIB
    assert int((await sandbox.run(write)).stdout) == 3_000_000
