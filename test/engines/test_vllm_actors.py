"""`VLLMEngine` over TorchRL's `AsyncVLLM`: Ray actors, with a real vLLM on the CPU: `make test-vllm-servers`.

It requests a GPU from Ray, which a process on the CPU does not use; Ray is configured with one.
"""

import warnings
from typing import ClassVar

import pytest
from helpers.limit import limit
from helpers.vllm_engines import ARGS, CONTEXT, MODEL, PROMPTS, TOKENIZER, gap, other_weights
from helpers.vllm_training import STEPS, train

from torchrl_agentic.dispatch import event_loop
from torchrl_agentic.engines import VLLMEngine
from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.testing import EngineContract
from torchrl_agentic.testing.tiny import TINY

# vLLM, Ray and TorchRL warn of themselves.
pytestmark = [pytest.mark.engines, pytest.mark.timeout(limit(300)), pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def actors():
    """An `AsyncVLLM` with a GiB for keys and values; no figures of ours go to vLLM's or Ray's makers."""
    ray = pytest.importorskip("ray", reason="`make test-vllm-servers` installs it")
    with warnings.catch_warnings(action="ignore"):
        from torchrl.modules.llm import AsyncVLLM

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_NO_USAGE_STATS", "1")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(num_cpus=2, num_gpus=1, include_dashboard=False, log_to_driver=False)
        engine = None
        try:
            engine = AsyncVLLM.from_pretrained(str(TINY), num_devices=1, verbose=False, **ARGS)
            yield engine
        finally:
            if engine is not None:
                engine.shutdown()
            ray.shutdown()


class TestVLLMEngineOverActors(EngineContract):
    prompts = PROMPTS
    stop_ids: ClassVar = {TOKENIZER.eos_token_id}
    max_tokens = 128
    too_long: ClassVar = [5] * CONTEXT
    weights: ClassVar = MODEL.state_dict()

    @pytest.fixture(autouse=True)
    def shared(self, actors):
        self.actors = actors

    async def make(self):
        return VLLMEngine(self.actors, tokenizer=TOKENIZER, temperature=0)


async def test_log_probs_are_those_of_the_new_weights_after_an_update(actors):
    engine, other, prompt = (
        VLLMEngine(actors, tokenizer=TOKENIZER, temperature=0),
        other_weights(),
        PROMPTS[0],
    )
    before = await engine.sample(prompt, max_tokens=48, key="before")
    assert gap(MODEL, prompt, before) < 1e-3 < 0.05 < gap(other, prompt, before)
    assert await engine.update(other) == 1
    after = await engine.sample(prompt, max_tokens=48, key="after")
    assert (after.version, gap(other, prompt, after) < 1e-3 < 0.05 < gap(MODEL, prompt, after)) == (1, True)
    await engine.update(MODEL)
    await engine.close()


def test_after_each_optimizer_step_the_actors_sample_from_the_new_weights(actors):
    engine = VLLMEngine(actors, tokenizer=TOKENIZER)
    try:
        found = train(engine)
        _, *control = train(engine, is_synced=False)
    finally:
        event_loop.run(engine.close())
    assert [gaps.largest < 1e-4 for gaps in found] == [True] * (STEPS + 1)
    assert [gaps.largest > 0.1 for gaps in control] == [True] * STEPS


def test_requests_cannot_be_kept_over_an_update(actors):
    with pytest.raises(ValueError, match="AsyncVLLM cannot keep requests"):
        VLLMEngine(actors, tokenizer=TOKENIZER, on_update="keep")


async def test_a_lost_actor_is_an_infrastructure_error(actors):
    """The last test of this file: it ends the actor."""
    engine = VLLMEngine(actors, tokenizer=TOKENIZER, temperature=0)
    import ray

    ray.kill(actors.actors[0])
    with pytest.raises(InfrastructureError, match="AsyncVLLM"):
        await engine.sample(PROMPTS[0], max_tokens=48, key="a")
