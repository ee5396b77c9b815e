"""Dumps for the tests of the viewer."""

from __future__ import annotations

from pathlib import Path

from torchrl_agentic.messages import (
    JSON,
    CallError,
    DispatchResult,
    Message,
    ParsedCall,
    Status,
    Timing,
    ToolResult,
    Turn,
)
from torchrl_agentic.records import Recorder, TokenRecord, TrajectoryRecord
from torchrl_agentic.tokens.ledger import TokenLedger

VERL_LINE: dict[str, JSON] = {
    "input": "\n\nsystem\nYou are good at sums.\n\n# Tools\n<tools>\n{}\n</tools>\n\n"
    "user\nWhat is 6 × 7?\n\nassistant\n",
    "output": "assistant\n<think>\nI had better compute it.\n\n    \n<tool_call>\n"
    '{"name": "code_interpreter", "arguments": {"code": "print(6 * 7.0)", "executes": "True"}}\n'
    "</tool_call>\n\n    \n    tool\n42.0\n\n\n    assistant\n<think>\nThe tool says 42.\n</think>\n\n"
    "#### 42.0",
    "score": 0,
    "step": 1,
}
"""A line as verl's trainer dumps it: an unclosed thought, a call, its result, an answer."""

THOUGHT = "<think>First I should compute the product.</think>"


def call(number: int, code: str, result: str, status: Status = Status.OK) -> tuple[ParsedCall, ToolResult]:
    """Create a call of the interpreter and its result."""
    error = CallError("json", "it is no JSON") if status is Status.MALFORMED else None
    parsed = ParsedCall("python", {} if error else {"code": code}, f"call_{number}", error=error)
    timing = Timing(1e9 + number, 0.0005, 0.0251)
    answer = ToolResult.from_text(result, status=status)
    return parsed, ToolResult(answer.parts, status=status, timing=timing)


def trajectory(
    name: str,
    *,
    step: int = 0,
    score: float | None = 0.5,
    question: str = "What is 6 × 7?",
    answer: str = "It is 42.",
    status: Status = Status.OK,
    result: str = "42",
    reason: str = "no_calls",
    request_id: str | None = None,
    extras: dict[str, JSON] | None = None,
    tokens: bool = False,
) -> TrajectoryRecord:
    """Create a record of two turns: the model thinks and calls, then answers."""
    parsed, answered = call(0, "x = 6\nx * 7", result, status)
    said = Message("assistant", f"{THOUGHT}\nLet me see. <call>python</call>")
    asked = (Message("system", "You are careful."), Message("user", question))
    told = Message("tool", result, tool_call_id="call_0")
    first = Turn(name, 0, said, DispatchResult("Let me see.", (parsed,), (answered,)), (told,), asked)
    last = Turn(name, 1, Message("assistant", answer), DispatchResult(answer))
    return TrajectoryRecord(
        request_id or f"{step:02x}-{name}",
        (first, last),
        step,
        name,
        rewards=(0.25, None),
        score=score,
        gts="42",
        extras=extras or {},
        termination_reason=reason,
        tokens=token_record() if tokens else None,
        started=1.7e9,
        versions={"torchrl-agentic": "0.1.0"},
    )


def token_record() -> TokenRecord:
    """Create a record of tokens of all four sources."""
    ledger = TokenLedger()
    ledger.add_prompt([1, 2, 3])
    ledger.add_sampled([4, 5], [-0.5, -0.25])
    ledger.add_boundary([6])
    ledger.add_result([7, 8], call=0)
    ledger.add_sampled([9])
    return TokenRecord(ledger, ("What is it?", "python, please", "<|im_end|>", "42", "It is 42."))


def write(folder: Path, *records: TrajectoryRecord) -> Path:
    """Write a dump with one file per step."""
    with Recorder(folder) as recorder:
        for record in records:
            recorder.write(record, folder / f"{record.step}.jsonl")
    return folder


def three_steps(folder: Path) -> Path:
    """Write a dump of three steps with two groups each; sorting their scores as text would be wrong."""
    scores = {"a": -0.05, "b": -0.6, "c": 10.0, "d": 2.0, "e": None, "f": float("nan")}
    statuses = {"b": Status.TIMEOUT, "d": Status.MALFORMED}
    return write(
        folder,
        *(
            trajectory(
                name,
                step=step,
                score=score,
                status=statuses.get(name, Status.OK),
                result="it took too long" if name in statuses else "42",
                question="What is 6 × 7?" if name < "d" else "What is 7 × 6?",
                answer=f"Needle {name}, in step {step}: 42." if name in "bd" else f"It is 42, says {name}.",
                reason="max_turns" if name == "c" else "no_calls",
                extras={"acc": 1.0 if name < "c" else 0.0, "note": f"of {name}"},
                tokens=name == "a",
            )
            for step in (1, 2, 10)
            for name, score in scores.items()
        ),
    )
