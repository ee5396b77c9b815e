"""Stored data of a kernel's frames is bounded and of known shape, for any content."""

import ast
import base64
import json
from collections.abc import Sequence
from importlib.resources import files

import pytest

from torchrl_agentic.repl.kernel_link import MAX_IMAGES, MAX_TEXTS, CellOutput, KernelLink
from torchrl_agentic.repl.supervised import KINDS, MAX_IMAGE
from torchrl_agentic.sandbox import BubblewrapSandbox
from torchrl_agentic.sandbox.bubblewrap import why_not
from torchrl_agentic.sandbox.inside.wire import BadMessage

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"bubblewrap does not work here: {why_not()}")
PACK = "import json, os, struct\ndef send(body): os.write(1, struct.pack('>I', len(body)) + body)\n"
END = {"seq": 1, "status": "ok", "value": None, "error": None}
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(100)).decode()


async def _answer(code: str, frames: Sequence[object] = ()) -> CellOutput:
    """Read the frames that a process in a sandbox sends: output of code, then these."""
    async with BubblewrapSandbox() as sandbox:
        await sandbox.write_file("frames", json.dumps(frames).encode())
        code += "\nfor frame in json.load(open('/work/frames')): send(json.dumps(frame).encode())"
        link = KernelLink(await sandbox.spawn((*sandbox.python_argv, "-c", PACK + code)))
        answer = CellOutput(1, 1000)
        try:
            await answer.read(link)
        finally:
            await link.end()
    return answer


async def _result(*frames: object):
    return (await _answer("", (*frames, END))).result("ok", "", lost=False)


@pytest.mark.parametrize(
    "body",
    [
        "send(b'x' * (5 << 20))",
        "os.write(1, b'\\xff' * 8)",
        "send(b'junk')",
        "send(b'\\xff')",
        "send(b'[]')",
        "send(b'[' * 200_000)",
        'send(b\'{"seq": 2, "status": "ok"}\')',
        'send(b\'{"status": "ok"}\')',
    ],
)
async def test_frame_of_another_cell_is_rejected(body: str):
    with pytest.raises(BadMessage):
        await _answer(body)


async def test_end_of_the_frames_is_reported():
    with pytest.raises(EOFError):
        await _answer("os.write(1, b'\\0\\0')")


@pytest.mark.parametrize(
    "frame",
    [
        {"stream": "stdout", "data": 7, "omitted": "x"},
        {"stream": [], "data": "AAAA", "omitted": -5},
        {"stream": "stdout", "data": "=", "omitted": None},
        {"stream": "stdout", "data": "é"},
        {"display": 7},
        {"display": {"image/png": [], "text/plain": ""}},
        {"display": {"image/svg+xml": "<svg>", "text/html": "<p>"}},
        {"display": {"image/png": base64.b64encode(b"GIF89a").decode()}},
        {"display": {"image/png": base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(1 << 20)).decode()}},
        {},
    ],
    ids=lambda frame: repr(frame)[:60],
)
async def test_odd_frames_leave_nothing(frame: dict[str, object]):
    result = await _result({"seq": 1, **frame})
    assert (result.stdout, result.stderr, result.display, result.omitted_bytes) == ("", "", (), 0)


async def test_output_without_end_keeps_its_head_and_tail():
    piece = {"seq": 1, "stream": "stdout", "data": base64.b64encode(b"x" * 900).decode(), "omitted": 50}
    result = await _result(*[piece] * 100)
    assert result.stdout.count("x") == 1000
    assert result.omitted_bytes == 100 * 950 - 1000
    assert "[94000 bytes omitted]" in result.stdout


async def test_only_so_many_displays_are_kept_and_texts_are_short():
    frame = {"seq": 1, "display": {"image/png": PNG, "text/plain": "t" * 100_000}}
    result = await _result(*[frame] * 4, *[frame] * 40)
    kinds = [shown.media_type for shown in result.display]
    assert (kinds.count("image/png"), kinds.count("text/plain")) == (MAX_IMAGES, MAX_TEXTS)
    assert max(len(shown.data) for shown in result.display) < 50_000


async def test_values_and_errors_are_texts_without_colours_that_can_be_written():
    end = {**END, "value": "\x1b[31mred\x1b[0m \ud800", "error": {"ename": [], "evalue": 7}}
    result = (await _answer("", [end])).result("ok", "", lost=False)
    assert result.value == "red \\ud800"
    assert (result.error.ename, result.error.evalue, result.error.traceback) == ("[]", "7", "")


def test_worker_has_the_same_image_limits_as_the_package():
    """It cannot import our limits, and repeats them."""

    def constant(file: str, name: str) -> object:
        tree = ast.parse(files("torchrl_agentic.repl").joinpath(file).read_text("utf-8"))
        (found,) = (node.value for node in tree.body if isinstance(node, ast.Assign)
                    and ast.unparse(node.targets[0]) == name)  # fmt: skip
        return eval(ast.unparse(found))

    assert constant("kernel.py", "IMAGES") == tuple(KINDS)
    assert constant("kernel.py", "MAX_IMAGE") == MAX_IMAGE
    assert constant("kernel_client.py", "MAX_IMAGE") > len(base64.b64encode(bytes(MAX_IMAGE)))
