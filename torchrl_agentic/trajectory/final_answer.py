"""`final_answer`: the answer at the end of a written solution."""

from __future__ import annotations

import re
from typing import Any

_GROUPED = re.compile(r"[-+]?\$?\d{1,3}(,\d{3})+(\.\d+)?")


def final_answer(text: Any, *, in_solution: bool = False) -> Any:
    """Return the answer at the end of a written solution; other answers are returned as they are.

    Args:
        text: The answer, or a solution that ends with `#### 42`.
        in_solution: Whether it is a written solution, whose last boxed content is the answer too.
    """
    if not isinstance(text, str):
        return text
    _, mark, answer = text.rpartition("####")
    answer = answer.strip()
    if mark and answer and "\n" not in answer:
        return answer.replace(",", "") if _GROUPED.fullmatch(answer) else answer
    return (_boxed(text) or text) if in_solution else text


def _boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{…}`."""
    _, mark, rest = text.rpartition("\\boxed{")
    depth = 1
    for at, character in enumerate(rest if mark else ""):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[:at].strip()
    return None
