"""`TaskColumns`: find the first messages, the right answer and the name of a task in a row of a data set."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from torchrl_agentic.messages import Fields, fields_of
from torchrl_agentic.text import did_you_mean, nearest, read_json
from torchrl_agentic.trajectory.final_answer import final_answer

QUESTIONS = ("messages", "prompt", "query", "question", "problem", "instruction")
"""Columns that may hold the first messages, or the text of the user's message; the first one counts."""
ANSWERS = ("answer", "ground_truth", "reward_model.ground_truth", "extra_info.ground_truth", "solution")
"""Columns that may hold the right answer; a dot leads into a nested column."""
NAMES = ("name", "id", "task_id", "uid", "index", "extra_info.index")
"""Columns that may name a row."""
_HIDDEN = ("name", "answer", "ground_truth")
_MEDIA = {"<image>": "images", "<video>": "videos"}
_ABSENT: Any = object()


@dataclass(frozen=True, slots=True)
class RowParts:
    """The parts of a row that make a task.

    Attributes:
        messages: The first messages.
        answer: The right answer, or None.
        name: Name of the row, a text or a whole number; None if it has none.
        data: The other columns.
    """

    messages: list[Mapping[str, Any]]
    answer: Any
    name: str | int | None
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class TaskColumns:
    r"""Names of the columns of a data set that tasks are made of.

    A written solution whose last line is `#### 42`, as in GSM8K, has the answer "42"; in a column `solution`,
    the content of the last `\boxed{…}` is the answer too. The whole text becomes the column `solution` of
    the task. The column `instruction` is completed by the column `input`, as in the data of Alpaca.
    Placeholders `<image>` and `<video>` in messages become parts of the columns `images` and `videos`.

    Attributes:
        question: Column of the first messages, or of the user's text; None: the first of `QUESTIONS`.
        answer: Column of the right answer; None: the first of `ANSWERS`. A dot leads into a nested column.
        name: Column of the name; None: the first of `NAMES`.
        system_prompt: Text of a system message for rows that begin without one; None: no such message.
    """

    question: str | None = None
    answer: str | None = None
    name: str | None = None
    system_prompt: str | None = None

    def read(self, row: Fields) -> RowParts:
        """Return the parts of a row.

        Args:
            row: The columns by name.

        Raises:
            ValueError: If a column is missing, or the first messages have another form.
        """
        key, asked = self._question(row)
        messages: list[Mapping[str, Any]] = _messages(key, asked)
        if key.casefold() == "instruction" and isinstance(more := row.get("input"), str) and more:
            messages = [{"role": "user", "content": f"{asked}\n\n{more}"}]
        is_bare = not messages or fields_of(messages[0]) is None or messages[0].get("role") != "system"
        if self.system_prompt is not None and is_bare:
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        messages = _with_media(messages, row)
        found, answer = self._find("answer", self.answer, row, ANSWERS)
        data = {name: value for name, value in row.items() if name not in {key, found, *_HIDDEN}}
        short = final_answer(answer, in_solution=found is not None and found.casefold() == "solution")
        if found is not None and (short is not answer or found.casefold() == "solution"):
            data.setdefault("solution", answer)
        return RowParts(messages, short, _label(self._find("name", self.name, row, NAMES)[1]), data)

    def _question(self, row: Fields) -> tuple[str, Any]:
        key, asked = self._find("question", self.question, row, QUESTIONS)
        if key is not None and asked is not None:
            return key, asked
        if self.question is not None:
            raise ValueError(f"the column {self.question!r}, which is to hold the question, is empty")
        near = ((name, nearest(name, QUESTIONS)) for name in row)
        hint = next((f"; did you mean {known!r} by {name!r}?" for name, known in near if known), ".")
        raise ValueError(
            f"a row needs one of {', '.join(QUESTIONS)}; got {', '.join(row) or 'none'}{hint} "
            'load_tasks takes others as question="column", or read=, a function from a row to a Task'
        )

    @staticmethod
    def _find(role: str, chosen: str | None, row: Fields, known: Iterable[str]) -> tuple[str | None, Any]:
        """Return the name and value of a column; (None, None) if none of the known ones has a value."""
        if chosen is not None:
            value = _lookup(row, chosen)
            if value is _ABSENT:
                raise ValueError(
                    f"{role}={chosen!r} is no column; the row has {', '.join(row) or 'none'}"
                    f"{did_you_mean(chosen, row)}"
                )
            return chosen, value
        for name in known:
            if (value := _lookup(row, name)) is not _ABSENT and value is not None:
                return name, value
        spelled = {name.casefold(): name for name in reversed(tuple(row))}
        for name in known:
            if (here := spelled.get(name)) is not None and row[here] is not None:
                return here, row[here]
        return None, None


def _lookup(row: Fields, name: str) -> Any:
    """Return a column, or a nested one that dots lead to."""
    if name in row:
        return row[name]
    found: Any = row if "." in name else None
    for step in name.split("."):
        inner = fields_of(found)
        if inner is None or step not in inner:
            return _ABSENT
        found = inner[step]
    return found


def _messages(key: str, asked: Any) -> list[Mapping[str, Any]]:
    if isinstance(asked, str):
        return _written(asked) or [{"role": "user", "content": asked}]
    if not isinstance(asked, list | tuple | np.ndarray):
        raise ValueError(f"the column {key!r} is a text or a list of messages; got {type(asked).__name__}")
    return list(cast("Iterable[Mapping[str, Any]]", asked))


def _with_media(messages: list[Mapping[str, Any]], row: Fields) -> list[Mapping[str, Any]]:
    """Replace the placeholders in texts by the images and videos of the row, as verl does."""
    if not any(row.get(column) is not None for column in _MEDIA.values()):
        return messages
    media = {mark: _as_list(row.get(column)) for mark, column in _MEDIA.items()}
    texts = [
        found for message in messages if isinstance(found := (fields_of(message) or {}).get("content"), str)
    ]
    counts = {mark: sum(text.count(mark) for text in texts) for mark in media}
    shown = [mark for mark, items in media.items() if items and counts[mark]]
    for mark in shown:
        if counts[mark] != len(media[mark]):
            raise ValueError(
                f"the messages have {counts[mark]} placeholders {mark}, and the column {_MEDIA[mark]!r} has "
                f"{len(media[mark])}"
            )
    if not shown:
        return messages
    left = {mark: iter(media[mark]) for mark in shown}
    split = re.compile(f"({'|'.join(shown)})").split
    made: list[Mapping[str, Any]] = []
    for message in messages:
        content = message["content"] if isinstance(message.get("content"), str) else ""
        pieces = [piece for piece in split(content) if piece]
        if any(piece in left for piece in pieces):
            parts = [
                _media_part(piece, next(left[piece])) if piece in left else {"type": "text", "text": piece}
                for piece in pieces
            ]
            message = {**message, "content": parts}
        made.append(message)
    return made


def _as_list(value: Any) -> list[Any]:
    return list(cast("Iterable[Any]", value)) if isinstance(value, list | tuple | np.ndarray) else []


def _media_part(mark: str, item: Any) -> dict[str, Any]:
    """Return an image or video as a part of a message."""
    kind = mark.strip("<>")
    fields = fields_of(item)
    if fields is not None:
        item = next((fields[key] for key in ("bytes", kind, "path", "url") if fields.get(key)), None)
    if isinstance(item, bytes):
        return {"type": kind, "base64": base64.b64encode(item).decode()}
    return {"type": kind, kind: item}


def _written(text: str) -> list[Mapping[str, Any]] | None:
    """Return the messages that a text holds as JSON, as cells of CSV files do; None if it is another text."""
    if not text.lstrip().startswith("[") or '"role"' not in text:
        return None
    try:
        found: Any = read_json(text)
    except ValueError:
        return None
    messages = [fields_of(one) for one in found]
    return found if messages and all(one and {"role", "content"} <= one.keys() for one in messages) else None


def _label(value: Any) -> str | int | None:
    """Return a name; None for a value that cannot be one."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    return value if isinstance(value, int) or value.strip() else None
