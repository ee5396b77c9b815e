"""
3 · Sandboxed Python
====================

Treat code that a model writes as hostile: models may mean no harm, but reward hacks, mistakes and text that a
tool returned look the same. This tutorial gives a model a Python interpreter whose variables last as long as
its trajectory, sets limits, attacks the sandbox, and shows what the model reads when code fails, hangs, uses
too much memory or dies.
"""

# %%
# Choose a sandbox
# ----------------
# ``default_sandbox()`` returns the strongest sandbox that works on this machine. It tries each kind, because
# containers often allow less than they seem to. ``torchrl-agentic check`` shows the same on the command line.
# If none works, creating a `PythonTool` fails at once; code runs without a sandbox only if you name
# `UnsafeSubprocessSandbox`.
from torchrl_agentic.sandbox import ResourceLimits, default_sandbox
from torchrl_agentic.sandbox.tiers import tiers

for kind, reason in tiers():
    print(f"{kind.name:12}", "works" if reason is None else "does not work here")
sandbox = default_sandbox(
    ResourceLimits(
        memory_bytes=256 << 20,  # of each process
        max_processes=16,
        disk_bytes=1 << 20,  # of each file
        network="none",
    )
)
print("used:", sandbox.name)
print("enforced:", ", ".join(name for name, held in sandbox.limits_enforced.items() if held))

# %%
# A Python for each trajectory
# ----------------------------
# `PythonTool` gives each trajectory an interpreter in a sandbox of its own. Tools with the same sandbox share
# files: here Python reads what the shell writes into ``/work``. ``timeout`` bounds one call, and
# ``output_max_chars`` bounds the text that the model reads.
import json

from tensordict import TensorDict
from torchrl.envs import TransformedEnv
from torchrl.envs.llm import ChatEnv

from torchrl_agentic import PythonTool, ShellTool, ToolCompose, ToolResult
from torchrl_agentic.repl import repl_in
from torchrl_agentic.testing import ScriptedPolicy


def run(code: str) -> str:
    """Write a call as models of the Hermes and Qwen families do."""
    return f"<tool_call>{json.dumps({'name': 'python', 'arguments': {'code': code}})}</tool_call>"


def talk(*turns: str) -> list[ToolResult]:
    """Run one trajectory with these messages; print and return the results."""
    told = []
    tools = [PythonTool(repl_in(sandbox), timeout=2, output_max_chars=400), ShellTool(sandbox)]
    env = TransformedEnv(ChatEnv(batch_size=(1,)), ToolCompose(tools, recorder=told.append))
    td = env.reset(TensorDict({"query": ["Compute."]}, batch_size=(1,)))
    policy = ScriptedPolicy([turns])
    for _ in turns:
        td = env.step_mdp(env.step(policy(td)))
    env.close()
    results = [result for turn in told for result in turn.outcome.results]
    for result in results:
        print(f"[{result.status}]", result.text.strip().replace("\n", "\n    "))
    return results


SHELL = '<tool_call>{"name": "shell", "arguments": {"argv": ["sh", "-c", "echo 6 7 > numbers"]}}</tool_call>'
results = talk(
    run("import statistics\nx = [3, 1, 4, 1, 5]\nstatistics.mean(x)"),
    run("x.append(9)\nprint(sorted(x))") + SHELL,
    run("a, b = map(int, open('numbers').read().split())\na * b"),
)
assert [result.status for result in results] == ["ok"] * 4

# %%
# What the model reads when code fails
# ------------------------------------
# A traceback shows only the model's own code: no frames of this package and no paths of the host. Output
# printed before the error is shown as well, and the variables remain.
results = talk(
    run("def mean(values):\n    return sum(values) / len(values)\nprint('so far')\nmean([])"),
    run("mean([1, 2])"),
    run("for i in range(10_000): print(i, end=' ')"),
)
assert [result.status for result in results] == ["error", "ok", "ok"]

# %%
# Endless, greedy and dying code
# ------------------------------
# Code that exceeds its time limit is interrupted, as by Ctrl-C, and its variables remain. If it ignores the
# interrupt, it is killed, and the model is told that the variables are lost. Using too much memory raises
# ``MemoryError``, and an interpreter that kills itself is replaced. Each of these costs the trajectory one
# cell and no other row anything.
results = talk(
    run("x = 1\nwhile True: pass"),
    run("x"),
    run("sum(iter(int, 1))"),  # C code that never comes back to Python
    run("x"),
    run("len(bytearray(1 << 30))"),
    run("import os\nos.kill(os.getpid(), 9)"),
    run("'still here'"),
)
assert [result.status for result in results] == ["timeout", "ok", "timeout", "error", "error", "error", "ok"]

# %%
# Attacks
# -------
# Hostile code would first try to reach the trainer's files and secrets, its processes and the network, to
# start a fork bomb, and to fill the disk. None of these attacks reaches the trainer or raises in it; the
# model reads the answer of the kernel.
import os
import textwrap
from pathlib import Path

os.environ["WANDB_API_KEY"] = "secret"
mine = Path("mine.txt").resolve()
mine.write_text("the trainer's own")
ATTACKS = {
    "read a file of the host": f"open({str(mine)!r}).read()",
    "read the passwords": "open('/etc/shadow').read()",
    "find secrets in the environment": "__import__('os').environ['WANDB_API_KEY']",
    "signal the trainer": f"import os\nos.kill({os.getpid()}, 15)",
    "reach the network": "import socket\nsocket.create_connection(('1.1.1.1', 53), timeout=1)",
    "overwrite the interpreter": "open('/usr/bin/python3', 'w')",
    "fill the disk": "with open('f', 'wb') as file:\n    for _ in range(64): file.write(bytes(1 << 20))",
    "start many processes": (
        "import subprocess\nfound = [subprocess.Popen(['sleep', '60']) for _ in range(100)]"
    ),
}
TRY = "try:\n%s\nexcept BaseException as error:\n    print(repr(error))\nelse:\n    print('got through')"
for name, attack in ATTACKS.items():
    print(f"{name}:")
    (result,) = talk(run(TRY % textwrap.indent(attack, "    ")))
    assert "got through" not in result.text
assert mine.read_text() == "the trainer's own"

# %%
# All cases
# ---------
# The package contains more than a hundred such cases. Every sandbox must pass all of them, except those that
# its ``cannot`` names. ``torchrl-agentic check sandbox forkserver`` runs them on your machine; tests of your
# own sandbox inherit `SandboxContract`. These are the cases about the network:
import asyncio

from torchrl_agentic.sandbox.conformance import CASES, check

cases = [case for case in CASES if case.threat == "network"]
for outcome in asyncio.run(check(lambda limits=None: type(sandbox)(limits), cases)):
    print(f"{outcome.status:8} {outcome.case.name} {outcome.reason}")
    assert outcome.status != "failed"

# %%
# No sandbox of this kind stops an attack on a bug of the kernel. Run untrusted code on another kernel: with
# ``DockerSandbox(runtime="runsc")``, or on a remote machine such as those of `E2BSandbox`.
