"""Files in an E2B sandbox, through its file API, which by itself would follow links and read without end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from torchrl_agentic.sandbox.base import WORK
from torchrl_agentic.sandbox.remote.service import from_service, patiently
from torchrl_agentic.sandbox.workspace import MAX_READ, inside

if TYPE_CHECKING:
    from e2b import AsyncSandbox, EntryInfo

MAX_DEPTH = 32
"""How many folders deep a file may lie: each is looked at, with a request of its own."""


async def write(machine: AsyncSandbox, path: str, data: bytes) -> None:
    """Write a file; see `Sandbox.write_file`."""
    place = await patiently(lambda: _looked_at(machine, path, new=True))
    files: Any = machine.files  # its types do not say of what an IO is

    async def attempt() -> None:
        with from_service(f"E2B did not write {path}"):
            await files.write(place, data, use_octet_stream=True)

    await patiently(attempt)


async def read(machine: AsyncSandbox, path: str, max_bytes: int | None) -> bytes:
    """Read a file, 64 MiB at most; see `Sandbox.read_file`."""
    place = await patiently(lambda: _looked_at(machine, path))
    limit = MAX_READ if max_bytes is None else min(max_bytes, MAX_READ)

    async def attempt() -> bytes:
        data = bytearray()
        with from_service(f"E2B did not read {path}"):
            async with await machine.files.read(place, format="stream") as stream:
                async for piece in stream:
                    data += piece
                    if len(data) >= limit:
                        break
        return bytes(data[:limit])

    return await patiently(attempt)


async def _looked_at(machine: AsyncSandbox, path: str, *, new: bool = False) -> str:
    """Give the place of a regular file, having looked at each step to it. new: it need not exist.

    Whoever runs inside may put a link there afterwards; that leads no further than to the same machine.
    """
    from e2b import FileType

    steps = inside(path)
    if not steps:
        raise IsADirectoryError(f"{path} is a folder")
    if len(steps) > MAX_DEPTH:
        raise PermissionError(f"{path} lies more than {MAX_DEPTH} folders deep")
    places = ["/".join((WORK, *steps[:depth])) for depth in range(1, len(steps) + 1)]
    found = await asyncio.gather(*(_entry(machine, place) for place in places), return_exceptions=True)
    for place, entry in zip(places, found, strict=True):
        if isinstance(entry, BaseException):
            raise entry
        if entry is None:
            if new:
                break
            raise FileNotFoundError(f"no such file: {path}")
        last = place == places[-1]
        if last and entry.type is FileType.DIR:
            raise IsADirectoryError(f"{path} is a folder")
        if entry.type is not (FileType.FILE if last else FileType.DIR):
            wanted = "regular file" if last else "folder"
            raise PermissionError(f"{path} cannot be opened: {place} is no {wanted}; links are not followed")
    return places[-1]


async def _entry(machine: AsyncSandbox, place: str) -> EntryInfo | None:
    from e2b import FileNotFoundException

    with from_service(f"E2B did not look at {place}"):
        try:
            return await machine.files.get_info(place)
        except FileNotFoundException:
            return None
