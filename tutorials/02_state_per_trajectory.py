"""
2 · State per trajectory
========================

A game, a shopping basket, a database row: many tools remember something between calls. What they remember
belongs to one trajectory, from its reset to its end, and must not be seen by any other. This tutorial writes
such a tool, watches its sessions open and close, lets one row of a batch begin anew while the others go on,
and branches a trajectory into several that share nothing.
"""

# %%
# A tool with a session
# ---------------------
# A tool is one object, whatever the size of the batch. What one trajectory has for itself is what its
# ``session`` yields: here a basket of its own, and ``run`` is called on that. The session is opened at the
# first call of a trajectory and closed exactly once, behind the ``yield``, however the trajectory ends. With
# a session, the calls of one trajectory come one after the other, in the order in which they stand in the
# message; different trajectories run side by side. ``effects`` would say otherwise: see `Effects`.
import contextlib

from torchrl_agentic import Tool, ToolError

PRICES = {"pen": 2, "book": 12, "lamp": 30}


class Basket(Tool):
    name = "basket"
    description = "Put a thing into your basket; gives what is in it, and what it costs."
    input_schema = {
        "type": "object",
        "properties": {"thing": {"type": "string", "enum": list(PRICES)}},
        "required": ["thing"],
    }

    def __init__(self, things=()):
        self.things = list(things)

    @contextlib.asynccontextmanager
    async def session(self, trajectory):
        print(f"  open {trajectory}")
        live = Basket()
        yield live
        print(f"  close {trajectory}: {', '.join(live.things)}")

    async def run(self, args, ctx):
        if len(self.things) == 3:
            raise ToolError("the basket is full")
        self.things.append(args["thing"])
        return f"{', '.join(self.things)}: {sum(PRICES[thing] for thing in self.things)} €"


# %%
# Rows do not see each other
# --------------------------
# Two rows of a batch call the same tool. Each has its own basket, and the second call of row 0 finds what the
# first has left there. A trajectory is named by its row and by how many that row has had before.
import json

from tensordict import TensorDict, TensorDictBase
from torchrl.envs import TransformedEnv
from torchrl.envs.llm import ChatEnv

from torchrl_agentic import ToolCompose
from torchrl_agentic.testing import ScriptedPolicy


def put(*things: str) -> str:
    """Write calls as models of the Hermes and Qwen families do."""
    calls = [json.dumps({"name": "basket", "arguments": {"thing": thing}}) for thing in things]
    return "".join(f"<tool_call>{call}</tool_call>" for call in calls)


def begin(rows: int) -> TensorDictBase:
    return env.reset(TensorDict({"query": ["Buy something."] * rows}, batch_size=(rows,)))


def advance(td: TensorDictBase, *said: str) -> TensorDictBase:
    """Let row i say said[i]; print what the tool answers, and go on to where the next step begins."""
    known = [len(row.content) for row in td.to_lazystack(0)["history"].prompt]
    policy = ScriptedPolicy([[text] * 9 for text in said])
    td = env.step_mdp(env.step(policy(td.to_lazystack(0))))
    for row, conversation in enumerate(td["history"].prompt):
        print(f"row {row}:", " | ".join(conversation.content[known[row] + 1 :]))
    return td


env = TransformedEnv(ChatEnv(batch_size=(2,)), ToolCompose([Basket()]))
td = advance(begin(2), put("pen", "book"), put("lamp"))
assert [row.content[-1] for row in td["history"].prompt] == ["pen, book: 14 €", "lamp: 30 €"]

# %%
# One row begins anew
# -------------------
# The trajectories of a batch end at different times. A reset with a mask ends those of its rows alone: the
# session of row 0 is closed, and its next call opens a new one. Row 1 goes on with what it has. Collectors
# reset rows like this by themselves; here it is done by hand. Rows of unequal length need a lazy stack.
import torch
from tensordict import NonTensorData

td = td.to_lazystack(0)
td["query"] = NonTensorData("Buy something else.").expand(2)
td["_reset"] = torch.tensor([[True], [False]])
td = advance(env.reset(td), put("book"), put("pen"))
assert [row.content[-1] for row in td["history"].prompt] == ["book: 12 €", "lamp, pen: 32 €"]

# %%
# At the end of the environment all that is still open is closed, once:
env.close()

# %%
# Without sessions
# ----------------
# What is kept on the tool itself is shared by all trajectories. That is right for a connection or a cache
# (``setup`` and ``teardown`` open and close it, once per process), and wrong for all that a model does: here
# the second row finds the pen of the first in its basket.


class Shared(Basket):
    stateful = False  # all trajectories talk to this one object


env = TransformedEnv(ChatEnv(batch_size=(2,)), ToolCompose([Shared()]))
td = advance(begin(2), put("pen"), put("lamp"))
env.close()
assert len({row.content[-1] for row in td["history"].prompt}) == 2

# %%
# Branches
# --------
# Tree search, and groups that share their first turns, let several trajectories go on from where one is.
# ``branch`` is the counterpart of ``session``: it opens what a new trajectory talks to, given what the old
# one has. `PythonTool` and the tools for files have it already: they clone the interpreter with its memory.


class Branching(Basket):
    @contextlib.asynccontextmanager
    async def session(self, trajectory):
        yield Branching()

    @contextlib.asynccontextmanager
    async def branch(self, live, trajectory):
        print(f"  branch {trajectory} with {', '.join(live.things)}")
        yield Branching(live.things)  # __init__ copies the list


compose = ToolCompose([Branching()])
env = TransformedEnv(ChatEnv(batch_size=(3,)), compose)
td = advance(begin(3), put("book"), "", "")

# %%
# Row 0 goes on in rows 1 and 2 as well. `ToolCompose.branch` copies what tools hold; the conversation, which
# is in the TensorDict, is copied beside it. From then on each sees its own calls alone.
from tensordict import lazy_stack

compose.branch(0, into=[1, 2])
td = lazy_stack([td[0].clone() for _ in range(3)])
td = advance(td, put("pen"), put("book"), put("lamp", "lamp", "lamp"))
env.close()
assert [row.content[-1] for row in td["history"].prompt] == [
    "book, pen: 14 €",
    "book, book: 24 €",
    "Error: the basket is full",
]

# %%
# A test for it
# -------------
# What every tool promises is a class of tests to inherit: that trajectories run side by side, that a session
# is closed once, by the task that opened it, that bad arguments never arrive. In a project it stands in a
# test file, where pytest runs it.
from torchrl_agentic.testing import ToolContract


class TestBasket(ToolContract):
    good = {"thing": "pen"}
    bad = [{"thing": "car"}, {}]

    def make(self):
        return Branching()


print(len([name for name in dir(TestBasket) if name.startswith("test_")]), "promises to be kept")

# %%
# What the tool itself does is tested with `call_tool`: one call in a session of its own, checked and bounded
# as `ToolCompose` does it. What goes wrong is a result.
from torchrl_agentic.testing import call_tool

print(call_tool(Basket(), {"thing": "pen"}).text)
print(call_tool(Basket(), {"thing": "car"}).text)
