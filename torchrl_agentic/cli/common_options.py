"""Options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

Dump = Annotated[Path, typer.Argument(help="Dump: a folder with a file per step, or one file.")]
Parser = Annotated[str | None, typer.Option(help="Tool-call format of the model, such as hermes.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print a JSON object instead.")]
