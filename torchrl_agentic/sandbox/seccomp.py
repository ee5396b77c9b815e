"""Classic BPF over `struct seccomp_data`: the few instructions that a filter of system calls is made of.

See seccomp(2) and linux/filter.h. Blocks fall through to what stands behind them, so no jump is ever long.
"""

from __future__ import annotations

import errno
import functools
import platform
import struct

from torchrl_agentic.sandbox.inside.rights import SCOPES_SIGNALS
from torchrl_agentic.sandbox.system_calls import TABLE, numbers

_LOAD, _AND, _JUMP_EQUAL, _JUMP_FROM_ON, _JUMP_WITH_ANY, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCH, ARG0, ARG1, ARG3 = 0, 4, 16, 24, 40
"""Where to load from: the number of the system call, the architecture, the low halves of the arguments."""


def _instruction(code: int, if_true: int, if_false: int, value: int) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)


ALLOW = _instruction(_RETURN, 0, 0, 0x7FFF0000)
KILL = _instruction(_RETURN, 0, 0, 0x80000000)
ASK = _instruction(_RETURN, 0, 0, 0x7FC00000)
"""Let the process decide that listens."""


def refuse(error: int) -> bytes:
    """End with an error number."""
    return _instruction(_RETURN, 0, 0, 0x00050000 | error)


def load(offset: int) -> bytes:
    """Load a word to look at."""
    return _instruction(_LOAD, 0, 0, offset)


def mask(bits: int) -> bytes:
    """Keep some bits of the loaded word."""
    return _instruction(_AND, 0, 0, bits)


def when(value: int, block: bytes) -> bytes:
    """Run a block if the loaded word equals a value, else go on behind it."""
    return _instruction(_JUMP_EQUAL, 0, len(block) // 8, value) + block


def unless(value: int, block: bytes) -> bytes:
    """Run a block unless the loaded word equals a value."""
    return _instruction(_JUMP_EQUAL, len(block) // 8, 0, value) + block


def from_on(value: int, block: bytes) -> bytes:
    """Run a block if the loaded word is a value or greater."""
    return _instruction(_JUMP_FROM_ON, 0, len(block) // 8, value) + block


def below(value: int, block: bytes) -> bytes:
    """Run a block if the loaded word is less than a value."""
    return _instruction(_JUMP_FROM_ON, len(block) // 8, 0, value) + block


def with_any(bits: int, block: bytes) -> bytes:
    """Run a block if the loaded word has any of these bits."""
    return _instruction(_JUMP_WITH_ANY, 0, len(block) // 8, bits) + block


AF_UNIX, AF_INET, AF_INET6 = 1, 2, 10
NETWORK = (AF_UNIX, AF_INET, AF_INET6)
"""The address families of a network that was granted."""
SCOPED = SCOPES_SIGNALS
"""The version of Landlock from which on it keeps signals, and names of abstract sockets, inside."""
_TRUNCATE_COVERED = 3  # by Landlock, from this version on

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000
_NEW_NAMESPACE = 0x7E020000  # every CLONE_NEW* flag that clone(2) takes
_ENTERED = (0x10000000, 0x00020000, 0x08000000, 0x04000000, 0x40000000, 0x20000000)
_STREAM, _SEQPACKET = 1, 5
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_F_SETLEASE, _F_NOTIFY, _F_SETDELEG = 1024, 1026, 1040
_F_SETOWN, _F_SETOWN_EX, _FIOSETOWN, _SIOCSPGRP = 8, 15, 0x8901, 0x8902
_MAP_HUGETLB = 0x40000
_NEW_LISTENER = 1 << 3
_SCHEDULING: tuple[str, ...] = (
    "sched_setparam", "sched_setscheduler", "sched_setaffinity", "sched_setattr",
)  # fmt: skip

_NO = refuse(errno.EPERM)
_ENDS = {"allowed": ALLOW, "denied": _NO}


def program(
    *,
    families: tuple[int, ...] = (),
    enters: bool = False,
    landlock: int = SCOPED,
    has_namespaces: bool = True,
    machine: str | None = None,
) -> bytes | None:
    """Return the filter, an array of `struct sock_filter`; None for a processor that the table does not know.

    Args:
        families: The address families that socket(2) may open. socketpair(2) opens Unix sockets in any case.
        enters: Whether setns(2) stays usable, for a clone that moves into namespaces whose files it is
            handed; code without such files or capabilities can do nothing with it.
        landlock: The version of Landlock that confines the code, or `SCOPED` where namespaces keep signals
            and names of sockets apart. What an older version leaves open is denied.
        has_namespaces: Whether namespaces of its own keep files, paths of sockets among them, and processes
            apart, rather than Landlock. Then process 1 is what looks after the code, or the code itself.
        machine: The kind of processor, as `platform.machine` names it; None: this one.
    """
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        return None
    return _program(families, enters, landlock, has_namespaces, machine)


@functools.cache
def _program(
    families: tuple[int, ...], enters: bool, landlock: int, has_namespaces: bool, machine: str
) -> bytes:
    code = load(ARCH) + unless(_ARCHITECTURES[machine], KILL) + load(NUMBER)
    if machine == "x86_64":
        code += from_on(_X32_BIT, refuse(errno.ENOSYS))
    known, checks = numbers(machine), _checks(families, enters, landlock, has_namespaces)
    for name, block in checks.items():
        if name in known:
            code += when(known[name], block)
    ends = {
        number: _ENDS.get(calls.verdict, ALLOW) for calls in TABLE for number in calls.of(machine).values()
    }
    return code + _runs(ends)


def gate(*, landlock: int, machine: str | None = None) -> tuple[bytes, list[int]]:
    """Return the filter that hands calls to `inside.gate`, and the numbers of those that start processes.

    The others send signals, where Landlock does not scope them.
    """
    known = numbers(machine or platform.machine())
    starts = [known[name] for name in ("clone", "fork", "vfork") if name in known]
    signals = ("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo")
    asked = starts if landlock >= SCOPED else [*starts, *(known[name] for name in signals)]
    return load(NUMBER) + b"".join(when(number, ASK) for number in asked) + ALLOW, starts


def _checks(families: tuple[int, ...], enters: bool, landlock: int, has_namespaces: bool) -> dict[str, bytes]:
    """Return what is done with each checked call. The low halves of arguments count, as for the kernel."""
    # Libraries set priorities of their threads, whose numbers a filter does not know.
    not_above = when(0, ALLOW) + (when(1, _NO) + ALLOW if has_namespaces else _NO)
    scheduling = load(ARG0) + not_above
    checks: dict[str, bytes] = dict.fromkeys(("prlimit64", *_SCHEDULING), scheduling)
    for name, kind in (("setpriority", 0), ("ioprio_set", 1)):
        checks[name] = load(ARG0) + when(kind, load(ARG1) + not_above) + _NO
    entered = b"".join(when(kind, ALLOW) for kind in (_ENTERED if enters else ()))
    opened = b"".join(when(family, ALLOW) for family in families)
    pairs = ALLOW
    if landlock < SCOPED or not has_namespaces:
        pairs = load(ARG1) + mask(0xF) + when(_STREAM, ALLOW) + when(_SEQPACKET, ALLOW) + _NO
    owner = (_F_SETOWN, _F_SETOWN_EX) if landlock < SCOPED else ()
    device_owner = (_FIOSETOWN, _SIOCSPGRP) if landlock < SCOPED else ()
    return checks | {
        "clone": load(ARG0) + with_any(_NEW_NAMESPACE, _NO) + ALLOW,
        "clone3": refuse(errno.ENOSYS),
        "setns": load(ARG1) + entered + _NO,
        "socket": load(ARG0) + opened + refuse(errno.EAFNOSUPPORT),
        "socketpair": load(ARG0) + when(AF_UNIX, pairs) + refuse(errno.EAFNOSUPPORT),
        "ioctl": _refusing(ARG1, (_TIOCSTI, _TIOCLINUX, *device_owner)),
        "fcntl": _refusing(ARG1, (_F_SETLEASE, _F_NOTIFY, _F_SETDELEG, *owner)),
        "mmap": load(ARG3) + with_any(_MAP_HUGETLB, _NO) + ALLOW,
        # A filter of the code's own that asks a process of its own would be asked in place of ours.
        "seccomp": load(ARG1) + with_any(_NEW_LISTENER, _NO) + ALLOW,
        "truncate": ALLOW if has_namespaces or landlock >= _TRUNCATE_COVERED else _NO,
        "pidfd_send_signal": ALLOW if landlock >= SCOPED else _NO,
    }


def _refusing(argument: int, values: tuple[int, ...]) -> bytes:
    return load(argument) + b"".join(when(value, _NO) for value in values) + ALLOW


def _runs(ends: dict[int, bytes]) -> bytes:
    """Return the code for what each number ends with, equal ones in a row together; others are ENOSYS."""
    unknown, code = refuse(errno.ENOSYS), b""
    last = max(ends)
    for number in range(last + 1):
        end = ends.get(number, unknown)
        if number == last or end != ends.get(number + 1, unknown):
            code += below(number + 1, end)
    return code + unknown
