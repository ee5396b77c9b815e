"""`E2BSandbox`: a virtual machine at E2B for each trajectory, over the internet.

Stops:
- anything on this host: code runs in a machine at E2B, which receives only commands, files and stdin
- using the internet unless it was granted, and callers from the internet: E2B enforces this at our request
- gaining rights inside: setuid programs, such as sudo, give none
- one process using more memory, processor time or file size than its limits; more processes of the machine's
  user than its limit
- the process group of a command outliving it
- unlimited output using memory of the trainer
- a machine outliving `close`, an `open` that failed, or its last use by more than timeout_s
Does not stop:
- a process that leaves the process group of its command from outliving it: it ends with the machine, and if
  it keeps the output of the command open, the command continues until its wall limit
- code raising the limits of processes if the user of the template is root
- all processes together using everything that the template's machine has
- E2B reading all data
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torchrl_agentic.sandbox.base import WORK
from torchrl_agentic.sandbox.remote.remote_process import START_S, Execution
from torchrl_agentic.sandbox.remote.remote_sandbox import RemoteCommand, RemoteSandbox
from torchrl_agentic.sandbox.remote.sdk_requests import request_with_retries, sdk_errors
from torchrl_agentic.sandbox.resource_limits import Network, ResourceLimits

if TYPE_CHECKING:
    from e2b import AsyncCommandHandle, AsyncSandbox

MARK = "torchrl_agentic"
"""Name of the metadata by which a lost machine is found."""
MAX_LINE = 1 << 17
"""Maximum bytes of a command line on Linux: the SDK passes the command as one word to a shell."""
MARGIN_S = 30.0
# The SDK decodes output as UTF-8. Each byte is sent as the character of that number, so none is lost.
_AS_TEXT = 'binmode STDOUT, ":utf8"; $| = 1; print $b while sysread STDIN, $b, 32768'


class E2BSandbox(RemoteSandbox["AsyncSandbox"]):
    """Run commands and keep files in a virtual machine at E2B.

    Args:
        limits: Limits of the sandbox.
        template: Template of the machine; None for E2B's "base". It needs bash and `programs`, which Debian
            and Ubuntu have.
        api_key: API key; None for that in E2B_API_KEY.
        timeout_s: Seconds that E2B keeps the machine after its last use; each use extends them.
        connection: Further options of the SDK for its connection: domain, proxy, request_timeout, ...

    Raises:
        ValueError: If `timeout_s` is not above 0, or the limits ask for folders or an unsupported network.
    """

    name: ClassVar[str] = "e2b"
    package: ClassVar[str] = "e2b"
    not_stopped: ClassVar[frozenset[str]] = frozenset({"daemons"})
    network: ClassVar[frozenset[Network]] = frozenset({"none", "loopback", "full"})
    unenforced: ClassVar[Mapping[str, str]] = {
        "seccomp": "the kernel is that of a virtual machine of its own"
    }
    counts_processes: ClassVar[bool] = True
    programs = (*RemoteSandbox.programs, "perl", "setpriv")
    prefix: ClassVar[tuple[str, ...]] = ("setpriv", "--no-new-privs", "--")

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
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be above 0; got {timeout_s}")
        self.template, self.api_key, self.timeout_s = template, api_key, timeout_s
        self.connection = dict(connection or {})
        self._until = 0.0

    @property
    def limits_enforced(self) -> Mapping[str, bool]:
        """Map each limit to whether it is enforced; once open, for the user of the template.

        The totals are those of the template's machine.
        """
        of_processes = ("cpu_seconds", "memory_bytes", "max_processes", "disk_bytes")
        held = dict.fromkeys(of_processes, not self.raises_limits)
        return {**held, "memory_total": True, "disk_total": True, "network": True, "seccomp": False}

    async def _create(self, mark: str) -> AsyncSandbox:
        from e2b import AsyncSandbox

        online = self.limits.network == "full"
        self._until = time.monotonic() + self.timeout_s
        with sdk_errors("E2B created no machine", _refusals()):
            return await AsyncSandbox.create(
                self.template,
                timeout=self.timeout_s,
                metadata={MARK: mark},
                allow_internet_access=online,
                network={} if online else {"allow_public_traffic": False},
                lifecycle={"on_timeout": "kill"},
                idempotency_key=mark,  # the SDK may repeat the request, but must create one machine
                **self._options,
            )

    async def _prepare(self, machine: AsyncSandbox) -> None:
        what = f"the E2B template {self.template or 'base'!r} cannot be used"
        command = f"mkdir -p {WORK} && chmod 0777 {WORK}"
        # A new machine may not be reachable everywhere at once.
        await request_with_retries(what, lambda: machine.commands.run(command, user="root", timeout=START_S))
        who = await request_with_retries(what, lambda: machine.commands.run("id -u", timeout=START_S))
        await super()._prepare(machine)
        self.raises_limits = self.raises_limits or who.stdout.strip() == "0"

    async def _end(self, machine: AsyncSandbox) -> None:
        await self._kill_machine(machine.sandbox_id)

    async def _end_lost(self, mark: str) -> None:
        from e2b import AsyncSandbox, SandboxQuery

        with sdk_errors(f"at E2B a machine with {MARK}={mark} may be left, for {self.timeout_s} s"):
            pages = AsyncSandbox.list(query=SandboxQuery(metadata={MARK: mark}), **self._options)
            while pages.has_next:
                for found in await pages.next_items():
                    await self._kill_machine(found.sandbox_id)

    async def _kill_machine(self, machine_id: str) -> None:
        from e2b import AsyncSandbox

        what = f"E2B did not end {machine_id}, which will time out within {self.timeout_s} s"
        await request_with_retries(what, lambda: AsyncSandbox.kill(machine_id, **self._options))

    async def _execute(self, machine: AsyncSandbox, command: RemoteCommand) -> E2BExecution:
        await self.extend_timeout(machine, command.wall_s or 0)
        line = f"set -o pipefail; {shlex.join(command.words)} | perl -e {shlex.quote(_AS_TEXT)}"
        if len(line.encode()) >= MAX_LINE:
            raise ValueError("the command is too long; write long arguments to a file")
        with sdk_errors("E2B did not start a command", _refusals()):
            handle = await machine.commands.run(
                line,
                background=True,
                envs={"HOME": "/"},  # the SDK starts a login shell, which would read a profile of the model
                stdin=command.has_stdin,
                timeout=0,
                on_stdout=lambda text: command.stdout(text.encode("latin-1", "replace")),
                on_stderr=lambda text: command.stderr(text.encode()),
                retain_output=False,
            )
        return E2BExecution(self, machine, handle)

    async def extend_timeout(self, machine: AsyncSandbox, seconds: float = 0.0) -> None:
        """Keep the machine for a command of some seconds, and for at least half of timeout_s.

        Args:
            machine: The machine.
            seconds: Duration of the command.
        """
        needed = max(self.timeout_s / 2, seconds + MARGIN_S if seconds else 0)
        if self._until - time.monotonic() < needed:
            granted = math.ceil(max(self.timeout_s, needed))
            until = time.monotonic() + granted
            await request_with_retries(
                "E2B did not extend the time of a machine", lambda: machine.set_timeout(granted)
            )
            self._until = until

    @property
    def _options(self) -> dict[str, Any]:
        return {"api_key": self.api_key, **self.connection}


class E2BExecution(Execution):
    """A command that E2B runs in a machine.

    Args:
        sandbox: The sandbox of the machine.
        machine: The machine.
        handle: The command at the SDK.
    """

    def __init__(self, sandbox: E2BSandbox, machine: AsyncSandbox, handle: AsyncCommandHandle[None]) -> None:
        self._sandbox, self._machine, self._handle = sandbox, machine, handle

    async def wait(self) -> int:
        """Deliver the output to its end. Return the exit code, 128 + n for signal n."""
        from e2b import CommandExitException

        with sdk_errors("E2B lost a process"):
            try:
                return (await self._handle.wait()).exit_code
            except CommandExitException as ended:
                return ended.exit_code if ended.exit_code >= 0 else 137

    async def write(self, data: bytes) -> None:
        """Write to stdin. Raise EOFError if the command has closed it."""
        from e2b import NotFoundException, SandboxException

        await self._sandbox.extend_timeout(self._machine)
        with sdk_errors("E2B did not deliver input"):
            try:
                await self._handle.send_stdin(data)
            except SandboxException as error:
                # Older machines report a closed pipe as an internal error.
                if isinstance(error, NotFoundException) or "pipe" in str(error) or "closed" in str(error):
                    raise EOFError("the process has closed its stdin") from None
                raise

    async def detach(self) -> None:
        """Close the connection."""
        await self._handle.disconnect()


def _refusals() -> tuple[type[Exception], ...]:
    import e2b

    of_requests = (e2b.InvalidArgumentException, e2b.NotFoundException, e2b.AuthenticationException)
    return (*of_requests, e2b.RateLimitException, e2b.ServiceBusyException)
