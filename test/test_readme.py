"""The README is short, and its tables agree with the package; `test_docs.py` runs its programs."""

import re
from pathlib import Path

from formats_table import with_table

from torchrl_agentic.parsers import ALIASES, PARSERS
from torchrl_agentic.parsers.registry import FORMATS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
CHANGELOG = (ROOT / "CHANGELOG.md").read_text("utf-8")
FORMATS_PAGE = (ROOT / "docs" / "howto" / "formats.md").read_text("utf-8")
TOOLS_PAGE = (ROOT / "docs" / "howto" / "tools.md").read_text("utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_readme_has_at_most_200_lines():
    assert len(README.splitlines()) <= 200


def test_lines_outside_tables_have_at_most_120_columns():
    long = [line for line in README.splitlines() if len(line) > 120 and not line.startswith("|")]
    assert long == []


def test_the_two_commands_of_a_fresh_machine_are_there():
    assert {"make demo", "make test"} <= set(re.findall(r"^make \w+", README, re.M))


def test_each_program_has_at_most_25_lines():
    assert len(PROGRAMS) == 3  # the smallest one, training, evaluation
    assert [len([line for line in one.splitlines() if line.strip()]) <= 25 for one in PROGRAMS] == [True] * 3


def test_the_table_of_formats_is_made_of_the_registry():
    assert with_table(FORMATS_PAGE) == FORMATS_PAGE, "run: python scripts/formats_table.py"
    assert all(f"`{name}`" in FORMATS_PAGE for name in (*PARSERS, *ALIASES))


def test_readme_and_changelog_count_the_formats():
    assert f"{len(FORMATS)} parsers" in README
    assert f"- Parsers for {len(FORMATS)} formats" in CHANGELOG


def test_the_first_release_has_at_most_15_bullets_and_changes_nothing():
    first = CHANGELOG.partition("\n## 0.1.0")[2].partition("\n## ")[0]
    assert 1 <= len(re.findall(r"^- ", first, re.M)) <= 15
    assert "Changed:" not in first


def test_each_row_of_what_people_bring_is_in_a_program_that_runs():
    table = TOOLS_PAGE.partition("| I have … | write … |")[2].partition("```python")[0]
    written = re.findall(r"^\| [^|]+ \| `(.+)` \|$", table, re.MULTILINE)
    assert len(written) >= 8
    programs = "".join(re.findall(r"```python\n(.*?)```", TOOLS_PAGE, re.DOTALL))
    assert [code for code in written if code not in programs] == []
