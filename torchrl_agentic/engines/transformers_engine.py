"""`TransformersEngine`: continuous batching with a transformers model, in this process."""

# transformers annotates few results.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import asyncio
import hashlib
import os
import random
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from transformers import DynamicCache

from torchrl_agentic.engines.base import Engine, OnIds, Sampled
from torchrl_agentic.engines.request_checks import check_request, closed_error
from torchrl_agentic.engines.sampling import Sampling
from torchrl_agentic.engines.weights import load_weights
from torchrl_agentic.errors import InfrastructureError, check_count
from torchrl_agentic.tokens.writer import stop_ids


@dataclass(slots=True, eq=False)
class _DecodeRequest:
    key: str
    ids: list[int]  # the prompt, then what was sampled
    n_prompt: int
    bound: int
    on_ids: OnIds | None
    future: asyncio.Future[Sampled]
    rng: random.Random
    log_probs: list[float] = field(default_factory=list[float])
    version: int = 0


class TransformersEngine(Engine):
    """An engine over a transformers model, with continuous batching: for small models, tests and debugging.

    A thread of its own runs the decode steps, so that the event loop never blocks. Requests join and leave
    between two steps. The keys and values of a trajectory are kept while there is room, so that its next
    turn computes only the tokens that are new. Use it on one event loop.

    Log-probabilities are those of the distribution that was sampled from, in float32: after temperature,
    top-k and top-p, as `agent_policy` returns them; at temperature 0, those of the model. A loss over
    `training_policy(..., temperature=...)` computes the same, if top-k and top-p leave no token out. The pad
    token is never sampled.

    Args:
        model: A causal language model of transformers with attention in all layers, in evaluation mode.
        tokenizer: The tokenizer of the model.
        temperature: Sampling temperature; 0 takes the most likely token each time.
        top_p: Sample from the most likely tokens that have this probability together.
        top_k: Sample from this many most likely tokens; 0: all.
        stop_token_ids: Ids that end an answer besides the tokenizer's `eos_token_id` and those of the model's
            `generation_config`.
        max_concurrent: Number of requests in a batch.
        context_length: Bound on prompt and answer together, in tokens; None: `max_position_embeddings` of
            the model's configuration.
        prefix_cache_tokens: Number of tokens of ended requests whose keys and values are kept; 0: none.
        seed: Seed of the sampling; None: random. With a seed, an answer depends on the seed, the key, the
            length of its prompt and the version, and not on the rest of the batch, up to rounding.

    Attributes:
        version: Number of updates so far.
        max_concurrent: Number of requests in a batch.
        context_length: Number of tokens that the model takes, prompt and answer together; None: no bound.
        stop_token_ids: Ids that end an answer.
        sampling: The distribution that it samples from.

    Raises:
        ValueError: If an option is out of range, the pad token also ends answers, or a layer has no attention
            cache.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        stop_token_ids: Sequence[int] = (),
        max_concurrent: int = 64,
        context_length: int | None = None,
        prefix_cache_tokens: int = 32_768,
        seed: int | None = None,
    ) -> None:
        check_count("max_concurrent", max_concurrent, optional=False)
        check_count("context_length", context_length)
        if not (temperature >= 0 and 0 < top_p <= 1 and top_k >= 0 and prefix_cache_tokens >= 0):
            raise ValueError(
                "temperature, top_k and prefix_cache_tokens must be 0 or more, and top_p above 0, at most 1; "
                f"got {temperature=}, {top_k=}, {prefix_cache_tokens=}, {top_p=}"
            )
        config = model.config.get_text_config()
        self.version = 0
        self.max_concurrent = max_concurrent
        generation_config = getattr(model, "generation_config", None)
        self.stop_token_ids = stop_ids(tokenizer, stop_token_ids, generation_config=generation_config)
        self._stops = frozenset(self.stop_token_ids)
        self._vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self.context_length = context_length or getattr(config, "max_position_embeddings", None)
        options = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
        self.sampling = Sampling.of(options, is_processed=True)
        self._seed = os.urandom(8).hex() if seed is None else str(seed)
        self._decoder = _Decoder(
            model,
            config,
            _TokenChoice(temperature, top_p, top_k, tokenizer.pad_token_id),
            prefix_cache_tokens,
        )
        self._waiting: deque[_DecodeRequest] = deque()
        self._running: list[_DecodeRequest] = []
        self._driver: asyncio.Task[None] | None = None
        self._between_steps = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "torchrl_agentic-model")
        self._is_closed = False

    async def sample(
        self, ids: Sequence[int], *, max_tokens: int, key: str, on_ids: OnIds | None = None
    ) -> Sampled:
        """Sample one answer, in a batch with the other requests; see `Engine.sample`."""
        bound = check_request(len(ids), max_tokens, self.context_length)
        if min(ids) < 0 or max(ids) >= self._vocabulary:
            raise ValueError(
                f"the prompt has ids from {min(ids)} to {max(ids)}, but the vocabulary of the model ends at "
                f"{self._vocabulary - 1}; use the tokenizer of the model"
            )
        if self._is_closed:
            raise closed_error(self)
        loop = asyncio.get_running_loop()
        request = _DecodeRequest(
            key, list(ids), len(ids), bound, on_ids, loop.create_future(), random.Random()
        )
        self._waiting.append(request)
        if self._driver is None or self._driver.done():
            self._driver = loop.create_task(self._drive())
        return await request.future  # which a cancelled caller cancels, so that the next step drops it

    async def update(self, weights: Any) -> int:
        """Abort the requests that run and load weights, between two steps.

        Args:
            weights: A state dict of the model; a TensorDict; another model with the same names; a function
                that is called with the model, on the thread that runs it, such as one that runs
                `optimizer.step()`; or None if the model was changed in place while no request ran.
        """
        return await asyncio.shield(asyncio.ensure_future(self._update(weights)))

    async def _update(self, weights: Any) -> int:
        async with self._between_steps:
            self._settle_all("aborted")
            if self._is_closed:
                raise closed_error(self)
            await asyncio.get_running_loop().run_in_executor(self._thread, self._decoder.load, weights)
            self.version += 1
            return self.version

    async def close(self) -> None:
        """End all requests with InfrastructureError, and the thread after its step; keep the model."""
        self._is_closed = True
        self._fail([*self._running, *self._waiting], closed_error(self))
        self._waiting.clear()
        if self._driver is not None and not self._driver.done():
            await asyncio.wait([self._driver])
        async with self._between_steps:
            self._running.clear()
            self._decoder.clear()
            self._thread.shutdown(wait=False)

    async def _drive(self) -> None:
        """Run steps until there are no requests."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                async with self._between_steps:
                    kept = [n for n, request in enumerate(self._running) if not request.future.done()]
                    joining = self._joining(self.max_concurrent - len(kept))
                    if not kept and not joining:
                        self._running.clear()
                        return
                    self._running = [*(self._running[n] for n in kept), *joining]
                    try:
                        found = await loop.run_in_executor(self._thread, self._decoder.step, kept, joining)
                    except Exception as error:
                        self._lose(error)
                    else:
                        for request, (token, log_prob) in zip(self._running, found, strict=True):
                            self._add(request, token, log_prob)
        finally:
            # There are none left unless the driver was cancelled, as when the event loop ends.
            left = [*self._running, *self._waiting]
            self._fail(left, InfrastructureError("the driver of the engine was cancelled"))

    def _joining(self, room: int) -> list[_DecodeRequest]:
        """Return waiting requests, as many as there is room for."""
        joining: list[_DecodeRequest] = []
        while self._waiting and len(joining) < room:
            request = self._waiting.popleft()
            if not request.future.done():
                request.version = self.version
                named = f"{self._seed}|{request.version}|{request.n_prompt}|{request.key}"
                request.rng.seed(hashlib.blake2b(named.encode(), digest_size=16).digest())
                joining.append(request)
        return joining

    def _add(self, request: _DecodeRequest, token: int, log_prob: float) -> None:
        """Add a token to an answer, and end the answer if it is complete."""
        if request.future.done():
            return
        request.ids.append(token)
        request.log_probs.append(log_prob)
        if request.on_ids is not None:
            try:
                request.on_ids((token,))
            except Exception as error:  # of the caller's function
                request.future.set_exception(error)
                return
        if token in self._stops:
            self._settle(request, "stop")
        elif len(request.log_probs) >= request.bound:
            self._settle(request, "length")

    def _settle(self, request: _DecodeRequest, finish: Literal["stop", "length", "aborted"]) -> None:
        if not request.future.done():
            sampled = request.ids[request.n_prompt :]
            request.future.set_result(Sampled(sampled, request.log_probs, finish, request.version))

    def _settle_all(self, finish: Literal["aborted"]) -> None:
        for request in self._running:
            self._settle(request, finish)

    def _lose(self, error: Exception) -> None:
        """Fail the requests of a batch whose step raised."""
        failure = InfrastructureError(f"a decode step failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        self._fail(self._running, failure)
        self._running = []
        self._decoder.clear()

    @staticmethod
    def _fail(requests: Sequence[_DecodeRequest], error: InfrastructureError) -> None:
        for request in requests:
            if not request.future.done():
                request.future.set_exception(error)


@dataclass(frozen=True, slots=True)
class _TokenChoice:
    """Chooses the next token of each row."""

    temperature: float
    top_p: float
    top_k: int
    forbidden: int

    def of(self, logits: torch.Tensor, draws: Sequence[float]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens and their log-probabilities, [B] each.

        Args:
            logits: float32, [B, V].
            draws: A random number in [0, 1) for each row; unused at temperature 0.
        """
        if self.temperature not in (0, 1):
            logits = logits / self.temperature
        allowed = logits.clone()
        if self.forbidden < logits.shape[-1]:
            allowed[:, self.forbidden] = -torch.inf
        if not self.temperature:
            return _with_log_probs(allowed.argmax(-1), logits)
        likely = most_likely(allowed, top_k=self.top_k, top_p=self.top_p)
        below = likely.double().softmax(-1).cumsum(-1)
        targets = torch.tensor(draws, dtype=below.dtype, device=below.device)[:, None] * below[:, -1:]
        tokens = torch.searchsorted(below, targets, right=True).squeeze(-1).clamp_(max=logits.shape[-1] - 1)
        # `training_policy` does not forbid the pad token, so it keeps its share of the distribution.
        return _with_log_probs(tokens, logits if likely is allowed else likely)


def _with_log_probs(tokens: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return tokens, logits.log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)


def most_likely(logits: torch.Tensor, *, top_k: int = 0, top_p: float = 1.0) -> torch.Tensor:
    """Return logits in which only the most likely tokens are left, and the others are minus infinity.

    Args:
        logits: Logits, [*B, V].
        top_k: Number of tokens that are left; 0: all.
        top_p: Total probability of the tokens that are left.

    Returns:
        The logits themselves if both leave all tokens, else a copy.
    """
    if 0 < top_k < logits.shape[-1]:
        lowest = logits.topk(top_k).values[..., -1:]
        logits = logits.masked_fill(logits < lowest, -torch.inf)
    if top_p < 1:
        ordered, places = logits.sort(descending=True)
        shares = ordered.softmax(-1)
        ordered.masked_fill_(shares.cumsum(-1) - shares >= top_p, -torch.inf)
        logits = torch.empty_like(logits).scatter_(-1, places, ordered)
    return logits


@dataclass(frozen=True, slots=True)
class _Prefix:
    """Keys and values of the first tokens of a trajectory, per layer [1, H, T, D]."""

    ids: list[int]
    layers: list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(slots=True)
class _Rows:
    """Rows of a batch: their keys and values, per layer [B, H, L, D], aligned at the right."""

    requests: list[_DecodeRequest]
    layers: list[tuple[torch.Tensor, torch.Tensor]]
    lengths: torch.Tensor  # number of valid columns of each row, int64, [B]
    cache: DynamicCache | None = None  # holds `layers`, until rows join or leave

    @property
    def width(self) -> int:
        return self.layers[0][0].shape[2] if self.layers else 0

    def selected(self, rows: Sequence[int]) -> _Rows:
        """Return some of the rows, in a batch no wider than they need."""
        if len(rows) == len(self.requests):
            return self
        index = torch.tensor(rows, dtype=torch.int64, device=self.lengths.device)
        lengths = self.lengths[index]
        start = self.width - int(lengths.max()) if rows else self.width
        layers = [(keys[index, :, start:], values[index, :, start:]) for keys, values in self.layers]
        return _Rows([self.requests[row] for row in rows], layers, lengths)

    def joined(self, other: _Rows) -> _Rows:
        """Return the rows of both."""
        if not self.requests or not other.requests:
            return self if self.requests else other
        width = max(self.width, other.width)

        def both(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
            return torch.cat([_widened(ours, width), _widened(theirs, width)])

        layers = [
            (both(keys, more_keys), both(values, more_values))
            for (keys, values), (more_keys, more_values) in zip(self.layers, other.layers, strict=True)
        ]
        lengths = torch.cat([self.lengths, other.lengths])
        return _Rows([*self.requests, *other.requests], layers, lengths)


def _widened(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """Return keys or values with columns of padding at the left."""
    return torch.nn.functional.pad(tensor, (0, 0, width - tensor.shape[2], 0))


def _cache_of(layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> DynamicCache:
    """Return a cache of transformers that holds a copy of keys and values."""
    cache = DynamicCache()
    for number, (keys, values) in enumerate(layers):
        cache.update(keys, values, number)
    return cache


class _Decoder:
    """The model with the keys and values of its batch and of ended requests; used by one thread at a time."""

    def __init__(self, model: Any, config: Any, choice: _TokenChoice, prefix_tokens: int) -> None:
        kinds = set(getattr(config, "layer_types", None) or ())
        windows = {"sliding_attention", "chunked_attention"}
        if not kinds <= {"full_attention", *windows}:
            raise ValueError(
                f"the model has layers without an attention cache: {', '.join(sorted(kinds))}; serve it with "
                "vLLM, or use LockStep(agent_policy(model, tokenizer))"
            )
        self._model, self._choice, self._prefix_tokens = model, choice, prefix_tokens
        self._device = next(model.parameters()).device
        # Padding between the kept tokens and the new ones needs attention by mask alone.
        attention = getattr(config, "_attn_implementation", None)
        self._joins_at_once = attention in ("sdpa", "eager") and not kinds & windows
        self._prefixes: OrderedDict[str, _Prefix] = OrderedDict()
        self._n_kept = 0
        self._rows = self._no_rows()

    def _no_rows(self) -> _Rows:
        return _Rows([], [], torch.empty(0, dtype=torch.int64, device=self._device))

    def clear(self) -> None:
        """Forget the batch and all keys and values."""
        self._rows, self._n_kept = self._no_rows(), 0
        self._prefixes.clear()

    def load(self, weights: Any) -> None:
        """Load weights; keys and values of the old ones are useless."""
        self.clear()
        load_weights(self._model, weights)

    @torch.no_grad()
    def step(self, kept: Sequence[int], joining: Sequence[_DecodeRequest]) -> list[tuple[int, float]]:
        """Sample one token for each row of the batch, and for requests that join it.

        Args:
            kept: Indices of the rows that have not ended.
            joining: New requests.

        Returns:
            Token and log-probability, of the rows in their order, then of the new requests.
        """
        self._keep_prefixes(set(kept))
        self._rows = self._rows.selected(kept)
        parts: list[torch.Tensor] = []
        if kept:
            parts.append(self._decode())
        some = [joining] if self._joins_at_once else [[request] for request in joining]
        for requests in some:
            if requests:
                rows, logits = self._prefill(requests)
                self._rows = self._rows.joined(rows)
                parts.append(logits)
        logits = torch.cat(parts).float()
        draws = [request.rng.random() for request in self._rows.requests] if self._choice.temperature else []
        tokens, known = self._choice.of(logits, draws)
        return list(zip(tokens.tolist(), known.tolist(), strict=True))

    def _decode(self) -> torch.Tensor:
        """Return the next logits of the rows, [B, V]."""
        rows = self._rows
        last = torch.tensor([[request.ids[-1]] for request in rows.requests], device=self._device)
        width = rows.width + 1
        mask = torch.arange(width, device=self._device) >= width - 1 - rows.lengths[:, None]
        cache = rows.cache or _cache_of(rows.layers)
        logits, layers = self._run(last, mask, rows.lengths[:, None], cache)
        self._rows = _Rows(rows.requests, layers, rows.lengths + 1, cache)
        return logits

    def _prefill(self, requests: Sequence[_DecodeRequest]) -> tuple[_Rows, torch.Tensor]:
        """Return new rows and their first logits, [B, V]."""
        prefixes = [self._prefix_of(request) for request in requests]
        news = [request.ids[len(prefix.ids) :] for request, prefix in zip(requests, prefixes, strict=True)]
        n_old = max(len(prefix.ids) for prefix in prefixes)
        n_new = max(map(len, news))
        ids = torch.tensor([[0] * (n_new - len(new)) + new for new in news], device=self._device)
        olds = torch.tensor([[len(prefix.ids)] for prefix in prefixes], device=self._device)
        sizes = torch.tensor([[len(new)] for new in news], device=self._device)
        new_columns = torch.arange(n_new, device=self._device) - (n_new - sizes)
        is_old = torch.arange(n_old, device=self._device) >= n_old - olds
        mask = torch.cat([is_old, new_columns >= 0], -1)
        positions = (olds + new_columns).clamp_(min=0)
        layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        if n_old:
            shown = next(prefix.layers for prefix in prefixes if prefix.ids)
            for number, pair in enumerate(shown):
                stacked = [
                    torch.cat(
                        [
                            _widened(prefix.layers[number][part] if prefix.ids else one[:, :, :0], n_old)
                            for prefix in prefixes
                        ]
                    )
                    for part, one in enumerate(pair)
                ]
                layers.append((stacked[0], stacked[1]))
        logits, layers = self._run(ids, mask, positions, _cache_of(layers))
        lengths = mask.sum(-1)
        if not bool(mask.all()):  # move the padding to the left
            order = mask.to(torch.int8).argsort(dim=-1, stable=True)[:, -int(lengths.max()) :]
            index = order[:, None, :, None]
            layers = [
                (keys.take_along_dim(index, 2), values.take_along_dim(index, 2)) for keys, values in layers
            ]
        return _Rows(list(requests), layers, lengths), logits

    def _run(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor,
        cache: DynamicCache,
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Run the model after the cached columns; return the last logits, [B, V], and all columns."""
        output = self._model(
            input_ids=ids,
            attention_mask=mask.long(),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        filled: list[Any] = list(cache.layers)
        return output.logits[:, -1], [(layer.keys, layer.values) for layer in filled]

    def _prefix_of(self, request: _DecodeRequest) -> _Prefix:
        """Return the kept keys and values that the prompt begins with; its last token is always computed."""
        kept = self._prefixes.pop(request.key, None)
        if kept is None:
            return _Prefix([], [])
        self._n_kept -= len(kept.ids)
        limit = min(len(kept.ids), len(request.ids) - 1)
        count = next((n for n in range(limit) if kept.ids[n] != request.ids[n]), limit)
        layers = [(keys[:, :, :count], values[:, :, :count]) for keys, values in kept.layers]
        return _Prefix(kept.ids[:count], layers)

    def _keep_prefixes(self, staying: set[int]) -> None:
        """Keep the keys and values of rows that have ended, as many as there is room for, the latest ones."""
        for row, request in enumerate(self._rows.requests):
            if row in staying or not self._prefix_tokens or request.future.cancelled():
                continue
            count = int(self._rows.lengths[row])
            if count > self._prefix_tokens:
                continue
            layers = [
                (keys[row : row + 1, :, -count:].clone(), values[row : row + 1, :, -count:].clone())
                for keys, values in self._rows.layers
            ]
            self._n_kept += count
            before = self._prefixes.pop(request.key, None)
            self._n_kept -= 0 if before is None else len(before.ids)
            self._prefixes[request.key] = _Prefix(request.ids[:count], layers)
            while self._n_kept > self._prefix_tokens:
                self._n_kept -= len(self._prefixes.popitem(last=False)[1].ids)
