"""
2 · State per trajectory
========================

A game, a shopping basket, a database row: many tools keep state between calls. That state belongs to one
trajectory, from its reset to its end, and no other trajectory may see it. This tutorial writes such a tool,
shows when its sessions open and close, resets one row of a batch while the others continue, and branches a
trajectory into several that share nothing.
"""

# %%
# A tool with a session
# ---------------------
# There is one tool object, however large the batch is. ``session`` yields the state of one trajectory: here a
# basket, on which ``run`` is called. The session opens at the first call of a trajectory and closes exactly
# once, after the ``yield``, however the trajectory ends. The calls of one trajectory to a tool with sessions
# run one after the other, in the order of the message; different trajectories run concurrently. ``effects``
# can declare another order: see `Effects`.
import contextlib

from torchrl_agentic import Tool, ToolError

PRICES = {"pen": 2, "book": 12, "lamp": 30}


class Basket(Tool):
    name = "basket"
    description = "Put a thing into your basket. Returns its contents and their price."
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
# State is separate for each row
# -------------------------------
# Two rows of a batch call the same tool. Each has its own basket, and the second call of row 0 finds what the
# first one put there. The name of a trajectory contains its row and the number of earlier trajectories of
# that row.
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
    """Let row i say said[i], print the results, and return the TensorDict of the next step."""
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
# Reset one row
# -------------
# The trajectories of a batch end at different times. A reset with a mask ends only the rows in the mask: the
# session of row 0 closes, and its next call opens a new one. Row 1 continues with its state. Collectors reset
# rows in this way; here it is done by hand.
import torch
from tensordict import NonTensorData

td["query"] = NonTensorData("Buy something else.").expand(2)
td["_reset"] = torch.tensor([[True], [False]])
td = advance(env.reset(td), put("book"), put("pen"))
assert [row.content[-1] for row in td["history"].prompt] == ["book: 12 €", "lamp, pen: 32 €"]

# %%
# The conversation itself lies in the TensorDict, under ``("history", "prompt")``. Each row is one immutable
# value, a tuple of messages: a step, a copy or a reset hands it on without looking inside, and an appended
# message makes a new, longer value. So a turn costs what is new in it, however long the conversation is, and
# a TensorDict that you have kept never changes. Read it as any `History` (``prompt[0].content``); a message
# is locked, and ``append`` and ``extend`` make longer conversations.
before = td["history"].prompt
advance(td, "enough", "enough")
assert [len(row.content) for row in before] == [3, 5]

# %%
# Closing the environment closes all open sessions, once:
env.close()

# %%
# Without sessions
# ----------------
# State on the tool object itself is shared by all trajectories. That is right for a connection or a cache
# (``setup`` and ``teardown`` open and close it, once per process) and wrong for anything that a model
# changes: here the second row finds the pen of the first row in its basket.


class Shared(Basket):
    stateful = False  # all trajectories use this one object


env = TransformedEnv(ChatEnv(batch_size=(2,)), ToolCompose([Shared()]))
td = advance(begin(2), put("pen"), put("lamp"))
env.close()
assert len({row.content[-1] for row in td["history"].prompt}) == 2

# %%
# Branches
# --------
# In tree search, and in groups that share their first turns, several trajectories continue from the same
# state. ``branch`` is the counterpart of ``session``: it opens the state of a new trajectory, given that of
# the old one. `PythonTool` and the file tools implement it: they clone the interpreter with its memory.


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
# Rows 1 and 2 continue from row 0 as well. `ToolCompose.branch` copies the state of the tools; the
# conversation, which is in the TensorDict, is copied separately. From then on each row sees only its own
# calls.
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
# `ToolContract` is a class of tests to inherit. It checks what every tool must do: trajectories run
# concurrently, a session is closed once and by the task that opened it, wrong arguments never reach the tool.
# In a project the class belongs in a test file, where pytest runs it.
from torchrl_agentic.testing import ToolContract


class TestBasket(ToolContract):
    good = {"thing": "pen"}
    bad = [{"thing": "car"}, {}]

    def make(self):
        return Branching()


print(len([name for name in dir(TestBasket) if name.startswith("test_")]), "promises to keep")

# %%
# Test the tool itself with `call_tool`. It runs one call in a session of its own, with the checks and the
# time limit of `ToolCompose`. An error is a result, too.
from torchrl_agentic.testing import call_tool

print(call_tool(Basket(), {"thing": "pen"}).text)
print(call_tool(Basket(), {"thing": "car"}).text)
