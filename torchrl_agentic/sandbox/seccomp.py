"""A seccomp filter as bytes, without a library: which system calls code in a sandbox may make.

Classic BPF over `struct seccomp_data`, see seccomp(2) and linux/filter.h. A deny-list of what containers
deny, plus everything that makes namespaces, since an outer namespace is needed to set the inner one up.
x86-64 only.
"""

from __future__ import annotations

import errno
import platform
import struct

_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _ARG0, _ARG1 = 0, 4, 16, 24  # offsets; of the arguments the low halves
_X86_64 = 0xC000003E
_X32_BIT = 0x40000000
_NEW_NAMESPACE = 0x7E020000  # every CLONE_NEW* flag that clone(2) takes
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C

_DENIED = {
    "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "pidfd_getfd": 438,
    "process_madvise": 440, "keyctl": 250, "add_key": 248, "request_key": 249, "bpf": 321,
    "perf_event_open": 298, "userfaultfd": 323, "io_uring_setup": 425, "io_uring_enter": 426,
    "io_uring_register": 427, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "unshare": 272,
    "setns": 308, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432,
    "fspick": 433, "mount_setattr": 442, "open_by_handle_at": 304, "name_to_handle_at": 303,
    "fanotify_init": 300,
    "kexec_load": 246, "kexec_file_load": 320, "init_module": 175, "finit_module": 313, "delete_module": 176,
    "reboot": 169, "swapon": 167, "swapoff": 168, "acct": 163, "quotactl": 179, "syslog": 103,
    "settimeofday": 164, "clock_settime": 227, "adjtimex": 159, "clock_adjtime": 305, "sethostname": 170,
    "setdomainname": 171, "iopl": 172, "ioperm": 173, "modify_ldt": 154, "personality": 135, "vhangup": 153,
    "mbind": 237, "set_mempolicy": 238, "get_mempolicy": 239, "move_pages": 279, "migrate_pages": 256,
    "memfd_secret": 447,
}  # fmt: skip
_CLONE, _CLONE3, _SOCKET, _IOCTL = 56, 435, 41, 16
AF_UNIX, AF_INET, AF_INET6 = 1, 2, 10


def _instruction(code: int, if_true: int, if_false: int, value: int) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)


_ALLOW = _instruction(_RETURN, 0, 0, 0x7FFF0000)
_KILL = _instruction(_RETURN, 0, 0, 0x80000000)


def _refuse(error: int) -> bytes:
    return _instruction(_RETURN, 0, 0, 0x00050000 | error)


def _when(value: int, block: bytes) -> bytes:
    """Run a block if the loaded word equals a value, else go on behind it."""
    return _instruction(_JUMP_EQUAL, 0, len(block) // 8, value) + block


def program(*, families: tuple[int, ...] = ()) -> bytes | None:
    """Make the filter; None where it is not known for this processor.

    families: the address families that socket(2) may open. socketpair(2) stays usable.
    """
    if platform.machine() != "x86_64":
        return None
    code = _instruction(_LOAD, 0, 0, _ARCH) + _instruction(_JUMP_EQUAL, 1, 0, _X86_64) + _KILL
    code += _instruction(_LOAD, 0, 0, _NUMBER)
    code += _instruction(_JUMP_GREATER_EQUAL, 0, 1, _X32_BIT) + _refuse(errno.ENOSYS)
    for number in _DENIED.values():
        code += _when(number, _refuse(errno.EPERM))
    # clone3 keeps its flags in memory, out of a filter's sight; the C library falls back to clone.
    code += _when(_CLONE3, _refuse(errno.ENOSYS))
    new_namespace = _instruction(_LOAD, 0, 0, _ARG0) + _instruction(_JUMP_SET, 0, 1, _NEW_NAMESPACE)
    code += _when(_CLONE, new_namespace + _refuse(errno.EPERM) + _ALLOW)
    allowed = b"".join(_when(family, _ALLOW) for family in families)
    code += _when(_SOCKET, _instruction(_LOAD, 0, 0, _ARG0) + allowed + _refuse(errno.EAFNOSUPPORT))
    # Only the low half of the request counts for the kernel, too (CVE-2019-10063 compared 64 bits).
    terminal = _when(_TIOCSTI, _refuse(errno.EPERM)) + _when(_TIOCLINUX, _refuse(errno.EPERM))
    code += _when(_IOCTL, _instruction(_LOAD, 0, 0, _ARG1) + terminal + _ALLOW)
    return code + _ALLOW
