"""`check`: runs all cases with a sandbox."""

from __future__ import annotations

import linecache
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

from torchrl_agentic.sandbox.conformance import (
    file_cases,
    filesystem_cases,
    leftover_cases,
    lifecycle_cases,
    limit_cases,
    network_cases,
    process_cases,
    protocol_cases,
    race_cases,
    rights_cases,
    supervision_cases,
)
from torchrl_agentic.sandbox.conformance.base import Case, Make

_GROUPS = (
    protocol_cases,
    file_cases,
    race_cases,
    lifecycle_cases,
    leftover_cases,
    supervision_cases,
    filesystem_cases,
    process_cases,
    rights_cases,
    network_cases,
    limit_cases,
)
CASES: tuple[Case, ...] = tuple(case for module in _GROUPS for case in module.group.cases)
_FOLDER = str(Path(__file__).parent)


@dataclass(frozen=True, slots=True)
class CaseOutcome:
    """The outcome of a case.

    Attributes:
        case: The case.
        status: "passed", "excused" if it was not tried, or "failed".
        reason: Why it was not tried, or how it failed, in one line.
        seconds: Its duration.
    """

    case: Case
    status: Literal["passed", "excused", "failed"]
    reason: str
    seconds: float


async def check(
    make: Make,
    cases: Iterable[Case] = CASES,
    *,
    untestable: Collection[str] = (),
    on_outcome: Callable[[CaseOutcome], None] | None = None,
) -> list[CaseOutcome]:
    """Run cases one after another, with sandboxes that `make` creates.

    Args:
        make: Creates a sandbox.
        cases: The cases.
        untestable: Threats that cannot be tested here, besides those that the sandbox does not stop.
        on_outcome: Called with each outcome.
    """
    if not __debug__:
        raise RuntimeError("'python -O' disables assertions, so no case can fail; run without -O")
    outcomes: list[CaseOutcome] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for case in cases:
            outcomes.append(await _outcome(case, make, untestable))
            if on_outcome is not None:
                on_outcome(outcomes[-1])
    return outcomes


async def _outcome(case: Case, make: Make, untestable: Collection[str]) -> CaseOutcome:
    began = time.monotonic()
    skip_reason = case.skip_reason(make(), untestable)
    if skip_reason is not None:
        return CaseOutcome(case, "excused", skip_reason, 0.0)
    try:
        await case.run(make)
    except Exception as error:
        return CaseOutcome(case, "failed", _first_line(error), time.monotonic() - began)
    return CaseOutcome(case, "passed", "", time.monotonic() - began)


def _first_line(error: Exception) -> str:
    """Return in one line what went wrong: the message, or the assertion that failed."""
    message = str(error).strip().partition("\n")[0]
    place = _place(error.__traceback__)
    if isinstance(error, AssertionError):
        return message or place
    return f"{type(error).__name__}: {message} ({place})"


def _place(trace: TracebackType | None) -> str:
    """Return the statement in a case that raised an exception, in one line."""
    frames = [frame for frame in traceback.extract_tb(trace) if frame.filename.startswith(_FOLDER)]
    if not frames:
        return "no reason given"
    first, last = frames[-1].lineno or 1, frames[-1].end_lineno or 1
    return " ".join(
        linecache.getline(frames[-1].filename, number).strip() for number in range(first, last + 1)
    )
