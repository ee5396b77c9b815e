"""ToolCompose: flags, sessions, state, copies, construction, and unusual messages."""

import asyncio
import gc
import json
import pickle
import sys
import textwrap
import threading
from contextlib import asynccontextmanager, closing
from typing import ClassVar

import pytest
import torch
from helpers.chat_envs import (
    STOP,
    Counter,
    add,
    advance,
    answer,
    begin,
    call,
    chat_env,
    conversations,
    dataset_env,
    echo,
    flags,
    results,
    step,
)
from helpers.limit import limit
from helpers.processes import run_program
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData
from torch.utils.data import DataLoader
from torchrl.envs import Compose, InitTracker, StepCounter, Transform, TransformedEnv
from torchrl.envs.llm import ChatEnv, DatasetChatEnv
from torchrl.envs.llm.transforms import PythonInterpreter

from torchrl_agentic import (
    InfrastructureError,
    JsonPart,
    Message,
    RateLimiter,
    Renamed,
    StopSignal,
    StopTool,
    Tool,
    ToolCompose,
    ToolError,
    ToolResult,
    Toolset,
    tool,
)
from torchrl_agentic.parsers import HermesParser
from torchrl_agentic.tools.row_data import local_name
from torchrl_agentic.transforms import history as border

FLAGS = {
    "any_tool_calls": torch.bool,
    "any_error": torch.bool,
    "stop_requested": torch.bool,
    "n_calls": torch.int64,
    "n_errors": torch.int64,
    "n_infra": torch.int64,
    "turn": torch.int64,
    "tool_reward": torch.float32,
    "tool_seconds": torch.float32,
}


def boom() -> str:
    """Fail."""
    raise ValueError("a bug")


def refuse() -> str:
    """Refuse."""
    raise ToolError("not like that")


def offline() -> str:
    """Be away."""
    raise InfrastructureError("service overloaded")


def stop_twice() -> str:
    """Stop with words."""
    raise StopSignal("enough")


class Memory(Tool):
    """One secret per trajectory."""

    name = "memory"
    input_schema: ClassVar = {"type": "object", "properties": {"keep": {"type": "string"}}}

    @asynccontextmanager
    async def session(self, trajectory):
        live = Memory()
        live.kept = "nothing"
        yield live

    async def run(self, args, ctx):
        self.kept = args.get("keep", self.kept)
        return self.kept


class Looker(Tool):
    """Keeps the state that it was shown."""

    name = "look"
    wants_state = True

    def __init__(self):
        self.seen = []

    async def run(self, args, ctx):
        self.seen.append(ctx.state)
        return "seen"


class TestFlags:
    @pytest.mark.parametrize("shape", [(1,), (3,), (2, 2)])
    def test_they_have_the_shape_of_done_on_reset_and_on_step(self, shape):
        env = chat_env(shape, ToolCompose([add]))
        td = begin(env)
        n = td.numel()
        stepped = step(env, td, *([call("add", a=1, b=1)] * n))
        for told in (td["agentic"], stepped["next", "agentic"]):
            assert {name: told[name].dtype for name in FLAGS} == FLAGS
            assert {told[name].shape for name in FLAGS} == {torch.Size([*shape, 1])}

    def test_they_are_zero_on_reset(self):
        env = dataset_env(2, ToolCompose([add]))
        td = advance(env, env.reset(), call("add", a=1, b=1), "x")
        assert flags(td, "n_calls") == [1, 0]
        td = env.reset()
        assert all(not td["agentic", name].any() for name in FLAGS)

    @pytest.mark.parametrize("shape", [(2,), (2, 2)])
    def test_flags_are_in_the_specs(self, shape):
        spec = chat_env(shape, ToolCompose([add])).observation_spec["agentic"]
        assert {name: spec[name].dtype for name in FLAGS} == FLAGS
        assert {spec[name].shape for name in FLAGS} == {torch.Size([*shape, 1])}

    def test_flags_describe_each_row(self):
        env = chat_env((4,), ToolCompose([add, refuse, offline, StopTool()]))
        td = step(
            env,
            begin(env),
            call("add", a=1, b=1) + call("refuse"),
            call("offline") + call("nothing") + call("add", a="x", b=1),
            "no call",
            STOP,
        )["next"]
        assert flags(td, "any_tool_calls") == [True, True, False, True]
        assert flags(td, "any_error") == [True, True, False, False]
        assert flags(td, "n_calls") == [2, 3, 0, 1]
        assert flags(td, "n_errors") == [1, 3, 0, 0]
        assert flags(td, "n_infra") == [0, 1, 0, 0]
        assert flags(td, "stop_requested") == [False, False, False, True]
        assert flags(td, "turn") == [1, 1, 1, 1]

    def test_rewards_of_tools_are_summed_per_turn(self):
        async def pay(amount: float) -> ToolResult:
            return ToolResult.from_value("paid", reward=amount)

        env = chat_env((2,), ToolCompose([tool(pay)]))
        td = advance(env, begin(env), call("pay", amount=0.5) + call("pay", amount=0.25), "none")
        assert td["agentic", "tool_reward"].tolist() == [[0.75], [0.0]]
        td = advance(env, td, "none", call("pay", amount=-1.0))
        assert td["agentic", "tool_reward"].tolist() == [[0.0], [-1.0]]

    def test_turns_are_counted_with_and_without_calls(self):
        env = chat_env((2,), ToolCompose([add]))
        td = begin(env)
        for turn in range(1, 4):
            td = advance(env, td, call("add", a=1, b=1) if turn % 2 else "none", "none")
            assert flags(td, "turn") == [turn, turn]


class TestStopping:
    @pytest.mark.parametrize("stop", [StopTool(), tool(stop_twice, name="stop")])
    def test_a_stop_sets_done_and_terminated_of_its_row_only(self, stop):
        """Collectors look at `done` alone, losses at `terminated`."""
        env = chat_env((3,), ToolCompose([stop]))
        td = step(env, begin(env), "go on", STOP, "go on")["next"]
        for key in ("done", "terminated"):
            assert td[key].tolist() == [[False], [True], [False]]

    def test_the_other_calls_of_the_message_are_answered(self):
        env = chat_env((1,), ToolCompose([add, StopTool()]))
        td = step(env, begin(env), STOP + call("add", a=1, b=1))["next"]
        assert results(td) == [["[stop] done", "2"]]

    def test_a_result_can_ask_for_the_stop_too(self):
        async def finish() -> ToolResult:
            return ToolResult.from_text("over", stop=True)

        env = chat_env((1,), ToolCompose([tool(finish)]))
        assert step(env, begin(env), call("finish"))["next"]["done"].all()

    def test_done_rows_stay_done(self):
        """A transform in front of the tools has ended row 0; a stop in row 1 must not undo it."""
        env = chat_env((2,), StepCounter(1), ToolCompose([StopTool()]))
        td = step(env, begin(env), "x", STOP)["next"]
        assert td["done"].tolist() == [[True], [True]]
        assert td["terminated"].tolist() == [[False], [True]]

    def test_other_row_continues_after_the_stop(self):
        """Row 1's next answer is kept and its call runs, though row 0 has ended in the turn before."""
        env = chat_env((2,), ToolCompose([add, StopTool()]))
        td = advance(env, begin(env), STOP + STOP, call("add", a=1, b=1))
        td = advance(env, td, "unread", call("add", a=2, b=2))
        assert results(td)[1] == ["2", "4"]
        assert conversations(td)[0][-1].content == "[stop] done"  # a row that is done stays as it is

    def test_the_session_of_the_row_closes_with_its_stop(self):
        counter = Counter()
        env = chat_env((2,), ToolCompose([counter, StopTool()]))
        step(env, begin(env), call("count") + STOP, call("count"))
        assert counter.events("close") == ["0.0"]


class TestSessions:
    def test_state_of_one_row_is_not_seen_in_another(self):
        env = chat_env((2,), ToolCompose([Memory()]))
        td = advance(env, begin(env), call("memory", keep="secret = 7"), call("memory"))
        td = advance(env, td, call("memory"), call("memory"))
        assert results(td) == [["secret = 7", "secret = 7"], ["nothing", "nothing"]]

    def test_two_calls_of_one_message_run_in_order_on_a_tool_with_state(self):
        """Under a plain gather both would read the counter before either writes it."""

        class Slow(Counter):
            @asynccontextmanager
            async def session(self, trajectory):
                live = Slow()
                live.calls = 0
                yield live

            async def run(self, args, ctx):
                before = self.calls
                await asyncio.sleep(0)
                self.calls = before + 1
                return self.calls

        env = chat_env((1,), ToolCompose([Slow()]))
        assert results(step(env, begin(env), call("count") * 3)["next"]) == [["1", "2", "3"]]

    def test_a_partial_reset_closes_that_row_once_and_leaves_the_others(self):
        """The rows differ in length: the TensorDict is carried as a lazy stack, or TorchRL refuses."""
        counter = Counter()
        env = chat_env((3,), ToolCompose([counter]))
        td = advance(env, begin(env), call("count"), call("count") * 2, call("count"))
        td = reset_rows(env, td, [True, False, False])
        assert counter.events("close") == ["0.0"]
        assert [len(chat) for chat in conversations(td)] == [1, 4, 3]
        td = advance(env, td, call("count"), call("count"), "none")
        assert results(td) == [["1"], ["1", "2", "3"], ["1"]]
        assert counter.events("open") == ["0.0", "1.0", "2.0", "0.1"]
        assert counter.events("close") == ["0.0"]

    def test_partial_resets_of_each_row_in_turn_close_each_once(self):
        counter = Counter()
        env = chat_env((3,), ToolCompose([counter]))
        td = advance(env, begin(env), *([call("count")] * 3))
        for row in range(3):
            td = reset_rows(env, td, [row == i for i in range(3)])
        assert sorted(counter.events("close")) == ["0.0", "1.0", "2.0"]
        td = advance(env, td, *([call("count")] * 3))
        assert results(td) == [["1"]] * 3

    def test_a_partial_reset_keeps_the_turn_count_and_flags_of_the_others(self):
        env = chat_env((2,), ToolCompose([add]))
        td = advance(env, begin(env), call("add", a=1, b=1), call("add", a=1, b=1))
        td = reset_rows(env, td, [True, False])
        assert flags(td, "turn") == [0, 1]
        assert flags(td, "any_tool_calls") == [False, True]
        assert flags(advance(env, td, "x", "x"), "turn") == [1, 2]

    def test_empty_reset_mask_closes_no_session(self):
        counter = Counter()
        env = chat_env((2,), ToolCompose([counter]))
        td = advance(env, begin(env), call("count"), call("count") * 2)
        td = reset_rows(env, td, [False, False])
        assert counter.events("close") == []

    @pytest.mark.parametrize("shape", [(2, 2), (4,)])
    def test_a_full_reset_closes_every_session_once(self, shape):
        counter = Counter()
        env = chat_env(shape, ToolCompose([counter]))
        step(env, begin(env), *([call("count")] * 4))
        begin(env)
        begin(env)
        assert sorted(counter.events("close")) == ["0.0", "1.0", "2.0", "3.0"]

    def test_close_closes_them_and_may_be_called_again(self):
        counter = Counter()
        env = chat_env((2,), ToolCompose([counter]))
        step(env, begin(env), call("count"), call("count"))
        env.transform.close()
        env.transform.close()
        env.close()
        assert sorted(counter.events("close")) == ["0.0", "1.0"]

    def test_the_environment_works_again_after_close(self):
        class Own(Counter):
            async def setup(self):
                self.diary.append(("setup", ""))

            async def teardown(self):
                self.diary.append(("teardown", ""))

        counter = Own()
        transform = ToolCompose([counter])
        env = chat_env((1,), transform)
        step(env, begin(env), call("count"))
        transform.close()
        assert results(step(env, begin(env), call("count"))["next"]) == [["1"]]
        assert [event for event, _ in counter.diary] == [
            "setup",
            "open",
            "close",
            "teardown",
            "setup",
            "open",
        ]

    def test_a_stopped_row_that_is_never_reset_can_still_call(self):
        counter = Counter()
        env = chat_env((1,), ToolCompose([counter, StopTool()]))
        td = advance(env, begin(env), call("count") + STOP)
        td["done"] = td["terminated"] = torch.zeros(1, 1, dtype=torch.bool)
        assert results(step(env, td, call("count"))["next"])[0][-1] == "1"

    def test_rows_that_do_not_step_run_no_tool(self):
        """`_step` masks rows, as batched environments do."""
        counter = Counter()
        env = chat_env((3,), ToolCompose([counter]))
        td = answer(begin(env), *([call("count")] * 3))
        td["_step"] = torch.tensor([[True], [False], [True]])
        td = env.step(td)
        assert sorted(counter.events("open")) == ["0.0", "2.0"]
        assert flags(td["next"], "n_calls") == [1, 0, 1]
        assert results(td["next"]) == [["1"], [], ["1"]]

    def test_row_outside_the_step_keeps_its_turn(self):
        env = chat_env((2,), ToolCompose([add]))
        td = advance(env, begin(env), "one", "one")
        td = answer(td, "two", "two")
        td["_step"] = torch.tensor([[True], [False]])
        assert flags(env.step(td)["next"], "turn") == [2, 1]

    def test_names_of_trajectories_repeat_neither_over_rows_nor_over_resets(self):
        seen = []

        class Names(Tool):
            name = "name"

            async def run(self, args, ctx):
                seen.append(ctx.trajectory)
                return "ok"

        env = chat_env((2,), ToolCompose([Names()]))
        for _ in range(3):
            step(env, begin(env), call("name"), call("name"))
        assert len(set(seen)) == 6

    def test_session_that_fails_to_open_affects_only_its_row(self, caplog):
        class Flaky(Counter):
            def session(self, trajectory):
                if trajectory.startswith("0"):
                    raise OSError("no port")
                return super().session(trajectory)

        env = chat_env((2,), ToolCompose([Flaky(), add]))
        td = step(env, begin(env), call("count") + call("add", a=1, b=1), call("count"))["next"]
        assert "crashed" in results(td)[0][0]
        assert results(td)[0][1] == "2"
        assert results(td)[1] == ["1"]

    def test_session_that_fails_to_close_is_logged(self, caplog):
        class Sticky(Counter):
            @asynccontextmanager
            async def session(self, trajectory):
                live = Counter()
                live.calls = 0
                yield live
                raise OSError("cannot close")

        env = chat_env((1,), ToolCompose([Sticky()]))
        step(env, begin(env), call("count"))
        assert results(step(env, begin(env), call("count"))["next"]) == [["1"]]
        assert "cannot close" in caplog.text


class TestIds:
    def run_twice(self):
        env = chat_env((2,), ToolCompose([add, echo]))
        td = begin(env)
        for _ in range(3):
            td = advance(
                env, td, call("add", "same", a=1, b=1) * 2, call("echo", text="x") + call("echo", text="y")
            )
        return [[m.tool_call_id for m in chat if m.role == "tool"] for chat in conversations(td)]

    def test_equal_rollouts_have_equal_ids(self):
        assert self.run_twice() == self.run_twice()

    def test_repeated_call_ids_are_made_unique(self):
        for row in self.run_twice():
            assert len(set(row)) == 6

    def test_id_that_looks_generated_does_not_collide(self):
        env = chat_env((1,), ToolCompose([add]))
        td = advance(env, begin(env), call("add", "call_1_0", a=1, b=1) + call("add", "call_0_0", a=1, b=1))
        td = advance(env, td, call("add", a=1, b=1))
        ids = [m.tool_call_id for m in conversations(td)[0] if m.role == "tool"]
        assert len(set(ids)) == 3

    def test_equal_tags_over_turns_get_different_ids(self):
        env = chat_env((1,), ToolCompose([add], "xml"))
        td = begin(env)
        for _ in range(2):
            td = advance(env, td, '<tool name="add" tag="A">{"a": 1, "b": 1}</tool>' * 2)
        ids = [m.tool_call_id for m in conversations(td)[0] if m.role == "tool"]
        assert len(set(ids)) == 4
        assert ids[0] == "A"


class TestState:
    def env(self, looker, **options):
        rows = [{"query": f"q{i}", "answer": f"a{i}", "level": i} for i in range(4)]

        def collate_all(batch):
            return {key: [row[key] for row in batch] for key in batch[0]}

        loader = DataLoader(rows, collate_fn=collate_all)
        env = DatasetChatEnv.from_dataloader(loader, batch_size=(2,))
        env.append_transform(ToolCompose([looker, add], **options))
        return env

    def test_a_tool_sees_its_row_without_history_and_answers(self):
        looker = Looker()
        env = self.env(looker, pass_state_to_tools=True)
        step(env, env.reset(), call("look"), call("look"))
        assert [state["query"] for state in looker.seen] == ["q0", "q1"]
        for state in looker.seen:
            assert not {"history", "answer", "agentic", "next"} & set(state.keys())

    def test_the_state_cannot_be_written(self):
        looker = Looker()
        env = self.env(looker, pass_state_to_tools=True)
        step(env, env.reset(), call("look"), call("look"))
        with pytest.raises(RuntimeError, match="lock"):
            looker.seen[0]["query"] = "another"

    def test_writing_into_its_tensors_does_not_reach_the_environment(self):
        class Vandal(Looker):
            async def run(self, args, ctx):
                ctx.state["done"].fill_(True)
                return "done"

        env = self.env(Vandal(), pass_state_to_tools=True)
        td = step(env, env.reset(), call("look"), "x")
        assert not td["done"].any()
        assert not td["next", "done"].any()

    def test_without_the_option_there_is_no_state(self):
        looker = Looker()
        env = self.env(looker)
        step(env, env.reset(), call("look"), call("look"))
        assert looker.seen == [None, None]

    def test_a_tool_that_does_not_want_it_gets_none(self):
        looker, deaf = Looker(), Looker()
        deaf.name, deaf.wants_state = "deaf", False
        env = chat_env((1,), ToolCompose([looker, deaf], pass_state_to_tools=True))
        step(env, begin(env), call("look") + call("deaf"))
        assert looker.seen[0] is not None
        assert deaf.seen == [None]

    def test_each_row_of_a_grid_sees_its_own_state(self):
        looker = Looker()
        env = chat_env((2, 2), ToolCompose([looker], pass_state_to_tools=True))
        td = begin(env)
        td["number"] = torch.arange(4).reshape(2, 2, 1)
        step(env, td, *([call("look")] * 4))
        assert [state["number"].item() for state in looker.seen] == [0, 1, 2, 3]


class TestConcurrency:
    def test_calls_of_all_rows_overlap(self):
        """Each of the six calls waits for the others: in any sequence, none would return."""
        barrier = asyncio.Barrier(6)

        async def meet() -> str:
            await barrier.wait()
            return "met"

        env = chat_env((3,), ToolCompose([tool(meet)]))
        td = step(env, begin(env), *([call("meet") * 2] * 3))["next"]
        assert results(td) == [["met", "met"]] * 3

    def test_blocking_tools_of_all_rows_overlap(self):
        barrier = threading.Barrier(4)

        def meet() -> str:
            barrier.wait(limit(30))
            return "met"

        env = chat_env((4,), ToolCompose([tool(meet)]))
        assert results(step(env, begin(env), *([call("meet")] * 4))["next"]) == [["met"]] * 4

    def test_blocking_tool_that_times_out_does_not_delay_others(self):
        release = threading.Event()

        def stuck() -> str:
            while not release.wait(0.01):
                pass
            return "late"

        env = chat_env((2,), ToolCompose([tool(stuck), echo], per_call_timeout=0.2))
        td = step(env, begin(env), call("stuck"), call("echo", text="hi"))["next"]
        release.set()
        assert "did not finish" in results(td)[0][0]
        assert results(td)[1] == ["hi"]

    def test_the_turn_s_deadline_counts_queueing(self):
        """Eight calls wait for one slot that is never free: all end at the turn's deadline."""
        started = []

        async def wait() -> str:
            started.append(1)
            await asyncio.Event().wait()
            return "never"

        limiter = RateLimiter(max_concurrent=1)
        env = chat_env((2,), ToolCompose([tool(wait)], rate_limits={"wait": limiter}, per_turn_timeout=0.2))
        td = step(env, begin(env), *([call("wait") * 4] * 2))["next"]
        assert flags(td, "n_errors") == [4, 4]
        assert len(started) == 1
        assert limiter.stats().in_flight == 0

    def test_one_limiter_bounds_two_environments(self):
        """Both environments step at the same time, on threads of their own; never two calls are inside."""
        limiter, inside, most = RateLimiter(max_concurrent=1), [], []

        async def enter() -> str:
            inside.append(1)
            most.append(len(inside))
            for _ in range(5):
                await asyncio.sleep(0)
            inside.pop()
            return "out"

        envs = [chat_env((2,), ToolCompose([tool(enter)], rate_limits={"enter": limiter})) for _ in range(2)]
        tds = [begin(env) for env in envs]
        ready = threading.Barrier(2)

        def run(env, td):
            ready.wait(limit(30))
            step(env, td, call("enter") * 3, call("enter") * 3)

        threads = [threading.Thread(target=run, args=pair) for pair in zip(envs, tds, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(limit(30))
        assert most == [1] * 12

    def test_a_limiter_serves_again_after_close(self):
        limiter = RateLimiter(max_concurrent=1)
        env = chat_env((1,), ToolCompose([echo], rate_limits={"echo": limiter}))
        for _ in range(2):
            assert results(step(env, begin(env), call("echo", text="x"))["next"]) == [["x"]]
            env.transform.close()
        assert limiter.stats().in_flight == 0

    def test_a_step_inside_a_running_event_loop_works(self):
        """As in Jupyter, where everything runs inside a loop."""
        env = chat_env((1,), ToolCompose([echo]))

        async def notebook():
            return results(step(env, begin(env), call("echo", text="x"))["next"])

        assert asyncio.run(notebook()) == [["x"]]

    def test_stepping_from_inside_a_tool_is_refused_and_does_not_hang(self, caplog):
        inner = chat_env((1,), ToolCompose([echo]))

        async def nest() -> str:
            step(inner, begin(inner), call("echo", text="x"))
            return "?"

        env = chat_env((1,), ToolCompose([tool(nest)]))
        assert "RuntimeError" in results(step(env, begin(env), call("nest"))["next"])[0][0]


class TestCopies:
    def test_a_clone_shares_tools_and_limiters(self):
        limiter = RateLimiter(max_concurrent=3)
        transform = ToolCompose([add, Counter()], rate_limits={"add": limiter})
        clone = transform.clone()
        assert all(a is b for a, b in zip(clone.tools, transform.tools, strict=True))
        env = chat_env((1,), clone)
        step(env, begin(env), call("add", a=1, b=1))
        assert limiter.stats().granted == 1

    def test_a_clone_has_sessions_of_its_own(self):
        counter = Counter()
        transform = ToolCompose([counter])
        env, other = chat_env((1,), transform), chat_env((1,), transform.clone())
        step(env, begin(env), call("count") * 2)
        assert results(step(other, begin(other), call("count"))["next"]) == [["1"]]
        begin(other)
        assert len(counter.events("close")) == 1

    def test_closing_a_clone_leaves_the_original_s_sessions(self):
        counter = Counter()
        transform = ToolCompose([counter])
        env = chat_env((1,), transform)
        td = advance(env, begin(env), call("count"))
        transform.clone().close()
        assert results(advance(env, td, call("count")))[0][-1] == "2"
        assert counter.events("close") == []

    def test_clone_works_after_its_original_is_closed(self):
        transform = ToolCompose([Counter()])
        env = chat_env((1,), transform.clone())
        td = advance(env, begin(env), call("count"))
        transform.close()
        assert results(advance(env, td, call("count")))[0][-1] in ("1", "2")

    def test_taking_a_tool_out_of_a_clone_leaves_the_original_s(self):
        transform = ToolCompose([add, echo])
        transform.clone().pop()
        env = chat_env((1,), transform)
        assert results(step(env, begin(env), call("echo", text="x"))["next"]) == [["x"]]

    def test_a_tool_added_to_a_clone_is_not_the_original_s(self):
        transform = ToolCompose([add])
        transform.clone().append(echo)
        env = chat_env((1,), transform)
        assert "no tool named 'echo'" in results(step(env, begin(env), call("echo", text="x"))["next"])[0][0]

    def test_a_clone_s_tools_find_a_compose_after_the_original_is_gone(self):
        """`ctx.compose` is how a tool finds its neighbours."""

        class Asks(Tool):
            name = "ask"

            async def run(self, args, ctx):
                return ctx.compose["add"].name

        clone = ToolCompose([Asks(), add]).clone()
        gc.collect()
        env = chat_env((1,), clone)
        assert results(step(env, begin(env), call("ask"))["next"]) == [["add"]]

    def test_it_pickles_after_use_and_the_copy_works(self):
        env = chat_env((2,), ToolCompose([Counter(), StopTool()], "xml"))
        step(env, begin(env), '<tool name="count"/>', "none")
        copy = pickle.loads(pickle.dumps(env))
        td = step(copy, begin(copy), '<tool name="count"/>', '<tool name="stop"/>')["next"]
        assert flags(td, "n_calls") == [1, 1]
        assert "1" in results(td)[0][0]
        assert td["done"].tolist() == [[False], [True]]

    def test_it_pickles_after_a_tool_with_a_limit_was_taken_out(self):
        transform = ToolCompose([StopTool(), Counter()], rate_limits={"count": RateLimiter(max_concurrent=1)})
        transform.pop()
        env = chat_env((1,), pickle.loads(pickle.dumps(transform)))
        assert step(env, begin(env), STOP)["next"]["done"].all()

    def test_tools_added_later_are_pickled_too(self):
        transform = ToolCompose([StopTool()])
        transform.append(Counter())
        env = chat_env((1,), pickle.loads(pickle.dumps(transform)))
        assert results(step(env, begin(env), call("count"))["next"]) == [["1"]]

    @pytest.mark.slow
    def test_used_environment_works_in_a_fresh_process(self, tmp_path):
        shorten = tool(
            textwrap.shorten,
            schema={
                "type": "object",
                "properties": {"text": {"type": "string"}, "width": {"type": "integer"}},
            },
        )
        env = chat_env((1,), ToolCompose([shorten, StopTool()]))
        step(env, begin(env), call("shorten", text="one two", width=20))
        (tmp_path / "env.pkl").write_bytes(pickle.dumps(env))
        program = f"""
import pickle
from pathlib import Path
from tensordict import TensorDict
from torchrl_agentic.testing import ScriptedPolicy
env = pickle.loads(Path({str(tmp_path / "env.pkl")!r}).read_bytes())
said = {call("shorten", text="one    two", width=20) + STOP!r}
td = env.step(ScriptedPolicy([[said]])(env.reset(TensorDict({{"query": ["q"]}}, batch_size=(1,)))))
print(td["next", "history"].prompt[0].content[2], td["next", "done"].item())
env.close()
"""
        done = run_program([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        assert done.stdout.strip() == "one two True", done.stderr

    def test_parent_of_a_later_transform_shares_tools_and_sessions(self):
        """`.parent` builds an environment of clones of the earlier transforms, and drops it."""
        counter = Counter()
        env = dataset_env(1, ToolCompose([counter]), StepCounter())
        td = advance(env, env.reset(), call("count"))
        parent = env.transform[-1].parent
        found = [t for t in parent.transform if isinstance(t, ToolCompose)]
        assert found[0].tools[0] is counter
        parent.close()
        del parent, found
        gc.collect()
        td = advance(env, td, call("count"))
        assert results(td) == [["1", "2"]]
        assert counter.events("close") == []

    def test_a_transform_appended_to_the_environment_goes_behind_the_tools(self):
        transform = ToolCompose([add])
        env = TransformedEnv(ChatEnv(batch_size=(1,)), transform)
        env.append_transform(StepCounter())
        env.append_transform(InitTracker())
        assert type(env.transform) is Compose
        assert env.transform[0] is transform
        assert [type(t) for t in env.transform[1:]] == [StepCounter, InitTracker]
        td = step(env, begin(env), call("add", a=1, b=1))
        assert td["next", "step_count"].tolist() == [[1]]
        assert results(td["next"]) == [["2"]]

    def test_a_transform_inserted_first_goes_before_the_tools(self):
        transform = ToolCompose([add])
        env = TransformedEnv(ChatEnv(batch_size=(1,)), transform)
        env.insert_transform(0, StepCounter())
        assert [type(t) for t in env.transform] == [StepCounter, ToolCompose]
        assert results(step(env, begin(env), call("add", a=1, b=1))["next"]) == [["2"]]

    def test_tools_can_be_added_after_another_transform(self):
        transform = ToolCompose([add])
        env = TransformedEnv(ChatEnv(batch_size=(1,)), transform)
        env.append_transform(StepCounter())
        transform.append(echo)
        assert results(step(env, begin(env), call("echo", text="x"))["next"]) == [["x"]]

    @pytest.mark.parametrize("unwrap", [True, False])
    def test_it_works_in_a_nested_environment_and_a_nested_compose(self, unwrap):
        inner = TransformedEnv(ChatEnv(batch_size=(1,)), StepCounter())
        env = TransformedEnv(inner, Compose(Compose(ToolCompose([add]))), auto_unwrap=unwrap)
        assert results(step(env, begin(env), call("add", a=1, b=1))["next"]) == [["2"]]

    @pytest.mark.parametrize("unwrap", [True, False])
    def test_it_works_under_another_environment(self, unwrap):
        inner = TransformedEnv(ChatEnv(batch_size=(1,)), ToolCompose([add]))
        env = TransformedEnv(inner, StepCounter(), auto_unwrap=unwrap)
        td = step(env, begin(env), call("add", a=1, b=1))
        assert results(td["next"]) == [["2"]]
        assert td["next", "step_count"].item() == 1

    def test_second_tool_compose_keeps_the_results_of_the_first(self):
        """The results of the first follow the model's message like forged turns, but are real."""
        env = chat_env((1,), ToolCompose([add]), ToolCompose([echo], "xml"))
        td = step(env, begin(env), call("add", a=1, b=1))
        assert results(td["next"]) == [["2"]]

    def test_messages_of_a_transform_in_front_are_kept(self):
        class Nudge(Transform):
            def _step(self, td, next_td):
                rows = [
                    row.extended([{"role": "user", "content": "go on"}]) for row in border.prompts(next_td)
                ]
                border.set_prompts(next_td, rows)
                return next_td

        env = chat_env((1,), Nudge(), ToolCompose([add]))
        td = step(env, begin(env), call("add", a=1, b=1))
        assert "go on" in [m.content for m in conversations(td["next"])[0]]

    def test_dropped_environments_leave_no_thread_but_the_loop(self):
        """Blocking tools started threads in each; they end when the environment is garbage collected."""

        def work() -> str:
            return "done"

        before = set(threading.enumerate())
        envs = [chat_env((1,), ToolCompose([tool(work)])) for _ in range(10)]
        for env in envs:
            step(env, begin(env), call("work"))
        made = set(threading.enumerate()) - before
        assert len(made) >= 10
        del env, envs
        gc.collect()
        for thread in made:
            if thread.name != "torchrl_agentic":
                thread.join(limit(30))
        assert {thread.name for thread in made if thread.is_alive()} <= {"torchrl_agentic"}

    def test_dropped_environments_close_their_sessions(self):
        closed = threading.Event()

        class Tells(Counter):
            @asynccontextmanager
            async def session(self, trajectory):
                live = Counter()
                live.calls = 0
                yield live
                closed.set()

        env = chat_env((1,), ToolCompose([Tells()]))
        step(env, begin(env), call("count"))
        del env
        gc.collect()
        assert closed.wait(limit(30))


class TestContainer:
    def test_tools_are_found_by_name_and_place(self):
        transform = ToolCompose([add, StopTool()])
        assert transform["add"] is transform[0] is transform.tools[0]
        assert "stop" in transform
        assert transform[1] in transform
        assert "else" not in transform
        assert [t.name for t in transform] == ["add", "stop"]
        assert len(transform) == 2
        with pytest.raises(KeyError, match="tools: add, stop"):
            transform["else"]

    def test_a_tool_can_be_inserted_and_taken_out(self):
        transform = ToolCompose([add])
        transform.insert(0, StopTool())
        transform.append_tool(echo)
        assert [t.name for t in transform] == ["stop", "add", "echo"]
        assert transform.pop(0).name == "stop"
        del transform[1]
        assert [t.name for t in transform] == ["add"]

    def test_a_tool_taken_out_is_not_there_any_more_for_the_model(self):
        transform = ToolCompose([add, echo])
        env = chat_env((1,), transform)
        transform.pop()
        assert "available: add" in results(step(env, begin(env), call("echo", text="x"))["next"])[0][0]

    def test_tool_specs_fit_the_chat_template(self):
        (spec,) = ToolCompose([add]).tool_specs
        assert spec["type"] == "function"
        assert spec["function"]["name"] == "add"
        assert spec["function"]["parameters"]["required"] == ["a", "b"]

    def test_replacing_by_index_explains_the_alternative(self):
        with pytest.raises(TypeError, match="pop"):
            ToolCompose([add])[0] = echo

    def toolset(self, diary, fails=False):
        class Set(Toolset):
            async def setup(self):
                diary.append("open")
                return [tool(add), tool(echo)] if not fails else [tool(add), tool(add)]

            async def teardown(self):
                diary.append("close")

        return Set()

    def test_a_toolset_brings_its_tools_and_is_closed_once(self):
        diary = []
        transform = ToolCompose([])
        transform.add_toolset(self.toolset(diary))
        env = chat_env((1,), transform)
        assert results(step(env, begin(env), call("add", a=1, b=1))["next"]) == [["2"]]
        transform.close()
        transform.close()
        assert diary == ["open", "close"]

    def test_a_tool_without_a_description_is_warned_of_once_by_name(self, caplog):
        class Silent(Tool):
            name = "silent"

            async def run(self, args, ctx):
                return "ok"

        transform = ToolCompose([Silent(), add])
        assert [record.getMessage() for record in caplog.records] == [
            "tool 'silent' has no description, so that the model cannot know what it does: give the function"
            " a docstring, or pass description= to the tool or to as_tool"
        ]
        transform.append(tool(lambda: 1, name="bare"))
        assert caplog.text.count("has no description") == 2

    def test_a_toolset_of_the_pr_stack_brings_its_tools_and_is_closed_on_the_loop_that_opened_it(self):
        class Pool:
            def __init__(self):
                self.loops, self.tools = [], ()

            async def open(self):
                self.loops.append(asyncio.get_running_loop())
                self.tools = (tool(add),)

            async def close(self):
                self.loops.append(asyncio.get_running_loop())

        pool, transform = Pool(), ToolCompose([])
        transform.add_toolset(pool)
        env = chat_env((1,), transform)
        assert results(step(env, begin(env), call("add", a=1, b=1))["next"]) == [["2"]]
        transform.close()
        assert len(pool.loops) == 2
        assert pool.loops[0] is pool.loops[1]

    def test_object_that_is_not_a_toolset_is_rejected_with_the_missing_methods(self):
        transform = ToolCompose([add])
        with pytest.raises(TypeError, match="int lacks setup, teardown"):
            transform.add_toolset(3)
        assert [each.name for each in transform] == ["add"]

    @pytest.mark.parametrize("method", ["append", "append_transform", "append_tool"])
    def test_every_way_to_add_a_transform_is_rejected_with_its_place(self, method):
        with pytest.raises(TypeError, match=r"TransformedEnv\(env, Compose\(ToolCompose\(.*StepCounter"):
            getattr(ToolCompose([add]), method)(StepCounter())

    def test_a_toolset_whose_tools_are_refused_is_closed(self):
        diary = []
        transform = ToolCompose([])
        with pytest.raises(ValueError, match="two tools"):
            transform.add_toolset(self.toolset(diary, fails=True))
        transform.close()
        assert diary == ["open", "close"]

    def test_toolset_that_fails_to_list_its_tools_keeps_them(self, caplog):
        class Set(Toolset):
            async def setup(self):
                return [tool(add)]

            async def refresh(self):
                raise OSError("out of order")

            async def teardown(self):
                pass

        transform, toolset = ToolCompose([]), Set()
        transform.add_toolset(toolset)
        env = chat_env((1,), transform)
        for _ in range(2):
            toolset.revision = 1
            assert results(step(env, begin(env), call("add", a=1, b=1))["next"]) == [["2"]]
        transform.close()
        assert caplog.text.count("could not refresh its tools") == 1  # it is asked once for each change

    def test_toolset_is_listed_again_only_after_a_change(self):
        asked = []

        class Set(Toolset):
            async def setup(self):
                return [tool(add)]

            async def refresh(self):
                asked.append(self.revision)
                return [tool(echo)]

            async def teardown(self):
                pass

        transform, toolset = ToolCompose([]), Set()
        transform.add_toolset(toolset)
        env = chat_env((1,), transform)
        step(env, begin(env), call("add", a=1, b=1))
        assert asked == []
        toolset.revision = 5
        begin(env)
        assert [tool.name for tool in transform.tools] == ["echo"]
        assert results(step(env, begin(env), call("echo", text="hi"))["next"]) == [["hi"]]
        assert asked == [5]
        transform.close()

    def test_a_toolset_with_limits_has_them_after_close_too(self):
        diary, limiter = [], RateLimiter(max_concurrent=1)
        transform = ToolCompose([])
        transform.add_toolset(self.toolset(diary), rate_limits={"add": limiter})
        env = chat_env((1,), transform)
        step(env, begin(env), call("add", a=1, b=1))
        transform.close()
        step(env, begin(env), call("add", a=1, b=1) + call("echo", text="hi"))
        assert limiter.stats().granted == 2

    def test_a_toolset_is_open_again_when_the_environment_is_used_after_close(self):
        diary = []
        transform = ToolCompose([])
        transform.add_toolset(self.toolset(diary))
        env = chat_env((1,), transform)
        transform.close()
        step(env, begin(env), call("add", a=1, b=1))
        assert diary == ["open", "close", "open"]


@pytest.mark.parametrize(("parser", "refused"), [("openai", 3), ("anthropic", 2), ("hermes", 0)])
def test_a_name_that_the_api_of_the_parser_refuses_is_logged(parser: str, refused: int, caplog):
    """Some servers with this API accept it, as data sets of functions with dots in their names need."""
    names = ["a-b_1", "math.add", "x" * 65, "a b"]
    tools = [Renamed(tool(lambda: "x", name="f", description="F."), name) for name in names]
    with closing(ToolCompose(tools[:2], parser=parser)) as compose:
        for item in tools[2:]:
            compose.append(item)
    assert caplog.text.count("refuses the name") == refused


class TestConstruction:
    def test_two_tools_of_one_name_are_refused(self):
        with pytest.raises(ValueError, match="two tools are named 'add'"):
            ToolCompose([add, tool(echo, name="add")])
        transform = ToolCompose([add])
        with pytest.raises(ValueError, match="two tools are named 'add'"):
            transform.append(add)
        assert len(transform) == 1

    def test_error_for_a_transform_among_the_tools_names_its_place(self):
        for make in (lambda: ToolCompose([StepCounter()]), lambda: ToolCompose([]).append(StepCounter())):
            with pytest.raises(TypeError, match=r"TransformedEnv\(env, Compose\(ToolCompose\(.*StepCounter"):
                make()

    def test_error_for_a_legacy_tool_transform_names_as_tool(self):
        with pytest.raises(TypeError, match=r"as_tool\(PythonInterpreter"):
            ToolCompose([PythonInterpreter()])

    def test_error_for_an_appended_legacy_tool_transform_names_as_tool(self):
        env = TransformedEnv(ChatEnv(batch_size=(1,)), ToolCompose([add]))
        with pytest.raises(TypeError, match="as_tool"):
            env.transform.append(PythonInterpreter())

    def test_error_for_a_class_asks_for_an_instance(self):
        with pytest.raises(TypeError, match=r"write StopTool\(...\)"):
            ToolCompose([StopTool])

    @pytest.mark.parametrize("item", [None, 3, "python", {"name": "x"}, object()])
    def test_object_that_is_not_a_tool_is_rejected(self, item):
        with pytest.raises(TypeError):
            ToolCompose([item])

    @pytest.mark.parametrize("tools", [StopTool(), "python", None, 3])
    def test_tools_that_are_not_a_list_are_rejected(self, tools):
        with pytest.raises(TypeError, match="list of tools"):
            ToolCompose(tools)

    def test_an_unknown_parser_lists_the_known_ones_and_the_nearest(self):
        with pytest.raises(ValueError, match=r"did you mean 'hermes'\?.*openai"):
            ToolCompose([], "hermess")

    @pytest.mark.parametrize("parser", [HermesParser, 3, None])
    def test_object_that_is_not_a_parser_is_rejected(self, parser):
        with pytest.raises(TypeError):
            ToolCompose([], parser)

    def test_a_limit_for_a_tool_that_is_not_there_is_refused(self):
        with pytest.raises(ValueError, match="'serch'"):
            ToolCompose([add], rate_limits={"serch": RateLimiter(max_concurrent=1)})

    @pytest.mark.parametrize(
        "option", ["per_call_timeout", "per_turn_timeout", "max_calls_per_turn", "max_threads"]
    )
    @pytest.mark.parametrize("value", [0, -1])
    def test_a_bound_that_is_not_above_zero_is_refused(self, option, value):
        with pytest.raises(ValueError, match=r"must be|at least"):
            ToolCompose([add], **{option: value})

    def test_nan_timeout_is_rejected(self):
        with pytest.raises(ValueError, match="nan"):
            ToolCompose([add], per_call_timeout=float("nan"))

    @pytest.mark.parametrize("mode", ["tokens", "text"])
    def test_an_environment_without_history_is_refused(self, mode):
        from torchrl_agentic.testing import byte_tokenizer

        base = ChatEnv(batch_size=(1,), input_mode=mode, tokenizer=byte_tokenizer())
        with pytest.raises(ValueError, match="input_mode='history'"):
            TransformedEnv(base, ToolCompose([add]))

    def test_a_setup_that_fails_raises_where_the_environment_is_built(self):
        class Broken(Tool):
            name = "broken"

            async def setup(self):
                raise OSError("no such server")

            async def run(self, args, ctx):
                return "?"

        with pytest.raises(OSError, match="no such server"):
            ToolCompose([add, Broken()])
        transform = ToolCompose([add])
        with pytest.raises(OSError, match="no such server"):
            transform.append(Broken())
        assert [t.name for t in transform] == ["add"]
        env = chat_env((1,), transform)
        assert results(step(env, begin(env), call("add", a=1, b=1))["next"]) == [["2"]]

    def test_tools_set_up_before_the_failure_are_torn_down(self):
        diary = []

        class Own(Tool):
            def __init__(self, name, fails=False):
                self.name, self.fails = name, fails

            async def setup(self):
                if self.fails:
                    raise OSError("no")
                diary.append(f"open {self.name}")

            async def teardown(self):
                diary.append(f"close {self.name}")

            async def run(self, args, ctx):
                return "?"

        with pytest.raises(OSError, match="no"):
            ToolCompose([Own("a"), Own("b"), Own("c", fails=True)])
        assert diary == ["open a", "open b", "close b", "close a"]

    def test_a_bad_schema_is_refused_with_the_tool_s_name(self):
        class Odd(Tool):
            name = "odd"
            input_schema: ClassVar = {"type": "nonsense"}

            async def run(self, args, ctx):
                return "?"

        with pytest.raises(ValueError, match="'odd'"):
            ToolCompose([Odd()])

    @pytest.mark.slow
    def test_list_to_stack_need_not_be_set_by_the_user(self):
        program = (
            "import tensordict\n"
            "from torchrl_agentic import ToolCompose\n"
            "ToolCompose([])\n"
            "print(bool(tensordict.list_to_stack()))"
        )
        done = run_program([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        assert done.stdout.strip() == "True", done.stderr


class BadParser(HermesParser):
    """Fails on messages that say so."""

    def parse(self, response, *, turn=0):
        if "break me" in response:
            raise KeyError("parser bug")
        return super().parse(response, turn=turn)


class BadRenderer(HermesParser):
    def render_result(self, call_id, result):
        if result.text == "unspeakable":
            raise KeyError("renderer bug")
        return super().render_result(call_id, result)


class NoneParser(HermesParser):
    def parse(self, response, *, turn=0):
        return None if "break me" in response else super().parse(response, turn=turn)


class RolelessRenderer(HermesParser):
    def render_result(self, call_id, result):
        return {"text": result.text}


class TestBugsOfOthers:
    @pytest.mark.parametrize("parser", [BadParser(), NoneParser()])
    def test_failing_parser_gives_one_error_result(self, parser, caplog):
        env = chat_env((2,), ToolCompose([add], parser))
        td = step(env, begin(env), "break me", call("add", a=1, b=1))["next"]
        assert flags(td, "n_errors") == [1, 0]
        assert "could not be read" in results(td)[0][0]
        assert results(td)[1] == ["2"]
        assert caplog.records

    def test_results_survive_a_failing_renderer(self, caplog):
        env = chat_env((2,), ToolCompose([echo, add], BadRenderer()))
        said = call("add", a=1, b=1) + call("echo", text="unspeakable")
        td = step(env, begin(env), said, call("add", a=2, b=2))["next"]
        assert results(td) == [["2", "unspeakable"], ["4"]]
        assert caplog.records

    @pytest.mark.parametrize("role", ["tool", "function"])
    def test_results_survive_a_renderer_without_messages(self, role, caplog):
        env = chat_env(
            (1,), ToolCompose([add], RolelessRenderer(), tool_role=role, recorder=lambda turn: None)
        )
        td = step(env, begin(env), call("add", a=1, b=1))["next"]
        assert conversations(td)[0][-1] == Message(role, "2", tool_call_id="call_0_0")

    def test_failing_tool_affects_only_its_call(self, caplog):
        env = chat_env((2,), ToolCompose([boom, add]))
        said = call("boom") + call("add", a=1, b=1)
        td = step(env, begin(env), said, call("add", a=2, b=2))["next"]
        assert results(td)[0][1] == "2"
        assert "boom crashed (ValueError)" in results(td)[0][0]
        assert results(td)[1] == ["4"]
        assert "a bug" not in results(td)[0][0]  # one line for the model; the log has the rest
        assert "a bug" in caplog.text

    @pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), GeneratorExit(), StopIteration()])
    def test_step_returns_for_any_exception_of_a_tool(self, error, caplog):
        async def odd() -> str:
            raise error

        env = chat_env((2,), ToolCompose([tool(odd), add]))
        td = step(env, begin(env), call("odd"), call("add", a=2, b=2))["next"]
        assert flags(td, "n_errors") == [1, 0]
        assert results(td)[1] == ["4"]

    def test_result_that_is_not_json_is_shown_as_text(self):
        async def odd() -> object:
            return object()

        env = chat_env((1,), ToolCompose([tool(odd)]))
        assert results(step(env, begin(env), call("odd"))["next"])[0] == ["<object object>"]

    def test_unserializable_result_affects_only_its_call(self, caplog):
        """A part becomes text when the messages are written, outside of where tools are caught."""

        async def odd() -> ToolResult:
            return ToolResult((JsonPart(object()),))

        env = chat_env((2,), ToolCompose([tool(odd), add]))
        td = step(env, begin(env), call("odd") + call("add", a=1, b=1), call("add", a=2, b=2))["next"]
        assert len(results(td)[0]) == 2
        assert results(td)[0][1] == "2"
        assert results(td)[1] == ["4"]

    def test_a_list_that_a_tool_returns_stays_json(self):
        async def items() -> list:
            return [1, 2, {"a": [True, None]}]

        env = chat_env((1,), ToolCompose([tool(items)]))
        assert results(step(env, begin(env), call("items"))["next"]) == [['[1, 2, {"a": [true, null]}]']]

    def test_arguments_that_are_lists_arrive_as_lists(self):
        seen = []

        async def take(numbers: list[int], empty: list[int]) -> str:
            seen.append((numbers, empty))
            return "ok"

        env = chat_env((1,), ToolCompose([tool(take)]))
        step(env, begin(env), call("take", numbers=[1, 2], empty=[]))
        assert seen == [([1, 2], [])]
        assert type(seen[0][0]) is list


class TestRecorder:
    def test_each_row_of_each_step_is_one_turn(self):
        turns = []
        env = dataset_env(2, ToolCompose([add], recorder=turns.append))
        td = advance(env, env.reset(), call("add", a=1, b=1), "hello")
        advance(env, td, "thanks", "hello")
        assert [(local_name(t.trajectory), t.index) for t in turns] == [
            ("0.0", 0),
            ("1.0", 0),
            ("0.0", 1),
            ("1.0", 1),
        ]
        assert [m.role for m in turns[0].context] == ["system", "user"]
        assert turns[2].context == ()
        assert [m.content for m in turns[0].messages] == ["2"]
        assert turns[0].outcome.results[0].text == "2"
        assert turns[2].message.content == "thanks"

    def test_new_trajectory_starts_without_old_records(self):
        turns = []
        env = dataset_env(1, ToolCompose([add], recorder=turns.append))
        step(env, env.reset(), "one")
        step(env, env.reset(), "two")
        assert [(local_name(t.trajectory), t.index, len(t.context)) for t in turns] == [
            ("0.0", 0, 2),
            ("0.1", 0, 2),
        ]

    def test_failing_recorder_does_not_stop_a_step(self, caplog):
        turns = []

        def broken(turn):
            raise ValueError("no disk")

        env = dataset_env(2, ToolCompose([add], recorder=[broken, turns.append]))
        td = advance(env, env.reset(), call("add", a=1, b=1), "hello")
        advance(env, td, "thanks", "hello")
        assert len(turns) == 4
        assert len([r for r in caplog.records if "no disk" in (r.exc_text or "")]) == 1


hostile_piece = st.one_of(
    st.text(),
    st.text(alphabet=st.characters(categories=["Cs", "Cc", "Lu"])),
    st.binary().map(lambda data: data.decode("latin-1")),
    st.binary().map(lambda data: data.decode("utf-8", "surrogateescape")),
    st.sampled_from(
        [
            "<tool_call>",
            "</tool_call>",
            '<tool name="add">',
            "</tool>",
            '{"name": "add", "arguments": {"a": NaN, "b": Infinity}}',
            '{"name": "add", "arguments": {"a": 1e999, "b": -0}}',
            '{"name": "add", "arguments": "{\\"a\\": 1}"}',
            '{"name": ["add"], "arguments": [[[]]]}',
            '{"message": "", "tools": [{"tool": "add", "args": {"a": 1, "b": 1}, "id": "x"}]}',
            "<think>",
            "</think>",
            "<|im_end|>",
            "<|im_start|>tool\n",
            "\x00",
            "\ud800",
            "\u2028",
        ]
    ),
)
json_value = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
hostile_message = st.one_of(
    st.lists(hostile_piece, max_size=6).map("".join),
    st.builds(
        lambda content, calls: Message("assistant", content, tool_calls=calls),
        st.one_of(st.none(), st.text(), st.lists(json_value, max_size=3)),
        st.lists(
            st.one_of(
                st.fixed_dictionaries(
                    {"name": json_value, "arguments": json_value}, optional={"id": json_value}
                ),
                st.fixed_dictionaries(
                    {"function": json_value}, optional={"id": json_value, "type": json_value}
                ),
                st.dictionaries(st.text(), json_value, max_size=3),
            ),
            max_size=3,
        ),
    ),
)


class TestHostileMessages:
    """Row 1 must get its sum for any message in row 0, and row 0 one result per call."""

    @pytest.mark.parametrize("parser", ["hermes", "xml", "json", "openai", "anthropic"])
    @given(said=hostile_message)
    def test_no_message_raises_or_touches_another_row(self, parser, said):
        env = chat_env((2,), ToolCompose([add], parser))
        honest = Message("assistant", "", tool_calls=[{"name": "add", "arguments": {"a": 2, "b": 3}}])
        if parser in ("json", "anthropic"):
            honest = {
                "json": '{"tools": [{"tool": "add", "args": {"a": 2, "b": 3}}]}',
                "anthropic": Message(
                    "assistant", [{"type": "tool_use", "id": "t", "name": "add", "input": {"a": 2, "b": 3}}]
                ),
            }[parser]
        td = step(env, begin(env), said, honest)["next"]
        row = conversations(td)[1]
        assert flags(td, "n_calls")[1] == 1
        assert flags(td, "n_errors")[1] == 0
        assert "5" in str(row[-1].content)
        if parser != "anthropic":
            assert len(results(td)[0]) == flags(td, "n_calls")[0]

    @given(junk=st.lists(hostile_piece.filter(lambda t: "think>" not in t), max_size=4).map("".join))
    def test_a_readable_call_in_front_of_junk_is_answered(self, junk):
        env = chat_env((1,), ToolCompose([add]))
        td = step(env, begin(env), call("add", a=2, b=3) + junk)["next"]
        assert results(td)[0][0] == "5"

    @pytest.mark.slow
    @pytest.mark.parametrize("parser", ["hermes", "xml", "json", "openai", "anthropic"])
    @pytest.mark.parametrize("opening", ["[", '{"a":', "<tool_call>", '<tool name="add">', "<think>"])
    def test_a_hundred_thousand_openings_are_read_in_time(self, parser, opening):
        env = chat_env((1,), ToolCompose([add], parser))
        bodies = (
            opening * 100_000,
            '<tool_call>{"name": "add", "arguments": ' + opening * 100_000 + "</tool_call>",
            '<tool name="add">' + opening * 100_000 + "</tool>",
        )
        for body in bodies:
            td = step(env, begin(env), body)["next"]
            assert flags(td, "n_calls")[0] == flags(td, "n_errors")[0]

    def test_deep_decoded_arguments_are_one_error(self):
        deep: list = []
        for _ in range(100_000):
            deep = [deep]
        function = {"name": "echo", "arguments": {"text": deep}}
        said = Message("assistant", "", tool_calls=[{"type": "function", "function": function}])
        env = chat_env((2,), ToolCompose([echo, add]))
        td = step(env, begin(env), said, call("add", a=2, b=3))["next"]
        assert flags(td, "n_errors") == [1, 0]
        assert results(td)[1] == ["5"]

    def test_deep_arguments_in_the_tool_calls_field_are_one_error(self):
        env = chat_env((2,), ToolCompose([echo, add]))
        deep = {"name": "echo", "arguments": '{"text": ' + "[" * 100_000}
        said = Message("assistant", "", tool_calls=[{"type": "function", "function": deep}])
        td = step(env, begin(env), said, call("add", a=2, b=3))["next"]
        assert flags(td, "n_errors") == [1, 0]
        assert results(td)[1] == ["5"]

    def test_a_thousand_calls_are_answered_once_each(self):
        env = chat_env((2,), ToolCompose([add]))
        td = step(env, begin(env), call("add", a=1, b=1) * 1000, call("add", a=2, b=3))["next"]
        assert flags(td, "n_calls") == [1000, 1]
        answered = results(td)[0]
        assert len(answered) == 1000
        assert set(answered[:256]) == {"2"}
        assert all("not run" in text for text in answered[256:])
        assert len({m.tool_call_id for m in conversations(td)[0] if m.role == "tool"}) == 1000

    def test_calls_with_equal_ids_all_run(self):
        env = chat_env((1,), ToolCompose([echo]))
        said = "".join(
            call("echo", name, text=str(i)) for i, name in enumerate(["x", "x", "x_2", "x", "x_2"])
        )
        td = step(env, begin(env), said)["next"]
        ids = [m.tool_call_id for m in conversations(td)[0] if m.role == "tool"]
        assert results(td) == [["0", "1", "2", "3", "4"]]
        assert len(set(ids)) == 5

    def test_a_megabyte_of_arguments_arrives(self):
        seen = []

        async def take(text: str) -> str:
            seen.append(len(text))
            return "ok"

        env = chat_env((1,), ToolCompose([tool(take)]))
        td = step(env, begin(env), call("take", text="x" * 1_000_000))["next"]
        assert seen == [1_000_000]
        assert results(td) == [["ok"]]

    def test_a_call_over_the_turn_s_budget_is_answered_and_not_run(self):
        env = chat_env((1,), ToolCompose([echo], max_calls_per_turn=2))
        td = step(env, begin(env), "".join(call("echo", text=str(i)) for i in range(4)))["next"]
        assert results(td)[0][:2] == ["0", "1"]
        assert all("not run" in text for text in results(td)[0][2:])

    def test_lone_surrogates_reach_the_tool_or_are_rejected(self):
        env = chat_env((2,), ToolCompose([echo]))
        said = '<tool_call>{"name": "echo", "arguments": {"text": "\\ud800"}}</tool_call>'
        td = step(env, begin(env), said, call("echo", text="fine"))["next"]
        assert len(results(td)[0]) == 1
        assert results(td)[1] == ["fine"]

    def test_name_of_any_characters_is_an_unknown_tool(self):
        env = chat_env((1,), ToolCompose([echo]))
        for name in ("\u0000", "\u2028", "a" * 100_000, "__class__", "echo\n"):
            said = f"<tool_call>{json.dumps({'name': name, 'arguments': {'text': 'x'}})}</tool_call>"
            assert len(results(step(env, begin(env), said)["next"])[0]) == 1


def reset_rows(env, td, mask):
    """Reset some rows; their next questions are the old ones."""
    td = td.to_lazystack(0)
    if "query" not in set(td.keys()):
        td["query"] = NonTensorData("again").expand(td.batch_size)
    td["_reset"] = torch.tensor(mask).unsqueeze(-1)
    return env.reset(td)
