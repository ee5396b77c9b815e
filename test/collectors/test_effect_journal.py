"""The journal of calls with effects, and what becomes of trajectories by it."""

import itertools
import os
import subprocess
import sys
from typing import ClassVar

import pytest
from helpers.processes import started
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic import Effects, Tool
from torchrl_agentic.collectors.collector_state import CollectorState, GroupState, RunningTrajectory
from torchrl_agentic.collectors.effect_journal import EffectJournal, may_have_effects
from torchrl_agentic.collectors.resumption import Resumption, fate_of
from torchrl_agentic.collectors.trajectory_state import TrajectoryState
from torchrl_agentic.dispatch import Dispatcher
from torchrl_agentic.dispatch.session import SessionCounts
from torchrl_agentic.errors import InfrastructureError


def state(turn, *, is_open=False, reason=""):
    """Return the state of a trajectory after so many turns."""
    return TrajectoryState((), (), 0, None, SessionCounts(turn), is_open, reason=reason)


states = st.none() | st.builds(
    state, st.integers(1, 5), is_open=st.booleans(), reason=st.sampled_from(["", "max_turns"])
)


@given(states, st.none() | st.integers(0, 5), st.booleans(), st.booleans())
def test_a_trajectory_continues_only_if_nothing_with_effects_may_have_run_since(found, last, known, effects):
    fate = fate_of(found, last_effects=last, is_known=known, has_effects=effects)
    if known:
        since, before = last is not None and (found is None or last >= found.counts.turn), last is not None
    else:
        since, before = effects and (found is None or not found.reason), effects
    may_continue = found is not None and not found.is_open and not since
    assert (fate == "continue") == may_continue
    if fate != "continue":
        assert fate == ("restart" if before else "begin")


@given(
    st.lists(st.tuples(st.sampled_from(["a@r", "a@r+1", "a@r+2", "b@r"]), st.integers(0, 3)), max_size=6),
    st.sampled_from(["a@r", "b@r"]),
    states,
)
def test_a_name_under_which_calls_with_effects_ran_is_not_used_again(tmp_path_factory, marks, key, found):
    path = tmp_path_factory.mktemp("journal") / "effects"
    first = EffectJournal(path)
    for name, turn in marks:
        first.mark(name, turn)
    first.close()
    journal = EffectJournal(path)
    resumption = Resumption(CollectorState(0, (), first.key), journal)
    suffix, source = resumption.start(key, RunningTrajectory(0, key, state=found), lambda: True)
    used = [turn for name, turn in marks if name == f"{key}{suffix}"]
    assert (source is None and not used) or (source is found and max(used, default=-1) < found.counts.turn)
    journal.close()


def test_without_the_journal_of_the_state_names_are_new_where_tools_have_effects(tmp_path):
    journal = EffectJournal(tmp_path / "effects")
    for saved in (CollectorState(0), CollectorState(0, (), "another")):
        one, other = Resumption(saved, journal), Resumption(saved, journal)
        names = [found.start("a@r", None, lambda: True)[0] for found in (one, other)]
        assert len(set(names)) == 2
        assert "" not in names
        assert one.start("a@r", None, lambda: False) == ("", None)
    assert Resumption().start("a@r", None, lambda: True) == ("", None)
    journal.close()


def test_groups_are_taken_once():
    resumption = Resumption(CollectorState(0, (GroupState(7, "b", 0), GroupState(3, "a", 0))))
    assert [group.task for group in resumption.groups] == ["a", "b"]
    assert resumption.take(3) == GroupState(3, "a", 0)
    assert resumption.take(3) is resumption.take(4) is None
    assert [group.label for group in resumption.groups] == [7]


def test_a_journal_survives_a_line_that_was_cut_off(tmp_path, caplog):
    path = tmp_path / "runs" / "effects"
    journal = EffectJournal(path)
    journal.mark("t/0.1@a", 3)
    journal.mark("t/0.1@a", 1)
    assert journal.last_turn("t/0.1@a") is None  # only earlier processes count
    journal.close()
    with path.open("a") as file:
        file.write('["t/0.2@')
    for number in itertools.count(4):
        again = EffectJournal(path)
        assert again.key == journal.key
        assert [again.last_turn(name) for name in ("t/0.1@a", "t/0.2@")] == [number - 1, None]
        assert caplog.text.count("was cut off") == number - 3
        if number == 6:
            break
        again.mark("t/0.1@a", number)
        again.close()
    again.close()


def test_another_file_is_no_journal(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("my notes\n")
    with pytest.raises(ValueError, match=r"notes\.txt is no journal of effects"):
        EffectJournal(path)
    assert path.read_text() == "my notes\n"


def test_two_processes_do_not_share_a_journal(tmp_path):
    path = tmp_path / "effects"
    locks = "f = open(sys.argv[1], 'a'); fcntl.lockf(f, fcntl.LOCK_EX)"
    holds = f"import fcntl, sys; {locks}; print(1, flush=True); input()"
    with started(
        [sys.executable, "-c", holds, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        with pytest.raises(RuntimeError, match="open in another process"):
            EffectJournal(path)
        process.kill()
    EffectJournal(path).close()


def test_calls_do_not_run_if_the_journal_cannot_be_written(tmp_path):
    journal = EffectJournal(tmp_path / "effects")
    journal.close()
    journal.close()
    other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)  # gets the number of the closed handle
    with pytest.raises(InfrastructureError, match="cannot be written: it is closed"):
        journal.mark("t/0.0", 0)
    assert os.pread(other, 100, 0) == b""
    os.close(other)


class Plain(Tool):
    """A tool with given effects."""

    description = "Do something."
    input_schema: ClassVar = {"type": "object", "properties": {}}

    def __init__(self, name, effects):
        self.name, self.effects = name, effects

    async def run(self, args, ctx):
        return "done"


def test_tools_that_write_or_run_alone_have_effects():
    tools = [
        Plain("alone", Effects.EXCLUSIVE),
        Plain("pure", None),
        Plain("reads", Effects(reads=["file"])),
        Plain("writes", Effects(writes=["file"])),
    ]
    bound = Dispatcher(tools).bound
    assert [name for name, one in bound.items() if may_have_effects([one], None)] == ["alone", "writes"]
    assert not may_have_effects(bound.values(), frozenset({"pure", "reads"}))
    assert may_have_effects(bound.values(), frozenset({"pure", "writes"}))
