"""
10 · From TorchRL's tool transforms
===================================

TorchRL 0.14 has tool transforms, each of which reads the last message, runs what it finds there, and appends
the answers. Here one transform, `ToolCompose`, does that for all tools. An old transform becomes one of them
by `as_tool`; most have something better to become. This goes through all of them, argument by argument.
"""

# %%
# Before
# ------
# A transform per kind of tool, each with a syntax of its own. Whatever the other rows do, they wait: rows and
# calls run one after the other.
import tensordict
from tensordict import TensorDict
from torchrl.data.llm import History
from torchrl.envs import TransformedEnv
from torchrl.envs.llm import ChatEnv
from torchrl.envs.llm.transforms import PythonInterpreter

tensordict.set_list_to_stack(True).set()
ask = TensorDict({"query": ["What is 6 * 7?"]}, batch_size=(1,))

env = TransformedEnv(ChatEnv(batch_size=(1,)), PythonInterpreter(persistent=True))
td = env.reset(ask.clone())
said = History(role="assistant", content="```python\nprint(6 * 7)\n```").view(1, 1)
td["history"].full = td["history"].prompt.extend(said, dim=-1, inplace=False)
before = env.step(td)["next", "history"].prompt[0, -1].content
print(before)
env.close()
env.transform.close()

# %%
# After
# -----
# The same transform as a tool, with the syntax that it had: the parser `fence` reads Markdown code. What the
# model is shown, which calls failed and how long they took is in the TensorDict and in the `Turn` of a
# recorder.
from torchrl_agentic import ToolCompose, as_tool
from torchrl_agentic.testing import ScriptedPolicy

tools = ToolCompose([as_tool(PythonInterpreter(persistent=True), name="python")], parser="fence")
env = TransformedEnv(ChatEnv(batch_size=(1,)), tools)
policy = ScriptedPolicy([["```python\nprint(6 * 7)\n```", "```python\n1 / 0\n```"]])
td = env.reset(ask.clone())
for _ in range(2):
    step = env.step(policy(td))
    after = step["next", "history"].prompt[0, -1].content
    print(after.strip().splitlines()[-2:], "errors:", step["next", "agentic", "n_errors"].item())
    td = env.step_mdp(step)
env.close()
assert "42" in before

# %%
# Better
# ------
# `PythonTool` has what the old interpreter lacks: a sandbox, functions that see the variables of their own
# block, output at any speed, and interpreters that start in milliseconds and can be branched. A typed
# function needs no transform at all.
from torchrl_agentic import PythonTool


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


tools = ToolCompose([PythonTool(), add], parser="hermes")
print([tool.name for tool in tools.tools])
print(tools["add"].input_schema["properties"])
tools.close()

# %%
# What changes for all of them
# ----------------------------
# - The parser is `ToolCompose`'s; the transform's own is not used, nor is its pattern. Arguments arrive as
#   the model wrote them.
# - Rows run side by side. The calls of one row to one transform run one after the other, as they did.
# - Each call is answered, in order, with a message of its own, and what failed is marked as an error.
# - A call may take ``per_call_timeout`` seconds. Then it is stopped, with the processes that it has started.
# - A transform serves one environment, and its row belongs to one trajectory: another one is refused.
#
# Everything, row by row
# ----------------------
# ``test/test_migration.py`` holds a test for each row: without it, or with one too many, it fails.
#
# .. list-table::
#    :header-rows: 1
#
#    * - old
#      - now
#      - what is different, and why
#    * - ``env.append_transform(A()).append_transform(B())``
#      - ``ToolCompose([as_tool(A(), name="a"), as_tool(B(), name="b")])``
#      - The message is parsed once, and the answers stand in the order of the calls. Of stacked transforms
#        the second reads what the first has answered, not what the model said.
#    * - ``PythonInterpreter()``
#      - ``PythonTool()``; ``as_tool(PythonInterpreter(), name="python")``
#      - A program that fails shows what it had printed before. ``parser="fence"`` for the old syntax.
#    * - ``PythonInterpreter(persistent=True)``
#      - ``PythonTool()``; ``as_tool(PythonInterpreter(persistent=True), name="python")``
#      - All interpreters of a batch start at once; one that ended itself is replaced, and the model told.
#        Still TorchRL's: 10 ms per line of output, anything on stderr is a failure, no sandbox.
#    * - ``PythonInterpreter(timeout=)``
#      - ``PythonTool(timeout=)``; the same, or ``ToolCompose(per_call_timeout=)``
#      - Whichever is shorter counts; either way the result has the status TIMEOUT.
#    * - ``PythonInterpreter(tool_name=)``
#      - ``ToolCompose(tool_role=)``
#      - One role for all tools; `as_tool` warns, and does not use the transform's.
#    * - ``PythonInterpreter(tokenizer=)``
#      - nothing
#      - It was never used.
#    * - ``PythonInterpreter(services=, service_name=, namespace=)``
#      - ``SandboxFusionTool(url)``; `as_tool` with the same
#      - It works as it did: Ray's interpreters are shared by all rows, which see each other's variables.
#    * - ``SimpleToolTransform(tools=)``
#      - the functions themselves: ``ToolCompose([f, g])``; ``as_tool(transform, name="f")`` for each
#      - Their signatures are told to the model, and arguments checked. ``{"success": False}`` is an error. A
#        tuple is a list, as it is for the functions themselves.
#    * - ``SimpleToolTransform(tool_schemas=)``
#      - the same; ``as_tool(input_schema=, description=)`` comes first
#      - They are told to the model; TorchRL only kept them.
#    * - ``SimpleToolTransform(parser=)``
#      - ``ToolCompose(parser=)``
#      - An object with ``parse`` and ``render``, or a name: ``"xml"`` for `XMLBlockParser`.
#    * - ``SimpleToolTransform(tool_call_pattern=)``
#      - ``ToolCompose(parser=)``
#      - A pattern cannot tell where JSON ends; see the tutorial on adding a parser.
#    * - ``SimpleToolTransform(tool_name=)``
#      - ``ToolCompose(tool_role=)``
#      - As above.
#    * - ``SimpleToolTransform(timeout=)``
#      - ``ToolCompose(per_call_timeout=)``
#      - TorchRL never looked at it.
#    * - ``BrowserTransform()``
#      - ``as_tool(BrowserTransform(), name="browser")``; ``HttpTool()`` where pages need no script
#      - A context for each row: pages and cookies of its own, side by side in one Chromium. A masked reset
#        closes those of its rows only. ``"screenshot"`` is told to the model and, still, an unknown action.
#    * - ``BrowserTransform(allowed_domains=)``
#      - the same; ``HttpTool(allowed_hosts=)``
#      - The host itself, or one below it; TorchRL takes ``notexample.org`` for ``example.org``. Only http and
#        https. Not checked: redirects, links that are clicked, what a page loads; `HttpTool` checks these.
#    * - ``BrowserTransform(headless=)``
#      - the same
#      - Nothing. The browser is playwright's; another one goes into the folder of PLAYWRIGHT_BROWSERS_PATH.
#    * - ``BrowserTransform(timeout=)``
#      - the same
#      - It counts for each action; TorchRL never looked at it.
#    * - ``BrowserTransform(tokenizer=, tool_name=)``
#      - nothing; ``ToolCompose(tool_role=)``
#      - As above.
#    * - ``MCPToolTransform(servers=)``
#      - ``MCPToolset``; ``as_tool(transform, name="server.tool")`` for each tool
#      - Texts and images in place of the ``repr`` of a list, errors as errors, what the server tells of its
#        tools, servers that end with `close`. TorchRL never sends "initialize": servers of the Python SDK
#        refuse it, with SDK 1.x and 2.x alike, and need `MCPToolset`.
#    * - ``MCPToolTransform(tool_call_pattern=, tool_name=)``
#      - ``ToolCompose(parser=, tool_role=)``
#      - As above.
#    * - ``MCPToolTransform(timeout=)``
#      - the same, or ``ToolCompose(per_call_timeout=)``
#      - The call is called off, and does not go on behind the answer.
#    * - ``ExecuteToolsInOrder(registry=)``
#      - ``as_tool(transform, name="service")`` for each service
#      - A result may be a list. What is no JSON, or raises, costs its own call only.
#    * - ``ExecuteToolsInOrder(parser=XMLBlockParser())``
#      - ``ToolCompose(parser="xml")``
#      - Attributes in any order. A tag is the id of its call: ``<tool_result call_id="A">`` has it, and
#        ``ToolContext.tag``. JSON that is broken is an error; it was an argument ``raw``.
#    * - ``ExecuteToolsInOrder(parser=JSONCallParser())``
#      - ``ToolCompose(parser="json")``
#      - An ``id`` may be given, text that is no such JSON is text, and end-of-turn tokens do no harm.
#    * - ``ExecuteToolsInOrder(stop_on_error=True)``
#      - the same
#      - What is not run is answered too: SKIPPED.
#    * - ``ExecuteToolsInOrder(pass_state_to_tools=)``
#      - the same, and ``as_tool(wants_state=True)`` with ``ToolCompose(pass_state_to_tools=True)``
#      - ``_state`` was always empty. Now it is the row's, without conversation and answers, where both ask
#        for it. A service that has no such parameter is not given it.
#    * - ``ToolService.schema_in``
#      - the same; a typed function is simpler
#      - It is told to the model and checked; nothing in it is required.
#    * - ``ToolService.schema_out``
#      - ``Tool.output_schema``
#      - Nobody checks it, as before.
#    * - ``class Mine(ToolTransformBase)``
#      - a typed function, or a subclass of `Tool`; ``as_tool(Mine(), name="mine")``
#      - ``_process_batch_item`` gets each call by itself, as ``<tool name="mine">{…}</tool>``, or as
#        ``as_tool(render_call=)`` writes it; ``_format_result`` is called. A row that it may keep things for
#        cannot be branched.
