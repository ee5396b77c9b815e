"""Names that models can write."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

MAX_NAME = 64
"""What APIs of models take, in characters."""
_UNFIT = re.compile(r"[^A-Za-z0-9_-]")


def clean(name: str) -> str:
    """Give a name of letters, digits, _ and -; one that was too long ends in a digest of what it was."""
    fit = _UNFIT.sub("_", name) or "_"
    if len(fit) <= MAX_NAME:
        return fit
    digest = hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:8]
    return f"{fit[: MAX_NAME - 9]}_{digest}"


def shown_names(names: Iterable[str], prefix: str = "") -> dict[str, str]:
    """Give each of a server's names the one that models see; of those that come out equal, later ones count.

    A name that is clean keeps its place, whatever comes before it.
    """
    ordered = list(dict.fromkeys(names))
    taken = {prefix + name for name in ordered if clean(prefix + name) == prefix + name}
    shown: dict[str, str] = {}
    for name in ordered:
        wanted = found = clean(prefix + name)
        count = 1
        while found != prefix + name and found in taken:
            count += 1
            found = f"{wanted[: MAX_NAME - 4]}_{count}"
        taken.add(found)
        shown[name] = found
    return shown
