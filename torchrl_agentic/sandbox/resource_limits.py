"""`ResourceLimits`: what code in a sandbox may use."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

T = TypeVar("T", int, float)
Network = Literal["none", "loopback", "allowlist", "full"]
_NUMBERS = (
    "cpu_seconds", "wall_seconds", "memory_bytes", "memory_total_bytes", "max_processes", "disk_bytes",
    "disk_total_bytes", "output_bytes",
)  # fmt: skip
_NETWORK_ORDER: tuple[Network, ...] = ("none", "loopback", "allowlist", "full")


@dataclass(frozen=True, slots=True)
class ResourceLimits:
    """Limits of a sandbox or of one call in it; None means no limit.

    Attributes:
        cpu_seconds: Processor time of each process, in seconds.
        memory_bytes: Memory of each process.
        memory_total_bytes: Memory of all processes together, with files that the sandbox keeps in memory.
        wall_seconds: Duration of a command, in seconds.
        disk_bytes: Size of each file.
        disk_total_bytes: Size of all files together.
        max_processes: Number of processes at the same time.
        network: "none", or what the sandbox supports of "loopback", "allowlist" and "full".
        network_allowlist: "host:port" entries, for the network "allowlist".
        fs_read_roots: Host folders that can be read, besides those of the system.
        fs_write_roots: Host folders that can be written.
        env: Environment of the code; None for the clean default. That of the trainer is never passed on.
        output_bytes: Bytes kept of stdout and of stderr each, half from the head and half from the tail.
    """

    cpu_seconds: float | None = 30.0
    wall_seconds: float | None = 60.0
    memory_bytes: int | None = 512 << 20
    network: Network = "none"
    network_allowlist: tuple[str, ...] = ()
    fs_read_roots: tuple[str, ...] = ()
    fs_write_roots: tuple[str, ...] = ()
    max_processes: int | None = 32
    env: Mapping[str, str] | None = None
    disk_bytes: int | None = 64 << 20
    output_bytes: int = 1 << 20
    memory_total_bytes: int | None = 1 << 30
    disk_total_bytes: int | None = 64 << 20

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError: If a limit is not above 0, or the network is unknown.
        """
        for name in _NUMBERS:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0, or None for no limit; got {value}")
        if self.network not in _NETWORK_ORDER:
            raise ValueError(f"network must be one of {', '.join(_NETWORK_ORDER)}; got {self.network!r}")

    def narrow(self, other: ResourceLimits | None) -> ResourceLimits:
        """Return the tighter of both limits in each field; every field of `other` counts, its defaults too.

        To tighten a single limit, pass `dataclasses.replace(sandbox.limits, wall_seconds=5)`. Values of
        `other` that would widen these limits are cut back, with a warning unless they are defaults.

        The environment keeps the variables that both have, with the values of these limits: a call can remove
        variables, but neither add nor change them. If `env` is None here, code gets the clean default
        environment, which a call does not change.

        Args:
            other: The limits that a call asks for; None for these limits.

        Returns:
            Limits that are at most as wide as these.
        """
        if other is None:
            return self
        asked = {
            name: getattr(other, name) for name in _NUMBERS if getattr(other, name) != getattr(_DEFAULT, name)
        }
        widened = [name for name, value in asked.items() if _wider(value, getattr(self, name))]
        if _NETWORK_ORDER.index(other.network) > _NETWORK_ORDER.index(self.network):
            widened.append("network")
        if not (other.env or {}).items() <= (self.env or {}).items():
            widened.append("env")
        if widened:
            warnings.warn(f"a call cannot widen the sandbox's limits: {', '.join(widened)}", stacklevel=2)
        return replace(
            self,
            cpu_seconds=_tighter(self.cpu_seconds, other.cpu_seconds),
            wall_seconds=_tighter(self.wall_seconds, other.wall_seconds),
            memory_bytes=_tighter(self.memory_bytes, other.memory_bytes),
            max_processes=_tighter(self.max_processes, other.max_processes),
            disk_bytes=_tighter(self.disk_bytes, other.disk_bytes),
            memory_total_bytes=_tighter(self.memory_total_bytes, other.memory_total_bytes),
            disk_total_bytes=_tighter(self.disk_total_bytes, other.disk_total_bytes),
            output_bytes=min(self.output_bytes, other.output_bytes),
            network=min(self.network, other.network, key=_NETWORK_ORDER.index),
            network_allowlist=_common_hosts(self, other),
            fs_read_roots=_common(self.fs_read_roots, other.fs_read_roots),
            fs_write_roots=_common(self.fs_write_roots, other.fs_write_roots),
            env=_common_variables(self.env, other.env),
        )


_DEFAULT = ResourceLimits()


def _wider(asked: float | None, granted: float | None) -> bool:
    return asked is not None and granted is not None and asked > granted


def _tighter(first: T | None, second: T | None) -> T | None:
    return min((value for value in (first, second) if value is not None), default=None)


def _common_hosts(ours: ResourceLimits, asked: ResourceLimits) -> tuple[str, ...]:
    """Return the hosts that both allow; "full" allows all hosts."""
    if ours.network == "full":
        return asked.network_allowlist
    if asked.network == "full":
        return ours.network_allowlist
    return tuple(host for host in ours.network_allowlist if host in asked.network_allowlist)


def _common_variables(
    ours: Mapping[str, str] | None, asked: Mapping[str, str] | None
) -> Mapping[str, str] | None:
    """Return our variables that are requested; all of them if `asked` is None."""
    if ours is None or asked is None:
        return ours
    return {name: value for name, value in ours.items() if name in asked}


def _common(first: Sequence[str], second: Sequence[str]) -> tuple[str, ...]:
    """Return the folders that are in both unions of folders."""
    found: set[str] = set()
    for left in map(os.path.abspath, first):
        for right in map(os.path.abspath, second):
            common = os.path.commonpath((left, right))
            if common in (left, right):
                found.add(right if common == left else left)
    return tuple(sorted(found))
