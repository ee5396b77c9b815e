"""README and pages of the site: their programs run, their links lead somewhere, their lists are complete."""

import contextlib
import importlib
import io
import json
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = {
    path.relative_to(DOCS).as_posix(): path.read_text("utf-8")
    for path in sorted(DOCS.rglob("*.md"))
    if "_build" not in path.parts
}
PAGES["../README.md"] = (ROOT / "README.md").read_text("utf-8")
PROGRAMS = {
    name: blocks for name, text in PAGES.items() if (blocks := re.findall(r"```python\n(.*?)```", text, re.S))
}


def test_pages_hold_programs():
    assert {"../README.md", "index.md", "faq.md", "migrate/verl.md", "howto/state.md"} <= set(PROGRAMS)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:size_average and reduce args:UserWarning")  # of TorchRL's SFTLoss
@pytest.mark.usefixtures("own_environ")
@pytest.mark.parametrize("page", PROGRAMS)
def test_the_programs_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """From top to bottom, in one namespace, as a reader would paste them."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "page"}
    threads = torch.get_num_threads()
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            for block in PROGRAMS[page]:
                exec(compile(block, page, "exec"), names)
    finally:
        torch.set_num_threads(threads)
    for line in re.findall(r"```text\n(.*?)```", PAGES[page], re.S):
        expected = [re.escape(part).replace("…", ".*") for part in line.splitlines()]
        assert re.search("\n".join(expected), printed.getvalue()), printed.getvalue()


@pytest.mark.parametrize(
    "package",
    [
        "",
        "parsers",
        "tools",
        "sandbox",
        "repl",
        "limits",
        "collectors",
        "engines",
        "evaluation",
        "rollout",
        "rewards",
        "records",
        "testing",
        "trajectory",
        "interactions",
    ],
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


def slug(heading: str) -> str:
    """Return the anchor of a heading, as GitHub and MyST make it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize(
    "page", [*PAGES, "../CONTRIBUTING.md", "../SECURITY.md", "../CHANGELOG.md", "../benchmarks/README.md"]
)
def test_links_lead_to_files_and_headings_that_exist(page: str):
    text = re.sub(r"```.*?```|`[^`\n]*`", "", (DOCS / page).read_text("utf-8"), flags=re.S)
    lost: list[str] = []
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        file = (DOCS / page).parent / path if path else DOCS / page
        if "tutorials" in file.parts:  # the site makes these pages of the programs in `tutorials/`
            file = ROOT / "tutorials" / f"{file.name}.py" if file.name != "index" else ROOT / "tutorials"
        elif file.parent.name == "api" and not file.suffix:
            file = file.with_suffix(".rst")
        headings = re.findall(r"^#+ (.+)$", file.read_text("utf-8"), re.M) if anchor and file.exists() else []
        if not file.exists() or (anchor and anchor not in map(slug, headings)):
            lost.append(target)
    assert lost == []


def test_every_page_is_in_a_table_of_contents():
    listed = {
        ((DOCS / page).parent / entry).relative_to(DOCS).as_posix()
        for page, text in PAGES.items()
        for block in re.findall(r"```\{toctree\}\n(.*?)```", text, re.S)
        for entry in block.splitlines()
        if entry and not entry.startswith(":")
    }
    pages = {page.removesuffix(".md") for page in PAGES if not page.startswith("..")}
    assert pages - listed == {"index"}


def test_cells_of_the_benchmarks_table_are_short():
    rows = re.findall(r"^\| (.+) \|$", (ROOT / "benchmarks" / "README.md").read_text("utf-8"), re.M)
    assert [cell for row in rows for cell in row.split(" | ") if len(cell.split()) > 25] == []
