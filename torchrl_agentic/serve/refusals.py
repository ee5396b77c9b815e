"""Why a server does not do what it is asked to; each has a status of HTTP."""

from __future__ import annotations

from typing import ClassVar


class Refused(Exception):
    """A request that is not served; the message is for whoever sent it."""

    status: ClassVar[int] = 422

    @property
    def headers(self) -> dict[str, str]:
        """What the answer has besides."""
        return {}


class BadRequest(Refused):
    """A request that asks for what cannot be."""


class Forbidden(Refused):
    """A request that comes from where none are taken."""

    status: ClassVar[int] = 403


class Unsupported(Refused):
    """A body of a kind that is not taken."""

    status: ClassVar[int] = 415


class Unauthorized(Refused):
    """A request without the token."""

    status: ClassVar[int] = 401

    @property
    def headers(self) -> dict[str, str]:
        """Say what is needed."""
        return {"WWW-Authenticate": "Bearer"}


class Overloaded(Refused):
    """More is asked than can wait. retry_after_s: when it is worth asking again, in whole seconds."""

    status: ClassVar[int] = 429

    def __init__(self, retry_after_s: int, what: str = "too many runs are waiting") -> None:
        super().__init__(f"{what}; ask again in {retry_after_s} s")
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        """Say when."""
        return {"Retry-After": str(self.retry_after_s)}
