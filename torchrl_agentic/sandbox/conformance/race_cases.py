"""The file API while code inside changes the files: it is neither redirected nor blocked."""

from __future__ import annotations

import asyncio
import contextlib
import textwrap
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from torchrl_agentic.errors import FilesNotCopied, SandboxError
from torchrl_agentic.sandbox.base import Sandbox
from torchrl_agentic.sandbox.conformance.attack_cases import until
from torchrl_agentic.sandbox.conformance.base import HANG_S, CaseGroup, Make
from torchrl_agentic.sandbox.conformance.host_cases import SECRET, host_folder

group = CaseGroup("races")


RACES = 200


@contextlib.asynccontextmanager
async def _swapping(sandbox: Sandbox, first: str, second: str) -> AsyncGenerator[None]:
    """Exchange two names inside in a loop, atomically if the kernel supports it."""
    code = f"""
        import ctypes, os
        libc, here, exchange = ctypes.CDLL(None), -100, 2
        one, other = {first!r}, {second!r}
        print('swapping', flush=True)
        while True:
            if libc.renameat2(here, one.encode(), here, other.encode(), exchange):
                os.rename(one, 'spare'); os.rename(other, one); os.rename('spare', other)
    """
    process = await sandbox.spawn([*sandbox.python_argv, "-c", textwrap.dedent(code)])
    try:
        await until(process, b"swapping\n")
        yield
        assert process.errors() == "", f"the names were not swapped: {process.errors()}"
    finally:
        await process.kill()


async def _race(attempt: Callable[[int], Awaitable[Any]]) -> list[object]:
    """Repeat an attempt until both possible outcomes were seen or are unlikely. Return the outcomes."""
    found: list[object] = []
    refused = 0
    for number in range(10 * RACES):
        try:
            found.append(await attempt(number))
        except (PermissionError, FileNotFoundError):
            refused += 1
        if number >= RACES and found and refused:
            break
    return found


@group.case(needs=["files"])
async def reading_while_a_folder_turns_into_a_link_reads_nothing_of_the_hosts(sandbox: Sandbox) -> None:
    with host_folder() as folder:
        await sandbox.run(["sh", "-c", f"mkdir door; printf own > door/secret; ln -s {folder} link"])
        async with _swapping(sandbox, "door", "link"):
            found = await _race(lambda _: sandbox.read_file("door/secret"))
        assert set(found) <= {b"own"}, set(found)


@group.case(needs=["files"])
async def writing_while_a_folder_turns_into_a_link_writes_nothing_of_the_hosts(sandbox: Sandbox) -> None:
    with host_folder() as folder:
        await sandbox.run(["sh", "-c", f"mkdir door; ln -s {folder} link"])
        async with _swapping(sandbox, "door", "link"):
            await _race(lambda number: sandbox.write_file(f"door/planted-{number % 50}/file", b"x"))
        assert [path.name for path in folder.iterdir()] == ["secret"]


@group.case(needs=["files"])
async def reading_and_writing_while_a_file_turns_into_a_link_touches_nothing_of_the_hosts(
    sandbox: Sandbox,
) -> None:
    with host_folder() as folder:
        await sandbox.run(["sh", "-c", f"printf own > door; ln -s {folder}/secret link"])
        async with _swapping(sandbox, "door", "link"):
            found = await _race(lambda _: sandbox.read_file("door"))
            await _race(lambda _: sandbox.write_file("door", b"own"))
        assert set(found) <= {b"own", b""}, set(found)
        assert (folder / "secret").read_text() == SECRET


@group.case(needs=["files"])
async def a_file_that_becomes_a_pipe_does_not_block(sandbox: Sandbox) -> None:
    await sandbox.run(["sh", "-c", "printf own > door; mkfifo pipe"])
    async with _swapping(sandbox, "door", "pipe"), asyncio.timeout(HANG_S):
        await _race(lambda _: sandbox.read_file("door"))
        await _race(lambda _: sandbox.write_file("door", b"own"))


@group.case(needs=["files"])
async def a_file_that_grows_without_end_is_read_as_far_as_asked(sandbox: Sandbox) -> None:
    process = await sandbox.spawn(
        ["sh", "-c", "echo > file; echo up; while :; do yes | head -c 100000 >> file; done"]
    )
    await until(process, b"up\n")
    async with asyncio.timeout(HANG_S):
        for _ in range(20):
            assert len(await sandbox.read_file("file", 50_000)) <= 50_000
    await process.kill()


@group.factory_case(needs=["files"])
async def copying_follows_no_link_of_either_side(make: Make) -> None:
    """Neither a link in place of the copied folder, nor one that replaces it meanwhile."""
    with host_folder() as folder:
        async with make() as sandbox, make() as other:
            await sandbox.run(["sh", "-c", f"mkdir door; echo own > door/planted; ln -s {folder} link"])
            await other.run(["ln", "-s", str(folder), "door"])
            with contextlib.suppress(OSError, SandboxError, FilesNotCopied):
                await sandbox.copy_files(other)
            await other.run(["sh", "-c", "rm -rf door; mkdir door"])
            async with _swapping(sandbox, "door", "link"):
                for _ in range(20):
                    with contextlib.suppress(OSError, SandboxError, FilesNotCopied):
                        await sandbox.copy_files(other)
            for path in ("door/secret", "link/secret"):
                with contextlib.suppress(OSError):
                    assert SECRET.encode() not in await other.read_file(path)
        assert [path.name for path in folder.iterdir()] == ["secret"]
