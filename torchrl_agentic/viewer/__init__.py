"""The viewer of dumps, `torchrl-agentic view`: in the terminal, as text, as a page. Loads no torch."""
