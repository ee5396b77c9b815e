"""A "machine" of the fake of E2B: a temporary folder, and processes of this host that run there."""

from __future__ import annotations

import base64
import contextlib
import functools
import os
import re
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torchrl_agentic.sandbox.base import WORK
from torchrl_agentic.sandbox.process import as_nobody
from torchrl_agentic.sandbox.workspace import NOBODY

CHUNK = 1 << 15
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_WORK = re.compile(rf"(?<![^\s'=]){WORK}(?=[/'\s]|$)")
_STATUS = {"invalid_argument": 400, "unauthenticated": 401, "not_found": 404, "internal": 500}


_start: Any = subprocess.Popen  # its overloads do not accept `user=` from a dict


class Refusal(Exception):
    """A request that is answered with an error: an HTTP status, or a code of envd's RPCs."""

    def __init__(self, status: int | str, message: str) -> None:
        super().__init__(message)
        self.message = message
        self.code = status
        self.status = status if isinstance(status, int) else _STATUS.get(status, 400)

    def body(self) -> dict[str, Any]:
        """Return the error as JSON."""
        return {"code": self.code, "message": self.message}


class Running:
    """A process in a machine, with pipes on all its streams.

    Attributes:
        followed: True if a client listens.
    """

    def __init__(self, process: subprocess.Popen[bytes], tag: str | None) -> None:
        self.process, self.tag = process, tag
        self.followed = True
        self._lock = threading.Lock()
        self._stop, self._wake = os.pipe()
        self._has_ended = False

    def write(self, data: bytes) -> None:
        """Write to the stdin of the process."""
        with self._lock:
            if self.process.stdin is None:
                raise Refusal("failed_precondition", "stdin not enabled or closed")
            try:
                self.process.stdin.write(data)
                self.process.stdin.flush()
            except (OSError, ValueError):
                raise Refusal("failed_precondition", "error writing to stdin: broken pipe") from None

    def close_stdin(self) -> None:
        """Close the stdin of the process."""
        with self._lock, contextlib.suppress(OSError):
            if self.process.stdin is not None:
                self.process.stdin.close()

    def signal(self, number: int) -> None:
        """Send a signal to this process only. As with envd, its output then ends for the client."""
        self.process.send_signal(number)
        with self._lock:
            if not self._has_ended:
                os.write(self._wake, b"x")

    def events(self, client: socket.socket) -> Iterator[dict[str, Any]]:
        """Yield the events of the process; its output is read to the end also if no client listens."""
        yield {"start": {"pid": self.process.pid}}
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        pipes = {self.process.stdout.fileno(): "stdout", self.process.stderr.fileno(): "stderr"}
        with selectors.DefaultSelector() as selector:
            for fd in (*pipes, self._stop, client.fileno()):
                selector.register(fd, selectors.EVENT_READ)
            while pipes:
                ready = [key.fd for key, _ in selector.select()]
                if self._stop in ready:
                    break
                for fd in ready:
                    if fd not in pipes:  # the client sends nothing more, so this is its end
                        self.followed = False
                        selector.unregister(fd)
                    elif data := os.read(fd, CHUNK):
                        if self.followed:
                            yield {"data": {pipes[fd]: base64.b64encode(data).decode()}}
                    else:
                        selector.unregister(fd)
                        del pipes[fd]
        with self._lock:
            self._has_ended = True
            os.close(self._stop)
            os.close(self._wake)
        code = self.process.wait()
        for file in (self.process.stdout, self.process.stderr, self.process.stdin):
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()
        if code < 0:
            status = f"signal: {signal.strsignal(-code)}".lower()
            yield {"end": {"exitCode": -1, "status": status, "error": status}}
        else:
            failed: dict[str, Any] = {"exitCode": code, "error": f"exit status {code}"} if code else {}
            yield {"end": {"exited": True, "status": f"exit status {code}", **failed}}


@functools.cache
def alone() -> tuple[str, ...]:
    """Return the command prefix with which only processes of the command count against its limit.

    It creates a user namespace, if the machine supports those. Otherwise it is (), and all processes of the
    user count.
    """
    unshare = shutil.which("unshare")
    if unshare is not None:
        prefix, identity = as_nobody()
        command = (unshare, "--user", "--map-current-user", "--")
        if _start([*prefix, *command, "true"], stderr=subprocess.DEVNULL, **identity).wait() == 0:
            return command
    return ()


class Machine:
    """A machine.

    Attributes:
        asked: The request that created it.
        timeout_s: Seconds that it was last granted.
    """

    def __init__(self, asked: Mapping[str, Any], user: str) -> None:
        self.user = user
        self.name = f"i{secrets.token_hex(10)}"
        self.token = secrets.token_hex(20)
        self.asked = asked
        self.timeout_s = int(asked.get("timeout", 300))
        self.root = tempfile.mkdtemp(prefix="torchrl_agentic-e2b-")
        if os.geteuid() == 0:
            os.chown(self.root, NOBODY, NOBODY)
        self.processes: dict[int, Running] = {}

    def has(self, metadata: Mapping[str, str]) -> bool:
        """Return whether it was created with this metadata."""
        return metadata.items() <= self.asked.get("metadata", {}).items()

    def end(self) -> None:
        """End all processes with its name in their environment, or in its folder, and remove its files."""
        for running in list(self.processes.values()):
            with contextlib.suppress(OSError):
                running.signal(signal.SIGTERM)
        deadline = time.monotonic() + 2
        while self.processes and time.monotonic() < deadline:
            time.sleep(0.01)
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline and self._kill_all():  # again for those started meanwhile
            time.sleep(0.01)
        shutil.rmtree(self.root, ignore_errors=True)

    def _kill_all(self) -> bool:
        """Kill all processes in the machine, and return whether there were any."""
        mark, found = f"E2B_SANDBOX_ID={self.name}".encode(), False
        for entry in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                inside = f"{os.readlink(entry.with_name('cwd'))}/".startswith(f"{self.root}/")
                if inside or mark in entry.read_bytes().split(b"\0"):
                    found = True
                    os.kill(int(entry.parent.name), signal.SIGKILL)
        return found

    def start(self, request: Mapping[str, Any], user: str) -> Running:
        """Start a process as a user: as root if we are root, otherwise with the fewest rights."""
        user = user or self.user
        if user not in ("user", "root"):
            raise Refusal("unauthenticated", f"invalid username: '{user}'")
        config = request["process"]
        argv = [self._translated(word) for word in (config["cmd"], *config.get("args", ()))]
        prefix, identity = ((), {}) if user == "root" else as_nobody()
        prefix = prefix if user == "root" else (*prefix, *alone())
        env = {"PATH": PATH, "HOME": self.root, "USER": user, "LOGNAME": user}
        env |= {"E2B_SANDBOX": "true", "E2B_SANDBOX_ID": self.name}
        env |= self.asked.get("envVars", {}) | config.get("envs", {})
        try:
            process = _start(
                [*prefix, *argv],
                cwd=self._translated(config.get("cwd", self.root)),
                env=env,
                stdin=subprocess.PIPE if request.get("stdin", True) else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                **identity,
            )
        except OSError as error:
            reason = f"fork/exec {config['cmd']}: {(error.strerror or '').lower()}"
            raise Refusal("invalid_argument", f"error starting process: {reason}") from None
        running = self.processes[process.pid] = Running(process, request.get("tag"))
        return running

    def follow(self, running: Running, client: socket.socket) -> Iterator[dict[str, Any]]:
        """Yield the events of a process of this machine, to its end."""
        try:
            yield from running.events(client)
        finally:
            self.processes.pop(running.process.pid, None)

    def call(self, path: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """Answer an RPC other than Start."""
        if path == "/process.Process/List":
            return {"processes": [{"pid": pid} for pid in self.processes]}
        wanted = request.get("process", {})
        running = self.processes.get(wanted.get("pid", 0))
        if "tag" in wanted:
            running = next((one for one in self.processes.values() if one.tag == wanted["tag"]), None)
        if running is None:
            raise Refusal("not_found", "process not found")
        match path:
            case "/process.Process/SendInput":
                running.write(base64.b64decode(request["input"]["stdin"]))
            case "/process.Process/CloseStdin":
                running.close_stdin()
            case "/process.Process/SendSignal":
                running.signal(signal.Signals[request["signal"].removeprefix("SIGNAL_")])
            case _:
                raise Refusal("unimplemented", f"not here: {path}")
        return {}

    def _translated(self, word: str) -> str:
        """Return a word, or the command line of a shell, with /work replaced by a folder of the machine."""
        return _WORK.sub(lambda _: self.root + WORK, word)
