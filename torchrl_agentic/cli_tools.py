"""`torchrl-agentic check tools`: what a model will be told of the tools that a file names."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from torchrl_agentic.printable import printable

if TYPE_CHECKING:
    from torchrl_agentic.tool import Tool
    from torchrl_agentic.tool_config import LoadedTools


@dataclass(frozen=True, slots=True)
class Shown:
    """A tool, where the file names it, and where its code is."""

    tool: Tool
    place: str
    defined: str

    def as_json(self) -> dict[str, Any]:
        """Give it as plain JSON."""
        from torchrl_agentic.tool import effects_of

        effects = effects_of(self.tool)
        return {
            "name": self.tool.name,
            "place": self.place,
            "source": self.defined,
            "effects": {
                "reads": sorted(effects.reads),
                "writes": sorted(effects.writes),
                "exclusive": effects.exclusive,
            },
            "spec": self.tool.spec(),
        }


def check_tools(console: Console, path: Path, *, as_json: bool) -> int:
    """Show the tools of a file; give the exit code."""
    from torchrl_agentic.errors import InfrastructureError

    errors = Console(stderr=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            loaded = _load(path)
            found = asyncio.run(_offered(loaded))
            specs = [item.as_json() for item in found]
            _check_schemas(found)
        except (ValueError, TypeError, OSError, ImportError, InfrastructureError) as error:
            errors.print(Text(f"torchrl-agentic: {printable_lines(str(error))}", style="red"), soft_wrap=True)
            return 1
    for warning in caught:
        errors.print(Text(printable_lines(str(warning.message)), style="yellow"), soft_wrap=True)
    if others := loaded.beyond_tools():
        words = f"{path}: not applied by ToolCompose; add {', '.join(others)}"
        errors.print(Text(printable_lines(words), style="yellow"), soft_wrap=True)
    if as_json:
        console.print_json(json.dumps({"tools": specs}), indent=2)
        return 0
    _show(console, found, specs)
    return 0


def printable_lines(text: str) -> str:
    """Keep control characters from the terminal, other than the ends of lines."""
    return "\n".join(map(printable, text.split("\n")))


def _load(path: Path) -> LoadedTools:
    """Load the tools of a file of tools, or of a rollout."""
    from torchrl_agentic.tool_config import load_tools
    from torchrl_agentic.tool_config.lines import read_yaml

    data = read_yaml(path).data
    if isinstance(data, dict) and {"conversations", "questions"} & data.keys():
        from torchrl_agentic.config import load_config, load_rollout_tools

        return load_rollout_tools(load_config(path), path.parent)
    return load_tools(path)


async def _offered(loaded: LoadedTools) -> list[Shown]:
    """Give all tools; servers are asked for theirs, and left again."""
    found = [
        Shown(tool, source.place, source.defined)
        for tool, source in zip(loaded.tools, loaded.sources.values(), strict=True)
    ]
    for toolset in loaded.toolsets:
        source: str = getattr(toolset, "source", repr(toolset))
        try:
            found += [Shown(tool, source, source) for tool in await toolset.setup()]
        finally:
            await toolset.teardown()
    return found


def _check_schemas(found: Sequence[Shown]) -> None:
    from torchrl_agentic.schema import Validator

    for item in found:
        try:
            Validator(item.tool.input_schema)
        except ValueError as error:
            raise ValueError(f"{item.place}: tool {item.tool.name!r}: {error}") from None


def _show(console: Console, found: Sequence[Shown], specs: Sequence[dict[str, Any]]) -> None:
    from torchrl_agentic.tool import effects_of

    table = Table(title=f"{len(found)} tools", title_justify="left", box=box.SIMPLE)
    for column in ("tool", "source", "effects", "description"):
        table.add_column(column, no_wrap=column == "tool", overflow="fold")
    for item in found:
        lines = item.tool.description.strip().splitlines() or [""]
        words = (item.tool.name, item.defined, str(effects_of(item.tool)), lines[0])
        table.add_row(*(Text(printable(word)) for word in words))
    console.print(table)
    for spec in specs:
        console.print(Text(printable(f"{spec['name']}, {spec['place']}"), style="bold"))
        text = printable_lines(json.dumps(spec["spec"], indent=2, ensure_ascii=False))
        console.print(Syntax(text, "json", background_color="default", word_wrap=True))
