"""The command line `torchrl-agentic`."""
