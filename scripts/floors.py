"""Print the lowest version of each package that pyproject.toml declares, as constraints for pip.

`make test-floors` installs them and runs the quick tests. The extras `docs` and `dev` declare none: only this
repository uses them, with constraints.txt.
"""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent


def declared() -> dict[str, list[Requirement]]:
    """Read what pyproject.toml requires.

    Returns:
        Requirements by extra; `build` and `dependencies` are those of the build and of the package itself.
        Extras inside an extra, as in `torchrl-agentic[ray]`, are left out.
    """
    table = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    project = table["project"]
    groups = {
        "build": table["build-system"]["requires"],
        "dependencies": project["dependencies"],
        **project["optional-dependencies"],
    }
    return {
        group: [found for line in lines if (found := Requirement(line)).name != project["name"]]
        for group, lines in groups.items()
    }


def floors() -> dict[str, str]:
    """Find the lowest declared version of each package that users of the package may install.

    Returns:
        Versions by name.

    Raises:
        ValueError: If a requirement declares none.
    """
    lowest: dict[str, str] = {}
    for group, requirements in declared().items():
        if group in ("docs", "dev"):
            continue
        for requirement in requirements:
            bounds = [bound.version for bound in requirement.specifier if bound.operator == ">="]
            if len(bounds) != 1 or lowest.setdefault(requirement.name, bounds[0]) != bounds[0]:
                raise ValueError(
                    f"pyproject.toml, {group}: {requirement} needs one lowest version, the same in all"
                )
    return lowest


if __name__ == "__main__":
    print(*(f"{name}=={version}" for name, version in floors().items()), sep="\n")
