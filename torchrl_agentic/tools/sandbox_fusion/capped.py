"""Python code around Python code, which keeps its output short.

Sandbox Fusion reads the output of a program only after its end: from 180 KiB on the pipe is full, the program
waits for ever, and the answer is a time limit. So the program runs as a child of one that reads along, passes
the first part on at once, and of the rest the last, with what was left out counted.
"""

from __future__ import annotations

import base64

HEAD_BYTES, TAIL_BYTES = 48 << 10, 16 << 10
"""What is passed on of stdout, and of stderr; together below what the pipes of the service hold."""

_PROGRAM = r"""
import base64, os, select, signal, sys
def run():
    code = base64.b64decode(@CODE@)
    import types
    try:
        with open(__file__, "wb") as file:  # tracebacks show its lines
            file.write(code)
    except OSError:
        pass
    old = sys.modules["__main__"].__dict__
    main = types.ModuleType("__main__")
    main.__dict__.update((name, old[name]) for name in old if name[:2] == "__" and name != "__doc__")
    sys.modules["__main__"] = main
    try:
        return exec(compile(code, __file__, "exec"), main.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        failed = error.with_traceback(error.__traceback__.tb_next)
    try:
        sys.excepthook(type(failed), failed, failed.__traceback__)
    except SystemExit:
        raise
    except BaseException as error:
        error.__traceback__ = error.__traceback__.tb_next
        print("Error in sys.excepthook:", file=sys.stderr)
        sys.__excepthook__(type(error), error, error.__traceback__)
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(failed), failed, failed.__traceback__)
    if isinstance(failed, KeyboardInterrupt):
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    raise SystemExit(1)
def read_along():
    ends = [os.pipe(), os.pipe()]
    child = os.fork()
    if not child:
        for target, (end, start) in zip((1, 2), ends):
            os.dup2(start, target)
            os.close(end)
            os.close(start)
        return run()
    kept = {}
    for target, (end, start) in zip((1, 2), ends):
        os.close(start)
        kept[end] = [target, 0, b""]
    code = None
    while kept:
        ready = select.select(list(kept), [], [], 0.05 if code is None else 0)[0]
        for end in ready:
            data = os.read(end, 65536)
            one = kept[end]
            head = data[:max(0, @HEAD@ - one[1])]
            one[1] += len(data)
            one[2] = (one[2] + data[len(head):])[-@TAIL@:]
            while head:
                head = head[os.write(one[0], head):]
            if not data:
                finish(kept.pop(end))
        if code is None:
            pid, status = os.waitpid(child, os.WNOHANG)
            code = status if pid else None
        elif not ready:
            while kept:
                finish(kept.popitem()[1])
    if code is None:
        code = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(code):
        signal.signal(os.WTERMSIG(code), signal.SIG_DFL) if os.WTERMSIG(code) not in (9, 19) else None
        os.kill(os.getpid(), os.WTERMSIG(code))
    os._exit(os.WEXITSTATUS(code))
def finish(one):
    target, size, tail = one
    left_out = size - @HEAD@ - len(tail)
    if left_out > 0:
        tail = b"\n[... %d bytes left out ...]\n" % left_out + tail
    while tail:
        tail = tail[os.write(target, tail):]
read_along()
"""


def capped(code: str) -> str:
    """Give a Python program that does what another one does, with its output cut in the middle."""
    packed = base64.b64encode(code.encode("utf-8", "surrogatepass"))
    program = _PROGRAM.replace("@HEAD@", str(HEAD_BYTES)).replace("@TAIL@", str(TAIL_BYTES))
    return program.strip().replace("@CODE@", repr(packed)) + "\n"
