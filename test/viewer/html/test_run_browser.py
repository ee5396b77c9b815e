"""Pages of training runs and of groups in Chromium: `make test-browser`."""

from pathlib import Path

import pytest
from helpers.training_runs import training_run

from torchrl_agentic.cli.view import view

CONTRAST = Path(__file__).with_name("contrast.js").read_text()
SPICE = "</script><img src=x onerror='window.ran=1'>\ud800\u202e __proto__"

pytestmark = pytest.mark.browser


def page_of(folder):
    page = folder / "page.html"
    assert view(folder, mask="", query="", sort="none", html=page, as_text=False) == 0
    return page


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return page_of(training_run(tmp_path_factory.mktemp("run") / "grpo"))


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "grpo"
    for name in ("run-a", "b-run"):
        training_run(folder, run=name, steps=2)
    return page_of(folder)


def address(tab):
    return tab.evaluate("location.hash")


def shown(tab):
    return tab.locator("#count").text_content()


class TestRunPage:
    def test_it_has_curves_ends_tools_and_rankings(self, opened, run):
        with opened(run) as tab:
            tab.get_by_role("link", name="Training run", exact=True).click()
            tab.locator(".curve-box svg").first.wait_for()
            titles = tab.locator("figcaption").all_text_contents()
            assert [title.split(" 0")[0] for title in titles][:1] == ["Score"]
            assert any(title.startswith("loss") for title in titles)
            headings = tab.locator("main h3").all_text_contents()
            assert headings == [
                "Curves",
                "Logged by the trainer",
                "How trajectories ended",
                "Tools",
                "Groups with the lowest scores",
                "Groups with the highest scores",
                "Trajectories with the lowest scores",
                "Trajectories with the highest scores",
                "Steps",
            ]
            assert "24 trajectories · 3 steps" in tab.locator("main").text_content()

    def test_a_point_of_a_curve_leads_to_the_trajectories_of_its_step(self, opened, run):
        with opened(f"{run.as_uri()}#:run-1") as tab:
            tab.locator(".curve-box svg").first.wait_for()
            tab.locator(".curve-box").first.locator("circle").nth(2).click()
            tab.get_by_role("heading", name="Overview of step:2").wait_for()
            assert address(tab) == "#?step%3A2"
            assert shown(tab) == "8 of 24"
            tab.locator("[role=option]").first.click()
            tab.locator("section.turn").first.wait_for()

    def test_the_logged_scalars_lead_there_too(self, opened, run):
        with opened(f"{run.as_uri()}#:run-1") as tab:
            loss = tab.locator(".curve-box", has_text="loss")
            loss.locator("circle").nth(1).click()
            tab.get_by_role("heading", name="Overview of step:1").wait_for()

    def test_the_worst_trajectory_and_group_are_linked(self, opened, run):
        with opened(f"{run.as_uri()}#:run-1") as tab:
            lowest = tab.locator(
                "section", has=tab.get_by_role("heading", name="Trajectories with the lowest")
            )
            lowest.get_by_role("link").first.click()
            tab.locator("section.turn").first.wait_for()
            assert address(tab) == "#run-a-1-0"
            tab.go_back()
            groups = tab.locator("section", has=tab.get_by_role("heading", name="Groups with the lowest"))
            groups.get_by_role("link").first.click()
            tab.locator(".sample").nth(3).wait_for()
            assert address(tab) == "#:group-2"

    def test_keys_lead_to_run_and_group(self, opened, run):
        with opened(run) as tab:
            tab.keyboard.press("r")
            tab.get_by_role("heading", name="Training run run-a").wait_for()
            tab.keyboard.press("j")
            tab.locator("section.turn").first.wait_for()
            tab.keyboard.press("g")
            tab.locator(".sample").nth(3).wait_for()
            assert tab.locator("main h2").text_content() == "What is 0 × 7?"

    def test_runs_are_kept_apart(self, opened, two_runs):
        with opened(two_runs) as tab:
            assert "The dump mixes 2 runs" in tab.locator("main").text_content()
            assert "run b-run" in tab.locator("#list").text_content() or shown(tab) == "32 in all"
            tab.get_by_role("link", name="Training run b-run").click()
            tab.locator(".curve-box svg").first.wait_for()
            tab.locator(".curve-box").first.locator("circle").first.click()
            tab.get_by_role("heading", name='Overview of step:0 run:"b-run"').wait_for()
            assert shown(tab) == "8 of 32"
            assert set(tab.evaluate("found.map((row) => INDEX.run_names[row.run])")) == {"b-run"}


class TestGroupPage:
    def test_samples_are_side_by_side_with_their_advantages(self, opened, run):
        with opened(f"{run.as_uri()}#:group-2") as tab:
            tab.locator(".sample").nth(3).wait_for()
            cells = tab.locator("main tbody tr").evaluate_all(
                "(rows) => rows.map((row) => [...row.children].map((cell) => cell.textContent))"
            )
            assert [row[1:3] for row in cells] == [
                ["1", "+1.414"],
                ["0.5", "0"],
                ["0.5", "0"],
                ["0", "-1.414"],
            ]
            assert cells[3][3:] == ["2", "1", "1", "max_turns"]
            facts = tab.locator(".heading").text_content()
            assert "advantages as in the batch" in facts
            assert "task sum-1" in facts
            cards = tab.locator(".sample")
            assert "It is 7." in cards.nth(0).text_content()
            assert "turn 2: the assistant after 6 characters" in cards.nth(1).text_content()
            assert cards.nth(1).locator("mark").all_text_contents() == ["7.", "2."]

    def test_a_sample_opens_its_trajectory_which_leads_back(self, opened, run):
        with opened(f"{run.as_uri()}#:group-2") as tab:
            tab.locator(".sample").nth(3).get_by_role("link").click()
            tab.locator("section.turn").first.wait_for()
            assert address(tab) == "#run-a-1-0"
            assert "advantage -1.414" in tab.locator(".heading").text_content()
            tab.get_by_role("link", name="Compare the 4 samples of this prompt").click()
            tab.locator(".sample").nth(3).wait_for()
            assert address(tab) == "#:group-2"
            tab.get_by_role("link", name="Next prompt").click()
            tab.get_by_role("heading", name="What is 2 × 7?").wait_for()
            assert "teaches nothing" in tab.locator("main").text_content()

    def test_a_group_that_is_none_shows_the_overview(self, opened, run):
        for wrong in ("#:group-0", "#:group-99", "#:run-7", "#?%ff"):
            with opened(f"{run.as_uri()}{wrong}") as tab:
                tab.get_by_role("heading", name="Overview").wait_for()


class TestQueries:
    @pytest.mark.parametrize(
        ("query", "count"),
        [
            ("advantage<0", 3),
            ("group:3 score>=1", 1),
            ("reason:max_turns", 6),
            ("run:nothing", 0),
            ("status:timeout", 3),
            ("step:0", 8),
            ("step:0,2 -task:sum-0", 12),
            ("step>=1 step<=2", 16),
            ("step>=1 score<0.5 What", 2),
            ("task:sum-4", 4),
            ("turns!=2", 0),
        ],
    )
    def test_a_query_lists_what_it_says(self, opened, run, query, count):
        with opened(run) as tab:
            tab.locator("#search").fill(query)
            wanted = f"{count} of 24"
            tab.locator("#count", has_text=wanted).wait_for()
            for _ in range(200):
                if shown(tab) == wanted:
                    break
                tab.wait_for_timeout(20)
            assert shown(tab) == wanted

    def test_an_unknown_field_is_searched_as_text(self, opened, run):
        with opened(run) as tab:
            tab.locator("#search").fill("nofield:3")
            tab.locator("#count", has_text="0 of 24").wait_for()


def test_no_text_of_a_run_is_markup(opened, tmp_path):
    page = page_of(training_run(tmp_path / "hostile", spice=SPICE, run="<b>&\"'\ud800", steps=2))
    with opened(page) as tab:
        for place in ("#:run-1", "#:group-2", "#"):
            tab.evaluate(f"location.hash = '{place}'")
            tab.locator("main h2").wait_for()
            tab.wait_for_timeout(200)
            assert tab.evaluate("[window.ran, {}.polluted]") == [None, None]
            assert tab.locator("main img, main b b, main script").count() == 0
        tab.evaluate("location.hash = '#:run-1'")
        tab.locator(".curve-box circle").first.click()
        tab.locator("#count", has_text="8 of 16").wait_for()


@pytest.mark.parametrize("scheme", ["dark", "light"])
@pytest.mark.parametrize("place", ["#:group-2", "#:run-1"])
def test_all_text_has_contrast(opened, run, place, scheme):
    with opened(f"{run.as_uri()}{place}", color_scheme=scheme) as tab:
        tab.locator(".sample, .curve-box svg").first.wait_for()
        tab.wait_for_timeout(200)
        assert tab.evaluate(CONTRAST) == []


def test_a_narrow_window_shows_everything(opened, run):
    with opened(f"{run.as_uri()}#:run-1", viewport={"width": 400, "height": 800}) as tab:
        tab.locator(".curve-box svg").first.wait_for()
        assert tab.evaluate("document.documentElement.scrollWidth <= 400")
