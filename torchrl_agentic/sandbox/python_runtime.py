"""Which Python a sandbox can offer, with which packages, and in what environment."""

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


def python_inside() -> str:
    """Give the path of the interpreter to use inside.

    Raises:
        SandboxError: there is none that whoever runs inside may read.
    """
    found = find_python()
    if found is None:
        raise SandboxError(
            f"no Python that code in a sandbox may run: {sys.base_prefix} is for root alone, and there is no "
            "/usr/bin/python3"
        )
    return found[0]


@functools.cache
def find_packages() -> Mapping[str, str]:
    """Give the folders of packages of the running Python, and where to show them inside.

    That is its own folder, that of the user, and those that `.pth` files add, as far as they are folders of
    packages: a project that is installed as editable is not shown, with whatever else lies in it. Only if the
    interpreter inside is of the same version; what may not be read inside is left out with a warning.
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
                "code in sandboxes sees no packages of this Python: %s is for root alone, so %s runs inside,"
                " which is another version. Install Python where others than root may read it",
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
                "code in sandboxes does not see the packages in %s: it runs as nobody, since this program"
                " runs as root, and may not go there: chmod o+rx it and all above it, or move it",
                folder,
            )
    return {folder: f"{_PACKAGES}/{number}" for number, folder in enumerate(shown)}


def package_folders() -> list[str]:
    """Return the folders of packages that the running Python imports from, in that order, below /usr none."""
    own = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    added = [path for path in sys.path if path in own or os.path.basename(path) in _PACKAGE_FOLDERS]
    return [
        folder
        for folder in dict.fromkeys((*added, *own))
        if os.path.isdir(folder) and not Path(folder).is_relative_to("/usr")
    ]


def clean_env() -> Mapping[str, str]:
    """Give the environment of code inside: nothing of ours but where the packages are shown."""
    return _with_packages(find_packages().values())


def env_inside(limits: ResourceLimits) -> Mapping[str, str]:
    """Give the environment of code that sees paths inside: that of the limits, else `clean_env`."""
    return clean_env() if limits.env is None else limits.env


def env_on_host(limits: ResourceLimits, folder: str) -> Mapping[str, str]:
    """Give the environment of code that sees the host's paths: that of the limits, or for this folder."""
    if limits.env is not None:
        return limits.env
    return {**_with_packages(find_packages()), "HOME": folder, "TMPDIR": folder, "MPLCONFIGDIR": folder}


def _with_packages(folders: Iterable[str]) -> Mapping[str, str]:
    path = os.pathsep.join(folders)
    return BASE_ENV | ({"PYTHONPATH": path} if path else {})


def _readable(folder: Path) -> bool:
    """Whether those who are not root can reach it, if we are root and give that up inside."""
    if os.geteuid() != 0:
        return True
    reached = all(path.stat().st_mode & stat.S_IXOTH for path in (folder, *folder.parents))
    return reached and bool(folder.stat().st_mode & stat.S_IROTH)
