"""The modules of `inside` as one text, so that a Python of any place and user can run them."""

from __future__ import annotations

import functools
from importlib import resources

PACKAGE = "torchrl_agentic.sandbox.inside"
_START = """\
import sys
package = sys.modules[{package!r}] = type(sys)({package!r})
for name, text in {modules!r}:
    module = sys.modules[package.__name__ + "." + name] = type(sys)(package.__name__ + "." + name)
    setattr(package, name, module)
    exec(compile(text, name, "exec"), module.__dict__)
"""


@functools.cache
def modules(*names: str) -> str:
    """Make a text that defines these modules, each able to import those before it."""
    folder = resources.files(PACKAGE)
    texts = [(name, folder.joinpath(f"{name}.py").read_text("utf-8")) for name in names]
    return _START.format(package=PACKAGE, modules=texts)


def program(*names: str) -> str:
    """Make a program for `python -I -S -B -c`: these modules, of which the last one's `main` is run.

    -I matters: without it the folder that Python starts in, or a variable,
    could put a file of the model's in place of a module that trusted code imports.
    """
    return modules(*names) + "module.main()\n"
