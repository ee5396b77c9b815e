"""A value that belongs to a process is seen by that process alone."""

import os
import pickle

import pytest

from torchrl_agentic.limits.process_bound import ProcessBound


def test_the_process_that_set_a_value_finds_it_until_it_is_cleared():
    bound = ProcessBound[str]()
    assert bound.get() is None
    assert bound.set("here") == bound.get() == "here"
    bound.clear()
    assert bound.get() is None


def test_no_value_arrives_with_a_pickled_copy():
    bound = ProcessBound[object]()
    bound.set(lambda: None)  # what could not be pickled is left behind too
    assert pickle.loads(pickle.dumps(bound)).get() is None


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_finds_no_value_and_may_set_its_own():
    bound = ProcessBound[str]()
    bound.set("parent")
    child = os.fork()
    if child == 0:
        os._exit(0 if bound.get() is None and bound.set("child") == bound.get() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert bound.get() == "parent"
