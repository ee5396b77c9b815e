"""The processes that a thread of ours has started; known on Linux only, elsewhere there seem to be none."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.messages import JSON, ToolResult
from torchrl_agentic.tools.base import ToolContext
from torchrl_agentic.tools.schema import Schema


def children_of(thread: int) -> list[int]:
    """Give the processes that a thread of this process, by its native id, has started and that still run."""
    return listed(Path(f"/proc/self/task/{thread}/children"))


def end_trees(pids: Iterable[int]) -> None:
    """Kill processes and all that they have started."""
    for pid in pids:
        below = [child for path in Path(f"/proc/{pid}/task").glob("*/children") for child in listed(path)]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        end_trees(below)


def listed(path: Path) -> list[int]:
    """Read a file of /proc that lists processes."""
    try:
        return [int(pid) for pid in path.read_text().split()]
    except OSError:
        return []


ANY: Schema = {"type": "object"}


class Call:
    """One call on its way through a transform. is_over: nobody waits for it any more."""

    def __init__(self, name: str, args: Mapping[str, JSON], ctx: ToolContext) -> None:
        self.name = name
        self.args = args
        self.ctx = ctx
        self.row = ctx.batch_index
        self.is_over = False


class Layer(ABC):
    """What all tools made of one transform share: how it is run, and whose its rows are.

    rows_have_state: whether a row keeps something from call to call, which a branch would have to copy.
    """

    rows_have_state: bool = True

    def __init__(self, transform: Any) -> None:
        self.transform = transform
        self.lock = threading.Lock()
        self._owners: dict[int, object] = {}
        self._users = 0
        self._is_closed = False

    @abstractmethod
    async def run(self, call: Call) -> ToolResult:
        """Answer one call; when it is cancelled, end what it waits for."""

    def offer(self, name: str) -> tuple[str, Schema]:
        """Give the description and the input schema that the transform itself knows for a tool."""
        del name
        return "", ANY

    @property
    def names(self) -> list[str]:
        """The names that the transform itself has for its tools; none if it does not tell."""
        name = getattr(self.transform, "name", None)
        return [name] if isinstance(name, str) and name else []

    def claim(self, row: int, trajectory: object) -> None:
        """Take a row for a trajectory.

        Raises:
            InfrastructureError: another environment's trajectory is in it.
        """
        if self._owners.setdefault(row, trajectory) is not trajectory:
            raise InfrastructureError(f"row {row} of {self._shared()}")

    def release(self, trajectory: object) -> None:
        """Let go of the rows of a trajectory."""
        for row in [row for row, owner in list(self._owners.items()) if owner is trajectory]:
            del self._owners[row]

    def reset(self, tensordict: Any, tensordict_reset: Any) -> None:
        """Hand on the reset of some rows.

        Raises:
            RuntimeError: a trajectory of another environment is in one of them.
        """
        chosen: list[bool] = tensordict.get("_reset").reshape(-1).tolist()
        taken = [row for row in list(self._owners) if row < len(chosen) and chosen[row]]
        if taken:
            raise RuntimeError(f"row {taken[0]} of {self._shared()}")
        with self.lock:
            self.reset_rows(chosen, tensordict, tensordict_reset)

    def reset_rows(self, chosen: list[bool], tensordict: Any, tensordict_reset: Any) -> None:
        """Reset the rows; called with the lock held."""
        del chosen
        reset = getattr(self.transform, "_reset", None)
        if reset is not None:
            reset(tensordict, tensordict_reset)

    def open(self) -> None:
        """Count one more tool that is in use, and open again what `close` has closed. Blocks."""
        with self.lock:
            self._users += 1
            if self._is_closed:
                self._is_closed = False
                self.reopen()

    def close(self) -> None:
        """Close the transform, with the last tool that used it. Blocks."""
        with self.lock:
            self._users = max(0, self._users - 1)
            if self._users == 0:
                self._is_closed = True
                self.close_transform()

    def reopen(self) -> None:  # noqa: B027  most transforms open what they need when they are called
        """Make a closed transform usable."""

    def close_transform(self) -> None:
        """End all that the transform holds."""
        close = getattr(self.transform, "close", None)
        if callable(close):
            close()

    def _shared(self) -> str:
        return (
            f"{type(self.transform).__name__} is in use by another environment: what it keeps would leak from"
            " one to the other; make a transform and an as_tool for each"
        )


class ThreadLayer(Layer):
    """A layer whose transform blocks: each call has a thread."""

    async def run(self, call: Call) -> ToolResult:
        """Run one call on a thread; when it is stopped, what it started is ended too."""
        thread: list[int] = []
        before: set[int] = set()

        def work() -> ToolResult:
            thread.append(threading.get_native_id())
            before.update(children_of(thread[0]))
            try:
                return self.answer(call)
            finally:
                thread.clear()

        try:
            return await call.ctx.in_thread(work)
        except BaseException:
            call.is_over = True
            # Its thread has run other calls before: what those have left running is not ours to end.
            for ident in thread[:1]:
                end_trees(pid for pid in children_of(ident) if pid not in before)
            self.stop(call)
            raise

    @abstractmethod
    def answer(self, call: Call) -> ToolResult:
        """Run one call, on a thread."""

    def stop(self, call: Call) -> None:
        """End what a call holds besides the processes that its thread has started; must not block."""
