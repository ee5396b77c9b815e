"""Samples of one prompt: groups, advantages, and the first point where two differ."""

import math

import pytest
import torch
from helpers.record_strategies import record, turn
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic import group_advantage
from torchrl_agentic.messages import Message
from torchrl_agentic.records import GroupMember, GroupRecord, Groups, Origin, Recorder
from torchrl_agentic.viewer.samples import (
    BEFORE_CHARS,
    SaidMessage,
    SampleGroups,
    advantages,
    common_length,
    first_difference,
    said_after_prompt,
)

scores = st.floats(-1e3, 1e3)
odd = st.sampled_from([None, math.nan, math.inf, -math.inf, 1e200])


@given(st.lists(scores, min_size=1, max_size=16))
def test_advantages_are_those_of_a_batch(found):
    batch = group_advantage(torch.tensor(found, dtype=torch.float64), len(found)).flatten().tolist()
    assert advantages(found) == pytest.approx(batch, rel=1e-5, abs=1e-6)


@given(scores, st.integers(1, 16))
def test_equal_scores_have_no_advantages(score, count):
    assert advantages([score] * count) == [0.0] * count


@given(st.lists(scores | odd, max_size=16))
def test_scores_that_cannot_be_compared_do_not_change_the_other_advantages(found):
    is_known = [score is not None and abs(score) <= 1e100 for score in found]
    made = advantages(found)
    assert [one is not None for one in made] == is_known
    only = advantages([score for score, known in zip(found, is_known, strict=True) if known])
    assert [one for one in made if one is not None] == only


def summaries(scores, *, group=None, run="r", step=0, prompt="What?", reasons=(), left=()):
    """Return summaries of the samples of a prompt, with the advantages of a batch by index."""
    made = []
    for index, score in enumerate(scores):
        first = turn("a")
        asked = type(first)(first.trajectory, 0, first.message, first.outcome, (), (Message("user", prompt),))
        reason = reasons[index] if index < len(reasons) else "no_calls"
        one = record(
            asked,
            request_id=f"{index}",
            trajectory=f"t/{index}",
            score=score,
            step=step,
            run=run,
            termination_reason=reason,
            origin=Origin("t", group, None if group is None else index),
        ).summary
        made.append(one)
    if left:
        groups = Groups("/nowhere")
        members = tuple(GroupMember(f"t/{index}", 0.0, gain) for index, gain in left)
        groups.add(GroupRecord(group or 0, "t", 0, 0, members, step + 1, run))
        made = [groups.located(one) for one in made]
    return made


def grouped(*some):
    groups = SampleGroups()
    for number, summary in enumerate(some):
        groups.add(number, summary)
    return list(groups)


def test_samples_of_a_prompt_in_a_step_are_a_group():
    one, other = summaries([1, 0]), summaries([1, 1], prompt="Who?")
    found = grouped(*one, *other, *summaries([0.5], step=1), *summaries([0.5], run="s"))
    assert [group.numbers for group in found] == [(0, 1), (2, 3), (4,), (5,)]
    assert [group.is_flat for group in found] == [False, True, False, False]
    assert (found[0].mean, found[0].spread) == (0.5, 0.5)
    assert found[0].advantages == pytest.approx((0.9998, -0.9998), abs=1e-4)
    assert not found[0].is_recorded


def test_groups_of_a_collector_are_told_apart_by_number_whatever_the_step():
    first, second = summaries([1, 0], group=1), summaries([0, 1], group=2)
    later = summaries([1, 0], group=1, step=3)
    found = grouped(first[0], second[1], second[0], later[1])
    assert [group.numbers for group in found] == [(0, 3), (2, 1)]


def test_failed_samples_have_no_advantage_and_move_no_other():
    found = grouped(*summaries([1, 0, -99], reasons=["no_calls", "max_turns", "failed"]))
    assert found[0].advantages == pytest.approx((0.9998, -0.9998, None), abs=1e-4)


def test_advantages_of_the_batch_count_where_they_are_known():
    samples = summaries([1, 0, 0.7], group=1, left=[(0, 0.25), (1, -0.25)])
    (found,) = grouped(*samples)
    assert found.is_recorded
    assert found.advantages == (0.25, -0.25, None)
    assert (found.mean, found.step) == (0.5, 1)


def test_of_a_sample_that_a_resumed_run_repeats_the_last_one_counts():
    samples = summaries([1, 0], group=1, left=[(0, 0.25), (1, -0.25)])
    (found,) = grouped(*samples, samples[1])
    assert found.advantages == (0.25, None, -0.25)
    assert found.mean == 0.5


texts = st.text("ab", max_size=12)
messages = st.lists(
    st.builds(SaidMessage, st.integers(0, 3), st.sampled_from(["assistant", "tool"]), texts), max_size=5
)


@given(messages)
def test_a_trajectory_does_not_differ_from_itself(said):
    assert first_difference(said, said) is None


@given(messages, messages)
def test_both_say_the_same_before_the_first_difference_and_not_there(one, other):
    found = first_difference(one, other)
    plain = [[(said.role, said.text) for said in some] for some in (one, other)]
    if found is None:
        assert plain[0] == plain[1]
        return
    n = next(n for n in range(6) if plain[0][n : n + 1] != plain[1][n : n + 1])
    assert plain[0][:n] == plain[1][:n]
    if n >= len(other):
        assert (found.role, found.text, found.other) == ("", "", one[n].text)
        return
    assert (found.turn, found.role) == (other[n].turn, other[n].role)
    assert other[n].text[: found.at] + found.text == other[n].text
    assert other[n].text[: found.at].endswith(found.before)
    assert len(found.before) == min(found.at, BEFORE_CHARS)
    if n < len(one) and one[n].role == other[n].role:
        assert one[n].text[: found.at] + found.other == one[n].text
        assert found.text[:1] != found.other[:1]


@given(texts, texts)
def test_the_common_length_is_the_longest(one, other):
    length = common_length(one, other)
    assert one[:length] == other[:length]
    assert one[length : length + 1] != other[length : length + 1] or one == other


def test_messages_after_the_prompt_are_those_of_the_turns():
    first, last = turn("one", index=0), turn("two", index=1)
    assert said_after_prompt(record(first, last)) == [
        SaidMessage(0, "assistant", "one"),
        SaidMessage(1, "assistant", "two"),
    ]


def test_groups_of_a_dump_give_step_and_advantage(tmp_path):
    with Recorder(tmp_path, run="r") as recorder:
        recorder.group_left(GroupRecord(0, "t", 0, 0, (GroupMember("t/0", 1.0, 0.5),)))
        recorder.step = 7
        recorder.weights_updated()
    groups = Groups(tmp_path)
    groups.refresh()
    (one,) = summaries([1.0])
    assert (groups.located(one).step, groups.located(one).advantage) == (7, 0.5)
    (other,) = summaries([1.0], run="s")
    assert groups.located(other) is other
