"""`Stage`: one rule of a turn, with its options, which both borders apply in the order of the transforms."""

from __future__ import annotations

import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torchrl_agentic.trajectory.columns import COLUMNS, KEY

if TYPE_CHECKING:
    from torchrl_agentic.trajectory.columns import Column
    from torchrl_agentic.trajectory.episode import OpenTurn

logger = logging.getLogger(__name__)
_logged: weakref.WeakSet[Stage] = weakref.WeakSet()  # an environment checks at each reset


class Stage(ABC):
    """One rule of a turn: run the calls, end the trajectory, ask the user, give a reward.

    A transform that has a `stage` works in an environment and in an `AgentCollector`: the environment calls
    it for all rows of a step at once, a collector for one trajectory at a time. A stage reads the turns, adds
    messages (`OpenTurn.add`), ends trajectories (`OpenTurn.end`) and gives rewards (`OpenTurn.give`). State
    of a trajectory belongs into `Episode.state`, under the stage as the key.

    Attributes:
        name: Name for messages: that of the transform it belongs to; by default made of the class's name.
        needs: Classes of stages that must stand in front of this one, besides that of `ToolCompose`.
        opens_turns: Whether it is the stage of `ToolCompose`, which stands in front of all others.
        gives_rewards: Whether it calls `OpenTurn.give`.
        reads_answer: Whether it may look up the right answer of a task, which a worker gets only then.
        hears_user: Whether the simulated user is heard here; the tools stay open until then.
        may_end: Whether it ends trajectories; stages with `needs_end` belong behind it.
        needs_end: Whether it acts when a trajectory has ended, in the same turn.
    """

    name: ClassVar[str] = "Stage"
    needs: ClassVar[tuple[type[Stage], ...]] = ()
    opens_turns: ClassVar[bool] = False
    gives_rewards: ClassVar[bool] = False
    reads_answer: ClassVar[bool] = True
    hears_user: ClassVar[bool] = False
    may_end: ClassVar[bool] = False
    needs_end: ClassVar[bool] = False

    @property
    def columns(self) -> Sequence[Column]:
        """Entries under "agentic" that it fills in."""
        return ()

    @abstractmethod
    def run(self, turns: Sequence[OpenTurn]) -> Coroutine[Any, Any, None] | None:
        """Act on the open turns of one or more trajectories.

        An ordinary method that has nothing to wait for returns None, which spares a step the way to the event
        loop and back. It may be a coroutine method, too.

        Args:
            turns: The turns, one per trajectory; each is passed to a stage once.

        Returns:
            What is left to do on the event loop, or None.
        """
        ...

    def check(self, stages: Sequence[Stage]) -> None:  # noqa: B027  most stages go together with all others
        """Check that the stage goes together with the others; called once, before the first trajectory.

        Args:
            stages: All stages, in the order of the transforms.

        Raises:
            ValueError: If it contradicts another one; the message says what would work.
        """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" not in cls.__dict__:
            cls.name = cls.__name__.removesuffix("Stage") or cls.__name__


def act(stage: Stage, turns: Iterable[OpenTurn]) -> Coroutine[Any, Any, None] | None:
    """Pass the turns to a stage that it has not seen.

    Args:
        stage: The stage.
        turns: Turns of several trajectories.

    Returns:
        What is left to do on the event loop, or None.
    """
    new = [turn for turn in turns if turn.claim(stage)]
    return stage.run(new) if new else None


def check_order(stages: Sequence[Stage]) -> None:
    """Check that each stage has what it needs in front of it, and goes together with the others.

    A stage that would miss the end of trajectories is logged, once.

    Args:
        stages: The stages, in the order of the transforms.

    Raises:
        ValueError: If one has not, or does not; the message names the order.
    """
    first = [type(stage) for stage in stages if stage.opens_turns][:1]
    for place, stage in enumerate(stages):
        for kind in (*([] if stage.opens_turns else first), *stage.needs):
            if not any(isinstance(one, kind) for one in stages[:place]):
                if any(isinstance(one, kind) for one in stages[place:]):
                    raise ValueError(
                        f"{stage.name} reads what {kind.name} writes, and stands in front of it; write "
                        f"Compose({kind.name}(...), {stage.name}(...))"
                    )
                raise ValueError(f"{stage.name} reads what {kind.name} writes, and there is none")
        for column in stage.columns:
            if COLUMNS.get(column.name, column) is not column:
                raise ValueError(
                    f"{stage.name} has a column {column.name!r}, which is one of {KEY!r} already: rename it"
                )
        stage.check(stages)
        late = next((one for one in stages[place + 1 :] if one.may_end), None)
        if stage.needs_end and late is not None and stage not in _logged:
            _logged.add(stage)
            logger.warning(
                "%s acts on trajectories that have ended, and misses those that %s behind it ends; write "
                "Compose(%s(...), %s(...))",
                stage.name,
                late.name,
                late.name,
                stage.name,
            )
