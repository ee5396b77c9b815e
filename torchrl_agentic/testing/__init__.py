"""What tests of tools, parsers, sandboxes and environments need; made for yours as much as for ours.

Import what you need from its module: `policies`, `tokenizers`, `clock` and the contracts.
"""
