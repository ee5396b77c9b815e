"""`service_engine`: the engine of a service that a YAML file names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torchrl_agentic.config import Location

if TYPE_CHECKING:
    from torchrl_agentic.engines import OpenAIEngine


def service_engine(
    model: str,
    location: Location,
    *,
    base_url: str | None = None,
    api_key_env: str | None = None,
    price: Mapping[Any, float] | None = None,
    **options: Any,
) -> OpenAIEngine:
    """Create the engine of a service with OpenAI's API.

    Args:
        model: Name of the model.
        location: Position of the settings.
        base_url: URL of the service.
        api_key_env: Environment variable with its key.
        price: Arguments of `Price`.
        options: Additional arguments of `OpenAIEngine`; None leaves the default.

    Raises:
        ConfigError: If there is no key, or a value is out of range; the message names file and line.
        MissingExtra: If `openai` is not installed.
    """
    from torchrl_agentic.engines import OpenAIEngine, Price

    key = None if api_key_env is None else os.environ.get(api_key_env)
    if api_key_env is not None and not key:
        location.at("api_key_env").fail(f"the environment variable {api_key_env!r} is not set; set it")
    given = {name: value for name, value in options.items() if value is not None}
    if price is not None:
        given["price"] = location.at("price").call(Price, **price)
    return location.call(OpenAIEngine, model, base_url=base_url, api_key=key, **given)
