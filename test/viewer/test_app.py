"""The viewer as it is used: keys are pressed, and the screen is looked at."""

import json
from pathlib import Path

import pytest
from helpers.viewer_dumps import three_steps, trajectory, write
from helpers.viewer_screen import opened
from textual.widgets import Input

from torchrl_agentic.records import record_to_json
from torchrl_agentic.viewer.screens import KEYS

SIZES = [(80, 24), (200, 60)]


@pytest.mark.parametrize("size", SIZES)
async def test_the_first_screen_shows_list_page_and_keys(tmp_path: Path, size: tuple[int, int]):
    async with opened(three_steps(tmp_path / "dump"), size) as screen:
        assert (len(screen.lines), {len(line) for line in screen.lines}) == (size[1], {size[0]})
        assert screen.top.startswith("dump · step 1 (1/3) · 1/6")
        assert screen.bottom.startswith("? keys")
        assert [line[:25].split()[0] for line in screen.lines[2:8]] == [
            "-0.05",
            "-0.6",
            "10",
            "2",
            "–",
            "nan",
        ]
        assert "✓ python · ok · queued 0.5 ms · ran 25.1 ms" in screen.text


async def test_n_and_p_go_through_trajectories_and_capitals_through_steps(tmp_path: Path):
    async with opened(three_steps(tmp_path)) as screen:
        seen = []
        for key in "nnpNNPNN":
            await screen.press(key)
            seen.append(screen.name)
        assert seen == ["1 b", "1 c", "1 b", "2 b", "10 b", "2 b", "10 b", "1 b"]


async def test_o_sorts_by_score_and_n_follows(tmp_path: Path):
    async with opened(three_steps(tmp_path)) as screen:
        await screen.press("o")
        assert (screen.names, "score ↑" in screen.top) == (["b", "a", "d", "c", "e", "f"], True)
        await screen.press("n")
        assert screen.name == "1 d"
        await screen.press("o")
        assert (screen.names, "score ↓" in screen.top) == (["c", "d", "a", "b", "e", "f"], True)
        await screen.press("o")
        assert screen.names == list("abcdef")


async def test_f_searches_and_enter_goes_through_matches_of_all_trajectories(tmp_path: Path):
    async with opened(three_steps(tmp_path)) as screen:
        await screen.press("f")
        await screen.type("needle")
        seen = [(screen.name, screen.bottom.split()[0])]
        for key in ("enter", "enter", "b"):
            await screen.press(key)
            seen.append((screen.name, screen.bottom.split()[0]))
        assert seen == [("1 b", "1/2"), ("1 d", "2/2"), ("1 b", "1/2"), ("1 d", "2/2")]
        await screen.press("escape")
        assert screen.bottom.startswith("? keys")


async def test_a_match_far_down_is_scrolled_to(tmp_path: Path):
    write(tmp_path, trajectory("a", step=1, answer="line\n" * 500 + "needle\n" + "line\n" * 500))
    async with opened(tmp_path) as screen:
        assert "needle" not in screen.text
        await screen.press("f")
        await screen.type("needle")
        assert "needle" in screen.text


async def test_words_without_a_match_are_reported(tmp_path: Path):
    async with opened(three_steps(tmp_path)) as screen:
        await screen.press("f")
        await screen.type("nowhere")
        await screen.press("enter")
        assert "not found" in screen.bottom
        await screen.press("escape", "enter")
        assert "there is no search" in screen.bottom


async def test_slash_filters_and_explains_a_query_that_is_wrong(tmp_path: Path):
    async with opened(three_steps(tmp_path)) as screen:
        await screen.press("slash")
        await screen.type("statu:timeout")
        assert "no field statu; did you mean status?" in screen.bottom
        assert screen.names == list("abcdef")
        await screen.press("escape", "slash")
        await screen.type("status:timeout,malformed")
        assert screen.names == ["b", "d"]
        assert "status:timeout,malformed" in screen.top
        assert "1/2 of 6" in screen.top
        await screen.press("n", "N")
        assert screen.name == "2 d"
        await screen.press("slash", "escape")
        assert screen.names == list("abcdef")


async def test_a_query_that_nothing_fulfils_says_so_on_the_page(tmp_path: Path):
    async with opened(three_steps(tmp_path)) as screen:
        await screen.press("slash")
        await screen.type("score>100")
        assert "No trajectory matches the query" in screen.text


async def test_a_lists_all_steps(tmp_path: Path):
    async with opened(three_steps(tmp_path)) as screen:
        await screen.press("N", "a")
        assert screen.names == list("abcdef") * 3
        assert "all steps · 7/18" in screen.top
        await screen.press("p")
        assert screen.name == "1 f"
        await screen.press("N")
        assert screen.name == "2 a"
        await screen.press("a")
        assert (screen.names, screen.name) == (list("abcdef"), "2 a")


async def test_r_jumps_to_a_request_id_over_all_steps(tmp_path: Path):
    record = trajectory("z", step=2, request_id="12ab-34cd-56ef")
    async with opened(write(three_steps(tmp_path), record)) as screen:
        await screen.press("slash")
        await screen.type("score<0")
        await screen.press("r")
        await screen.type("12ab34")
        assert screen.name == "2 z"
        await screen.press("r")
        await screen.type("ffff")
        assert "no request id begins with" in screen.bottom


async def test_s_shows_a_table_and_x_one_field_of_it(tmp_path: Path):
    async with opened(three_steps(tmp_path)) as screen:
        await screen.press("s")
        assert "request_id         01-a" in screen.text
        await screen.press("x")
        assert "Which field?" in screen.text
        await screen.type("note")
        assert "of a" in screen.text
        assert "request_id" not in screen.text
        assert "· note" in screen.top
        await screen.press("n")
        assert "of b" in screen.text
        await screen.press("s")
        assert "✗ python" in screen.text


async def test_fields_that_only_some_have_can_be_chosen(tmp_path: Path):
    write(tmp_path, *(trajectory(name, step=1, extras={f"of_{name}": 1}) for name in "abc"))
    async with opened(tmp_path) as screen:
        await screen.press("x")
        await screen.type("of_b")
        assert "has no of_b" in screen.text
        await screen.press("n")
        assert "of_b               1" in screen.text


async def test_i_shows_tokens_by_source(tmp_path: Path):
    async with opened(three_steps(tmp_path)) as screen:
        await screen.press("i")
        assert "sampled · 2 tokens [3, 5) · mask 1" in screen.text
        await screen.press("n")
        assert "not recorded" in screen.text
        await screen.press("i")
        assert "✗ python" in screen.text


async def test_c_compares_with_the_group_and_m_cycles_through_it(tmp_path: Path):
    async with opened(three_steps(tmp_path), (160, 40)) as screen:
        seen = []
        for key in "cmm":
            await screen.press(key)
            seen.append(screen.lines[1].split("┃")[1].split("·")[0].strip())
        assert seen == ["b", "c", "b"]
        await screen.press("escape")
        assert "┃" not in screen.text


async def test_single_trajectory_of_a_group_has_no_comparison(tmp_path: Path):
    async with opened(write(tmp_path, trajectory("a", step=1))) as screen:
        await screen.press("c")
        assert "no other trajectory" in screen.bottom


async def test_e_unfolds_reasoning(tmp_path: Path):
    async with opened(three_steps(tmp_path)) as screen:
        assert "compute the product" not in screen.text
        await screen.press("e")
        assert "compute the product" in screen.text
        await screen.press("e")
        assert "compute the product" not in screen.text


async def test_j_k_g_and_capital_g_scroll_the_page_wherever_the_focus_is(tmp_path: Path):
    write(tmp_path, trajectory("a", step=1, answer="\n".join(map(str, range(300)))))
    async with opened(tmp_path) as screen:
        page = screen.app.page
        positions = []
        for key in ("j", "j", "k", "G", "g"):
            await screen.press(key)
            positions.append(page.scroll_offset.y)
        assert 0 < positions[2] == positions[0] < positions[1] < positions[3]
        assert positions[4] == 0
        await screen.press("right", "down", "down", "up")
        assert page.scroll_offset.y == 1


async def test_arrows_and_tab_move_the_focus_and_the_cursor_of_the_list(tmp_path: Path):
    async with opened(three_steps(tmp_path)) as screen:
        await screen.press("down", "down", "up")
        assert screen.name == "1 b"
        await screen.press("right")
        assert screen.app.focused is screen.app.page
        await screen.press("left")
        assert screen.app.focused is screen.app.list
        await screen.press("tab")
        assert screen.app.focused is screen.app.page


async def test_a_click_chooses_a_trajectory(tmp_path: Path):
    async with opened(three_steps(tmp_path)) as screen:
        await screen.pilot.click("#list", offset=(3, 3))
        assert screen.name == "1 d"


async def test_t_chooses_a_step(tmp_path: Path):
    async with opened(three_steps(tmp_path)) as screen:
        await screen.press("t")
        assert "Which step?" in screen.text
        await screen.press("down", "enter")
        assert screen.name == "2 a"
        await screen.press("t")
        await screen.type("10")
        assert screen.name == "10 a"
        await screen.press("t", "escape")
        assert screen.name == "10 a"


async def test_plus_shows_more_of_a_long_text(tmp_path: Path):
    write(tmp_path, trajectory("a", step=1, answer="word " * 10_000 + "end"))
    async with opened(tmp_path) as screen:
        await screen.press("G")
        assert "more characters: + shows more" in screen.text
        await screen.press("plus", "G")
        assert screen.lines[-2].rstrip().endswith("end")


async def test_l_hides_the_list_and_capital_l_loads_a_large_trajectory(tmp_path: Path):
    write(tmp_path, trajectory("a", step=1, answer="word " * 500_000))
    async with opened(tmp_path) as screen:
        await screen.press("l")
        assert "score err" not in screen.text
        assert "L loads all of it" in screen.text
        await screen.pilot.press("L")
        await screen.until(lambda: "✓ python" in screen.text)


@pytest.mark.parametrize("size", SIZES)
async def test_the_help_names_all_keys(tmp_path: Path, size: tuple[int, int]):
    async with opened(three_steps(tmp_path), size) as screen:
        await screen.press("question_mark")
        assert "next, previous trajectory" in screen.text
        await screen.press("escape")
        assert "step 1 (1/3)" in screen.top
        bound = {binding[0] for binding in screen.app.BINDINGS}
        told = {key for keys in KEYS for key in keys.split()} - {"tab", "←", "→"}
        names = {"?": "question_mark", "/": "slash", "+": "plus", "esc": "escape"}
        assert {names.get(key, key) for key in told} == bound


async def test_trajectories_and_steps_that_come_appear(tmp_path: Path):
    async with opened(write(tmp_path, trajectory("a", step=1))) as screen:
        write(tmp_path, trajectory("b", step=1))
        await screen.until(lambda: screen.names == ["a", "b"])
        assert screen.name == "1 a"
        await screen.press("F")
        assert screen.name == "1 b"
        write(tmp_path, trajectory("c", step=2))
        await screen.until(lambda: screen.name == "2 c")
        assert "following" in screen.bottom


async def test_a_file_that_vanishes_is_explained(tmp_path: Path):
    async with opened(three_steps(tmp_path)) as screen:
        (tmp_path / "1.jsonl").unlink()
        await screen.until(lambda: "1.jsonl was removed" in screen.bottom)
        assert screen.name == "10 a"


async def test_empty_folder_is_watched_for_new_files(tmp_path: Path):
    async with opened(tmp_path) as screen:
        assert "holds no .jsonl" in screen.text.replace("\n", " ")
        await screen.press("n", "N", "s", "i", "c", "t", "escape", "x", "escape", "o", "F", "F", "L", "plus")
        write(tmp_path, trajectory("a", step=1))
        await screen.until(lambda: screen.name == "1 a")


HOSTILE = (
    "\x1b[2J\x1b]0;title\x07\r\x9b31m[bold red]markup[/] :skull: \u202edesrever\u2066 \u200bz"
    + "\u0301" * 90
    + " 漢字👍 \ud83d \x00\t"
)


@pytest.mark.parametrize("size", SIZES)
async def test_no_control_character_of_a_dump_reaches_the_screen(tmp_path: Path, size: tuple[int, int]):
    """In names, texts, arguments, results, reasons, fields, statuses, tokens: every view is looked at."""
    record = record_to_json(trajectory(HOSTILE, step=1, answer=HOSTILE, result=HOSTILE, tokens=True))
    text = json.dumps(record).replace("python", json.dumps(HOSTILE)[1:-1])
    text = text.replace("no_calls", json.dumps(HOSTILE)[1:-1])
    data = {**json.loads(text), "request_id": HOSTILE, HOSTILE: {HOSTILE: HOSTILE}}
    lines = [
        json.dumps(data),
        json.dumps({**data, "request_id": "x"}),
        HOSTILE.encode("utf-8", "replace").decode(),
    ]
    (tmp_path / f"{HOSTILE[:4]}.jsonl").write_text("\n".join(lines))
    async with opened(tmp_path, size) as screen:
        for key in ("n", "n", "p", "e", "G", "s", "G", "x", "escape", "i", "c", "a", "t", "escape", "f"):
            await screen.press(key)
            assert all(part.isprintable() for part in screen.lines), (key, screen.text)
            assert {len_of(line) for line in screen.lines} == {size[0]}
        await screen.type("markup")
        assert "[bold red]" in screen.text or screen.bottom


def len_of(line: str) -> int:
    from rich.cells import cell_len

    return cell_len(line)


async def test_the_line_that_is_typed_in_closes_with_escape(tmp_path: Path):
    async with opened(three_steps(tmp_path)) as screen:
        await screen.press("f")
        assert screen.app.focused is screen.app.query_one(Input)
        await screen.press("escape")
        assert screen.app.focused is screen.app.page
        await screen.press("n")
        assert screen.name == "1 b"
