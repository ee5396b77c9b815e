"""`ScriptedEngine`: answers from a script, without a model: for tests, demonstrations and replays."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torchrl_agentic.engines.base import Engine, OnIds, Sampled
from torchrl_agentic.engines.request_checks import check_request, closed_error
from torchrl_agentic.errors import check_count

Answer: TypeAlias = str | Sequence[int]
Script: TypeAlias = (
    Callable[[str, int, Sequence[int]], Answer] | Mapping[str, Sequence[Answer]] | Sequence[Sequence[Answer]]
)


@dataclass(slots=True)
class ScriptPosition:
    """The position of a request in its answers.

    Attributes:
        turn: Number of the answer in its trajectory, counted from 0.
        ids: Token ids of the whole answer.
        done: How many of them the prompt already ends with.
    """

    turn: int
    ids: Sequence[int]
    done: int = 0


MOST_KEYS = 65_536
"""Number of trajectories whose positions are kept, the most recently used ones."""


class AnswerCursor:
    """Finds the answer that a request asks for, by its key and its prompt.

    A trajectory gets one answer after the other. An answer counts once `finish` was called for it; until
    then, a request with the same key asks for the same answer: for the rest of it if the prompt ends with
    its first ids (sampling resumes), else for all of it (the request is made again).

    Args:
        answers: Called with (key, turn, prompt ids) once per answer; returns the ids of the whole answer.
    """

    def __init__(self, answers: Callable[[str, int, Sequence[int]], Sequence[int]]) -> None:
        self._answers = answers
        # By trajectory: its turn, and the answer that was begun in it, with the length of its prompt.
        self._known: OrderedDict[str, tuple[int, Sequence[int] | None, int]] = OrderedDict()

    def find(self, key: str, ids: Sequence[int]) -> ScriptPosition:
        """Return the answer to a prompt, in time O(length of the answer).

        Args:
            key: Name of the trajectory.
            ids: Token ids of the prompt, [P].
        """
        turn, answer, start = self._known.get(key, (0, None, 0))
        done = len(ids) - start
        if answer is None or not 0 <= done < len(answer) or list(ids[start:]) != list(answer[:done]):
            answer, start, done = self._answers(key, turn, ids), len(ids), 0
        self._known[key] = turn, answer, start
        self._known.move_to_end(key)
        if len(self._known) > MOST_KEYS:
            self._known.popitem(last=False)
        return ScriptPosition(turn, answer, done)

    def finish(self, key: str, turn: int) -> None:
        """Count an answer: the next request with this key asks for the next one.

        Args:
            key: Name of the trajectory.
            turn: The number of the answer, as `find` returned it.
        """
        if self._known.get(key, (0, None, 0))[0] == turn:
            self._known[key] = turn + 1, None, 0


@dataclass(slots=True, eq=False)
class _ScriptedRequest:
    version: int
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class ScriptedEngine(Engine):
    """An engine that answers from a script and encodes the answers with a tokenizer.

    Each trajectory (`key`) gets the answers of its script one after the other. Requests that were aborted,
    cancelled or failed do not count: a request that resumes after the first ids of an answer gets its rest.

    Args:
        script: A function of (key, turn, prompt ids) that returns an answer; or lists of answers by name of
            the trajectory or of its task ("task" for "task/0" and "task/1"); or a list of such lists, which
            trajectories take in the order in which they begin, over and over. After the last answer of its
            list, a trajectory gets "". An answer is a string, to which a stop token is appended, or the exact
            ids; ids that do not end with a stop token have the finish "length".
        tokenizer: A tokenizer of transformers; None if all answers are ids.
        stop_token_ids: Ids that end an answer besides the tokenizer's `eos_token_id`.
        log_prob: Log-probability of each id, in nats; None: the results have none.
        latency_s: Seconds until the first token of an answer, or a function of (key, turn) that returns
            them.
        token_s: Seconds for each token.
        piece_tokens: Number of tokens between which a request can be aborted, and which `on_ids` gets at a
            time; None: the whole answer.
        max_concurrent: Number of requests that it answers at once.
        context_length: Bound on prompt and answer together, in tokens; None: no bound.

    Attributes:
        version: Number of updates so far.
        max_concurrent: Number of requests that it answers at once.
        context_length: Bound on prompt and answer together, in tokens; None: no bound.

    Raises:
        TypeError: If the script is a list of texts instead of a list of lists.
    """

    def __init__(
        self,
        script: Script,
        tokenizer: Any = None,
        *,
        stop_token_ids: Sequence[int] = (),
        log_prob: float | None = None,
        latency_s: float | Callable[[str, int], float] = 0.0,
        token_s: float = 0.0,
        piece_tokens: int | None = None,
        max_concurrent: int = 64,
        context_length: int | None = None,
    ) -> None:
        check_count("max_concurrent", max_concurrent, optional=False)
        check_count("piece_tokens", piece_tokens)
        lists = () if callable(script) else script.values() if isinstance(script, Mapping) else script
        if any(isinstance(answers, str) for answers in lists):
            raise TypeError(
                "a script is a list of answers per trajectory: ScriptedEngine([['turn 0', 'turn 1']])"
            )
        self.version = 0
        self.max_concurrent = max_concurrent
        self._script, self._tokenizer = script, tokenizer
        eos: int | None = getattr(tokenizer, "eos_token_id", None)
        self._stops: tuple[int, ...] = (*(() if eos is None else (eos,)), *stop_token_ids)
        self._log_prob, self._latency_s, self._token_s = log_prob, latency_s, token_s
        self._piece_tokens, self.context_length = piece_tokens, context_length
        self._cursor = AnswerCursor(self._encoded)
        self._names: dict[str, int] = {}
        self._places = asyncio.Semaphore(max_concurrent)
        self._running: dict[_ScriptedRequest, None] = {}  # in the order in which they began
        self._is_closed = False

    async def sample(
        self, ids: Sequence[int], *, max_tokens: int, key: str, on_ids: OnIds | None = None
    ) -> Sampled:
        """Return the next answer of a trajectory; see `Engine.sample`."""
        bound = check_request(len(ids), max_tokens, self.context_length)
        if self._is_closed:
            raise closed_error(self)
        async with self._places:
            if self._is_closed:
                raise closed_error(self)
            request = _ScriptedRequest(self.version)
            place = self._cursor.find(key, ids)
            self._running[request] = None
            try:
                return await self._answer(request, place, bound, key, on_ids)
            finally:
                self._running.pop(request, None)

    async def _answer(
        self, request: _ScriptedRequest, place: ScriptPosition, bound: int, key: str, on_ids: OnIds | None
    ) -> Sampled:
        rest = place.ids[place.done : place.done + bound]
        size = self._piece_tokens or max(1, len(rest))
        latency = self._latency_s
        delay = latency(key, place.turn) if callable(latency) else latency
        done = 0
        while done < len(rest):
            piece = rest[done : done + size]
            await _wait(request.ended, delay + self._token_s * len(piece))
            if request.ended.is_set():
                break
            delay, done = 0.0, done + len(piece)
            if on_ids is not None:
                on_ids(piece)
        if self._is_closed and done < len(rest):
            raise closed_error(self)
        found = list(rest[:done])
        known = None if self._log_prob is None else [self._log_prob] * done
        if done < len(rest):
            return Sampled(found, known, "aborted", request.version)
        self._cursor.finish(key, place.turn)
        has_stopped = bool(found) and found[-1] in self._stops
        return Sampled(found, known, "stop" if has_stopped else "length", request.version)

    async def update(self, weights: Any) -> int:
        """Count an update, and abort the requests that run.

        Args:
            weights: Ignored.
        """
        self.version += 1
        self._end_requests()
        return self.version

    async def close(self) -> None:
        """End all requests; later ones raise InfrastructureError."""
        self._is_closed = True
        self._end_requests()

    def _end_requests(self) -> None:
        for request in list(self._running):
            request.ended.set()

    def _encoded(self, key: str, turn: int, ids: Sequence[int]) -> Sequence[int]:
        answer = self._written(key, turn, ids)
        if not isinstance(answer, str):
            return answer
        if self._tokenizer is None or not self._stops:
            raise TypeError(f"a string needs a tokenizer with an eos_token; got the answer {answer!r}")
        return [*self._tokenizer.encode(answer, add_special_tokens=False), self._stops[0]]

    def _written(self, key: str, turn: int, ids: Sequence[int]) -> Answer:
        if callable(self._script):
            return self._script(key, turn, ids)
        if isinstance(self._script, Mapping):
            name = key
            while name not in self._script and "/" in name:
                name = name.rpartition("/")[0]
            if name not in self._script:
                raise ValueError(
                    f"the script has no trajectory {key!r}; it has {', '.join(map(repr, self._script))}"
                )
            answers = self._script[name]
        else:
            number = self._names.setdefault(key, len(self._names))
            answers = self._script[number % len(self._script)]
        return answers[turn] if turn < len(answers) else ""


async def _wait(ended: asyncio.Event, seconds: float) -> None:
    """Wait for a time, or until an event happens."""
    if seconds <= 0:
        await asyncio.sleep(0)
        return
    try:
        async with asyncio.timeout(seconds):
            await ended.wait()
    except TimeoutError:
        pass
