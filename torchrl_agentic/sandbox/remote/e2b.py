"""`E2BSandbox`: a virtual machine at E2B for each trajectory, reached over the internet.

Stops:
- anything on this host: code runs in a machine of E2B's, to which only commands, files and stdin are sent
- the internet unless it was granted, and callers from the internet: E2B keeps that, we ask for it
- gaining rights inside: setuid programs, sudo among them, give none
- one process using more memory, processor time or file size than its limits; more processes of the
  machine's user than its limit
- the process group of a command outliving it
- output without end costing the trainer memory
- a machine that outlives `close`, an `open` that failed, or its last use by more than timeout_s
Does not stop:
- a process that leaves the process group of its command from outliving it: it ends with the machine, and if
  it holds the output of the command, the command goes on until its wall limit
- code from lifting the limits of processes where the template's user is root
- all processes together from using all that the template's machine has
- E2B from reading along
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import shlex
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torchrl_agentic.errors import MissingExtra
from torchrl_agentic.sandbox.base import WORK
from torchrl_agentic.sandbox.cancellation import off_loop
from torchrl_agentic.sandbox.remote.remote_process import START_S, Take
from torchrl_agentic.sandbox.remote.remote_sandbox import RemoteSandbox
from torchrl_agentic.sandbox.remote.service import ask, from_service
from torchrl_agentic.sandbox.resource_limits import Network, ResourceLimits

if TYPE_CHECKING:
    from e2b import AsyncCommandHandle, AsyncSandbox

MARK = "torchrl_agentic"
"""The name in a machine's metadata by which a lost one is found."""
CHUNK = 1 << 18
"""Bytes of input in one request."""
MAX_LINE = 1 << 17
"""Longest command line that Linux takes, in bytes: the SDK passes it as one word to a shell."""
MARGIN_S = 30.0
# The SDK decodes output as UTF-8. Each byte goes as the character of its number, so that none is lost.
_AS_TEXT = 'binmode STDOUT, ":utf8"; $| = 1; print $b while sysread STDIN, $b, 32768'


class E2BSandbox(RemoteSandbox["AsyncSandbox"]):
    """Commands and files in a virtual machine at E2B.

    Args:
        limits: Limits of the sandbox.
        template: The template of the machine; None for E2B's "base". It needs bash and `programs`, as Debian
            and Ubuntu have them.
        api_key: API key; None for that in E2B_API_KEY.
        timeout_s: Seconds that E2B keeps the machine after its last use; each use prolongs that.
        connection: Further options of the SDK for its connection: domain, proxy, request_timeout, ...
    """

    name: ClassVar[str] = "e2b"
    cannot: ClassVar[frozenset[str]] = frozenset({"daemons"})
    network: ClassVar[frozenset[Network]] = frozenset({"none", "loopback", "full"})
    counts_processes = True
    programs = (*RemoteSandbox.programs, "perl", "setpriv")

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
        self._mark = ""
        self._until = 0.0
        self._as_root = False

    @property
    def limits_enforced(self) -> Mapping[str, bool]:
        """Which limits hold here; once it is open, with regard to the user of the template.

        The totals are those of the template's machine.
        """
        of_processes = ("cpu_seconds", "memory_bytes", "max_processes", "disk_bytes")
        held = dict.fromkeys(of_processes, not self._as_root)
        return {**held, "memory_total": True, "disk_total": True, "network": True, "seccomp": False}

    def fresh(self) -> E2BSandbox:
        """Create another one with the same settings, not open yet."""
        return E2BSandbox(
            self.limits,
            template=self.template,
            api_key=self.api_key,
            timeout_s=self.timeout_s,
            connection=self.connection,
        )

    async def _create(self) -> AsyncSandbox:
        await off_loop(importlib.import_module, "e2b")  # takes half a second, the first time
        from e2b import AsyncSandbox

        online = self.limits.network == "full"
        self._mark, self._until = uuid.uuid4().hex, time.monotonic() + self.timeout_s
        with from_service("E2B gave no machine"):
            return await AsyncSandbox.create(
                self.template,
                timeout=self.timeout_s,
                metadata={MARK: self._mark},
                allow_internet_access=online,
                network={} if online else {"allow_public_traffic": False},
                lifecycle={"on_timeout": "kill"},
                idempotency_key=self._mark,  # the SDK may repeat the request, and must not get two machines
                **self._options,
            )

    async def _prepare(self, machine: AsyncSandbox) -> None:
        what = f"the E2B template {self.template or 'base'!r} cannot be used"
        command = f"mkdir -p {WORK} && chmod 0777 {WORK}"
        # A new machine may not be known everywhere at once.
        await ask(what, lambda: machine.commands.run(command, user="root", timeout=START_S))
        who = await ask(what, lambda: machine.commands.run("id -u", timeout=START_S))
        self._as_root = who.stdout.strip() == "0"
        await super()._prepare(machine)

    async def _end(self, machine: AsyncSandbox) -> None:
        await self._kill_machine(machine.sandbox_id)

    async def _end_lost(self) -> None:
        from e2b import AsyncSandbox, SandboxQuery

        with from_service(f"at E2B a machine with {MARK}={self._mark} may be left, for {self.timeout_s} s"):
            pages = AsyncSandbox.list(query=SandboxQuery(metadata={MARK: self._mark}), **self._options)
            while pages.has_next:
                for found in await pages.next_items():
                    await self._kill_machine(found.sandbox_id)

    async def _kill_machine(self, machine_id: str) -> None:
        from e2b import AsyncSandbox

        what = f"E2B did not end {machine_id}, and will in {self.timeout_s} s"
        await ask(what, lambda: AsyncSandbox.kill(machine_id, **self._options))

    async def execute(
        self,
        machine: AsyncSandbox,
        words: Sequence[str],
        stdout: Take,
        stderr: Take,
        *,
        stdin: bool,
        wall_s: float | None,
    ) -> Execution:
        """Start a command; see `RemoteSandbox.execute`."""
        await self.prolong(machine, wall_s or 0)
        line = f"set -o pipefail; {shlex.join(words)} | perl -e {shlex.quote(_AS_TEXT)}"
        if len(line.encode()) >= MAX_LINE:
            raise ValueError("the command is too long; put what is long into a file")
        with from_service("E2B did not start a command"):
            handle = await machine.commands.run(
                line,
                background=True,
                envs={"HOME": "/"},  # the SDK starts a login shell, which would read a profile of the model's
                stdin=stdin,
                timeout=0,
                on_stdout=lambda text: stdout(text.encode("latin-1", "replace")),
                on_stderr=lambda text: stderr(text.encode()),
                retain_output=False,
            )
        return Execution(self, machine, handle)

    def _supervised(
        self, argv: Sequence[str], limits: ResourceLimits, cwd: str | None, stdin: bool | int
    ) -> list[str]:
        return super()._supervised(("setpriv", "--no-new-privs", "--", *argv), limits, cwd, stdin)

    def may_run(self, error: BaseException | None) -> bool:
        """Return whether E2B gave no clear answer."""
        import e2b

        of_requests = (e2b.InvalidArgumentException, e2b.NotFoundException, e2b.AuthenticationException)
        of_limits = (e2b.RateLimitException, e2b.ServiceBusyException)
        return error is not None and not isinstance(error, (*of_requests, *of_limits))

    async def prolong(self, machine: AsyncSandbox, seconds: float = 0.0) -> None:
        """Keep the machine for a command of that length, and for half of timeout_s at least."""
        needed = max(self.timeout_s / 2, seconds + MARGIN_S if seconds else 0)
        if self._until - time.monotonic() < needed:
            granted = math.ceil(max(self.timeout_s, needed))
            until = time.monotonic() + granted
            await ask("E2B did not prolong a machine's time", lambda: machine.set_timeout(granted))
            self._until = until

    @property
    def _options(self) -> dict[str, Any]:
        return {"api_key": self.api_key, **self.connection}


class Execution:
    """A command that E2B runs in a machine."""

    def __init__(self, sandbox: E2BSandbox, machine: AsyncSandbox, handle: AsyncCommandHandle[None]) -> None:
        self._sandbox, self._machine, self._handle = sandbox, machine, handle

    async def wait(self) -> int:
        """Deliver the output to its end and return the exit code."""
        from e2b import CommandExitException

        with from_service("E2B lost a process"):
            try:
                return (await self._handle.wait()).exit_code
            except CommandExitException as ended:
                return ended.exit_code if ended.exit_code >= 0 else 137

    async def write(self, data: bytes) -> None:
        """Write to stdin. Raise EOFError if the command reads no more."""
        from e2b import NotFoundException, SandboxException

        await self._sandbox.prolong(self._machine)
        for start in range(0, len(data), CHUNK):
            with from_service("E2B did not pass on input"):
                try:
                    await self._handle.send_stdin(data[start : start + CHUNK])
                except SandboxException as error:
                    # A closed pipe is an internal error in older machines.
                    if isinstance(error, NotFoundException) or "pipe" in str(error) or "closed" in str(error):
                        raise EOFError("the process reads no more") from None
                    raise

    async def detach(self) -> None:
        """Close the connection."""
        await self._handle.disconnect()
