"""The system calls of confined processes that another process decides on: new processes, and signals.

See seccomp_unotify(2). Only arguments in registers are looked at: what a pointer points to could change
between the look and the call.
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
"""How long a process that was let through may take to show up, at most."""


class Gate:
    """Lets processes start while fewer than `max_processes` run, threads counted, and signal each other only.

    starts: the numbers of the calls that start a process; the others that it is asked about send a signal.
    Once it is closed, nothing new can start.
    """

    def __init__(self, fd: int, starts: list[int], max_processes: int | None) -> None:
        self.fd = fd
        self._starts = starts
        self._max_processes = max_processes
        self._let_through: dict[int, float] = {}

    def answer(self) -> None:
        """Decide on one call that waits."""
        notice = bytearray(_NOTICE.size)
        try:
            fcntl.ioctl(self.fd, _RECEIVE, notice)
            number, asking, _, call, argument = _NOTICE.unpack(notice)
            error = self._refuses_start(asking) if call in self._starts else _refuses_signal(argument)
            self._send(_REPLY.pack(number, 0, -error, 0 if error else _CONTINUE))
        except InterruptedError:
            pass  # it still waits: the next poll says so
        except FileNotFoundError:
            pass  # who asked is gone, or was interrupted

    def close(self) -> None:
        """Answer nothing any more: every call that would have waited fails."""
        os.close(self.fd)

    def _send(self, reply: bytes) -> None:
        while True:
            try:
                fcntl.ioctl(self.fd, _SEND, reply)
                return
            except InterruptedError:
                continue  # by a signal of ours; who asked would wait for ever

    def _refuses_start(self, asking: int) -> int:
        if self._max_processes is None:
            return 0
        # Some that were let through may not be there yet: many that ask at once would all get in. Whoever
        # asks again, or has ended, has its own.
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
    """Give an error for a process that is not ours, or a group (below 0) that none of ours is in."""
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
