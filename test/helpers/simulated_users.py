"""Simulated users. Worker processes import this module too."""

import asyncio
import threading
from contextlib import asynccontextmanager

from torchrl_agentic.interactions import Interaction, Reply
from torchrl_agentic.tools.row_data import local_name


class Shopper(Interaction):
    """Asks for its goal, counts the messages it gets, and logs when sessions open and close."""

    def __init__(self, *, name="shopper", diary=None, judged=None):
        self.name = name
        self.diary = [] if diary is None else diary
        self.judged = judged
        self.heard = []

    @asynccontextmanager
    async def session(self, trajectory, *, goal="tea", **more):
        live = type(self)(name=self.name, diary=self.diary, judged=self.judged)
        live.goal, live.trajectory, live.more = goal, trajectory, more
        self.diary.append(("open", trajectory, asyncio.current_task()))
        try:
            yield live
        finally:
            self.diary.append(("close", trajectory, asyncio.current_task()))

    async def respond(self, messages):
        self.heard.append(messages[-1].content)
        if messages[-1].content == "crash":
            raise RuntimeError("no more tea")
        if messages[-1].content == "hang":
            await asyncio.Event().wait()
        if messages[-1].content == "bye":
            return None
        if messages[-1].content == "sold":
            return Reply("Thanks.", score=1.0, is_over=True)
        return Reply(f"{self.goal} {len(self.heard)}", score=0.25)

    async def score(self, messages):
        self.diary.append(("score", self.trajectory, [message.content for message in messages]))
        return self.judged

    def events(self, event):
        return [local_name(trajectory) for kind, trajectory, _ in self.diary if kind == event]


class Clerk:
    """An interaction as verl defines it, with blocking methods and all state in the object."""

    def __init__(self, config):
        self.config, self.name = config, config.get("name", "clerk")
        self.instances, self.finalized, self.threads = {}, [], set()

    def _here(self):
        self.threads.add(threading.get_ident())

    def start_interaction(self, instance_id=None, **kwargs):
        self._here()
        if kwargs.get("goal") == "nothing":
            raise ValueError("nothing to sell")
        self.instances[instance_id] = {"kwargs": kwargs, "heard": []}
        return instance_id

    def generate_response(self, instance_id, messages, **kwargs):
        self._here()
        state = self.instances[instance_id]
        assert kwargs == state["kwargs"]
        state["heard"].append(messages)
        return messages[-1]["content"] == "sold", f"heard {len(state['heard'])}", 0.5, {"k": 1}

    def calculate_score(self, instance_id, **kwargs):
        self._here()
        return float(len(self.instances[instance_id]["heard"]))

    def finalize_interaction(self, instance_id, **kwargs):
        self._here()
        self.finalized.append(instance_id)
        del self.instances[instance_id]


class AsyncClerk(Clerk):
    """A `Clerk` with coroutines, and an instance id of its own."""

    async def start_interaction(self, instance_id=None, **kwargs):
        return super().start_interaction(f"mine-{instance_id}", **kwargs)

    async def generate_response(self, instance_id, messages, **kwargs):
        return super().generate_response(instance_id, messages, **kwargs)

    async def calculate_score(self, instance_id, **kwargs):
        return super().calculate_score(instance_id, **kwargs)

    async def finalize_interaction(self, instance_id, **kwargs):
        super().finalize_interaction(instance_id, **kwargs)


def parrot(messages):
    """Return the last message."""
    return messages[-1].content


async def eager(messages, goal="tea"):
    """Ask for the goal."""
    return Reply(f"I want {goal}.", score=0.5)
