from torchrl_agentic.viewer.app import RolloutViewer as RolloutViewer
