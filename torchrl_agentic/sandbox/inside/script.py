"""Runs a file as `python3 main.py` would, in a running interpreter, which ends with it.

A fork server imports this module once. A cell calls it, in an interpreter that has run nothing else.

Differences to a fresh Python: libraries are loaded; a script whose time is over still writes its buffered
output; a script that closes files that it has not opened, through which it is supervised, is ended soon
after.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import io
import linecache
import os
import resource
import signal
import sys
import time
import traceback
import types
from typing import Any, NoReturn, TextIO

EARLY_S = 0.05
"""Seconds that the time of a script may be over early: it began when the request arrived."""
_OUR_FAULT, _CANNOT_WRITE = 70, 120
_CALLS_IN_C = 3
"""Number of calls of `exec` and `eval` above a script, which count against its recursion limit."""
_CONTROL, _OUT_OF_THE_WAY = 3, 100
_PACKAGE = "torchrl_agentic.sandbox.inside"


def run_script(path: str, stdin: str | None, timeout_s: float, memory_bytes: int | None) -> NoReturn:
    """Run a file, and exit with its exit code.

    Args:
        path: Path of the file.
        stdin: A file that is removed once it is open; None for empty input.
        timeout_s: Maximum seconds.
        memory_bytes: Bytes that it may map besides those that are mapped now; None for no limit.
    """
    try:
        until = time.monotonic() + timeout_s - EARLY_S
        _take_over(stdin)
        if memory_bytes is not None:
            _limit_memory(memory_bytes)
        signal.signal(signal.SIGINT, lambda number, frame: _interrupted(number, frame, until))
        main = _main_module(path)
        _finish(main, _execute(path, main))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(_OUR_FAULT)


def _take_over(stdin: str | None) -> None:
    """Replace the standard streams, and close everything else but the connection to the supervisor."""
    reading = os.open(stdin or os.devnull, os.O_RDONLY)
    os.dup2(reading, 0)
    if stdin:
        os.unlink(stdin)
    control = fcntl.fcntl(_CONTROL, fcntl.F_DUPFD_CLOEXEC, _OUT_OF_THE_WAY)
    os.closerange(3, control)
    sys.stdin = sys.__stdin__ = _stream(0, "r", "<stdin>", "surrogateescape")
    sys.stdout = sys.__stdout__ = _stream(1, "w", "<stdout>", "surrogateescape")
    sys.stderr = sys.__stderr__ = _stream(2, "w", "<stderr>", "backslashreplace")


def _interrupted(number: int, frame: types.FrameType | None, until: float) -> None:
    """Raise KeyboardInterrupt; if the time is over, flush the output and exit."""
    if time.monotonic() < until:
        signal.default_int_handler(number, frame)
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def _limit_memory(more: int) -> None:
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = mapped + more if most == resource.RLIM_INFINITY else min(mapped + more, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _stream(number: int, mode: str, name: str, errors: str) -> TextIO:
    """Return a standard stream as Python makes it without a terminal, in the locale C.UTF-8."""
    raw: Any = io.FileIO(number, mode, closefd=False)
    raw.name = name
    buffer = io.BufferedReader(raw) if mode == "r" else io.BufferedWriter(raw)
    text: Any = io.TextIOWrapper(buffer, "utf-8", errors, newline="\n", line_buffering=number == 2)
    text.mode = mode
    return text


def _main_module(path: str) -> types.ModuleType:
    """Set up `__main__`, `sys.argv` and `sys.path` as for a program."""
    folder = os.path.dirname(path)
    sys.argv = [os.path.basename(path)]
    sys.path[:] = [folder, *filter(None, sys.path)]
    sys.meta_path[:] = [
        finder for finder in sys.meta_path if not type(finder).__module__.startswith(_PACKAGE)
    ]
    ours = sys.modules.pop(
        _PACKAGE, None
    )  # found without inspecting all modules, each of which would cost a copied page
    for name in vars(ours) if ours else ():
        sys.modules.pop(f"{_PACKAGE}.{name}", None)
    for name in ("random", "numpy.random"):
        if name in sys.modules:
            sys.modules[name].seed()
    linecache.clearcache()
    main = types.ModuleType("__main__")
    main.__dict__.update(
        __file__=path, __builtins__=sys.modules["builtins"], __annotations__={}, __cached__=None
    )
    sys.modules["__main__"] = main
    depth, frame = _CALLS_IN_C, sys._getframe()  # pyright: ignore[reportPrivateUsage]  inspect is slow
    while frame.f_back is not None:
        depth, frame = depth + 1, frame.f_back
    sys.setrecursionlimit(sys.getrecursionlimit() + depth)
    return main


def _execute(path: str, main: types.ModuleType) -> int:
    """Run the program until it ends or raises. Return its exit code, -n for signal n."""
    try:
        with open(path, "rb") as file:
            source = file.read()
        exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)
    except SystemExit as error:
        return _exit_code(error)
    except BaseException as error:
        return _show(error)
    return 0


def _exit_code(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    with contextlib.suppress(Exception):
        sys.stderr.write(str(error.code) + "\n")
    return 1


def _show(error: BaseException) -> int:
    """Print a traceback through `sys.excepthook`. Return the exit code."""
    _leave_out_ours(error)
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit as end:
        return _exit_code(end)
    except BaseException as broken:
        _leave_out_ours(broken)
        broken.__context__ = None
        sys.stderr.write("Error in sys.excepthook:\n")
        sys.__excepthook__(type(broken), broken, broken.__traceback__)
        sys.stderr.write("\nOriginal exception was:\n")
        sys.__excepthook__(type(error), error, error.__traceback__)
    return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def _leave_out_ours(error: BaseException) -> None:
    """Remove the frames of this module from a traceback, at its start and where a signal was passed on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals is globals():
        trace = trace.tb_next
    error.__traceback__ = trace
    while trace is not None and trace.tb_next is not None:
        if trace.tb_next.tb_frame.f_globals is globals():
            trace.tb_next = None
        trace = trace.tb_next


def _join_threads() -> None:
    """Wait for all threads except daemons, if there are any."""
    threading: Any = sys.modules.get("threading")
    if threading is not None:
        threading._shutdown()


def _finish(main: types.ModuleType, code: int) -> NoReturn:
    """End as Python does: after all threads, exit functions and destructors, with flushed buffers."""
    run_exit_functions: Any = atexit.__dict__["_run_exitfuncs"]
    for step in (_join_threads, run_exit_functions, lambda: _forget(main.__dict__)):
        try:
            step()
        except BaseException as error:
            sys.__excepthook__(type(error), error, error.__traceback__)
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except BaseException as error:
            code = _CANNOT_WRITE
            with contextlib.suppress(Exception):
                sys.stderr.write(f"Exception ignored in: {stream!r}\n{type(error).__name__}: {error}\n")
    ctypes.pythonapi.fflush(None)  # flush the buffers of C code
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def _forget(names: dict[str, Any]) -> None:
    """Clear the names that the program has defined, so that destructors run."""
    for first in (True, False):
        for name in [name for name in names if name != "__builtins__" and first == name.startswith("_")]:
            names[name] = None
    gc.collect()
