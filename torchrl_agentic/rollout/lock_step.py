"""`LockStep`: a TorchRL policy as an engine, one batch after the other."""

# TensorDict border: TensorDict and TorchRL annotate few results.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.modules.llm.policies import ChatHistory

from torchrl_agentic.engines.base import Engine, Finish, OnIds, Sampled
from torchrl_agentic.engines.request_checks import check_request, closed_error
from torchrl_agentic.engines.sampling import sampling_of
from torchrl_agentic.engines.weights import load_weights
from torchrl_agentic.errors import InfrastructureError, check_count
from torchrl_agentic.rollout.answer_rows import write_prompts
from torchrl_agentic.tensors import column_tensor
from torchrl_agentic.tokens.writer import stop_ids
from torchrl_agentic.transforms.history import as_history
from torchrl_agentic.transforms.token_rows import TOKENS_LEFT, TokenRow, read_rows


@dataclass(slots=True, eq=False)
class _PolicyRequest:
    ids: list[int]
    bound: int
    on_ids: OnIds | None
    future: asyncio.Future[Sampled]
    version: int = 0


class _NoResponse(ValueError):
    """The policy wrote no ids, and would not in another attempt."""


class LockStep(Engine):
    """An engine over any TorchRL policy that reads prompt ids and writes sampled ids.

    It collects the requests that wait, runs the policy on them as one batch, on a thread of its own, and
    answers all of them when the batch is done: a batch takes as long as its longest answer. Prefer
    `VLLMEngine` or `TransformersEngine` where they can run the model.

    The policy reads ("tokens", "prompt"), ("masks", "all_attention_mask") and ("agentic", "tokens_left"),
    int64, [B, 1], the bound of each row; it writes ("tokens", "response") and, if it can, ("log_probs",
    "response"), ragged or padded at the right. `agent_policy` keeps to the bounds by sampling rows with
    different bounds one group after the other. Answers of a policy that ignores the bounds are cut; it
    should have a bound of its own.

    An update waits for the batch that runs, so no request is aborted. A cancelled request is dropped if it
    waits; one in a running batch keeps its row until the batch is done.

    Args:
        policy: The policy, such as `agent_policy(model, tokenizer)`.
        tokenizer: The tokenizer of the model.
        stop_token_ids: Ids that end an answer besides the tokenizer's `eos_token_id`, as the policy has them;
            not needed for `agent_policy`.
        max_concurrent: Number of requests in a batch.
        wait_s: Time in which an idle engine collects requests for its next batch, in seconds.
        context_length: Bound on prompt and answer together, in tokens; None: the policy's own.
        load: Called with the weights by `update`, on the thread of the policy; None: `load_state_dict` of
            the policy.
        device: Device of the batch; None: that of the policy's parameters, or the CPU.

    Attributes:
        version: Number of updates so far.
        max_concurrent: Number of requests in a batch.
        context_length: Bound on prompt and answer together, in tokens; None: the policy's own.
        sampling: The distribution that the policy samples from; None: unknown.

    Raises:
        ValueError: If an option is out of range, the pad token also ends answers, or the policy reads
            conversations instead of token ids.
    """

    def __init__(
        self,
        policy: Callable[[TensorDictBase], TensorDictBase],
        tokenizer: Any,
        *,
        stop_token_ids: Sequence[int] = (),
        max_concurrent: int = 64,
        wait_s: float = 0.01,
        context_length: int | None = None,
        load: Callable[[Any], None] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        check_count("max_concurrent", max_concurrent, optional=False)
        check_count("context_length", context_length)
        if not wait_s >= 0:
            raise ValueError(f"wait_s must be 0 seconds or more; got {wait_s}")
        reads = getattr(policy, "in_keys", None)
        if reads and ("tokens", "prompt") not in reads:
            raise ValueError(
                f"LockStep gives a policy token ids, but {type(policy).__name__} reads {list(reads)}; choose "
                "input_mode='tokens', or agent_policy(..., mode='tokens')"
            )
        self.version = 0
        self.max_concurrent = max_concurrent
        self._policy, self._load = policy, load
        known: Sequence[int] = getattr(policy, "stop_token_ids", ())  # of `agent_policy`
        self.stop_token_ids = stop_ids(tokenizer, (*stop_token_ids, *known))
        self._stops, self._pad = frozenset(self.stop_token_ids), tokenizer.pad_token_id
        self._wait_s, self.context_length = wait_s, context_length
        self.sampling = sampling_of(policy)
        self._device = _device_of(policy) if device is None else torch.device(device)
        self._reads_history = ("history", "prompt") in getattr(policy, "in_keys", ())
        self._waiting: deque[_PolicyRequest] = deque()
        self._running: list[_PolicyRequest] = []
        self._is_full = asyncio.Event()
        self._driver: asyncio.Task[None] | None = None
        self._between_batches = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "torchrl_agentic-policy")
        self._is_closed = False

    async def sample(
        self, ids: Sequence[int], *, max_tokens: int, key: str, on_ids: OnIds | None = None
    ) -> Sampled:
        """Sample one answer in the next batch; `on_ids` gets it in one piece. See `Engine.sample`."""
        bound = check_request(len(ids), max_tokens, self.context_length)
        if self._is_closed:
            raise closed_error(self)
        loop = asyncio.get_running_loop()
        request = _PolicyRequest(list(ids), bound, on_ids, loop.create_future())
        self._waiting.append(request)
        if len(self._waiting) >= self.max_concurrent:
            self._is_full.set()
        if self._driver is None or self._driver.done():
            self._driver = loop.create_task(self._drive())
        return await request.future  # which a cancelled caller cancels

    async def update(self, weights: Any) -> int:
        """Load weights after the batch that runs.

        Args:
            weights: A state dict of the policy, a TensorDict, another policy with the same names, a function
                that is called with the policy, or what `load` takes; None keeps the weights.
        """
        return await asyncio.shield(asyncio.ensure_future(self._update(weights)))

    async def _update(self, weights: Any) -> int:
        def load() -> None:
            if weights is not None and self._load is not None:
                self._load(weights)
            else:
                load_weights(self._policy, weights)

        async with self._between_batches:
            if self._is_closed:
                raise closed_error(self)
            await asyncio.get_running_loop().run_in_executor(self._thread, load)
            self.version += 1
            return self.version

    async def close(self) -> None:
        """End all requests with InfrastructureError; a running batch ends by itself, on its thread."""
        self._is_closed = True
        self._fail([*self._running, *self._waiting], closed_error(self))
        self._waiting.clear()
        if self._driver is not None and not self._driver.done():
            self._driver.cancel()
            await asyncio.wait([self._driver])
        self._thread.shutdown(wait=False)

    async def _drive(self) -> None:
        """Run batches until there are no requests."""
        loop = asyncio.get_running_loop()
        try:
            await self._collect()
            while self._waiting:
                async with self._between_batches:
                    self._running = batch = self._next_batch()
                    if not batch:
                        continue
                    try:
                        found = await loop.run_in_executor(self._thread, self._run, batch)
                    except _NoResponse as error:
                        self._fail(batch, error)
                    except Exception as error:
                        failure = InfrastructureError(f"the policy failed: {type(error).__name__}: {error}")
                        failure.__cause__ = error
                        self._fail(batch, failure)
                    else:
                        for request, answer in zip(batch, found, strict=True):
                            self._settle(request, answer)
                    self._running = []
        finally:
            # There are none left unless the driver was cancelled, as when the event loop ends.
            left = [*self._running, *self._waiting]
            self._waiting.clear()
            self._fail(left, InfrastructureError("the driver of the engine was cancelled"))

    async def _collect(self) -> None:
        """Wait for more requests, up to a full batch."""
        self._is_full = asyncio.Event()
        if self._wait_s and len(self._waiting) < self.max_concurrent:
            try:
                async with asyncio.timeout(self._wait_s):
                    await self._is_full.wait()
            except TimeoutError:
                pass

    def _next_batch(self) -> list[_PolicyRequest]:
        alive = (request for request in self._waiting if not request.future.done())
        batch = list(islice(alive, self.max_concurrent))
        for request in batch:
            request.version = self.version
        taken = set(map(id, batch))
        self._waiting = deque(
            request for request in self._waiting if id(request) not in taken and not request.future.done()
        )
        return batch

    @torch.no_grad()
    def _run(self, batch: Sequence[_PolicyRequest]) -> list[tuple[list[int], list[float] | None]]:
        """Run the policy; return ids and log-probabilities of each answer, as the policy wrote them."""
        td = TensorDict({}, batch_size=[len(batch)], device=self._device)
        prompts = [column_tensor("q", request.ids, self._device) for request in batch]
        pairs = zip(prompts, batch, strict=True)
        write_prompts(td, [TokenRow({"prompt": ids}, {"prompt": request.ids}) for ids, request in pairs])
        td.set(TOKENS_LEFT, torch.tensor([[request.bound] for request in batch], device=self._device))
        if self._reads_history:  # to add the answer as a message, which nobody reads here
            prompt = as_history([[{"role": "user", "content": ""}]] * len(batch))
            td.set("history", ChatHistory(prompt=prompt, batch_size=[len(batch)]))
        sampled = self._policy(td)
        tokens, log_probs = read_rows(sampled, "tokens"), read_rows(sampled, "log_probs")
        if tokens is None or not all("response" in row.tensors for row in tokens):
            raise _NoResponse(
                "the policy wrote no ('tokens', 'response'); it must read ids, as with input_mode='tokens'"
            )
        known = [None if log_probs is None else row.tensors.get("response") for row in log_probs or tokens]
        return [
            (row.ids("response"), None if each is None else each.tolist())
            for row, each in zip(tokens, known, strict=True)
        ]

    def _settle(self, request: _PolicyRequest, answer: tuple[list[int], list[float] | None]) -> None:
        """Answer a request: up to the first stop token or its bound, without padding."""
        if request.future.done():
            return
        ids, known = answer
        stop = next((place for place, token in enumerate(ids) if token in self._stops), None)
        if stop is None:
            size = next((n for n in range(len(ids), 0, -1) if ids[n - 1] != self._pad), 0)
        else:
            size = stop + 1
        finish: Finish = "stop" if stop is not None and size <= request.bound else "length"
        size = min(size, request.bound)
        if not size:
            n_prompt = len(request.ids)
            request.future.set_exception(
                ValueError(f"the policy sampled nothing: the prompt of {n_prompt} tokens leaves no room")
            )
            return
        try:
            if request.on_ids is not None:
                request.on_ids(ids[:size])
        except Exception as error:  # of the caller's function
            request.future.set_exception(error)
        else:
            log_probs = None if known is None else known[:size]
            request.future.set_result(Sampled(ids[:size], log_probs, finish, request.version))

    @staticmethod
    def _fail(requests: Sequence[_PolicyRequest], error: Exception) -> None:
        for request in requests:
            if not request.future.done():
                request.future.set_exception(error)


def _device_of(policy: Any) -> torch.device:
    """Return the device of the first parameter of a policy."""
    if not isinstance(policy, torch.nn.Module):
        return torch.device("cpu")
    first = next(policy.parameters(), None)
    return torch.device("cpu") if first is None else first.device
