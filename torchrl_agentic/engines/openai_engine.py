"""`OpenAIEngine`: ask a model behind a chat completions API, of OpenAI, vLLM, SGLang, Ollama and others."""

# `openai` is optional, and servers send any JSON: `Any`.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import time
import urllib.parse
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torchrl_agentic.engines.base import ChatEngine, ContextExceeded, EngineUnusable
from torchrl_agentic.engines.completion import Completion, InvalidCompletion, api_messages
from torchrl_agentic.engines.request_gate import RequestGate
from torchrl_agentic.engines.server_events import DONE, event_data
from torchrl_agentic.engines.usage import Price, Usage
from torchrl_agentic.errors import (
    InfrastructureError,
    MissingExtra,
    check_count,
    check_seconds,
)
from torchrl_agentic.limits import Limiter, RateLimiter
from torchrl_agentic.messages import JSON, Message, fields_of
from torchrl_agentic.text import TooDeepError, read_json, shorten
from torchrl_agentic.tools.service import BUSY, Patience, ServiceError, pause_s, retry_after_s

if TYPE_CHECKING:
    from openai import AsyncOpenAI

MAX_RESPONSE_BYTES = 64 << 20
BUSY_TRIES = 20
"""Most tries of a request that the service turns away: each of them slows all requests of the engine."""
REFUSALS_IN_A_ROW = 8
"""Number of requests refused as invalid, with no answer in between, after which the engine is unusable."""
MAX_LOWERINGS = 2
"""Number of times that the bound of a request is lowered: to what the model takes, then by the prompt."""
USAGES_KEPT = 10_000
"""Number of trajectories whose usage is remembered."""
OPENAI_URL = "https://api.openai.com/v1"

_SHOWN = 500
_UNUSED = (Usage(), 0)
_OVERLOADED = BUSY | {529}
_PASSING = frozenset({408, 409, 425})
_NO_CREDIT = frozenset({"insufficient_quota", "billing_hard_limit_reached", "billing_not_active"})
_FILTERED = frozenset({"content_filter", "content_policy_violation"})
_ADVICE: Mapping[int, str] = {
    401: "check api_key",
    402: "the account has no credit left",
    403: "check that api_key may use this model",
    404: "check model and base_url, which usually ends in /v1",
    405: "check base_url, which usually ends in /v1",
}
_TOO_LONG = re.compile(
    r"context[ _](length|window|size)|maximum context|too many (input )?tokens|prompt is too long"
    r"|(input|prompt|request) (is )?longer than|exceeds? (the )?(available )?context|max_model_len",
    re.IGNORECASE,
)
_MOST = re.compile(r"cannot be greater than max_model_len=(\d+)|supports at most (\d+) completion tokens")
_CONTEXT = re.compile(r"maximum context length (?:is|of) (\d+)")
_PROMPT = re.compile(
    r"(\d+) (?:input tokens|(?:tokens )?in the (?:messages|input|prompt)|tokens from the input)"
)


class OpenAIEngine(ChatEngine):
    """Asks a model behind a chat completions API: OpenAI's, or that of vLLM, SGLang, Ollama and many others.

    Use it with `ToolCompose(tools, parser="openai")` and without a tokenizer. Trajectories have no tokens, so
    they serve evaluations and data collection, and no loss takes them.

    A request that fails in passing is made again. Status 429 and 503 slow all requests of the engine, by the
    pause that the service asks for. A service that refuses every request (wrong key, unknown model, no
    credit) raises EngineUnusable, which ends a collector at once. A conversation that is too long for the
    model ends its trajectory as truncated, and a refusal ends it with the reason "refused".

    Args:
        model: Name of the model.
        base_url: URL of the API, which usually ends in "/v1"; None: the environment variable
            OPENAI_BASE_URL, else OpenAI's.
        api_key: Key of the API; None: the environment variable OPENAI_API_KEY, which is not sent to a
            `base_url` given here unless it is OpenAI's.
        max_concurrent: Most requests at once; others wait.
        temperature: Sampling temperature; None: the service's default.
        top_p: Probability mass of the tokens that are sampled from; None: the service's default.
        seed: Seed of the sampling, if the service has one. Each request gets its own, computed from this one,
            the name of the trajectory and the turn.
        extra_body: Additional fields of each request, by the service's names.
        limiter: Limiter that the requests share with other users of the service; None: no other limit.
        price: Price of the tokens, for `usage`; None: the cost that the service reports, if it does.
            `Usage.unpriced` counts the requests whose cost is unknown.
        retries: Number of times that a request is made again after a failure other than 429 and 503.
        backoff_s: Seconds before the first retry; doubled before each following one, up to 30.
        timeout: Time limit for one try of a request, in seconds; None: no limit.
        stream: Receive answers in pieces, which keeps connections alive while a model thinks.
        reasoning_field: Field in which the reasoning of all earlier messages is sent back, such as
            "reasoning_content"; "auto": the reasoning since the last message of the user, which belongs to
            the calls in between, in the field that the service writes it in; None: it is not sent.
        headers: Additional headers of each request.
        client: An `openai.AsyncOpenAI` to use, which the caller closes; not with `base_url`, `api_key` and
            `headers`.

    Attributes:
        version: Policy version: number of updates so far.
        max_concurrent: Most requests at once.
        model: Name of the model.
        usage: Requests, tokens and cost so far.

    Raises:
        MissingExtra: If `openai` is not installed.
        ValueError: If an argument is out of range, or there is no key.
    """

    usage: Usage

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        max_concurrent: int = 64,
        temperature: float | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        extra_body: Mapping[str, JSON] | None = None,
        limiter: Limiter | None = None,
        price: Price | None = None,
        retries: int = 4,
        backoff_s: float = 0.5,
        timeout: float | None = 600.0,
        stream: bool = False,
        reasoning_field: str | None = "auto",
        headers: Mapping[str, str] | None = None,
        client: AsyncOpenAI | None = None,
    ) -> None:
        if not (isinstance(model, str) and model):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"model is the name of a model, such as 'gpt-5'; got {model!r}")
        if client is not None and not (base_url is api_key is headers is None):
            raise ValueError("client= has its own base_url, api_key and headers: set them there")
        check_count("max_concurrent", max_concurrent, optional=False)
        check_count("retries", retries, optional=False, least=0)
        check_count("seed", seed, least=0)
        check_seconds("timeout", timeout)
        self.version = 0
        self.max_concurrent = int(max_concurrent)
        self.model, self.usage = model, Usage()
        self._price, self._seed, self._stream = price, seed, stream
        self._reasoning_field = reasoning_field or None
        self._field_of_service: str | None = None
        self._openai = _imported()
        self._given = client
        self._url, self._key = _endpoint(base_url, api_key) if client is None else _endpoint_of(client)
        self._headers = dict(headers or {})
        chosen = {"temperature": temperature, "top_p": top_p}
        self._options = {name: value for name, value in chosen.items() if value is not None}
        self._extra_body = dict(extra_body or {})
        self._timeout, self._retries = timeout, int(retries)
        self._patience = Patience(first_s=backoff_s, longest_s=30.0)
        self._slots = RateLimiter(max_concurrent=self.max_concurrent)
        self._limiters: list[Limiter] = [self._slots, *([] if limiter is None else [limiter])]
        self._form = _RequestForm(self._url, stream=stream)
        self._errors = _ServiceErrors(model, self._url, self._key)
        self._reader = _AnswerReader(self._errors)
        self._links: dict[asyncio.AbstractEventLoop, _LoopConnections] = {}
        self._is_closed = False
        self._usages: dict[str, tuple[Usage, int]] = {}
        """(usage, tokens of the latest request) by trajectory."""

    def describe(self) -> str:
        """Return the class of the engine and its model."""
        return f"OpenAIEngine {self.model}"

    @property
    def sampling(self) -> dict[str, JSON]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The given sampling options, as JSON; a resumed evaluation must have the same ones."""
        options: dict[str, JSON] = {**self._options, "seed": self._seed, **self._extra_body}
        if self._reasoning_field != "auto":
            options["reasoning_field"] = self._reasoning_field or ""
        return {name: value for name, value in options.items() if value is not None}

    def usage_of(self, key: str) -> Usage:
        """Return the usage of one of the latest `USAGES_KEPT` trajectories, and an empty one for others.

        Args:
            key: Name of the trajectory.
        """
        return self._usages.get(key, _UNUSED)[0]

    def conversation_tokens(self, key: str) -> int:
        """Return the number of tokens of a conversation, prompt and answer, as of its latest response.

        Args:
            key: Name of the trajectory, one of the latest `USAGES_KEPT`; 0 for others, and if the response
                reported no usage.
        """
        return self._usages.get(key, _UNUSED)[1]

    @property
    def may_know_cost(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """True with a `price`, or if the service may report the cost, as OpenRouter does; OpenAI does not."""
        host = urllib.parse.urlsplit(self._url).hostname or ""
        return self._price is not None or not host.endswith(("openai.com", ".azure.com"))

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]],
        max_tokens: int,
        key: str,
    ) -> Message:
        """Return the next message of the model.

        Args:
            messages: The conversation, in the form of chat templates.
            tools: Descriptions of the tools, in the form of OpenAI's API.
            max_tokens: Upper bound on the tokens of the message, reasoning included.
            key: Name of the trajectory.

        Returns:
            The message. It is incomplete if the model was cut off; its calls then do not run. A refusal is in
            `Message.refusal`, reasoning in `Message.reasoning`.

        Raises:
            InfrastructureError: If the service cannot be reached, fails, stays overloaded or answers wrongly,
                or the engine is closed.
            EngineUnusable: If the service refuses every request.
            ContextExceeded: If the conversation is too long for the model.
            ValueError: If the service refuses this request.
        """
        check_count("max_tokens", max_tokens, optional=False)
        if not messages:
            raise ValueError("there are no messages; a request needs at least one")
        is_auto = self._reasoning_field == "auto"
        field = self._field_of_service if is_auto else self._reasoning_field
        payload: dict[str, Any] = {
            "model": self.model,
            "messages": api_messages(messages, reasoning_field=field, whole=not is_auto),
            **self._options,
            **({"tools": list(tools)} if tools else {}),
        }
        if self._seed is not None:
            name = f"{self._seed} {key.rpartition('@')[0] or key} {len(messages)}"
            payload["seed"] = zlib.crc32(name.encode("utf-8", "replace")) & 0x7FFFFFFF
        link = self._link()
        try:
            async with link.gate.request():
                completion = await self._with_retries(link, payload, int(max_tokens))
        except _Refused as refused:
            return Message("assistant", "", is_complete=False, refusal=str(refused))
        self._field_of_service = completion.reasoning_field or self._field_of_service
        used = Usage.of_response(completion.usage, self._price)
        self.usage += used  # pyright: ignore[reportIncompatibleVariableOverride]  it is never None
        before, _ = self._usages.pop(key, _UNUSED)
        self._usages[key] = before + used, used.tokens
        if len(self._usages) > USAGES_KEPT:
            del self._usages[next(iter(self._usages))]
        return completion.message(messages)

    async def update(self, weights: Any) -> int:
        """Count an update.

        Args:
            weights: None.

        Raises:
            ValueError: If there are weights: those of a model behind an API cannot be changed.
        """
        if weights is not None:
            raise ValueError(
                f"the weights of {self.model!r} are behind an API and cannot be updated; to train a model, "
                "sample with VLLMEngine, HTTPEngine or TransformersEngine. update(None) counts an update"
            )
        self.version += 1
        return self.version

    async def close(self) -> None:
        """End all requests with InfrastructureError, and close the connections; may be called again."""
        self._is_closed = True
        links, self._links = self._links, {}
        here = asyncio.get_running_loop()
        for loop, link in links.items():
            if loop is here:
                await link.close()
            elif loop.is_running():
                closing = asyncio.run_coroutine_threadsafe(link.close(), loop)
                with contextlib.suppress(asyncio.CancelledError):  # its loop ended meanwhile
                    await asyncio.wrap_future(closing)

    def __repr__(self) -> str:
        return f"OpenAIEngine({self.model!r}, base_url={_shown_url(self._url)!r})"

    def _link(self) -> _LoopConnections:
        """Return the connections of the running event loop."""
        if self._is_closed:
            raise InfrastructureError("the OpenAIEngine was closed; make a new one")
        loop = asyncio.get_running_loop()
        if loop not in self._links:
            self._links = {one: link for one, link in self._links.items() if not one.is_closed()}
            if self._given is None:
                client = self._openai.AsyncOpenAI(
                    base_url=self._url,
                    api_key=self._key,
                    max_retries=0,
                    default_headers=self._headers,
                    http_client=self._openai.DefaultAioHttpClient(),  # HTTPX2 searches all connections
                )
            else:
                client = self._given.with_options(max_retries=0)
            self._links[loop] = _LoopConnections(client, is_own=self._given is None)
        return self._links[loop]

    async def _with_retries(
        self, link: _LoopConnections, payload: dict[str, Any], max_tokens: int
    ) -> Completion:
        """Make a request until it is answered, or has failed for good."""
        failed = busy = lowered = 0
        while True:
            try:
                completion = await self._try(link, payload, max_tokens, may_lower=lowered < MAX_LOWERINGS)
            except _AskAgain as adapted:
                lowered += adapted.max_tokens is not None
                max_tokens = adapted.max_tokens or max_tokens
                continue
            except ServiceError as error:
                is_busy = error.reason == "busy"
                failed, busy = failed + (not is_busy), busy + is_busy
                pause = pause_s(busy if is_busy else failed, error, self._patience)
                for limiter in self._limiters:
                    if is_busy:
                        limiter.record_overload(pause)
                    else:
                        limiter.record_failure(str(error))
                if pause is None or failed > self._retries or busy >= BUSY_TRIES:
                    if error.reason == "connection" and not self._errors.n_answered:
                        raise EngineUnusable(f"{error}; check base_url and that the server runs") from None
                    raise
                if not is_busy:  # else the limiters hold all requests back
                    await asyncio.sleep(pause)
            else:
                for limiter in self._limiters:
                    limiter.record_success()
                self._errors.succeeded()
                return completion

    async def _try(
        self, link: _LoopConnections, payload: Mapping[str, Any], max_tokens: int, *, may_lower: bool
    ) -> Completion:
        """Make a request once.

        Args:
            link: The connections.
            payload: The fields of the request, but for its bound.
            max_tokens: Upper bound on the tokens of the answer.
            may_lower: Whether the bound may be lowered if it is more than the context leaves.

        Raises:
            ServiceError: If it failed.
            _AskAgain: If the service refused a form of the request that will not be used again.
            _Refused: If the service refuses to answer this conversation.
        """
        body = self._form.body(payload, max_tokens)
        openai: Any = self._openai
        async with contextlib.AsyncExitStack() as stack:
            for limiter in self._limiters:
                await stack.enter_async_context(limiter.slot())
            try:
                async with asyncio.timeout(self._timeout):
                    create = link.client.chat.completions.with_streaming_response.create
                    # The library copies arguments field by field, which takes longer than all the rest of a
                    # request; it takes extra_body as it is.
                    async with create(
                        model=self.model,
                        messages=(),
                        stream=self._stream,
                        extra_body={**body, **self._extra_body},
                        timeout=self._timeout,
                    ) as response:
                        return await self._reader.read(response)
            except openai.APIStatusError as error:
                again = None
                if error.status_code in (400, 422):
                    again = self._form.adapt(_message_of(error), body, may_lower=may_lower)
                raise again or self._errors.of_status(error) from None
            except (TimeoutError, openai.APIConnectionError) as error:
                if link.is_late(error):
                    limit = "in time" if self._timeout is None else f"within {self._timeout:g} s"
                    raise self._errors.error(f"did not answer {limit}", "timeout") from None
                what = error.__cause__ or error
                raise self._errors.error(f"cannot be reached: {what!r}", "connection") from None
            except link.transport_errors as error:
                raise self._errors.error(f"ended an answer early: {error!r}", "short") from None


class _RequestForm:
    """The form in which a service takes requests, learned from what it refuses.

    Attributes:
        bound: Name of the field with the bound on the tokens of an answer.
        asks_for_usage: Whether a stream is asked to report the usage.
    """

    def __init__(self, url: str, *, stream: bool) -> None:
        host = urllib.parse.urlsplit(url).hostname or ""
        # OpenAI's reasoning models take only the new name, many other servers only the old one.
        self.bound = "max_completion_tokens" if host.endswith("openai.com") else "max_tokens"
        self.asks_for_usage = stream

    def body(self, payload: Mapping[str, Any], max_tokens: int) -> dict[str, Any]:
        """Return the fields of a request, with its bound."""
        usage = {"stream_options": {"include_usage": True}} if self.asks_for_usage else {}
        return {**payload, self.bound: max_tokens, **usage}

    def adapt(self, text: str, body: Mapping[str, Any], *, may_lower: bool) -> _AskAgain | None:
        """Adapt to a refused form of requests; return how to ask again, or None for other refusals."""
        if "max_completion_tokens" in text and "max_tokens" in body and "nsupported" in text:
            self.bound = "max_completion_tokens"
            return _AskAgain()
        if "stream_options" in text and "stream_options" in body:
            self.asks_for_usage = False
            return _AskAgain()
        most, context, prompt = _MOST.search(text), _CONTEXT.search(text), _PROMPT.search(text)
        room = 0
        if most is not None:
            room = int(most[1] or most[2])
        elif context is not None and prompt is not None:
            room = int(context[1]) - int(prompt[1])
        return _AskAgain(room) if may_lower and 0 < room < body.get(self.bound, 0) else None


class _ServiceErrors:
    """Turns the errors of a service into exceptions of this package, which depend on its earlier answers.

    Attributes:
        n_answered: Number of requests that were answered.
    """

    def __init__(self, model: str, url: str, key: str) -> None:
        self._name, self._key = f"{model} at {_shown_url(url)}", key
        self.n_answered = self._refused_in_a_row = 0

    def succeeded(self) -> None:
        """Record an answer."""
        self.n_answered, self._refused_in_a_row = self.n_answered + 1, 0

    def error(self, what: str, reason: str, *, is_transient: bool = True) -> ServiceError:
        return ServiceError(self.text(what), reason, is_transient=is_transient)

    def text(self, what: str) -> str:
        return self._redacted(f"{self._name} {what}")

    def _redacted(self, text: str) -> str:
        return text.replace(self._key, "[api_key]") if len(self._key) >= 8 else text

    def reported(self, status: int, code: Any, text: str, param: Any, retry_after: float | None) -> Exception:
        """Return the exception for an error that the service reports."""
        what = self.text(f"responded with {status}: {text}")
        codes = {str(code)}
        if status in _OVERLOADED and not codes & _NO_CREDIT:
            return ServiceError(what, "busy", is_transient=True, retry_after=retry_after, status=status)
        if status >= 500 or status in _PASSING:
            return ServiceError(what, "server", is_transient=True, retry_after=retry_after, status=status)
        if codes & _FILTERED or (status in (400, 403) and "flagged" in text):
            return _Refused(self._redacted(text))
        if status in _ADVICE and not (status == 403 and self.n_answered):
            return EngineUnusable(f"{what}; {_ADVICE[status]}")
        if codes & _NO_CREDIT:
            return EngineUnusable(f"{what}; {_ADVICE[402]}")
        if status < 400:
            return EngineUnusable(f"{what}; {_ADVICE[405]}")
        if "context_length_exceeded" in codes or _TOO_LONG.search(text):
            return ContextExceeded(what)
        self._refused_in_a_row += 1
        is_option = isinstance(param, str) and bool(param) and not param.startswith(("messages", "input"))
        if is_option or self._refused_in_a_row >= REFUSALS_IN_A_ROW:
            return EngineUnusable(f"{what}; check the options of the engine and the tools")
        return ValueError(what)

    def of_status(self, error: Any) -> Exception:
        """Return the exception for a response whose status is an error."""
        headers = error.response.headers
        wait = retry_after_s(headers.get("retry-after"), time.time())
        if (millis := retry_after_s(headers.get("retry-after-ms"), 0.0)) is not None:
            wait = millis / 1000
        return self.reported(error.status_code, error.code, _message_of(error), error.param, wait)


class _AnswerReader:
    """Reads the answers of a service, as a whole or in pieces."""

    def __init__(self, errors: _ServiceErrors) -> None:
        self._errors = errors

    async def read(self, response: Any) -> Completion:
        """Read the answer of the service, as a whole or in pieces."""
        completion = Completion()
        is_stream = "event-stream" in response.headers.get("content-type", "")
        try:
            if is_stream:
                is_done = False
                async for data in event_data(self._bounded(response.iter_bytes())):
                    is_done = data == DONE
                    if not is_done:
                        self._add(completion, read_json(data), is_whole=False)
                if not is_done and completion.finish is None:
                    raise self._errors.error("ended an answer early", "short")
            else:
                body = bytearray()
                async for chunk in self._bounded(response.iter_bytes()):
                    body += chunk
                self._check_kind(response, body)
                self._add(completion, read_json(body), is_whole=True)
        except (InvalidCompletion, json.JSONDecodeError, UnicodeDecodeError, TooDeepError) as error:
            what = f"sent no chat completion: {shorten(str(error), _SHOWN)}"
            raise self._errors.error(what, "garbage") from None
        if completion.has_failed:
            raise self._errors.error(f"ended an answer with {completion.finish!r}", "server")
        return completion

    def _check_kind(self, response: Any, body: bytes | bytearray) -> None:
        """Raise EngineUnusable for a web page from a service that has never answered a request."""
        if not self._errors.n_answered and "html" in response.headers.get("content-type", ""):
            raise EngineUnusable(
                self._errors.text(
                    f"sent a web page ({bytes(body[:80])!r}…); check base_url, which usually ends in /v1"
                )
            )

    def _add(self, completion: Completion, data: JSON, *, is_whole: bool) -> None:
        fields = fields_of(data)
        if fields is not None and (error := fields.get("error")) and not fields.get("choices"):
            about = fields_of(error) or {}
            code = about.get("code")
            status = code if isinstance(code, int) else 500
            raise self._errors.reported(status, about.get("code"), _said(error), about.get("param"), None)
        completion.add(data, is_whole=is_whole)

    async def _bounded(self, chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
        size = 0
        async for chunk in chunks:
            size += len(chunk)
            if size > MAX_RESPONSE_BYTES:
                raise self._errors.error(
                    f"sent more than {MAX_RESPONSE_BYTES:,} bytes", "too_large", is_transient=False
                )
            yield chunk


class _AskAgain(Exception):
    """The request is made again in another form.

    Args:
        max_tokens: Bound on the answer that the service accepts; None: as before.
    """

    def __init__(self, max_tokens: int | None = None) -> None:
        super().__init__()
        self.max_tokens = max_tokens


class _Refused(Exception):
    """The service refuses to answer a conversation."""


@dataclass(slots=True)
class _LoopConnections:
    """The connections of one event loop, and the requests that run over them."""

    client: Any
    is_own: bool
    gate: RequestGate = field(default_factory=RequestGate)

    @property
    def transport_errors(self) -> tuple[type[Exception], ...]:
        """Errors of the HTTP library while the body of a response is read."""
        import httpx2  # of `openai`

        return (httpx2.HTTPError, httpx2.StreamError)

    @staticmethod
    def is_late(error: Exception) -> bool:
        """Return True for an error of a service that was reached, but did not answer in time."""
        import httpx2
        import openai

        if isinstance(error.__cause__, httpx2.ConnectTimeout):  # also, over aiohttp, a refused connection
            return False
        return isinstance(error, TimeoutError | openai.APITimeoutError)

    async def close(self) -> None:
        """End the requests, and close the connections unless they are the caller's."""
        await self.gate.close()
        if self.is_own:
            await self.client.close()


def _imported() -> Any:
    try:
        import openai
    except ImportError:
        raise MissingExtra("OpenAIEngine", "openai", "openai") from None
    return openai


def _endpoint(base_url: str | None, api_key: str | None) -> tuple[str, str]:
    """Return the URL of the API and its key."""
    url = base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"base_url is a URL such as 'http://127.0.0.1:8000/v1'; got {_shown_url(url)!r}")
    is_openai = (parts.hostname or "").endswith(".openai.com")
    if api_key is None and (base_url is None or is_openai):
        api_key = os.environ.get("OPENAI_API_KEY")
    if api_key is None and is_openai:
        raise ValueError(
            "OpenAI's API needs a key: give api_key=, or set the environment variable OPENAI_API_KEY; for "
            "another service, give base_url="
        )
    return url, api_key or "EMPTY"


def _endpoint_of(client: AsyncOpenAI) -> tuple[str, str]:
    key: Any = client.api_key
    return str(client.base_url), key if isinstance(key, str) else ""


def _shown_url(url: str) -> str:
    """Return a URL without the parts that may contain secrets."""
    parts = urllib.parse.urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


def _said(error: Any) -> str:
    """Return the message of an error that a service sent."""
    fields = fields_of(error) or {}
    text = next((found for key in ("message", "detail", "error") if (found := fields.get(key))), error)
    return shorten(text, _SHOWN)


def _message_of(error: Any) -> str:
    """Return the message of an `openai.APIStatusError`."""
    return _said(error.body if error.body is not None else error.message)
