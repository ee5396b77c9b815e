"""Exceptions, the checks of public arguments that raise them, and names that packages load on first use."""

from __future__ import annotations

import importlib
import math
import pkgutil
import re
import sys
from abc import ABCMeta
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, TypeGuard, TypeVar

T = TypeVar("T")

LARGEST_REWARD = 3.4028234663852886e38
"""The largest number of float32, the type of rewards in batches."""


_EXPORTED = re.compile(r"^from (\S+) import (\w+) as \2$", re.MULTILINE)


class ToolError(Exception):
    """Error of a tool that the model can correct, such as a query without matches.

    The call gets a result with the status ERROR, and the model reads the message.

    Args:
        message: Text for the model: what was wrong, and what would work.
        detail: Data for programs, which becomes the `meta` of the result. The model does not see it.

    Attributes:
        message: The text for the model.
        detail: The data for programs; empty if there is none.
    """

    def __init__(self, message: str, detail: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.detail: dict[str, Any] = dict(detail or {})


class UnreadableResult(TypeError):
    """A tool has run, but what it returned cannot become a `ToolResult`."""


class StopSignal(Exception):
    """Request of a tool to end its trajectory; the message is the reason.

    The call counts as answered, and the flags `stop_requested`, `done` and `terminated` of its row are set.
    """


class InfrastructureError(RuntimeError):
    """Failure that the model did not cause: a lost sandbox, an overloaded service.

    A call that raises it gets a result with the status INFRA, which a reward can leave out.
    """


class SandboxError(InfrastructureError):
    """A sandbox cannot be started on this machine, or was lost.

    A command that fails inside a working sandbox raises nothing; its result has an exit code.
    """


class FilesNotCopied(ToolError):
    """Files that code has left in a sandbox cannot be copied: too many, moved meanwhile, or without rights.

    The code has caused it, so this is not an `InfrastructureError`: a model must not learn to have its
    trajectory replaced. A collector goes on without the fork.
    """


class PathNotGranted(ToolError, PermissionError):
    """A path lies neither below /work nor below a folder that the limits of the sandbox grant.

    The caller has chosen the path, usually the model, so this is not an `InfrastructureError`.
    """


class ToolFailed(InfrastructureError):
    """A trajectory cannot begin or go on because a tool failed outside of its calls.

    Examples are a world that does not open and an initial message that raises. A failed call is no failure of
    the trajectory; it gets a result. The collector counts this failure under "tool".
    """


class UserFailed(InfrastructureError):
    """A simulated user raised, which is the cause, or returned no reply or no score.

    The collector counts this failure under "user".
    """


class ContextExceeded(ValueError):
    """A conversation is longer than the model takes; raised by `ChatEngine.chat`, it ends a trajectory."""


class RewardError(RuntimeError):
    """A trajectory has no reward: a function or a tool that gives one raised, or it is not finite."""


class InvalidTask(Exception):
    """Statement of a reward function, a tool's `final_reward` or a simulated user that a task cannot be used.

    Raise it for a task without a right answer, or whose tests do not pass with the reference solution. The
    collector counts the failure under "task" and drops the group at once, whatever `on_failure` says, unless
    it says "raise". Another attempt would meet the same task.

    The message says what is wrong with the task::

        if not task.answer:
            raise InvalidTask(f"task {task.name} has no answer")
    """


class SchemaValidationError(ValueError):
    """Arguments do not fit a schema; the message names the argument, its value and what is expected."""


class MissingExtra(ImportError):
    """An optional dependency is not installed; the message names the pip command that installs it.

    Args:
        what: The feature that needs the package, as the subject of a sentence.
        package: Name of the missing package.
        extra: The extra of torchrl-agentic that installs it.
    """

    def __init__(self, what: str, package: str, extra: str) -> None:
        super().__init__(f"{what} needs the {package!r} package: pip install 'torchrl-agentic[{extra}]'")


class ConfigError(ValueError):
    """A mistake in a configuration; the message begins with `file:line`."""


def check_seconds(name: str, value: Any, *, none: str = "no bound") -> None:
    """Check that a public argument is a number of seconds above 0, or None.

    Args:
        name: Name of the argument.
        value: Value of the argument.
        none: Meaning of None, for the message.

    Raises:
        TypeError: If `value` is not a number.
        ValueError: If `value` is 0, negative or NaN.
    """
    check_above_zero(name, value, " seconds", none=none)


def check_above_zero(name: str, value: Any, unit: str = "", *, none: str = "no limit") -> None:
    """Check that a public argument is a number above 0, or None.

    Args:
        name: Name of the argument.
        value: Value of the argument.
        unit: Unit of the number, for the message, with a space before it.
        none: Meaning of None, for the message.

    Raises:
        TypeError: If `value` is not a number.
        ValueError: If `value` is 0, negative or NaN.
    """
    if value is None:
        return
    if not _is_number(value):
        raise TypeError(f"{name} is a number above 0{unit}, or None for {none}; got {_described(value)}")
    if not value > 0:  # refuses NaN too, for which every comparison is false
        raise ValueError(f"{name} must be above 0{unit}, or None for {none}; got {value}")


def check_count(name: str, value: Any, *, optional: bool = True, least: int = 1) -> None:
    """Check that a public argument is a whole number of 1 or more, or of `least` or more.

    Args:
        name: Name of the argument.
        value: Value of the argument. A float without a fraction is accepted.
        optional: Whether None is accepted.
        least: Smallest number that is accepted.

    Raises:
        TypeError: If `value` is not a number.
        ValueError: If `value` is below `least`, infinite or not whole.
    """
    if optional and value is None:
        return
    or_none = ", or None for no limit" if optional else ""
    if not _is_number(value):
        raise TypeError(f"{name} is a whole number of {least} or more{or_none}; got {_described(value)}")
    if not (least <= value < math.inf and value % 1 == 0):
        raise ValueError(f"{name} must be {least} or more, and whole{or_none}; got {value}")


def check_posix(what: str) -> None:
    """Check that this is a POSIX system, before a feature is used that needs one.

    Args:
        what: The feature, as the subject of a sentence.

    Raises:
        NotImplementedError: On Windows.
    """
    if sys.platform == "win32":
        raise NotImplementedError(
            f"{what} does not work on Windows: use Linux, for example in WSL 2 or a container, or macOS"
        )


def check_reward(name: str, value: float) -> None:
    """Check that a reward fits the float32 columns of a batch, where a larger one would be infinite.

    Args:
        name: What the number is, for the message.
        value: The number.

    Raises:
        ValueError: If `value` is NaN, infinite, or larger than float32 can hold.
    """
    if not abs(value) <= LARGEST_REWARD:  # refuses NaN too
        raise ValueError(
            f"{name} must be finite and at most {LARGEST_REWARD:.5g} in size, because batches hold float32; "
            f"got {value}"
        )


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real)


def _described(value: Any) -> str:
    return f"{value!r} ({type(value).__name__})"


class Interface(ABCMeta):
    """Metaclass of base classes whose `isinstance` accepts look-alikes: other objects with the same members.

    `class Tool(metaclass=Interface, members=("name", "run"))` lists the members that an object needs to pass
    for a Tool. A member that the class defines as a method must be callable, and one that it defines as a
    string must be a string. Subclasses list no members, so their `isinstance` is the usual one. Members are
    looked up on the object, because it may set them in `__init__`.

    Code that needs more than these members adapts a look-alike first; `derives` tells the two apart.
    """

    __interface_members__: tuple[str, ...]

    def __new__(
        mcs,
        name: str,
        bases: tuple[type, ...],
        namespace: dict[str, Any],
        /,
        *,
        members: tuple[str, ...] = (),
        **options: Any,
    ) -> Interface:
        """Create a class.

        Args:
            mcs: The metaclass.
            name: Name of the class.
            bases: Its base classes.
            namespace: Its attributes.
            members: Members that an object needs to be an instance; none for subclasses.
            options: Other keywords of the class statement.
        """
        made = super().__new__(mcs, name, bases, namespace, **options)
        made.__interface_members__ = members
        return made

    def __instancecheck__(cls, instance: Any) -> bool:
        """Return True for derived objects and for complete look-alikes."""
        if super().__instancecheck__(instance):
            return True
        return bool(cls.__interface_members__) and not lacking(instance, cls)


def lacking(item: Any, interface: Interface) -> list[str]:
    """Return the members of an interface that an object lacks.

    Args:
        item: The object. A class lacks all members, because only its instances could have them.
        interface: The base class that lists the members.
    """
    members = interface.__interface_members__
    if isinstance(item, type):
        return list(members)
    return [name for name in members if not _has(item, name, getattr(interface, name, None))]


def _has(item: Any, name: str, ours: Any) -> bool:
    if isinstance(ours, str):
        return isinstance(getattr(item, name, None), str)
    return callable(getattr(item, name, None)) if callable(ours) else hasattr(item, name)


def derives(item: Any, kind: type[T]) -> TypeGuard[T]:
    """Return True if the class of an object is a subclass of `kind`, and False for a look-alike.

    Args:
        item: The object.
        kind: The base class.
    """
    return kind in type(item).__mro__


def load_lazily(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return the `__getattr__`, `__dir__` and `__all__` of a package that loads its names on first use.

    The names are those of its stub `__init__.pyi`, which type checkers read too. Each has a line of its own:
    `from torchrl_agentic.tools.base import Tool as Tool`.

    Args:
        package: Name of the package.
    """
    module = sys.modules[package]
    stub = (pkgutil.get_data(package, "__init__.pyi") or b"").decode()
    defined_in = {name: source for source, name in _EXPORTED.findall(stub)}

    def load(name: str) -> Any:
        if name not in defined_in:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=module)
        value = getattr(importlib.import_module(defined_in[name]), name)
        setattr(module, name, value)
        return value

    for name, source in defined_in.items():
        if source == f"{package}.{name}":  # the import system sets the module of this name, but only once
            load(name)
    return load, lambda: [*vars(module), *defined_in], list(defined_in)
