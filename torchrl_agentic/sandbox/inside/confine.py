"""Runs one command with few rights, and ends all its processes when it ends.

Run as `python -c <program> FD`, where the descriptor contains an `Order`. This process is trusted and stays
outside the confinement. It adopts every orphan, and ends in the same way as the command, after all of them.
It writes one byte to its status descriptor if the command ran to its end; otherwise it failed itself, and
stderr says why.
"""

from __future__ import annotations

import marshal
import os
import resource
import select
import signal
import socket
import struct
import sys

from torchrl_agentic.sandbox.inside import orphans, rights
from torchrl_agentic.sandbox.inside.seccomp_notify import SeccompNotify

TYPE_CHECKING = False  # the import of typing takes longer than all others together
if TYPE_CHECKING:
    from typing import NoReturn, TypedDict

    class Order(TypedDict):
        """The command to run, and the rights that it keeps.

        Attributes:
            limits: Arguments of `set_limits`.
            entrance: Descriptor of the file by which the command enters its control group, or None.
        """

        argv: list[bytes]
        env: dict[bytes, bytes]
        cwd: bytes
        read: list[str]
        write: list[str]
        devices: list[str]
        tcp: bool
        version: int
        filter: bytes
        notify: bytes
        starts: list[int]
        entrance: int | None
        max_processes: int | None
        limits: dict[str, int | None]
        parent: int
        status_fd: int | None


_NO_START, _NO_COMMAND = 126, 127


def main() -> NoReturn:
    """Carry out the order."""
    with open(int(sys.argv[1]), "rb") as file:
        order: Order = marshal.load(file)
    if order["status_fd"] is not None:
        os.set_inheritable(order["status_fd"], False)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    told_to_end, awake = _wake_ups()
    rights.subreaper()
    # Files that code of this user has in flight count against the limit when the listener is passed on.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    rights.die_with_parent(signal.SIGTERM)
    if os.getppid() != order["parent"]:
        os._exit(1)
    ours, theirs = socket.socketpair()
    trusted, pid = os.getpid(), os.fork()
    if pid == 0:
        _become(order, trusted, theirs)
    rights.set_dumpable(False)
    if order["entrance"] is not None:
        os.close(order["entrance"])
    theirs.close()
    notify = SeccompNotify(_received_fd(ours), order["starts"], order["max_processes"])
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    try:
        code = _supervise(pid, notify, awake, told_to_end)
    finally:
        # In this order: while processes can start others, some may do so faster than they are killed.
        notify.close()
        orphans.kill_all()
    if code is not None and order["status_fd"] is not None:
        os.write(order["status_fd"], b".")
    _end_as(code or 0)


def _supervise(pid: int, notify: SeccompNotify, awake: int, told_to_end: list[int]) -> int | None:
    """Answer the listened calls until the command has ended. Return its exit code, or None if told to end."""
    poll = select.poll()
    poll.register(awake, select.POLLIN)
    poll.register(notify.fd, select.POLLIN)
    code = None
    while code is None and not told_to_end:
        for fd, events in poll.poll():
            if fd == awake:
                os.read(awake, 512)
            elif events & select.POLLIN:
                notify.answer()
            elif events & select.POLLHUP:
                poll.unregister(fd)  # no process is left that could make a call
            # Otherwise a signal interrupted the kernel; the next poll has the answer.
        code = orphans.reap().get(pid)
    return code


def _wake_ups() -> tuple[list[int], int]:
    """Return a list of the signals to end, and a descriptor to poll for them or for the end of a child."""
    told: list[int] = []
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    signal.signal(signal.SIGCHLD, lambda number, _: None)
    return told, awake


def _become(order: Order, trusted: int, report: socket.socket) -> NoReturn:
    """Confine this process and become the command. Failures before the report are not the model's."""
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        rights.die_with_parent(signal.SIGKILL)
        if os.getppid() != trusted:
            os._exit(1)
        rights.prefer_oom_kill()
        rights.drop_capabilities()
        rights.landlock(
            order["read"],
            order["write"],
            devices=order["devices"],
            tcp=order["tcp"],
            version=order["version"],
        )
        # First, because the filter prevents the command from listening itself, and from sending open files.
        listener = rights.install_seccomp(order["notify"], listen=True)
        report.sendmsg([b"+"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", listener))])
        os.close(listener)
        rights.install_seccomp(order["filter"])
        report.send(b".")
    except BaseException as error:
        report.send(str(error).encode("utf-8", "replace"))
        os._exit(1)
    try:
        if (
            order["entrance"] is not None
        ):  # only now: other processes in the group may have left no memory for the steps above
            os.write(order["entrance"], b"0")
            os.close(order["entrance"])
        os.chdir(order["cwd"])
        rights.set_limits(**order["limits"])
    except BaseException as error:
        _give_up(_NO_START, order["cwd"], error)
    try:
        os.execvpe(order["argv"][0], order["argv"], order["env"])
    except (FileNotFoundError, NotADirectoryError) as error:
        _give_up(_NO_COMMAND, order["argv"][0], error)
    except BaseException as error:
        _give_up(_NO_START, order["argv"][0], error)


def _give_up(code: int, what: bytes, error: BaseException) -> NoReturn:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    os.write(2, what + b": " + (reason or "cannot be used").encode("utf-8", "replace") + b"\n")
    os._exit(code)


def _received_fd(ours: socket.socket) -> int:
    """Receive the listener from the process that becomes the command, or exit with its error message."""
    first, extras, _, _ = ours.recvmsg(1, socket.CMSG_SPACE(4))
    rest = ours.recv(1 << 12)
    ours.close()
    if not extras or rest != b".":
        os.write(2, (b"" if extras else first) + rest or b"it was killed while it was set up")
        os._exit(1)
    return struct.unpack("i", extras[0][2])[0]


def _end_as(code: int) -> NoReturn:
    """End as the command did: with its exit code, or by the same signal."""
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
