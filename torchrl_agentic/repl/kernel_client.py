"""The client of a Jupyter kernel; runs inside the sandbox beside its kernel, see `jupyter_repl`.

It uses ZeroMQ to communicate with the kernel, and answers requests of the host on stdin and stdout as
`sandbox.inside.supervisor` does. So the host never keeps or parses messages of the kernel, which may be
forged or endless.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import importlib.util
import json
import os
import platform
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import types
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, cast

from torchrl_agentic.sandbox.inside.capture import CHUNK
from torchrl_agentic.sandbox.inside.pipes import Pipe
from torchrl_agentic.sandbox.inside.wire import Splitter, pack

if TYPE_CHECKING:
    from jupyter_client.asynchronous.client import AsyncKernelClient
    from jupyter_client.connect import KernelConnectionInfo

Fields = dict[str, Any]
MAX_REQUEST = 72 << 20
"""Maximum bytes of a request of the host."""
MAX_MESSAGE = 16 << 20
"""Maximum bytes of a message; the connection to the kernel is renewed after a longer one."""
HIGH_WATER = 16
"""Maximum number of messages in ZeroMQ's queue; the kernel drops further ones."""
RETRY_MS = 20
"""Milliseconds between ZeroMQ's attempts to connect to a kernel that is starting."""
IMAGES = {"image/png": b"\x89PNG\r\n\x1a\n", "image/jpeg": b"\xff\xd8\xff"}
"""Media types of images that are sent, and how their data begins."""
MAX_IMAGES, MAX_IMAGE = 5, 1 << 20
MAX_TEXTS, MAX_TEXT = 20, 16384
"""Maximum numbers and sizes of the displays of a cell."""
COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
PROBE_S = 0.1
"""Seconds from the answer of the kernel, and from each probe, to the next probe whether it is idle."""
PROBES = 20
"""Number of probes after which the messages of the kernel count as lost."""
ANSWER_S = 5.0
"""Maximum seconds from the report that the kernel is idle to its answer."""
NUDGE_S = 0.05
"""Seconds from an interrupt, and from each nudge, to the next nudge."""
NUDGES = 20


class KernelCell:
    """State of the running cell.

    Args:
        request: Id of the request of the host.
        count: Number of the cell.
        message_id: Id of its request to the kernel.
    """

    def __init__(self, request: int, count: int, message_id: str) -> None:
        self.request, self.count = request, count
        self.message_ids = {message_id}
        self.begun = self.interrupted = self.idle = False
        self.stopped = ""
        self.reply: Fields | None = None
        self.value: str | None = None
        self.shown: list[bytes] = []


class KernelProxy:
    """Sends cells to the kernel, and their results to the host."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.requests = Splitter(MAX_REQUEST)
        self.cell: KernelCell | None = None
        self.start_request: int | None = None
        self.count, self.grace_s = 0, 0.0
        self.tasks: list[asyncio.Task[None]] = []
        self.heard: set[str] = set()
        self.client: AsyncKernelClient
        self.kernel: subprocess.Popen[bytes]
        self.out: dict[str, Pipe] = {}

    def receive(self) -> None:
        """Carry out the requests of the host that have arrived; end if there are no more."""
        data = os.read(0, CHUNK)
        if not data:
            os._exit(0)
        for body, *fields in self.requests.feed(data):
            header = json.loads(body)
            op, number = header["op"], header["id"]
            if op == "start":
                self.start_request = number
                self.count, self.grace_s = header["count"], header["grace_s"]
                self.tasks.append(asyncio.ensure_future(self.start(header)))
            elif op == "cell":
                self.execute(number, fields[0].decode("utf-8", "surrogatepass"), header["timeout_s"])
            elif op == "stop_cell":
                if self.cell is not None and header["why"]:
                    self.stop(self.cell, header["why"])
                elif self.cell is not None:
                    self.interrupt()
                answer(number, {})
            else:  # a restart: the host starts another client and kernel
                os._exit(0)

    async def start(self, settings: Fields) -> None:
        """Start the kernel, and wait until it can run cells.

        Args:
            settings: Settings of the host: argv of the kernel, output_bytes.
        """
        if not self.can_start():
            return
        folder = tempfile.mkdtemp(prefix="kernel-")
        info = connection(folder)
        self.launch(folder, info, settings)
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
        # Both sides have their sockets open, so their names are no longer needed.
        shutil.rmtree(folder, ignore_errors=True)
        for output in self.out.values():
            output.take()
        self.report_start({})

    def can_start(self) -> bool:
        """Return whether a kernel can be used here; report it to the host if not."""
        try:
            socket.socket(socket.AF_UNIX).close()
        except OSError as error:
            self.refuse("sockets", str(error))
            return False
        missing = [name for name in ("jupyter_client", "zmq") if importlib.util.find_spec(name) is None]
        if missing:
            self.refuse("import", f"no module named {missing[0]!r}")
        return not missing

    def refuse(self, what: str, text: str) -> None:
        """Report to the host that there will be no kernel.

        Args:
            what: What failed: "sockets", "import" or "kernel".
            text: Details.
        """
        python = platform.python_version()
        self.report_start({"refused": what, "python": python, "text": text[-MAX_TEXT:]})

    def report_start(self, header: Fields) -> None:
        """Answer the request for a kernel."""
        if self.start_request is not None:
            answer(self.start_request, header)
        self.start_request = None

    def launch(self, folder: str, info: KernelConnectionInfo, settings: Fields) -> None:
        """Start the process of the kernel.

        Args:
            folder: Folder of its connection file.
            info: Content of that file.
            settings: Settings of the host.
        """
        path = os.path.join(folder, "kernel.json")
        with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            json.dump(info, file)
        reactor: Any = types.SimpleNamespace(watch=self.loop.add_reader, forget=self.loop.remove_reader)
        self.out = {name: Pipe(reactor, settings["output_bytes"]) for name in ("stdout", "stderr")}
        places = {"{connection_file}": path, "{folder}": folder}
        command = [places.get(word, word) for word in cast("list[str]", settings["argv"])]
        out, err = (pipe.end for pipe in self.out.values())
        try:
            self.kernel = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
        except OSError as error:
            self.refuse("kernel", f"{command[0]}: {error.strerror}")
            raise
        for pipe in self.out.values():
            pipe.close_end()
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
        if self.start_request is not None:
            printed = b"\n".join(pipe.take()[0] for pipe in self.out.values())
            self.refuse("kernel", f"exit code {code}\n{printed.decode('utf-8', 'replace')[-MAX_TEXT:]}")
        elif self.cell is not None:
            self.finish(self.cell, how=describe_exit(code))
        os._exit(0)

    def listen(
        self,
        receive: Callable[[], Coroutine[Any, Any, Fields]],
        take: Callable[[str, Fields, KernelCell], None],
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

    def on_shell(self, kind: str, content: Fields, cell: KernelCell) -> None:
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
                cell.value = plain(item["text"])
        if cell.idle:
            self.finish(cell)
        else:
            self.loop.call_later(PROBE_S, self.probe, cell, PROBES)

    def probe(self, cell: KernelCell, left: int) -> None:
        """Check whether the report that the kernel is idle was dropped in a flood, or nothing arrives.

        Args:
            cell: The cell that the kernel has answered.
            left: Number of probes left.
        """
        if self.cell is not cell:
            return
        if not left:
            self.finish(cell, how="its messages do not arrive")
            return
        cell.message_ids.add(self.ask("kernel_info_request", {}))
        self.loop.call_later(PROBE_S, self.probe, cell, left - 1)

    def on_iopub(self, kind: str, content: Fields, cell: KernelCell) -> None:
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
            self.out[content["name"]].capture.add(str(content.get("text", "")).encode("utf-8", "replace"))
        elif kind in ("execute_result", "display_data"):
            data = content["data"]
            text = plain(data.get("text/plain", ""))
            if kind == "execute_result":
                cell.value = text
            self.show(cell, data, text if kind == "display_data" else "")

    def show(self, cell: KernelCell, data: Fields, text: str) -> None:
        """Keep an image; its text if it is invalid or there are too many.

        Args:
            cell: The cell.
            data: The forms of the displayed object, by media type.
            text: Its text; "" if that is the value of the cell.
        """
        kinds = cell.shown[::2]
        texts = kinds.count(b"text/plain")
        for kind, start in IMAGES.items():
            image = decoded(data.get(kind))
            if image.startswith(start) and len(image) <= MAX_IMAGE and len(kinds) - texts < MAX_IMAGES:
                cell.shown += [kind.encode(), image]
                return
        if text and texts < MAX_TEXTS:
            cell.shown += [b"text/plain", encoded(text)]

    def execute(self, request: int, code: str, timeout: float | None) -> None:
        """Start a cell.

        Args:
            request: Id of the request of the host.
            code: Its code.
            timeout: Maximum seconds; None for no limit.
        """
        self.count += 1
        cell = self.cell = KernelCell(request, self.count, "")
        try:
            content = {"code": code, "silent": False, "allow_stdin": False, "stop_on_error": False}
            cell.message_ids = {self.ask("execute_request", content, {"cellId": str(cell.count)})}
        except ValueError as error:  # half surrogate pairs cannot be sent
            cell.reply = {"ename": type(error).__name__, "evalue": str(error)}
            self.finish(cell)
            return
        if timeout is not None:
            self.loop.call_later(timeout, self.stop, cell, "timeout")

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

    def nudge(self, cell: KernelCell | None, left: int) -> None:
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

    def stop(self, cell: KernelCell, why: str) -> None:
        """Interrupt a cell, and give it up if it does not react.

        Args:
            cell: The cell.
            why: The reason, for the answer.
        """
        if self.cell is cell and not cell.stopped:
            cell.stopped = why
            self.interrupt()
            self.give_up(cell, round(self.grace_s / NUDGE_S))

    def give_up(self, cell: KernelCell, left: int) -> None:
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
            self.finish(cell, how=None if cell.reply is not None else "killed by SIGKILL")

    def finish(self, cell: KernelCell, how: str | None = None) -> None:
        """Report the result of a cell, unless it has been reported.

        Args:
            cell: The cell.
            how: How the kernel has ended, or will be ended by the host; None if it can run more cells.
        """
        if self.cell is not cell:
            return
        self.cell = None
        (out, omitted), (err, more) = (pipe.take() for pipe in self.out.values())
        header: Fields = {"count": cell.count, "stopped": cell.stopped, "lost_before": False}
        header["omitted"] = omitted + more
        if how is None:
            value = b"" if cell.value is None else b"=" + encoded(cell.value)
            answer(cell.request, header, out, err, b"", value, *error_of(cell.reply), *cell.shown)
        else:
            answer(cell.request, {**header, "how": how}, out, err, b"")


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


def error_of(reply: Fields | None) -> tuple[bytes, bytes, bytes]:
    """Return name, text and traceback of the exception of a cell; empty if it has none."""
    if reply is None:
        return b"KernelError", b"the kernel did not answer", b""
    if reply.get("status") == "ok":
        return b"", b"", b""
    lines: Any = reply.get("traceback")
    trace = "\n".join(map(str, cast("list[object]", lines) if isinstance(lines, list) else []))
    name = plain(reply.get("ename", reply.get("status"))) or "KernelError"
    return encoded(name), encoded(plain(reply.get("evalue", ""))), encoded(plain(trace, 2 * MAX_TEXT))


def plain(value: object, limit: int = MAX_TEXT) -> str:
    """Return the beginning of a text of the kernel, without colours.

    Args:
        value: The text.
        limit: Largest number of characters.
    """
    return COLOURS.sub("", str(value)[:limit])


def encoded(text: str) -> bytes:
    """Encode a text that may contain half surrogate pairs."""
    return text.encode("utf-8", "backslashreplace")


def decoded(data: object) -> bytes:
    """Return data in base64; b"" if it is something else, or too long for an image."""
    try:
        return base64.b64decode(data) if isinstance(data, str) and len(data) < 2 * MAX_IMAGE else b""
    except (binascii.Error, ValueError):
        return b""


def answer(request: int, header: Fields, *fields: bytes) -> None:
    """Answer a request of the host.

    Args:
        request: Number of the request.
        header: The header of the answer.
        fields: Its binary fields.
    """
    view = memoryview(pack(json.dumps({**header, "id": request}).encode("ascii"), *fields))
    while view:
        view = view[os.write(1, view) :]


def describe_exit(code: int) -> str:
    """Return a description of an exit code, such as "killed by SIGKILL"."""
    try:
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    except ValueError:
        return f"killed by signal {-code}"


def ignore(number: int, frame: object) -> None:
    """Ignore a signal. SIG_IGN would be inherited by the kernel.

    Args:
        number: The signal.
        frame: The interrupted frame.
    """


async def main() -> None:
    """Carry out requests until the host closes the connection."""
    proxy = KernelProxy()
    proxy.loop.add_reader(0, proxy.receive)
    await asyncio.Event().wait()


if __name__ == "__main__":
    if os.getpgrp() != os.getpid():
        os.setpgrp()
    signal.signal(signal.SIGINT, ignore)
    asyncio.run(main())
