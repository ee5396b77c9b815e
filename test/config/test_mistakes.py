"""Errors in a tools configuration have the file, the line and the expected value."""

from pathlib import Path

import pytest

from torchrl_agentic.config import ConfigError, load_tools

TOOLS = """\
import torchrl_agentic
from torchrl_agentic.tools.verl import BaseTool


def look(x: int) -> int:
    '''Look.'''
    return x


class Bare(BaseTool):
    pass


class Half:
    async def execute(self, id, parameters): ...


class Broken(BaseTool):
    def __init__(self, config, tool_schema):
        self.limit = config["limit"]


class Abstract(torchrl_agentic.Tool):
    name = "abstract"


class Slotted:
    pass


an_object = Slotted()
"""
SCHEMA = """\
tools:
- class_name: torchrl_agentic.tools.SearchTool
  config: {{retrieval_service_url: "http://localhost:1/retrieve"}}
  tool_schema:
    type: function
    function:
      name: search
      description: Search.
      parameters:
        type: object
        properties:
          query_list:
            type: array
            {}
        required: [query_list]
"""
VERL = """\
tools:
  - class_name: "verl.tools.search_tool.SearchTool"
    config:
      type: native
      retrieval_service_url: http://localhost:1/retrieve
"""

MISTAKES = {
    "a key at the top": ("tool: [stop]", 1, ["unknown key 'tool'", "did you mean 'tools'?"]),
    "a key of an entry": (
        "tools:\n- class_nam: x.Y\n",
        2,
        ["unknown key 'class_nam'", "did you mean 'class_name'?"],
    ),
    "no class_name": ("tools:\n- config: {type: native}\n", 2, ["'class_name' is missing"]),
    "an option": (
        "tools:\n- stop\n- python:\n    timout: 1\n",
        4,
        ["unknown key 'timout'", "'timeout'", "output_max_chars"],
    ),
    "an option of a class": (
        VERL + "      top_k: 3\n",
        6,
        ["unknown key 'top_k'", "did you mean 'topk'?"],
    ),
    "the type of an option": ("tools:\n- python: {timeout: ten}", 2, ["valid number", "got ten"]),
    "a number that is none": (VERL + "      topk: '3'\n", 6, ["valid integer", "got 3"]),
    "a value the tool refuses": ("tools:\n- python:\n    timeout: -1\n", 3, ["above 0 seconds", "got -1"]),
    "an option that is missing": ("tools:\n- stop\n- search\n", 3, ["retrieval_service_url"]),
    "options that are none": ("tools:\n- python: 3\n", 2, ["expected options", "got 3"]),
    "a name": ("tools:\n- stop\n- pyton\n", 3, ["no tool 'pyton'", "did you mean 'python'?", "class_name"]),
    "an entry that is none": ("tools:\n- stop\n- 3\n", 3, ["expected the name of a tool", "got 3"]),
    "tools that are no list": ("tools:\n  python: {}\n", 1, ["valid list"]),
    "an option in the column of its tool": (
        "tools:\n- python:\n  timeout: 10\n",
        3,
        ["unexpected key 'timeout' next to 'python'", "indent the options"],
    ),
    "config too far left": (
        "tools:\n- class_name: x.Y\nconfig:\n  type: native\n",
        3,
        ["unknown key 'config'", "expected one of"],
    ),
    "type too far left": (
        "tools:\n- class_name: x.Y\n  type: native\n",
        3,
        ["unknown key 'type'", "expected one of class_name, config"],
    ),
    "a column that nothing else has": (
        "tools:\n  - stop\n - python\n",
        3,
        ["not YAML", "check the indentation"],
    ),
    "a value and keys": ("tools: stop\n  - python\nlimits: x: 3\n", 3, ["not YAML", "check the indentation"]),
    "a tab": ("tools:\n\t- stop\n", 2, ["a tab", "spaces"]),
    "an open bracket": ("tools: [stop,\n", 2, ["not YAML", "expected"]),
    "two documents": ("tools: [stop]\n---\ntools: [python]\n", 2, ["not YAML", "single document"]),
    "a key twice": ("tools: [stop]\nlimits: {}\ntools: [python]\n", 3, ["duplicate key 'tools'", "line 1"]),
    "an option twice": (
        "tools:\n- python:\n    timeout: 1\n    timeout: 2\n",
        4,
        ["duplicate key 'timeout'", "line 3"],
    ),
    "a key that is no text": (
        "tools: [stop]\nlimits:\n  on: {}\n",
        3,
        ["a key must be a string", "'on'", "quote"],
    ),
    "a date that does not exist": ("tools:\n- python: {x: 2001-99-99}\n", 2, ["cannot read '2001-99-99'"]),
    "an unknown anchor": ("tools: [*a]\n", 1, ["not YAML", "undefined alias"]),
    "nothing": ("# nothing\n", 1, ["empty", "expected keys, such as 'tools:"]),
    "a list": ("- stop\n", 1, ["expected a mapping with keys of", "tools", "got ['stop']"]),
    "a type": (
        "tools:\n- class_name: x.Y\n  config:\n    type: nativ\n",
        4,
        ["tools.0.config.type", "got nativ", "did you mean 'native'?", "'mcp'"],
    ),
    "a class of verl": (
        "tools:\n- class_name: verl.tools.search_tool.SearchTol\n",
        2,
        ["no class", "did you mean 'verl.tools.search_tool.SearchTool'?"],
    ),
    "a module": ("tools:\n- stop\n- class_name: no.such.Tool\n", 3, ["cannot import no.such", "No module"]),
    "a class that is not there": (
        "tools:\n- class_name: tools.py:Bar\n",
        2,
        ["tools.py has no attribute 'Bar'", "did you mean 'Bare'?"],
    ),
    "half a name": ("tools:\n- class_name: Tool\n", 2, ["'package.module.Name' or 'file.py:Name'", "'Tool'"]),
    "a file that is not there": (
        "tools:\n- class_name: none.py:X\n",
        2,
        ["no file 'none.py'", "there is no none.py in"],
    ),
    "no class": (
        "tools:\n- class_name: tools.py:look\n",
        2,
        ["look is not a class", "write it as '- function:"],
    ),
    "an object": (
        "tools:\n- class_name: tools.py:an_object\n",
        2,
        ["an object of Slotted is not a class", "Tool"],
    ),
    "a class as a function": (
        "tools:\n- function: tools.py:Bare\n",
        2,
        ["'tools.py:Bare' is a class", "class_name"],
    ),
    "no tool": (
        "tools:\n- class_name: collections.OrderedDict\n",
        2,
        ["a tool is a Tool", "OrderedDict lacks name, description, input_schema, run"],
    ),
    "half a life": ("tools:\n- class_name: tools.py:Half\n", 2, ["Half has execute, but not create"]),
    "an abstract tool": (
        "tools:\n- class_name: tools.py:Abstract\n",
        2,
        ["Can't instantiate abstract class Abstract", "run"],
    ),
    "a class without a schema": (
        "tools:\n- stop\n- class_name: tools.py:Bare\n  config: {}\n",
        3,
        ["cannot create Bare", "add a tool_schema", "get_openai_tool_schema"],
    ),
    "a constructor that raises": (
        "tools:\n- class_name: tools.py:Broken\n",
        2,
        ["tools.py:20", "Broken", "KeyError", "limit"],
    ),
    "a file that raises": (
        "function_tool_path: broken.py\n",
        1,
        ["function_tool_path", "broken.py:3", "ZeroDivisionError"],
    ),
    "a class's file that raises": (
        "tools:\n- class_name: broken.py:X\n",
        2,
        ["broken.py:3", "ZeroDivisionError"],
    ),
    "a file that is no Python": ("tools:\n- function: wrong.py:f\n", 2, ["wrong.py:2", "SyntaxError"]),
    "verl itself": ("tools:\n- class_name: verls.py:X\n", 2, ["verls.py:1", "torchrl_agentic.tools.verl"]),
    "a function without hints": ("tools:\n- function: bare.py:f\n", 2, ["f()", "'x'", "annotation"]),
    "a function that is no name": ("tools:\n- function: [a, b]\n", 2, ["'file.py:name'", "got ['a', 'b']"]),
    "a tool file that is not there": ("tool_config_path: none.yaml\n", 1, ["no file 'none.yaml'"]),
    "a limit of nothing": (
        "tools: [stop]\nlimits:\n  stp: {max_concurrent: 1}\n",
        3,
        ["no tool 'stp' to limit", "did you mean 'stop'?"],
    ),
    "an argument of a limit": (
        "tools: [stop]\nlimits:\n  stop:\n    max_concurent: 1\n",
        4,
        ["unknown key 'max_concurent'", "did you mean 'max_concurrent'?"],
    ),
    "a limit of none": ("tools: [stop]\nlimits:\n  stop: {max_concurrent: 0}\n", 3, ["1 or more", "got 0"]),
    "a selection": (
        "tools: [stop, python]\ntool_selected_list:\n- stop\n- pyton\n",
        4,
        ["no tool 'pyton' to select", "did you mean 'python'?"],
    ),
    "a switch": ("multi_turn:\n  enable: maybe\n", 2, ["valid boolean", "got maybe"]),
    "a key of multi_turn": (
        "multi_turn:\n  enable: true\n  tools_config_path: x.yaml\n",
        3,
        ["unknown key 'tools_config_path'", "did you mean 'tool_config_path'?"],
    ),
    "an environment variable": (
        "tools:\n- search: {retrieval_service_url: '${oc.env:NO_SUCH_URL}'}\n",
        2,
        ["environment variable 'NO_SUCH_URL' is not set"],
    ),
    "a server's own class": (
        "tools:\n- class_name: tools.py:Bare\n  mcp: {mcp_servers_config_path: x.json}\n",
        2,
        ["class_name", "MCPSearchTool", "got tools.py:Bare"],
    ),
    "mcp and native": (
        "tools:\n- class_name: x.Y\n  config: {type: native}\n  mcp: {mcp_servers_config_path: x.json}\n",
        4,
        ["unknown key 'mcp'", "class_name, config, tool_schema"],
    ),
    "mcp without servers": (
        "tools:\n- class_name: verl.tools.mcp_base_tool.MCPBaseTool\n  config: {type: mcp}\n",
        2,
        ["'mcp' is missing"],
    ),
    "a file of servers": (
        "mcp:\n  mcp_servers_config_path: none.json\n",
        2,
        ["no file 'none.json'"],
    ),
    "a setting of servers": (
        "tools:\n- mcp:\n    mcp_servers_config_path: x.json\n    ratelimit: 3\n",
        4,
        ["unknown key 'ratelimit'"],
    ),
    "a name of a schema": (
        SCHEMA.format("items: {type: string}").replace("      name: search\n", ""),
        6,
        ["'name' is missing"],
    ),
    "a keyword of a schema": (
        SCHEMA.format("itemz: {type: string}"),
        14,
        ["'itemz'", "did you mean 'items'?"],
    ),
    "a type of a schema": (
        SCHEMA.format("items: {type: str}"),
        14,
        ["expected one of string, integer", "got str; did you mean 'string'?"],
    ),
    "a schema that is a word": (SCHEMA.format("items: string"), 14, ["expected a schema", "got string"]),
    "booleans for words": (
        SCHEMA.format("items: {type: string, enum: [yes, no]}"),
        14,
        ["the value True is not of type string", "quote them"],
    ),
    "an enum of one": (
        SCHEMA.format("items: {type: string, enum: a}"),
        14,
        ["expected a list of values", "got a"],
    ),
    "required of a property": (
        SCHEMA.format("items: {type: string, required: true}"),
        14,
        ["expected a list of property names", "got True"],
    ),
    "required that is no property": (
        SCHEMA.format("items: {type: string}").replace("[query_list]", "[query]"),
        15,
        ["no property 'query' to require", "did you mean 'query_list'?"],
    ),
    "properties that are a list": (
        SCHEMA.format("items: {type: object, properties: [a]}"),
        14,
        ["a mapping from names to schemas"],
    ),
    "a schema that the tool cannot serve": (
        SCHEMA.format("items: {type: string}").replace("query_list", "queries"),
        9,
        ["the tool needs a property 'query_list'", "did you mean 'queries'?"],
    ),
    "another agent": (
        "actor_rollout_ref:\n  rollout:\n    agent: {default_agent_loop: single_turn_agent}\n",
        2,
        ["'single_turn_agent'", "'tool_agent' is the only one"],
    ),
    "a file of agents": (
        "actor_rollout_ref:\n  rollout:\n    agent: {agent_loop_config_path: loops.yaml}\n",
        2,
        ["agent_loop_config_path", "remove it"],
    ),
    "a reference to nowhere": (
        SCHEMA.format("items: {$ref: '#/$defs/nope'}"),
        9,
        ["invalid JSON Schema", "nope"],
    ),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "broken.py").write_text("import os\n\n1 / 0\n")
    (tmp_path / "wrong.py").write_text("import os\ndef f(:\n")
    (tmp_path / "verls.py").write_text("from verl.tools.base_tool import BaseTool\n")
    (tmp_path / "bare.py").write_text("def f(x):\n    '''F.'''\n")
    (tmp_path / "x.json").write_text('{"mcpServers": {}}')
    return tmp_path


@pytest.mark.parametrize("name", MISTAKES)
def test_error_has_the_line_and_the_expected_value(folder: Path, name: str):
    text, line, words = MISTAKES[name]
    (folder / "c.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_tools(folder / "c.yaml")
    said = str(caught.value)
    assert f"c.yaml:{line}:" in said
    for word in words:
        assert word in said


def test_all_errors_of_a_section_are_reported_together(folder: Path):
    (folder / "c.yaml").write_text("tool: []\nfunction_tool_path: {}\nlimits: 3\n")
    with pytest.raises(ConfigError) as caught:
        load_tools(folder / "c.yaml")
    assert [line.split(":")[1] for line in str(caught.value).splitlines()] == ["2", "3", "1"]


def test_a_package_that_is_not_found_is_answered_with_the_form_for_files(tmp_path: Path):
    (tmp_path / "tools.yaml").write_text("tools:\n- class_name: my_stuff.tools.CalcTool\n")
    with pytest.raises(
        ConfigError, match=r"tools\.yaml:2: .*No module named .*'my_stuff/tools\.py:CalcTool'"
    ):
        load_tools(tmp_path / "tools.yaml")


def test_a_file_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"none\.yaml: no such file"):
        load_tools(tmp_path / "none.yaml")


def test_file_that_is_not_text_is_named(tmp_path: Path):
    (tmp_path / "c.yaml").write_bytes(b"tools: [\xff]")
    with pytest.raises(ConfigError, match=r"c\.yaml: .*utf-8"):
        load_tools(tmp_path / "c.yaml")


def test_anchors_that_multiply_are_refused(tmp_path: Path):
    lines = ["a: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"b{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    (tmp_path / "c.yaml").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=r"c\.yaml: more than 200000 values"):
        load_tools(tmp_path / "c.yaml")


def test_merges_that_multiply_are_refused(tmp_path: Path):
    lines = ["a: &a0 {x: 1}"]
    lines += [f"b{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}" for n in range(1, 12)]
    (tmp_path / "c.yaml").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=r"c\.yaml:\d+: merges more than"):
        load_tools(tmp_path / "c.yaml")


def test_an_anchor_inside_itself_is_refused(tmp_path: Path):
    (tmp_path / "c.yaml").write_text("tools:\n- &a\n  python: *a\n")
    with pytest.raises(ConfigError, match=r"c\.yaml: nested more than"):
        load_tools(tmp_path / "c.yaml")


def test_error_in_another_file_names_that_file(folder: Path):
    (folder / "c.yaml").write_text("tool_config_path: d.yaml\n")
    (folder / "d.yaml").write_text("tools:\n- stop\n- pyton\n")
    with pytest.raises(ConfigError, match=r"d\.yaml:3: .*no tool 'pyton'"):
        load_tools(folder / "c.yaml")
