"""`load_tasks`: read a data set of any common form as tasks."""

# TensorDict border: TorchRL annotates few results.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from os import PathLike
from typing import Any, cast

from torchrl.envs.transforms import Transform

from torchrl_agentic.errors import check_count
from torchrl_agentic.messages import StoredMessage, fields_of
from torchrl_agentic.rollout.dataset_item import DatasetItem, read_source
from torchrl_agentic.tensors import leaves
from torchrl_agentic.text import shorten
from torchrl_agentic.tokens.writer import ChatEncoder
from torchrl_agentic.tools.base import Tool
from torchrl_agentic.tools.row_data import RowData
from torchrl_agentic.trajectory.task import Task
from torchrl_agentic.trajectory.task_columns import TaskColumns
from torchrl_agentic.transforms import ToolCompose, TurnTokenizer

logger = logging.getLogger(__name__)


def load_tasks(
    source: Any,
    *,
    split: str | None = None,
    subset: str | None = None,
    system_prompt: str | None = None,
    question: str | None = None,
    answer: str | None = None,
    name: str | None = None,
    read: Callable[[Any], Task | Mapping[str, Any] | None] | None = None,
    where: Callable[[Task], object] | None = None,
    shuffle: int | None = None,
    limit: int | None = None,
    tokenizer: Any = None,
    max_prompt_tokens: int | None = None,
    tools: Any = (),
    tokenizer_options: Mapping[str, Any] | None = None,
) -> list[Task]:
    """Read a data set as tasks, for `AgentCollector`, `rollout`, `evaluate` and `TaskStream`.

    The columns of common data sets are found by themselves: the first messages or the user's text in
    `messages`, `prompt`, `query`, `question`, `problem` or `instruction`; the right answer in `answer`,
    `ground_truth`, `reward_model.ground_truth` (verl) or `solution`; the name in `name`, `id`, `task_id`,
    `uid`, `index` or `extra_info.index`. A written solution that ends in `#### 42` has the answer "42", and
    is kept as the column `solution`. Placeholders `<image>` and `<video>` in messages become the items of the
    columns `images` and `videos`. All other columns become the `data` of the task, as plain Python:
    `tools_kwargs`, `tool_selection`, `interaction_kwargs`, `extra_info`, `data_source` and so on.

    Names are unique, and do not depend on `where`, `shuffle` and `limit`. A row without a name is called
    after its file and its number there, such as "train-17"; so is a row whose name is a number. The second
    row with a name gets " (2)".

    Args:
        source: A file (.jsonl, .json, .parquet, .csv) or a folder of such files, or a list of them; the name
            of a data set on the Hugging Face hub, such as "openai/gsm8k"; a `Dataset` or `DatasetDict` of the
            package `datasets`; a data frame of pandas; or an iterable of rows or of `Task` objects.
        split: The split to read from the hub, from a `DatasetDict`, or from a folder of files whose names
            begin with train, validation or test. Needed where there are several.
        subset: Subset of a data set on the hub, such as "main".
        system_prompt: Text of a system message for tasks that begin without one.
        question: Column of the first messages, or of the user's text. None: found, see above.
        answer: Column of the right answer; a dot leads into a nested column. None: found.
        name: Column of the name. None: found.
        read: Function for rows of another form: gets a row as plain Python and returns a `Task`, a row with
            columns as above, or None to leave it out.
        where: Function of a `Task` that returns whether to keep it.
        shuffle: Seed of a random order; None: the order of the data set.
        limit: Number of tasks at most, counted after `where` and the bound on prompts.
        tokenizer: Tokenizer of the model, to measure prompts.
        max_prompt_tokens: Tasks with a longer first prompt are left out, with one line in the log. The prompt
            is rendered with the schemas of `tools`, as the collector does it. Messages of tools that open at
            the beginning of a trajectory are not counted, since the tools are not opened.
        tools: The tools, as a list or as the transforms that the collector gets: a `ToolCompose`, or the
            `Compose` of one, whose `TurnTokenizer` then measures the prompts.
        tokenizer_options: Additional arguments of `ChatEncoder`, as the collector gets them.

    Returns:
        The tasks.

    Raises:
        ValueError: If a row has another form, which the message names with file and line, no row is left, or
            an argument is out of range.
        FileNotFoundError: If a file does not exist.
        TypeError: If `source` or a function's result has the wrong type.
        MissingExtra: If a package that reads the data set is not installed.
    """
    check_count("limit", limit)
    check_count("max_prompt_tokens", max_prompt_tokens)
    measure = None if max_prompt_tokens is None else PromptLength(tokenizer, tools, tokenizer_options)
    columns = TaskColumns(question, answer, name, system_prompt)
    items = read_source(source, split=split, subset=subset)
    found = _tasks(items, columns, read, where, _described(source))
    if shuffle is not None:
        shuffled = list(found)
        random.Random(shuffle).shuffle(shuffled)
        found = iter(shuffled)
    kept: list[Task] = []
    too_long: list[int] = []
    for place, task in found:
        if measure is not None and max_prompt_tokens is not None:
            try:
                length = measure(task)
            except Exception as error:  # templates raise any type
                raise ValueError(f"{place}: the prompt cannot be rendered: {error}") from error
            if length > max_prompt_tokens:
                too_long.append(length)
                continue
        kept.append(task)
        if len(kept) == limit:
            break
    if too_long:
        said = (
            f"{len(too_long)} of {len(too_long) + len(kept)} tasks have prompts of more than "
            f"{max_prompt_tokens} tokens; the longest has {max(too_long)}"
        )
        if not kept:
            raise ValueError(f"no tasks are left: {said}. Raise max_prompt_tokens, or offer fewer tools")
        logger.warning("left out: %s", said)
    return kept


def _tasks(
    items: Iterable[DatasetItem],
    columns: TaskColumns,
    read: Callable[[Any], Any] | None,
    where: Callable[[Task], object] | None,
    source: str,
) -> Iterator[tuple[str, Task]]:
    """Yield the place and the task of each row, with unique names; raise ValueError if there are no rows."""
    n_rows, n_kept, names = 0, 0, set[str]()
    for item in items:
        n_rows += 1
        value = item.value
        if read is not None and (value := _called(read, value, item)) is None:
            continue
        task = _unique(_task(value, item, columns), names)
        if where is None or _called(where, task, item):
            n_kept += 1
            yield item.place, task
    if n_rows == 0:
        raise ValueError(f"{source} is empty: it has no rows")
    if n_kept == 0:
        raise ValueError(f"no tasks are left: read= and where= left out all {n_rows} rows of {source}")


def _called(function: Callable[[Any], Any], value: Any, item: DatasetItem) -> Any:
    """Call a function of the user; its errors name the row."""
    try:
        return function(value)
    except Exception as error:
        error.add_note(f"This concerns {item.place}.")
        raise


def _task(value: Any, item: DatasetItem, columns: TaskColumns) -> Task:
    try:
        if isinstance(value, Task):
            return Task.of(value, item.number)
        fields = fields_of(value)
        if fields is None:
            raise ValueError(
                f"expected a Task, or a row with columns by name; got {shorten(value)} "
                f"({type(value).__name__})"
            )
        parts = columns.read(fields)
        task = Task.from_parts(parts, _name(parts.name, item))
    except ValueError as error:
        raise ValueError(f"{item.place}: {error}") from None
    if task.messages[-1]["role"] == "assistant":
        raise ValueError(
            f"{item.place}: the messages end with one of the assistant, so nothing is left to answer. Cut "
            "such conversations with read=, a function from a row to a Task"
        )
    return task


def _name(label: str | int | None, item: DatasetItem) -> str:
    """Return the name of a row: its label; a number is preceded by the name of the file."""
    label = item.number if label is None else label
    if isinstance(label, str) and not label.isdecimal():
        return label
    return f"{item.stem}-{label}" if item.stem else str(label)


def _unique(task: Task, names: set[str]) -> Task:
    """Return the task under a name that is new, and add it to the names."""
    name, copy = task.name, 1
    while name in names:
        copy += 1
        name = f"{task.name} ({copy})"
    names.add(name)
    return task if name == task.name else replace(task, name=name)


def _described(source: Any) -> str:
    if isinstance(source, str | PathLike):
        return str(cast("str | PathLike[str]", source))
    return f"the source ({type(source).__name__})"


class PromptLength:
    """Counts the tokens of the first prompt of a task as a collector encodes it, with the schemas of tools.

    Args:
        tokenizer: Tokenizer of the model; None if a `TurnTokenizer` is among the transforms.
        tools: A list of tools; or a `ToolCompose`, or the `Compose` of one with other transforms.
        tokenizer_options: Additional arguments of `ChatEncoder`; not with a `TurnTokenizer`, which has
            its own.

    Raises:
        TypeError: If `tools` is neither, or `tokenizer` is not a tokenizer.
        ValueError: If there is no tokenizer, or options for a `TurnTokenizer`.
    """

    def __init__(
        self, tokenizer: Any, tools: Any, tokenizer_options: Mapping[str, Any] | None = None
    ) -> None:
        shown: dict[str, Any] = {}
        found = list(leaves(tools)) if isinstance(tools, Transform) else []
        compose = next((one for one in found if isinstance(one, ToolCompose)), None)
        writer = next((one for one in found if isinstance(one, TurnTokenizer)), None)
        if compose is not None:
            shown = {"tools": compose.tools, "tool_role": compose.stage.tool_role}
        elif not found:
            if isinstance(tools, Tool | str | Mapping) or not isinstance(tools, Iterable):
                raise TypeError(f"tools is a list of tools or a ToolCompose; got {type(tools).__name__}")
            shown = {"tools": list(tools)}
        if writer is not None:
            if tokenizer_options:
                raise ValueError(
                    f"the TurnTokenizer decides {', '.join(sorted(tokenizer_options))}: set it there"
                )
            self._encoder = writer.chat_encoder
        elif tokenizer is None:
            raise ValueError("max_prompt_tokens= needs tokenizer=, the tokenizer of the model")
        else:
            self._encoder = ChatEncoder(tokenizer, **{**shown, **(tokenizer_options or {})})

    def __call__(self, task: Task) -> int:
        """Return the number of tokens of the first prompt of a task.

        Raises:
            Exception: If the chat template rejects the messages; templates raise any type.
        """
        chat = [StoredMessage(message).for_template() for message in task.messages]
        names = RowData.of(task.data).selection_at(0)
        return len(self._encoder.encode_chat(chat, tools=names))
