"""`EvalRun`: a running evaluation, with its samples, scorers, limits and folder."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torchrl_agentic.collectors.agent_collector import AgentCollector
from torchrl_agentic.collectors.failures import FailedTask
from torchrl_agentic.collectors.requests import is_cancelling
from torchrl_agentic.collectors.rollout_loop import CollectorError
from torchrl_agentic.dispatch import event_loop
from torchrl_agentic.dispatch.event_loop import WorkerThreads
from torchrl_agentic.engines.base import ChatEngine, Engine, EngineUnusable
from torchrl_agentic.engines.usage import Usage
from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.evaluation.eval_folder import EvalFolder
from torchrl_agentic.evaluation.eval_result import EvalHook, EvalProgress, EvalResult
from torchrl_agentic.evaluation.eval_sample import (
    EvalSample,
    failed_sample,
    sample_of,
    trajectory_of,
    usage_of_tokens,
)
from torchrl_agentic.messages import JSON
from torchrl_agentic.records.record import TrajectoryRecord
from torchrl_agentic.rewards.answers import answer_reward
from torchrl_agentic.trajectory.score import Score, Scorer, score_with
from torchrl_agentic.trajectory.task import Task
from torchrl_agentic.trajectory.trajectory import Trajectory

logger = logging.getLogger(__name__)
SCORER_THREADS = 64
"""Number of sync scorers that run at once."""
HOPELESS = 32
"""Number of samples after which an evaluation stops if every one of them failed."""


class EvalInterrupted(KeyboardInterrupt):
    """Ctrl-C ended an evaluation; `result` has the samples so far.

    Args:
        result: The result so far.

    Attributes:
        result: The result so far.
    """

    def __init__(self, result: EvalResult) -> None:
        super().__init__(f"interrupted after {len(result.samples)} of {result.total} samples")
        self.result = result


def answer_score(trajectory: Trajectory) -> float:
    """Compare the model's last message with the right answer."""
    return answer_reward(trajectory.answer, str(trajectory.task.truth))


class EvalMeter:
    """Counts the usage of an evaluation, and checks its limits.

    Args:
        name: Name of the evaluation.
        max_tokens: Number of tokens after which no more samples are taken; None: no limit.
        max_cost: Cost after which no more samples are taken; None: no limit.
        reading: Names of limits that need the usage that responses report, for a warning.

    Attributes:
        usage: Usage so far, that of earlier programs and of replaced trajectories included.
        exceeded: The limit that was reached, a key of `STOPS`; "" if none was.
    """

    def __init__(
        self, name: str, max_tokens: int | None, max_cost: float | None, *, reading: tuple[str, ...] = ()
    ) -> None:
        self._name, self._max_tokens, self._max_cost, self._reading = name, max_tokens, max_cost, reading
        self.usage, self.exceeded = Usage(), ""
        self._counted = Usage()
        """Usage of earlier programs, and of an engine that does not count by itself."""
        self._metered: Engine | ChatEngine | None = None
        self._meters: list[tuple[Engine | ChatEngine, Usage]] = []
        """Engines that count their own usage, each with its usage when the evaluation began."""
        self._lock = threading.Lock()
        self._has_warned = False

    def begin(
        self, engine: Engine | ChatEngine, scorer_engines: Sequence[Engine | ChatEngine], before: Usage
    ) -> None:
        """Begin to count.

        Args:
            engine: The engine of the trajectories.
            scorer_engines: Engines of scorers, which count their own usage.
            before: Usage of earlier programs.
        """
        self.usage = self._counted = before
        self._metered = engine if is_metered(engine) else None
        counting = [*(() if self._metered is None else (engine,)), *scorer_engines]
        self._meters = [(one, _known(one.usage, one)) for one in {id(one): one for one in counting}.values()]
        self._check(self._metered_usage)

    def spend(self, trajectory: Trajectory | None) -> Usage:
        """Count a trajectory, and return its usage.

        Args:
            trajectory: The trajectory; None if it failed before it began.
        """
        used = Usage()
        if trajectory is not None and self._metered is not None:
            used = _known(self._metered.usage_of(trajectory.name), self._metered)
        elif trajectory is not None:
            used = usage_of_tokens(trajectory)
            with self._lock:
                self._counted += used
        self.count()
        return used

    def count(self) -> None:
        """Add up all usage, and check the limits."""
        with self._lock:
            used = self._metered_usage
            self.usage = self._counted + used
            self._check(used)

    @property
    def _metered_usage(self) -> Usage:
        """Usage in this program of the engines that count their own usage."""
        return sum((_known(one.usage, one) - base for one, base in self._meters), Usage())

    def _check(self, used: Usage) -> None:
        has_no_cost = self._max_cost is not None and used.unpriced > 0
        if self._reading and (used.uncounted or has_no_cost) and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: responses report no %s, so that %s cannot count them; have the service report it, give "
                "a price, or bound samples by max_turns and limit",
                self._name,
                "usage" if used.uncounted else "cost",
                " and ".join(self._reading),
            )
        if self.exceeded:
            return
        if self._max_cost is not None and used.requests and used.unpriced == used.requests:
            self.exceeded = "unpriced"
        elif self._max_tokens is not None and self.usage.tokens >= self._max_tokens:
            self.exceeded = "tokens"
        elif self._max_cost is not None and self.usage.cost >= self._max_cost:
            self.exceeded = "cost"


class EvalScoring:
    """Runs the scorers of an evaluation, the sync ones on threads.

    Args:
        scorers: Scorers by name.
    """

    def __init__(self, scorers: Mapping[str, Scorer]) -> None:
        self.scorers = scorers
        self._threads = WorkerThreads(SCORER_THREADS)

    async def score(self, trajectory: Trajectory) -> tuple[dict[str, Score], dict[str, str]]:
        """Run all scorers concurrently; return the scores, and the errors of scorers that raised, by name.

        Args:
            trajectory: The trajectory.
        """
        wanted = [
            name
            for name, scorer in self.scorers.items()
            if scorer is not answer_score or trajectory.task.truth is not None
        ]
        found = await asyncio.gather(*(self._score_by(self.scorers[name], trajectory) for name in wanted))
        scores = {name: one for name, one in zip(wanted, found, strict=True) if isinstance(one, Score)}
        errors = {name: one for name, one in zip(wanted, found, strict=True) if isinstance(one, str)}
        return scores, errors

    async def _score_by(self, scorer: Scorer, trajectory: Trajectory) -> Score | str:
        try:
            return await score_with(scorer, trajectory, self._threads.run)
        except BaseException as error:  # SystemExit too: it would end the loop that all share
            if isinstance(error, GeneratorExit) or is_cancelling():
                raise
            return f"{type(error).__name__}: {error}"[:10_000]

    def close(self) -> None:
        """End the threads."""
        self._threads.close()


class EvalRun:
    """The samples of a running evaluation, and their folder.

    `admitted`, `score` and `fail` run on the event loop, the other methods in the thread of the caller.

    Args:
        tasks: The tasks, whose names differ.
        scorers: Scorers by name.
        epochs: Number of samples per task.
        pass_at: The k of pass@k, in ascending order.
        meter: Counts the usage, and checks the limits.
        fail_above: Share of failed samples above which no more are taken.
        name: Name of the evaluation.
        settings: Settings that must be equal for it to be resumed.
        has_tokens: Whether samples keep the tokens of their trajectories.
        progress: Called at the beginning and after each sample, or None.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        scorers: Mapping[str, Scorer],
        epochs: int,
        pass_at: tuple[int, ...],
        *,
        meter: EvalMeter,
        fail_above: float,
        name: str,
        settings: Mapping[str, JSON],
        has_tokens: bool,
        progress: EvalHook | None,
    ) -> None:
        self._tasks, self._epochs, self._pass_at = tasks, epochs, pass_at
        self._scoring, self._meter = EvalScoring(scorers), meter
        self._name, self._settings, self._progress = name, settings, progress
        self._total, self._fail_above, self._has_tokens = len(tasks) * epochs, fail_above, has_tokens
        self._samples: dict[tuple[str, int], EvalSample] = {}
        self._n_before = self._n_failed = 0
        self._folder: EvalFolder | None = None
        self._lock = threading.RLock()  # held while a sample is written
        self._running: dict[int, tuple[Task, Task, int]] = {}
        """(as it runs, as it was given, epoch) by the id of a task that runs."""
        self._scored: dict[str, tuple[dict[str, Score], dict[str, str], Usage]] = {}
        self._stopped, self._error = "", ""
        self._began = time.monotonic()

    @property
    def stopped(self) -> str:
        """Why no more samples are taken, a key of `STOPS`; "" while they are."""
        return self._stopped or self._meter.exceeded

    def open(
        self,
        out: str | Path,
        *,
        resume: bool,
        known: Mapping[str, str],
        decode: Callable[[Sequence[int]], str] | None,
    ) -> Usage:
        """Open the folder, read the samples of earlier programs, and return their usage.

        Args:
            out: The folder.
            resume: Whether it may hold this evaluation.
            known: Digests of all tasks by name.
            decode: Decodes token ids, or None.
        """
        summary: dict[str, JSON] = {
            "name": self._name,
            "settings": dict(self._settings),
            "scorers": list(self._scoring.scorers),
            "epochs": self._epochs,
            "pass_at": list(self._pass_at),
            "tasks": [task.name for task in self._tasks],
        }
        self._folder = EvalFolder(out, summary, resume=resume, known=known, decode=decode)
        wanted = {task.name for task in self._tasks}
        for sample in (*self._folder.samples, *(sample for sample, _ in self._folder.unscored)):
            if sample.task in wanted and sample.epoch <= self._epochs:
                self._samples[sample.task, sample.epoch] = sample
        self._n_before = len(self._samples)
        return self._folder.usage

    async def admitted(self, shown: Callable[[Task], Task]) -> AsyncIterator[Task]:
        """Yield the tasks that are missing, epoch by epoch, until a limit is reached.

        Args:
            shown: Returns a copy of a task, as the model gets it.
        """
        for epoch, task in itertools.product(range(1, self._epochs + 1), self._tasks):
            if (task.name, epoch) in self._samples:
                continue
            if self.stopped:
                return
            copy = shown(task)
            self._running[id(copy)] = copy, task, epoch
            yield copy

    async def score(self, trajectory: Trajectory) -> Score:
        """Run all scorers concurrently, and return their values as parts of one score."""
        usage = self._meter.spend(trajectory)
        _, task, _ = self._running[id(trajectory.task)]
        scores, errors = await self._scoring.score(replace(trajectory, task=task))
        self._meter.count()  # what scorers have used
        self._scored[trajectory.name] = scores, errors, usage
        values = {name: float(score) for name, score in scores.items()}
        return Score(next(iter(values.values()), 0.0), parts=values)

    def fail(self, failed: FailedTask) -> None:
        """Keep a sample that failed."""
        _, task, epoch = self._running.pop(id(failed.task))
        sample = failed_sample(failed, task, epoch, self._meter.spend(failed.trajectory))
        logger.warning("%s, epoch %d failed (%s): %s", task.name, epoch, sample.failure, sample.error)
        self._settle(sample)

    def collect(self, collector: AgentCollector) -> EvalResult:
        """Run the collector to its end, and return the result."""
        try:
            self._rescore()
            with self._lock:
                self._report(None)
            with collector:
                for batch in collector.trajectories():
                    for trajectory in batch:
                        self._end(trajectory)
        except CollectorError as error:
            self._break(error)
        except KeyboardInterrupt:
            self._stopped = "interrupted"
            raise EvalInterrupted(self._result()) from None
        return self._result()

    def _rescore(self) -> None:
        """Score again the trajectories whose scorers failed in an earlier program, without sampling."""
        tasks = {task.name: task for task in self._tasks}
        unscored = [] if self._folder is None else self._folder.unscored
        chosen = [(one, record) for one, record in unscored if (one.task, one.epoch) in self._samples]

        async def rescored(sample: EvalSample, record: TrajectoryRecord) -> EvalSample:
            scores, errors = await self._scoring.score(trajectory_of(record, tasks[sample.task]))
            return replace(sample, scores=scores, score_errors=errors)

        async def all_rescored() -> list[EvalSample]:
            return await asyncio.gather(*(rescored(*one) for one in chosen))

        if self._folder is None or not chosen:
            return
        found = event_loop.run(all_rescored())
        self._folder.rescore(found)
        for sample in found:
            self._samples[sample.task, sample.epoch] = sample
            self._n_failed += sample.has_failed

    def _end(self, trajectory: Trajectory) -> None:
        _, task, epoch = self._running.pop(id(trajectory.task))
        scores, errors, usage = self._scored.pop(trajectory.name)
        if not self._has_tokens:
            trajectory = replace(trajectory, ledger=None, contexts=())
        trajectory = replace(trajectory, task=task)
        self._settle(sample_of(trajectory, epoch, scores=scores, score_errors=errors, usage=usage))

    def _settle(self, sample: EvalSample) -> None:
        """Save a sample, count it, and report it."""
        with self._lock:
            if self._folder is not None:
                had_error = self._folder.error
                self._folder.append(sample)
                if self._folder.error is not None and had_error is None:
                    logger.error("samples cannot be saved in %s: %s", self._folder.path, self._folder.error)
                sample = replace(sample, trajectory=None)
            self._samples[sample.task, sample.epoch] = sample
            self._n_failed += sample.has_failed
            too_many = self._n_failed > self._fail_above * self._total
            is_hopeless = too_many or self._n_failed == len(self._samples) >= HOPELESS
            if self._fail_above < 1.0 and is_hopeless and not self.stopped:
                self._stopped = "failures"
            self._report(sample)

    def _report(self, sample: EvalSample | None) -> None:
        if self._progress is None:
            return
        done = len(self._samples)
        seconds, since = time.monotonic() - self._began, done - self._n_before
        self._progress(
            EvalProgress(
                sample,
                done,
                self._total,
                self._n_failed,
                self._meter.usage,
                seconds,
                seconds / since * (self._total - done) if since else None,
            )
        )

    def _break(self, error: CollectorError) -> None:
        """Keep the samples if the engine is lost and there are any; otherwise raise the error."""
        cause = error.__cause__ or error
        if not self._samples or not isinstance(cause, InfrastructureError | EngineUnusable):
            raise cause from None
        self._stopped, self._error = "engine", f"{type(cause).__name__}: {cause}"

    def _result(self) -> EvalResult:
        self._meter.count()
        with self._lock:
            order = {task.name: place for place, task in enumerate(self._tasks)}
            samples = sorted(self._samples.values(), key=lambda one: (order[one.task], one.epoch))
            stopped = self.stopped
            if stopped in ("tokens", "cost", "unpriced", "failures") and len(samples) == self._total:
                stopped = ""
            result = EvalResult(
                self._name,
                samples,
                [task.name for task in self._tasks],
                list(self._scoring.scorers),
                self._epochs,
                self._pass_at,
                stopped,
                self._error,
                usage=self._meter.usage,
                seconds=time.monotonic() - self._began,
                settings=dict(self._settings),
                out=None if self._folder is None else self._folder.path,
            )
            folder = self._folder
            if folder is None:
                return result
            folder.finish({"status": "ended", **result.to_json(samples=False)})
            if folder.error is None:
                return result
            return replace(result, error=result.error or str(folder.error), n_unsaved=folder.n_unsaved)

    def close(self) -> None:
        """Close the folder and the threads."""
        with self._lock:
            self._scoring.close()
            if self._folder is not None:
                self._folder.close()


def is_metered(engine: Engine | ChatEngine) -> bool:
    """Return True if an engine counts its usage, in total and by trajectory.

    Args:
        engine: The engine.
    """
    return engine.usage is not None and engine.usage_of("") is not None


def _known(usage: Usage | None, engine: Engine | ChatEngine) -> Usage:
    """Return the usage of an engine that counts it; raise TypeError if it is None."""
    if usage is None:
        raise TypeError(f"{engine.describe()} counts its usage, but returned None for it")
    return usage
