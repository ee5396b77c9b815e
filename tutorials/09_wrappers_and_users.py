"""
9 · Wrappers, cassettes and users
=================================

Limits on calls, retries and shorter results are wrappers around a tool, and their order matters. A cassette
records what tools answered, so that a rollout can be repeated without them. If the model calls no tool, a
simulated user can answer it.
"""

# %%
# An unreliable service
# ---------------------
# `Faulty` adds faults to any tool. The fault for a call is a function of a seed, the trajectory and the call
# id, so a run with faults can be repeated. `Retrying` repeats calls that failed without a mistake of the
# model, with pauses that double; the model's own mistakes are not retried.
import json
from collections.abc import Sequence

from tensordict import TensorDict
from torchrl.envs import Compose, TransformedEnv
from torchrl.envs.llm import ChatEnv

from torchrl_agentic import Faulty, Message, Retrying, ToolCompose, tool
from torchrl_agentic.testing import ScriptedPolicy

BOOKS = {"dune": "Dune, 1965, by Frank Herbert: sand, spice, worms.", "emma": "Emma, 1815, by Jane Austen."}
asked: list[str] = []


@tool
def look_up(title: str) -> str:
    """Look a book up.

    Args:
        title: Its title.
    """
    asked.append(title)
    return BOOKS.get(title.lower(), "no such book")


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def talk(script: Sequence[str], tools: Sequence[object], *behind: object) -> list[tuple[str, str]]:
    """Run one row with a script; print the messages of tools and users, and return the conversation."""
    env = TransformedEnv(ChatEnv(batch_size=(1,)), Compose(ToolCompose(tools), *behind))
    policy = ScriptedPolicy([script])
    td = env.reset(TensorDict({"query": ["Which books are old?"]}, batch_size=(1,)))
    for _ in script:
        td = env.step(policy(td))["next"]
    shown = td["history"].prompt[0]
    env.close()
    said = list(zip(shown.role, shown.content, strict=True))
    for role, content in said[1:]:
        if role != "assistant":
            print(f"  {role}: {content}")
    if behind:
        print("  done:", td["done"].item(), "score:", td["agentic", "user_final_score"].item())
    return said


SCRIPT = ["".join(call("look_up", title=title) for title in ("Dune", "Emma", "Dune", "Ulysses"))]
faulty = Faulty(look_up, seed=5, timeouts=0.3, overloads=0.3)
print("without retries:")
plain = talk(SCRIPT, [faulty])
print("with retries:")
again = talk(SCRIPT, [Retrying(faulty, attempts=5, first_s=0.01)])
assert any("not available" in text for _, text in plain)
assert not any("Error" in text for _, text in again)

# %%
# The order of wrappers
# ---------------------
# The outermost wrapper sees a call first and its result last. Here the cache stores whole texts, which are
# truncated only for the model; each call counts towards the budget, cache hits included; and the remaining
# budget is added after truncation. `Renamed` is innermost, so that every message uses the name that the model
# knows.
from torchrl_agentic import Budgeted, Cached, Renamed, Truncated

asked.clear()
library = Renamed(look_up, "library")
wrapped = Budgeted(Truncated(Cached(Retrying(library)), max_chars=40), calls=3)
print(wrapped)
counted = talk([SCRIPT[0].replace("look_up", "library")], [wrapped])
print("asked for:", asked)
assert asked == ["Dune", "Emma"]

# %%
# In the reverse order only calls that reach the service count. The cache would store the line about the
# budget as it was at that time, so ``tell=False`` omits it.
asked.clear()
turned = talk(SCRIPT, [Truncated(Cached(Budgeted(look_up, calls=3, tell=False)), max_chars=40)])
print("asked for:", asked)
assert asked == ["Dune", "Emma", "Ulysses"]

# %%
# Wrong combinations raise an error when they are created. A tool with side effects cannot be cached, and is
# retried only with a key by which its service recognises the second attempt.
from torchrl_agentic import Effects


@tool(effects=Effects(writes=["shelf"]))
def lend(title: str) -> str:
    """Lend a book."""
    return f"you have {title}"


for wrap in (Retrying, Cached):
    try:
        wrap(lend)
    except ValueError as error:
        print(f"{wrap.__name__}: {error}")

# %%
# A cassette
# ----------
# `Recorded` records each call and its result, errors included. `Replayed` in the same place returns the same
# results without running the tool: to debug a policy without the service, or to test a change of prompts. An
# unrecorded call fails, and the error shows the most similar recorded one.
from torchrl_agentic import Cassette, Recorded, Replayed

cassette = Cassette("books.jsonl")
recorded = talk(SCRIPT, [Recorded(Truncated(faulty, max_chars=40), cassette)])
asked.clear()
print("again, from the cassette:")
replayed = talk(SCRIPT, [Replayed(look_up, cassette)])
assert replayed == recorded
assert asked == []
print("another call:")
missed = talk([call("look_up", title="Dune, part two")], [Replayed(look_up, cassette)])

# %%
# Users
# -----
# A `UserSimulator` answers each message without tool calls; after a message with calls the tools have
# answered, and the user is silent. Each row is handled separately. A `ScriptedUser` returns given replies. A
# reply may carry a score and may end the row. To write your own user, for example a model behind an API,
# subclass `Interaction` and define ``async def respond(self, messages)``.
from torchrl_agentic import Interaction, Reply, ScriptedUser, UserSimulator

user = ScriptedUser(["Is Emma older than Dune?", Reply("Thank you.", score=1.0, is_over=True)])
chat = talk(
    ["Shall I look one up?", call("look_up", title="Emma"), "It is from 1815, so yes."],
    [look_up],
    UserSimulator(user),
)
assert [role for role, _ in chat] == ["user", "assistant", "user", "assistant", "tool", "assistant", "user"]


class Impatient(Interaction):
    async def respond(self, messages: Sequence[Message]) -> Reply | str | None:
        """Ask for a year until the model names one; leave after three messages."""
        text = messages[-1].text
        if any(word.strip(".,").isdigit() for word in text.split()):
            return Reply("Good.", score=1.0, is_over=True)
        return "In which year?" if len(messages) < 5 else None


talk(["It is old.", "Very old.", "From 1815."], [look_up], UserSimulator(Impatient()))
