"""A seccomp filter as bytes, without a library: which system calls code in a sandbox may make.

Classic BPF over `struct seccomp_data`, see seccomp(2) and linux/filter.h. A deny-list of what containers
deny, plus everything that makes namespaces, since an outer namespace is needed to set the inner one up.
x86-64 only.
"""

from __future__ import annotations

import errno
import functools
import platform

from torchrl_agentic.sandbox.bpf import (
    ALLOW,
    ARCH,
    ARG0,
    ARG1,
    KILL,
    NUMBER,
    from_on,
    load,
    refuse,
    unless,
    when,
    with_any,
)

_X86_64 = 0xC000003E
_X32_BIT = 0x40000000
_NEW_NAMESPACE = 0x7E020000  # every CLONE_NEW* flag that clone(2) takes
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C

_DENIED = {
    "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "pidfd_getfd": 438,
    "process_madvise": 440, "keyctl": 250, "add_key": 248, "request_key": 249, "bpf": 321,
    "perf_event_open": 298, "userfaultfd": 323, "io_uring_setup": 425, "io_uring_enter": 426,
    "io_uring_register": 427, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "unshare": 272,
    "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432,
    "fspick": 433, "mount_setattr": 442, "open_by_handle_at": 304, "name_to_handle_at": 303,
    "fanotify_init": 300,
    "kexec_load": 246, "kexec_file_load": 320, "init_module": 175, "finit_module": 313, "delete_module": 176,
    "reboot": 169, "swapon": 167, "swapoff": 168, "acct": 163, "quotactl": 179, "syslog": 103,
    "settimeofday": 164, "clock_settime": 227, "adjtimex": 159, "clock_adjtime": 305, "sethostname": 170,
    "setdomainname": 171, "iopl": 172, "ioperm": 173, "modify_ldt": 154, "personality": 135, "vhangup": 153,
    "mbind": 237, "set_mempolicy": 238, "get_mempolicy": 239, "move_pages": 279, "migrate_pages": 256,
    "memfd_secret": 447, "pidfd_open": 434, "memfd_create": 319,
}  # fmt: skip
_CLONE, _CLONE3, _SOCKET, _IOCTL, _SETNS, _PRLIMIT = 56, 435, 41, 16, 308, 302
_ENTERED = (0x10000000, 0x00020000, 0x08000000, 0x04000000, 0x40000000, 0x20000000)
AF_UNIX, AF_INET, AF_INET6 = 1, 2, 10
NETWORK = (AF_UNIX, AF_INET, AF_INET6)
"""What kinds of sockets a network needs that was granted."""


@functools.cache
def program(*, families: tuple[int, ...] = (), clones: bool = False) -> bytes | None:
    """Make the filter; None where it is not known for this processor.

    families: the address families that socket(2) may open. socketpair(2) stays usable. clones: whether
    setns(2) stays usable, for a clone that moves into namespaces whose files it is handed; who has no such
    files, nor capabilities, can do nothing with it.
    """
    if platform.machine() != "x86_64":
        return None
    code = load(ARCH) + unless(_X86_64, KILL)
    code += load(NUMBER) + from_on(_X32_BIT, refuse(errno.ENOSYS))
    for number in _DENIED.values():
        code += when(number, refuse(errno.EPERM))
    # Our own limits only: those of process 1, which is of the same user, are not for code to set.
    code += when(_PRLIMIT, load(ARG0) + when(0, ALLOW) + refuse(errno.EPERM))
    entered = b"".join(when(kind, ALLOW) for kind in (_ENTERED if clones else ()))
    code += when(_SETNS, load(ARG1) + entered + refuse(errno.EPERM))
    # clone3 keeps its flags in memory, out of a filter's sight; the C library falls back to clone.
    code += when(_CLONE3, refuse(errno.ENOSYS))
    code += when(_CLONE, load(ARG0) + with_any(_NEW_NAMESPACE, refuse(errno.EPERM)) + ALLOW)
    allowed = b"".join(when(family, ALLOW) for family in families)
    code += when(_SOCKET, load(ARG0) + allowed + refuse(errno.EAFNOSUPPORT))
    # Only the low half of the request counts for the kernel, too (CVE-2019-10063 compared 64 bits).
    terminal = when(_TIOCSTI, refuse(errno.EPERM)) + when(_TIOCLINUX, refuse(errno.EPERM))
    code += when(_IOCTL, load(ARG1) + terminal + ALLOW)
    return code + ALLOW
