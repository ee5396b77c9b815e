"""The README's Python runs, from top to bottom, and prints what it says."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from scripts.formats_table import with_table
from torchrl_agentic.parsers import ALIASES, PARSERS
from torchrl_agentic.parsers.registry import FORMATS

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)


def test_the_readme_has_programs():
    assert len(BLOCKS) >= 3


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("own_environ")
def test_the_readmes_programs_run_and_print_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    printed = io.StringIO()
    names: dict[str, object] = {"__name__": "readme"}
    with contextlib.redirect_stdout(printed):
        for block in BLOCKS:
            exec(compile(block, str(README), "exec"), names)
    lines = printed.getvalue().splitlines()
    assert len((tmp_path / "dump" / "7.jsonl").read_text("utf-8").splitlines()) == 1
    assert lines[-5:-1] == ["42", "42", "calls: 2 errors: 0", "The answer is 49. 1.0"]
    assert lines[-1].endswith(" sampled of 193")


def test_the_table_of_formats_is_made_of_the_registry():
    readme = README.read_text("utf-8")
    assert with_table(readme) == readme, "run: python scripts/formats_table.py"
    assert all(f"`{name}`" in readme for name in (*PARSERS, *ALIASES))


def test_the_changelog_counts_the_formats():
    changelog = (README.parent / "CHANGELOG.md").read_text("utf-8")
    assert f"- Parsers for {len(FORMATS)} formats" in changelog


def test_the_smallest_program_has_at_most_25_lines():
    assert len([line for line in BLOCKS[0].splitlines() if line.strip()]) <= 25


def test_each_row_of_what_people_bring_is_in_a_program_that_runs():
    table = README.read_text("utf-8").partition("| I have … | write … |")[2].partition("```python")[0]
    written = re.findall(r"^\| [^|]+ \| `(.+)` \|$", table, re.MULTILINE)
    assert len(written) >= 8
    programs = "".join(BLOCKS)
    assert [code for code in written if code not in programs] == []
