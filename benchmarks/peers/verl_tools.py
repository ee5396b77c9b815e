"""The tool, as verl loads it by `function_tool_path`."""

from load import work
from verl.tools.function_tool import function_tool

function_tool(work)
