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
from torchrl_agentic.tools.per_trajectory import Users
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
    """One call of a transform.

    Attributes:
        is_over: Whether the caller has stopped waiting for it.
    """

    def __init__(self, name: str, args: Mapping[str, JSON], ctx: ToolContext) -> None:
        self.name = name
        self.args = args
        self.ctx = ctx
        self.row = ctx.batch_index
        self.is_over = False


class Layer(ABC):
    """What all tools made of one transform share: how to run it, and which trajectory owns which row.

    Attributes:
        rows_have_state: Whether a row keeps state from call to call, which a branch would have to copy.
    """

    rows_have_state: bool = True

    def __init__(self, transform: Any) -> None:
        self.transform = transform
        self.lock = threading.Lock()
        self._owners: dict[int, object] = {}
        self._users = Users()
        self._is_closed = False

    @abstractmethod
    async def run(self, call: Call) -> ToolResult:
        """Answer one call; if it is cancelled, end what it waits for."""

    def offer(self, name: str) -> tuple[str, Schema]:
        """Return the description and the input schema that the transform has for a tool."""
        del name
        return "", ANY

    @property
    def names(self) -> list[str]:
        """Names that the transform has for its tools; empty if it has none."""
        name = getattr(self.transform, "name", None)
        return [name] if isinstance(name, str) and name else []

    def claim(self, row: int, trajectory: object) -> None:
        """Take a row for a trajectory.

        Raises:
            InfrastructureError: If a trajectory of another environment owns it.
        """
        if self._owners.setdefault(row, trajectory) is not trajectory:
            raise InfrastructureError(f"row {row} of {self._shared()}")

    def release(self, trajectory: object) -> None:
        """Release the rows of a trajectory."""
        for row in [row for row, owner in list(self._owners.items()) if owner is trajectory]:
            del self._owners[row]

    def reset(self, tensordict: Any, tensordict_reset: Any) -> None:
        """Reset some rows of the transform.

        Raises:
            RuntimeError: If a trajectory of another environment owns one of them.
        """
        chosen: list[bool] = tensordict.get("_reset").reshape(-1).tolist()
        taken = [row for row in list(self._owners) if row < len(chosen) and chosen[row]]
        if taken:
            raise RuntimeError(f"row {taken[0]} of {self._shared()}")
        with self.lock:
            self.reset_rows(chosen, tensordict, tensordict_reset)

    def reset_rows(self, chosen: list[bool], tensordict: Any, tensordict_reset: Any) -> None:
        """Reset rows; called with the lock held."""
        del chosen
        reset = getattr(self.transform, "_reset", None)
        if reset is not None:
            reset(tensordict, tensordict_reset)

    def open(self) -> None:
        """Add a tool that uses the transform, and reopen the transform if `close` has closed it. Blocks."""
        with self.lock:
            self._users.join()
            if self._is_closed:
                self._is_closed = False
                self.reopen()

    def close(self) -> None:
        """Remove a tool that uses the transform, and close the transform after the last one. Blocks."""
        with self.lock:
            if self._users.leave():
                self._is_closed = True
                self.close_transform()

    def reopen(self) -> None:  # noqa: B027  most transforms open what they need when they are called
        """Make a closed transform usable."""

    def close_transform(self) -> None:
        """Close what the transform holds open."""
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
        """Run one call on a thread; if it is stopped, end the processes that it started."""
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
            # Processes that earlier calls on this thread have left running are not ours to end.
            for ident in thread[:1]:
                end_trees(pid for pid in children_of(ident) if pid not in before)
            self.stop(call)
            raise

    @abstractmethod
    def answer(self, call: Call) -> ToolResult:
        """Run one call, on a thread."""

    def stop(self, call: Call) -> None:
        """End what a call holds besides the processes that its thread has started, without blocking."""
