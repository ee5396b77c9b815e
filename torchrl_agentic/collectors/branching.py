"""`Branching`: at which turns trajectories fork, so that the trajectories of a group form trees."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from torchrl_agentic.dispatch import Session
from torchrl_agentic.errors import FilesNotCopied, check_count
from torchrl_agentic.messages import Turn
from torchrl_agentic.tools.base import Tool, Toolset, has_sessions, world_name
from torchrl_agentic.trajectory.fork import Fork, ForkState

if TYPE_CHECKING:
    from torchrl_agentic.trajectory.spec import TrajectorySpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BranchPoint:
    """A place between two turns at which a trajectory may fork.

    Attributes:
        n_turns: Number of turns so far.
        turn: The last turn: the message, its calls and their results.
        log_probs: Log-probabilities of the tokens of the last message, in nats; NaN where unknown, and empty
            without tokens.
        n_forks: Number of forks so far.
    """

    n_turns: int
    turn: Turn
    log_probs: Sequence[float] = ()
    n_forks: int = 0


@dataclass(frozen=True, slots=True)
class Branching:
    """Options of the trees that trajectories grow.

    A trajectory that forks continues as branch 0, and its other branches begin with its messages, its tokens
    and copies of what its tools hold open. Each may fork again. A tree never has more than `max_leaves`
    leaves: a fork divides the number of leaves that may still grow evenly among its branches, so that it does
    not matter which of them is faster.

    Forks share the tokens in front of them. With `at=(1, 2)` and `width=2`, a tree has 4 leaves, and its
    3 turns cost 1 + 2 + 4 messages instead of the 12 of four separate trajectories.

    Args:
        at: Numbers of turns after which a trajectory forks: 1 is the first message with the results of its
            calls. Or a function of a `BranchPoint` that returns True where it forks; it runs on the event
            loop, between two turns.
        width: Number of branches of a fork.
        max_leaves: Upper bound on the leaves of a tree; None: all that `at` and `width` lead to. Needed with
            a function.

    Raises:
        TypeError: If `at` is neither numbers nor a function.
        ValueError: If a number is out of range, or `max_leaves` is missing.
    """

    at: tuple[int, ...] | Callable[[BranchPoint], bool] = (1,)
    width: int = 2
    max_leaves: int | None = None

    def __post_init__(self) -> None:
        check_count("width", self.width, optional=False, least=2)
        check_count("max_leaves", self.max_leaves, least=2)
        if callable(self.at):
            if self.max_leaves is None:
                raise ValueError("at is a function, which may return True at every turn: pass max_leaves=")
            return
        if not isinstance(cast("object", self.at), tuple) or not self.at:
            raise TypeError(f"at is a tuple of numbers of turns, or a function; got {self.at!r}")
        for turn in self.at:
            check_count("each number in at", turn, optional=False)
        if list(self.at) != sorted(set(self.at)):
            raise ValueError(f"the numbers in at ascend, and each is there once; got {self.at!r}")

    @property
    def n_leaves(self) -> int:
        """Upper bound on the leaves of a tree."""
        if self.max_leaves is not None:
            return self.max_leaves
        assert not callable(self.at)
        return self.width ** len(self.at)

    def shares(self, point: BranchPoint, n_leaves: int) -> list[int]:
        """Return how many leaves may grow from each branch of a fork; a single number if there is none.

        Args:
            point: Where the trajectory is.
            n_leaves: Number of leaves that may grow from it.
        """
        width = min(self.width, n_leaves)
        if width < 2:
            return [n_leaves]
        forks = self.at(point) if callable(self.at) else point.n_turns in self.at
        if not isinstance(cast("object", forks), bool):
            raise TypeError(f"the function at of Branching returns True or False; got {forks!r}")
        if not forks:
            return [n_leaves]
        return [n_leaves // width + (branch < n_leaves % width) for branch in range(width)]


@dataclass(eq=False, slots=True)
class Branch:
    """Place of a trajectory in its tree; it changes when the trajectory forks.

    Attributes:
        index: Number of the tree in its group.
        n_leaves: Number of leaves that may grow from here.
        forks: The forks on its way.
        state: The trajectory at its last fork; None before the first one.
        session: Copy of what was open at the fork, until the branch starts; None if it has started.
    """

    index: int
    n_leaves: int
    forks: tuple[Fork, ...] = ()
    state: ForkState | None = None
    session: Session | None = None

    @property
    def path(self) -> str:
        """The numbers of the branches on its way, such as "0.1"; "" before the first fork."""
        return ".".join(str(fork.branch) for fork in self.forks)

    @property
    def can_begin_again(self) -> bool:
        """True if the trajectory can begin again at its last fork, where its tools held nothing open."""
        return self.state is not None and not self.state.is_open

    def take_session(self) -> Session | None:
        """Return the session of the branch, which belongs to the caller from now on."""
        session, self.session = self.session, None
        return session


class Forkable(Protocol):
    """A trajectory between two turns."""

    def branch_point(self) -> BranchPoint:
        """Return where the trajectory is."""
        ...

    def fork_state(self) -> ForkState:
        """Return the trajectory as its branches continue it."""
        ...

    async def branch_session(self, names: Sequence[str]) -> list[Session]:
        """Return sessions of new trajectories with copies of what is open."""
        ...


class Forking:
    """The forks of one trajectory.

    Args:
        options: When it forks.
        branch: Its place in its tree.
        name_of: Returns the name of a new trajectory, from the numbers of the branches on its way.
        begin: Called with the new trajectories, in the order of their branches.
    """

    def __init__(
        self,
        options: Branching,
        branch: Branch,
        *,
        name_of: Callable[[str], str],
        begin: Callable[[Sequence[Branch]], None],
    ) -> None:
        self._options, self._branch = options, branch
        self._name_of, self._begin = name_of, begin

    @property
    def forks(self) -> tuple[Fork, ...]:
        """The forks so far, those before its beginning included."""
        return self._branch.forks

    async def after_turn(self, run: Forkable) -> None:
        """Fork a trajectory, if this is the place for it.

        Args:
            run: The trajectory.

        Raises:
            TypeError: If a tool that is open defines no `branch`, or the function `at` returns no bool.
            InfrastructureError: If the state of a tool cannot be copied. If what code has left is to blame,
                the trajectory goes on without a fork, here and later.
        """
        place = self._branch
        if place.n_leaves < 2:
            return
        point = run.branch_point()
        shares = self._options.shares(point, place.n_leaves)
        if len(shares) < 2:
            return
        state = run.fork_state()
        n_tokens = 0 if state.ledger is None else len(state.ledger)
        branches = [
            Branch(
                place.index,
                share,
                (*place.forks, Fork(point.n_turns, n_tokens, number, state.seconds, state.columns)),
                state,
            )
            for number, share in enumerate(shares)
        ]
        try:
            sessions = await run.branch_session([self._name_of(branch.path) for branch in branches[1:]])
        except FilesNotCopied as error:
            place.n_leaves = 1
            logger.warning("%s cannot fork: %s", self._name_of(place.path), error)
            return
        own, *others = branches
        place.n_leaves, place.forks, place.state = own.n_leaves, own.forks, own.state
        for branch, session in zip(others, sessions, strict=True):
            branch.session = session
        self._begin(others)


def check_branches(spec: TrajectorySpec) -> None:
    """Check that the trajectories of a collector can fork, as far as it can be known before they begin.

    Args:
        spec: What the trajectories share.

    Raises:
        TypeError: If a tool, a toolset or a simulated user has state that cannot be copied.
        ValueError: If prompts are rendered anew.
    """
    if spec.users is not None:
        raise TypeError("branching= and UserSimulator exclude each other: simulated users have no branch()")
    if spec.encoder is not None and spec.encoder.use_inference_chat_template:
        raise ValueError(
            "branching= and use_inference_chat_template=True exclude each other: branches share no tokens if "
            "each prompt is rendered anew"
        )
    for tool in map(_innermost, spec.dispatcher.tools):
        if has_sessions(tool) and type(tool).branch is Tool.branch:
            raise TypeError(
                f"trajectories with the tool {tool.name!r} cannot fork, since {type(tool).__name__} has "
                "sessions and defines no branch(): define it beside session(), or leave branching= out"
            )
    for world in _worlds(entry.world for entry in spec.dispatcher.bound.values()):
        if type(world).branch is Toolset.branch:
            raise TypeError(
                f"trajectories with the toolset {world_name(world)!r} cannot fork, since "
                f"{type(world).__name__} has a world and defines no branch(): define it beside session(), or "
                "leave branching= out"
            )


def _innermost(tool: Tool) -> Tool:
    """Return the tool inside all its wrappers."""
    while isinstance(inner := getattr(tool, "tool", None), Tool):
        tool = inner
    return tool


def _worlds(worlds: Iterable[Toolset | None]) -> list[Toolset]:
    return list(dict.fromkeys(world for world in worlds if world is not None))
