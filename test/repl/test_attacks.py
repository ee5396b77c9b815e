"""Code that means harm, in a fork server's interpreter: what holds, and (xfail) what does not yet."""
# ruff: noqa: E501  code for inside is easier to read in few long lines

import asyncio
import os
import random

import pytest
from helpers.limit import limit

from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.repl import ForkServerRepl, ReplResult
from torchrl_agentic.sandbox import ForkServerSandbox, ResourceLimits
from torchrl_agentic.sandbox.conformance.host_cases import file_appears
from torchrl_agentic.sandbox.forkserver_sandbox import cannot_work

pytestmark = pytest.mark.skipif(cannot_work() is not None, reason=f"no fork server here: {cannot_work()}")


# Finds the worker that runs the cell, and its module: the code and it are one.
async def not_cloned(sandbox: ForkServerSandbox) -> None:
    """See that clones have the files alone."""
    (clone,) = await sandbox.clones(1)
    assert not clone.has_live_clone
    await clone.close()


WORKER = """
import array, ctypes, os, signal, socket, struct, sys, threading, time
frame = sys._getframe()
while not hasattr(frame.f_locals.get('self'), 'streams'): frame = frame.f_back
worker = frame.f_locals['self']
module = sys.modules[type(worker).__module__]
spaces, rights = module.namespaces, module.rights
assert hasattr(module, 'reopen') and hasattr(worker, 'clone') and hasattr(spaces, 'enter')
"""


async def ran(repl: ForkServerRepl, code: str, timeout: float = 5) -> ReplResult:
    """Run code that must succeed."""
    result = await repl.execute(code, timeout=timeout)
    assert result.status == "ok", result.text
    return result


async def works(repl: ForkServerRepl) -> None:
    async with asyncio.timeout(limit(10)):
        assert (await repl.execute("40 + 2", timeout=limit(5))).value == "42"


# Another trajectory of the same zygote.


async def told_by_a_sibling(setup: str, write: str, read: str) -> str:
    async with ForkServerRepl() as first, ForkServerRepl() as second:
        await first.execute("import os, socket, ctypes, fcntl, struct, mmap\n" + setup, timeout=limit(5))
        await first.execute(write, timeout=limit(5))
        found = await second.execute("import os, socket, ctypes, fcntl, struct\n" + read, timeout=limit(5))
        back = await first.execute("os.read(m, 100)" if "m = os.open" in setup else "0", timeout=limit(5))
        return found.text + back.text


PTY = (
    "m = os.open('/dev/ptmx', os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)\n"
    "fcntl.ioctl(m, 0x40045431, struct.pack('i', 0))\n"
    "name = '/dev/pts/%d' % struct.unpack('i', fcntl.ioctl(m, 0x80045430, bytes(4)))[0]\n"
)


@pytest.mark.parametrize(
    ("setup", "write", "read"),
    [
        ("", "open('/work/x', 'w').write('leaked')", "open('/work/x').read()"),
        ("", "open('/tmp/x', 'w').write('leaked')", "open('/tmp/x').read()"),
        ("", "open('/dev/shm/x', 'w').write('leaked')", "open('/dev/shm/x').read()"),
        pytest.param(
            "", "open('/dev/x', 'w').write('leaked')", "open('/dev/x').read()",
        ),
        pytest.param(
            PTY, "0",
            "for name in os.listdir('/dev/pts'):\n"
            "    if name != 'ptmx': os.write(os.open('/dev/pts/' + name, os.O_RDWR | os.O_NOCTTY), b'leaked')",
        ),
        (
            "s = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0]; s.bind('\\0mark'); m = None\n",
            "0",
            "try:\n"
            "    socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', '\\0mark'); print('leaked')\n"
            "except PermissionError: pass",
        ),
        (
            "libc = ctypes.CDLL(None); libc.shmat.restype = ctypes.c_void_p\n",
            "a = libc.shmat(libc.shmget(77, 4096, 0o1666), None, 0); ctypes.memmove(a, b'leaked', 6)",
            "libc = ctypes.CDLL(None); libc.shmat.restype = ctypes.c_void_p\n"
            "i = libc.shmget(77, 4096, 0o666)\n"
            "if i >= 0: print(ctypes.string_at(libc.shmat(i, None, 0), 6))",
        ),
        (
            "librt = ctypes.CDLL('librt.so.1')\n",
            "q = librt.mq_open(b'/mark', os.O_CREAT | os.O_RDWR, 0o666, None)",
            "if ctypes.CDLL('librt.so.1').mq_open(b'/mark', os.O_RDWR) >= 0: print('leaked')",
        ),
        ("os.setpgrp()", "import subprocess; subprocess.Popen(['sh', '-c', 'sleep 50 # leaked'])",
         "for p in os.listdir('/proc'):\n    if p.isdigit(): print(open('/proc/%s/cmdline' % p).read())"),
    ],
    ids=["work", "tmp", "shm", "dev", "pty", "abstract", "sysv", "mq", "processes"],
)  # fmt: skip
async def test_siblings_cannot_talk(setup: str, write: str, read: str) -> None:
    assert "leaked" not in await told_by_a_sibling(setup, write, read)


async def test_nothing_outlives_its_trajectory() -> None:
    async with ForkServerRepl() as repl:
        await repl.execute("open('/dev/stays', 'w').write('x'); open('/tmp/stays', 'w'); 0")
    async with ForkServerRepl() as repl:
        found = await repl.execute(
            "import os; [p for p in ('/dev/stays', '/tmp/stays', '/work/stays') if os.path.exists(p)]"
        )
        await repl.execute("os.unlink('/dev/stays')")
        assert found.value == "[]"


# Process 1 and what is above it.


@pytest.mark.parametrize(
    "code",
    [
        "open('/proc/1/mem', 'rb')",
        "open('/proc/1/environ', 'rb').read()",
        "open('/proc/1/maps').read() or 1 / 0",
        "os.listdir('/proc/1/fd')",
        "os.open('/proc/1/ns/user', os.O_RDONLY)",
        "os.listdir('/proc/1/root')",
        "os.readlink('/proc/1/cwd')",
        "open('/proc/1/uid_map', 'w')",
        "open('/proc/1/oom_score_adj', 'w').write('1000')",
        "os.kill(1, signal.SIGKILL) or os.kill(1, signal.SIGSTOP)",
        "call(101, 16, 1, 0, 0)",  # ptrace
        "call(310, 1, 0, 0, 0, 0, 0)",  # process_vm_readv
        "call(434, 1, 0)",  # pidfd_open
        "call(424, 1, 9, 0, 0)",  # pidfd_send_signal
        pytest.param(
            "call(302, 1, 3, struct.pack('QQ', 1 << 23, 1 << 23), 0)",  # prlimit64, and nothing that hurts
        ),
        "call(308, os.open('/proc/self/ns/mnt', os.O_RDONLY), 0x20000)",  # setns
        "call(308, os.open('/proc/self/ns/user', os.O_RDONLY), 0x10000000)",
        "call(308, os.open('/proc/self/ns/pid', os.O_RDONLY), 0x20000000)",
        "call(308, os.open('/proc/self/ns/net', os.O_RDONLY), 0x40000000)",
        "call(308, os.open('/proc/self/ns/net', os.O_RDONLY), 0)",
        "fcntl.ioctl(os.open('/proc/self/ns/user', os.O_RDONLY), 0xb702)",  # NS_GET_PARENT
        "call(272, 0x10000000)",  # unshare
        "call(56, 0x10000000 | 17, 0, 0, 0, 0)",  # clone
        "call(435, struct.pack('Q', 0x10000000) + bytes(80), 88)",  # clone3
        "call(165, b'x', b'/tmp', b'tmpfs', 0, 0)",  # mount
        "call(425, 1, bytes(120))",  # io_uring_setup
        "call(0x40000000 | 39)",  # by the numbers of x32
        "open('/proc/sys/kernel/core_pattern', 'w')",
        "open('/proc/sysrq-trigger', 'w')",
        "os.setuid(0)",
        "os.mknod('/work/sda', 0o60666, os.makedev(8, 0))",
    ],
)
async def test_worker_cannot_regain_capabilities(code: str) -> None:
    async with ForkServerRepl() as repl:
        await ran(
            repl,
            "import ctypes, fcntl, os, signal, struct\nlibc = ctypes.CDLL(None, use_errno=True)\n"
            "def call(*args):\n"
            "    if libc.syscall(*args) < 0: raise OSError(ctypes.get_errno(), 'refused')",
        )
        result = await repl.execute(code, timeout=limit(5))
        if "os.kill(1" not in code:  # process 1 may be sent signals, for which it has no ears
            assert result.error is not None
            assert result.error.ename in (
                "PermissionError",
                "OSError",
                "BlockingIOError",
                "FileNotFoundError",
            )
        await works(repl)
        assert (await repl.sandbox.run(["echo", "up"])).stdout == "up\n"


@pytest.mark.parametrize(
    "name",
    [pytest.param(name) for name in ("AS", "DATA", "NOFILE", "NPROC")],
)
async def test_limits_of_process_1_are_out_of_reach(name: str) -> None:
    async with ForkServerRepl() as repl:
        await repl.execute(
            f"import resource; resource.prlimit(1, resource.RLIMIT_{name}, (0, 0))", timeout=limit(5)
        )
        await works(repl)
        assert (await repl.sandbox.run(["echo", "up"])).stdout == "up\n"


async def test_setns_by_the_pidfd_of_a_child_is_denied() -> None:
    async with ForkServerRepl() as repl:
        result = await ran(
            repl,
            "import ctypes, os, time\nlibc = ctypes.CDLL(None, use_errno=True)\nfd = ctypes.c_int(-1)\n"
            "pid = libc.syscall(56, 0x1000 | 17, 0, ctypes.byref(fd), 0, 0)\n"
            "if pid == 0: time.sleep(5); os._exit(0)\n"
            "fd.value, [libc.syscall(308, fd, kind) for kind in "
            "(0x10000000, 0x20000, 0x8000000, 0x4000000, 0x20000000)]",
        )
        assert result.value is not None
        assert result.value.endswith("[-1, -1, -1, -1, -1])")


# Clones.


KEEP = "module.reopen = lambda fd: None\n"


@pytest.mark.parametrize(
    ("setup", "write", "read"),
    [
        ("s, t = socket.socketpair()", "s.send(b'leaked')", "t.settimeout(0.3); t.recv(9)"),
        (KEEP + "s, t = socket.socketpair()", "s.send(b'leaked')", "t.settimeout(0.3); t.recv(9)"),
        (KEEP + "r, w = os.pipe(); os.set_blocking(r, False)", "os.write(w, b'leaked')", "os.read(r, 9)"),
        (KEEP + "m = os.memfd_create('m')", "os.write(m, b'leaked')", "os.pread(m, 9, 0)"),
        (KEEP + "e = os.eventfd(0, os.EFD_NONBLOCK)", "os.eventfd_write(e, 5)", "'leak' + 'ed' if os.eventfd_read(e) else 0"),
        (KEEP + "f = open('/work/f', 'wb+', 0); os.unlink('/work/f')", "f.write(b'leaked')", "f.seek(0); f.read()"),
        ("import mmap; m = mmap.mmap(-1, 4096)", "m[:6] = b'leaked'", "m[:6]"),
        ("import mmap; m = mmap.mmap(os.open('/dev/zero', os.O_RDWR), 4096)", "m[:6] = b'leaked'", "m[:6]"),
        ("libc = ctypes.CDLL(None); libc.shmat.restype = ctypes.c_void_p\n"
            "a = libc.shmat(libc.shmget(0, 4096, 0o1600), None, 0)", "ctypes.memmove(a, b'leaked', 6); 0", "ctypes.string_at(a, 6)"),
        (KEEP + "s, t = socket.socketpair(); m = os.memfd_create('m'); socket.send_fds(s, [b'x'], [m])", "os.write(m, b'leaked'); 0", "os.pread(socket.recv_fds(t, 1, 1)[1][0], 9, 0)"),
        (KEEP + "d = os.open('/work', os.O_RDONLY)", "f = os.open('f', os.O_CREAT | os.O_WRONLY, dir_fd=d); os.write(f, b'leaked'); os.close(f)", "os.read(os.open('f', os.O_RDONLY, dir_fd=d), 9)"),
        (KEEP + "m = os.memfd_create('m'); d = os.open('/proc/self/fd/%d' % m, os.O_RDONLY); os.close(m)", "os.write(os.open('/proc/self/fd/%d' % d, os.O_RDWR), b'leaked')", "os.pread(d, 9, 0)"),
        (KEEP + "import fcntl\n" + PTY + "s = os.open(name, os.O_RDWR | os.O_NOCTTY)", "os.write(s, b'leaked')", "os.read(m, 9)"),
        ("d = os.open('/work', os.O_RDONLY); os.chdir = lambda path: os.fchdir(d)", "open('f', 'w').write('leaked')", "open('f').read()"),
        ("def enter(fds, flags):\n"
            "    for fd, (name, kind) in zip(fds, spaces._ENTERED):\n"
            "        if name in ('user', 'pid'): spaces._check(spaces._libc.setns(fd, kind), name)\n"
            "spaces.enter = enter", "open('/work/f', 'w').write('leaked')", "open('/work/f').read()"),
    ],
    ids=["socket", "kept socket", "pipe", "memfd", "eventfd", "deleted file", "mmap", "dev zero", "sysv",
         "in flight", "folder", "memfd for reading", "terminal", "cwd", "namespaces"],
)  # fmt: skip
async def test_clones_share_nothing(setup: str, write: str, read: str) -> None:
    """Written in the original, read in the clone; that it cannot be cloned is fine, too."""
    async with ForkServerRepl() as repl:
        made = await repl.execute(WORKER + setup, timeout=limit(5))
        if made.error is not None and made.error.ename == "PermissionError":
            return  # what would be shared cannot even be made
        assert made.status == "ok", made.text
        (clone,) = await repl.fork(1)
        async with clone:
            await repl.execute(write, timeout=limit(3))
            assert "leaked" not in (await clone.execute(read, timeout=limit(3))).text


VFORKS = """
calls = ctypes.PyDLL(None)  # whoever calls keeps the interpreter's lock
shared, me, (ready, told) = [], os.getpid(), os.pipe()
def children(of):
    found = []
    for name in os.listdir('/proc'):
        try:
            if int(open('/proc/%s/stat' % name).read().rpartition(')')[2].split()[1]) == of: found.append(int(name))
        except (OSError, ValueError): pass
    return found
if os.fork() == 0:  # ends those who wait for a child that borrowed their memory
    while len(waiting := [p for p in children(me) if p != os.getpid() and len(children(p)) == 1]) != 2: time.sleep(0.01)
    time.sleep(0.1)
    for pid in (me, *waiting): os.kill(pid, 9); time.sleep(0.02)
    os.write(told, b'ok'); os._exit(0)
def life(handed, flags):
    if calls.syscall(58): os.abort()  # vfork: the child has our memory, not a copy
    spaces.enter(handed[:-3], flags)
    if calls.syscall(58): os.abort()
    rights.drop_capabilities(); rights.set_dumpable(True); os.setsid(); os.chdir('/work')
    go, ours = os.dup2(ready, 60), (worker.control.fileno(), *worker.streams)
    for new, old in zip(handed[-3:], ours): os.dup2(new, old, inheritable=False)
    for target, saved in zip((1, 2), worker.streams): os.dup2(saved, target)
    for fd in set(range(3, 64)) - {*ours, go}:
        try: os.close(fd)
        except OSError: pass
    os.read(go, 1); os.close(go)
    worker.control.sendall(module.pack(b'cloned'))
    again = object.__new__(type(worker)); again.__dict__.update(worker.__dict__); again.serve()
class Signals:
    def __getattr__(self, name): return getattr(signal, name)
    def signal(self, *args): pass
def clone(handed, flags):
    module.signal = Signals()
    threading.Thread(target=life, args=(list(handed), flags)).start()
worker.clone = clone
"""


async def test_clones_do_not_share_their_address_space() -> None:
    async with ForkServerRepl() as repl:
        await ran(repl, WORKER + VFORKS)
        (clone,) = await repl.fork(1)
        async with clone:
            await repl.execute("shared.append('leaked')", timeout=limit(3))
            assert "leaked" not in (await clone.execute("shared", timeout=limit(3))).text


async def test_clones_cannot_signal_each_other() -> None:
    async with ForkServerRepl() as repl:
        await ran(repl, WORKER + "os.setsid = lambda: None")
        (clone,) = await repl.fork(1)
        async with clone:
            await ran(clone, "kept = 1")
            await repl.execute("signal.signal(signal.SIGTERM, signal.SIG_IGN); os.kill(0, signal.SIGTERM)")
            assert not (await clone.execute("kept", timeout=limit(5))).state_lost


INTRUDER = """
count, plain, pair = [0], type(worker).clone, socket.socketpair()
def intrude(handed, mine):
    spaces.enter(handed[:-3], flags)
    while True:  # /proc is the clone's, whose worker is stopped while it is looked at
        try: states = [open('/proc/%s/stat' % p).read().rpartition(')')[2].split()[0]
                       for p in os.listdir('/proc') if p.isdigit() and p != '1']
        except OSError: continue
        if 'T' in states: break
        time.sleep(0.0005)
    time.sleep(0.05)
    if os.fork(): os._exit(0)
    while True:
        time.sleep(0.01)
        try: mine.send(open('/work/out').read().encode(), socket.MSG_DONTWAIT); os.unlink('/work/out')
        except OSError: pass
        try: data = mine.recv(99, socket.MSG_DONTWAIT); open('/work/in', 'wb').write(data)
        except OSError: pass
def clone(handed, flags):
    count[0] += 1
    if count[0] > 2: time.sleep(0.5)
    elif os.fork() == 0:
        try: intrude(handed, pair[count[0] - 1])
        finally: os._exit(1)
    plain(worker, handed)
worker.clone = clone
"""


async def test_processes_of_the_original_do_not_exist_in_its_clones() -> None:
    async with ForkServerRepl() as repl:
        await ran(repl, WORKER + INTRUDER)
        everyone = [repl, *await repl.fork(2)]
        found = ""
        for one in everyone:
            await one.execute("open('/work/out', 'w').write('leaked'); 0", timeout=limit(3))
        for one in everyone:
            found += (
                await one.execute(
                    "import os, time; time.sleep(0.1)\nif os.path.exists('/work/in'): print(open('/work/in').read())\n"
                    "for p in os.listdir('/proc'):\n"
                    "    if p.isdigit() and p != '1': print(open('/proc/%s/status' % p).read())",
                    timeout=limit(3),
                )
            ).text
        for clone in everyone[1:]:
            await clone.close()
        assert "CapEff:\t000001ffffffffff" not in found
        assert "leaked" not in found


async def test_clones_and_the_original_cannot_see_each_other() -> None:
    async with ForkServerRepl() as repl:
        await ran(repl, "import os, subprocess")
        clones = await repl.fork(3)
        for one in (repl, *clones):
            seen = await ran(one, "sorted(p for p in os.listdir('/proc') if p.isdigit())")
            assert seen.value is not None
            assert len(seen.value.split(",")) == 2  # process 1 and itself
        for clone in clones:
            await clone.close()


async def test_worker_that_keeps_capabilities_is_rejected() -> None:
    code = (
        "def keep():\n"
        "    half = struct.pack('<6I', 0, 0xffffffff, 0, 0, 0x1ff, 0)\n"
        "    spaces._check(spaces._libc.capset(struct.pack('<II', 0x20080522, 0), half), 'capset')\n"
        "rights.drop_capabilities = keep"
    )
    async with ForkServerRepl() as repl:
        await ran(repl, WORKER + code)
        await not_cloned(repl.sandbox)


async def test_interpreter_that_cannot_be_cloned_keeps_working() -> None:
    """A process that waits for its vfork child cannot be stopped."""
    code = (
        "import ctypes, os, time\nkept = 1\nif os.fork() == 0:\n"
        "    ctypes.PyDLL(None).syscall(58)\n    time.sleep(1000)"
    )
    async with ForkServerRepl() as repl:
        await ran(repl, code)
        await not_cloned(repl.sandbox)
        after = await repl.execute("kept", timeout=limit(1))
        assert (after.value, after.status) == ("1", "ok")


async def test_a_worker_that_cannot_fork_keeps_its_state() -> None:
    code = (
        "import os, time\nkept = 1\n"
        "try:\n    while True:\n        if os.fork() == 0: time.sleep(1000)\nexcept OSError: pass"
    )
    async with ForkServerRepl(ForkServerSandbox(ResourceLimits(max_processes=8))) as repl:
        await ran(repl, code)
        for clone in await repl.fork(1):
            await clone.close()
        after = await repl.execute("kept", timeout=limit(5))
        assert (after.value, after.state_lost) == ("1", False)


async def test_sixteen_clones_do_not_change_the_original() -> None:
    async with ForkServerRepl() as repl:
        await ran(repl, "kept = 1")
        clones = await repl.fork(16)
        await asyncio.gather(*(clone.close() for clone in clones))
        after = await repl.execute("kept", timeout=limit(5))
        assert (after.value, after.state_lost) == ("1", False)


async def test_many_clones_are_made_in_several_goes() -> None:
    async with ForkServerRepl() as repl:
        await ran(repl, "kept = 1")
        clones = await repl.sandbox.clones(20)
        assert all(clone.has_live_clone for clone in clones)
        await asyncio.gather(*(clone.close() for clone in clones))
        assert (await repl.execute("kept", timeout=limit(5))).value == "1"


async def test_clones_do_not_share_a_loopback() -> None:
    async with ForkServerRepl(ForkServerSandbox(ResourceLimits(network="loopback"))) as repl:
        await ran(repl, "import socket")
        (clone,) = await repl.fork(1)
        async with clone:
            await ran(repl, "s = socket.create_server(('127.0.0.1', 8765)); 0")
            tried = await clone.execute("socket.create_connection(('127.0.0.1', 8765), 1)", timeout=limit(5))
            assert tried.error is not None


async def test_death_of_a_clone_is_reported_at_once() -> None:
    async with ForkServerRepl() as repl:
        (clone,) = await repl.fork(1)
        async with clone:
            code = "import os, time\nif os.fork(): os._exit(3)\ntime.sleep(1000)"
            assert (await clone.execute(code, timeout=1.5)).status == "died"


async def test_threads_and_files_opened_while_clones_are_made_stay_behind() -> None:
    code = (
        "import os, threading\nopened = []\n"
        "def busy():\n"
        "    while True:\n"
        "        r, w = os.pipe(); opened.append((r, w))\n"
        "        if len(opened) > 50:\n"
        "            for fd in opened.pop(0): os.close(fd)\n"
        "threading.Thread(target=busy, daemon=True).start()"
    )
    async with ForkServerRepl() as repl:
        await ran(repl, code)
        (clone,) = await repl.fork(1)
        async with clone:
            found = await clone.execute(
                "links = []\nfor name in os.listdir('/proc/self/fd'):\n"
                "    try: links.append(os.readlink('/proc/self/fd/' + name))\n    except OSError: pass\n"
                "sum(link.startswith('pipe:') for link in links), threading.active_count()",
                timeout=limit(5),
            )
            assert found.status == "ok"
            if not found.state_lost and "(4, 1)" not in found.text:  # run again instead: its own thread
                assert ", 2)" in found.text


# Faults of the code that must not become faults of ours.


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.kill(os.getpid(), 19)",  # SIGSTOP
        "import signal, os; signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65)); os.kill(os.getpid(), 19)",
        "import time\nwhile True:\n    try: time.sleep(100)\n    except KeyboardInterrupt: pass",
        "import re; re.match('(a+)+$', 'a' * 40 + 'b')",
        "x = 7 ** (7 ** 10)",
        "import ctypes\nwhile True: ctypes.PyDLL(None).poll(None, 0, 100000)",
        "sum(iter(int, 1))",
        "class A:\n    def __del__(self):\n        while True: pass\nA()\n0",
        "class A:\n    def __repr__(self):\n        while True: pass\nA()",
        "import os, fcntl\nr = os.open('/proc/self/fd/1', os.O_RDONLY)\nwhile True: os.write(1, b'x' * 4096); os.read(r, 4096)",
    ],
    ids=["SIGSTOP", "all blocked", "swallow", "regex", "pow", "C with the lock", "C loop", "del", "repr", "own pipe"],
)  # fmt: skip
async def test_hanging_code_only_times_out(code: str) -> None:
    async with ForkServerRepl() as repl:
        async with asyncio.timeout(limit(6)):
            result = await repl.execute(code, timeout=limit(0.1))
        assert (result.status, result.timed_out) == ("timeout", True)
        await works(repl)


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.closerange(0, 1024)",
        "import sys; sys.modules.clear()",
        "import sys; sys.modules['linecache'] = sys.modules['traceback'] = None; 1 / 0",
        "import builtins; builtins.__dict__.clear()",
        WORKER + "worker.run = lambda *a: b''",
        WORKER + "type(worker).run = None",
        WORKER + "module.pack = lambda *a: b'\\xff' * 100",
        WORKER + "worker.control.shutdown(socket.SHUT_WR)",
        WORKER + "worker.control.shutdown(socket.SHUT_RD)",
        WORKER + "worker.control.setblocking(False)",
        WORKER + "worker.streams[:] = [0, 0]",
        WORKER + "worker.control.sendall(struct.pack('>I', 100)); time.sleep(0.2)",
        WORKER + "worker.control.sendall(struct.pack('>I', 4 << 20) + bytes(1 << 20))",
        WORKER + "for _ in range(100): socket.send_fds(worker.control, [b'\\0'], [0] * 50)",
        "import os, resource; resource.setrlimit(resource.RLIMIT_NOFILE, (4, 4))",
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (1, 1)); x = bytearray(1 << 26)",
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))",
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (0, 0))\nwhile True: pass",
        "import fcntl; [fcntl.fcntl(fd, 1031, 1 << 20) for fd in (1, 2)]; print('x' * 900_000)",
        "import fcntl, os; [os.set_blocking(fd, False) for fd in (0, 1, 2, 3)]; print('x' * 300_000)",
        "open('/proc/self/oom_score_adj', 'w').write('1000')",
        "import os; os.chmod('/work', 0); os.chmod('/tmp', 0)",
        "import os; os.setpgid(0, 0)",
        "import os, signal; os.kill(0, signal.SIGTTOU); os.kill(-1, signal.SIGTERM)",
        "import os\nfor _ in range(300_000): os.write(1, b'x')",
        "import os\nfor fd in (1, 2):\n    for _ in range(90): os.write(fd, bytes(1 << 20))",
        "class P:\n    def _repr_png_(self): return b'\\x89PNG\\r\\n\\x1a\\n' + bytes(100)\n"
        "display(*(P() for _ in range(300_000)))",
        "class P:\n    def _repr_png_(self): return b'x' * (60 << 20)\nP()",
        "class E(Exception):\n    __str__ = __repr__ = lambda self: 1 / 0\nraise E",
        "class E(Exception):\n    __class__ = property(lambda self: 1 / 0)\nraise E",
        "class E(Exception):\n    __traceback__ = property(lambda self: 1 / 0)\nraise E",
        "class E(Exception):\n    def __str__(self): return 'x' * 100_000_000\nraise E",
        "class S(str):\n    encode = __len__ = None\nclass R:\n    def __repr__(self): return S('x')\nR()",
        "def f(n):\n    try: raise ValueError('x' * 10_000)\n    except ValueError: f(n - 1) if n else 1 / 0\nf(200)",
        "raise type('\\ud800\\n' * 100, (BaseException,), {})",
        "raise BaseExceptionGroup('x', [ValueError()] * 100_000)",
    ],
)  # fmt: skip
async def test_damage_is_limited_to_its_own_cell(code: str) -> None:
    async with ForkServerRepl() as repl:
        async with asyncio.timeout(limit(25)):
            result = await repl.execute(code, timeout=2)
            assert result.status in ("ok", "error", "died", "limit", "timeout")
            assert len(result.text) < 8_000_000
            next_one = await repl.execute("1 + 1", timeout=limit(1))
            assert next_one.status in ("ok", "error", "died", "timeout")
            await repl.restart()
        await works(repl)
        assert (await repl.sandbox.run(["echo", "up"])).stdout == "up\n" or "chmod" in code


async def test_forged_answer_is_bounded_like_a_real_one() -> None:
    code = (
        "import os, struct\ndef field(data): return struct.pack('>I', len(data)) + data\n"
        "data = field(b''.join(map(field, [b'1', b'', b'Error', b'x' * 7_000_000, b''])))\n"
        "while data: data = data[os.write(3, data):]"
    )
    async with ForkServerRepl() as repl:
        assert len((await repl.execute(code, timeout=limit(5))).text) < 100_000


async def test_a_large_output_that_was_allowed_comes_back() -> None:
    limits = ResourceLimits(output_bytes=8 << 20)
    code = "import os\nfor fd in (1, 2):\n    for _ in range(8): os.write(fd, b'\\xff' * (1 << 20))"
    async with ForkServerRepl(ForkServerSandbox(limits)) as repl:
        assert (await repl.execute(code, timeout=limit(10))).status == "ok"


async def test_a_fork_bomb_leaves_commands_and_the_interpreter_usable() -> None:
    code = (
        "import os, time\nmade = 0\ntry:\n    while made < 100:\n"
        "        if os.fork() == 0: time.sleep(1000)\n        made += 1\nexcept OSError: pass\nmade"
    )
    async with ForkServerRepl(ForkServerSandbox(ResourceLimits(max_processes=8))) as repl:
        assert int((await ran(repl, code)).value or 99) <= 8
        assert (await repl.sandbox.run(["echo", "up"])).stdout == "up\n"
        await repl.restart()
        await works(repl)


@pytest.mark.parametrize("size", [65536, 0], ids=["bytes", "files"])
async def test_full_folders_leave_all_usable(size: int) -> None:
    code = (
        "import os\nfor folder in ('/work', '/tmp', '/dev/shm'):\n    try:\n        for i in range(20_000):\n"
        f"            open('%s/%d' % (folder, i), 'wb').write(bytes({size}))\n    except OSError: print('full')"
    )
    async with ForkServerRepl(ForkServerSandbox(ResourceLimits(disk_total_bytes=4 << 20))) as repl:
        assert (await ran(repl, code, 10)).stdout == "full\n" * 3
        assert (await repl.sandbox.run(["echo", "up"])).stdout == "up\n"
        (clone,) = await repl.fork(1)
        async with clone:
            assert (await ran(clone, "len(os.listdir('/work'))")).value != "0"
        with pytest.raises(OSError, match="space"):
            await repl.sandbox.write_file("d/e/f", b"x" * 100_000)


# Deadlines and cancelling.


async def test_cell_that_returns_at_its_deadline_does_not_affect_later_cells() -> None:
    async with ForkServerRepl() as repl:
        await ran(repl, "import time")
        for number in range(150):
            seconds = 0.003 + random.random() * 0.003
            code = f"for _ in range({random.randrange(80_000)}): pass\ntime.sleep({seconds})\n{number}"
            first = await repl.execute(code, timeout=0.005)
            assert first.value in (None, str(number))
            assert (first.status, first.error, first.text.count("KeyboardInterrupt")) in (
                ("ok", None, 0), ("timeout", None, 0),
            )  # fmt: skip
            assert (await repl.execute(f"{number} * 10", timeout=limit(5))).text == str(number * 10)


async def test_cancelling_at_any_moment_leaves_the_right_answer_to_the_next() -> None:
    async with ForkServerRepl() as repl:
        await ran(repl, "import time")
        for number in range(150):
            task = asyncio.create_task(repl.execute(f"time.sleep(0.003); print('no'); {number}"))
            await asyncio.sleep(random.random() * 0.006)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert (await repl.execute(f"{number} * 10", timeout=limit(5))).text == str(number * 10)


async def test_cancelling_twice_is_cancelling() -> None:
    async with ForkServerRepl() as repl:
        await ran(repl, "kept = 1")
        task = asyncio.create_task(repl.execute("while True: pass"))
        await asyncio.sleep(0.2)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        after = await repl.execute("kept", timeout=limit(5))
        assert (after.value, after.status) == ("1", "ok")


async def test_cancelling_while_code_is_sent_leaves_the_interpreter_usable() -> None:
    async with ForkServerRepl() as repl:
        task = asyncio.create_task(repl.execute("len('" + "x" * 10_000_000 + "')"))
        await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await works(repl)


async def test_closing_while_a_cell_runs_gives_infra() -> None:
    repl = ForkServerRepl()
    await repl.open()
    task = asyncio.create_task(repl.execute("import time; time.sleep(1000)"))
    await asyncio.sleep(0.1)
    await repl.close()
    with pytest.raises(InfrastructureError):
        async with asyncio.timeout(limit(5)):
            await task


async def test_late_output_of_threads_and_processes_is_marked() -> None:
    code = """
import os, threading, time
def late():
    while not os.path.exists('now'): time.sleep(0.01)
    os.write(1, b'late')
    open('printed', 'w').close()
threading.Thread(target=late).start()
"""
    async with ForkServerRepl() as repl:
        assert (await ran(repl, code)).text == ""
        await repl.sandbox.write_file("now", b"")
        await file_appears(repl.sandbox, "printed")
        result = await repl.execute("print('now')")
        assert (result.stdout, result.background) == ("now\n", "late")


async def test_nothing_runs_on_after_close() -> None:
    mark = f"93{os.getpid()}"
    repl = ForkServerRepl()
    await repl.open()
    await ran(repl, f"import subprocess\nfor _ in range(5): subprocess.Popen(['setsid', 'sleep', '{mark}'])")
    (clone,) = await repl.fork(1)
    await ran(clone, f"subprocess.Popen(['setsid', 'sleep', '{mark}']); None")
    async with asyncio.timeout(limit(5)):  # while a program takes another one's place, it has no command line
        while sum(mark in line for line in command_lines()) != 1:
            await asyncio.sleep(0.02)
    await repl.close()
    await clone.close()
    async with asyncio.timeout(limit(5)):
        while any(mark in line for line in command_lines()):
            await asyncio.sleep(0.02)


def command_lines() -> list[str]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    found.append(file.read().replace(b"\0", b" ").decode("utf-8", "replace"))
            except OSError:
                pass
    return found
