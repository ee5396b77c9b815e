"""`ensure_sandbox` and `ensure_template`: adapt objects that behave like a `Sandbox`."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

from torchrl_agentic.errors import derives, lacking
from torchrl_agentic.sandbox.base import Process, Sandbox, SandboxResult
from torchrl_agentic.sandbox.resource_limits import ResourceLimits


class SandboxAdapter(Sandbox):
    """Adapts an object that behaves like a sandbox to `Sandbox`.

    `fresh` calls that of the object, or else makes a deep copy of the object as it was when it was adapted.
    The optional members `is_open`, `limits_enforced`, `isolated`, `spawn` and `python_argv` are used if it
    has them.
    """

    def __init__(self, target: Any) -> None:
        self.target = target
        self.limits = target.limits
        self.isolated = bool(getattr(target, "isolated", False))  # pyright: ignore[reportAttributeAccessIssue]
        self._is_open = False
        self.template = Template(target)

    @property
    def limits_enforced(self) -> Mapping[str, bool]:
        """Return `limits_enforced` of the object; empty if it has none."""
        return getattr(self.target, "limits_enforced", {})

    def fresh(self) -> Sandbox:
        """Return a new, unopened sandbox with the same settings.

        Raises:
            TypeError: If the object has no `fresh` and cannot be copied.
        """
        return ensure_sandbox(self.template.make())

    @property
    def is_open(self) -> bool:
        """Return `is_open` of the object, or else whether `open` was called."""
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
        """Run one command and wait until it ends."""
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
    """Creates objects like a given one: by its `fresh`, or as copies of its initial state.

    Args:
        target: The object.
        shared: Objects that copies refer to instead of copying them, unless `make` is given replacements.
    """

    def __init__(self, target: Any, *shared: Any) -> None:
        self._kind = type(target).__name__
        self._shared = shared
        self._fresh = getattr(target, "fresh", None)
        self._untouched: Any = None
        self.reason = ""
        if not callable(self._fresh):
            if getattr(target, "is_open", False) is True:
                self.reason = "it is already open"
                return
            try:
                self._untouched = copy.deepcopy(target, {id(item): item for item in shared})
            except Exception as error:
                self.reason = f"it cannot be copied ({error})"

    def make(self, *given: Any) -> Any:
        """Return a new object.

        Args:
            given: Replacements of the shared objects, in their order; arguments of `fresh` if the object has
                it.

        Raises:
            TypeError: If the object has no `fresh` and cannot be copied.
        """
        self.check()
        if callable(self._fresh):
            return self._fresh(*given)
        memo = {id(ours): theirs for ours, theirs in zip(self._shared, given or self._shared, strict=True)}
        return copy.deepcopy(self._untouched, memo)

    def check(self) -> None:
        """Check that new objects can be made.

        Raises:
            TypeError: If the object has no `fresh` and cannot be copied.
        """
        if self.reason:
            raise TypeError(
                f"each trajectory needs its own {self._kind}, but this one has no fresh(), and"
                f" {self.reason}:"
                " define fresh(), which returns a new, unopened one with the same settings"
            )


_adapted: WeakValueDictionary[int, SandboxAdapter] = WeakValueDictionary()
"""Adapters by the identity of the object: tools with the same object share its adapter and its files."""


def ensure_sandbox(item: Any, *, also: Sequence[str] = ()) -> Sandbox:
    """Return a `Sandbox` for an object: the object itself, or an adapter.

    Args:
        item: A `Sandbox`, or an object with `limits` and the coroutine functions `open`, `close`, `run`,
            `write_file` and `read_file`, with the same arguments as those of `Sandbox`.
        also: Further members that the caller uses, such as "spawn".

    Raises:
        TypeError: If it is neither. The message names the missing members.
    """
    if derives(item, Sandbox):
        return item
    _check(item, [*lacking(item, Sandbox), *also])
    adapter = _adapted.get(id(item))
    if adapter is None:
        adapter = _adapted[id(item)] = SandboxAdapter(item)
    return adapter


def ensure_template(item: Any) -> Sandbox:
    """Return a `Sandbox` whose `fresh` works, for tools that open a sandbox for each trajectory.

    Raises:
        TypeError: If `item` is not a sandbox, or if no new one can be made from it.
    """
    sandbox = ensure_sandbox(item)
    if derives(sandbox, SandboxAdapter):
        sandbox.template.check()
    return sandbox


def _check(item: Any, members: Sequence[str]) -> None:
    """Raise TypeError if an object lacks members."""
    if isinstance(item, type):
        raise TypeError(f"expected a sandbox, got the class {item.__name__}: write {item.__name__}(...)")
    missing = [name for name in members if not hasattr(item, name)]
    if missing:
        raise TypeError(
            f"a sandbox has limits, open, close, run, write_file and read_file; {type(item).__name__} lacks"
            f" {', '.join(missing)}"
        )
