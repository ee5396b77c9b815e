"""Python inside sandboxes: which interpreter, which packages, which environment."""

from __future__ import annotations

import functools
import logging
import os
import stat
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path

from torchrl_agentic.errors import SandboxError
from torchrl_agentic.sandbox.inside.files import WORK
from torchrl_agentic.sandbox.resource_limits import ResourceLimits

logger = logging.getLogger(__name__)

_SYSTEM = ("/usr/bin/python3", "/usr/local/bin/python3")
_PACKAGES = "/opt/packages"
_PACKAGE_FOLDERS = ("site-packages", "dist-packages")
BASE_ENV = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": WORK,
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "OPENBLAS_NUM_THREADS": "1",
    "MPLBACKEND": "agg",
    "MPLCONFIGDIR": "/tmp/matplotlib",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
}


@functools.cache
def find_python() -> tuple[str, str | None] | None:
    """Return the interpreter to use inside, and the folder to show for it or None; None if there is none.

    It is the running Python if the user that code runs as can read it, otherwise the system's.
    """
    prefix = Path(sys.base_prefix).resolve()
    own = prefix / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    if own.is_file() and (prefix.is_relative_to("/usr") or _readable(prefix)):
        return str(own), None if prefix.is_relative_to("/usr") else str(prefix)
    for path in _SYSTEM:
        if os.path.isfile(path):
            return path, None
    return None


def python_roots() -> list[str]:
    """Return the folder of the interpreter, or no folder if it is below /usr or Python is not found."""
    found = find_python()
    return [] if found is None or found[1] is None else [found[1]]


def python_inside() -> str:
    """Return the path of the interpreter to use inside.

    Raises:
        SandboxError: If the user that code runs as can read no interpreter.
    """
    found = find_python()
    if found is None:
        raise SandboxError(
            f"code in a sandbox can run no Python: only root may read {sys.base_prefix}, and there is no "
            "/usr/bin/python3; install Python where other users may read it"
        )
    return found[0]


@functools.cache
def find_packages() -> Mapping[str, str]:
    """Map the folders of packages of the running Python to the paths where they are shown inside.

    These are its own folder, that of the user, and folders of packages that `.pth` files add. A project that
    is installed as editable is not shown, because its folder may contain anything. The result is empty if the
    interpreter inside has another version. Folders that cannot be read inside are left out with a warning.
    """
    found = find_python()
    if found is None:
        return {}
    folders = package_folders()
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    inside = Path(found[0]).resolve().name
    if inside != version:
        if folders:
            logger.warning(
                "code in sandboxes has no packages of this Python: only root may read %s, so %s runs inside,"
                " which is another version. Install Python where other users may read it",
                sys.base_prefix,
                found[0],
            )
        return {}
    shown: list[str] = []
    for folder in folders:
        if _readable(Path(folder)):
            shown.append(folder)
        else:
            logger.warning(
                "code in sandboxes cannot use the packages in %s: this program runs as root, so code runs as"
                " nobody, who may not read that folder. Run chmod o+rx on it and its parents, or move it",
                folder,
            )
    return {folder: f"{_PACKAGES}/{number}" for number, folder in enumerate(shown)}


def package_folders() -> list[str]:
    """Return the folders of packages that the running Python imports from, except those below /usr."""
    own = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    added = [path for path in sys.path if path in own or os.path.basename(path) in _PACKAGE_FOLDERS]
    return [
        folder
        for folder in dict.fromkeys((*added, *own))
        if os.path.isdir(folder) and not Path(folder).is_relative_to("/usr")
    ]


def clean_env() -> Mapping[str, str]:
    """Return the default environment of code inside: constants, and the paths of the packages."""
    return _with_packages(find_packages().values())


def env_inside(limits: ResourceLimits) -> Mapping[str, str]:
    """Return the environment of code that sees the paths inside: that of the limits, or else `clean_env`.

    Args:
        limits: Limits of the sandbox.
    """
    return clean_env() if limits.env is None else limits.env


def env_on_host(limits: ResourceLimits, folder: str) -> Mapping[str, str]:
    """Return the environment of code that sees the paths of the host.

    Args:
        limits: Limits of the sandbox; their `env` is used if it is set.
        folder: The private folder, for HOME and temporary files.
    """
    if limits.env is not None:
        return limits.env
    return {**_with_packages(find_packages()), "HOME": folder, "TMPDIR": folder, "MPLCONFIGDIR": folder}


def _with_packages(folders: Iterable[str]) -> Mapping[str, str]:
    path = os.pathsep.join(folders)
    return BASE_ENV | ({"PYTHONPATH": path} if path else {})


def _readable(folder: Path) -> bool:
    """Return whether code inside can read a folder: it runs as nobody if this process is root."""
    if os.geteuid() != 0:
        return True
    reached = all(path.stat().st_mode & stat.S_IXOTH for path in (folder, *folder.parents))
    return reached and bool(folder.stat().st_mode & stat.S_IROTH)
