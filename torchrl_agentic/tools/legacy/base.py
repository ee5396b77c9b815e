"""`Layer`, the base class that runs calls of a legacy transform, and the processes that its threads start."""

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
    """Return the running child processes that a thread has started; empty on systems other than Linux.

    Args:
        thread: Native id of a thread of this process.
    """
    return listed(Path(f"/proc/self/task/{thread}/children"))


def end_trees(pids: Iterable[int]) -> None:
    """Kill processes and all their descendants."""
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


class TransformCall:
    """One call of a transform.

    Args:
        name: Name of the tool.
        args: Arguments of the call.
        ctx: Context of the call.

    Attributes:
        row: Index of the row in the batch.
        is_over: Whether the caller has stopped waiting for it.
    """

    def __init__(self, name: str, args: Mapping[str, JSON], ctx: ToolContext) -> None:
        self.name = name
        self.args = args
        self.ctx = ctx
        self.row = ctx.batch_index
        self.is_over = False


class Layer(ABC):
    """Runs the calls of one transform, for all its tools, and records which trajectory owns which row.

    Args:
        transform: The transform.

    Attributes:
        transform: The transform.
        lock: Lock for the state of the transform.
        rows_have_state: Whether a row keeps state between calls, which a branch would have to copy.
    """

    rows_have_state: bool = True

    def __init__(self, transform: Any) -> None:
        self.transform = transform
        self.lock = threading.Lock()
        self._owners: dict[int, object] = {}
        self._users = Users()
        self._is_closed = False

    @abstractmethod
    async def run(self, call: TransformCall) -> ToolResult:
        """Run one call; on cancellation, end the processes that it waits for."""

    def offer(self, name: str) -> tuple[str, Schema]:
        """Return the transform's description and input schema of a tool."""
        del name
        return "", ANY

    @property
    def names(self) -> list[str]:
        """The transform's names of its tools; empty if it has none."""
        name = getattr(self.transform, "name", None)
        return [name] if isinstance(name, str) and name else []

    def claim(self, row: int, trajectory: object) -> None:
        """Make a trajectory the owner of a row.

        Args:
            row: Index of the row.
            trajectory: The trajectory.

        Raises:
            InfrastructureError: If a trajectory of another environment owns the row.
        """
        if self._owners.setdefault(row, trajectory) is not trajectory:
            raise InfrastructureError(f"row {row} of {self._shared()}")

    def release(self, trajectory: object) -> None:
        """Release the rows of a trajectory."""
        for row in [row for row, owner in list(self._owners.items()) if owner is trajectory]:
            del self._owners[row]

    def reset(self, tensordict: Any, tensordict_reset: Any) -> None:
        """Reset some rows of the transform.

        Args:
            tensordict: TensorDict of the reset, with the mask "_reset".
            tensordict_reset: TensorDict after the reset.

        Raises:
            RuntimeError: If a trajectory of another environment owns one of the rows.
        """
        chosen: list[bool] = tensordict.get("_reset").reshape(-1).tolist()
        taken = [row for row in list(self._owners) if row < len(chosen) and chosen[row]]
        if taken:
            raise RuntimeError(f"row {taken[0]} of {self._shared()}")
        with self.lock:
            self.reset_rows(chosen, tensordict, tensordict_reset)

    def reset_rows(self, chosen: list[bool], tensordict: Any, tensordict_reset: Any) -> None:
        """Reset rows; called with the lock held.

        Args:
            chosen: Whether to reset the row, for each row.
            tensordict: TensorDict of the reset.
            tensordict_reset: TensorDict after the reset.
        """
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
        """Make a closed transform usable again."""

    def close_transform(self) -> None:
        """Close the transform."""
        close = getattr(self.transform, "close", None)
        if callable(close):
            close()

    def _shared(self) -> str:
        return (
            f"{type(self.transform).__name__} is in use by another environment, and its state would leak"
            " between the two; create a transform and an as_tool for each environment"
        )


class ThreadLayer(Layer):
    """A layer for a blocking transform: each call runs on a thread."""

    async def run(self, call: TransformCall) -> ToolResult:
        """Run one call on a thread; on cancellation, end the processes that it started."""
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
            # Not the processes that earlier calls on this thread have left running.
            for ident in thread[:1]:
                end_trees(pid for pid in children_of(ident) if pid not in before)
            self.stop(call)
            raise

    @abstractmethod
    def answer(self, call: TransformCall) -> ToolResult:
        """Run one call, on a thread."""

    def stop(self, call: TransformCall) -> None:
        """Close other resources of a cancelled call, without blocking."""
