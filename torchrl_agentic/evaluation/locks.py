"""Locks of files that end with the program that holds them."""

from __future__ import annotations

import os
import sys

_FAR = 0x7FFFFFFE
"""The byte that is locked on Windows, where nobody else can read a locked one: behind the data."""


def lock_file(file: int) -> bool:
    """Lock an open file for this program alone, until it is closed; return False if another one holds it.

    On a file system without locks, nothing is locked.

    Args:
        file: Descriptor of the file, which is open for writing. On Windows, its position changes.
    """
    if sys.platform == "win32":
        import msvcrt

        os.lseek(file, _FAR, os.SEEK_SET)
        try:
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        pass
    return True
