"""The token ledger of a trajectory: each id, its source, and log-probability and version of the sampled."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from pydantic_core import core_schema

SAMPLED, PROMPT, BOUNDARY = -1, -2, -3
"""Sources of a token: the policy; a prompt or an injected message; the chat template between messages.

The source of a tool result's token is the number of its call, counted through the trajectory from 0.
"""
_NAMES = {SAMPLED: "sampled", PROMPT: "prompt", BOUNDARY: "boundary"}
_UNKNOWN, _NO_VERSION = array("d", [math.nan]), array("q", [-1])
_MAX_LOG_PROB = 1e-4  # above 0, for the rounding of an engine


class Columns(NamedTuple):
    """Copies of the arrays of a ledger, each [T]: int64, but for float64 log-probabilities."""

    ids: array[int]
    sources: array[int]
    log_probs: array[float]
    versions: array[int]


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """A run of tokens that have one source.

    Attributes:
        source: SAMPLED, PROMPT, BOUNDARY, or the number of a call.
        start: Index of the first token.
        stop: Index after the last token.
    """

    source: int
    start: int
    stop: int

    @property
    def name(self) -> str:
        """Return the source as a word, such as "sampled" or "call 0"."""
        return source_name(self.source)


@dataclass(frozen=True, slots=True)
class TokenRuns:
    """JSON of a ledger.

    Attributes:
        ids: Token ids.
        runs: Runs of tokens of one kind: their source, the policy version that sampled them or -1, and their
            number. Sources: -1 sampled, which are those to train on; -2 prompt; -3 the chat template between
            messages; from 0 the number of the call whose result it is.
        log_probs: Log-probabilities of the sampled tokens, in nats; null if one is unknown, or all of them.
    """

    ids: list[int]
    runs: list[tuple[int, int, int]]
    log_probs: list[float | None] | None


class TokenLedger:
    """Token ids of one trajectory, each marked as sampled by the policy or injected by the environment.

    Ids are appended exactly as the model saw them and never re-created from text, because a tokenizer may
    split the same text differently once the words around it have changed. All arrays have the same length.

    >>> ledger = TokenLedger()
    >>> ledger.add_prompt([5, 6])
    >>> ledger.add_sampled([7, 2], [-0.5, -0.1])
    >>> ledger.add_result([8], call=0)
    >>> list(ledger.mask)
    [False, False, True, True, False]
    """

    __slots__ = ("_ids", "_log_probs", "_sources", "_versions")

    def __init__(self) -> None:
        self._ids, self._log_probs, self._sources = array("q"), array("d"), array("q")
        self._versions = array("q")

    @property
    def ids(self) -> Sequence[int]:
        """Token ids, [T]."""
        return tuple(self._ids)

    @property
    def log_probs(self) -> Sequence[float]:
        """Log-probability of each token when it was sampled, in nats, [T]; NaN if injected or unknown."""
        return tuple(self._log_probs)

    @property
    def sources(self) -> Sequence[int]:
        """Source of each token, [T]: SAMPLED, PROMPT, BOUNDARY, or the number of a call."""
        return tuple(self._sources)

    @property
    def versions(self) -> Sequence[int]:
        """Policy version that sampled each token, [T]; -1 if it was injected, or the version is unknown."""
        return tuple(self._versions)

    @property
    def mask(self) -> Sequence[bool]:
        """True for each token that was sampled, the end-of-sequence token included, [T]: the loss mask."""
        return [source == SAMPLED for source in self._sources]

    @property
    def next_call(self) -> int:
        """Number of the next call: one more than the highest one that has tokens here."""
        return max(0, max(self._sources, default=SAMPLED) + 1)

    def add_prompt(self, ids: Iterable[int]) -> None:
        """Append tokens of a prompt, or of an injected message that is not a tool result.

        Args:
            ids: Token ids.
        """
        self._append(_checked_ids(ids), PROMPT)

    def add_boundary(self, ids: Iterable[int]) -> None:
        """Append tokens that the chat template writes between messages.

        Args:
            ids: Token ids.
        """
        self._append(_checked_ids(ids), BOUNDARY)

    def add_result(self, ids: Iterable[int], *, call: int) -> None:
        """Append tokens of a tool result.

        Args:
            ids: Token ids.
            call: Number of the call, counted through the trajectory from 0.

        Raises:
            ValueError: If `call` is negative.
        """
        if call < 0:
            raise ValueError(f"calls are numbered from 0; got {call}")
        self._append(_checked_ids(ids), call)

    def add_sampled(
        self, ids: Iterable[int], log_probs: Iterable[float] | None = None, *, version: int | None = None
    ) -> None:
        """Append tokens that the policy sampled.

        Args:
            ids: Sampled token ids, the stop token included.
            log_probs: One log-probability per id, in nats, or None if they are unknown.
            version: Policy version that sampled them; None: unknown.

        Raises:
            ValueError: If `ids` and `log_probs` differ in length, or a log-probability is above 0.
        """
        ids = _checked_ids(ids)
        values = _UNKNOWN * len(ids) if log_probs is None else array("d", log_probs)
        if len(values) != len(ids):
            raise ValueError(f"{len(ids)} sampled tokens, but {len(values)} log-probabilities")
        # If the first one is NaN, so is their maximum.
        if values and not max(values) <= _MAX_LOG_PROB and any(value > _MAX_LOG_PROB for value in values):
            raise ValueError(f"a log-probability is at most 0; got {max(values)}")
        self._append(ids, SAMPLED, values, version)

    def add_injected(self, ids: Iterable[int], sources: Iterable[int]) -> None:
        """Append tokens that were not sampled, from several sources.

        Args:
            ids: Token ids.
            sources: Source of each id: PROMPT, BOUNDARY, or the number of a call.

        Raises:
            ValueError: If `ids` and `sources` differ in length, or a source is SAMPLED or unknown.
        """
        if not isinstance(sources, array) or sources.typecode != "q":
            sources = array("q", sources)
        if sources and (min(sources) < BOUNDARY or SAMPLED in sources):
            raise ValueError(f"sources are PROMPT, BOUNDARY and numbers of calls; got {min(sources)}")
        ids = _checked_ids(ids)
        if len(ids) != len(sources):
            raise ValueError(f"{len(ids)} tokens, but {len(sources)} sources")
        self._ids += ids
        self._sources += sources
        self._log_probs += _UNKNOWN * len(ids)
        self._versions += _NO_VERSION * len(ids)

    def spans(self) -> Iterator[TokenSpan]:
        """Yield the runs of tokens that have one source, in order."""
        start = 0
        for source, run in itertools.groupby(self._sources):
            stop = start + len(list(run))
            yield TokenSpan(source, start, stop)
            start = stop

    def since(self, start: int) -> tuple[array[int], array[int]]:
        """Return the ids and the sources of the tokens behind the first ones, as compact arrays.

        Args:
            start: Number of the first tokens, which are left out.
        """
        return self._ids[start:], self._sources[start:]

    def columns(self, size: int | None = None) -> Columns:
        """Return copies of the arrays, whose memory a tensor may share.

        Args:
            size: Number of the first tokens that are copied; None: all.
        """
        return Columns(self._ids[:size], self._sources[:size], self._log_probs[:size], self._versions[:size])

    @property
    def sampled_stop(self) -> int:
        """Number of tokens up to the last sampled one; 0 if none was sampled."""
        return len(self) - self._sources[::-1].index(SAMPLED) if SAMPLED in self._sources else 0

    def copy(self, size: int | None = None) -> Self:
        """Return an independent copy, for a branch of the trajectory.

        Args:
            size: Number of its first tokens that are copied; None: all.
        """
        new = type(self)()
        new._ids, new._sources, new._log_probs, new._versions = self.columns(size)
        return new

    def to_json(self, digits: int | None = None) -> dict[str, Any]:
        """Return the ledger as JSON, in the form of `TokenRuns`.

        Args:
            digits: Number of digits behind the point to which log-probabilities are rounded; None: all.
        """
        runs: list[list[int]] = []
        sampled = array("d")
        for span in self.spans():
            if span.source == SAMPLED:
                sampled += self._log_probs[span.start : span.stop]
            for version, run in itertools.groupby(self._versions[span.start : span.stop]):
                runs.append([span.source, version, len(list(run))])
        log_probs: list[float | None] | None = None
        if not all(map(math.isnan, sampled)):
            rounded = sampled if digits is None else [round(value, digits) for value in sampled]
            log_probs = [None if math.isnan(value) else value for value in rounded]
        return {"ids": self._ids.tolist(), "runs": runs, "log_probs": log_probs}

    @classmethod
    def from_runs(cls, found: TokenRuns) -> Self:
        """Read a ledger from its JSON.

        Raises:
            ValueError: If the runs do not cover the ids, or hold an invalid value.
        """
        ledger, start, known = cls(), 0, 0
        for source, version, size in found.runs:
            ids = found.ids[start : start + size]
            if source == SAMPLED:
                values = None if found.log_probs is None else found.log_probs[known : known + size]
                likely = None if values is None else [math.nan if one is None else one for one in values]
                ledger.add_sampled(ids, likely, version=None if version < 0 else version)
                known += size
            else:
                ledger.add_injected(ids, [source] * size)
            start += size
        if not len(ledger) == len(found.ids) == start or known != len(found.log_probs or range(known)):
            raise ValueError(f"the runs of a ledger cover {start} of {len(found.ids)} token ids")
        return ledger

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        written = core_schema.plain_serializer_function_ser_schema(cls.to_json)
        runs = core_schema.no_info_after_validator_function(cls.from_runs, handler.generate_schema(TokenRuns))
        return {**runs, "serialization": written}

    def __len__(self) -> int:
        return len(self._ids)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenLedger):
            return NotImplemented
        return self.to_json() == other.to_json()

    def __repr__(self) -> str:
        return f"TokenLedger({', '.join(f'{span.stop - span.start} {span.name}' for span in self.spans())})"

    def _append(
        self, ids: array[int], source: int, log_probs: array[float] | None = None, version: int | None = None
    ) -> None:
        self._ids += ids
        self._sources += array("q", [source]) * len(ids)
        self._log_probs += _UNKNOWN * len(ids) if log_probs is None else log_probs
        self._versions += (_NO_VERSION if version is None else array("q", [version])) * len(ids)


def _checked_ids(ids: Iterable[int]) -> array[int]:
    """Return ids as an array; raise ValueError if one is negative or no integer, before any is appended."""
    if not isinstance(ids, array) or ids.typecode != "q":
        ids = list(ids)
        if not set(map(type, ids)) <= {int}:
            wrong = next(token for token in ids if type(token) is not int)
            raise ValueError(f"a token id is an integer from 0 on; got {wrong!r}")
        ids = array("q", ids)
    if ids and min(ids) < 0:
        raise ValueError(f"a token id is an integer from 0 on; got {min(ids)}")
    return ids


def source_name(source: int) -> str:
    """Return the source of a token as a word, such as "sampled" or "call 0"."""
    return _NAMES.get(source, f"call {source}")
