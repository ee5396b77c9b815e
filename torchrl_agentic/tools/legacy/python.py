"""`PythonInterpreter`: a process per call, per row (`persistent`), or from a pool of Ray's."""

from __future__ import annotations

from typing import Any

from torchrl_agentic.errors import ToolError
from torchrl_agentic.messages import Status, ToolResult
from torchrl_agentic.schema import Schema
from torchrl_agentic.tools.legacy.base import Call, ThreadLayer
from torchrl_agentic.tools.legacy.children import end_trees

_CODE: Schema = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
_TIMED_OUT = ("Code execution timed out", "Code execution timed out - process restarted")
_ANEW = "The interpreter had ended: a new one ran this, and what the old one knew is gone."


class PythonLayer(ThreadLayer):
    """Calls `_execute_python_code(code, row)`; a row whose interpreter has ended gets another."""

    def __init__(self, transform: Any) -> None:
        super().__init__(transform)
        self.rows_have_state = bool(transform.persistent) and transform.python_service is None

    def answer(self, call: Call) -> ToolResult:
        """Run code."""
        was_lost = self.rows_have_state and self._make_process(call)
        done = self.transform._execute_python_code(str(call.args.get("code", "")), call.row)
        parts = (_ANEW if was_lost else "", done.get("stdout", ""), done.get("stderr", ""))
        text = "\n".join(part.rstrip("\n") for part in parts if part and part.strip())
        if done.get("stderr") in _TIMED_OUT:
            return ToolResult.from_text(text, status=Status.TIMEOUT)
        return ToolResult.from_text(text, is_error=not done["success"])

    @property
    def names(self) -> list[str]:
        """What it is called here."""
        return ["python"]

    def offer(self, name: str) -> tuple[str, Schema]:
        """Tell of the code."""
        return "", _CODE

    def _make_process(self, call: Call) -> bool:
        """Make the row's process, if it has none that runs. Whether one was lost.

        The transform makes its processes one after the other, and counts them: rows that start together make
        too many. So a clone makes this one, which the row alone waits for.
        """
        with self.lock:
            process = self._slots(call.row)[call.row]
        if process is not None and process.process is not None and process.process.poll() is None:
            return False
        maker = self.transform.clone()
        maker._ensure_processes(1)
        made, maker.processes = maker.processes[0], []
        with self.lock:
            if not call.is_over:
                self._slots(call.row)[call.row] = made
        if call.is_over:
            made.cleanup()
            raise ToolError("the call is over")
        return process is not None

    def _slots(self, row: int) -> list[Any]:
        processes: list[Any] = self.transform.processes
        processes.extend([None] * (row + 1 - len(processes)))
        return processes

    def stop(self, call: Call) -> None:
        """End the row's process; without the lock, since this runs on the event loop."""
        processes: list[Any] = self.transform.processes or []
        if not self.rows_have_state or call.row >= len(processes):
            return
        process, processes[call.row] = processes[call.row], None
        if process is not None and process.process is not None:
            end_trees([process.process.pid])
