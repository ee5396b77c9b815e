"""`serving`, which runs an ASGI application on loopback, for tests of what talks to a server."""

from torchrl_agentic.serve.serving import END_S, serving

__all__ = ["END_S", "serving"]
