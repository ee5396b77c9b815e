"""Files that go into a trajectory's workspace with its dataset row, and files that its code hands back."""

from __future__ import annotations

import mimetypes
import weakref
from collections.abc import Mapping
from typing import Any, cast

from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.messages import FileRefPart
from torchrl_agentic.sandbox import Sandbox
from torchrl_agentic.sandbox.base import WORK
from torchrl_agentic.sandbox.workspace import inside
from torchrl_agentic.tool import ToolContext

MAX_OUTPUTS = 32
"""How many files one result refers to at most."""

_uploaded: weakref.WeakKeyDictionary[Sandbox, set[str]] = weakref.WeakKeyDictionary()


class FileExchange:
    """What a tool takes from the dataset and gives back, as files in its sandbox.

    Args:
        uploads: the name of what holds the files in the environment's row: paths below /work → text or bytes.
            They are written before the first call, once for all tools of a workspace.
        outputs: a folder below /work; files that are new or have changed there after a call are referred to
            in its result.
    """

    def __init__(self, uploads: str | None = None, outputs: str | None = None) -> None:
        if outputs is not None:
            inside(outputs)
        self.uploads, self.outputs = uploads, outputs
        self._seen: dict[str, str] = {}

    def fresh(self) -> FileExchange:
        """Make another one, for another trajectory."""
        return FileExchange(self.uploads, self.outputs)

    async def before(self, sandbox: Sandbox, ctx: ToolContext) -> None:
        """Write the files of the row, if that was not done yet.

        Raises:
            InfrastructureError: there is no row, it holds something else, or a path leaves the workspace.
        """
        if self.uploads is None:
            return
        if ctx.state is None:
            raise InfrastructureError(
                "uploads come from the row: write ToolCompose(pass_state_to_tools=True)"
            )
        done = _uploaded.setdefault(sandbox, set())
        if self.uploads in done:
            return
        done.add(self.uploads)
        for path, content in _files(ctx.state, self.uploads).items():
            data = content.encode() if isinstance(content, str) else content
            try:
                await sandbox.write_file(path, data)
            except OSError as error:
                raise InfrastructureError(f"{self.uploads!r} of the row: {error}") from None

    async def after(self, sandbox: Sandbox) -> tuple[FileRefPart, ...]:
        """Refer to the files that are new or have changed."""
        if self.outputs is None:
            return ()
        folder = "/".join((WORK, *inside(self.outputs)))
        found = await sandbox.run(["find", folder, "-type", "f", "-printf", r"%T@ %i %s\t%p\0"])
        entries = (entry.partition("\t") for entry in found.stdout.split("\0") if "\t" in entry)
        now = {path: state for state, _, path in entries}
        changed = sorted(path for path, state in now.items() if self._seen.get(path) != state)
        self._seen = now
        return tuple(FileRefPart(path, mimetypes.guess_type(path)[0]) for path in changed[:MAX_OUTPUTS])


def _files(state: Any, key: str) -> Mapping[str, str | bytes]:
    """Read the files out of a row; what holds them may be a dict or a TensorDict."""
    value: Any = state.get(key, None)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        value = value.to_dict() if hasattr(value, "to_dict") else getattr(value, "data", value)
    found = cast("Mapping[Any, Any]", value) if isinstance(value, Mapping) else {None: None}
    if not all(isinstance(path, str) and isinstance(text, str | bytes) for path, text in found.items()):
        raise InfrastructureError(f"{key!r} of the row is no mapping of paths to text or bytes")
    return found
