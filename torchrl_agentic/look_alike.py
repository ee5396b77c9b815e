"""`Interface`, the metaclass of base classes that objects of other classes may stand in for."""

from __future__ import annotations

from abc import ABCMeta
from typing import Any, TypeGuard, TypeVar

T = TypeVar("T")


class Interface(ABCMeta):
    """The class of base classes whose `isinstance` accepts look-alikes: other objects with the same members.

    `class Tool(metaclass=Interface, members=("name", "run"))` lists the members that make a look-alike
    complete. Where the class defines a member as a method, the object's must be callable. Subclasses list
    none, so their `isinstance` is the ordinary one. Members are looked up on the object, because it may set
    them in `__init__`.

    Code that calls more than the members adapts a look-alike first; `derives` tells the two apart.
    """

    _members: tuple[str, ...]

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
        """Create a class and keep which members its look-alikes have."""
        made = super().__new__(mcs, name, bases, namespace, **options)
        made._members = members
        return made

    def __instancecheck__(cls, instance: Any) -> bool:
        """Return True for derived objects and for complete look-alikes."""
        return super().__instancecheck__(instance) or (bool(cls._members) and not lacking(instance, cls))


def lacking(item: Any, interface: Interface) -> list[str]:
    """Return the members of an interface that an object does not have; a class has none of them."""
    if isinstance(item, type):
        return list(interface._members)
    return [name for name in interface._members if not _has(item, name, getattr(interface, name, None))]


def _has(item: Any, name: str, ours: Any) -> bool:
    if isinstance(ours, str):
        return isinstance(getattr(item, name, None), str)
    return callable(getattr(item, name, None)) if callable(ours) else hasattr(item, name)


def derives(item: Any, kind: type[T]) -> TypeGuard[T]:
    """Return True if the class of `item` derives from `kind`; a look-alike does not."""
    return kind in type(item).__mro__
