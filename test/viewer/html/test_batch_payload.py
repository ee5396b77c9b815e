"""A page holds the timelines of the batches beside its dump."""

import json

import pytest
from helpers.collector_runs import SetClock, one_batch, stats_of
from helpers.html_pages import dump_of, page_of
from helpers.record_strategies import record

from torchrl_agentic.collectors.timeline import BatchTimeline, TimelineRow, TimelineWriter
from torchrl_agentic.records import Dump
from torchrl_agentic.trajectory.span import Span
from torchrl_agentic.viewer.html import page, write_page

HOSTILE = ["</script><script>alert(1)</script>", "<!--<script>", "__proto__", "\ud800"]


def with_batches(folder, *batches):
    dump_of(folder, [record(request_id="a")])
    writer = TimelineWriter(folder, run="r1")
    for batch in batches:
        writer.write(batch)
        writer.close()
    return folder


def test_a_page_without_timelines_has_no_batches(tmp_path):
    found = page_of(dump_of(tmp_path, [record()]))
    assert (found.index["batches"], found.batches) == ([], [])
    assert "timeline" not in found.index["files"]


def test_a_batch_has_all_bars_of_its_trajectories(tmp_path):
    clock, writer = SetClock(), TimelineWriter(tmp_path, run="r1")
    stats = stats_of(clock, timeline=writer)
    dump_of(tmp_path, [record(request_id="a")])
    one_batch(stats, clock)
    stats.stop()
    found = page_of(tmp_path)
    ((number, run, time, seconds, waited, n_rows, tokens),) = found.index["batches"]
    assert (number, run, seconds, waited, n_rows, tokens) == (0, "r1", 23, 21, 4, 80)
    assert time > 1.6e9
    (batch,) = found.batches
    assert (batch["stop"], batch["waited"], batch["ages"]) == (23, 2, [[0, 70], [1, 10]])
    assert batch["causes"][0] == ["tool/search", pytest.approx(17.5)]
    late = batch["rows"][-1]
    assert (late["name"], late["group"], late["reason"], late["tokens"]) == (
        "b0/g1/1",
        "b0/g1",
        "no_calls",
        20,
    )
    assert late["held"] == pytest.approx(19.5)
    bars = [
        (cause, start, stop, batch["texts"][name], turn, tokens, batch["texts"][status])
        for cause, start, stop, name, turn, _, tokens, status in late["spans"]
    ]
    assert bars == [
        ("engine", 0, 1, "", 0, 10, "stop"),
        ("tools", 1, 21, "", 0, 0, ""),
        ("tool", 1, 21, "search", 0, 0, "timeout"),
        ("engine", 21, 22, "", 1, 10, "stop"),
        ("reward", 22, 23, "", 1, 0, ""),
    ]


def test_rows_of_a_group_are_together_and_groups_are_in_the_order_they_began(tmp_path):
    rows = tuple(
        TimelineRow(name, group, began, 10)
        for name, group, began in [("a", "y", 5), ("b", "x", 2), ("c", "y", 1)]
    )
    (batch,) = page_of(with_batches(tmp_path, BatchTimeline(0, 1, 10, rows=rows))).batches
    assert [row["name"] for row in batch["rows"]] == ["c", "a", "b"]


def test_a_row_links_to_its_conversation_unless_several_have_its_name(tmp_path):
    names = ["one", "two", "two"]
    dump_of(tmp_path, [record(request_id=str(n), trajectory=name) for n, name in enumerate(names)])
    writer = TimelineWriter(tmp_path)
    rows = tuple(TimelineRow(name, "g", 0, 1) for name in ("one", "two", "unknown"))
    writer.write(BatchTimeline(0, 0, 1, rows=rows))
    writer.close()
    found = page_of(tmp_path)
    assert {row["name"]: row["record"] for row in found.batches[0]["rows"]} == {
        "one": 0,
        "two": None,
        "unknown": None,
    }
    assert found.index["rows"][0][0] == "0"


@pytest.mark.parametrize("spice", HOSTILE)
def test_no_name_of_a_batch_is_markup(tmp_path, spice):
    """A page has as many tags as one of harmless names."""
    span = Span("tool", 0, 1, spice, spice, status=spice)
    row = TimelineRow(spice, spice, 0, 1, spice, spans=(span,))
    batch = BatchTimeline(0, 0, 1, 0, {f"tool/{spice}": 1}, {0: 1}, (), (row,))
    found = page_of(with_batches(tmp_path, batch))
    assert found.text.lower().count("<script") == found.text.lower().count("</script") == 4
    assert found.text.count("<!--") == 0
    (shown,) = found.batches[0]["rows"]
    assert (shown["name"], shown["group"], shown["reason"]) == (spice, spice, spice)


def test_bad_lines_are_listed_and_the_other_batches_are_shown(tmp_path):
    with_batches(tmp_path, BatchTimeline(0, 0, 1))
    with (tmp_path / "timeline.jsonl").open("a") as file:
        file.write("no json\n")
    with_batches(tmp_path, BatchTimeline(1, 0, 1))
    index = page_of(tmp_path).index
    assert [row[0] for row in index["batches"]] == [0, 1]
    ((file, number, reason),) = index["problems"]
    assert (index["files"][file], number) == ("timeline", 2)
    assert "Expecting value" in reason


def test_a_timeline_that_cannot_be_read_is_listed(tmp_path, monkeypatch):
    with_batches(tmp_path, *(BatchTimeline(n, 0, 1) for n in range(3)))
    monkeypatch.setattr("torchrl_agentic.records.jsonl_index.MAX_LINES", 2)
    found = page_of(tmp_path)
    ((file, number, reason),) = found.index["problems"]
    assert (found.index["files"][file], number, found.batches) == ("timeline", None, [])
    assert "more than 2 lines" in reason
    assert len(found.bodies) == 1


def test_the_last_batches_are_shown_and_the_others_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr("torchrl_agentic.viewer.html.page.MOST_BATCHES", 3)
    found = page_of(with_batches(tmp_path, *(BatchTimeline(n, 0, 1) for n in range(5))))
    assert [row[0] for row in found.index["batches"]] == [2, 3, 4]
    assert found.index["n_batches_omitted"] == 2
    assert len(found.batches) == 3


def test_a_file_of_a_dump_is_shown_without_the_timelines_of_its_folder(tmp_path):
    with_batches(tmp_path, BatchTimeline(0, 0, 1))
    out = tmp_path / "page.html"
    with Dump(tmp_path / "0.jsonl") as dump:
        write_page(dump, out)
    assert '"batches": []' in out.read_text()


def test_a_batch_of_256_trajectories_with_50_spans_is_small(tmp_path):
    spans = tuple(
        Span("tool" if n % 2 else "engine", n * 1.234567, n + 2.345678, "t", "search", n // 2, 0, 80, "ok")
        for n in range(50)
    )
    rows = tuple(
        TimelineRow(f"task-{n // 8}/{n % 8}", f"task-{n // 8}", 0, 60, spans=spans) for n in range(256)
    )
    found = page_of(with_batches(tmp_path, BatchTimeline(0, 0, 60, rows=rows)))
    (packed,) = [inside for attributes, inside in found.scripts if 'id="batch-' in attributes]
    assert len(packed) < 300_000
    assert sum(len(row["spans"]) for row in found.batches[0]["rows"]) == 12_800


def test_the_index_names_the_timeline_last(tmp_path):
    with_batches(tmp_path, BatchTimeline(0, 0, 1))
    index = page.Index("dump")
    with Dump(tmp_path) as dump:
        assert len(list(page.chunks(dump, index))) == 1
        assert len(list(page.timelines(dump, index))) == 1
    assert index.files == ["0", "timeline"]
    assert json.loads(b"".join(index.parts()))["batches"][0][0] == 0
