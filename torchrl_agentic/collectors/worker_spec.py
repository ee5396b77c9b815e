"""`WorkerSpec`: what each worker of a collector creates its stages from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torchrl.envs.transforms import Transform

from torchrl_agentic.limits import RateLimiter
from torchrl_agentic.tensors import leaves
from torchrl_agentic.trajectory.spec import TrajectorySpec


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Transforms and options that a worker creates the stages of its trajectories from.

    Attributes:
        transforms: As `AgentCollector` takes them, without recorder; or a function that returns them.
        tokenizer: Tokenizer of the engine, or None.
        max_turns: Upper bound on the messages of the model in a trajectory.
        tokenizer_options: Further arguments of `ChatEncoder`.
        max_new_tokens: Upper bound on the tokens of one message.
        speculate: Whether calls of tools without effects start while the model writes.
        context_length: Number of tokens that the engine takes; None: unknown.
        stop_token_ids: Ids that end an answer of the engine.
    """

    transforms: Any
    tokenizer: Any
    max_turns: int
    tokenizer_options: Mapping[str, Any]
    max_new_tokens: int
    speculate: bool
    context_length: int | None
    stop_token_ids: tuple[int, ...]

    def create(self) -> TrajectorySpec:
        """Create what trajectories share; not on the event loop of this package, since tools may be set up.

        The collector records.
        """
        transforms = self.transforms if isinstance(self.transforms, Transform) else self.transforms()
        spec = TrajectorySpec.of(
            list(leaves(transforms)),
            self.tokenizer,
            max_turns=self.max_turns,
            tokenizer_options=self.tokenizer_options,
            stop_token_ids=self.stop_token_ids,
        )
        return replace(spec, hook=None)


def check_limiters(spec: TrajectorySpec) -> None:
    """Raise ValueError if a function that is called in each worker creates a limiter of its own each time."""
    for bound in spec.dispatcher.bound.values():
        if isinstance(bound.limiter, RateLimiter):
            limits = bound.limiter.limits
            raise ValueError(
                f"the limiter of {bound.tool.name!r} is created in each worker, so that {limits} would hold "
                "in each of them: write ClusterRateLimiter(name, ...), or pass the transforms themselves"
            )
