"""Groups that left in batches: what a recorder writes of them, and how they are read."""

import json
import logging
import pickle

from helpers.record_strategies import record, turn
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic.messages import Message, Turn
from torchrl_agentic.records import (
    BadLine,
    Dump,
    GroupMember,
    GroupRecord,
    Groups,
    Origin,
    Recorder,
    Recording,
    TrajectoryHook,
    as_hook,
    question_of,
    read_groups,
    read_records,
)
from torchrl_agentic.records.record import QUESTION_CHARS, plain_text, question_in

texts = st.text(st.characters(), max_size=8)
numbers = st.floats(-1e9, 1e9)
groups = st.builds(
    GroupRecord,
    st.integers(0, 10**6),
    texts,
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.lists(st.builds(GroupMember, texts, numbers, numbers), max_size=4).map(tuple),
    st.integers(0, 10**6),
    texts,
)


def group(number=0, *names, batch=0):
    members = tuple(GroupMember(name, 1.0, 0.5) for name in names or (f"t/{number}.0", f"t/{number}.1"))
    return GroupRecord(number, "t", batch, 0, members)


def steps(folder):
    return [(found.number, found.step) for found in read_groups(folder)]


@given(groups)
def test_a_group_is_read_as_it_was_written(made):
    assert GroupRecord.from_json(json.loads(json.dumps(made.to_json()))) == made


def test_groups_lie_beside_the_trajectories_and_are_none(tmp_path):
    with Recorder(tmp_path, run="r1") as recorder:
        recorder.write(record(trajectory="t/0.0"))
        recorder.group_left(group())
    (found,) = read_groups(tmp_path)
    assert (found.run, found.members[1].name) == ("r1", "t/0.1")
    assert [one.trajectory for one in read_records(tmp_path)] == ["t/0.0"]
    with Dump(tmp_path) as dump:
        assert [file.name for file in dump.files] == ["0"]


def test_a_batch_belongs_to_the_step_of_the_update_after_it(tmp_path):
    with Recorder(tmp_path / "before") as recorder:  # the step is set before a batch is asked for
        for step in range(3):
            recorder.step = step
            recorder.group_left(group(step, batch=step))
            recorder.weights_updated()
    with Recorder(tmp_path / "after") as recorder:  # it is set once the batch is there
        for step in range(3):
            recorder.group_left(group(step, batch=step))
            recorder.step = step
            recorder.weights_updated()
    assert steps(tmp_path / "before") == steps(tmp_path / "after") == [(0, 0), (1, 1), (2, 2)]


def test_without_updates_a_batch_belongs_to_the_step_at_which_it_left(tmp_path):
    with Recorder(tmp_path) as recorder:
        for step in range(3):
            recorder.step = step
            recorder.group_left(group(2 * step, batch=step))
            recorder.group_left(group(2 * step + 1, batch=step))
    assert steps(tmp_path) == [(number, number // 2) for number in range(6)]


def test_flush_writes_groups_that_wait_for_an_update(tmp_path):
    recorder = Recorder(tmp_path)
    recorder.group_left(group())
    assert steps(tmp_path) == []
    recorder.flush()
    assert steps(tmp_path) == [(0, 0)]
    recorder.close()


def test_a_copy_of_a_recorder_writes_no_group_of_the_original(tmp_path):
    with Recorder(tmp_path) as recorder:
        recorder.group_left(group())
        pickle.loads(pickle.dumps(recorder)).close()
        assert steps(tmp_path) == []


def test_groups_are_found_by_run_and_name_as_the_file_grows(tmp_path):
    found = Groups(tmp_path)
    assert not found.refresh()
    with Recorder(tmp_path, run="a") as recorder:
        recorder.group_left(group())
    assert found.refresh()
    assert not found.refresh()
    with found.path.open("a") as file:
        file.write('{"broken": 1}\n')
        line = json.dumps({**group(7).to_json(), "run": "b"})
        file.write(line[:20])
        file.flush()
        assert found.refresh()
        assert found.place("b", "t/7.0") is None
        file.write(line[20:] + "\n")
    assert found.refresh()
    assert found.place("b", "t/7.0")[0].number == 7
    assert found.place("a", "t/0.1")[1] == GroupMember("t/0.1", 1.0, 0.5)
    assert found.place("b", "t/0.1") is None
    assert len(found) == 4


def test_a_rewritten_file_is_read_again(tmp_path):
    found = Groups(tmp_path)
    for number in (1, 2):
        found.path.write_text(json.dumps(group(number).to_json()) + "\n" * number)
        assert found.refresh() is True or number == 1
    found.path.write_text("")
    found.refresh()
    assert len(found) == 0


def test_groups_of_one_file_lie_in_its_folder(tmp_path):
    with Recorder(tmp_path / "all.jsonl", run="a") as recorder:
        recorder.write(record(trajectory="t/0.0"))
        recorder.group_left(group())
    found = Groups(tmp_path / "all.jsonl")
    found.refresh()
    assert found.place("a", "t/0.0") is not None


def test_bad_lines_are_named(tmp_path):
    lines = ["", "nonsense", json.dumps({**group().to_json(), "schema_version": 9})]
    bad = {**group().to_json(), "members": [{"name": "t", "reward": 1.0, "advantage": "nan"}]}
    (tmp_path / "groups.jsonl").write_text("\n".join([*lines, json.dumps(bad), "[]"]))
    found = list(read_groups(tmp_path))
    assert [one.number for one in found if isinstance(one, BadLine)] == [2, 3, 4, 5]
    assert "reads version 2" in found[1].reason
    assert "finite" in found[2].reason


def test_all_hooks_hear_of_groups_and_updates_and_a_broken_one_costs_nothing(caplog):
    class Heard(TrajectoryHook):
        def __init__(self):
            self.said = []

        def begin(self, trajectory, row=0):
            said = self.said

            class Kept(Recording):
                def set_origin(self, origin):
                    said.append(origin)

            return Kept()

        def group_left(self, group):
            self.said.append(group.number)

        def weights_updated(self):
            self.said.append("updated")

    class Broken(TrajectoryHook):
        def group_left(self, group):
            raise OSError("full")

    heard = Heard()
    hook = as_hook([Broken(), heard])
    with caplog.at_level(logging.ERROR):
        hook.group_left(group(5))
        hook.weights_updated()
        hook.begin("t").set_origin(Origin("t", 5, 0))
    assert heard.said == [5, "updated", Origin("t", 5, 0)]
    assert "group 5" in caplog.text


def test_an_appending_recorder_warns_of_another_run_beside_its_dump(tmp_path, caplog):
    with Recorder(tmp_path, run="a") as recorder:
        recorder.write(record(trajectory="0.0"))
    with caplog.at_level(logging.WARNING), Recorder(tmp_path, run="b", step=0) as recorder:
        recorder.write(record(trajectory="0.0"))
    assert "run 'a'" in caplog.text
    found = list(read_records(tmp_path))
    assert [(one.run, one.trajectory) for one in found] == [("a", "0.0"), ("b", "0.0")]


def test_the_origin_of_a_trajectory_is_recorded(tmp_path):
    with Recorder(tmp_path) as recorder:
        recording = recorder.begin("t/4.1", 1)
        recording.set_origin(Origin("t", 4, 1))
        recording.record_turn(turn())
        recording.set_origin(Origin("t", 4, 1, (2, 3), 1.5))
        recording.finish("no_calls")
    (found,) = read_records(tmp_path)
    assert found.origin == Origin("t", 4, 1, (2, 3), 1.5)
    with Dump(tmp_path) as dump:
        dump.files[0].scan()
        summary = dump.files[0].summary(0)
    assert (summary.origin, summary.run, summary.question) == (found.origin, recorder.run, "What?")
    assert summary == found.summary


words = st.text(st.characters(codec="utf-8", exclude_categories=("Cc",)), max_size=300)
prompts = st.lists(st.tuples(st.sampled_from(["system", "user"]), words), min_size=1, max_size=4)


@given(prompts)
def test_a_question_is_one_short_line_and_the_same_from_messages_and_from_text(prompt):
    messages = [Message(role, f"-{text}") for role, text in prompt]
    question = question_of(messages)
    assert len(question) <= QUESTION_CHARS
    assert question.split() == question.split(" ") or question == ""
    if any(role == "user" for role, _ in prompt):
        assert question_in(plain_text(messages)) == question


def test_a_question_is_the_last_one_of_the_user():
    shown = [Message("user", "1 + 1?"), Message("assistant", "2"), Message("user", "2 + \n 2?")]
    assert question_of([Message("system", "Add."), *shown]) == "2 + 2?"
    assert question_of([Message("input", "Some text")]) == "Some text"
    assert question_of([]) == ""


def test_a_question_cut_inside_of_a_secret_shows_none_of_it(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "abcdefghijkl")
    asked = "x" * (QUESTION_CHARS - 7) + "abcdefghijkl"
    first = Turn("t", 0, Message("assistant", "ok"), turn().outcome, (), (Message("user", asked),))
    with Recorder(tmp_path) as recorder:
        recorder.write(record(first))
    assert "abcdef" not in (tmp_path / "0.jsonl").read_text()
