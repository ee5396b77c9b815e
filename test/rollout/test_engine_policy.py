"""`agent_policy` over any `Engine`: rows at the same time, exact ids, bounds of rows, and failures."""

import asyncio
import math

import pytest
import torch
from helpers.chat_envs import begin, chat_env
from helpers.model_families import FAMILIES
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict

from torchrl_agentic import EndTrajectory, InfrastructureError, Message, ToolCompose, TurnTokenizer
from torchrl_agentic.dispatch import event_loop
from torchrl_agentic.engines import (
    ChatEngine,
    Engine,
    EnginePool,
    Sampled,
    Sampling,
    ScriptedEngine,
    TransformersEngine,
)
from torchrl_agentic.rollout import LockStep, agent_policy, trajectory_batch
from torchrl_agentic.testing import load_tiny

pytestmark = pytest.mark.filterwarnings("ignore:(Prompt|Full) history should have one more batch dimension")
TOKENIZER = FAMILIES["qwen2_5"].tokenizer()
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class Talks(Engine):
    """Answers "word " and the length of the prompt; a function of (engine, key) may act before."""

    def __init__(self, act=None):
        self.act, self.asked, self.open, self.most = act, [], 0, 0

    async def sample(self, ids, *, max_tokens, key, on_ids=None):
        self.asked.append((key, len(ids), max_tokens))
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            await asyncio.sleep(0)
            if self.act is not None and (found := await self.act(self, key)) is not None:
                return found
            text = TOKENIZER.encode(f"word {len(ids)}", add_special_tokens=False)
            whole = [*text, TOKENIZER.eos_token_id]
            found = whole[:max_tokens]
            return Sampled(found, [-0.25] * len(found), "stop" if found == whole else "length")
        finally:
            self.open -= 1

    async def update(self, weights):
        self.version += 1
        return self.version

    async def close(self):
        pass


def env_of(rows, tokenizer=TOKENIZER, turns=2, **options):
    compose = ToolCompose([add])
    turn_tokenizer = TurnTokenizer(tokenizer, tools=compose.tools, **options)
    return chat_env((rows,), compose, EndTrajectory(max_turns=turns), turn_tokenizer)


def roll(env, policy, turns=2):
    """Return the steps of a rollout; asserts that each prompt begins with all ids before it."""
    td, steps = begin(env), []
    for _ in range(turns):
        steps.append(env.step(policy(td)))
        for row in steps[-1].unbind(0):
            full = row["tokens", "full"]
            assert torch.equal(row["next", "tokens", "prompt"][: len(full)], full)
        td = env.step_mdp(steps[-1])
    env.close()
    return steps


def test_all_rows_of_a_batch_are_sampled_at_the_same_time():
    engine = Talks()
    steps = roll(env_of(5), agent_policy(engine, TOKENIZER))
    assert (engine.most, len(engine.asked)) == (5, 10)
    for step in steps:
        for row in step.unbind(0):
            size = len(row["tokens", "prompt"])
            assert row["history"].full[-1].content == f"word {size}"
            assert row["log_probs", "response"].tolist() == [-0.25] * len(row["tokens", "response"])
            assert row["masks", "all_assistant_mask"].sum() == len(row["tokens", "response"])


def test_the_requests_of_a_trajectory_have_its_name_and_no_other():
    engine = Talks()
    env = env_of(3)
    policy = agent_policy(engine, TOKENIZER)
    steps = [*roll(env, policy), *roll(env_of(3), policy)]
    keys = [key for key, _, _ in engine.asked]
    assert keys[:3] == keys[3:6]
    assert keys[6:9] == keys[9:12]
    assert len(set(keys)) == 6
    assert keys[:3] == [str(number) for number in steps[0]["agentic", "trajectory"].flatten().tolist()]


def test_a_policy_over_an_engine_samples_what_its_script_says():
    engine = ScriptedEngine([[CALL, "It is 3."]], TOKENIZER, log_prob=-0.5)
    steps = roll(env_of(2), agent_policy(engine, TOKENIZER))
    assert steps[0]["next", "agentic", "any_tool_calls"].all()
    for row in trajectory_batch(steps).unbind(0):
        text = TOKENIZER.decode(row["tokens", "full"])
        assert text.count("<tool_response>\n3\n") == 1
        assert text.rstrip().endswith("It is 3.<|im_end|>")
        known = row["log_probs", "full"][row["masks", "all_assistant_mask"]]
        assert known.eq(-0.5).all()


def test_transformers_samples_the_same_by_an_engine_and_by_generate():
    model, tokenizer = load_tiny()
    engine = TransformersEngine(model, tokenizer, temperature=0)
    found = []
    for given, more in ((engine, {}), (model, {"temperature": 0})):
        env = env_of(3, tokenizer, tokenization_sanity_check_mode="disable")
        found.append(roll(env, agent_policy(given, tokenizer, max_new_tokens=24, **more)))
    event_loop.run(engine.close())
    for one, other in zip(*map(trajectory_batch, found), strict=True):
        assert torch.equal(one["tokens", "full"], other["tokens", "full"])
        assert torch.equal(one["masks", "all_assistant_mask"], other["masks", "all_assistant_mask"])
        torch.testing.assert_close(
            one["log_probs", "full"], other["log_probs", "full"], equal_nan=True, atol=1e-4, rtol=0
        )


def test_each_row_keeps_to_its_own_bound_and_one_without_room_is_not_asked():
    engine = Talks()
    env = env_of(3)
    asked = LazyStackedTensorDict.lazy_stack([NonTensorData(word) for word in ("a", "b c d", "e " * 20)])
    td = env.reset(TensorDict({"query": asked}, batch_size=[3]))
    sizes = [len(row["tokens", "prompt"]) for row in td.unbind(0)]
    engine.context_length = length = sizes[1] + 4
    assert sizes[0] < sizes[1] < length < sizes[2]
    td = agent_policy(engine, TOKENIZER, max_new_tokens=8)(td)
    assert [(size, bound) for _, size, bound in engine.asked] == [
        (size, min(8, length - size)) for size in sizes[:2]
    ]
    assert td["agentic", "room"].flatten().tolist() == [length - size for size in sizes]
    last = td.unbind(0)[2]
    assert len(last["tokens", "response"]) == len(last["log_probs", "response"]) == 0
    env.close()


def test_an_answer_that_an_update_aborts_goes_on_behind_its_ids():
    async def cut(engine, key):
        if len(engine.asked) <= 2:
            await engine.update(None)
            return Sampled([9, 8], [-1.0, -2.0], "aborted", 0)
        return None

    engine = Talks(cut)
    (step,) = roll(env_of(2), agent_policy(engine, TOKENIZER, max_new_tokens=30), turns=1)
    for row in step.unbind(0):
        size = len(row["tokens", "prompt"])
        whole = TOKENIZER.encode(f"word {size + 2}", add_special_tokens=False)
        assert row["tokens", "response"].tolist() == [9, 8, *whole, TOKENIZER.eos_token_id]
        assert row["log_probs", "response"].tolist()[:3] == [-1.0, -2.0, -0.25]
    assert sorted(bound for _, _, bound in engine.asked) == [28, 28, 30, 30]


def test_a_request_that_fails_once_is_made_again():
    async def lose(engine, key):
        if len(engine.asked) == 2 and key == engine.asked[0][0]:
            raise InfrastructureError("away")
        return

    engine = Talks(lose)
    (step,) = roll(env_of(2), agent_policy(engine, TOKENIZER), turns=1)
    assert len(engine.asked) == 3
    assert [row["history"].full[-1].content[:5] for row in step.unbind(0)] == ["word "] * 2


def test_a_row_that_cannot_be_sampled_raises_and_ends_the_requests_of_the_others():
    ended = []

    async def act(engine, key):
        if len(engine.asked) == 3 and not ended:
            raise ValueError("no such prompt")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(key)

    engine = Talks(act)
    env = env_of(3)
    with pytest.raises(ValueError, match="no such prompt"):
        agent_policy(engine, TOKENIZER)(begin(env))
    event_loop.run(asyncio.sleep(0))
    assert engine.open == 0
    env.close()


def test_unknown_log_probs_are_nan_and_left_out_if_nobody_wants_them():
    async def unknown(engine, key):
        return Sampled([9, TOKENIZER.eos_token_id], None, "stop")

    (step,) = roll(env_of(2), agent_policy(Talks(unknown), TOKENIZER), turns=1)
    assert all(math.isnan(one) for row in step.unbind(0) for one in row["log_probs", "response"])
    (step,) = roll(env_of(2), agent_policy(Talks(), TOKENIZER, return_log_probs=False), turns=1)
    assert "log_probs" not in set(step.keys())


def test_an_answer_that_breaks_the_protocol_of_engines_is_refused():
    async def long(engine, key):
        return Sampled([9] * 50, [-1.0] * 50, "length")

    env = env_of(1)
    with pytest.raises(InfrastructureError, match="sampled 50 tokens, but at most 8"):
        agent_policy(Talks(long), TOKENIZER, max_new_tokens=8)(begin(env))
    env.close()


def test_a_policy_says_what_its_engine_says():
    engine = Talks()
    engine.sampling, engine.stop_token_ids = Sampling(0.7, 0.7), (5,)
    policy = agent_policy(engine, TOKENIZER, stop_token_ids=[6])
    assert policy.sampling == Sampling(0.7, 0.7)
    assert policy.stop_token_ids == (TOKENIZER.eos_token_id, 6, 5)


def test_a_pool_serves_a_policy_and_a_policy_serves_an_engine():
    """`LockStep` runs the policy on a thread of its own, and the policy the engine on the event loop."""
    first, second = Talks(), Talks()
    first.max_concurrent = second.max_concurrent = 2
    engine = LockStep(agent_policy(EnginePool([first, second]), TOKENIZER), TOKENIZER)

    async def ask():
        return await asyncio.gather(*(engine.sample([5] * 9, max_tokens=30, key=f"{n}") for n in range(4)))

    found = event_loop.run(ask())
    assert [one.finish for one in found] == ["stop"] * 4
    assert len(first.asked) == len(second.asked) == 2
    event_loop.run(engine.close())


class Says(ChatEngine):
    async def chat(self, messages, *, tools, max_tokens, key):
        return Message("assistant", "hello")

    async def update(self, weights):
        return 0

    async def close(self):
        pass


@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        (Says(), {}, TypeError, "samples tokens; Says answers messages"),
        (object(), {}, TypeError, "a transformers model, a vLLM engine or an Engine is needed.*got object"),
        (Talks(), {"temperature": 0.5}, ValueError, "Talks has temperature of its own.*got 0.5"),
        (Talks(), {"top_p": 0.9}, ValueError, "Talks has top_p of its own"),
        (Talks(), {"tool_choice": "auto"}, ValueError, "Talks has tool_choice of its own"),
        (Talks(), {"generate_kwargs": {"min_p": 0.1}}, ValueError, "Talks has generate_kwargs of its own"),
        (Talks(), {"mode": "chat"}, ValueError, "mode is 'tokens' or 'history'"),
    ],
)
def test_what_an_engine_cannot_do_is_refused_by_name(model, options, error, message):
    with pytest.raises(error, match=message):
        agent_policy(model, TOKENIZER, **options)
