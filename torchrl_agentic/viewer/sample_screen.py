"""`SampleScreen`, the samples of one prompt side by side: scores, advantages, ends, and where they differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen

from torchrl_agentic.records import BadLine, Summary
from torchrl_agentic.viewer.html.summary import final_answer
from torchrl_agentic.viewer.layout import Look, page
from torchrl_agentic.viewer.library import Library
from torchrl_agentic.viewer.line_view import LineView
from torchrl_agentic.viewer.query import LARGE, Gone, Row, label
from torchrl_agentic.viewer.render_record import Block, number, plural
from torchrl_agentic.viewer.samples import (
    Divergence,
    SaidMessage,
    SampleGroups,
    first_difference,
    said_after_prompt,
)
from torchrl_agentic.viewer.text_wrap import Line, fit

MOST_SAMPLES = 256
"""Number of samples whose messages are read and compared; the scores of all are shown."""
_AROUND = 300


@dataclass(frozen=True, slots=True)
class SampleRow:
    """A sample of a prompt.

    Attributes:
        row: The trajectory.
        summary: Its summary.
        advantage: Its advantage; None if it left in no batch, or has no score.
        answer: Its last message, without reasoning and calls; None if it was not read.
        difference: The first point where it differs from the best sample; None if there is none.
    """

    row: Row
    summary: Summary
    advantage: float | None
    answer: str | None
    difference: Divergence | None


class Choice(NamedTuple):
    """The sample that the user chose, to open it or to compare it with the best one.

    Attributes:
        row: The sample.
        best: The best sample of the prompt.
        action: What to do with them.
    """

    row: Row
    best: Row
    action: Literal["open", "compare"]


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of one prompt, the best first.

    Attributes:
        question: The question.
        rows: The samples.
        facts: Number, mean and spread of the scores, and where the advantages come from.
    """

    question: str
    rows: Sequence[SampleRow]
    facts: str


def samples_of(library: Library, row: Row) -> Samples | None:
    """Return the samples of the prompt of a trajectory, or None if it cannot be read.

    Args:
        library: The dump.
        row: The trajectory.
    """
    if isinstance(row.summary, BadLine):
        return None
    rows = library.group(row)
    groups = SampleGroups()
    for place, one in enumerate(rows):
        if not isinstance(summary := one.summary, BadLine):
            groups.add(place, summary)
    (group,) = groups
    known = dict(zip(group.numbers, group.advantages, strict=True))
    places = sorted(known, key=lambda place: _rank(rows[place]))
    found: list[SampleRow] = []
    best: list[SaidMessage] = []
    for rank, place in enumerate(places):
        one, answer, difference = rows[place], None, None
        summary = one.summary
        assert not isinstance(summary, BadLine)
        if rank < MOST_SAMPLES and one.size <= LARGE:
            answer, said = _read(library, one)
            best = best or said
            difference = first_difference(best, said)
        found.append(SampleRow(one, summary, known[place], answer, difference))
    mean = "no scores"
    if group.mean is not None and group.spread is not None:
        mean = f"score {number(group.mean)} ± {number(group.spread)}"
    source = "advantages of the batch" if group.is_recorded else "advantages computed from the scores"
    flat = " · all scores are equal, so the group teaches nothing" if group.is_flat else ""
    facts = f"{plural(len(found), 'sample')} · step {group.step} · {mean} · {source}{flat}"
    return Samples(row.summary.question, found, facts)


def _rank(row: Row) -> tuple[bool, float]:
    """Return a key that sorts the best score first, and trajectories without a score last."""
    return row.score is None, -(row.score or 0.0)


def _read(library: Library, row: Row) -> tuple[str | None, list[SaidMessage]]:
    try:
        with library.lock:
            record = row.record()
    except Gone:
        return None, []
    if isinstance(record, BadLine):
        return None, []
    return final_answer(record), said_after_prompt(record)


def sample_line(sample: SampleRow, width: int) -> Line:
    """Return a line of the list of samples.

    Args:
        sample: The sample.
        width: Number of cells in the line.
    """
    summary = sample.summary
    errors = f"{summary.n_errors}✗" if summary.n_errors else ""
    gain = sample.advantage
    style = "faint" if not gain else "same" if abs(gain) < 1e-9 else "assistant" if gain > 0 else "error"
    return fit(
        (
            (f"{number(summary.score):>7} ", "score"),
            (f"{'–' if gain is None else f'{gain:+.2f}':>7} ", style),
            (f"{summary.n_turns:>3}t {summary.n_calls:>3}c ", "faint"),
            (f"{errors:>3} ", "error"),
            (f"{summary.termination_reason:<12.12} ", "faint"),
            (" ".join((sample.answer or label(sample.row))[: 4 * width].split()), ""),
        ),
        width,
    )


HEAD = "  score  advant turn call err end          last message"


class SampleScreen(ModalScreen[Choice | None]):
    """Dialog with the samples of a prompt; its result is the sample that the user chose.

    Args:
        samples: The samples.
        current: The open trajectory.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        ("escape,S,q", "dismiss", "close"),
        ("enter", "choose('open')", "open"),
        ("c", "choose('compare')", "compare with the best"),
        ("j,n", "move(1)", "next"),
        ("k,p", "move(-1)", "previous"),
    ]
    CSS = """
    SampleScreen > .box { width: 96%; max-width: 200; height: 94%; }
    SampleScreen #sample-head { height: 3; }
    SampleScreen #sample-list { height: 1fr; border-bottom: solid #303850; }
    SampleScreen #sample-text { height: 1fr; }
    """

    def __init__(self, samples: Samples, current: Row | None) -> None:
        super().__init__()
        self._samples = samples
        rows = [sample.row for sample in samples.rows]
        self._place = rows.index(current) if current in rows else 0

    def compose(self) -> ComposeResult:
        """Create the widgets."""
        with Vertical(classes="box"):
            yield LineView(id="sample-head")
            yield LineView(id="sample-list", has_cursor=True)
            yield LineView(id="sample-text")

    def on_mount(self) -> None:
        """Put the focus on the list."""
        self.query_one("#sample-list").focus()

    def on_line_view_resized(self) -> None:
        """Lay out everything for the new width."""
        head, lines = self.query_one("#sample-head", LineView), self.query_one("#sample-list", LineView)
        room = head.room
        made = [
            fit(((self._samples.question or "(the prompt has no text)", "name"),), room),
            fit(((f"{self._samples.facts} · enter opens, c compares with the best", "faint"),), room),
            fit(((HEAD, "faint"),), room),
        ]
        head.show(len(made), made.__getitem__)
        rows, room = self._samples.rows, lines.room
        lines.show(len(rows), lambda place: sample_line(rows[place], room))
        lines.choose(self._place)
        self._show_text()

    def on_line_view_chosen(self, event: LineView.Chosen) -> None:
        """Show the sample under the cursor."""
        self._place = event.place
        self._show_text()

    def _show_text(self) -> None:
        view = self.query_one("#sample-text", LineView)
        made = page(sample_blocks(self._samples.rows[self._place], is_best=self._place == 0), Look(view.room))
        view.show(len(made.lines), made.lines.__getitem__)
        view.scroll_to(y=0, animate=False)

    def action_move(self, by: int) -> None:
        """Choose another sample."""
        self.query_one("#sample-list", LineView).action_move(by)

    def action_choose(self, action: Literal["open", "compare"]) -> None:
        """Return the sample under the cursor."""
        rows = self._samples.rows
        self.dismiss(Choice(rows[self._place].row, rows[0].row, action))


def sample_blocks(sample: SampleRow, *, is_best: bool) -> list[Block]:
    """Return the blocks of a sample: where it differs from the best one, and its last message.

    Args:
        sample: The sample.
        is_best: Whether it is the best one.
    """
    blocks = [Block(((label(sample.row), "name"), (f" · {sample.summary.request_id}", "faint")))]
    if sample.answer is None:
        return [*blocks, Block(((f"not read: it has {sample.row.size:,} bytes", "faint"),))]
    if not is_best:
        blocks.append(_difference_block(sample.difference))
    return [
        *blocks,
        Block((("last message", "assistant title"),), sample.answer or "(only calls)", "assistant"),
    ]


def _difference_block(found: Divergence | None) -> Block:
    if found is None:
        return Block((("says the same as the best sample", "same"),))
    where = f"differs from the best sample in turn {found.turn}"
    if not found.role:
        return Block(((f"{where}, before which it has ended", "differs"),))
    after = f", after {found.at:,} characters of the {found.role}" if found.at else f": the {found.role} says"
    begin = f"{'…' if found.at > len(found.before) else ''}{found.before}"
    best, here = (f"{begin}{text[:_AROUND] or ' (ends here)'}" for text in (found.other, found.text))
    text = f"best: {best}\nhere: {here}"
    mark = len(f"best: {best}\nhere: {begin}")
    paints = ((0, 5, "key"), (mark - len(begin) - 6, mark - len(begin), "key"), (mark, len(text), "differs"))
    return Block(((where + after, "differs"),), text, "value", paints)
