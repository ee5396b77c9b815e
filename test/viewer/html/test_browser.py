"""The page in Chromium: `make test-browser`."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.html_pages import dump_of, page_of
from helpers.record_strategies import record, turn

from torchrl_agentic.messages import DispatchResult, Message, ParsedCall, Status, Timing, ToolResult, Turn
from torchrl_agentic.records import TokenRecord
from torchrl_agentic.tokens.ledger import TokenLedger

CONTRAST = Path(__file__).with_name("contrast.js").read_text()

pytestmark = pytest.mark.browser

SCRIPTS = [
    "</script><script>window.ran = 1; alert(1)</script>",
    "<img src=x onerror='window.ran = 1; alert(2)'><svg onload=alert(3)>",
    "<iframe srcdoc='<script>parent.ran = 1</script>'></iframe><a href='javascript:alert(4)'>x</a>",
    "javascript:alert(5)",
    "<!--<script>",
    '"><style>*{display:none}</style>',
    "${alert(6)}`;alert(7)//",
    "__proto__",
    "constructor",
]
ODD = "\ud800 \x1b[31mred\x1b[0m \u202egnp.exe \u200b\x00\x07 \u2066a\u2069 ❤️ 👩‍💻"


def _wait_for_address(page, wanted=None):
    """Give the part that names a trajectory, once it is there. The page forbids wait_for_function."""
    for _ in range(500):
        address = page.evaluate("location.hash")
        if address and wanted in (None, address):
            break
        page.wait_for_timeout(20)
    return address


def _hostile(number, text):
    """A trajectory in which everything that can be a text is the same one."""
    call = ParsedCall(text, {text: text, "__proto__": {"polluted": 1}, "constructor": text}, text)
    result = ToolResult.from_text(text + ODD, status=Status.ERROR)
    result = replace(result, timing=Timing(1.0, 0.1, 0.2), notes=(text,), metrics={text: text})
    messages = (Message("tool", text + ODD, tool_call_id=text),)
    context = (Message(text, text), Message("user", text + ODD))
    outcome = DispatchResult(text, (call,), (result,))
    made = Turn(text, 0, Message("assistant", f"<think>{text}</think>{text}"), outcome, messages, context)
    ledger = TokenLedger()
    ledger.add_prompt([1])
    ledger.add_sampled([2])
    return record(
        made,
        request_id=f"{text}#{number}/call-1",
        gts={text: text, "__proto__": 1},
        extras={text: text, "__proto__": text},
        termination_reason=text,
        tokens=TokenRecord(ledger, (text, text)),
        versions={text: text, "__proto__": text},
        score=float(number),
    )


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile") / "<img src=x onerror=alert(8)>"
    dump_of(folder, [_hostile(n, text) for n, text in enumerate(SCRIPTS)], "<script>alert(9)<.jsonl")
    page_of(folder)
    return folder / "page.html"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    good = replace(ToolResult.from_text("forty-two"), timing=Timing(10.0, 0.5, 1.0))
    bad = replace(ToolResult.from_text("no", status=Status.TIMEOUT), timing=Timing(20.0, 0.0, 2.0))
    some = [
        record(
            turn(f"message {n}", result=bad if n % 3 == 0 else good),
            request_id=f"id-{n}",
            score=n / 99,
            step=n // 50,
            gts="42",
            rewards=(n / 10,),
        )
        for n in range(100)
    ]
    long = record(*(turn(f"turn {n}", index=n, result=bad) for n in range(250)), request_id="long")
    dump_of(folder, [*some, long])
    page_of(folder)
    return folder / "page.html"


class TestHostileDump:
    @pytest.mark.parametrize("number", range(len(SCRIPTS)))
    def test_no_text_of_a_dump_runs_or_becomes_an_element(self, opened, hostile, number):
        """Nor is anything tried that the policy had to stop: the browser would say so in its console."""
        with opened(hostile) as page:
            page.locator(f"#line-{number}").click()
            page.locator("section.turn").wait_for()
            for fold in page.locator("main summary").all():
                fold.click()
            page.locator("#more summary").click()
            assert page.evaluate("[window.ran, {}.polluted, [].polluted]") == [None, None, None]
            assert page.locator("img, iframe, svg[onload], a[href^='javascript'], body style").count() == 0
            assert page.locator("script:not([type])").count() == 1
            shown = page.locator("main").text_content()
            assert SCRIPTS[number] in shown

    def test_the_overview_runs_nothing_either(self, opened, hostile):
        with opened(hostile) as page:
            page.locator("main h2").wait_for()
            assert page.evaluate("window.ran") is None
            assert "<img src=x" in page.locator("#name").text_content()

    def test_characters_that_hide_or_reorder_text_are_written_out(self, opened, hostile):
        with opened(hostile) as page:
            page.locator("#line-0").click()
            result = page.locator("article.call .result").text_content()
            assert "⟨U+D800⟩ ⟨U+001B⟩[31mred⟨U+001B⟩[0m ⟨U+202E⟩gnp.exe " in result
            assert "⟨U+200B⟩⟨U+0000⟩⟨U+0007⟩ ⟨U+2066⟩a⟨U+2069⟩ ❤️ 👩‍💻" in result

    def test_a_script_that_is_put_in_all_the_same_does_not_run(self, opened, hostile):
        with opened(hostile, quiet=False) as page:
            page.evaluate("document.body.append(document.createElement('script'))")
            with pytest.raises(Exception, match="TrustedScript"):
                page.evaluate(
                    "document.querySelector('body > script:last-child').textContent = 'window.ran = 1'"
                )
            with pytest.raises(Exception, match="TrustedHTML"):
                page.evaluate("document.body.innerHTML = '<p>x'")
            assert page.evaluate("window.ran") is None

    @pytest.mark.parametrize("number", range(len(SCRIPTS)))
    def test_address_of_a_trajectory_works_for_any_id(self, opened, hostile, number):
        with opened(hostile) as page:
            page.locator(f"#line-{number}").click()
            page.locator("section.turn").wait_for()
            _wait_for_address(page)
            address = page.evaluate("location.href")
        with opened(address) as page:
            page.locator(f"#line-{number}[aria-selected=true]").wait_for()

    def test_numbers_that_cannot_be_drawn_are_omitted(self, opened, tmp_path):
        ledger = TokenLedger()
        ledger.add_injected([5], [-3])
        results = [
            replace(ToolResult.from_text("x"), timing=Timing(start, 1e308, -1.0), reward=float("nan"))
            for start in (-1e308, 1e308)
        ]
        calls = tuple(ParsedCall("f", {}, f"c{n}") for n in range(2))
        made = Turn("t", 0, Message("assistant", "hello"), DispatchResult("", calls, tuple(results)))
        some = [
            record(made, score=score, started=1e300, rewards=(float("inf"),), tokens=TokenRecord(ledger))
            for score in (-1e308, 1e308, float("nan"))
        ]
        page_of(dump_of(tmp_path, some))
        with opened(tmp_path / "page.html") as page:
            page.locator("#line-2").click()
            page.locator("section.turn").wait_for()
            assert "reward NaN" in page.locator("#call-1").text_content()
            assert page.locator(".painted").text_content() == "5"


class TestList:
    def test_only_lines_in_sight_are_in_the_document(self, opened, plain):
        with opened(plain) as page:
            assert page.locator("[role=option]").count() < 40
            page.locator("#list").evaluate("list => { list.scrollTop = 1e9 }")
            page.locator("#line-100").wait_for()
            assert page.locator("#line-0").count() == 0

    @pytest.mark.parametrize(
        ("field", "value", "count"),
        [
            ("by-status", "timeout", "35 of 101"),
            ("by-status", "without a failed call", "66 of 101"),
            ("by-tool", "f", "101 in all"),
            ("by-step", "1", "50 of 101"),
            ("from-score", "0.9", "10 of 101"),
        ],
    )
    def test_filters_keep_matching_rows(self, opened, plain, field, value, count):
        with opened(plain) as page:
            page.locator("#more summary").click()
            select = page.locator(f"#{field}")
            if field == "from-score":
                select.fill(value)
            else:
                texts = select.locator("option").all_text_contents()
                select.select_option(label=next(text for text in texts if text.startswith(value)))
            page.keyboard.press("Tab")
            page.get_by_role("status").get_by_text(count).wait_for()
            page.get_by_role("button", name="Show all").click()
            page.get_by_role("status").get_by_text("101 in all").wait_for()

    def test_the_search_finds_text_inside_of_trajectories(self, opened, plain):
        with opened(plain) as page:
            page.keyboard.press("/")
            page.keyboard.type("MESSAGE 17")
            page.get_by_role("status").get_by_text(re.compile("^1 of 101$")).wait_for()
            page.keyboard.press("Enter")
            page.keyboard.press("j")
            page.locator("#line-17[aria-selected=true]").wait_for()
            page.keyboard.press("/")
            page.keyboard.press("Escape")
            page.get_by_role("status").get_by_text("101 in all").wait_for()

    def test_the_worst_can_come_first(self, opened, plain):
        with opened(plain) as page:
            page.locator("#order").select_option("best")
            assert page.locator("[role=option]").first.get_attribute("id") == "line-99"


class TestTrajectory:
    def test_keyboard_reaches_a_failed_call_from_the_list_and_returns(self, opened, plain):
        with opened(plain) as page:
            page.keyboard.press("j")
            page.locator("#line-0[aria-selected=true]").wait_for()
            page.keyboard.press("Escape")
            page.keyboard.press("ArrowDown")
            page.keyboard.press("ArrowDown")
            page.keyboard.press("ArrowDown")
            page.locator("#line-3[aria-selected=true]").wait_for()
            page.get_by_role("region", name="Turn").get_by_text("message 3").wait_for()
            page.keyboard.press("Enter")
            page.locator("#title:focus").wait_for()
            page.keyboard.press("e")
            page.locator("#call-1:focus").wait_for()
            page.keyboard.press("Escape")
            page.locator("#list:focus").wait_for()
            page.keyboard.press("k")
            page.locator("#line-2[aria-selected=true]").wait_for()
            page.keyboard.press("o")
            page.get_by_role("heading", name="Overview").wait_for()

    def test_no_key_of_a_quick_hand_is_lost(self, opened, plain):
        with opened(plain) as page:
            page.keyboard.press("j")
            page.evaluate(
                """() => {
                  const press = (key) => document.dispatchEvent(new KeyboardEvent("keydown", { key }));
                  for (let step = 0; step < 90; step++) press("j");
                  for (let round = 0; round < 200; round++) { press("k"); press("j"); }
                }"""
            )
            page.locator("#line-90[aria-selected=true]").wait_for()
            page.get_by_role("region", name="Turn").get_by_text("message 90").wait_for()
            assert _wait_for_address(page, "#id-90") == "#id-90"
            page.keyboard.press("j")
            page.keyboard.press("o")
            page.get_by_role("heading", name="Overview").wait_for()
            page.wait_for_timeout(300)
            assert page.evaluate("location.hash") == ""
            assert page.get_by_role("heading", name="Overview").is_visible()

    def test_it_says_what_happened_and_shows_both_answers(self, opened, plain):
        with opened(f"{plain.as_uri()}#id-3") as page:
            page.locator(".summary").get_by_text("it took too long").wait_for()
            assert (
                page.locator(".answers").text_content()
                == "The right answer42The model's last messagemessage 3"
            )
            assert page.get_by_role("heading", name="Reward per turn").is_visible()

    def test_link_opens_a_call_that_is_not_shown_yet(self, opened, plain):
        with opened(f"{plain.as_uri()}#long/call-240") as page:
            page.locator("#call-240:focus").wait_for()
            assert page.locator("section.turn").count() == 240
            page.get_by_role("button", name="10 turns to come").click()
            assert page.locator("section.turn").count() == 250

    def test_long_text_is_shortened_until_it_is_expanded(self, opened, tmp_path):
        page_of(dump_of(tmp_path, [record(turn("x" * 50_000 + "end"), request_id="r")]))
        with opened(f"{(tmp_path / 'page.html').as_uri()}#r") as page:
            said = page.locator("section.turn .assistant pre")
            assert len(said.text_content()) < 21_000
            said.get_by_role("button", name="30,003 more characters").click()
            assert said.text_content() == "x" * 50_000 + "end"

    def test_an_address_of_nothing_shows_the_overview(self, opened, plain):
        for address in ("nothing", "%", ":0", ":1000", "id-3/call-9"):
            with opened(f"{plain.as_uri()}#{address}") as page:
                page.locator("main h2").wait_for()

    def test_previous_and_next_follow_the_filters(self, opened, plain):
        with opened(plain) as page:
            page.locator("#order").select_option("best")
            page.locator("#line-99").click()
            page.get_by_role("link", name="Next").click()
            page.locator("#line-98[aria-selected=true]").wait_for()

    def test_a_timeline_shows_waiting_and_running(self, opened, plain):
        with opened(f"{plain.as_uri()}#id-1") as page:
            page.locator("rect.queue").wait_for(state="attached")
            queue, run = (
                float(page.locator(f".chart rect.{kind}").get_attribute("width")) for kind in ("queue", "bar")
            )
            assert run == pytest.approx(2 * queue)
            page.locator(".chart a").first.click()
            page.locator("#call-1:focus").wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast_with_its_background(opened, plain, scheme):
    """A ratio of 4.5, as WCAG AA asks for text of this size."""
    with opened(f"{plain.as_uri()}#id-3", color_scheme=scheme) as page:
        page.locator("section.turn").wait_for()
        assert page.evaluate(CONTRAST) == []
