"""`VLLMEngine` over a real vLLM, on the CPU, with our tiny model: `make test-vllm`. One engine for all."""

import asyncio
import copy
import types
from typing import ClassVar

import pytest
import pytest_asyncio
import torch
from tensordict import TensorDict

from torchrl_agentic.engines import VLLMEngine
from torchrl_agentic.parsers.base import specs_of
from torchrl_agentic.testing import EngineContract
from torchrl_agentic.testing.tiny import TINY, load_tiny, tiny_questions
from torchrl_agentic.tools import PythonTool

# vLLM warns of itself.
pytestmark = [pytest.mark.engines, pytest.mark.timeout(300), pytest.mark.filterwarnings("default")]
on_loop = pytest.mark.asyncio(loop_scope="module")

MODEL, TOKENIZER = load_tiny()
QUESTIONS = tiny_questions(8)
CONTEXT = 1024
ARGS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_num_seqs": 8,
    "max_model_len": CONTEXT,
    "enable_prefix_caching": False,
}


def prompt_of(text):
    return TOKENIZER.apply_chat_template(
        [{"role": "user", "content": text}],
        tools=list(specs_of([PythonTool()])),
        add_generation_prompt=True,
        return_dict=False,
    )


PROMPTS = [prompt_of(question["query"]) for question in QUESTIONS]


@pytest.fixture(scope="module", autouse=True)
def small_cache():
    """A GiB for keys and values; and no figures of ours go to vLLM's makers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_NO_USAGE_STATS", "1")
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def first(small_cache):
    """The engine that starts and ends vLLM; other engines of this file use its `AsyncLLM`."""
    engine = VLLMEngine.from_model(TINY, engine_args=ARGS, temperature=0)
    yield engine
    await engine.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def llm(first):
    return first.llm


def on_module_loop(contract):
    """Give the tests of a contract the event loop of this file, because an `AsyncLLM` has but one."""

    def mark(cls):
        for name, member in vars(contract).items():
            if name.startswith("test_"):
                test = types.FunctionType(member.__code__, member.__globals__, name, member.__defaults__)
                test.__kwdefaults__ = member.__kwdefaults__
                setattr(cls, name, on_loop(test))
        return cls

    return mark


@on_module_loop(EngineContract)
class TestVLLMEngine(EngineContract):
    prompts = PROMPTS
    stop_ids: ClassVar = {TOKENIZER.eos_token_id}
    max_tokens = 128
    too_long: ClassVar = [5] * CONTEXT
    weights: ClassVar = MODEL.state_dict()

    async def make(self):
        return VLLMEngine(self.llm, tokenizer=TOKENIZER, temperature=0)

    @pytest_asyncio.fixture(autouse=True, loop_scope="module")
    async def own_llm(self, llm):
        type(self).llm = llm

    @pytest_asyncio.fixture(loop_scope="module")
    async def engine(self, own_llm):
        engine = await self.make()
        yield engine
        await engine.close()


def own_log_probs(model, prompt, ids):
    """Log-probabilities of an answer as transformers computes them."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]


def gap(model, prompt, found):
    return (own_log_probs(model, prompt, found.ids) - torch.tensor(found.log_probs)).abs().max().item()


def other_weights():
    """The model with other weights, under which answers and log-probabilities differ."""
    torch.manual_seed(0)
    other = copy.deepcopy(MODEL)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.5 * parameter.std() * torch.randn_like(parameter))
    return other


@pytest_asyncio.fixture(loop_scope="module")
async def engine(llm):
    engine = VLLMEngine(llm, tokenizer=TOKENIZER, temperature=0)
    yield engine
    await engine.update(MODEL.state_dict())
    await engine.close()


@on_loop
async def test_log_probs_are_those_of_the_model_whatever_the_temperature(llm):
    engine = VLLMEngine(llm, tokenizer=TOKENIZER, temperature=1.7)
    found = await asyncio.gather(
        *(engine.sample(prompt, max_tokens=64, key=str(n)) for n, prompt in enumerate(PROMPTS))
    )
    gaps = [gap(MODEL, prompt, one) for prompt, one in zip(PROMPTS, found, strict=True)]
    print(f"max |Δ log-prob|: {max(gaps):.1e}")
    assert max(gaps) < 1e-3
    assert min(min(one.log_probs) for one in found) < -1


def as_folder(model, path):
    model.save_pretrained(path)
    return path


FORMS = {
    "state dict": lambda model, _: model.state_dict(),
    "TensorDict": lambda model, _: TensorDict.from_module(model).data,
    "pairs": lambda model, _: iter(model.state_dict().items()),
    "parameters": lambda model, _: model.named_parameters(),  # without the head, which is the embedding
    "module": lambda model, _: model,
    "folder": as_folder,
    "name of a folder": lambda model, path: str(as_folder(model, path)),
}


@pytest.mark.parametrize("form", FORMS)
@on_loop
async def test_log_probs_are_those_of_the_new_weights_after_an_update(engine, form, tmp_path):
    other, prompt = other_weights(), PROMPTS[0]
    before = await engine.sample(prompt, max_tokens=48, key="before")
    assert gap(other, prompt, before) > 0.05
    assert await engine.update(FORMS[form](other, tmp_path)) == 1
    after = await engine.sample(prompt, max_tokens=48, key="after")
    assert after.version == 1
    assert gap(other, prompt, after) < 1e-3
    assert gap(MODEL, prompt, after) > 0.05
