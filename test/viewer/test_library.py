"""A dump is listed while it is read, and while its files grow, shrink, come and go."""

import itertools
import json
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from helpers.viewer_dumps import three_steps, trajectory, write

from torchrl_agentic.records import BadLine, record_to_json
from torchrl_agentic.viewer.layout import Needle
from torchrl_agentic.viewer.library import Library
from torchrl_agentic.viewer.query import Gone, label
from torchrl_agentic.viewer.state import ViewerState


class Reader:
    """A library with a virtual clock, and its reader."""

    def __init__(self, path: Path) -> None:
        self.now = 0.0
        self.library = Library(path, clock=lambda: self.now)
        self.state = ViewerState(self.library)
        self.settle()

    def settle(self) -> None:
        """Look for new lines, and read all of them."""
        self.now += 10
        while self.library.work():
            self.state.catch_up()
        self.state.catch_up()

    def ask(self, query: str = "", sort: str = "none", *, all_steps: bool = False) -> list[str]:
        self.state.list.sort, self.state.list.shows_all_steps = sort, all_steps
        self.state.list.query_by(query)
        self.state.list.ask()
        self.settle()
        return self.names

    @property
    def names(self) -> list[str]:
        return [label(row) for row in self.state.list.shown]


Read = Callable[[Path], Reader]


@pytest.fixture
def read() -> Iterator[Read]:
    """Opens dumps, and closes them."""
    with ExitStack() as opened:

        def open_one(path: Path) -> Reader:
            reader = Reader(path)
            opened.callback(reader.library.close)
            return reader

        yield open_one


def _line(name: str, **known: object) -> str:
    return json.dumps(record_to_json(trajectory(name, **known))) + "\n"


def test_steps_are_sorted_by_number(tmp_path: Path, read: Read):
    write(three_steps(tmp_path), trajectory("z", step=3))
    (tmp_path / "validation.jsonl").write_text(_line("v"))
    reader = read(tmp_path)
    assert [step.name for step in reader.library.steps] == ["1", "2", "3", "10", "validation"]


def test_scores_sort_as_numbers_with_missing_ones_last(tmp_path: Path, read: Read):
    reader = read(three_steps(tmp_path))
    assert reader.names == list("abcdef")
    assert reader.ask(sort="score ascending") == ["b", "a", "d", "c", "e", "f"]
    assert reader.ask(sort="score descending") == ["c", "d", "a", "b", "e", "f"]


def test_next_and_previous_go_by_the_sorted_and_filtered_list_and_wrap(tmp_path: Path, read: Read):
    reader = read(three_steps(tmp_path))
    reader.ask("reason:no_calls", "score descending")
    seen = []
    for _ in range(6):
        seen.append(label(reader.state.list.opened.row))
        reader.state.list.go(1)
    assert seen == ["a", "b", "e", "f", "d", "a"]
    reader.state.list.go(-1)
    assert label(reader.state.list.opened.row) == "a"


def test_another_step_keeps_sort_filter_and_place(tmp_path: Path, read: Read):
    reader = read(three_steps(tmp_path))
    reader.ask("reason:no_calls", "score ascending")
    reader.state.list.open(reader.state.list.shown[2])
    reader.state.list.go_step(1)
    reader.settle()
    assert reader.state.list.step.name == "2"
    assert (reader.names, label(reader.state.list.opened.row)) == (["b", "a", "d", "e", "f"], "d")
    reader.state.list.go_step(-1)
    reader.state.list.go_step(-1)
    assert reader.state.list.step.name == "10"


def test_a_query_goes_over_all_steps_when_all_are_listed(tmp_path: Path, read: Read):
    reader = read(three_steps(tmp_path))
    assert reader.ask("status:timeout", all_steps=True) == ["b"] * 3
    assert reader.ask("step>1 score<0", all_steps=True) == ["a", "b"] * 2
    assert reader.ask('"step 2" needle', all_steps=True) == ["b", "d"]
    assert reader.ask("-needle -says") == []


def test_words_are_counted_over_the_whole_list_and_walked_through_in_its_order(tmp_path: Path, read: Read):
    reader = read(three_steps(tmp_path))
    reader.ask(sort="score descending", all_steps=True)
    state = reader.state
    state.list.open(state.list.shown[0])
    state.search.begin("NEEDLE")
    reader.settle()
    seen = []
    for _ in range(7):
        state.page.lay_out(80)
        assert state.search.next_match(1)
        seen.append((state.list.opened.row.step.name, label(state.list.opened.row), state.search.counter))
    order = [("1", "d"), ("2", "d"), ("10", "d"), ("1", "b"), ("2", "b"), ("10", "b"), ("1", "d")]
    assert seen == [(*place, f"{n % 6 + 1}/6") for n, place in enumerate(order)]
    state.page.lay_out(80)
    assert state.search.next_match(-1)
    assert (state.list.opened.row.step.name, label(state.list.opened.row), state.search.counter) == (
        "10",
        "b",
        "6/6",
    )


def test_words_that_json_escapes_are_found_too(tmp_path: Path, read: Read):
    said = 'a "quoted" line\nbreak, ü and KİSS'
    (tmp_path / "1.jsonl").write_text(_line("x", answer=said))
    reader = read(tmp_path)
    for words in ('"quoted"', "LINE\nbreak", "Ü AND", "kİss", "\u212ai̇ss"[:1]):
        reader.state.search.begin(words)
        reader.settle()
        assert sum(reader.library.counts.values()) >= 1, words


def test_match_in_unsearched_text_is_selected_when_found(tmp_path: Path, read: Read):
    reader = read(three_steps(tmp_path))
    reader.state.search.begin("needle d")
    reader.state.page.lay_out(80)
    assert not reader.state.search.next_match(1)
    assert reader.state.search.counter.endswith("searching …")
    reader.settle()
    assert (label(reader.state.list.opened.row), reader.state.search.counter) == ("d", "1/1")


def test_a_request_id_is_found_in_any_step_by_its_beginning(tmp_path: Path, read: Read):
    record = trajectory("z", step=2, request_id="12ab-34cd-56ef")
    reader = read(write(three_steps(tmp_path), record))
    for wanted in ("12ab34", "12AB-34cd-56ef", "1-2-a"):
        assert reader.library.find(wanted).summary.trajectory == "z"
    assert reader.library.find("56ef") is None


def test_group_has_trajectories_of_a_step_with_the_same_prompt(tmp_path: Path, read: Read):
    reader = read(three_steps(tmp_path))
    assert [label(row) for row in reader.library.group(reader.state.list.opened.row)] == ["a", "b", "c"]
    state = reader.state
    assert [label(state.page.next_mate()) for _ in range(3)] == ["b", "c", "b"]


def test_appended_lines_appear_without_moving_the_page(tmp_path: Path, read: Read):
    reader = read(write(tmp_path, trajectory("a", step=1)))
    row = reader.state.list.opened.row
    write(tmp_path, trajectory("b", step=1), trajectory("c", step=2))
    reader.settle()
    assert reader.names == ["a", "b"]
    assert reader.state.list.opened.row is row
    assert [step.name for step in reader.library.steps] == ["1", "2"]


def test_follow_selects_the_newest_trajectory(tmp_path: Path, read: Read):
    reader = read(write(tmp_path, trajectory("a", step=1)))
    write(tmp_path, trajectory("c", step=2), trajectory("d", step=2))
    reader.settle()
    reader.state.list.newest()
    assert (reader.state.list.step.name, label(reader.state.list.opened.row)) == ("2", "d")


def test_a_line_that_is_still_being_written_is_read_again_when_it_is_whole(tmp_path: Path, read: Read):
    line = _line("whole")
    path = tmp_path / "1.jsonl"
    path.write_text(_line("a") + line[:100])
    reader = read(path)
    reader.state.list.go(1)
    assert isinstance(reader.state.list.opened.row.summary, BadLine)
    with path.open("a") as file:
        file.write(line[100:] + _line("next"))
    reader.settle()
    assert reader.names == ["a", "whole", "next"]
    assert label(reader.state.list.opened.row) == "whole"


@pytest.mark.parametrize("how", ["cut", "replaced"])
def test_rewritten_file_is_read_again_and_reported(tmp_path: Path, read: Read, how: str):
    path = tmp_path / "1.jsonl"
    path.write_text(_line("a") + _line("b"))
    reader = read(tmp_path)
    old = reader.state.list.opened.row
    if how == "cut":
        path.write_text(_line("c"))
    else:
        (tmp_path / "new").write_text(_line("c"))
        (tmp_path / "new").replace(path)
    reader.settle()
    assert reader.names == ["c"]
    assert reader.library.notes == ["1.jsonl was rewritten or cut, and is read again"]
    with pytest.raises(Gone, match=r"1\.jsonl was rewritten"):
        old.record()


def test_deleted_file_is_omitted_and_reported(tmp_path: Path, read: Read):
    reader = read(three_steps(tmp_path))
    old = reader.state.list.opened.row
    (tmp_path / "1.jsonl").unlink()
    reader.settle()
    assert reader.library.notes == ["1.jsonl was removed"]
    assert [step.name for step in reader.library.steps] == ["2", "10"]
    assert reader.state.list.opened.row.step.name == "10"
    with pytest.raises(Gone, match="was removed"):
        old.record()


def test_deleted_folder_is_reported_and_its_rows_stay(tmp_path: Path, read: Read):
    folder = tmp_path / "dump"
    reader = read(three_steps(folder))
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    reader.settle()
    assert "can no longer be read" in reader.library.notes[-1]
    assert reader.names == list("abcdef")


def test_empty_folder_and_empty_file_are_reported_until_lines_arrive(tmp_path: Path, read: Read):
    reader = read(tmp_path)
    assert "holds no .jsonl" in reader.state.page.blocks()[0].text
    (tmp_path / "1.jsonl").touch()
    reader.settle()
    assert "no trajectories yet" in reader.state.page.blocks()[0].text
    write(tmp_path, trajectory("a", step=1))
    reader.settle()
    assert label(reader.state.list.opened.row) == "a"


def test_no_such_path_is_an_error_at_once(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        Library(tmp_path / "nowhere")


def test_a_broken_line_is_listed_with_the_reason_and_shown_with_its_beginning(tmp_path: Path, read: Read):
    (tmp_path / "1.jsonl").write_bytes(
        _line("a").encode() + b'\n\n{"input": \x1b\xff]\n' + _line("b").encode()
    )
    reader = read(tmp_path)
    assert reader.names[0] == "a"
    assert reader.names[1].startswith("line 4: ")
    reader.state.list.go(1)
    title, beginning = reader.state.page.blocks()
    assert "Line 4 of the file cannot be read" in title.title[0][0]
    assert beginning.text.startswith('{"input": \x1b')
    assert reader.ask("score>0") == ["a", "b"]


def test_a_dump_of_inputs_and_outputs_is_shown(tmp_path: Path, read: Read):
    (tmp_path / "1.jsonl").write_text(
        json.dumps({"input": "Q", "output": "<think>x</think>A", "score": 2, "step": 1, "acc": 1.0})
    )
    reader = read(tmp_path)
    assert [block.text for block in reader.state.page.blocks()][2:] == ["Q", "<think>x</think>", "A"]
    assert reader.state.list.opened.row.score == 2
    assert reader.ask("acc=1") == ["0"]


def test_large_trajectory_is_shortened_until_it_is_expanded(tmp_path: Path, read: Read):
    (tmp_path / "1.jsonl").write_text(_line("a", answer="word " * 1_000_000) + _line("b"))
    reader = read(tmp_path)
    first = reader.state.page.blocks()
    assert "MB. This is its beginning; L loads all of it." in first[0].text
    assert any("a" in block.text for block in first)
    reader.state.page.load()
    assert reader.state.page.blocks()[-1].text == "word " * 1_000_000


def test_most_of_a_file_is_listed_before_it_is_read_to_its_end(tmp_path: Path):
    line = _line("a", answer="word " * 20_000)
    (tmp_path / "1.jsonl").write_text(line * 100)
    looks = itertools.count()
    with closing(Library(tmp_path, clock=lambda: next(looks) * 0.006)) as library:  # time for one look
        state = ViewerState(library)
        library.work()
        state.catch_up()
        assert 0 < len(state.list.shown) < 100
        assert 0 < library.progress < 1
        state.list.sort = "score ascending"
        state.list.ask()
        assert state.list.shown


def test_a_needle_is_never_missed_by_the_look_at_bytes():
    """Kelvin's sign, the long s and the dotless i equal k, s and i without case, and are no ASCII."""
    for words in ("Kiss", "\u212aıſſ", "a.b", "..", '"', "é", " "):
        for text in (words, words.lower(), words.upper()):
            needle = Needle(words)
            for line in (json.dumps(text), json.dumps(text, ensure_ascii=False)):
                assert not needle.spans(text) or needle.may_be_in(line.encode()), (words, text)


def test_nan_is_not_a_score(tmp_path: Path, read: Read):
    reader = read(write(tmp_path, trajectory("a", score=math.nan, step=1)))
    assert reader.state.list.opened.row.score is None
    assert reader.ask("score:none") == ["a"]
