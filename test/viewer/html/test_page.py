"""A page is one file without external requests, and holds a dump as text that no browser runs."""

import base64
import hashlib
import json
import re
from importlib import resources

import pytest
from helpers.html_pages import dump_of, page_of
from helpers.record_strategies import record, records, turn
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic.messages import Status, Timing, ToolResult
from torchrl_agentic.records import Dump
from torchrl_agentic.viewer.html import page, payload, write_page

ASSETS = resources.files("torchrl_agentic.viewer.html") / "assets"
HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "]]>",
    "</SCRIPT\t>",
    "\u2028",
    "\ud800",
    "\\u003c",
]


def _whole(message):
    """Return the message with what a server returned apart from its content."""
    return message.reasoning + message.text + (f"[refusal] {message.refusal}" if message.refusal else "")


def _tag_count(page):
    return page.text.lower().count("<script"), page.text.lower().count("</script"), page.text.count("<!--")


@given(some=st.lists(records(), min_size=1, max_size=3), spice=st.sampled_from(HOSTILE))
def test_all_text_of_a_dump_is_in_its_page_and_none_of_it_is_markup(tmp_path_factory, some, spice):
    """For any texts, the page has as many tags as one of harmless texts."""
    spiced = [record(turn(spice), request_id=f"{spice}{n}", gts=spice) for n in range(2)]
    page = page_of(dump_of(tmp_path_factory.mktemp("dump"), [*some, *spiced]))

    assert _tag_count(page) == (3, 3, 0)
    assert [found["id"] for found in page.bodies] == [one.request_id for one in [*some, *spiced]]
    for one, found in zip([*some, *spiced], page.bodies, strict=True):
        said = [
            text
            for turn in one.turns
            for text in (
                *(message.text for message in turn.context),
                _whole(turn.message),
                *(message.text for message in turn.messages),
            )
        ]
        shown = [
            text
            for turn in found["turns"]
            for text in (
                *(text for _, text in turn["context"]),
                "".join(text for _, text, _ in turn["said"]),
                *(text for _, text in turn["answers"]),
            )
        ]
        assert shown == said
        assert [call["result"] for call in found["calls"]] == [result.text for _, _, result in one.calls]
    assert page.bodies[-1]["right"] == spice


def test_the_list_has_what_the_summary_of_a_trajectory_has(tmp_path):
    one = record(
        turn(result=ToolResult.from_text("x", status=Status.TIMEOUT)), score=0.5, step=3, request_id="a"
    )
    index = page_of(dump_of(tmp_path, [one])).index
    ((name, file, step, score, reason, turns, statuses, tools, excerpt, run, task),) = index["rows"]
    assert (index["run_names"][run], task) == (one.run or index["run_names"][0], "")
    assert (name, index["files"][file], step, score, turns, excerpt) == ("a", "0", 3, 0.5, 1, "What?")
    assert index["reasons"][reason] == ""
    assert [(index["statuses"][status][0], count) for status, count in statuses] == [("timeout", 1)]
    assert [(index["tools"][tool], count) for tool, count in tools] == [("f", 1)]


def test_numbers_that_json_lacks_are_written_as_text(tmp_path):
    page = page_of(dump_of(tmp_path, [record(score=float("nan")), record(score=float("inf"))]))
    assert [row[3] for row in page.index["rows"]] == ["nan", "inf"]


def test_large_integers_keep_their_digits(tmp_path):
    """JavaScript has none: as numbers they would be rounded."""
    large = 2**63 + 1
    one = record(turn(result=ToolResult.from_text("x"), args={"n": large}), gts=large)
    (found,) = page_of(dump_of(tmp_path, [one])).bodies
    assert found["calls"][0]["args"] == [["n", str(large)]]
    assert found["right"] == str(large)


def test_texts_differ_from_numbers_and_programs_are_readable(tmp_path):
    one = record(turn(result=ToolResult.from_text("x"), args={"a": "5", "b": 5, "code": "x = 1\nx"}))
    (found,) = page_of(dump_of(tmp_path, [one])).bodies
    assert found["calls"][0]["args"] == [["a", '"5"'], ["b", "5"], ["code", "x = 1\nx"]]


class TestOneFile:
    def test_it_names_no_address_that_a_browser_would_fetch(self, tmp_path):
        text = page_of(dump_of(tmp_path, [record()])).text
        assert set(re.findall(r"[a-z]+://[^\"' ]*", text)) == {
            "http://www.w3.org/2000/svg"
        }  # a name, not a place
        assert not re.findall(
            r"<(?:link|img|iframe|object|embed|base|form action)|\bsrc=|@import|url\(", text
        )

    def test_its_policy_allows_its_own_style_and_script_and_nothing_else(self, tmp_path):
        page = page_of(dump_of(tmp_path, [record()]))
        (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page.text)
        (style,) = re.findall(r"<style>(.*?)</style>", page.text, re.DOTALL)
        (script,) = [inside for attributes, inside in page.scripts if not attributes]

        def hashed(text):
            return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

        allowed = dict(part.split(" ", 1) for part in policy.split("; "))
        assert allowed == {
            "default-src": "'none'",
            "style-src": hashed(style),
            "script-src": hashed(script),
            "base-uri": "'none'",
            "form-action": "'none'",
            "require-trusted-types-for": "'script'",
            "trusted-types": "'none'",
        }
        assert page.text.index("Content-Security-Policy") < page.text.index("<style>")

    @pytest.mark.parametrize(
        "name", ["data.js", "charts.js", "list.js", "trajectory.js", "timeline.js", "page.js"]
    )
    def test_no_script_makes_html_or_programs_of_text(self, name):
        text = (ASSETS / name).read_text("utf-8")
        assert not re.findall(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|Function\(|fetch\(", text
        )
        assert "</script" not in text

    def test_list_comes_before_the_trajectories(self, tmp_path):
        """So a browser shows it before it has read the rest."""
        text = page_of(dump_of(tmp_path, [record()])).text
        assert text.index('id="index"') < text.index('"use strict"') < text.index('id="chunk-0"')

    def test_the_name_of_the_folder_is_text_in_its_title(self, tmp_path):
        folder = tmp_path / "<script>alert(1)<"
        text = page_of(dump_of(folder, [record()])).text
        assert "<title>&lt;script&gt;alert(1)&lt; – trajectories</title>" in text


class TestWhatCannotBeRead:
    def test_bad_lines_are_listed_with_their_numbers_and_reasons(self, tmp_path):
        dump_of(tmp_path, [record()])
        with (tmp_path / "0.jsonl").open("ab") as file:
            file.write(b'no json\n{"schema_version": 99}\n{"schema_version": 3, "requ')
        index = page_of(tmp_path).index
        assert len(index["rows"]) == 1
        assert index["n_problems"] == 3
        assert [number for _, number, _ in index["problems"]] == [2, 3, 4]
        reasons = " ".join(reason for *_, reason in index["problems"])
        assert "version 99" in reasons
        assert "cut off" in reasons

    def test_lines_of_other_versions_and_trainers_are_shown_too(self, tmp_path):
        dump_of(tmp_path, [record(request_id="ours")])
        verl = {"input": "What?", "output": "42", "gts": "42", "score": 1.0, "step": 4}
        (tmp_path / "1.jsonl").write_text(json.dumps(verl))
        page = page_of(tmp_path)
        assert [row[2] for row in page.index["rows"]] == [0, 4]
        assert page.bodies[1]["given"] == "42"
        assert page.index["n_problems"] == 0

    def test_a_file_without_a_trajectory_says_so(self, tmp_path):
        (tmp_path / "0.jsonl").touch()
        index = page_of(tmp_path).index
        assert (index["rows"], index["problems"]) == ([], [[0, None, "the file holds no trajectory"]])

    def test_a_file_that_went_away_is_listed_and_the_others_are_shown(self, tmp_path):
        dump_of(tmp_path, [record(request_id="here")])
        dump_of(tmp_path, [record(request_id="gone")], "1.jsonl")
        with Dump(tmp_path) as dump:
            (tmp_path / "1.jsonl").unlink()
            index = page.Index("dump")
            assert len(list(page.chunks(dump, index))) == 1
        ((file, number, reason),) = index.problems
        assert (index.files[file], number) == ("1", None)
        assert "No such file" in reason

    def test_values_of_a_wrong_type_affect_only_their_trajectory(self, tmp_path):
        dump_of(tmp_path, [record(turn(result=ToolResult.from_text("x")), request_id=name) for name in "ab"])
        first, second = (json.loads(line) for line in (tmp_path / "0.jsonl").read_text().splitlines())
        first["turns"][0]["outcome"]["calls"][0]["args"] = 5
        (tmp_path / "0.jsonl").write_text("\n".join(map(json.dumps, (first, second))))
        page = page_of(tmp_path)
        assert [found["id"] for found in page.bodies] == [row[0] for row in page.index["rows"]] == ["b"]
        assert page.index["n_problems"] == 1

    def test_first_bad_lines_are_listed_and_all_are_counted(self, tmp_path):
        (tmp_path / "0.jsonl").write_text("no json\n" * 1200)
        index = page_of(tmp_path).index
        assert (index["n_problems"], len(index["problems"])) == (1200, 1000)

    def test_nothing_is_written_without_a_dump(self, tmp_path):
        with pytest.raises(FileNotFoundError), Dump(tmp_path / "none") as dump:
            write_page(dump, tmp_path / "page.html")
        assert not (tmp_path / "page.html").exists()


class TestLongTexts:
    def test_text_over_the_limit_is_cut_and_counted(self, tmp_path):
        long, short = "x" * 3 * payload.MAX_CHARS, "y" * 1000
        one = record(turn(short), turn(index=1, result=ToolResult.from_text(long)))
        (found,) = page_of(dump_of(tmp_path, [one])).bodies
        kept = found["calls"][0]["result"]
        assert found["turns"][0]["said"] == [["text", short, None]]
        assert found["left_out"] > 2 * payload.MAX_CHARS
        assert kept.endswith("more characters are not in this page]")
        assert len(json.dumps(found)) < 1.01 * payload.MAX_CHARS

    def test_text_within_the_limit_is_complete(self, tmp_path):
        (found,) = page_of(dump_of(tmp_path, [record(turn("x" * (payload.MAX_CHARS // 3)))])).bodies
        assert found["left_out"] == 0

    @given(st.lists(st.integers(0, 10_000), max_size=30), st.integers(0, 50_000))
    def test_the_cap_is_the_largest_that_keeps_the_sum_below_the_limit(self, lengths, most):
        cap = payload.fair_cap(lengths, most)
        if sum(lengths) > most:
            assert sum(min(cap, length) for length in lengths) <= most
            assert sum(min(cap + 1, length) for length in lengths) > most
        else:
            assert cap == max(lengths, default=0)

    def test_trajectories_are_packed_several_at_a_time(self, tmp_path, monkeypatch):
        """However large the dump, not more than one chunk is in memory."""
        monkeypatch.setattr("torchrl_agentic.viewer.html.page.CHUNK_BYTES", 5000)
        page = page_of(dump_of(tmp_path, [record(turn("x" * 2000), request_id=str(n)) for n in range(7)]))
        assert page.index["chunks"] == [2, 2, 2, 1]
        assert [found["id"] for found in page.bodies] == list("0123456")


class TestTimes:
    def test_quantiles_are_times_that_were_measured(self, tmp_path):
        results = [
            ToolResult.from_text("x", status=status)
            for status in (Status.OK, Status.TIMEOUT, Status.INVALID_ARGS)
        ]
        timed = [
            record(turn(result=_timed(result, seconds)))
            for result, seconds in zip(results, (1.0, 3.0, 99.0), strict=True)
        ]
        index = page_of(dump_of(tmp_path, timed)).index
        assert index["times"] == [["f", 2, [0.5] * 4, [1.0, 3.0, 3.0, 3.0]]]  # no tool ran for the third

    def test_times_that_are_not_numbers_are_not_drawn(self, tmp_path):
        one = record(turn(result=_timed(ToolResult.from_text("x"), float("nan"))))
        (found,) = page_of(dump_of(tmp_path, [one])).bodies
        assert (found["calls"][0]["run"], found["calls"][0]["queue"]) == (None, 0.5)


def _timed(result, run_s):
    return ToolResult(result.parts, status=result.status, timing=Timing(100.0, 0.5, run_s))
