"""Stored data of answers is bounded and of known shape, for any content: code may have forged them."""

import ast
import asyncio
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import pytest
from helpers.limit import limit
from helpers.loop_stalls import no_stalls

from torchrl_agentic.repl import ReplResult, SubprocessRepl
from torchrl_agentic.repl.base import LOST
from torchrl_agentic.repl.supervised import KINDS, MAX_IMAGE, MAX_IMAGES, MAX_TEXT, MAX_TEXTS
from torchrl_agentic.sandbox import ResourceLimits
from torchrl_agentic.sandbox.inside.wire import Splitter, pack

PNG = b"\x89PNG\r\n\x1a\n" + bytes(100)
HEADER = {"stopped": "", "lost_before": False, "count": 1, "omitted": 0}
ENDED = [b""] * 3
DONE = [b""] * 7


class Answering:
    """A supervisor that answers the first cell with these bytes or fields, and the others as it should."""

    def __init__(self, answers: list[Any]) -> None:
        self.answers, self.sent = answers, asyncio.Queue[bytes]()
        self.requests: Splitter | None = None
        self.is_killed = False

    async def send(self, data: bytes) -> None:
        if self.requests is None:  # the first message is that of `BOOT`
            self.requests = Splitter(1 << 20)
            return
        for body, *_ in self.requests.feed(data):
            request = json.loads(body)
            if request["op"] == "cell" and self.answers:
                sent = self.answers.pop(0)
                if isinstance(sent, tuple):
                    header, *fields = sent
                    sent = answer({"id": request["id"], **header}, *fields)
                self.sent.put_nowait(sent)
            else:
                self.sent.put_nowait(answer({**HEADER, "id": request["id"]}, *DONE))

    async def receive(self) -> bytes:
        return b"" if self.is_killed else await self.sent.get()

    async def kill(self) -> None:
        self.is_killed = True
        self.sent.put_nowait(b"")

    async def wait(self) -> str:
        return "exit code 1"

    def errors(self) -> str:
        return ""


class Place:
    """A sandbox of such processes."""

    limits = ResourceLimits(output_bytes=1000)
    is_open = True
    losses = 0

    def __init__(self, answers: list[Any]) -> None:
        self.answers = answers

    async def spawn(self, argv: Sequence[str]) -> Answering:
        return Answering(self.answers)

    async def open(self) -> None: ...
    async def close(self) -> None: ...
    async def run(self, argv: Sequence[str], **options: Any) -> None: ...
    async def write_file(self, path: str, data: bytes) -> None: ...
    async def read_file(self, path: str, max_bytes: int | None = None) -> None: ...


def answer(header: object, *fields: bytes) -> bytes:
    return pack(json.dumps(header).encode(), *fields)


async def _results(sent: Any) -> tuple[ReplResult, ReplResult]:
    """Return the result of a cell that is answered with these bytes or fields, and that of the next one."""
    async with SubprocessRepl(Place([sent]), python_argv=("python3",)) as repl:
        async with asyncio.timeout(limit(5)):
            return await repl.execute("1"), await repl.execute("2")


async def _result(header: dict[str, object], *fields: bytes) -> ReplResult:
    return (await _results(({**HEADER, **header}, *fields)))[0]


@pytest.mark.parametrize(
    "sent",
    [
        b"\xff" * 8,
        pack(b"junk"),
        pack(b"\xff"),
        pack(b"[]"),
        pack(b"[" * 200_000),
        ({**HEADER, "id": [1]}, *DONE),
        b"\0\0\0\1x",
        ({}, *DONE),
        (HEADER, b"", b""),
        (HEADER, *DONE[:5]),
        ({**HEADER, "count": "1"}, *DONE),
        ({**HEADER, "stopped": []}, *DONE),
        ({**HEADER, "omitted": True}, *DONE),
        ({**HEADER, "how": {"a": 1}}, *ENDED),
        (HEADER, *DONE, *[b""] * 1_000_000),
        ({**HEADER, "padding": [0] * 400_000}, *DONE),
        pack(b'{"id": 0}') * 10,
        pack() * 10,
    ],
    ids=lambda sent: repr(sent)[:60],
)
async def test_invalid_answer_is_the_end_of_the_interpreter(sent: Any):
    async with no_stalls():
        result, after = await _results(sent)
    assert (result.status, result.state_lost) == ("died", True)
    assert LOST in result.message
    assert "invalid" in result.message
    assert (after.status, after.state_lost) == ("ok", False)


@pytest.mark.parametrize(
    "shown",
    [
        [b"image/png", b""],
        [b"image/png", b"GIF89a"],
        [b"image/png", b"\x89PNG\r\n\x1a\n" + bytes(1 << 20)],
        [b"image/svg+xml", b"<svg>"],
        [b"text/html", b"<p>"],
        [b"\xff", b"\xff"],
        [b"image/png"],
    ],
    ids=lambda shown: repr(shown)[:60],
)
async def test_odd_displays_leave_nothing(shown: list[bytes]):
    assert (await _result({}, *DONE, *shown)).display == ()


async def test_only_so_many_displays_are_kept_and_texts_are_short():
    displays = [b"image/png", PNG] * (MAX_IMAGES + 1) + [b"text/plain", b"t" * 100_000] * (MAX_TEXTS + 1)
    result = await _result({}, *DONE, *displays)
    kinds = [shown.media_type for shown in result.display]
    assert (kinds.count("image/png"), kinds.count("text/plain")) == (MAX_IMAGES, MAX_TEXTS)
    assert max(len(shown.data) for shown in result.display) <= MAX_TEXT


async def test_values_and_errors_are_short_texts_that_can_be_written():
    result = await _result(
        {}, b"", b"", b"", b"=\xed\xa0\x80" + b"x" * 200_000, b"E", b"\xff", b"t" * 200_000
    )
    assert result.value is not None
    assert result.value.encode()
    assert len(result.value) <= MAX_TEXT
    assert result.error is not None
    assert (result.error.ename, result.error.evalue, len(result.error.traceback)) == ("E", "\ufffd", MAX_TEXT)


def test_client_of_kernels_has_the_same_limits_of_images():
    """It cannot import ours, and repeats them."""
    tree = ast.parse(files("torchrl_agentic.repl").joinpath("kernel_client.py").read_text("utf-8"))
    text = {ast.unparse(node.targets[0]): ast.unparse(node.value)
            for node in tree.body if isinstance(node, ast.Assign)}  # fmt: skip
    assert eval(text["(MAX_IMAGES, MAX_IMAGE)"]) == (MAX_IMAGES, MAX_IMAGE)
    assert eval(text["(MAX_TEXTS, MAX_TEXT)"])[0] == MAX_TEXTS
    assert tuple(eval(text["IMAGES"])) == KINDS
