"""Program that runs inside sandboxes: a solution in one process, its tests in another one.

Test code that shares an interpreter with hostile code proves nothing: the code can print what success
prints, exit early, or replace what the tests use. Hence the tests run in another sandbox, and call the
solution through messages. What comes back is plain data, or a reference whose comparisons and truth the
solution cannot decide.

`CodeScorer` writes this file into both sandboxes, starts `python3 code_bridge.py solution FILE` in one and
`python3 code_bridge.py tests FILE` in the other, and passes their messages on: one JSON value per line.
"""

from __future__ import annotations

import builtins
import json
import operator
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, BinaryIO

PLAIN: tuple[Any, ...] = (bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict)
MUTABLE = (list, dict, set, bytearray)
PREDICATES = frozenset(
    name for kind in PLAIN for name in dir(kind) if name.startswith(("is", "starts", "ends"))
)
"""Methods of plain data that decide, such as `startswith` and `issubset`."""
MAX_WHY = 500
"""Characters of an error message that are kept."""


class Channel:
    """Messages over the standard streams, which other code then finds replaced."""

    def __init__(self) -> None:
        self._reading: BinaryIO = os.fdopen(os.dup(0), "rb")
        self._writing: BinaryIO = os.fdopen(os.dup(1), "wb")
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)

    def send(self, message: Mapping[str, Any]) -> None:
        """Write a message."""
        self._writing.write(json.dumps(message).encode() + b"\n")
        self._writing.flush()

    def receive(self) -> dict[str, Any]:
        """Wait for a message; raise EOFError at the end."""
        line = self._reading.readline()
        if not line.endswith(b"\n"):
            raise EOFError("the other side has ended")
        return json.loads(line)


def encode(value: Any, refer: Callable[[Any], Any]) -> Any:
    """Return a value in the form of messages.

    Args:
        value: The value.
        refer: Called with objects that are no plain data; returns their reference.
    """
    if value is None or type(value) in (bool, str):
        return value
    if type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, "tolist"):
        value = value.tolist()
    kind: Any = next((one for one in PLAIN if isinstance(value, one)), None)
    if kind is None:
        return ["ref", refer(value)]
    if kind in (bool, str):
        return kind(value)
    if kind is int:
        return ["int", hex(int(value))]
    if kind is float:
        return ["float", float.hex(float(value))]
    if kind is complex:
        return ["complex", float.hex(value.real), float.hex(value.imag)]
    if kind in (bytes, bytearray):
        return [kind.__name__, bytes(value).hex()]
    name: str = kind.__name__
    if name == "dict":
        return [name, [[encode(key, refer), encode(item, refer)] for key, item in kind.items(value)]]
    return [name, [encode(item, refer) for item in kind.__iter__(value)]]


def decode(value: Any, resolve: Callable[[Any], Any]) -> Any:
    """Return the value of a message.

    Args:
        value: Its form in a message.
        resolve: Called with references; returns their object.
    """
    if value is None or isinstance(value, bool | str):
        return value
    kind, *content = value
    first = content[0]
    if kind == "ref":
        return resolve(first)
    if kind == "int":
        return int(first, 16)
    if kind == "float":
        return float.fromhex(first)
    if kind == "complex":
        return complex(float.fromhex(first), float.fromhex(content[1]))
    if kind in ("bytes", "bytearray"):
        return {"bytes": bytes, "bytearray": bytearray}[kind].fromhex(first)
    if kind == "dict":
        return {decode(key, resolve): decode(item, resolve) for key, item in first}
    kinds: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
    return kinds[kind](decode(item, resolve) for item in first)


def serve_solution(file: str, channel: Channel) -> None:
    """Load the solution, and do what the tests ask for.

    Args:
        file: Path of the solution.
        channel: Messages from and to the tests.
    """
    objects: list[Any] = []
    numbers: dict[int, int] = {}

    def refer(value: Any) -> int:
        if id(value) not in numbers:
            numbers[id(value)] = len(objects)
            objects.append(value)
        return numbers[id(value)]

    def answer(message: Mapping[str, Any]) -> dict[str, Any]:
        target = objects[message["target"]]
        args = [decode(one, objects.__getitem__) for one in message["args"]]
        kwargs = {name: decode(one, objects.__getitem__) for name, one in message["kwargs"].items()}
        do: dict[str, Callable[..., Any]] = {
            "call": target,
            "get": partial(getattr, target),
            "set": partial(setattr, target),
            "iter": partial(iter, target),
            "next": partial(next, target),
            "len": partial(len, target),
            "item": partial(operator.getitem, target),
            "set_item": partial(operator.setitem, target),
            "str": partial(str, target),
        }
        value = do[message["do"]](*args, **kwargs)
        changed = {str(n): encode(one, refer) for n, one in enumerate(args) if isinstance(one, MUTABLE)}
        return {"value": encode(value, refer), "changed": changed}

    names: dict[str, Any] = {"__name__": "solution"}
    try:
        with open(file, encoding="utf-8") as source:
            exec(compile(source.read(), "solution.py", "exec"), names)
        shown = {str(name): one for name, one in names.items() if not isinstance(one, types.ModuleType)}
        channel.send(
            {"names": [[name, encode(one, refer)] for name, one in shown.items() if name[:2] != "__"]}
        )
    except BaseException as error:
        channel.send({"raised": type(error).__name__, "why": str(error)[:MAX_WHY]})
        return
    while True:
        message = channel.receive()
        try:
            channel.send(answer(message))
        except BaseException as error:
            kind = next((one.__name__ for one in type(error).__mro__ if hasattr(builtins, one.__name__)), "")
            channel.send({"raised": kind, "why": str(error)[:MAX_WHY]})


def run_tests(file: str, channel: Channel) -> None:
    """Run the tests, and send the verdict.

    Args:
        file: Path of the tests.
        channel: Messages to and from the solution.
    """

    def resolve(number: Any) -> Remote:
        return Remote(number, ask)

    def ask(do: str, number: int, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        def refer(value: Any) -> Any:
            if not isinstance(value, Remote):
                raise TypeError(f"a solution takes plain data; got {type(value).__name__}")
            return object.__getattribute__(value, "_number")

        sent = {name: encode(one, refer) for name, one in (kwargs or {}).items()}
        channel.send(
            {"do": do, "target": number, "args": [encode(one, refer) for one in args], "kwargs": sent}
        )
        message = channel.receive()
        if "raised" in message:
            raise _exception(str(message["raised"]), str(message["why"]), is_next=do == "next")
        value = decode(message["value"], resolve)
        if value is None:  # by convention, a function that changes its arguments returns None
            for place, new in message["changed"].items():
                _change(args[int(place)], decode(new, resolve))
        return value

    why = ""
    try:
        message = channel.receive()
        if "raised" in message:
            raise RuntimeError(f"the solution raises {message['raised']}: {message['why']}")
        # A solution must not replace `len` or `__builtins__` in its tests.
        names: dict[str, Any] = {
            name: decode(value, resolve)
            for name, value in message["names"]
            if name not in vars(builtins) and not name.startswith("__")
        }
        names["__name__"] = "tests"
        with open(file, encoding="utf-8") as source:
            exec(compile(source.read(), "tests.py", "exec"), names)
    except BaseException as error:
        why = f"{type(error).__name__}: {error}"[:MAX_WHY]
        channel.send({"verdict": False, "why": why})
    else:
        channel.send({"verdict": True, "why": ""})
    os._exit(0)


def _exception(kind: str, why: str, *, is_next: bool) -> Exception:
    """Return an exception of the solution.

    A StopIteration that leaves a function would end a `map` of the tests early, as if they had passed.
    """
    found = getattr(builtins, kind, RuntimeError)
    if not (isinstance(found, type) and issubclass(found, Exception)):
        return RuntimeError(f"{kind}: {why}")
    if issubclass(found, StopIteration | StopAsyncIteration):
        return found() if is_next else RuntimeError(f"{kind}: {why}")
    try:
        return found(why)
    except TypeError:  # such as UnicodeDecodeError, which takes several arguments
        return RuntimeError(f"{kind}: {why}")


def _change(mine: Any, new: Any) -> None:
    """Make the changes to an argument that the solution made to its copy."""
    name: str = type(mine).__name__
    if type(mine) is not type(new) or mine == new:
        return
    if name in ("list", "bytearray"):
        mine[:] = new
    elif name in ("dict", "set"):
        mine.clear()
        mine.update(new)


class Remote:
    """An object of the solution. Nothing that it says decides a comparison or a condition.

    Args:
        number: Number by which the solution knows it.
        ask: Sends a request about it and returns the answer.
    """

    __slots__ = ("_ask", "_number")

    def __init__(self, number: Any, ask: Callable[..., Any]) -> None:
        object.__setattr__(self, "_number", int(number))
        object.__setattr__(self, "_ask", ask)

    def _do(self, do: str, *args: Any, **kwargs: Any) -> Any:
        ask = object.__getattribute__(self, "_ask")
        return ask(do, object.__getattribute__(self, "_number"), args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the object with plain data and other objects of the solution."""
        return self._do("call", *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols such as __array_interface__ would read memory of the tests
            raise AttributeError(name)
        if name in PREDICATES:  # otherwise an object could stand for any text
            raise TypeError(f"{name} is a method of plain data, but this is an object of the solution")
        return self._do("get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._do("set", name, value)

    def __iter__(self) -> Iterator[Any]:
        found = self._do("iter")
        return found if isinstance(found, Remote) else iter(found)

    def __next__(self) -> Any:
        return self._do("next")

    def __len__(self) -> int:
        return self._do("len")

    def __getitem__(self, key: Any) -> Any:
        return self._do("item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._do("set_item", key, value)

    def __str__(self) -> str:
        return str(self._do("str"))

    def __repr__(self) -> str:
        return "<an object of the solution>"

    def __eq__(self, other: object) -> bool:
        mine = object.__getattribute__(self, "_number")
        return isinstance(other, Remote) and object.__getattribute__(other, "_number") == mine

    def __hash__(self) -> int:
        return hash(object.__getattribute__(self, "_number"))

    def __bool__(self) -> bool:
        raise TypeError("an object of the solution is neither true nor false: compare plain data")


if __name__ == "__main__":
    {"solution": serve_solution, "tests": run_tests}[sys.argv[1]](sys.argv[2], Channel())
