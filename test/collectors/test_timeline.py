"""`TimelineWriter` writes the spans of each batch beside a dump, and `read_timelines` reads them."""

import json
import stat

import pytest
from helpers.collector_runs import SetClock, one_batch, stats_of
from helpers.record_strategies import record
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic.collectors.timeline import BatchTimeline, TimelineRow, TimelineWriter, read_timelines
from torchrl_agentic.records import BadLine, Dump, Recorder, read_records
from torchrl_agentic.trajectory.span import Span

seconds = st.floats(-1e6, 1e9, allow_nan=False).map(lambda value: round(value, 6))
texts = st.text(st.characters(), max_size=8)


def spans(trajectory):
    counts = st.integers(0, 1000)
    return st.builds(
        Span,
        st.sampled_from(["admission", "engine", "tools", "tool", "user", "reward", "update", "trainer"]),
        seconds,
        seconds,
        st.just(trajectory),
        texts,
        counts,
        counts,
        counts,
        texts,
    )


rows = texts.flatmap(
    lambda name: st.builds(
        TimelineRow,
        st.just(name),
        texts,
        seconds,
        seconds,
        texts,
        st.integers(0, 10**6),
        seconds,
        st.integers(0, 9),
        st.lists(spans(name), max_size=4).map(tuple),
    )
)
timelines = st.builds(
    BatchTimeline,
    st.integers(0, 1000),
    seconds,
    seconds,
    st.none() | seconds,
    st.dictionaries(texts, seconds, max_size=3),
    st.dictionaries(st.integers(0, 99), st.integers(0, 10**6), max_size=3),
    st.lists(spans(""), max_size=3).map(tuple),
    st.lists(rows, max_size=3).map(tuple),
    texts,
    st.floats(0, 2e9).map(lambda value: round(value, 3)),
)


@given(timelines)
def test_a_timeline_is_read_as_it_was_written(timeline):
    assert BatchTimeline.from_json(json.loads(json.dumps(timeline.to_json()))) == timeline


def run(folder, batches=2, **more):
    clock, writer = SetClock(), TimelineWriter(folder, run="r1")
    stats = stats_of(clock, timeline=writer)
    for batch in range(batches):
        one_batch(stats, clock, batch=batch, **more)
        stats.add(Span("update", clock.now, clock.now + 0.5, version=batch + 1))
        clock.now += 0.5
    stats.stop()
    return list(read_timelines(folder))


def test_each_batch_has_all_spans_of_its_trajectories(tmp_path):
    first, second = run(tmp_path, n_turns=40)
    assert (first.number, second.number, first.run) == (0, 1, "r1")
    assert [row.name for row in second.rows] == ["b1/g0/0", "b1/g0/1", "b1/g1/0", "b1/g1/1"]
    for row in second.rows:
        assert [span.cause for span in row.spans] == ["engine", "tool", "tools"] * 40 + ["engine", "reward"]
        assert (row.tokens, row.reason, row.n_omitted) == (410, "no_calls", 0)
        assert row.spans[0].start == row.began == second.start
        assert row.spans[-1].stop == row.ended
    assert second.rows[-1].spans[118].status == "TIMEOUT"


def test_a_batch_says_who_held_up_the_trainer_and_why(tmp_path):
    first, _ = run(tmp_path)
    assert first.waited == first.start + 2
    assert first.causes == pytest.approx({"tool/search": 17.5, "engine": 1.75, "reward": 1.75})
    assert [row.held for row in first.rows] == pytest.approx([0.5, 0.5, 0.5, 19.5])
    assert first.ages == {0: 70, 1: 10}


def test_updates_belong_to_the_batches_during_which_they_ran(tmp_path):
    first, second = run(tmp_path)
    assert (first.own, second.own) == ((), ())
    clock, writer = SetClock(), TimelineWriter(tmp_path / "other")
    stats = stats_of(clock, timeline=writer)
    for name in "ab":
        stats.trajectory_began(name)
    clock.now += 2
    stats.add(Span("update", clock.now - 1, clock.now))
    for name in "ab":
        stats.trajectory_ended(name, "no_calls")
        stats.batch([name], tokens=1, ages={0: 1})
    stats.stop()
    for batch in read_timelines(tmp_path / "other"):
        assert [span.cause for span in batch.own] == ["update"]
        assert batch.waited is None


def test_spans_of_an_endless_trajectory_are_counted_when_they_are_left_out(tmp_path):
    clock, writer = SetClock(), TimelineWriter(tmp_path)
    stats = stats_of(clock, timeline=writer)
    stats.trajectory_began("a")
    for turn in range(5000):
        stats.add(Span("engine", turn, turn + 1, "a", turn=turn))
    stats.trajectory_ended("a", "max_turns")
    stats.batch(["a"], tokens=1, ages={})
    stats.stop()
    (batch,) = read_timelines(tmp_path)
    (row,) = batch.rows
    assert (len(row.spans), row.n_omitted, row.spans[-1].turn) == (2000, 3000, 4999)


def test_a_writer_beside_a_recorder_shares_its_folder_run_and_permissions(tmp_path):
    with Recorder(tmp_path / "dump", run="mine", mode=0o640) as recorder:
        writer = TimelineWriter.beside(recorder)
        recorder.write(record())
        writer.write(BatchTimeline(0, 1, 2))
        writer.close()
    assert writer.path == tmp_path / "dump" / "timeline.jsonl"
    assert stat.S_IMODE(writer.path.stat().st_mode) == 0o640
    (found,) = read_timelines(tmp_path / "dump")
    assert (found.run, found.number) == ("mine", 0)
    assert found.time > 1.6e9


def test_the_trajectories_of_a_dump_are_read_without_its_timeline(tmp_path):
    run(tmp_path)
    with Recorder(tmp_path) as recorder:
        recorder.write(record(request_id="a"))
    assert [one.request_id for one in read_records(tmp_path)] == ["a"]
    with Dump(tmp_path) as dump:
        assert [file.name for file in dump.files] == ["0"]


def test_a_folder_without_timelines_has_none(tmp_path):
    assert list(read_timelines(tmp_path)) == []
    assert list(read_timelines(tmp_path / "missing")) == []


def test_a_writer_that_was_closed_opens_its_file_again(tmp_path):
    writer = TimelineWriter(tmp_path)
    for number in range(20):
        writer.write(BatchTimeline(number, 0, 1))
        writer.close()
    assert [found.number for found in read_timelines(tmp_path)] == list(range(20))
    assert writer.n_omitted == 0


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        "[]",
        "null",
        '{"schema_version": 3}',
        '{"schema_version": 2}',
        json.dumps({**BatchTimeline(0, 1, 2).to_json(), "start": "NaN"}),
        json.dumps({**BatchTimeline(0, 1, 2).to_json(), "own": [{"cause": "lunch", "start": 1, "stop": 2}]}),
        json.dumps({**BatchTimeline(0, 1, 2).to_json(), "rows": [{"name": "a"}]}),
        json.dumps({**BatchTimeline(0, 1, 2).to_json(), "ages": [1]}),
        "[" * 100_000,
    ],
)
def test_a_line_of_another_form_does_not_hide_the_others(tmp_path, line):
    writer = TimelineWriter(tmp_path)
    writer.write(BatchTimeline(0, 1, 2))
    writer.close()
    with writer.path.open("a") as file:
        file.write(f"{line}\n")
    writer.write(BatchTimeline(1, 1, 2))
    writer.close()
    first, bad, second = read_timelines(tmp_path)
    assert (first.number, second.number) == (0, 1)
    assert isinstance(bad, BadLine)
    assert bad.number == 2


def test_a_slow_disk_leaves_out_timelines_and_never_blocks(tmp_path, caplog):
    """The folder is a pipe that nobody reads until the end, so that its thread cannot go on."""
    import os
    import threading

    path = tmp_path / "timeline.jsonl"
    os.mkfifo(path)
    writer = TimelineWriter(tmp_path)
    rows = tuple(TimelineRow(f"{n}", "g", 0, 1) for n in range(4000))
    for number in range(50):
        writer.write(BatchTimeline(number, 0, 1, rows=rows))
    assert writer.n_omitted >= 30
    assert caplog.text.count("written too slowly") == 1
    taken = []
    with path.open("rb") as pipe:
        reader = threading.Thread(target=lambda: taken.append(pipe.read()))
        reader.start()
        writer.close()
        reader.join()
    assert len(taken[0].splitlines()) == 50 - writer.n_omitted
