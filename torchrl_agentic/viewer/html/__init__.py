"""A dump as one HTML file, which opens from disk and asks no network for anything.

`write_page` writes it. What stands in a dump is never trusted: the page makes text of it, and its
Content-Security-Policy lets no script run but its own.
"""

from torchrl_agentic.viewer.html.page import write_page

__all__ = ["write_page"]
