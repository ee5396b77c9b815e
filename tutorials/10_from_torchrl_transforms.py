"""
10 · From TorchRL's tool transforms
===================================

Each tool transform of TorchRL 0.14 reads the last message, runs the calls that it finds there, and appends
the results. Here one transform, `ToolCompose`, does this for all tools. `as_tool` turns an old transform into
a tool; most have a better replacement. This page covers all of them, argument by argument.
"""

# %%
# Before
# ------
# There is one transform per kind of tool, each with its own syntax. Rows and calls run one after the other.
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
# The same transform as a tool, with the same syntax: the parser `fence` reads Markdown code. The TensorDict,
# and the `Turn` that a recorder gets, contain the results, the failed calls and the times.
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
# `PythonTool` adds what the old interpreter lacks: a sandbox, functions that see the variables of their own
# block, fast output, and interpreters that start in milliseconds and can be branched. A typed function needs
# no transform at all.
from torchrl_agentic import PythonTool


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


tools = ToolCompose([PythonTool(), add], parser="hermes")
print([tool.name for tool in tools.tools])
print(tools["add"].input_schema["properties"])
tools.close()

# %%
# What changes for all of them
# ----------------------------
# - `ToolCompose` parses; the parser and the pattern of the transform are not used. Arguments arrive as the
#   model wrote them.
# - Rows run concurrently. The calls of one row to one transform run one after the other, as before.
# - Each call gets a message of its own, in order, and failures are marked as errors.
# - A call may take ``per_call_timeout`` seconds. Then it is stopped, with the processes that it started.
# - A transform serves one environment, and its row one trajectory: using it elsewhere raises an error.
#
# Everything, row by row
# ----------------------
# ``test/test_migration.py`` contains a test for each row, and fails if a row is missing or has no test.
#
# .. list-table::
#    :header-rows: 1
#
#    * - old
#      - now
#      - what is different, and why
#    * - ``env.append_transform(A()).append_transform(B())``
#      - ``ToolCompose([as_tool(A(), name="a"), as_tool(B(), name="b")])``
#      - The message is parsed once, and results are in the order of the calls. The second of two stacked
#        transforms reads the answer of the first, not the message of the model.
#    * - ``PythonInterpreter()``
#      - ``PythonTool()``; ``as_tool(PythonInterpreter(), name="python")``
#      - A failing program shows what it printed before. ``parser="fence"`` for the old syntax.
#    * - ``PythonInterpreter(persistent=True)``
#      - ``PythonTool()``; ``as_tool(PythonInterpreter(persistent=True), name="python")``
#      - All interpreters of a batch start at once; one that ended itself is replaced, and the model is told.
#        Unchanged: 10 ms per line of output, any text on stderr is a failure, no sandbox.
#    * - ``PythonInterpreter(timeout=)``
#      - ``PythonTool(timeout=)``; the same, or ``ToolCompose(per_call_timeout=)``
#      - The shorter one counts; the result has the status TIMEOUT.
#    * - ``PythonInterpreter(tool_name=)``
#      - ``ToolCompose(tool_role=)``
#      - One role for all tools; `as_tool` warns, and does not use the transform's.
#    * - ``PythonInterpreter(tokenizer=)``
#      - nothing
#      - It was never used.
#    * - ``PythonInterpreter(services=, service_name=, namespace=)``
#      - ``SandboxFusionTool(url)``; `as_tool` with the same
#      - Unchanged: all rows share Ray's interpreters and see each other's variables.
#    * - ``SimpleToolTransform(tools=)``
#      - the functions themselves: ``ToolCompose([f, g])``; ``as_tool(transform, name="f")`` for each
#      - The model sees their signatures, and arguments are checked. ``{"success": False}`` is an error. A
#        tuple becomes a list, as for plain functions.
#    * - ``SimpleToolTransform(tool_schemas=)``
#      - the same; ``as_tool(input_schema=, description=)`` comes first
#      - The model sees them; TorchRL only stored them.
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
#      - TorchRL ignored it.
#    * - ``BrowserTransform()``
#      - ``as_tool(BrowserTransform(), name="browser")``; ``HttpTool()`` where pages need no script
#      - A context for each row: pages and cookies of its own, side by side in one Chromium. A masked reset
#        closes only those of its rows. ``"screenshot"`` is in the schema and remains an unknown action.
#    * - ``BrowserTransform(allowed_domains=)``
#      - the same; ``HttpTool(allowed_hosts=)``
#      - The host itself, or one below it; TorchRL takes ``notexample.org`` for ``example.org``. Only http and
#        https. Not checked: redirects, links that are clicked, what a page loads; `HttpTool` checks these.
#    * - ``BrowserTransform(headless=)``
#      - the same
#      - Nothing. The browser is Playwright's; put another one into the folder PLAYWRIGHT_BROWSERS_PATH.
#    * - ``BrowserTransform(timeout=)``
#      - the same
#      - It bounds each action; TorchRL ignored it.
#    * - ``BrowserTransform(tokenizer=, tool_name=)``
#      - nothing; ``ToolCompose(tool_role=)``
#      - As above.
#    * - ``MCPToolTransform(servers=)``
#      - ``MCPToolset``; ``as_tool(transform, name="server.tool")`` for each tool
#      - Texts and images instead of the ``repr`` of a list, errors as errors, the server's descriptions of
#        its tools, servers that end with `close`. TorchRL never sends "initialize", which servers of the
#        Python SDK (1.x and 2.x) demand: they need `MCPToolset`.
#    * - ``MCPToolTransform(tool_call_pattern=, tool_name=)``
#      - ``ToolCompose(parser=, tool_role=)``
#      - As above.
#    * - ``MCPToolTransform(timeout=)``
#      - the same, or ``ToolCompose(per_call_timeout=)``
#      - The call is cancelled and does not continue after its result.
#    * - ``ExecuteToolsInOrder(registry=)``
#      - ``as_tool(transform, name="service")`` for each service
#      - A result may be a list. Invalid JSON, or an exception, affects only its own call.
#    * - ``ExecuteToolsInOrder(parser=XMLBlockParser())``
#      - ``ToolCompose(parser="xml")``
#      - Attributes in any order. A tag is the id of its call, in ``<tool_result call_id="A">`` and in
#        ``ToolContext.tag``. Invalid JSON is an error; before, it became an argument ``raw``.
#    * - ``ExecuteToolsInOrder(parser=JSONCallParser())``
#      - ``ToolCompose(parser="json")``
#      - Calls may have an ``id``, other text is text, and end-of-turn tokens do no harm.
#    * - ``ExecuteToolsInOrder(stop_on_error=True)``
#      - the same
#      - Calls that do not run get a result, too: SKIPPED.
#    * - ``ExecuteToolsInOrder(pass_state_to_tools=)``
#      - the same, and ``as_tool(wants_state=True)`` with ``ToolCompose(pass_state_to_tools=True)``
#      - ``_state`` was always empty. Now it holds the row, without conversation and answers, if both options
#        are set. A service without such a parameter does not get it.
#    * - ``ToolService.schema_in``
#      - the same; a typed function is simpler
#      - The model sees it, and arguments are checked; none of them is required.
#    * - ``ToolService.schema_out``
#      - ``Tool.output_schema``
#      - It is not checked, as before.
#    * - ``class Mine(ToolTransformBase)``
#      - a typed function, or a subclass of `Tool`; ``as_tool(Mine(), name="mine")``
#      - ``_process_batch_item`` gets each call by itself, as ``<tool name="mine">{…}</tool>``, or as
#        ``as_tool(render_call=)`` writes it; ``_format_result`` is called. Rows for which it may keep state
#        cannot be branched.
