"""The interpreter's side, run inside the sandbox as `python -c <this file> <fd>`.

Needs nothing but Python 3.8.
"""

from __future__ import annotations

import sys

# What the model wrote into its folder must not take the place of the modules that are imported here.
sys.path[:] = [path for path in sys.path if path]

import ast
import json
import linecache
import os
import queue
import signal
import struct
import threading
import traceback
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    Requests = queue.SimpleQueue[dict[str, Any] | None]

MAX_VALUE = 8192
MAX_TRACE = 16384


def main(fd: int) -> None:
    """Run one cell after the other, until the other side closes the connection."""
    pid, busy = os.getpid(), [0]
    requests: Requests = queue.SimpleQueue()
    os.set_inheritable(fd, False)
    streams = [os.dup(number) for number in (1, 2)]
    namespace: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=listen, args=(fd, requests, busy), daemon=True).start()
    sys.path.insert(0, "")
    while True:
        request = requests.get()
        if request is None:
            os._exit(0)
        for number, saved in zip((1, 2), streams):  # noqa: B905  strict= came with 3.10
            os.dup2(saved, number)
        sys.stdout, sys.stderr = stream(1), stream(2)
        reply = cell(namespace, request["code"], request["seq"], busy)
        if os.getpid() != pid:  # the code forked, and this is its child coming back into our loop
            os._exit(0)
        for file in (sys.stdout, sys.stderr):
            try:
                file.flush()
            except Exception:
                pass
        reply["seq"] = request["seq"]
        body = json.dumps(reply).encode("ascii")
        send(fd, struct.pack(">I", len(body)) + body)


def stream(number: int) -> TextIO:
    """Make a text stream on a file descriptor, for the code to print to."""
    return open(number, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)


def listen(fd: int, requests: Requests, busy: list[int]) -> None:
    """Take frames off the connection: code goes to the main thread, interrupts become signals."""
    while True:
        head = receive(fd, 4)
        body = head and receive(fd, struct.unpack(">I", head)[0])
        if not body:
            requests.put(None)
            os._exit(0)
        request = json.loads(body.decode("ascii"))
        if request["op"] == "exec":
            requests.put(request)
        elif request["op"] == "interrupt" and busy[0] == request["seq"]:
            os.kill(os.getpid(), signal.SIGINT)


def receive(fd: int, size: int) -> bytes | None:
    """Read exactly so many bytes; None when the connection has ended."""
    data = bytearray()
    while len(data) < size:
        try:
            piece = os.read(fd, min(size - len(data), 1 << 20))
        except OSError:
            return None
        if not piece:
            return None
        data += piece
    return bytes(data)


def send(fd: int, data: bytes) -> None:
    """Write all of it."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def cell(namespace: dict[str, Any], code: str, seq: int, busy: list[int]) -> dict[str, Any]:
    """Run one cell; an expression in its last line is its value."""
    name = "<cell %d>" % seq
    linecache.cache[name] = (len(code), None, [line + "\n" for line in code.split("\n")], name)
    value = None
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        busy[0] = seq
        try:
            tree = ast.parse(code, name)
            last = None
            if tree.body and isinstance(tree.body[-1], ast.Expr):
                last = ast.Expression(tree.body[-1].value)
                del tree.body[-1]
            exec(compile(tree, name, "exec"), namespace)
            if last is not None:
                found = eval(compile(last, name, "eval"), namespace)
                if found is not None:
                    namespace["_"] = found
                    value = clip(repr(found), MAX_VALUE)
        finally:
            busy[0] = 0
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    except BaseException as error:
        return {"value": None, "error": describe(error)}
    return {"value": value, "error": None}


def describe(error: BaseException) -> dict[str, str]:
    """Say what was raised, with a traceback that begins in the code's own cells."""
    trace = error.__traceback__
    while trace is not None and not trace.tb_frame.f_code.co_filename.startswith("<cell "):
        trace = trace.tb_next
    try:
        text = "".join(traceback.format_exception(type(error), error, trace)).rstrip("\n")
        value = str(error)
    except BaseException:
        text = value = ""
    return {
        "ename": type(error).__name__,
        "evalue": clip(value, MAX_VALUE),
        "traceback": clip(text, MAX_TRACE),
    }


def clip(text: str, limit: int) -> str:
    """Keep head and tail of a long text."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return "%s… [%d characters omitted] …%s" % (text[:half], len(text) - 2 * half, text[-half:])


if __name__ == "__main__":
    main(int(sys.argv[1]))
