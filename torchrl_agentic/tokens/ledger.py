"""The token ledger of a trajectory: which ids, who wrote each, how likely the sampled ones were."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

SAMPLED, PROMPT, BOUNDARY = -1, -2, -3
"""Sources of a token: the model; a prompt, or a message that was put in; the chat template between messages.
A tool result has the number of its call, counted through the trajectory from 0."""
_NAMES = {SAMPLED: "sampled", PROMPT: "prompt", BOUNDARY: "boundary"}


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of one source in a row, [start, stop)."""

    source: int
    start: int
    stop: int

    @property
    def name(self) -> str:
        """What wrote them, in words."""
        return source_name(self.source)


class TokenLedger:
    """The tokens of one trajectory, append-only: sampled ids are kept, never made again from text.

    All arrays have one length. mask: whether the model sampled the token, its end-of-sequence token included;
    those are the ones to train on. log_probs: natural logarithms, NaN where nothing was sampled or no
    log-probability is known.

    >>> ledger = TokenLedger()
    >>> ledger.prompt([5, 6])
    >>> ledger.sampled([7, 2], [-0.5, -0.1])
    >>> ledger.result([8], call=0)
    >>> list(ledger.mask)
    [False, False, True, True, False]
    """

    __slots__ = ("_ids", "_log_probs", "_sources")

    def __init__(self) -> None:
        self._ids, self._log_probs, self._sources = array("q"), array("d"), array("q")

    @property
    def ids(self) -> Sequence[int]:
        """The token ids."""
        return tuple(self._ids)

    @property
    def log_probs(self) -> Sequence[float]:
        """The log-probability of each token when it was sampled, in nats; NaN where there is none."""
        return tuple(self._log_probs)

    @property
    def sources(self) -> Sequence[int]:
        """What wrote each token: SAMPLED, PROMPT, BOUNDARY, or the number of a call."""
        return tuple(self._sources)

    @property
    def mask(self) -> Sequence[bool]:
        """Whether each token was sampled."""
        return [source == SAMPLED for source in self._sources]

    def prompt(self, ids: Iterable[int]) -> None:
        """Add tokens of a prompt, or of a message that was neither sampled nor a tool's."""
        self._put(ids, PROMPT)

    def boundary(self, ids: Iterable[int]) -> None:
        """Add tokens that the chat template puts between messages."""
        self._put(ids, BOUNDARY)

    def result(self, ids: Iterable[int], *, call: int) -> None:
        """Add tokens of the result of a call.

        Raises:
            ValueError: calls count from 0.
        """
        if call < 0:
            raise ValueError(f"calls are numbered from 0; got {call}")
        self._put(ids, call)

    def sampled(self, ids: Iterable[int], log_probs: Iterable[float] | None = None) -> None:
        """Add tokens of the model. log_probs: in nats, one for each; None: not known.

        Raises:
            ValueError: there are more of the one than of the other, or a log-probability is above 0.
        """
        ids = list(ids)
        values = [math.nan] * len(ids) if log_probs is None else list(log_probs)
        if len(values) != len(ids):
            raise ValueError(f"{len(ids)} sampled tokens, but {len(values)} log-probabilities")
        if any(value > 1e-4 for value in values):
            raise ValueError(f"a log-probability is at most 0; got {max(values)}")
        self._put(ids, SAMPLED, values)

    def add(self, ids: Iterable[int], sources: Iterable[int]) -> None:
        """Add tokens that were not sampled, each with its source.

        Raises:
            ValueError: there are more of the one than of the other, or a source is none, or SAMPLED.
        """
        ids, sources = list(ids), list(sources)
        if len(ids) != len(sources):
            raise ValueError(f"{len(ids)} tokens, but {len(sources)} sources")
        if any(source < BOUNDARY or source == SAMPLED for source in sources):
            raise ValueError(f"sources are PROMPT, BOUNDARY and numbers of calls; got {min(sources)}")
        self._check(ids)
        self._ids.extend(ids)
        self._sources.extend(sources)
        self._log_probs.extend([math.nan] * len(ids))

    def spans(self) -> Iterator[Span]:
        """Go through the runs of tokens with one source."""
        start = 0
        for index in range(1, len(self) + 1):
            if index == len(self) or self._sources[index] != self._sources[start]:
                yield Span(self._sources[start], start, index)
                start = index

    def copy(self) -> Self:
        """Make a ledger that goes its own way from here: for a branch of the trajectory."""
        new = type(self)()
        new._ids, new._log_probs, new._sources = self._ids[:], self._log_probs[:], self._sources[:]
        return new

    def to_json(self) -> dict[str, Any]:
        """Give the ledger as JSON has it; None stands for NaN."""
        log_probs = [None if math.isnan(value) else value for value in self._log_probs]
        return {"ids": list(self._ids), "sources": list(self._sources), "log_probs": log_probs}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read what `to_json` gives.

        Raises:
            ValueError: the arrays differ in length, or hold what no ledger does.
        """
        ids, sources, log_probs = (list(data[key]) for key in ("ids", "sources", "log_probs"))
        if not len(ids) == len(sources) == len(log_probs):
            raise ValueError(f"{len(ids)} ids, {len(sources)} sources, {len(log_probs)} log-probabilities")
        ledger = cls()
        for token, source, value in zip(ids, sources, log_probs, strict=True):
            if source == SAMPLED:
                ledger.sampled([token], None if value is None else [value])
            else:
                ledger.add([token], [source])
        return ledger

    def __len__(self) -> int:
        return len(self._ids)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenLedger):
            return NotImplemented
        return self.to_json() == other.to_json()

    def __repr__(self) -> str:
        return f"TokenLedger({', '.join(f'{span.stop - span.start} {span.name}' for span in self.spans())})"

    def _put(self, ids: Iterable[int], source: int, log_probs: Iterable[float] | None = None) -> None:
        ids = list(ids)
        self._check(ids)
        self._ids.extend(ids)
        self._sources.extend([source] * len(ids))
        self._log_probs.extend([math.nan] * len(ids) if log_probs is None else log_probs)

    @staticmethod
    def _check(ids: Sequence[int]) -> None:
        """See that all can be added, before the first one is."""
        for token in ids:
            if type(token) is not int or token < 0:
                raise ValueError(f"a token id is an integer from 0 on; got {token!r}")


def source_name(source: int) -> str:
    """Say in words what wrote a token."""
    return _NAMES.get(source, f"call {source}")
