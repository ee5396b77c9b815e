"""Classes that tool files import from verl, and the tools that run them.

A tool file written for verl loads once its import path is changed from `verl.tools` to this package.
"""

from torchrl_agentic.tools.function import function_tool
from torchrl_agentic.tools.verl.base_tool import (
    BaseTool,
    OpenAIFunctionParametersSchema,
    OpenAIFunctionPropertySchema,
    OpenAIFunctionSchema,
    OpenAIFunctionToolSchema,
    ToolResponse,
    _process_single_case,  # pyright: ignore[reportPrivateUsage]
    process_image,
    process_video,
    rollout_trace_op,
)

__all__ = [
    "BaseTool",
    "OpenAIFunctionParametersSchema",
    "OpenAIFunctionPropertySchema",
    "OpenAIFunctionSchema",
    "OpenAIFunctionToolSchema",
    "ToolResponse",
    "_process_single_case",
    "function_tool",
    "process_image",
    "process_video",
    "rollout_trace_op",
]
