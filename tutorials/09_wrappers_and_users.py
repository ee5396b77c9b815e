"""
9 · Wrappers, cassettes and users
=================================

What one may want of any tool (fewer calls, more tries, shorter answers) is a wrapper around it, and their
order says what happens. A cassette keeps what tools answered, so that a rollout can be run again without
them. And where the model calls no tool, a simulated user may answer it.
"""

# %%
# A service that is not always there
# ----------------------------------
# `Faulty` makes one of any tool. What befalls a call follows from a seed, its trajectory and its id, so that
# a run with faults can be repeated. `Retrying` tries again where the tool failed for no fault of the model's,
# after a pause that doubles; a mistake of the model's would be the same next time.
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
    """Let one row say its script; give the conversation, and print what others say in it."""
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
print("as it is:")
plain = talk(SCRIPT, [faulty])
print("tried again:")
again = talk(SCRIPT, [Retrying(faulty, attempts=5, first_s=0.01)])
assert any("not available" in text for _, text in plain)
assert not any("Error" in text for _, text in again)

# %%
# The order of wrappers
# ---------------------
# The outermost wrapper sees a call first and its result last. Below, the cache keeps texts whole, and they
# are cut for the model alone; each call counts, a hit of the cache too; what is left of the budget stands
# behind the cut. `Renamed` is innermost, so that all who speak of the tool use the name the model knows.
from torchrl_agentic import Budgeted, Cached, Renamed, Truncated

asked.clear()
library = Renamed(look_up, "library")
wrapped = Budgeted(Truncated(Cached(Retrying(library)), max_chars=40), calls=3)
print(wrapped)
counted = talk([SCRIPT[0].replace("look_up", "library")], [wrapped])
print("asked for:", asked)
assert asked == ["Dune", "Emma"]

# %%
# The other way round, only what reaches the service is counted. The cache would keep the line about the
# budget as it was at that time, so ``tell=False`` leaves it out.
asked.clear()
turned = talk(SCRIPT, [Truncated(Cached(Budgeted(look_up, calls=3, tell=False)), max_chars=40)])
print("asked for:", asked)
assert asked == ["Dune", "Emma", "Ulysses"]

# %%
# What makes no sense is refused when it is written down. A tool that changes things is not cached, and tried
# again only with a key by which its service knows the second try.
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
# `Recorded` writes down each call and what came of it, errors too. `Replayed` in the same place gives the
# same answers and runs nothing: to debug a policy without the service, or to test a change of prompts. A call
# that was not recorded fails, and says what comes nearest.
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
# A `UserSimulator` answers each message that calls no tool; where one was called, the tool has answered and
# the user is silent. So both take turns, row by row. A `ScriptedUser` says what is written down. A reply may
# carry a score and may be the last: the row is done then. A user of your own, a model behind an API perhaps,
# is an `Interaction` with an ``async def respond(self, messages)``.
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
        """Ask for a year until there is one; leave after three messages."""
        text = messages[-1].text
        if any(word.strip(".,").isdigit() for word in text.split()):
            return Reply("Good.", score=1.0, is_over=True)
        return "In which year?" if len(messages) < 5 else None


talk(["It is old.", "Very old.", "From 1815."], [look_up], UserSimulator(Impatient()))
