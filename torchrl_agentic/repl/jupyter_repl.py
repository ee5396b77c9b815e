"""`JupyterRepl`: an IPython kernel as interpreter, with magics, top-level `await` and figures.

The kernel and its client both run inside the sandbox and communicate over ZeroMQ's Unix sockets there, see
`kernel_client.py`. The host receives frames from the client's stdout. A client on the host could be sent one
endless message, which no high-water mark stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
from importlib.resources import files
from typing import Any, ClassVar

from torchrl_agentic.errors import InfrastructureError, MissingExtra, SandboxError
from torchrl_agentic.repl.base import KEPT, ReplResult, ReplStatus, SerialRepl, StartFailed
from torchrl_agentic.repl.kernel_link import CellOutput, KernelLink, text_of
from torchrl_agentic.sandbox import BubblewrapSandbox, ResourceLimits, Sandbox
from torchrl_agentic.sandbox.bootstrap import GRACE_S
from torchrl_agentic.sandbox.cancellation import run_to_completion
from torchrl_agentic.sandbox.inside.wire import BadMessage
from torchrl_agentic.sandbox.look_alike_sandbox import ensure_sandbox
from torchrl_agentic.sandbox.python_runtime import clean_env, find_packages

START_S = 60.0
"""Maximum seconds that a kernel may take to start."""
REPORT_S = 5.0
"""Maximum seconds that the client may take to report a stopped cell, besides the grace time of the kernel."""
NETWORK = (
    "a Jupyter kernel uses Unix sockets, which this sandbox denies. Pass one with a network of its own, "
    "JupyterRepl(BubblewrapSandbox(ResourceLimits(network='loopback', ...))), or no sandbox: JupyterRepl()"
)
_OPTIONS = (
    "--ipython-dir",
    "{folder}",
    "--HistoryManager.enabled=False",
    "--IPKernelApp.capture_fd_output=False",
    "--log-level=50",
)
_FONTS = "/etc/fonts"
IPYTHON = "python3"
"""Name of the kernel spec that ipykernel installs."""


class JupyterRepl(SerialRepl):
    """An IPython kernel in a sandbox; variables, imports and functions stay from call to call.

    Displayed objects are in `display`: at most 5 PNG or JPEG images of at most 1 MiB per cell, others as
    text; HTML and JavaScript are left out.

    Args:
        sandbox: Where it runs. Its Python needs `ipykernel`, and a `BubblewrapSandbox` needs the network
            "loopback". None for such a sandbox with the packages that are installed here.
        kernel_name: Name of an installed kernel spec whose command is visible inside the sandbox; values,
            tracebacks and displays are then as with `kernel_argv`. "python3" for IPython, as described here.
        kernel_argv: Command that starts the kernel inside, with {connection_file} in place of that file.
            Values, tracebacks and displays are then those of that kernel; plain ipykernel needs a sandbox
            that allows TCP and netlink. None for ipykernel without them.

    Raises:
        MissingExtra: If no sandbox is given and ipykernel is not installed here, or a kernel spec is named
            and jupyter_client is not installed.
        SandboxError: If no sandbox is given, and the packages installed here cannot be used inside one.
        ValueError: If the sandbox denies Unix sockets, or no kernel spec has that name.
        TypeError: If `sandbox` is not a sandbox or lacks a member such as `spawn`, or if both `kernel_name`
            and `kernel_argv` are given.
    """

    name: ClassVar[str] = "jupyter"

    def __init__(
        self,
        sandbox: Sandbox | None = None,
        *,
        kernel_name: str = IPYTHON,
        kernel_argv: tuple[str, ...] | None = None,
    ) -> None:
        if kernel_name != IPYTHON:
            if kernel_argv is not None:
                raise TypeError("kernel_name and kernel_argv both select the kernel: pass only one of them")
            kernel_argv = _argv_of_spec(kernel_name)
        if isinstance(sandbox, BubblewrapSandbox) and sandbox.limits.network == "none":
            raise ValueError(NETWORK)
        super().__init__()
        self.sandbox = sandbox_for_kernels() if sandbox is None else ensure_sandbox(sandbox, also=["spawn"])
        self._kernel_argv = kernel_argv
        self._live: KernelLink | None = None
        self._seq = 0
        self._running = 0

    def fresh(self, sandbox: Sandbox | None = None) -> JupyterRepl:
        """Return a new, unopened interpreter with the same settings, in this sandbox or one of its own."""
        return JupyterRepl(sandbox or self.sandbox.fresh(), kernel_argv=self._kernel_argv)

    async def restart(self) -> None:
        """Forget all definitions."""
        async with self._lock:
            self._check_open()
            await self._end()
            self._live = await self._start()
            self.cells.clear()
            self._untold = False

    async def interrupt(self) -> None:
        """Stop the running code."""
        if self._live is not None and self._running:
            with contextlib.suppress(EOFError):
                await self._live.ask({"op": "interrupt", "seq": self._running})

    async def _run(self, code: str, timeout: float | None, left: float | None) -> ReplResult:
        """Run a cell. If the kernel was lost, starting a new one does not count against the timeout."""
        try:
            live = await self._ready()
        except StartFailed as error:  # leftovers of earlier code prevent the start
            if not self._seq:
                raise
            return self._not_run(error)
        self.cells.append(code)
        self._seq += 1
        self._running = self._seq
        answer = CellOutput(self._seq, self.sandbox.limits.output_bytes)
        try:
            return await self._answered(live, answer, code, timeout, left)
        except asyncio.CancelledError:
            # No later call may read this answer.
            await run_to_completion(self._cancel(live, answer), always_wait=True)
            raise
        finally:
            self._running = 0

    async def _ready(self) -> KernelLink:
        """Return the kernel. Start a new one if there is none or it has ended since the last call.

        Raises:
            InfrastructureError: If it was ended from outside its sandbox since the last call.
        """
        if self._live is not None and self._live.ended.done():
            ended = self._live.ended.result()
            self._untold = self._seq > 0
            await self._end()
            await self._check_cause(ended)
        if self._live is None:
            self._live = await self._start()
        return self._live

    async def _answered(
        self, live: KernelLink, answer: CellOutput, code: str, timeout: float | None, left: float | None
    ) -> ReplResult:
        try:
            async with asyncio.timeout(left):
                await live.ask({"op": "exec", "seq": answer.seq, "code": code})
                await answer.read(live)
        except TimeoutError:
            stopped = f"Execution exceeded {timeout:g} s and was stopped"
            if not await self._stop(live, answer, GRACE_S):
                return await self._lost(answer, "timeout", stopped)
            return self._told(answer, "timeout", f"{stopped}; {KEPT}")
        except EOFError:
            ended = await live.how_it_ended(GRACE_S)
            if live.ended.done():
                how_exactly = live.ended.result()
                await self._end()
                await self._check_cause(how_exactly)
            return await self._lost(answer, "died", f"The interpreter ended ({ended})")
        except BadMessage as error:
            return await self._lost(
                answer, "died", f"The interpreter was ended, because it sent an invalid message ({error})"
            )
        match answer.status:
            case "ok":
                return self._told(answer, "ok", "")
            case "died":
                return await self._lost(answer, "died", f"The interpreter ended ({answer.how})")
            case _:
                message = "The interpreter was ended, because its messages do not arrive"
                return await self._lost(answer, "died", message)

    async def _stop(self, live: KernelLink, answer: CellOutput, grace_s: float) -> bool:
        """Interrupt a cell and wait for its answer. Return whether it came and the kernel still runs.

        The client reports a kernel that ignores the interrupt after the grace time, with its output.
        """
        try:
            async with asyncio.timeout(grace_s + REPORT_S):
                await live.ask({"op": "stop", "seq": answer.seq, "grace_s": grace_s})
                await answer.read(live)
        except (TimeoutError, EOFError, BadMessage):
            return False
        return answer.status == "ok"

    async def _cancel(self, live: KernelLink, answer: CellOutput) -> None:
        if self._live is live and not await self._stop(live, answer, GRACE_S / 2):
            self._untold = True
            await self._end()

    async def _lost(self, answer: CellOutput, status: ReplStatus, message: str) -> ReplResult:
        self._untold = True  # reported by the next call if this one is cancelled
        await self._end()
        _, lost = self._take_loss()
        return answer.result(status, f"{message}; {lost}", lost=True)

    def _told(self, answer: CellOutput, status: ReplStatus, message: str) -> ReplResult:
        untold, lost = self._take_loss()
        if untold:
            message = f"{message}\n" * bool(message) + f"Before this call, {lost}"
        return answer.result(status, message, lost=untold)

    async def _check_cause(self, ended: str) -> None:
        """Raise InfrastructureError if no code inside can have ended the kernel in this way."""
        if await self.sandbox.was_ended_outside(ended):
            _, lost = self._take_loss()
            raise InfrastructureError(
                f"the interpreter was lost: its sandbox was {ended} from outside; {lost}"
            )

    async def _begin(self) -> None:
        self._live = await self._start()
        self._losses = self.sandbox.losses

    async def _start(self) -> KernelLink:
        sources = files("torchrl_agentic.repl")
        client, kernel = (
            sources.joinpath(name).read_text("utf-8") for name in ("kernel_client.py", "kernel.py")
        )
        python = (*self.sandbox.python_argv, "-s", "-B", "-c")
        argv = self._kernel_argv or (*python, kernel, "-f", "{connection_file}", *_OPTIONS)
        live = KernelLink(await self.sandbox.spawn((*python, client)))
        try:
            async with asyncio.timeout(START_S):
                await live.ask({"argv": argv, "output_bytes": self.sandbox.limits.output_bytes})
                reason = _refusal(await live.frame())
        except (TimeoutError, EOFError, BadMessage):
            reason = f"the kernel did not start: {live.process.errors().strip() or 'no output'}"
        except BaseException:
            await live.end()
            raise
        if reason:
            await live.end()
            raise StartFailed(reason)
        return live

    async def _end(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            await live.end()

    def __repr__(self) -> str:
        return f"JupyterRepl({self.sandbox!r})"


def sandbox_for_kernels() -> Sandbox:
    """Return the sandbox that is used if none is given, with the packages that are installed here.

    Raises:
        MissingExtra: If ipykernel is not among them.
        SandboxError: If the user that code runs as cannot read them, or its Python has another version.
    """
    for name in ("ipykernel", "jupyter_client"):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise MissingExtra("JupyterRepl", name, "jupyter")
        if not spec.origin.startswith(("/usr/", *find_packages())):
            raise SandboxError(
                f"{name} in {os.path.dirname(spec.origin)} cannot be shown inside: only root may read it, or "
                "it is for another version of Python; install it elsewhere, and pass a sandbox that shows it"
            )
    # A thread counts as a process, and reserves address space for its own heap.
    env = {**clean_env(), "MALLOC_ARENA_MAX": "2"}
    del env["MPLBACKEND"]  # the kernel sets its own, which displays figures
    # Matplotlib calls fc-list if it is installed, which prints an error if its settings are missing.
    roots = tuple(folder for folder in (_FONTS,) if os.path.isdir(folder))
    limits = ResourceLimits(
        memory_bytes=1 << 30, max_processes=64, network="loopback", fs_read_roots=roots, env=env
    )
    return BubblewrapSandbox(limits)


def _argv_of_spec(name: str) -> tuple[str, ...]:
    """Return the command of an installed kernel spec, with the variables that it sets.

    Raises:
        MissingExtra: If jupyter_client is not installed.
        ValueError: If there is no such spec.
    """
    try:
        from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel
    except ImportError:
        raise MissingExtra("JupyterRepl(kernel_name=...)", "jupyter_client", "jupyter") from None
    specs: Any = KernelSpecManager()
    try:
        spec = specs.get_kernel_spec(name)
    except (NoSuchKernel, TypeError):
        known = ", ".join(sorted({IPYTHON, *specs.find_kernel_specs()}))
        raise ValueError(f"no kernel spec is named {name!r}; installed: {known}") from None
    variables = [f"{key}={value}" for key, value in spec.env.items()]
    argv = [word.replace("{resource_dir}", spec.resource_dir) for word in spec.argv]
    return (*(["env", *variables] if variables else []), *argv)


def _refusal(frame: dict[str, Any]) -> str:
    """Return why there is no kernel, from the first frame; "" if there is one."""
    text = text_of(frame.get("text", "no reason given")).strip()
    match frame.get("failed"):
        case None:
            return ""
        case "sockets":
            return f"{NETWORK} ({text})"
        case "import":
            return (
                f"the Python {text_of(frame.get('python'))} inside the sandbox has no Jupyter: {text}. "
                "Install ipykernel there, or show a folder that has it for this version: "
                "fs_read_roots=(folder,) and env={'PYTHONPATH': folder, ...} in the limits; JupyterRepl() "
                "does that with the packages installed here"
            )
        case _:
            return f"the kernel did not start: {text}"
