"""One trajectory, from its task to its reward, in plain Python: both borders run the same stages.

A message takes this way: `Episode.open_turn` → the stages, in the order of the transforms → what follows it.
"""

from torchrl_agentic.errors import load_lazily

__getattr__, __dir__, __all__ = load_lazily(__name__)
