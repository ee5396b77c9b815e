"""`CallsStage`: read the calls of a message, run them, and append their results; `BoundsStage`: end there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from torchrl_agentic.dispatch.opening import open_tools
from torchrl_agentic.messages import JSON, ParsedCall, ToolResult
from torchrl_agentic.parsers.base import ToolCallParser, escaped_call, parse_message, with_tool_names
from torchrl_agentic.trajectory.columns import CALLS, REPORTED_CALLS, Column
from torchrl_agentic.trajectory.episode import Stage
from torchrl_agentic.trajectory.watch import SILENT

if TYPE_CHECKING:
    from torchrl_agentic.trajectory.episode import Episode, OpenTurn

logger = logging.getLogger(__name__)

EOS_STRINGS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<｜end▁of▁sentence｜>",
    "<end_of_turn>",
    "</s>",
    "<eos>",
)
"""Strings that are cut off the end of a message: engines may leave the end-of-sequence token in the text."""


class CallsStage(Stage):
    """Reads the calls of each message, runs them, and appends their results; the stage of `ToolCompose`.

    It ends a trajectory that a tool stops, whose message is a refusal, was cut off, or that could not begin.

    Args:
        parser: Reads calls and renders results.
        tool_role: Role of the messages that carry results.
        media: Whether images and videos become parts of messages.
        passes_state: Whether tools with `wants_state` get a view of the row.
        reports_calls: Whether there is a column with the list of calls.
        eos_strings: Strings that are cut off the end of a message.
    """

    name = "ToolCompose"
    reads_answer = False
    opens_turns = True

    def __init__(
        self,
        parser: ToolCallParser,
        *,
        tool_role: str = "tool",
        media: bool = False,
        passes_state: bool = False,
        reports_calls: bool = False,
        eos_strings: Sequence[str] = EOS_STRINGS,
    ) -> None:
        self.parser, self.tool_role, self.media = parser, tool_role, media
        self.passes_state, self.reports_calls = passes_state, reports_calls
        self.eos_strings = tuple(eos_strings)

    @property
    def columns(self) -> Sequence[Column]:
        """Counts, flags and rewards of the calls, and their list if it is reported."""
        return (*CALLS, *REPORTED_CALLS) if self.reports_calls else CALLS

    def run(self, turns: Sequence[OpenTurn]) -> Coroutine[Any, Any, None] | None:
        """Read all messages; run the calls of all trajectories concurrently."""
        escape = self.parser.control_escaper.escape
        calling: list[OpenTurn] = []
        for turn in turns:
            session = turn.episode.session
            session.turn = turn.number  # it is higher if this step was interrupted while its calls ran
            turn.escape = escape
            turn.parsed = parse_message(
                self.parser,
                turn.message,
                tools=session.dispatcher.schemas,
                turn=turn.number,
                trajectory=turn.episode.name,
            )
            if turn.parsed.calls and turn.has_begun:
                turn.calls = turn.calls or session.begin_turn(turn.parsed.calls)
                calling.append(turn)
            else:
                session.turn += 1
        if calling:
            return self._call(turns, calling)
        self._conclude(turns)
        return None

    async def _call(self, turns: Sequence[OpenTurn], calling: Sequence[OpenTurn]) -> None:
        dispatcher = calling[0].episode.session.dispatcher
        views = self.passes_state and any(tool.wants_state for tool in dispatcher.tools)
        states = [turn.view() if views else None for turn in calling]
        starts = [_doing(turn) for turn in calling]
        if calling[0].speculative is None:
            batch = [
                (turn.episode.session, turn.calls, state) for turn, state in zip(calling, states, strict=True)
            ]
            results = await dispatcher.run(batch)
        else:  # one trajectory of a collector
            results = [await calling[0].speculative.run(calling[0].calls, states[0])]
        for turn, some, start in zip(calling, results, starts, strict=True):
            turn.take_results(some)
            turn.episode.session.n_calls += len(some)
            _note_times(turn, start)
        self._conclude(turns)

    def _conclude(self, turns: Sequence[OpenTurn]) -> None:
        """Append the results, record the turns, and end the trajectories that are over."""
        for turn in turns:
            rendered = self.render(turn.episode, turn.calls, turn.results) if turn.calls else ()
            turn.add(rendered)
            turn.episode.note_turn(turn, rendered)
            if turn.is_stopped:
                turn.end("stop_tool", terminated=True)
            if not turn.has_begun:
                turn.end("not_begun", truncated=True)
            if turn.message.refusal:
                turn.end("refused", terminated=True)
            elif turn.is_cut:
                turn.end("max_trajectory_tokens" if turn.is_full else "max_new_tokens", truncated=True)

    def render(
        self, episode: Episode, calls: Sequence[ParsedCall], results: Sequence[ToolResult]
    ) -> Sequence[Mapping[str, JSON]]:
        """Return the messages that carry the results of calls.

        Args:
            episode: The trajectory.
            calls: The calls.
            results: One result per call.
        """
        rendered: Sequence[Mapping[str, JSON]] | None = None
        if self.media:
            from torchrl_agentic.tokens.encoding import filled, slotted  # it opens images

            texts, slots = slotted(results)
            if slots:
                rendered = filled(self._messages(episode, calls, texts), slots)
                if rendered is not None:
                    rendered = [_with_escaped_parts(message, self.parser) for message in rendered]
        if rendered is None:
            rendered = self._messages(episode, calls, results)
        if self.tool_role == "tool":
            return rendered
        role = self.tool_role
        return [{**message, "role": role} if message["role"] == "tool" else message for message in rendered]

    def _messages(
        self, episode: Episode, calls: Sequence[ParsedCall], results: Sequence[ToolResult]
    ) -> Sequence[Mapping[str, JSON]]:
        """Render results by the parser; if it raises, as plain messages of the role "tool"."""
        try:
            rendered = self.parser.render(calls, results)
            if any(not isinstance(message["role"], str) or "content" not in message for message in rendered):
                raise TypeError("a message has a role and a content")
        except Exception:
            logger.exception("parser %r cannot render (trajectory %s)", self.parser, episode.name)
            escape = self.parser.control_escaper.escape
            named = [escaped_call(call, escape) for call in calls]
            rendered = with_tool_names(
                [
                    {"role": "tool", "content": escape(result.text), "tool_call_id": call.call_id}
                    for call, result in zip(named, results, strict=True)
                ],
                named,
            )
        return rendered

    async def open(self, episodes: Sequence[Episode]) -> list[Sequence[Mapping[str, JSON]]]:
        """Open what opens at the beginning of trajectories, concurrently.

        Args:
            episodes: Trajectories that begin; their sessions have read their rows of the data set.

        Returns:
            For each trajectory the initial messages of its tools and worlds.
        """
        opened = await asyncio.gather(
            *(open_tools(episode.session, episode.session.dispatcher.tools) for episode in episodes)
        )
        return [
            self.render(episode, calls, results) if calls else ()
            for episode, (calls, results) in zip(episodes, opened, strict=True)
        ]


class BoundsStage(Stage):
    """Ends trajectories by their turns or their answers; the stage of `EndTrajectory`.

    Args:
        max_turns: Number of turns after which a trajectory is truncated, or None for no limit but its own.
        when_no_calls: Whether a message without calls terminates the trajectory, because it is the answer.
    """

    name = "EndTrajectory"
    reads_answer = False
    may_end = True

    def __init__(self, *, max_turns: int | None = None, when_no_calls: bool = False) -> None:
        self.max_turns, self.when_no_calls = max_turns, when_no_calls

    def run(self, turns: Sequence[OpenTurn]) -> None:
        """End the trajectories that are over."""
        for turn in turns:
            message = turn.message
            is_answer = not (turn.results or turn.is_cut or message.refusal) and turn.has_begun
            if self.when_no_calls and is_answer:
                turn.end("no_calls", terminated=True)
            bounds = [bound for bound in (self.max_turns, turn.episode.max_turns) if bound is not None]
            if bounds and turn.episode.n_turns >= min(bounds):
                turn.end("max_turns", truncated=True)


def _doing(turn: OpenTurn) -> float:
    watch = turn.episode.watch
    if watch is SILENT:
        return 0.0
    return watch.doing("tools", ", ".join(dict.fromkeys(call.tool for call in turn.calls)))


def _note_times(turn: OpenTurn, start: float) -> None:
    """Note how long the calls of a turn took, together and each."""
    watch = turn.episode.watch
    if watch is SILENT:
        return
    watch.span("tools", start, turn=turn.number)
    starts = {} if turn.speculative is None else turn.speculative.starts
    for number, (call, result) in enumerate(zip(turn.calls, turn.results, strict=True)):
        if result.timing is not None:
            began = starts.get(number, start) + result.timing.queue_s
            watch.span(
                "tool", began, began + result.timing.run_s, name=call.tool, turn=turn.number,
                status=result.status.name,
            )  # fmt: skip


def parser_for(parser: Any, tokenizer: Any, template_kwargs: Mapping[str, Any]) -> ToolCallParser:
    """Return a parser, set up for a tokenizer if there is one.

    Args:
        parser: A parser, or the name of a registered one.
        tokenizer: Tokenizer of the model, or None.
        template_kwargs: Options of the chat template.
    """
    from torchrl_agentic.parsers import get_parser  # which finds all parsers

    found = get_parser(parser, tokenizer=tokenizer, **(template_kwargs if parser == "auto" else {}))
    return found if tokenizer is None else found.with_tokenizer(tokenizer, **template_kwargs)


def without_eos(text: str, eos_strings: Sequence[str]) -> str:
    """Return a text without end-of-sequence strings, and white space around them, at its end.

    Args:
        text: Text of a message.
        eos_strings: Strings to cut off.
    """
    while True:
        trimmed = text.rstrip()
        ending = next((eos for eos in eos_strings if trimmed.endswith(eos)), None)
        if ending is None:
            return text
        text = trimmed.removesuffix(ending)


def _with_escaped_parts(message: Mapping[str, JSON], parser: ToolCallParser) -> Mapping[str, JSON]:
    """Escape control tokens that would appear if a template drops the images between two texts."""
    content = message["content"]
    if not isinstance(content, list):
        return message
    parts = cast("list[Mapping[str, JSON]]", content)
    from torchrl_agentic.tokens.encoding import escaped_parts  # only media needs it

    return {**message, "content": escaped_parts(parts, parser.control_escaper)}
