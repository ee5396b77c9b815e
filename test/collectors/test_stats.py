"""`CollectorStats` says why a trainer waits, in bounded memory."""

import json
import sys
import threading

import pytest
from helpers.collector_runs import SetClock, one_batch, stats_of
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic.collectors.stats import CollectorStats
from torchrl_agentic.trajectory.span import Span


@pytest.fixture
def clock():
    return SetClock()


@pytest.fixture
def stats(clock):
    return stats_of(clock)


class TestWaits:
    def test_a_wait_is_divided_among_what_the_trajectories_of_the_batch_did(self, stats, clock):
        """From 2 to 4, all four are missing and sampled or rewarded, but for the slow search of the last."""
        one_batch(stats, clock)
        wait = stats.snapshot()["wait"]
        assert wait["seconds"] == wait["last_seconds"] == 22
        assert wait["last_causes"] == wait["causes"]
        assert wait["causes"] == pytest.approx(
            {"tool/search": 0.5 + 17, "engine": 0.75 + 1, "reward": 0.75 + 1, "batch": 1}
        )
        assert wait["last_held"]["b0/g1/1"] == pytest.approx(0.5 + 19)

    def test_sums_go_on_and_the_last_wait_is_that_of_the_last_batch(self, stats, clock):
        one_batch(stats, clock)
        one_batch(stats, clock, batch=1, slow_s=1)
        wait = stats.snapshot()["wait"]
        assert (wait["n"], wait["seconds"], wait["last_seconds"]) == (2, 25, 3)
        assert wait["last_causes"] == {"engine": 1, "reward": 1, "batch": 1}

    def test_a_batch_that_was_ready_costs_no_wait(self, stats, clock):
        one_batch(stats, clock)
        before = stats.snapshot()["wait"]
        stats.trajectory_began("a")
        clock.now += 5
        stats.trajectory_ended("a", "no_calls")
        stats.batch(["a"], tokens=1, ages={0: 1})
        wait = stats.snapshot()["wait"]
        assert wait["seconds"] == before["seconds"]
        assert (wait["last_seconds"], wait["last_causes"]) == (0, {})

    def test_a_wait_without_a_batch_is_not_blamed_on_a_trajectory(self, stats, clock):
        stats.wait_began()
        clock.now += 3
        stats.wait_ended()
        clock.now += 3
        stats.wait_ended()
        assert stats.snapshot()["wait"]["causes"] == {"other": 3}

    def test_a_wait_is_visible_while_it_lasts(self, stats, clock):
        stats.wait_began()
        clock.now += 3
        stats.wait_began()
        clock.now += 4
        wait = stats.snapshot()["wait"]
        assert (wait["n"], wait["now"], wait["seconds"]) == (1, 7, 7)

    def test_spans_of_an_earlier_wait_do_not_count_again(self, stats, clock):
        stats.trajectory_began("a")
        stats.wait_began()
        clock.now += 2
        stats.add(Span("engine", clock.now - 2, clock.now, "a"))
        stats.wait_ended()
        stats.wait_began()
        clock.now += 2
        stats.add(Span("reward", clock.now - 2, clock.now, "a"))
        stats.trajectory_ended("a", "no_calls")
        stats.batch(["a"], tokens=1, ages={})
        assert stats.snapshot()["wait"]["last_causes"] == {"reward": 2}


class TestEngine:
    def test_idle_share_and_mean_requests_are_integrals_over_time(self, stats, clock):
        clock.now += 2
        stats.request_began()
        stats.request_began()
        clock.now += 3
        stats.request_ended()
        clock.now += 1
        stats.request_ended()
        clock.now += 4
        engine = stats.snapshot()["engine"]
        assert engine["idle_total"] == engine["idle"] == pytest.approx(6 / 10)
        assert engine["mean_requests_total"] == pytest.approx((2 * 3 + 1) / 10)

    def test_requests_over_the_limit_of_the_engine_are_queued(self, stats):
        for _ in range(6):
            stats.request_began()
        engine = stats.snapshot()["engine"]
        assert (engine["requests"], engine["queued"]) == (4, 2)

    def test_rates_forget_what_is_older_than_a_minute(self, stats, clock):
        for _ in range(100):
            clock.now += 1
            stats.add(Span("engine", clock.now - 1, clock.now, tokens=10))
        for _ in range(100):
            clock.now += 1
            stats.add(Span("engine", clock.now - 1, clock.now, tokens=40))
        tokens = stats.snapshot()["tokens"]
        assert tokens["per_s"] == pytest.approx(40)
        assert (tokens["per_s_total"], tokens["sampled"]) == (25, 5000)

    def test_a_silent_engine_is_seen_without_events(self, stats, clock):
        stats.request_began()
        clock.now += 1000
        stats.request_ended()
        clock.now += 100
        engine = stats.snapshot()["engine"]
        assert engine["idle_total"] == pytest.approx(100 / 1100)

    def test_a_stopped_clock_freezes_all_rates(self, stats, clock):
        one_batch(stats, clock)
        stats.stop()
        before = stats.snapshot()
        clock.now += 1000
        assert stats.snapshot() == before


class TestSums:
    def test_seconds_and_calls_are_counted_by_cause_and_tool(self, stats, clock):
        one_batch(stats, clock)
        found = stats.snapshot()
        assert found["seconds_by_cause"] == {"tool/search": 23, "tools": 23, "engine": 8, "reward": 4}
        assert found["calls"] == {"search": {"n": 4, "statuses": {"ok": 3, "timeout": 1}}}
        assert found["tokens"]["sampled"] == found["tokens"]["trained"] == 80
        assert found["reasons"] == {"no_calls": 4}
        assert found["batches"]["groups"] == 2

    def test_ages_are_those_of_the_last_batch_and_of_recent_ones(self, stats, clock):
        one_batch(stats, clock)
        one_batch(stats, clock, batch=1)
        assert stats.snapshot()["ages"] == {"last": {"0": 70, "1": 10}, "recent": {"0": 140, "1": 20}}

    def test_the_mean_length_is_that_of_trajectories_that_left(self, stats, clock):
        assert "collector/tokens_per_trajectory" not in stats.scalars()
        for name, tokens in (("a", 10), ("b", 20), ("failed", 90)):
            stats.trajectory_began(name, "g")
            stats.add(Span("engine", clock.now, clock.now, name, tokens=tokens))
        stats.trajectory_ended("a", "no_calls")
        stats.trajectory_ended("b", "no_calls")
        stats.trajectory_ended("failed", "timeout", is_kept=False)
        stats.batch(["a", "b"], tokens=30, ages={0: 30})
        assert stats.snapshot()["tokens"]["per_trajectory"] == 15
        assert stats.scalars()["collector/tokens_per_trajectory"] == 15
        assert stats.snapshot()["batches"]["complete_groups"] == 0

    def test_failures_and_events_are_counted(self, stats):
        stats.failure("timeout")
        stats.count("resumed", 3)
        stats.count("resumed")
        assert stats.snapshot()["failures"] == {"timeout": 1}
        assert stats.snapshot()["events"] == {"resumed": 4}


class TestStragglers:
    def begin(self, stats, *groups):
        for group, size in groups:
            for n in range(size):
                stats.trajectory_began(f"{group}{n}", group)

    def names(self, stats):
        return [each.name for each in stats.stragglers()]

    def test_they_are_the_missing_ones_of_the_oldest_groups(self, stats):
        self.begin(stats, ("a", 2), ("b", 2), ("c", 2))
        stats.trajectory_ended("a0", "no_calls")
        assert self.names(stats) == ["a1", "b0", "b1"]

    def test_complete_groups_leave_fewer_to_wait_for(self, stats):
        self.begin(stats, ("a", 2), ("b", 1), ("c", 2))
        stats.trajectory_ended("b0", "no_calls")
        assert self.names(stats) == ["a0", "a1"]

    def test_a_group_is_not_complete_while_some_of_it_have_not_begun(self, clock):
        stats = CollectorStats(clock, groups_per_batch=2, group_size=2)
        self.begin(stats, ("a", 1), ("b", 2), ("c", 2))
        stats.trajectory_ended("a0", "no_calls")
        assert stats.snapshot()["batches"]["complete_groups"] == 0
        assert self.names(stats) == ["b0", "b1"]
        stats.trajectory_began("a1", "a")
        stats.trajectory_ended("a1", "no_calls")
        assert stats.snapshot()["batches"]["complete_groups"] == 1

    def test_groups_that_left_or_were_dropped_are_forgotten(self, stats):
        self.begin(stats, ("a", 1), ("b", 2), ("c", 1), ("d", 1))
        stats.trajectory_ended("a0", "no_calls")
        stats.batch(["a0"], tokens=1, ages={})
        stats.trajectory_ended("b0", "no_calls")
        stats.trajectory_ended("b1", "failed", is_kept=False)
        stats.trajectory_ended("b0", "failed", is_kept=False)
        assert self.names(stats) == ["c0", "d0"]
        assert stats.snapshot()["reasons"] == {"no_calls": 2, "failed": 1}
        assert stats.snapshot()["in_flight"] == 2

    def test_each_says_what_it_does_and_for_how_long(self, stats, clock):
        stats.trajectory_began("a")
        clock.now += 1
        stats.request_began("a")
        clock.now += 2
        stats.add(Span("engine", clock.now - 2, clock.now, "a", turn=3))
        (late,) = stats.stragglers()
        assert (late.doing, late.turn) == ("after engine", 3)
        stats.doing("a", "tools", "search, python")
        clock.now += 4
        (late,) = stats.stragglers()
        assert (late.doing, late.doing_s, late.seconds, late.group) == ("tools search, python", 4, 7, "a")

    def test_a_trajectory_that_begins_again_is_counted_once(self, stats):
        self.begin(stats, ("a", 1))
        stats.trajectory_began("a0", "b")
        assert stats.snapshot()["in_flight"] == 1
        (late,) = stats.stragglers()
        assert (late.name, late.group) == ("a0", "b")

    def test_the_one_that_began_first_comes_first(self, stats, clock):
        stats.trajectory_began("a0", "a")
        clock.now += 1
        stats.trajectory_began("b0", "b")
        clock.now += 1
        stats.trajectory_began("a1", "a")
        assert self.names(stats) == ["a0", "b0", "a1"]
        assert len(stats.stragglers(2)) == 2


class TestViews:
    def test_the_table_says_why_the_trainer_waited(self, stats, clock):
        one_batch(stats, clock)
        stats.add(Span("trainer", clock.now, clock.now + 4))
        assert str(stats).split("\n") == [
            "1 batch in 24.0 s · 0 trajectories in flight · 3 tokens/s",
            "engine: 0 of 4 requests, 0 queued, 0.3 on average, idle 88% of the time",
            "why the trainer waited: 22.0 s in all, 92% of the time",
            "  tool search                           17.5 s   80%",
            "  engine                                 1.8 s    8%",
            "  reward                                 1.8 s    8%",
            "  batch                                  1.0 s    5%",
            "batches were ready 4.0 s before the trainer asked for them",
            "ages of the tokens of the last batch: 0: 88%, 1: 12%",
        ]

    def test_a_snapshot_is_json(self, stats, clock):
        one_batch(stats, clock)
        stats.trajectory_began("late")
        snapshot = stats.snapshot()
        assert json.loads(json.dumps(snapshot, allow_nan=False)) == snapshot

    def test_scalars_are_floats_with_names_for_curves(self, stats, clock):
        one_batch(stats, clock)
        scalars = stats.scalars()
        assert all(type(value) is float for value in scalars.values())
        assert all(name.startswith("collector/") for name in scalars)
        assert scalars["collector/wait/tool/search"] == pytest.approx(17.5)
        assert scalars["collector/wait"] == 22
        assert scalars["collector/age_mean"] == pytest.approx(1 / 8)
        assert scalars["collector/seconds/engine"] == 8

    def test_the_curve_of_a_cause_falls_to_zero(self, stats, clock):
        one_batch(stats, clock)
        one_batch(stats, clock, batch=1, slow_s=1)
        assert stats.scalars()["collector/wait/tool/search"] == 0

    @pytest.mark.slow
    def test_loggers_of_torchrl_take_the_scalars(self, stats, clock, tmp_path):
        from torchrl.record import CSVLogger

        one_batch(stats, clock)
        logger = CSVLogger("run", log_dir=str(tmp_path))
        for name, value in stats.scalars().items():
            logger.log_scalar(name, value, step=7)
        (file,) = tmp_path.rglob("wait/engine.csv")
        assert file.read_text().split(",")[0] == "7"

    def test_no_name_that_a_model_invents_is_a_path(self, stats, clock):
        for name in ("../../x", "..", "a/b", "\ud800", "", "tool/../y"):
            stats.add(Span("tool", 0, 1, "", name))
            stats.failure(name)
        names = [name.removeprefix("collector/") for name in stats.scalars()]
        assert {name for name in names if "tool" in name or "failures" in name} == {
            "seconds/tool/_x", "seconds/tool/_", "seconds/tool/a_b", "seconds/tool/tool_y",
            "failures/_x", "failures/_", "failures/a_b", "failures/tool/_y",
        }  # fmt: skip
        assert stats.scalars()["collector/seconds/tool/_"] == 3

    def test_the_table_fits_80_columns_whatever_the_names(self, stats, clock):
        for n in range(12):
            long = f"{n}" + "x\n\x1b[31m" * 30
            stats.trajectory_began(long)
            stats.wait_began()
            clock.now += n + 1
            stats.add(Span("tool", clock.now - n - 1, clock.now, long, long, status="ok"))
            stats.trajectory_ended(long, "no_calls")
            stats.batch([long], tokens=1, ages={n: 1})
            stats.wait_ended()
            stats.failure(long)
        stats.trajectory_began("late" + "x" * 100)
        stats.doing("late" + "x" * 100, "tools", "search, " * 30)
        clock.now += 5400
        lines = str(stats).split("\n")
        assert max(map(len, lines)) <= 80
        assert not any("\x1b" in line for line in lines)
        assert "  4 other causes" in str(stats)


class TestBounds:
    def test_memory_does_not_grow_with_the_run(self, stats, clock):
        """Compare what is reachable after 70 and after 270 batches."""
        sizes = []
        for batches in (range(70), range(70, 270)):
            for batch in batches:
                one_batch(stats, clock, batch=batch)
            sizes.append(_reachable(stats))
        assert sizes[1] <= sizes[0] * 1.02

    def test_spans_are_not_kept_while_nobody_waits(self, stats, clock):
        stats.trajectory_began("a")
        sizes = []
        for _ in range(2):
            for _ in range(100):
                clock.now += 1
                stats.add(Span("engine", clock.now - 1, clock.now, "a"))
            sizes.append(_reachable(stats))
        assert sizes[1] <= sizes[0] * 1.02

    def test_trajectories_that_no_batch_takes_are_forgotten_at_last(self, stats):
        for n in range(70_000):
            stats.trajectory_began(f"t{n}")
            stats.trajectory_ended(f"t{n}", "no_calls")
        assert stats.snapshot()["batches"]["complete_groups"] == 65_536

    def test_invented_names_of_tools_and_reasons_are_counted_together(self, stats, clock):
        stats.wait_began()
        for n in range(1000):
            stats.trajectory_began(f"t{n}")
            clock.now += 1
            stats.add(Span("tool", clock.now - 1, clock.now, f"t{n}", f"tool{n}", status="unknown_tool"))
            stats.trajectory_ended(f"t{n}", f"reason{n}")
            stats.failure(f"kind{n}")
        stats.batch([f"t{n}" for n in range(1000)], tokens=0, ages=dict.fromkeys(range(1000), 1))
        found = stats.snapshot()
        for counts in (
            found["calls"],
            found["reasons"],
            found["failures"],
            found["seconds_by_cause"],
            found["wait"]["causes"],
            found["ages"]["last"],
        ):
            assert len(counts) <= 202
        assert found["calls"]["(others)"]["n"] == 800
        assert sum(found["wait"]["causes"].values()) == pytest.approx(1000)

    def test_spans_of_a_trajectory_are_bounded_during_a_long_wait(self, stats, clock):
        stats.trajectory_began("a")
        stats.wait_began()
        for _ in range(1000):
            clock.now += 1
            stats.add(Span("engine", clock.now - 1, clock.now, "a"))
        size = _reachable(stats)
        for _ in range(1000):
            clock.now += 1
            stats.add(Span("engine", clock.now - 1, clock.now, "a"))
        assert _reachable(stats) <= size * 1.05
        stats.trajectory_ended("a", "no_calls")
        stats.batch(["a"], tokens=1, ages={})
        assert sum(stats.snapshot()["wait"]["causes"].values()) == pytest.approx(2000)


def _reachable(stats):
    """Return the number of bytes of the numbers, texts, lists and spans that the statistics hold."""
    seen, queue, total = set(), [stats], 0
    while queue:
        one = queue.pop()
        if id(one) in seen or callable(one):
            continue
        seen.add(id(one))
        total += sys.getsizeof(one)
        if isinstance(one, dict):
            queue += [*one.keys(), *one.values()]
        elif isinstance(one, str | int | float | bool) or one is None:
            continue
        elif hasattr(one, "__slots__") and not hasattr(one, "__iter__"):
            queue += [getattr(one, slot) for slot in type(one).__slots__]
        elif hasattr(one, "__iter__"):
            queue += list(one)
        elif hasattr(one, "__dict__"):
            queue += list(vars(one).values())
    return total


def test_a_reader_on_another_thread_sees_consistent_figures(stats, clock):
    """While the loop's thread writes, the calls that a reader sees fit their seconds."""
    done = threading.Event()
    wrong = []

    def read():
        while not done.is_set():
            found = stats.snapshot()
            seconds = found["seconds_by_cause"].get("tool/search", 0)
            if seconds != found["calls"].get("search", {"n": 0})["n"]:
                wrong.append(seconds)
            str(stats)

    reader = threading.Thread(target=read)
    reader.start()
    for n in range(3000):
        stats.trajectory_began(f"t{n}")
        stats.add(Span("tool", 0, 1, f"t{n}", "search", status="ok"))
        stats.trajectory_ended(f"t{n}", f"reason{n % 50}")
        if n % 10 == 9:
            stats.batch([f"t{m}" for m in range(n - 9, n + 1)], tokens=10, ages={0: 10})
    done.set()
    reader.join()
    assert not wrong


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["begin", "end", "drop", "wait", "got", "batch", "span"]), st.integers(0, 5)
        ),
        max_size=60,
    )
)
def test_any_order_of_calls_keeps_the_counts_right(script):
    clock = SetClock()
    stats = CollectorStats(clock, groups_per_batch=1)
    running, ended = set(), set()
    for what, n in script:
        clock.now += 1
        name = f"t{n}"
        if what == "begin" and name not in running | ended:
            stats.trajectory_began(name, f"g{n % 2}")
            running.add(name)
        elif what in ("end", "drop"):
            stats.trajectory_ended(name, "x", is_kept=what == "end")
            if what == "end" and name in running:
                ended.add(name)
            elif what == "drop":
                ended.discard(name)
            running.discard(name)
        elif what == "wait":
            stats.wait_began()
        elif what == "got":
            stats.wait_ended()
        elif what == "batch":
            stats.batch(ended, tokens=1, ages={0: 1})
            ended.clear()
        elif what == "span":
            stats.add(Span("engine", clock.now - 1, clock.now, name))
    found = stats.snapshot()
    assert found["in_flight"] == len(running)
    assert {each.name for each in stats.stragglers(10)} <= running
    assert bool(stats.stragglers()) == bool(running)
    assert sum(found["wait"]["causes"].values()) + found["wait"]["now"] == pytest.approx(
        found["wait"]["seconds"]
    )
