"""Run code in a Sandbox Fusion service: a client for rewards and a tool for models, under one limit."""

from torchrl_agentic.tools.sandbox_fusion.fusion_client import Outcome, RunResult, SandboxFusionClient
from torchrl_agentic.tools.sandbox_fusion.fusion_tool import SandboxFusionTool

__all__ = ["Outcome", "RunResult", "SandboxFusionClient", "SandboxFusionTool"]
