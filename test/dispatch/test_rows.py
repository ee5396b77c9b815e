"""Sessions by row: names, clones, pickles and forks."""

import contextlib
import os
import pickle

import pytest

from torchrl_agentic.dispatch import SessionRows
from torchrl_agentic.dispatch.event_loop import run
from torchrl_agentic.messages import ParsedCall
from torchrl_agentic.tools.base import Tool


class Counter(Tool):
    """Counts its calls, for each trajectory apart."""

    name = "count"
    description = "Count."

    def __init__(self) -> None:
        self.calls = 0
        self.events: list[str] = []

    def session(self, trajectory):
        @contextlib.asynccontextmanager
        async def opened():
            live = Counter()
            self.events.append("open")
            yield live
            self.events.append("close")

        return opened()

    async def run(self, args, ctx):
        self.calls += 1
        return str(self.calls)


@pytest.fixture
def counter():
    return Counter()


@pytest.fixture
def rows(counter):
    rows = SessionRows([counter], {}, dict)
    yield rows
    rows.close()


def call(rows: SessionRows, row: int) -> str:
    return run(rows.session(row).run([ParsedCall("count", {}, "c")]))[0].text


def test_each_row_has_a_session_until_its_trajectory_ends(rows, counter):
    assert [call(rows, 0), call(rows, 0), call(rows, 1)] == ["1", "2", "1"]
    name = rows.session(0).trajectory
    assert rows.end([0, 7]).keys() == {0}
    assert counter.events == ["open", "open", "close"]
    assert call(rows, 0) == "1"
    assert rows.session(0).trajectory != name
    assert call(rows, 1) == "2"


def test_finished_rows_keep_their_names(rows, counter):
    call(rows, 0)
    name = rows.session(0).trajectory
    rows.finish_rows([0, 5])
    assert counter.events == ["open", "close"]
    assert rows.session(0).trajectory == name


def test_numbers_of_trajectories_differ(rows):
    rows.session(0), rows.session(1)
    first = dict(rows.ids)
    assert first[0] != first[1]
    rows.end([0])
    rows.session(0)
    assert rows.ids[0] != first[0]
    assert rows.ids[1] == first[1]


def test_a_clone_shares_tools_and_no_sessions(rows, counter):
    call(rows, 0)
    rows.state["known"] = True
    clone = rows.clone()
    assert not clone.sessions
    assert not clone.state
    assert call(clone, 0) == "1"
    assert not clone.close()  # the tools belong to the original
    assert call(rows, 0) == "2"
    clone.tools.append(Counter())
    assert rows.tools == [counter]


def test_a_pickle_takes_tools_and_options_along(rows):
    call(rows, 0)
    other = pickle.loads(pickle.dumps(rows))
    assert not other.is_open
    assert call(other, 0) == "1"
    assert other.session(0).trajectory != rows.session(0).trajectory
    assert other.close()


def test_fork_does_not_close_sessions_of_its_parent(rows):
    call(rows, 0)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        answer = f"{len(rows.sessions)} {call(rows, 0)}"
        os.write(write, answer.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        assert pipe.read() == "0 1"
    os.waitpid(child, 0)
    assert call(rows, 0) == "2"


def test_tools_find_the_owner(counter):
    class Owner:
        pass

    owner = Owner()
    rows = SessionRows([counter], {}, dict, owner=owner)
    assert rows.dispatcher.compose.__class__ is Owner
    other = pickle.loads(pickle.dumps(rows))
    assert other.dispatcher.compose is None
    copy = pickle.loads(pickle.dumps(rows))
    copy.bind(owner)
    assert copy.dispatcher.compose.__class__ is Owner


def test_closed_rows_can_be_used_again(rows):
    call(rows, 0)
    assert rows.close()
    assert call(rows, 0) == "1"
