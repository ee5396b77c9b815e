"""`open_model` loads the model and the tools of a YAML file, ready for `evaluate`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torchrl_agentic.cli.rollout_file import ModelConfig, RolloutConfig, dispatching, load_rollout_tools
from torchrl_agentic.cli.service_engine import service_engine
from torchrl_agentic.config import Location
from torchrl_agentic.dispatch import event_loop

if TYPE_CHECKING:
    from torchrl_agentic.engines import OpenAIEngine
    from torchrl_agentic.transforms import ToolCompose


SMALL_MODEL = 50_000_000
"""Number of parameters below which a model on a CPU uses one thread."""


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """Arguments of `evaluate` from a YAML file.

    Attributes:
        engine: The model or engine.
        tokenizer: Its tokenizer; None for a model behind an API.
        tools: Tools, parser and limits.
        options: Additional arguments of `evaluate`.
        ignored: Settings of the file that have no effect, a sentence each.
    """

    engine: Any
    tokenizer: Any
    tools: ToolCompose
    options: dict[str, Any]
    ignored: list[str]


@contextlib.contextmanager
def open_model(settings: RolloutConfig, folder: Path, parser: str | None = None) -> Generator[OpenedModel]:
    """Load the model and the tools of a configuration, and close what was opened.

    Args:
        settings: The configuration, which has a model.
        folder: Directory that its paths are relative to.
        parser: Name of the parser; None: that of the configuration.

    Raises:
        ConfigError: If the file has a mistake; the message names file and line.
        OSError: If there is no such model.
        MissingExtra: If the engine is not installed.
    """
    import torch

    from torchrl_agentic.transforms import ToolCompose

    chosen = settings.model
    assert chosen is not None
    loaded = load_rollout_tools(settings, folder)
    is_service = chosen.engine == "openai"
    is_default = parser is None and is_service and "parser" not in settings.model_fields_set
    limits = dispatching(settings, loaded, "openai" if is_default else parser or settings.parser)
    bound = chosen.max_turns if "max_turns" in chosen.model_fields_set else loaded.max_turns
    options: dict[str, Any] = {
        "max_turns": bound or chosen.max_turns,
        "max_new_tokens": chosen.max_new_tokens,
        "tokenizer_options": loaded.tokenizer_options,
    }
    engine, tokenizer = _service(chosen, settings.location(folder)) if is_service else _model(chosen)
    if not is_service:
        options |= {"temperature": chosen.temperature, "tool_choice": chosen.tool_choice}
        options["max_in_flight"] = chosen.rows
    cast("Any", torch).manual_seed(chosen.seed)
    toolsets = limits.pop("toolsets")
    compose = ToolCompose(loaded.tools, tokenizer=tokenizer, **limits).with_toolsets(toolsets)
    ignored: list[str] = []
    if chosen.mode == "history" and not is_service:
        options["tokenizer_options"] = {"use_inference_chat_template": True}
    if loaded.tokenizer_options and (chosen.mode == "history" or is_service):
        ignored.append("limits on tool results and the sanity check are ignored: they need 'mode: tokens'")
    if loaded.max_user_turns or loaded.interaction_config_path:
        ignored.append(
            "max_user_turns and interaction_config_path are ignored: this command simulates no user"
        )
    try:
        yield OpenedModel(engine, tokenizer, compose, options, ignored)
    finally:
        if is_service:
            event_loop.run(engine.close())


def _model(chosen: ModelConfig) -> tuple[Any, Any]:
    """Load the model and its tokenizer."""
    from torchrl_agentic.evaluation.model_engine import load_model

    path = chosen.path
    if path == "tiny":
        from torchrl_agentic.rollout.tiny_model import TINY

        path = str(TINY)
    model, tokenizer = load_model(path, cast("Any", chosen.engine), device=chosen.device, dtype=chosen.dtype)
    if chosen.engine == "transformers" and "OMP_NUM_THREADS" not in os.environ:
        _use_few_threads(model)
    return model, tokenizer


def _use_few_threads(model: Any) -> None:
    """Use one thread for a small model on a CPU, which is faster than several."""
    import torch

    if model.device.type == "cpu" and model.num_parameters() < SMALL_MODEL:
        torch.set_num_threads(1)


def _service(chosen: ModelConfig, location: Location) -> tuple[OpenAIEngine, None]:
    """Return the engine of a service, and no tokenizer."""
    stated = chosen.model_fields_set
    engine = service_engine(
        chosen.path,
        location.at("model"),
        base_url=chosen.base_url,
        api_key_env=chosen.api_key_env,
        price=chosen.price,
        max_concurrent=chosen.rows if "rows" in stated else None,
        temperature=chosen.temperature if "temperature" in stated else None,
        seed=chosen.seed if "seed" in stated else None,
        extra_body=chosen.extra_body,
        reasoning_field=chosen.reasoning_field or "",
    )
    return engine, None
