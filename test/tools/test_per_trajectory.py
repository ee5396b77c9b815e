"""What tools share within a trajectory is created once and dropped with its last user."""

import pickle

from torchrl_agentic.tools.base import current_session
from torchrl_agentic.tools.per_trajectory import PerTrajectory


def test_tools_of_one_trajectory_share_one_instance():
    shared = PerTrajectory[list[str]]()
    first, second = shared.join("t", list), shared.join("t", list)
    other = shared.join("u", list)
    assert first.value is second.value
    assert first.value is not other.value
    assert list(shared) == [[], []]


def test_last_user_closes_the_shared_instance_and_the_next_creates_one():
    shared = PerTrajectory[object]()
    first, second = shared.join("t", object), shared.join("t", object)
    assert [first.leave(), second.leave()] == [False, True]
    assert len(shared) == 0
    assert shared.join("t", object).value is not first.value


def test_sessions_of_one_name_share_nothing():
    shared = PerTrajectory[object]()
    found = []
    for session in (object(), object()):
        token = current_session.set(session)
        found.append(shared.join("0.0", object).value)
        current_session.reset(token)
    assert found[0] is not found[1]


def test_equal_owners_are_distinguished_by_identity():
    shared = PerTrajectory[object]()
    one, other = [1], [1]
    values = [shared.join("t", object, owner=owner).value for owner in (one, other, one)]
    assert values[0] is values[2]
    assert values[0] is not values[1]


def test_shared_state_is_not_pickled():
    shared = PerTrajectory[list[str]]()
    shared.join("t", list)
    assert len(pickle.loads(pickle.dumps(shared))) == 0
