"""Old TorchRL tool transforms as tools: `as_tool(PythonInterpreter(persistent=True), name="python")`.

A legacy transform parses the message again; here its execution layer is called instead, so that the arguments
arrive as the model wrote them: a code fence in the code, for one, cannot cut it. One file per layer, behind
the `Layer` of `base`. Nothing here imports torch.
"""

from torchrl_agentic.tools.legacy.transform_tool import LegacyTool, as_tool

__all__ = ["LegacyTool", "as_tool"]
