"""An IPython kernel whose cells behave as in the other interpreters; runs with `-f FILE`, see `jupyter_repl`.

FILE is the connection file. The number of a cell is sent as its "cellId".
"""

# ruff: noqa: E402  the debugger comes first
from __future__ import annotations

import sys

# The debugger would listen on a port, and its import takes a tenth of a second.
sys.modules["debugpy"] = None  # pyright: ignore[reportArgumentType]  this is how an import is refused

import asyncio
import contextlib
import functools
import os
import signal
import warnings
from collections.abc import Generator
from typing import Any

from ipykernel import iostream, kernelapp

from torchrl_agentic.sandbox.inside.worker import (
    MAX_DISPLAY_BYTES,
    MAX_VALUE,
    clip,
    describe,
    encoded,
    stream,
)

IMAGES = ("image/png", "image/jpeg")
FOLDER = os.path.join(os.getcwd(), "")
COLOURS = ("TERM", "CLICOLOR", "FORCE_COLOR", "CLICOLOR_FORCE")


def main(argv: list[str]) -> None:
    """Start a kernel, change its shell, and serve requests."""
    # Its pipe for forked processes listens on a TCP port, and libzmq aborts if netlink is denied.
    threads: Any = iostream.IOPubThread
    threads._setup_pipe_in = no_pipe
    app: Any = kernelapp.IPKernelApp.instance()
    app.initialize(argv)
    for name in COLOURS:  # the kernel has set them for terminals
        os.environ.pop(name, None)
    warnings.filterwarnings("ignore", message="To exit: use")
    shell = app.shell
    shell.user_ns["exit"] = shell.user_ns["quit"] = end_cell
    shell.system = shell.system_raw  # the other method creates a terminal, which converts \n to \r\n
    change_displays(shell.display_formatter)
    change_cells(shell, Interrupts(app.kernel))
    signal.signal(signal.SIGURG, wake)
    app.start()


class Interrupts:
    """Handles SIGINT: it ends the code of a cell, however early it arrives, and nothing else.

    Otherwise the kernel could receive it during its own work, and then ignore it, end, or never answer. Its
    handler for `await` cancels a task without waking the loop.
    """

    def __init__(self, kernel: Any) -> None:
        self.early = False
        self.task: asyncio.Task[Any] | None = None
        kernel.pre_handler_hook = self.hold
        kernel.post_handler_hook = self.ignore
        kernel._cancel_on_sigint = contextlib.nullcontext

    def hold(self) -> None:
        """Keep interrupts for the code that is about to run."""
        self.early = False
        signal.signal(signal.SIGINT, self.note)

    def ignore(self) -> None:
        """Ignore interrupts between two cells."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    @contextlib.contextmanager
    def armed(self, task: asyncio.Task[Any] | None = None) -> Generator[None]:
        """End the code in the block on an interrupt, by an exception or by cancelling a task."""
        self.task = task
        try:
            self._replace(self.cancel if task else signal.default_int_handler)
            if self.early:
                self.early = False
                raise KeyboardInterrupt
            yield
        finally:
            self._replace(self.note)

    def _replace(self, handler: Any) -> None:
        """Set a handler, unless the code has set its own."""
        if signal.getsignal(signal.SIGINT) in (self.note, self.cancel, signal.default_int_handler):
            signal.signal(signal.SIGINT, handler)

    def note(self, *args: object) -> None:
        """Remember an interrupt."""
        del args
        self.early = True

    def cancel(self, *args: object) -> None:
        """Cancel the task."""
        del args
        if self.task is not None:
            self.task.get_loop().call_soon_threadsafe(self.task.cancel)


def no_pipe(thread: Any) -> None:
    """Replace the method that creates the pipe for forked processes."""
    thread._pipe_flag = False


def change_cells(shell: Any, interrupts: Interrupts) -> None:
    """Make each cell start with working streams, and end with an answer that can be sent.

    Args:
        shell: The shell of the kernel.
        interrupts: The handler of SIGINT.
    """
    plain_run, plain_code = shell.run_cell_async, shell.run_code
    plain_trigger = shell.events.trigger
    pid = os.getpid()
    streams = [os.dup(number) for number in (1, 2)]
    raised: list[BaseException] = []
    names: list[str] = []  # of the running cell, and of cells that its magics run
    plain_write = shell.displayhook.write_format_data

    def show(exc_tuple: Any = None, *args: object, **kwargs: object) -> None:
        """Keep the exception for the answer."""
        del args, kwargs
        error = sys.exc_info()[1] if exc_tuple is None else exc_tuple[1]
        if error is not None:
            raised.append(error)
            shell._last_traceback = [format_traceback(error)]

    def write(data: Any, *args: object, **kwargs: object) -> None:
        """Also put the value into the answer, because other messages may be dropped."""
        shell.payload_manager.write_payload({"source": "value", "text": data.get("text/plain", "")})
        plain_write(data, *args, **kwargs)

    @functools.wraps(plain_run)
    async def run(*args: Any, **kwargs: Any) -> Any:
        if names:
            names.append(f"{names[-1]} within")
            try:
                return await plain_run(*args, **kwargs)
            finally:
                names.pop()
        raised.clear()
        restore(streams)
        names.append(f"cell {kwargs.get('cell_id')}")
        try:
            result = await plain_run(*args, **kwargs)
        finally:
            interrupts.hold()
            names.clear()
            if os.getpid() != pid:  # the code forked, and its child has returned into this loop
                os._exit(0)
            restore(streams)
        for name in ("error_before_exec", "error_in_exec"):
            error = getattr(result, name)
            if error is not None:
                setattr(result, name, sendable_error(error))
        if result.success and raised:  # while a value was displayed, or in a magic
            result.error_in_exec = sendable_error(raised[-1])
        return result

    async def run_code(*args: Any, async_: bool = False, **kwargs: Any) -> Any:
        with interrupts.armed(asyncio.current_task() if async_ else None):
            return await plain_code(*args, async_=async_, **kwargs)

    def trigger(event: str, *args: Any, **kwargs: Any) -> None:
        if event != "post_execute":
            plain_trigger(event, *args, **kwargs)
            return
        try:
            with interrupts.armed():  # this draws the figures, which may take a long time
                plain_trigger(event, *args, **kwargs)
        except KeyboardInterrupt as error:
            raised.append(error)

    def name(*args: object) -> str:
        del args
        return f"<{names[-1] if names else 'setup'}>"

    shell.run_cell_async, shell.run_code = run, run_code
    shell.events.trigger = trigger
    shell.displayhook.write_format_data = write

    def structured(etype: Any, error: BaseException, *args: object, **kwargs: object) -> list[str]:
        """Format an exception for the history, for which IPython needs half a second."""
        del etype, args, kwargs
        return [format_traceback(error)]

    shell.compile.get_code_name = name
    shell.showtraceback = shell.showsyntaxerror = show
    shell.InteractiveTB.structured_traceback = structured


def change_displays(formatter: Any) -> None:
    """Display values as text and small images only, and cut the middle of long texts."""
    plain_format = formatter.format

    def shown(*args: Any, **kwargs: Any) -> Any:
        data, about = plain_format(*args, **kwargs)
        if "text/plain" in data:
            data["text/plain"] = encoded(clip(data["text/plain"], MAX_VALUE)).decode()
        for kind in IMAGES:
            if len(data.get(kind, b"")) > MAX_DISPLAY_BYTES:
                del data[kind]
        return data, about

    formatter.active_types = ["text/plain", *IMAGES]
    formatter.formatters["text/plain"].pprint = False
    formatter.format = shown


def restore(saved: list[int]) -> None:
    """Restore the standard streams, whatever a cell has done to them."""
    for file in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            file.flush()
    for number, original in zip((1, 2), saved, strict=True):
        os.dup2(original, number)
    sys.stdout, sys.stderr = stream(1), stream(2)


def wake(number: int, frame: object) -> None:
    """Do nothing: a handler makes the signal end a system call, see `kernel_client.KernelProxy.nudge`.

    Args:
        number: The signal.
        frame: The interrupted frame.
    """


def end_cell(code: object = None) -> None:
    """End the cell; the kernel continues."""
    raise SystemExit(code)


def sendable_error(error: BaseException) -> Exception:
    """Return an exception with the same name whose text can be read, is short, and can be sent."""
    return type(type(error).__name__, (Exception,), {})(describe(error)[1].decode())


def format_traceback(error: BaseException) -> str:
    """Return a traceback from the code's own cells on, or from its files if a magic ran one."""
    return describe(error, FOLDER)[2].decode()


if __name__ == "__main__":
    main(sys.argv[1:])
