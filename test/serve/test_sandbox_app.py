"""The server under load, with clients that disconnect and sandboxes that fail; our server only."""

import asyncio
import contextlib
import os
import select
import shutil
import tempfile
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.limit import limit

from torchrl_agentic.errors import MissingExtra, SandboxError
from torchrl_agentic.sandbox import (
    BubblewrapSandbox,
    ForkServerSandbox,
    LandlockSandbox,
    Sandbox,
    zygote_pool,
)
from torchrl_agentic.sandbox.tiers import tiers
from torchrl_agentic.serve import sandbox_app as app_module
from torchrl_agentic.serve.access import Overloaded, RequestQueue
from torchrl_agentic.serve.sandbox_app import run_limits, sandbox_app
from torchrl_agentic.serve.serving import serving

WAIT_S = limit(20.0)
no_sandbox = pytest.mark.no_sandbox


class Shared:
    """A folder shared with programs, for named pipes: the order of events is observed, not timed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def sandbox(self) -> Sandbox:
        return ForkServerSandbox(replace(run_limits(), fs_write_roots=(str(self.folder),)))

    def pipe(self, name: str) -> str:
        path = self.folder / name
        os.mkfifo(path)
        path.chmod(0o666)
        return str(path)


@pytest.fixture
def shared() -> Generator[Shared]:
    """Not in /tmp, which programs have their own of; for all users, because programs run as nobody."""
    folder = Path(tempfile.mkdtemp(prefix="serve-", dir="/var/tmp"))
    folder.chmod(0o777)
    yield Shared(folder)
    shutil.rmtree(folder)


@asynccontextmanager
async def _client(url: str) -> AsyncGenerator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, timeout=WAIT_S, trust_env=False) as client:
        yield client


def _program(code: str, **more: Any) -> dict[str, Any]:
    return {"code": code, "language": "python", "run_timeout": 60, **more}


def _opened(path: str) -> int:
    """Open a pipe to read, and wait until a program has opened it and written something."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    poll = select.poll()  # select() takes no numbers above 1023, and a long run has more open
    poll.register(fd, select.POLLIN)
    assert poll.poll(1000 * WAIT_S), "the program does not begin"
    assert os.read(fd, 64)
    return fd


def _ends(fd: int) -> bool:
    """Wait until no process has a pipe open for writing."""
    poll = select.poll()
    poll.register(fd, 0)
    found = poll.poll(WAIT_S * 1000)
    os.close(fd)
    return bool(found)


def _holding(path: str, then: str = "time.sleep(3600)") -> str:
    return f"import time\nheld = open({path!r}, 'w')\nheld.write('begun')\nheld.flush()\n{then}"


async def test_request_to_a_full_queue_is_rejected_and_others_are_served(shared: Shared):
    begun, go = shared.pipe("begun"), shared.pipe("go")
    with serving(sandbox_app(make_sandbox=shared.sandbox, max_concurrency=1, max_queue=1)) as url:
        async with _client(url) as client:
            first = asyncio.create_task(
                client.post("/run_code", json=_program(_holding(begun, f"open({go!r}).read()")))
            )
            held = await asyncio.to_thread(_opened, begun)
            others = {asyncio.create_task(client.post("/run_code", json=_program("print(2)"))) for _ in "ab"}
            refused, waiting = await asyncio.wait(others, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
            answer = refused.pop().result()
            assert answer.status_code == 429
            assert int(answer.headers["Retry-After"]) >= 1
            assert "waiting" in answer.json()["detail"]
            assert not first.done()
            assert (await client.get("/v1/ping")).status_code == 200
            assert await asyncio.to_thread(_let_go, go)
            assert (await first).json()["status"] == "Success"
            assert (await waiting.pop()).json()["run_result"]["stdout"] == "2\n"
            os.close(held)


def _let_go(path: str) -> bool:
    """Release a program that reads a pipe."""
    os.close(os.open(path, os.O_WRONLY))
    return True


async def test_a_client_that_hangs_up_ends_its_program_and_frees_its_place(shared: Shared):
    begun = shared.pipe("begun")
    with serving(sandbox_app(make_sandbox=shared.sandbox, max_concurrency=1, max_queue=1)) as url:
        async with _client(url) as leaving:
            request = asyncio.create_task(leaving.post("/run_code", json=_program(_holding(begun))))
            held = await asyncio.to_thread(_opened, begun)
            request.cancel()
            await asyncio.wait((request,))
        assert await asyncio.to_thread(_ends, held), "the program runs on"
        async with _client(url) as client:
            answer = await client.post("/run_code", json=_program("print(1)"))
        assert answer.json()["run_result"]["stdout"] == "1\n"


async def test_cells_of_a_client_that_hangs_up_end_too(shared: Shared):
    begun = shared.pipe("begun")
    with serving(sandbox_app(make_sandbox=shared.sandbox, max_concurrency=1)) as url:
        async with _client(url) as leaving:
            request = asyncio.create_task(leaving.post("/run_jupyter", json={"cells": [_holding(begun)]}))
            held = await asyncio.to_thread(_opened, begun)
            request.cancel()
            await asyncio.wait((request,))
        assert await asyncio.to_thread(_ends, held), "the cell runs on"


async def test_request_of_a_client_that_left_the_queue_is_not_run(shared: Shared):
    begun, go = shared.pipe("begun"), shared.pipe("go")
    trace = shared.folder / "trace"
    with serving(sandbox_app(make_sandbox=shared.sandbox, max_concurrency=1, max_queue=1)) as url:
        async with _client(url) as client:
            first = asyncio.create_task(
                client.post("/run_code", json=_program(_holding(begun, f"open({go!r}).read()")))
            )
            os.close(await asyncio.to_thread(_opened, begun))
            program = _program(f"open({str(trace)!r}, 'w')")
            both = {asyncio.create_task(client.post("/run_code", json=program)) for _ in "ab"}
            refused, queued = await asyncio.wait(both, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
            assert refused.pop().result().status_code == 429
            assert queued.pop().cancel()
            await asyncio.wait(both)
            await asyncio.to_thread(_let_go, go)
            assert (await first).status_code == 200
            answer = await client.post("/run_code", json=_program("print(3)"))
            assert answer.json()["run_result"]["stdout"] == "3\n"
            assert not trace.exists()


@pytest.mark.slow
async def test_stopping_the_server_stops_running_programs(shared: Shared):
    """Runs that outlast the grace period are cancelled, and their sandboxes closed."""
    begun = shared.pipe("begun")
    server = serving(sandbox_app(make_sandbox=shared.sandbox))
    async with _client(server.__enter__()) as client:
        request = asyncio.create_task(client.post("/run_code", json=_program(_holding(begun))))
        held = await asyncio.to_thread(_opened, begun)
        await asyncio.to_thread(server.__exit__, None, None, None)
        assert await asyncio.to_thread(_ends, held), "the program runs on"
        with pytest.raises(httpx.HTTPError):
            await _answered(request)


async def _answered(request: asyncio.Task[httpx.Response]) -> None:
    (await request).raise_for_status()


async def test_a_sandbox_that_is_lost_is_a_sandbox_error(shared: Shared):
    begun = shared.pipe("begun")
    with serving(sandbox_app(make_sandbox=shared.sandbox)) as url:
        async with _client(url) as client:
            request = asyncio.create_task(client.post("/run_code", json=_program(_holding(begun))))
            os.close(await asyncio.to_thread(_opened, begun))
            await asyncio.to_thread(zygote_pool.close_pools)
            answer = await request
            assert (answer.status_code, answer.json()["status"]) == (200, "SandboxError")
            assert "lost" in answer.json()["message"]
            again = (await client.post("/run_code", json=_program("print(1)"))).json()
            assert again["status"] == "Success"


@pytest.mark.parametrize("kind", [BubblewrapSandbox, LandlockSandbox])
def test_weaker_sandboxes_serve_too(kind: type[Sandbox]):
    """There a program is a command, started instead of forked."""
    reason = dict(tiers())[kind]
    if reason is not None:
        pytest.skip(reason)
    with (
        serving(sandbox_app(make_sandbox=lambda: kind(run_limits()))) as url,
        httpx.Client(base_url=url, trust_env=False, timeout=WAIT_S) as client,
    ):
        numpy = "import numpy, sys\nprint(input(), numpy.ones(2).sum())\nsys.exit(3)"
        body = _program(numpy, stdin="in", memory_limit_MB=128, files={"a": "YQ=="}, fetch_files=["a"])
        answer = client.post("/run_code", json=body).json()
        assert (answer["run_result"]["stdout"], answer["run_result"]["stderr"]) == ("in 2.0\n", "")
        assert (answer["status"], answer["run_result"]["return_code"]) == ("Failed", 3)
        assert answer["files"] == {"a": "YQ=="}
        body = _program("print(1, flush=True)\nwhile True: pass", run_timeout=limit(0.5))
        ran = client.post("/run_code", json=body).json()["run_result"]
        assert (ran["status"], ran["stdout"]) == ("TimeLimitExceeded", "1\n")
        cells = client.post("/run_jupyter", json={"cells": ["x = 1", "x"]}).json()["cells"]
        assert cells[1]["display"] == [{"text/plain": "1"}]


def _failing(error: Exception) -> Callable[[], Sandbox]:
    """Return a factory of sandboxes that fails after the server has started."""
    calls = iter(range(2))

    def make() -> Sandbox:
        if next(calls, None) is None:
            raise error
        return ForkServerSandbox(run_limits())

    return make


@pytest.mark.parametrize("path", ["run_code", "run_jupyter"])
def test_a_sandbox_that_cannot_be_had_is_a_sandbox_error(path: str):
    with serving(sandbox_app(make_sandbox=_failing(SandboxError("no room")))) as url:
        body = {"code": "1", "language": "python", "cells": ["1"]}
        answer = httpx.post(f"{url}/{path}", json=body, trust_env=False, timeout=WAIT_S)
    assert answer.status_code == 200
    assert (answer.json()["status"], answer.json()["message"]) == ("SandboxError", "no room")


def test_a_bug_is_a_status_500_with_a_sentence():
    with serving(sandbox_app(make_sandbox=_failing(ZeroDivisionError("oops")))) as url:
        body = {"code": "1", "language": "python"}
        answer = httpx.post(f"{url}/run_code", json=body, trust_env=False, timeout=WAIT_S)
    assert answer.status_code == 500
    assert "oops" in answer.json()["detail"]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_long_is_refused(chunked: bool):
    data = b"x" * 5000
    with serving(sandbox_app(max_body_bytes=1000)) as url:
        content = iter((data[:2500], data[2500:])) if chunked else data
        kind = {"Content-Type": "application/json"}
        answer = httpx.post(f"{url}/run_code", content=content, headers=kind, trust_env=False, timeout=WAIT_S)
    assert answer.status_code == 413
    assert "1000" in answer.json()["detail"]


def test_missing_sandbox_raises_when_the_server_is_created(monkeypatch: pytest.MonkeyPatch):
    def none(limits: object) -> Sandbox:
        raise SandboxError("no sandbox works here")

    monkeypatch.setattr(app_module, "default_sandbox", none)
    with pytest.raises(SandboxError, match="no sandbox works here"):
        sandbox_app()


@no_sandbox
@pytest.mark.parametrize("numbers", [(0, 1), (1, -1)])
def test_invalid_numbers_are_rejected(numbers: tuple[int, int]):
    with pytest.raises(ValueError, match="max_concurrency must be at least 1"):
        RequestQueue(max_concurrency=numbers[0], max_queue=numbers[1])


@no_sandbox
async def test_places_are_given_in_the_order_of_arrival_and_given_back():
    admission = RequestQueue(max_concurrency=2, max_queue=8)
    running = peak = 0
    order: list[int] = []

    async def one(number: int) -> None:
        nonlocal running, peak
        with admission.entered():
            async with admission.place():
                order.append(number)
                running += 1
                peak = max(peak, running)
                await asyncio.sleep(0)
                running -= 1

    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*map(one, range(10)))
    assert (order, peak, admission.waiting) == (list(range(10)), 2, 0)


@no_sandbox
async def test_a_place_is_given_back_after_an_error():
    admission = RequestQueue(max_concurrency=1, max_queue=0)
    with pytest.raises(ZeroDivisionError):
        await _take(admission, lambda: 1 / 0)
    async with asyncio.timeout(WAIT_S):
        await _take(admission)


@no_sandbox
async def test_cancelled_request_leaves_the_queue():
    admission = RequestQueue(max_concurrency=1, max_queue=1)
    with admission.entered():
        async with admission.place():
            waiting = asyncio.create_task(_take(admission))
            await asyncio.sleep(0)
            with pytest.raises(Overloaded):
                await _take(admission)
            waiting.cancel()
            await asyncio.wait((waiting,))
            assert admission.waiting == 0
    async with asyncio.timeout(WAIT_S):
        await _take(admission)


async def _take(admission: RequestQueue, then: Callable[[], object] = bool) -> None:
    with admission.entered():
        async with admission.place():
            then()


@no_sandbox
@pytest.mark.parametrize(("seconds", "waiting", "expected"), [(0.01, 0, 1), (4.0, 0, 2), (4.0, 9, 20)])
def test_the_time_to_come_back_goes_by_how_long_runs_take(seconds: float, waiting: int, expected: int):
    admission = RequestQueue(max_concurrency=2, max_queue=10)
    admission.note(seconds)
    with contextlib.ExitStack() as entered:
        for _ in range(waiting):
            entered.enter_context(admission.entered())
        assert admission.retry_after_s() == expected


@no_sandbox
def test_a_server_without_starlette_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "starlette.applications", None)
    monkeypatch.delitem(__import__("sys").modules, "torchrl_agentic.serve.http_app", raising=False)
    with pytest.raises(MissingExtra, match=r"torchrl-agentic\[serve\]"):
        sandbox_app(make_sandbox=lambda: ForkServerSandbox())
