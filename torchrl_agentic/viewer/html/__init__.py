"""Write a dump as one HTML file that opens from disk, without network access.

`write_page` writes it. The content of a dump is not trusted: the page shows it as text, and its
Content-Security-Policy allows only its own script.
"""

from torchrl_agentic.viewer.html.page import write_page

__all__ = ["write_page"]
