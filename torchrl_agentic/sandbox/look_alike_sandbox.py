"""`ensure_sandbox` and `ensure_template`, which adapt sandboxes that do not derive from `Sandbox`."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

from torchrl_agentic.errors import derives, lacking
from torchrl_agentic.sandbox.base import Process, Sandbox, SandboxResult
from torchrl_agentic.sandbox.resource_limits import ResourceLimits


class DuckSandbox(Sandbox):
    """A look-alike of a sandbox behind the interface.

    Its `fresh` is the object's, or else a deep copy of the object as it was when it was adapted. What else
    the object may have is used: `is_open`, `limits_enforced`, `isolated`, `spawn`, `python_argv`.
    """

    def __init__(self, target: Any) -> None:
        self.target = target
        self.limits = target.limits
        self.isolated = bool(getattr(target, "isolated", False))  # pyright: ignore[reportAttributeAccessIssue]
        self._is_open = False
        self.template = Template(target)

    @property
    def limits_enforced(self) -> Mapping[str, bool]:
        """Return what the object says of its limits; nothing if it says nothing."""
        return getattr(self.target, "limits_enforced", {})

    def fresh(self) -> Sandbox:
        """Return another one with the same settings, not open yet.

        Raises:
            TypeError: If the object has no `fresh` and cannot be copied.
        """
        return ensure_sandbox(self.template.make())

    @property
    def is_open(self) -> bool:
        """Return what the object says, or else whether `open` was called."""
        return bool(getattr(self.target, "is_open", self._is_open))

    async def open(self) -> None:
        """Open the object if it is not open."""
        if not self.is_open:
            await self.target.open()
            self._is_open = True

    async def close(self) -> None:
        """Close the object if it is open."""
        if self.is_open:
            self._is_open = False
            await self.target.close()

    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | None = None,
        cwd: str | None = None,
        limits: ResourceLimits | None = None,
    ) -> SandboxResult:
        """Run one command to its end."""
        return await self.target.run(argv, stdin=stdin, cwd=cwd, limits=limits)

    async def spawn(self, argv: Sequence[str]) -> Process:
        """Start a long-lived process.

        Raises:
            TypeError: If the object has no `spawn`.
        """
        _check(self.target, ["spawn"])
        return await self.target.spawn(argv)

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file inside."""
        await self.target.write_file(path, data)

    async def read_file(self, path: str, max_bytes: int | None = None) -> bytes:
        """Read a file inside, or its first `max_bytes`."""
        return await self.target.read_file(path, max_bytes)

    @property
    def python_argv(self) -> tuple[str, ...]:
        """Return the command that starts Python inside."""
        return getattr(self.target, "python_argv", super().python_argv)

    def __repr__(self) -> str:
        return repr(self.target)


class Template:
    """Makes objects like one that people brought: by its `fresh`, or as copies of how it was at first.

    Args:
        target: The object.
        shared: What copies do not copy but refer to, or replace by what `make` is given.
    """

    def __init__(self, target: Any, *shared: Any) -> None:
        self._kind = type(target).__name__
        self._shared = shared
        self._fresh = getattr(target, "fresh", None)
        self._untouched: Any = None
        self.reason = ""
        if not callable(self._fresh):
            if getattr(target, "is_open", False) is True:
                self.reason = "it is open already"
                return
            try:
                self._untouched = copy.deepcopy(target, {id(item): item for item in shared})
            except Exception as error:
                self.reason = f"it cannot be copied ({error})"

    def make(self, *given: Any) -> Any:
        """Return another object; `given` takes the place of what is shared, or is handed to `fresh`.

        Raises:
            TypeError: If the object has no `fresh` and cannot be copied.
        """
        self.check()
        if callable(self._fresh):
            return self._fresh(*given)
        memo = {id(ours): theirs for ours, theirs in zip(self._shared, given or self._shared, strict=True)}
        return copy.deepcopy(self._untouched, memo)

    def check(self) -> None:
        """Raise TypeError if no other object can be made."""
        if self.reason:
            raise TypeError(
                f"each trajectory needs a {self._kind} of its own, but this one lacks fresh, and"
                f" {self.reason}:"
                " define fresh(), which returns another one with the same settings, not open yet"
            )


_adapted: WeakValueDictionary[int, DuckSandbox] = WeakValueDictionary()
"""By the identity of the object: tools that are given the same one share its adapter, and so their files."""


def ensure_sandbox(item: Any, *, also: Sequence[str] = ()) -> Sandbox:
    """Return a `Sandbox` for what people bring: a Sandbox itself, or a look-alike.

    Args:
        item: A Sandbox, or an object with `limits` and the coroutine functions `open`, `close`, `run`,
            `write_file` and `read_file`, which take the arguments of those of `Sandbox`.
        also: What else the caller uses, such as "spawn".

    Raises:
        TypeError: If it is none of these. The message names what a look-alike lacks.
    """
    if derives(item, Sandbox):
        return item
    _check(item, [*lacking(item, Sandbox), *also])
    adapter = _adapted.get(id(item))
    if adapter is None:
        adapter = _adapted[id(item)] = DuckSandbox(item)
    return adapter


def ensure_template(item: Any) -> Sandbox:
    """Return a `Sandbox` whose `fresh` works, for tools that open one for each trajectory.

    Raises:
        TypeError: If it is none, or if nothing says how to make another one like it.
    """
    sandbox = ensure_sandbox(item)
    if derives(sandbox, DuckSandbox):
        sandbox.template.check()
    return sandbox


def _check(item: Any, members: Sequence[str]) -> None:
    """Raise TypeError if an object lacks members."""
    if isinstance(item, type):
        raise TypeError(f"{item.__name__} is a class; a sandbox is an object: write {item.__name__}(...)")
    missing = [name for name in members if not hasattr(item, name)]
    if missing:
        raise TypeError(
            f"a sandbox has limits, open, close, run, write_file and read_file; {type(item).__name__} lacks"
            f" {', '.join(missing)}"
        )
