"""Read turns, calls and results from the text dumps of verl's trainer.

Such a dump holds the output of a chat template, decoded without special tokens: each role is on a line of its
own, calls are in the text, and results are `tool` sections, or `<tool_response>` in a `user` section.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torchrl_agentic.messages import DispatchResult, Message, ParsedCall, Status, ToolResult, Turn
from torchrl_agentic.parsers import get_parser

_ROLE = re.compile(r"^[ \t]*(system|user|assistant|tool)[ \t]*$", re.MULTILINE)
_NOT_BLANK = re.compile(r"\S")
_MISSING = "the dump has no result of this call"


def turns_of_text(name: str, prompt: str, output: str) -> tuple[Turn, ...] | None:
    """Read the turns of a trajectory from its texts.

    Args:
        name: Name of the trajectory.
        prompt: The prompt, `input` of the dump.
        output: The text after it, `output` of the dump.

    Returns:
        The turns, each with its calls and their results; None if neither text has roles.
    """
    context = _sections(prompt)
    if context is None and not output.lstrip().startswith("assistant\n"):
        return None
    pending = [Message("input", prompt)] if context is None and prompt else context or []
    turns: list[Turn] = []
    for role, text in _answered(output):
        if role == "assistant":
            turns.append(_turn(name, len(turns), text, pending))
            pending = []
        elif turns and not pending and (found := _with_results(turns[-1], role, text)) is not None:
            turns[-1] = found
        else:
            pending.append(Message(role, text))
    if not turns:
        return (_turn(name, 0, "", pending),)
    turns[-1] = replace(turns[-1], messages=(*turns[-1].messages, *pending))
    return tuple(turns)


def _sections(text: str) -> list[Message] | None:
    """Split a prompt at its roles; return None if it does not begin with one."""
    marks = list(_ROLE.finditer(text))
    if not marks or text[: marks[0].start()].strip():
        return None
    stops = [mark.start() for mark in marks[1:]] + [len(text)]
    found = [Message(m[1], text[m.end() : stop].strip()) for m, stop in zip(marks, stops, strict=True)]
    if found[-1].role == "assistant" and not found[-1].text:  # the header of the answer
        found.pop()
    return found


def _answered(text: str) -> Iterator[tuple[str, str]]:
    """Split an output into (role, text).

    A line that is a role ends an answer only if another answer follows, or if a call came before it: models
    write such words themselves.
    """
    marks = [(m[1], m.start(), m.end()) for m in _ROLE.finditer(text) if m[1] != "system"]
    last_answer = max((start for role, start, _ in marks if role == "assistant"), default=-1)
    role, begin = "assistant", 0
    first = call = -1  # positions behind `begin` of the first text and of the first call
    for name, start, stop in marks:
        if first < begin:
            found = _NOT_BLANK.search(text, begin)
            first = len(text) if found is None else found.start()
        if call < begin and (call := text.find("</tool_call>", begin)) < 0:
            call = len(text)
        if name == "assistant":
            is_mark = role != "assistant" or first >= start
        else:
            is_mark = start < last_answer or call < start
        if not is_mark:
            continue
        if text[begin:start].strip() or role != "assistant":
            yield role, text[begin:start].strip()
        role, begin = name, stop
    if text[begin:].strip():
        yield role, text[begin:].strip()


def _turn(name: str, index: int, text: str, context: Sequence[Message]) -> Turn:
    """Read the calls of an answer. Their results are missing until `_with_results` adds them."""
    parsed = get_parser("qwen3_coder" if "<function=" in text else "hermes").parse(text)
    calls = tuple(replace(call, call_id=f"call_{index}_{number}") for number, call in enumerate(parsed.calls))
    results = tuple(map(_missing, calls))
    outcome = DispatchResult(parsed.text, calls, results)
    return Turn(name, index, Message("assistant", text), outcome, (), tuple(context))


def _missing(call: ParsedCall) -> ToolResult:
    if call.error is not None:
        return ToolResult.from_text(call.error.message, status=Status.MALFORMED)
    return replace(ToolResult.from_text("", status=Status.SKIPPED), notes=(_MISSING,))


def _responses(text: str) -> Iterator[str]:
    """Yield what is in `<tool_response>`."""
    start = 0
    while (begin := text.find("<tool_response>", start)) >= 0:
        begin += len("<tool_response>")
        if (end := text.find("</tool_response>", begin)) < 0:
            return
        yield text[begin:end].removeprefix("\n").removesuffix("\n")
        start = end


def _with_results(turn: Turn, role: str, text: str) -> Turn | None:
    """Return the turn with the results of a section, or None if it has none, or too many for the calls."""
    texts = [*_responses(text)] or ([text] if role == "tool" else [])
    waiting = [n for n, result in enumerate(turn.outcome.results) if _MISSING in result.notes]
    if not texts or len(texts) > len(waiting):
        return None
    results, messages = list(turn.outcome.results), list(turn.messages)
    for number, found in zip(waiting, texts, strict=False):
        results[number] = ToolResult.from_text(found)
        messages.append(Message("tool", found, tool_call_id=turn.outcome.calls[number].call_id))
    outcome = replace(turn.outcome, results=tuple(results))
    return replace(turn, outcome=outcome, messages=tuple(messages))
