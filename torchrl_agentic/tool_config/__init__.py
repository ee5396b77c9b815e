"""Tools from YAML files: our short form and verl's, with the line of each mistake."""

from torchrl_agentic.tool_config.load import LoadedTools, load_config_tools, load_tools
from torchrl_agentic.tool_config.mistakes import ConfigError
from torchrl_agentic.tool_config.models import ToolsConfig

__all__ = ["ConfigError", "LoadedTools", "ToolsConfig", "load_config_tools", "load_tools"]
