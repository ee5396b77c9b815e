"""Namespaces and mounts, by ctypes: see namespaces(7) and user_namespaces(7)."""

# Windows lacks the modules and functions that are bound only elsewhere; nothing here runs there.
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import os
import signal
import socket
import struct
import sys
from collections.abc import Iterable

from torchrl_agentic.sandbox.inside import rights

if sys.platform != "win32":
    import fcntl

    _libc = ctypes.CDLL(None, use_errno=True)
    _here = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter lock, which the new process must hold
    _CLONE, _KCMP = {"x86_64": (56, 312), "aarch64": (220, 272)}.get(os.uname().machine, (0, 0))

NEW_USER, NEW_MOUNT, NEW_PID, NEW_IPC, NEW_UTS, NEW_NET = (
    0x10000000, 0x00020000, 0x20000000, 0x08000000, 0x04000000, 0x40000000,
)  # fmt: skip
NESTED = NEW_USER | NEW_MOUNT | NEW_PID | NEW_IPC | NEW_UTS
"""Namespaces of each trajectory."""
_ENTERED = (
    ("user", NEW_USER), ("mnt", NEW_MOUNT), ("ipc", NEW_IPC), ("uts", NEW_UTS), ("net", NEW_NET),
    ("pid", NEW_PID),
)  # fmt: skip
"""Their names below /proc/self/ns, in the order in which a process can enter them."""
_KCMP_VM = 1
_NOSUID, _NODEV, _NOEXEC, _BIND, _REC, _PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18

_FLAGS = {"proc": _NODEV | _NOEXEC, "devpts": _NOEXEC}


def _check(failed: int, what: str) -> None:
    if failed:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def bare_fork(flags: int = 0) -> int:
    """Fork into new namespaces without running any hooks. Return 0 in the child, as os.fork.

    It takes half the time of os.fork. The process must have one thread, and its child must not rely on
    signals that it raises itself, because neither Python nor the C library is notified.

    Args:
        flags: CLONE_NEW* flags of the new namespaces; 0 for none.

    Raises:
        OSError: If there can be no more processes or namespaces.
    """
    pid = _here.syscall(_CLONE, flags | signal.SIGCHLD, None, None, None, None)
    _check(pid < 0, "clone")
    return pid


def fork_into_namespaces(flags: int) -> int:
    """Fork into new namespaces, as process 1 of a new PID namespace. Return 0 in the child, as os.fork.

    The user has the same number inside as outside, and all capabilities over the new namespaces. The
    restrictions of `bare_fork` apply.

    Args:
        flags: CLONE_NEW* flags of the new namespaces.

    Raises:
        InterruptedError: If code of the same user interfered.
        OSError: If there can be no more processes or namespaces.
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
            rights.set_dumpable(True)  # otherwise the files below /proc/self belong to root
            rights.tell_kernel("setgroups", b"deny")
            rights.tell_kernel("uid_map", b"%d %d 1" % (uid, uid))
            rights.tell_kernel("gid_map", b"%d %d 1" % (gid, gid))
            with contextlib.suppress(OSError):  # before the zygote, because all others would end with it
                rights.tell_kernel("oom_score_adj", b"500")
            rights.set_dumpable(False)
            os.write(end, b".")
        except BaseException:
            os._exit(1)  # otherwise it would continue as a second copy of this process
        os.close(end)
        return 0
    os.close(end)
    mapped = os.read(done, 1)
    os.close(done)
    if not mapped:
        # The creator of the namespace may write its maps, and so may other processes of the same user.
        raise InterruptedError(errno.EINTR, "a process of the code interfered")
    return pid


def mount(kind: str, path: str, options: str = "") -> None:
    """Mount a file system that needs no device, without setuid programs and devices.

    Args:
        kind: Type of the file system.
        path: Where to mount it.
        options: Mount options.
    """
    flags = _NOSUID | _FLAGS.get(kind, _NODEV)
    name = kind.encode()
    _check(_libc.mount(name, path.encode(), name, flags, options.encode()), "mount " + path)


def bind(fd: int, path: str) -> None:
    """Also show an open file or folder of this mount namespace at a path. If it is read-only, it stays so.

    Args:
        fd: Descriptor of the file or folder.
        path: Where to show it.
    """
    source = "/proc/self/fd/%d" % fd  # noqa: UP031  as in the rest of what is loaded inside
    _check(_libc.mount(source.encode(), path.encode(), None, _BIND | _REC, None), "bind " + path)


def keep_mounts_private() -> None:
    """Make all later mounts visible in this namespace only."""
    _check(_libc.mount(None, b"/", None, _REC | _PRIVATE, None), "make / private")


def files_of(flags: int) -> list[int]:
    """Open the files of this process's namespaces, in the order in which they can be entered.

    Args:
        flags: CLONE_NEW* flags that select the namespaces.
    """
    return [os.open("/proc/self/ns/" + name, os.O_RDONLY) for name, kind in _ENTERED if kind & flags]


def enter(files: Iterable[int], flags: int) -> None:
    """Enter namespaces. The next child will be in all of them.

    Args:
        files: Descriptors from `files_of`.
        flags: The same flags.
    """
    kinds = [(name, kind) for name, kind in _ENTERED if kind & flags]
    for fd, (name, kind) in zip(files, kinds):  # noqa: B905  strict= came with 3.10
        _check(_libc.setns(fd, kind), "enter the namespace " + name)


def share_memory(one: int, other: int) -> bool:
    """Return whether two processes share an address space; see kcmp(2). One that has ended shares nothing.

    Args:
        one: A PID.
        other: Another PID.

    Raises:
        OSError: If one of them cannot be inspected.
    """
    found = _libc.syscall(_KCMP, one, other, _KCMP_VM, 0, 0)
    if found < 0 and ctypes.get_errno() == errno.ESRCH:
        return False
    _check(found < 0, "compare processes")
    return found == 0


def raise_loopback() -> None:
    """Enable the loopback interface of a new network namespace."""
    up, get_flags, set_flags = 1, 0x8913, 0x8914
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = array.array("B", struct.pack("16sh22x", b"lo", 0))
        fcntl.ioctl(any_socket, get_flags, request)
        (flags,) = struct.unpack_from("h", request, 16)
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sh22x", b"lo", flags | up))
