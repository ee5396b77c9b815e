"""Failed trajectories are replaced a bounded number of times; then their groups are dropped."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic.collectors.failures import OUTAGE_S, FailureKind, FailurePolicy, failure_kind
from torchrl_agentic.errors import InfrastructureError, InvalidTask, SandboxError, ToolFailed, UserFailed

KINDS: tuple[FailureKind, ...] = get_args(FailureKind)


def test_each_member_is_replaced_so_many_times_and_then_the_group_is_dropped():
    policy = FailurePolicy("replace")
    assert [policy.fail(7, 0, "engine").action for _ in range(3)] == ["replace"] * 3
    assert policy.fail(7, 1, "timeout").action == "replace", "another member has its own replacements"
    assert policy.fail(8, 0, "engine").action == "replace", "so has another group"
    verdict = policy.fail(7, 0, "crash")
    assert verdict.action == "drop"
    assert verdict.reason == "one of its trajectories was replaced 3 times"
    assert (policy.replaced, policy.dropped) == (5, 1)
    assert policy.failures == {"engine": 4, "timeout": 1, "crash": 1}
    assert policy.infrastructure == 5


def test_a_task_that_cannot_be_used_is_not_tried_again():
    assert FailurePolicy("replace").fail(0, 0, "task").action == "drop"


@pytest.mark.parametrize("kind", KINDS)
def test_drop_and_raise_replace_nothing(kind: FailureKind):
    for on_failure in ("drop", "raise"):
        policy = FailurePolicy(on_failure)
        assert policy.fail(0, 0, kind).action == on_failure
        assert (policy.replaced, policy.dropped, policy.failures[kind]) == (0, on_failure == "drop", 1)


def test_a_group_that_is_forgotten_has_all_its_replacements_again():
    policy = FailurePolicy("replace", max_replacements=1)
    assert policy.fail(0, 0, "engine").action == "replace"
    policy.forget(0)
    policy.forget(0)
    assert policy.fail(0, 0, "engine").action == "replace"
    assert policy.fail(0, 0, "engine").action == "drop"


def test_groups_that_all_fail_end_in_the_error_instead_of_a_loop_without_end():
    kinds = itertools.cycle(["engine", "timeout", "reward"])  # none of them often enough
    policy = FailurePolicy("drop", max_drops_in_a_row=3)
    actions = [policy.fail(group, 0, next(kinds)).action for group in range(2)]
    policy.succeed()
    actions += [policy.fail(group, 0, next(kinds)).action for group in range(2, 5)]
    assert actions == ["drop"] * 5
    verdict = policy.fail(5, 0, "engine")
    assert verdict.action == "raise"
    assert verdict.reason == "3 groups were dropped in a row, and no trajectory succeeded"
    endless = FailurePolicy("drop", max_failures=None)
    assert {endless.fail(group, 0, "reward").action for group in range(1000)} == {"drop"}


@pytest.mark.parametrize("on_failure", ["replace", "drop"])
@pytest.mark.parametrize("kind", ["reward", "crash", "task"])
def test_a_mistake_that_every_trajectory_makes_ends_the_collector(on_failure: Any, kind: FailureKind):
    policy = FailurePolicy(on_failure, max_failures=16)
    actions = [policy.fail(number // 8, number % 8, kind, KeyError).action for number in range(15)]
    assert "raise" not in actions
    verdict = policy.fail(1, 7, kind, KeyError)
    assert verdict.action == "raise"
    assert verdict.reason == "16 trajectories failed with KeyError, and none succeeded"


def test_the_failures_of_a_single_task_end_nothing():
    policy = FailurePolicy("replace", max_replacements=100)
    assert {policy.fail(3, number % 8, "reward", KeyError).action for number in range(100)} == {"replace"}


def test_infrastructure_may_fail_for_two_minutes():
    now = [0.0]
    policy = FailurePolicy("replace", max_replacements=100, clock=lambda: now[0])
    actions = []
    for number in range(130):
        actions.append(policy.fail(number % 3, 0, "tool", RuntimeError).action)
        now[0] += 1.0
    assert actions.index("raise") == 120
    policy.succeed()
    assert policy.fail(0, 0, "tool", RuntimeError).action == "replace"


@given(
    st.integers(0, 4),
    st.integers(1, 4),
    st.sampled_from(["replace", "drop", "raise"]),
    st.integers(),
)
def test_no_group_gets_more_replacements_than_it_may(
    replacements: int, drops: int, on_failure: Any, seed: int
):
    rng = random.Random(seed)
    policy = FailurePolicy(
        on_failure, max_replacements=replacements, max_failures=1000, max_drops_in_a_row=drops
    )
    actions: Counter[str] = Counter()
    replaced: Counter[tuple[int, int]] = Counter()
    in_a_row = 0
    groups, following = list(range(3)), 3
    for _ in range(200):
        if rng.random() < 0.3:
            policy.succeed()
            in_a_row = 0
            continue
        group, member = rng.choice(groups), rng.randrange(3)
        action = policy.fail(group, member, rng.choice(KINDS)).action
        actions[action] += 1
        if action == "replace":
            replaced[group, member] += 1
            assert replaced[group, member] <= replacements
            assert on_failure == "replace"
        elif action == "drop":
            groups[groups.index(group)] = following
            following += 1
            in_a_row += 1
            assert in_a_row <= drops
        else:
            assert on_failure == "raise" or in_a_row == drops
    assert (policy.replaced, policy.dropped) == (actions["replace"], actions["drop"])
    assert policy.failures.total() == actions.total()
    infrastructure = ("timeout", "engine", "tool", "user")
    assert policy.infrastructure == sum(policy.failures[kind] for kind in infrastructure)


@given(st.data(), st.integers(1, 20))
def test_only_failures_of_one_type_in_several_groups_without_a_success_end_a_collector(data, bound: int):
    """The model: the failures of each type since the last success, and the groups that they are in."""
    now = 0.0
    policy = FailurePolicy("replace", max_replacements=10**6, max_failures=bound, clock=lambda: now)
    since: dict[Any, list[tuple[int, float]]] = {}
    for _ in range(data.draw(st.integers(0, 100))):
        now += data.draw(st.sampled_from([0.0, 1.0, 60.0]))
        if data.draw(st.integers(0, 9)) == 0:
            policy.succeed()
            since.clear()
            continue
        group, kind = data.draw(st.integers(0, 2)), data.draw(st.sampled_from(KINDS))
        error, is_overtaken = data.draw(st.sampled_from([KeyError, ValueError])), data.draw(st.booleans())
        verdict = policy.fail(group, 0, kind, error, is_overtaken=is_overtaken)
        is_lost = kind in ("timeout", "engine", "tool", "user")
        seen = since.setdefault(kind if is_lost else (kind, error), [])
        if not is_overtaken:
            seen.append((group, now))
        is_raised = not is_overtaken and len(seen) >= bound and len({group for group, _ in seen}) > 1
        is_raised = is_raised and (not is_lost or now - seen[0][1] >= OUTAGE_S)
        assert (verdict.action == "raise") == is_raised
        if verdict.action == "drop":  # a task that cannot be used
            assert kind == "task"


@pytest.mark.parametrize(
    ("error", "phase", "kind"),
    [
        (InfrastructureError("gone"), "trajectory", "engine"),
        (SandboxError("gone"), "reward", "engine"),
        (ToolFailed("no world"), "task", "tool"),
        (UserFailed("no reply"), "trajectory", "user"),
        (InvalidTask("no answer"), "reward", "task"),
        (InvalidTask("no answer"), "trajectory", "task"),
        (TimeoutError(), "trajectory", "timeout"),
        (TimeoutError(), "reward", "reward"),
        (ValueError("prompt too long"), "task", "task"),
        (ValueError("bug"), "reward", "reward"),
        (KeyError("bug"), "trajectory", "crash"),
    ],
)
def test_infrastructure_is_told_from_mistakes_in_code_and_tasks(error: BaseException, phase: Any, kind: str):
    assert failure_kind(error, phase) == kind


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"on_failure": "retry"}, "on_failure is 'replace', 'drop' or 'raise'; got 'retry'"),
        ({"on_failure": "drop", "max_replacements": -1}, "max_replacements must be 0 or more"),
        ({"on_failure": "drop", "max_drops_in_a_row": 0}, "max_drops_in_a_row must be 1 or more"),
    ],
)
def test_wrong_policies_are_refused(arguments: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        FailurePolicy(**arguments)
