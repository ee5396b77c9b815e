"""The engine that `docs/howto/engines.md` shows keeps the contract."""

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs" / "howto" / "engines.md"
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.S)

names: dict[str, Any] = {"__name__": __name__}
for program in PROGRAMS:
    if "Bigrams" in program:
        exec(compile(program, str(PAGE), "exec"), names)

TestBigrams = names["TestBigrams"]


def test_the_page_lists_all_engines():
    from torchrl_agentic import engines

    shown = set(re.findall(r"^\| `(\w+)", PAGE.read_text("utf-8"), re.M))
    kinds = {name for name in engines.__all__ if hasattr(getattr(engines, name), "sample")} - {"Engine"}
    assert kinds <= shown
