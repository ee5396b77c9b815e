"""`BoundedSampler`: policies that sample within bounds of each row; `EngineSampler`: with any `Engine`."""

# TensorDict border: TensorDict and TorchRL annotate few results.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase

from torchrl_agentic.collectors.requests import Requests
from torchrl_agentic.dispatch import event_loop
from torchrl_agentic.engines.base import Engine
from torchrl_agentic.rollout.answer_rows import Answer, answered, prompt_rows, write_answers
from torchrl_agentic.tokens.ledger import TokenLedger
from torchrl_agentic.transforms.specs import TRAJECTORY
from torchrl_agentic.transforms.token_rows import ROOM, TOKENS_LEFT, TokenRow
from torchrl_agentic.transforms.turn_tokenizer import ATTENTION, TOKENS

_numbers = itertools.count()


class BoundedSampler(TensorDictModuleBase, ABC):
    """Samples answers that fit: a prompt that is too long gets an empty answer and never reaches the model.

    Reads ("tokens", "prompt"), and ("agentic", "tokens_left") if `TurnTokenizer` has a bound. Writes the keys
    of `TransformersWrapper`: "tokens", ("masks", "all_attention_mask") and ("log_probs", "response"), in
    nats, the stop token included. Writes ("agentic", "room"), int64, [*B, 1]: how many tokens each prompt
    leaves, 0 or less if there is no room. `TurnTokenizer` and `EndTrajectory` truncate such rows.

    Args:
        max_new_tokens: Upper bound on the tokens of an answer.
        length: Number of tokens that the model takes, prompt and answer together; None if it is unknown.
        log_probs: Write log-probabilities.
    """

    def __init__(self, *, max_new_tokens: int, length: int | None, log_probs: bool) -> None:
        super().__init__()
        self.in_keys: Any = [TOKENS]
        self.out_keys: Any = ["tokens", ATTENTION, *([("log_probs", "response")] if log_probs else []), ROOM]
        self.max_new_tokens, self.length, self.log_probs = max_new_tokens, length, log_probs

    @abstractmethod
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
            names: Name of each trajectory; None if the environment names none.
            device: Device of the batch.
        """

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Sample in each row of a batch, [*B], that has room."""
        rows = prompt_rows(tensordict)
        bounds = self._bounds(tensordict, [len(row.tensors["prompt"]) for row in rows])
        numbers = tensordict.get(TRAJECTORY, None)
        names = [None] * len(rows) if numbers is None else [str(one) for one in numbers.reshape(-1).tolist()]
        fitting = [index for index, bound in enumerate(bounds) if bound > 0]
        found = iter(
            self.sample(
                [rows[index] for index in fitting],
                [bounds[index] for index in fitting],
                [names[index] for index in fitting],
                tensordict.device,
            )
            if fitting
            else ()
        )
        nothing = [] if self.log_probs else None
        answers = [
            next(found) if bound > 0 else answered(row, [], nothing)
            for row, bound in zip(rows, bounds, strict=True)
        ]
        return write_answers(tensordict, answers)

    def _bounds(self, tensordict: TensorDictBase, lengths: Sequence[int]) -> list[int]:
        """Return how many tokens may be sampled in each row, and write the room of each row."""
        left = tensordict.get(TOKENS_LEFT, None)
        of_bound = None if left is None else left.reshape(-1).tolist()
        of_context = None if self.length is None else [self.length - length for length in lengths]
        known = [rooms for rooms in (of_bound, of_context) if rooms is not None]
        if not known:
            return [self.max_new_tokens] * len(lengths)
        rooms = list(map(min, *known)) if len(known) > 1 else known[0]
        shape = (*tensordict.batch_size, 1)
        tensordict.set(ROOM, torch.tensor(rooms, device=tensordict.device).reshape(shape))
        return [min(self.max_new_tokens, room) for room in rooms]


class EngineSampler(BoundedSampler):
    """Samples an answer to each prompt with an engine, on the event loop of this package.

    The rows of a batch are sampled at the same time. As in a collector, requests that fail for a while are
    made again, and an answer that a weight update aborts continues under the new weights.

    Args:
        engine: The engine; it stays open.
        stop_token_ids: Ids that end an answer.
        options: Additional arguments of `BoundedSampler`.
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
        rows = [TokenLedger() for _ in prompts]
        for row, prompt in zip(rows, prompts, strict=True):
            row.add_prompt(prompt.ids("prompt"))
        starts = [len(row) for row in rows]
        event_loop.run(self._sample(rows, bounds, names))
        return [
            answered(prompt, list(row.ids[start:]), row.log_probs[start:] if self.log_probs else None)
            for prompt, row, start in zip(prompts, rows, starts, strict=True)
        ]

    async def _sample(
        self, rows: Sequence[TokenLedger], bounds: Sequence[int], names: Sequence[str | None]
    ) -> None:
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
        """Return the requests of the running event loop, which differs after a fork."""
        loop = asyncio.get_running_loop()
        if self._requests is None or self._loop is not loop:
            self._requests, self._loop = Requests(self.engine, stop_ids=self._stop_token_ids), loop
        return self._requests
