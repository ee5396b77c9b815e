"""`ValueStack`: a lazy stack of plain immutable values, whose TensorDicts are made on demand.

TorchRL copies, selects and moves the entries of a batch several times per step. In a lazy stack each of these
visits every item. A `ValueStack` is a lazy stack as far as TorchRL can see, but it holds a tuple of values:
to copy it is to copy a reference, whatever its length.

The class overrides methods of tensordict, private ones among them. `test/transforms/test_consumers.py` checks
what TorchRL does with them, against the version of tensordict that is installed.
"""

# TensorDict and TorchRL have no types to check against. This module replaces private methods of tensordict.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportPrivateUsage=false, reportUnknownLambdaType=false
# pyright: reportIncompatibleVariableOverride=false

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Protocol, Self, TypeVar, cast

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_tensorclass

_KEEP: Any = object()


class Item(Protocol):
    """An item of a `ValueStack`: an immutable value."""

    def keep(self, names: Callable[[str], bool]) -> Self:
        """Return an item with some of the keys.

        Args:
            names: Called with a key; returns whether it stays.
        """
        ...


T = TypeVar("T", bound=Item)


def _writer(name: str) -> Any:
    """Return the method of a `ValueStack` that writes as the method of a lazy stack does."""

    def write(self: ValueStack[Any], *args: Any, **kwargs: Any) -> Any:
        return self._write(name, *args, **kwargs)

    return write


class ValueStack(LazyStackedTensorDict, Generic[T]):
    """A lazy stack of one dimension, [N], around a tuple of immutable values.

    No operation that copies, selects, locks or names it touches the values. Operations that write replace the
    tuple of this object, and no copy of it changes.

    Args:
        *items: TensorDicts that TorchRL made, of batch size [].
        device: Device of the stack if there are no items.
    """

    _values: tuple[T, ...]
    _made: list[TensorDictBase] | None
    _keys: tuple[frozenset[str], frozenset[str]] | None

    def __new__(cls, *items: TensorDictBase, stack_dim: int = 0, **options: Any) -> Any:
        """Return a stack of values if the items are of batch size []; otherwise an ordinary stack of them."""
        if stack_dim not in (0, -1) or any(item.batch_dims for item in items):
            return LazyStackedTensorDict(*items, stack_dim=stack_dim, **options)
        return super().__new__(cls)

    def __init__(self, *items: TensorDictBase, device: Any = None, **_: Any) -> None:
        self._assign(tuple(map(self._read_item, items)), items[0].device if items else device)

    @staticmethod
    def _read_item(item: Any) -> Any:
        """Return the value of an item that TorchRL made, a TensorDict or TensorClass of batch size []."""
        raise NotImplementedError

    @staticmethod
    def _keys_of(value: Any) -> frozenset[str]:
        """Return the keys of the TensorDict of a value."""
        raise NotImplementedError

    @staticmethod
    def _shown(value: Any, device: torch.device | None, *, lock: bool = True) -> TensorDictBase:
        """Return a value as TorchRL reads it, of batch size []; a locked one may be shared between stacks."""
        raise NotImplementedError

    @classmethod
    def around(cls, values: Iterable[T], device: torch.device | None = None) -> Self:
        """Return a stack of values.

        Args:
            values: The values.
            device: Device of the TensorDicts of the items.
        """
        made = TensorDictBase.__new__(cls)
        made._assign(tuple(values), device)
        return made

    @classmethod
    def from_tensordict(cls, td: TensorDictBase) -> Self:
        """Return a lazy stack as a stack of values; often it is one already.

        Args:
            td: The stack, [N].

        Raises:
            RuntimeError: If TorchRL's public `step_mdp` has split it.
        """
        return td if type(td) is cls else cls.around(map(cls._read_item, items_of(td)), td.device)

    @property
    def values_held(self) -> tuple[T, ...]:
        """The values, [N]."""
        return self._values

    def __len__(self) -> int:
        return len(self._values)

    @classmethod
    def _new_lazy_unsafe(cls, *items: Any, **options: Any) -> Any:
        return LazyStackedTensorDict._new_lazy_unsafe(*items, **options)

    def _assign(self, values: tuple[T, ...], device: torch.device | None) -> None:
        self.__dict__.update(
            _values=values,
            _made=None,
            _keys=None,
            stack_dim=0,
            hook_in=None,
            hook_out=None,
            _is_locked=None,
            _device=device,
            _batch_size=torch.Size((len(values),)),
        )

    def _copy(self, device: Any = _KEEP) -> Self:
        made = TensorDictBase.__new__(type(self))
        made.__dict__.update(self.__dict__)
        made.__dict__.update(_is_locked=None, _cache=None)
        if device is not _KEEP:
            made.__dict__.update(_device=device, _made=None)
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {"values": self._values, "device": self._device}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._assign(state["values"], state["device"])
        self.__dict__.update(_cache=None, _last_op=None)

    # What TorchRL reads.

    @property
    def tensordicts(self) -> list[TensorDictBase]:
        """TensorDicts of the items, locked; made when they are first read."""
        made = self._made
        if made is None:
            made = self.__dict__["_made"] = [self._shown(one, self._device) for one in self._values]
        return made

    @tensordicts.setter
    def tensordicts(self, items: Sequence[TensorDictBase]) -> None:
        self._assign(tuple(map(self._read_item, items)), self._device)

    def _known_keys(self) -> tuple[frozenset[str], frozenset[str]]:
        """Return the keys that all items have, and those that some item has."""
        if self._keys is None:
            kinds: set[frozenset[str]] = {self._keys_of(one) for one in self._values} or {frozenset()}
            self.__dict__["_keys"] = frozenset[str].intersection(*kinds), frozenset[str].union(*kinds)
        return cast("Any", self._keys)

    def _key_list(self) -> list[str]:
        return sorted(self._known_keys()[0])

    @property
    def _has_exclusive_keys(self) -> bool:
        every, some = self._known_keys()
        return every != some

    @property
    def device(self) -> torch.device | None:
        """Device of the TensorDicts of the items."""
        return self._device

    @device.setter
    def device(self, value: Any) -> None:
        self.__dict__.update(_device=None if value is None else torch.device(value), _made=None)

    def clear_device_(self) -> Self:
        """Forget the device."""
        self.device = None
        return self

    @property
    def names(self) -> list[str | None]:
        """Name of the dimension."""
        return [self._td_dim_name]

    @names.setter
    def names(self, value: Sequence[str | None] | None) -> None:
        self._set_names(value)

    def _set_names(self, names: Sequence[str | None] | None) -> None:
        self._td_dim_name = names[0] if names else None

    def _erase_names(self) -> None:
        self._td_dim_name = None

    def _has_names(self) -> bool:
        return self._td_dim_name is not None

    def _check_dim_name(self, name: str | None) -> bool:
        return name is not None and name == self._td_dim_name

    @property
    def is_locked(self) -> bool:
        """True if this object is locked; its items always are."""
        return bool(self._is_locked)

    @is_locked.setter
    def is_locked(self, value: bool) -> None:
        if value:
            self.lock_()
        else:
            self.unlock_()

    _lock_parents_weakrefs: Any = TensorDictBase._lock_parents_weakrefs

    def _propagate_lock(self, lock_parents_weakrefs: Any = None, *, is_compiling: bool) -> None:
        self._is_locked = True
        if lock_parents_weakrefs is not None:
            self._lock_parents_weakrefs = self._lock_parents_weakrefs + lock_parents_weakrefs

    def _propagate_unlock(self) -> list[Any]:
        self._is_locked: Any = None
        return []

    def is_shared(self) -> bool:
        """Return False: the values are not in shared memory."""
        return False

    def is_memmap(self) -> bool:
        """Return False: the values are not mapped."""
        return False

    _is_shared: Any = False
    _is_memmap: Any = False

    def share_memory_(self) -> Self:
        """Return the stack: its values travel by pickling."""
        return self

    # What copies it.

    def _clone(self, recurse: bool = True) -> Any:
        return super()._clone() if recurse else self._copy()

    def _select(
        self, *keys: Any, inplace: bool = False, strict: bool = False, set_shared: bool = True
    ) -> Any:
        names = {key if isinstance(key, str) else key[0] for key in keys}
        if strict and (missing := names - self._known_keys()[0]):
            raise KeyError(f"not all items have {sorted(missing)}")
        return self._keep(lambda key: key in names, inplace=inplace)

    def _exclude(self, *keys: Any, inplace: bool = False, set_shared: bool = True) -> Any:
        names = {key if isinstance(key, str) else key[0] for key in keys}
        return self._keep(lambda key: key not in names, inplace=inplace)

    def _keep(self, names: Callable[[str], bool], *, inplace: bool) -> Any:
        if all(map(names, self._known_keys()[1])):
            return self if inplace else self._copy()
        kept = tuple(one.keep(names) for one in self._values)
        if not inplace:
            return self.around(kept, self._device)
        self._assign(kept, self._device)
        return self

    # What writes to it: this object gets other values.

    def _thawed(self) -> LazyStackedTensorDict:
        """Return an ordinary stack of TensorDicts that nobody else has."""
        items = [self._shown(one, self._device, lock=False) for one in self._values]
        return LazyStackedTensorDict(*items, stack_dim=0)

    def _write(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if self.is_locked:
            raise RuntimeError("Cannot modify locked TensorDict.")
        stack = self._thawed()
        found = getattr(stack, name)(*args, **kwargs)
        self.tensordicts = stack.tensordicts
        return self if found is stack or found is None else found

    _set_str: Any = _writer("_set_str")
    _set_tuple: Any = _writer("_set_tuple")
    _set_at_str: Any = _writer("_set_at_str")
    _set_at_tuple: Any = _writer("_set_at_tuple")
    __setitem__: Any = _writer("__setitem__")
    insert: Any = _writer("insert")
    append: Any = _writer("append")
    del_: Any = _writer("del_")
    pop: Any = _writer("pop")
    update_: Any = _writer("update_")

    def update(self, other: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Take over the values of another stack; a dict writes entries as in a lazy stack.

        Args:
            other: The other stack, or a TensorClass around one, or a dict of entries.
            *args: As `TensorDictBase.update` takes them.
            **kwargs: As `TensorDictBase.update` takes them.
        """
        held = unwrapped(other)
        if self.is_locked and not kwargs.get("ignore_lock"):
            raise RuntimeError("Cannot modify locked TensorDict.")
        if is_flat_stack(held) and kwargs.get("keys_to_update") is None:
            self._assign(self._updated(self.from_tensordict(held).values_held), self._device)
            return self
        return self._write("update", held, *args, **kwargs)

    def _updated(self, values: tuple[T, ...]) -> tuple[T, ...]:
        """Return the values after an update by those of another stack."""
        return values

    def _memmap_(self, **options: Any) -> Any:
        return self._thawed()._memmap_(**options)


def is_flat_stack(td: Any) -> bool:
    """Return True for a lazy stack of one dimension."""
    return isinstance(td, LazyStackedTensorDict) and td.batch_dims == 1


def items_of(td: TensorDictBase) -> Sequence[TensorDictBase]:
    """Return the items of a stack along its first dimension.

    Args:
        td: The stack.

    Raises:
        RuntimeError: If TorchRL's public `step_mdp` has split it.
    """
    if isinstance(td, LazyStackedTensorDict) and td.stack_dim == 0:
        return td.tensordicts
    try:
        return td.unbind(0)
    except AttributeError as error:
        raise RuntimeError(
            "this history is not a stack of messages any more: torchrl.envs.utils.step_mdp splits ragged "
            "histories. Use env.step_mdp(td), or let a rollout or a collector do it"
        ) from error


def unwrapped(value: Any) -> Any:
    """Return the TensorDict behind a TensorClass; other objects as they are."""
    return value._tensordict if is_tensorclass(value) else value


def flattened(td: TensorDictBase, dims: int) -> list[Any]:
    """Return the items of a stack along its first dimensions, in one list.

    Args:
        td: The stack, [*B, ...].
        dims: Number of dimensions.
    """
    level: list[Any] = [td]
    for _ in range(dims):
        level = [below for item in level for below in items_of(item)]
    return level


def nested(rows: Sequence[Any], shape: Sequence[int], stack: Callable[..., Any]) -> Any:
    """Return a stack of a batch: rows in the last dimension, ordinary lazy stacks around them.

    Args:
        rows: Rows of the flattened batch.
        shape: Batch size.
        stack: Called with the list of rows of the last dimension; returns their stack.
    """
    if len(shape) == 1:
        return stack(rows)
    size = len(rows) // shape[0]
    parts = [nested(rows[i * size : (i + 1) * size], shape[1:], stack) for i in range(shape[0])]
    return LazyStackedTensorDict(*parts, stack_dim=0)
