"""Collectors in a world that fails at random: engines, tools and rewards, and the count of what they hold."""

import asyncio
import contextlib
import functools
import gc
import itertools
import json
import random
from collections import Counter
from typing import ClassVar

from torchrl.envs import Compose

from torchrl_agentic import Effects, RateLimiter, Tool, ToolCompose, ToolError, TurnTokenizer
from torchrl_agentic.collectors import AgentCollector, CollectorError, Task
from torchrl_agentic.engines import Engine, Sampled
from torchrl_agentic.engines.scripted_engine import AnswerCursor
from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.testing import byte_tokenizer

TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LONG_S = 10_000.0
"""Seconds of the skipping clock after which a collector counts as wedged."""


@functools.cache
def tokenizer():
    """Return the tokenizer of all these engines: one token per byte."""
    found = byte_tokenizer("tiny-qwen")
    found.chat_template = TEMPLATE
    return found


def call(name, **arguments):
    """Return a call in the format of Hermes."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@functools.lru_cache(2_000)
def encoded(text):
    """Return the ids of an answer, with the stop token."""
    return (*tokenizer().encode(text, add_special_tokens=False), tokenizer().eos_token_id)


def numbered_tasks(count):
    """Return so many tasks, or endless ones for None."""
    numbers = itertools.count() if count is None else range(count)
    tasks = (Task(f"t{number}", [{"role": "user", "content": f"q{number}"}]) for number in numbers)
    return tasks if count is None else list(tasks)


class CountedTool(Tool):
    """Counts its open sessions, and how often each call ran."""

    name = "look"
    description = "Look something up."
    input_schema: ClassVar = {
        "type": "object",
        "properties": {"key": {"type": "string"}},
        "required": ["key"],
    }

    def __init__(self, act=None):
        self.act = act
        self.ran = Counter()
        self.opened, self.closed = [], []

    @contextlib.asynccontextmanager
    async def session(self, trajectory):
        self.opened.append(trajectory)
        try:
            yield self
        finally:
            self.closed.append(trajectory)

    async def run(self, args, ctx):
        self.ran[ctx.trajectory, args["key"]] += 1
        if self.act is not None:
            await self.act(args["key"])
        return f"found {args['key']}"

    @property
    def is_all_closed(self):
        return sorted(self.opened) == sorted(self.closed)


class CountedPureTool(CountedTool):
    """Has no sessions and no effects, so that its calls may start while the model writes."""

    effects = Effects.PURE
    session = Tool.session


def n_answers(ids):
    """Return the number of answers that a prompt contains."""
    return tokenizer().decode(ids).count("<|im_start|>assistant") - 1


class WildEngine(Engine):
    """Answers from a script; `fate` decides before each request what befalls it.

    Fates: "ok", "abort" (after a part), "empty" (aborted without a token), "lost", "broken" (another
    exception), "hang", "cancel" (its own task was cancelled), "exit".
    """

    def __init__(self, script, *, fate=lambda key: "ok", delay=lambda key: 0.0, version=0, piece=5):
        self.version, self.max_concurrent = version, 8
        self.fate, self.delay, self.piece = fate, delay, piece
        # By the prompt, because a trajectory may begin again under its key.
        self.cursor = AnswerCursor(lambda key, turn, ids: encoded(script(key, n_answers(ids))))
        self.open = Counter()
        self.asked = []
        self.weights = []
        self.ended = asyncio.Event()

    async def sample(self, ids, *, max_tokens, key, on_ids=None):
        self.open[key] += 1
        self.asked.append((key, len(ids), max_tokens))
        try:
            return await self._sample(ids, max_tokens, key, on_ids)
        finally:
            self.open[key] -= 1

    async def _sample(self, ids, max_tokens, key, on_ids):
        fate, version, ended = self.fate(key), self.version, self.ended
        place = self.cursor.find(key, ids)
        if fate == "lost":
            await asyncio.sleep(self.delay(key))
            raise InfrastructureError("the engine was lost")
        if fate == "broken":
            raise RuntimeError("a mistake in the engine")
        if fate == "cancel":
            raise asyncio.CancelledError
        if fate == "exit":
            raise SystemExit(3)
        if fate == "hang":
            await asyncio.Event().wait()
        if fate == "empty":
            return Sampled([], [], "aborted", version)
        rest = place.ids[place.done : place.done + max_tokens]
        found = []
        for start in range(0, len(rest), self.piece):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.delay(key)):
                    await ended.wait()
            if ended.is_set() or (fate == "abort" and start):
                return Sampled(found, [-1.0] * len(found), "aborted", version)
            found += rest[start : start + self.piece]
            if on_ids is not None:
                on_ids(rest[start : start + self.piece])
        self.cursor.finish(key, place.turn)
        is_whole = place.done + len(found) == len(place.ids)
        return Sampled(found, [-1.0] * len(found), "stop" if is_whole else "length", version)

    async def update(self, weights):
        self.weights.append(weights)
        self.ended.set()
        self.ended = asyncio.Event()
        await asyncio.sleep(0.5)
        self.version += 1
        return self.version

    async def close(self):
        self.ended.set()


def looks(turns):
    """Return a script: so many turns with one call, whose key is unique, then an answer."""
    return lambda key, turn: call("look", key=f"{key}#{turn}") if turn < turns else f"done {key}"


def collector_of(engine, *, tools=(), transforms=None, tasks=1, **more):
    """Return a collector over an engine of this module."""
    if transforms is None:
        transforms, more = ToolCompose(list(tools)), {"tokenizer": tokenizer(), **more}
    given = numbered_tasks(tasks) if tasks is None or isinstance(tasks, int) else tasks
    return AgentCollector(transforms, engine=engine, tasks=given, **more)


async def drained(collector, limit=None):
    """Return the batches of a collector, at most `limit`, then shut it down."""
    found = []
    async with collector, asyncio.timeout(LONG_S):
        async for batch in collector:
            found.append(batch)
            if len(found) == limit:
                break
    return found


def rows_of(batches):
    """Return the rows of batches as one list."""
    return [row for batch in batches for row in batch.unbind(0)]


def names_of(batch):
    """Return the names of the trajectories of a batch."""
    return [row["collector", "name"] for row in batch.unbind(0)]


def tasks_of(batches):
    """Return the names of the tasks in batches, one per row."""
    return [name.split("/")[0] for batch in batches for name in names_of(batch)]


class Odds:
    """Random decisions of one schedule."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        rng = self.rng
        self.turns = rng.randint(0, 2)
        self.has_timeout = rng.random() < 0.6
        self.engine_fault = rng.choice([0, 0, 0.1, 0.3])
        self.tool_fault = rng.choice([0, 0, 0.2])
        self.reward_fault = rng.choice([0, 0, 0.2])
        self.slow = rng.choice([0.01, 1.0, 30.0])

    def seconds(self):
        """Return a duration; a few are very long."""
        return self.rng.choice([0.0, 0.0, 0.1, 1.0]) * self.rng.random() * self.slow

    def fate(self, key):
        """Return the fate of a request."""
        if self.rng.random() >= self.engine_fault:
            return "ok"
        faults = ["abort", "abort", "empty", "lost", "lost", "broken", "cancel"]
        return self.rng.choice([*faults, "hang"] if self.has_timeout else faults)

    async def tool(self, key):
        """Be slow, raise, or hang."""
        await asyncio.sleep(self.seconds())
        if self.rng.random() < self.tool_fault:
            kind = self.rng.choice(["error", "crash", "infra", "hang"])
            if kind == "hang":
                await asyncio.Event().wait()
            raise {"error": ToolError, "crash": ValueError, "infra": InfrastructureError}[kind]("no")

    async def reward(self, trajectory):
        """Return a number; or be slow, raise, hang, or return nonsense."""
        await asyncio.sleep(self.seconds())
        if self.rng.random() < self.reward_fault:
            kind = self.rng.choice(["crash", "none", "nan", "cancel", "exit", "hang"])
            if kind == "hang" and self.has_timeout:
                await asyncio.Event().wait()
            if kind == "cancel":
                raise asyncio.CancelledError
            if kind == "exit":
                raise SystemExit(1)
            if kind == "crash":
                raise ValueError("no reward")
            return {"none": None, "nan": float("nan")}.get(kind, 0.0)
        return float(self.rng.random())


class World:
    """What the schedules share, because it takes time to build: a tool, its limiter, and the transforms.

    Limiters that workers share live in real time, which does not skip, so a tool for workers has none.
    """

    def __init__(self, tool=None, *, is_limited=False):
        self.tool = CountedTool() if tool is None else tool
        self.limiter = RateLimiter(max_concurrent=2)
        limits = {"look": self.limiter} if tool is None or is_limited else None
        compose = ToolCompose([self.tool], per_call_timeout=20.0, rate_limits=limits)
        self.transforms = Compose(compose, TurnTokenizer(tokenizer()))


async def run_schedule(seed, world, workers=None, beside=None):
    """Run a collector through a random schedule, and check that everything is accounted for at its end.

    Called with the random decisions, `workers` returns the workers of the collector, and `beside` what runs
    beside it, given these too.
    """
    odds = Odds(seed)
    rng = odds.rng
    tool, limiter = world.tool, world.limiter
    tool.act, tool.ran, tool.opened, tool.closed = odds.tool, Counter(), [], []
    script = looks(odds.turns)
    engine = WildEngine(
        script, fate=odds.fate, delay=lambda key: odds.seconds() / 10, version=rng.choice([0, 7])
    )
    engine.can_resume = rng.random() < 0.8
    size, per_batch = rng.randint(1, 3), rng.randint(1, 3)
    n_tasks = rng.choice([0, 1, 3, 5, None])
    collector = collector_of(
        engine,
        transforms=world.transforms,
        tasks=n_tasks,
        group_size=size,
        groups_per_batch=per_batch,
        max_in_flight=rng.choice([1, 2, 5, "auto"]),
        max_staleness=rng.choice([0, 1, 2, None]),
        on_update=rng.choice(["resume", "finish"]),
        reward=odds.reward if rng.random() < 0.5 else None,
        trajectory_timeout=100.0 if odds.has_timeout else None,
        on_failure=rng.choice(["replace", "replace", "drop", "raise"]),
        max_replacements=rng.choice([0, 1, 3]),
        engine_retries=rng.choice([0, 1]),
        max_new_tokens=300,
        speculate=rng.random() < 0.3,
        workers=None if workers is None else (chosen := workers(odds)),
    )
    batches = []
    is_over = False

    async def consume():
        nonlocal is_over
        with contextlib.suppress(CollectorError):
            async for batch in collector:
                batches.append(batch)
                await asyncio.sleep(odds.seconds())
                for _ in range(rng.choice([0, 1, 1, 1, 2])):
                    await collector.update_weights()
                if len(batches) >= 4:
                    return
            is_over = True

    async with asyncio.timeout(LONG_S):
        consumer = asyncio.create_task(consume())
        other = asyncio.create_task(asyncio.sleep(0) if beside is None else beside(odds, chosen))
        how = rng.choice(["end", "end", "close", "cancel"])
        if how != "end":
            await asyncio.wait({consumer}, timeout=odds.seconds() * 5)
        if how == "cancel":
            consumer.cancel()
        if how != "close":
            await asyncio.wait({consumer})
        await collector.aclose()
        await asyncio.wait({consumer})
        other.cancel()
        await asyncio.wait({other})
    if not consumer.cancelled():
        consumer.result()
    for _ in range(20):  # tasks whose work is done need a turn of the loop to end; none may need time
        if len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0)
    check_nothing_left(collector, engine, tool, limiter)
    check_rows(batches, tool, script, collector, size=size)
    figures = collector.stats.snapshot()
    if is_over and how == "end":
        assert n_tasks == figures["batches"]["groups"] + figures["events"].get("dropped", 0)
    return figures["events"]


def check_nothing_left(collector, engine, tool, limiter=None):
    """Check that no session, request, task, permit and trajectory is left of a collector."""
    assert tool.is_all_closed
    assert not engine.open.total()
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, left
    if limiter is not None:
        assert (limiter.stats().in_flight, limiter.stats().waiting) == (0, 0)
    figures = collector.stats.snapshot()
    assert figures["in_flight"] == figures["engine"]["requests"] == figures["engine"]["queued"] == 0


def check_rows(batches, tool, script, collector, *, size):
    """Check that groups are whole, texts are the script's, and each call ran once and has one result."""
    for batch in batches:
        counts = Counter(row["collector", "group"].item() for row in batch.unbind(0))
        assert all(1 <= count <= size for count in counts.values())
        for row in batch.unbind(0):
            name = row["collector", "name"]
            key = name.partition("+")[0]  # one that was lost with its worker has the key of its successor
            mask = row["masks", "all_assistant_mask"]
            sampled = tokenizer().decode(row["tokens", "full"][mask])
            turns = row["agentic", "turn"].item()
            assert sampled == "".join(script(key, turn) + "<|im_end|>" for turn in range(turns))
            versions = row["collector", "policy_version"]
            assert ((versions >= 0) == mask).all()
            assert (versions[mask].diff() >= 0).all()
            assert row["agentic", "n_calls"].item() == turns - 1
            assert all(tool.ran[name, f"{key}#{turn}"] <= 1 for turn in range(turns))
            shown = tokenizer().decode(row["tokens", "full"])
            for turn in range(turns - 1):
                assert shown.count(f"found {key}#{turn}") <= 1
    assert all(count == 1 for count in tool.ran.values())


async def run_schedules(seeds, world=None, **more):
    """Run schedules one after the other; messages of asyncio about lost tasks and exceptions are errors."""
    said, events = [], Counter()
    worlds = [World(), World(CountedPureTool(), is_limited=True)] if world is None else [world]
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: said.append(context))
    for seed in seeds:
        try:
            events.update(await run_schedule(seed, worlds[seed // 10 % len(worlds)], **more))
        except BaseException as error:
            error.add_note(f"schedule {seed}")
            raise
    gc.collect()
    assert not said, said
    return events
