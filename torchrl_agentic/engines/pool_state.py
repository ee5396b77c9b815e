"""`PoolState`: which engine of a pool gets a request, which engines are out, and which weights they have.

It decides and counts; `EnginePool` acts. It knows engines by number only, and no event loop.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torchrl_agentic.limits.backoff import backoff_pause_s

Phase: TypeAlias = Literal["in", "out", "trial", "unusable"]

MAX_KEYS = 65_536
"""Number of trajectories whose engine is remembered, the latest ones."""
LEAVE = 0.5
"""A trajectory leaves a full engine for one whose load is at most this share of the full one's."""
MAX_BLAMED = 2
"""Number of engines that one trajectory may take out before it gets an answer again."""


@dataclass(slots=True)
class MemberState:
    """One engine of a pool.

    Attributes:
        number: Its place in the pool, counted from 0.
        limit: Number of requests that it works on at once.
        version: Policy version of its weights, in the numbers of the pool.
        phase: "in": it gets requests. "out": it was lost, and is tried again at `retry_at`. "trial": one
            request, a check or an update decides whether it is in again. "unusable": it refuses everything.
        running: Number of requests that run.
        is_loading: Whether an update of its weights is under way, so that it gets no requests.
        loads: Number of updates of its weights that have begun.
        epoch: Number of times that it went out; requests of earlier epochs say nothing about it.
        failures: Number of failures in a row that took or kept it out.
        retry_at: Time at which it may be tried again.
        reason: Message of the failure that took it out.
        brings_back: Whether it needs a check or its weights before it serves again, if it was out.
    """

    number: int
    limit: int
    version: int
    brings_back: bool = False
    phase: Phase = "in"
    running: int = 0
    is_loading: bool = False
    loads: int = 0
    epoch: int = 0
    failures: int = 0
    retry_at: float = 0.0
    reason: str = ""

    @property
    def load(self) -> float:
        """Requests that run, as a share of those that it works on at once."""
        return self.running / self.limit

    def may_try(self, now: float) -> bool:
        """Return whether the engine is out, and may be tried again now."""
        return self.phase == "out" and not self.is_loading and now >= self.retry_at

    def needs_load(self, version: int) -> bool:
        """Return whether the engine needs a check, or the weights of a version, before it serves."""
        return self.brings_back or self.version != version

    def take_out(self, now: float, reason: str, *, retry_s: float, longest_s: float) -> None:
        """Take the engine out, for longer after each consecutive failure.

        Args:
            now: The time, in seconds.
            reason: Message of the failure.
            retry_s: Seconds until it is tried again after the first failure.
            longest_s: Bound on these seconds, which double with each failure.
        """
        self.phase, self.reason, self.epoch = "out", reason, self.epoch + 1
        self.failures += 1
        self.retry_at = now + backoff_pause_s(self.failures, retry_s, longest_s)


@dataclass(frozen=True, slots=True)
class Ticket:
    """One request to one engine.

    Attributes:
        number: The engine.
        key: Name of the trajectory.
        version: Policy version of the weights of the engine when the request began.
        epoch: `MemberState.epoch` at this time.
        loads: `MemberState.loads` at this time.
    """

    number: int
    key: str
    version: int
    epoch: int
    loads: int


@dataclass(slots=True)
class _Home:
    """State of a trajectory: its engine, the latest weights that sampled it, and its failures."""

    number: int
    version: int
    failures: int = 0


class _Homes:
    """The trajectories whose engine is remembered, the latest `most` ones."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._homes: OrderedDict[str, _Home] = OrderedDict()

    def get(self, key: str) -> _Home | None:
        return self._homes.get(key)

    def settle(self, key: str, number: int, version: int) -> None:
        """Assign an engine to a trajectory, which sees no weights older than `version` if it is new."""
        home = self._homes.setdefault(key, _Home(number, version))
        home.number = number
        self._homes.move_to_end(key)
        if len(self._homes) > self._most:
            self._homes.popitem(last=False)

    def note(self, key: str, version: int) -> _Home | None:
        """Record the version of sampled tokens, so that the trajectory sees no older weights later."""
        if (home := self._homes.get(key)) is not None:
            home.version = max(home.version, version)
        return home


class PoolState:
    """State of a pool of engines, and the decisions that follow from it.

    Routing. A trajectory stays on its engine, which has its prefix in the cache, while that is in, unless it
    is full (requests would wait) and another has at most `LEAVE` of its load. Others go to the engine with
    the lowest load, the first of several. The weights that sample a trajectory never become older.

    Health. A failure takes an engine out, for `retry_s` seconds, then for twice as long after each failure in
    a row. Then one trial decides: a request of a trajectory without an engine; or, if
    `MemberState.brings_back` is set or the engine missed an update, the check or update that the caller of
    `due` makes. A trajectory whose requests fail on one engine after the other takes out `MAX_BLAMED` of them
    at most.

    Versions. An update gives new weights to one engine after the other. Meanwhile an engine gets requests
    only if its version is within `max_skew` of the oldest that serves. Outside of updates, all engines that
    are in have the version of the pool.

    Args:
        limits: Number of requests that each engine works on at once.
        version: Policy version of the weights that all of them have.
        max_skew: Largest difference between the versions that serve at once.
        retry_s: Seconds after which a lost engine is tried again.
        longest_retry_s: Bound on these seconds, which double with each failure in a row.
        max_keys: Number of trajectories that are remembered.

    Attributes:
        members: The engines.
        version: Policy version: number of updates that have ended.
        target: Version that a running update leads to, or None.
    """

    def __init__(
        self,
        limits: Sequence[int],
        *,
        version: int = 0,
        max_skew: int = 1,
        retry_s: float = 1.0,
        longest_retry_s: float = 60.0,
        max_keys: int = MAX_KEYS,
    ) -> None:
        self.members = [MemberState(number, limit, version) for number, limit in enumerate(limits)]
        self.version = version
        self.target: int | None = None
        self._max_skew = max_skew
        self._retry_s, self._longest_retry_s = retry_s, longest_retry_s
        self._homes = _Homes(max_keys)
        self._tried: set[int] = set()
        """Engines that got, or were offered, the weights of the update."""
        self._tries_all = False
        """Whether the update also tries engines that are out, because no other was left."""

    def choose(self, key: str, now: float, avoid: Collection[int] = ()) -> int | Literal["wait"] | None:
        """Choose the engine of a request.

        Args:
            key: Name of the trajectory.
            now: The time, in seconds.
            avoid: Engines on which this request has failed.

        Returns:
            Number of the engine; "wait" if one may become free by a trial or an update that is under way;
            None if there is none.
        """
        home = self._homes.get(key)
        reached = self.version if self.target is None else self.target
        oldest, newest = self._bounds()
        if home is not None:
            oldest = max(oldest, min(home.version, reached))
        ready = [
            one
            for one in self.members
            if one.phase == "in"
            and not one.is_loading
            and one.number not in avoid
            and oldest <= one.version <= newest
        ]
        own = next((one for one in ready if home is not None and one.number == home.number), None)
        if own is not None and own.running < own.limit:
            return own.number
        if own is None:
            for one in self.members:
                is_near = oldest <= one.version <= newest and one.number not in avoid
                if is_near and one.may_try(now) and not one.needs_load(self.version):
                    return one.number
        if ready:
            best = min(ready, key=lambda one: (one.load, one.number))
            if own is None or (best.running + 1) / best.limit <= LEAVE * own.load:
                return best.number
            return own.number
        may_come = (one.phase in ("in", "trial") and one.number not in avoid for one in self.members)
        return "wait" if any(may_come) else None

    def begin(self, number: int, key: str) -> Ticket:
        """Begin a request; the trajectory stays on this engine from now on.

        Args:
            number: The engine, as `choose` returned it.
            key: Name of the trajectory.
        """
        one = self.members[number]
        one.running += 1
        if one.phase == "out":
            one.phase = "trial"
        self._homes.settle(key, number, self.version)
        return Ticket(number, key, one.version, one.epoch, one.loads)

    def end(self, ticket: Ticket) -> bool:
        """End a request; a trial without a result, because its caller was cancelled, is made again.

        Returns:
            Whether an engine has become available to waiting requests.
        """
        one = self.members[ticket.number]
        one.running -= 1
        if one.is_loading:
            return not one.running
        if one.phase != "trial" or ticket.epoch != one.epoch:
            return False
        one.phase = "out"
        return True

    def succeed(self, ticket: Ticket, version: int) -> bool:
        """Record an answer.

        Args:
            ticket: The request.
            version: Policy version of the weights that sampled it.

        Returns:
            Whether this brings the engine back.
        """
        one = self.members[ticket.number]
        if (home := self._homes.note(ticket.key, version)) is not None:
            home.failures = 0
        if ticket.epoch != one.epoch or one.phase not in ("in", "trial"):
            return False
        one.failures = 0
        is_back = one.phase == "trial" and not one.is_loading
        if is_back:
            one.phase = "in"
        return is_back

    def fail(self, ticket: Ticket, now: float, reason: str, version: int | None = None) -> bool:
        """Record that a request failed because its engine may be lost.

        Args:
            ticket: The request.
            now: The time, in seconds.
            reason: Message of the failure.
            version: Policy version of the weights that sampled a part of the answer; None: there is none.

        Returns:
            Whether this takes the engine out.
        """
        one, home = self.members[ticket.number], self._homes.get(ticket.key)
        if version is not None:
            self._homes.note(ticket.key, version)
        if home is not None:
            home.failures += 1
        if ticket.epoch != one.epoch or one.phase not in ("in", "trial"):
            return False
        if one.phase == "in" and home is not None and home.failures > MAX_BLAMED:
            return False
        one.take_out(now, reason, retry_s=self._retry_s, longest_s=self._longest_retry_s)
        return True

    def exclude(self, number: int, reason: str) -> None:
        """Record that an engine refuses every request; it is not tried again.

        Args:
            number: The engine.
            reason: Message of the refusal.
        """
        one = self.members[number]
        one.phase, one.reason, one.epoch, one.is_loading = "unusable", reason, one.epoch + 1, False

    def due(self, now: float) -> list[int]:
        """Return the engines that are out and due for a check or an update; call `begin_load` for each."""
        return [one.number for one in self.members if one.may_try(now) and one.needs_load(self.version)]

    def begin_update(self) -> int:
        """Begin an update of all engines, and return the version that it leads to."""
        assert self.target is None, "one update at a time"
        self.target = self.version + 1
        self._tried.clear()
        self._tries_all = False
        return self.target

    def next_to_update(self) -> int | None:
        """Return a serving engine without the weights of the running update; None if all have them.

        If no engine serves, those that are out are tried, each once.
        """
        assert self.target is not None
        ready = [one for one in self.members if one.phase in ("in", "trial")]
        if not any(one.phase == "in" or not one.is_loading for one in ready):
            self._tries_all = True
        if self._tries_all:
            ready += [one for one in self.members if one.phase == "out" and one.number not in self._tried]
        for one in ready:
            if not one.is_loading and one.version < self.target:
                return one.number
        return None

    def begin_load(self, number: int) -> None:
        """Begin an update or a check of an engine; it gets no requests until this has ended."""
        one = self.members[number]
        one.is_loading = True
        one.loads += 1
        self._tried.add(number)
        if one.phase == "out":
            one.phase = "trial"

    def end_load(self, number: int, version: int | None, now: float) -> bool:
        """End the update of an engine.

        Args:
            number: The engine.
            version: Version of the weights that it has now; None if it refused them and has its old ones.
            now: The time, in seconds.

        Returns:
            Whether this brings the engine back.
        """
        one = self.members[number]
        one.is_loading = False
        if version is not None:
            one.version = version
        if one.phase != "trial":
            return False
        if version is None or version < self.version:  # there were newer weights in the meantime
            one.phase, one.retry_at = "out", now
            return False
        one.phase = "in"
        return True

    def fail_load(self, number: int, now: float, reason: str) -> bool:
        """Record that an update or check of an engine failed.

        Args:
            number: The engine.
            now: The time, in seconds.
            reason: Message of the failure.

        Returns:
            Whether this takes the engine out.
        """
        one = self.members[number]
        one.is_loading = False
        if one.phase not in ("in", "trial"):
            return False
        one.take_out(now, reason, retry_s=self._retry_s, longest_s=self._longest_retry_s)
        return True

    def end_update(self, *, is_done: bool) -> None:
        """End an update.

        Args:
            is_done: Whether an engine has the new weights, so that the version rises.
        """
        if is_done and self.target is not None:
            self.version = self.target
        self.target = None

    def _bounds(self) -> tuple[float, float]:
        """Return the lowest and the highest version that may get requests now."""
        if self.target is None:
            return 0, math.inf  # all engines that are in have the same
        serving = [
            one
            for one in self.members
            if (one.phase == "in" and (one.running or not one.is_loading))
            or (one.phase == "trial" and not one.is_loading)
        ]
        highest = max((one.version for one in serving if one.running), default=0)
        lowest = min((one.version for one in serving), default=self.target)
        return highest - self._max_skew, lowest + self._max_skew
