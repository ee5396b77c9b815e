"""Interactions from a YAML file in verl's form."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pydantic

from torchrl_agentic.config.document import read_yaml
from torchrl_agentic.config.sections import Section, read_section
from torchrl_agentic.interactions import Interaction
from torchrl_agentic.interactions.adapters import create_interaction
from torchrl_agentic.interactions.base import default_name
from torchrl_agentic.tools.loading import load_object


class _InteractionEntry(Section):
    class_name: str
    name: str | None = None
    config: dict[str, Any] | None = None


class _Interactions(Section):
    interaction: Annotated[list[_InteractionEntry], pydantic.Field(min_length=1)]


def load_interactions(path: str | Path) -> dict[str, Interaction]:
    """Return the interactions of a file by name: `interaction: [{name?, class_name, config?}, …]`.

    A class in verl's form gets `config` as one mapping, with the name in it; an `Interaction` gets its
    entries as arguments. The default name is that of the class without `Interaction`, in lower case.

    Args:
        path: The file. A `class_name` is `package.module.Class` or `file.py:Class`; verl's
            `Gsm8kInteraction` is replaced by ours.

    Raises:
        ConfigError: If an entry is wrong, two have one name, or a class cannot be found or created.
    """
    data, location = read_yaml(path)
    made: dict[str, Interaction] = {}
    for index, entry in enumerate(read_section(_Interactions, data, location).interaction):
        where = location.at("interaction", index, "class_name")
        name = entry.name or default_name(entry.class_name.rpartition(".")[2].rpartition(":")[2])
        if name in made:
            where.fail(f"two interactions are named {name!r}; rename one")
        kind = where.find(load_object, entry.class_name)
        made[name] = where.call(create_interaction, kind, name, entry.config or {})
    return made
