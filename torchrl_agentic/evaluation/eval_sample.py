"""`EvalSample`: the outcome of one task in one epoch, and its record in the dump."""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, cast

from torchrl_agentic.codec import from_json, to_json
from torchrl_agentic.engines.usage import Usage
from torchrl_agentic.messages import JSON, Turn
from torchrl_agentic.records.record import TokenRecord, TrajectoryRecord
from torchrl_agentic.records.recorder import versions
from torchrl_agentic.tokens.ledger import SAMPLED
from torchrl_agentic.trajectory.score import Score

if TYPE_CHECKING:
    from torchrl_agentic.collectors.failures import FailedTask
    from torchrl_agentic.trajectory.task import Task
    from torchrl_agentic.trajectory.trajectory import Trajectory

FAILED = "failed"
"""Reason why the record of a failed sample ended."""
BOUNDS = frozenset({"max_turns", "max_new_tokens", "max_trajectory_tokens"})
"""Reasons of trajectories that a bound ended."""


@dataclass(frozen=True, slots=True)
class EvalSample:
    """The outcome of one task in one epoch.

    Attributes:
        task: Name of the task.
        epoch: Number of the epoch, counted from 1.
        scores: Scores by the name of their scorer; a scorer that raised, or returned None, has none.
        score_errors: Errors of scorers that raised, by name.
        failure: Why there is no trajectory, a `FailureKind` such as "engine"; else "".
        error: Text of the error; "" without one.
        expected: The right answer of the task; None if it is unknown.
        answer: Text of the model's last message.
        reason: Why the trajectory ended, see `Trajectory.reason`; "failed" after a failure.
        n_turns: Number of messages of the model.
        n_calls: Number of tool calls.
        n_errors: Number of calls whose result is an error.
        seconds: Duration.
        usage: Tokens and cost.
        trajectory: The whole conversation; None if it is in the folder of the evaluation, or failed.
    """

    task: str
    epoch: int
    scores: Mapping[str, Score] = field(default_factory=dict[str, Score])
    score_errors: Mapping[str, str] = field(default_factory=dict[str, str])
    failure: str = ""
    error: str = ""
    expected: JSON = None
    answer: str = ""
    reason: str = ""
    n_turns: int = 0
    n_calls: int = 0
    n_errors: int = 0
    seconds: float = 0.0
    usage: Usage = field(default_factory=Usage)
    trajectory: Trajectory | None = field(default=None, compare=False, repr=False)

    @property
    def has_failed(self) -> bool:
        """True if the trajectory failed, or one of its scorers."""
        return bool(self.failure or self.score_errors)

    @property
    def score(self) -> float | None:
        """Value of the first scorer, or None."""
        return next((float(score) for score in self.scores.values()), None)

    def to_json(self) -> dict[str, JSON]:
        """Return the fields, without the conversation."""
        found: dict[str, JSON] = {one.name: getattr(self, one.name) for one in fields(self)}
        del found["trajectory"]
        return {
            **found,
            "scores": {name: to_json(score) for name, score in self.scores.items()},
            "score_errors": dict(self.score_errors),
            "usage": asdict(self.usage),
        }


def sample_of(
    trajectory: Trajectory,
    epoch: int,
    *,
    scores: Mapping[str, Score],
    score_errors: Mapping[str, str],
    usage: Usage,
) -> EvalSample:
    """Return the sample of a trajectory that has ended.

    Args:
        trajectory: The trajectory.
        epoch: Number of the epoch, counted from 1.
        scores: Scores by scorer.
        score_errors: Errors by scorer.
        usage: Its tokens and cost.
    """
    return EvalSample(
        trajectory.task.name,
        epoch,
        scores=dict(scores),
        score_errors=dict(score_errors),
        expected=trajectory.task.truth,
        answer=trajectory.answer,
        reason=trajectory.reason,
        n_turns=len(trajectory.turns),
        n_calls=trajectory.n_calls,
        n_errors=trajectory.n_errors,
        seconds=trajectory.seconds,
        usage=usage,
        trajectory=trajectory,
    )


def failed_sample(failed: FailedTask, task: Task, epoch: int, usage: Usage) -> EvalSample:
    """Return the sample of a trajectory that failed.

    Args:
        failed: The failure.
        task: The task.
        epoch: Number of the epoch, counted from 1.
        usage: Tokens and cost.
    """
    found, error = failed.trajectory, failed.error
    text = str(error) or type(error).__name__
    sample = EvalSample(
        task.name, epoch, failure=failed.kind, error=text, expected=task.truth, reason=FAILED, usage=usage
    )
    if found is None:
        return sample
    return replace(
        sample,
        n_turns=len(found.turns),
        n_calls=found.n_calls,
        n_errors=found.n_errors,
        seconds=found.seconds,
        trajectory=found,
    )


def record_of(
    sample: EvalSample,
    *,
    run: str = "",
    digest: str = "",
    decode: Callable[[Sequence[int]], str] | None = None,
) -> TrajectoryRecord:
    """Return the record of a sample; its extras hold the fields that a trajectory lacks.

    Args:
        sample: A sample with its trajectory.
        run: Id of the run.
        digest: Digest of the task, see `task_digest`.
        decode: Decodes token ids for the record of its tokens; None: the record has no tokens.
    """
    trajectory = sample.trajectory
    turns: tuple[Turn, ...] = ()
    tokens = None
    if trajectory is not None and trajectory.turns:
        turns = trajectory.turns
        known = sum(len(turn.context) + 1 + len(turn.messages) for turn in turns)
        if len(trajectory.messages) > known:  # those of the user behind the last turn
            last = turns[-1]
            messages = (*last.messages, *trajectory.messages[known:])
            turns = (*turns[:-1], replace(last, messages=messages))
        ledger = None if trajectory.contexts else trajectory.ledger  # none has all of them
        if decode is not None and ledger is not None:
            ids = ledger.ids
            texts = tuple(decode(ids[span.start : span.stop]) for span in ledger.spans())
            tokens = TokenRecord(ledger, texts)
    fields = sample.to_json()
    extras = {name: fields[name] for name in ("task", "epoch", "scores", "seconds", "usage")}
    extras |= {name: fields[name] for name in ("score_errors", "failure", "error") if fields[name]}
    return TrajectoryRecord(
        uuid.uuid4().hex,
        turns,
        trajectory=sample.task if sample.epoch == 1 else f"{sample.task} #{sample.epoch}",
        rewards=tuple(None for _ in turns),
        score=sample.score,
        gts=sample.expected,
        extras={**extras, "task_digest": digest} if digest else extras,
        termination_reason=sample.reason,
        tokens=tokens,
        started=time.time() - sample.seconds,
        versions=versions(),
        run=run,
    )


def sample_from(record: TrajectoryRecord) -> EvalSample:
    """Read a sample from its record; the conversation stays in the record.

    Args:
        record: A record that `record_of` made.

    Raises:
        KeyError: If a field is missing.
        TypeError: If a field has another type.
        ValueError: If a value is invalid.
    """
    extras: Mapping[str, Any] = record.extras
    scores = {name: from_json(Score, one) for name, one in extras["scores"].items()}
    last = record.turns[-1] if record.turns else None
    said = last.messages[-1] if last is not None and last.messages else last and last.message
    return EvalSample(
        str(extras["task"]),
        int(extras["epoch"]),
        scores=scores,
        score_errors=dict(extras.get("score_errors", {})),
        failure=str(extras.get("failure", "")),
        error=str(extras.get("error", "")),
        expected=record.gts,
        answer=said.text
        if said is not None and said.role == "assistant" and not extras.get("failure")
        else "",
        reason=record.termination_reason,
        n_turns=len(record.turns),
        n_calls=sum(1 for _ in record.calls),
        n_errors=sum(result.is_error for _, _, result in record.calls),
        seconds=float(extras["seconds"]),
        usage=usage_from(extras["usage"]),
    )


def with_scores(record: TrajectoryRecord, sample: EvalSample) -> TrajectoryRecord:
    """Return a record with the scores of a sample.

    Args:
        record: A record that `record_of` made.
        sample: The sample, scored again.
    """
    fields = sample.to_json()
    extras = {name: value for name, value in record.extras.items() if name != "score_errors"}
    extras |= {name: fields[name] for name in ("scores", "score_errors") if fields[name] or name == "scores"}
    return replace(record, score=sample.score, extras=extras)


def trajectory_of(record: TrajectoryRecord, task: Task) -> Trajectory:
    """Return the trajectory of a record for scorers, without scores of simulated users and without spans.

    Args:
        record: A record that `record_of` made.
        task: Its task.
    """
    from torchrl_agentic.trajectory.trajectory import Trajectory

    truncated = record.termination_reason in BOUNDS
    return Trajectory(
        record.trajectory,
        task,
        0,
        tuple(record.messages),
        record.turns,
        record.termination_reason,
        terminated=not truncated,
        truncated=truncated,
        ledger=None if record.tokens is None else record.tokens.ledger,
        columns={"tool_reward": sum(result.reward or 0.0 for _, _, result in record.calls)},
        seconds=float(record.extras["seconds"]),
    )


def usage_from(data: Mapping[str, Any]) -> Usage:
    """Read a usage from its fields by name; fields that earlier versions did not write are 0.

    Args:
        data: The fields.

    Raises:
        KeyError: If a field is missing.
    """
    given = {"uncounted": 0, "unpriced": 0, **data}
    return Usage(**{one.name: given[one.name] for one in fields(Usage)})


def usage_of_tokens(trajectory: Trajectory) -> Usage:
    """Return the usage of a trajectory, computed from its tokens; each request counts its whole prompt.

    Args:
        trajectory: A trajectory; without a ledger, its prompts are not counted.
    """
    if trajectory.ledger is None:
        asked = [span for span in trajectory.spans if span.cause == "engine"]
        return Usage(len(asked), completion=sum(span.tokens for span in asked))
    contexts = trajectory.contexts or (trajectory.ledger,)
    spans = [span for ledger in contexts for span in ledger.spans() if span.source == SAMPLED]
    return Usage(
        len(spans),
        prompt=sum(span.start for span in spans),
        completion=sum(span.stop - span.start for span in spans),
    )


def task_digest(task: Task) -> str:
    """Return a digest of a task's name, messages, answer and data, to recognize it in a later run.

    Args:
        task: The task.
    """
    content = [task.name, [dict(one) for one in task.messages], task.answer, dict(task.data), task.max_turns]
    return digest_of(content, _described)


def digest_of(content: JSON, describe: Callable[[Any], JSON] = repr) -> str:
    """Return a short hash of JSON.

    Args:
        content: The JSON.
        describe: Converts a value that `json` cannot write to JSON.
    """
    text = json.dumps(content, sort_keys=True, default=describe, ensure_ascii=False)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()


def _described(value: Any) -> JSON:
    """Return JSON for a value that is not JSON, the same in each program: without addresses of objects."""
    if callable(getattr(value, "tolist", None)):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(cast("Mapping[str, Any]", value))
    if isinstance(value, bytes):
        return hashlib.blake2b(value, digest_size=6).hexdigest()
    shown = repr(value)
    return type(value).__name__ if " at 0x" in shown else shown
