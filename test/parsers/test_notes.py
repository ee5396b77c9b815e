"""The page on parsing explains each note and each error code that the parsers have."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import torchrl_agentic.parsers

PARSERS = Path(torchrl_agentic.parsers.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "howto" / "parsing.md"
NAMES = ("name", "aliases", "style", "_FIELD_NAMES")
OTHER_WORDS = {
    "at_least_one", "const_string", "dots_function_call", "function_call", "function_calls", "in_section",
    "is_error", "is_live", "is_whole", "json_schema", "key_end", "opened_at", "parameter_end",
    "reasoning_open", "stop_after_first", "structural_tag", "tags_with_separator", "think_fast",
    "think_faster", "tool_call", "tool_call_id", "tool_calls", "tool_name", "tool_response", "tool_result",
    "tool_use", "tool_use_id", "triggered_tags", "turn_end", "unclosed_fences", "value_begin",
    "chat_template", "draft_policy", "failed_searches", "reasoning_end", "result_tags",
}  # fmt: skip
"""Words in the code of the parsers that are neither notes nor error codes: fields, tags, attributes."""


def table(heading: str) -> set[str]:
    """Return the first column of the table under a heading of the page."""
    _, _, rest = PAGE.read_text("utf-8").partition(f"\n## {heading}\n")
    section = rest.partition("\n## ")[0]
    return set(re.findall(r"^\| `(\w+)` \|", section, re.M))


def trees(*folders: str) -> Iterator[ast.Module]:
    for folder in folders:
        for path in (PARSERS / folder).glob("*.py"):
            yield ast.parse(path.read_text("utf-8"))


def targets(node: ast.AST) -> list[str]:
    if isinstance(node, ast.keyword):
        return [node.arg or ""]
    found = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in found if isinstance(target, ast.Name)]


def strings(node: ast.AST) -> set[str]:
    return {
        one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)
    }


def codes(tree: ast.Module) -> Iterator[str]:
    """Return the codes of errors: first arguments of their constructors, and values of `code`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("CallParseError", "CallError"):
            yield from strings(node.args[0])
        if isinstance(node, ast.Assign) and targets(node) == ["code"] and isinstance(node.value, ast.IfExp):
            yield from (*strings(node.value.body), *strings(node.value.orelse))


def words(tree: ast.Module) -> set[str]:
    """Return the strings that may be notes: words with an underscore, but for names of formats."""
    named = [node for node in ast.walk(tree) if isinstance(node, ast.Assign | ast.AnnAssign | ast.keyword)]
    skipped = {id(one) for node in named if set(targets(node)) & set(NAMES) for one in ast.walk(node)}
    found = (
        node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in skipped
    )
    return {word for word in found if isinstance(word, str) and re.fullmatch("[a-z]+(?:_[a-z]+)+", word)}


CODES = {code for tree in trees("", "engine", "formats", "adapters") for code in codes(tree)}


def test_each_error_code_is_explained():
    assert table("Error codes") == CODES


def test_each_note_is_explained():
    """Add a new word that is not a note to OTHER_WORDS."""
    used = {word for tree in trees("engine", "formats") for word in words(tree)} - OTHER_WORDS
    explained = table("Notes of a message") | table("Notes of a call")
    assert used - CODES == explained - CODES
