"""Program that runs other Python code in a child process and shortens its output; see `capped`.

`capped` sends the source of this file to the service, so it imports the standard library only and runs on
old Pythons too. The code does not see the names of this file, because it runs as a new `__main__`.
"""

import os
import select
import signal
import sys
import types


def run_capped(code: bytes, head_bytes: int, tail_bytes: int) -> None:
    """Run code in a child process, pass its output on, and end as the child ends.

    Args:
        code: Source of the program.
        head_bytes: Bytes of stdout, and of stderr, that are passed on at once.
        tail_bytes: Last bytes of the rest that are passed on at the end.
    """
    pipes = [os.pipe(), os.pipe()]
    child = os.fork()
    if not child:
        for target, (reader, writer) in zip((1, 2), pipes):  # noqa: B905  Python 3.9 has no strict=
            os.dup2(writer, target)
            os.close(reader)
            os.close(writer)
        # A program that is killed cannot flush its buffer.
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        return _run(code)
    streams: dict[int, _CappedOutput] = {}
    for target, (reader, writer) in zip((1, 2), pipes):  # noqa: B905  Python 3.9 has no strict=
        os.close(writer)
        streams[reader] = _CappedOutput(target, head_bytes, tail_bytes)
    status = None
    while streams:
        ready = select.select(list(streams), [], [], 0.05 if status is None else 0)[0]
        for reader in ready:
            data = os.read(reader, 65536)
            streams[reader].add(data)
            if not data:
                streams.pop(reader).finish()
        if status is None:
            pid, found = os.waitpid(child, os.WNOHANG)
            status = found if pid else None
        elif not ready:  # the child has ended, but processes that it left still hold the pipes
            while streams:
                streams.popitem()[1].finish()
    if status is None:
        status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


class _CappedOutput:
    """Output of the child on one file descriptor, of which the head is passed on at once."""

    def __init__(self, target: int, head_bytes: int, tail_bytes: int) -> None:
        self.target = target
        self.head_bytes = head_bytes
        self.tail_bytes = tail_bytes
        self.size = 0
        self.tail = b""

    def add(self, data: bytes) -> None:
        """Pass on what belongs to the head, and keep the last bytes of the rest."""
        head = data[: max(0, self.head_bytes - self.size)]
        self.size += len(data)
        self.tail = (self.tail + data[len(head) :])[-self.tail_bytes :]
        self.write(head)

    def finish(self) -> None:
        """Pass on the number of omitted bytes, and the tail."""
        omitted = self.size - self.head_bytes - len(self.tail)
        if omitted > 0:
            self.write(b"\n[... %d bytes left out ...]\n" % omitted)
        self.write(self.tail)

    def write(self, data: bytes) -> None:
        """Write all of the data."""
        while data:
            data = data[os.write(self.target, data) :]


def _run(code: bytes) -> None:
    """Run code as `python main.py` would, with the same tracebacks and the same exit status."""
    try:
        with open(__file__, "wb") as file:  # tracebacks show the lines of this file
            file.write(code)
    except OSError:
        pass
    names = sys.modules["__main__"].__dict__
    main = types.ModuleType("__main__")
    main.__dict__.update((name, names[name]) for name in names if name[:2] == "__" and name != "__doc__")
    sys.modules["__main__"] = main
    try:
        return exec(compile(code, __file__, "exec"), main.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        failed = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
    try:
        sys.excepthook(type(failed), failed, failed.__traceback__)
    except SystemExit:
        raise
    except BaseException as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        print("Error in sys.excepthook:", file=sys.stderr)
        sys.__excepthook__(type(error), error, error.__traceback__)
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(failed), failed, failed.__traceback__)
    if isinstance(failed, KeyboardInterrupt):
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    raise SystemExit(1)
