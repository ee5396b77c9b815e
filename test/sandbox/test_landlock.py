"""Threats that the Landlock sandbox stops and does not stop, beyond the contract."""

import ast
import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from helpers.limit import limit
from helpers.processes import run_program, started

from torchrl_agentic.sandbox import ResourceLimits, SandboxError, inside
from torchrl_agentic.sandbox.landlock import LandlockSandbox, why_not
from torchrl_agentic.sandbox.process import as_nobody

works = pytest.mark.skipif(why_not() is not None, reason=f"Landlock does not work here: {why_not()}")
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can set this attack up")
every_version = pytest.mark.parametrize("version", [1, 3, 5, 99])
"""Older ones leave more open, which has to be closed by other means; 99 stands for what is there."""


@contextlib.asynccontextmanager
async def opened(limits=None, version=99):
    async with LandlockSandbox(limits) as sandbox:
        sandbox._version = min(version, sandbox._version)
        yield sandbox


async def python(sandbox, code, *argv):
    """Run Python inside and return its output."""
    result = await sandbox.run([*sandbox.python_argv, "-c", code, *argv])
    return result.stdout + result.stderr


ATTEMPTS = """
import ctypes, errno, json, os, resource, select, signal, socket, subprocess, sys
libc = ctypes.CDLL(None, use_errno=True)

def call(*arguments):
    result = libc.syscall(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
    return result

outcomes = {}
for attempt in json.load(sys.stdin):
    os.chdir(os.environ["HOME"])
    try:
        exec(attempt)
        outcomes[attempt] = "done"
    except OSError as error:
        outcomes[attempt] = errno.errorcode[error.errno]
print(json.dumps(outcomes))
"""


async def outcomes(sandbox, attempts):
    """Return for each attempt, a piece of Python, "done" or the name of its error."""
    stdin = json.dumps(list(attempts)).encode()
    result = await sandbox.run([*sandbox.python_argv, "-c", ATTEMPTS], stdin=stdin)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture
def folder():
    """A folder that all users may read and write, with a secret; only root may use those of pytest."""
    with tempfile.TemporaryDirectory() as path:
        os.chmod(path, 0o777)
        secret = Path(path, "secret")
        secret.write_text("sesame")
        secret.chmod(0o666)
        yield path


@pytest.fixture
def victim():
    """A process of the same user as the code."""
    prefix, identity = as_nobody()
    with started([*prefix, "sleep", "100"], cwd="/", **identity) as process:
        yield process
        process.kill()


def processes():
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            found.append(Path("/proc", pid, "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return "\n".join(found)


async def until(condition):
    async with asyncio.timeout(limit(5)):
        while not condition():
            await asyncio.sleep(0.01)


OUT_OF_THE_FOLDER = """
open('{there}/secret').read()
open('/proc/self/root{there}/secret').read()
os.symlink('{there}/secret', 'link'); open('link').read()
os.symlink('{there}', 'away'); open('away/planted', 'w')
os.chdir('{there}'); open('secret').read()
os.open('secret', os.O_RDONLY, dir_fd=os.open('{there}', os.O_PATH))
os.listdir('{there}')
os.truncate('{there}/secret', 0)
open('{there}/secret', 'a')
open('{there}/new', 'w')
os.mkdir('{there}/folder')
os.mkfifo('{there}/fifo')
os.symlink('x', '{there}/symlink')
open('mine', 'w'); os.link('mine', '{there}/mine')
open('mine', 'w'); os.rename('mine', '{there}/moved')
os.mkdir('d'); os.rename('d', '{there}/d')
os.link('{there}/secret', 'linked')
os.rename('{there}/secret', 'got')
"""
ELSEWHERE = """
os.rename(os.getcwd(), os.getcwd() + '-moved')
os.rmdir(os.getcwd())
os.listdir('..')
os.listdir('/proc')
open('/proc/self/mem', 'rb')
open('/proc/self/environ', 'rb')
open('/dev/shm/new', 'w')
open('/dev/tty')
open('/etc/passwd')
open('/usr/new', 'w')
"""


@works
@every_version
async def test_paths_cannot_leave_the_folder(folder, version):
    attempts = (OUT_OF_THE_FOLDER.format(there=folder) + ELSEWHERE).split("\n")
    async with opened(version=version) as sandbox:
        found = await outcomes(sandbox, filter(None, attempts))
    assert set(found.values()) <= {"EACCES", "EPERM", "EXDEV"}, found
    assert Path(folder, "secret").read_text() == "sesame"
    assert os.listdir(folder) == ["secret"]


@works
async def test_the_same_ways_lead_to_a_folder_that_was_granted(folder):
    """Otherwise the test above might only prove that its attempts are wrong."""
    attempts = filter(None, OUT_OF_THE_FOLDER.format(there=folder).split("\n"))
    async with opened(ResourceLimits(fs_write_roots=(folder,))) as sandbox:
        found = await outcomes(sandbox, attempts)
    assert set(found.values()) == {"done"}, found


@works
@every_version
async def test_no_other_process_can_be_signalled_read_or_limited(victim, version):
    """The trainer, a stranger of the same user, and the trusted parent; signal 0 asks whether one could."""
    others = (os.getpid(), victim.pid, "os.getppid()")
    attempts = [
        f"pid = {pid}; {attack}"
        for pid in others
        for attack in (
            "os.kill(pid, 0)",
            "os.kill(pid, signal.SIGKILL)",
            "os.kill(-pid, signal.SIGKILL)",
            "call(200, pid, 9)",  # tkill
            "call(234, pid, pid, 9)",  # tgkill
            "signal.pidfd_send_signal(os.pidfd_open(pid), 9)",
            "resource.prlimit(pid, resource.RLIMIT_CPU, (1, 1))",
            "os.setpriority(os.PRIO_PROCESS, pid, 19)",
            "os.sched_setaffinity(pid, {0})",
            "os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))",
            "call(101, 16, pid, 0, 0)",  # ptrace, PTRACE_ATTACH
            "call(310, pid, 0, 0, 0, 0, 0)",  # process_vm_readv
            "call(438, os.pidfd_open(pid), 0, 0)",  # pidfd_getfd
            "open(f'/proc/{pid}/environ').read()",
            "open(f'/proc/{pid}/cmdline').read()",
            "open(f'/proc/{pid}/mem', 'rb')",
            "os.listdir(f'/proc/{pid}/fd')",
            "os.readlink(f'/proc/{pid}/cwd')",
        )
    ]
    attempts += ["os.setpriority(os.PRIO_USER, os.getuid(), 19)"]
    async with opened(version=version) as sandbox:
        found = await outcomes(sandbox, attempts)
        through = {attempt: end for attempt, end in found.items() if end not in ("EPERM", "EACCES", "ESRCH")}
        assert not through
    assert victim.poll() is None


@works
@every_version
async def test_a_signal_to_everybody_stays_inside(version):
    """With SIGURG, which most ignore: should this fail, it must not end the machine."""
    prefix, identity = as_nobody()
    script = "trap 'exit 3' URG; echo ready; while :; do sleep 0.1; done"
    listener = [*prefix, "sh", "-c", script]
    with started(listener, cwd="/", stdout=subprocess.PIPE, **identity) as listening:
        assert listening.stdout.read(6) == b"ready\n"
        async with opened(version=version) as sandbox:
            await outcomes(sandbox, ["os.kill(-1, signal.SIGURG)"])
        with pytest.raises(subprocess.TimeoutExpired):
            listening.wait(0.3)
        listening.send_signal(signal.SIGURG)
        assert listening.wait(limit(5)) == 3


@works
@every_version
async def test_its_own_processes_can_be_signalled(version):
    """Where the parent decides on it, too: children, their groups and sessions, its own group, itself."""
    code = (
        "import os, signal, subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '99']); child.kill(); print(child.wait())\n"
        "child = subprocess.Popen(['sleep', '99'], start_new_session=True)\n"
        "os.killpg(child.pid, signal.SIGTERM); print(child.wait())\n"
        "signal.signal(signal.SIGUSR1, lambda *_: print('got it', flush=True)); os.kill(0, signal.SIGUSR1)\n"
        "os.abort()"
    )
    async with opened(version=version) as sandbox:
        result = await sandbox.run([*sandbox.python_argv, "-c", code])
    assert (result.stdout, result.exit_code) == ("-9\n-15\ngot it\n", -signal.SIGABRT), result.stderr


@works
async def test_the_owner_of_a_descriptor_cannot_be_another_process(victim):
    """SIGIO, or any other signal, goes to the owner when there is something to read."""
    attempts = [
        f"import fcntl; r, w = os.pipe(); fcntl.fcntl(r, fcntl.F_SETOWN, {victim.pid})",
        f"import fcntl; r, w = os.pipe(); fcntl.ioctl(r, 0x8901, ({victim.pid}).to_bytes(4, 'little'))",
    ]
    async with opened(version=5) as sandbox:
        assert set((await outcomes(sandbox, attempts)).values()) == {"EPERM"}


@works
@every_version
async def test_nothing_is_left_running_however_it_hides(version):
    """Daemons: forked twice, in sessions of their own, as orphans whose parents take in orphans; at once."""
    mark = f"91{os.getpid()}"
    code = (
        "import ctypes, os, sys, time; libc = ctypes.CDLL(None)\n"
        "for _ in range(3):\n"
        "    if os.fork() == 0:\n"
        "        os.setsid(); libc.prctl(36, 1, 0, 0, 0); libc.prctl(1, 0, 0, 0, 0)\n"
        "        if os.fork() == 0:\n"
        "            os.setsid()\n"
        "            for fd in (0, 1, 2): os.close(fd)\n"
        "            time.sleep(100)\n"
        "        os._exit(0)\n"
        "os._exit(5)"
    )
    async with opened(version=version) as sandbox:
        result = await sandbox.run([*sandbox.python_argv, "-c", code, mark])
        assert result.exit_code == 5
        assert mark not in processes()


FORKS = (
    "import os, sys\nfor _ in range({n}):\n    if os.fork() == 0:\n"
    "        while True:\n            try:\n                if os.fork(): os._exit(0)\n"
    "            except OSError: pass\n{then}"
)


@works
@pytest.mark.parametrize("then", ["os._exit(0)", "import time; time.sleep(100)"])
async def test_processes_that_fork_and_end_without_pause_are_all_ended(then):
    """Each is gone before it could be killed; what ends them is that they can start no other."""
    mark = f"92{os.getpid()}"
    async with opened(ResourceLimits(wall_seconds=1)) as sandbox:
        result = await sandbox.run([*sandbox.python_argv, "-c", FORKS.format(n=8, then=then), mark])
        assert mark not in processes()
    assert result.timed_out == ("sleep" in then)


@works
async def test_nothing_is_left_running_if_the_supervisor_gets_no_processor_time():
    """It is stopped here, as on a busy machine: it can neither end the processes nor be asked to."""
    mark = f"99{os.getpid()}"
    code = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    async with opened(ResourceLimits(max_processes=8)) as sandbox:
        process = await sandbox.spawn([*sandbox.python_argv, "-c", code, mark])
        await until(lambda: processes().count(mark) > 4)
        os.kill(process.process.pid, signal.SIGSTOP)
        await process.kill()
        assert mark not in processes()


@works
async def test_the_number_of_processes_holds_when_all_fork_at_once_and_for_threads():
    code = (
        "import os, threading, time\n"
        "for _ in range(6):\n"
        "    try: os.fork()\n"
        "    except BlockingIOError: pass\n"
        "time.sleep(0.3); os.write(1, b'.')\ntime.sleep(0.5)\n"
    )
    threads = (
        "import threading, time\ntry:\n"
        "    for n in range(40): threading.Thread(target=time.sleep, args=(0.2,), daemon=True).start()\n"
        "except RuntimeError: print(n)"
    )
    async with opened(ResourceLimits(max_processes=16, memory_bytes=None)) as sandbox:
        assert 12 <= len(await python(sandbox, code)) <= 16
        assert await python(sandbox, threads) == "15\n"


@works
async def test_others_of_the_same_user_do_not_count(victim):
    """As RLIMIT_NPROC would: a user with a hundred processes could start nothing."""
    del victim
    async with opened(ResourceLimits(max_processes=2)) as one, opened() as other:
        process = await other.spawn(["sh", "-c", "sleep 99 & sleep 99 & sleep 99 & echo up; wait"])
        assert await process.receive() == b"up\n"
        assert (await one.run(["sh", "-c", "/bin/echo a; /bin/echo b"])).stdout == "a\nb\n"


@works
async def test_when_the_trainer_is_killed_all_of_it_ends(folder):
    mark = f"93{os.getpid()}"
    code = (
        "import asyncio, sys\nfrom torchrl_agentic.sandbox.landlock import LandlockSandbox\n"
        "async def main():\n    async with LandlockSandbox() as sandbox:\n"
        "        await sandbox.run(['sh', '-c', 'setsid sleep $0 & sleep $0', sys.argv[1]])\n"
        "asyncio.run(main())"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": folder}
    with started([sys.executable, "-c", code, mark], env=env) as trainer:
        await until(lambda: processes().count(f"sleep {mark}\n") + processes().count(f"sleep {mark} ") >= 2)
        trainer.kill()
        await until(lambda: mark not in processes())


@works
@every_version
async def test_the_trusted_parent_cannot_be_killed_from_inside(version):
    async with opened(version=version) as sandbox:
        result = await sandbox.run(
            ["sh", "-c", "kill -9 $PPID; kill -STOP $PPID; kill -9 0; echo not reached"]
        )
        assert (result.exit_code, result.stdout) == (-9, "")


@works
async def test_a_long_lived_process_is_served_and_ends_with_all_it_started():
    mark = f"94{os.getpid()}"
    async with opened() as sandbox:
        process = await sandbox.spawn(["sh", "-c", f"setsid sleep {mark} & echo err >&2; cat; exit 3"])
        await process.send(b"hello")
        assert await process.receive() == b"hello"
        assert mark in processes()
        await process.kill()
        assert mark not in processes()
        assert await process.receive() == b""
        assert process.errors() == "err\n"
        await process.kill()
        ended = await sandbox.spawn(["sh", "-c", "exit 137"])
        assert await ended.wait() == "exit code 137"
        await ended.kill()
        killed = await sandbox.spawn(["sh", "-c", "kill -9 $$"])
        assert await killed.wait() == "killed by SIGKILL"
        await killed.kill()
        left = await sandbox.spawn(["sleep", mark])
        await until(lambda: mark in processes())
    assert mark not in processes()
    with pytest.raises(EOFError):
        await left.send(b"x")


@works
@pytest.mark.parametrize("network", ["none", "full"])
async def test_named_shared_objects_are_denied(network):
    """It would outlive them, and others could use it."""
    attempts = [
        f"call({number}, 0x1234, 4096, 0o1666, 0)"
        for number in (29, 30, 31, 64, 65, 66, 220, 68, 69, 70, 71)  # shmget … msgctl
    ]
    attempts += ["call(240, b'/name', 0o102, 0o600, 0)", "call(241, b'/name')"]  # mq_open, mq_unlink
    attempts += ["call(253)", "call(294, 0)"]  # inotify_init: it tells the names of new files in any folder
    async with opened(ResourceLimits(network=network)) as sandbox:
        assert set((await outcomes(sandbox, attempts)).values()) == {"EPERM"}


@works
async def test_nothing_of_the_kernel_is_left_that_only_attacks_need():
    attempts = [
        f"call({number}, 0, 0, 0, 0, 0)"
        for number in (
            101,
            250,
            321,
            298,
            323,
            425,
            426,
            427,
            272,
            308,
            165,
            166,
            155,
            161,
            428,
            430,
            304,
            300,
        )
    ]
    attempts += ["call(56, 0x10000000 | 17, 0, 0, 0, 0)"]  # clone into a new user namespace
    attempts += ["import fcntl; fcntl.ioctl(0, 0x5412, b'x')"]  # TIOCSTI
    attempts += ["call(317, 1, 8, b'')"]  # a seccomp filter with a listener of its own
    async with opened() as sandbox:
        assert set((await outcomes(sandbox, attempts)).values()) == {"EPERM"}


@works
@every_version
async def test_without_a_network_no_socket_reaches_anybody(folder, version):
    """Also not one of a pair: a datagram socket could be sent to any name."""
    path, abstract = f"{folder}/socket", f"\0torchrl_agentic-{os.getpid()}"
    attempts = [
        f"socket.socket(getattr(socket, {family!r}), getattr(socket, {kind!r}))"
        for family in ("AF_UNIX", "AF_INET", "AF_INET6", "AF_NETLINK", "AF_PACKET", "AF_VSOCK", "AF_ALG")
        for kind in ("SOCK_STREAM", "SOCK_DGRAM", "SOCK_RAW", "SOCK_SEQPACKET")
    ]
    attempts += [
        f"socket.socketpair(socket.AF_UNIX, socket.{kind})[0].sendto(b'x', {name!r})"
        for kind in ("SOCK_DGRAM", "SOCK_RAW", "SOCK_STREAM", "SOCK_SEQPACKET")
        for name in (path, abstract)
    ]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one, socket.socket(socket.AF_UNIX) as other:
        one.bind(path)
        os.chmod(path, 0o777)
        one.setblocking(False)
        other.bind(abstract)
        other.listen()
        async with opened(version=version) as sandbox:
            found = await outcomes(sandbox, attempts)
            # EPIPE: the name is ignored, and the other one of the pair is gone.
            assert set(found.values()) <= {"EAFNOSUPPORT", "EPERM", "EISCONN", "EPIPE"}, found
            assert "done" in (await outcomes(sandbox, ["socket.socketpair()"])).values()
        with pytest.raises(BlockingIOError):
            one.recv(1)


@works
@pytest.mark.parametrize("version", [3, 5, 99])
async def test_a_full_network_is_the_hosts_with_its_named_sockets(folder, version):
    """Does not stop: the host's loopback, sockets by path; abstract ones with Landlock before version 6."""
    path, abstract = f"{folder}/socket", f"\0torchrl_agentic-{os.getpid()}"
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX) as named,
        socket.socket(socket.AF_UNIX) as unnamed,
    ):
        udp.bind(("127.0.0.1", 0))
        named.bind(path)
        os.chmod(path, 0o777)
        unnamed.bind(abstract)
        named.listen()
        unnamed.listen()
        reach = {
            f"socket.create_connection({tcp.getsockname()})": "done",
            f"socket.socket(2, 2).sendto(b'x', {udp.getsockname()})": "done",
            f"socket.socket(1).connect({path!r})": "done",
            "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)": "EAFNOSUPPORT",
        }
        async with opened(ResourceLimits(network="full"), version) as sandbox:
            reach[f"socket.socket(1).connect({abstract!r})"] = "done" if sandbox._version < 6 else "EPERM"
            assert await outcomes(sandbox, reach) == reach
            names = "import socket; print(socket.getaddrinfo('localhost', 80)[0][4][0])"
            assert (await python(sandbox, names)).strip() in ("127.0.0.1", "::1")


@works
@root_only
async def test_a_setuid_program_gives_no_rights(folder):
    shutil.copy("/usr/bin/id", f"{folder}/id")
    os.chmod(f"{folder}/id", 0o4755)
    async with opened(ResourceLimits(fs_read_roots=(folder,))) as sandbox:
        assert (await sandbox.run([f"{folder}/id", "-u"])).stdout == "65534\n"
        prefix, _ = as_nobody()
        outside = run_program([*prefix, f"{folder}/id", "-u"], capture_output=True, check=True)
        assert outside.stdout == b"0\n", "the test needs a file system on which setuid counts"


@works
async def test_open_files_of_the_trainer_are_not_passed_on(folder):
    with open(f"{folder}/secret") as secret:
        os.set_inheritable(secret.fileno(), True)
        code = (
            "import os\nfor fd in range(1024):\n"
            "    try: os.fstat(fd); print(fd, end=' ')\n    except OSError: pass"
        )
        async with opened() as sandbox:
            assert await python(sandbox, code) == "0 1 2 "
            process = await sandbox.spawn([*sandbox.python_argv, "-c", code])
            assert await process.receive() == b"0 1 2 "


@works
async def test_neither_command_nor_environment_can_be_read_by_other_users():
    """The trusted process has neither in its arguments or environment."""
    limits = ResourceLimits(env={"TOKEN": f"sesame-{os.getpid()}", "PATH": "/usr/bin:/bin"})
    async with opened(limits) as sandbox:
        process = await sandbox.spawn(["sh", "-c", "echo $TOKEN; sleep 99; exit $TOKEN"])
        assert await process.receive() == f"sesame-{os.getpid()}\n".encode()
        found = Path("/proc", str(process.process.pid))
        assert "TOKEN" not in found.joinpath("cmdline").read_text()
        if os.geteuid() == 0:
            assert b"sesame" not in found.joinpath("environ").read_bytes()
        else:
            with pytest.raises(PermissionError):
                found.joinpath("environ").read_bytes()


@works
async def test_files_of_the_models_do_not_get_into_the_trusted_process(monkeypatch):
    """Python looks for modules in the folder it starts in, and wherever PYTHONPATH says."""
    async with opened() as sandbox:
        folder = (await sandbox.run(["pwd"])).stdout.strip()
        for name in ("marshal", "ctypes", "signal", "socket", "encodings", "sitecustomize"):
            await sandbox.write_file(f"{name}.py", b"import os; os.write(2, b'got in')")
        monkeypatch.chdir(folder)
        limits = ResourceLimits(env={"PYTHONPATH": folder, "PATH": "/usr/bin:/bin"})
        async with opened(limits) as other:
            for each in (sandbox, other):
                result = await each.run(["true"])
                assert (result.exit_code, result.stderr) == (0, "")


@works
async def test_existence_of_any_path_is_visible(folder):
    """Does not stop this."""
    attempts = [
        f"assert os.stat('{folder}/secret').st_size == 6",
        "os.stat('/proc/1')",
        f"os.stat('{folder}/x')",
    ]
    async with opened() as sandbox:
        assert list((await outcomes(sandbox, attempts)).values()) == ["done", "done", "ENOENT"]


@works
async def test_rights_of_files_of_the_same_user_can_be_changed(folder):
    """Does not stop this, where code runs as the trainer's user; root's files are not the code's."""
    attempts = [f"os.chmod('{folder}/secret', 0o600)", f"os.utime('{folder}/secret', (1, 1))"]
    os.chmod(f"{folder}/secret", 0o644)
    async with opened() as sandbox:
        expected = "EPERM" if os.geteuid() == 0 else "done"
        assert set((await outcomes(sandbox, attempts)).values()) == {expected}


@works
async def test_memory_and_disk_have_no_limit_in_total():
    """Does not stop this: each of two processes may have all of it, and each of two files."""
    async with opened(ResourceLimits(memory_bytes=200 << 20, disk_bytes=1 << 20)) as sandbox:
        code = "import os; os.fork(); x = bytearray(150 << 20); print('got it', flush=True); os.wait()"
        assert (await python(sandbox, code)).count("got it") == 2
        made = await sandbox.run(
            ["sh", "-c", "for n in 1 2; do head -c 1000000 /dev/zero > $n; done; wc -c 1 2"]
        )
        assert "2000000 total" in made.stdout


@works
async def test_when_memory_runs_out_the_kernel_ends_the_code_first():
    async with opened() as sandbox:
        process = await sandbox.spawn(["sh", "-c", "echo up; sleep 99"])
        await process.receive()
        inside_pid = (
            Path(f"/proc/{process.process.pid}/task/{process.process.pid}/children").read_text().split()[0]
        )
        assert Path("/proc", inside_pid, "oom_score_adj").read_text() == "1000\n"


@works
async def test_details_of_the_machine_are_visible():
    """Does not stop this."""
    async with opened() as sandbox:
        seen = await python(sandbox, "import os; print(os.uname().release, os.cpu_count(), end='')")
        assert seen == f"{os.uname().release} {os.cpu_count()}"


@works
async def test_roots_that_were_granted_are_there(folder):
    async with opened(ResourceLimits(fs_read_roots=(folder,))) as sandbox:
        assert (await sandbox.run(["cat", f"{folder}/secret"])).stdout == "sesame"
        assert (await sandbox.run(["touch", f"{folder}/new"])).exit_code != 0
    async with opened(ResourceLimits(fs_write_roots=(folder,))) as sandbox:
        assert (await sandbox.run(["touch", f"{folder}/new"])).exit_code == 0
    assert os.path.exists(f"{folder}/new")


@works
async def test_a_broken_sandbox_is_an_error_and_no_result():
    folder = tempfile.mkdtemp(dir="/var/tmp")
    os.chmod(folder, 0o755)
    async with opened(ResourceLimits(fs_read_roots=(folder,))) as sandbox:
        os.rmdir(folder)
        with pytest.raises(SandboxError, match=folder):
            await sandbox.run(["true"])
    with pytest.raises(SandboxError, match="not open"):
        await sandbox.run(["true"])


@works
async def test_errors_of_the_code_are_results():
    async with opened() as sandbox:
        await sandbox.run(["sh", "-c", "mkdir -p sub; touch plain; mkdir folder; ln -s /root away"])
        assert (await sandbox.run(["pwd"], cwd="sub")).stdout.endswith("/sub\n")
        for cwd in ("missing", "plain", "away"):
            assert (await sandbox.run(["pwd"], cwd=cwd)).exit_code == 126
        for argv, code in (
            (["./plain"], 126),
            (["./folder"], 126),
            (["./missing"], 127),
            (["echo", "x" * 200_000], 126),
        ):
            assert (await sandbox.run(argv)).exit_code == code
        for signal_name, code in (("SEGV", -11), ("TERM", -15), ("INT", -2), ("HUP", -1)):
            assert (await sandbox.run(["sh", "-c", f"kill -{signal_name} $$"])).exit_code == code
        assert (await sandbox.run(["sh", "-c", "exit 137"])).exit_code == 137
        await sandbox.run(["sh", "-c", "chmod 000 ."])
        assert (await sandbox.run(["true"])).exit_code == 126
        for path in ("/", "/tmp", "..", "/work/../etc", "a\0b"):
            with pytest.raises(PermissionError):
                await sandbox.run(["pwd"], cwd=path)


@works
async def test_a_limit_that_is_too_small_to_start_with_is_a_result():
    async with opened(ResourceLimits(memory_bytes=1 << 20)) as sandbox:
        assert (await sandbox.run(["true"])).exit_code != 0


@works
async def test_the_environment_is_the_one_in_the_limits():
    async with opened(ResourceLimits(env={"A": "b"})) as sandbox:
        assert (await sandbox.run(["/usr/bin/env"])).stdout == "A=b\n"
    async with opened() as sandbox:
        await sandbox.write_file("f", b"")
        folder = (await sandbox.run(["pwd"])).stdout.strip()
        assert os.listdir(folder) == ["f"]
        seen = (await sandbox.run(["env"])).stdout.split()
        assert {f"HOME={folder}", f"TMPDIR={folder}"} <= set(seen)
        assert (await python(sandbox, "import tempfile; print(tempfile.gettempdir())")).strip() == folder


@works
async def test_cancelling_while_it_starts_leaves_nothing(monkeypatch):
    mark = f"95{os.getpid()}"
    async with opened() as sandbox:
        for delay in (0, 0.01, 0.02, 0.03, 0.05):
            task = asyncio.create_task(sandbox.run(["sleep", mark]))
            await asyncio.sleep(delay)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await until(lambda: mark not in processes())


@pytest.mark.parametrize("machine", ["armv7l", "riscv64"])
def test_other_processors_are_refused_by_name(monkeypatch, machine):
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert machine in why_not.__wrapped__()


@pytest.mark.skipif(sys.platform != "linux", reason="another reason comes first")
@pytest.mark.parametrize(
    ("missing", "instead", "reason"),
    [
        ("python_runtime.find_python", None, "can run no Python"),
        ("landlock._landlock_version", 0, "kernel has no Landlock"),
    ],
)
def test_missing_requirement_is_reported(monkeypatch, missing, instead, reason):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(f"torchrl_agentic.sandbox.{missing}", lambda: instead)
    assert reason in why_not.__wrapped__()


def test_code_inside_the_sandbox_needs_only_an_old_python():
    for path in Path(inside.__path__[0]).glob("*.py"):
        tree = ast.parse(path.read_text("utf-8"), feature_version=(3, 9))
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = (
                    [node.module]
                    if isinstance(node, ast.ImportFrom)
                    else [alias.name for alias in node.names]
                )
                for name in names:
                    ours = name.startswith(inside.__name__)
                    assert ours or name.partition(".")[0] in sys.stdlib_module_names, (path, name)
