"""Against a real vLLM, on the CPU, with our tiny model: `make test-vllm` installs it. One engine for all."""

import warnings

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict
from torch.utils.data import DataLoader

with warnings.catch_warnings(action="ignore"):  # where vLLM is, TorchRL imports it, and that warns of much
    from helpers.chat_envs import collate, conversations
    from torchrl.collectors.llm import LLMCollector
    from torchrl.envs import Compose, TransformedEnv
    from torchrl.envs.llm import ChatEnv, DatasetChatEnv

from helpers.limit import limit

from torchrl_agentic import EndTrajectory, Tool, ToolCompose, TurnTokenizer
from torchrl_agentic.parsers import get_parser
from torchrl_agentic.rollout import agent_policy, ledgers, training_policy, trajectory_batch
from torchrl_agentic.testing.tiny import TINY, load_tiny, tiny_questions
from torchrl_agentic.tools import PythonTool

# vLLM, Ray and TorchRL warn of themselves.
pytestmark = [pytest.mark.engines, pytest.mark.timeout(limit(300)), pytest.mark.filterwarnings("default")]

ROWS = 16
QUESTIONS = tiny_questions(ROWS)
FLOAT32 = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 64}


@pytest.fixture(scope="module", autouse=True)
def small_cache():
    """A GiB for keys and values; and no figures of ours go to vLLM's or Ray's makers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_NO_USAGE_STATS", "1")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        yield


@pytest.fixture(scope="module")
def engine(small_cache):
    from vllm import LLM

    llm = LLM(str(TINY), **FLOAT32)
    yield llm
    llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def tiny():
    return load_tiny()


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return tiny[1]


def make_env(tokenizer, *, rows=ROWS, tools=None, turns=4, tokens=True, **options):
    compose = ToolCompose([PythonTool()] if tools is None else tools)
    between = [EndTrajectory(when_no_calls=True, max_turns=turns)]
    if tokens:
        between.append(TurnTokenizer(tokenizer, tools=compose.tools, **options))
    return TransformedEnv(ChatEnv(batch_size=(rows,)), Compose(compose, *between)), compose


def ask(env, queries):
    asked = LazyStackedTensorDict.lazy_stack([NonTensorData(query) for query in queries])
    return env.reset(TensorDict({"query": asked}, batch_size=env.batch_size))


def roll(env, policy, queries, turns=4):
    """Give the steps until all rows are done, and the last message of each when it was done.

    Asserts that each prompt of a continuing row begins with all ids before it.
    """
    td, steps, said = ask(env, queries), [], [None] * len(queries)
    for _ in range(turns):
        step = env.step(policy(td))
        steps.append(step)
        for row in step.unbind(0):
            if ("ledger", "mask") in row["next"].keys(True) and not row["done"].any():
                full, prompt = row["tokens", "full"], row["next", "tokens", "prompt"]
                assert torch.equal(prompt[: len(full)], full)
                assert len(row["next", "ledger", "mask"]) == len(prompt)
        for index, (chat, done) in enumerate(
            zip(conversations(step["next"]), step["next", "done"], strict=True)
        ):
            said[index] = chat[-1] if said[index] is None and done.any() else said[index]
        if all(said):
            break
        td = env.step_mdp(step)
    return steps, said


def right(said):
    return sum(
        message.text == f"The answer is {question['answer']}."
        for message, question in zip(said, QUESTIONS, strict=True)
    )


def recorded_and_recomputed(batch, tiny):
    """Pairs of log-probs of the sampled tokens: as vLLM gave them, and as transformers computes them."""
    with torch.no_grad():
        again = training_policy(*tiny)(batch.copy())
    pairs = []
    for row, other in zip(batch.unbind(0), again.unbind(0), strict=True):
        mask = row["masks", "all_assistant_mask"]
        pairs.append((row["log_probs", "full"][mask], other["log_probs", "full"][mask]))
    return pairs


def report(name, pairs):
    gap = torch.cat([(one - other).abs() for one, other in pairs])
    print(f"{name}: |Δ log-prob| of {len(gap)} tokens: max {gap.max():.1e}, mean {gap.mean():.1e}")
    return gap


@pytest.fixture(scope="module")
def greedy(engine, tokenizer):
    env, compose = make_env(tokenizer, raise_on_drift=True)
    policy = agent_policy(engine, tokenizer, compose.tools, temperature=0, max_new_tokens=128)
    yield roll(env, policy, [question["query"] for question in QUESTIONS])
    env.close()


def test_it_answers_questions_it_was_not_taught_by_calling_python(greedy, tokenizer):
    """Rows are of unequal length from the first prompt on, and end in different turns."""
    steps, said = greedy
    print(f"{right(said)} of {ROWS} right")
    assert right(said) >= ROWS - 2
    assert len(steps) >= 3
    batch = trajectory_batch(steps)
    assert len(batch) == ROWS
    assert len({len(row["tokens", "full"]) for row in batch.unbind(0)}) > ROWS // 2
    for row in batch.unbind(0):
        text = tokenizer.decode(row["tokens", "full"])
        assert text.count("<tool_call>\n{") - 1 == text.count("<tool_response>") >= 1  # one is in the prompt
        assert row["masks", "all_assistant_mask"].sum() < len(row["tokens", "full"]) / 2


def test_its_log_probs_are_those_that_transformers_computes(greedy, tiny):
    """Both compute in float32. Seen: 8e-6 at most; with weights of a model that was less sure, 5e-5."""
    pairs = recorded_and_recomputed(trajectory_batch(greedy[0]), tiny)
    gap = report("greedy", pairs)
    assert gap.max() < 1e-3
    assert gap.mean() < 1e-5


def test_the_first_token_and_the_one_that_ends_an_answer_have_their_log_probs(greedy, tiny):
    for step in greedy[0][:2]:
        for row in step.unbind(0):
            response, log_probs = row["tokens", "response"], row["log_probs", "response"]
            assert response[-1] == tiny[1].eos_token_id
            assert len(response) == len(log_probs)
            assert (log_probs[[0, -1]] < 0).all()
            ledger = row["next", "ledger"]
            size = len(row["tokens", "full"])
            assert ledger["mask"][size - len(response) : size].all()
            assert torch.equal(ledger["log_probs"][size - len(response) : size], log_probs)


def test_transformers_samples_the_same(greedy, tiny):
    """Greedy, in float32, from the same prompts: the share of answers with the same ids."""
    model, tokenizer = tiny
    policy = agent_policy(model, tokenizer, temperature=0, max_new_tokens=128)
    same = total = 0
    for step in greedy[0][:2]:
        prompts = step.select("history", ("tokens", "prompt"), ("masks", "all_attention_mask")).copy()
        for row in prompts.unbind(0):
            row["masks", "all_attention_mask"] = torch.ones_like(row["tokens", "prompt"], dtype=torch.bool)
        for row, other in zip(step.unbind(0), policy(prompts).unbind(0), strict=True):
            same += torch.equal(row["tokens", "response"], other["tokens", "response"])
            total += 1
            assert set(row["tokens"].keys()) == set(other["tokens"].keys())
    print(f"{same} of {total} answers have the same ids")
    assert same >= total - 1


def test_sampled_tokens_are_kept_with_the_log_probs_of_the_model(engine, tiny):
    """Hot and pushed towards new tokens, it writes noise; the log-probs are still those at temperature 1."""
    env, compose = make_env(tiny[1], turns=2, tokenization_sanity_check_mode="disable")
    hot = {"temperature": 2.0, "generate_kwargs": {"presence_penalty": 2.0, "frequency_penalty": 2.0}}
    policy = agent_policy(engine, tiny[1], compose.tools, max_new_tokens=120, **hot)
    steps, _ = roll(env, policy, [question["query"] for question in QUESTIONS])
    sampled = torch.cat([row["tokens", "response"] for row in steps[0].unbind(0)])
    assert len(sampled.unique()) > 100
    gap = report("noise", recorded_and_recomputed(trajectory_batch(steps), tiny))
    assert gap.max() < 1e-3
    env.close()


def test_the_pad_token_is_never_sampled(engine, tokenizer):
    """Losses would take it for padding. Here it is one of two tokens that are allowed at all."""
    other = tokenizer.convert_tokens_to_ids("<|im_start|>")
    env, compose = make_env(tokenizer)
    allowed = {"allowed_token_ids": [tokenizer.pad_token_id, other]}
    policy = agent_policy(engine, tokenizer, compose.tools, max_new_tokens=20, generate_kwargs=allowed)
    td = policy(ask(env, [question["query"] for question in QUESTIONS]))
    assert torch.cat([row["tokens", "response"] for row in td.unbind(0)]).unique().tolist() == [other]
    env.close()


def test_stop_token_ids_end_an_answer(engine, tokenizer, greedy):
    """TorchRL's wrapper drops `stop_token_ids`, without a word."""
    stop = greedy[0][0].unbind(0)[0]["tokens", "response"][3].item()
    env, compose = make_env(tokenizer)
    policy = agent_policy(engine, tokenizer, compose.tools, temperature=0, stop_token_ids=[stop])
    row = policy(ask(env, [question["query"] for question in QUESTIONS])).unbind(0)[0]
    assert row["tokens", "response"].tolist() == greedy[0][0].unbind(0)[0]["tokens", "response"][:4].tolist()
    assert row["history"].full[-1].is_complete
    env.close()


@pytest.mark.parametrize("missing", ["most of it", "only the end"])
def test_truncated_answer_is_closed_and_its_calls_do_not_run(engine, tokenizer, greedy, missing):
    """Even if the call is complete: a message without its end may continue."""
    first = greedy[0][0].unbind(0)[0]["tokens", "response"]
    called = []

    def python(code: str) -> str:
        """Run Python code."""
        called.append(code)
        return "1"

    size = 4 if missing == "most of it" else len(first) - 1
    env, compose = make_env(tokenizer, rows=1, tools=[python], turns=2)
    policy = agent_policy(engine, tokenizer, compose.tools, temperature=0, max_new_tokens=size)
    steps, _ = roll(env, policy, [QUESTIONS[0]["query"]])
    row = steps[0].unbind(0)[0]
    assert row["tokens", "response"].tolist() == first[:size].tolist()
    assert not row["next", "agentic", "any_tool_calls"].any()
    (ledger,) = ledgers(steps)
    assert [span.name for span in ledger.spans()][-2:] == ["sampled", "boundary"]
    closed = tokenizer.decode(row["next", "tokens", "prompt"][len(row["tokens", "full"]) :])
    assert closed.startswith("<|im_end|>\n")
    assert not called
    env.close()


ODD = [
    f"{word} {word} {word}"
    for word in ("hello", "<tool_call>", "äöü", "The answer is", "{}", "7 7", "", "no")
]


@pytest.mark.parametrize("parallel", [True, False])
def test_required_tool_choice_forces_a_call(engine, tokenizer, parallel):
    """The model was taught nothing like these; of what it samples without constraint, little can be read."""
    env, compose = make_env(tokenizer, rows=len(ODD))
    policy = agent_policy(
        engine, tokenizer, compose.tools, parser="hermes", tool_choice="required", temperature=1.0,
        parallel_tool_calls=parallel, max_new_tokens=256,
    )  # fmt: skip
    td = policy(ask(env, ODD))
    ended = 0
    for row in td.unbind(0):
        if row["tokens", "response"][-1] != tokenizer.eos_token_id:
            continue  # the code in the call was still going on
        ended += 1
        message = row["history"].full[-1]
        calls = get_parser("hermes").parse(message.content).calls
        assert calls
        assert parallel or len(calls) == 1
        assert [(call.error, call.tool, list(call.args)) for call in calls] == [
            (None, "python", ["code"])
        ] * len(calls)
    assert ended >= len(ODD) // 2
    env.close()


def test_log_probs_of_a_constrained_answer_are_of_what_the_constraint_left(engine, tiny):
    """Forced tokens have log-probability 0 there, but not for the model: recompute before training."""
    env, compose = make_env(tiny[1], rows=len(ODD), turns=1)
    policy = agent_policy(
        engine, tiny[1], compose.tools, parser="hermes", tool_choice="required", max_new_tokens=64
    )
    steps, _ = roll(env, policy, ODD)
    for recorded, recomputed in recorded_and_recomputed(trajectory_batch(steps), tiny):
        forced = recorded[0]
        assert forced == 0 or forced > recomputed[0]
        assert (recorded >= recomputed - 1e-3).all()
    env.close()


def test_an_automatic_choice_leaves_free_text_free(engine, tokenizer, greedy):
    """The same greedy answers as without constraint, calls and all."""
    env, compose = make_env(tokenizer)
    policy = agent_policy(
        engine,
        tokenizer,
        compose.tools,
        parser="hermes",
        tool_choice="auto",
        temperature=0,
        max_new_tokens=128,
    )
    _, said = roll(env, policy, [question["query"] for question in QUESTIONS])
    same = sum(one.text == other.text for one, other in zip(said, greedy[1], strict=True))
    print(f"{same} of {ROWS} last messages are the same under a structural tag")
    assert same >= ROWS - 2
    assert any("<tool_call>" not in message.text for message in said)
    env.close()


def test_history_mode_answers_the_same(engine, tokenizer, greedy):
    env, compose = make_env(tokenizer, tokens=False)
    policy = agent_policy(engine, tokenizer, compose.tools, mode="history", temperature=0, max_new_tokens=128)
    _, said = roll(env, policy, [question["query"] for question in QUESTIONS])
    assert [message.text for message in said] == [message.text for message in greedy[1]]
    env.close()


def test_a_collector_resets_the_rows_that_are_done(engine, tokenizer):
    """Trajectories have two or three turns, so some rows restart while others continue."""
    compose = ToolCompose([PythonTool()])
    loader = DataLoader(QUESTIONS, collate_fn=collate)
    env = DatasetChatEnv.from_dataloader(loader, batch_size=(4,))
    for transform in (
        compose,
        EndTrajectory(when_no_calls=True, max_turns=4),
        TurnTokenizer(tokenizer, tools=compose.tools, raise_on_drift=True),
    ):
        env.append_transform(transform)
    policy = agent_policy(engine, tokenizer, compose.tools, temperature=0, max_new_tokens=128)
    collector = LLMCollector(
        env, policy=policy, dialog_turns_per_batch=8, total_dialog_turns=40, yield_completed_trajectories=True
    )
    try:
        found = [ledger for batch in collector for ledger in ledgers(batch)]
    finally:
        collector.shutdown()
    answers = [span for ledger in found for span in ledger.spans() if span.name == "sampled"]
    assert len(found) >= 8
    assert len(answers) > 2 * len(found)
    texts = [tokenizer.decode(ledger.ids) for ledger in found]
    assert len({text.split("<|im_start|>")[2] for text in texts}) >= 6
    assert all(text.count("The answer is") == 1 for text in texts)


def test_torchrls_asynchronous_engine_serves_it_too(tiny, greedy):
    """It requests a GPU from Ray, which a process on the CPU does not use; Ray is configured with one."""
    ray = pytest.importorskip("ray", reason="`make test-vllm` installs it")
    from torchrl.modules.llm import AsyncVLLM

    ray.init(num_cpus=2, num_gpus=1, include_dashboard=False, log_to_driver=False)
    engine = None
    try:
        engine = AsyncVLLM.from_pretrained(str(TINY), num_devices=1, verbose=False, **FLOAT32)
        tokenizer = tiny[1]
        env, compose = make_env(tokenizer, raise_on_drift=True)
        policy = agent_policy(engine, tokenizer, compose.tools, temperature=0, max_new_tokens=128)
        steps, said = roll(env, policy, [question["query"] for question in QUESTIONS])
        env.close()
    finally:
        if engine is not None:
            engine.shutdown()
        ray.shutdown()
    assert right(said) >= ROWS - 2
    assert sum(one.text == other.text for one, other in zip(said, greedy[1], strict=True)) >= ROWS - 1
    gap = report("asynchronous", recorded_and_recomputed(trajectory_batch(steps), tiny))
    assert gap.max() < 1e-3


class Verbose(Tool):
    """Answers the model's calls: row 0 with far more than the engine's context holds, the others briefly."""

    name, description = "python", "Run Python code and return what it prints."
    input_schema = {"type": "object", "properties": {"code": {"type": "string"}}}  # noqa: RUF012  a constant

    async def run(self, args, ctx):
        return "word " * 2000 if ctx.batch_index == 0 else "42"


def test_a_result_beyond_the_context_truncates_its_row_and_no_other(engine, tokenizer):
    env, _ = make_env(tokenizer, rows=4, tools=[Verbose()])
    policy = agent_policy(engine, tokenizer, max_new_tokens=64, temperature=0)
    steps, said = roll(env, policy, [question["query"] for question in QUESTIONS[:4]])
    env.close()
    assert [message.role for message in said] == ["tool", "assistant", "assistant", "assistant"]
    assert steps[0]["next", "truncated"].flatten().tolist() == [True, False, False, False]
    assert steps[-1]["next", "terminated"].flatten().tolist() == [False, True, True, True]
    assert len(trajectory_batch(steps)) == 4
