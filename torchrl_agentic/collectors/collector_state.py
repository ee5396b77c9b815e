"""`CollectorState`: the begun groups of a collector as plain values, with which another process continues."""

from __future__ import annotations

import base64
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, cast

import numpy as np

from torchrl_agentic.codec import from_json, to_json
from torchrl_agentic.errors import check_count
from torchrl_agentic.tokens.ledger import TokenLedger
from torchrl_agentic.trajectory.task import Task
from torchrl_agentic.trajectory.trajectory import Trajectory

logger = logging.getLogger(__name__)

FORMAT = 4
"""Version of the form of `CollectorState.to_json`."""


@dataclass(frozen=True, slots=True)
class GroupState:
    """A group that had begun and had not left.

    Attributes:
        label: Number of its task, the same in a run that is resumed.
        task: Name of the task.
        version: Policy version at which it began.
        attempts: Number of its trajectories that failed and were replaced.
        finished: Trajectories that had ended. After `from_json`, their tasks have a name and no messages.
        running: The others that had begun, by index: the value of `attempts` when they did, from which their
            keys follow.
    """

    label: int
    task: str
    version: int
    attempts: int = 0
    finished: tuple[Trajectory, ...] = ()
    running: Mapping[int, int] = field(default_factory=dict[int, int])


@dataclass(frozen=True, slots=True)
class CollectorState:
    """The begun groups of a collector, and its policy version.

    Attributes:
        version: Policy version.
        groups: Groups that had begun and had not left.
    """

    version: int
    groups: tuple[GroupState, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return dicts, lists, texts and numbers, in time O(tokens).

        A trajectory that holds other values, such as opened images, is left out, and begins again.
        """
        return {
            "format": FORMAT,
            "policy_version": self.version,
            "groups": [_group_to_json(group) for group in self.groups],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CollectorState:
        """Read what `to_json` wrote.

        Args:
            data: The object.

        Raises:
            ValueError: If it is something else.
        """
        if data.get("format") != FORMAT:
            raise ValueError(
                f"the state of the collector has the format {data.get('format')!r}; this version reads "
                f"{FORMAT}"
            )
        try:
            version = _count(data, "policy_version")
            groups = tuple(_group_from_json(group) for group in data["groups"])
            if len({group.label for group in groups}) < len(groups):
                raise ValueError("two groups have one label")
            if any(not 0 <= group.version <= version for group in groups):
                raise ValueError(f"a group is newer than the policy version {version}")
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"this is no state of an AgentCollector: {type(error).__name__}: {error}"
            ) from error
        return cls(version, groups)


class NotPlain(TypeError):
    """A value is neither a text, a number, a list nor a mapping of them."""


def plain(value: Any) -> Any:
    """Return a copy of a value that holds only dicts, lists, texts, numbers, bools and None.

    Args:
        value: The value; tuples become lists.

    Raises:
        NotPlain: If it holds something else.
    """
    if value is None or type(value) in {str, int, float, bool}:
        return value
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        if any(not isinstance(key, str) for key, _ in items):
            raise NotPlain("a mapping has keys that are no texts")
        return {str(key): plain(one) for key, one in items}
    if isinstance(value, list | tuple):
        return [plain(one) for one in cast("Iterable[Any]", value)]
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise NotPlain(f"it holds a value of type {type(value).__name__}")


def _group_to_json(group: GroupState) -> dict[str, Any]:
    finished = [_unless_other(one) for one in group.finished]
    return {
        "label": group.label,
        "task": group.task,
        "version": group.version,
        "attempts": group.attempts,
        "finished": [one for one in finished if one is not None],
        "running": [{"index": index, "attempt": attempt} for index, attempt in group.running.items()],
    }


def _unless_other(one: Trajectory) -> dict[str, Any] | None:
    """Convert a trajectory; None if it holds something that a state cannot."""
    try:
        return _finished_to_json(one)
    except NotPlain as error:
        logger.warning("the state leaves %s out, so that it begins again: %s", one.name, error)
        return None


def _group_from_json(data: Mapping[str, Any]) -> GroupState:
    label, version, attempts = (_count(data, key) for key in ("label", "version", "attempts"))
    task = _text(data, "task")
    running = [(_count(one, "index"), _count(one, "attempt")) for one in data["running"]]
    finished = tuple(_finished_from_json(one, Task(task, ())) for one in data["finished"])
    indices = [*(one.index for one in finished), *(index for index, _ in running)]
    if len(set(indices)) < len(indices):
        raise ValueError(f"two trajectories of {task} have one index")
    return GroupState(label, task, version, attempts, finished, dict(running))


_META = {"turns": {"__all__": {"outcome": {"results": {"__all__": {"meta"}}}}}}
_OWN = {"task": True, "ledger": True, "contexts": True, "spans": True, "forks": True}
"""Fields of a trajectory that are left out, or have a form of their own."""


def _finished_to_json(one: Trajectory) -> dict[str, Any]:
    """Convert a trajectory; the `meta` of results is left out if it is not plain."""
    try:
        fields = plain(to_json(one, exclude=_OWN))
    except NotPlain:
        fields = plain(to_json(one, exclude={**_OWN, **_META}))
    return {
        **fields,
        "reward": float(one.reward),
        "seconds": float(one.seconds),
        "ledger": _packed_ledger(one.ledger),
        "contexts": [_packed_ledger(ledger) for ledger in one.contexts],
    }


def _finished_from_json(data: Mapping[str, Any], task: Task) -> Trajectory:
    own = {"task": task, "reward": data["reward"], "seconds": data["seconds"]}
    contexts = [_unpacked_ledger(one) for one in data["contexts"]]
    ledger = _unpacked_ledger(data["ledger"])
    return from_json(Trajectory, {**data, **own, "ledger": ledger, "contexts": contexts})


def _packed_ledger(ledger: TokenLedger | None) -> dict[str, Any] | None:
    """Return the JSON of a ledger with texts for its numbers: `torch.load` takes 10 us per number."""
    if ledger is None:
        return None
    made = ledger.to_json()
    return {**made, "ids": _packed(made["ids"], _IDS), "log_probs": _packed(made["log_probs"], _LOG_PROBS)}


def _unpacked_ledger(found: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if found is None:
        return None
    ids, log_probs = _unpacked(found["ids"], _IDS), _unpacked(found["log_probs"], _LOG_PROBS)
    return {**found, "ids": ids, "log_probs": log_probs}


_IDS, _LOG_PROBS = "<u4", "<f8"


def _packed(values: Sequence[float | None] | None, kind: str) -> str | None:
    return None if values is None else base64.b64encode(np.array(values, kind).tobytes()).decode()


def _unpacked(text: str | None, kind: str) -> list[Any] | None:
    return None if text is None else np.frombuffer(base64.b64decode(text, validate=True), kind).tolist()


def _count(data: Mapping[str, Any], key: str) -> int:
    check_count(key, data[key], optional=False, least=0)
    return int(data[key])


def _text(data: Mapping[str, Any], key: str) -> str:
    if not isinstance(data[key], str):
        raise TypeError(f"{key} is a text; got {data[key]!r:.80}")
    return data[key]
