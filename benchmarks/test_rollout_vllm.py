"""The share of vLLM's speed that a rollout reaches: 64 rows of 4 turns, compared with the engine alone.

Each answer is exactly as long as it says, and always calls a tool that does nothing. `.venv-vllm` has vLLM.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import pytest
from rig import noop
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase
from torchrl.envs import Compose, TransformedEnv
from torchrl.envs.llm import ChatEnv

from torchrl_agentic import EndTrajectory, ToolCompose, TurnTokenizer
from torchrl_agentic.messages import JSON, ParsedCall, ParseResult, content_text
from torchrl_agentic.parsers import ToolCallParser
from torchrl_agentic.parsers.base import Tools
from torchrl_agentic.rollout import agent_policy
from torchrl_agentic.testing.tiny import TINY, load_tiny, tiny_questions

Benchmark = Callable[..., Any]
ROWS, TURNS = 64, 4

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: `make test-vllm`"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(600),
]


class Anything(ToolCallParser):
    """Reads any text as one call."""

    name: ClassVar[str] = "anything"

    def parse(
        self, response: str | Mapping[str, JSON], *, tools: Tools | None = None, turn: int = 0
    ) -> ParseResult:
        """Read one call."""
        text = response if isinstance(response, str) else content_text(response.get("content"))
        return ParseResult("", (ParsedCall("noop", {}, f"call_{turn}_0", span=(0, len(text))),), text)

    def render_call(self, call: ParsedCall) -> str:
        """Write nothing."""
        return ""


class Loop:
    """An environment, and a policy whose answers have `size` tokens with the stop token."""

    def __init__(self, engine: Any, tokenizer: Any, size: int) -> None:
        compose = ToolCompose([noop], Anything())
        turns = TurnTokenizer(tokenizer, tools=compose.tools, tokenization_sanity_check_mode="disable")
        transforms = Compose(compose, EndTrajectory(max_turns=TURNS), turns)
        self.env = TransformedEnv(ChatEnv(batch_size=(ROWS,)), transforms)
        # Until the last token the end is out of the question, then all else is.
        self.exact = {"min_tokens": size - 1, "logit_bias": {tokenizer.eos_token_id: 100.0}}
        self.policy = agent_policy(engine, tokenizer, max_new_tokens=size, generate_kwargs=self.exact)
        queries = [NonTensorData(question["query"]) for question in tiny_questions(ROWS)]
        self.queries = LazyStackedTensorDict.lazy_stack(queries)
        self.size = size

    def run(self) -> list[TensorDictBase]:
        """Run one rollout from the reset."""
        start = time.process_time()
        td, steps = self.env.reset(TensorDict({"query": self.queries}, batch_size=[ROWS])), []
        for _ in range(TURNS):
            steps.append(self.env.step(self.policy(td)))
            td = self.env.step_mdp(steps[-1])
        self.cpu_s = time.process_time() - start
        assert all(len(row["tokens", "response"]) == self.size for step in steps for row in step.unbind(0))
        assert bool(steps[-1]["next", "done"].all())
        return steps


class Alone:
    """The engine alone, with the same sampling and prompts, to which ids are appended by hand."""

    def __init__(self, engine: Any, loop: Loop) -> None:
        from vllm import SamplingParams

        self.engine, self.cpu_s = engine, 0.0
        self.sampling = SamplingParams(max_tokens=loop.size, detokenize=False, logprobs=0, **loop.exact)
        first, second = loop.run()[:2]
        self.prompts = [row["tokens", "prompt"].tolist() for row in first.unbind(0)]
        rows = zip(first.unbind(0), second.unbind(0), strict=True)
        self.added = [row["tokens", "prompt"][len(old["tokens", "full"]) :].tolist() for old, row in rows]

    def run(self) -> None:
        """Generate four times."""
        prompts, start = self.prompts, time.process_time()
        for _ in range(TURNS):
            asked = [{"prompt_token_ids": prompt} for prompt in prompts]
            found = self.engine.generate(asked, self.sampling, use_tqdm=False)
            answers = [list(request.outputs[0].token_ids) for request in found]
            prompts = [[*a, *b, *c] for a, b, c in zip(prompts, answers, self.added, strict=True)]
        self.cpu_s = time.process_time() - start


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    from vllm import LLM

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_NO_USAGE_STATS", "1")
        llm = LLM(str(TINY), dtype="float32", enforce_eager=True, max_num_seqs=ROWS)
    yield llm
    llm.llm_engine.engine_core.shutdown()


@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize("which", ["engine alone", "whole loop"])
def test_rollout(benchmark: Benchmark, engine: Any, which: str, size: int) -> None:
    benchmark.group = f"rollout: {ROWS} rows × {TURNS} turns × {size} tokens"
    loop = Loop(engine, load_tiny()[1], size)
    alone = Alone(engine, loop)
    if which == "engine alone":
        benchmark.pedantic(alone.run, rounds=3, warmup_rounds=1)
    else:
        before: list[float] = []

        def timed() -> None:
            # Right before each round: where others compute too, what is minutes apart cannot be compared.
            start = time.perf_counter()
            alone.run()
            before.append(time.perf_counter() - start)

        benchmark.pedantic(loop.run, setup=timed, rounds=3, warmup_rounds=1)
        share = statistics.median(before[1:]) / benchmark.stats.stats.median
        benchmark.extra_info["speed"] = share
        outside = loop.cpu_s - alone.cpu_s
        benchmark.extra_info["seconds outside"] = outside
        print(
            f"{size} tokens per answer: {share:.0%} of the speed of the engine alone, in turns; "
            f"{outside:.2f} s of processor time more"
        )
    loop.env.close()
