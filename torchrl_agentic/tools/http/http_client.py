"""HTTP connections to checked addresses, and `PageReader`, which converts web pages to text.

The layout of a hostile page of a few hundred kilobytes can take gigabytes (a wide table of many rows), and
its parser is C code on untrusted data. So each page is converted in its own sandbox, without a network, with
no files of the host except Python and its packages, and with limits on memory and time. If no sandbox works,
a process with these limits and the rights of the trainer converts it.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import logging
import socket
import ssl
import threading
import warnings
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from ssl import SSLContext
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import httpcore
import httpx

from torchrl_agentic.errors import InfrastructureError, MissingExtra, SandboxError, ToolError
from torchrl_agentic.sandbox.cancellation import run_to_completion
from torchrl_agentic.tools.base import ToolContext
from torchrl_agentic.tools.http.policy import Address, HostPolicy, parse_address, plain
from torchrl_agentic.tools.per_loop import PerLoop

if TYPE_CHECKING:
    from torchrl_agentic.sandbox import Sandbox

logger = logging.getLogger(__name__)

MAX_MEMORY_BYTES = 1 << 29
MAX_SECONDS = 4
"""Processor time for one page, and about its wall time, in seconds."""
AT_ONCE = 4

CONVERT = "from inscriptis import get_text\ntext = get_text(html)\n"
"""Python code that sets the string `text` from the string `html`."""
_INSIDE = """\
with open("page.html", "rb") as file:
    html = file.read().decode("utf-8", "replace")
{convert}
with open("page.txt", "wb") as file:
    file.write(text[:{limit}].encode("utf-8", "replace"))
"""
_LIMITS = f"""\
import resource
for limit, value in ((resource.RLIMIT_AS, {MAX_MEMORY_BYTES}), (resource.RLIMIT_CPU, {MAX_SECONDS})):
    try:
        resource.setrlimit(limit, (value, value))
    except (ValueError, OSError):
        pass
"""
"""Python code that sets the limits where no sandbox does."""
_choosing = threading.Lock()


def require() -> None:
    """Check that pages can be converted.

    Raises:
        MissingExtra: If the library `inscriptis` is not installed.
    """
    if importlib.util.find_spec("inscriptis") is None:
        raise MissingExtra("HttpTool(html=...)", "inscriptis", "html")


class PageReader:
    """Converts web pages to text, a few at a time on each event loop.

    Each page has its own sandbox, of the strongest kind that works on this machine, so that a page that takes
    over its parser cannot read other pages or the host. If no sandbox works, this is logged once, and
    processes with limits, but with all rights of this one, convert the pages.

    Args:
        convert: Python code that sets `text` from `html`.
    """

    def __init__(self, convert: str = CONVERT) -> None:
        self._convert = convert
        self._places = PerLoop[asyncio.Semaphore]()

    async def text_of(self, html: str, limit: int) -> str | None:
        """Return the text of a page, or None if the conversion fails or exceeds its limits.

        Args:
            html: Source of the page.
            limit: Most characters to return.
        """
        program = _INSIDE.format(convert=self._convert, limit=limit)
        async with self._places.get(lambda: asyncio.Semaphore(AT_ONCE)):
            sandbox = (await asyncio.to_thread(_template)).fresh()
            text = await _converted(sandbox, program, html.encode("utf-8", "replace"), 4 * limit)
        return None if text is None else text.decode("utf-8", "replace")


def _template() -> Sandbox:
    """Return the template of the sandboxes for pages."""
    with _choosing:
        return page_sandbox()


@functools.cache
def page_sandbox() -> Sandbox:
    """Return the sandbox whose copies read web pages; if none works here, one without isolation, and warn."""
    from torchrl_agentic.sandbox import (
        ForkServerSandbox,
        ResourceLimits,
        UnsafeSubprocessSandbox,
        default_sandbox,
    )

    limits = ResourceLimits(
        cpu_seconds=MAX_SECONDS, wall_seconds=MAX_SECONDS + 1, memory_bytes=MAX_MEMORY_BYTES, max_processes=4
    )
    try:
        sandbox = default_sandbox(limits)
    except SandboxError as error:
        logger.warning("web pages are converted with limits, but without a sandbox: %s", error)
        return UnsafeSubprocessSandbox(limits)
    if isinstance(sandbox, ForkServerSandbox):
        return ForkServerSandbox(limits, preload=("inscriptis",))
    return sandbox


async def _converted(sandbox: Sandbox, program: str, html: bytes, max_bytes: int) -> bytes | None:
    from torchrl_agentic.repl import ForkServerRepl
    from torchrl_agentic.sandbox import ForkServerSandbox

    try:
        if not sandbox.isolated:
            with warnings.catch_warnings(action="ignore"):  # the log has said once that nothing is isolated
                await sandbox.open()
        async with sandbox:
            await sandbox.write_file("page.html", html)
            if isinstance(sandbox, ForkServerSandbox):  # its interpreter has the library loaded already
                async with ForkServerRepl(sandbox) as repl:
                    done = (await repl.execute(program, timeout=MAX_SECONDS + 1)).status == "ok"
            else:
                code = program if sandbox.isolated else _LIMITS + program
                done = (await sandbox.run((*sandbox.python_argv, "-c", code))).exit_code == 0
            return await sandbox.read_file("page.txt", max_bytes) if done else None
    except SandboxError as error:
        logger.warning("a web page could not be converted in a sandbox: %s", error)
    except OSError:
        pass  # the page or its text is too large for the sandbox
    return None


Resolver: TypeAlias = Callable[[str, int], Sequence[str]]
"""Returns the addresses of a host, or raises `socket.gaierror`. It runs on a thread, so it may block."""

MAX_ADDRESSES = 4
"""Most addresses of a host that are tried, one after the other."""
ATTEMPT_S = 3.0
"""Seconds that an address may take to accept a connection before the next one is tried."""


class WireLimit(Exception):
    """A server has sent more bytes than a call may receive."""


@dataclass(slots=True)
class CallProgress:
    """Progress of one call.

    Attributes:
        ctx: Context of the call.
        bytes_left: Bytes that the call may still receive.
        doing: The current step, for the message of a timeout.
        connected: Whether the request opened a new connection, instead of using an idle one.
        body: The part of the body that has arrived.
    """

    ctx: ToolContext
    bytes_left: int
    doing: str = "looking up the host"
    connected: bool = False
    body: bytearray = field(default_factory=bytearray)


current: ContextVar[CallProgress] = ContextVar("progress of the HTTP call")
"""Progress of the call whose task is running: httpcore does not pass the request to its network backend."""


def look_up(host: str, port: int) -> list[str]:
    """Return the addresses of a host that the system's resolver knows.

    Args:
        host: Name of the host.
        port: The port.

    Raises:
        socket.gaierror: If there are none.
    """
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


class CountedStream(httpcore.AsyncNetworkStream):
    """A connection that counts all received bytes for the call that reads them, headers included.

    Args:
        stream: The connection.
    """

    def __init__(self, stream: httpcore.AsyncNetworkStream) -> None:
        self._stream = stream

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Read bytes, and count them.

        Args:
            max_bytes: Most bytes to read.
            timeout: Time limit in seconds, or None.

        Raises:
            WireLimit: If the call has received too many bytes.
        """
        progress = current.get()
        data = await self._stream.read(max_bytes, timeout)
        progress.bytes_left -= len(data)
        if progress.bytes_left < 0:
            raise WireLimit
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Write bytes.

        Args:
            buffer: The bytes.
            timeout: Time limit in seconds, or None.
        """
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        """Close the connection."""
        await self._stream.aclose()

    async def start_tls(
        self, ssl_context: SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        """Encrypt the connection, and check the certificate of the host.

        Args:
            ssl_context: The trusted certificates.
            server_hostname: Name of the host.
            timeout: Time limit in seconds, or None.

        Returns:
            The encrypted connection.
        """
        current.get().doing = f"agreeing on TLS with {server_hostname}"
        try:
            return CountedStream(await self._stream.start_tls(ssl_context, server_hostname, timeout))
        except BaseException:  # httpcore leaves the connection open when it is cancelled
            await asyncio.shield(self._stream.aclose())
            raise

    def get_extra_info(self, info: str) -> Any:
        """Return a property of the connection; see httpcore."""
        return self._stream.get_extra_info(info)


class PinnedBackend(httpcore.AsyncNetworkBackend):
    """Connects only to addresses that a policy permits.

    Args:
        policy: The policy.
        resolver: Resolves names.
        network: Opens the connections; None: anyio.
    """

    def __init__(
        self,
        policy: HostPolicy,
        resolver: Resolver = look_up,
        network: httpcore.AsyncNetworkBackend | None = None,
    ) -> None:
        self._policy = policy
        self._resolver = resolver
        self._network = network or cast("httpcore.AsyncNetworkBackend", httpcore.AnyIOBackend())

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to one of the addresses of a host.

        Args:
            host: Name or address of the host.
            port: The port.
            timeout: Ignored; the call has its own time limit.
            local_address: Address to connect from, or None.
            socket_options: Options of the socket, or None.

        Returns:
            The connection.

        Raises:
            ToolError: If one of its addresses is not permitted, or it has none.
            httpcore.ConnectError, httpcore.ConnectTimeout: If no address accepts the connection.
        """
        addresses = await self._addresses(host, port)
        current.get().doing = f"connecting to {host}"
        for index, address in enumerate(addresses):
            last = index == len(addresses) - 1
            try:
                stream = await self._network.connect_tcp(
                    str(address), port, None if last else ATTEMPT_S, local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                if last:
                    raise
                continue
            await self._check_peer(stream, address)
            current.get().connected = True
            current.get().doing = f"waiting for the response of {host}"
            return CountedStream(stream)
        raise AssertionError("_addresses returns at least one address")

    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.AsyncNetworkStream:
        """Raise ToolError: no URL leads to a socket in the file system.

        Args:
            path: Path of the socket.
            timeout: Time limit in seconds, or None.
            socket_options: Options of the socket, or None.
        """
        raise ToolError("sockets in the file system cannot be reached over HTTP")

    async def sleep(self, seconds: float) -> None:
        """Sleep some seconds."""
        await asyncio.sleep(seconds)

    async def _addresses(self, host: str, port: int) -> list[Address]:
        literal = parse_address(host)
        texts = [host] if literal is not None else await self._resolve(host, port)
        addresses = [parse_address(text) for text in dict.fromkeys(texts)]
        if not addresses:
            raise ToolError(f"host {host!r} has no address")
        found: list[Address] = []
        for address in addresses:
            if address is None or not self._policy.permits(host, port, address):
                raise ToolError(
                    f"host {host!r} has an address that is not public; only public addresses are allowed"
                )
            found.append(address)
        return found[:MAX_ADDRESSES]

    async def _resolve(self, host: str, port: int) -> Sequence[str]:
        current.get().doing = f"looking up {host}"
        try:
            return await current.get().ctx.in_thread(self._resolver, host, port)
        except socket.gaierror as error:
            if error.errno == socket.EAI_AGAIN:
                raise ToolError(
                    f"host {host!r} cannot be looked up at the moment: its name server does not respond"
                ) from None
            raise ToolError(f"host {host!r} does not exist: the name has no address") from None
        except UnicodeError:
            raise ToolError(f"host {host!r} cannot be looked up: a part of the name is too long") from None
        except OSError as error:
            raise InfrastructureError(f"this machine cannot look up names: {error}") from error

    async def _check_peer(self, stream: httpcore.AsyncNetworkStream, address: Address) -> None:
        peer = stream.get_extra_info("server_addr")
        reached = parse_address(str(peer[0])) if peer else None
        if reached is None or plain(reached) != plain(address):
            await stream.aclose()
            raise InfrastructureError(f"connected to {reached} instead of {address}")


KEEP_ALIVE_S = 2.0
"""Seconds that an idle connection is kept; servers close theirs after 5 s or later."""
MAX_IDLE = 20


class _ResponseBody(httpx.AsyncByteStream):
    """Body of a response, whose end gives its connection back or closes it."""

    def __init__(
        self,
        response: httpcore.Response,
        connection: httpcore.AsyncHTTPConnection,
        give_back: Callable[[httpcore.AsyncHTTPConnection], Awaitable[None]],
    ) -> None:
        self._response, self._connection, self._give_back = response, connection, give_back

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._response.aiter_stream():
            yield chunk

    async def aclose(self) -> None:
        is_clean = not has_unread_data(self._response)
        try:
            await self._response.aclose()
        except BaseException:
            await run_to_completion(self._connection.aclose())
            raise
        if is_clean and self._connection.is_idle():
            await run_to_completion(self._give_back(self._connection))
        else:
            await run_to_completion(self._connection.aclose())


def has_unread_data(response: httpcore.Response) -> bool:
    """Return whether data follows a response, which would be read as the response to the next request.

    Reads private attributes of httpcore; if they are missing, no connection is used twice.
    """
    try:
        connection = cast("Any", response.stream)._connection
        return bool(connection._h11_state.trailing_data[0])
    except AttributeError:
        return True


class PinnedTransport(httpx.AsyncBaseTransport):
    """Sends requests over connections of a `PinnedBackend`. The exceptions are those of httpcore.

    It is used without an `httpx.AsyncClient`, which would share cookies between trajectories and parse
    redirects before we check them; and without the pool of httpcore, which keeps the connection of a request
    that is cancelled at some moments open for ever. A connection serves one request at a time here, and is
    closed if that ends by an exception.

    Args:
        backend: Opens the connections.
        ssl_context: The trusted certificates.
    """

    def __init__(self, backend: PinnedBackend, ssl_context: ssl.SSLContext) -> None:
        self._backend, self._ssl_context = backend, ssl_context
        self._idle: deque[tuple[httpcore.Origin, httpcore.AsyncHTTPConnection]] = deque()
        self._is_closed = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request, and return the response before its body is read."""
        assert isinstance(request.stream, httpx.AsyncByteStream)
        url = request.url
        sent = httpcore.Request(
            method=request.method,
            url=httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path),
            headers=request.headers.raw,
            content=request.stream,
        )
        connection = await self._connection(sent.url.origin)
        try:
            response = await connection.handle_async_request(sent)
        except BaseException:
            await run_to_completion(connection.aclose())
            raise
        stream = _ResponseBody(response, connection, functools.partial(self._give_back, sent.url.origin))
        return httpx.Response(response.status, headers=response.headers, stream=stream)

    async def _connection(self, origin: httpcore.Origin) -> httpcore.AsyncHTTPConnection:
        """Return an idle connection, or a new one, and close those that are idle for too long."""
        found: httpcore.AsyncHTTPConnection | None = None
        useless: list[httpcore.AsyncHTTPConnection] = []
        for _ in range(len(self._idle)):
            known, connection = self._idle.popleft()
            if connection.has_expired() or not connection.is_available():
                useless.append(connection)
            elif known == origin and found is None:
                found = connection
            else:
                self._idle.append((known, connection))
        try:
            for connection in useless:
                await run_to_completion(connection.aclose())
        except BaseException:
            if found is not None:
                await run_to_completion(found.aclose())
            raise
        return found or httpcore.AsyncHTTPConnection(
            origin,
            ssl_context=self._ssl_context,
            keepalive_expiry=KEEP_ALIVE_S,
            network_backend=self._backend,
        )

    async def _give_back(self, origin: httpcore.Origin, connection: httpcore.AsyncHTTPConnection) -> None:
        """Keep a connection for another request to its origin; close the oldest if there are many."""
        self._idle.append((origin, connection))
        while len(self._idle) > (0 if self._is_closed else MAX_IDLE):
            await self._idle.popleft()[1].aclose()

    async def aclose(self) -> None:
        """Close all idle connections; the others close with their requests."""
        self._is_closed = True
        while self._idle:
            await run_to_completion(self._idle.popleft()[1].aclose())


def make_ssl_context(ca_file: str | None) -> ssl.SSLContext:
    """Return a context that trusts the certificates of certifi or of a file, and ignores the environment.

    Args:
        ca_file: The file; None: certifi.

    Raises:
        OSError: If the file cannot be read.
    """
    return httpx.create_ssl_context(
        verify=True if ca_file is None else ssl.create_default_context(cafile=ca_file), trust_env=False
    )
