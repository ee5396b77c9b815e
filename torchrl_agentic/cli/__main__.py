"""Run the command line: `python -m torchrl_agentic.cli`."""

from torchrl_agentic.cli.main import app

app()
