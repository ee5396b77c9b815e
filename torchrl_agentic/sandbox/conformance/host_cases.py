"""The part of cases on the host: secrets, processes, memory and open files of the trainer."""

from __future__ import annotations

import asyncio
import contextlib
import glob
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from torchrl_agentic.errors import SandboxError
from torchrl_agentic.sandbox.base import Sandbox, SandboxResult
from torchrl_agentic.sandbox.conformance.base import HANG_S
from torchrl_agentic.sandbox.python_runtime import find_python

END_S = HANG_S
"""Seconds after which a process that should have ended counts as left behind."""
SECRET = "sesame-of-the-host"
"""Content of files and variables that must not be readable inside."""


def new_mark() -> str:
    """Return a unique number, which processes can `sleep` for and be found by."""
    return str(random.randrange(10**8, 10**9))


def command_lines() -> dict[int, str]:
    """Return the command lines of all visible processes, by PID."""
    found: dict[int, str] = {}
    if sys.platform != "linux":
        done = subprocess.run(["ps", "-axo", "pid=,args="], capture_output=True, text=True, check=True)
        for line in done.stdout.splitlines():
            number, _, words = line.strip().partition(" ")
            found[int(number)] = words
        return found
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            words = Path("/proc", name, "cmdline").read_bytes().replace(b"\0", b" ")
            found[int(name)] = words.decode("utf-8", "replace")
    return found


async def check_gone(mark: str) -> None:
    """Wait until no process with a mark in its command line is left; kill those that do not end.

    Args:
        mark: The mark.
    """
    left: list[int] = []
    until = time.monotonic() + END_S
    while time.monotonic() < until:
        left = [number for number, words in command_lines().items() if mark in words]
        if not left:
            return
        await asyncio.sleep(0.02)
    for number in left:
        with contextlib.suppress(OSError):
            os.kill(number, signal.SIGKILL)
    raise AssertionError(f"{len(left)} processes still run that should have ended: {mark}")


async def file_appears(sandbox: Sandbox, path: str) -> bytes:
    """Wait until code inside has created a file, and return its content.

    Args:
        sandbox: The sandbox.
        path: Path inside.
    """
    async with asyncio.timeout(HANG_S):
        while True:
            with contextlib.suppress(FileNotFoundError):
                return await sandbox.read_file(path)
            await asyncio.sleep(0.02)


def files_named(name: str) -> list[str]:
    """Return files with a name below the host's temporary folders, two levels deep."""
    found: list[str] = []
    for folder in {tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm"}:
        for pattern in (name, f"*/{name}", f"*/*/{name}"):
            found += glob.glob(f"{folder}/{pattern}")  # skips folders that vanish meanwhile
    return found


@contextlib.contextmanager
def host_folder() -> Generator[Path]:
    """Yield a new folder on the host that all users may read and write, with a file `secret` in it."""
    folder = Path(tempfile.mkdtemp(prefix="conformance-"))
    try:
        folder.chmod(0o777)
        (folder / "secret").write_text(SECRET)
        (folder / "secret").chmod(0o666)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def host_secrets() -> Generator[list[str]]:
    """Yield the paths of new files that all users may read, in all folders of the host that allow it."""
    name = f"conformance-{new_mark()}"
    paths: list[Path] = []
    try:
        for folder in {tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm", str(Path.home())}:
            path = Path(folder, name)
            with contextlib.suppress(OSError):
                path.write_text(SECRET)
                paths.append(path)
                path.chmod(0o666)
        yield list(map(str, paths))
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def secret_variable() -> Generator[None]:
    """Put a secret into the environment of this process."""
    os.environ["TORCHRL_AGENTIC_SECRET"] = SECRET
    try:
        yield
    finally:
        del os.environ["TORCHRL_AGENTIC_SECRET"]


@contextlib.contextmanager
def secret_file() -> Generator[int]:
    """Open an inheritable anonymous file with a secret, and yield its descriptor."""
    with tempfile.TemporaryFile() as file:
        file.write(SECRET.encode())
        file.seek(0)
        os.set_inheritable(file.fileno(), True)
        yield file.fileno()


@contextlib.contextmanager
def host_process() -> Generator[subprocess.Popen[bytes]]:
    """Run a process on the host, with a secret in its command line and in its environment."""
    words = [_python(), "-c", "import time; time.sleep(600)", SECRET]
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, env={"PATH": os.defpath, "SECRET": SECRET})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _python() -> str:
    """Return our interpreter, or a similar one if other users cannot run it."""
    found = find_python()
    return sys.executable if os.access(sys.executable, os.X_OK) or found is None else found[0]


def full_folders(*paths: str) -> list[str]:
    """Return the non-empty folders among these paths, as far as they are readable."""
    found: list[str] = []
    for path in paths:
        with contextlib.suppress(OSError):
            found += [path] if os.listdir(path) else []
    return found


def open_files() -> int:
    """Return the number of open files of this process."""
    return len(os.listdir("/proc/self/fd"))


def oom_score_adj() -> int:
    """Return `oom_score_adj` of this process: how much the kernel prefers to kill it when memory runs out."""
    return int(Path("/proc/self/oom_score_adj").read_text())


def forget_peak_memory() -> None:
    """Reset `peak_memory`."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """Return the peak memory of this process since `forget_peak_memory`, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


async def result_or_error(task: asyncio.Task[SandboxResult]) -> SandboxResult | SandboxError:
    """Wait for a command that was disturbed. Return its result, or the sandbox's error."""
    try:
        async with asyncio.timeout(HANG_S):
            return await task
    except SandboxError as error:
        return error


_TRAINER = """
import asyncio, os, pickle, sys, warnings
warnings.simplefilter("ignore")
sandbox, arguments, terminal = pickle.load(sys.stdin.buffer)
if terminal:
    import pty
    out = os.dup(1)
    child, master = pty.fork()
    if child:
        try:
            while os.read(master, 1000):
                pass
        except OSError:
            pass
        sys.exit(os.waitpid(child, 0)[1])
    sys.stdout = open(out, "w")
"""


@dataclass(frozen=True, slots=True)
class TrainerProcess:
    """Another process that uses a sandbox; its warnings and errors are kept apart from its output."""

    process: asyncio.subprocess.Process
    errors: IO[bytes]

    def kill(self) -> None:
        """Kill it, as the kernel does when memory runs out."""
        self.process.kill()

    async def expect_line(self, expected: str) -> None:
        """Assert that it prints a line next.

        Args:
            expected: The line.
        """
        assert self.process.stdout is not None
        line = "nothing"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HANG_S):
                line = (await self.process.stdout.readline()).decode()
        if line != f"{expected}\n":
            self.errors.seek(0)
            said = self.errors.read()[-2000:].decode("utf-8", "replace")
            raise AssertionError(f"the trainer printed {line!r} instead of {expected!r}; errors: {said!r}")


@contextlib.asynccontextmanager
async def trainer(
    sandbox: Sandbox, program: str, *arguments: str, terminal: bool = False
) -> AsyncGenerator[TrainerProcess]:
    """Run another process that uses a sandbox like this one.

    Args:
        sandbox: The sandbox, unopened.
        program: Its code, with the variables `sandbox` and `arguments`.
        arguments: Values of `arguments`.
        terminal: Run it with a controlling terminal.
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    with tempfile.TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(
            _python(), "-c", _TRAINER + textwrap.dedent(program), env=env, start_new_session=True,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=errors,
        )  # fmt: skip
        assert process.stdin is not None
        try:
            process.stdin.write(pickle.dumps((sandbox.fresh(), arguments, terminal)))
            process.stdin.close()
            yield TrainerProcess(process, errors)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            with contextlib.suppress(TimeoutError):  # what it has started may hold its output open
                async with asyncio.timeout(END_S):
                    await process.communicate()
