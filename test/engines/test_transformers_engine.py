"""The engine over a transformers model keeps the contract and samples what the model samples."""

import asyncio
import copy
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers.limit import limit
from tensordict import TensorDict
from transformers import Qwen2Config, Qwen2ForCausalLM

from torchrl_agentic.engines import Sampled, TransformersEngine
from torchrl_agentic.engines.sampling import Sampling
from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.testing import EngineContract, byte_tokenizer, load_tiny, tiny_questions

MODEL, TOKENIZER = load_tiny()
PROMPTS: list[list[int]] = [
    TOKENIZER.apply_chat_template(
        [{"role": "user", "content": question["query"]}], add_generation_prompt=True, return_dict=False
    )
    for question in tiny_questions(8)
]
CONTEXT = MODEL.config.max_position_embeddings


class TestGreedy(EngineContract):
    prompts = PROMPTS[:3]
    stop_ids = (TOKENIZER.eos_token_id,)
    min_tokens = 5
    too_long = (5,) * CONTEXT
    other_weights = (
        copy.deepcopy(MODEL),
        copy.deepcopy(MODEL).state_dict(),
        TensorDict.from_module(copy.deepcopy(MODEL)),
        lambda model: model.load_state_dict(copy.deepcopy(MODEL).state_dict()),
    )

    async def make(self) -> TransformersEngine:
        return TransformersEngine(MODEL, TOKENIZER, temperature=0, max_concurrent=4)


class TestSampling(EngineContract):
    prompts = PROMPTS[:3]
    stop_ids = (TOKENIZER.eos_token_id,)
    max_tokens = 256
    is_deterministic = False

    async def make(self) -> TransformersEngine:
        weights = {name: value.clone() for name, value in MODEL.state_dict().items()}
        type(self).weights = weights
        return TransformersEngine(MODEL, TOKENIZER, temperature=0.7, top_p=0.9, top_k=20, seed=0)


WORDS = byte_tokenizer()


def _random_model(seed: int = 0, **options: Any) -> Qwen2ForCausalLM:
    """Return an untrained model, which hardly ever samples a stop token, so that answers are long."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        **options,
    )
    return Qwen2ForCausalLM(config).eval()


def _generated(model: Any, tokenizer: Any, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Return the greedy answer of `model.generate`."""
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        suppress_tokens=[tokenizer.pad_token_id],
    )
    return found[0, len(prompt) :].tolist()


def _log_probs(
    model: Any, prompt: Sequence[int], ids: Sequence[int], *, temperature: float = 1.0
) -> list[float]:
    """Return the log-probabilities of an answer in one pass over all tokens."""
    whole = torch.tensor([[*prompt, *ids]])
    with torch.no_grad():
        logits = model(whole).logits[0, len(prompt) - 1 : -1].float()
    known = (logits / temperature).log_softmax(-1)
    return known.gather(-1, torch.tensor(ids)[:, None]).squeeze(-1).tolist()


def _prompts(sizes: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, len(WORDS), (size,), generator=generator).tolist() for size in sizes]


async def _all(
    engine: TransformersEngine, prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[Sampled]:
    asked = (engine.sample(one, max_tokens=max_tokens, key=f"{n}") for n, one in enumerate(prompts))
    return await asyncio.gather(*asked)


async def test_greedy_answers_and_log_probs_are_those_of_generate():
    engine = TransformersEngine(MODEL, TOKENIZER, temperature=0)
    for prompt, found in zip(PROMPTS, await _all(engine, PROMPTS, 60), strict=True):
        assert list(found.ids) == _generated(MODEL, TOKENIZER, prompt, 60)
        assert found.log_probs == pytest.approx(_log_probs(MODEL, prompt, found.ids), abs=1e-4)
    await engine.close()


WINDOW = {
    "use_sliding_window": True,
    "sliding_window": 16,
    "max_window_layers": 1,
    "layer_types": ["full_attention", "sliding_attention"],
}


@pytest.mark.parametrize("options", [{}, WINDOW], ids=["full", "sliding"])
@pytest.mark.parametrize("prefix_cache_tokens", [0, 32_768])
async def test_turns_of_unequal_rows_are_those_of_generate(options: dict[str, Any], prefix_cache_tokens: int):
    """Batches of three, prompts of 1 to 90 tokens, and a second turn that extends most first ones."""
    model = _random_model(**options)
    engine = TransformersEngine(
        model, WORDS, temperature=0, max_concurrent=3, prefix_cache_tokens=prefix_cache_tokens
    )
    prompts = _prompts([1, 40, 7, 90, 23, 2, 64])
    bounds = [9, 30, 17, 5, 25, 40, 12]

    async def trajectory(number: int) -> None:
        ids, bound = prompts[number], bounds[number]
        for turn in range(3):
            found = await engine.sample(ids, max_tokens=bound, key=f"{number}")
            assert list(found.ids) == _generated(model, WORDS, ids, bound)
            assert found.log_probs == pytest.approx(_log_probs(model, ids, found.ids), abs=1e-4)
            # The first trajectory changes its first token, as one whose ids drifted.
            ids = [*ids, *found.ids, *prompts[(number + turn) % 7]]
            ids[0] = 5 if number == 0 else ids[0]

    await asyncio.gather(*map(trajectory, range(7)))
    await engine.close()


class _Passes:
    """Records the passes of a model: number of new tokens, and the thread."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.sizes: list[tuple[int, int]] = []
        self.threads: set[int] = set()
        self.before: Callable[[], None] = lambda: None
        model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.before()
        self.sizes.append(tuple(kwargs["input_ids"].shape))
        self.threads.add(threading.get_ident())


async def test_a_next_turn_computes_the_new_tokens_only():
    model = _random_model()
    passes = _Passes(model)
    engine = TransformersEngine(model, WORDS, temperature=0)
    (prompt,) = _prompts([50])
    first = await engine.sample(prompt, max_tokens=4, key="a")
    await engine.sample([*prompt, *first.ids, 7, 8, 9], max_tokens=1, key="a")
    await engine.sample(prompt, max_tokens=1, key="b")
    # The last sampled token has no keys and values yet: four tokens are new to the second turn.
    assert passes.sizes == [(1, 50), (1, 1), (1, 1), (1, 1), (1, 4), (1, 50)]
    await engine.close()


async def test_kept_prefixes_stay_within_their_bound():
    model = _random_model()
    passes = _Passes(model)
    engine = TransformersEngine(model, WORDS, temperature=0, prefix_cache_tokens=100)
    prompts = _prompts([40, 40, 40])
    for number, prompt in enumerate(prompts):
        await engine.sample(prompt, max_tokens=1, key=f"{number}")
    passes.sizes.clear()
    for number in (2, 1, 0):
        await engine.sample([*prompts[number], 5], max_tokens=1, key=f"{number}")
    assert passes.sizes == [(1, 1), (1, 1), (1, 41)]
    await engine.close()


async def test_a_request_joins_and_leaves_while_another_decodes():
    model = _random_model()
    passes = _Passes(model)
    engine = TransformersEngine(model, WORDS, temperature=0)
    long, short = _prompts([20, 33])
    began = asyncio.Event()
    order: list[str] = []

    async def ask(name: str, prompt: Sequence[int], max_tokens: int) -> Sampled:
        found = await engine.sample(prompt, max_tokens=max_tokens, key=name, on_ids=lambda _: began.set())
        order.append(name)
        return found

    first = asyncio.create_task(ask("long", long, 200))
    await began.wait()
    second = await ask("short", short, 10)
    assert list(second.ids) == _generated(model, WORDS, short, 10)
    assert list((await first).ids) == _generated(model, WORDS, long, 200)
    assert order == ["short", "long"]
    assert passes.sizes.count((2, 1)) == 9  # decoded together
    await engine.close()


async def test_the_model_runs_on_one_thread_that_is_not_the_loops():
    model = _random_model()
    passes = _Passes(model)
    engine = TransformersEngine(model, WORDS)
    await _all(engine, _prompts([5, 6, 7]), 5)
    await engine.update(lambda given: passes.threads.add(threading.get_ident()))
    await _all(engine, _prompts([5, 6, 7]), 5)
    assert len(passes.threads) == 1
    assert threading.get_ident() not in passes.threads
    await engine.close()


async def test_the_loop_runs_while_the_model_does():
    """The model waits for an event that the loop sets."""
    model = _random_model()
    passes, go = _Passes(model), threading.Event()
    passes.before = lambda: None if go.wait(limit(30)) else pytest.fail("the event loop was blocked")
    engine = TransformersEngine(model, WORDS)
    asyncio.get_running_loop().call_later(0.01, go.set)
    assert len((await engine.sample([5], max_tokens=3, key="a")).ids) == 3
    await engine.close()


async def test_a_cancelled_request_leaves_the_batch():
    model = _random_model()
    passes = _Passes(model)
    engine = TransformersEngine(model, WORDS, temperature=0, max_concurrent=1)
    first, second = _prompts([5, 6])
    began = asyncio.Event()
    doomed = asyncio.create_task(engine.sample(first, max_tokens=500, key="a", on_ids=lambda _: began.set()))
    await began.wait()
    waiting = asyncio.create_task(engine.sample(second, max_tokens=10, key="b"))
    doomed.cancel()
    assert list((await waiting).ids) == _generated(model, WORDS, second, 10)
    assert len(passes.sizes) < 100
    await engine.close()


async def test_the_same_seed_samples_the_same_alone_and_in_a_batch():
    model = _random_model()
    prompts = _prompts([4, 30, 11, 25])
    both: list[list[list[int]]] = []
    for max_concurrent in (1, 4):
        engine = TransformersEngine(model, WORDS, temperature=1.0, seed=7, max_concurrent=max_concurrent)
        both.append([list(found.ids) for found in await _all(engine, prompts, 20)])
        await engine.close()
    assert both[0] == both[1]
    other = TransformersEngine(model, WORDS, temperature=1.0, seed=8)
    assert [list(found.ids) for found in await _all(other, prompts, 20)] != both[0]
    await other.close()


async def test_trajectories_of_a_group_differ():
    engine = TransformersEngine(_random_model(), WORDS, seed=7)
    found = await _all(engine, _prompts([10]) * 8, 20)
    assert len({tuple(one.ids) for one in found}) == 8
    await engine.close()


async def _first_tokens(count: int, **options: Any) -> Counter[int]:
    engine = TransformersEngine(_random_model(), WORDS, seed=1, **options)
    found = await _all(engine, [[5, 6, 7]] * count, 1)
    await engine.close()
    return Counter(one.ids[0] for one in found)


def _distribution() -> torch.Tensor:
    with torch.no_grad():
        return _random_model()(torch.tensor([[5, 6, 7]])).logits[0, -1].float()


async def test_sampled_tokens_have_the_distribution_of_the_model():
    logits = _distribution() / 0.5
    logits[WORDS.pad_token_id] = -torch.inf
    expected = logits.softmax(-1)
    counts = await _first_tokens(2000, temperature=0.5)
    found = torch.tensor([counts[token] for token in range(len(WORDS))]) / 2000
    assert float((found - expected).abs().sum() / 2) < 0.1  # total variation
    assert counts[WORDS.pad_token_id] == 0


async def test_top_k_and_top_p_leave_the_most_likely_tokens():
    logits = _distribution()
    logits[WORDS.pad_token_id] = -torch.inf
    order = logits.argsort(descending=True).tolist()
    counts = await _first_tokens(500, top_k=3)
    assert set(counts) == set(order[:3])
    shares = logits.softmax(-1).sort(descending=True).values.cumsum(-1)
    nucleus = int((shares < 0.5).sum()) + 1
    counts = await _first_tokens(500, top_p=0.5)
    assert set(counts) <= set(order[:nucleus])
    assert counts.most_common(1)[0][0] in order[:2]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
async def test_log_probs_are_those_at_the_sampling_temperature(temperature: float):
    model = _random_model()
    engine = TransformersEngine(model, WORDS, temperature=temperature, seed=0)
    (prompt,) = _prompts([12])
    found = await engine.sample(prompt, max_tokens=20, key="a")
    expected = _log_probs(model, prompt, found.ids, temperature=temperature)
    assert found.log_probs == pytest.approx(expected, abs=2e-5)
    assert engine.sampling == Sampling(temperature, temperature)
    await engine.close()


async def test_log_probs_are_those_among_the_tokens_that_top_k_and_top_p_leave():
    options: dict[str, Any]
    for options in ({"top_k": 1}, {"top_p": 1e-6, "temperature": 2.0}):  # one token is left: it is certain
        engine = TransformersEngine(_random_model(), WORDS, **options, seed=0)
        (prompt,) = _prompts([12])
        found = await engine.sample(prompt, max_tokens=20, key="a")
        assert found.log_probs == [0.0] * 20
        assert engine.sampling.others
        await engine.close()


@pytest.mark.parametrize("form", ["module", "state dict"])
async def test_tokens_after_an_update_are_of_the_new_weights(form: str):
    """The answer aborts in the middle; its two parts are those of the two models, without stale keys."""
    old, new = _random_model(0), _random_model(1)
    weights: Any = new
    if form == "state dict":
        weights = {name: value.clone() for name, value in new.state_dict().items()}
    engine = TransformersEngine(old, WORDS, temperature=0)
    (prompt,) = _prompts([30])
    before = _generated(old, WORDS, prompt, 150)
    began = asyncio.Event()
    task = asyncio.create_task(engine.sample(prompt, max_tokens=150, key="a", on_ids=lambda _: began.set()))
    await began.wait()
    assert await engine.update(weights) == 1
    first = await task
    assert (first.finish, first.version) == ("aborted", 0)
    assert list(first.ids) == before[: len(first.ids)]
    resumed = [*prompt, *first.ids]
    rest = await engine.sample(resumed, max_tokens=20, key="a")
    assert (rest.finish, rest.version) == ("length", 1)
    assert list(rest.ids) == _generated(new, WORDS, resumed, 20)
    assert rest.log_probs == pytest.approx(_log_probs(new, resumed, rest.ids), abs=1e-4)
    await engine.close()


async def test_weights_that_do_not_fit_are_an_error_and_no_update():
    engine = TransformersEngine(_random_model(), WORDS)
    with pytest.raises(RuntimeError, match="Missing key"):
        await engine.update({})
    with pytest.raises(TypeError, match="state dict"):
        await engine.update(3)
    assert engine.version == 0
    assert len((await engine.sample([5], max_tokens=2, key="a")).ids) == 2
    await engine.close()


async def test_a_step_that_fails_is_an_infrastructure_error_and_the_next_one_works():
    model = _random_model()
    passes = _Passes(model)
    engine = TransformersEngine(model, WORDS, temperature=0)

    def fail() -> None:
        raise torch.OutOfMemoryError("out of memory")

    passes.before = fail
    found = await asyncio.gather(
        *(engine.sample([5], max_tokens=3, key=f"{n}") for n in range(3)), return_exceptions=True
    )
    assert all(isinstance(one, InfrastructureError) and "out of memory" in str(one) for one in found)
    passes.before = lambda: None
    found = await engine.sample([5], max_tokens=3, key="a")
    assert list(found.ids) == _generated(model, WORDS, [5], 3)
    await engine.close()


async def test_ids_outside_the_vocabulary_harm_nobody():
    engine = TransformersEngine(_random_model(), WORDS)
    good = asyncio.create_task(engine.sample([5], max_tokens=3, key="a"))
    for bad in ([5, len(WORDS)], [-1]):
        with pytest.raises(ValueError, match="vocabulary"):
            await engine.sample(bad, max_tokens=3, key="b")
    assert len((await good).ids) == 3
    await engine.close()


async def test_an_answer_ends_with_the_context():
    engine = TransformersEngine(_random_model(), WORDS, context_length=10)
    found = await engine.sample([5] * 8, max_tokens=100, key="a")
    assert (len(found.ids), found.finish) == (2, "length")
    await engine.close()


def test_an_engine_serves_several_loops_one_after_the_other():
    engine = TransformersEngine(_random_model(), WORDS)
    for key in "ab":
        assert len(asyncio.run(engine.sample([5], max_tokens=2, key=key)).ids) == 2
    asyncio.run(engine.close())


def test_an_event_loop_that_ends_fails_its_requests():
    engine = TransformersEngine(_random_model(), WORDS)

    async def main() -> list[Any]:
        tasks = [asyncio.create_task(engine.sample([5], max_tokens=500, key=f"{n}")) for n in range(2)]
        await asyncio.sleep(0.01)
        for task in asyncio.all_tasks() - {asyncio.current_task(), *tasks}:
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert all(isinstance(one, InfrastructureError) for one in asyncio.run(main()))


@pytest.mark.parametrize(
    "options", [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.5}, {"top_k": -1}, {"max_concurrent": 0}]
)
def test_options_out_of_range_are_refused(options: dict[str, Any]):
    with pytest.raises(ValueError, match=next(iter(options))):
        TransformersEngine(MODEL, TOKENIZER, **options)
