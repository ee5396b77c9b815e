"""The files of one run: put there before it, fetched after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.sandbox import Sandbox
from torchrl_agentic.serve.refusals import BadRequest
from torchrl_agentic.serve.wire import Fetched


async def put(sandbox: Sandbox, files: Mapping[str, bytes | None]) -> None:
    """Write files into a sandbox.

    Raises:
        BadRequest: they cannot all be written.
    """
    for path, data in files.items():
        if data is None:
            continue
        try:
            await sandbox.write_file(path, data)
        except InfrastructureError:
            raise
        except OSError as error:
            raise BadRequest(f"{path!r} cannot be written: {error}") from None


async def fetch(sandbox: Sandbox, paths: Sequence[str], max_bytes: int) -> Fetched:
    """Read the files that are there. max_bytes: of all together; those that do not fit are left out."""
    files: dict[str, bytes] = {}
    missing: list[str] = []
    room = max_bytes
    for path in dict.fromkeys(paths):
        try:
            data = await sandbox.read_file(path, room + 1)
        except InfrastructureError:
            raise
        except OSError as error:
            missing.append(f"{path!r} is not sent back: {error}")
            continue
        if len(data) > room:
            missing.append(f"{path!r} is not sent back: all together hold more than {max_bytes} bytes")
            continue
        files[path] = data
        room -= len(data)
    return Fetched(files, tuple(missing))


def unused(name: str, taken: Mapping[str, object]) -> str:
    """Give a name that no file has, this one if possible."""
    while name in taken:
        name = f"_{name}"
    return name
