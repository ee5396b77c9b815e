"""Interactions from a YAML file, in verl's form."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torchrl_agentic.interactions.adapters import as_interaction
from torchrl_agentic.interactions.base import Interaction, default_name
from torchrl_agentic.tool_config.lines import read_yaml

VERL: Mapping[str, str] = {
    "verl.interactions.gsm8k_interaction.Gsm8kInteraction": "torchrl_agentic.interactions.Gsm8kInteraction",
}
"""Verl's interactions → ours that do the same."""
_KEYS = ("name", "class_name", "config")
_FORM = "'interaction: [{name?: text, class_name: text, config?: mapping}, …]'"


def load_interactions(path: str | Path) -> dict[str, Interaction]:
    """Make the interactions that a file names, by name: `interaction: [{name?, class_name, config?}, …]`.

    A class in verl's shape gets `config` as one mapping, with the name in it; an `Interaction` gets its
    entries as arguments. The default name is that of the class without `Interaction`, in lower case.

    Args:
        path: The file. Each `class_name` is "package.module.Class"; verl's `Gsm8kInteraction` is found under
            its name in verl.

    Raises:
        ValueError: If the file says something else, two have one name, or a class cannot be found or made.
    """
    path = Path(path)
    data = read_yaml(path).data
    entries = cast("dict[str, Any]", data).get("interaction") if isinstance(data, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{path}: expected {_FORM}; got {data!r}")
    made: dict[str, Interaction] = {}
    for index, entry in enumerate(cast("list[Any]", entries)):
        place = f"{path}, interaction {index}"
        name, class_name, config = _fields(place, entry)
        name = name or default_name(class_name.rpartition(".")[2])
        if name in made:
            raise ValueError(f"{place}: two interactions are named {name!r}; give one another name")
        made[name] = _make(place, name, class_name, config)
    return made


def _fields(place: str, entry: Any) -> tuple[str | None, str, dict[str, Any]]:
    fields = cast("dict[str, Any]", entry) if isinstance(entry, dict) else {}
    name, class_name, config = (fields.get(key) for key in _KEYS)
    config = cast("Any", {} if config is None else config)
    if (
        not isinstance(class_name, str)
        or not isinstance(name, str | None)
        or not isinstance(config, dict)
        or not set(fields) <= set(_KEYS)
    ):
        raise ValueError(f"{place}: expected {_FORM}; got {entry!r}")
    return name, class_name, cast("dict[str, Any]", config)


def _make(place: str, name: str, class_name: str, config: Mapping[str, Any]) -> Interaction:
    module, _, attribute = VERL.get(class_name, class_name).rpartition(".")
    try:
        kind: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{place}: no class {class_name!r}: {error}") from error
    if not inspect.isclass(kind):
        raise ValueError(f"{place}: {class_name!r} is no class")
    try:
        if not issubclass(kind, Interaction):
            return as_interaction(cast("Any", kind)(config={"name": name, **config}), name=name)
        made = kind(**config)
    except TypeError as error:
        raise ValueError(f"{place}: {class_name}: {error}") from error
    made.name = name
    return made
