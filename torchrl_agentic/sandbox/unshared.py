"""Seccomp filters in place of namespaces: against what reaches other processes without opening a file.

They go on top of `seccomp.program`. x86-64 only.
"""

from __future__ import annotations

import errno

from torchrl_agentic.sandbox.bpf import ALLOW, ARG0, ARG1, ASK, NUMBER, load, mask, refuse, when
from torchrl_agentic.sandbox.seccomp import AF_UNIX

SCOPED_SIGNALS = 6
"""The version of Landlock from which on it keeps signals inside."""
_TRUNCATE_COVERED = 3

_STARTS = {"clone": 56, "fork": 57, "vfork": 58}
_SIGNALS = {"kill": 62, "tkill": 200, "tgkill": 234, "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297}
_DENIED = {
    "shmget": 29, "shmat": 30, "shmctl": 31, "semget": 64, "semop": 65, "semctl": 66, "semtimedop": 220,
    "msgget": 68, "msgsnd": 69, "msgrcv": 70, "msgctl": 71, "mq_open": 240, "mq_unlink": 241,
    "inotify_init": 253, "inotify_init1": 294,
}  # fmt: skip
_OF_A_PROCESS = {
    "prlimit64": 302, "sched_setparam": 142, "sched_setscheduler": 144, "sched_setaffinity": 203,
    "sched_setattr": 314,
}  # fmt: skip
_SETPRIORITY, _IOPRIO_SET, _SOCKETPAIR, _SECCOMP = 141, 251, 53, 317
_TRUNCATE, _PIDFD_SEND_SIGNAL, _FCNTL, _IOCTL = 76, 424, 72, 16
_F_SETOWN, _F_SETOWN_EX, _FIOSETOWN, _SIOCSPGRP = 8, 15, 0x8901, 0x8902
_STREAM, _SEQPACKET = 1, 5


def program(*, landlock: int) -> bytes:
    """Make a filter for processes that share everything but files with the rest of the machine.

    It denies what System V and POSIX keep by name between processes, watching folders, the limits and
    priorities of other processes, and datagram sockets, which can be had in pairs and then be sent anywhere.
    landlock: its version; what older ones leave open is denied here.
    """
    no = refuse(errno.EPERM)
    code = load(NUMBER)
    for number in _DENIED.values():
        code += when(number, no)
    for number in _OF_A_PROCESS.values():
        code += when(number, load(ARG0) + when(0, ALLOW) + no)
    for number, kind in ((_SETPRIORITY, 0), (_IOPRIO_SET, 1)):
        itself = load(ARG1) + when(0, ALLOW) + no
        code += when(number, load(ARG0) + when(kind, itself) + no)
    connected = load(ARG1) + mask(0xF) + when(_STREAM, ALLOW) + when(_SEQPACKET, ALLOW)
    code += when(_SOCKETPAIR, load(ARG0) + when(AF_UNIX, connected + no) + no)
    # A filter of the code's own that asks a process of its own would be asked in place of ours.
    code += when(_SECCOMP, load(ARG1) + mask(1 << 3) + when(0, ALLOW) + no)
    if landlock < _TRUNCATE_COVERED:
        code += when(_TRUNCATE, no)
    if landlock < SCOPED_SIGNALS:
        code += when(_PIDFD_SEND_SIGNAL, no)
        for call, commands in ((_FCNTL, (_F_SETOWN, _F_SETOWN_EX)), (_IOCTL, (_FIOSETOWN, _SIOCSPGRP))):
            owner = b"".join(when(command, no) for command in commands)
            code += when(call, load(ARG1) + owner + ALLOW)
    return code + ALLOW


def gate(*, landlock: int) -> bytes:
    """Make the filter that hands calls over to `inside.gate`: new processes, and signals where it must."""
    calls = _STARTS if landlock >= SCOPED_SIGNALS else _STARTS | _SIGNALS
    return load(NUMBER) + b"".join(when(number, ASK) for number in calls.values()) + ALLOW
