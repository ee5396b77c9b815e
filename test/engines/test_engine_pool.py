"""`EnginePool`: engines that are lost and come back, and weights that reach one engine after the other."""

import asyncio
from collections import defaultdict

import pytest
import torch
from fakes import token_server
from fakes.token_server import TokenServer
from helpers.collector_worlds import (
    CountedTool,
    check_rows,
    collector_of,
    encoded,
    looks,
    rows_of,
    tokenizer,
)
from helpers.limit import limit

from torchrl_agentic.engines import (
    ChatEngine,
    EnginePool,
    EnginePressure,
    EngineUnusable,
    HTTPEngine,
    ScriptedEngine,
)
from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.testing import EngineContract, SimulatedEngine, run_skipping
from torchrl_agentic.tools.service import Patience

STOP = 0


def whole_answer(key, turn, ids):
    """Return what is left of the answer to a prompt of 3 ids, which may have a part of it already."""
    whole = [*(1 + (sum(ids[:3]) * 31 + place) % 97 for place in range(20 + ids[0] % 20)), STOP]
    return whole[len(ids) - 3 :]


class PoolContract(EngineContract):
    prompts = ((5, 6, 7), (8, 8, 8), (9, 9, 1))
    stop_ids = (STOP,)
    min_tokens = 20
    too_long = (3,) * 100


class TestPoolOfScriptedEngines(PoolContract):
    async def make(self):
        engines = [
            ScriptedEngine(
                whole_answer,
                stop_token_ids=[STOP],
                log_prob=-0.5,
                token_s=1e-4,
                piece_tokens=2,
                max_concurrent=3,
                context_length=99 + number,
            )
            for number in range(3)
        ]
        return EnginePool(engines)


class TestPoolWithoutSkew(PoolContract):
    async def make(self):
        options = {"step_s": 2e-4, "per_sequence_s": 1e-6, "max_concurrent": 3, "context_length": 99}
        engines = [SimulatedEngine(whole_answer, **options) for _ in range(2)]
        return EnginePool(engines, max_skew=0, stream=True)


class Server(SimulatedEngine):
    """An engine that knows which weights sampled what; when it is lost, it forgets those that it had."""

    def __init__(self, answers=whole_answer, **options):
        super().__init__(answers, **{"max_concurrent": 4, **options})
        self.held = {0: None}  # weights by version
        self.began = []  # (time, key) of each request
        self.sampled = defaultdict(list)  # weights behind each answer, by key
        self.is_sampling = 0
        self.loads, self.loading = [], asyncio.Event()
        self.may_load = asyncio.Event()
        self.may_load.set()

    async def sample(self, ids, *, max_tokens, key, on_ids=None):
        self.began.append((asyncio.get_running_loop().time(), key))
        self.is_sampling += 1
        try:
            found = await super().sample(ids, max_tokens=max_tokens, key=key, on_ids=on_ids)
        finally:
            self.is_sampling -= 1
        if found.ids:
            self.sampled[key].append(self.held[found.version])
        return found

    async def update(self, weights):
        self.loading.set()
        await self.may_load.wait()
        version = await super().update(weights)
        self.loads.append(weights)
        self.held[version] = self.held[version - 1] if weights is None else weights
        return version

    def lose_requests(self, message="the engine was lost", *, for_s=0.0, keeps_ids=False):
        self.held[self.version] = None
        self.lost_at = asyncio.get_running_loop().time()
        super().lose_requests(message, for_s=for_s, keeps_ids=keeps_ids)

    @property
    def keys(self):
        return [key for _, key in self.began]


def phases(pool):
    return [one.phase for one in pool.members]


async def ask(pool, key, **options):
    return await pool.sample([5, 6, 7], max_tokens=64, key=key, **options)


def begin(pool, *keys):
    return [asyncio.create_task(ask(pool, key)) for key in keys]


async def settled():
    """Let all tasks run until they wait."""
    for _ in range(20):
        await asyncio.sleep(0)


def script_of(turns):
    """Return the answers of a script to prompts that may have a part of them, whatever engine gave it."""
    script, header = looks(turns), tokenizer().encode("<|im_start|>assistant\n", add_special_tokens=False)

    def answers(key, turn, ids):
        ids, size = list(ids), len(header)
        ends = [place + size for place in range(len(ids)) if ids[place : place + size] == header]
        return encoded(script(key, len(ends) - 1))[len(ids) - ends[-1] :]

    return answers


OUTAGE_S = 3.0


async def lose_in_turn(engines, lost_at, **options):
    """Lose one engine after the other, while it has requests."""
    for number, engine in enumerate(engines):
        await asyncio.sleep(lost_at if number == 0 else 5.0)
        while not engine.is_sampling:
            await asyncio.sleep(0.1)
        engine.lose_requests(for_s=OUTAGE_S, **options)


class TestCollectors:
    @pytest.mark.parametrize("speculate", [False, True])
    @pytest.mark.parametrize("keeps_ids", [False, True])
    def test_a_lost_engine_costs_no_trajectory_and_no_call_and_is_used_again(self, keeps_ids, speculate):
        async def main():
            engines = [Server(script_of(2)) for _ in range(3)]
            pool, tool = EnginePool(engines), CountedTool(lambda key: asyncio.sleep(0.5))
            collector = collector_of(
                pool, tools=[tool], tasks=60, group_size=2, groups_per_batch=4, speculate=speculate
            )
            outage = asyncio.create_task(lose_in_turn(engines[1:2], 1.5, keeps_ids=keeps_ids))
            async with collector:
                batches = [batch async for batch in collector]
            await outage
            rows = rows_of(batches)
            assert len({row["collector", "name"] for row in rows}) == len(rows) == 120
            check_rows(batches, tool, looks(2), collector, size=2)
            assert tool.ran.total() == 240
            figures = collector.stats.snapshot()
            assert not figures["failures"], figures["failures"]
            events = figures["events"]
            assert events.get("replaced", 0) == 0
            assert (events.get("resumed", 0) > 0) == keeps_ids
            times = [time for time, _ in engines[1].began]
            lost_at = engines[1].lost_at
            out = [time for time in times if lost_at < time < lost_at + OUTAGE_S]
            assert len(out) in (1, 2), "only trials, after 1 and 2 s"
            assert len([time for time in times if time > lost_at + OUTAGE_S]) > 10
            assert phases(pool) == ["in"] * 3
            await pool.close()

        run_skipping(main())

    @pytest.mark.parametrize("max_skew", [0, 1])
    @pytest.mark.parametrize("on_update", ["finish", "resume"])
    def test_tokens_have_the_version_of_the_weights_that_sampled_them(self, max_skew, on_update):
        async def main():
            engines = [Server(script_of(2), update_s=0.7) for _ in range(3)]
            pool, tool = EnginePool(engines, max_skew=max_skew), CountedTool(lambda key: asyncio.sleep(0.5))
            collector = collector_of(
                pool,
                tools=[tool],
                tasks=None,
                group_size=2,
                groups_per_batch=4,
                max_staleness=2,
                on_update=on_update,
                max_in_flight=14,
            )
            outage = asyncio.create_task(lose_in_turn(engines, 2.0))
            rows = []
            async with collector:
                async for batch in collector:
                    rows += [(row, pool.version) for row in batch.unbind(0)]
                    if pool.version == 20:
                        break
                    await collector.update_weights(pool.version + 1)
            await outage
            sampled = defaultdict(set)
            for engine in engines:
                assert engine.lost_at
                for key, versions in engine.sampled.items():
                    sampled[key] |= {version or 0 for version in versions}
            for row, now in rows:
                versions = row["collector", "policy_version"]
                versions = versions[versions >= 0]
                assert set(versions.tolist()) == sampled[row["collector", "name"]]
                assert now - versions.min() <= 2
                assert (versions.diff() >= 0).all()
            check_rows([], tool, looks(2), collector, size=2)
            assert all(20 in engine.loads for engine in engines)
            assert not collector.stats.snapshot()["failures"]
            await pool.close()

        run_skipping(main())


class TestFailures:
    def test_a_request_goes_on_elsewhere_and_its_trajectory_stays_there(self):
        async def main():
            first, second = engines = [Server(), Server()]
            pool = EnginePool(engines)
            (task,) = begin(pool, "a")
            await settled()
            first.lose_requests("no power", for_s=1.0)
            assert (await task).finish == "stop"
            assert (first.keys, second.keys) == (["a"], ["a"])
            assert phases(pool) == ["out", "in"]
            assert pool.members[0].reason == "no power"
            await asyncio.sleep(10)
            await ask(pool, "a")
            assert second.keys == ["a", "a"]

        run_skipping(main())

    def test_a_part_of_an_answer_is_returned_and_goes_on_elsewhere(self):
        async def main():
            first, second = engines = [Server(), Server()]
            pool = EnginePool(engines)
            (task,) = begin(pool, "a")
            await asyncio.sleep(0.1)
            first.lose_requests(keeps_ids=True, for_s=100)
            part = await task
            assert (part.finish, phases(pool)) == ("aborted", ["out", "in"])
            assert 0 < len(part.ids) == len(part.log_probs)
            rest = await pool.sample([5, 6, 7, *part.ids], max_tokens=64, key="a")
            assert [*part.ids, *rest.ids] == whole_answer("a", 0, [5, 6, 7])
            assert second.keys == ["a"]

        run_skipping(main())

    def test_an_answer_that_was_heard_is_not_made_again_by_the_pool(self):
        async def main():
            engines = [Server(), Server()]
            pool, pieces = EnginePool(engines), []
            task = asyncio.create_task(ask(pool, "a", on_ids=pieces.extend))
            await asyncio.sleep(0.2)
            assert pieces
            engines[0].lose_requests("no power", for_s=100)
            with pytest.raises(InfrastructureError, match="no power"):
                await task
            assert (await ask(pool, "a")).finish == "stop"
            assert engines[1].keys == ["a"]

        run_skipping(main())

    def test_streaming_keeps_ids_that_nobody_hears(self):
        async def main():
            heard = []

            class Streams(Server):
                async def sample(self, ids, *, max_tokens, key, on_ids=None):
                    heard.append(on_ids is not None)
                    return await super().sample(ids, max_tokens=max_tokens, key=key, on_ids=on_ids)

            for stream in (False, True):
                await ask(EnginePool([Streams()], stream=stream), "a")
            assert heard == [False, True]

        run_skipping(main())

    def test_if_all_are_out_the_error_says_why_and_when_one_is_tried(self):
        async def main():
            engines = [Server(), Server()]
            pool = EnginePool(engines, retry_s=2.0)
            for number, engine in enumerate(engines):
                engine.lose_requests(f"fire {number}", for_s=5.0)
            with pytest.raises(InfrastructureError, match="fire 1"):
                await ask(pool, "a")
            with pytest.raises(InfrastructureError, match=r"all 2 engines .* in 2\.0 s.*fire 0.*fire 1"):
                await ask(pool, "b")
            assert phases(pool) == ["out", "out"]
            await asyncio.sleep(6.0)
            found = await asyncio.gather(*begin(pool, *"abcd"))
            assert [one.finish for one in found] == ["stop"] * 4
            assert phases(pool) == ["in", "in"]

        run_skipping(main())

    def test_while_all_are_out_one_request_tries_and_the_others_wait_for_it(self):
        async def main():
            pool = EnginePool([Server()])
            (engine,) = pool.engines
            engine.lose_requests(for_s=0.5)
            with pytest.raises(InfrastructureError):
                await ask(pool, "a")
            await asyncio.sleep(1.0)
            engine.began.clear()
            tasks = begin(pool, "a", "b", "c")
            await settled()
            assert (engine.keys, phases(pool)) == (["a"], ["trial"])
            tasks[0].cancel()
            await settled()
            assert (engine.keys, phases(pool)) == (["a", "b"], ["trial"])
            await asyncio.gather(*tasks[1:])
            assert phases(pool) == ["in"]

        run_skipping(main())

    def test_an_unusable_engine_is_left_out_and_only_all_of_them_raise(self):
        class Refusing(Server):
            is_refusing = True

            async def sample(self, ids, *, max_tokens, key, on_ids=None):
                if self.is_refusing:
                    raise EngineUnusable("unknown model")
                return await super().sample(ids, max_tokens=max_tokens, key=key, on_ids=on_ids)

        async def main():
            bad, good = Refusing(), Refusing()
            good.is_refusing = False
            pool = EnginePool([bad, good])
            assert (await ask(pool, "a")).finish == "stop"
            await asyncio.sleep(1000)
            await ask(pool, "b")
            assert (phases(pool), good.keys) == (["unusable", "in"], ["a", "b"])
            await pool.update("w")
            assert (bad.loads, good.loads) == ([], ["w"])
            good.is_refusing = True
            with pytest.raises(EngineUnusable, match=r"engine 0 \(Refusing\): unknown model"):
                await ask(pool, "c")

        run_skipping(main())

    def test_a_prompt_that_an_engine_refuses_says_nothing_about_it(self):
        async def main():
            pool = EnginePool([Server(context_length=50), Server(context_length=40)])
            assert pool.context_length == 40
            with pytest.raises(ValueError, match="60 tokens"):
                await pool.sample([1] * 60, max_tokens=5, key="a")
            assert phases(pool) == ["in", "in"]

        run_skipping(main())

    @pytest.mark.parametrize("is_own", [False, True])
    def test_a_check_decides_before_any_request(self, is_own):
        async def main():
            checked = []

            class Checked(Server):
                async def check(self):
                    await check(self)

            async def check(engine):
                checked.append(engine)
                if len(checked) < 3:
                    raise InfrastructureError("not yet")

            engine, other = (Checked if is_own else Server)(), Server()
            pool = EnginePool([engine, other], check=None if is_own else check)
            engine.lose_requests(for_s=0.5)
            await ask(pool, "a")
            for number in range(30):
                await asyncio.sleep(0.5)
                await ask(pool, f"t{number}")
            assert checked == [engine] * 3
            times = [time for time, _ in engine.began]
            assert times[1] > 7.0, "checks after 1, 2 and 4 s"
            assert phases(pool) == ["in", "in"]

        run_skipping(main())


class CountingServer(TokenServer):
    """A server that counts the responses and pieces of responses that it has sent."""

    n_sent = 0

    def response(self, *args):
        self.n_sent += 1
        return super().response(*args)


class TestServers:
    """Servers behind sockets, which end and begin again on the same port."""

    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_server_that_ends_and_begins_again_serves_again(self, stream):
        class Words:
            eos_token_id, pad_token_id, pad_token = token_server.STOP, 0, "<pad>"

            def __len__(self):
                return 100

        prompt = [5, 6, 7, 8]
        whole = token_server.answer_of(prompt)

        async def answer(pool, key):
            """Return a whole answer, resumed as a collector does."""
            ids, log_probs, n_parts = [], [], 0
            while not ids or ids[-1] != token_server.STOP:
                found = await pool.sample([*prompt, *ids], max_tokens=64, key=key)
                ids += found.ids
                log_probs += found.log_probs
                n_parts += 1
            places = range(len(whole))
            assert (ids, log_probs) == (whole, [token_server.log_prob_of(place) for place in places])
            return n_parts

        async with TokenServer("vllm") as first:
            second = await CountingServer("vllm").__aenter__()
            engines = [
                HTTPEngine(
                    server.url("/"),
                    kind="vllm",
                    tokenizer=Words(),
                    max_concurrent=4,
                    patience=Patience(tries=1),
                )
                for server in (first, second)
            ]
            pool = EnginePool(engines, retry_s=0.01, longest_retry_s=0.02, stream=stream)
            tasks = [asyncio.create_task(answer(pool, f"t{number}")) for number in range(8)]
            while second.running < 4 or second.n_sent < 4 * 3 * stream:
                await asyncio.sleep(0)
            await second.__aexit__(None, None, None)
            parts = await asyncio.gather(*tasks)
            assert phases(pool)[0] == "in" != phases(pool)[1]
            assert max(parts) == (2 if stream else 1)
            await pool.update({"w": torch.ones(1)})
            assert (len(first.loaded), len(second.loaded)) == (1, 0)
            await second.__aenter__()
            async with asyncio.timeout(limit(30)):
                while phases(pool) != ["in", "in"]:
                    await answer(pool, "waits")
            assert (len(first.loaded), len(second.loaded)) == (1, 1)
            before = len(second.visits)
            await asyncio.gather(*(answer(pool, f"after {number}") for number in range(8)))
            assert sum("generate" in visit.path for visit in second.visits[before:]) == 4
            await pool.close()
            await second.__aexit__(None, None, None)


class TestUpdates:
    def test_one_engine_after_the_other_loads_while_the_others_sample(self):
        async def main():
            first, second = engines = [Server(), Server()]
            pool = EnginePool(engines)
            first.may_load.clear()
            second.may_load.clear()
            update = asyncio.create_task(pool.update("w"))
            await first.loading.wait()
            found = await asyncio.gather(*begin(pool, "a", "b"))
            assert (first.keys, second.keys) == ([], ["a", "b"])
            assert [one.version for one in found] == [0, 0]
            assert not second.loading.is_set()
            first.may_load.set()
            await second.loading.wait()
            assert (await ask(pool, "c")).version == 1
            assert (first.keys, pool.version) == (["c"], 0)
            second.may_load.set()
            assert await update == pool.version == 1

        run_skipping(main())

    def test_at_once_engines_load_together(self):
        async def main():
            engines = [Server() for _ in range(3)]
            pool = EnginePool(engines, at_once=2)
            for engine in engines:
                engine.may_load.clear()
            update = asyncio.create_task(pool.update("w"))
            await engines[1].loading.wait()
            assert [engine.loading.is_set() for engine in engines] == [True, True, False]
            for engine in engines:
                engine.may_load.set()
            assert await update == 1

        run_skipping(main())

    def test_requests_that_run_are_aborted_and_go_on(self):
        async def main():
            engines = [Server(), Server()]
            pool = EnginePool(engines)
            tasks = begin(pool, "a", "b")
            await asyncio.sleep(0.1)
            await pool.update("w")
            found = await asyncio.gather(*tasks)
            assert {(one.finish, one.version) for one in found} == {("aborted", 0)}
            assert phases(pool) == ["in", "in"], "an update is no loss"
            ids = found[0].ids
            rest = await pool.sample([5, 6, 7, *ids], max_tokens=64, key="a")
            assert ([*ids, *rest.ids], rest.version) == (whole_answer("a", 0, [5, 6, 7]), 1)

        run_skipping(main())

    def test_an_engine_that_comes_back_gets_the_latest_weights_first(self):
        async def main():
            first, second = engines = [Server(), Server()]
            pool = EnginePool(engines)
            await pool.update("w1")
            first.lose_requests(for_s=3.0)
            await ask(pool, "a")
            assert await pool.update("w2") == 2
            assert (first.loads, second.loads) == (["w1"], ["w1", "w2"])
            for number in range(20):
                await asyncio.sleep(0.5)
                found = await ask(pool, f"t{number}")
                assert found.version == 2
            assert first.loads == ["w1", "w2"]
            assert set().union(*first.sampled.values()) == {"w2"}
            assert phases(pool) == ["in", "in"]

        run_skipping(main())

    def test_a_restarted_engine_gets_its_weights_again_although_it_missed_no_update(self):
        async def main():
            first, second = engines = [Server(), Server()]
            pool = EnginePool(engines)
            await pool.update("w1")
            (task,) = begin(pool, "a")
            await settled()
            first.lose_requests()
            await task
            await asyncio.sleep(1.0)
            await ask(pool, "b")
            await asyncio.sleep(1.0)
            await asyncio.gather(*begin(pool, *"cd"))
            assert (first.held[first.version], first.loads) == ("w1", ["w1", "w1"])
            assert "w1" in {has for key in "cd" for has in first.sampled[key]}
            assert (pool.version, second.loads) == (1, ["w1"])

        run_skipping(main())

    def test_the_weights_for_engines_that_come_back_are_a_copy(self):
        async def main():
            first, second = engines = [Server(), Server()]
            pool, live = EnginePool(engines), {"a": torch.ones(2)}
            await pool.update(live)
            (task,) = begin(pool, "a")
            await settled()
            first.lose_requests()
            await task
            live["a"].zero_()  # the optimizer
            await asyncio.sleep(1.0)
            await ask(pool, "b")
            await settled()
            assert first.loads[1]["a"].tolist() == [1, 1]
            assert second.loads == [live]

        run_skipping(main())

    def test_an_iterator_of_weights_reaches_all_engines(self):
        async def main():
            engines = [Server(), Server()]
            pairs = [("a", torch.ones(2)), ("b", torch.zeros(1))]
            await EnginePool(engines).update(iter(pairs))
            assert [engine.loads for engine in engines] == [[pairs], [pairs]]

        run_skipping(main())

    def test_an_engine_that_fails_to_load_is_out_and_the_update_counts(self):
        async def main():
            first, _ = engines = [Server(), Server()]
            pool = EnginePool(engines)
            first.lose_requests("no power", for_s=0.5)
            assert await pool.update("w") == 1
            assert (phases(pool), pool.members[0].reason) == (["out", "in"], "no power")
            await asyncio.sleep(1.0)
            await asyncio.gather(*begin(pool, "a"))
            await settled()
            assert (first.loads, phases(pool)) == (["w"], ["in", "in"])

        run_skipping(main())

    def test_an_engine_that_loads_too_long_is_out(self):
        async def main():
            first, second = engines = [Server(), Server()]
            pool = EnginePool(engines, update_timeout=10.0)
            first.may_load.clear()
            assert await pool.update("w") == 1
            assert asyncio.get_running_loop().time() == pytest.approx(10.0)
            assert phases(pool) == ["out", "in"]
            assert "in time" in pool.members[0].reason
            assert second.loads == ["w"]

        run_skipping(main())

    def test_if_no_engine_can_load_the_version_stays(self):
        async def main():
            engines = [Server(), Server()]
            pool = EnginePool(engines)
            for engine in engines:
                engine.lose_requests("no power", for_s=1.5)
            for _ in range(2):  # the second time, both are out and are tried nevertheless
                with pytest.raises(InfrastructureError, match="no power"):
                    await pool.update("w")
            assert pool.version == 0
            await asyncio.sleep(1.5)
            assert await pool.update("w") == 1
            assert phases(pool) == ["in", "in"]

        run_skipping(main())

    def test_weights_that_the_first_engine_refuses_are_an_error_and_change_nothing(self):
        async def main():
            engines = [Picky({"bad"}), Picky(set())]
            pool = EnginePool(engines)
            with pytest.raises(ValueError, match="no such weights"):
                await pool.update("bad")
            assert (pool.version, phases(pool), engines[1].loads) == (0, ["in", "in"], [])
            assert await pool.update("good") == 1
            found = await asyncio.gather(*begin(pool, "a", "b"))
            assert [one.version for one in found] == [1, 1]

        run_skipping(main())

    def test_an_engine_that_refuses_what_another_has_loaded_is_out(self):
        async def main():
            pool = EnginePool([Picky(set()), Picky({"w"})])
            assert await pool.update("w") == 1
            assert phases(pool) == ["in", "out"]
            assert "no such weights" in pool.members[1].reason
            for key in "abc":
                assert (await ask(pool, key)).version == 1
            assert await pool.update("next") == 2
            await asyncio.sleep(5.0)
            await ask(pool, "d")
            await settled()
            assert (phases(pool), pool.engines[1].loads) == (["in", "in"], ["next"])

        run_skipping(main())

    def test_an_update_goes_on_if_its_caller_is_cancelled(self):
        async def main():
            engines = [Server(update_s=1.0), Server(update_s=1.0)]
            pool = EnginePool(engines)
            update = asyncio.create_task(pool.update("w"))
            await engines[0].loading.wait()
            update.cancel()
            with pytest.raises(asyncio.CancelledError):
                await update
            assert await pool.update(None) == 2
            assert [engine.loads for engine in engines] == [["w", None], ["w", None]]

        run_skipping(main())

    def test_closing_ends_updates_and_requests_that_wait(self):
        async def main():
            engine = Server(update_s=5.0)
            pool = EnginePool([engine])
            update = asyncio.create_task(pool.update("w"))
            await engine.loading.wait()
            (waiting,) = begin(pool, "a")
            await settled()
            await pool.close()
            ended = await asyncio.gather(update, waiting, return_exceptions=True)
            assert [type(one) for one in ended] == [InfrastructureError] * 2
            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert not left

        run_skipping(main())


class Picky(Server):
    """An engine that refuses some weights."""

    def __init__(self, refused):
        super().__init__()
        self.refused = refused

    async def update(self, weights):
        if weights in self.refused:
            raise ValueError("no such weights")
        return await super().update(weights)


def test_it_says_of_all_engines_what_a_collector_asks_one():
    engines = [Server(context_length=None, max_concurrent=3), Server(context_length=80, max_concurrent=5)]
    pool = EnginePool(engines)
    assert (pool.max_concurrent, pool.context_length, pool.version) == (8, 80, 0)
    assert (pool.can_resume, pool.takes_media) == (True, False)
    engines[1].can_resume = False
    assert not EnginePool(engines).can_resume
    for engine, version in zip(engines, (3, 4), strict=True):
        engine.version = version
    assert EnginePool(engines).version == 4
    assert repr(pool) == "EnginePool(2 engines: in, in; version 0)"


async def test_it_passes_media_on_and_keeps_the_form_of_wrong_answers():
    class Sees(Server):
        takes_media = True

        async def sample(self, ids, *, max_tokens, key, on_ids=None, media=None):
            return media

    pool = EnginePool([Sees()])
    assert pool.takes_media
    assert await ask(pool, "a", media={"image": ["cat"]}) == {"image": ["cat"]}


async def test_its_pressure_is_that_of_the_fullest_engine_and_the_sum_of_the_rest():
    class Full(Server):
        seen: EnginePressure | None = None

        async def pressure(self):
            if isinstance(self.seen, Exception):
                raise self.seen
            return self.seen

    silent, first, second = engines = [Server(), Full(), Full()]
    pool = EnginePool(engines)
    assert await pool.pressure() is None
    first.seen, second.seen = EnginePressure(0.2, 1, 4, 10), EnginePressure(0.7, 2, 3, 5)
    assert await pool.pressure() == EnginePressure(0.7, 3, 7, 0)
    second.seen = EnginePressure(0.5, 0, 1, 1)  # it was started again
    first.seen = EnginePressure(0.2, 0, 1, 12)
    assert await pool.pressure() == EnginePressure(0.5, 0, 2, 2)
    first.seen = InfrastructureError("away")
    assert (await pool.pressure()).running == 1
    second.seen = InfrastructureError("away too")
    with pytest.raises(InfrastructureError, match="away"):
        await pool.pressure()
    assert await EnginePool([silent]).pressure() is None


class Speaks(ChatEngine):
    version, max_concurrent = 0, 1

    async def chat(self, messages, *, tools, max_tokens, key): ...

    async def update(self, weights): ...

    async def close(self): ...


_ENGINE = Server()


@pytest.mark.parametrize(
    ("engines", "options", "error", "message"),
    [
        ([], {}, ValueError, "at least one engine"),
        (_ENGINE, {}, TypeError, "a list of engines; got Server"),
        ("abc", {}, TypeError, "a list of engines; got str"),
        ([3], {}, TypeError, "engine 0 of the pool: .* got int, which lacks"),
        ([Speaks()], {}, TypeError, "engine 0 of the pool is a Speaks, which answers messages"),
        ([_ENGINE, _ENGINE], {}, ValueError, "engine 1 is in the pool twice"),
        ([_ENGINE], {"max_skew": 2}, ValueError, "max_skew is 0 or 1"),
        ([_ENGINE], {"at_once": 0}, ValueError, "at_once must be 1 or more"),
        ([_ENGINE], {"retry_s": None}, TypeError, "retry_s is a number of seconds"),
        ([_ENGINE], {"retry_s": 0}, ValueError, "retry_s must be above 0"),
        ([_ENGINE], {"retry_s": 9, "longest_retry_s": 1}, ValueError, "longest_retry_s is at least retry_s"),
        ([_ENGINE], {"update_timeout": -1}, ValueError, "update_timeout must be above 0"),
        ([_ENGINE], {"check": 3}, TypeError, "check is an async function"),
    ],
)
def test_wrong_arguments_are_errors_that_say_what_is_expected(engines, options, error, message):
    with pytest.raises(error, match=message):
        EnginePool(engines, **options)
