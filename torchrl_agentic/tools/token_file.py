"""Tokens that servers and their clients share, in files that only they may read."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

MIN_TOKEN = 16
"""A shorter token can be guessed."""
_TOKEN = re.compile(rf"[A-Za-z0-9._~+/-]{{{MIN_TOKEN},}}=*", re.ASCII)
_MAKE = "python -c 'import secrets; print(secrets.token_urlsafe())'"


def check_token(token: str, where: str = "the token") -> str:
    """Return a token that can be sent in a header and is not too easy to guess.

    Args:
        token: The token.
        where: What the error calls it.

    Raises:
        ValueError: If it is not one; the message does not repeat it.
    """
    if not _TOKEN.fullmatch(token):
        raise ValueError(
            f"{where} has {len(token)} characters; expected at least {MIN_TOKEN}, of letters, digits and "
            f"-._~+/; make one with: {_MAKE}"
        )
    return token


def read_token(path: str | Path) -> str:
    """Read the token in a file; space around it is left out.

    Args:
        path: The file. Its owner may read it, and its group; others may not.

    Raises:
        ValueError: If all users of the machine can read or change the file, or if it has no token.
        OSError: If it cannot be read.
    """
    with open(os.path.expanduser(path), "rb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if mode & (stat.S_IROTH | stat.S_IWOTH):
            raise ValueError(f"all users can read or change {path} (mode {mode:04o}); run: chmod 600 {path}")
        data = file.read(1 << 16)
    return check_token(data.decode("utf-8", "replace").strip(), f"the token in {path}")


def bearer(path: str | Path | None) -> dict[str, str]:
    """Return the headers that send the token in a file; none without a file.

    Raises:
        ValueError: If the file does not have a token, or if all users can read it.
        OSError: If it cannot be read.
    """
    return {} if path is None else {"Authorization": f"Bearer {read_token(path)}"}
