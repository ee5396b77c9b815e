"""Files go in with the dataset row and come back as references."""

import pytest

from torchrl_agentic import FileReadTool, ParsedCall, PythonTool, ShellTool
from torchrl_agentic.dispatch import Dispatcher
from torchrl_agentic.messages import FileRefPart, Status
from torchrl_agentic.repl import repl_in
from torchrl_agentic.sandbox import default_sandbox
from torchrl_agentic.sandbox.bubblewrap import why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"bubblewrap does not work here: {why_not()}")
STATE = {"files": {"data/in.csv": "a,b\n1,2\n", "raw.bin": b"\0\xff"}}


def _python(code: str, call_id: str = "c1") -> list[ParsedCall]:
    return [ParsedCall("python", {"code": code}, call_id)]


async def test_uploads_are_there_before_the_first_call_of_any_tool_of_the_workspace():
    sandbox = default_sandbox()
    tools = [
        PythonTool(repl_in(sandbox), uploads="files"),
        ShellTool(sandbox, uploads="files"),
        FileReadTool(sandbox),
    ]
    async with Dispatcher(tools).session("t") as session:
        first = await session.run([ParsedCall("shell", {"command": "cat data/in.csv"}, "c1")], state=STATE)
        assert first[0].text.startswith("a,b\n1,2")
        code = "open('raw.bin', 'rb').read(), open('raw.bin', 'wb').write(b'mine')"
        assert "b'\\x00\\xff'" in (await session.run(_python(code), state=STATE))[0].text
        again = await session.run(_python("open('raw.bin').read()"), state=STATE)
        assert again[0].text == "'mine'"


async def test_two_trajectories_have_their_own_uploads():
    dispatcher = Dispatcher([PythonTool(uploads="files")])
    for name in ("one", "two"):
        async with dispatcher.session(name) as session:
            results = await session.run(_python("open('f').read()"), state={"files": {"f": name}})
            assert results[0].text == f"'{name}'"
    await dispatcher.close()


@pytest.mark.parametrize("files", [{"../out": "x"}, {"/etc/passwd": "x"}, ["f"], {"f": 3}])
async def test_row_without_the_files_gives_infra(files):
    dispatcher = Dispatcher([PythonTool(uploads="files")])
    async with dispatcher.session("t") as session:
        (result,) = await session.run(_python("1"), state={"files": files})
        assert result.status is Status.INFRA
    await dispatcher.close()


async def test_new_and_changed_files_of_the_folder_come_back_once():
    dispatcher = Dispatcher([PythonTool(outputs="out")])
    async with dispatcher.session("t") as session:
        code = "import os; os.makedirs('out/d'); open('out/d/plot.png', 'w').write('x'); open('f', 'w')"
        (first,) = await session.run(_python(code))
        assert first.parts[1:] == (FileRefPart("/work/out/d/plot.png", "image/png"),)
        (second,) = await session.run(_python("1"))
        assert second.parts[1:] == ()
        (third,) = await session.run(_python("open('out/d/plot.png', 'a').write('y'); None"))
        assert [part.path for part in third.parts[1:]] == ["/work/out/d/plot.png"]
    await dispatcher.close()


def test_an_outputs_folder_outside_of_the_workspace_is_refused():
    with pytest.raises(PermissionError):
        PythonTool(outputs="/etc")
