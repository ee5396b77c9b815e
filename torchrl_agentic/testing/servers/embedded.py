"""`serving`: run an ASGI application on loopback, for tests of clients."""

from torchrl_agentic.serve.serving import END_S, serving

__all__ = ["END_S", "serving"]
