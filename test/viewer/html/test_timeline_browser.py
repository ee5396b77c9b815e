"""The timeline of a batch in Chromium: `make test-browser`."""

from pathlib import Path

import pytest
from helpers.collector_runs import SetClock, one_batch, stats_of
from helpers.html_pages import dump_of, page_of
from helpers.record_strategies import record

from torchrl_agentic.collectors.timeline import BatchTimeline, TimelineRow, TimelineWriter
from torchrl_agentic.trajectory.span import Span

CONTRAST = Path(__file__).with_name("contrast.js").read_text()
HOSTILE = "</script><img src=x onerror='window.ran = 1'>\u202e"

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """The page of three batches: one with a straggler, one with 256 x 50 spans, and a hostile one."""
    folder = tmp_path_factory.mktemp("batches")
    dump_of(folder, [record(request_id="its-record", trajectory="b0/g1/1")])
    clock, writer = SetClock(), TimelineWriter(folder, run="r1")
    stats = stats_of(clock, timeline=writer)
    stats.add(Span("update", clock.now - 1, clock.now + 1))
    one_batch(stats, clock)
    stats.stop()
    spans = tuple(
        Span("tool" if n % 2 else "engine", n, n + 1, "t", "search", n // 2, 0, 80, "ok") for n in range(50)
    )
    rows = tuple(
        TimelineRow(f"task-{n // 8}/{n % 8}", f"task-{n // 8}", 0, 50, spans=spans) for n in range(256)
    )
    writer.write(BatchTimeline(1, 0, 60, rows=rows))
    bad = Span("tool", 0, 1, HOSTILE, HOSTILE, status=HOSTILE)
    late = TimelineRow(HOSTILE, HOSTILE, 0, 1, HOSTILE, held=1, spans=(bad,))
    writer.write(BatchTimeline(2, 0, 1, 0, {f"tool/{HOSTILE}": 1}, {0: 1}, (), (late,), HOSTILE))
    writer.close()
    page_of(folder)
    return (folder / "page.html").as_uri()


def drawn_colors(page):
    """Return the set of colors on the canvas, as "r,g,b"."""
    return set(
        page.evaluate(
            """() => {
              const canvas = document.querySelector(".time-box canvas");
              const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
              const colors = new Set();
              for (let n = 0; n < data.length; n += 4) {
                const [red, green, blue, alpha] = data.slice(n, n + 4);
                if (alpha === 255) colors.add(`${red},${green},${blue}`);
              }
              return [...colors];
            }"""
        )
    )


def test_the_timeline_is_reached_from_the_overview(opened, address):
    with opened(address) as page:
        page.get_by_role("link", name="Timeline").click()
        page.get_by_role("heading", name="Batch 2").wait_for()
        page.get_by_role("link", name="Previous").click()
        page.get_by_role("heading", name="Batch 1").wait_for()
        page.keyboard.press("o")
        page.get_by_role("heading", name="Overview").wait_for()
        page.keyboard.press("t")
        page.get_by_role("heading", name="Batch 2").wait_for()
        page.keyboard.press("j")
        page.get_by_role("heading", name="b0/g1/1").wait_for()


def test_a_page_without_batches_has_no_link_to_them(opened, tmp_path):
    page_of(dump_of(tmp_path, [record()]))
    with opened(tmp_path / "page.html") as page:
        page.locator("main h2").wait_for()
        assert not page.get_by_role("link", name="Timeline").is_visible()
        page.keyboard.press("t")
        assert page.get_by_role("heading", name="Overview").is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_kind_of_span_is_drawn_in_its_color(opened, address, scheme):
    colors = {
        "light": ("59,125,216", "179,24,43", "154,91,0", "18,103,44", "14,124,134", "255,243,205"),
        "dark": ("91,155,240", "255,143,155", "240,180,90", "111,214,138", "60,195,207", "58,50,18"),
    }
    with opened(f"{address}#:batch-1", color_scheme=scheme) as page:
        page.locator(".time-box canvas").wait_for()
        assert set(colors[scheme]) <= drawn_colors(page)


def test_it_says_why_the_trainer_waited_and_for_whom(opened, address):
    with opened(f"{address}#:batch-1") as page:
        waited = page.locator("section", has=page.get_by_role("heading", name="Why the trainer waited"))
        assert "It waited 21 s" in waited.text_content()
        assert "Held up by: b0/g1/1 (19.5 s)" in waited.text_content()
        assert waited.get_by_role("img", name="tool search 17.5 s, 83 %").is_visible()


def test_a_batch_that_was_ready_says_so_and_has_no_straggler(opened, tmp_path):
    dump_of(tmp_path, [record()])
    writer = TimelineWriter(tmp_path)
    row = TimelineRow("a", "g", 0, 1.0001, held=0.0001)
    writer.write(BatchTimeline(0, 0, 1.0002, 1, {"engine": 0.0001, "batch": 0.0001}, rows=(row,)))
    writer.close()
    page_of(tmp_path)
    with opened(f"{(tmp_path / 'page.html').as_uri()}#:batch-1") as page:
        page.get_by_text("It did not wait").wait_for()
        page.get_by_role("button", name="Next straggler").click()
        assert page.locator("#time-at").text_content() == "No trajectory held up this batch."


def test_keys_choose_a_straggler_and_its_spans_and_open_its_conversation(opened, address):
    with opened(f"{address}#:batch-1") as page:
        page.locator(".time-box").focus()
        said = page.locator("#time-at")
        page.keyboard.press("ArrowDown")
        assert "b0/g0/0: group b0/g0" in said.text_content()
        page.keyboard.press("s")
        assert "b0/g1/1: group b0/g1" in said.text_content()
        assert "the trainer waited 19.5 s for it" in said.text_content()
        page.keyboard.press("ArrowRight")
        assert "turn 1: sampled for 1 s" in said.text_content()
        assert "10 tokens, policy version 0, stop (span 1 of 5)" in said.text_content()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        assert "turn 1: ran search for 20 s, from 1 s to 21 s, timeout" in said.text_content()
        page.keyboard.press("End")
        assert "was rewarded" in said.text_content()
        page.keyboard.press("Enter")
        page.get_by_role("heading", name="b0/g1/1").wait_for()


def test_pointing_at_a_bar_shows_its_tool_status_and_time(opened, address):
    with opened(f"{address}#:batch-1") as page:
        box = page.locator(".time-box")
        x, y = page.evaluate(
            """async () => {
              while (drawnTimeline === null) await new Promise(requestAnimationFrame);
              const row = drawnTimeline.batch.rows[3];
              return [drawnTimeline.x(10), row.y + 8 - drawnTimeline.box.scrollTop];
            }"""
        )
        box.hover(position={"x": x, "y": y})
        assert page.locator(".time-tip").text_content() == (
            "b0/g1/1\nturn 1: ran search for 20 s, from 1 s to 21 s, timeout"
        )
        page.mouse.move(0, 0)
        assert not page.locator(".time-tip").is_visible()


def test_the_table_has_what_the_bars_show(opened, address):
    with opened(f"{address}#:batch-1") as page:
        page.get_by_text("As a table").click()
        last = page.locator("table tbody tr").last
        assert last.locator("th, td").all_text_contents() == [
            "b0/g1/1", "b0/g1", "0 µs", "23 s", "2 s", "20 s", "1 s", "2", "20", "no_calls", "19.5 s",
        ]  # fmt: skip
        last.get_by_role("link").click()
        page.get_by_role("heading", name="b0/g1/1").wait_for()


def test_256_trajectories_of_50_spans_are_drawn_and_scrolled_within_a_frame(opened, address):
    with opened(f"{address}#:batch-2") as page:
        page.locator(".time-box canvas").wait_for()
        page.locator(".time-box").focus()
        for _ in range(30):
            page.keyboard.press("PageDown")
        assert "task-31/7" in page.locator("#time-at").text_content()
        assert page.evaluate("drawnTimeline.box.scrollTop") > 3000
        assert page.locator(".time-box canvas").evaluate("(one) => one.height") < 1500
        took = page.evaluate(
            """() => {
              const began = performance.now();
              for (let n = 0; n < 20; n++) { drawnTimeline.box.scrollTop = n * 100; drawnTimeline.draw(); }
              return (performance.now() - began) / 20;
            }"""
        )
        assert took < 50  # ms; measured: 0.5


def test_zooming_shows_a_part_of_the_time(opened, address):
    with opened(f"{address}#:batch-2") as page:
        page.locator(".time-box canvas").wait_for()
        shown = "[drawnTimeline.first, drawnTimeline.last]"
        page.get_by_role("button", name="Zoom in").click()
        first, last = page.evaluate(shown)
        assert last - first == 30
        page.locator(".time-box").focus()
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Home")
        first, last = page.evaluate(shown)
        assert first == 0
        page.keyboard.press("0")
        assert page.evaluate(shown) == [0, 60]


def test_hostile_names_are_text(opened, address):
    with opened(f"{address}#:batch-3") as page:
        page.locator(".time-box").focus()
        page.keyboard.press("s")
        page.keyboard.press("ArrowRight")
        page.locator("main summary").click()
        assert "onerror" in page.locator("#time-at").text_content()
        assert "⟨U+202E⟩" in page.locator("#time-at").text_content()
        assert page.evaluate("window.ran") is None
        assert page.locator("main img").count() == 0


@pytest.mark.parametrize("address_of", [":batch-0", ":batch-4", ":batch-x", ":batch-"])
def test_an_address_of_no_batch_shows_the_overview(opened, address, address_of):
    with opened(f"{address}#{address_of}") as page:
        page.get_by_role("heading", name="Overview").wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast_with_its_background(opened, address, scheme):
    with opened(f"{address}#:batch-1", color_scheme=scheme) as page:
        page.get_by_text("As a table").click()
        assert page.evaluate(CONTRAST) == []


def test_a_narrow_window_shows_it_too(opened, address):
    with opened(f"{address}#:batch-1", viewport={"width": 400, "height": 700}) as page:
        page.locator(".time-box canvas").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        assert "59,125,216" in drawn_colors(page)
