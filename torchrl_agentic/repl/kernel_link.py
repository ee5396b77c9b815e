"""`KernelLink`: the host's end of the connection to a kernel's client inside the sandbox.

What is kept of the frames is bounded, because code may control `kernel_client.py`.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import re
import struct
from typing import Any

from torchrl_agentic.messages import fields_of
from torchrl_agentic.repl.base import ReplDisplay, ReplError, ReplResult, ReplStatus
from torchrl_agentic.repl.supervised import KINDS, MAX_IMAGES, is_image
from torchrl_agentic.sandbox import Process
from torchrl_agentic.sandbox.inside.wire import BadMessage
from torchrl_agentic.sandbox.process import Capture, describe_exit, signed_exit_code
from torchrl_agentic.text import read_json

MAX_FRAME = 4 << 20
"""Maximum bytes of a frame."""
MAX_TEXTS, MAX_TEXT = 20, 16384
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class KernelLink:
    """A kernel and its client.

    Attributes:
        ended: Future of how the client ended.

    Args:
        process: The client.
    """

    def __init__(self, process: Process) -> None:
        self.process = process
        self.ended = asyncio.ensure_future(process.wait())
        self._data = bytearray()

    async def ask(self, message: dict[str, Any]) -> None:
        """Send a frame.

        Raises:
            EOFError: If the client reads no more.
        """
        body = json.dumps(message).encode("ascii")
        await self.process.send(struct.pack(">I", len(body)) + body)

    async def frame(self) -> dict[str, Any]:
        """Wait for the next frame.

        Raises:
            EOFError: If there are no more.
            BadMessage: If it is too long, or not a JSON object.
        """
        (length,) = struct.unpack(">I", await self._first(4))
        if length > MAX_FRAME:
            raise BadMessage(f"a frame of {length} bytes")
        body = (await self._first(4 + length))[4:]
        del self._data[: 4 + length]
        try:
            fields = fields_of(read_json(body))
        except ValueError:
            raise BadMessage("no JSON") from None
        if fields is None:
            raise BadMessage("no object")
        return dict(fields)

    async def _first(self, size: int) -> bytes:
        while len(self._data) < size:
            data = await self.process.receive()
            if not data:
                raise EOFError
            self._data += data
        return bytes(self._data[:size])

    async def how_it_ended(self, grace_s: float) -> str:
        """Return how the client ended. One that only closed its connection is killed when it is replaced.

        Args:
            grace_s: Seconds to wait for its end.
        """
        await asyncio.wait([self.ended], timeout=grace_s)
        if not self.ended.done():
            return "it closed its connection"
        code = self.ended.result().removeprefix("exit code ")
        return describe_exit(signed_exit_code(int(code))) if code.isdigit() else f"its sandbox was {code}"

    async def end(self) -> None:
        """Kill the client, the kernel, and all processes that they started."""
        await self.process.kill()
        await self.ended


class CellOutput:
    """The result of one cell, assembled from its frames.

    Args:
        seq: Number of the cell.
        output_bytes: Maximum bytes to keep of each stream.
    """

    def __init__(self, seq: int, output_bytes: int) -> None:
        self.seq = seq
        self.display: list[ReplDisplay] = []
        self._streams = {"stdout": Capture(output_bytes), "stderr": Capture(output_bytes)}
        self._last: dict[str, Any] = {}

    @property
    def status(self) -> str:
        """How the cell ended: "ok", "died", "stuck" or "cut"; "" while it runs."""
        return str(self._last.get("status", ""))

    @property
    def how(self) -> str:
        """How the kernel died."""
        code = self._last.get("code")
        return describe_exit(code) if isinstance(code, int) else "no exit code"

    async def read(self, link: KernelLink) -> None:
        """Read frames until the last one of the cell."""
        while not self._last:
            frame = await link.frame()
            if frame.get("seq") != self.seq:
                raise BadMessage("an answer to another request")
            self._take(frame)

    def _take(self, frame: dict[str, Any]) -> None:
        if "status" in frame:
            self._last = frame
        capture = self._streams.get(text_of(frame.get("stream")))
        if capture is not None:
            capture.add(_bytes(frame.get("data")))
            omitted = frame.get("omitted")
            capture.total += omitted if isinstance(omitted, int) and omitted > 0 else 0
        data = fields_of(frame.get("display"))
        if data is not None:
            self._show(dict(data))

    def _show(self, data: dict[str, Any]) -> None:
        """Keep an image; as text if it is invalid or there are too many."""
        images = sum(shown.media_type in KINDS for shown in self.display)
        for kind in KINDS:
            image = _bytes(data.get(kind))
            if images < MAX_IMAGES and is_image(kind, image):
                self.display.append(ReplDisplay(kind, image))
                return
        text = text_of(data.get("text/plain", ""))
        if text and len(self.display) - images < MAX_TEXTS:
            self.display.append(ReplDisplay("text/plain", text))

    def result(self, status: ReplStatus, message: str, *, lost: bool) -> ReplResult:
        """Return the result of the cell.

        Args:
            status: Status of the result.
            message: Message of the interpreter.
            lost: True if state was lost.
        """
        out, err = self._streams.values()
        error, fields = None, fields_of(self._last.get("error"))
        if fields is not None and status == "ok":  # after a timeout, the KeyboardInterrupt is that of `_stop`
            status = "error"
            error = ReplError(*(text_of(fields.get(name, "")) for name in ("ename", "evalue", "traceback")))
        value = self._last.get("value")
        return ReplResult(
            stdout=out.text(),
            stderr=err.text(),
            display=tuple(self.display),
            error=error,
            timed_out=status == "timeout",
            execution_count=self.seq,
            value=None if value is None else text_of(value),
            status=status,
            message=message,
            state_lost=lost,
            omitted_bytes=out.omitted + err.omitted,
        )


def text_of(value: object) -> str:
    """Return a received value as a short text, without colours, that can be written anywhere."""
    text = _COLOURS.sub("", str(value)[: 2 * MAX_TEXT])
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _bytes(data: object) -> bytes:
    try:
        return base64.b64decode(data) if isinstance(data, str) else b""
    except (binascii.Error, ValueError):
        return b""
