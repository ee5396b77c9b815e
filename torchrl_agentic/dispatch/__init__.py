"""From parsed calls to results, in plain asyncio: look up, validate, order, limit and run, under deadlines.

A message takes this way: `Dispatcher.run` → `resolve` → `TurnRun.start` → `dependencies` → `Session.live` →
the tool.
"""

from torchrl_agentic.errors import load_lazily

__getattr__, __dir__, __all__ = load_lazily(__name__)
