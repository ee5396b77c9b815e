"""Filters of system calls: classic BPF programs over `struct seccomp_data`.

See seccomp(2) and linux/filter.h. A block that does not return continues with the next one, so that no jump
is longer than a block.
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
"""Offsets in `struct seccomp_data`: number of the system call, architecture, low halves of arguments."""


def _instruction(code: int, if_true: int, if_false: int, value: int) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)


ALLOW = _instruction(_RETURN, 0, 0, 0x7FFF0000)
KILL = _instruction(_RETURN, 0, 0, 0x80000000)
ASK = _instruction(_RETURN, 0, 0, 0x7FC00000)
"""Let the process that listens decide."""


def refuse(error: int) -> bytes:
    """Return with an error number."""
    return _instruction(_RETURN, 0, 0, 0x00050000 | error)


def load(offset: int) -> bytes:
    """Load a word."""
    return _instruction(_LOAD, 0, 0, offset)


def mask(bits: int) -> bytes:
    """Clear the other bits of the loaded word."""
    return _instruction(_AND, 0, 0, bits)


def when(value: int, block: bytes) -> bytes:
    """Run a block if the loaded word equals a value.

    Args:
        value: The value.
        block: Instructions.
    """
    return _instruction(_JUMP_EQUAL, 0, len(block) // 8, value) + block


def unless(value: int, block: bytes) -> bytes:
    """Run a block unless the loaded word equals a value.

    Args:
        value: The value.
        block: Instructions.
    """
    return _instruction(_JUMP_EQUAL, len(block) // 8, 0, value) + block


def from_on(value: int, block: bytes) -> bytes:
    """Run a block if the loaded word is greater than or equal to a value.

    Args:
        value: The value.
        block: Instructions.
    """
    return _instruction(_JUMP_FROM_ON, 0, len(block) // 8, value) + block


def below(value: int, block: bytes) -> bytes:
    """Run a block if the loaded word is less than a value.

    Args:
        value: The value.
        block: Instructions.
    """
    return _instruction(_JUMP_FROM_ON, len(block) // 8, 0, value) + block


def with_any(bits: int, block: bytes) -> bytes:
    """Run a block if the loaded word has any of these bits.

    Args:
        bits: The bits.
        block: Instructions.
    """
    return _instruction(_JUMP_WITH_ANY, 0, len(block) // 8, bits) + block


AF_UNIX, AF_INET, AF_INET6 = 1, 2, 10
NETWORK = (AF_UNIX, AF_INET, AF_INET6)
"""Address families of a network that was granted."""
SCOPED = SCOPES_SIGNALS
"""First version of Landlock that restricts signals and abstract sockets to the sandbox."""
_TRUNCATE_COVERED = 3  # first version of Landlock that covers truncate(2)

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000
_NEW_NAMESPACE = 0x7E020000  # every CLONE_NEW* flag that clone(2) takes
_ENTERED = (0x10000000, 0x00020000, 0x08000000, 0x04000000, 0x40000000, 0x20000000)
_STREAM, _SEQPACKET = 1, 5
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_F_SETLEASE, _F_NOTIFY, _F_SETPIPE_SZ, _F_SETDELEG = 1024, 1026, 1031, 1040
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
    """Return the filter, an array of `struct sock_filter`; None if the table does not have this processor.

    Args:
        families: Address families that socket(2) may open. socketpair(2) opens Unix sockets in any case.
        enters: Allow setns(2), for a clone that enters namespaces whose files it is given; code without such
            files or capabilities cannot use it.
        landlock: Version of Landlock that confines the code, or `SCOPED` if namespaces separate signals and
            socket names. The filter denies what an older version leaves open.
        has_namespaces: True if namespaces, rather than Landlock, separate processes, files and sockets by
            path. Process 1 is then the supervisor of the code, or the code itself.
        machine: Kind of processor, as `platform.machine` names it; None for this one.
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


def notify_program(*, landlock: int, machine: str | None = None) -> tuple[bytes, list[int]]:
    """Return the filter for `inside.seccomp_notify`, and the numbers of the calls that start processes.

    The other calls send signals, where Landlock does not restrict them.

    Args:
        landlock: Version of Landlock that confines the code.
        machine: Kind of processor, as `platform.machine` names it; None for this one.
    """
    known = numbers(machine or platform.machine())
    starts = [known[name] for name in ("clone", "fork", "vfork") if name in known]
    signals = ("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo")
    asked = starts if landlock >= SCOPED else [*starts, *(known[name] for name in signals)]
    return load(NUMBER) + b"".join(when(number, ASK) for number in asked) + ALLOW, starts


def _checks(families: tuple[int, ...], enters: bool, landlock: int, has_namespaces: bool) -> dict[str, bytes]:
    """Return the block for each checked call. Only the low halves of arguments count, as in the kernel."""
    # Libraries set priorities of their threads, whose ids a filter does not know.
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
        "timer_create": refuse(errno.ENOSYS),
        **dict.fromkeys(("sendmsg", "sendmmsg"), ALLOW if families else _NO),
        "setns": load(ARG1) + entered + _NO,
        "socket": load(ARG0) + opened + refuse(errno.EAFNOSUPPORT),
        "socketpair": load(ARG0) + when(AF_UNIX, pairs) + refuse(errno.EAFNOSUPPORT),
        "ioctl": _refusing(ARG1, (_TIOCSTI, _TIOCLINUX, *device_owner)),
        "fcntl": _refusing(ARG1, (_F_SETLEASE, _F_NOTIFY, _F_SETPIPE_SZ, _F_SETDELEG, *owner)),
        "mmap": load(ARG3) + with_any(_MAP_HUGETLB, _NO) + ALLOW,
        # A listener of the code itself would be asked instead of the supervisor.
        "seccomp": load(ARG1) + with_any(_NEW_LISTENER, _NO) + ALLOW,
        "truncate": ALLOW if has_namespaces or landlock >= _TRUNCATE_COVERED else _NO,
        "pidfd_send_signal": ALLOW if landlock >= SCOPED else _NO,
    }


def _refusing(argument: int, values: tuple[int, ...]) -> bytes:
    return load(argument) + b"".join(when(value, _NO) for value in values) + ALLOW


def _runs(ends: dict[int, bytes]) -> bytes:
    """Return the code for the result of each number, ENOSYS for others; equal neighbours are merged."""
    unknown, code = refuse(errno.ENOSYS), b""
    last = max(ends)
    for number in range(last + 1):
        end = ends.get(number, unknown)
        if number == last or end != ends.get(number + 1, unknown):
            code += below(number + 1, end)
    return code + unknown
