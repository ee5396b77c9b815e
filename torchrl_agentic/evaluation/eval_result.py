"""`EvalResult`: the samples of an evaluation, with their means, pass@k, failures and cost."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_agentic.engines.usage import Usage
from torchrl_agentic.errors import check_count
from torchrl_agentic.evaluation.estimates import Estimate, mean_estimate, pass_estimate
from torchrl_agentic.evaluation.eval_folder import read_eval
from torchrl_agentic.evaluation.eval_sample import BOUNDS, EvalSample, usage_from
from torchrl_agentic.messages import JSON

if TYPE_CHECKING:
    from rich.table import Table

PASSES = 1.0
"""Value from which on a score counts as passed, for pass@k and pass^k."""
STOPS = {
    "": "",
    "tokens": "the limit on tokens was reached",
    "cost": "the limit on the cost was reached",
    "unpriced": "max_cost cannot be enforced, since responses report no cost: give the engine a price",
    "failures": "too many samples failed",
    "engine": "the engine cannot be used",
    "interrupted": "it was interrupted",
    "running": "it has not ended, or its program was killed",
}
"""Why an evaluation stopped before all samples were taken; "" if it did not."""


@dataclass(frozen=True, slots=True)
class Metric:
    """Estimates from the values of one scorer.

    Attributes:
        name: Name of the scorer.
        mean: Mean over tasks; None without a value.
        pass_at: pass@k by k: at least one of k samples of a task has a value of 1 or more.
        pass_hat: pass^k by k: all of k samples have.
        n_errors: Number of samples in which the scorer raised.
    """

    name: str
    mean: Estimate | None
    pass_at: Mapping[int, Estimate]
    pass_hat: Mapping[int, Estimate]
    n_errors: int


@dataclass(frozen=True, slots=True)
class EvalResult:
    """The outcome of an evaluation.

    Attributes:
        name: Name of the evaluation.
        samples: One per task and epoch that was sampled, in the order of the tasks.
        tasks: Names of the tasks, in order.
        scorers: Names of the scorers.
        epochs: Number of samples per task.
        pass_at: The k of pass@k and pass^k.
        stopped: Why not all samples were taken, see `STOPS`; "" if all were.
        error: Text of the error that stopped it, or of the first failure to write; "" without one.
        n_unsaved: Number of samples that could not be written to the folder.
        usage: Tokens and cost, those of earlier programs, of failed trajectories and of `scorer_engines`
            included.
        seconds: Duration, without earlier programs of an evaluation that was resumed.
        settings: Settings that must be equal for an evaluation to be resumed.
        out: The folder, or None.
    """

    name: str
    samples: Sequence[EvalSample]
    tasks: Sequence[str]
    scorers: Sequence[str]
    epochs: int = 1
    pass_at: Sequence[int] = (1,)
    stopped: str = ""
    error: str = ""
    n_unsaved: int = 0
    usage: Usage = field(default_factory=Usage)
    seconds: float = 0.0
    settings: Mapping[str, JSON] | None = None
    out: Path | None = None

    @property
    def total(self) -> int:
        """Number of samples of the whole evaluation: tasks times epochs."""
        return len(self.tasks) * self.epochs

    @property
    def n_missing(self) -> int:
        """Number of samples that were not taken."""
        return self.total - len(self.samples)

    @property
    def failed(self) -> Sequence[EvalSample]:
        """The samples whose trajectory or scorer failed."""
        return [sample for sample in self.samples if sample.has_failed]

    @property
    def is_whole(self) -> bool:
        """True if every sample was taken, scored and, with a folder, saved."""
        return not (self.stopped or self.n_missing or self.failed or self.n_unsaved)

    @property
    def failures(self) -> Mapping[str, int]:
        """Number of failed samples by kind, "scorer" included, the most frequent first."""
        kinds = Counter(sample.failure or "scorer" for sample in self.failed)
        return dict(kinds.most_common())

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """The metric of each scorer, by name."""
        return {name: self._metric(name) for name in self.scorers}

    @property
    def score(self) -> float | None:
        """Mean of the first scorer, or None."""
        for name in self.scorers[:1]:
            values = mean_estimate(self.values(name))
            return None if values is None else values.value
        return None

    def values(self, scorer: str) -> Mapping[str, Sequence[float]]:
        """Return the values of a scorer by task, in the order of the epochs.

        Args:
            scorer: Name of the scorer.
        """
        found: dict[str, list[float]] = {name: [] for name in self.tasks}
        for sample in self.samples:
            if scorer in sample.scores:
                found[sample.task].append(float(sample.scores[scorer]))
        return found

    def _metric(self, name: str) -> Metric:
        values = self.values(name)
        counts = {
            task: (len(some), sum(value >= PASSES for value in some)) for task, some in values.items() if some
        }

        def passes(all_pass: bool) -> dict[int, Estimate]:
            found = {k: pass_estimate(counts, k, all_pass=all_pass) for k in self.pass_at}
            return {k: estimate for k, estimate in found.items() if estimate is not None}

        return Metric(
            name,
            mean_estimate(values),
            passes(all_pass=False),
            passes(all_pass=True),
            sum(name in sample.score_errors for sample in self.samples),
        )

    @classmethod
    def read(cls, path: str | Path) -> EvalResult:
        """Read the folder of an evaluation, which may be running or have been killed.

        Args:
            path: The folder.

        Raises:
            FileNotFoundError: If it holds no evaluation.
            ValueError: If its `eval.json` cannot be read.
        """
        saved = read_eval(path)
        told: Mapping[str, Any] = saved.summary
        order = {name: place for place, name in enumerate(told["tasks"])}
        wanted = [
            sample for sample, _ in saved.samples if sample.task in order and sample.epoch <= told["epochs"]
        ]
        ended = told["status"] != "running"
        return cls(
            str(told["name"]),
            sorted(wanted, key=lambda sample: (order[sample.task], sample.epoch)),
            list(told["tasks"]),
            list(told["scorers"]),
            int(told["epochs"]),
            tuple(told["pass_at"]),
            str(told.get("stopped", "")) if ended else "running",
            str(told.get("error", "")),
            int(told.get("n_unsaved", 0)),
            usage_from(told["usage"]) if ended else sum((one.usage for one, _ in saved.samples), Usage()),
            float(told.get("seconds", 0.0)),
            told["settings"],
            Path(path),
        )

    def to_json(self, *, samples: bool = True) -> dict[str, JSON]:
        """Return the results as a JSON object.

        Args:
            samples: Whether it has the samples too, without their conversations.
        """
        found: dict[str, JSON] = {
            "name": self.name,
            "is_whole": self.is_whole,
            "stopped": self.stopped,
            "error": self.error,
            "n_samples": len(self.samples),
            "n_missing": self.n_missing,
            "n_failed": len(self.failed),
            "n_unsaved": self.n_unsaved,
            "failures": dict(self.failures),
            "metrics": {name: _metric_to_json(metric) for name, metric in self.metrics.items()},
            "usage": asdict(self.usage),
            "seconds": self.seconds,
            "epochs": self.epochs,
            "settings": dict(self.settings or {}),
        }
        if samples:
            found["samples"] = [sample.to_json() for sample in self.samples]
        return found

    def table(self) -> Table:
        """Return the results as a table of rich, for `rich.print` and notebooks."""
        several = any(k > 1 for k in self.pass_at)
        names = ["score", "estimate", "value"] if several else ["score", "mean"]
        rows: list[Sequence[str]] = []
        for metric in self.metrics.values():
            found: list[tuple[str, Estimate | None]] = [("mean", metric.mean)]
            for k in self.pass_at if several else ():
                found.append((f"pass@{k}", metric.pass_at.get(k)))
                if k > 1:
                    found.append((f"pass^{k}", metric.pass_hat.get(k)))
            for place, (name, estimate) in enumerate(found):
                head = ["" if place else metric.name, name] if several else [metric.name]
                rows.append((*head, *_cells(estimate)))
        return made_table(self._headline(), (*names, "95% interval", "tasks", "samples"), rows)

    def _headline(self) -> str:
        return f"{self.name}: {len(self.samples)} of {self.total} samples"

    @property
    def notes(self) -> Sequence[str]:
        """Lines below the table: tokens, cost, failures, and why samples are missing."""
        usage, lines = self.usage, list[str]()
        price = f", cost {usage.cost:.4g}" if usage.cost else ""
        lines.append(
            f"{usage.prompt} prompt tokens, {usage.completion} completion tokens{price}, {self.seconds:.1f} s"
        )
        cut = Counter(sample.reason for sample in self.samples if sample.reason in BOUNDS)
        if cut:
            bounds = ", ".join(f"{count} by {bound}" for bound, count in cut.most_common())
            lines.append(f"{cut.total()} of {len(self.samples)} samples were cut short: {bounds}")
        if usage.uncounted:
            lines.append(
                f"{usage.uncounted} of {usage.requests} responses reported no usage: their tokens and cost "
                "are not counted, and limits on them are not enforced"
            )
        if usage.cost and (n_unpriced := usage.unpriced - usage.uncounted) > 0:
            lines.append(
                f"{n_unpriced} of {usage.requests} responses have no known cost, which is not counted"
            )
        if self.failed:
            kinds = ", ".join(f"{count} {kind}" for kind, count in self.failures.items())
            lines.append(f"{len(self.failed)} samples failed: {kinds}")
            for sample in self.failed[:3]:
                text = sample.error or "; ".join(f"{k}: {v}" for k, v in sample.score_errors.items())
                lines.append(f"  {sample.task}, epoch {sample.epoch}: {text[:300]}")
        if self.stopped or self.n_missing:
            why = STOPS.get(self.stopped, self.stopped)
            lines.append(
                f"{self.n_missing} samples are missing{f': {why}' if why else ''}"
                + (f": {self.error}" if self.stopped == "engine" else "")
            )
        if self.n_unsaved or (self.error and self.stopped != "engine"):
            lines.append(f"{self.n_unsaved} samples are not saved in {self.out}: {self.error}")
        return lines

    def __str__(self) -> str:
        return text_of(self.table(), self.notes)


def made_table(title: str, names: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table for the terminal.

    Args:
        title: Its title.
        names: Names of the columns; all but "score" and "estimate" hold numbers.
        rows: Cells of each row.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, title_style="bold")
    for name in names:
        table.add_column(name, justify="left" if name in ("score", "estimate") else "right")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def text_of(table: Table, notes: Sequence[str]) -> str:
    """Return a table as plain text, with notes below it.

    Args:
        table: The table.
        notes: Lines of text.
    """
    from rich.console import Console

    file = io.StringIO()
    Console(file=file, width=120).print(table)
    lines = (line.rstrip() for line in file.getvalue().rstrip().splitlines())
    return "\n".join((*lines, "", *notes)).rstrip()


def checked_pass_at(pass_at: int | Sequence[int], epochs: int) -> tuple[int, ...]:
    """Return the k of pass@k in ascending order.

    Args:
        pass_at: A number, or several.
        epochs: Number of samples per task.

    Raises:
        TypeError: If they are not numbers.
        ValueError: If one is below 1 or above `epochs`.
    """
    given = (pass_at,) if isinstance(pass_at, int) else tuple(pass_at)
    for k in given:
        check_count("pass_at", k, optional=False)
        if k > epochs:
            raise ValueError(f"pass@{k} needs at least {k} samples of each task; epochs is {epochs}")
    return tuple(sorted({int(k) for k in given})) or (1,)


EvalHook = Callable[["EvalProgress"], object]


@dataclass(frozen=True, slots=True)
class EvalProgress:
    """The progress of an evaluation, after a sample.

    Attributes:
        sample: The sample that has ended; None at the beginning.
        done: Number of samples that have ended, those of earlier programs included.
        total: Number of samples that are wanted.
        failed: Number of samples that failed.
        usage: Tokens and cost so far, those of earlier programs included.
        seconds: Seconds since the begin of this program's part.
        eta_s: Estimated seconds until the end; None until a sample has ended.
    """

    sample: EvalSample | None
    done: int
    total: int
    failed: int
    usage: Usage
    seconds: float
    eta_s: float | None


def _cells(estimate: Estimate | None) -> tuple[str, str, str, str]:
    """Return value, interval, tasks and samples as strings."""
    if estimate is None:
        return "–", "–", "0", "0"
    interval = "–" if estimate.low is None else f"{estimate.low:.3f} to {estimate.high:.3f}"
    return f"{estimate.value:.3f}", interval, str(estimate.n_tasks), str(estimate.n_samples)


def _metric_to_json(metric: Metric) -> dict[str, JSON]:
    made: dict[str, JSON] = asdict(metric)
    return made | {name: {str(k): one for k, one in made[name].items()} for name in ("pass_at", "pass_hat")}
