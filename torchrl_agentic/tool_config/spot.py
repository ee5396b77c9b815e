"""Where something stands in a configuration, and what paths there mean."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from torchrl_agentic.tool_config.lines import Document
from torchrl_agentic.tool_config.mistakes import ConfigError, Steps


@dataclass(frozen=True, slots=True)
class Spot:
    """A place in a configuration.

    folder: what paths there are relative to. document: None for a configuration that a program has made.
    subject: the value there, for messages.
    """

    folder: Path
    document: Document | None = None
    steps: Steps = ()
    subject: str = ""

    def at(self, *steps: int | str) -> Spot:
        """Go further in."""
        return replace(self, steps=(*self.steps, *steps))

    def about(self, value: str) -> Spot:
        """Mean the value that stands here."""
        return replace(self, subject=repr(value))

    @property
    def place(self) -> str:
        """Say where this is: `file:line`."""
        return self.document.place(self.steps) if self.document is not None else "the configuration"

    def __str__(self) -> str:
        """Say where this is, and by which keys one gets there."""
        name = ".".join(map(str, self.steps))
        place = self.place if self.document is not None else ""
        return ": ".join(part for part in (place, name, self.subject) if part)

    def fail(self, words: str) -> NoReturn:
        """Say what is wrong here.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"{self}: {words}")

    def path(self, name: str) -> Path:
        """Find a file, beside the one that names it or else in the working folder.

        Raises:
            ConfigError: it is in neither.
        """
        found = Path(name).expanduser()
        places = [self.folder / found] if found.is_absolute() else [self.folder / found, Path.cwd() / found]
        path = next((path for path in places if path.is_file()), None)
        if path is None:
            tried = " or ".join(dict.fromkeys(str(path.parent.resolve()) for path in places))
            self.fail(f"no file {name!r}: there is no {found.name} in {tried}")
        return path.resolve()
