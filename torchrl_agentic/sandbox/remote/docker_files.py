"""Files in a Docker container, read and written by commands in it.

Docker's archive API is no use here: it does not see what is mounted in a running container, such as the
tmpfs at /work, but writes below it without a word (moby #22020); and it refuses where the root is read-only.
"""

from __future__ import annotations

import asyncio

from torchrl_agentic.errors import SandboxError
from torchrl_agentic.sandbox.cancellation import to_the_end
from torchrl_agentic.sandbox.process import MAX_ERRORS, Capture, how
from torchrl_agentic.sandbox.remote.docker_calls import reported
from torchrl_agentic.sandbox.remote.docker_container import Container
from torchrl_agentic.sandbox.remote.docker_scripts import DENIED, FOLDER, MISSING, READ, REFUSED, WRITE
from torchrl_agentic.sandbox.workspace import MAX_READ, inside

FILE_S = 60.0


async def write(container: Container, path: str, data: bytes) -> None:
    """Write a file; see `Sandbox.write_file`."""
    await _run(container, path, WRITE, make=True, size=len(data), stdin=data)


async def read(container: Container, path: str, max_bytes: int | None) -> bytes:
    """Read a file; see `Sandbox.read_file`."""
    return await _run(container, path, READ, size=min(MAX_READ if max_bytes is None else max_bytes, MAX_READ))


async def _run(
    container: Container, path: str, script: str, *, size: int, make: bool = False, stdin: bytes | None = None
) -> bytes:
    """Give what a script printed of a file."""
    steps = inside(path)
    if not steps:
        raise IsADirectoryError(f"{path} is a folder")
    argv = ["sh", "-c", script, "sh", str(size), "make" if make else "", *steps]
    command = await container.start(argv, env={}, stdin=len(stdin or b""))
    out, err = bytearray(), Capture(MAX_ERRORS)
    try:
        with reported(f"reach the file {path}"):
            async with asyncio.timeout(FILE_S):
                await command.communicate(stdin, out.extend, err.add)
                code = await command.code()
    except BaseException:
        await to_the_end(command.give_up())
        raise
    finally:
        await command.close()
    _raise_for(code, path, err.text())
    return bytes(out)


def _raise_for(code: int, path: str, said: str) -> None:
    """Say of a file what is wrong with it, from the exit code of a script."""
    if code == MISSING:
        raise FileNotFoundError(f"no such file: {path}")
    if code == FOLDER:
        raise IsADirectoryError(f"{path} is a folder")
    if code == REFUSED:
        raise PermissionError(f"{path} cannot be opened: only files are, and links are not followed")
    if code == DENIED:
        raise PermissionError(f"{path} cannot be opened: its rights were taken away")
    if code == 127:
        raise SandboxError(f"the image lacks a program: {said.strip()}")
    if code:
        raise OSError(f"{path} cannot be read or written: {said.strip() or how(code)}")
