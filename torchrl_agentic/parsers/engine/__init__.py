"""Shared readers of the formats: one pass over a message, JSON, XML parameters, Python literals."""
