"""Every public name is there without what only POSIX systems have; what needs it says so."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.forked import run_forked

from torchrl_agentic.errors import check_posix
from torchrl_agentic.evaluation.locks import lock_file
from torchrl_agentic.limits import ClusterRateLimiter

WITHOUT_POSIX = """
import importlib, os, select, signal, socket, socketserver, sys
from pathlib import Path

def public_names():
    for path in sorted(ROOT.rglob("__init__.py")):
        package = importlib.import_module(".".join(path.relative_to(ROOT.parent).parent.parts))
        for name in getattr(package, "__all__", ()):
            getattr(package, name)
            yield name

ROOT = Path(sys.argv[1])
before = list(public_names())  # with all that other packages load, which may need POSIX
for name in [name for name in sys.modules if name.partition(".")[0] == "torchrl_agentic"]:
    del sys.modules[name]
for name in "fcntl grp posix pty pwd resource syslog termios tty".split():
    sys.modules[name] = None
for module, names in {
    os: "fork forkpty getegid geteuid getgid getgroups getloadavg getpgid getpgrp getpriority getsid getuid"
    " initgroups killpg mkfifo mknod nice openpty pipe2 posix_spawn pread pwrite register_at_fork"
    " sched_getaffinity sched_setaffinity setgid setpgid setsid setuid statvfs sysconf uname wait3 wait4"
    " WNOHANG WIFEXITED chown fchmod fchown lchown chroot ctermid ttyname memfd_create pidfd_open"
    " O_CLOEXEC O_DIRECTORY O_DSYNC O_NOCTTY O_NOFOLLOW O_NONBLOCK O_PATH O_SYNC O_TMPFILE",
    select: "poll epoll",
    signal: "SIGALRM SIGCHLD SIGCONT SIGHUP SIGKILL SIGPIPE SIGQUIT SIGSTOP SIGSYS SIGTSTP SIGUSR1 SIGUSR2"
    " SIGWINCH SIGXCPU SIGXFSZ ITIMER_REAL SIG_BLOCK alarm pthread_sigmask setitimer sigwait",
    socket: "AF_NETLINK AF_UNIX AF_VSOCK CMSG_LEN CMSG_SPACE SCM_RIGHTS recv_fds send_fds",
    socketserver: "ForkingMixIn ThreadingUnixStreamServer UnixStreamServer",
}.items():
    for name in names.split():
        vars(module).pop(name, None)
sys.platform = "win32"
assert list(public_names()) == before
print(len(before))
"""


@pytest.mark.slow
def test_every_public_name_is_imported_without_posix(tmp_path: Path):
    program = tmp_path / "without_posix.py"
    program.write_text(WITHOUT_POSIX)
    done = run_forked(program, str(Path(__file__).parents[1] / "torchrl_agentic"))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 300


def test_what_needs_posix_says_so(monkeypatch: pytest.MonkeyPatch):
    check_posix("a fork")
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(NotImplementedError, match="a fork does not work on Windows: use Linux"):
        check_posix("a fork")
    with pytest.raises(NotImplementedError, match="ClusterRateLimiter over the processes of a machine"):
        ClusterRateLimiter("windows", over="machine", max_concurrent=1)


def test_a_file_is_locked_for_one_program(tmp_path: Path):
    with open(tmp_path / "samples", "w") as first, open(tmp_path / "samples", "r+") as second:
        assert lock_file(first.fileno())
        assert not lock_file(second.fileno())
        first.close()
        assert lock_file(second.fileno())


@pytest.mark.parametrize("is_held", [False, True])
def test_a_lock_on_windows_is_a_byte_behind_the_data(
    is_held: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Only the choice of the call is tested: `msvcrt` is a fake, and no Windows is at hand."""
    with open(tmp_path / "samples", "w+b") as file:
        positions: list[int] = []

        def locking(descriptor: int, mode: int, size: int) -> Any:
            positions.append(file.raw.tell())
            assert (descriptor, mode, size) == (file.fileno(), 2, 1)
            if is_held:
                raise PermissionError(13, "Permission denied")

        monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(locking=locking, LK_NBLCK=2))
        monkeypatch.setattr(sys, "platform", "win32")
        assert lock_file(file.fileno()) is not is_held
        assert positions[0] > 1 << 30
