"""`VLLMEngine` over a `vllm.LLM`, on the CPU, with our tiny model: `make test-vllm`. One LLM for all."""

import asyncio
from typing import ClassVar

import pytest
from helpers.limit import limit
from helpers.vllm_engines import ARGS, CONTEXT, MODEL, PROMPTS, ROUNDING, TOKENIZER, gap, other_weights

from torchrl_agentic.collectors import AgentCollector
from torchrl_agentic.dispatch import event_loop
from torchrl_agentic.engines import Sampling, VLLMEngine
from torchrl_agentic.evaluation import evaluate
from torchrl_agentic.rollout import agent_policy
from torchrl_agentic.testing import EngineContract, tiny_questions
from torchrl_agentic.testing.tiny import TINY
from torchrl_agentic.tools import PythonTool
from torchrl_agentic.transforms import ToolCompose

# vLLM warns of itself.
pytestmark = [pytest.mark.engines, pytest.mark.timeout(limit(300)), pytest.mark.filterwarnings("default")]
LONG = {"sampling": {"min_tokens": 600}}


@pytest.fixture(scope="module")
def llm():
    from vllm import LLM

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_NO_USAGE_STATS", "1")
        made = LLM(str(TINY), **ARGS, logprobs_mode="processed_logprobs", enable_prefix_caching=False)
    yield made
    made.llm_engine.engine_core.shutdown()


def unfinished(llm):
    return llm.llm_engine.get_num_unfinished_requests()


class TestVLLMEngineOverLLM(EngineContract):
    prompts = PROMPTS
    stop_ids: ClassVar = {TOKENIZER.eos_token_id}
    max_tokens = 128
    too_long: ClassVar = [5] * CONTEXT
    weights: ClassVar = MODEL.state_dict()

    @pytest.fixture(autouse=True)
    def own_llm(self, llm):
        type(self).llm = llm

    async def make(self):
        return VLLMEngine(self.llm, tokenizer=TOKENIZER, temperature=0)


def begin(engine, number, max_tokens=600):
    """Start a request; return its task, and an event for its first token."""
    began = asyncio.Event()
    task = asyncio.create_task(
        engine.sample(PROMPTS[number], max_tokens=max_tokens, key=str(number), on_ids=lambda _: began.set())
    )
    return task, began


async def test_log_probs_are_those_at_the_sampling_temperature(llm):
    engine = VLLMEngine(llm, tokenizer=TOKENIZER, temperature=1.7)
    assert engine.sampling == Sampling(1.7, 1.7)
    found = await asyncio.gather(
        *(engine.sample(prompt, max_tokens=64, key=str(n)) for n, prompt in enumerate(PROMPTS))
    )
    for prompt, one in zip(PROMPTS, found, strict=True):
        assert gap(MODEL, prompt, one, temperature=1.7) < 1e-3


async def test_requests_join_those_that_run_and_end_before_them(llm):
    engine = VLLMEngine(llm, tokenizer=TOKENIZER, **LONG)
    task, began = begin(engine, 0)
    await began.wait()
    short = VLLMEngine(llm, tokenizer=TOKENIZER, temperature=0)  # over the same LLM, at the same time
    found = await asyncio.gather(*(begin(short, number, 48)[0] for number in (1, 2)))
    assert not task.done()
    assert [one.finish for one in found] == ["stop", "stop"]
    assert all(gap(MODEL, PROMPTS[number], one) < 1e-3 for number, one in zip((1, 2), found, strict=True))
    assert len((await task).ids) == 600
    await engine.close()


async def test_a_cancelled_request_ends_in_vllm(llm):
    engine = VLLMEngine(llm, tokenizer=TOKENIZER, **LONG)
    doomed, began = begin(engine, 0)
    await began.wait()
    doomed.cancel()
    await asyncio.gather(doomed, return_exceptions=True)
    await engine.sample(PROMPTS[1], max_tokens=2, key="b")  # a step later
    assert unfinished(llm) == 0
    await engine.close()


async def test_closing_ends_the_requests_and_leaves_the_llm_to_others(llm):
    engine = VLLMEngine(llm, tokenizer=TOKENIZER, **LONG)
    doomed, began = begin(engine, 0)
    await began.wait()
    await engine.close()
    assert (await asyncio.gather(doomed, return_exceptions=True))[0].args == ("the engine is closed",)
    other = VLLMEngine(llm, tokenizer=TOKENIZER, temperature=0)
    assert (await other.sample(PROMPTS[0], max_tokens=48, key="a")).finish == "stop"
    assert unfinished(llm) == 0
    (found,) = llm.generate([{"prompt_token_ids": PROMPTS[0]}], use_tqdm=False)
    assert found.finished


async def test_an_update_waits_for_the_answers_that_run(llm):
    engine, other = VLLMEngine(llm, tokenizer=TOKENIZER, **LONG), other_weights()
    task, began = begin(engine, 0)
    await began.wait()
    assert await engine.update(other) == 1
    assert task.done()
    before, after = task.result(), await engine.sample(PROMPTS[0], max_tokens=40, key="b")
    assert (before.finish, before.version, after.version) == ("length", 0, 1)
    never = engine.stop_token_ids  # min_tokens keeps them out
    assert gap(other, PROMPTS[0], after, never=never) < ROUNDING
    assert gap(MODEL, PROMPTS[0], after, never=never) > 0.05
    await engine.update(MODEL)
    await engine.close()


@pytest.mark.parametrize(
    ("on_update", "message"), [("abort", "cannot abort requests"), ("keep", "LLM cannot keep requests")]
)
def test_what_an_llm_cannot_do_at_an_update_is_refused(llm, on_update, message):
    with pytest.raises(ValueError, match=message):
        VLLMEngine(llm, tokenizer=TOKENIZER, on_update=on_update)


def test_a_collector_and_an_evaluation_run_over_an_llm(llm):
    engine = VLLMEngine(llm, tokenizer=TOKENIZER, temperature=0)
    collector = AgentCollector(
        ToolCompose([PythonTool()]),
        engine=engine,
        tokenizer=TOKENIZER,
        tasks=tiny_questions(6),
        groups_per_batch=3,
        max_new_tokens=96,
        reward=lambda trajectory: float(str(trajectory.task.answer) in trajectory.answer),
    )
    rewards = []
    with collector:
        for batch in collector:
            rewards += [float(row["reward"]) for row in batch.unbind(0)]
            collector.update_policy_weights_(MODEL)
    assert sum(rewards) >= 5
    assert engine.version == 2
    result = evaluate(tiny_questions(6), [PythonTool()], llm, TOKENIZER, temperature=0.0, max_new_tokens=96)
    assert result.is_whole
    event_loop.run(engine.close())


def test_policies_over_one_llm_share_its_thread(llm):
    """`agent_policy` samples on the event loop of the package, the first engine on that of a test."""
    policies = [agent_policy(llm, TOKENIZER, temperature=t, max_new_tokens=8) for t in (0, 1.0)]
    assert [policy.sampling.temperature for policy in policies] == [0, 1.0]
    assert all(policy.stop_token_ids == (TOKENIZER.eos_token_id,) for policy in policies)
