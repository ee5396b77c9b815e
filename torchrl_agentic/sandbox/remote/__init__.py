"""Sandboxes in containers and at cloud services, each through the provider's own SDK."""
