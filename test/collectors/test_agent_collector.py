"""The surface of `AgentCollector`: iteration, weights, replay buffers, losses, and its arguments."""

import asyncio
import gc
import os
import threading
import warnings
import weakref

import pytest
import torch
from helpers.collector_worlds import (
    CountedTool,
    WildEngine,
    collector_of,
    drained,
    looks,
    names_of,
    numbered_tasks,
    rows_of,
    tasks_of,
    tokenizer,
)
from helpers.limit import limit
from tensordict import TensorDict
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.objectives.llm import GRPOLoss
from transformers import Qwen2Config, Qwen2ForCausalLM

from torchrl_agentic import EndTrajectory, RateLimiter, ToolCompose
from torchrl_agentic.collectors import AgentCollector, CollectorError, Task, Trajectory
from torchrl_agentic.collectors.batching import collector_batch, group_advantage
from torchrl_agentic.engines import ChatEngine
from torchrl_agentic.messages import Message
from torchrl_agentic.rollout import training_policy
from torchrl_agentic.testing import run_skipping
from torchrl_agentic.tokens.ledger import TokenLedger


def simple(engine=None, *, turns=0, **more):
    """Return a collector without faults, and its tool."""
    tool = CountedTool()
    engine = engine or WildEngine(looks(turns))
    return collector_of(engine, tools=[tool], **more), tool


def small_model(seed=0):
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer()),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return Qwen2ForCausalLM(config).eval()


def test_a_loop_gets_all_groups_whole_and_in_their_order():
    collector, tool = simple(turns=1, tasks=5, group_size=2, groups_per_batch=2)
    with collector:
        batches = list(collector)
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert tasks_of(batches) == [f"t{number}" for number in range(5) for _ in range(2)]
    assert tool.is_all_closed
    assert all(count == 1 for count in tool.ran.values())


def test_more_groups_per_batch_than_tasks_are_one_short_batch():
    collector, _ = simple(tasks=2, groups_per_batch=10)
    with collector:
        assert [len(batch) for batch in collector] == [2]


def test_no_tasks_are_no_batches():
    collector, _ = simple(tasks=[])
    with collector:
        assert list(collector) == []


def test_a_loop_goes_on_where_it_was_left():
    collector, _ = simple(tasks=3)
    with collector:
        first = [next(iter(collector)), next(iter(collector))]
        assert tasks_of([*first, *collector]) == ["t0", "t1", "t2"]


def test_any_thread_iterates_and_threads_share_the_batches():
    collector, _ = simple(tasks=20)
    found = []

    def work():
        found.extend(collector)

    with collector:
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(tasks_of(found)) == sorted(f"t{number}" for number in range(20))


def test_a_running_loop_iterates_with_async_for():
    collector, tool = simple(turns=1, tasks=3)
    batches = asyncio.run(drained(collector))
    assert tasks_of(batches) == ["t0", "t1", "t2"]
    assert tool.is_all_closed


def test_for_and_async_for_on_two_loops_are_refused():
    collector, _ = simple(tasks=4)
    with collector:
        next(iter(collector))
        with pytest.raises(RuntimeError, match="another event loop"):
            asyncio.run(anext(aiter(collector)))


def test_a_mistaken_for_does_not_end_the_async_for():
    collector, _ = simple(tasks=3)

    async def main():
        found = []
        async with collector:
            async for batch in collector:
                found.append(batch)
                with pytest.raises(RuntimeError, match="another event loop"):
                    await asyncio.to_thread(list, collector)
        return tasks_of(found)

    assert asyncio.run(main()) == ["t0", "t1", "t2"]


def test_the_weights_may_be_loaded_before_the_first_batch_of_any_loop():
    engine = WildEngine(looks(0))
    collector, _ = simple(engine, tasks=1)
    collector.update_policy_weights_({"a": 1})
    assert engine.weights == [{"a": 1}]
    (batch,) = asyncio.run(drained(collector))
    versions = batch[0]["collector", "policy_version"]
    assert versions.unique().tolist() == [-1, 1]


def test_an_async_context_shuts_down_a_collector_that_a_thread_iterates():
    collector, tool = simple(turns=1, tasks=None)

    async def main():
        async with collector:
            return await asyncio.to_thread(lambda: next(iter(collector)))

    assert len(asyncio.run(main())) == 1
    assert tool.is_all_closed
    with pytest.raises(CollectorError, match="shut down"):
        list(collector)


def test_an_event_loop_that_has_ended_is_named_as_the_reason():
    collector, _ = simple(tasks=4)

    async def one():
        async for _ in collector:
            break

    asyncio.run(one())
    with pytest.raises(RuntimeError, match=r"has ended.*new AgentCollector"):
        asyncio.run(one())


def test_blocking_methods_on_the_loop_of_async_for_name_the_coroutines():
    collector, _ = simple(tasks=4)

    async def main():
        async with collector:
            async for _ in collector:
                with pytest.raises(Exception, match=r"await collector\.update_weights"):
                    collector.update_policy_weights_()
                assert await collector.update_weights() == 1
                break

    asyncio.run(main())


def test_an_update_waits_for_the_engine_of_an_async_for_in_another_thread():
    engine = WildEngine(looks(0))
    collector, _ = simple(engine, tasks=2)

    async def main():
        async with collector:
            async for _ in collector:
                await asyncio.to_thread(collector.update_policy_weights_, {"a": 1})
                assert engine.version == collector.policy_version == len(engine.weights)

    asyncio.run(main())
    assert engine.version == 2


@pytest.mark.parametrize("given", [{}, {"reward": lambda trajectory: 1.0}], ids=["none", "a function"])
def test_a_collector_without_any_reward_says_so_once(given, caplog):
    collector = collector_of(WildEngine(looks(1)), tools=[CountedTool()], tasks=3, **given)
    with collector:
        batches = iter(collector)
        assert ("no reward" in caplog.text) == (not given), "before anything is sampled"
        next(batches)
        assert len(list(collector)) == 2
    assert caplog.text.count("no reward: the rewards and advantages of all batches are 0") == (not given)


def test_batches_have_the_documented_entries():
    collector, _ = simple(turns=1, tasks=[Task("a", [{"role": "user", "content": "hi"}], "7", {"level": 3})])
    collector.engine.delay = lambda key: 0.0
    with collector:
        ((row,),) = [list(batch.unbind(0)) for batch in collector]
    size = len(row["tokens", "full"])
    for key in (("masks", "all_attention_mask"), ("masks", "all_assistant_mask"), ("log_probs", "full")):
        assert row[key].shape == (size,)
    assert row["tokens", "full"][-1] == tokenizer().eos_token_id
    assert row["masks", "all_assistant_mask"][-1]
    mask = row["masks", "all_assistant_mask"]
    assert (row["log_probs", "full"].isnan() == ~mask).all()
    assert row["reward"].shape == row["advantage"].shape == row["next", "reward"].shape == (1, 1)
    assert (row["query"], row["answer"], row["level"]) == ("hi", "7", 3)
    assert row["collector", "reason"] == "no_calls"
    assert row["next", "terminated"].item()
    assert not row["next", "truncated"].item()


@pytest.mark.parametrize("by", ["positional", "weights", "policy"])
def test_weights_come_as_module_tensordict_mapping_function_or_none(by):
    engine = WildEngine(looks(0))
    collector, _ = simple(engine, tasks=None)
    model = torch.nn.Linear(2, 1)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    loads = []

    def give(value):
        if by == "positional":
            collector.update_policy_weights_(value)
        else:
            collector.update_policy_weights_(**{by: value})

    with collector:
        for _, value in zip(
            collector,
            [model, TensorDict.from_module(model), TensorDict(state), state, None, lambda: loads.append(1)],
            strict=False,
        ):
            give(value)
    assert len(engine.weights) == 6
    for given in engine.weights[:4]:
        assert sorted(given) == ["bias", "weight"]
        assert all(torch.equal(given[name], state[name]) for name in state)
    assert engine.weights[4] is None
    assert callable(engine.weights[5])


def test_a_weight_updater_of_torchrl_pushes_the_weights():
    pushed = []

    class Updater:
        def push_weights(self, weights):
            pushed.append(weights)

    engine = WildEngine(looks(0))
    collector, _ = simple(engine, tasks=1, weight_updater=Updater())
    with collector:
        collector.update_policy_weights_({"a": 1})
    assert pushed == [{"a": 1}]
    assert engine.weights == [None], "the engine counts the update, and keeps what was pushed"


def test_a_replay_buffer_takes_batches_and_samples_them():
    collector, _ = simple(turns=1, tasks=3, group_size=2)
    buffer = ReplayBuffer(storage=LazyStackStorage(16), batch_size=4)
    with collector:
        for batch in collector:
            buffer.extend(batch)
    sample = buffer.sample()
    assert len(buffer) == 6
    assert len(sample) == 4
    assert {row["collector", "reason"] for row in sample.unbind(0)} == {"no_calls"}


@pytest.mark.filterwarnings("ignore:size_average and reduce args:UserWarning")
def test_the_loss_takes_samples_as_they_are():
    rewards = iter(range(100))
    collector, _ = simple(turns=1, tasks=2, group_size=2, groups_per_batch=2, reward=lambda _: next(rewards))
    with collector:
        (batch,) = collector
    buffer = ReplayBuffer(storage=LazyStackStorage(16), batch_size=4)
    buffer.extend(batch)
    model = small_model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = GRPOLoss(training_policy(model, tokenizer()), masking_strategy="rlhf")(buffer.sample())
    found.loss_objective.backward()
    assert found.loss_objective.isfinite()
    assert all(one.grad.isfinite().all() for one in model.parameters() if one.grad is not None)
    assert sum(one.grad.abs().sum() for one in model.parameters() if one.grad is not None) > 0


def test_groups_of_several_sizes_have_their_own_advantages():
    ledger = TokenLedger()
    ledger.add_prompt([1])
    ledger.add_sampled([2], [-0.5])
    rewards = [(1.0, 2.0), (3.0,), (0.0, 0.0, 6.0), (5.0, 9.0)]

    def trajectory(name, index, reward):
        return Trajectory(
            name,
            Task("t", [{"role": "user", "content": "q"}]),
            index,
            (),
            reason="no_calls",
            ledger=ledger,
            reward=reward,
        )

    groups = [
        (number, [trajectory(f"{number}.{index}", index, reward) for index, reward in enumerate(group)])
        for number, group in enumerate(rewards)
    ]
    batch = collector_batch(groups)
    wanted = torch.cat([group_advantage(torch.tensor(group), len(group)) for group in rewards])
    assert torch.equal(torch.stack([row["advantage"] for row in batch.unbind(0)]), wanted)


def test_the_advantage_is_that_of_the_group():
    values = {"t0": [1.0, 2.0], "t1": [5.0, 5.0]}

    def reward(trajectory):
        return values[trajectory.task.name][trajectory.index]

    collector, _ = simple(tasks=2, group_size=2, groups_per_batch=2, reward=reward)
    with collector:
        (batch,) = collector
    wanted = group_advantage(torch.tensor([1.0, 2.0, 5.0, 5.0]), 2)
    assert torch.equal(torch.stack([row["advantage"] for row in batch.unbind(0)]), wanted)
    assert batch[2]["advantage"].item() == 0


def test_the_same_latencies_make_the_same_batches():
    """Draw latencies from the keys, which are the same in each collector except for their prefix."""

    def found():
        def delay(key):
            return sum(map(ord, key.split("@")[0])) % 17 / 3

        async def act(key):
            await asyncio.sleep(delay(key) * 7)

        async def main():
            engine = WildEngine(looks(2), delay=delay)
            collector = collector_of(
                engine, tools=[CountedTool(act)], tasks=12, group_size=2, groups_per_batch=2
            )
            batches = []
            async with collector:
                async for batch in collector:
                    batches.append(batch)
                    await collector.update_weights()
            return [
                (
                    row["collector", "name"].split("@")[0],
                    row["collector", "policy_version"].tolist(),
                    row["collector", "seconds"].item(),
                    len(row["tokens", "full"]),
                )
                for row in rows_of(batches)
            ]

        return run_skipping(main())

    first = found()
    assert len({versions[-1] for _, versions, _, _ in first}) > 1
    assert found() == first


def test_a_hook_that_raises_shuts_the_collector_down():
    def hook(batch):
        raise LookupError("mine")

    collector, tool = simple(turns=1, tasks=None, post_collect_hook=hook)
    with pytest.raises(LookupError):
        next(iter(collector))
    with pytest.raises(CollectorError, match="mine"):
        list(collector)
    assert tool.is_all_closed


def test_a_collector_that_is_garbage_leaves_nothing_open():
    closed = threading.Event()

    async def act(key):
        try:
            await asyncio.Event().wait()
        finally:
            closed.set()

    called = threading.Event()
    tool = CountedTool(lambda key: (called.set(), act(key))[1])
    collector = collector_of(WildEngine(looks(1)), tools=[tool], tasks=None)

    def work():
        with pytest.raises(CollectorError):
            next(iter(collector))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert called.wait(limit(10))
    collector.shutdown()
    thread.join(limit(10))
    assert closed.wait(limit(10))
    other, tool = simple(turns=1, tasks=None)
    next(iter(other))
    alive = weakref.ref(other)
    del other
    gc.collect()
    assert alive() is None
    for _ in range(1000):
        if tool.is_all_closed:
            break
        threading.Event().wait(0.01)
    assert tool.is_all_closed


def test_shutdown_from_another_thread_ends_the_iteration_with_an_error_that_says_so():
    waits = threading.Event()

    async def act(key):
        waits.set()
        await asyncio.Event().wait()

    tool = CountedTool(act)
    collector = collector_of(WildEngine(looks(1)), tools=[tool], tasks=None)
    errors = []

    def work():
        try:
            list(collector)
        except CollectorError as error:
            errors.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    assert waits.wait(limit(10))
    collector.shutdown()
    thread.join(limit(10))
    assert not thread.is_alive()
    assert ["was shut down" in error for error in errors] == [True]
    assert tool.is_all_closed
    collector.shutdown()


def test_a_fork_is_told_to_make_its_own_collector():
    collector, _ = simple(tasks=None)
    with collector, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks in processes with threads
        next(iter(collector))
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                next(iter(collector))
            except RuntimeError as error:
                os.write(writer, str(error).encode())
            finally:
                os._exit(0)
        os.close(writer)
        said = os.read(reader, 1000).decode()
        os.waitpid(pid, 0)
        assert "another process" in said
        next(iter(collector))


def test_a_state_continues_with_the_tasks_that_had_not_left():
    collector, _ = simple(tasks=6, groups_per_batch=2)
    with collector:
        first = next(iter(collector))
        state = collector.state_dict()
    other, _ = simple(tasks=6, groups_per_batch=2)
    other.load_state_dict(state)
    with other:
        assert tasks_of([first, *other]) == [f"t{number}" for number in range(6)]
        with pytest.raises(RuntimeError, match="before the first batch"):
            other.load_state_dict(state)


class Speaks(ChatEngine):
    """A chat engine that repeats the question."""

    version, max_concurrent = 0, 4

    async def chat(self, messages, *, tools, max_tokens, key):
        return Message("assistant", f"you said {messages[-1]['content']}")

    async def update(self, weights):
        raise NotImplementedError

    async def close(self):
        pass


def test_an_engine_of_messages_has_trajectories_and_no_batches():
    collector = AgentCollector(ToolCompose([]), engine=Speaks(), tasks=numbered_tasks(2))
    with collector, pytest.raises(TypeError, match=r"trajectories\(\)"):
        next(iter(collector))
    collector = AgentCollector(ToolCompose([]), engine=Speaks(), tasks=numbered_tasks(2))
    with collector:
        assert [[one.answer for one in batch] for batch in collector.trajectories()] == [
            ["you said q0"],
            ["you said q1"],
        ]
    with pytest.raises(ValueError, match=r"max_trajectory_tokens needs .* evaluate\(\)"):
        AgentCollector(ToolCompose([]), engine=Speaks(), tasks=numbered_tasks(2), max_trajectory_tokens=100)


def test_names_are_unique_in_the_process():
    found = []
    for _ in range(2):
        collector, _ = simple(tasks=[{"query": "a", "name": "x"}] * 3, group_size=2)
        with collector:
            found += [name for batch in collector for name in names_of(batch)]
    assert len(found) == len(set(found)) == 12


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"engine": None}, "LockStep"),
        ({"engine": small_model}, "engine is an Engine"),
        ({"engine": type("LLM", (), {"chat": print})()}, "engine is an Engine"),
        ({"transforms": None}, "ToolCompose"),
        ({"transforms": EndTrajectory(max_turns=2)}, "ToolCompose"),
        ({"transforms": torch.nn.Linear(1, 1)}, "ToolCompose"),
        ({"tokenizer": None}, "tokenizer="),
        ({"tokenizer": "gpt2"}, "tokenizer"),
        ({"tasks": None}, "tasks"),
        ({"tasks": "abc"}, "tasks"),
        ({"tasks": {"query": "a"}}, "tasks"),
        ({"group_size": 0}, "group_size"),
        ({"group_size": 1.5}, "group_size"),
        ({"group_size": None}, "group_size"),
        ({"groups_per_batch": "2"}, "groups_per_batch"),
        ({"max_in_flight": 0}, "max_in_flight"),
        ({"max_in_flight": "much"}, "max_in_flight"),
        ({"max_in_flight": None}, "max_in_flight"),
        ({"max_staleness": -1}, "max_staleness"),
        ({"max_staleness": "none"}, "max_staleness"),
        ({"on_update": "abort"}, "on_update"),
        ({"max_turns": 0}, "max_turns"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": None}, "max_new_tokens"),
        ({"max_trajectory_tokens": 0}, "max_trajectory_tokens"),
        ({"max_trajectory_tokens": "9"}, "max_trajectory_tokens"),
        ({"reward": 1.0}, "reward"),
        ({"trajectory_timeout": 0}, "trajectory_timeout"),
        ({"trajectory_timeout": "1"}, "trajectory_timeout"),
        ({"on_failure": "ignore"}, "on_failure"),
        ({"max_replacements": -1}, "max_replacements"),
        ({"engine_retries": -1}, "engine_retries"),
        ({"tokenizer_options": ["x"]}, "tokenizer_options"),
        ({"tokenizer_options": {"nothing": 1}}, "nothing"),
        ({"weight_updater": object()}, "push_weights"),
        ({"post_collect_hook": 3}, "post_collect_hook"),
        ({"timeline": 3}, "timeline"),
        ({"speculate": "yes"}, "speculate"),
    ],
    ids=lambda value: (
        "-".join(value) + f"-{next(iter(value.values()))!s:.12}" if isinstance(value, dict) else ""
    ),
)
def test_a_wrong_argument_is_named(wrong, message):
    given = {
        "transforms": ToolCompose([]),
        "engine": WildEngine(looks(0)),
        "tokenizer": tokenizer(),
        "tasks": [],
        **wrong,
    }
    with pytest.raises((TypeError, ValueError), match=message.replace("(", "\\(")):
        AgentCollector(given.pop("transforms"), **given)


def test_permits_of_a_limiter_come_back_when_a_collector_shuts_down():
    waits = threading.Event()

    async def act(key):
        waits.set()
        await asyncio.Event().wait()

    limiter = RateLimiter(max_concurrent=1)
    compose = ToolCompose([CountedTool(act)], rate_limits={"look": limiter}, per_call_timeout=None)
    collector = AgentCollector(
        compose, engine=WildEngine(looks(1)), tokenizer=tokenizer(), tasks=numbered_tasks(3), max_in_flight=3
    )

    def work():
        with pytest.raises(CollectorError):
            list(collector)

    thread = threading.Thread(target=work)
    thread.start()
    assert waits.wait(limit(10))
    collector.shutdown()
    thread.join(limit(10))
    assert (limiter.stats().in_flight, limiter.stats().waiting) == (0, 0)


def test_the_stats_are_one_object_from_the_beginning():
    collector, *_ = simple()
    stats = collector.stats
    assert stats.snapshot()["batches"]["n"] == 0
    batches = sum(1 for _ in collector)
    assert collector.stats is stats
    assert stats.snapshot()["batches"]["n"] == batches > 0
    assert collector.stats()["collector/batches"] == batches
