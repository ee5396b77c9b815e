"""Sandboxes in containers and services elsewhere: each uses its provider's own SDK."""
