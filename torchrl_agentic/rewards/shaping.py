"""Reward the form of a trajectory: `format_reward`, `length_penalty`, `tool_use_reward`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

from torchrl_agentic.errors import check_above_zero
from torchrl_agentic.messages import Status
from torchrl_agentic.trajectory.score import Score
from torchrl_agentic.trajectory.trajectory import Trajectory

ShapingScorer: TypeAlias = Callable[[Trajectory], Score]

UNREADABLE = frozenset({Status.MALFORMED})
INVALID = frozenset({Status.MALFORMED, Status.UNKNOWN_TOOL, Status.INVALID_ARGS})
NOT_THE_MODELS = frozenset({Status.INFRA, Status.CRASH, Status.CANCELLED})
"""Statuses of calls that failed although the model did nothing wrong."""


def format_reward(
    *,
    tags: Sequence[str] = (),
    pattern: str | re.Pattern[str] | None = None,
    calls: Literal["readable", "valid", "any"] = "readable",
    text: Callable[[Trajectory], str] | None = None,
) -> ShapingScorer:
    """Return a scorer: 1.0 if a trajectory has the required form, else 0.0.

    The parts of the score are "calls", "tags" and "pattern", as far as they are required.

    Args:
        tags: Names of tags that the text must have, in this order, each once and closed: `("think",
            "answer")` for `<think>…</think><answer>…</answer>`. A missing `<think>` at the start is accepted
            if its end is there, because chat templates put it into the prompt.
        pattern: Regular expression that must match somewhere in the text.
        calls: "readable": the parser can read all tool calls. "valid": and their tools and arguments are
            those of the schemas. "any": calls do not count.
        text: Function of the trajectory that returns the text to look at; None: the last message of the model
            with its reasoning.

    Raises:
        ValueError: If `calls` is another text.
        re.error: If `pattern` is no regular expression.
    """
    if calls not in ("readable", "valid", "any"):
        raise ValueError(f"calls is 'readable', 'valid' or 'any'; got {calls!r}")
    if isinstance(tags, str):
        raise TypeError(f"tags is a list of names; got {tags!r}: write [{tags!r}]")
    compiled = None if pattern is None else re.compile(pattern)

    def score(trajectory: Trajectory) -> Score:
        said = (trajectory.texts or ("",))[-1] if text is None else text(trajectory)
        problems: dict[str, str] = {}
        if calls != "any":
            problems["calls"] = _call_problem(trajectory, UNREADABLE if calls == "readable" else INVALID)
        if tags:
            problems["tags"] = _tag_problem(said, tags)
        if compiled is not None:
            problems["pattern"] = "" if compiled.search(said) else f"no match of {compiled.pattern!r}"
        parts = {name: float(not problem) for name, problem in problems.items()}
        return Score(
            min(parts.values(), default=1.0), None, "; ".join(filter(None, problems.values())), parts
        )

    score.__name__ = score.__qualname__ = "format_reward"
    return score


def _call_problem(trajectory: Trajectory, statuses: frozenset[Status]) -> str:
    bad = Counter(
        str(result.status) for call, result in trajectory.calls if result.status in statuses or call.error
    )
    return ", ".join(f"{count} {status} calls" for status, count in sorted(bad.items()))


def _tag_problem(text: str, tags: Sequence[str]) -> str:
    """Return why a text does not have the tags; "" if it does."""
    position = 0
    for index, tag in enumerate(tags):
        first, last = f"<{tag}>", f"</{tag}>"
        counts = text.count(first), text.count(last)
        is_in_prompt = index == 0 and tag == "think" and counts == (0, 1)
        if counts != (1, 1) and not is_in_prompt:
            return f"{counts[0]} {first} and {counts[1]} {last}"
        start = position if is_in_prompt else text.find(first, position)
        end = text.find(last, max(start, position))
        if start < position or end < start:
            return f"{first} is out of order"
        position = end + len(last)
    return ""


def length_penalty(
    max_length: float,
    buffer: float,
    *,
    unit: Literal["tokens", "turns"] | Callable[[Trajectory], float] = "tokens",
    penalty: float = 1.0,
) -> ShapingScorer:
    """Return a scorer: 0.0 up to a length, then falling to `-penalty` at `max_length`, and that beyond it.

    The soft overlong punishment of DAPO (arXiv:2503.14476, equation 13): with length `n`, it is 0 for
    `n <= max_length - buffer`, `-penalty` for `n > max_length`, and linear in between.

    Args:
        max_length: Length from which the whole penalty is due.
        buffer: Length over which the penalty grows; DAPO takes a fifth of the longest response.
        unit: "tokens": tokens that the model sampled in all of its messages. "turns": its messages. Or a
            function of the trajectory that returns a length.
        penalty: The whole penalty, above 0.

    Raises:
        ValueError: If a number is not above 0, `buffer` is larger than `max_length`, or `unit` is another
            text; in a call: if the trajectory has no tokens, since its engine takes messages.
    """
    for name, value in (("max_length", max_length), ("buffer", buffer), ("penalty", penalty)):
        check_above_zero(name, value)
    if buffer > max_length:
        raise ValueError(f"buffer is at most max_length, {max_length}; got {buffer}")
    if not callable(unit) and unit not in ("tokens", "turns"):
        raise ValueError(f"unit is 'tokens', 'turns' or a function of a Trajectory; got {unit!r}")

    def length_of(trajectory: Trajectory) -> float:
        if callable(unit):
            return unit(trajectory)
        if unit == "turns":
            return len(trajectory.turns)
        if trajectory.ledger is None:
            raise ValueError(
                "length_penalty counts tokens, and this trajectory has none, since its engine takes "
                'messages: pass unit="turns", or a function that counts words'
            )
        return trajectory.n_sampled

    def score(trajectory: Trajectory) -> Score:
        length = length_of(trajectory)
        excess = min(max(length - (max_length - buffer), 0.0), buffer)
        said = "" if not excess else f"length {length:g} of {max_length:g}"
        return Score(-penalty * excess / buffer if excess else 0.0, None, said)

    score.__name__ = score.__qualname__ = "length_penalty"
    return score


def tool_use_reward(
    *,
    used: float = 1.0,
    success: float = 0.0,
    error: float = 0.0,
    tools: Mapping[str, float] | None = None,
    bounds: tuple[float, float] = (-1.0, 1.0),
) -> ShapingScorer:
    """Return a scorer of tool calls: a bonus for using tools, and values per successful and failed call.

    Calls that failed although the model did nothing wrong (INFRA, CRASH, CANCELLED) count as uses, but
    neither as successes nor as errors. The parts of the score are "used", "success" and "error", before the
    bounds.

    A policy learns to call a tool often if each call pays. Prefer `used` to `success`, and keep both small
    beside the reward for the answer.

    Args:
        used: Added once if a call went well, or failed through no fault of the model.
        success: Added per successful call.
        error: Added per failed call; negative for a penalty.
        tools: Added per successful call of a tool, by its name, instead of `success`. Calls of other tools do
            not count, except as errors. None: all tools count.
        bounds: Least and largest score.

    Raises:
        ValueError: If the bounds are not in order.
    """
    least, most = bounds
    if not least <= most:
        raise ValueError(f"bounds are (least, largest); got {bounds}")

    def score(trajectory: Trajectory) -> Score:
        parts = {"used": 0.0, "success": 0.0, "error": 0.0}
        errors: Counter[str] = Counter()
        for call, result in trajectory.calls:
            counts = tools is None or call.tool in tools
            if result.is_error and result.status not in NOT_THE_MODELS:
                parts["error"] += error
                errors[f"{call.tool or 'unreadable'}: {result.status}"] += 1
                continue
            if counts:
                parts["used"] = used
            if counts and not result.is_error:
                parts["success"] += success if tools is None else tools[call.tool]
        said = ", ".join(f"{count} × {what}" for what, count in sorted(errors.items()))
        return Score(min(max(sum(parts.values()), least), most), None, said, parts)

    score.__name__ = score.__qualname__ = "tool_use_reward"
    return score
