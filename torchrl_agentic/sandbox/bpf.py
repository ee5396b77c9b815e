"""Classic BPF over `struct seccomp_data`: the few instructions that a filter of system calls is made of.

See seccomp(2) and linux/filter.h. Blocks fall through to what stands behind them, so no jump is ever long.
"""

from __future__ import annotations

import struct

_LOAD, _AND, _JUMP_EQUAL, _JUMP_FROM_ON, _JUMP_WITH_ANY, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCH, ARG0, ARG1, ARG3 = 0, 4, 16, 24, 40
"""Where to load from: the number of the system call, the architecture, the low halves of the arguments."""


def _instruction(code: int, if_true: int, if_false: int, value: int) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)


ALLOW = _instruction(_RETURN, 0, 0, 0x7FFF0000)
KILL = _instruction(_RETURN, 0, 0, 0x80000000)
ASK = _instruction(_RETURN, 0, 0, 0x7FC00000)
"""Let the process decide that listens."""


def refuse(error: int) -> bytes:
    """End with an error number."""
    return _instruction(_RETURN, 0, 0, 0x00050000 | error)


def load(offset: int) -> bytes:
    """Load a word to look at."""
    return _instruction(_LOAD, 0, 0, offset)


def mask(bits: int) -> bytes:
    """Keep some bits of the loaded word."""
    return _instruction(_AND, 0, 0, bits)


def when(value: int, block: bytes) -> bytes:
    """Run a block if the loaded word equals a value, else go on behind it."""
    return _instruction(_JUMP_EQUAL, 0, len(block) // 8, value) + block


def unless(value: int, block: bytes) -> bytes:
    """Run a block unless the loaded word equals a value."""
    return _instruction(_JUMP_EQUAL, len(block) // 8, 0, value) + block


def from_on(value: int, block: bytes) -> bytes:
    """Run a block if the loaded word is a value or greater."""
    return _instruction(_JUMP_FROM_ON, 0, len(block) // 8, value) + block


def below(value: int, block: bytes) -> bytes:
    """Run a block if the loaded word is less than a value."""
    return _instruction(_JUMP_FROM_ON, len(block) // 8, 0, value) + block


def with_any(bits: int, block: bytes) -> bytes:
    """Run a block if the loaded word has any of these bits."""
    return _instruction(_JUMP_WITH_ANY, 0, len(block) // 8, bits) + block
