"""`ToolCompose.from_config`: the tools of a file, open and ready to step."""

from pathlib import Path
from typing import Any

import pytest
from helpers.chat_envs import advance, begin, call, chat_env, flags, results, step

from torchrl_agentic import RateLimiter, ToolCompose
from torchrl_agentic.config import ConfigError, load_tools
from torchrl_agentic.messages import ParsedCall
from torchrl_agentic.parsers import HermesParser

TOOLS = '''\
from torchrl_agentic import Toolset, tool
from torchrl_agentic.tools.verl import BaseTool, OpenAIFunctionToolSchema, ToolResponse

OPEN = []


def double(x: int) -> int:
    """Double it."""
    return 2 * x


class Count(BaseTool):
    def get_openai_tool_schema(self):
        told = {"name": "count", "description": "Count."}
        return OpenAIFunctionToolSchema.model_validate({"function": told})

    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self.calls = {}

    async def create(self, instance_id=None, **kwargs):
        self.calls[instance_id] = 0
        return instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        self.calls[instance_id] += self.config["step"]
        return ToolResponse(text=str(self.calls[instance_id])), None, {}


class Two(Toolset):
    def __init__(self, name="halve"):
        self.name = name

    async def setup(self):
        OPEN.append(self)

        @tool(name=self.name)
        def halve(x: int) -> int:
            """Halve it."""
            return x // 2

        return [halve]

    async def teardown(self):
        OPEN.remove(self)
'''
CONFIG = """\
tools:
- function: tools.py:double
- class_name: tools.py:Count
  config: {step: 10}
- class_name: tools.py:Two
- stop
limits: {double: {max_concurrent: 2}, stop: {max_concurrent: 1}}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "tools.yaml").write_text(CONFIG)
    return tmp_path / "tools.yaml"


def _open(compose: ToolCompose) -> list[Any]:
    return compose["count"].target.execute.__func__.__globals__["OPEN"]


def test_tools_of_all_kinds_answer(config: Path):
    env = chat_env((2,), ToolCompose.from_config(config))
    td = begin(env)
    for _ in range(2):
        td = advance(env, td, call("double", x=4) + call("halve", x=4) + call("count"), call("count"))
    assert results(td) == [["8", "2", "10", "8", "2", "20"], ["10", "20"]]
    env.close()


def test_it_closes_the_toolsets_that_it_has_opened(config: Path):
    compose = ToolCompose.from_config(config)
    held = _open(compose)
    assert len(held) == 1
    compose.close()
    assert held == []


def test_arguments_override_the_file(config: Path):
    limiter = RateLimiter(max_concurrent=3)
    parser = HermesParser()
    config.write_text(CONFIG + "multi_turn: {format: qwen3_coder, max_parallel_calls: 2}\n")
    loaded = load_tools(config)
    ours = ToolCompose.from_config(loaded, parser, rate_limits={"double": limiter}, max_calls_per_turn=5)
    assert ours.parser is parser
    env = chat_env((1,), ours)
    td = step(env, begin(env), 4 * call("double", x=1) + 2 * call("stop"))["next"]
    assert flags(td, "n_errors") == [1]
    assert (limiter.stats().granted, loaded.limits["double"].stats().granted) == (4, 0)
    assert loaded.limits["stop"].stats().granted == 1
    env.close()
    theirs = ToolCompose.from_config(str(config))
    assert theirs.parser.name == "qwen3_coder"
    env = chat_env((1,), theirs)
    td = step(env, begin(env), theirs.parser.render_calls([ParsedCall("double", {"x": 1}, "c")] * 3))["next"]
    assert flags(td, "n_errors") == [1]
    env.close()


def test_settings_of_other_transforms_are_logged_once_per_load(config: Path, caplog):
    config.write_text(CONFIG + "multi_turn: {max_assistant_turns: 3}\n")
    ToolCompose.from_config(config).close()
    (line,) = [record.message for record in caplog.records if "not applied by ToolCompose" in record.message]
    assert "EndTrajectory(max_turns=3), TurnTokenizer(max_tool_response_chars=256, " in line
    caplog.clear()
    loaded = load_tools(config)
    compose = ToolCompose.from_config(loaded, max_calls_per_turn=1)
    assert compose.tools[0] is loaded.tools[0]
    assert not caplog.records
    compose.close()


def test_default_parser_is_hermes(config: Path):
    compose = ToolCompose.from_config(config)
    assert compose.parser.name == "hermes"
    compose.close()


def test_toolset_with_taken_names_is_closed(config: Path):
    more = "- class_name: tools.py:Two\n- class_name: tools.py:Two\n  config: {name: double}\n"
    config.write_text(CONFIG.replace("- class_name: tools.py:Two\n", more))
    opened = []
    kind = ToolCompose.add_toolset

    class Watched(ToolCompose):
        def add_toolset(self, toolset: Any, **options: Any) -> None:
            opened.append(toolset.toolset)
            kind(self, toolset, **options)

    with pytest.raises(ConfigError) as caught:
        Watched.from_config(config)
    for part in ("2 tools are named 'double'", "tools.yaml:2", "tools.yaml:6"):
        assert part in str(caught.value)
    assert len(opened) == 2
    assert type(opened[0]).setup.__globals__["OPEN"] == []


def test_a_clone_has_the_tools_of_the_file_too(config: Path):
    compose = ToolCompose.from_config(config)
    clone = compose.clone()
    assert [tool.name for tool in clone.tools] == ["double", "count", "stop", "halve"]
    compose.close()
    clone.close()
