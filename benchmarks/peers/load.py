"""The workload of all peers: scripted answers with calls, and tools with seeded latencies.

It needs only a tokenizer, so that it runs in the virtual environment of every peer. An answer is found by the
prompt alone, since not every peer names the trajectory of a request: its user message holds the number of the
trajectory, and its turns are counted.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TINY = Path(__file__).parents[2] / "torchrl_agentic" / "rollout" / "tiny"
STEP_S, PER_SEQUENCE_S, PLACES = 0.002, 1e-5, 256
"""The engine: a quarter of the times of `SimulatedEngine`'s defaults."""
FOREVER_MS = 3_600_000
MAX_TURNS = 8
MAX_TOKENS = 256
TO_P99 = 2.326  # standard deviations from the median to the 99th percentile


@dataclass(frozen=True)
class Plan:
    """One trajectory.

    Attributes:
        words: Number of words in each answer, before its call.
        naps_ms: Milliseconds of the tool after each answer but the last.
    """

    words: tuple[int, ...]
    naps_ms: tuple[int, ...]


@dataclass(frozen=True)
class Load:
    """A distribution of trajectories; the same number always has the same plan.

    Attributes:
        count: Number of trajectories, all of which run at once.
        median_ms: Median time of a tool.
        tail: 99th percentile of this time, as a multiple of the median.
        longest_ms: Bound on this time.
        stuck: Share of the calls that do not return, 0 to 1.
        stuck_turn: Turn whose call never returns, in every trajectory; None: only by `stuck`.
        seed: Seed of all random numbers.
    """

    count: int
    median_ms: float = 75.0
    tail: float = 30.0
    longest_ms: float = 1_800.0
    stuck: float = 0.0
    stuck_turn: int | None = None
    seed: int = 0

    @functools.cache  # noqa: B019
    def plan(self, number: int) -> Plan:
        """Return the trajectory with this number."""
        rng = random.Random(f"{self.seed}/{number}")
        least = 1 if self.stuck_turn is None else self.stuck_turn + 2
        turns = rng.randint(least, MAX_TURNS)
        words = tuple(min(60, max(2, round(10 * math.exp(rng.gauss(0, 0.7))))) for _ in range(turns))
        naps = []
        for turn in range(turns - 1):
            nap = min(self.longest_ms, self.median_ms * math.exp(rng.gauss(0, math.log(self.tail) / TO_P99)))
            is_stuck = rng.random() < self.stuck or turn == self.stuck_turn
            naps.append(FOREVER_MS if is_stuck else round(nap))
        return Plan(words, tuple(naps))

    def tasks(self, *, refills: bool) -> int:
        """Return how many tasks a peer gets.

        Args:
            refills: The peer begins a trajectory as soon as another one has ended. It gets ten times as many
                tasks, so that it stays full until all trajectories that count have ended.
        """
        return 10 * self.count if refills else self.count

    @property
    def answers(self) -> int:
        """Number of answers of all trajectories."""
        return sum(len(self.plan(number).words) for number in range(self.count))


MEASURES: Mapping[str, Load] = {
    "plain": Load(count=256),
    "stuck": Load(count=256, stuck=0.1),
    "updates": Load(count=256),
    "aborts": Load(count=256),
    "memory": Load(count=1_000, median_ms=1.0, stuck_turn=2),
}
"""What is measured, all trajectories at once: answers/s and processor time; stuck tools; an update of the
weights every second, as the peer's trainer makes it and by a server that aborts all answers; memory."""
CALL_TIMEOUT_S = 2.0
"""Time limit of a call, where the peer has one."""
LIMIT_S: Mapping[str, float] = {"plain": 45.0, "stuck": 25.0, "updates": 40.0, "aborts": 40.0, "memory": 45.0}
"""Seconds after which a measure ends, whatever has been collected."""


def question(number: int) -> list[dict[str, str]]:
    """Return the prompt of a trajectory."""
    return [{"role": "user", "content": f"q{number}"}]


async def work(ms: int) -> str:
    """Wait for a service.

    Args:
        ms: Milliseconds.
    """
    await asyncio.sleep(ms / 1000)
    return f"waited for {ms} ms"


class Script:
    """The answers of a load, as token ids and as messages of a chat API.

    Args:
        load: The load.
        tokenizer: The tokenizer of the tiny model.
    """

    def __init__(self, load: Load, tokenizer: Any) -> None:
        self.load, self.tokenizer = load, tokenizer
        self._start: int = tokenizer.convert_tokens_to_ids("<|im_start|>")
        self._header: list[int] = self._encode("assistant\n")
        self._numbers: dict[tuple[int, ...], int] = {}
        self.ids = functools.cache(self._ids)
        for number in range(load.count):
            self.sampled(number)  # encoded now, so that no run pays for it

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def text(self, number: int, turn: int) -> str:
        """Return the words of an answer."""
        return " ".join(["so"] * self.load.plan(number).words[turn])

    def arguments(self, number: int, turn: int) -> str | None:
        """Return the arguments of the call in an answer, as JSON; None if it has no call."""
        naps = self.load.plan(number).naps_ms
        return json.dumps({"ms": naps[turn]}) if turn < len(naps) else None

    def _ids(self, number: int, turn: int) -> tuple[int, ...]:
        text, arguments = self.text(number, turn), self.arguments(number, turn)
        if arguments is not None:
            text += f'\n<tool_call>\n{{"name": "work", "arguments": {arguments}}}\n</tool_call>'
        return (*self._encode(text), self.tokenizer.eos_token_id)

    def find(self, prompt: Sequence[int]) -> tuple[int, int, int]:
        """Return what the ids of a prompt ask for.

        Returns:
            The number of the trajectory, the turn, and how many ids of its answer the prompt ends with.
        """
        ids = list(prompt)
        starts = [at for at, id_ in enumerate(ids) if id_ == self._start]
        size = 1 + len(self._header)
        turn = sum(ids[at + 1 : at + size] == self._header for at in starts) - 1
        user = tuple(ids[starts[1] : starts[2]])
        if user not in self._numbers:
            found = re.search(r"\bq(\d+)", self.tokenizer.decode(user))
            assert found is not None, self.tokenizer.decode(ids)
            self._numbers[user] = int(found[1])
        return self._numbers[user], turn, len(ids) - starts[-1] - size

    def sampled(self, number: int) -> list[int]:
        """Return all ids of the answers of a trajectory."""
        return [id_ for turn in range(len(self.load.plan(number).words)) for id_ in self.ids(number, turn)]

    def place(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
        """Return the number and the turn that a conversation of a chat API asks for."""
        asked = next(one["content"] for one in messages if one["role"] == "user")
        if not isinstance(asked, str):
            asked = asked[0]["text"]
        return int(asked[1:]), sum(one["role"] == "assistant" for one in messages)


def tokenizer() -> Any:
    """Load the tokenizer of the tiny model."""
    from transformers import PreTrainedTokenizerFast

    found = PreTrainedTokenizerFast.from_pretrained(TINY, local_files_only=True, padding_side="left")
    found.name_or_path = "torchrl-agentic-tiny"
    return found
