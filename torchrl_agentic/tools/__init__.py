"""Tools that come with the package.

To add one: subclass `Tool` in a file of its own, and let a test inherit `testing.ToolContract`.
"""

from torchrl_agentic.errors import StopSignal
from torchrl_agentic.tools.files import FileEditTool, FileReadTool, FileWriteTool
from torchrl_agentic.tools.legacy import as_tool
from torchrl_agentic.tools.python import PythonTool
from torchrl_agentic.tools.shell import ShellTool
from torchrl_agentic.tools.stop import StopTool

__all__ = [
    "FileEditTool",
    "FileReadTool",
    "FileWriteTool",
    "PythonTool",
    "ShellTool",
    "StopSignal",
    "StopTool",
    "as_tool",
]
