"""Namespaces and mounts, by ctypes: see namespaces(7) and user_namespaces(7)."""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import fcntl
import os
import signal
import socket
import struct
from collections.abc import Iterable

from torchrl_agentic.sandbox.inside import rights

_libc = ctypes.CDLL(None, use_errno=True)
_here = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter's lock, which a new process needs to hold

NEW_USER, NEW_MOUNT, NEW_PID, NEW_IPC, NEW_UTS, NEW_NET = (
    0x10000000, 0x00020000, 0x20000000, 0x08000000, 0x04000000, 0x40000000,
)  # fmt: skip
NESTED = NEW_USER | NEW_MOUNT | NEW_PID | NEW_IPC | NEW_UTS
"""The namespaces that a trajectory has of its own."""
_ENTERED = (
    ("user", NEW_USER), ("mnt", NEW_MOUNT), ("ipc", NEW_IPC), ("uts", NEW_UTS), ("net", NEW_NET),
    ("pid", NEW_PID),
)  # fmt: skip
"""The names of these below /proc/self/ns, in the order in which a process may enter them."""
_CLONE, _KCMP = {"x86_64": (56, 312), "aarch64": (220, 272)}.get(os.uname().machine, (0, 0))
_KCMP_VM = 1
_NOSUID, _NODEV, _NOEXEC, _BIND, _REC, _PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18

_FLAGS = {"proc": _NODEV | _NOEXEC, "devpts": _NOEXEC}


def _check(failed: int, what: str) -> None:
    if failed:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def bare_fork(flags: int = 0) -> int:
    """Fork, into new namespaces of these kinds, past all hooks; 0 in the child, as os.fork.

    It costs half of os.fork. Only for a process of one thread, whose child never raises a signal by itself:
    neither Python nor the C library learn of it.

    Raises:
        OSError: there can be no more processes or namespaces.
    """
    pid = _here.syscall(_CLONE, flags | signal.SIGCHLD, None, None, None, None)
    _check(pid < 0, "clone")
    return pid


def fork_into_namespaces(flags: int) -> int:
    """Fork into new namespaces, as process 1 of a new PID namespace; 0 in the child, as os.fork.

    The user inside has the number that it has outside, and all capabilities over what is new.
    For the same processes as `bare_fork`.

    Raises:
        OSError: there can be no more; InterruptedError: code of the same user got in between.
    """
    uid, gid = os.getuid(), os.getgid()
    done, end = os.pipe()
    try:
        pid = bare_fork(flags)
    except OSError:
        os.close(done)
        os.close(end)
        raise
    if pid == 0:
        os.close(done)
        try:
            rights.dumpable(True)  # else the files below /proc/self are root's
            rights.tell_kernel("setgroups", b"deny")
            rights.tell_kernel("uid_map", b"%d %d 1" % (uid, uid))
            rights.tell_kernel("gid_map", b"%d %d 1" % (gid, gid))
            with contextlib.suppress(OSError):  # before the zygote, with which all others would end
                rights.tell_kernel("oom_score_adj", b"500")
            rights.dumpable(False)
            os.write(end, b".")
        except BaseException:
            os._exit(1)  # else it would go on as a second one of us
        os.close(end)
        return 0
    os.close(end)
    mapped = os.read(done, 1)
    os.close(done)
    if not mapped:
        # Who has made the namespace may write its maps, and so may whoever is of the same user.
        raise InterruptedError(errno.EINTR, "a process of the code got in between")
    return pid


def mount(kind: str, path: str, options: str = "") -> None:
    """Mount a file system of a kind that needs no device, without set-user-id programs and devices."""
    flags = _NOSUID | _FLAGS.get(kind, _NODEV)
    name = kind.encode()
    _check(_libc.mount(name, path.encode(), name, flags, options.encode()), "mount " + path)


def bind(fd: int, path: str) -> None:
    """Show an open file or folder of this mount namespace at a path, too; what is read-only stays so."""
    source = "/proc/self/fd/%d" % fd  # noqa: UP031  as in the rest of what is loaded inside
    _check(_libc.mount(source.encode(), path.encode(), None, _BIND | _REC, None), "bind " + path)


def keep_mounts_private() -> None:
    """Let what is mounted from now on be seen here alone."""
    _check(_libc.mount(None, b"/", None, _REC | _PRIVATE, None), "make / private")


def files_of(flags: int) -> list[int]:
    """Open the files of our own namespaces of these kinds, in the order in which they can be entered."""
    return [os.open("/proc/self/ns/" + name, os.O_RDONLY) for name, kind in _ENTERED if kind & flags]


def enter(files: Iterable[int], flags: int) -> None:
    """Enter the namespaces of these kinds, with the files from `files_of`; the next child will be in all."""
    kinds = [(name, kind) for name, kind in _ENTERED if kind & flags]
    for fd, (name, kind) in zip(files, kinds):  # noqa: B905  strict= came with 3.10
        _check(_libc.setns(fd, kind), "enter the namespace " + name)


def share_memory(one: int, other: int) -> bool:
    """Whether two processes have one memory; see kcmp(2). One that has ended shares nothing.

    Raises:
        OSError: one of them cannot be looked into.
    """
    found = _libc.syscall(_KCMP, one, other, _KCMP_VM, 0, 0)
    if found < 0 and ctypes.get_errno() == errno.ESRCH:
        return False
    _check(found < 0, "compare processes")
    return found == 0


def raise_loopback() -> None:
    """Switch the loopback interface of a new network namespace on."""
    up, get_flags, set_flags = 1, 0x8913, 0x8914
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = array.array("B", struct.pack("16sh22x", b"lo", 0))
        fcntl.ioctl(any_socket, get_flags, request)
        (flags,) = struct.unpack_from("h", request, 16)
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sh22x", b"lo", flags | up))
