"""Check a request of the model, send it, follow redirects, and read the body of the response.

Nearly all failures are ERROR results: the model chooses the URL, so it must not be able to cause INFRA
results, which rewards leave out. Only failures of this machine itself are INFRA.
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


def error_for(error: Exception, host: str, port: int) -> ToolError | InfrastructureError:
    """Return the exception to raise for a failed request.

    Args:
        error: Exception of httpcore.
        host: Host of the request.
        port: Port of the request.

    Returns:
        A `ToolError` with a message for the model, or an `InfrastructureError` if this machine has failed.
    """
    where = f"{host}:{port}"
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return _failure(
                "certificate", f"the certificate of {where} is not accepted: {cause.verify_message}"
            )
        if isinstance(cause, ssl.SSLError):
            return _failure("tls", f"the TLS connection to {where} failed; try http:// instead of https://")
        if isinstance(cause, ConnectionRefusedError):
            return _failure("refused", f"nothing listens at {where}: the connection was refused")
        if isinstance(cause, OSError) and cause.errno in _OURS:
            return InfrastructureError(f"this machine cannot open a connection: {cause.strerror}")
        if isinstance(cause, OSError) and cause.errno in _AWAY:
            return _failure("unreachable", f"{host} cannot be reached from this machine")
    match error:
        case httpcore.ConnectError() | httpcore.ConnectTimeout():
            return _failure("unreachable", f"{where} does not respond")
        case httpcore.RemoteProtocolError() if "disconnected" in str(error):
            return _failure("no answer", f"{where} closed the connection without an HTTP response")
        case httpcore.RemoteProtocolError() if "too long" in str(error):
            return _failure("not HTTP", f"{where} sends endless headers")
        case httpcore.RemoteProtocolError():
            return _failure("not HTTP", f"the response of {where} is not HTTP/1.1")
        case httpcore.LocalProtocolError():
            return _failure("request", f"the request cannot be sent as HTTP/1.1: {error}")
        case _:
            return _failure("broken", f"the connection to {where} was lost")


def _failure(reason: str, text: str) -> ToolError:
    return ToolError(text, {"reason": reason})


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and its causes, because httpcore and anyio wrap the system's errors."""
    for _ in range(MAX_CAUSES):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


ACCEPTED = "gzip, deflate"
"""Encodings that requests accept; zlib can decompress a bounded number of bytes of both."""

MAX_MEMBERS = 100
"""Most members of a gzip stream; each costs a copy of the rest."""


@dataclass(frozen=True, slots=True)
class BodyEnd:
    """How a body ended.

    Attributes:
        truncated: Whether it was cut at our size bound.
        problem: Another reason why it is incomplete, or None.
    """

    truncated: bool = False
    problem: str | None = None


class Inflater:
    """Decompresses gzip (also of several members) and deflate (with or without zlib's header), step by step.

    Args:
        encoding: "gzip" or "deflate".

    Attributes:
        finished: Whether everything that follows is padding.
        whole: Whether the stream may end here.
    """

    def __init__(self, encoding: str) -> None:
        self._is_gzip = encoding == "gzip"
        self._stream = zlib.decompressobj(31) if self._is_gzip else None
        self._members = 0
        self.finished = False
        self.whole = True

    def feed(self, data: bytes, most: int) -> bytes:
        """Decompress some bytes; output beyond `most` bytes is dropped.

        Args:
            data: Compressed bytes.
            most: Most bytes to return.

        Returns:
            The decompressed bytes.

        Raises:
            zlib.error: If the data is not compressed as announced.
        """
        out = b""
        while data and len(out) < most and not self.finished:
            if self._stream is None:
                # Deflate should have zlib's header, but some servers omit it.
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
                # Anything after the last member, such as zeros, is padding.
                self.finished = not (self._is_gzip and data[:1] in (b"", b"\x1f"))
                self._stream = zlib.decompressobj(31) if self._is_gzip else None
        return out


def inflater_for(content_encoding: str) -> Inflater | None:
    """Return a decompressor for a body, or None if it is not compressed.

    Args:
        content_encoding: Value of the header Content-Encoding.

    Raises:
        ToolError: If the encoding is not in `ACCEPTED`, or there are several.
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
                f"the response is compressed as {shorten(content_encoding, 40)!a}; "
                "only gzip and deflate can be read"
            )


async def read_body(
    chunks: AsyncIterator[bytes], inflater: Inflater | None, most: int, into: bytearray
) -> BodyEnd:
    """Read a body.

    Args:
        chunks: The chunks of the body.
        inflater: Decompressor, or None if the body is not compressed.
        most: Most bytes to keep.
        into: Buffer for the body; it has what has arrived even after an exception.

    Returns:
        How the body ended.
    """
    try:
        async for chunk in chunks:
            # One byte more than `most` distinguishes a body that fits from a longer one.
            room = most + 1 - len(into)
            into += chunk if inflater is None else inflater.feed(chunk, room)
            if len(into) > most:
                del into[most:]
                return BodyEnd(truncated=True)
    except WireLimit:
        return BodyEnd(truncated=True)
    except zlib.error:
        return BodyEnd(problem="the rest is not compressed as announced")
    return BodyEnd(
        problem=None if inflater is None or inflater.whole else "the compressed data ends too early"
    )


READING = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing on the server."""

OURS = frozenset(
    {
        "accept-encoding", "connection", "content-encoding", "content-length", "expect", "forwarded", "host",
        "http2-settings", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "via", "x-real-ip",
    }
)  # fmt: skip
"""Headers that frame the message or identify the client; the model must not set them."""
OURS_BY_PREFIX = ("proxy-", "x-forwarded-", "sec-")
ONLY_IF_NAMED = frozenset({"cookie", "cookie2", "metadata", "metadata-flavor"})
"""Headers that give access to other people's sessions or to the metadata of a cloud."""
HARMLESS = frozenset(
    {
        "accept", "accept-language", "content-language", "content-type", "if-modified-since", "if-none-match",
        "range", "user-agent",
    }
)  # fmt: skip
"""Headers that are sent to another site after a redirect; others may be secret."""

MAX_HEADERS = 50
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
_VALUE = re.compile(r"[\t\x20-\x7e]{0,4096}")


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A checked request.

    Attributes:
        method: Method in upper case.
        target: URL, host and port.
        headers: Headers, with names in lower case.
        content: The body, or None.
    """

    method: str
    target: Target
    headers: Mapping[str, str]
    content: bytes | None = None


def checked_headers(value: JSON, allowed: Collection[str] | None) -> dict[str, str]:
    """Return the model's headers, with names in lower case.

    Args:
        value: The argument `headers` of a call.
        allowed: Names that are allowed, in lower case; None: all but those in `OURS` and `ONLY_IF_NAMED`.

    Raises:
        ToolError: If a header is not allowed or is invalid.
    """
    fields = fields_of(value)
    if fields is None or len(fields) > MAX_HEADERS:
        raise ToolError(f"'headers' must be an object that maps at most {MAX_HEADERS} names to strings")
    headers: dict[str, str] = {}
    for name, text in fields.items():
        lower = name.lower()
        shown = ascii(shorten(name))
        if not _TOKEN.fullmatch(name):
            raise ToolError(
                f"{shown} is not a header name; use letters, digits and hyphens, e.g. Accept-Language"
            )
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
    """Return the body of a request and its media type, or two None.

    Args:
        args: Arguments of the call.
        method: Method of the request.

    Raises:
        ToolError: If there are two bodies, or the method has none.
    """
    body, data = args.get("body"), args.get("json")
    if body is None and data is None:
        return None, None
    if body is not None and data is not None:
        raise ToolError("pass either 'body' or 'json', not both")
    if method in READING:
        raise ToolError(f"a {method} request has no body; leave it out, or put its values into the URL")
    if data is None:
        return str(body).encode("utf-8", "replace"), "text/plain; charset=utf-8"
    try:
        return json.dumps(data).encode(), "application/json"
    except (TypeError, ValueError, RecursionError):
        raise ToolError("'json' is nested too deeply or is not JSON") from None


def redirected(request: HttpRequest, status: int, target: Target) -> HttpRequest:
    """Return the request that follows a redirect, as in browsers: POST becomes GET, except for 307 and 308.

    A request to another origin loses headers that may be secret. It must not have a body, because the
    redirecting server could have it sent to anyone in our name.

    Args:
        request: The redirected request.
        status: Status of the redirect.
        target: Target of the redirect.

    Raises:
        ToolError: If it leads from https to http, or would send a body to another origin.
    """
    if request.target.url.scheme == "https" and target.url.scheme == "http":
        raise ToolError("it leads from https to http, where others could read and change the data")
    same = request.target.origin == target.origin
    headers = (
        request.headers
        if same
        else {name: request.headers[name] for name in request.headers if name in HARMLESS}
    )
    if (status == 303 and request.method != "HEAD") or (status in (301, 302) and request.method == "POST"):
        headers = {name: value for name, value in headers.items() if not name.startswith("content-")}
        return HttpRequest("GET", target, headers)
    if request.content is not None and not same:
        raise ToolError(
            "the body would be sent to another site; if you want that, send a request to that site"
        )
    return replace(request, target=target, headers=headers)


Secrets: TypeAlias = Callable[[HttpRequest], Mapping[str, str]]
"""Returns the headers for the origin of a request that the model does not see."""

_NETWORK = (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException)
_CLOSED = (httpcore.ReadError, httpcore.WriteError, httpcore.RemoteProtocolError)
REDIRECTS = frozenset({301, 302, 303, 307, 308})


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A response whose body was read.

    Attributes:
        status: Status code.
        url: URL of the response.
        headers: Headers of the response.
        ended: How the body ended.
        redirects: URLs before `url`, in order.
        method: Method of the last request.
    """

    status: int
    url: str
    headers: httpx.Headers
    ended: BodyEnd
    redirects: tuple[str, ...] = ()
    method: str = "GET"


async def exchange(
    transport: httpx.AsyncBaseTransport,
    request: HttpRequest,
    *,
    policy: HostPolicy,
    secrets: Secrets,
    max_redirects: int,
    max_bytes: int,
) -> HttpResponse:
    """Send a request, follow redirects, and read the body into that of the `current` progress.

    Args:
        transport: Sends single requests.
        request: The request.
        policy: Decides which redirects are allowed.
        secrets: Returns headers that the model does not see.
        max_redirects: Most redirects to follow.
        max_bytes: Most bytes of the decompressed body.

    Returns:
        The response.

    Raises:
        ToolError: If a redirect is not allowed, or the network failed; the message explains it to the model.
        InfrastructureError: If this machine cannot connect to anything.
    """
    redirects: list[str] = []
    while True:
        response = await _send(transport, request, secrets)
        try:
            location = response.headers.get("location")
            if response.status_code not in REDIRECTS or location is None:
                ended = await _read(response, request, max_bytes)
                url = str(request.target.url)
                return HttpResponse(
                    response.status_code, url, response.headers, ended, tuple(redirects), request.method
                )
        finally:
            await response.aclose()
        redirects.append(str(request.target.url))
        request = _next(
            request, response.status_code, location, policy, len(redirects) > max_redirects, max_redirects
        )


async def _send(
    transport: httpx.AsyncBaseTransport, request: HttpRequest, secrets: Secrets
) -> httpx.Response:
    host, port = request.target.host, request.target.port
    progress = current.get()
    headers = {"accept": "*/*", "accept-encoding": ACCEPTED, **request.headers, **secrets(request)}
    while True:
        progress.doing, progress.connected = f"waiting for the response of {host}", False
        try:
            message = httpx.Request(
                request.method, request.target.url, headers=headers, content=request.content
            )
            return await transport.handle_async_request(message)
        except WireLimit:
            raise ToolError(f"{host}:{port} sends endless headers", {"reason": "not HTTP"}) from None
        except _NETWORK as error:
            # The server may have closed an idle connection at this moment: try again with a new one.
            if not progress.connected and request.method in READING and isinstance(error, _CLOSED):
                continue
            raise error_for(error, host, port) from error


async def _read(response: httpx.Response, request: HttpRequest, max_bytes: int) -> BodyEnd:
    progress = current.get()
    progress.doing = f"reading the response of {request.target.host}"
    # A response without a body may have a Content-Encoding. It is read to its end, to keep the connection.
    bare = request.method == "HEAD" or response.status_code in (204, 304)
    inflater = None if bare else inflater_for(response.headers.get("content-encoding", ""))
    try:
        return await read_body(response.aiter_raw(), inflater, max_bytes, progress.body)
    except _NETWORK:
        return BodyEnd(problem="the connection was lost before the end")


def _next(
    request: HttpRequest, status: int, location: str, policy: HostPolicy, too_many: bool, most: int
) -> HttpRequest:
    """Return the request that follows a redirect, checked as strictly as the model's own URL."""
    origin = str(request.target.url)
    shown = f"{shorten(origin, 200)} redirects to {shorten(location, 200)!a}"
    if too_many:
        raise ToolError(
            f"{shown}, which is not followed: a request may have at most {most} redirects",
            {"reason": "redirect"},
        )
    try:
        target = policy.target(str(request.target.url.join(location)))
        return redirected(request, status, target)
    except (httpx.InvalidURL, ValueError):
        raise ToolError(f"{shown}, which is not a URL", {"reason": "redirect"}) from None
    except ToolError as error:
        raise ToolError(f"{shown}, which is not followed: {error}", {"reason": "redirect"}) from None
