"""
1 · A first tool
================

A tool is a typed function with a docstring. This tutorial makes tools from functions, in a program and in a
file; passes columns of the data set to arguments that the model does not see; returns rewards with results;
and shows what a model reads after a wrong call.
"""

# %%
# A typed function
# ----------------
# The name, the types and the docstring of the function are all that a model needs to know about the tool.
# There is no separate schema to keep in step with the code, and the arguments of each call are checked
# against the types.
import json

from torchrl_agentic import ToolError, tool


@tool
def divide(a: float, b: float = 1.0) -> float:
    """Divide one number by another.

    Args:
        a: The dividend.
        b: The divisor; not 0.
    """
    if b == 0:
        raise ToolError("b is 0; give another divisor")
    return a / b


print(json.dumps(divide.spec(), indent=1))
print("still a function:", divide(1, 4))

# %%
# The model sees results, and mistakes
# ------------------------------------
# `ToolCompose` is a transform of a `ChatEnv` that holds the tools. In place of a model, a `ScriptedPolicy`
# returns given messages; tests of tools use it too. Each call gets one result, even if the call is wrong, and
# the result says what would have been right, because the model has no other way to find out. Raise
# ``ToolError`` for errors that the model can correct. Any other exception is a bug in the tool: the model
# reads that the tool crashed, and the traceback goes to the log. Undeclared arguments are ignored, because
# models often add some; a recorder of `ToolCompose` sees them in the notes of the result.
from tensordict import TensorDict
from torchrl.envs import TransformedEnv
from torchrl.envs.llm import ChatEnv

from torchrl_agentic import ToolCompose
from torchrl_agentic.testing import ScriptedPolicy


def call(name: str, **arguments: object) -> str:
    """Write a call as models of the Hermes and Qwen families do."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


calls = [
    call("divide", a=7, b=2),
    call("divide", a=7, b=0),  # an error that the tool raises
    call("divide", a="7/2"),  # a wrong type
    call("divide", b=2),  # a missing argument
    call("devide", a=7, b=2),  # an unknown tool
    '<tool_call>{"name": "divide", "arguments": {"a": 7,}}</tool_call>',  # invalid JSON
    call("divide", a=7, unit="m"),  # an argument too many
]
turns = []
compose = ToolCompose([divide], parser="hermes", recorder=turns.append)
env = TransformedEnv(ChatEnv(batch_size=(1,)), compose)
td = env.reset(TensorDict({"query": ["What is 7 / 2?"]}, batch_size=(1,)))
step = env.step(ScriptedPolicy([["".join(calls)]])(td))
results = step["next", "history"].prompt[0].content[-len(calls) :]
for written, result in zip(calls, results, strict=True):
    print(f"{written[11:-12]}\n    -> {result}")
print("errors:", step["next", "agentic", "n_errors"].item(), "of", step["next", "agentic", "n_calls"].item())
print("noted:", turns[0].outcome.results[-1].notes)
env.close()
assert [result.startswith("Error") for result in results] == [False, True, True, True, True, True, False]

# %%
# Arguments that the model does not see
# -------------------------------------
# A tool that checks an answer must know the right one. ``Injected[str]`` fills the argument from the column
# of that name in the data set's row. The argument is not in the schema, and a value that the model sends for
# it is ignored. ``Inject("…")`` takes a column of another name, or "trajectory", "turn", "state" or
# "tools_kwargs".
#
# ``ToolResult.from_value(value, reward=…)`` adds a reward to a result, and ``metrics=…`` adds metrics. The
# model sees only the value. Lists, tuples, dicts, dataclasses, pydantic models, arrays, tensors and tables
# are shown as JSON.
from typing import Annotated

from torchrl_agentic import Inject, Injected, ToolResult


@tool
def check(answer: float, ground_truth: Injected[str], turn: Annotated[int, Inject("turn")]) -> ToolResult:
    """Check your answer.

    Args:
        answer: The answer, as a number.
    """
    right = answer == float(ground_truth)
    return ToolResult.from_value({"right": right, "tries": turn + 1}, reward=right / (turn + 1))


print("the model sees:", list(check.input_schema["properties"]))

# %%
# The data set
# ------------
# A data loader delivers the rows. ``query`` becomes the first user message. The other columns stay beside the
# conversation, where tools can read them; the prompt does not contain them.
from torch.utils.data import DataLoader
from torchrl.envs.llm import DatasetChatEnv

from torchrl_agentic import collate_rows

rows = [
    {"query": "What is 7 / 2?", "ground_truth": "3.5"},
    {"query": "What is 1 / 4?", "ground_truth": "0.25"},
]


def dataset_env(*tools: object) -> TransformedEnv:
    loader = DataLoader(rows, batch_size=1, collate_fn=collate_rows)
    return TransformedEnv(DatasetChatEnv.from_dataloader(loader, batch_size=(2,)), ToolCompose(tools))


env = dataset_env(divide, check)
td = env.reset()
policy = ScriptedPolicy(
    [
        [call("check", answer=3), call("check", answer=3.5)],
        [call("divide", a=1, b=4), call("check", answer=4, ground_truth="4")],
    ]
)
for _ in range(2):
    step = env.step(policy(td))
    rewards = step["next", "agentic", "tool_reward"].flatten().tolist()
    print("rewards of this turn:", rewards)
    td = env.step_mdp(step)
for row in range(2):
    shown = td["history"].prompt[row]
    for role, content in zip(shown.role, shown.content, strict=True):
        print(f"{role:>9}: {content}")
env.close()
assert rewards == [0.5, 0.0]

# %%
# A missing column is reported before the first turn, not in the middle of a run.
rows = [{"query": row["query"]} for row in rows]
env = dataset_env(check)
try:
    env.reset()
except ValueError as error:
    print(error)
env.close()

# %%
# A file of tools
# ---------------
# ``@function_tool`` marks a function, which remains an ordinary function, as in verl's files of tools.
# `load_function_tools` runs such a file and returns its tools in order. It is stricter than ``@tool``: each
# parameter must have a description, because the model reads nothing else about it.
from pathlib import Path

from torchrl_agentic import load_function_tools

Path("my_tools.py").write_text('''
from torchrl_agentic import Injected, function_tool

@function_tool
def hint(hints: Injected[list]) -> str:
    """Get a hint."""
    return hints[0]

@function_tool("power")
def _power(base: float, exponent: int = 2) -> float:
    """Raise a number to a power.

    Args:
        base: The number.
        exponent: The power.
    """
    return base**exponent
''')
loaded = load_function_tools("my_tools.py")
print([(loaded_tool.name, list(loaded_tool.input_schema["properties"])) for loaded_tool in loaded])
compose = ToolCompose([divide, *loaded])
print(compose)
compose.close()

# %%
# Errors name the file and the line:
Path("more_tools.py").write_text('''
from torchrl_agentic import function_tool

@function_tool
def root(number: float) -> float:
    """Take the square root."""
    return number**0.5
''')
try:
    load_function_tools("more_tools.py")
except ImportError as error:
    print(str(error).rpartition("/")[2])
