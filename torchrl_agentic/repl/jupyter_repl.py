"""`JupyterRepl`: an IPython kernel as interpreter, with magics, top-level `await` and figures.

The kernel and its client both run inside the sandbox and communicate over ZeroMQ's Unix sockets there, see
`kernel_client.py`, which answers the host as the supervisors of `sandbox.inside` do. A client on the host
could be sent one endless message, which no high-water mark stops.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, ClassVar

from torchrl_agentic.errors import MissingExtra, SandboxError
from torchrl_agentic.repl.base import ReplResult
from torchrl_agentic.repl.supervised import ProcessRepl, ProcessStream
from torchrl_agentic.sandbox import BubblewrapSandbox, Process, ResourceLimits, Sandbox
from torchrl_agentic.sandbox.bootstrap import GRACE_S, SAFE_PATH, source_of
from torchrl_agentic.sandbox.duck_typed_sandbox import ensure_sandbox
from torchrl_agentic.sandbox.link import Link
from torchrl_agentic.sandbox.python_runtime import clean_env, find_packages

START_S = 60.0
"""Maximum seconds that a kernel may take to start."""
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


class JupyterRepl(ProcessRepl):
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
    no_start: ClassVar[str] = "the kernel did not start"

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
        self._count = 0  # cells of all kernels

    def fresh(self, sandbox: Sandbox | None = None) -> JupyterRepl:
        """Return a new, unopened interpreter with the same settings, in this sandbox or one of its own."""
        return JupyterRepl(sandbox or self.sandbox.fresh(), kernel_argv=self._kernel_argv)

    async def _run(self, code: str, timeout: float | None, left: float | None) -> ReplResult:
        self._count += 1
        return await super()._run(code, timeout, left)

    async def _on_worker_end(self) -> None:
        await self._end()

    def _argv(self) -> Sequence[str]:
        client = _program("kernel_client", "wire", "capture", "reactor", "pipes")
        return (*self.sandbox.python_argv, "-s", "-B", "-c", client)

    async def _greet(self, process: Process) -> tuple[Link, str]:
        kernel = _program("kernel", "rights", "namespaces", "wire", "worker")
        python = (*self.sandbox.python_argv, "-s", "-B", "-c", kernel)
        argv = self._kernel_argv or (*python, "-f", "{connection_file}", *_OPTIONS)
        link = Link(ProcessStream(process), output_bytes=self.sandbox.limits.output_bytes)
        settings: dict[str, Any] = {
            "argv": argv,
            "output_bytes": self.sandbox.limits.output_bytes,
            "grace_s": GRACE_S,
        }
        async with asyncio.timeout(START_S):
            found, _ = await link.ask("start", **settings, count=max(0, self._count - 1))
        return link, _refusal(found)


def _program(name: str, *modules: str) -> str:
    """Return a program for `python -c` that runs a module of this folder.

    Args:
        name: Name of the module.
        modules: Modules of `sandbox.inside` that it imports, in the order of their imports.
    """
    text = files("torchrl_agentic.repl").joinpath(f"{name}.py").read_text("utf-8")
    return f"{SAFE_PATH}{source_of(*modules)}exec(compile({text!r}, {name!r}, 'exec'))\n"


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


def _refusal(found: dict[str, Any]) -> str:
    """Return why there is no kernel, from the answer of the client; "" if there is one."""
    text = str(found.get("text", "no reason given")).strip()
    match found.get("refused"):
        case None:
            return ""
        case "sockets":
            return f"{NETWORK} ({text})"
        case "import":
            return (
                f"the Python {found.get('python')} inside the sandbox has no Jupyter: {text}. "
                "Install ipykernel there, or show a folder that has it for this version: "
                "fs_read_roots=(folder,) and env={'PYTHONPATH': folder, ...} in the limits; JupyterRepl() "
                "does that with the packages installed here"
            )
        case _:
            return f"the kernel did not start: {text}"
