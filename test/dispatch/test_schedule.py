"""The order of calls is the one that DESIGN section 5 defines."""

from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_agentic.dispatch.turn import conflict, dependencies
from torchrl_agentic.tools.base import Effects

_names = st.frozensets(st.sampled_from("abc"), max_size=2)
_effects = st.builds(Effects, _names, _names, st.sampled_from([False, False, False, True]))


def _closure(waits: list[set[int]]) -> list[set[int]]:
    closed: list[set[int]] = []
    for direct in waits:
        closed.append(set(direct).union(*(closed[index] for index in direct)))
    return closed


def _must_not_overlap(first: Effects, second: Effects) -> bool:
    """The definition: one writes a resource that the other reads or writes, or one is exclusive."""
    for one, other in ((first, second), (second, first)):
        if one.exclusive or any(name in other.reads or name in other.writes for name in one.writes):
            return True
    return False


@settings(max_examples=10 * settings.default.max_examples, deadline=None)
@given(st.lists(_effects, max_size=12))
def test_calls_wait_for_exactly_the_conflicting_ones(effects: list[Effects]):
    brute = [{j for j in range(i) if _must_not_overlap(effects[j], effects[i])} for i in range(len(effects))]
    found = dependencies(effects)
    assert len(found) == len(effects)
    assert all(index < number for number, direct in enumerate(found) for index in direct)
    assert _closure(found) == _closure(brute)


@given(_effects, _effects)
def test_conflict_matches_its_definition_and_is_symmetric(first: Effects, second: Effects):
    assert conflict(first, second) == conflict(second, first) == _must_not_overlap(first, second)


def test_pure_calls_wait_for_nothing():
    assert dependencies([Effects.PURE] * 5) == [set()] * 5


def test_readers_overlap_and_a_writer_waits_for_all_of_them():
    read, write = Effects(reads=["x"]), Effects(writes=["x"])
    assert dependencies([read, read, write, read]) == [set(), set(), {0, 1}, {2}]
