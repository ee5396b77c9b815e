"""Contracts as test classes: inherit one of `torchrl_agentic.testing`, and supply the object under test.

They need pytest, pytest-asyncio and hypothesis: pip install 'torchrl-agentic[test]'.
"""
