"""The collector over a real vLLM, on the CPU, with our tiny model: `make test-vllm`."""

import asyncio

import pytest
import torch
from helpers.limit import limit
from helpers.vllm_engines import ARGS, ROUNDING, other_weights

from torchrl_agentic import Task, ToolCompose, tool
from torchrl_agentic.collectors import AgentCollector
from torchrl_agentic.engines import VLLMEngine
from torchrl_agentic.rollout import training_policy
from torchrl_agentic.testing import TINY, load_tiny, tiny_questions

# vLLM warns of itself.
pytestmark = [pytest.mark.engines, pytest.mark.timeout(limit(300)), pytest.mark.filterwarnings("default")]
SYSTEM = {"role": "system", "content": "You solve problems with a Python tool."}


@tool
async def python(code: str) -> str:
    """Run Python code in a fresh interpreter and return what it prints.

    Args:
        code: The code.
    """
    await asyncio.sleep(0.01)
    value = code.removeprefix("print(").removesuffix(")")
    return str(eval(value, {"__builtins__": {}}))  # arithmetic of a model of our own


async def collect(engine, weights):
    """Collect batches with an update in the middle of each; return them and the weights of each version."""
    model, tokenizer = load_tiny()
    questions = tiny_questions(24, seed=3)
    tasks = [
        Task(str(n), [SYSTEM, {"role": "user", "content": one["query"]}], one["answer"])
        for n, one in enumerate(questions)
    ]
    collector = AgentCollector(
        ToolCompose([python], "hermes"),
        engine=engine,
        tokenizer=tokenizer,
        tasks=tasks,
        group_size=2,
        groups_per_batch=4,
        max_staleness=1,
        max_new_tokens=64,
        max_turns=4,
    )
    batches, by_version = [], {engine.version: dict(model.state_dict())}
    async with collector:
        async for batch in collector:
            batches.append(batch)
            new = weights[len(batches) % 2]
            version = await collector.update_weights(new)
            by_version[version] = new
    return batches, by_version


@torch.no_grad()
def gap(row, by_version):
    """Return the largest difference between sampled log-probs and those of the version that sampled them."""
    model, tokenizer = load_tiny()
    policy = training_policy(model, tokenizer)
    versions = row["collector", "policy_version"]
    worst = 0.0
    for version in versions[versions >= 0].unique().tolist():
        model.load_state_dict(by_version[version])
        ids = row["tokens", "full"].unsqueeze(0)
        logits = policy.model(ids).logits.float().log_softmax(-1)[0, :-1]
        known = logits.gather(-1, ids[0, 1:, None])[:, 0]
        places = (versions[1:] == version).nonzero()[:, 0]
        worst = max(worst, (known[places] - row["log_probs", "full"][1:][places]).abs().max().item())
    return worst


def test_tokens_have_the_log_probs_of_the_weights_that_sampled_them():
    async def run():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
            patch.setenv("VLLM_NO_USAGE_STATS", "1")
            engine = VLLMEngine.from_model(TINY, engine_args={**ARGS, "dtype": "float32"})
            try:
                weights = [dict(load_tiny()[0].state_dict()), dict(other_weights().state_dict())]
                return await collect(engine, weights)
            finally:
                await engine.close()

    batches, by_version = asyncio.run(run())
    rows = [row for batch in batches for row in batch.tensordicts]
    assert len(rows) == 48
    assert sorted(int(row["collector", "group"]) for row in rows) == sorted(2 * list(range(24)))
    for number, batch in enumerate(batches):
        for row in batch.tensordicts:
            versions = row["collector", "policy_version"][row["masks", "all_assistant_mask"]]
            assert number - int(versions.min()) <= 1
            assert int(versions.max()) <= number
    assert max(gap(row, by_version) for row in rows) < ROUNDING
    assert sum(int(row["agentic", "n_calls"]) for row in rows) > 20
