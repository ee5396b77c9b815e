"""Tools and interactions from YAML files, in our short form and in verl's; errors name file and line."""

from torchrl_agentic.errors import load_lazily

__getattr__, __dir__, __all__ = load_lazily(__name__)
