"""`open_logger`: a logger of TorchRL that continues a run; `log_metrics`: write scalars to loggers."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, cast

from torchrl.record import loggers

logger = logging.getLogger(__name__)

RUN_ID = "wandb-run-id"
"""Name of the file that holds the id of a run of Weights & Biases."""


def open_logger(
    kind: Literal["", "csv", "tensorboard", "wandb"], folder: str | Path, *, start: int = 0, **options: Any
) -> Any:
    """Return the logger of a training run; a resumed run continues its log.

    TensorBoard shows the steps from `start` on once, as the resumed run logs them. Weights & Biases
    continues under the id in the folder, and keeps its first values of repeated steps.

    Args:
        kind: "csv", whose repeated lines `discard_steps` removes, "tensorboard", or "wandb" for Weights &
            Biases; "" for none.
        folder: Folder of the run, which gets the files of the logger; its name is that of the run.
        start: The first step that is logged; 0 for a new run.
        **options: Passed on to TorchRL's `get_logger`, such as `wandb_kwargs`.

    Returns:
        The logger; None for "".

    Raises:
        ImportError: If the package of the logger is not installed.
    """
    folder = Path(folder)
    parent = folder if kind == "wandb" else folder.parent
    if kind == "wandb":
        file = folder / RUN_ID
        if not start or not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(uuid.uuid4().hex, "utf-8")
        options["wandb_kwargs"] = {"id": file.read_text("utf-8"), **options.get("wandb_kwargs", {})}
    made: Any = cast("Any", loggers).get_logger(kind, str(parent), folder.name, **options)
    if kind == "tensorboard" and start:
        made.experiment.close()  # it opens a new file at the next scalar, which hides later steps of others
        made.experiment.purge_step = start
    return made


def log_metrics(loggers: Iterable[Any], metrics: Mapping[str, float], step: int) -> None:
    """Write scalars to loggers; one that fails with an OSError, such as a full disk, ends no training.

    Args:
        loggers: Loggers of TorchRL; None among them, as `get_logger("")` returns, is skipped.
        metrics: Scalars by name.
        step: Number of the step.
    """
    for one in loggers:
        if one is None:
            continue
        try:
            one.log_metrics(dict(metrics), step)
        except OSError as error:
            logger.error("%s has no scalars of step %d: %s", type(one).__name__, step, error)
