"""`HTTPEngine`: sample with a server of vLLM or SGLang that takes and gives token ids."""

# JSON of servers: `Any`.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic_core import from_json

from torchrl_agentic.engines.base import Engine, EnginePressure, Finish, OnIds, Sampled
from torchrl_agentic.engines.http_session import SHOWN, HTTPSession
from torchrl_agentic.engines.request_checks import FINISHES, check_request
from torchrl_agentic.engines.request_gate import SETTLE_S, RequestGate, RequestInterrupted
from torchrl_agentic.engines.sampling import Sampling
from torchrl_agentic.engines.server_events import DONE, event_data
from torchrl_agentic.engines.server_metrics import pressure_of, read_metrics
from torchrl_agentic.engines.weights import Weights, in_thread, weights_folder
from torchrl_agentic.errors import InfrastructureError, check_count, check_seconds
from torchrl_agentic.messages import JSON
from torchrl_agentic.tokens.writer import stop_ids
from torchrl_agentic.tools.service import BUSY, Patience, ServiceError

__all__ = ["HTTPEngine"]

logger = logging.getLogger(__name__)

Kind: TypeAlias = Literal["vllm", "sglang"]
UpdateWeights: TypeAlias = Callable[[Any], Awaitable[None]]

_FORBID = -100.0
_LEAST = -3.4e38  # of 32-bit floats


class HTTPEngine(Engine):
    """Samples with a server that takes and gives token ids.

    vLLM: `vllm serve MODEL --tokens-only` or `--enable-scale-out`, which have `/inference/v1/generate`. For
    weight updates the server needs `VLLM_SERVER_DEV_MODE=1`. SGLang: `/generate` of any server.

    An answer ends with one of the stop ids, and with no other token. The pad token is never sampled, because
    losses drop it. Failed requests are made again; a stream that breaks off returns the ids so far, with the
    finish "aborted".

    An update holds new requests back and pauses the server, which ends or keeps requests that run; then the
    server loads a folder of safetensors files, which it must be able to read, and goes on.

    Args:
        url: URL of the server, without a path.
        kind: "vllm" or "sglang".
        tokenizer: The tokenizer of the model; its end-of-sequence token ends an answer.
        temperature: Sampling temperature; 0 for greedy sampling.
        top_p: Probability mass of the tokens that are sampled from.
        stop_token_ids: Additional ids that end an answer. The server does not report those of its model: give
            the `eos_token_id` of its `generation_config.json`, if that lists several.
        log_probs: Return log-probabilities.
        log_probs_are_processed: The server returns log-probabilities after temperature, as vLLM does with
            `--logprobs-mode processed_logprobs`, and SGLang without `SGLANG_RETURN_ORIGINAL_LOGPROB`. None:
            SGLang does, vLLM does not.
        sampling: Additional sampling parameters, by the server's names.
        context_length: Number of tokens that the model takes, prompt and answer together; None leaves the
            check to the server.
        vocab_size: Number of ids that are expected; None: those of the tokenizer.
        max_concurrent: Most requests at once; others wait.
        model: Name of the model, for a vLLM server with several.
        api_key: Sent as `Authorization: Bearer ...`.
        headers: Additional headers of each request.
        timeout: Time limit for one try of a request, in seconds; None: no limit.
        patience: How often to try again after transient failures, and with which pauses; no try begins after
            its `deadline_s`.
        update_weights: Loads new weights into the server: `await update_weights(weights)`, instead of the
            server's own endpoints. No request runs during this.
        weights_parent: Folder for the files of new weights, which the server must see under the same path; by
            default in memory or among temporary files.

    Attributes:
        version: Policy version: number of weight updates so far.
        max_concurrent: Most requests at once.
        context_length: Number of tokens that the model takes; None if it is unknown.
        stop_token_ids: Ids that end an answer.
        can_resume: Aborted answers may be resumed; False if `sampling` constrains them.
        sampling: The distribution that the server samples from.

    Raises:
        ValueError: If the kind is unknown, or the pad token also ends answers.
    """

    def __init__(
        self,
        url: str,
        *,
        kind: Kind,
        tokenizer: Any,
        temperature: float = 1.0,
        top_p: float = 1.0,
        stop_token_ids: Sequence[int] = (),
        log_probs: bool = True,
        log_probs_are_processed: bool | None = None,
        sampling: Mapping[str, JSON] | None = None,
        context_length: int | None = None,
        vocab_size: int | None = None,
        max_concurrent: int = 64,
        model: str | None = None,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = 600.0,
        patience: Patience | None = None,
        update_weights: UpdateWeights | None = None,
        weights_parent: str | Path | None = None,
    ) -> None:
        if kind not in _WIRES:
            raise ValueError(f"kind is one of {', '.join(map(repr, _WIRES))}; got {kind!r}")
        check_count("max_concurrent", max_concurrent, optional=False)
        check_count("context_length", context_length)
        check_count("vocab_size", vocab_size)
        check_seconds("timeout", timeout)
        self.version = 0
        self.max_concurrent = int(max_concurrent)
        self.context_length = context_length
        self.stop_token_ids = stop_ids(tokenizer, stop_token_ids)
        self._url, self._kind = url.rstrip("/"), kind
        self._vocab_size: int = vocab_size or len(tokenizer)
        self._log_probs = log_probs
        base: dict[str, JSON] = {
            "temperature": temperature,
            "top_p": top_p,
            "stop_token_ids": list(self.stop_token_ids),
            "ignore_eos": True,  # the ids above are the only ones that end an answer
            "logit_bias": {str(tokenizer.pad_token_id): _FORBID},
        }
        self._wire = _WIRES[kind](base, sampling or {}, log_probs, model)
        is_processed = kind == "sglang" if log_probs_are_processed is None else log_probs_are_processed
        self.sampling = Sampling.of({**base, **(sampling or {})}, is_processed=is_processed)
        self.can_resume = not self._wire.constraints & {
            name for name, value in (sampling or {}).items() if value
        }
        self._update_weights, self._weights_parent = update_weights, weights_parent
        authorization = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._http = HTTPSession(
            self._url,
            {**authorization, **(headers or {})},
            timeout=timeout,
            patience=patience or Patience(),
        )
        self._slots = asyncio.Semaphore(self.max_concurrent)
        self._gate = RequestGate()
        self._name, self._numbers = uuid.uuid4().hex[:8], itertools.count()
        self._has_missed_metrics = False

    async def sample(
        self, ids: Sequence[int], *, max_tokens: int, key: str, on_ids: OnIds | None = None
    ) -> Sampled:
        """Sample one answer.

        Args:
            ids: Token ids of the prompt, [P].
            max_tokens: Upper bound on the number of sampled ids.
            key: Name of the trajectory, sent as `X-Session-ID` and as SGLang's `routing_key`.
            on_ids: Called on the event loop with each piece of sampled ids, in order.

        Raises:
            InfrastructureError: If the server cannot be reached, fails or answers wrongly, the engine is
                closed, or a weight update has failed.
            ValueError: If the server refuses the request, such as a prompt longer than its context.
        """
        bound = check_request(len(ids), max_tokens, self.context_length)
        found, made_at = _AnswerPiece(), self.version
        finish: Finish = "aborted"
        try:
            async with self._slots, self._gate.request():
                made_at = self.version
                await self._run(_HTTPRequest(tuple(ids), bound, key, on_ids, found))
                finish = self._finish_of(found)
        except RequestInterrupted:
            pass
        return Sampled(found.ids, found.log_probs if self._log_probs else None, finish, made_at)

    async def update(self, weights: Weights | str | Path | None) -> int:
        """Load new weights. An update that has begun runs to its end even if the caller is cancelled.

        Args:
            weights: A state dict, a TensorDict, pairs of a name and a tensor, a module, or the path of a
                folder with safetensors files; with `update_weights`, what that takes. None keeps the weights
                of the server and counts an update.

        Returns:
            The new policy version.

        Raises:
            InfrastructureError: If the server fails or has no endpoints for updates. If it failed while it
                loaded, all requests raise it too until an update succeeds.
        """
        return await self._gate.complete(self._update(weights))

    async def check(self) -> None:
        """Check that the server answers that it is healthy; an `EnginePool` does so before it comes back.

        Raises:
            InfrastructureError: If it does not, or the engine is closed.
        """
        self._gate.check_open()
        status, _ = await self._http.get("/health")
        if status >= 300:
            raise InfrastructureError(f"{self._url}/health responded with {status}")

    async def pressure(self) -> EnginePressure | None:
        """Return how full the server is by its `/metrics`; None if these do not say it.

        vLLM has them unless it was started with `--disable-log-stats`, SGLang with `--enable-metrics`.

        Raises:
            InfrastructureError: If the server cannot be reached or fails, or the engine is closed.
        """
        self._gate.check_open()
        status, text = await self._http.get("/metrics")
        if status >= 500 or status in BUSY:
            raise InfrastructureError(f"{self._url}/metrics responded with {status}")
        metrics = read_metrics(text) if status < 300 else {}
        found = pressure_of(metrics, self._kind)
        if found is None and not self._has_missed_metrics:
            self._has_missed_metrics = True
            logger.info(
                "%s/metrics (status %d) says nothing about the KV cache, so that no request is held back for "
                "it; vLLM has metrics without --disable-log-stats, SGLang with --enable-metrics",
                self._url,
                status,
            )
        return found

    async def close(self) -> None:
        """End all requests with InfrastructureError, and close the connections."""
        await self._gate.close()
        await self._http.close()

    async def _update(self, weights: Any) -> int:
        async with contextlib.AsyncExitStack() as stack:
            folder = None
            if weights is not None and self._update_weights is None:
                made = weights_folder(weights, is_tied=True, parent=self._weights_parent)
                folder = await stack.enter_async_context(in_thread(made))
            await stack.enter_async_context(self._gate.closed_for_update())
            if weights is None:
                pass
            elif self._update_weights is not None:
                await self._gate.drained()
                with self._gate.loading("the server"):
                    await self._update_weights(weights)
            else:
                if not self.can_resume:
                    await self._gate.drained()
                await self._command(self._wire.pause)
                try:
                    if not await self._gate.settled(SETTLE_S):
                        await self._gate.interrupt()
                    with self._gate.loading("the server"):
                        await self._command(self._wire.load(str(folder)))
                finally:
                    await self._command(self._wire.resume)
            self.version += 1
            return self.version

    async def _command(self, command: tuple[str, JSON]) -> None:
        """Post a command to the server, with retries."""
        path, payload = command

        async def post() -> None:
            async with self._http.post(path, payload, {}) as response:
                self._wire.check_command(_json(await response.read()))

        try:
            await self._http.with_retries(post, lambda: True)
        except ValueError as error:
            raise InfrastructureError(f"{error}. {self._wire.hint}") from error

    async def _run(self, request: _HTTPRequest) -> None:
        """Run a request, and retry it as long as it has no ids."""
        stream = request.on_ids is not None

        async def once() -> None:
            name = f"{request.key}/{self._name}-{next(self._numbers)}"
            payload = self._wire.request(request, name, stream)
            async with self._http.post(self._wire.path, payload, {"X-Session-ID": request.key}) as response:
                if stream:
                    async for data in event_data(response.content.iter_any()):
                        if data != DONE:
                            self._add(request, _event(data))
                else:
                    self._add(request, _json(await response.read()))
            if request.found.finish is None:
                raise ServiceError(f"{self._url} ended an answer early", "short", is_transient=True)

        try:
            await self._http.with_retries(once, lambda: not request.found.ids)
        except ServiceError as error:
            if not request.found.ids or not error.is_transient:
                raise
            request.found.finish = "abort"  # sampling may resume behind what it has

    def _add(self, request: _HTTPRequest, data: Any) -> None:
        """Add a response, or a piece of a stream, to the answer."""
        try:
            if isinstance(data, Mapping) and data.get("error") is not None:
                self._raise_for_event(data["error"])
            piece = self._wire.read(data, request.found)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise InfrastructureError(
                f"{self._url} sent no answer with token ids ({error!r}): {str(data)[:SHOWN]}"
            ) from error
        self._check(piece, len(request.found.ids), request.max_tokens)
        request.found.ids += piece.ids
        if self._log_probs and max(piece.log_probs, default=0.0) > 0.0:  # rounded up
            piece.log_probs = [min(0.0, each) for each in piece.log_probs]
        request.found.log_probs += piece.log_probs
        request.found.finish = piece.finish
        if piece.ids and request.on_ids is not None:
            request.on_ids(piece.ids)

    def _check(self, piece: _AnswerPiece, before: int, max_tokens: int) -> None:
        """Raise InfrastructureError if a piece is not what an engine returns."""
        if not set(map(type, piece.ids)) <= {int}:
            raise InfrastructureError(f"{self._url} sent ids that are not integers: {piece.ids!r:.200}")
        if piece.ids and not 0 <= min(piece.ids) <= max(piece.ids) < self._vocab_size:
            wrong = next(token for token in piece.ids if not 0 <= token < self._vocab_size)
            raise InfrastructureError(
                f"{self._url} sampled id {wrong}; the vocabulary has {self._vocab_size}. Is the tokenizer"
                " that of the server's model?"
            )
        if before + len(piece.ids) > max_tokens:
            raise InfrastructureError(
                f"{self._url} sampled {before + len(piece.ids)} tokens; at most {max_tokens} were asked for"
            )
        if not self._log_probs:
            return
        if len(piece.log_probs) != len(piece.ids):
            raise InfrastructureError(
                f"{self._url} sent {len(piece.log_probs)} log-probabilities of {len(piece.ids)} tokens"
            )
        try:
            least = min(piece.log_probs, default=0.0)
            is_finite = math.isfinite(math.fsum(piece.log_probs)) and least >= _LEAST
        except (TypeError, ValueError, OverflowError):  # no numbers, infinite ones, or too large ones
            is_finite = False
        if not is_finite:
            raise InfrastructureError(f"{self._url} sent log-probabilities that are not finite")

    def _finish_of(self, found: _AnswerPiece) -> Finish:
        """Return why an answer ended."""
        if found.ids and found.ids[-1] in self.stop_token_ids:
            return "stop"
        finish = FINISHES.get(found.finish or "")
        if finish == "aborted":
            return finish
        if not found.ids:
            raise InfrastructureError(f"{self._url} sampled no tokens (finish {found.finish!r})")
        if finish is None:
            raise InfrastructureError(f"{self._url} ended a request with {found.finish!r}")
        if finish == "stop":
            raise InfrastructureError(
                f"{self._url} stopped at id {found.ids[-1]}, which is not one of the stop ids"
                f" {list(self.stop_token_ids)}; give it as stop_token_ids"
            )
        return finish

    def _raise_for_event(self, error: Any) -> None:
        """Raise the error that came instead of a piece of a stream."""
        code = error.get("code") if isinstance(error, Mapping) else None
        what = f"{self._url} sent an error: {str(error)[:SHOWN]}"
        if isinstance(code, int) and 400 <= code < 500 and code not in BUSY:
            raise ValueError(what)
        raise ServiceError(what, "server", is_transient=True)


@dataclass(slots=True)
class _AnswerPiece:
    """Ids and log-probabilities of an answer, or of a piece of it; the finish is None before its end."""

    ids: list[int] = field(default_factory=list[int])
    log_probs: list[float] = field(default_factory=list[float])
    finish: str | None = None


@dataclass(frozen=True, slots=True)
class _HTTPRequest:
    """A request, with the answer so far."""

    ids: Sequence[int]
    max_tokens: int
    key: str
    on_ids: OnIds | None
    found: _AnswerPiece


def _json(body: bytes) -> Any:
    try:
        return from_json(body)
    except ValueError:
        raise InfrastructureError(f"the server sent no JSON: {body[:SHOWN]!r}") from None


def _event(data: bytes) -> Any:
    try:
        return from_json(data)
    except ValueError:  # a proxy may end a stream in the middle of an event
        what = f"the server sent no JSON: {data[:SHOWN]!r}"
        raise ServiceError(what, "stream", is_transient=True) from None


class _Wire(ABC):
    """Requests and responses of a kind of server.

    Attributes:
        path: Path of the endpoint that samples.
        pause: Path and payload of the command that ends all requests and lets no other begin.
        resume: Path and payload of the command that ends the pause.
        hint: Advice for a server without these commands.
        constraints: Sampling parameters that constrain answers.
    """

    path: str
    pause: tuple[str, JSON]
    resume: tuple[str, JSON]
    hint: str
    constraints: frozenset[str]

    def __init__(
        self, base: Mapping[str, JSON], sampling: Mapping[str, JSON], log_probs: bool, model: str | None
    ) -> None:
        self.base, self.sampling, self.log_probs, self.model = base, sampling, log_probs, model

    @abstractmethod
    def request(self, request: _HTTPRequest, name: str, stream: bool) -> JSON:
        """Return the payload of a request."""

    @abstractmethod
    def read(self, data: Any, before: _AnswerPiece) -> _AnswerPiece:
        """Return the new ids of a response, or of an event of a stream."""

    @abstractmethod
    def load(self, folder: str) -> tuple[str, JSON]:
        """Return path and payload of the command that loads weights."""

    def check_command(self, data: Any) -> None:
        """Raise InfrastructureError if the response to a command says that it failed."""
        if isinstance(data, Mapping) and data.get("success") is False:
            raise InfrastructureError(f"the server refused a command: {str(data)[:SHOWN]}")


class _VLLM(_Wire):
    """vLLM, https://docs.vllm.ai: token in, token out."""

    path = "/inference/v1/generate"
    pause = ("/pause?mode=abort", {})
    resume = ("/resume", {})
    hint = "A vLLM server has commands for weight updates if VLLM_SERVER_DEV_MODE=1; or give update_weights"
    constraints = frozenset({"structured_outputs"})

    def request(self, request: _HTTPRequest, name: str, stream: bool) -> JSON:
        logprobs = {"logprobs": 0} if self.log_probs else {}
        bound = {"max_tokens": request.max_tokens, "detokenize": False}
        return {
            "request_id": name,
            "token_ids": list(request.ids),
            "sampling_params": {**self.base, **bound, **logprobs, **self.sampling},
            "stream": stream,
            **({} if self.model is None else {"model": self.model}),
        }

    def read(self, data: Any, before: _AnswerPiece) -> _AnswerPiece:
        if not data["choices"]:
            return _AnswerPiece(finish=before.finish)  # the usage, after the last piece
        (choice,) = data["choices"]
        content = (choice.get("logprobs") or {}).get("content") or ()
        log_probs = [each["logprob"] for each in content]
        return _AnswerPiece(list(choice["token_ids"] or ()), log_probs, choice["finish_reason"])

    def load(self, folder: str) -> tuple[str, JSON]:
        return "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}}


class _SGLang(_Wire):
    """SGLang, https://docs.sglang.ai: native generate API."""

    path = "/generate"
    pause = ("/pause_generation", {"mode": "abort"})
    resume = ("/continue_generation", {})
    hint = "Is it an SGLang server? Otherwise give update_weights"
    constraints = frozenset({"json_schema", "regex", "ebnf", "structural_tag"})

    def request(self, request: _HTTPRequest, name: str, stream: bool) -> JSON:
        bound: dict[str, JSON] = {"max_new_tokens": request.max_tokens, "skip_special_tokens": False}
        return {
            "rid": name,
            "input_ids": list(request.ids),
            "sampling_params": {**self.base, **bound, **self.sampling},
            "return_logprob": self.log_probs,
            "stream": stream,
            "routing_key": request.key,
        }

    def read(self, data: Any, before: _AnswerPiece) -> _AnswerPiece:
        meta = data["meta_info"]
        ids = list(data["output_ids"])
        log_probs = [each[0] for each in meta["output_token_logprobs"]] if self.log_probs else []
        # Servers stream all ids so far, or with --incremental-streaming-output the new ones only.
        had = len(before.ids)
        if had and len(ids) == meta["completion_tokens"]:
            ids, log_probs = ids[had:], log_probs[had:]
        finish = meta["finish_reason"]
        return _AnswerPiece(ids, log_probs, None if finish is None else finish["type"])

    def load(self, folder: str) -> tuple[str, JSON]:
        return "/update_weights_from_disk", {"model_path": folder, "flush_cache": True}


_WIRES: Mapping[str, type[_Wire]] = {"vllm": _VLLM, "sglang": _SGLang}
