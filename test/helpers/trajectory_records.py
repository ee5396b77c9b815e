"""Records of trajectories, made by hand."""

from torchrl_agentic.messages import (
    DispatchResult,
    Message,
    ParsedCall,
    Status,
    TextPart,
    Timing,
    ToolResult,
    Turn,
)
from torchrl_agentic.records import TokenRecord, TrajectoryRecord
from torchrl_agentic.tokens.ledger import TokenLedger


def result(status=Status.OK, *, run_s=0.01, queue_s=0.001, text="x"):
    return ToolResult((TextPart(text),), status=Status(status), timing=Timing(1e9, queue_s, run_s))


def turn(*calls, index=0, name="t"):
    """Create a turn from calls, each given as (tool, result)."""
    parsed = tuple(ParsedCall(tool, {}, f"call_{index}_{n}", index=n) for n, (tool, _) in enumerate(calls))
    outcome = DispatchResult("", parsed, tuple(one for _, one in calls))
    context = (Message("user", "q"),) if index == 0 else ()
    return Turn(name, index, Message("assistant", "a"), outcome, (), context)


def trajectory(*turns, step=0, score=None, reason="no_calls", sampled=0, injected=0, name="t", **extras):
    tokens = None
    if sampled or injected:
        ledger = TokenLedger()
        ledger.add_prompt([1] * injected)
        ledger.add_sampled([2] * sampled)
        tokens = TokenRecord(ledger)
    turns = turns or (turn(),)
    return TrajectoryRecord(
        f"{name}-{step}",
        turns,
        step,
        name,
        score=score,
        termination_reason=reason,
        tokens=tokens,
        extras=extras,
    )
