"""System calls by which a process confines itself on Linux: Landlock, seccomp, limits, death signals."""

# Windows lacks the modules and functions that are bound only elsewhere; nothing here runs there.
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import struct
import sys

TYPE_CHECKING = False  # the import of typing takes longer than all others together

if TYPE_CHECKING:
    from collections.abc import Iterable

if sys.platform != "win32":
    import resource

    _libc = ctypes.CDLL(None, use_errno=True)

_PDEATHSIG, _DUMPABLE, _SECCOMP, _BOUNDING_DROP, _SUBREAPER, _NO_NEW_PRIVS, _AMBIENT = (
    1,
    4,
    22,
    24,
    36,
    38,
    47,
)
_SECCOMP_CALL = {"x86_64": 317, "aarch64": 277}
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every processor

_PENDING = 256
"""Maximum number of timers and queued signals of all processes of a user together."""
SCOPES_SIGNALS = 6
"""First version of Landlock that restricts signals to a domain."""
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_MAKE_CHAR, _REFER, _TRUNCATE, _IOCTL_DEV = 1 << 6, 1 << 13, 1 << 14, 1 << 15
_READ = EXECUTE | READ_FILE | READ_DIR
_DEVICE = READ_FILE | WRITE_FILE | _TRUNCATE
_OF_FILES = EXECUTE | READ_FILE | WRITE_FILE | _TRUNCATE | _IOCTL_DEV


def landlock_version() -> int:
    """Return the version of Landlock in this kernel; 0 if it has none."""
    return max(0, _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1))


def landlock(
    read: Iterable[str],
    write: Iterable[str],
    *,
    devices: Iterable[str] = (),
    tcp: bool = False,
    version: int | None = None,
) -> None:
    """Restrict the file access of this process and its descendants to these paths, irrevocably.

    From version 6 on, confined processes can neither signal others nor connect to abstract sockets of others.

    Args:
        read: Folders and files that can be read and executed.
        write: Folders and files that can also be changed.
        devices: Files that can only be read and written.
        tcp: Allow TCP. Versions before 4 cannot deny it.
        version: Maximum version of Landlock to use; None for that of the kernel.

    Raises:
        OSError: If there is no Landlock, or a path cannot be opened.
    """
    best = landlock_version()
    if not best:
        raise OSError(errno.EOPNOTSUPP, "this kernel has no Landlock, or it is disabled")
    version = best if version is None else min(version, best)
    every = (1 << 13) - 1
    for since, right in ((2, _REFER), (3, _TRUNCATE), (5, _IOCTL_DEV)):
        every |= right if version >= since else 0
    rules = struct.pack("<QQQ", every, 0b11 if version >= 4 and not tcp else 0, 0b11 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset: int = _checked(
        _libc.syscall(_CREATE_RULESET, rules, ctypes.c_size_t(size), 0), "landlock_create_ruleset"
    )
    try:
        for paths, rights in ((read, _READ), (write, every), (devices, _DEVICE)):
            for path in paths:
                _add_rule(ruleset, path, rights & every)
        _checked(_libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
        _checked(_libc.syscall(_RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
    finally:
        os.close(ruleset)


def restrict_to_own_processes() -> None:
    """Prevent this process and its descendants from accessing the memory of others, and from signalling them.

    This is a Landlock domain without restrictions of files. Signals and abstract sockets are restricted from
    version 6 on.

    Raises:
        OSError: If the kernel has no Landlock, or version 1, which cannot allow moving files.
    """
    version = landlock_version()
    if version < 2:
        raise OSError(errno.EOPNOTSUPP, "Landlock of version 2 or later is needed")
    # Before version 6 a domain must restrict some file access; devices cannot be created here anyway.
    files, scopes = (0, 0b11) if version >= 6 else (_MAKE_CHAR | _REFER, 0)
    rules, size = struct.pack("<QQQ", files, 0, scopes), 24 if version >= 6 else 8
    ruleset: int = _checked(
        _libc.syscall(_CREATE_RULESET, rules, ctypes.c_size_t(size), 0), "landlock_create_ruleset"
    )
    if files:
        _add_rule(ruleset, "/", _REFER)
    _checked(_libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    _checked(_libc.syscall(_RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


def _add_rule(ruleset: int, path: str, rights: int) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            rights &= _OF_FILES
        rule = struct.pack("<Qi", rights, fd)
        _checked(_libc.syscall(_ADD_RULE, ruleset, 1, rule, 0), "landlock_add_rule " + path)
    finally:
        os.close(fd)


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def install_seccomp(program: bytes, *, listen: bool = False) -> int:
    """Filter every system call of this process and its descendants, irrevocably.

    Args:
        program: The filter, an array of `struct sock_filter`.
        listen: Return a descriptor on which another process answers the calls that the filter hands over.

    Returns:
        The descriptor, or -1 without `listen`.

    Raises:
        OSError: If the kernel refuses the filter; EBUSY if there is a listener already.
    """
    filter_ = _Program(len(program) // 8, program)
    _checked(_libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    if not listen:
        _checked(_libc.prctl(_SECCOMP, 2, ctypes.byref(filter_), 0, 0), "seccomp")
        return -1
    number = _SECCOMP_CALL[os.uname().machine]
    return _checked(_libc.syscall(number, 1, 1 << 3, ctypes.byref(filter_)), "seccomp with a listener")


def drop_capabilities() -> None:
    """Drop all capabilities, now and, if permitted, after any exec."""
    _libc.prctl(_AMBIENT, 4, 0, 0, 0)
    for capability in range(64):
        if _libc.prctl(_BOUNDING_DROP, capability, 0, 0, 0):
            break  # there are no more, or it is not permitted
    _checked(_libc.capset(struct.pack("<II", 0x20080522, 0), bytes(24)), "capset")


def set_dumpable(allowed: bool) -> None:
    """Set whether other processes of the same user may read this process: memory, environment and open files.

    Args:
        allowed: True if they may.
    """
    _checked(_libc.prctl(_DUMPABLE, int(allowed), 0, 0, 0), "dumpable")


def die_with_parent(signal: int) -> None:
    """Receive a signal when the thread that started this process ends.

    Args:
        signal: Number of the signal.
    """
    _checked(_libc.prctl(_PDEATHSIG, signal, 0, 0, 0), "pdeathsig")


def subreaper() -> None:
    """Become the parent of every descendant that loses its own."""
    _checked(_libc.prctl(_SUBREAPER, 1, 0, 0, 0), "subreaper")


def prefer_oom_kill() -> None:
    """Make this process and its descendants the first that the kernel kills when memory runs out.

    Do nothing if /proc cannot be written. Code may revert it to the value of the process that started this
    one.
    """
    with contextlib.suppress(OSError):
        tell_kernel("oom_score_adj", b"1000")


def tell_kernel(name: str, text: bytes) -> None:
    """Write a file below /proc/self. A text stream would cost a new fork 20 copied pages of memory.

    Args:
        name: Name of the file.
        text: Content to write.
    """
    fd = os.open("/proc/self/" + name, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text)
    finally:
        os.close(fd)


def set_limits(
    *,
    cpu_seconds: int | None = None,
    memory_bytes: int | None = None,
    max_processes: int | None = None,
    file_bytes: int | None = None,
    open_files: int | None = None,
) -> None:
    """Limit each process from now on. A limit that is already lower stays.

    Core files are disabled, and there can be few timers and queued signals, which the kernel counts per user.

    Args:
        cpu_seconds: Processor time of each process; None for no change, as for the others.
        memory_bytes: Address space of each process.
        max_processes: Processes of this user in this user namespace.
        file_bytes: Size of each file.
        open_files: Open files of each process.
    """
    pending = getattr(resource, "RLIMIT_SIGPENDING", None)  # exists on Linux
    for kind, value in (
        *(((pending, _PENDING),) if pending is not None else ()),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_NPROC, max_processes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, open_files),
    ):
        if value is not None:
            hard = resource.getrlimit(kind)[1]
            lowest = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (lowest, lowest))


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, what + ": " + os.strerror(number))
    return result
