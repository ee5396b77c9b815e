"""HTTP for the model: public hosts only, or those that were named, and bounds on all that comes back.

addresses: which addresses are public. policy: which URLs may be asked for. backend: resolves once, checks,
connects to what was checked. client: the connections of one event loop. request: what the model asked, made
safe. exchange: sends it, follows redirects, reads the body. body, text, page: what came back, bounded, then
readable. failure, answer: what the model is told of it. offer, tool: `HttpTool`.
"""

from torchrl_agentic.tools.http.http_tool import HttpTool

__all__ = ["HttpTool"]
