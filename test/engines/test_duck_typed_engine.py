"""Engines with nothing but the abstract methods of `Engine`, and objects that only look like one."""

import asyncio
import inspect

import pytest
from helpers.collector_worlds import numbered_tasks

from torchrl_agentic import InfrastructureError, Message, ToolCompose
from torchrl_agentic.collectors import AgentCollector
from torchrl_agentic.engines import (
    ChatEngine,
    Engine,
    EnginePool,
    EnginePressure,
    Sampled,
    Sampling,
    Usage,
    ensure_engine,
)
from torchrl_agentic.engines.duck_typed_engine import ChatEngineAdapter, EngineAdapter
from torchrl_agentic.evaluation import evaluate
from torchrl_agentic.rewards import ModelJudge
from torchrl_agentic.testing import EngineContract, finished_trajectory, load_tiny

STOP = 1


class Plain:
    """An object with nothing but what every engine needs; it answers [9, STOP]."""

    def __init__(self):
        self.version, self.is_closed, self.keys = 0, False, []

    async def sample(self, ids, *, max_tokens, key, on_ids=None):
        if not ids or max_tokens < 1:
            raise ValueError(f"the prompt has {len(ids)} ids; {max_tokens=}")
        if self.is_closed:
            raise InfrastructureError("closed")
        self.keys.append(key)
        await asyncio.sleep(0)
        found = [9, STOP][:max_tokens]
        if on_ids is not None:
            on_ids(found)
        return Sampled(found, [-0.5] * len(found), "stop" if found[-1] == STOP else "length", self.version)

    async def update(self, weights):
        self.version += 1
        return self.version

    async def close(self):
        self.is_closed = True


class Derived(Plain, Engine):
    """The same as an `Engine`."""


class PlainChat:
    """An object that answers messages, with nothing but what every chat engine needs."""

    version = 0

    async def chat(self, messages, *, tools, max_tokens, key):
        return Message("assistant", '{"grade": "C"}')

    async def update(self, weights):
        return 0

    async def close(self):
        pass


class DerivedChat(PlainChat, ChatEngine):
    """The same as a `ChatEngine`."""


class TestPlain(EngineContract):
    prompts = ([1], [2, 3])
    stop_ids = (STOP,)

    async def make(self):
        return Plain()


class TestDerived(TestPlain):
    async def make(self):
        return Derived()


class Asked(Plain):
    """An object with every optional member of an engine."""

    max_concurrent, can_resume, may_know_cost, takes_media = 3, False, False, True
    context_length, stop_token_ids, sampling = 77, (5,), Sampling(0.5)
    usage = Usage(requests=4)

    def __init__(self):
        super().__init__()
        self.seed = None

    async def sample(self, ids, *, media=None, **options):
        self.media = media
        return await super().sample(ids, **options)

    async def pressure(self):
        return EnginePressure(0.5, 1, 2, 3)

    async def check(self):
        raise InfrastructureError("away")

    def usage_of(self, key):
        return Usage(requests=len(key))

    def set_seed(self, seed):
        self.seed = seed

    def describe(self):
        return "Asked model"


async def said_by(engine):
    """Return what an engine says of itself."""
    engine.set_seed(8)
    await engine.sample([1], max_tokens=4, key="a", media={"image": ["cat"]})
    try:
        await engine.check()
    except InfrastructureError as error:
        checked = str(error)
    return [
        (engine.max_concurrent, engine.can_resume, engine.may_know_cost, engine.takes_media),
        (engine.context_length, tuple(engine.stop_token_ids), engine.sampling),
        (engine.usage, engine.usage_of("abc"), await engine.pressure()),
        (engine.has_check, checked, engine.describe()),
    ]


SAID = [
    (3, False, False, True),
    (77, (5,), Sampling(0.5)),
    (Usage(requests=4), Usage(requests=3), EnginePressure(0.5, 1, 2, 3)),
    (True, "away", "Asked model"),
]


@pytest.mark.parametrize("bases", [(Asked,), (Asked, Engine)], ids=["look-alike", "derived"])
async def test_every_optional_member_of_an_engine_is_asked(bases):
    given = type("Given", bases, {})()
    assert await said_by(ensure_engine(given)) == SAID
    assert (given.seed, given.media) == (8, {"image": ["cat"]})


async def test_what_an_engine_leaves_out_has_a_default():
    for engine in (ensure_engine(Plain()), Derived()):
        assert (engine.max_concurrent, engine.can_resume, engine.takes_media) == (256, True, False)
        assert (engine.context_length, tuple(engine.stop_token_ids), engine.sampling) == (None, (), None)
        assert (engine.usage, engine.usage_of("a"), await engine.pressure()) == (None, None, None)
        assert (engine.has_check, await engine.check(), engine.set_seed(3)) == (False, None, None)
    assert ensure_engine(Plain()).describe() == "Plain"
    for chat in (ensure_engine(PlainChat()), DerivedChat()):
        assert (chat.max_concurrent, dict(chat.sampling), chat.conversation_tokens("a")) == (256, {}, None)


@pytest.mark.parametrize(("kind", "adapter"), [(Engine, EngineAdapter), (ChatEngine, ChatEngineAdapter)])
def test_an_adapter_passes_on_every_member_of_an_engine(kind, adapter):
    public = {name for name in dir(kind) if not name.startswith("_")}
    own = {name for one in adapter.__mro__ if one.__module__ == adapter.__module__ for name in vars(one)}
    assert public <= own
    assert not inspect.isabstract(adapter)


async def test_the_state_of_a_look_alike_is_read_when_it_is_asked():
    given = Plain()
    engine = ensure_engine(given)
    given.version, given.can_resume, given.usage = 4, False, Usage(requests=1)
    assert (engine.version, engine.can_resume, engine.usage) == (4, False, Usage(requests=1))


def test_an_engine_is_returned_unchanged_and_a_look_alike_has_one_adapter():
    for given in (Derived(), DerivedChat()):
        assert ensure_engine(given) is given
    given = Plain()
    adapter = ensure_engine(given)
    assert ensure_engine(given) is adapter
    assert ensure_engine(adapter) is adapter
    with pytest.raises(ValueError, match="engine 1 is in the pool twice"):
        EnginePool([given, given])


def test_a_subclass_that_leaves_out_a_method_cannot_be_created():
    class Half(Engine):
        async def sample(self, ids, *, max_tokens, key, on_ids=None): ...

    with pytest.raises(TypeError, match=r"close.*update"):
        Half()


class NoUpdates:
    version = 0

    async def sample(self, ids, *, max_tokens, key, on_ids=None): ...


TAKERS = {
    "collector": lambda engine: AgentCollector(ToolCompose([]), engine=engine, tasks=numbered_tasks(1)),
    "judge": ModelJudge,
    "pool": lambda engine: EnginePool([engine]),
}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (None, "got NoneType, which lacks version, sample, update, close"),
        (
            NoUpdates(),
            r"got NoUpdates, which lacks update, close.*derive .* from torchrl_agentic\.engines\.Engine",
        ),
        (Plain, "got the class Plain"),
    ],
    ids=["None", "object", "class"],
)
@pytest.mark.parametrize("take", TAKERS.values(), ids=TAKERS)
def test_what_is_no_engine_is_refused_with_what_it_lacks(take, wrong, message):
    with pytest.raises(TypeError, match=message):
        take(wrong)


def trained_on(engine):
    """Return the names of the trajectories of a collector over an engine."""
    tokenizer = load_tiny()[1]
    collector = AgentCollector(
        ToolCompose([]),
        engine=engine,
        tokenizer=tokenizer,
        tokenizer_options={"stop_token_ids": [STOP]},
        tasks=numbered_tasks(3),
        reward=lambda one: 1.0,
    )
    with collector:
        return sum(len(batch) for batch in collector)


@pytest.mark.parametrize("kind", [Plain, Derived])
def test_a_collector_runs_over_an_engine_without_optional_members(kind):
    engine = kind()
    assert trained_on(engine) == len(set(engine.keys)) == 3


@pytest.mark.parametrize("kind", [PlainChat, DerivedChat])
async def test_a_judge_asks_a_chat_engine_without_optional_members(kind):
    assert (await ModelJudge(kind())(finished_trajectory("4", answer=4))).value == 1.0


async def test_a_pool_tries_a_look_alike_by_its_check():
    class Lost(Asked):
        def __init__(self):
            super().__init__()
            self.is_away, self.n_checks = True, 0

        async def sample(self, ids, **options):
            if self.is_away:
                raise InfrastructureError("away")
            return await super().sample(ids, **options)

        async def check(self):
            self.n_checks += 1
            self.is_away = False

    lost, other = Lost(), Plain()
    pool = EnginePool([lost, other], retry_s=0.01)
    assert (await pool.sample([1], max_tokens=4, key="a")).ids == [9, STOP]
    assert len(other.keys) == 1
    while pool.members[0].phase != "in":
        await asyncio.sleep(0.01)
        await pool.sample([1], max_tokens=4, key="b")
    assert lost.n_checks == 1
    await pool.close()


def test_a_pool_counts_what_all_of_its_engines_count():
    pool = EnginePool([Asked(), Asked()])
    assert (pool.usage, pool.usage_of("ab")) == (Usage(requests=8), Usage(requests=4))
    assert not pool.may_know_cost
    assert EnginePool([Asked(), Plain()]).usage is None


def test_an_evaluation_keeps_what_its_engine_samples_from(tmp_path):
    """Its settings are JSON, so that it can be resumed with the same engine only."""

    class Sampler(Plain, Engine):
        sampling = Sampling(0.5, 0.5)

    def run(engine, **options):
        return evaluate(
            [{"query": "q", "answer": "1"}],
            [],
            engine,
            load_tiny()[1],
            tokenizer_options={"stop_token_ids": [STOP]},
            out=tmp_path / "out",
            **options,
        )

    assert run(Sampler()).is_whole
    assert run(Sampler(), resume=True).is_whole
    other = Sampler()
    other.sampling = Sampling(0.9, 0.9)
    with pytest.raises(ValueError, match=r"sampling was .*0\.5.* and is .*0\.9"):
        run(other, resume=True)
