"""vLLM samples from the weights of each optimizer step, on the CPU, with our tiny model: `make test-vllm`.

The bounds are of the absolute difference between the log-probability that vLLM gave a sampled token and the
one that transformers computes with the trained model: 1e-4 for every token in float32, and 1e-2 for the mean
over the tokens of a batch in bfloat16. bfloat16 has 8 bits of precision, so a logit of 16 is rounded by up to
0.03, and single tokens may differ by 0.1 although the weights are the same.
"""

import pytest
import torch
from helpers.limit import limit
from helpers.vllm_engines import ARGS
from helpers.vllm_training import STEPS, run_page, train

from torchrl_agentic.dispatch import event_loop
from torchrl_agentic.engines import VLLMEngine
from torchrl_agentic.testing import TINY

# vLLM warns of itself.
pytestmark = [pytest.mark.engines, pytest.mark.timeout(limit(300)), pytest.mark.filterwarnings("default")]
DTYPES = [torch.bfloat16, torch.float32]


@pytest.fixture(scope="module", params=DTYPES, ids=["bfloat16", "float32"])
def engine(request):
    """An engine that computes with the data type of the parameter."""
    args = {**ARGS, "dtype": str(request.param).removeprefix("torch.")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_NO_USAGE_STATS", "1")
        engine = VLLMEngine.from_model(TINY, engine_args=args)
        yield engine, request.param
        event_loop.run(engine.close())


def figures(found):
    return "; ".join(f"largest {gaps.largest:.1e}, mean {gaps.mean:.1e}" for gaps in found)


def is_close(gaps, dtype):
    """Check the bounds of the module's docstring."""
    return gaps.mean < 1e-2 if dtype is torch.bfloat16 else gaps.largest < 1e-4


def test_after_each_optimizer_step_the_engine_samples_from_the_new_weights(engine):
    engine, dtype = engine
    found = train(engine, dtype=dtype)
    print(figures(found))
    assert len(found) == STEPS + 1
    assert all(is_close(gaps, dtype) for gaps in found), figures(found)


def test_without_the_update_the_engine_samples_from_other_weights_than_the_model_has(engine):
    """The control: the bounds above notice an engine that keeps its weights."""
    engine, dtype = engine
    first, *later = train(engine, dtype=dtype, is_synced=False)
    print(figures([first, *later]))
    assert is_close(first, dtype)
    assert len(later) == STEPS
    assert not any(is_close(gaps, dtype) for gaps in later), figures(later)
    assert later[-1].largest > 1, figures(later)
    assert later[-1].mean > 0.1, figures(later)


def test_the_program_of_the_page_trains_in_one_process(tmp_path):
    assert [line.split()[1] for line in run_page("In this process", tmp_path)] == ["1", "2"]
