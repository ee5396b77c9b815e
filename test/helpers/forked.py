"""Programs that use torch, as forks of a process that has imported it: they start at once.

Importing torch, TorchRL and transformers takes a program five seconds of processor time. `forked` runs a file
as `python FILE` does, except that all programs of a test process share these imports.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Generator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from helpers.limit import limit
from helpers.processes import GROUP, kill_with_variable

PROCESSES = multiprocessing.get_context("forkserver")
"""Starts functions of modules in processes that are forks of one with `PRELOADED`."""
PRELOADED = [
    "torchrl.collectors.llm",
    "torchrl.objectives.llm",
    "torchrl_agentic.testing.tokenizers",
    "torchrl_agentic.rollout.tiny_model",
    "transformers.models.llama.modeling_llama",
    "jinja2",
]
PROCESSES.set_forkserver_preload(PRELOADED)


@contextlib.contextmanager
def starts_by_fork() -> Generator[None]:
    """Make `PROCESSES` the default way to start a process, instead of "spawn", which TorchRL sets.

    As with "spawn", a process gets what is pickled, and nothing else.
    """
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(before, force=True)


class Forked:
    """A running program.

    Attributes:
        pid: Its process id.
        stdout: What it prints, line by line.
    """

    def __init__(self, process: Any, reader: Connection, errors: Any, group: str) -> None:
        self._process, self._errors, self._group = process, errors, group
        self.pid: int = process.pid
        self.stdout = os.fdopen(os.dup(reader.fileno()))

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it and all that it has started."""
        self._process.kill()
        kill_with_variable(GROUP, self._group)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for its end, and return what is left of its output, and all of its error output.

        Raises:
            subprocess.TimeoutExpired: If it hangs.
        """
        has_hung = threading.Event()
        killer = threading.Timer(timeout, lambda: (has_hung.set(), self.kill()))
        killer.start()
        try:
            out = self.stdout.read()
            self._process.join()
        finally:
            killer.cancel()
        if has_hung.is_set():
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        self._errors.seek(0)
        return out, self._errors.read()


@contextlib.contextmanager
def forked(
    file: str | os.PathLike[str], *words: str, cwd: str | os.PathLike[str] = ".", env: Mapping[str, str] = {}
) -> Generator[Forked]:
    """Run a Python file. At the end, kill it and all that it has started.

    Args:
        file: Its path, relative to `cwd`.
        words: Its arguments.
        cwd: Its working folder.
        env: Environment variables besides those of this process.
    """
    group = uuid.uuid4().hex
    environ = {**os.environ, **env, GROUP: group}
    reader, writer = PROCESSES.Pipe(duplex=False)
    with tempfile.NamedTemporaryFile("w+") as errors, reader:
        with writer:
            given = (os.fspath(file), words, os.fspath(cwd), environ, writer, errors.name)
            process = PROCESSES.Process(target=_run, args=given, name=os.fspath(file))
            process.start()
        program = Forked(process, reader, errors, group)
        try:
            yield program
        finally:
            program.kill()
            process.join()
            program.stdout.close()


def run_forked(
    file: str | os.PathLike[str], *words: str, timeout: float = 100, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a Python file to its end.

    Args:
        file: Its path.
        words: Its arguments.
        timeout: Generous seconds for an idle machine, after which it counts as hung; see `limit`.
        options: Other arguments of `forked`.
    """
    with forked(file, *words, **options) as process:
        out, errors = process.communicate(limit(timeout))
    assert process.returncode is not None
    return subprocess.CompletedProcess([str(file), *words], process.returncode, out, errors)


def process_group(size: int) -> list[dict[str, str]]:
    """Return the environment variables of each process of a group on this machine, as torchrun sets them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


def _run(
    file: str, words: Sequence[str], cwd: str, environ: Mapping[str, str], out: Connection, errors: str
) -> None:
    """Run a file as the main program of this process."""
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(cwd)
    os.dup2(out.fileno(), 1)
    out.close()
    with open(errors, "w") as error_file:
        os.dup2(error_file.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", buffering=1, closefd=False)
    sys.argv = [file, *words]
    sys.path.insert(0, os.path.dirname(os.path.abspath(file)))
    runpy.run_path(file, run_name="__main__")
