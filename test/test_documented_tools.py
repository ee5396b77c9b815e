"""Every tool that README, how-to pages and tutorials define keeps the promises of `ToolContract`."""

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from torchrl_agentic import LifecycleTool, PythonTool, as_tool
from torchrl_agentic.testing import ToolContract
from torchrl_agentic.tools.verl import OpenAIFunctionToolSchema

ROOT = Path(__file__).parent.parent
TAKES_TOOLS = ("ToolCompose", "SimpleToolTransform", "as_tool")


def programs() -> Iterator[tuple[str, str]]:
    """Document → its Python, including Python files that it writes."""
    for page in ("README.md", "docs/howto/tools.md", "docs/howto/extending.md"):
        text = (ROOT / page).read_text("utf-8")
        yield Path(page).stem, "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    for path in sorted((ROOT / "tutorials").glob("*.py")):
        yield path.stem, path.read_text("utf-8")


def trees(program: str) -> Iterator[ast.Module]:
    """The program, and each text in it that is a program itself."""
    yield (tree := ast.parse(program))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\ndef " in node.value:
            yield ast.parse(node.value)


def tools_in(tree: ast.Module) -> list[str]:
    """The names of what is defined as a tool: classes that run, decorated functions, and functions passed as
    tools."""
    passed = {
        name.id
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and ast.unparse(call.func) in TAKES_TOOLS
        for name in ast.walk(call)
        if isinstance(name, ast.Name)
    }
    found: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            methods = {each.name for each in node.body if isinstance(each, ast.AsyncFunctionDef)}
            inherits = any(isinstance(base, ast.Name) and base.id in found for base in node.bases)
            if methods & {"run", "execute"} or inherits:
                found.append(node.name)
        elif isinstance(node, ast.FunctionDef):
            marks = " ".join(map(ast.unparse, node.decorator_list))
            if re.search(r"\b(function_)?tool\b", marks) or node.name in passed:
                found.append(node.name)
    return found


def is_constant(node: ast.stmt) -> bool:
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
        return False
    try:
        ast.literal_eval(node.value)
    except ValueError:
        return False
    return True


def definitions(tree: ast.Module) -> dict[str, Any]:
    """What a program imports and defines, its constants too; nothing else of it is run."""
    kept = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    body = [node for node in tree.body if isinstance(node, kept) or is_constant(node)]
    names: dict[str, Any] = {"__name__": "document"}
    exec(compile(ast.Module(body, []), "document", "exec"), names)
    return names


@dataclass
class Example:
    """How to create a documented tool, and the arguments of a call."""

    good: Mapping[str, Any]
    bad: tuple[Mapping[str, Any], ...] = ({},)
    row: Mapping[str, Any] = field(default_factory=dict[str, Any])
    make: Callable[[Any], Any] = lambda kind: kind() if isinstance(kind, type) else kind


def lifecycle(argument: str = "number", **config: Any) -> Callable[[Any], Any]:
    def make(kind: Any) -> LifecycleTool:
        types = {"number": "integer", "text": "string"}
        properties = {argument: {"type": types[argument]}}
        parameters = {"type": "object", "properties": properties, "required": [argument]}
        function = {"name": "it", "description": "Do it.", "parameters": parameters}
        return LifecycleTool(
            kind(config, OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function}))
        )

    return make


def old(function: Any) -> Any:
    from torchrl.envs.llm.transforms import SimpleToolTransform

    return as_tool(SimpleToolTransform(tools={"double": function}), name="double")


def greeting(name: str) -> str:
    """Greet somebody."""
    return f"hello {name}"


EXAMPLES = {
    ("README", "add"): Example({"a": 1, "b": 2}, ({}, {"a": "x", "b": 1})),
    ("extending", "add"): Example({"a": 1, "b": 2}, ({}, {"a": "x", "b": 1})),
    ("extending", "Shouting"): Example({"name": "Ann"}, make=lambda kind: kind(greeting)),
    ("extending", "greet"): Example({"name": "Ann"}),
    ("tools", "add"): Example({"a": 1, "b": 2}, ({}, {"a": "x", "b": 1})),
    ("tools", "guess"): Example({"number": 7}, row={"ground_truth": "7"}),
    ("tools", "Notes"): Example({"line": "x"}, ({}, {"line": 3})),
    ("tools", "Points"): Example({"number": 1}, make=lifecycle()),
    ("tools", "double"): Example({"n": 2}, make=old),
    ("01_first_tool", "divide"): Example({"a": 1, "b": 2}, ({}, {"a": "x"})),
    ("01_first_tool", "check"): Example({"answer": 7}, row={"ground_truth": "7"}),
    ("01_first_tool", "hint"): Example({}, (), row={"hints": ["think"]}),
    ("01_first_tool", "_power"): Example({"base": 2}),
    ("02_state_per_trajectory", "Basket"): Example({"thing": "pen"}, ({}, {"thing": "car"})),
    ("02_state_per_trajectory", "Shared"): Example({"thing": "pen"}, ({}, {"thing": "car"})),
    ("02_state_per_trajectory", "Branching"): Example({"thing": "pen"}, ({}, {"thing": "car"})),
    ("07_tools_with_a_life", "GuessTool"): Example({"number": 1}, make=lifecycle(most=9, cost=0.1)),
    ("07_tools_with_a_life", "Paid"): Example({"code": "1"}, make=lambda kind: kind(PythonTool())),
    ("08_tools_from_files_and_servers", "convert"): Example({"miles": 1}),
    ("08_tools_from_files_and_servers", "NotesTool"): Example(
        {"text": "x"}, ({},), make=lifecycle("text", most=2)
    ),
    ("09_wrappers_and_users", "look_up"): Example({"title": "Emma"}),
    ("09_wrappers_and_users", "lend"): Example({"title": "Emma"}),
    ("10_from_torchrl_transforms", "add"): Example({"a": 1, "b": 2}, ({}, {"a": "x", "b": 1})),
}
MISTAKES = {("01_first_tool", "root")}
"""What is defined to show how it is refused."""
DEFINED = {
    (document, name): tree
    for document, program in programs()
    for tree in trees(program)
    for name in tools_in(tree)
}


def test_each_documented_tool_has_an_example_and_each_example_a_tool():
    assert set(DEFINED) == set(EXAMPLES) | MISTAKES


@pytest.fixture(params=[key for key in EXAMPLES if key in DEFINED], ids="-".join)
def example(request: pytest.FixtureRequest) -> tuple[Example, Any]:
    document, name = request.param
    return EXAMPLES[document, name], definitions(DEFINED[document, name])[name]


class TestDocumentedTools(ToolContract):
    """The contract, once for each tool; of a subclass only `make`, `good`, `bad` and `row` are its own."""

    @pytest.fixture(autouse=True)
    def _take(self, example: tuple[Example, Any]) -> None:
        self.example, self.kind = example

    def make(self) -> Any:
        return self.example.make(self.kind)

    @property
    def good(self) -> Any:
        return self.example.good

    @property
    def bad(self) -> Any:
        return self.example.bad

    @property
    def row(self) -> Any:
        return self.example.row
