"""A virtual machine at E2B, rented for one trajectory: commands and files go there over the internet.

Stops:
- anything on this host: code runs in a machine of E2B's, to which only commands, files and stdin are sent
- the internet unless it was granted, and callers from the internet: E2B keeps that, we ask for it
- gaining rights inside: setuid programs, sudo among them, give none
- one process using more memory, processor time or file size than its limits; more processes of the
  machine's user than its limit
- output without end costing the trainer memory
- a machine that outlives `close`, an `open` that failed, or its last use by more than timeout_s
Does not stop:
- a process that leaves the session of its command from outliving it; it ends with the machine
- code from lifting the limits of processes where the template's user is root
- all processes together from using all that the template's machine has
- E2B from reading along
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import math
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from torchrl_agentic.errors import MissingExtra, SandboxError
from torchrl_agentic.sandbox.base import WORK, Sandbox, SandboxResult, checked
from torchrl_agentic.sandbox.cancellation import off_loop, to_the_end
from torchrl_agentic.sandbox.remote import e2b_files
from torchrl_agentic.sandbox.remote.envd import run_to_end
from torchrl_agentic.sandbox.remote.envd_served import EnvdServed
from torchrl_agentic.sandbox.remote.service import clean_up, from_service, in_time, patiently
from torchrl_agentic.sandbox.remote.watcher import limited
from torchrl_agentic.sandbox.resource_limits import Network, ResourceLimits
from torchrl_agentic.sandbox.workspace import inside

if TYPE_CHECKING:
    from e2b import AsyncSandbox

MARK = "torchrl_agentic"
"""The name in a machine's metadata under which `open` writes what it would find it again by."""
_PREPARE = ("/bin/sh", "-c", 'mkdir -p -- "$1" && chmod 0777 -- "$1"', "sh", WORK)
_PREPARE_S = 30.0
_MARGIN_S = 30.0


class E2BSandbox(Sandbox):
    """Commands and files in a virtual machine at E2B.

    template: what the machine is made of, E2B's "base" if not given; it needs bash, setsid, setpriv and env,
    as Debian and Ubuntu have them. api_key: that in E2B_API_KEY if not given. timeout_s: how long E2B keeps
    the machine after its last use if nobody closes it; each use prolongs that.
    connection: further options of the SDK for its connection: domain, proxy, retries, request_timeout, ...
    """

    name: ClassVar[str] = "e2b"
    cannot: ClassVar[frozenset[str]] = frozenset({"daemons"})
    network: ClassVar[frozenset[Network]] = frozenset({"none", "loopback", "full"})

    def __init__(
        self,
        limits: ResourceLimits | None = None,
        *,
        template: str | None = None,
        api_key: str | None = None,
        timeout_s: int = 900,
        connection: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(limits)
        if importlib.util.find_spec("e2b") is None:
            raise MissingExtra("E2BSandbox", "e2b", "e2b")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be above 0; got {timeout_s}")
        if self.limits.fs_read_roots or self.limits.fs_write_roots:
            raise ValueError("a machine at E2B cannot show folders of this host; write_file what it needs")
        self.template, self.api_key, self.timeout_s = template, api_key, timeout_s
        self.connection = dict(connection or {})
        self._machine: AsyncSandbox | None = None
        self._until = 0.0
        self._as_root = False
        self._opening = asyncio.Lock()
        self._served: list[EnvdServed] = []

    @property
    def limits_enforced(self) -> Mapping[str, bool]:
        """Which limits hold here; once it is open, with regard to whom the template runs code as.

        The totals are those of the template's machine.
        """
        of_processes = ("cpu_seconds", "memory_bytes", "max_processes", "disk_bytes")
        held = dict.fromkeys(of_processes, not self._as_root)
        return {**held, "memory_total": True, "disk_total": True, "network": True, "seccomp": False}

    def fresh(self) -> E2BSandbox:
        """Make another one with the same settings, not open yet."""
        return E2BSandbox(
            self.limits,
            template=self.template,
            api_key=self.api_key,
            timeout_s=self.timeout_s,
            connection=self.connection,
        )

    @property
    def is_open(self) -> bool:
        """Whether it can be used."""
        return self._machine is not None

    async def open(self) -> None:
        """Rent a machine, and make it ready."""
        async with self._opening:
            if self._machine is not None:
                return
            await off_loop(importlib.import_module, "e2b")  # takes half a second, the first time
            mark = uuid.uuid4().hex
            renting = asyncio.create_task(self._rent(mark))
            try:
                await asyncio.wait({renting})
                machine = renting.result()
                await self._prepare(machine)
            except BaseException:
                await clean_up(self._undo(renting, mark))
                raise
            self._machine = machine

    async def _rent(self, mark: str) -> AsyncSandbox:
        from e2b import AsyncSandbox

        online = self.limits.network == "full"
        self._until = time.monotonic() + self.timeout_s
        with from_service("E2B gave no machine"):
            return await AsyncSandbox.create(
                self.template,
                timeout=self.timeout_s,
                metadata={MARK: mark},
                allow_internet_access=online,
                network={} if online else {"allow_public_traffic": False},
                lifecycle={"on_timeout": "kill"},
                idempotency_key=mark,  # the SDK may repeat the request, and must not get two machines
                **self._options,
            )

    async def _prepare(self, machine: AsyncSandbox) -> None:
        # A new machine may not be known everywhere at once.
        made = await patiently(lambda: run_to_end(machine, _PREPARE, user="root", wall_seconds=_PREPARE_S))
        trial = limited(["id", "-u"], WORK, ResourceLimits())
        tried = await run_to_end(machine, trial, wall_seconds=_PREPARE_S)
        if made.exit_code or tried.exit_code:
            reason = (made.stderr + tried.stderr).strip() or "no reason given"
            raise SandboxError(f"the E2B template {self.template or 'base'!r} cannot be used: {reason}")
        self._as_root = tried.stdout.strip() == "0"

    async def _undo(self, renting: asyncio.Task[AsyncSandbox], mark: str) -> None:
        """End what an `open` that failed has left, also where E2B's answer never came."""
        from e2b import AsyncSandbox, SandboxQuery

        with contextlib.suppress(SandboxError):
            await self._end((await renting).sandbox_id)
            return
        if _was_refused(renting.exception()):
            return
        with from_service(f"at E2B a machine with {MARK}={mark} may be left, for {self.timeout_s} s"):
            pages = AsyncSandbox.list(query=SandboxQuery(metadata={MARK: mark}), **self._options)
            while pages.has_next:
                for found in await pages.next_items():
                    await self._end(found.sandbox_id)

    async def close(self) -> None:
        """End the machine, also if the caller is cancelled meanwhile.

        Raises:
            SandboxError: E2B cannot be reached; it stays open then, to be closed again.
        """
        for served in self._served:
            served.abandon()
        self._served.clear()
        if self._machine is not None:
            await to_the_end(in_time(self._close(self._machine)))

    async def _close(self, machine: AsyncSandbox) -> None:
        await self._end(machine.sandbox_id)
        self._machine = None

    async def _end(self, machine_id: str) -> None:
        from e2b import AsyncSandbox

        async def attempt() -> None:
            with from_service(f"E2B did not end {machine_id}, and will in {self.timeout_s} s"):
                await AsyncSandbox.kill(machine_id, **self._options)

        await patiently(attempt)

    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | None = None,
        cwd: str | None = None,
        limits: ResourceLimits | None = None,
    ) -> SandboxResult:
        """Run one command to its end; without a wall limit, it has timeout_s at most."""
        effective = self.limits.narrow(limits)
        args = limited(checked(argv), "/".join((WORK, *inside(cwd or WORK))), effective)
        wall, kept = effective.wall_seconds, effective.output_bytes
        machine = await self._alive(wall or 0)
        return await run_to_end(machine, args, stdin=stdin, wall_seconds=wall, output_bytes=kept)

    async def spawn(self, argv: Sequence[str]) -> EnvdServed:
        """Start a long-lived process; its processor time has no limit, since it serves many calls."""
        args = limited(checked(argv), WORK, replace(self.limits, cpu_seconds=None))
        served = EnvdServed(await self._alive(), self._alive)
        await served.start(args)
        self._served = [other for other in self._served if not other.over] + [served]
        return served

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file inside."""
        await e2b_files.write(await self._alive(), path, data)

    async def read_file(self, path: str, max_bytes: int | None = None) -> bytes:
        """Read a file inside, 64 MiB of it at most."""
        return await e2b_files.read(await self._alive(), path, max_bytes)

    async def _alive(self, seconds: float = 0.0) -> AsyncSandbox:
        """Give the machine, with time left for a command of that length, and half of timeout_s at least."""
        machine = self._machine
        if machine is None:
            raise SandboxError("the sandbox is not open: use 'async with', or call open() first")
        needed = max(self.timeout_s / 2, seconds + _MARGIN_S if seconds else 0)
        if self._until - time.monotonic() < needed:
            granted = math.ceil(max(self.timeout_s, needed))
            until = time.monotonic() + granted

            async def attempt() -> None:
                with from_service("E2B did not prolong a machine's time"):
                    await machine.set_timeout(granted)

            await patiently(attempt)
            self._until = until
        return machine

    @property
    def _options(self) -> dict[str, Any]:
        return {"api_key": self.api_key, **self.connection}


def _was_refused(error: BaseException | None) -> bool:
    """Whether E2B said no, so that there is no machine; after any other failure there may be one."""
    from e2b import AuthenticationException, SandboxException, ServiceBusyException

    cause = error and error.__cause__
    if isinstance(cause, SandboxException):
        return cause.status_code is not None and 400 <= cause.status_code < 500
    return isinstance(cause, AuthenticationException | ServiceBusyException)
