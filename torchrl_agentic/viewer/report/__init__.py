"""Statistics of dumps by step and by tool, and comparisons of two runs.

`read_report` reads a dump and returns a `Report`; `compare` compares two. `tables` shows them in a terminal,
`chart` draws them.
"""

from torchrl_agentic.errors import load_lazily

__getattr__, __dir__, __all__ = load_lazily(__name__)
