"""Hypothesis strategies for records of trajectories, and two functions that make one by hand."""

from __future__ import annotations

from hypothesis import strategies as st

from torchrl_agentic.messages import (
    CallError,
    DispatchResult,
    Message,
    ParsedCall,
    Status,
    TextPart,
    Timing,
    ToolResult,
    Turn,
)
from torchrl_agentic.records import Origin, TokenRecord, TrajectoryRecord
from torchrl_agentic.records.record_json import RESERVED
from torchrl_agentic.tokens.ledger import TokenLedger

text = st.text(st.characters(), max_size=20)  # lone surrogates included
_seconds = st.floats(0, 1e9)
args = st.dictionaries(text, st.none() | st.booleans() | st.integers() | text | st.lists(text), max_size=3)
messages = st.builds(
    Message,
    st.sampled_from(["user", "assistant", "tool"]),
    st.none() | text | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": text}), max_size=2),
    st.lists(st.fixed_dictionaries({"id": text}), max_size=2).map(tuple),
    st.none() | text,
    st.booleans(),
    reasoning=text,
    refusal=text,
)
_calls = st.lists(
    st.tuples(
        st.builds(
            ParsedCall, text, args, text, st.none() | text, st.none() | st.builds(CallError, text, text)
        ),
        st.builds(
            ToolResult,
            st.tuples(st.builds(TextPart, text)),
            status=st.sampled_from(list(Status)),
            stop=st.booleans(),
            reward=st.none() | st.floats(-1e6, 1e6),
            metrics=st.none() | st.dictionaries(text, st.integers()),
            timing=st.none() | st.builds(Timing, _seconds, _seconds, _seconds),
            notes=st.lists(text, max_size=2).map(tuple),
        ),
    ),
    max_size=3,
)


origins = st.builds(
    Origin,
    text,
    st.none() | st.integers(0, 10**6),
    st.none() | st.integers(0, 100),
    st.lists(st.integers(0, 10**6), unique=True, max_size=3).map(lambda found: tuple(sorted(found))),
    st.none() | _seconds,
)


@st.composite
def turns(draw: st.DrawFn, trajectory: str, index: int, row: int) -> Turn:
    """Draw a turn of a trajectory."""
    pairs = draw(_calls)
    calls = tuple(
        ParsedCall(call.tool, call.args, call.call_id, call.tag, call.error, index=number)
        for number, (call, _) in enumerate(pairs)
    )
    return Turn(
        trajectory,
        index,
        draw(messages),
        DispatchResult(draw(text), calls, tuple(result for _, result in pairs)),
        tuple(draw(st.lists(messages, max_size=2))),
        tuple(draw(st.lists(messages, max_size=2))),
        tuple(draw(st.lists(text, max_size=2))),
        row,
    )


@st.composite
def ledgers(draw: st.DrawFn) -> TokenLedger:
    """Draw a ledger; log-probabilities are known for all of its tokens or for none."""
    ledger, known = TokenLedger(), draw(st.booleans())
    ids = st.lists(st.integers(0, 200_000), max_size=4)
    for source in draw(st.lists(st.integers(-3, 2), max_size=5)):
        some = draw(ids)
        if source == -1:
            ledger.add_sampled(some, [-0.5] * len(some) if known else None)
        else:
            ledger.add_injected(some, [source] * len(some))
    return ledger


@st.composite
def records(draw: st.DrawFn) -> TrajectoryRecord:
    """Draw a record that a `Recorder` may write."""
    name, row = draw(text), draw(st.integers(0, 100))
    number = st.none() | st.floats(-1e9, 1e9)
    made = tuple(draw(turns(name, index, row)) for index in range(draw(st.integers(1, 3))))
    ledger = draw(st.none() | ledgers())
    return TrajectoryRecord(
        draw(st.uuids()).hex,
        made,
        draw(st.integers(0, 10**6)),
        name,
        row,
        tuple(draw(number) for _ in made),
        draw(number),
        draw(st.none() | text | st.lists(text)),
        draw(st.dictionaries(text.filter(lambda key: key not in RESERVED), st.none() | text, max_size=2)),
        draw(st.sampled_from(["no_calls", "max_turns", "stop_tool", "reset", ""])),
        None if ledger is None else TokenRecord(ledger, tuple("x" for _ in ledger.spans())),
        draw(st.none() | _seconds),
        {"torchrl-agentic": "0.1.0"},
        draw(st.text("0123456789abcdef", min_size=1, max_size=8)),
        draw(origins),
    )


def turn(
    said: str = "hello",
    *,
    trajectory: str = "0.0",
    index: int = 0,
    row: int = 0,
    result: ToolResult | None = None,
    args: dict[str, object] | None = None,
) -> Turn:
    """Create a turn, with one call if `result` is given."""
    calls = () if result is None else (ParsedCall("f", args or {}, f"call_{index}_0"),)
    results = () if result is None else (result,)
    context = (Message("user", "What?"),) if index == 0 else ()
    answers = tuple(Message("tool", one.text, tool_call_id=f"call_{index}_0") for one in results)
    outcome = DispatchResult(said, calls, results)
    return Turn(trajectory, index, Message("assistant", said), outcome, answers, context, (), row)


def record(*some: Turn, **fields: object) -> TrajectoryRecord:
    """Create a record of turns."""
    made = some or (turn(),)
    known: dict[str, object] = {
        "request_id": "r",
        "turns": made,
        "trajectory": made[0].trajectory,
        "rewards": (None,) * len(made),
        **fields,
    }
    return TrajectoryRecord(**known)  # pyright: ignore[reportArgumentType]
