"""The panel of a collector shows its statistics in a terminal of 80 columns."""

import io

import pytest
from helpers.collector_runs import SetClock, one_batch, stats_of
from rich.console import Console

from torchrl_agentic.collectors.panel import collector_panel, panel_of
from torchrl_agentic.trajectory.span import Span


@pytest.fixture
def clock():
    return SetClock()


@pytest.fixture
def stats(clock):
    return stats_of(clock)


def text_of(stats, width=80):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(panel_of(stats.snapshot()))
    return console.export_text()


def line_with(text, word):
    return next(line for line in text.splitlines() if word in line)


def test_it_shows_the_waits_by_cause_and_the_use_of_the_engine(stats, clock):
    one_batch(stats, clock)
    stats.add(Span("trainer", clock.now, clock.now + 4))
    for name in "abc":
        stats.trajectory_began(name, "g")
        stats.request_began(name)
    text = text_of(stats)
    assert "3 trajectories" in line_with(text, "in flight")
    assert "█" * 18 + "░" * 6 + " 3 of 4" in line_with(text, "engine")
    assert line_with(text, "tool search").split()[-4:-1] == ["17.5", "s", "80%"]
    assert "the trainer waited 22.0 s" in text
    assert "ready 4.0 s before" in line_with(text, "trainer  ")
    assert "0: 88%, 1: 12%" in line_with(text, "token ages")


def test_it_names_the_stragglers_and_what_they_do(stats, clock):
    stats.trajectory_began("task-7/3")
    stats.doing("task-7/3", "tools", "python")
    stats.wait_began()
    clock.now += 90
    text = text_of(stats)
    assert "waiting for 90.0 s now" in text
    assert "turn 1, tools python for 90.0 s" in line_with(text, "task-7/3")


def test_it_is_drawn_before_anything_has_happened(stats):
    assert "the trainer waited 0 ms, 0% of the time" in text_of(stats)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_name_breaks_its_lines(stats, clock, width):
    hostile = "[red]x\n\x1b[2J" * 30
    one_batch(stats, clock)
    stats.trajectory_began(hostile)
    stats.doing(hostile, "tools", hostile)
    stats.failure(hostile)
    text = text_of(stats, width)
    assert {len(line) for line in text.splitlines()} == {width}
    assert "\x1b[2J" not in text
    assert "[red]x" in line_with(text, "turn 1")


def test_it_shows_the_newest_figures_while_it_is_open(stats, clock):
    console = Console(width=80, file=io.StringIO(), force_terminal=True)
    with collector_panel(stats, console=console) as live:
        one_batch(stats, clock)
        live.refresh()
    assert "tool search" in console.file.getvalue()


def test_a_pipe_gets_the_last_panel_only(stats, clock):
    console = Console(width=80, file=io.StringIO())
    with collector_panel(stats, console=console):
        one_batch(stats, clock)
    assert console.file.getvalue().count("the trainer waited") == 1


def test_the_statistics_open_it_on_standard_error(stats, clock, capsys):
    with stats.live():
        one_batch(stats, clock)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "tool search" in captured.err
