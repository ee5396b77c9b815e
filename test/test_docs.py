"""The pages of the site: their programs run, and what they list is complete."""

import contextlib
import importlib
import io
import json
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
PAGES = {
    path.relative_to(DOCS).as_posix(): path.read_text("utf-8")
    for path in sorted(DOCS.rglob("*.md"))
    if "_build" not in path.parts
}
PROGRAMS = {
    name: blocks for name, text in PAGES.items() if (blocks := re.findall(r"```python\n(.*?)```", text, re.S))
}


def test_pages_hold_programs():
    assert {"index.md", "faq.md", "migrate/verl.md", "howto/state.md"} <= set(PROGRAMS)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("own_environ")
@pytest.mark.parametrize("page", PROGRAMS)
def test_the_programs_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """From top to bottom, in one namespace, as a reader would paste them."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "page"}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for block in PROGRAMS[page]:
            exec(compile(block, page, "exec"), names)
    for line in re.findall(r"```text\n(.*?)```", PAGES[page], re.S):
        expected = [re.escape(part).replace("…", ".*") for part in line.splitlines()]
        assert re.search("\n".join(expected), printed.getvalue()), printed.getvalue()


@pytest.mark.parametrize(
    "package",
    ["", "parsers", "tools", "sandbox", "repl", "limits", "rollout", "records", "testing", "interactions"],
)
def test_every_public_name_has_a_place_in_the_api(package: str):
    module = importlib.import_module(f"torchrl_agentic.{package}".rstrip("."))
    pages = "\n".join(page.read_text("utf-8") for page in (DOCS / "api").glob("*.rst"))
    listed = set(re.findall(r"\btorchrl_agentic(?:\.\w+)?\.(\w+)$", pages, re.M))
    assert [name for name in module.__all__ if name not in listed] == []


def test_nothing_is_listed_in_the_api_that_is_not_public():
    pages = "\n".join(page.read_text("utf-8") for page in (DOCS / "api").glob("*.rst"))
    for path in re.findall(r"^ +~(torchrl_agentic\.[\w.]+)$", pages, re.M):
        module, _, name = path.rpartition(".")
        assert name in importlib.import_module(module).__all__, path


def test_all_results_of_the_benchmarks_are_shown():
    groups = json.loads((DOCS / "_data" / "benchmarks.json").read_text("utf-8"))["groups"]
    shown = re.findall(r"```\{benchmarks\} (.+)\n", PAGES["performance.md"])
    assert [group for group in groups if not group.startswith(tuple(shown))] == []


def test_the_pages_load_nothing_from_elsewhere():
    """The site is read on machines without a network."""
    images = re.compile(r"!\[[^]]*\]\(https?://|<(?:img|script|link)[^>]+https?://")
    assert [name for name, text in PAGES.items() if images.search(text)] == []
