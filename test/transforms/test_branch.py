"""A row's trajectory continues in several rows, each with its own copy of the open sessions."""

import pytest
from helpers.chat_envs import Counter, advance, begin, call, chat_env, results, step

from torchrl_agentic import FileReadTool, PythonTool, ShellTool, ToolCompose
from torchrl_agentic.repl import SubprocessRepl, repl_in
from torchrl_agentic.sandbox import BubblewrapSandbox, default_sandbox
from torchrl_agentic.sandbox.bubblewrap import why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"bubblewrap does not work here: {why_not()}")


def _tools(kind):
    sandbox = default_sandbox() if kind == "default" else BubblewrapSandbox()
    repl = repl_in(sandbox) if kind == "default" else SubprocessRepl(sandbox)
    return [PythonTool(repl), ShellTool(sandbox), FileReadTool(sandbox)]


@pytest.mark.parametrize("kind", ["default", "replayed"])
def test_branches_start_with_copies_of_state_and_files(kind):
    compose = ToolCompose(_tools(kind))
    env = chat_env((3,), compose)
    first = call("python", code="x = [1]; open('f', 'w').write('a')") + call("shell", command="mkdir d")
    td = advance(env, begin(env), first, "", "")
    compose.branch(0, [1, 2])
    said = [call("python", code=f"x.append({row}); open('f', 'a').write('{row}'); x") for row in range(3)]
    td = advance(env, td, *said)
    assert [texts[-1] for texts in results(td)] == [f"[1, {row}]" for row in range(3)]
    td = advance(env, td, *[call("shell", argv=["sh", "-c", "cat f; ls"])] * 3)
    assert [texts[-1].split("\n")[0] for texts in results(td)] == ["a0d", "a1d", "a2d"]
    env.close()


def test_a_tool_that_cannot_be_branched_is_named():
    compose = ToolCompose([Counter()])
    env = chat_env((2,), compose)
    step(env, begin(env), call("count"), "")
    with pytest.raises(TypeError, match="cannot be branched"):
        compose.branch(0, [1])
    env.close()


def test_a_row_without_anything_open_branches_too():
    compose = ToolCompose([Counter()])
    env = chat_env((2,), compose)
    begin(env)
    compose.branch(0, [1])
    env.close()
