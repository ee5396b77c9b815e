"""Chat environments, tools, and functions that make one step. Worker processes import this module too."""

import json
from contextlib import asynccontextmanager

from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict
from torch.utils.data import DataLoader
from torchrl.envs import Compose, TransformedEnv
from torchrl.envs.llm import ChatEnv, DatasetChatEnv

from torchrl_agentic import StopTool, Tool, ToolCompose
from torchrl_agentic.interactions import ScriptedUser
from torchrl_agentic.testing import ScriptedPolicy
from torchrl_agentic.tools.row_data import local_name
from torchrl_agentic.transforms import UserSimulator
from torchrl_agentic.transforms import history as border

STOP = '<tool_call>{"name": "stop", "arguments": {}}</tool_call>'


def call(name, call_id=None, /, **args):
    """Return a call as Hermes and Qwen models write it."""
    own = {} if call_id is None else {"id": call_id}
    return f"<tool_call>{json.dumps({'name': name, 'arguments': args, **own})}</tool_call>"


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def echo(text: str) -> str:
    """Return the text."""
    return text


class Counter(Tool):
    """Counts the calls of each trajectory and logs when sessions open and close."""

    name, description = "count", "Count the calls."

    def __init__(self):
        self.diary = []

    @asynccontextmanager
    async def session(self, trajectory):
        live = Counter()
        live.calls, live.diary = 0, self.diary
        self.diary.append(("open", trajectory))
        yield live
        self.diary.append(("close", trajectory))

    async def run(self, args, ctx):
        self.calls += 1
        return self.calls

    def events(self, event, row=None):
        """Return the trajectories of these events, by their names within the environment."""
        named = [local_name(name) for kind, name in self.diary if kind == event]
        return [name for name in named if row in (None, int(name.split(".")[0]))]


def collate(rows):
    return {"query": [row["query"] for row in rows]}


def dataset_env(batch, *transforms, queries=8):
    """Create an environment that resets itself from a data set: questions q0, q1, ..."""
    loader = DataLoader([{"query": f"q{i}"} for i in range(queries)], collate_fn=collate)
    env = DatasetChatEnv.from_dataloader(loader, batch_size=(batch,), system_prompt="Be brief.")
    for transform in transforms:
        env.append_transform(transform)
    return env


def add_env(batch=1):
    """Create an environment with `add`; a factory for batched environments and collectors."""
    return dataset_env(batch, ToolCompose([add, StopTool()]))


def count_env(batch=1):
    return dataset_env(batch, ToolCompose([Counter(), StopTool()]))


def scripted_user_env(batch=1):
    user = UserSimulator(ScriptedUser(["u1", "u2"]))
    return dataset_env(batch, ToolCompose([add, StopTool()]), user)


def chat_env(shape, *transforms):
    """Create an environment without a data set; `begin` resets it."""
    transform = transforms[0] if len(transforms) == 1 else Compose(*transforms)
    return TransformedEnv(ChatEnv(batch_size=shape), transform)


def begin(env, **more):
    """Reset with the questions q0, q1, ... in the order of the rows."""
    td = TensorDict(more, batch_size=env.batch_size)
    queries = [NonTensorData(f"q{i}") for i in range(td.numel())]
    for size in reversed(td.batch_size):
        queries = [
            LazyStackedTensorDict.lazy_stack(queries[i : i + size]) for i in range(0, len(queries), size)
        ]
    return env.reset(td.set("query", queries[0]))


def answer(td, *said):
    """Write responses as a policy does: said[i], a text or a Message, in row i; "" in a row that is done."""
    td = td.to_lazystack(0) if td.batch_dims == 1 else td
    return ScriptedPolicy([[text] * 50 for text in said])(td)


def step(env, td, *said):
    """Make one whole step; its outcome is in "next"."""
    return env.step(answer(td, *said))


def advance(env, td, *said):
    """Make one step, and return the TensorDict from which the next one starts."""
    return env.step_mdp(step(env, td, *said))


def conversations(td):
    """Return the conversations of a TensorDict's prompt, as a flat list of lists of `Message`."""
    return [[m.read() for m in row.messages] for row in border.prompts(td)]


def results(td):
    """Return the texts of the tool messages of each row."""
    return [[m.content for m in chat if m.role == "tool"] for chat in conversations(td)]


def flags(td, name):
    return td["agentic", name].flatten().tolist()
