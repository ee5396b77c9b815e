"""`COLUMNS`: the entries under "agentic", what each turn contributes to them, and how a trajectory adds up.

Specs, zeros at a reset, what a step writes, the batches of collectors and `trajectory_batch` come from this
table. A new column is one more line here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torchrl_agentic.messages import JSON, Status
from torchrl_agentic.trajectory.reasons import number_of

if TYPE_CHECKING:
    from torchrl_agentic.trajectory.episode import Episode, OpenTurn

KEY = "agentic"
Fold = Literal["any", "sum", "last", "join"]
"""How the values of the turns become that of the trajectory."""


@dataclass(frozen=True, slots=True)
class Column:
    """An entry under "agentic": a number per row, [*B, 1], or a list per row, [*B].

    Attributes:
        name: Its key.
        kind: `bool`, `int` (int64), `float` (float32) or `list`.
        fold: How the values of the turns become that of the trajectory.
        of_turn: Returns the value of a turn; rows that take no part in a step have 0, False or []. Or None:
        of_episode: Returns the value of a trajectory, in every step and at its reset.
    """

    name: str
    kind: type
    fold: Fold
    of_turn: Callable[[OpenTurn], Any] | None = None
    of_episode: Callable[[Episode], Any] | None = None

    def value(self, turn: OpenTurn) -> Any:
        """Return the value of a turn, of the kind of the column."""
        if self.of_turn is not None:
            return self.kind(self.of_turn(turn))
        assert self.of_episode is not None
        return self.kind(self.of_episode(turn.episode))


def _seconds(turn: OpenTurn) -> float:
    return sum(result.timing.run_s for result in turn.results if result.timing is not None)


def _n_infra(turn: OpenTurn) -> int:
    return sum(result.status is Status.INFRA for result in turn.results) if turn.n_errors else 0


def _user_turn(episode: Episode) -> int:
    return 0 if episode.user is None else episode.user.n_replies


def call_records(turn: OpenTurn) -> list[dict[str, JSON]]:
    """Return id, number, tool, status, reward and metrics of each call of a turn.

    The number is the source of the call's tokens in a `TokenLedger`.
    """
    first = turn.episode.session.n_calls - len(turn.calls)
    return [
        {
            "call_id": call.call_id,
            "number": first + index,
            "tool": call.tool,
            "status": str(result.status),
            "reward": result.reward,
            "metrics": dict(result.metrics or {}),
        }
        for index, (call, result) in enumerate(zip(turn.calls, turn.results, strict=True))
    ]


CALLS = (
    Column("any_tool_calls", bool, "any", lambda turn: bool(turn.results)),
    Column("any_error", bool, "any", lambda turn: turn.n_errors > 0),
    Column("stop_requested", bool, "any", lambda turn: turn.is_stopped),
    Column("cut", bool, "any", lambda turn: turn.is_cut),
    Column("no_verdict", bool, "any", lambda turn: turn.is_unjudged),
    Column("not_begun", bool, "any", lambda turn: not turn.has_begun),
    Column("n_calls", int, "sum", lambda turn: len(turn.results)),
    Column("n_errors", int, "sum", lambda turn: turn.n_errors),
    Column("n_infra", int, "sum", _n_infra),
    Column("turn", int, "last", of_episode=lambda episode: episode.n_turns),
    Column("trajectory", int, "last", of_episode=lambda episode: episode.number),
    Column("ended_by", int, "last", lambda turn: number_of(turn.reason) if turn.reason else 0),
    Column("tool_reward", float, "sum", lambda turn: turn.tool_reward),
    Column("trajectory_reward", float, "sum", lambda turn: turn.final_reward),
    Column("tool_seconds", float, "sum", _seconds),
)
REPORTED_CALLS = (Column("calls", list, "join", call_records),)
USER = (
    Column("user_turn", int, "last", of_episode=_user_turn),
    Column("user_score", float, "sum", lambda turn: (turn.reply.score or 0.0) if turn.reply else 0.0),
    Column("user_final_score", float, "sum", lambda turn: turn.user_score),
    Column("user_error", bool, "any", lambda turn: turn.user_error is not None),
)
TOKENS = (Column("token_drift", int, "last", lambda turn: turn.drift),)
COLUMNS = {column.name: column for column in (*CALLS, *REPORTED_CALLS, *USER, *TOKENS)}
"""All entries under "agentic" of the stages of this package, by name."""


def folded(column: Column, known: Any, new: Any) -> Any:
    """Return the value of a trajectory after a further turn.

    Args:
        column: The column.
        known: Its value so far.
        new: Its value in the turn.
    """
    if column.fold == "last":
        return new
    return (known or new) if column.fold == "any" else known + new


def fold_turn(facts: dict[str, Any], turn: OpenTurn, columns: Iterable[Column]) -> None:
    """Fold a turn into the values of its trajectory.

    Args:
        facts: Values by name; changed.
        turn: The turn, after all stages.
        columns: The columns.
    """
    for column in columns:
        new = column.value(turn)
        facts[column.name] = folded(column, facts[column.name], new) if column.name in facts else new
