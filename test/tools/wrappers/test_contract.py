"""Each wrapper is a tool: it keeps what every tool promises, around tools with sessions and without."""

import pickle
from typing import Any

import pytest
from helpers.wrapper_tools import Notes, add, allowed, by_hand, transparent

from torchrl_agentic.messages import ToolResult
from torchrl_agentic.testing import ToolContract
from torchrl_agentic.tools import (
    Approved,
    Budgeted,
    Cached,
    Cassette,
    Faulty,
    Hedged,
    Recorded,
    Renamed,
    Replayed,
    Retrying,
    Truncated,
    Wrapped,
)
from torchrl_agentic.tools.base import ToolContext, effects_of, has_sessions


class AroundAdd(ToolContract):
    good = {"a": 1, "b": 2}  # noqa: RUF012
    bad = ({}, {"a": "x"}, {"a": 1, "b": None})


class AroundNotes(ToolContract):
    good = {"text": "x"}  # noqa: RUF012
    bad = ({}, {"text": 3})


class TestWrapped(AroundNotes):
    def make(self) -> Wrapped:
        return Wrapped(Notes())


class TestRenamed(AroundNotes):
    def make(self) -> Renamed:
        return Renamed(Notes(), "memo")


class TestTruncated(AroundNotes):
    def make(self) -> Truncated:
        return Truncated(Notes(), 20)


class TestRetrying(AroundAdd):
    def make(self) -> Retrying:
        return Retrying(add)


class TestHedged(AroundAdd):
    def make(self) -> Hedged:
        return Hedged(add)


class TestCached(AroundAdd):
    def make(self) -> Cached:
        return Cached(add)


class TestCachedGlobally(AroundAdd):
    def make(self) -> Cached:
        return Cached(add, "global")


class TestBudgeted(AroundNotes):
    def make(self) -> Budgeted:
        return Budgeted(Notes(), calls=1)


class TestApproved(AroundNotes):
    def make(self) -> Approved:
        return Approved(Notes(), allowed)


class TestApprovedByHumans(AroundNotes):
    def make(self) -> Approved:
        return Approved(Notes(), allowed, wait_s=60)


class TestFaulty(AroundNotes):
    def make(self) -> Faulty:
        return Faulty(Notes(), seed=0)


class TestRecorded(AroundNotes):
    @pytest.fixture(autouse=True)
    def path(self, tmp_path: Any) -> None:
        self.cassette = Cassette(tmp_path / "cassette.jsonl")

    def make(self) -> Recorded:
        return Recorded(Notes(), self.cassette)


class TestReplayed(AroundAdd):
    @pytest.fixture(autouse=True)
    def record(self, tmp_path: Any) -> None:
        self.cassette = Cassette(tmp_path / "cassette.jsonl")
        for trajectory in ("t", "0.0", "1.0", "2.0", ""):
            self.cassette.append(trajectory, "add", "c1", self.good, ToolResult.from_value(3), 0.0)

    def make(self) -> Replayed:
        return Replayed(add, self.cassette)


class TestReplayedOrRun(AroundAdd):
    @pytest.fixture(autouse=True)
    def path(self, tmp_path: Any) -> None:
        self.cassette = Cassette(tmp_path / "cassette.jsonl")

    def make(self) -> Replayed:
        return Replayed(add, self.cassette, strict=False)


class TestAStack(AroundAdd):
    @pytest.fixture(autouse=True)
    def path(self, tmp_path: Any) -> None:
        self.wrappers = transparent(tmp_path / "cassette.jsonl")

    def make(self) -> Any:
        stack: Any = add
        for wrap in self.wrappers.values():
            stack = wrap(stack)
        return stack


WRAPPERS = list(transparent("unused"))


@pytest.mark.parametrize("name", WRAPPERS)
async def test_a_wrapper_arrives_whole_when_it_is_pickled(name: str, tmp_path: Any):
    wrapped = transparent(tmp_path / "cassette.jsonl")[name](add)
    await by_hand(wrapped, a=1)
    twin = pickle.loads(pickle.dumps(wrapped))
    assert (await by_hand(twin, a=1, b=2)).text == "3"
    assert twin.spec() == wrapped.spec()


@pytest.mark.parametrize("tool", [Notes(), add], ids=["with sessions", "without"])
@pytest.mark.parametrize("name", [name for name in WRAPPERS if name != "Cached"])
def test_a_wrapper_has_the_effects_of_its_tool(name: str, tool: Any, tmp_path: Any):
    wrapped = transparent(tmp_path / "cassette.jsonl")[name](tool)
    assert effects_of(wrapped) == effects_of(tool)


@pytest.mark.parametrize("name", ["Wrapped", "Renamed", "Truncated", "Retrying", "Approved", "Recorded"])
def test_a_wrapper_without_state_opens_no_session_around_a_tool_without_any(name: str, tmp_path: Any):
    wrappers = transparent(tmp_path / "cassette.jsonl")
    assert not has_sessions(wrappers[name](add))
    assert has_sessions(wrappers[name](Notes()))


async def test_a_tool_is_called_by_hand_as_without_wrappers():
    assert (await Wrapped(Wrapped(add)).run({"a": 1}, ToolContext(call_id="c1"))) == 1
