"""The client of a Jupyter kernel; runs inside the sandbox beside its kernel, as `python -c <this file>`.

It uses ZeroMQ to communicate with the kernel, and frames as in `wire.py` on stdin and stdout for the host. So
the host never keeps or parses messages of the kernel, which may be forged or endless.
"""

# ruff: noqa: E402  sys.path comes first
from __future__ import annotations

import sys

# Files of the model in the current folder must not replace the modules that are imported here.
sys.path[:] = [path for path in sys.path if path]

import asyncio
import base64
import contextlib
import importlib.util
import json
import os
import platform
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from jupyter_client.asynchronous.client import AsyncKernelClient
    from jupyter_client.connect import KernelConnectionInfo

Fields = dict[str, Any]
CHUNK = 1 << 16
PIECE = 1 << 20
"""Maximum bytes of output in one frame."""
MAX_MESSAGE = 16 << 20
"""Maximum bytes of a message; the connection to the kernel is renewed after a longer one."""
HIGH_WATER = 16
"""Maximum number of messages in ZeroMQ's queue; the kernel drops further ones."""
RETRY_MS = 20
"""Milliseconds between ZeroMQ's attempts to connect to a kernel that is starting."""
MAX_SHOWN = 25
"""Maximum number of displays of a cell."""
MAX_TEXT = 16384
MAX_IMAGE = 3 << 19  # in base64, more than 1 MiB
PROBE_S = 0.1
"""Seconds from the answer of the kernel, and from each probe, to the next probe whether it is idle."""
PROBES = 20
"""Number of probes after which the messages of the kernel count as lost."""
ANSWER_S = 5.0
"""Maximum seconds from the report that the kernel is idle to its answer."""
NUDGE_S = 0.05
"""Seconds from an interrupt, and from each nudge, to the next nudge."""
NUDGES = 20


class Output:
    """Head and tail of the output of a pipe, read whenever there is some.

    Args:
        fd: Descriptor of the pipe.
        limit: Maximum bytes to keep.
    """

    def __init__(self, fd: int, limit: int) -> None:
        self.fd, self.half = fd, max(1, limit // 2)
        self.head, self.tail, self.total = bytearray(), bytearray(), 0
        os.set_blocking(fd, False)
        asyncio.get_running_loop().add_reader(fd, self.pull)

    def pull(self, rounds: int = 16) -> None:
        """Read what is there now, with at most `rounds` reads."""
        for _ in range(rounds):
            try:
                data = os.read(self.fd, CHUNK)
            except BlockingIOError:
                return
            if not data:
                asyncio.get_running_loop().remove_reader(self.fd)
                return
            self.add(data)

    def add(self, data: bytes) -> None:
        """Keep bytes as far as there is room."""
        self.total += len(data)
        room = self.half - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        self.tail += data
        if len(self.tail) > 2 * self.half + CHUNK:
            del self.tail[: -self.half]

    def take(self) -> tuple[bytes, int]:
        """Return the bytes that were kept and the number of omitted bytes, and reset."""
        self.pull(rounds=64)
        kept = bytes(self.head + self.tail[-self.half :])
        omitted = self.total - len(kept)
        self.head, self.tail, self.total = bytearray(), bytearray(), 0
        return kept, omitted


class Cell:
    """State of the running cell.

    Args:
        seq: Number of the cell.
        message_id: Id of its request to the kernel.
    """

    def __init__(self, seq: int, message_id: str) -> None:
        self.seq = seq
        self.message_ids = {message_id}
        self.begun = self.interrupted = self.idle = False
        self.reply: Fields | None = None
        self.value: str | None = None
        self.shown = 0


class KernelProxy:
    """Sends cells to the kernel, and their results to the host.

    Args:
        order: Settings of the host.
    """

    def __init__(self, order: Fields) -> None:
        self.order = order
        self.loop = asyncio.get_running_loop()
        self.cell: Cell | None = None
        self.ready = False
        self.tasks: list[asyncio.Task[None]] = []
        self.heard: set[str] = set()
        self.client: AsyncKernelClient
        self.kernel: subprocess.Popen[bytes]
        self.out: dict[str, Output] = {}

    async def start(self) -> None:
        """Start the kernel, and wait until it can run cells."""
        folder = tempfile.mkdtemp(prefix="kernel-")
        info = connection(folder)
        self.launch(folder, info)
        # while the kernel does the same
        import zmq.asyncio
        from jupyter_client.asynchronous.client import AsyncKernelClient

        context = zmq.asyncio.Context()
        context.setsockopt(zmq.RCVHWM, HIGH_WATER)
        context.setsockopt(zmq.SNDHWM, HIGH_WATER)
        context.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
        context.setsockopt(zmq.RECONNECT_IVL, RETRY_MS)
        self.client = AsyncKernelClient(context=context)
        self.client.load_connection_info(info)
        self.client.start_channels(stdin=False, hb=False, control=False)
        self.listen(self.client.get_iopub_msg, self.on_iopub)
        self.listen(self.client.get_shell_msg, self.on_shell)
        while len(self.heard) < 2:  # messages that the kernel publishes before the subscription are lost
            self.ask("kernel_info_request", {})
            await asyncio.sleep(0.05)
        self.ready = True
        # Both sides have their sockets open, so their names are no longer needed.
        shutil.rmtree(folder, ignore_errors=True)
        for output in self.out.values():
            output.take()
        send({"seq": 0, "ready": True})

    def launch(self, folder: str, info: KernelConnectionInfo) -> None:
        """Start the process of the kernel.

        Args:
            folder: Folder of its connection file.
            info: Content of that file.
        """
        path = os.path.join(folder, "kernel.json")
        with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            json.dump(info, file)
        pipes = {name: os.pipe() for name in ("stdout", "stderr")}
        places = {"{connection_file}": path, "{folder}": folder}
        command = [places.get(word, word) for word in cast("list[str]", self.order["argv"])]
        try:
            self.kernel = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=pipes["stdout"][1], stderr=pipes["stderr"][1]
            )
        except OSError as error:
            report_failure("kernel", f"{command[0]}: {error.strerror}")
            raise
        for name, (reading, writing) in pipes.items():
            os.close(writing)
            self.out[name] = Output(reading, self.order["output_bytes"])
        threading.Thread(target=self.reap, daemon=True).start()

    def reap(self) -> None:
        """Wait for the end of the kernel and of all adopted orphans."""
        while True:
            pid, status = os.wait()
            if pid == self.kernel.pid:
                self.loop.call_soon_threadsafe(self.on_end, os.waitstatus_to_exitcode(status))
                return

    def on_end(self, code: int) -> None:
        """Report the end of the kernel, and end too."""
        if not self.ready:
            printed = b"\n".join(output.take()[0] for output in self.out.values())
            report_failure("kernel", f"exit code {code}\n{printed.decode('utf-8', 'replace')[-MAX_TEXT:]}")
        elif self.cell is not None:
            self.finish(self.cell, status="died", code=code)
        os._exit(0)

    def listen(
        self, receive: Callable[[], Coroutine[Any, Any, Fields]], take: Callable[[str, Fields, Cell], None]
    ) -> None:
        """Pass messages of a channel that are about the running cell to a method.

        Args:
            receive: Receives the next message of the channel.
            take: The method; called with the type and the content of the message, and the cell.
        """

        async def loop() -> None:
            while True:
                # `receive` does not suspend while messages are waiting, so a flood would hold up all else.
                await asyncio.sleep(0)
                # The code knows the key, so messages may have any content.
                try:
                    message = await receive()
                    self.heard.add(take.__name__)
                    cell, content = self.cell, message["content"]
                    if cell is not None and message["parent_header"]["msg_id"] in cell.message_ids:
                        take(message["header"]["msg_type"], {**content}, cell)
                except Exception:
                    continue

        self.tasks.append(asyncio.ensure_future(loop()))

    def on_shell(self, kind: str, content: Fields, cell: Cell) -> None:
        """Handle the answer to a cell.

        Args:
            kind: Type of the message.
            content: Its content.
            cell: The cell.
        """
        if kind != "execute_reply":
            return
        cell.reply = content
        for item in content.get("payload", ()):
            if item["source"] == "value":
                cell.value = str(item["text"])[:MAX_TEXT]
        if cell.idle:
            self.finish(cell)
        else:
            self.loop.call_later(PROBE_S, self.probe, cell, PROBES)

    def probe(self, cell: Cell, left: int) -> None:
        """Check whether the report that the kernel is idle was dropped in a flood, or nothing arrives.

        Args:
            cell: The cell that the kernel has answered.
            left: Number of probes left.
        """
        if self.cell is not cell:
            return
        if not left:
            self.finish(cell, status="cut")
            return
        cell.message_ids.add(self.ask("kernel_info_request", {}))
        self.loop.call_later(PROBE_S, self.probe, cell, left - 1)

    def on_iopub(self, kind: str, content: Fields, cell: Cell) -> None:
        """Handle output of a cell.

        Args:
            kind: Type of the message.
            content: Its content.
            cell: The cell.
        """
        if kind == "status" and content.get("execution_state") == "idle":
            cell.idle = True
            if cell.reply is not None:
                self.finish(cell)
            else:
                self.loop.call_later(ANSWER_S, self.finish, cell)
        elif kind == "execute_input":
            cell.begun = True
            if cell.interrupted:  # it came too early: the kernel ignores it between cells
                self.interrupt()
        elif kind == "stream" and content.get("name") in self.out:  # from kernels that print in this way
            self.out[content["name"]].add(str(content.get("text", "")).encode("utf-8", "replace"))
        elif kind in ("execute_result", "display_data"):
            data = content["data"]
            text = str(data.get("text/plain", ""))[:MAX_TEXT]
            if kind == "execute_result":
                cell.value = text
            images = {
                name: str(data[name])
                for name in ("image/png", "image/jpeg")
                if name in data and len(str(data[name])) < MAX_IMAGE
            }
            if cell.shown < MAX_SHOWN and (images or kind == "display_data"):
                cell.shown += 1
                send({"seq": cell.seq, "display": {"text/plain": text, **images}})

    def execute(self, seq: int, code: str) -> None:
        """Start a cell.

        Args:
            seq: Number of the cell.
            code: Its code.
        """
        try:
            content = {"code": code, "silent": False, "allow_stdin": False, "stop_on_error": False}
            message_id = self.ask("execute_request", content, {"cellId": str(seq)})
        except ValueError as error:  # half surrogate pairs cannot be sent
            refusal = {"ename": type(error).__name__, "evalue": str(error)}
            send({"seq": seq, "status": "ok", "value": None, "error": refusal})
            return
        self.cell = Cell(seq, message_id)

    def ask(self, kind: str, content: Fields, about: Fields | None = None) -> str:
        """Send the kernel a request, and return its id.

        The client's own methods bypass zmq.asyncio, which then may not notice the answer.

        Args:
            kind: Type of the message.
            content: Its content.
            about: Its metadata; None for none.
        """
        session, socket = self.client.session, self.client.shell_channel.socket
        message = session.msg(kind, content, metadata=about)
        self.sent = socket.send_multipart(session.serialize(message))
        return message["header"]["msg_id"]

    def interrupt(self) -> None:
        """Send SIGINT to the process group of the kernel, as Ctrl-C would. This process ignores it."""
        if self.cell is not None:
            self.cell.interrupted = not self.cell.begun
        os.killpg(os.getpgrp(), signal.SIGINT)
        self.loop.call_later(NUDGE_S, self.nudge, self.cell, NUDGES)

    def nudge(self, cell: Cell | None, left: int) -> None:
        """Make the kernel's main thread return from a system call that it entered when the interrupt came.

        Python only records a signal, and runs its handler between two instructions. A signal that comes after
        the last check and before the call has no effect until the call ends. Another signal ends the call,
        and then the handler runs; this one has no effect of its own.

        Args:
            cell: The cell that was interrupted.
            left: Number of nudges left; the code may have caught the interrupt, and continue.
        """
        if cell is not None and self.cell is cell and left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.kernel.pid, signal.SIGURG)
            self.loop.call_later(NUDGE_S, self.nudge, cell, left - 1)

    def stop(self, seq: int, grace_s: float) -> None:
        """Interrupt a cell, and give it up if it does not react.

        Args:
            seq: Number of the cell.
            grace_s: Seconds that it may take to react.
        """
        cell = self.cell
        if cell is not None and cell.seq == seq:
            self.interrupt()
            self.give_up(cell, round(grace_s / NUDGE_S))

    def give_up(self, cell: Cell, left: int) -> None:
        """Report a cell that has not ended after some steps. One with an answer may have too much output.

        Steps are counted instead of time, because a machine that stalls stalls the kernel too.

        Args:
            cell: The cell.
            left: Number of steps left, of `NUDGE_S` each.
        """
        if self.cell is not cell:
            return
        if left:
            self.loop.call_later(NUDGE_S, self.give_up, cell, left - 1)
        else:
            self.finish(cell, status="ok" if cell.reply is not None else "stuck")

    def finish(self, cell: Cell, *, status: str = "ok", code: int = 0) -> None:
        """Report the result of a cell, unless it has been reported.

        Args:
            cell: The cell.
            status: "ok", "died", "stuck" or "cut".
            code: Exit code of the kernel if it died.
        """
        if self.cell is not cell:
            return
        self.cell = None
        for name, output in self.out.items():
            data, omitted = output.take()
            for start in range(0, len(data), PIECE):
                piece = base64.b64encode(data[start : start + PIECE]).decode()
                send({"seq": cell.seq, "stream": name, "data": piece, "omitted": 0})
            if omitted:
                send({"seq": cell.seq, "stream": name, "data": "", "omitted": omitted})
        error = None
        if status == "ok":
            error = error_of(cell.reply or {"ename": "KernelError", "evalue": "the kernel did not answer"})
        send({"seq": cell.seq, "status": status, "code": code, "value": cell.value, "error": error})


def connection(folder: str) -> KernelConnectionInfo:
    """Return new addresses for a kernel, and the key that signs its messages."""
    return {
        "shell_port": 1,
        "iopub_port": 2,
        "stdin_port": 3,
        "control_port": 4,
        "hb_port": 5,
        "transport": "ipc",
        "ip": os.path.join(folder, "k"),
        "key": secrets.token_hex(32),
        "signature_scheme": "hmac-sha256",
    }


def error_of(reply: Fields) -> Fields | None:
    """Return the exception of a cell, or None."""
    if reply.get("status") == "ok":
        return None
    lines: Any = reply.get("traceback")
    texts = map(str, cast("list[object]", lines) if isinstance(lines, list) else [])
    return {
        "ename": str(reply.get("ename", reply.get("status")))[:MAX_TEXT],
        "evalue": str(reply.get("evalue", ""))[:MAX_TEXT],
        "traceback": "\n".join(texts)[: 2 * MAX_TEXT],
    }


def can_start() -> bool:
    """Return whether a kernel can be used here; report it to the host if not."""
    try:
        socket.socket(socket.AF_UNIX).close()
    except OSError as error:
        report_failure("sockets", str(error))
        return False
    missing = [name for name in ("jupyter_client", "zmq") if importlib.util.find_spec(name) is None]
    if missing:
        report_failure("import", f"no module named {missing[0]!r}")
    return not missing


def report_failure(what: str, text: str) -> None:
    """Report to the host that there will be no kernel.

    Args:
        what: What failed: "sockets", "import" or "kernel".
        text: Details.
    """
    send({"seq": 0, "failed": what, "python": platform.python_version(), "text": text[-MAX_TEXT:]})


def send(message: Fields) -> None:
    """Write a frame."""
    body = json.dumps(message).encode("ascii")
    view = memoryview(struct.pack(">I", len(body)) + body)
    while view:
        view = view[os.write(1, view) :]


def receive() -> Fields | None:
    """Read a frame; None at the end."""
    head = read_exactly(4)
    body = head and read_exactly(struct.unpack(">I", head)[0])
    return json.loads(body.decode("ascii")) if body else None


def read_exactly(size: int) -> bytes | None:
    """Read `size` bytes; None if stdin has ended."""
    data = bytearray()
    while len(data) < size:
        piece = os.read(0, min(size - len(data), 1 << 20))
        if not piece:
            return None
        data += piece
    return bytes(data)


async def main() -> None:
    """Carry out the frames on stdin until there are no more."""
    order = receive()
    if order is None:
        return
    courier = KernelProxy(order)
    frames: asyncio.Queue[Fields] = asyncio.Queue()

    def read() -> None:
        frame = receive()
        while frame is not None:
            courier.loop.call_soon_threadsafe(frames.put_nowait, frame)
            frame = receive()
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    if can_start():
        await courier.start()
    while True:
        frame = await frames.get()
        if frame["op"] == "exec":
            courier.execute(frame["seq"], frame["code"])
        elif frame["op"] == "stop":
            courier.stop(frame["seq"], frame["grace_s"])
        elif courier.cell is not None and courier.cell.seq == frame["seq"]:
            courier.interrupt()


def ignore(number: int, frame: object) -> None:
    """Ignore a signal. SIG_IGN would be inherited by the kernel.

    Args:
        number: The signal.
        frame: The interrupted frame.
    """


if __name__ == "__main__":
    if os.getpgrp() != os.getpid():
        os.setpgrp()
    signal.signal(signal.SIGINT, ignore)
    asyncio.run(main())
