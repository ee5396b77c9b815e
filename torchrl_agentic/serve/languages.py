"""The languages that programs may be written in: how each is compiled and run, and which of them are here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torchrl_agentic.sandbox import Sandbox

PYTHON = "python"
_LOOK = 'for name in "$@"; do if command -v "$name" >/dev/null; then echo "$name"; fi; done'


@dataclass(frozen=True, slots=True)
class Language:
    """How programs of a language are run.

    file: what the program is saved as; {file} in the commands. compile: empty if it is not compiled.
    memory_flag: how the runtime is told how many MiB it may use, as {memory}; such runtimes reserve far more
    addresses than they use. overhead_mb: for all others, what their libraries may map besides.
    """

    file: str
    run: tuple[str, ...]
    compile: tuple[str, ...] = ()
    memory_flag: str | None = None
    overhead_mb: int = 64

    @property
    def needs(self) -> str:
        """The program that must be there."""
        return (self.compile or self.run)[0]

    def command(self, file: str, memory_mb: int | None) -> tuple[str, ...]:
        """Give the command that runs a file."""
        flags = (self.memory_flag.format(memory=memory_mb),) if self.memory_flag and memory_mb else ()
        command, *rest = (word.format(file=file) for word in self.run)
        return (command, *flags, *rest)


LANGUAGES: Mapping[str, Language] = {
    "bash": Language("main.sh", ("bash", "{file}")),
    "cpp": Language("main.cpp", ("./a.out",), ("g++", "-std=c++17", "-O2", "-pthread", "{file}")),
    "go": Language("main.go", ("./a.out",), ("go", "build", "-o", "a.out", "{file}")),
    "lua": Language("main.lua", ("lua", "{file}")),
    "nodejs": Language("main.js", ("node", "{file}"), memory_flag="--max-old-space-size={memory}"),
    "perl": Language("main.pl", ("perl", "{file}")),
    "php": Language("main.php", ("php", "-f", "{file}")),
    "ruby": Language("main.rb", ("ruby", "{file}"), overhead_mb=256),
    "rust": Language("main.rs", ("./a.out",), ("rustc", "-O", "-o", "a.out", "{file}")),
}
"""Python is not among them: its command is the sandbox's own."""


async def languages_in(sandbox: Sandbox) -> Mapping[str, Language]:
    """Look which languages an open sandbox has.

    Raises:
        SandboxError: it is lost.
    """
    python = Language("main.py", (*sandbox.python_argv, "{file}"), overhead_mb=256)
    known = {PYTHON: python, **LANGUAGES}
    look = ("sh", "-c", _LOOK, "sh", *(language.needs for language in known.values()))
    there = (await sandbox.run(look)).stdout.splitlines()
    return {name: language for name, language in known.items() if language.needs in there}
