"""HTTP requests of the model: to public hosts only, or to named ones, with bounds on all that comes back.

`policy` decides which URLs and addresses are allowed. `http_client` resolves each host once, checks its
addresses and connects to one of them. `exchange` checks a request, sends it, follows redirects and reads the
body. `render` makes the response readable for the model. `http_tool` has `HttpTool`.
"""

from torchrl_agentic.tools.http.http_tool import HttpTool

__all__ = ["HttpTool"]
