"""Leases for the processes of one machine: one of them serves the others over a socket, whoever is first."""

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

from torchrl_agentic.limits.base import Limits
from torchrl_agentic.limits.lease_server import Lease, LeaseServer, LimitsDiffer, Report

FOLDER = "TORCHRL_AGENTIC_LIMITS"
"""The environment variable that names another folder than /tmp; processes share limits within one folder."""
RETRY_S = 0.01
MAX_ADDRESS = 103
"""The longest address of a unix socket, in bytes: 107 on Linux, 103 on macOS and the BSDs."""
_DESCRIPTORS = "/proc/self/fd"
_servers: dict[Path, _Server] = {}
_lock = threading.Lock()


class MachineTransport:
    """A connection to the process that serves a name; becomes that process if there is none.

    The socket lies in a folder that only this user can enter. If the process that serves ends, one of the
    others takes its place.

    Args:
        name: Name of the service.

    Raises:
        PermissionError: If the folder belongs to another user, or others may enter it.
        OSError: If the folder's path is too long for a socket, on a system without /proc.
    """

    def __init__(self, name: str) -> None:
        self._path = _folder() / hashlib.sha256(name.encode()).hexdigest()[:24]
        with _address(self._path):  # raises here, and not at the first call, if there can be none
            pass
        self._stream: Any = None

    def sync(self, report: Report, timeout: float) -> Lease:
        """Exchange a report for a lease; see `Transport`."""
        until = time.monotonic() + timeout
        line = json.dumps(dataclasses.asdict(report)).encode() + b"\n"
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
            raise ConnectionResetError("the process that gave out the leases has ended")
        fields: dict[str, Any] = json.loads(answer)
        if "refusal" in fields:
            raise LimitsDiffer(fields["refusal"])
        fields["starts"] = tuple(fields["starts"])
        return Lease(**fields)

    def close(self) -> None:
        """Hang up; see `Transport`."""
        if self._stream is not None:
            with contextlib.suppress(OSError):
                self._stream.close()
            self._connection.close()
            self._stream = None


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True

    def __init__(self, path: Path, lock: int, began: float, settle_s: float) -> None:
        self.lock_file, self.one_at_a_time = lock, threading.Lock()
        self.lease_server, self.longest_s = LeaseServer(began, settle_s), 0.0
        with _address(path) as address:
            super().__init__(address, _Client)

    def answer(self, line: bytes) -> bytes:
        fields: dict[str, Any] = json.loads(line)
        fields["limits"] = Limits(**fields["limits"])
        report = Report(**fields)
        with self.one_at_a_time:
            # Whoever comes after us knows until when there were leases, and how long they may still be used.
            os.utime(self.lock_file)
            if max(report.ttl_s, report.call_s) > self.longest_s:
                self.longest_s = max(report.ttl_s, report.call_s)
                os.pwrite(self.lock_file, f"{self.longest_s:<20.6f}".encode(), 0)
            try:
                answer = dataclasses.asdict(self.lease_server.sync(report, time.monotonic()))
            except LimitsDiffer as error:
                answer = {"refusal": str(error)}
        return json.dumps(answer).encode() + b"\n"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Pass over a client that went away, or wrote what is no report."""


class _Client(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, _Server)
        for line in self.rfile:
            self.wfile.write(self.server.answer(line))


def _serve(path: Path) -> bool:
    """Serve a name in this process, unless another one does; False: one does, or is about to."""
    with _lock:
        if path in _servers:
            return True
        # A lock of POSIX: children of a fork do not inherit it, so that it ends with this process alone.
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
        server = _servers[path] = _Server(path, lock, time.monotonic() - age, settle_s)
        threading.Thread(target=server.serve_forever, name="torchrl_agentic-leases", daemon=True).start()
        return True


def _forget() -> None:
    """After a fork: the parent serves, and only it; our copy of its socket would outlive it."""
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
            f"the path of the limiter's socket has {len(os.fsencode(path))} bytes, and a socket's at most "
            f"{MAX_ADDRESS}: set {FOLDER} to a shorter folder, the same one in all processes that share it",
            str(path),
        )
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"{_DESCRIPTORS}/{folder}/{path.name}"
    finally:
        os.close(folder)


def _folder() -> Path:
    """Give a folder that belongs to this user alone.

    Raises:
        PermissionError: it belongs to somebody else, or others may enter it.
    """
    folder = Path(os.environ.get(FOLDER) or "/tmp", f"torchrl_agentic-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} has to be a folder that belongs to this user alone")
    return folder
