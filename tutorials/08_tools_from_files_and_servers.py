"""
8 · Tools from files and servers
================================

The tools of a run are often a matter of configuration. This tutorial lists tools of all kinds in one YAML
file (tools of the package, functions, classes written for verl), shows what a model will read about them,
adds the tools of an MCP server, and shows the messages for mistakes in such files.
"""

# %%
# A file of tools
# ---------------
# The Python file contains your own tools: a function, and a class in verl's form, which keeps state per
# trajectory. It does not register anything. It may be next to the YAML file or in a package.
from pathlib import Path

Path("my_tools.py").write_text('''
from torchrl_agentic import function_tool
from torchrl_agentic.tools.verl import BaseTool, ToolResponse

@function_tool
def convert(miles: float) -> float:
    """Convert miles to kilometres.

    Args:
        miles: How many.
    """
    return round(miles * 1.609344, 3)

class NotesTool(BaseTool):
    """Keeps the notes of each trajectory."""

    notes = {}

    async def create(self, instance_id=None, **kwargs):
        self.notes[instance_id] = []
        return instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        self.notes[instance_id].append(parameters["text"])
        kept = self.notes[instance_id][-self.config["most"]:]
        return ToolResponse(text=" | ".join(kept)), 0.0, {}

    async def release(self, instance_id, **kwargs):
        del self.notes[instance_id]
''')

# %%
# An entry of the YAML file is the name of a tool of the package, with or without options; a function; or a
# class, as verl writes it. Files written for verl load unchanged: verl's tools for answers, search and
# sandboxes are replaced by ours, and the ``multi_turn`` section is read. ``limits`` bounds the number of
# concurrent calls.
TOOLS = """\
tools:
- stop
- python: {timeout: 5}
- function: my_tools.py:convert
- class_name: my_tools.py:NotesTool
  config: {type: native, most: 2}
  tool_schema:
    type: function
    function:
      name: note
      description: Write a note, and read the last ones.
      parameters:
        type: object
        properties:
          text: {type: string, description: What to note.}
        required: [text]
- class_name: verl.tools.gsm8k_tool.Gsm8kTool
  config: {type: native}
limits:
  python: {max_concurrent: 2}
tool_selected_list: [stop, python, convert, note]
"""
Path("tools.yaml").write_text(TOOLS)

# %%
# `ToolCompose.from_config` creates the transform. Everything else is as with tools made in Python. The Python
# tool and the file tools share one sandbox.
import json

from tensordict import TensorDict
from torchrl.envs import TransformedEnv
from torchrl.envs.llm import ChatEnv

from torchrl_agentic import ToolCompose
from torchrl_agentic.testing import ScriptedPolicy


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def answers(compose: ToolCompose, *turns: str) -> list[str]:
    """Run one row with these messages, and return the results of its calls."""
    env = TransformedEnv(ChatEnv(batch_size=(1,)), compose)
    policy = ScriptedPolicy([turns])
    td = env.reset(TensorDict({"query": ["How far is it?"]}, batch_size=(1,)))
    for _ in turns:
        td = env.step(policy(td))["next"]
    shown = td["history"].prompt[0]
    env.close()
    return [text for role, text in zip(shown.role, shown.content, strict=True) if role == "tool"]


compose = ToolCompose.from_config("tools.yaml")
print([each.name for each in compose.tools])
found = answers(
    compose,
    call("python", code="miles = 26 + 385 / 1760\nmiles") + call("note", text="a marathon"),
    call("convert", miles=26.21875) + call("note", text="42 km") + call("note", text="done"),
)
print(found)
assert found[2:] == ["42.195", "a marathon | 42 km", "42 km | done"]

# %%
# The tools of a server
# ---------------------
# An MCP server is a toolset: it lists its tools itself, and may change them while the environment runs. Here
# it is the server that the tests use, a process that communicates over stdio; with a URL it is a remote
# server. ``tools=`` selects tools, and ``name_prefix`` keeps those of several servers apart. With
# ``sessions="trajectory"`` each trajectory has its own connection, for servers that keep state between calls.
from torchrl_agentic import MCPToolset
from torchrl_agentic.testing.servers import demo_mcp

compose = ToolCompose()
compose.add_toolset(MCPToolset(demo_mcp.config(), tools=["echo", "fail"], name_prefix="demo_"))
print([each.name for each in compose.tools])
found = answers(compose, call("demo_echo", text="hello") + call("demo_fail", why="no paper left"))
print(found)
assert found[0] == "hello"
assert "no paper left" in found[1]

# %%
# Editors and desktop programs list servers in a JSON file. `mcp_servers` reads such a file, as does the key
# ``mcp`` of a file of tools. ``${VAR}`` is replaced by an environment variable, so that the file need not
# contain secrets; error messages do not show them either.
import os

launched = demo_mcp.config()
os.environ["DEMO_PATH"] = launched.env["PYTHONPATH"]
servers = {
    "mcpServers": {
        "demo": {
            "command": launched.command,
            "args": list(launched.args),
            "env": {"PYTHONPATH": "${DEMO_PATH}"},
        }
    }
}
Path("servers.json").write_text(json.dumps(servers))
MCP = "mcp: {mcp_servers_config_path: servers.json, tool_selected_list: [echo]}\n"
Path("all_tools.yaml").write_text(TOOLS.replace("note]", "note, echo]") + MCP)

# %%
# Check before training
# ---------------------
# ``torchrl-agentic check tools FILE`` loads a file and shows for each tool its source, the resources that it
# writes, and the schema that the model reads; it starts MCP servers to list their tools. With ``--json`` a
# program can read the output; here the command runs inside this program.
from typer.testing import CliRunner

from torchrl_agentic.cli.main import app

shown = CliRunner().invoke(app, ["check", "tools", "all_tools.yaml", "--json"])
assert shown.exit_code == 0, shown.output
for each in json.loads(shown.stdout)["tools"]:
    writes = ", ".join(each["effects"]["writes"])
    takes = ", ".join(each["spec"]["function"]["parameters"].get("properties", {}))
    print(f"{each['name']:8} {takes:7} writes: {writes:18} {Path(each['place']).name}")

# %%
# What mistakes look like
# -----------------------
# Everything is checked when the file is loaded: keys, options, names in Python files, schemas. Each message
# starts with the file and the line, says what was found and what was expected, and suggests the nearest name.
# The command line prints the same message and exits with code 1.
MISTAKES = [
    ("- stop", "- sotp"),
    ("timeout: 5", "timeuot: 5"),
    ("my_tools.py:convert", "my_tools.py:konvert"),
    ("most: 2}\n", "most: 2}\n  tool_shema: {}\n"),
    ("text: {type: string", "text: {type: strnig"),
    ("gsm8k_tool.Gsm8kTool", "gsm8k_tool.GSM8kTool"),
    ("python: {max_concurrent", "pyton: {max_concurrent"),
    ("note]", "notes]"),
]
for right, wrong in MISTAKES:
    Path("mistaken.yaml").write_text(TOOLS.replace(right, wrong))
    try:
        ToolCompose.from_config("mistaken.yaml")
    except ValueError as error:
        print(f"{wrong.strip()!r}:\n    {str(error).replace(str(Path.cwd()), '…')}")
    else:
        raise AssertionError(wrong)
