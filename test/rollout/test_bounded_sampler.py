"""Trajectories that exceed the model's context, or their own bound, end truncated; others continue."""

import pytest
from helpers.chat_envs import begin, chat_env
from helpers.model_families import FAMILIES
from helpers.token_rollouts import Rollout, Says, token_env
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict
from transformers import AutoModelForCausalLM

from torchrl_agentic import EndTrajectory, Tool, ToolCompose, TurnTokenizer
from torchrl_agentic.records import Recorder, read_records
from torchrl_agentic.rollout import agent_policy, trajectory_batch
from torchrl_agentic.rollout.policies import context_length
from torchrl_agentic.testing.tiny import TINY, load_tiny, tiny_questions

pytestmark = pytest.mark.filterwarnings("ignore:(Prompt|Full) history should have one more batch dimension")
CONTEXT = 640


class Verbose(Tool):
    """Answers the tiny model's calls: row 0 with far more than the context holds, the others briefly."""

    name, description = "python", "Run Python code and return what it prints."
    input_schema = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}  # noqa: RUF012

    async def run(self, args, ctx):
        return "word " * 2000 if ctx.batch_index == 0 else "42"


@pytest.fixture(scope="module")
def tiny():
    """The tiny model with a context of CONTEXT tokens; it asserts that it never gets more."""
    model, tokenizer = load_tiny()
    model.config.max_position_embeddings = CONTEXT

    def look(_module, _args, kwargs):
        assert kwargs["position_ids"].max() < CONTEXT

    model.register_forward_pre_hook(look, with_kwargs=True)
    return model, tokenizer


def env_of(tokenizer, *, rows=2, recorder=None, tokens=True, **options):
    compose = ToolCompose([Verbose()], recorder=recorder)
    transforms = [compose, EndTrajectory(when_no_calls=True)]
    if tokens:
        transforms.append(TurnTokenizer(tokenizer, tools=compose.tools, **options))
    return chat_env((rows,), *transforms), compose


def roll(env, policy, queries, turns=6):
    """Step until all rows are done; return the steps."""
    asked = LazyStackedTensorDict.lazy_stack([NonTensorData(query) for query in queries])
    td, steps = env.reset(TensorDict({"query": asked}, batch_size=env.batch_size)), []
    while not td["done"].all():
        assert len(steps) < turns
        steps.append(env.step(policy(td)))
        td = env.step_mdp(steps[-1])
    env.close()
    return steps


def ends(steps):
    """Of each row the turn in which it ended, whether it terminated, and whether it was truncated."""
    found = {}
    for turn, step in enumerate(steps, 1):
        for row, after in enumerate(step["next"].unbind(0)):
            if after["done"].any() and row not in found:
                found[row] = (turn, bool(after["terminated"]), bool(after["truncated"]))
    return [found[row] for row in sorted(found)]


QUERIES = [question["query"] for question in tiny_questions(2)]


def test_a_result_beyond_the_context_truncates_its_row_and_no_other(tiny, tmp_path):
    """The model's own context length is the bound, without a word about it."""
    model, tokenizer = tiny
    with Recorder(tmp_path) as recorder:
        env, _ = env_of(tokenizer, recorder=recorder)
        steps = roll(env, agent_policy(model, tokenizer, max_new_tokens=64, temperature=0), QUERIES)
    assert ends(steps) == [(1, False, True), (2, True, False)]
    batch = trajectory_batch(steps)
    assert len(batch) == 2
    assert all(len(row["tokens", "full"]) <= CONTEXT for row in batch.unbind(0))
    reasons = {record.row: record.termination_reason for record in read_records(tmp_path)}
    assert reasons == {0: "max_trajectory_tokens", 1: "no_calls"}


def test_a_first_prompt_beyond_the_context_gets_an_empty_answer(tiny):
    model, tokenizer = tiny
    env, _ = env_of(tokenizer)
    policy = agent_policy(model, tokenizer, max_new_tokens=64, temperature=0)
    steps = roll(env, policy, ["word " * 3000, QUERIES[1]])
    assert ends(steps) == [(1, False, True), (2, True, False)]
    first = steps[0].unbind(0)[0]
    assert len(first["tokens", "response"]) == len(first["log_probs", "response"]) == 0
    assert first["next", "history"].prompt[-1].content == ""


def test_without_tokens_the_row_ends_as_soon_as_its_prompt_has_no_room(tiny):
    model, tokenizer = tiny
    env, compose = env_of(tokenizer, tokens=False)
    policy = agent_policy(model, tokenizer, compose.tools, mode="history", max_new_tokens=64, temperature=0)
    assert ends(roll(env, policy, QUERIES)) == [(2, False, True), (2, True, False)]


def test_answers_keep_to_the_bound_of_the_trajectory(tiny):
    """A bound below the context: an answer that would pass it is cut there, and the row is truncated."""
    model, tokenizer = tiny
    env, _ = env_of(tokenizer)
    prompt = len(begin(env).unbind(0)[0]["tokens", "prompt"])
    env, _ = env_of(tokenizer, max_trajectory_tokens=prompt + 16)
    policy = agent_policy(model, tokenizer, max_new_tokens=64, temperature=0)
    steps = roll(env, policy, ["q0", "q1"])
    assert all(end == (1, False, True) for end in ends(steps))
    assert all(len(row["tokens", "full"]) <= prompt + 16 for row in trajectory_batch(steps).unbind(0))


def test_a_conversation_that_grows_ends_early():
    """The over-size case of verl's test plan: each turn adds a long result, until the bound ends it."""

    def essay() -> str:
        """Write an essay."""
        return "word " * 300

    tokenizer = FAMILIES["qwen2_5"].tokenizer()
    talk = Rollout(token_env(tokenizer, [essay], rows=2, max_trajectory_tokens=4000), tokenizer)
    call = Says('<tool_call>{"name": "essay", "arguments": {}}</tool_call>')
    sizes = []
    while not talk.td["done"][0].any():
        talk.turn(call, Says("hello"))
        sizes.append(len(talk.td.unbind(0)[0]["tokens", "prompt"]))
        assert len(sizes) < 10
    assert sizes[-2] < 4000 <= sizes[-1]
    assert talk.td["truncated"].flatten().tolist() == [True, False]
    assert talk.td["terminated"].flatten().tolist() == [False, False]


def test_the_context_is_read_off_the_model():
    assert context_length(AutoModelForCausalLM.from_pretrained(TINY)) > 0
    assert context_length(object()) is None


def test_a_bound_below_one_is_refused():
    with pytest.raises(ValueError, match="max_trajectory_tokens must be 1 or more"):
        TurnTokenizer(FAMILIES["qwen2_5"].tokenizer(), max_trajectory_tokens=0)
