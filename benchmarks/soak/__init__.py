"""Soak test of `AgentCollector`: hours of failures, after which nothing is left over and nothing is lost."""
