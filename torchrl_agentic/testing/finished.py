"""`finished_trajectory`: a finished `Trajectory` for unit tests of rewards and scorers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_agentic.messages import CallError, DispatchResult, Message, ParsedCall, Status, ToolResult, Turn
from torchrl_agentic.tokens.ledger import TokenLedger
from torchrl_agentic.trajectory.task import Task
from torchrl_agentic.trajectory.trajectory import Trajectory

Call = tuple[str, Status]


def finished_trajectory(
    *texts: str,
    question: str = "What is 6 * 7?",
    answer: Any = None,
    data: Mapping[str, Any] | None = None,
    calls: Sequence[Call] = (),
    n_sampled: int | None = None,
    name: str = "test",
) -> Trajectory:
    """Return a finished trajectory, without an engine.

    >>> trajectory = finished_trajectory("It is 42.", answer="42")
    >>> assert trajectory.final_answer == "It is 42."

    Args:
        texts: Messages of the model, one per turn; the last one is its answer. The calls belong to the first.
        question: Text of the user.
        answer: The right answer.
        data: Columns of the data set.
        calls: Tool calls: name of the tool, and status of the result. A call with the status MALFORMED could
            not be read.
        n_sampled: Number of sampled tokens; None: as many as the texts have words.
        name: Name of the trajectory.
    """
    task = Task(name, [{"role": "user", "content": question}], answer, data or {})
    messages = [Message("user", question)]
    turns: list[Turn] = []
    for index, text in enumerate(texts):
        made = tuple(
            _call(number, tool, status) for number, (tool, status) in enumerate(() if index else calls)
        )
        results = tuple(ToolResult.from_text(str(status), status=status) for _, status in calls[: len(made)])
        said = Message("assistant", text)
        heard = tuple(
            Message("tool", one.text, tool_call_id=call.call_id)
            for call, one in zip(made, results, strict=True)
        )
        turns.append(Turn(name, index, said, DispatchResult(text, made, results), heard))
        messages += [said, *heard]
    ledger = TokenLedger()
    ledger.add_prompt([0])
    count = sum(len(text.split()) for text in texts) if n_sampled is None else n_sampled
    ledger.add_sampled([1] * count, [-1.0] * count)
    return Trajectory(
        name, task, 0, tuple(messages), tuple(turns), "no_calls", terminated=True, ledger=ledger
    )


def _call(number: int, tool: str, status: Status) -> ParsedCall:
    error = CallError("bad_json", "the arguments are not JSON") if status is Status.MALFORMED else None
    return ParsedCall(tool, {}, f"call_{number}", error=error, index=number)
