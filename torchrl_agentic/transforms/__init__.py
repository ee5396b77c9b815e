"""The TorchRL side: the transforms that put tool use into an environment.

Everything below this folder is torch-free.
"""

from torchrl_agentic.errors import load_lazily

__getattr__, __dir__, __all__ = load_lazily(__name__)
