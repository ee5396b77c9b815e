"""Web pages as readable text, made by the `inscriptis` library in a sandbox, where this machine has one.

A page of a few hundred kilobytes can be written so that its layout takes gigabytes (a wide table of many
rows), and its parser is C code that reads what strangers wrote. So each page is read in a sandbox of its own:
without a network, without files of the host but Python and its packages, with limits on memory and time.
Where no sandbox works, a process with these limits reads it, with the rights of the trainer.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import logging
import socket
import ssl
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from ssl import SSLContext
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import httpcore
import httpx

from torchrl_agentic.errors import InfrastructureError, MissingExtra, SandboxError, ToolError
from torchrl_agentic.tools.base import ToolContext
from torchrl_agentic.tools.http.policy import Address, HostPolicy, parse_address, plain

if TYPE_CHECKING:
    from torchrl_agentic.sandbox import Sandbox

logger = logging.getLogger(__name__)

MAX_MEMORY_BYTES = 1 << 29
MAX_SECONDS = 4
"""Of a page: processor time, and about the same by the clock."""
AT_ONCE = 4

CONVERT = "from inscriptis import get_text\ntext = get_text(html)\n"
"""Python code that makes the string `text` of the string `html`."""
_INSIDE = """\
with open("page.html", "rb") as file:
    html = file.read().decode("utf-8", "replace")
{convert}
with open("page.txt", "wb") as file:
    file.write(text[:{limit}].encode("utf-8", "replace"))
"""
_CHILD = f"""\
import sys
try:
    import resource
    for limit, value in ((resource.RLIMIT_AS, {MAX_MEMORY_BYTES}), (resource.RLIMIT_CPU, {MAX_SECONDS})):
        try:
            resource.setrlimit(limit, (value, value))
        except (ValueError, OSError):
            pass
except ImportError:
    pass
html = sys.stdin.buffer.read().decode("utf-8", "replace")
{{convert}}
sys.stdout.buffer.write(text[:{{limit}}].encode("utf-8", "replace"))
"""
_choosing = threading.Lock()


def require() -> None:
    """Make sure that pages can be converted.

    Raises:
        MissingExtra: the library is not installed.
    """
    if importlib.util.find_spec("inscriptis") is None:
        raise MissingExtra("HttpTool(html=...)", "inscriptis", "html")


class PageReader:
    """Converts pages, a few at a time. Belongs to one event loop.

    Each page is read in a sandbox of its own, of the strongest kind that works on this machine, so a page
    that takes over its parser learns nothing of another page, nor of the host. Where none works, a warning
    says so once, and processes that have limits, but all rights of this one, read them.

    Args:
        convert: Python code that makes `text` of `html`.
    """

    def __init__(self, convert: str = CONVERT) -> None:
        self._convert = convert
        self._places = asyncio.Semaphore(AT_ONCE)

    async def text_of(self, html: str, limit: int) -> str | None:
        """Return the first `limit` characters of a page's text; None where it cannot be had within bounds."""
        data = html.encode("utf-8", "replace")
        async with self._places:
            sandbox = await asyncio.to_thread(_template)
            if sandbox is None:
                text = await _in_process(_CHILD.format(convert=self._convert, limit=limit), data)
            else:
                program = _INSIDE.format(convert=self._convert, limit=limit)
                text = await _in_sandbox(sandbox.fresh(), program, data, 4 * limit)
        return None if text is None else text.decode("utf-8", "replace")


def _template() -> Sandbox | None:
    """Return what sandboxes for pages are made from; None where none works."""
    with _choosing:
        return _found()


@functools.cache
def _found() -> Sandbox | None:
    from torchrl_agentic.sandbox import ForkServerSandbox, ResourceLimits, default_sandbox

    limits = ResourceLimits(
        cpu_seconds=MAX_SECONDS, wall_seconds=MAX_SECONDS + 1, memory_bytes=MAX_MEMORY_BYTES, max_processes=4
    )
    try:
        sandbox = default_sandbox(limits)
    except SandboxError as error:
        logger.warning("web pages are read with limits, but without a sandbox: %s", error)
        return None
    if isinstance(sandbox, ForkServerSandbox):
        return ForkServerSandbox(limits, preload=("inscriptis",))
    return sandbox


async def _in_sandbox(sandbox: Sandbox, program: str, html: bytes, max_bytes: int) -> bytes | None:
    from torchrl_agentic.repl import ForkServerRepl
    from torchrl_agentic.sandbox import ForkServerSandbox

    try:
        async with sandbox:
            await sandbox.write_file("page.html", html)
            if isinstance(sandbox, ForkServerSandbox):  # an interpreter is there, with the library loaded
                async with ForkServerRepl(sandbox) as repl:
                    done = (await repl.execute(program, timeout=MAX_SECONDS + 1)).status == "ok"
            else:
                done = (await sandbox.run((*sandbox.python_argv, "-c", program))).exit_code == 0
            return await sandbox.read_file("page.txt", max_bytes) if done else None
    except SandboxError as error:
        logger.warning("a web page could not be read in a sandbox: %s", error)
    except OSError:
        pass  # the page, or its text, is more than the sandbox takes
    return None


async def _in_process(program: str, html: bytes) -> bytes | None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-c", program,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL, env={"LANG": "C.UTF-8"},
    )  # fmt: skip
    try:
        async with asyncio.timeout(MAX_SECONDS + 1):
            out, _ = await process.communicate(html)
    except (TimeoutError, ConnectionError):
        return None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await asyncio.shield(process.wait())
    return out if process.returncode == 0 else None


Resolver: TypeAlias = Callable[[str, int], Sequence[str]]
"""The addresses of a host. It may block: it runs on a thread. `socket.gaierror`: it knows none."""

MAX_ADDRESSES = 4
"""How many addresses of a host are tried, one after the other."""
ATTEMPT_S = 3.0
"""How long an address may take to answer before the next one is tried."""


class WireLimit(Exception):
    """A server has sent more bytes than a call may take."""


@dataclass(slots=True)
class Progress:
    """How far one call has come.

    doing: for the sentence that says where it stopped. connected: whether its request made a connection, and
    did not find one that was kept. body: what has arrived.
    """

    ctx: ToolContext
    bytes_left: int
    doing: str = "looking up the host"
    connected: bool = False
    body: bytearray = field(default_factory=bytearray)


current: ContextVar[Progress] = ContextVar("progress of the HTTP call")
"""httpcore hands a backend neither the request nor anything of ours, but calls it in the task of the call."""


def look_up(host: str, port: int) -> list[str]:
    """Ask the system's resolver."""
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


class CountedStream(httpcore.AsyncNetworkStream):
    """A connection whose bytes count for the call that reads them: headers, framing and all.

    spoiled: it is not to be used for another request.
    """

    def __init__(self, stream: httpcore.AsyncNetworkStream) -> None:
        self._stream = stream
        self.spoiled = False

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Read, and count.

        Raises:
            WireLimit: it is more than the call may take.
        """
        progress = current.get()
        data = await self._stream.read(max_bytes, timeout)
        progress.bytes_left -= len(data)
        if progress.bytes_left < 0:
            raise WireLimit
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Write."""
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        """Close."""
        await self._stream.aclose()

    async def start_tls(
        self, ssl_context: SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        """Encrypt; the certificate must be that of the host."""
        current.get().doing = f"agreeing on TLS with {server_hostname}"
        try:
            return CountedStream(await self._stream.start_tls(ssl_context, server_hostname, timeout))
        except BaseException:  # httpcore leaves the connection open where it is cancelled
            await asyncio.shield(self._stream.aclose())
            raise

    def get_extra_info(self, info: str) -> Any:
        """Say what the connection knows of itself."""
        if info == "is_readable" and self.spoiled:
            return True  # which tells the pool not to use an idle connection again
        return self._stream.get_extra_info(info)


class PinnedBackend(httpcore.AsyncNetworkBackend):
    """Connects to what a policy permits, and to nothing else. network: what makes the connections."""

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
        """Connect to a host at one of its addresses.

        Raises:
            ToolError: one of its addresses is not permitted, or it has none.
            httpcore.ConnectError, httpcore.ConnectTimeout: none of them answers.
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
            current.get().doing = f"waiting for the answer of {host}"
            return CountedStream(stream)
        raise AssertionError("no host has no addresses")

    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.AsyncNetworkStream:
        """Refuse: no URL leads to a socket in the file system."""
        raise ToolError("sockets in the file system are not reached over HTTP")

    async def sleep(self, seconds: float) -> None:
        """Sleep."""
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
                    f"host {host!r} has an address that is not public; only the internet can be reached"
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
                    f"host {host!r} cannot be looked up at the moment: its name server does not answer"
                ) from None
            raise ToolError(f"there is no host {host!r}: the name has no address") from None
        except UnicodeError:
            raise ToolError(f"host {host!r} cannot be looked up: a part of the name is too long") from None
        except OSError as error:
            raise InfrastructureError(f"names cannot be looked up: {error}") from error

    async def _check_peer(self, stream: httpcore.AsyncNetworkStream, address: Address) -> None:
        peer = stream.get_extra_info("server_addr")
        reached = parse_address(str(peer[0])) if peer else None
        if reached is None or plain(reached) != plain(address):
            await stream.aclose()
            raise InfrastructureError(f"connected to {reached} instead of {address}")


KEEP_ALIVE_S = 2.0
"""How long an idle connection is kept; servers close theirs after 5 s and more."""
MAX_IDLE = 20


class _Stream(httpx.AsyncByteStream):
    def __init__(self, response: httpcore.Response) -> None:
        self._response = response

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._response.aiter_stream():
            yield chunk

    async def aclose(self) -> None:
        if _has_left_over(self._response):
            cast("CountedStream", self._response.extensions["network_stream"]).spoiled = True
        await self._response.aclose()


def _has_left_over(response: httpcore.Response) -> bool:
    """Whether a server has sent more than its answer, which would be read as the answer to the next request.

    httpcore does not say, so this looks inside; where that has changed no connection is used twice.
    """
    try:
        connection = cast("Any", response.stream)._stream._connection
        return bool(connection._h11_state.trailing_data[0])
    except AttributeError:
        return True


class PinnedTransport(httpx.AsyncBaseTransport):
    """Sends requests over connections of a `PinnedBackend`. The exceptions are those of httpcore.

    It is used without an `httpx.AsyncClient` around it, which would keep cookies from one trajectory to
    another and read where redirects lead before we do.
    """

    def __init__(self, backend: PinnedBackend, ssl_context: ssl.SSLContext) -> None:
        # How many there may be at once is for a rate limiter to say; waiting here would count as slowness.
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=ssl_context,
            max_connections=None,
            max_keepalive_connections=MAX_IDLE,
            keepalive_expiry=KEEP_ALIVE_S,
            network_backend=backend,
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request; its body and that of the answer are streams."""
        assert isinstance(request.stream, httpx.AsyncByteStream)
        url = request.url
        response = await self._pool.handle_async_request(
            httpcore.Request(
                method=request.method,
                url=httpcore.URL(
                    scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
                ),
                headers=request.headers.raw,
                content=request.stream,
            )
        )
        return httpx.Response(response.status, headers=response.headers, stream=_Stream(response))

    async def aclose(self) -> None:
        """Close what is idle, and break off what is not."""
        await self._pool.aclose()


class Client:
    """What a tool holds on one event loop. Calls of all trajectories share connections, and nothing else."""

    def __init__(self, backend: PinnedBackend, ssl_context: ssl.SSLContext) -> None:
        self.pages = PageReader()
        self.transport = PinnedTransport(backend, ssl_context)

    async def aclose(self) -> None:
        """Close the connections."""
        await self.transport.aclose()


def make_ssl_context(ca_file: str | None) -> ssl.SSLContext:
    """Make what checks certificates: those of certifi, or those of a file; nothing from the environment.

    Raises:
        OSError: the file cannot be read.
    """
    return httpx.create_ssl_context(
        verify=True if ca_file is None else ssl.create_default_context(cafile=ca_file), trust_env=False
    )
