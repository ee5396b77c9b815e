"""Leases for the processes of one machine: the first process serves the others over a Unix socket."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import math
import os
import socket
import socketserver
import stat
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from torchrl_agentic.limits.base import ServiceLimits
from torchrl_agentic.limits.lease_server import Lease, LeaseRequest, LeaseServer, LimitsDiffer

FOLDER = "TORCHRL_AGENTIC_LIMITS"
"""Environment variable that names the parent folder of the sockets instead of /tmp."""
RETRY_S = 0.01
MAX_ADDRESS = 103
"""Longest address of a Unix socket on all systems, in bytes: 107 on Linux, 103 on macOS and the BSDs."""
_DESCRIPTORS = "/proc/self/fd"
_servers: dict[Path, _LeaseSocket] = {}
_lock = threading.Lock()


class UnixSocketTransport:
    """A connection to the process that serves a name; this process serves it if no other one does.

    The socket lies in a folder that only this user can enter. When the serving process ends, another one
    takes its place.

    Args:
        name: Name of the service.

    Raises:
        PermissionError: If the folder belongs to another user, or others may enter it.
        OSError: If the folder's path is too long for a socket, on a system without /proc.
    """

    def __init__(self, name: str) -> None:
        self._path = _folder() / hashlib.sha256(name.encode()).hexdigest()[:24]
        with _address(self._path):  # raises now, and not at the first call, if the path is too long
            pass
        self._stream: Any = None

    def sync(self, request: LeaseRequest, timeout: float) -> Lease:
        """Send a request and return the lease; see `Transport`.

        Args:
            request: State and demand of this process.
            timeout: Longest time to wait for the answer, in seconds.
        """
        until = time.monotonic() + timeout
        line = json.dumps(dataclasses.asdict(request)).encode() + b"\n"
        while True:
            try:
                return self._ask(line, until)
            except TimeoutError:
                self.close()
                raise
            except OSError:
                self.close()
                if not _serve(self._path):
                    time.sleep(RETRY_S)
                if time.monotonic() >= until:
                    raise

    def _ask(self, line: bytes, until: float) -> Lease:
        left = max(0.001, until - time.monotonic())
        if self._stream is None:
            with contextlib.ExitStack() as stack:
                connection = stack.enter_context(socket.socket(socket.AF_UNIX))
                connection.settimeout(left)
                with _address(self._path) as address:
                    connection.connect(address)
                self._stream = connection.makefile("rwb")
                self._connection = connection
                stack.pop_all()
        self._connection.settimeout(left)
        self._stream.write(line)
        self._stream.flush()
        answer = self._stream.readline()
        if not answer.endswith(b"\n"):
            raise ConnectionResetError("the process that served the leases has ended")
        fields: dict[str, Any] = json.loads(answer)
        if "refusal" in fields:
            raise LimitsDiffer(fields["refusal"])
        fields["starts"] = tuple(fields["starts"])
        return Lease(**fields)

    def close(self) -> None:
        """Close the connection; see `Transport`."""
        if self._stream is not None:
            with contextlib.suppress(OSError):
                self._stream.close()
            self._connection.close()
            self._stream = None


class _LeaseSocket(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True

    def __init__(self, path: Path, lock: int, began: float, settle_s: float) -> None:
        self.lock_file, self.one_at_a_time = lock, threading.Lock()
        self.lease_server, self.longest_s = LeaseServer(began, settle_s), 0.0
        with _address(path) as address:
            super().__init__(address, _Handler)

    def answer(self, line: bytes) -> bytes:
        fields: dict[str, Any] = json.loads(line)
        fields["limits"] = ServiceLimits(**fields["limits"])
        request = LeaseRequest(**fields)
        with self.one_at_a_time:
            # The next server reads from this file how old the last lease is, and how long leases are valid.
            os.utime(self.lock_file)
            if max(request.ttl_s, request.call_s) > self.longest_s:
                self.longest_s = max(request.ttl_s, request.call_s)
                os.pwrite(self.lock_file, f"{self.longest_s:<20.6f}".encode(), 0)
            try:
                answer = dataclasses.asdict(self.lease_server.sync(request, time.monotonic()))
            except LimitsDiffer as error:
                answer = {"refusal": str(error)}
        return json.dumps(answer).encode() + b"\n"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that disconnected or sent an invalid request."""


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, _LeaseSocket)
        for line in self.rfile:
            self.wfile.write(self.server.answer(line))


def _serve(path: Path) -> bool:
    """Serve a name in this process; return False if another process does, or is about to."""
    with _lock:
        if path in _servers:
            return True
        # A POSIX lock: forked children do not inherit it, so that it ends with this process.
        lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            return False
        found = os.fstat(lock)
        age = max(0.0, time.time() - found.st_mtime) if found.st_size else math.inf
        settle_s = float(os.pread(lock, 20, 0) or 0)
        path.unlink(missing_ok=True)
        server = _servers[path] = _LeaseSocket(path, lock, time.monotonic() - age, settle_s)
        threading.Thread(target=server.serve_forever, name="torchrl_agentic-leases", daemon=True).start()
        return True


def _forget() -> None:
    """Close our copies of the sockets after a fork: only the parent serves, and they would outlive it."""
    global _lock
    _lock = threading.Lock()
    for server in _servers.values():
        server.socket.close()
        os.close(server.lock_file)
    _servers.clear()


os.register_at_fork(after_in_child=_forget)


@contextlib.contextmanager
def _address(path: Path) -> Generator[str]:
    """Yield an address that fits into `sockaddr_un` and leads to `path`, however long that is.

    A long one is reached through a descriptor of its folder. Sockets are found by their inode, so processes
    that use different addresses of one file meet.

    Raises:
        OSError: If the path is too long, and this system has no /proc.
    """
    if len(os.fsencode(path)) <= MAX_ADDRESS:
        yield str(path)
        return
    if not os.path.isdir(_DESCRIPTORS):
        raise OSError(
            errno.ENAMETOOLONG,
            f"the path of the limiter's socket has {len(os.fsencode(path))} bytes, and may have "
            f"{MAX_ADDRESS}: set {FOLDER} to a shorter folder, the same for all processes",
            str(path),
        )
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"{_DESCRIPTORS}/{folder}/{path.name}"
    finally:
        os.close(folder)


def _folder() -> Path:
    """Return the folder of the sockets, which belongs to this user alone.

    Raises:
        PermissionError: If it belongs to another user, or others may enter it.
    """
    folder = Path(os.environ.get(FOLDER) or "/tmp", f"torchrl_agentic-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} must be a folder that belongs to this user alone, with mode 0700")
    return folder
