"""`PerTrajectory`: a value that several tools share within one trajectory, such as a sandbox or a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeAlias, TypeVar

from torchrl_agentic.tools.base import current_session

T = TypeVar("T")
_Key: TypeAlias = tuple[int, object]
_Members: TypeAlias = "dict[_Key, Membership[T]]"


class PerTrajectory(Generic[T]):
    """The shared values of the trajectories that are open, created for the first tool that joins.

    Trajectories are told apart by their session while it opens, because two environments may use one name.
    Values do not travel: a pickled or copied `PerTrajectory` is empty.
    """

    def __init__(self) -> None:
        self._members: _Members[T] = {}

    def join(self, trajectory: str, create: Callable[[], T], *, owner: object = None) -> Membership[T]:
        """Return the membership of a trajectory, with one user more.

        Args:
            trajectory: Name of the trajectory.
            create: Creates the value; called if no tool of the trajectory has joined yet.
            owner: Object whose tools share the value, by identity; None if there is one owner only.

        Returns:
            A membership; call its `leave` once.
        """
        key = (id(owner), current_session.get() or trajectory)
        member = self._members.get(key)
        if member is None:
            member = self._members[key] = Membership(self._members, key, owner, create())
        member.users.join()
        return member

    def __iter__(self) -> Iterator[T]:
        return iter([member.value for member in self._members.values()])

    def __len__(self) -> int:
        return len(self._members)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), ())


class Users:
    """Count of the users of something that the last of them closes; a pickled copy has none."""

    def __init__(self) -> None:
        self._count = 0

    def join(self) -> None:
        """Add one user."""
        self._count += 1

    def leave(self) -> bool:
        """Remove one user, if there is one; return True if none is left."""
        self._count = max(0, self._count - 1)
        return self._count == 0

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), ())


class Membership(Generic[T]):
    """The value that the tools of one trajectory share; created by `PerTrajectory.join`.

    Args:
        members: Memberships by owner and trajectory, which the last `leave` removes this one from.
        key: Its key in `members`.
        owner: Object whose tools share the value, or None.
        value: The value.

    Attributes:
        value: The value.
        users: Count of the tools that use it.
    """

    def __init__(
        self,
        members: dict[tuple[int, object], Membership[T]],
        key: tuple[int, object],
        owner: object,
        value: T,
    ) -> None:
        self.value = value
        self.users = Users()
        self._members, self._key = members, key
        self._owner = owner  # kept alive, so that no other owner gets its identity meanwhile

    def leave(self) -> bool:
        """Remove one user; return True if it was the last one, which has to close the value."""
        is_last = self.users.leave()
        if is_last:
            del self._members[self._key]
        return is_last
