"""What went wrong on the network, in a sentence for the model.

Nearly all of it is an ERROR: the model chose the URL, and what a reward leaves out (INFRA) must not be its to
choose. Only what this machine itself lacks is nobody's fault.
"""

from __future__ import annotations

import errno
import json
import re
import ssl
import zlib
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import httpcore
import httpx

from torchrl_agentic.errors import InfrastructureError, ToolError
from torchrl_agentic.messages import JSON, fields_of
from torchrl_agentic.text import shorten
from torchrl_agentic.tools.http.http_client import WireLimit, current
from torchrl_agentic.tools.http.policy import HostPolicy, Target

MAX_CAUSES = 10

_OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL})
_AWAY = frozenset({errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN})


def explained(error: Exception, host: str, port: int) -> ToolError | InfrastructureError:
    """Give the exception that says what became of a request."""
    where = f"{host}:{port}"
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return _failure(
                "certificate", f"the certificate of {where} is not accepted: {cause.verify_message}"
            )
        if isinstance(cause, ssl.SSLError):
            return _failure("tls", f"{where} does not speak TLS as it should; try http:// if it is meant to")
        if isinstance(cause, ConnectionRefusedError):
            return _failure("refused", f"nothing listens at {where}: the connection was refused")
        if isinstance(cause, OSError) and cause.errno in _OURS:
            return InfrastructureError(f"no connection can be made from here: {cause.strerror}")
        if isinstance(cause, OSError) and cause.errno in _AWAY:
            return _failure("unreachable", f"{host} cannot be reached from here")
    match error:
        case httpcore.ConnectError() | httpcore.ConnectTimeout():
            return _failure("unreachable", f"{where} does not answer")
        case httpcore.RemoteProtocolError() if "disconnected" in str(error):
            return _failure("no answer", f"{where} closed the connection without an HTTP answer")
        case httpcore.RemoteProtocolError() if "too long" in str(error):
            return _failure("not HTTP", f"{where} sends headers without end")
        case httpcore.RemoteProtocolError():
            return _failure("not HTTP", f"what {where} answers is not HTTP/1.1")
        case httpcore.LocalProtocolError():
            return _failure("request", f"the request cannot be sent as HTTP/1.1: {error}")
        case _:
            return _failure("broken", f"the connection to {where} broke off")


def _failure(reason: str, text: str) -> ToolError:
    return ToolError(text, {"reason": reason})


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and what led to it: httpcore and anyio wrap what the system said."""
    for _ in range(MAX_CAUSES):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


ACCEPTED = "gzip, deflate"
"""What we ask for: zlib can stop after so many bytes."""

MAX_MEMBERS = 100
"""How many gzip files in a row are read: each costs a copy of what follows."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a body ended. truncated: at our bound. problem: why it is not whole otherwise, None where it is."""

    truncated: bool = False
    problem: str | None = None


class Inflater:
    """Decompresses gzip (of several members too) and deflate (with zlib's header or without), step by step.

    finished: what follows is padding. whole: it could end here.
    """

    def __init__(self, encoding: str) -> None:
        self._is_gzip = encoding == "gzip"
        self._stream = zlib.decompressobj(31) if self._is_gzip else None
        self._members = 0
        self.finished = False
        self.whole = True

    def feed(self, data: bytes, most: int) -> bytes:
        """Give what comes of some compressed bytes, `most` bytes at most; what is over is lost.

        Raises:
            zlib.error: they are not compressed as announced.
        """
        out = b""
        while data and len(out) < most and not self.finished:
            if self._stream is None:
                # Deflate is meant to have zlib's header; some servers leave it out.
                self._stream = zlib.decompressobj(15 if data[0] & 0x0F == 8 else -15)
            self.whole = False
            out += self._stream.decompress(data, most - len(out))
            data = b""
            if self._stream.eof:
                self.whole = True
                self._members += 1
                if self._members > MAX_MEMBERS:
                    raise zlib.error("too many members")
                data = self._stream.unused_data
                # Zeros, or anything else behind the last member, are padding.
                self.finished = not (self._is_gzip and data[:1] in (b"", b"\x1f"))
                self._stream = zlib.decompressobj(31) if self._is_gzip else None
        return out


def inflater_for(content_encoding: str) -> Inflater | None:
    """Give what decompresses a body; None where it is not compressed.

    Raises:
        ToolError: it is compressed in a way we did not ask for, or more than once.
    """
    names = [name.strip().lower() for name in content_encoding.split(",")]
    match [name for name in names if name not in ("", "identity")]:
        case []:
            return None
        case ["gzip" | "x-gzip"]:
            return Inflater("gzip")
        case ["deflate"]:
            return Inflater("deflate")
        case _:
            raise ToolError(
                f"the answer is compressed as {shorten(content_encoding, 40)!a}; gzip and deflate can be read"
            )


async def read_body(
    chunks: AsyncIterator[bytes], inflater: Inflater | None, most: int, into: bytearray
) -> Ended:
    """Read a body up to `most` bytes; what has arrived is in `into` whatever happens."""
    try:
        async for chunk in chunks:
            # One more than there is room for tells a body that fits from one that does not.
            room = most + 1 - len(into)
            into += chunk if inflater is None else inflater.feed(chunk, room)
            if len(into) > most:
                del into[most:]
                return Ended(truncated=True)
    except WireLimit:
        return Ended(truncated=True)
    except zlib.error:
        return Ended(problem="the rest is not compressed as announced")
    return Ended(problem=None if inflater is None or inflater.whole else "the compressed data ends too early")


READING = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing on the server."""

OURS = frozenset(
    {
        "accept-encoding", "connection", "content-encoding", "content-length", "expect", "forwarded", "host",
        "http2-settings", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "via", "x-real-ip",
    }
)  # fmt: skip
"""Headers that frame the message, or say who is asking: never the model's."""
OURS_BY_PREFIX = ("proxy-", "x-forwarded-", "sec-")
ONLY_IF_NAMED = frozenset({"cookie", "cookie2", "metadata", "metadata-flavor"})
"""Headers that open other people's sessions, or the metadata of a cloud."""
HARMLESS = frozenset(
    {
        "accept", "accept-language", "content-language", "content-type", "if-modified-since", "if-none-match",
        "range", "user-agent",
    }
)  # fmt: skip
"""Headers that may follow a redirect to another site; any other one may be a secret."""

MAX_HEADERS = 50
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
_VALUE = re.compile(r"[\t\x20-\x7e]{0,4096}")


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. headers: with names in lower case."""

    method: str
    target: Target
    headers: Mapping[str, str]
    content: bytes | None = None


def checked_headers(value: JSON, allowed: Collection[str] | None) -> dict[str, str]:
    """Give the model's headers, names in lower case.

    allowed: the only ones, None for any but those that are ours.

    Raises:
        ToolError: one of them is not the model's to set, or is no header.
    """
    fields = fields_of(value)
    if fields is None or len(fields) > MAX_HEADERS:
        raise ToolError(f"'headers' takes an object of at most {MAX_HEADERS} names and their texts")
    headers: dict[str, str] = {}
    for name, text in fields.items():
        lower = name.lower()
        shown = ascii(shorten(name))
        if not _TOKEN.fullmatch(name):
            raise ToolError(f"{shown} is no name of a header; letters, digits and hyphens are, e.g. Accept")
        if lower in OURS or lower.startswith(OURS_BY_PREFIX):
            raise ToolError(f"header {shown} is set by the tool; leave it out")
        if (lower not in allowed) if allowed is not None else lower in ONLY_IF_NAMED:
            hint = f"; allowed: {', '.join(sorted(allowed)) or 'none'}" if allowed is not None else ""
            raise ToolError(f"header {shown} is not allowed{hint}")
        if not isinstance(text, str) or not _VALUE.fullmatch(text):
            raise ToolError(
                f"the value of header {shown} must be one line of plain ASCII text, at most 4096 characters"
            )
        headers[lower] = text.strip()
    return headers


def checked_body(args: Mapping[str, JSON], method: str) -> tuple[bytes | None, str | None]:
    """Give the body and the media type that it brings along.

    Raises:
        ToolError: there are two, or the method takes none.
    """
    body, data = args.get("body"), args.get("json")
    if body is None and data is None:
        return None, None
    if body is not None and data is not None:
        raise ToolError("give either 'body' or 'json', not both")
    if method in READING:
        raise ToolError(f"a {method} request has no body; put what you want to say into the URL")
    if data is None:
        return str(body).encode("utf-8", "replace"), "text/plain; charset=utf-8"
    try:
        return json.dumps(data).encode(), "application/json"
    except (TypeError, ValueError, RecursionError):
        raise ToolError("'json' is nested too deep, or is no JSON") from None


def redirected(ask: Ask, status: int, target: Target) -> Ask:
    """Give the request that follows a redirect, as browsers do: POST becomes GET, but for 307 and 308.

    Headers that may be secrets are dropped where it leads to another origin, and so is the body: whoever
    redirects could have it sent to anyone in our name.

    Raises:
        ToolError: it leads from https to http, or would send a body elsewhere.
    """
    if ask.target.url.scheme == "https" and target.url.scheme == "http":
        raise ToolError("it leads from https to http, where anyone could read and change what is sent")
    same = ask.target.origin == target.origin
    headers = ask.headers if same else {name: ask.headers[name] for name in ask.headers if name in HARMLESS}
    if (status == 303 and ask.method != "HEAD") or (status in (301, 302) and ask.method == "POST"):
        headers = {name: value for name, value in headers.items() if not name.startswith("content-")}
        return Ask("GET", target, headers)
    if ask.content is not None and not same:
        raise ToolError("it wants the body sent to another site; ask that site yourself if that is meant")
    return replace(ask, target=target, headers=headers)


Secrets: TypeAlias = Callable[[Ask], Mapping[str, str]]
"""The headers that go to the origin of a request and that the model does not know of."""

_NETWORK = (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException)
_CLOSED = (httpcore.ReadError, httpcore.WriteError, httpcore.RemoteProtocolError)
REDIRECTS = frozenset({301, 302, 303, 307, 308})


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back. redirects: the URLs before `url`. ended: how the body ended."""

    status: int
    url: str
    headers: httpx.Headers
    ended: Ended
    redirects: tuple[str, ...] = ()
    method: str = "GET"


async def exchange(
    transport: httpx.AsyncBaseTransport,
    ask: Ask,
    *,
    policy: HostPolicy,
    secrets: Secrets,
    max_redirects: int,
    max_bytes: int,
) -> Answer:
    """Send a request, follow where it is redirected, and read the body into `current`'s.

    Raises:
        ToolError: it may not go where it is redirected, or the network failed; the message says why.
        InfrastructureError: this machine cannot connect to anything.
    """
    redirects: list[str] = []
    while True:
        response = await _send(transport, ask, secrets)
        try:
            location = response.headers.get("location")
            if response.status_code not in REDIRECTS or location is None:
                ended = await _read(response, ask, max_bytes)
                url = str(ask.target.url)
                return Answer(
                    response.status_code, url, response.headers, ended, tuple(redirects), ask.method
                )
        finally:
            await response.aclose()
        redirects.append(str(ask.target.url))
        ask = _next(
            ask, response.status_code, location, policy, len(redirects) > max_redirects, max_redirects
        )


async def _send(transport: httpx.AsyncBaseTransport, ask: Ask, secrets: Secrets) -> httpx.Response:
    host, port = ask.target.host, ask.target.port
    progress = current.get()
    headers = {"accept": "*/*", "accept-encoding": ACCEPTED, **ask.headers, **secrets(ask)}
    while True:
        progress.doing, progress.connected = f"waiting for the answer of {host}", False
        try:
            request = httpx.Request(ask.method, ask.target.url, headers=headers, content=ask.content)
            return await transport.handle_async_request(request)
        except WireLimit:
            raise ToolError(f"{host}:{port} sends headers without end", {"reason": "not HTTP"}) from None
        except _NETWORK as error:
            # A connection that was kept may have been closed by the server in this moment: make another one.
            if not progress.connected and ask.method in READING and isinstance(error, _CLOSED):
                continue
            raise explained(error, host, port) from error


async def _read(response: httpx.Response, ask: Ask, max_bytes: int) -> Ended:
    progress = current.get()
    progress.doing = f"reading the answer of {ask.target.host}"
    # What has no body may still say how it would be compressed. It is read all the same, to its end, which
    # keeps the connection.
    bare = ask.method == "HEAD" or response.status_code in (204, 304)
    inflater = None if bare else inflater_for(response.headers.get("content-encoding", ""))
    try:
        return await read_body(response.aiter_raw(), inflater, max_bytes, progress.body)
    except _NETWORK:
        return Ended(problem="the connection broke off before the end")


def _next(ask: Ask, status: int, location: str, policy: HostPolicy, too_many: bool, most: int) -> Ask:
    """Check where a redirect leads, as strictly as what the model wrote."""
    origin = str(ask.target.url)
    shown = f"{shorten(origin, 200)} redirects to {shorten(location, 200)!a}"
    if too_many:
        raise ToolError(f"{shown}; it is not followed, {most} redirects are the most", {"reason": "redirect"})
    try:
        target = policy.target(str(ask.target.url.join(location)))
        return redirected(ask, status, target)
    except (httpx.InvalidURL, ValueError):
        raise ToolError(f"{shown}, which is no URL", {"reason": "redirect"}) from None
    except ToolError as error:
        raise ToolError(f"{shown}; that is not followed: {error}", {"reason": "redirect"}) from None
