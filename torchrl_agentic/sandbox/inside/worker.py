"""Runs cells one after another: the interpreter of the model's code.

The supervisor forks and confines it first. Nothing that it sends is trusted, because the code controls it.
"""

# Windows lacks the modules and functions that are bound only elsewhere; nothing here runs there.
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import ast
import contextlib
import io
import linecache
import os
import random
import signal
import socket
import stat
import sys
import traceback
import types
import warnings
from typing import Any, TextIO

from torchrl_agentic.sandbox.inside import namespaces, rights
from torchrl_agentic.sandbox.inside.wire import Splitter, pack

if sys.platform != "win32":
    import fcntl

MAX_VALUE = 8192
MAX_TRACE = 16384
MAX_DISPLAYS = 5
MAX_DISPLAY_BYTES = 1 << 20
MAX_REQUEST = (16 << 20) * 4 + 64
"""Maximum bytes of a request: code of 16 Mi characters."""
_COPIED = ("/work", "/tmp")

Display = tuple[bytes, bytes]
"""Media type and data of a displayed object."""


class Worker:
    """The main loop of the interpreter and its state between cells.

    Args:
        control: Socket to the supervisor.
    """

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.namespace: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
        main = types.ModuleType("__main__")  # so that pickle and dataclasses find what cells define
        main.__dict__.update(self.namespace)
        self.namespace = main.__dict__
        sys.modules["__main__"] = main
        self.shown: list[Display] = []
        self.not_shown = 0
        self.streams = [os.dup(number) for number in (1, 2)]
        self.unreaped: list[int] = []

    def serve(self) -> None:
        """Answer requests until the connection ends."""
        self.namespace["display"] = self.display
        sys.path.insert(0, "")
        requests = Splitter(MAX_REQUEST)
        handed: list[int] = []
        while True:
            try:
                data, ancillary, _, _ = self.control.recvmsg(1 << 16, socket.CMSG_SPACE(16 * 4))
            except OSError:
                os._exit(0)
            if not data:
                os._exit(0)
            handed += received_fds(ancillary)
            for kind, *fields in requests.feed(data):
                if kind == b"run":
                    self.control.sendall(self.run(*fields))
                elif kind == b"seed":
                    seed(int(fields[0]))
                elif kind == b"clone":
                    self.clone(handed, int(fields[0]))
                    handed = []

    def run(self, number: bytes, code: bytes) -> bytes:
        """Run a cell and return its answer.

        Args:
            number: Number of the cell.
            code: The code, in UTF-8.
        """
        pid = os.getpid()
        while self.unreaped:  # reached only if cloning failed
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.unreaped.pop(), 0)
        for target, saved in zip((1, 2), self.streams):  # noqa: B905  strict= came with 3.10
            os.dup2(saved, target)
        sys.stdout, sys.stderr = stream(1), stream(2)
        self.shown, self.not_shown = [], 0
        value, error = self._cell(f"<cell {int(number)}>", code.decode("utf-8", "surrogatepass"))
        if os.getpid() != pid:  # the code forked, and its child has returned into this loop
            os._exit(0)
        self._show_figures()
        if self.not_shown:
            sys.stderr.write(f"[{self.not_shown} images not shown: too many or too large]\n")
        for file in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                file.flush()
        shown = [part for display in self.shown for part in display]
        return pack(number, value, *error, *shown)

    def _cell(self, name: str, code: str) -> tuple[bytes, tuple[bytes, bytes, bytes]]:
        linecache.cache[name] = (len(code), None, [line + "\n" for line in code.split("\n")], name)
        value = b""
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            try:
                tree = ast.parse(code, name)
                last = None
                if tree.body and isinstance(tree.body[-1], ast.Expr):
                    last = ast.Expression(tree.body[-1].value)
                    del tree.body[-1]
                exec(compile(tree, name, "exec"), self.namespace)
                if last is not None:
                    found = eval(compile(last, name, "eval"), self.namespace)
                    if found is not None:
                        self.namespace["_"] = found
                        if not self._show(found):
                            value = b"=" + encoded(clip(repr(found), MAX_VALUE))
            finally:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
        except BaseException as error:
            return b"", describe(error)
        return value, (b"", b"", b"")

    def display(self, *values: Any) -> None:
        """Display images as images, and print everything else."""
        for value in values:
            if not self._show(value):
                print(value if isinstance(value, str) else repr(value))

    def _show(self, value: Any) -> bool:
        """Keep the image of a value. Return False if it has none."""
        if is_figure(value):
            self._keep(picture(value))
            close_figure(value)
            return True
        if isinstance(value, type):
            return False
        made = getattr(value, "_repr_png_", None)
        data = made() if callable(made) else None
        if not isinstance(data, bytes):
            return False
        self._keep(data)
        return True

    def _keep(self, data: bytes) -> None:
        if len(self.shown) < MAX_DISPLAYS and len(data) <= MAX_DISPLAY_BYTES:
            self.shown.append((b"image/png", data))
        else:
            self.not_shown += 1

    def _show_figures(self) -> None:
        """Display and close open pyplot figures."""
        pyplot = sys.modules.get("matplotlib.pyplot")
        if pyplot is None:
            return
        try:
            for number in pyplot.get_fignums():
                self._keep(picture(pyplot.figure(number)))
            pyplot.close("all")
        except Exception as error:
            sys.stderr.write(f"[a figure cannot be shown: {error}]\n")

    def clone(self, handed: list[int], flags: int) -> None:
        """Copy this process into other namespaces.

        Args:
            handed: Descriptors of the namespaces, of the socket to the copy's supervisor, and of its stdout
                and stderr.
            flags: CLONE_NEW* flags of the namespaces.
        """
        numbers, folder = random.getstate(), current_folder()
        try:
            first = namespaces.bare_fork()
        except OSError as error:
            os.write(handed[-3], encoded(str(error)))
            first = -1
        if first:
            for fd in handed:
                os.close(fd)
            if first > 0:
                self.unreaped.append(first)  # slow; other clones are made meanwhile
            return
        continue_in_child(handed, flags)
        rights.drop_capabilities()
        rights.set_dumpable(True)
        os.setsid()
        random.setstate(numbers)  # a fork reseeds it
        os.chdir(folder)  # the same path in the file systems of the clone
        self._take(handed)
        self.control.sendall(pack(b"cloned"))

    def _take(self, handed: list[int]) -> None:
        """Use the files that a clone was given. It keeps none that it shares with the original."""
        *_namespaces, control, out, err = handed
        ours = (self.control.fileno(), *self.streams)
        for new, old in zip((control, out, err), ours):  # noqa: B905  strict= came with 3.10
            os.dup2(new, old, inheritable=False)
        for fd in handed:
            os.close(fd)
        for target, saved in zip((1, 2), self.streams):  # noqa: B905  strict= came with 3.10
            os.dup2(saved, target)
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) not in ours:
                reopen(int(name))


def continue_in_child(handed: list[int], flags: int) -> None:
    """Continue in a child that is in other namespaces; see `Worker.clone`."""
    try:
        namespaces.enter(handed[:-3], flags)
        child = os.fork()
    except BaseException as error:  # otherwise two processes would answer
        os.write(handed[-3], encoded(str(error)))
        os._exit(1)
    if child:
        os._exit(0)


def reopen(fd: int) -> None:
    """Replace an open file by the clone's own copy of it; by /dev/null if it is not a file."""
    try:
        kind = os.fstat(fd).st_mode
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        path, position = "/dev/null", 0
        if stat.S_ISREG(kind) and os.readlink(f"/proc/self/fd/{fd}").startswith(_COPIED):
            path, position = os.readlink(f"/proc/self/fd/{fd}"), os.lseek(fd, 0, os.SEEK_CUR)
        inheritable = os.get_inheritable(fd)
        try:
            new = os.open(path, flags & ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC))
        except OSError:  # it has been removed
            new, position = os.open("/dev/null", os.O_RDWR), 0
        if position:
            os.lseek(new, position, os.SEEK_SET)
        os.dup2(new, fd, inheritable)
        os.close(new)
    except OSError:
        pass  # the descriptor of the listing, already closed


def current_folder() -> str:
    """Return the path of the current folder, or the initial one if it has been removed."""
    try:
        return os.getcwd()
    except OSError:
        return _COPIED[0]


def received_fds(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    """Return the descriptors that came with a message."""
    found: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found += memoryview(data[: len(data) // 4 * 4]).cast("i").tolist()
    return found


def stream(number: int) -> TextIO:
    """Return a text stream on a file descriptor, for the code to print to."""
    return open(number, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)


def describe(error: BaseException, *folders: str) -> tuple[bytes, bytes, bytes]:
    """Return the name, the text and the traceback of an exception, from the code's own cells on.

    Args:
        error: The exception.
        folders: Folders of files that the traceback may also begin with, if it has no cell.
    """
    trace = None
    for prefix in ("<cell ", *folders):
        trace = trace or error.__traceback__
        while trace is not None and not trace.tb_frame.f_code.co_filename.startswith(prefix):
            trace = trace.tb_next
        if trace is not None:
            break
    try:
        text = "".join(traceback.format_exception(type(error), error, trace)).rstrip("\n")
        value = str(error)
    except BaseException:
        text = value = ""
    name = type(error).__name__
    return encoded(name), encoded(clip(value, MAX_VALUE)), encoded(clip(text or name, MAX_TRACE))


def encoded(text: str) -> bytes:
    """Encode text of the code, including half surrogate pairs."""
    return text.encode("utf-8", "backslashreplace")


def clip(text: str, limit: int) -> str:
    """Keep the head and the tail of a long text."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}… [{len(text) - 2 * half} characters omitted] …{text[-half:]}"


def is_figure(value: Any) -> bool:
    """Return whether a value is a matplotlib figure."""
    figure = sys.modules.get("matplotlib.figure")
    return figure is not None and isinstance(value, figure.Figure)


def picture(figure: Any) -> bytes:
    """Return a figure as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def close_figure(figure: Any) -> None:
    """Close a figure, so that it is not displayed again."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None:
        pyplot.close(figure)


class _SeedNumpy:
    """Seeds numpy's global generator when a cell first imports numpy."""

    def __init__(self, value: int) -> None:
        self.value = value

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find the spec of the awaited module, and have it seeded after its import."""
        if name != "numpy.random":
            return None
        from importlib.machinery import PathFinder

        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_seed(module: types.ModuleType) -> None:
            run(module)
            module.seed(self.value % 2**32)

        spec.loader.exec_module = run_and_seed
        return spec


def seed(value: int) -> None:
    """Seed `random`, and numpy's global generator if it is used."""
    random.seed(value)
    numpy_random = sys.modules.get("numpy.random")
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _SeedNumpy)]
    if numpy_random is not None:
        numpy_random.seed(value % 2**32)
    else:
        sys.meta_path.insert(0, _SeedNumpy(value))


def warm_up() -> None:
    """Do once, before workers are forked, what each would do, so that they share its memory."""
    tree = ast.parse("1\n2", "<cell 0>")
    last = ast.Expression(ast.Expr(ast.Constant(2)).value)
    ast.fix_missing_locations(last)
    exec(compile(tree, "<cell 0>", "exec"), {})
    try:
        eval(compile(last, "<cell 0>", "eval"), {})
        exec(compile(ast.parse("def f(): return g\nf()", "<cell 0>"), "<cell 0>", "exec"), {})
    except NameError as error:
        describe(error)
    Splitter(MAX_REQUEST).feed(pack(b"run", b"0", b""))
    warnings.filterwarnings("ignore", "FigureCanvasAgg is non-interactive", UserWarning)


def main(control: socket.socket) -> None:
    """Run as the worker, in a process that has been confined."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Worker(control).serve()
