"""How Linux lets a process confine itself: Landlock, seccomp, limits, and with whom it dies. By ctypes."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import stat
import struct

TYPE_CHECKING = False  # the typing module takes longer to import than all else together

if TYPE_CHECKING:
    from collections.abc import Iterable

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
"""How many timers and queued signals there may be, for all processes of a user together."""
SCOPES_SIGNALS = 6
"""The version of Landlock from which on a domain keeps signals inside."""
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_MAKE_CHAR, _REFER, _TRUNCATE, _IOCTL_DEV = 1 << 6, 1 << 13, 1 << 14, 1 << 15
_READ = EXECUTE | READ_FILE | READ_DIR
_DEVICE = READ_FILE | WRITE_FILE | _TRUNCATE
_OF_FILES = EXECUTE | READ_FILE | WRITE_FILE | _TRUNCATE | _IOCTL_DEV


def landlock_version() -> int:
    """Give the version of Landlock in this kernel; 0 if it has none."""
    return max(0, _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1))


def landlock(
    read: Iterable[str],
    write: Iterable[str],
    *,
    devices: Iterable[str] = (),
    tcp: bool = False,
    version: int | None = None,
) -> None:
    """Leave this process, and all that it starts, nothing of the file system but these paths; for good.

    read: folders and files that can be read and executed. write: those that can also be changed. devices:
    files that can be read and written, no more. tcp: whether TCP is left; it can be refused from version 4
    on. From version 6 on, what is confined can neither signal what is not, nor reach its abstract sockets.
    version: use no more of Landlock than this one had.

    Raises:
        OSError: there is no Landlock, or a path cannot be opened.
    """
    best = landlock_version()
    if not best:
        raise OSError(errno.EOPNOTSUPP, "this kernel has no Landlock, or it is not switched on")
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


def stay_among_own() -> None:
    """Let this process and its children reach into the memory of none but each other, nor signal others.

    A Landlock domain that takes nothing of the file system away. Signals and abstract sockets are kept back
    from version 6 on.

    Raises:
        OSError: the kernel has no Landlock, or its first version, which cannot allow files to be moved.
    """
    version = landlock_version()
    if version < 2:
        raise OSError(errno.EOPNOTSUPP, "Landlock of version 2 or later is needed")
    # Before version 6 something of the file system has to be named; nobody here may make devices anyway.
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
    """Put a filter before every system call of this process and of all that it starts; for good.

    listen: give a descriptor, on which another process answers the calls that the filter hands over;
    otherwise -1 is given.

    Raises:
        OSError: the kernel refuses it; EBUSY, if somebody listens already.
    """
    filter_ = _Program(len(program) // 8, program)
    _checked(_libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    if not listen:
        _checked(_libc.prctl(_SECCOMP, 2, ctypes.byref(filter_), 0, 0), "seccomp")
        return -1
    number = _SECCOMP_CALL[os.uname().machine]
    return _checked(_libc.syscall(number, 1, 1 << 3, ctypes.byref(filter_)), "seccomp with a listener")


def drop_capabilities() -> None:
    """Give up every capability, now and, as far as this process may say so, after any exec."""
    _libc.prctl(_AMBIENT, 4, 0, 0, 0)
    for capability in range(64):
        if _libc.prctl(_BOUNDING_DROP, capability, 0, 0, 0):
            break  # there are no more, or we may not
    _checked(_libc.capset(struct.pack("<II", 0x20080522, 0), bytes(24)), "capset")


def dumpable(allowed: bool) -> None:
    """Say whether others of the same user may read this process: its memory, environment and open files."""
    _checked(_libc.prctl(_DUMPABLE, int(allowed), 0, 0, 0), "dumpable")


def die_with_parent(signal: int) -> None:
    """Get a signal when the thread that started this process ends."""
    _checked(_libc.prctl(_PDEATHSIG, signal, 0, 0, 0), "pdeathsig")


def subreaper() -> None:
    """Become the parent of every descendant that loses its own."""
    _checked(_libc.prctl(_SUBREAPER, 1, 0, 0, 0), "subreaper")


def die_first() -> None:
    """Be what the kernel ends before anything else when memory runs out, with all that this starts.

    Where /proc cannot be written, nothing changes. Code may take it back, down to what its starter had.
    """
    with contextlib.suppress(OSError):
        tell_kernel("oom_score_adj", b"1000")


def tell_kernel(name: str, text: bytes) -> None:
    """Write a file below /proc/self; not as a text stream, whose code costs a new fork 20 pages of memory."""
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
    """Limit each process from here on; None leaves a limit, one that is lower stays.

    There are no core files, and few timers and queued signals, which the kernel counts by user.

    max_processes: of this user, in this user namespace.
    """
    pending = getattr(resource, "RLIMIT_SIGPENDING", None)  # Linux has it
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
