"""Sandbox and search servers for machines without a cloud: the applications of `torchrl-agentic serve`."""
