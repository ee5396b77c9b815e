"""A fake of E2B on loopback: its control API, and envd inside each machine, in their real wire formats.

A "machine" is a temporary folder, and its commands are plain processes of this host that run there; /work in
their arguments is replaced by a folder in it. So this tests that both sides understand each other, and what
is requested from E2B, but no isolation.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import urllib.parse
from collections.abc import Generator, Mapping
from typing import Any, Self

from fakes.e2b_http import Fault, Handler, Http, Seen
from fakes.e2b_machine import Machine, Refusal

__all__ = ["E2BServer", "Fault", "Seen"]

ENVD_VERSION = "0.9.0"


class E2BServer:
    """A fake of E2B. A context manager.

    `E2BSandbox(api_key=server.api_key, connection=server.connection)` uses it.

    Attributes:
        machines: Machines that have not been ended.
        quota: Maximum number of machines at once.
        user: User that the template runs commands as.
    """

    def __init__(self, *, quota: int | None = None, user: str = "user") -> None:
        self.api_key = f"e2b_{secrets.token_hex(20)}"
        self.quota, self.user = quota, user
        self.machines: dict[str, Machine] = {}
        self.requests: list[Seen] = []
        self.faults: list[Fault] = []
        self._keys: dict[str, str] = {}
        self._streams: dict[socket.socket, Machine] = {}
        self._lock = threading.Lock()
        self._http = Http(("127.0.0.1", 0), Handler)
        self._http.fake = self
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        for name in list(self.machines):
            self.expire(name)
        self._http.cut()
        self._thread.join()

    @property
    def url(self) -> str:
        """The URL of the server."""
        return f"http://127.0.0.1:{self._http.server_port}"

    @property
    def connection(self) -> dict[str, Any]:
        """Options of the SDK that connect it to this server, whatever the environment."""
        return {"api_url": self.url, "sandbox_url": self.url, "debug": False}

    def expire(self, name: str) -> None:
        """End a machine as if its time were over."""
        machine = self.machines.pop(name, None)
        if machine is not None:
            self.cut_streams(machine)
            machine.end()

    def cut_streams(self, only: Machine | None = None) -> None:
        """Close the connections on which processes are followed; the processes continue."""
        with self._lock:
            for stream, machine in self._streams.items():
                if only in (None, machine):
                    with contextlib.suppress(OSError):
                        stream.shutdown(socket.SHUT_RDWR)

    def asked(self, path: str) -> list[Seen]:
        """Return the requests to a path."""
        return [seen for seen in self.requests if seen.path == path]

    def fault_for(self, path: str) -> Fault | None:
        """Return the fault that is due for a request, and count it."""
        with self._lock:
            for fault in self.faults:
                if fault.times > 0 and fault.path == path:
                    fault.times -= 1
                    return fault
        return None

    @contextlib.contextmanager
    def streaming(self, connection: socket.socket, machine: Machine) -> Generator[None]:
        """Record a connection on which a process is followed."""
        with self._lock:
            self._streams[connection] = machine
        try:
            yield
        finally:
            with self._lock:
                del self._streams[connection]

    def control(self, seen: Seen, query: Mapping[str, str]) -> tuple[int, Any]:
        """Answer a request to the control API."""
        if seen.headers.get("x-api-key") != self.api_key:
            raise Refusal(401, "the API key is invalid")
        match seen.method, seen.path.strip("/").split("/"):
            case "POST", ["v2", "sandboxes"]:
                return 201, self._create(seen)
            case "GET", ["v2", "sandboxes"]:
                wanted = dict(urllib.parse.parse_qsl(query.get("metadata", "")))
                found = [machine for machine in self.machines.values() if machine.has(wanted)]
                return 200, [self._described(machine) for machine in found]
            case "DELETE", ["sandboxes", name]:
                self._known(name)
                self.expire(name)
                return 204, None
            case "POST", ["sandboxes", name, "timeout"]:
                self._known(name).timeout_s = int(seen.body["timeout"])
                return 204, None
            case _:
                raise Refusal(404, f"no such endpoint: {seen.method} {seen.path}")

    def _create(self, seen: Seen) -> dict[str, Any]:
        template = seen.body["templateID"]
        if template != "base":
            raise Refusal(404, f"template '{template}' not found")
        with self._lock:
            key = seen.headers.get("idempotency-key", secrets.token_hex(8))
            machine = self.machines.get(self._keys.get(key, ""))
            if machine is None:
                if self.quota is not None and len(self.machines) >= self.quota:
                    raise Refusal(429, f"you have reached the maximum number of sandboxes ({self.quota})")
                machine = Machine(seen.body, self.user)
                self.machines[machine.name] = machine
                self._keys[key] = machine.name
        return self._described(machine) | {"envdAccessToken": machine.token, "domain": None}

    def _known(self, name: str) -> Machine:
        if name not in self.machines:
            raise Refusal(404, f"sandbox {name} not found")
        return self.machines[name]

    def _described(self, machine: Machine) -> dict[str, Any]:
        return {
            "templateID": "base", "sandboxID": machine.name, "clientID": "fake", "envdVersion": ENVD_VERSION,
            "startedAt": "2026-01-01T00:00:00Z", "endAt": "2026-01-01T01:00:00Z", "cpuCount": 2,
            "memoryMB": 512, "diskSizeMB": 1024, "state": "running",
            "metadata": machine.asked.get("metadata", {}),
        }  # fmt: skip
