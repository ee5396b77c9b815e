"""Look at recorded trajectories: `python scripts/rollout_viewer.py DIR` is `torchrl-agentic view DIR`."""

import sys

from torchrl_agentic.cli.main import app

if __name__ == "__main__":
    app(["view", *sys.argv[1:]], prog_name="rollout_viewer.py")
