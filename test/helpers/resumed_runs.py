"""Training runs that are killed and resumed, in a world whose answers and rewards repeat."""

import asyncio
import contextlib
import itertools
import os
import random
import threading
import zlib
from typing import Any, ClassVar

import torch
from helpers.collector_worlds import call, n_answers, numbered_tasks, tokenizer

from torchrl_agentic import Effects, Tool, ToolCompose, tool
from torchrl_agentic.collectors import AgentCollector, TaskStream
from torchrl_agentic.engines import ScriptedEngine

N_TASKS = 8
OPTIONS: dict[str, Any] = {"group_size": 2, "groups_per_batch": 2, "max_in_flight": 6, "max_staleness": 0}


CHANCES = {"note": 4, "look": 10, "keep": 1}


class Note(Tool):
    """Appends the name of the trajectory and the id of the call to a file, before it waits."""

    name = "note"
    description = "Note a number."
    input_schema: ClassVar = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    effects = Effects(writes=["notes"])

    def __init__(self, path, pause):
        self.path, self.pause = path, pause

    async def run(self, args, ctx):
        with self.path.open("a") as file:
            file.write(f"{ctx.trajectory} {ctx.call_id}\n")
        await self.pause()
        return f"noted {args['n']}"


class Keep(Tool):
    """Counts its calls in each trajectory."""

    name = "keep"
    description = "Count."
    input_schema: ClassVar = {"type": "object", "properties": {}}

    def __init__(self):
        self.numbers = itertools.count(1)

    @contextlib.asynccontextmanager
    async def session(self, trajectory):
        yield Keep()

    async def run(self, args, ctx):
        return f"kept {next(self.numbers)}"


class Sampler(ScriptedEngine):
    """Says what follows from the key, the number of answers in the prompt, and the weights alone."""

    def __init__(self, pause, tools, heard):
        super().__init__(self._said, tokenizer(), log_prob=-1.0)
        self.weights, self.tools = 0, tools
        self.pause, self.heard = pause, heard

    def _said(self, key, turn, ids):
        turn = n_answers(ids)
        self.heard(key, turn)
        odds = random.Random(f"{key}|{turn}|{self.weights}")
        if turn >= 6 or odds.random() < 0.1:
            return f"done {odds.random()}"
        names = odds.choices([*CHANCES], [*CHANCES.values()], k=odds.randint(1, 2))
        names = [name if name in self.tools else "look" for name in names]
        return "\n".join(
            call(name, **({} if name == "keep" else {"n": odds.randrange(100)})) for name in names
        )

    async def sample(self, ids, *, max_tokens, key, on_ids=None):
        await self.pause()
        return await super().sample(ids, max_tokens=max_tokens, key=key, on_ids=on_ids)

    async def update(self, weights):
        self.weights = weights
        return await super().update(weights)


def looker(pause):
    """Return a tool without effects."""

    @tool
    async def look(n: int) -> str:
        """Look a number up.

        Args:
            n: The number.
        """
        await pause()
        return f"saw {n}"

    return look


async def reward(trajectory):
    """Return a number that depends on all messages."""
    return zlib.crc32("\n".join(message.text for message in trajectory.messages).encode()) % 1000 / 1000


def pauses(seed, longest):
    """Return a coroutine function that waits for a random time."""
    odds = random.Random(seed)
    return lambda: asyncio.sleep(odds.random() * longest)


def collector_of(
    folder, pause, *, heard=lambda key, turn: None, tools=tuple(CHANCES), is_stream=False, **options
):
    """Return an engine and a collector over it, whose values depend on the weights and the keys alone."""
    made = {"note": Note(folder / "notes", pause), "look": looker(pause), "keep": Keep()}
    engine = Sampler(pause, tools, heard)
    tasks = numbered_tasks(N_TASKS)
    collector = AgentCollector(
        ToolCompose([made[name] for name in tools], parser="hermes"),
        engine=engine,
        tokenizer=tokenizer(),
        tasks=TaskStream(tasks, epochs=1, seed=5) if is_stream else tasks,
        name="run",
        reward=reward,
        **{**OPTIONS, **options},
    )
    return engine, collector


def figures_of(batch):
    """Return the tasks of a batch with their rewards, and the tokens of its trajectories."""
    rows = batch.unbind(0)
    found = sorted(
        (row["collector", "name"].split("@")[0].split("~")[0], row["reward"].item()) for row in rows
    )
    tokens = sorted(zlib.crc32(str(row["tokens", "full"].tolist()).encode()) for row in rows)
    ages = [
        int(row["collector", "policy_version"][row["masks", "all_assistant_mask"]].min().item())
        for row in rows
    ]
    return [[[name.split("/")[0], value] for name, value in found], tokens, min(ages)]


def notes_of(folder):
    """Return the effects so far: pairs of a trajectory and the id of a call."""
    path = folder / "notes"
    return [tuple(line.split()) for line in path.read_text().splitlines()] if path.exists() else []


def n_left(state):
    """Return the number of tasks that have left according to a state."""
    if "tasks" in state:
        return state["tasks"]["n_read"] - len(state["tasks"]["unfinished"])
    return state["tasks_before"] + len(state["tasks_done"])


def train(folder, seed, told, options):
    """Train from the last state in a folder to the end, and save a state again and again.

    The states are taken on the event loop between two turns, and on a thread at any time.

    Args:
        folder: Folder of the run.
        seed: Seed of the times.
        told: Called with (key, turn) of each answer that is asked for, and with the curve at the end.
        options: Options of `collector_of`.
    """
    path = folder / "state.pt"
    saved = torch.load(path, weights_only=True) if path.exists() else None
    curve = [] if saved is None else saved["curve"]
    odds, lock, is_over = random.Random(seed), threading.Lock(), threading.Event()

    def save():
        if not lock.acquire(blocking=False):
            return
        try:
            state = collector.state_dict()
            if n_left(state) == len(curve) * 2:  # no batch is on its way to the trainer
                made = {"collector": state, "curve": curve, "weights": engine.weights}
                torch.save(made, folder / "next.pt")
                os.replace(folder / "next.pt", path)
        finally:
            lock.release()

    def heard(key, turn):
        if odds.random() < 0.5:
            save()
        told((key, turn))

    def save_often():
        while not is_over.wait(0.005):
            save()

    engine, collector = collector_of(folder, pauses(seed, 0.004), heard=heard, **options)
    if saved is not None:
        collector.load_state_dict(saved["collector"])
        collector.update_policy_weights_(saved["weights"])
        assert collector.policy_version == saved["weights"]
    saver = threading.Thread(target=save_often)
    saver.start()
    try:
        with collector:
            for batch in collector:
                with lock:
                    curve.append([*figures_of(batch), collector.policy_version])
                    collector.update_policy_weights_(engine.weights + 1)
    finally:
        is_over.set()
        saver.join()
    told(curve)


def train_and_tell(folder, seed, connection, options):
    """Run `train` in a process of its own, which may be killed at any time."""
    train(folder, seed, connection.send, options)
