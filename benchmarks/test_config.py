"""The time to load a configuration of many tools, and the cost of a call among many tools."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchrl_agentic import tool
from torchrl_agentic.config import load_tools
from torchrl_agentic.dispatch import Dispatcher
from torchrl_agentic.messages import ParsedCall

Benchmark = Callable[..., Any]
FUNCTION = '''
@function_tool
def look_{0}(place: str, depth: int = 1, kinds: list[str] | None = None) -> str:
    """Look somewhere.

    Args:
        place: Where.
        depth: How far.
        kinds: What for.
    """
    return place
'''
CLASS = """\
- class_name: classes.py:Life
  config: {{type: native, depth: {0}}}
  tool_schema:
    type: function
    function:
      name: life_{0}
      description: A tool that lives as long as its trajectory.
      parameters:
        type: object
        properties:
          answer: {{type: string, description: What the answer is.}}
          size: {{type: integer, minimum: 1}}
        required: [answer]
"""
NATIVE = """\
- class_name: verl.tools.search_tool.SearchTool
  config: {{retrieval_service_url: "http://localhost:1/retrieve", rate_limit: 10, type: native}}
  tool_schema:
    type: function
    function:
      name: search_{0}
      description: Search.
      parameters:
        type: object
        properties: {{query_list: {{type: array, items: {{type: string}}}}}}
        required: [query_list]
"""


def configuration(folder: Path, number: int) -> Path:
    """Write a file of `number` tools: a third each of functions, user classes, and tools of the package."""
    third = number // 3
    functions = "".join(FUNCTION.format(index) for index in range(number - 2 * third))
    (folder / "functions.py").write_text("from torchrl_agentic import function_tool\n" + functions)
    (folder / "classes.py").write_text(
        "from torchrl_agentic.tools.verl import BaseTool\n\n\nclass Life(BaseTool):\n    pass\n"
    )
    entries = "".join(kind.format(index) for kind in (CLASS, NATIVE) for index in range(third))
    path = folder / "tools.yaml"
    path.write_text(f"function_tool_path: functions.py\ntools:\n{entries}")
    return path


@pytest.mark.parametrize("number", [10, 100, 1000])
def test_loading(benchmark: Benchmark, tmp_path: Path, number: int) -> None:
    benchmark.group = f"configuration: {number} tools"
    path = configuration(tmp_path, number)
    loaded = benchmark.pedantic(lambda: load_tools(path), rounds=5, warmup_rounds=1)
    assert len(loaded.tools) == number


@pytest.mark.parametrize("number", [1, 1000])
def test_a_call_among_many_tools(benchmark: Benchmark, number: int) -> None:
    """Call the tool in the middle 1,000 times, once per turn."""
    benchmark.group = "dispatch: 1,000 turns of one call, by the number of tools"

    async def look(place: str, depth: int = 1) -> str:
        """Look somewhere."""
        return place

    tools = [tool(look, name=f"look_{index}") for index in range(number)]
    dispatcher = Dispatcher(tools)
    session = dispatcher.session("t")
    batch = [ParsedCall(f"look_{number // 2}", {"place": "here"}, "c")]

    async def turns() -> None:
        for _ in range(1000):
            await session.run(batch)

    with asyncio.Runner() as runner:
        benchmark.pedantic(lambda: runner.run(turns()), rounds=20, warmup_rounds=2)
        runner.run(dispatcher.close())
