"""The description of a text format: markers, what surrounds calls, reasoning, ends of turns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeAlias

FENCES = ("```", "~~~")
ReasoningPolicy: TypeAlias = Literal["text", "error", "execute"]


def any_of(markers: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of the first of some markers, of those at one place the longest."""
    return re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))))


@dataclass(frozen=True, kw_only=True)
class TextFormat:
    """Description of a format whose calls are part of the text; a `TextParser` has one.

    Attributes:
        openers: Markers that begin a call.
        shapes: For openers that are a bracket, which is frequent in data and prose: the patterns of a bracket
            that begins a call, and of text that may become one when more text comes.
        closer: Marker that ends a block; "" if the format has none.
        section: Markers around all calls of a message; ("", "") if the format has none.
        around: Text written before, between and after the calls of a message.
        trigger: String at which a grammar begins a call; by default the first of `around` or of `openers`.
        has_grammar: Whether a structural tag can describe the calls.
        think: Tags that open and end reasoning.
        think_end_proves: Whether an end of reasoning without a beginning proves that the prompt opened it;
            False if the tag also ends other things.
        other_thinks: Further pairs of such tags, of other models of the family.
        calls_end_thoughts: Whether a call that begins before the end of reasoning ends it.
        parse_reasoning: What to do with calls inside closed reasoning by default; see `TextParser`.
        turn_end: Tokens that end the message.
        continued: A token of `turn_end`, and the opener behind which the message goes on after it.
        result_tags: Tags around results; if the model writes them itself, nothing between them is a call.
        other_openers: Openers of another dialect of the family, handled by `TextParser.read_other_opener`.
        more_markers: Further strings that results must not contain.
        fences_are_text: Whether a call in a Markdown fence is an example.
        call_fences: First lines of Markdown fences that may contain calls nevertheless.
        openers_may_be_words: Whether prose after an opener makes it a word of the text; False if a call may
            consist of prose.
        shape: A correct call, shown in error messages to the model; "" for `tool_name` with an `argument`
            "value", as `TextParser.write` writes it.
    """

    openers: tuple[str, ...] = ()
    shapes: Mapping[str, tuple[re.Pattern[str], re.Pattern[str]]] = field(
        default_factory=dict[str, tuple[re.Pattern[str], re.Pattern[str]]]
    )
    closer: str = ""
    section: tuple[str, str] = ("", "")
    around: tuple[str, str, str] = ("", "\n", "")
    trigger: str = ""
    has_grammar: bool = True
    think: tuple[str, str] = ("<think>", "</think>")
    think_end_proves: bool = True
    other_thinks: tuple[tuple[str, str], ...] = ()
    calls_end_thoughts: bool = False
    parse_reasoning: ReasoningPolicy = "text"
    turn_end: tuple[str, ...] = ()
    continued: tuple[str, str] = ("", "")
    result_tags: tuple[str, str] = ("", "")
    other_openers: tuple[str, ...] = ()
    more_markers: tuple[str, ...] = ()
    fences_are_text: bool = True
    call_fences: tuple[str, ...] = ()
    openers_may_be_words: bool = True
    shape: str = ""

    # Groups of markers that the reading functions search for

    @cached_property
    def reasoning_tags(self) -> Mapping[str, str]:
        """Return the end tag of reasoning by opening tag."""
        return dict(pair for pair in (self.think, *self.other_thinks) if all(pair))

    @cached_property
    def think_ends(self) -> tuple[str, ...]:
        """Return the tags that end reasoning."""
        return tuple(self.reasoning_tags.values())

    @cached_property
    def watched(self) -> tuple[str, ...]:
        """Return the markers at which the pass over a message stops."""
        fences = FENCES if self.fences_are_text else ()
        own = (*self.openers, *self.other_openers, *self.section, *self.reasoning_tags)
        markers = (*own, self.result_tags[0], *fences, *self.turn_end)
        return tuple(marker for marker in markers if marker and marker not in self.shapes)

    @cached_property
    def longest(self) -> int:
        """Return the length of the longest watched marker."""
        return max(map(len, self.watched))

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Return the pattern of any watched marker."""
        return any_of(self.watched)

    @cached_property
    def calling(self) -> tuple[str, ...]:
        """Return the markers that begin calls or sections."""
        return tuple(filter(None, (*self.openers, *self.other_openers, self.section[0])))

    @cached_property
    def calling_alone(self) -> tuple[str, ...]:
        """Return the markers that begin calls and have no entry in `shapes`."""
        return tuple(one for one in self.calling if one not in self.shapes)

    @cached_property
    def calling_pattern(self) -> re.Pattern[str]:
        """Return the pattern of any marker that begins calls or sections."""
        return any_of(self.calling)

    @cached_property
    def ends_word(self) -> tuple[str, ...]:
        """Return the markers that end the text after an opener."""
        return tuple(filter(None, (*self.calling_alone, self.closer, self.section[1], *self.turn_end)))

    @cached_property
    def ends_prose(self) -> tuple[str, ...]:
        """Return the markers that end text in a section, including those of reasoning and turns."""
        return tuple(marker for marker in (*self.watched, *self.think_ends) if marker not in FENCES)

    @cached_property
    def signs_in_thoughts(self) -> frozenset[str]:
        """Return the first characters of markers that count inside reasoning."""
        return frozenset(marker[0] for marker in (*self.calling, *self.turn_end))

    def control_markers(self) -> tuple[str, ...]:
        """Return the markers that tool results must not contain.

        Single brackets that open calls are left out: they are frequent in data, and part of larger tokens.
        """
        markers = [*self.openers, self.closer, *self.turn_end]
        markers += [marker for pair in self.reasoning_tags.items() for marker in pair]
        markers += [*self.section, *self.result_tags, *self.other_openers, *self.more_markers]
        return tuple(dict.fromkeys(marker for marker in markers if len(marker) > 1))
