"""`TrainingRow`: a part of a trajectory that a loss counts as one row, so that each token counts once.

Usually a trajectory is one row. A tree has one per segment between two forks, and a trajectory whose prompts
are rendered anew has one per context: a context ends where the next prompt does not continue its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchrl_agentic.tokens.ledger import PROMPT, SAMPLED, TokenLedger
from torchrl_agentic.trajectory.advantages import Path, tree_advantage, tree_values
from torchrl_agentic.trajectory.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """Tokens that a loss counts with one advantage, behind the tokens that they depend on.

    Attributes:
        trajectory: The trajectory, or the first of those that share the row.
        path: Number of the tree, then that of the branch at each fork on the way.
        ledger: The tokens of its context, up to the end of the row.
        start: Number of first tokens that belong to other rows. Only sampled tokens behind them count.
        first_turn: Number of the turn in which the first sampled token of the ledger was sampled.
        is_end: Whether the trajectory ends with this row.
        reward: Reward of the trajectory, or the mean of those that the row led to; see `tree_values`.
        advantage: Its advantage; see `tree_advantage`.
    """

    trajectory: Trajectory
    path: Path
    ledger: TokenLedger
    start: int
    first_turn: int
    is_end: bool
    reward: float
    advantage: float

    @property
    def turns(self) -> list[int]:
        """Turn in which each token was sampled, [T]; -1 for the others, those of other rows included."""
        numbers = [-1] * len(self.ledger)
        turn = self.first_turn
        for span in self.ledger.spans():
            if span.source == SAMPLED:
                if span.start >= self.start:
                    numbers[span.start : span.stop] = [turn] * (span.stop - span.start)
                turn += 1
        return numbers


def training_rows(trajectories: Sequence[Trajectory]) -> list[TrainingRow]:
    """Return the rows of a whole group: each before those that follow it, trajectories in the given order.

    Together they count each sampled token of the group once. The baseline is over trajectories, and rows
    inherit the advantage of theirs.

    Args:
        trajectories: The trajectories, in the order of their paths.

    Raises:
        ValueError: If a reward is not finite in float32.
    """
    rewards = {trajectory.path: float(trajectory.reward) for trajectory in trajectories}
    values, advantages = tree_values(rewards), tree_advantage(rewards)
    found: list[TrainingRow] = []
    seen: set[Path] = set()
    for trajectory in trajectories:
        path, forks = trajectory.path, trajectory.forks
        for size in range(1, len(path)):
            node = path[:size]
            if node not in seen and trajectory.ledger is not None:
                start = 0 if size == 1 else forks[size - 2].n_tokens
                ledger = trajectory.ledger.copy(forks[size - 1].n_tokens)
                one = TrainingRow(trajectory, node, ledger, start, 0, False, values[node], advantages[node])
                seen.add(node)
                found.append(one)
        start = forks[-1].n_tokens if forks else 0
        first_turn = 0
        contexts = trajectory.contexts or ([trajectory.ledger] if trajectory.ledger is not None else [])
        for number, ledger in enumerate(contexts):
            is_end = number == len(contexts) - 1
            found.append(
                TrainingRow(
                    trajectory, path, ledger, start, first_turn, is_end, values[path], advantages[path]
                )
            )
            first_turn += sum(span.source == SAMPLED for span in ledger.spans())
    return found


class Contexts:
    """The contexts of a trajectory whose prompts are rendered anew.

    Attributes:
        ledgers: Their tokens. Earlier answers that the next prompt does not continue are PROMPT tokens there.
    """

    def __init__(self, ledgers: Sequence[TokenLedger] = ()) -> None:
        self.ledgers = [ledger.copy() for ledger in ledgers]

    def note(self, ledger: TokenLedger, size: int) -> None:
        """Append an answer to the context that its prompt continues, or to a new one.

        Args:
            ledger: A prompt, and the answer behind it.
            size: Number of tokens of the prompt.
        """
        columns = ledger.columns()
        known = self.ledgers[-1] if self.ledgers else TokenLedger()
        if not self.ledgers or columns.ids[: len(known)] != known.columns().ids or len(known) > size:
            known = TokenLedger()
            self.ledgers.append(known)
        known.add_injected(columns.ids[len(known) : size], [PROMPT] * (size - len(known)))
        for start, stop, version in _runs(columns.versions, size):
            known.add_sampled(
                columns.ids[start:stop],
                columns.log_probs[start:stop],
                version=None if version < 0 else version,
            )


def _runs(versions: Sequence[int], start: int) -> list[tuple[int, int, int]]:
    """Return the runs of tokens of one policy version, from a place on."""
    found: list[tuple[int, int, int]] = []
    for place in range(start, len(versions)):
        if found and versions[place] == found[-1][2]:
            found[-1] = (found[-1][0], place + 1, versions[place])
        else:
            found.append((place, place + 1, versions[place]))
    return found
