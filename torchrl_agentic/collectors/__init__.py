"""`AgentCollector`: every trajectory advances on its own, and whole groups leave as batches."""
