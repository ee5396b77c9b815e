"""Code that runs in a Sandbox Fusion service: a client for rewards, a tool for models, one limit for both."""

from torchrl_agentic.tools.sandbox_fusion.fusion_client import Outcome, RunResult, SandboxFusionClient
from torchrl_agentic.tools.sandbox_fusion.fusion_tool import SandboxFusionTool

__all__ = ["Outcome", "RunResult", "SandboxFusionClient", "SandboxFusionTool"]
