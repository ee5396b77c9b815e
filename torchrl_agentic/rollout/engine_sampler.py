"""`EngineSampler`: samples the rows of a batch with any `Engine`, all at the same time."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from torchrl_agentic.collectors.requests import Requests
from torchrl_agentic.dispatch import event_loop
from torchrl_agentic.engines.base import Engine
from torchrl_agentic.rollout.answer_rows import Answer, answered
from torchrl_agentic.rollout.bounded_sampler import BoundedSampler
from torchrl_agentic.transforms.token_rows import TokenRow

_numbers = itertools.count()


class EngineSampler(BoundedSampler):
    """Samples an answer to each prompt with an engine, on the event loop of this package.

    The rows of a batch are sampled at the same time. As in a collector, requests that fail for a while are
    made again, and an answer that a weight update aborts goes on under the new weights.

    Args:
        engine: The engine; it stays open.
        stop_token_ids: Ids that end an answer.
        options: Further arguments of `BoundedSampler`.
    """

    def __init__(self, engine: Engine, *, stop_token_ids: Sequence[int], **options: Any) -> None:
        super().__init__(**options)
        self.engine = engine
        self._stop_token_ids = tuple(stop_token_ids)
        self._requests: Requests | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def sample(
        self,
        prompts: Sequence[TokenRow],
        bounds: Sequence[int],
        names: Sequence[str | None],
        device: torch.device | None,
    ) -> list[Answer]:
        """Sample an answer to each prompt.

        Args:
            prompts: Rows with the ids of prompts, [P] each.
            bounds: Upper bound on the tokens of each answer, 1 or more.
            names: Name of each trajectory, the key of its requests; None: each request has a key of its own.
            device: Ignored.

        Raises:
            InfrastructureError: If the engine is lost, or breaks its protocol.
            ValueError: If the engine cannot take a prompt.
        """
        rows = [_Row(prompt.ids("prompt")) for prompt in prompts]
        event_loop.run(self._sample(rows, bounds, names))
        return [
            answered(prompt, row.answer, row.log_probs if self.log_probs else None)
            for prompt, row in zip(prompts, rows, strict=True)
        ]

    async def _sample(self, rows: Sequence[_Row], bounds: Sequence[int], names: Sequence[str | None]) -> None:
        requests = self._requests_here()
        tasks = [
            asyncio.create_task(
                requests.answer(row, max_tokens=bound, key=name or f"request {next(_numbers)}")
            )
            for row, bound, name in zip(rows, bounds, names, strict=True)
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # those of the other rows, if one has failed
                task.cancel()

    def _requests_here(self) -> Requests:
        """Return the requests to the engine on the running event loop, which is another one after a fork."""
        loop = asyncio.get_running_loop()
        if self._requests is None or self._loop is not loop:
            self._requests, self._loop = Requests(self.engine, stop_ids=self._stop_token_ids), loop
        return self._requests


class _Row:
    """The prompt of a row, and the answer that is sampled behind it."""

    __slots__ = ("_prompt", "answer", "log_probs")

    def __init__(self, prompt: list[int]) -> None:
        self._prompt = prompt
        self.answer: list[int] = []
        self.log_probs: list[float] = []

    @property
    def ids(self) -> Sequence[int]:
        return [*self._prompt, *self.answer] if self.answer else self._prompt

    def add_sampled(
        self, ids: Sequence[int], log_probs: Sequence[float] | None = None, *, version: int | None = None
    ) -> None:
        self.answer += ids
        self.log_probs += [math.nan] * len(ids) if log_probs is None else log_probs
