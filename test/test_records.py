"""Turns as JSON lines come back as they were; what cannot be read is reported in its place."""

import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
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
from torchrl_agentic.records import (
    SCHEMA_VERSION,
    BadLine,
    Recorder,
    read_records,
    turn_from_json,
    turn_to_json,
)

_text = st.text(st.characters(), max_size=20)  # lone surrogates included
_float = st.floats(0, 1e9)
_args = st.dictionaries(
    _text, st.none() | st.booleans() | st.integers() | _text | st.lists(_text), max_size=3
)
_message = st.builds(
    Message,
    st.sampled_from(["user", "assistant", "tool"]),
    st.none() | _text | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": _text}), max_size=2),
    st.lists(st.fixed_dictionaries({"id": _text}), max_size=2).map(tuple),
    st.none() | _text,
    st.booleans(),
)
_calls = st.lists(
    st.tuples(
        st.builds(
            ParsedCall, _text, _args, _text, st.none() | _text, st.none() | st.builds(CallError, _text, _text)
        ),
        st.builds(
            ToolResult,
            st.tuples(st.builds(TextPart, _text)),
            status=st.sampled_from(list(Status)),
            stop=st.booleans(),
            reward=st.none() | st.floats(-1e6, 1e6),
            timing=st.builds(Timing, _float, _float, _float),
            notes=st.lists(_text, max_size=2).map(tuple),
        ),
    ),
    max_size=3,
)  # fmt: skip


@st.composite
def _turns(draw: st.DrawFn) -> Turn:
    pairs = draw(_calls)
    calls = tuple(
        ParsedCall(call.tool, call.args, call.call_id, call.tag, call.error, index=index)
        for index, (call, _) in enumerate(pairs)
    )
    return Turn(
        draw(_text),
        draw(st.integers(0, 1000)),
        draw(_message),
        DispatchResult(draw(_text), calls, tuple(result for _, result in pairs)),
        tuple(draw(st.lists(_message, max_size=2))),
        tuple(draw(st.lists(_message, max_size=2))),
        tuple(draw(st.lists(_text, max_size=2))),
    )


def _turn(trajectory: str = "t", text: str = "hello", index: int = 0) -> Turn:
    result = ToolResult.from_text(text)
    outcome = DispatchResult("", (ParsedCall("f", {"a": text}, "c1"),), (result,))
    return Turn(trajectory, index, Message("assistant", text), outcome)


@settings(deadline=None)
@given(turn=_turns())
def test_a_turn_comes_back_as_it_was(turn: Turn):
    """Through real JSON text, so that nothing lives on as a Python object."""
    assert turn_from_json(json.loads(json.dumps(turn_to_json(turn)))) == turn


@settings(deadline=None, max_examples=50)
@given(turns=st.lists(_turns(), max_size=4))
def test_a_file_of_turns_comes_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, turns: list[Turn]):
    """One line per turn, whatever line separators and surrogates the texts hold."""
    path = tmp_path_factory.mktemp("records") / "turns.jsonl"
    with Recorder(path) as recorder:
        for turn in turns:
            recorder(turn)
    assert (list(read_records(path)) if turns else []) == turns


def test_half_a_surrogate_pair_is_written_and_read(tmp_path: Path):
    with Recorder(tmp_path / "r.jsonl") as recorder:
        recorder(_turn(text="\ud800 é"))
        recorder(_turn(text="é"))
    first, second = read_records(tmp_path / "r.jsonl")
    assert isinstance(first, Turn)
    assert first.message.content == "\ud800 é"
    assert isinstance(second, Turn)
    assert "é".encode() in (tmp_path / "r.jsonl").read_bytes()


@pytest.mark.parametrize(
    "junk",
    [
        b'{"schema_version": 1, "traj',
        b"",
        b"[]",
        b"3",
        b"null",
        b"{}",
        b"\xff\xfe",
        b'{"schema_version": "1"}',
        b'{"schema_version": 1, "calls": [3]}',
        b'{"schema_version": 1, "calls": [], "text": "", "trajectory": "", "turn": 0, "message": 3}',
        b"[" * 100_000,
        b"1" * 5000,
    ],
    ids=lambda junk: repr(junk[:20]),
)
def test_a_line_that_cannot_be_read_is_reported_in_its_place(tmp_path: Path, junk: bytes):
    good = json.dumps(turn_to_json(_turn())).encode()
    (tmp_path / "r.jsonl").write_bytes(good + b"\n" + junk + b"\n" + good + b"\n")
    first, bad, last = read_records(tmp_path / "r.jsonl")
    assert isinstance(first, Turn)
    assert isinstance(last, Turn)
    assert isinstance(bad, BadLine)
    assert bad.number == 2
    assert bad.reason


def test_a_last_line_that_was_cut_off_is_reported(tmp_path: Path):
    good = json.dumps(turn_to_json(_turn()))
    (tmp_path / "r.jsonl").write_text(good + "\n" + good[:50])
    assert [type(item) for item in read_records(tmp_path / "r.jsonl")] == [Turn, BadLine]


def test_recording_goes_on_behind_a_line_that_was_cut_off(tmp_path: Path):
    """The first turn after a crash must not be glued to the broken line, and lost with it."""
    good = json.dumps(turn_to_json(_turn()))
    (tmp_path / "r.jsonl").write_text(good + "\n" + good[:50])
    with Recorder(tmp_path / "r.jsonl") as recorder:
        recorder(_turn("after"))
    found = list(read_records(tmp_path / "r.jsonl"))
    assert [item.trajectory for item in found if isinstance(item, Turn)] == ["t", "after"]


def test_a_record_of_a_later_version_is_refused(tmp_path: Path):
    data = turn_to_json(_turn()) | {"schema_version": SCHEMA_VERSION + 1}
    with pytest.raises(ValueError, match=f"version {SCHEMA_VERSION + 1}"):
        turn_from_json(data)
    (tmp_path / "r.jsonl").write_text(json.dumps(data) + "\n")
    (bad,) = read_records(tmp_path / "r.jsonl")
    assert isinstance(bad, BadLine)
    assert f"version {SCHEMA_VERSION + 1}" in bad.reason


def test_one_recorder_serves_several_threads(tmp_path: Path):
    """Texts longer than a pipe or a page, so that lines written in pieces would mix."""
    with Recorder(tmp_path / "r.jsonl") as recorder, ThreadPoolExecutor(8) as threads:
        list(threads.map(recorder, [_turn(str(n), "x" * 20_000, n) for n in range(100)]))
    found = list(read_records(tmp_path / "r.jsonl"))
    assert {turn.trajectory for turn in found if isinstance(turn, Turn)} == {str(n) for n in range(100)}
    assert len(found) == 100


def test_a_recorder_pickles_and_opens_again_after_close(tmp_path: Path):
    with Recorder(tmp_path / "deep" / "r.jsonl") as recorder:
        recorder(_turn("a"))
        copy = pickle.loads(pickle.dumps(recorder))
        with copy:
            copy(_turn("b"))
        recorder.close()
        recorder.close()
        recorder(_turn("c"))
    found = list(read_records(tmp_path / "deep" / "r.jsonl"))
    assert [turn.trajectory for turn in found if isinstance(turn, Turn)] == ["a", "b", "c"]
