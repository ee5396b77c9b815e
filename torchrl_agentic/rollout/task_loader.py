"""`TaskLoader`: tasks as rows for TorchRL's chat environments."""

# TensorDict border: TensorDict and TorchRL annotate few results.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from tensordict import TensorDict

from torchrl_agentic.collectors.task_stream import TaskStream
from torchrl_agentic.trajectory.task import Task
from torchrl_agentic.transforms import collate_rows


class TaskLoader(Iterable[TensorDict]):
    """Tasks as rows for an environment, in place of a `DataLoader`.

    ::

        env = DatasetChatEnv.from_dataloader(TaskLoader(tasks), batch_size=(32,), repeats=8)

    has four tasks at a time, each in a group of 8 rows that follow each other. A row has the first messages
    as "query", "name", "answer", and the columns of the data of the task.

    TorchRL begins an iterable anew when it ends, so that a list of tasks repeats in its order; a `TaskStream`
    has a new order in each epoch. The environment reads a task when it is made, and later at resets: load the
    state of a `TaskStream` before, and save it when all groups have ended.

    Args:
        tasks: A list of tasks, or a `TaskStream`, or another iterable of tasks or rows.

    Attributes:
        batch_size: Number of rows in an element: 1.

    Raises:
        TypeError: If `tasks` has another type.
        ValueError: If `tasks` is empty.
    """

    batch_size = 1

    def __init__(self, tasks: Iterable[Any]) -> None:
        given = cast("object", tasks)
        if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
            raise TypeError(f"tasks is an iterable of tasks or rows; got {type(tasks).__name__}")
        if isinstance(tasks, Sequence) and not tasks:
            raise ValueError("there are no tasks")
        self._tasks = tasks
        known = tasks.tasks if isinstance(tasks, TaskStream) else tasks if isinstance(tasks, Sequence) else ()
        rows = [task_row(Task.of(one, number)) for number, one in enumerate(known)]
        self._columns = dict.fromkeys(name for row in rows for name in row)

    def __iter__(self) -> Iterator[TensorDict]:
        number = -1
        for number, one in enumerate(self._tasks):
            row = task_row(Task.of(one, number))
            yield collate_rows([{**self._columns, **row}])
        if number < 0:  # TorchRL would ask again and again
            raise RuntimeError(
                "the tasks have ended, and environments repeat their data: use TaskStream(epochs=None) "
                "and stop the loop of the collector after as many batches as there should be"
            )


def task_row(task: Task) -> dict[str, Any]:
    """Return a task as a row of a data set, from which `Task.of` makes the same task.

    Args:
        task: The task.
    """
    answer = {} if task.answer is None else {"answer": task.answer}
    return {**task.data, "name": task.name, "query": [dict(one) for one in task.messages], **answer}
