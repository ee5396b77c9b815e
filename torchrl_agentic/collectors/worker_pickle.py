"""`pickle_for_workers`: pickle the transforms of a collector, with limiters that hold over all workers."""

# cloudpickle annotates nothing.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import io
import sys
from typing import Any, Literal

import cloudpickle

from torchrl_agentic.limits import ClusterRateLimiter, RateLimiter
from torchrl_agentic.records import TrajectoryHook
from torchrl_agentic.tools.function import FunctionTool

Over = Literal["ray", "machine"]


class _SilentHook(TrajectoryHook):
    """Takes the place of a recorder in a worker, since the collector records."""


class _Pickler(cloudpickle.Pickler):
    """Pickles functions by value, rate limiters as shared ones, and no recorders."""

    def __init__(self, file: io.BytesIO, name: str, over: Over) -> None:
        super().__init__(file)
        self._name = name
        self._over: Over = over
        self._limiters: list[RateLimiter] = []

    def reducer_override(self, obj: Any) -> Any:
        """Return how an object is pickled."""
        if isinstance(obj, RateLimiter):
            self._limiters.append(obj)
            return obj.reduce_shared(f"{self._name}:{len(self._limiters)}", self._over)
        if isinstance(obj, ClusterRateLimiter) and not obj.holds_over(self._over):
            raise ValueError(
                f"{obj!r} holds on this machine only, while workers may run on others: create it after "
                "ray.init(), or with over='ray'"
            )
        if isinstance(obj, FunctionTool) and not _is_importable(obj.function.__module__):
            return obj.reduce_by_value()
        if isinstance(obj, TrajectoryHook):
            return _SilentHook, ()
        return super().reducer_override(obj)


def _is_importable(module: str) -> bool:
    """Return whether a worker can import a module; the main module of a worker is another one."""
    return module != "__main__" and module in sys.modules


def pickle_for_workers(spec: Any, name: str, *, over: Over) -> bytes:
    """Pickle what workers create their agents from; functions travel by value.

    A `RateLimiter` becomes a `ClusterRateLimiter` with the same limits, so that they hold over all workers.

    Args:
        spec: The transforms and options.
        name: Name of the collector, unique in the cluster.
        over: What carries the leases: "ray", or "machine" for workers on this machine.

    Raises:
        TypeError: If it cannot be pickled.
        ValueError: If a `ClusterRateLimiter` holds on this machine only, and the workers may be elsewhere.
    """
    file = io.BytesIO()
    try:
        _Pickler(file, name, over).dump(spec)
    except ValueError:
        raise
    except Exception as error:
        raise TypeError(
            f"the transforms cannot be sent to workers: {error}. Pass a function without arguments that "
            "returns them, AgentCollector(make_transforms, ...); it is called in each worker"
        ) from error
    return file.getvalue()
