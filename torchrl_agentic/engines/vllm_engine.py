"""`VLLMEngine`: sample with vLLM, in this process or in the Ray actors of TorchRL's `AsyncVLLM`."""

# vLLM is installed in an environment of its own, and Ray annotates few results.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import itertools
import json
import uuid
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from torchrl_agentic.engines.base import Engine, EnginePressure, OnIds, Sampled
from torchrl_agentic.engines.request_checks import FINISHES, check_request
from torchrl_agentic.engines.request_gate import SETTLE_S, RequestGate, RequestInterrupted
from torchrl_agentic.engines.sampling import Sampling
from torchrl_agentic.engines.weights import (
    Weights,
    check_fits,
    checkpoint_shapes,
    in_thread,
    weights_folder,
)
from torchrl_agentic.errors import InfrastructureError, MissingExtra
from torchrl_agentic.parsers import get_parser
from torchrl_agentic.tokens.writer import stop_ids

if TYPE_CHECKING:
    from torchrl_agentic.parsers import ToolCallParser
    from torchrl_agentic.parsers.base import Tools

__all__ = ["VLLMEngine", "structural_tag", "without_padding"]

OnUpdate: TypeAlias = Literal["abort", "wait", "keep"]
LoadWeights: TypeAlias = Callable[[Any, Any], Awaitable[None]]

_FORBID = -100.0
PROCESSED = "processed_logprobs"
"""The `logprobs_mode` of vLLM in which log-probabilities are those of the distribution sampled from."""
_OWN = ("n", "stop", "max_tokens", "output_kind", "stop_token_ids", "logprobs")
_SHUTDOWN_S = 10.0
_MAX_NUM_SEQS = 256  # of vLLM, if the arguments leave it out
_STICKY_KEYS = 65_536


class VLLMEngine(Engine):
    """Samples with vLLM.

    An answer ends with one of the stop ids, and with no other token. The pad token is never sampled, because
    losses drop it. Log-probabilities are those of the distribution that was sampled from, if `from_model` or
    the caller started vLLM with `logprobs_mode="processed_logprobs"`; by vLLM's default they are those of the
    model before temperature and `top_p`. Under a constraint, they are those of the tokens that it allows.

    A weight update pauses vLLM. New requests wait for its end, and each result has the version of the
    weights that sampled it. `update` takes a state dict, a TensorDict, pairs of a name and a tensor, or a
    module, with the names of the checkpoint; it writes them to a safetensors file that vLLM loads. It also
    takes the path of a folder with such files, as `save_pretrained` writes it. `load_weights` replaces this
    by another way, such as vLLM's weight transfer over NCCL or CUDA IPC.

    Args:
        engine: A `vllm.v1.engine.async_llm.AsyncLLM`, which must be used on one event loop only; a
            `vllm.LLM`, which works on a thread of its own, so that nothing else may use it while requests
            run; or TorchRL's `AsyncVLLM`. It stays open when this object is closed.
        tokenizer: The tokenizer of the model; its end-of-sequence token ends an answer.
        temperature: Sampling temperature; 0 for greedy sampling.
        top_p: Probability mass of the tokens that are sampled from.
        stop_token_ids: Additional ids that end an answer, besides the tokenizer's `eos_token_id` and those of
            the model's `generation_config`.
        log_probs: Return log-probabilities.
        sampling: Additional arguments of `vllm.SamplingParams`.
        on_update: Effect of an update on running requests: "abort" them, so that they may be resumed under
            the new weights; "wait" for their end; or "keep" them, which continues answers under the new
            weights and gives them the version of their first token.
            None: "wait" under a constraint on tool calls, which cannot resume, and for a `vllm.LLM`, which
            cannot abort; "abort" otherwise.
        load_weights: Loads new weights: `await load_weights(engine, weights)`, while vLLM is paused.
        weights_parent: Folder for the files of new weights, which all workers of vLLM must see; by default
            in memory or among temporary files.
        tool_choice: "auto" forces calls of tools into their format and schema; "required" also forces at
            least one call. None: no constraint.
        parser: The format of tool calls, or its name, for `tool_choice`.
        tools: The tools that may be called, for `tool_choice`.
        parallel_tool_calls: Allow several calls in a constrained answer.

    Attributes:
        llm: The vLLM engine.
        version: Policy version: number of weight updates so far.
        max_concurrent: Number of requests that vLLM works on at once.
        context_length: Number of tokens that the model takes, prompt and answer together; None if unknown.
        stop_token_ids: Ids that end an answer.
        can_resume: Aborted answers may be resumed; False under a constraint on tool calls.
        sampling: The distribution that it samples from.

    Raises:
        TypeError: If the engine is of another type.
        ValueError: If the pad token also ends answers, an argument of `sampling` is not supported, or the
            format of calls has no structural tag.
        MissingExtra: If vLLM is not installed.
    """

    def __init__(
        self,
        engine: Any,
        *,
        tokenizer: Any,
        temperature: float = 1.0,
        top_p: float = 1.0,
        stop_token_ids: Sequence[int] = (),
        log_probs: bool = True,
        sampling: Mapping[str, Any] | None = None,
        on_update: OnUpdate | None = None,
        load_weights: LoadWeights | None = None,
        weights_parent: str | Path | None = None,
        tool_choice: Literal["auto", "required"] | None = None,
        parser: ToolCallParser | str | None = None,
        tools: Tools = (),
        parallel_tool_calls: bool = True,
    ) -> None:
        params = _vllm_module("sampling_params")
        if (own := sorted(set(_OWN) & set(sampling or ()))) != []:
            raise ValueError(
                f"sampling cannot have {', '.join(own)}: the engine sets it, or samples ids only"
            )
        self.llm = engine
        self._server = _server_of(engine)
        self.stop_token_ids = stop_ids(
            tokenizer, stop_token_ids, generation_config=self._server.generation_config
        )
        self.version = 0
        self.max_concurrent = self._server.max_concurrent
        self.context_length = self._server.context_length
        options: dict[str, Any] = {
            "max_tokens": None,  # of each request
            "temperature": temperature,
            "top_p": top_p,
            "stop_token_ids": list(self.stop_token_ids),
            "ignore_eos": True,  # the ids above are the only ones that end an answer
            "detokenize": False,
            "logprobs": 0 if log_probs else None,
            "flat_logprobs": True,
            "logit_bias": without_padding(tokenizer.pad_token_id, self._server.vocab_size),
            "skip_clone": True,  # each request gets a copy of its own
            **(sampling or {}),
        }
        if tool_choice is not None:
            options["structured_outputs"] = structural_tag(parser, tools, tool_choice, parallel_tool_calls)
        self._params: Any = params.SamplingParams(**options)
        self.sampling = Sampling.of(options, is_processed=logprobs_mode(engine) == PROCESSED)
        self.can_resume = self._params.structured_outputs is None
        if on_update not in (None, "abort", "wait", "keep"):
            raise ValueError(f"on_update is 'abort', 'wait' or 'keep'; got {on_update!r}")
        if on_update == "abort" and not self.can_resume:
            raise ValueError("a constrained answer cannot be resumed; on_update must be 'wait' or 'keep'")
        if on_update == "keep" and not self._server.has_labels:
            raise ValueError(
                f"{type(engine).__name__} cannot keep requests over an update; on_update must be 'wait', or "
                "'abort' for AsyncVLLM"
            )
        if on_update == "abort" and not self._server.can_abort:
            raise ValueError("a vllm.LLM cannot abort requests for an update; on_update must be 'wait'")
        may_abort = self.can_resume and self._server.can_abort
        self._on_update: OnUpdate = on_update or ("abort" if may_abort else "wait")
        self._load_weights, self._weights_parent = load_weights, weights_parent
        self._log_probs = log_probs
        self._owns = False
        self._numbers = itertools.count()
        self._name = uuid.uuid4().hex[:8]
        self._gate = RequestGate()
        self._labels: dict[str, int] = {}
        self._shapes: Mapping[str, tuple[int, ...]] | None = None

    @classmethod
    def from_model(
        cls,
        model: str | Path,
        *,
        tokenizer: Any = None,
        engine_args: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> VLLMEngine:
        """Start vLLM for a model; `close` ends it.

        Args:
            model: Folder or name of the model.
            tokenizer: The tokenizer of the model; None loads it.
            engine_args: Additional arguments of vLLM's `AsyncEngineArgs`, such as `max_num_seqs`. The default
                of `logprobs_mode` is "processed_logprobs".
            options: Additional arguments of this class.

        Raises:
            MissingExtra: If vLLM is not installed.
        """
        arguments, engine = _vllm_module("engine.arg_utils"), _vllm_module("v1.engine.async_llm")
        if tokenizer is None:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(model)
        args = {"enable_log_requests": False, "logprobs_mode": PROCESSED, **(engine_args or {})}
        llm: Any = engine.AsyncLLM.from_engine_args(arguments.AsyncEngineArgs(model=str(model), **args))
        try:
            made = cls(llm, tokenizer=tokenizer, **options)
            if "disable_log_stats" not in args:
                made._server.mute()
        except BaseException:
            llm.shutdown()
            raise
        made._owns = True
        return made

    async def sample(
        self, ids: Sequence[int], *, max_tokens: int, key: str, on_ids: OnIds | None = None
    ) -> Sampled:
        """Sample one answer.

        Args:
            ids: Token ids of the prompt, [P].
            max_tokens: Upper bound on the number of sampled ids. An answer also ends where the context does.
            key: Name of the trajectory; requests with the same key go to the same replica.
            on_ids: Called on the event loop with each piece of sampled ids, in order; actors send one piece.

        Raises:
            InfrastructureError: If vLLM is closed, lost or overloaded, or a weight update has failed.
            ValueError: If vLLM cannot take the prompt, such as one longer than its context.
        """
        params = self._params.clone()
        params.skip_clone = True
        params.max_tokens = check_request(len(ids), max_tokens, self.context_length)
        params.min_tokens = min(params.min_tokens, params.max_tokens)
        self._server.check_loop()
        made_at = self.version
        try:
            async with self._gate.request():
                made_at = self.version
                answer = await self._server.run(self._new_name(key), list(ids), params, key, on_ids)
        except RequestInterrupted:
            answer = _Output([], [], "abort")
        finish = FINISHES.get(answer.finish)
        if finish is None:
            raise InfrastructureError(f"vLLM ended a request with {answer.finish!r}")
        version = min((self._labels.get(label, made_at) for label in answer.labels), default=made_at)
        log_probs = (answer.log_probs or []) if self._log_probs else None
        return Sampled(answer.ids, log_probs, finish, version)

    async def update(self, weights: Weights | str | Path | None) -> int:
        """Load new weights. An update that has begun runs to its end even if the caller is cancelled.

        Args:
            weights: The weights; None keeps those of vLLM and counts an update.

        Returns:
            The new policy version.

        Raises:
            ValueError: If they are not the weights of the model; vLLM keeps those it has.
            InfrastructureError: If vLLM is closed or lost, or loading fails. Until an update succeeds, all
                requests raise it too, because vLLM may have part of the new weights.
        """
        return await self._gate.complete(self._update(weights))

    async def pressure(self) -> EnginePressure | None:
        """Return how full vLLM was in its last step.

        Returns:
            None without its statistics, with `disable_log_stats` or `AsyncVLLM`.
        """
        stats = self._server.stats
        return None if stats is None else stats.pressure()

    async def close(self) -> None:
        """End all requests with InfrastructureError, and vLLM if `from_model` started it."""
        await self._gate.close()
        if self._owns:
            self._owns = False
            await self._server.shut_down()

    def _new_name(self, key: str) -> str:
        return f"{key}/{self._name}-{next(self._numbers)}"

    async def _update(self, weights: Any) -> int:
        async with contextlib.AsyncExitStack() as stack:
            folder = None
            if weights is not None and self._load_weights is None:
                folder = await stack.enter_async_context(in_thread(self._folder_of(weights)))
            await stack.enter_async_context(self._gate.closed_for_update())
            if self._on_update == "wait":
                await self._gate.drained()
            await self._server.pause("keep" if self._on_update == "keep" else "abort")
            try:
                if not self._server.has_labels and not await self._gate.settled(SETTLE_S):
                    await self._gate.interrupt()  # they arrived too late to be aborted
                if weights is not None:
                    with self._gate.loading("vLLM"):
                        if self._load_weights is not None:
                            await self._load_weights(self._server.engine, weights)
                        else:
                            await self._server.load(str(folder))
                self.version += 1
                label = f"{self._name}-{self.version}"
                self._labels[label] = self.version
                await self._server.mark(label)
            finally:
                await self._server.resume()
            return self.version

    @contextlib.contextmanager
    def _folder_of(self, weights: Weights | str | Path) -> Generator[Path]:
        """Yield a folder with the weights, after checking that they fit the model."""
        if self._shapes is None:
            self._shapes = checkpoint_shapes(self._server.model) if self._server.model is not None else {}
        with weights_folder(weights, is_tied=self._server.is_tied, parent=self._weights_parent) as folder:
            check_fits(checkpoint_shapes(folder), self._shapes)
            yield folder


@dataclass(frozen=True, slots=True)
class _Output:
    """Sampled tokens; `labels` name the weights that sampled them, as far as these are known."""

    ids: list[int]
    log_probs: list[float] | None
    finish: str
    labels: Sequence[str] = ()


class _Server(ABC):
    """One or several vLLM engines."""

    engine: Any
    max_concurrent: int
    context_length: int | None
    vocab_size: int | None
    model: str | None
    """Folder of the checkpoint, if it is known."""
    generation_config: Any
    """The model's `generation_config`, a mapping or an object; None: unknown."""
    is_tied: bool
    """The head of the model shares the weights of its embedding."""
    has_labels: bool
    """Answers have the labels of the weights that sampled them."""
    can_abort: bool = True
    """An update can end requests with the ids that they have."""
    stats: _Stats | None = None
    """How full the engine is, if that is known."""

    def read(self, config: Any) -> None:
        """Read the properties of the model from vLLM's configuration."""
        replicas = config.parallel_config.data_parallel_size
        self.max_concurrent = config.scheduler_config.max_num_seqs * replicas
        self.context_length = config.model_config.max_model_len
        self.vocab_size = config.model_config.get_vocab_size()
        self.generation_config = config.model_config.try_get_generation_config()
        self.model = config.model_config.model
        self.is_tied = bool(getattr(config.model_config.hf_text_config, "tie_word_embeddings", False))

    @abstractmethod
    async def run(self, name: str, ids: list[int], params: Any, key: str, on_ids: OnIds | None) -> _Output:
        """Run a request."""

    @abstractmethod
    async def pause(self, mode: Literal["abort", "keep"]) -> None:
        """Stop scheduling, and end or keep the requests that run."""

    @abstractmethod
    async def load(self, folder: str) -> None:
        """Load the weights of a folder."""

    async def mark(self, label: str) -> None:  # noqa: B027
        """Name the weights that vLLM has, if it `has_labels`."""

    async def resume(self) -> None:  # noqa: B027
        """End a pause."""

    @abstractmethod
    async def shut_down(self) -> None:
        """End vLLM."""

    def check_loop(self) -> None:  # noqa: B027
        """Raise RuntimeError if the engine is in use on another event loop."""

    def mute(self) -> None:  # noqa: B027
        """Collect only the statistics that `pressure` needs."""


class _InProcess(_Server):
    """An `AsyncLLM` in this process."""

    has_labels = True

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.read(engine.vllm_config)
        self.stats = _stats_of(engine)

    def mute(self) -> None:
        if self.stats is not None:
            self.engine.logger_manager.stat_loggers[:] = [self.stats]

    def check_loop(self) -> None:
        handler = self.engine.output_handler
        if handler is not None and handler.get_loop() is not asyncio.get_running_loop():
            raise RuntimeError("this AsyncLLM is in use on another event loop; start one for each loop")

    async def run(self, name: str, ids: list[int], params: Any, key: str, on_ids: OnIds | None) -> _Output:
        tokens_input = _vllm_module("inputs").tokens_input
        params.output_kind = _output_kind(on_ids)
        found = _Output([], [], "abort")
        with _errors():
            outputs = self.engine.generate(tokens_input(ids), params, name, session_id=key)
            try:
                async with contextlib.aclosing(outputs):
                    async for output in outputs:
                        piece = _answer_of(output)
                        if on_ids is not None and piece.ids:
                            on_ids(piece.ids)
                        found = _joined(found, piece)
            except asyncio.CancelledError:
                await self.engine.abort(name)  # `generate` itself does not if the request is not yet queued
                raise
        return found

    async def pause(self, mode: Literal["abort", "keep"]) -> None:
        with _errors():
            await self.engine.pause_generation(mode=mode, clear_cache=True)

    async def load(self, folder: str) -> None:
        with _errors():
            await self.engine.collective_rpc("reload_weights", kwargs={"weights_path": folder})

    async def mark(self, label: str) -> None:
        with _errors():
            await self.engine.update_weight_version(label)

    async def resume(self) -> None:
        with _errors():
            await self.engine.resume_generation()

    async def shut_down(self) -> None:
        if self.engine.output_handler is not None:
            self.engine.output_handler.cancel()  # it would take the end of vLLM for a crash
        await asyncio.to_thread(self.engine.shutdown, _SHUTDOWN_S)


class _Offline(_Server):
    """A `vllm.LLM` in this process, which does not label its weights, and does one thing at a time."""

    has_labels = False
    can_abort = False

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.read(engine.llm_engine.vllm_config)
        self.stats = _stats_of(engine.llm_engine)
        self._stepper = _steppers.setdefault(engine, _Stepper(engine.llm_engine))

    async def run(self, name: str, ids: list[int], params: Any, key: str, on_ids: OnIds | None) -> _Output:
        params.output_kind = _output_kind(on_ids)
        job = _OfflineRequest(name, ids, params, on_ids, asyncio.get_running_loop().create_future())
        self._stepper.add(job)
        try:
            with _errors():
                return await job.future
        except asyncio.CancelledError:
            self._stepper.abort(job)
            raise

    async def pause(self, mode: Literal["abort", "keep"]) -> None:
        del mode  # updates wait for the end of all requests

    async def load(self, folder: str) -> None:
        with _errors():
            await self._stepper.call(
                self.engine.collective_rpc, "reload_weights", kwargs={"weights_path": folder}
            )
            await self._stepper.call(self.engine.reset_prefix_cache)

    async def shut_down(self) -> None:
        await self._stepper.call(self.engine.llm_engine.engine_core.shutdown)


@dataclass(slots=True, eq=False)
class _OfflineRequest:
    """A request to a `vllm.LLM`; `found` is the answer so far."""

    name: str
    ids: list[int]
    params: Any
    on_ids: OnIds | None
    future: asyncio.Future[_Output]
    found: _Output = _Output([], [], "abort")

    def tell(self, output: Any) -> None:
        """Pass an output or an error on to the event loop of the request; any thread may call."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.future.get_loop().call_soon_threadsafe(self._hear, output)

    def _hear(self, output: Any) -> None:
        if self.future.done():
            return
        try:
            if isinstance(output, Exception):
                raise output
            piece = _answer_of(output)
            if self.on_ids is not None and piece.ids:
                self.on_ids(piece.ids)
            self.found = _joined(self.found, piece)
        except Exception as error:
            self.future.set_exception(error)
        else:
            if output.finished:
                self.future.set_result(self.found)


class _Stepper:
    """Steps the engine of a `vllm.LLM` on a thread of its own while there are requests.

    Args:
        engine: The `LLMEngine` of the LLM.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._thread = ThreadPoolExecutor(1, "torchrl_agentic-vllm")
        self._jobs: deque[_OfflineRequest] = deque()  # that begin, or are cancelled
        self._running: dict[str, _OfflineRequest] = {}

    def add(self, job: _OfflineRequest) -> None:
        """Add a request; requests that are added together begin in the same step."""
        self._jobs.append(job)
        if len(self._jobs) == 1:
            asyncio.get_running_loop().call_soon(self._thread.submit, self._step_all)

    def abort(self, job: _OfflineRequest) -> None:
        """End a request whose caller was cancelled."""
        self.add(job)

    async def call(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call a function on the thread, when no request runs."""
        made = functools.partial(function, *args, **options)
        return await asyncio.get_running_loop().run_in_executor(self._thread, made)

    def _step_all(self) -> None:
        """Run steps until there are no requests."""
        while True:
            self._take()
            if not self._engine.has_unfinished_requests():
                return
            try:
                outputs = self._engine.step()
            except Exception as error:
                failed, self._running = self._running, {}
                for job in failed.values():
                    job.tell(error)
                return
            for output in outputs:
                job = self._running.get(output.request_id)
                if job is not None:
                    job.tell(output)
                    if output.finished:
                        del self._running[job.name]

    def _take(self) -> None:
        """Hand the engine the requests that begin, and end those that were cancelled."""
        tokens_input = _vllm_module("inputs").tokens_input
        while self._jobs:
            job = self._jobs.popleft()
            if job.name in self._running:
                del self._running[job.name]
                self._engine.abort_request([job.name])
            elif not job.future.done():
                try:
                    self._engine.add_request(job.name, tokens_input(job.ids), job.params)
                except Exception as error:
                    job.tell(error)
                else:
                    self._running[job.name] = job


_steppers: weakref.WeakKeyDictionary[Any, _Stepper] = weakref.WeakKeyDictionary()
"""One per `vllm.LLM`, since engines that share it must not step it at the same time."""


class _Stats:
    """A logger of vLLM's statistics that keeps the last ones of each replica.

    vLLM calls it on its event loop, after each step. It has the methods of `AggregateStatLoggerBase`.
    """

    def __init__(self) -> None:
        self._last: dict[int, Any] = {}  # SchedulerStats by replica
        self._preempted = 0

    def pressure(self) -> EnginePressure:
        """Return the KV use of the fullest replica, and the sums of the other figures."""
        last = self._last.values()
        return EnginePressure(
            max((each.kv_cache_usage for each in last), default=0.0),
            sum(each.num_waiting_reqs + each.num_skipped_waiting_reqs for each in last),
            sum(each.num_running_reqs for each in last),
            self._preempted,
        )

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Keep the statistics of a step.

        Args:
            scheduler_stats: Those of the scheduler, or None.
            iteration_stats: Those of the requests, or None.
            mm_cache_stats: Ignored.
            engine_idx: Number of the replica.
        """
        del mm_cache_stats
        if scheduler_stats is not None:
            self._last[engine_idx] = scheduler_stats
        if iteration_stats is not None:
            self._preempted += iteration_stats.num_preempted_reqs

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        """Ignore that vLLM sleeps.

        Args:
            sleep: Ignored.
            level: Ignored.
        """

    def record_admission_rejection(self, reason: str) -> None:
        """Ignore a request that vLLM rejects."""

    def log(self) -> None:
        """Log nothing."""

    def log_engine_initialized(self) -> None:
        """Log nothing."""


def _stats_of(engine: Any) -> _Stats | None:
    """Return the statistics of an `AsyncLLM`, which may serve several engines; None if it has none."""
    manager = getattr(engine, "logger_manager", None)
    if manager is None:
        return None
    for logger in manager.stat_loggers:
        if isinstance(logger, _Stats):
            return logger
    stats = _Stats()
    manager.stat_loggers.append(stats)
    return stats


class _Actors(_Server):
    """The Ray actors of an `AsyncVLLM`, which do not label their weights, and cannot stream."""

    has_labels = False

    def __init__(self, engine: Any) -> None:
        from transformers import AutoConfig

        args = engine.engine_args
        self.engine, self.model = engine, args.model
        self.generation_config = saved_generation_config(args.model)
        found: Any = AutoConfig.from_pretrained(args.model, trust_remote_code=args.trust_remote_code)
        config = found.get_text_config()
        self.max_concurrent = (args.max_num_seqs or _MAX_NUM_SEQS) * len(engine.actors)
        self.context_length = args.max_model_len or getattr(config, "max_position_embeddings", None)
        self.vocab_size = config.vocab_size
        self.is_tied = bool(getattr(config, "tie_word_embeddings", False))
        self._running = [0] * len(engine.actors)
        self._place_of: OrderedDict[str, int] = OrderedDict()

    async def run(self, name: str, ids: list[int], params: Any, key: str, on_ids: OnIds | None) -> _Output:
        params.output_kind = _output_kind(None)
        place = self._choose(key)
        self._running[place] += 1
        try:
            answer = _answer_of(
                await self._result(place, "generate", {"prompt_token_ids": ids}, params, use_tqdm=False)
            )
        finally:
            self._running[place] -= 1
        if answer.ids and on_ids is not None:
            on_ids(answer.ids)
        return answer

    def _choose(self, key: str) -> int:
        """Return the actor of a trajectory; a new one goes where fewest requests run."""
        place = self._place_of.pop(key, None)
        if place is None:
            place = min(range(len(self._running)), key=self._running.__getitem__)
        self._place_of[key] = place
        if len(self._place_of) > _STICKY_KEYS:
            self._place_of.popitem(last=False)
        return place

    async def pause(self, mode: Literal["abort", "keep"]) -> None:
        del mode
        await self._all("sleep", 0)  # level 0 ends all requests and schedules no other

    async def load(self, folder: str) -> None:
        await self._all("collective_rpc_v1", "reload_weights", None, (), {"weights_path": folder})
        await self._all("reset_prefix_cache")

    async def resume(self) -> None:
        await self._all("wake_up", ["scheduling"])

    async def shut_down(self) -> None:
        await asyncio.to_thread(self.engine.shutdown)

    async def _all(self, method: str, *args: Any) -> None:
        """Call a method of all actors, and wait for all of them."""
        calls = (self._result(place, method, *args) for place in range(len(self._running)))
        found = await asyncio.gather(*calls, return_exceptions=True)
        for error in found:
            if isinstance(error, BaseException):
                raise error

    async def _result(self, place: int, method: str, *args: Any, **options: Any) -> Any:
        """Await the result of a method of an actor; cancelling it cancels the method."""
        import ray
        from ray.exceptions import RayError, RayTaskError

        if place >= len(self.engine.actors):
            raise InfrastructureError("AsyncVLLM has been shut down")
        ref = getattr(self.engine.actors[place], method).remote(*args, **options)
        try:
            with _errors():
                return await asyncio.wrap_future(ref.future())
        except asyncio.CancelledError:
            ray.cancel(ref)
            raise
        except RayError as error:
            cause = error.cause if isinstance(error, RayTaskError) else None
            if isinstance(cause, ValueError):
                raise ValueError(str(cause)) from error
            raise InfrastructureError(f"AsyncVLLM: {type(error).__name__}: {cause or error}") from error


def _vllm_module(name: str) -> Any:
    """Return a module of vLLM, which is imported when it is used."""
    try:
        return importlib.import_module(f"vllm.{name}")
    except ImportError:
        raise MissingExtra("Generating with vLLM", "vllm", "vllm") from None


def _output_kind(on_ids: OnIds | None) -> Any:
    """Return the output kind of a request: pieces if there is a callback for them, else the whole answer."""
    kinds = _vllm_module("sampling_params").RequestOutputKind
    return kinds.FINAL_ONLY if on_ids is None else kinds.DELTA


@contextlib.contextmanager
def _errors() -> Generator[None]:
    """Turn errors of vLLM into ours."""
    from vllm.exceptions import GracefulHTTPError, VLLMClientError, VLLMServerError  # pyright: ignore

    try:
        yield
    except VLLMClientError as error:
        raise ValueError(str(error)) from error
    except (VLLMServerError, GracefulHTTPError) as error:
        raise InfrastructureError(f"vLLM: {type(error).__name__}: {error}") from error


def _answer_of(output: Any) -> _Output:
    """Return the tokens of a `RequestOutput`."""
    (answer,) = output.outputs
    ids, each = list(answer.token_ids), answer.logprobs
    log_probs = None
    if each is not None:
        firsts = each.start_indices  # of each position; the sampled token is the first
        log_probs = [min(0.0, each.logprobs[first]) for first in firsts]
        if len(log_probs) != len(ids):
            raise InfrastructureError(f"vLLM gave {len(log_probs)} log-probabilities of {len(ids)} tokens")
    labels = [span.version for span in answer.weight_versions or () if span.end > span.start]
    return _Output(ids, log_probs, answer.finish_reason or "abort", labels)


def _joined(before: _Output, piece: _Output) -> _Output:
    """Append a piece to an answer; the finish and the version of the piece become those of the answer."""
    if not before.ids:
        return piece
    log_probs = None
    if before.log_probs is not None and piece.log_probs is not None:
        log_probs = before.log_probs + piece.log_probs
    return _Output(before.ids + piece.ids, log_probs, piece.finish, piece.labels)


def logprobs_mode(engine: Any) -> str | None:
    """Return the `logprobs_mode` of a vLLM engine; None if it is unknown.

    Args:
        engine: An `AsyncLLM`, a `vllm.LLM`, or TorchRL's `AsyncVLLM`.
    """
    inner = getattr(engine, "llm_engine", engine)  # of a `vllm.LLM`
    places = (getattr(inner, "model_config", None), getattr(engine, "engine_args", None))
    return next((mode for one in places if (mode := getattr(one, "logprobs_mode", None))), None)


def is_vllm(model: Any) -> bool:
    """Return True for an engine that `VLLMEngine` takes, without importing vLLM.

    Args:
        model: An object of any class.
    """
    return bool(_kinds_of(model) & {("vllm", "AsyncLLM"), ("vllm", "LLM"), ("torchrl", "AsyncVLLM")})


def _kinds_of(model: Any) -> set[tuple[str, str]]:
    """Return the package and the name of each class of an object."""
    return {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(model).__mro__}


def _server_of(engine: Any) -> _Server:
    """Return the `_Server` of an engine."""
    kinds = _kinds_of(engine)
    if ("vllm", "AsyncLLM") in kinds:
        return _InProcess(engine)
    if ("vllm", "LLM") in kinds:
        return _Offline(engine)
    if ("torchrl", "AsyncVLLM") in kinds:
        return _Actors(engine)
    raise TypeError(f"engine is vLLM's AsyncLLM or LLM, or TorchRL's AsyncVLLM; got {type(engine).__name__}")


def saved_generation_config(model: str) -> Any:
    """Return the `generation_config.json` of a model as transformers reads it; None if there is none.

    Args:
        model: Folder or name of the model.
    """
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(model)
    except OSError:
        return None


def structural_tag(
    parser: ToolCallParser | str | None,
    tools: Tools,
    tool_choice: Literal["auto", "required"],
    parallel: bool,
) -> Any:
    """Return the constraint on tool calls as vLLM's `structured_outputs`.

    Args:
        parser: The format of the calls, or its name.
        tools: Tools that may be called.
        tool_choice: "auto", or "required" for at least one call.
        parallel: Allow several calls in an answer.

    Raises:
        ValueError: If there is no parser, or its format has no structural tag.
        MissingExtra: If vLLM is not installed.
    """
    if parser is None:
        raise ValueError("tool_choice needs parser=, the format in which the model calls tools")
    tag = get_parser(parser).structural_tag(tools, tool_choice=tool_choice, parallel=parallel)
    if tag is None:
        raise ValueError(
            f"the format {get_parser(parser).name!r} has no structural tag; leave tool_choice out"
        )
    return _vllm_module("sampling_params").StructuredOutputsParams(structural_tag=json.dumps(tag))


def without_padding(pad: int, vocab_size: int | None) -> dict[int, float] | None:
    """Return a bias that forbids the pad token, which losses drop; None if the model has no such token.

    Args:
        pad: Id of the pad token.
        vocab_size: Number of ids that the model has, or None if it is unknown.
    """
    return {pad: _FORBID} if vocab_size is None or pad < vocab_size else None
