"""An interpreter, whose messages hold any bytes, works at each of the services."""

import sys
from collections.abc import AsyncGenerator

import pytest
import pytest_asyncio

for package in ("aiodocker", "e2b", "modal"):
    pytest.importorskip(package)
if sys.platform != "linux":
    pytest.skip("the fakes look into /proc", allow_module_level=True)

from fakes.docker import FakeDocker  # noqa: E402
from fakes.e2b import E2BServer  # noqa: E402
from fakes.modal import FakeModal  # noqa: E402

from torchrl_agentic.repl import SubprocessRepl  # noqa: E402
from torchrl_agentic.sandbox import (  # noqa: E402
    DockerSandbox,
    E2BSandbox,
    ModalSandbox,
    ResourceLimits,
    Sandbox,
)


@pytest_asyncio.fixture(params=["docker", "e2b", "modal"])
async def sandbox(request: pytest.FixtureRequest) -> AsyncGenerator[Sandbox]:
    # The fakes run commands as a user of this machine, who may have more processes than the limit.
    limits = ResourceLimits(max_processes=None)
    if request.param == "docker":
        async with FakeDocker() as daemon:
            yield DockerSandbox(limits, url=daemon.url)
    elif request.param == "e2b":
        with E2BServer() as server:
            yield E2BSandbox(limits, api_key=server.api_key, connection=server.connection)
    else:
        async with FakeModal() as fake, fake.client() as client:
            yield ModalSandbox(limits, client=client)


async def test_an_interpreter_keeps_its_state_and_prints_long_text(sandbox: Sandbox):
    async with sandbox, SubprocessRepl(sandbox) as repl:
        await repl.execute("x = 'é' * 100_000")
        result = await repl.execute("print(x)")
        assert result.stdout == "é" * 100_000 + "\n"
        stopped = await repl.execute("while True: pass", timeout=0.5)
        assert stopped.timed_out
