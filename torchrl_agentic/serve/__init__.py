"""Services for machines without a cloud: what `torchrl-agentic serve` starts, as Starlette applications."""
