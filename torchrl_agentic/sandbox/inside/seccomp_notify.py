"""`SeccompNotify`: decides on system calls of confined processes: new processes, and signals.

See seccomp_unotify(2). Only arguments in registers are checked, because memory could change between the check
and the call.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time

from torchrl_agentic.sandbox.inside.orphans import descendants

_RECEIVE, _SEND, _CONTINUE = 0xC0502100, 0xC0182101, 1
_NOTICE = struct.Struct("<QIIi12xi44x")  # id, thread, flags, call, …, first argument, …
_REPLY = struct.Struct("<QqiI")
_SETTLE_S = 0.1
"""Maximum seconds until a process that was allowed is visible."""


class SeccompNotify:
    """Allows new processes below a maximum, threads included, and signals among own processes.

    Args:
        fd: Descriptor of the listener.
        starts: Numbers of the calls that start a process; the other calls send a signal.
        max_processes: Maximum number of processes and threads; None for no limit.
    """

    def __init__(self, fd: int, starts: list[int], max_processes: int | None) -> None:
        self.fd = fd
        self._starts = starts
        self._max_processes = max_processes
        self._let_through: dict[int, float] = {}

    def answer(self) -> None:
        """Decide on one waiting call."""
        notice = bytearray(_NOTICE.size)
        try:
            fcntl.ioctl(self.fd, _RECEIVE, notice)
            number, asking, _, call, argument = _NOTICE.unpack(notice)
            error = self._refuses_start(asking) if call in self._starts else _refuses_signal(argument)
            self._send(_REPLY.pack(number, 0, -error, 0 if error else _CONTINUE))
        except InterruptedError:
            pass  # the call still waits, and the next poll reports it
        except FileNotFoundError:
            pass  # the caller has ended, or was interrupted

    def close(self) -> None:
        """Stop answering: every call that waits, or would wait, fails."""
        os.close(self.fd)

    def _send(self, reply: bytes) -> None:
        while True:
            try:
                fcntl.ioctl(self.fd, _SEND, reply)
                return
            except InterruptedError:
                continue  # interrupted by a signal; without an answer the caller would wait forever

    def _refuses_start(self, asking: int) -> int:
        if self._max_processes is None:
            return 0
        # Processes that were allowed may not be visible yet, so count them too: otherwise many concurrent
        # calls would all pass. A caller that calls again, or has ended, has its process.
        self._let_through.pop(asking, None)
        while True:
            running = {thread for threads in descendants().values() for thread in threads}
            recent = time.monotonic() - _SETTLE_S
            for thread, moment in list(self._let_through.items()):
                if moment < recent or thread not in running:
                    del self._let_through[thread]
            if len(running) >= self._max_processes:
                return errno.EAGAIN
            if len(running) + len(self._let_through) < self._max_processes:
                self._let_through[asking] = time.monotonic()
                return 0
            time.sleep(0.001)


def _refuses_signal(target: int) -> int:
    """Return an error number if the target, negative for a group, is not among own processes, else 0."""
    if target == 0:
        return 0
    ours = descendants()
    if target > 0:
        allowed = target in ours or any(target in threads for threads in ours.values())
    else:
        allowed = -target in {_group(pid) for pid in ours}
    return 0 if allowed else errno.EPERM


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0
