"""`VLLMEngine` over a real vLLM, on the CPU, with our tiny model: `make test-vllm`. One engine for all."""

import asyncio
import types
from typing import ClassVar

import pytest
import pytest_asyncio
import torch
from helpers.limit import limit
from helpers.vllm_engines import ARGS, CONTEXT, MODEL, PROMPTS, ROUNDING, TOKENIZER, gap, other_weights
from tensordict import TensorDict
from transformers import GenerationConfig

from torchrl_agentic.engines import Sampling, VLLMEngine
from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.parsers import get_parser
from torchrl_agentic.parsers.base import specs_of
from torchrl_agentic.testing import EngineContract
from torchrl_agentic.testing.tiny import TINY
from torchrl_agentic.tools import PythonTool

# vLLM warns of itself.
pytestmark = [pytest.mark.engines, pytest.mark.timeout(limit(300)), pytest.mark.filterwarnings("default")]
on_loop = pytest.mark.asyncio(loop_scope="module")


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
    args = {**ARGS, "enable_prefix_caching": False}
    engine = VLLMEngine.from_model(TINY, engine_args=args, temperature=0)
    yield engine
    await engine.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def llm(first):
    return first.llm


def on_module_loop(contract):
    """Run the tests of a contract on the event loop of this file, since an `AsyncLLM` works on one only."""

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


@pytest_asyncio.fixture(loop_scope="module")
async def engine(llm):
    engine = VLLMEngine(llm, tokenizer=TOKENIZER, temperature=0)
    yield engine
    await engine.update(MODEL.state_dict())
    await engine.close()


@on_loop
async def test_log_probs_are_those_at_the_sampling_temperature(llm):
    engine = VLLMEngine(llm, tokenizer=TOKENIZER, temperature=1.7)
    assert engine.sampling == Sampling(1.7, 1.7)
    found = await asyncio.gather(
        *(engine.sample(prompt, max_tokens=64, key=str(n)) for n, prompt in enumerate(PROMPTS))
    )
    pairs = zip(PROMPTS, found, strict=True)
    gaps = [gap(MODEL, prompt, one, temperature=1.7) for prompt, one in pairs]
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
    assert gap(other, prompt, after) < ROUNDING
    assert gap(MODEL, prompt, after) > 0.05


WRONG = {
    "missing": (lambda state: state.pop("model.norm.weight"), "missing: model.norm.weight"),
    "unknown": (lambda state: state.update(other=torch.ones(1)), "unknown: other"),
    "of another shape": (
        lambda state: state.update({"model.norm.weight": torch.ones(3)}),
        r"\(3,\) instead of",
    ),
    "none": (lambda state: state.clear(), "there are no weights"),
}


@pytest.mark.parametrize("wrong", WRONG)
@on_loop
async def test_weights_of_another_model_are_refused_before_vllm_has_any_of_them(engine, wrong):
    change, message = WRONG[wrong]
    state = dict(other_weights().state_dict())
    change(state)
    with pytest.raises(ValueError, match=message):
        await engine.update(state)
    found = await engine.sample(PROMPTS[0], max_tokens=48, key="a")
    assert found.version == 0
    assert gap(MODEL, PROMPTS[0], found) < 1e-3


def begin(engine, prompt, key="a", max_tokens=800):
    """Start a request; return its task, and an event for its first token."""
    began = asyncio.Event()
    task = asyncio.create_task(
        engine.sample(prompt, max_tokens=max_tokens, key=key, on_ids=lambda _: began.set())
    )
    return task, began


LONG = {"sampling": {"min_tokens": 800}}


@on_loop
async def test_an_aborted_answer_keeps_its_ids_with_the_log_probs_of_the_old_weights(llm, tmp_path):
    engine, other = VLLMEngine(llm, tokenizer=TOKENIZER, **LONG), other_weights()
    other.save_pretrained(tmp_path)  # beforehand, because the answer takes about a second
    task, began = begin(engine, PROMPTS[0])
    await began.wait()
    await engine.update(tmp_path)
    first = await task
    assert (first.finish, first.version) == ("aborted", 0)
    assert 0 < len(first.ids) == len(first.log_probs) < 800
    never = engine.stop_token_ids  # min_tokens keeps them out, and the log-probs are those of what is left
    assert gap(MODEL, PROMPTS[0], first, never=never) < 1e-3
    rest = await engine.sample([*PROMPTS[0], *first.ids], max_tokens=40, key="a")
    assert rest.version == 1
    assert gap(other, [*PROMPTS[0], *first.ids], rest, never=never) < ROUNDING
    await engine.update(MODEL)
    await engine.close()


@on_loop
async def test_a_draining_update_waits_for_answers_and_holds_new_ones_back(llm):
    ended = []

    async def load(_llm, _weights):
        ended.append(task.done())

    engine = VLLMEngine(llm, tokenizer=TOKENIZER, on_update="wait", load_weights=load, **LONG)
    task, began = begin(engine, PROMPTS[0])
    await began.wait()
    update = asyncio.create_task(engine.update("weights"))
    for _ in range(4):  # until it holds requests back
        await asyncio.sleep(0)
    late = asyncio.create_task(engine.sample(PROMPTS[1], max_tokens=20, key="late"))
    first = await task
    assert (first.finish, first.version, len(first.ids)) == ("length", 0, 800)
    assert await update == 1
    assert ended == [True]
    assert (await late).version == 1
    await engine.close()


@on_loop
async def test_kept_answers_continue_under_the_new_weights(llm, tmp_path):
    engine, other = VLLMEngine(llm, tokenizer=TOKENIZER, on_update="keep", **LONG), other_weights()
    other.save_pretrained(tmp_path)
    task, began = begin(engine, PROMPTS[0])
    await began.wait()
    await engine.update(tmp_path)
    found = await task
    assert (found.finish, found.version, len(found.ids)) == ("length", 0, 800)
    assert gap(MODEL, PROMPTS[0], found) > 0.05
    tail = type(found)(found.ids[-20:], found.log_probs[-20:])
    assert gap(other, [*PROMPTS[0], *found.ids[:-20]], tail, never=engine.stop_token_ids) < ROUNDING
    await engine.update(MODEL)
    await engine.close()


@on_loop
async def test_load_weights_replaces_the_way_in_which_weights_are_loaded(llm):
    seen = []

    async def load(given, weights):
        seen.append((given is llm, weights, await llm.is_paused()))

    engine = VLLMEngine(llm, tokenizer=TOKENIZER, load_weights=load)
    assert await engine.update("over NCCL") == 1
    assert seen == [(True, "over NCCL", True)]
    assert not await llm.is_paused()
    await engine.close()


@on_loop
async def test_after_a_failed_update_requests_fail_until_one_succeeds(llm):
    fail = True

    async def load(_llm, _weights):
        if fail:
            raise RuntimeError("the trainer is gone")

    engine = VLLMEngine(llm, tokenizer=TOKENIZER, load_weights=load)
    with pytest.raises(InfrastructureError, match="the trainer is gone"):
        await engine.update("weights")
    with pytest.raises(InfrastructureError, match="the trainer is gone"):
        await engine.sample(PROMPTS[0], max_tokens=8, key="a")
    fail = False
    assert await engine.update("weights") == 1
    assert (await engine.sample(PROMPTS[0], max_tokens=8, key="a")).version == 1
    await engine.close()


@on_loop
async def test_an_update_goes_on_if_its_caller_is_cancelled(engine):
    other = other_weights()
    update = asyncio.create_task(engine.update(other))
    await asyncio.sleep(0)
    update.cancel()
    with pytest.raises(asyncio.CancelledError):
        await update
    while engine.version == 0:
        await asyncio.sleep(0.01)
    found = await engine.sample(PROMPTS[0], max_tokens=48, key="a")
    assert found.version == 1
    assert gap(other, PROMPTS[0], found) < ROUNDING


@on_loop
async def test_a_cancelled_request_ends_in_vllm(llm):
    engine = VLLMEngine(llm, tokenizer=TOKENIZER, **LONG)
    task, began = begin(engine, PROMPTS[0])
    await began.wait()
    assert llm.output_processor.get_num_unfinished_requests() == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert llm.output_processor.get_num_unfinished_requests() == 0
    await engine.close()


@on_loop
async def test_an_answer_ends_with_a_further_stop_id_and_with_no_other_token(engine, llm):
    whole = await engine.sample(PROMPTS[0], max_tokens=48, key="a")
    stop = whole.ids[3]
    other = VLLMEngine(llm, tokenizer=TOKENIZER, temperature=0, stop_token_ids=[stop])
    found = await other.sample(PROMPTS[0], max_tokens=48, key="a")
    assert (found.ids, found.finish) == (whole.ids[: whole.ids.index(stop) + 1], "stop")
    await other.close()


@on_loop
async def test_the_pad_token_is_never_sampled(llm):
    """Not even of two tokens, of which the other is the least likely one."""
    pad = TOKENIZER.pad_token_id
    with torch.no_grad():
        other = MODEL(torch.tensor([PROMPTS[0]])).logits[0, -1].argmin().item()
    assert other != pad
    only = {"allowed_token_ids": [pad, other]}
    engine = VLLMEngine(llm, tokenizer=TOKENIZER, temperature=0, sampling=only)
    assert (await engine.sample(PROMPTS[0], max_tokens=1, key="a")).ids == [other]
    await engine.close()


@on_loop
async def test_an_answer_ends_where_the_context_does(llm):
    engine = VLLMEngine(llm, tokenizer=TOKENIZER, sampling={"min_tokens": 900})
    prompt = (PROMPTS[0] * 20)[: CONTEXT - 10]
    found = await engine.sample(prompt, max_tokens=100, key="a")
    assert (len(found.ids), found.finish) == (10, "length")
    await engine.close()


@on_loop
async def test_a_constraint_forces_calls_and_drains_at_updates(llm):
    engine = VLLMEngine(
        llm, tokenizer=TOKENIZER, parser="hermes", tools=specs_of([PythonTool()]), tool_choice="required"
    )
    assert not engine.can_resume
    prompt = TOKENIZER.encode("<|im_start|>user\nhello hello<|im_end|>\n<|im_start|>assistant\n")
    tasks = [begin(engine, prompt, key=str(n)) for n in range(4)]
    for _, began in tasks:
        await began.wait()
    await engine.update(None)
    found = [await task for task, _ in tasks]
    assert all(one.finish in ("stop", "length") for one in found)
    ended = [one for one in found if one.finish == "stop"]
    for one in ended:
        calls = get_parser("hermes").parse(TOKENIZER.decode(one.ids[:-1])).calls
        assert [(call.tool, call.error) for call in calls] == [("python", None)] * len(calls)
        assert calls
    with pytest.raises(ValueError, match="cannot be resumed"):
        VLLMEngine(
            llm,
            tokenizer=TOKENIZER,
            parser="hermes",
            tools=specs_of([PythonTool()]),
            tool_choice="required",
            on_update="abort",
        )
    await engine.close()


@on_loop
async def test_wrong_arguments_are_refused(llm):
    for name in ("n", "stop", "max_tokens", "output_kind", "stop_token_ids", "logprobs"):
        with pytest.raises(ValueError, match=f"sampling cannot have {name}"):
            VLLMEngine(llm, tokenizer=TOKENIZER, sampling={name: 1})
    with pytest.raises(ValueError, match="on_update is 'abort', 'wait' or 'keep'"):
        VLLMEngine(llm, tokenizer=TOKENIZER, on_update="drop")
    with pytest.raises(TypeError, match="AsyncLLM or LLM"):
        VLLMEngine(object(), tokenizer=TOKENIZER)


@on_loop
async def test_its_bounds_are_those_of_vllm(engine):
    assert (engine.max_concurrent, engine.context_length) == (8, CONTEXT)


@on_loop
async def test_without_log_probs_there_are_none(llm):
    engine = VLLMEngine(llm, tokenizer=TOKENIZER, log_probs=False)
    assert (await engine.sample(PROMPTS[0], max_tokens=8, key="a")).log_probs is None
    await engine.close()


def test_another_event_loop_is_refused(first, llm):
    engine = VLLMEngine(llm, tokenizer=TOKENIZER)
    with pytest.raises(RuntimeError, match="another event loop"):
        asyncio.run(engine.sample(PROMPTS[0], max_tokens=8, key="a"))


@on_loop
async def test_the_pressure_follows_the_requests_that_run(first):
    before = await first.pressure()  # of the last step, in which requests of other tests may have run
    started, release = asyncio.Event(), asyncio.Event()
    seen = []

    async def watch():
        await started.wait()
        while not release.is_set():
            seen.append(await first.pressure())
            await asyncio.sleep(0.001)

    watching = asyncio.create_task(watch())
    tasks = [
        asyncio.create_task(
            first.sample(PROMPTS[n], max_tokens=64, key=f"pressure/{n}", on_ids=lambda _: started.set())
        )
        for n in range(4)
    ]
    await asyncio.gather(*tasks)
    release.set()
    await watching
    assert max(each.running for each in seen) >= 2
    assert 0 < max(each.kv_use for each in seen) < 1
    assert all(each.preempted == before.preempted for each in seen)
    again = VLLMEngine(first.llm, tokenizer=TOKENIZER)
    assert await again.pressure() == await first.pressure(), "engines over one AsyncLLM share its statistics"


@on_loop
async def test_an_answer_ends_with_the_end_ids_of_the_models_generation_config(first, tmp_path, monkeypatch):
    whole = await first.sample(PROMPTS[0], max_tokens=16, key="whole")
    other = next(token for token in whole.ids[1:] if token != whole.ids[0])
    GenerationConfig(eos_token_id=[TOKENIZER.eos_token_id, other]).save_pretrained(tmp_path)
    monkeypatch.setattr(first.llm.vllm_config.model_config, "generation_config", str(tmp_path))
    engine = VLLMEngine(first.llm, tokenizer=TOKENIZER, temperature=0)
    assert engine.stop_token_ids == (TOKENIZER.eos_token_id, other)
    found = await engine.sample(PROMPTS[0], max_tokens=16, key="cut")
    assert (found.ids, found.finish) == (whole.ids[: whole.ids.index(other) + 1], "stop")


@on_loop
async def test_a_dead_engine_is_an_infrastructure_error(llm):
    """The last test of this file: it ends vLLM."""
    engine = VLLMEngine(llm, tokenizer=TOKENIZER, **LONG)
    task, began = begin(engine, PROMPTS[0])
    await began.wait()
    llm.engine_core.shutdown()
    with pytest.raises(InfrastructureError, match="EngineDeadError"):
        await task
    with pytest.raises(InfrastructureError, match="EngineDeadError"):
        await engine.sample(PROMPTS[0], max_tokens=8, key="b")
    with pytest.raises(InfrastructureError):
        await engine.update(None)
    await engine.close()
