"""Any TorchRL policy is an engine: its batches, its answers, its errors."""

import asyncio
import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers.limit import limit
from tensordict import TensorDict, TensorDictBase
from torchrl.modules.llm import TransformersWrapper

from torchrl_agentic.engines import Sampled
from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.rollout import LockStep, agent_policy
from torchrl_agentic.testing import EngineContract, byte_tokenizer, load_tiny, run_skipping, tiny_questions
from torchrl_agentic.transforms.token_rows import TOKENS_LEFT, TokenRow, read_rows, write_rows

MODEL, TOKENIZER = load_tiny()
PROMPTS: list[list[int]] = [
    TOKENIZER.apply_chat_template(
        [{"role": "user", "content": question["query"]}], add_generation_prompt=True, return_dict=False
    )
    for question in tiny_questions(4)
]
CONTEXT = MODEL.config.max_position_embeddings


class TestAgentPolicy(EngineContract):
    prompts = PROMPTS[:3]
    stop_ids = (TOKENIZER.eos_token_id,)
    min_tokens = 5
    too_long = (5,) * CONTEXT
    other_weights = (
        agent_policy(copy.deepcopy(MODEL), TOKENIZER),
        lambda policy: policy.load_state_dict(policy.state_dict()),
    )

    async def make(self) -> LockStep:
        policy = agent_policy(MODEL, TOKENIZER, max_new_tokens=64, temperature=0)
        return LockStep(policy, TOKENIZER, max_concurrent=4, wait_s=0.001)


WORDS = byte_tokenizer()
PAD, EOS = WORDS.pad_token_id, WORDS.eos_token_id


class _Policy:
    """A policy that answers [first id + 1, first id + 2, ..., stop token] and ignores bounds."""

    def __init__(self, *, padded: bool = False, log_probs: bool = True) -> None:
        self.padded, self.log_probs = padded, log_probs
        self.batches: list[list[list[int]]] = []
        self.threads: set[int] = set()
        self.before: Callable[[], None] = lambda: None
        self.loaded: list[Any] = []

    def load_state_dict(self, weights: Any) -> None:
        self.loaded.append(weights)

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        self.threads.add(threading.get_ident())
        rows = read_rows(td, "tokens")
        assert rows is not None
        prompts = [row.ids("prompt") for row in rows]
        self.batches.append(prompts)
        self.before()
        answers = [[prompt[0] + n + 1 for n in range(len(prompt))] + [EOS] for prompt in prompts]
        if self.padded:
            width = max(map(len, answers))
            answers = [answer + [PAD] * (width - len(answer)) for answer in answers]
            tokens = {"response": torch.tensor(answers)}
            td["tokens"] = TensorDict(tokens, batch_size=td.batch_size)
            if self.log_probs:
                known = TensorDict({"response": torch.full((len(answers), width), -0.5)}, td.batch_size)
                td["log_probs"] = known
            return td
        responses = [{"response": torch.tensor(answer)} for answer in answers]
        merged = [row.merged(TokenRow(more)) for row, more in zip(rows, responses, strict=True)]
        write_rows(td, "tokens", merged)
        if self.log_probs:
            known = [TokenRow({"response": torch.full((len(answer),), -0.5)}) for answer in answers]
            write_rows(td, "log_probs", known)
        return td


class TestAPolicyThatPads(EngineContract):
    prompts = ([5, 6, 7, 8], [20, 3], [40, 1, 1])
    stop_ids = (EOS,)
    min_tokens = 3
    has_log_probs = False

    async def make(self) -> LockStep:
        return LockStep(_Policy(padded=True, log_probs=False), WORDS, max_concurrent=3, wait_s=0.0)


async def _all(engine: LockStep, prompts: Sequence[Sequence[int]], max_tokens: int = 50) -> list[Sampled]:
    asked = (engine.sample(one, max_tokens=max_tokens, key=f"{n}") for n, one in enumerate(prompts))
    return await asyncio.gather(*asked)


@pytest.mark.parametrize("padded", [False, True])
async def test_padding_is_no_part_of_an_answer(padded: bool):
    engine = LockStep(_Policy(padded=padded), WORDS)
    found = await _all(engine, [[10] * 4, [20]])
    assert found == [
        Sampled([11, 12, 13, 14, EOS], [-0.5] * 5, "stop", 0),
        Sampled([21, EOS], [-0.5] * 2, "stop", 0),
    ]
    await engine.close()


async def test_an_answer_beyond_its_bound_is_cut():
    engine = LockStep(_Policy(), WORDS)
    found = await _all(engine, [[10] * 4, [20]], max_tokens=2)
    assert found == [Sampled([11, 12], [-0.5] * 2, "length", 0), Sampled([21, EOS], [-0.5] * 2, "stop", 0)]
    await engine.close()


async def test_the_policy_gets_the_bounds_of_its_rows():
    bounds: list[list[list[int]]] = []
    policy = _Policy()

    def noting(td: TensorDictBase) -> TensorDictBase:
        bounds.append(td[TOKENS_LEFT].tolist())
        return policy(td)

    engine = LockStep(noting, WORDS, context_length=20)
    await asyncio.gather(
        *(engine.sample([5] * n, max_tokens=bound, key=f"{n}") for n, bound in ((3, 7), (15, 30)))
    )
    assert bounds == [[[7], [5]]]
    await engine.close()


def test_requests_of_one_wait_are_one_batch():
    async def main() -> list[int]:
        policy = _Policy()
        engine = LockStep(policy, WORDS, wait_s=1.0, max_concurrent=8)

        async def later(delay: float) -> None:
            await asyncio.sleep(delay)
            await engine.sample([5], max_tokens=9, key=f"{delay}")

        await asyncio.gather(*map(later, (0.0, 0.4, 0.9, 5.0)))
        await engine.close()
        return [len(batch) for batch in policy.batches]

    assert run_skipping(main()) == [3, 1]


def test_a_full_batch_does_not_wait():
    async def main() -> tuple[list[int], float]:
        policy = _Policy()
        engine = LockStep(policy, WORDS, wait_s=1.0, max_concurrent=2)
        await _all(engine, [[5]] * 2)
        await _all(engine, [[5]] * 5)
        await engine.close()
        return [len(batch) for batch in policy.batches], asyncio.get_running_loop().time()

    assert run_skipping(main()) == ([2, 2, 2, 1], 0.0)


async def test_the_policy_runs_on_one_thread_while_the_loop_goes_on():
    """The policy waits for an event that the loop sets; requests made meanwhile are the next batch."""
    policy, running, go = _Policy(), threading.Event(), threading.Event()

    def wait() -> None:
        running.set()
        assert go.wait(limit(30))

    policy.before = wait
    engine = LockStep(policy, WORDS, wait_s=0.0, max_concurrent=8)
    first = asyncio.create_task(engine.sample([5], max_tokens=9, key="a"))
    while not running.is_set():
        await asyncio.sleep(0.001)
    others = [asyncio.create_task(engine.sample([6], max_tokens=9, key=f"{n}")) for n in range(3)]
    others[0].cancel()
    await asyncio.sleep(0)
    go.set()
    await asyncio.gather(first, *others, return_exceptions=True)
    assert policy.batches == [[[5]], [[6], [6]]]
    assert len(policy.threads) == 1
    assert threading.get_ident() not in policy.threads
    await engine.close()


async def test_an_update_waits_for_the_batch_that_runs():
    policy, running, go = _Policy(), threading.Event(), threading.Event()

    def wait() -> None:
        running.set()
        assert go.wait(limit(30))
        assert not policy.loaded

    policy.before = wait
    engine = LockStep(policy, WORDS, wait_s=0.0)
    request = asyncio.create_task(engine.sample([5], max_tokens=9, key="a"))
    while not running.is_set():
        await asyncio.sleep(0.001)
    update = asyncio.create_task(engine.update({"w": 1}))
    await asyncio.sleep(0)
    go.set()
    assert await update == 1
    assert policy.loaded == [{"w": 1}]
    found = await request
    assert (found.finish, found.version) == ("stop", 0)
    policy.before = lambda: None
    assert (await engine.sample([5], max_tokens=9, key="a")).version == 1
    await engine.close()


async def test_weights_go_to_the_callback_or_to_the_policy():
    loaded: list[Any] = []
    engine = LockStep(_Policy(), WORDS, load=loaded.append)
    assert await engine.update("weights") == 1
    assert await engine.update(None) == 2
    assert loaded == ["weights"]
    await engine.close()
    policy = agent_policy(MODEL, TOKENIZER, max_new_tokens=4)
    engine = LockStep(policy, TOKENIZER)
    assert await engine.update(policy.state_dict()) == 1
    with pytest.raises(RuntimeError, match="Missing key"):
        await engine.update({})
    assert engine.version == 1
    await engine.close()


async def test_a_policy_that_fails_is_an_infrastructure_error_of_its_batch():
    policy = _Policy()
    engine = LockStep(policy, WORDS)

    def fail() -> None:
        raise RuntimeError("CUDA error")

    policy.before = fail
    found = await asyncio.gather(
        *(engine.sample([5], max_tokens=9, key=f"{n}") for n in range(2)), return_exceptions=True
    )
    assert all(isinstance(one, InfrastructureError) and "CUDA error" in str(one) for one in found)
    policy.before = lambda: None
    assert (await engine.sample([5], max_tokens=9, key="a")).finish == "stop"
    await engine.close()


async def test_a_policy_without_ids_is_a_value_error_that_says_so():
    engine = LockStep(lambda td: td, WORDS)
    with pytest.raises(ValueError, match="input_mode='tokens'"):
        await engine.sample([5], max_tokens=9, key="a")
    await engine.close()


async def test_closing_does_not_wait_for_the_batch_that_runs():
    policy, running, go = _Policy(), threading.Event(), threading.Event()

    def wait() -> None:
        running.set()
        assert go.wait(limit(30))

    policy.before = wait
    engine = LockStep(policy, WORDS, wait_s=0.0)
    request = asyncio.create_task(engine.sample([5], max_tokens=9, key="a"))
    while not running.is_set():
        await asyncio.sleep(0.001)
    await engine.close()
    with pytest.raises(InfrastructureError, match="closed"):
        await request
    go.set()


def test_an_engine_serves_several_loops_one_after_the_other():
    engine = LockStep(_Policy(), WORDS)
    for key in "ab":
        assert len(asyncio.run(engine.sample([5], max_tokens=2, key=key)).ids) == 2
    asyncio.run(engine.close())


@pytest.mark.parametrize("options", [{"wait_s": -1.0}, {"max_concurrent": 0}, {"context_length": 0}])
def test_options_out_of_range_are_refused(options: dict[str, Any]):
    with pytest.raises(ValueError, match=next(iter(options))):
        LockStep(_Policy(), WORDS, **options)


@pytest.mark.parametrize(
    "policy",
    [
        lambda: TransformersWrapper(MODEL, tokenizer=TOKENIZER),
        lambda: agent_policy(MODEL, TOKENIZER, mode="history"),
    ],
    ids=["TransformersWrapper", "agent_policy"],
)
def test_a_policy_that_reads_conversations_is_refused(policy):
    with pytest.raises(ValueError, match=r"gives a policy token ids, but .* reads"):
        LockStep(policy(), TOKENIZER)


@pytest.mark.filterwarnings("ignore:size_average and reduce args")
async def test_a_wrapper_of_torchrl_that_reads_tokens_answers():
    options = {"input_mode": "tokens", "pad_output": False, "generate_kwargs": {"max_new_tokens": 4}}
    engine = LockStep(TransformersWrapper(MODEL, tokenizer=TOKENIZER, **options), TOKENIZER)
    found = await engine.sample(PROMPTS[0], max_tokens=4, key="a")
    await engine.close()
    assert 0 < len(found.ids) <= 4
