"""The decisions of a pool: which engine gets a request, which are out, and how far versions are apart."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic.engines.pool_state import MAX_BLAMED, PoolState


def state_of(*limits, **options):
    return PoolState(limits or (4, 4, 4), **options)


def began(state, key, now=0.0, avoid=()):
    """Begin a request where the state says, and return its ticket."""
    number = state.choose(key, now, avoid)
    assert isinstance(number, int), number
    return state.begin(number, key)


def finish(state, ticket, version=None):
    state.succeed(ticket, ticket.version if version is None else version)
    state.end(ticket)


def lose(state, number, now=0.0):
    """Fail a request of a new trajectory on one engine."""
    ticket = state.begin(number, f"lost on {number} at {now}")
    went = state.fail(ticket, now, "gone")
    state.end(ticket)
    assert went
    return ticket


def phases(state):
    return [one.phase for one in state.members]


class TestRouting:
    def test_new_trajectories_go_to_the_smallest_share_and_then_to_the_first(self):
        state = state_of(4, 8, 4)
        assert [began(state, f"t{n}").number for n in range(8)] == [0, 1, 2, 1, 0, 1, 2, 1]

    def test_a_trajectory_stays_on_its_engine(self):
        state = state_of()
        first = began(state, "a")
        finish(state, first)
        others = [began(state, f"t{n}") for n in range(2)]
        assert [one.number for one in others] == [0, 1]
        assert began(state, "a").number == first.number == 0

    def test_a_full_engine_is_left_for_one_with_half_of_its_load(self):
        state = state_of(4, 4)
        finish(state, began(state, "a"))
        for number in range(4):
            state.begin(0, f"t{number}")
        for _ in range(2):
            assert state.choose("a", 0.0) == 1
            state.begin(1, "other")
        assert state.choose("a", 0.0) == 0, "the other has 2 of 4, and would have 3"

    def test_the_oldest_trajectory_is_forgotten(self):
        state = state_of(9, 9, max_keys=2)
        for key in "abac":
            state.begin(1, key)
        assert [state.choose(key, 0.0) for key in "abc"] == [1, 0, 1]


class TestHealth:
    def test_a_lost_engine_gets_nothing_before_its_time_and_then_one_trial(self):
        state = state_of(4, 4, retry_s=1.0)
        lose(state, 0)
        assert [began(state, f"t{n}", 0.9).number for n in range(3)] == [1, 1, 1]
        trial = began(state, "trial", 1.0)
        assert (trial.number, phases(state)) == (0, ["trial", "in"])
        assert began(state, "next", 1.0).number == 1
        assert state.succeed(trial, 0)
        assert phases(state) == ["in", "in"]
        assert state.choose("next but one", 1.0) == 0

    def test_a_trajectory_with_an_engine_is_no_trial(self):
        state = state_of(4, 4)
        state.begin(1, "a")
        lose(state, 0)
        assert (state.choose("a", 5.0), state.choose("b", 5.0)) == (1, 0)

    def test_pauses_double_until_their_bound_and_begin_anew_after_an_answer(self):
        state = state_of(4, retry_s=1.0, longest_retry_s=5.0)
        now, pauses = 0.0, []
        for _ in range(4):
            lose(state, 0, now)
            pauses.append(state.members[0].retry_at - now)
            now = state.members[0].retry_at
        assert pauses == [1.0, 2.0, 4.0, 5.0]
        finish(state, began(state, "trial", now))
        lose(state, 0, now)
        assert state.members[0].retry_at - now == 1.0

    def test_a_cancelled_trial_is_made_again(self):
        state = state_of(4)
        lose(state, 0)
        trial = began(state, "a", 1.0)
        assert state.choose("b", 1.0) == "wait"
        assert state.end(trial)
        assert state.choose("b", 1.0) == 0

    def test_requests_from_before_a_loss_say_nothing_about_the_engine(self):
        state = state_of(4)
        before = [began(state, f"t{n}") for n in range(3)]
        assert state.fail(before[0], 0.0, "gone")
        assert not state.fail(before[1], 0.0, "gone")
        trial = began(state, "trial", 1.0)
        assert not state.succeed(before[1], 0)
        assert phases(state) == ["trial"]
        finish(state, trial)
        assert not state.fail(before[2], 2.0, "gone")
        assert phases(state) == ["in"]
        assert state.members[0].failures == 0

    def test_one_trajectory_takes_out_two_engines_at_most(self):
        state, tried = state_of(4, 4, 4, 4), set()
        for _ in range(4):
            ticket = began(state, "poison", 0.0, tried)
            state.fail(ticket, 0.0, "no")
            state.end(ticket)
            tried.add(ticket.number)
        assert phases(state).count("out") == MAX_BLAMED
        assert state.choose("poison", 0.0, tried) is None
        finish(state, began(state, "poison", 0.0))
        ticket = began(state, "poison", 0.0)
        assert state.fail(ticket, 0.0, "no"), "an answer clears the trajectory"

    def test_no_engine_is_none_and_an_unusable_one_is_never_tried(self):
        state = state_of(4, 4)
        lose(state, 0)
        state.exclude(1, "wrong key")
        assert state.choose("a", 0.5) is None
        assert state.choose("a", 1.5) == 0
        state.exclude(0, "wrong key")
        assert state.choose("a", 1e9) is None
        assert state.due(1e9) == []

    def test_an_engine_that_brings_back_is_due_instead_of_tried(self):
        state = state_of(4, 4)
        state.members[0].brings_back = True
        lose(state, 0)
        assert (state.due(0.9), state.due(1.0), state.choose("a", 1.0)) == ([], [0], 1)
        state.begin_load(0)
        assert state.due(9.0) == []
        assert state.fail_load(0, 9.0, "still gone")
        assert (state.due(10.9), state.due(11.0)) == ([], [0])
        state.begin_load(0)
        assert state.end_load(0, 0, 11.0)
        assert phases(state) == ["in", "in"]


def roll(state):
    """Load the weights of an update into all engines, and return the order."""
    order = []
    state.begin_update()
    while (number := state.next_to_update()) is not None:
        order.append(number)
        state.begin_load(number)
        state.end_load(number, state.target, 0.0)
    state.end_update(is_done=True)
    return order


class TestUpdates:
    def test_an_engine_that_loads_gets_nothing_while_the_others_do(self):
        state = state_of(4, 4)
        state.begin(0, "a")
        state.begin_update()
        state.begin_load(0)
        assert [state.choose(key, 0.0) for key in "ab"] == [1, 1]
        state.end_load(0, 1, 0.0)
        assert [state.choose(key, 0.0) for key in "ab"] == [0, 1]

    def test_the_version_rises_when_all_have_it(self):
        state = state_of()
        assert (roll(state), state.version) == ([0, 1, 2], 1)
        assert [one.version for one in state.members] == [1, 1, 1]

    def test_a_lost_engine_misses_an_update_and_is_due(self):
        state = state_of()
        lose(state, 1)
        assert roll(state) == [0, 2]
        assert state.due(1.0) == [1]
        assert state.choose("a", 1.0) == 0, "no request is its trial"

    def test_weights_that_became_old_while_an_engine_came_back_do_not_count(self):
        state = state_of()
        lose(state, 1)
        roll(state)
        state.begin_load(1)
        roll(state)
        assert not state.end_load(1, 1, 5.0)
        assert (phases(state)[1], state.due(5.0)) == ("out", [1])
        state.begin_load(1)
        assert state.end_load(1, 2, 5.0)

    def test_an_engine_that_comes_back_during_an_update_gets_it_too(self):
        state = state_of(4, 4)
        roll(state)
        lose(state, 1)
        state.members[1].brings_back = True
        state.begin_load(1)
        state.begin_update()
        state.begin_load(0)
        assert state.end_load(1, 1, 5.0)
        assert state.next_to_update() == 1

    def test_if_all_are_out_all_are_tried_once(self):
        state = state_of(4, 4)
        for number in range(2):
            lose(state, number)
        state.begin_update()
        assert state.next_to_update() == 0
        state.begin_load(0)
        state.fail_load(0, 0.0, "gone")
        assert state.next_to_update() == 1
        state.begin_load(1)
        state.fail_load(1, 0.0, "gone")
        assert state.next_to_update() is None
        state.end_update(is_done=False)
        assert state.version == 0

    @pytest.mark.parametrize("max_skew", [0, 1])
    def test_new_weights_wait_for_the_old_ones_only_without_skew(self, max_skew):
        state = state_of(4, 4, max_skew=max_skew)
        old = state.begin(1, "old")
        state.begin_update()
        state.begin_load(0)
        state.end_load(0, 1, 0.0)
        assert state.choose("new", 0.0, {1}) == (0 if max_skew else "wait")
        state.begin_load(1)
        assert state.choose("new", 0.0) == (0 if max_skew else "wait"), "a request still runs"
        assert state.end(old)
        assert state.choose("new", 0.0) == 0

    def test_the_weights_of_a_trajectory_never_become_older(self):
        state = state_of(4, 4)
        state.begin_update()
        state.begin_load(0)
        state.end_load(0, 1, 0.0)
        ticket = began(state, "a")
        assert (ticket.number, ticket.version) == (0, 1)
        state.fail(ticket, 0.0, "gone", 1)
        state.end(ticket)
        assert state.choose("a", 0.0) == "wait"
        assert state.choose("b", 0.0) == 1
        state.begin_load(1)
        state.end_load(1, 1, 0.0)
        assert state.choose("a", 0.0) == 1


class Run:
    """A pool under random events, with what must hold after each."""

    def __init__(self, rng, max_skew):
        self.rng = rng
        count, is_remembered = rng.randint(1, 4), rng.random() < 0.7
        self.state = PoolState(
            [rng.randint(1, 4) for _ in range(count)],
            max_skew=max_skew,
            retry_s=rng.choice([0.5, 2.0]),
            longest_retry_s=8.0,
            max_keys=100 if is_remembered else 3,
        )
        for one in self.state.members:
            one.brings_back = rng.random() < 0.3
        self.now, self.max_skew, self.is_remembered = 0.0, max_skew, is_remembered
        self.open, self.loading, self.last, self.seen = [], {}, {}, set()
        self.has_success = False

    def ask(self):
        state, key = self.state, f"k{self.rng.randrange(8)}"
        if any(ticket.key == key for ticket in self.open):
            return
        found = state.choose(key, self.now)
        serving = [one for one in state.members if one.phase == "in" and not one.is_loading]
        if found is None:
            assert not any(one.phase in ("in", "trial") for one in state.members)
            return
        if found == "wait":
            is_trying = any(one.phase == "trial" for one in state.members)
            assert state.target is not None or is_trying
            return
        one = state.members[found]
        assert not one.is_loading
        if one.phase == "in" and key not in self.seen and state.target is None:
            assert (one.load, found) == min((other.load, other.number) for other in serving)
        if one.phase != "in":
            assert (one.phase, self.now >= one.retry_at) == ("out", True)
        self.seen.add(key)
        ticket = state.begin(found, key)
        if self.is_remembered:
            assert ticket.version >= self.last.get(key, 0)
        self.open.append(ticket)
        self.check_skew()

    def check_skew(self):
        """Check the versions that engines in service sample with at once."""
        serving = {
            one.version
            for one in self.state.members
            for ticket in self.open
            if ticket.number == one.number and ticket.epoch == one.epoch and ticket.loads == one.loads
        }
        assert not serving or max(serving) - min(serving) <= self.max_skew

    def answer(self):
        if self.open:
            ticket = self.open.pop(self.rng.randrange(len(self.open)))
            self.succeed(ticket)

    def succeed(self, ticket):
        self.state.succeed(ticket, ticket.version)
        self.state.end(ticket)
        self.last[ticket.key] = ticket.version

    def cancel(self):
        if self.open:
            self.state.end(self.open.pop(self.rng.randrange(len(self.open))))

    def fail(self):
        if self.open:
            ticket = self.open.pop(self.rng.randrange(len(self.open)))
            self.state.fail(ticket, self.now, "gone")
            self.state.end(ticket)

    def wait(self):
        self.now += self.rng.choice([0.1, 1.0, 10.0])

    def bring_back(self):
        for number in self.state.due(self.now):
            assert self.state.members[number].phase == "out"
            self.state.begin_load(number)
            self.loading[number] = self.state.version

    def update(self):
        state = self.state
        if state.target is None:
            state.begin_update()
            self.has_success = False
        elif (number := state.next_to_update()) is not None:
            state.begin_load(number)
            self.loading[number] = state.target
            # The engine aborts what runs, sooner or later.
            for ticket in [one for one in self.open if one.number == number]:
                if self.rng.random() < 0.8:
                    self.open.remove(ticket)
                    self.succeed(ticket)
        elif state.target not in self.loading.values():
            state.end_update(is_done=self.has_success)
            for one in state.members:
                assert one.phase != "in" or one.is_loading or one.version == state.version

    def end_load(self):
        if not self.loading:
            return
        number = self.rng.choice(sorted(self.loading))
        version = self.loading.pop(number)
        if self.rng.random() < 0.3:
            self.state.fail_load(number, self.now, "gone")
            return
        self.has_success |= version == self.state.target
        # Requests that ran until now end with the old weights.
        for ticket in [one for one in self.open if one.number == number]:
            self.open.remove(ticket)
            self.succeed(ticket)
        self.state.end_load(number, version, self.now)

    def settle(self):
        """Let everything end, and check that every engine can be in again."""
        state = self.state
        for _ in range(200):
            while self.open:
                self.answer()
            while self.loading:
                number, version = self.loading.popitem()
                self.has_success |= version == state.target
                state.end_load(number, version, self.now)
            if state.target is not None:
                self.update()
            self.bring_back()
            found = state.choose(f"new {self.now}", self.now)
            if isinstance(found, int):
                self.open.append(state.begin(found, f"new {self.now}"))
            self.now += 10.0
            if all(one.phase == "in" for one in state.members) and state.target is None:
                return
        raise AssertionError(state.members)


@given(seed=st.integers(0, 2**32), max_skew=st.sampled_from([0, 1]), size=st.integers(1, 400))
def test_whatever_happens_the_rules_hold_and_every_engine_comes_back(seed, max_skew, size):
    rng = random.Random(seed)
    run = Run(rng, max_skew)
    acts = [run.ask] * 5 + [run.answer] * 3 + [run.update] * 3 + [run.end_load] * 3
    acts += [run.cancel, run.fail, run.wait, run.bring_back]
    for _ in range(size):
        rng.choice(acts)()
        for one in run.state.members:
            assert one.running == sum(ticket.number == one.number for ticket in run.open)
            assert one.phase != "trial" or one.is_loading or one.running
    run.settle()


@given(st.lists(st.integers(1, 8), min_size=1, max_size=5), st.integers(0, 60))
def test_loads_of_new_trajectories_differ_by_one_request_at_most(limits, count):
    state = PoolState(limits)
    for number in range(count):
        began(state, f"t{number}")
    for one in state.members:
        for other in state.members:
            assert (one.running - 1) / one.limit <= other.load
