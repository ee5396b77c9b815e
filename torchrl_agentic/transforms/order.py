"""In which order transforms must stand where a user takes part."""

from __future__ import annotations

from collections.abc import Iterator

from torchrl.envs.transforms import Compose

from torchrl_agentic.transforms.compose import ToolCompose
from torchrl_agentic.transforms.ending import EndTrajectory
from torchrl_agentic.transforms.tokens import TurnTokenizer

ORDER = "Compose(ToolCompose(...), EndTrajectory(max_turns=...), UserSimulator(...), TurnTokenizer(...))"


def check_order(user: object, transform: object) -> None:
    """Look at the transforms of an environment, among them a user simulator.

    Raises:
        ValueError: one of them would take the word from the user, or not hear it.
    """
    seen: list[object] = []
    for item in _leaves(transform):
        if isinstance(item, EndTrajectory) and item.when_no_calls:
            raise ValueError(
                "EndTrajectory(when_no_calls=True) ends what UserSimulator answers: leave when_no_calls out, "
                "and let the user end the conversation, or max_turns"
            )
        seen.append(item)
    behind = seen[seen.index(user) :] if user in seen else seen
    if any(isinstance(item, ToolCompose) for item in behind):
        raise ValueError(f"UserSimulator reads what ToolCompose writes: {ORDER}")
    if user in seen and any(isinstance(item, TurnTokenizer) for item in seen[: seen.index(user)]):
        raise ValueError(f"TurnTokenizer must see what UserSimulator writes: {ORDER}")


def _leaves(transform: object) -> Iterator[object]:
    if isinstance(transform, Compose) and not isinstance(transform, ToolCompose):
        for inner in transform.transforms:
            yield from _leaves(inner)
    else:
        yield transform
