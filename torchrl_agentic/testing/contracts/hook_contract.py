"""The contract of every `TrajectoryHook`."""

from __future__ import annotations

import math
import pickle
import threading
from collections.abc import Iterator, Sequence

import pytest

from torchrl_agentic.messages import (
    CallError,
    DispatchResult,
    Message,
    ParsedCall,
    Status,
    Timing,
    ToolResult,
    Turn,
)
from torchrl_agentic.records import Recording, TokenRecord, TrajectoryHook, as_hook
from torchrl_agentic.tokens.ledger import TokenLedger


class HookContract:
    """Tests of a `TrajectoryHook`: it receives all trajectories, and never disturbs them."""

    def make(self) -> TrajectoryHook:
        """Return a fresh hook to test."""
        raise NotImplementedError

    def told(self, hook: TrajectoryHook) -> int | None:
        """Return how many ended trajectories the hook has written or sent; None if that is unknown."""
        del hook

    @pytest.fixture
    def hook(self) -> Iterator[TrajectoryHook]:
        """Yield a fresh hook, and close it afterwards if it has `close`."""
        hook = self.make()
        yield hook
        close = getattr(hook, "close", None)
        if close is not None:
            close()

    def turns(self, trajectory: str = "0.0", row: int = 0) -> Sequence[Turn]:
        """Return the turns of a trajectory: one with a call of each status, then one without calls.

        Args:
            trajectory: Name of the trajectory.
            row: Row of the batch.
        """
        statuses = [*Status]
        calls = [
            ParsedCall("f", {"a": [1, "é\ud800\x1b[31m", None]}, f"call_0_{n}") for n in range(len(statuses))
        ]
        calls[0] = ParsedCall("", {}, "call_0_0", error=CallError("bad_json", "not JSON"))
        results = [
            ToolResult.from_text("x" * 1000, status=status) if n else ToolResult((), reward=math.nan)
            for n, status in enumerate(statuses)
        ]
        results[1] = ToolResult.from_value("text", reward=1.0, metrics={"n": 1})
        results.append(ToolResult((), timing=Timing(1.0, 0.0, 0.5), stop=True))
        calls.append(ParsedCall("stop", {}, "call_0_x"))
        outcome = DispatchResult("said", tuple(calls), tuple(results))
        said = Message("assistant", "said\x00 <b>")
        first = Turn(trajectory, 0, said, outcome, (Message("tool", "x"),), (Message("user", "?"),), (), row)
        return [first, Turn(trajectory, 1, Message("assistant", None), DispatchResult(), row=row)]

    def play(self, recording: Recording, turns: Sequence[Turn]) -> None:
        """Call every method of a recording.

        Args:
            recording: The recording of one trajectory.
            turns: Turns of the trajectory.
        """
        ledger = TokenLedger()
        ledger.add_prompt([1, 2])
        ledger.add_sampled([3], [-0.5])
        for turn in turns:
            recording.record_turn(turn)
            recording.add_reward(0.5)
        recording.add_messages([Message("user", "bye")])
        recording.annotate(gts="4", tokens=TokenRecord(ledger), difficulty="hard")
        recording.annotate(score=1.0)
        recording.finish("no_calls")

    def test_hook_accepts_every_event_of_a_trajectory(self, hook: TrajectoryHook) -> None:
        assert as_hook(hook) is not None
        self.play(hook.begin("0.0"), self.turns())
        assert self.told(hook) in (1, None)

    def test_only_turns_and_ends_are_required(self, hook: TrajectoryHook) -> None:
        recording = hook.begin("0.0")
        for turn in self.turns():
            recording.record_turn(turn)
        recording.finish("reset")
        assert self.told(hook) in (1, None)

    def test_trajectories_of_one_name_are_several(self, hook: TrajectoryHook) -> None:
        """Environments that share a hook use the same names for their trajectories."""
        recordings = [hook.begin("0.0"), hook.begin("0.0")]
        for turn in self.turns():
            for recording in recordings:
                recording.record_turn(turn)
        for recording in recordings:
            recording.finish("no_calls")
        assert self.told(hook) in (2, None)

    def test_it_serves_environments_of_several_threads(self, hook: TrajectoryHook) -> None:
        failed: list[BaseException] = []

        def play(row: int) -> None:
            try:
                self.play(hook.begin(f"{row}.0", row), self.turns(f"{row}.0", row))
            except BaseException as error:  # an assertion in a thread would be lost
                failed.append(error)

        threads = [threading.Thread(target=play, args=(row,)) for row in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed
        assert self.told(hook) in (4, None)

    def test_hook_can_be_pickled_to_workers(self, hook: TrajectoryHook) -> None:
        """Without the trajectories that were begun here."""
        hook.begin("0.0").record_turn(self.turns()[0])
        copy = pickle.loads(pickle.dumps(hook))
        self.play(copy.begin("0.0"), self.turns())
        close = getattr(copy, "close", None)
        if close is not None:
            close()
