"""`OpenAIEngine` over the chat completions of a real vLLM server on the CPU: `make test-vllm`."""

import asyncio
import re

import pytest
from helpers.chat_worlds import adder
from helpers.limit import limit
from helpers.vllm_engines import CONTEXT
from helpers.vllm_servers import serving

from torchrl_agentic import PythonTool, ToolCompose
from torchrl_agentic.engines import ContextExceeded, EngineUnusable, OpenAIEngine, Price
from torchrl_agentic.rollout import rollout, to_sft
from torchrl_agentic.testing import ChatEngineContract, load_tiny, tiny_questions
from torchrl_agentic.testing.tiny import TINY

pytestmark = [pytest.mark.engines, pytest.mark.timeout(limit(300))]
MODEL = str(TINY)


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """The URL of the API of a server that reads tool calls."""
    pytest.importorskip("vllm", reason="`make test-vllm-servers` installs it")
    reads = ("--enable-auto-tool-choice", "--tool-call-parser=hermes")
    bounds = (f"--max-model-len={CONTEXT}", "--max-num-seqs=8")
    with serving(tmp_path_factory.mktemp("server"), *reads, *bounds) as found:
        yield f"{found}/v1"


@pytest.mark.parametrize("stream", [False, True])
class TestContract(ChatEngineContract):
    tools = (PythonTool().spec(),)

    @pytest.fixture(autouse=True)
    def serve(self, url, stream):
        self.options = {"base_url": url, "stream": stream}

    async def make(self):
        return OpenAIEngine(MODEL, temperature=0, max_concurrent=8, **self.options)


def rolled_out(compose, engine, tasks):
    """Return the trajectories of tasks, and close the engine."""
    try:
        return rollout(compose, engine, None, tasks, max_new_tokens=64)
    finally:
        asyncio.run(engine.close())


@pytest.mark.parametrize("stream", [False, True])
def test_questions_are_answered_with_tools(url, stream):
    engine = OpenAIEngine(MODEL, base_url=url, temperature=0, stream=stream, price=Price(1.0, 2.0))
    compose = ToolCompose([PythonTool()], parser="openai")
    found = rolled_out(compose, engine, tiny_questions(40))
    right = [str(one.task.answer) in re.findall(r"-?\d+", one.answer) for one in found]
    assert sum(right) >= 36
    assert all(one.n_calls and not one.n_errors for one in found if one.answer)
    assert sum(engine.usage_of(one.name).completion for one in found) == engine.usage.completion > 0
    assert engine.usage.cost == pytest.approx((engine.usage.prompt + 2 * engine.usage.completion) / 1e6)


def test_collected_data_have_the_tokens_that_the_model_would_have_sampled(url):
    """The tiny model is asked over the API, and what it said is encoded for itself."""
    _, tokenizer = load_tiny()
    engine = OpenAIEngine(MODEL, base_url=url, temperature=0)
    tools = [PythonTool()]
    found = rolled_out(ToolCompose(tools, parser="openai"), engine, tiny_questions(4))
    data = to_sft(found, tokenizer, tools=tools)
    assert len(data) == 4
    for row, trajectory in zip(data.token_rows(), found, strict=True):
        used = engine.usage_of(trajectory.name)
        assert sum(row["assistant_masks"]) == used.completion
        assert used.requests == len(trajectory.turns)


def test_seeds_make_answers_repeat(url):
    async def said(seed):
        more = {"min_tokens": 16}
        engine = OpenAIEngine(MODEL, base_url=url, temperature=2.0, seed=seed, extra_body=more)
        messages = [{"role": "user", "content": "Say anything."}]
        answers = [await engine.chat(messages, tools=[], max_tokens=24, key=f"t/{n}@c0") for n in range(3)]
        await engine.close()
        return [answer.content for answer in answers]

    first = asyncio.run(said(1))
    assert len(set(first)) > 1
    assert asyncio.run(said(1)) == first
    assert asyncio.run(said(2)) != first


def test_a_conversation_that_is_too_long_ends_truncated_and_a_bound_that_does_not_fit_is_lowered(url):
    async def ask(words, max_tokens):
        engine = OpenAIEngine(MODEL, base_url=url)
        try:
            messages = [{"role": "user", "content": "word " * words}]
            return await engine.chat(messages, tools=[], max_tokens=max_tokens, key="t")
        finally:
            await engine.close()

    with pytest.raises(ContextExceeded):
        asyncio.run(ask(5 * CONTEXT, 64))
    assert asyncio.run(ask(10, 2 * CONTEXT)).role == "assistant"
    engine = OpenAIEngine(MODEL, base_url=url)
    compose = ToolCompose([adder()], parser="openai")
    (found,) = rolled_out(compose, engine, [{"query": "word " * 5 * CONTEXT}])
    assert (found.reason, found.truncated) == ("max_trajectory_tokens", True)


def test_an_unknown_model_and_a_url_without_v1_are_errors_at_once(url):
    compose = ToolCompose([adder()], parser="openai")
    for engine in (
        OpenAIEngine("no-such-model", base_url=url),
        OpenAIEngine(MODEL, base_url=url.removesuffix("/v1")),
    ):
        with pytest.raises(EngineUnusable, match="check model and base_url"):
            rolled_out(compose, engine, tiny_questions(3))
