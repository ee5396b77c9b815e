"""Tools and interactions from YAML files, in our short form and in verl's; errors name file and line."""

from torchrl_agentic.config.document import Location
from torchrl_agentic.config.interactions import load_interactions
from torchrl_agentic.config.loader import load_config_tools, load_tools
from torchrl_agentic.config.sections import ToolsConfig
from torchrl_agentic.errors import ConfigError
from torchrl_agentic.tools.loaded_tools import LoadedTools

__all__ = [
    "ConfigError", "LoadedTools", "Location", "ToolsConfig", "load_config_tools", "load_interactions",
    "load_tools",
]  # fmt: skip
