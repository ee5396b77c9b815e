"""Calls that start while the model still writes: when they start, and that each runs once."""

import asyncio
import json

import pytest
from helpers.limit import limit

from torchrl_agentic import Effects, ToolCompose, tool
from torchrl_agentic.collectors import AgentCollector, Task
from torchrl_agentic.collectors.requests import Requests
from torchrl_agentic.collectors.trajectory_run import TrajectoryRun
from torchrl_agentic.engines import Engine, Sampled
from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.tensors import leaves
from torchrl_agentic.testing import byte_tokenizer, load_tiny
from torchrl_agentic.trajectory.spec import TrajectorySpec
from torchrl_agentic.trajectory.speculative_calls import Detokenizer

TASK = Task("t", [{"role": "user", "content": "go"}])
PATIENCE_S = limit(20)


def call(name, call_id=None, **args):
    own = {} if call_id is None else {"id": call_id}
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': args, **own})}\n</tool_call>"


class Dictated(Engine):
    """An engine whose tokens a test releases: it streams each piece, then waits to be told to go on."""

    version, max_concurrent = 0, 4

    def __init__(self, tokenizer, *turns):
        self.tokenizer = tokenizer
        self.turns = [list(pieces) for pieces in turns]
        self.go_on = asyncio.Event()
        self.written = asyncio.Event()

    async def sample(self, ids, *, max_tokens, key, on_ids=None):
        pieces = self.turns.pop(0)
        sampled = []
        for place, piece in enumerate(pieces):
            new = self.tokenizer(piece, add_special_tokens=False)["input_ids"]
            if place == len(pieces) - 1:
                new = [*new, self.tokenizer.eos_token_id]
            sampled += new
            if on_ids is not None:
                on_ids(new)
            if place < len(pieces) - 1:
                self.written.set()
                await self.go_on.wait()
        return Sampled(sampled, None, "stop")

    async def update(self, weights):
        return 0

    async def close(self):
        pass


class Calls:
    """Tools that count how often they run, and events for when they do."""

    def __init__(self):
        self.started = asyncio.Event()
        self.ran = []

    async def look(self, page: int) -> str:
        """Look at a page.

        Args:
            page: Its number.
        """
        self.ran.append(("look", page))
        self.started.set()
        return f"page {page} <|im_end|>"

    async def write(self, page: int) -> str:
        """Write a page.

        Args:
            page: Its number.
        """
        self.ran.append(("write", page))
        return "written"

    async def reset(self) -> str:
        """Reset everything."""
        self.ran.append(("reset",))
        return "reset"

    def tools(self):
        return [
            tool(self.look, effects=Effects.PURE),
            tool(self.write, effects=Effects(writes=["page"])),
            tool(self.reset, effects=Effects.EXCLUSIVE),
        ]


async def run(engine, calls, tokenizer, **options):
    spec = TrajectorySpec.of(list(leaves(ToolCompose(calls.tools(), **options))), tokenizer, max_turns=4)
    return await TrajectoryRun(spec, Requests(engine), TASK, name="t", speculate=True).run()


@pytest.fixture
def tokenizer():
    return load_tiny()[1]


async def test_a_call_starts_while_the_model_still_writes(tokenizer):
    calls = Calls()
    engine = Dictated(tokenizer, [call("look", page=1), "That is all."], ["Done."])
    running = asyncio.create_task(run(engine, calls, tokenizer))
    await asyncio.wait_for(engine.written.wait(), PATIENCE_S)
    await asyncio.wait_for(calls.started.wait(), PATIENCE_S)  # the answer is not complete yet
    engine.go_on.set()
    trajectory = await running
    assert calls.ran == [("look", 1)]
    (result,) = trajectory.turns[0].outcome.results
    assert result.text == "page 1 <|im_end|>"
    assert "<|im_end|>" not in trajectory.messages[2].text
    (written,) = [span for span in trajectory.spans if span.cause == "engine"][:1]
    (ran,) = [span for span in trajectory.spans if span.cause == "tool"]
    assert written.start <= ran.start < written.stop


async def test_the_statistics_of_a_collector_count_them(tokenizer):
    calls = Calls()
    text = call("look", page=1) + call("write", page=2) + call("look", page=3)
    engine = Dictated(tokenizer, [text, " "], ["Done."])
    engine.go_on.set()
    compose = ToolCompose(calls.tools())
    async with AgentCollector(
        compose, engine=engine, tokenizer=tokenizer, tasks=[TASK], speculate=True
    ) as collector:
        async for _ in collector:
            pass
    assert collector.stats.snapshot()["events"] == {"early": 2}


async def test_results_keep_the_order_of_the_calls_and_each_runs_once(tokenizer):
    calls = Calls()
    text = call("write", page=1) + call("look", page=2) + call("write", page=3) + call("look", page=4)
    engine = Dictated(tokenizer, [text, " "], ["Done."])
    engine.go_on.set()
    trajectory = await run(engine, calls, tokenizer)
    texts = [result.text for result in trajectory.turns[0].outcome.results]
    assert [text.partition(" <")[0] for text in texts] == ["written", "page 2", "written", "page 4"]
    assert sorted(calls.ran) == [("look", 2), ("look", 4), ("write", 1), ("write", 3)]
    assert trajectory.turns[0].index == 0
    assert trajectory.turns[1].index == 1


async def test_a_call_with_effects_waits_for_the_whole_message(tokenizer):
    calls = Calls()
    engine = Dictated(tokenizer, [call("write", page=1) + call("look", page=2), " "], ["Done."])
    running = asyncio.create_task(run(engine, calls, tokenizer))
    await asyncio.wait_for(calls.started.wait(), PATIENCE_S)
    assert calls.ran == [("look", 2)]
    engine.go_on.set()
    await running
    assert calls.ran == [("look", 2), ("write", 1)]


async def test_nothing_starts_behind_an_exclusive_call(tokenizer):
    calls = Calls()
    text = call("look", page=1) + call("reset") + call("look", page=2)
    engine = Dictated(tokenizer, [text, " "], ["Done."])
    running = asyncio.create_task(run(engine, calls, tokenizer))
    await asyncio.wait_for(calls.started.wait(), PATIENCE_S)
    await asyncio.sleep(0)
    assert calls.ran == [("look", 1)]
    engine.go_on.set()
    await running
    assert calls.ran == [("look", 1), ("reset",), ("look", 2)]


async def test_equal_ids_become_unique_as_without_early_calls(tokenizer):
    text = call("look", "a", page=1) + call("look", "a", page=2)
    engine = Dictated(tokenizer, [text, call("look", "a", page=3)], ["Done."])
    engine.go_on.set()
    trajectory = await run(engine, Calls(), tokenizer)
    assert [one.call_id for one in trajectory.turns[0].outcome.calls] == ["a", "a_2", "a_3"]


async def test_arguments_are_checked_and_limits_hold(tokenizer):
    calls = Calls()
    text = call("look", page="x") + call("look", page=2) + call("look", page=3)
    engine = Dictated(tokenizer, [text, " "], ["Done."])
    engine.go_on.set()
    trajectory = await run(engine, calls, tokenizer, max_calls_per_turn=2)
    statuses = [result.status.name for result in trajectory.turns[0].outcome.results]
    assert statuses == ["INVALID_ARGS", "OK", "SKIPPED"]
    assert calls.ran == [("look", 2)]


async def test_a_tool_that_is_not_selected_does_not_start(tokenizer):
    calls, asked = Calls(), []

    def choose(trajectory, turn, row):
        asked.append(turn)
        return ["write"]

    engine = Dictated(tokenizer, [call("look", page=1), " "], ["Done."])
    engine.go_on.set()
    trajectory = await run(engine, calls, tokenizer, tool_selection=choose)
    assert calls.ran == []
    assert trajectory.turns[0].outcome.results[0].status.name == "UNKNOWN_TOOL"
    assert asked == [0]


async def test_an_early_call_ends_with_its_trajectory(tokenizer):
    ended = asyncio.Event()
    started = asyncio.Event()

    async def hang() -> str:
        """Hang."""
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return ""

    engine = Dictated(tokenizer, [call("hang"), " "])
    spec = TrajectorySpec.of(list(leaves(ToolCompose([tool(hang)]))), tokenizer, max_turns=4)
    running = asyncio.create_task(TrajectoryRun(spec, Requests(engine), TASK, name="t", speculate=True).run())
    await asyncio.wait_for(started.wait(), PATIENCE_S)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.wait_for(ended.wait(), PATIENCE_S)


class LostOnce(Dictated):
    """An engine that is lost at the end of its first answer, and gives the same one again."""

    is_lost = False

    async def sample(self, ids, *, max_tokens, key, on_ids=None):
        found = await super().sample(ids, max_tokens=max_tokens, key=key, on_ids=on_ids)
        if not self.is_lost:
            self.is_lost = True
            raise InfrastructureError("gone")
        return found


async def test_an_answer_that_is_lost_and_made_again_runs_no_call_twice(tokenizer):
    calls, answer = Calls(), [call("look", page=1), " "]
    engine = LostOnce(tokenizer, answer, answer, ["Done."])
    engine.go_on.set()
    spec = TrajectorySpec.of(list(leaves(ToolCompose(calls.tools()))), tokenizer, max_turns=4)
    requests = Requests(engine, backoff_s=0.001)
    trajectory = await TrajectoryRun(spec, requests, TASK, name="t", speculate=True).run()
    assert calls.ran == [("look", 1)]
    assert [len(turn.outcome.results) for turn in trajectory.turns] == [1, 0]


@pytest.mark.parametrize("text", ["héllo 日本語 🙂 done", "a\n\n  b", ""])
def test_pieces_of_text_join_to_the_whole(text):
    tokenizer = byte_tokenizer()
    reader = Detokenizer(tokenizer)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert "".join(reader.feed([one]) for one in ids) == text
