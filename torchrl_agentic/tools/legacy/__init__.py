"""Old TorchRL tool transforms as tools: `as_tool(PythonInterpreter(persistent=True), name="python")`.

A legacy transform parses the message itself. Here its execution layer is called instead, so that the
arguments arrive as the model wrote them; a code fence inside of code, for example, cannot truncate it. Each
kind of transform has a subclass of `Layer`. Nothing here imports torch.
"""

from torchrl_agentic.tools.legacy.transform_tool import LegacyTool, as_tool

__all__ = ["LegacyTool", "as_tool"]
