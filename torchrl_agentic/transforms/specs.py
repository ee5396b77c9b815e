"""How an environment's specs change with tools in it."""

from __future__ import annotations

from typing import Any

from torchrl.data import Composite, TensorSpec

from torchrl_agentic.transforms import telemetry
from torchrl_agentic.transforms.history import AgentHistory

NO_HISTORY = (
    'ToolCompose reads ("history", "prompt"), and this environment has input_mode={mode!r}. '
    "Use ChatEnv(input_mode='history'); a policy may generate from tokens all the same"
)


def observation(spec: Any, *, calls: bool = False) -> Any:
    """Add flags and telemetry; the prompt is an `AgentHistory` now. calls: see `telemetry.spec`.

    Raises:
        ValueError: there is no history to read.
    """
    if "history" not in spec.keys():
        raise ValueError(NO_HISTORY.format(mode="tokens or text"))
    _forget_optional(spec, ("history", "prompt"))
    prompt = spec["history", "prompt"]
    fields = {name: prompt[name] for name in prompt.keys()}
    spec["history"]["prompt"] = Composite(
        fields, shape=prompt.shape, device=prompt.device, data_cls=AgentHistory
    )
    spec[telemetry.KEY] = telemetry.spec(spec.shape, spec.device, calls=calls)
    return spec


def action(spec: TensorSpec) -> TensorSpec:
    """Leave out the fields of messages that only some messages have."""
    _forget_optional(spec, ("history", "full"))
    return spec


def _forget_optional(spec: Any, key: tuple[str, str]) -> None:
    """Drop what only some messages have: rollouts do not have it, and specs are compared with them."""
    if isinstance(spec, Composite) and key in spec.keys(True):
        history = spec[key]
        for name in ("tool_calls", "tool_responses"):
            if name in history.keys():
                del history[name]
