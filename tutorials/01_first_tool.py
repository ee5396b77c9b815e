"""
1 · A first tool
================

A tool is a typed function with a docstring. This tutorial makes tools of functions, in a program and in a
file, lets the data set fill in arguments that the model must not see, has calls carry rewards, and looks at
what a model reads when it calls a tool wrongly.
"""

# %%
# A typed function
# ----------------
# All that a model is told of a tool stands in the function already: its name, its types, its docstring. So
# there is no schema to keep in step with the code, and what the model may send is checked against it.
import json

from torchrl_agentic import ToolError, tool


@tool
def divide(a: float, b: float = 1.0) -> float:
    """Divide one number by another.

    Args:
        a: What is divided.
        b: By what; not 0.
    """
    if b == 0:
        raise ToolError("b is 0; give another divisor")
    return a / b


print(json.dumps(divide.spec(), indent=1))
print("still a function:", divide(1, 4))

# %%
# The model sees results, and mistakes
# ------------------------------------
# Tools stand in a `ToolCompose`, which is a transform of a `ChatEnv`. In place of a model, a `ScriptedPolicy`
# says what it is told to; that is also how tools are tested. Each of its calls gets one result, whatever is
# wrong with it, and the result says what would have been right: the model has no other way to find out.
# ``ToolError`` is for what only the tool knows. Any other exception is a bug: the model reads that the tool
# crashed, and the traceback is in the log. An argument that was not declared is passed over, since models
# like to add some; a recorder of `ToolCompose` finds it in the notes of the result.
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
    call("divide", a=7, b=0),  # what the tool refuses
    call("divide", a="7/2"),  # a wrong type
    call("divide", b=2),  # a missing argument
    call("devide", a=7, b=2),  # an unknown tool
    '<tool_call>{"name": "divide", "arguments": {"a": 7,}}</tool_call>',  # JSON that is none
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
# A tool that checks an answer has to know the right one. ``Injected[str]`` takes it from the column of that
# name in the data set's row; it is not in the schema, and what a model sends under that name is passed over.
# ``Inject("…")`` takes a column of another name, or "trajectory", "turn", "state", "tools_kwargs".
#
# ``ToolResult.from_value(value, reward=…)`` is a result with a reward, ``metrics=…`` adds metrics. The model
# sees the value alone. Lists, tuples, dicts, dataclasses, pydantic models, arrays, tensors and tables are
# shown as JSON.
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
# Its rows come through a data loader. ``query`` becomes the first message of the user; the other columns stay
# beside the conversation, where tools find them and the prompt does not.
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
# A column that the data set does not have is found before the first turn, not in the middle of a run.
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
# ``@function_tool`` marks a function and leaves it a function, in the form of verl's files of tools.
# `load_function_tools` runs such a file and gives its tools in their order. It is stricter: each parameter
# must be described, since the model is all that reads it there.
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
print([(each.name, list(each.input_schema["properties"])) for each in loaded])
compose = ToolCompose([divide, *loaded])
print(compose)
compose.close()

# %%
# What it refuses, it refuses with file and line:
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
