"""TLS: the certificate must be that of the host, though the connection is made to an address."""

import asyncio
import shutil
import ssl
from dataclasses import dataclass
from pathlib import Path

import pytest
from fakes.web import WebServer, page, redirect
from helpers.limit import limit
from helpers.processes import run_program

from torchrl_agentic.errors import ToolError
from torchrl_agentic.messages import ToolResult
from torchrl_agentic.tools import HttpTool
from torchrl_agentic.tools.base import ToolContext

NAME = "secure.example"


@dataclass
class Certified:
    """A certificate for `NAME`, and a server's context. asked: the names that clients indicated."""

    file: Path
    context: ssl.SSLContext
    asked: list[str | None]


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Certified:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    key, file = folder / "key.pem", folder / "cert.pem"
    run_program(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-keyout", str(key), "-out", str(file), "-days", "2", "-subj", f"/CN={NAME}",
         "-addext", f"subjectAltName=DNS:{NAME}"],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file, key)
    asked: list[str | None] = []
    context.sni_callback = lambda socket, name, context: asked.append(name)
    return Certified(file, context, asked)


def tool_for(
    server: WebServer, certified: Certified | None, name: str = NAME, timeout: float = 5
) -> HttpTool:
    return HttpTool(
        allowed_hosts=[f"{name}:{server.port}", "127.0.0.1"],
        ca_file=str(certified.file) if certified else None,
        resolver=lambda host, port: ["127.0.0.1"],
        timeout=timeout,
    )


async def ask(tool: HttpTool, url: str) -> ToolResult:
    try:
        async with asyncio.timeout(limit(10)):
            return await tool.run({"url": url}, ToolContext("c1"))
    finally:
        await tool.teardown()


async def test_name_indication_and_certificate_are_those_of_the_name(certified: Certified):
    async with WebServer({"/": page(b"secret")}, ssl_context=certified.context) as server:
        certified.asked.clear()
        result = await ask(tool_for(server, certified), server.url(host=NAME))
        assert result.text.endswith("secret")
        assert certified.asked == [NAME]
        assert server.visits[0].headers["host"] == f"{NAME}:{server.port}"


async def test_a_certificate_for_another_name_is_refused(certified: Certified):
    async with WebServer({"/": page(b"secret")}, ssl_context=certified.context) as server:
        with pytest.raises(ToolError, match="not accepted: Hostname mismatch") as refusal:
            await ask(tool_for(server, certified, "other.example"), server.url(host="other.example"))
        assert refusal.value.detail == {"reason": "certificate"}
        assert server.visits == []


async def test_untrusted_certificate_is_rejected(certified: Certified, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(certified.file))  # the environment's word does not count
    async with WebServer({"/": page(b"secret")}, ssl_context=certified.context) as server:
        with pytest.raises(ToolError, match="not accepted: self-signed certificate"):
            await ask(tool_for(server, None), server.url(host=NAME))
        assert server.visits == []


async def test_a_redirect_from_https_to_http_is_not_followed(certified: Certified):
    async with WebServer({"/": page(b"plain")}) as plain:
        acts = {"/": redirect(plain.url(host=NAME))}
        async with WebServer(acts, ssl_context=certified.context) as server:
            both = HttpTool(
                allowed_hosts=[f"{NAME}:{server.port}", f"{NAME}:{plain.port}", "127.0.0.1"],
                ca_file=str(certified.file),
                resolver=lambda host, port: ["127.0.0.1"],
            )
            with pytest.raises(ToolError, match="from https to http"):
                await ask(both, server.url(host=NAME))
        assert plain.connections == 0


async def test_server_without_tls_is_reported_and_a_stalled_handshake_times_out():
    async with WebServer() as server:
        result = await ask(
            tool_for(server, None, timeout=0.5), server.url(host=NAME).replace("http:", "https:")
        )
        assert "while agreeing on TLS with secure.example" in result.text

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example ESMTP\r\n")
        await reader.read(100)
        writer.close()

    mail = await asyncio.start_server(talk, "127.0.0.1", 0)
    port = mail.sockets[0].getsockname()[1]
    tool = HttpTool(
        allowed_hosts=[f"{NAME}:{port}", "127.0.0.1"], resolver=lambda host, port: ["127.0.0.1"], timeout=5
    )
    with pytest.raises(ToolError, match=r"the TLS connection to .* failed"):
        await ask(tool, f"https://{NAME}:{port}/")
    mail.close()
    await mail.wait_closed()
