"""Tool use for language-model reinforcement learning in TorchRL.

The names of `__init__.pyi` are loaded when they are first used: importing the package loads no torch, and
starts nothing.
"""

from torchrl_agentic.errors import load_lazily

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = load_lazily(__name__)
