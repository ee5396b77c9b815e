"""`HTTPEngine` beside a real vLLM server on the CPU: `make test-vllm`."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from typing import ClassVar

import httpx
import pytest
from helpers.limit import limit
from helpers.processes import started
from helpers.vllm_engines import ARGS, CONTEXT, MODEL, PROMPTS, TOKENIZER, gap, other_weights
from helpers.vllm_training import STEPS, run_page, train

from torchrl_agentic.dispatch import event_loop
from torchrl_agentic.engines import HTTPEngine
from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.testing import EngineContract
from torchrl_agentic.testing.tiny import TINY
from torchrl_agentic.tools.service import Patience

pytestmark = [pytest.mark.engines, pytest.mark.timeout(limit(300))]
START_S = limit(240)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The URL of a server and its process; no figures of ours go to vLLM's makers."""
    pytest.importorskip("vllm", reason="`make test-vllm-servers` installs it")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": "1"}
    options = ["--tokens-only", "--host=127.0.0.1", f"--port={port}", "--no-enable-prefix-caching"]
    options += ["--dtype=float32", "--enforce-eager", f"--max-model-len={CONTEXT}"]
    options += [f"--max-num-seqs={ARGS['max_num_seqs']}"]
    log = tmp_path_factory.mktemp("server") / "log"
    program = [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", "--model", str(TINY)]
    environment = {**os.environ, **own}
    url = f"http://127.0.0.1:{port}"
    with (
        log.open("wb") as file,
        started([*program, *options], env=environment, stdout=file, stderr=subprocess.STDOUT) as process,
    ):
        until = time.monotonic() + START_S
        while not answers(url):
            assert process.poll() is None, log.read_text()[-5000:]
            assert time.monotonic() < until, log.read_text()[-5000:]
            time.sleep(0.5)
        yield url, process
        end(process)


def answers(url):
    try:
        return httpx.get(f"{url}/health", timeout=limit(5)).status_code == 200
    except httpx.TransportError:
        return False


def end(process):
    """Ask a server and the processes that it started to end, and wait for it."""
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(limit(20))


def engine_of(url, **options):
    return HTTPEngine(
        url,
        kind="vllm",
        tokenizer=TOKENIZER,
        **{"temperature": 0, "max_concurrent": ARGS["max_num_seqs"], **options},
    )


class TestHTTPEngineOverVLLM(EngineContract):
    prompts = PROMPTS
    stop_ids: ClassVar = {TOKENIZER.eos_token_id}
    max_tokens = 128
    too_long: ClassVar = [5] * CONTEXT
    weights: ClassVar = MODEL.state_dict()

    @pytest.fixture(autouse=True)
    def shared(self, server):
        self.url = server[0]

    async def make(self):
        return engine_of(self.url)


async def test_log_probs_are_those_of_the_new_weights_after_an_update(server):
    engine, other, prompt = engine_of(server[0]), other_weights(), PROMPTS[0]
    before = await engine.sample(prompt, max_tokens=48, key="before")
    assert gap(MODEL, prompt, before) < 1e-3 < 0.05 < gap(other, prompt, before)
    assert await engine.update(other) == 1
    after = await engine.sample(prompt, max_tokens=48, key="after")
    assert (after.version, gap(other, prompt, after) < 1e-3 < 0.05 < gap(MODEL, prompt, after)) == (1, True)
    await engine.update(MODEL)
    await engine.close()


async def test_aborted_streams_keep_their_ids_with_the_log_probs_of_the_old_weights(server, tmp_path):
    other_weights().save_pretrained(tmp_path)  # beforehand, because the answers take but a few seconds
    prompts = PROMPTS * 4  # more than the server works on at once, so that some run when the update comes
    engine, began = (
        engine_of(server[0], temperature=1.0, max_concurrent=len(prompts), sampling={"min_tokens": 800}),
        asyncio.Event(),
    )
    tasks = [
        asyncio.create_task(
            engine.sample(prompt, max_tokens=800, key=str(number), on_ids=lambda _: began.set())
        )
        for number, prompt in enumerate(prompts)
    ]
    await began.wait()
    await engine.update(tmp_path)
    found = await asyncio.gather(*tasks)
    aborted = [one for one in found if one.finish == "aborted"]
    assert {one.version for one in found} == {0}
    assert any(one.ids for one in aborted)
    assert all(len(one.ids) < 800 for one in aborted)
    for prompt, one in zip(prompts, found, strict=True):
        if one.ids:
            assert gap(MODEL, prompt, one) < 1e-3
    await engine.update(MODEL)
    await engine.close()


@pytest.mark.filterwarnings("default")  # PyTorch warns of itself
def test_after_each_optimizer_step_the_server_samples_from_the_new_weights(server, tmp_path):
    engine = engine_of(server[0], temperature=1.0, weights_parent=tmp_path)
    try:
        found = train(engine)
        _, *control = train(engine, is_synced=False)
    finally:
        event_loop.run(engine.close())
    assert [gaps.largest < 1e-4 for gaps in found] == [True] * (STEPS + 1)
    assert [gaps.largest > 0.1 for gaps in control] == [True] * STEPS


def test_the_program_of_the_page_trains_over_a_server(server, tmp_path):
    lines = run_page("A server", tmp_path, "http://127.0.0.1:8000", server[0])
    assert [line.split()[1] for line in lines] == ["1", "2"]


async def test_a_server_that_ends_is_an_infrastructure_error(server):
    """The last test of this file: it ends the server."""
    url, process = server
    patience = Patience(tries=2, first_s=0.01)
    engine, began = engine_of(url, patience=patience, sampling={"min_tokens": 380}), asyncio.Event()
    task = asyncio.create_task(
        engine.sample(PROMPTS[0], max_tokens=400, key="a", on_ids=lambda _: began.set())
    )
    await began.wait()
    await asyncio.to_thread(end, process)
    assert (await task).finish == "aborted"
    with pytest.raises(InfrastructureError, match="cannot be reached"):
        await engine.sample(PROMPTS[0], max_tokens=8, key="b")
    await engine.close()
