from torchrl_agentic.config.document import Location as Location
from torchrl_agentic.config.interactions import load_interactions as load_interactions
from torchrl_agentic.config.loader import load_config_tools as load_config_tools
from torchrl_agentic.config.loader import load_tools as load_tools
from torchrl_agentic.config.sections import ToolsConfig as ToolsConfig
from torchrl_agentic.errors import ConfigError as ConfigError
from torchrl_agentic.tools.loaded_tools import LoadedTools as LoadedTools
