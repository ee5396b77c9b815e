"""Which Python a sandbox can offer."""

from __future__ import annotations

import functools
import os
import stat
import sys
from pathlib import Path

_SYSTEM = ("/usr/bin/python3", "/usr/local/bin/python3")


@functools.cache
def find_python() -> tuple[str, str | None] | None:
    """Give the interpreter to use inside, and the folder that must be shown for it; None if there is none.

    Ours where whoever runs inside may read it, else the system's.
    """
    prefix = Path(sys.base_prefix).resolve()
    own = prefix / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    if own.is_file() and (prefix.is_relative_to("/usr") or _readable(prefix)):
        return str(own), None if prefix.is_relative_to("/usr") else str(prefix)
    for path in _SYSTEM:
        if os.path.isfile(path):
            return path, None
    return None


def _readable(folder: Path) -> bool:
    """Whether those who are not root can reach it, if we are root and give that up inside."""
    if os.geteuid() != 0:
        return True
    return all(path.stat().st_mode & stat.S_IXOTH for path in (folder, *folder.parents))
