"""A pool of two vLLM servers on the CPU; one is killed and started again: `make test-vllm-servers`."""

import asyncio
import os
from collections import Counter
from typing import ClassVar

import pytest
import torch
from helpers.collector_worlds import rows_of
from helpers.limit import limit
from helpers.vllm_engines import CONTEXT, MODEL, PROMPTS, TOKENIZER, gap, other_weights
from helpers.vllm_servers import VLLMServer

from torchrl_agentic import Task, Tool, ToolCompose
from torchrl_agentic.collectors import AgentCollector
from torchrl_agentic.engines import EnginePool, HTTPEngine
from torchrl_agentic.testing import tiny_questions
from torchrl_agentic.tools.service import Patience

pytestmark = [pytest.mark.engines, pytest.mark.timeout(limit(900))]
TASKS, SIZE = 24, 2
PATIENCE_S = limit(240)
SYSTEM = {"role": "system", "content": "You solve problems with a Python tool."}


class Python(Tool):
    """Run Python code and return its value. It counts its calls."""

    name = "python"
    description = "Run Python code in a fresh interpreter and return what it prints."
    input_schema: ClassVar = {
        "type": "object",
        "properties": {"code": {"type": "string"}},
        "required": ["code"],
    }

    def __init__(self):
        self.ran = Counter()
        self.is_busy = asyncio.Event()

    async def run(self, args, ctx):
        self.ran[ctx.trajectory, ctx.turn, ctx.call_id] += 1
        if len(self.ran) >= TASKS // 2:
            self.is_busy.set()
        await asyncio.sleep(0.05)
        value = args["code"].removeprefix("print(").removesuffix(")")
        return str(eval(value, {"__builtins__": {}}))  # arithmetic of a model of our own


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Two servers, which start at the same time, each on a core of its own.

    vLLM binds the first thread of every server to the first core, where one that waits in a busy loop leaves
    another next to nothing: it loaded weights in 107 s instead of 0.1 s.
    """
    pytest.importorskip("vllm", reason="`make test-vllm-servers` installs it")
    cores = sorted(os.sched_getaffinity(0))
    options = ["--tokens-only", "--no-enable-prefix-caching", "--max-num-seqs=8"]
    options.append(f"--max-model-len={CONTEXT}")
    made = [
        VLLMServer(
            tmp_path_factory.mktemp("server"),
            *options,
            environment={
                "VLLM_SERVER_DEV_MODE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": str(cores[number % len(cores)]),
            },
        )
        for number in range(2)
    ]
    try:
        for server in made:
            server.start()
        for server in made:
            server.wait()
        yield made
    finally:
        for server in made:
            server.end()


def pool_of(servers, **options):
    patience = Patience(tries=2, first_s=0.05)
    engines = [
        HTTPEngine(
            server.url,
            kind="vllm",
            tokenizer=TOKENIZER,
            temperature=0,
            max_concurrent=8,
            patience=patience,
        )
        for server in servers
    ]
    return EnginePool(engines, retry_s=0.5, longest_retry_s=2.0, **options)


async def kill(server, pool, number, when):
    """Kill a server as soon as an event has happened and the server has requests."""
    await when.wait()
    while not pool.members[number].running:
        await asyncio.sleep(0)
    await asyncio.sleep(0.02)  # the requests reach the server
    server.kill()


def row_gap(row, model):
    """Return the largest difference between the log-probs of a row and those of the model."""
    ids, mask = row["tokens", "full"], row["masks", "all_assistant_mask"]
    with torch.no_grad():
        logits = model(ids[None]).logits[0, :-1].float()
    own = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    return (own - row["log_probs", "full"][1:])[mask[1:]].abs().max().item()


async def until_in(pool, number):
    """Ask for answers until an engine is used again."""
    async with asyncio.timeout(PATIENCE_S):
        while pool.members[number].phase != "in":
            await pool.sample(PROMPTS[0], max_tokens=4, key="until it is in")
            await asyncio.sleep(0.2)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_killed_server_costs_no_trajectory_and_no_call_and_is_used_again(servers, stream):
    pool, tool = pool_of(servers, stream=stream), Python()
    tasks = [
        Task(str(number), [SYSTEM, {"role": "user", "content": one["query"]}], one["answer"])
        for number, one in enumerate(tiny_questions(TASKS, seed=3))
    ]
    collector = AgentCollector(
        ToolCompose([tool], "hermes"),
        engine=pool,
        tokenizer=TOKENIZER,
        tasks=tasks,
        group_size=SIZE,
        groups_per_batch=4,
        max_new_tokens=64,
        max_turns=4,
    )
    killing = asyncio.create_task(kill(servers[1], pool, 1, tool.is_busy))
    async with collector, asyncio.timeout(PATIENCE_S):
        batches = [batch async for batch in collector]
    await killing
    rows = rows_of(batches)
    assert len({row["collector", "name"] for row in rows}) == len(rows) == TASKS * SIZE
    assert set(tool.ran.values()) == {1}
    ran = Counter(name for name, _, _ in tool.ran)
    assert {row["collector", "name"]: row["agentic", "n_calls"].item() for row in rows} == {
        row["collector", "name"]: ran[row["collector", "name"]] for row in rows
    }
    figures = collector.stats.snapshot()
    assert not figures["failures"], figures["failures"]
    assert figures["events"].get("replaced", 0) == 0
    assert pool.members[1].phase != "in", "it was lost while it had requests"
    assert figures["events"].get("aborted", 0) == figures["events"].get("resumed", 0)
    assert max(row_gap(row, MODEL) for row in rows) < 1e-3

    other = other_weights()
    assert await pool.update(other) == 1, "the other server has the weights"
    servers[1].start()
    await asyncio.to_thread(servers[1].wait)
    await until_in(pool, 1)
    keys = [f"after/{number}" for number in range(8)]
    asked = [
        asyncio.create_task(pool.sample(PROMPTS[number], max_tokens=64, key=key))
        for number, key in enumerate(keys)
    ]
    await asyncio.sleep(0)
    assert [one.running for one in pool.members] == [4, 4]
    for prompt, found in zip(PROMPTS, await asyncio.gather(*asked), strict=True):
        assert found.version == 1
        assert gap(other, prompt, found) < 1e-3 < 0.05 < gap(MODEL, prompt, found)
    await pool.update(MODEL)
    await pool.close()
