"""What is sent to and from the server that runs code: the JSON of Sandbox Fusion."""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

from torchrl_agentic.sandbox import Sandbox
from torchrl_agentic.sandbox.inside.files import inside

Json: TypeAlias = dict[str, Any]
"""A JSON object as it goes over the wire."""
Name = Literal[
    "python", "cpp", "nodejs", "go", "go_test", "java", "php", "csharp", "bash", "typescript", "sql", "rust",
    "cuda", "lua", "R", "perl", "D_ut", "ruby", "scala", "julia", "pytest", "junit", "kotlin_script", "jest",
    "verilog", "python_gpu", "lean", "swift", "racket",
]  # fmt: skip
"""The languages that the protocol knows; which of them run here is another question."""


def _decoded(data: object) -> object:
    if not isinstance(data, str):
        return data
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"a file is sent as base64: {error}") from None


def _below_work(path: str) -> str:
    try:
        steps = inside(path)
    except PermissionError as error:
        raise ValueError(f"{error}; files are written below it, by relative paths") from None
    if not steps:
        raise ValueError(f"{path!r} is a folder, not a file")
    return path


MAX_ITEMS = 1024
"""How many cells a request may have, how many files, and how many that it wants back."""


def _counted(files: object) -> object:
    """Refuse too many before any is checked: for a dict, `max_length` comes after all of its items."""
    if isinstance(files, dict) and len(files) > MAX_ITEMS:
        raise ValueError(f"at most {MAX_ITEMS} files; got {len(files)}")
    return files


Seconds = Annotated[float, Field(ge=0, le=86400, allow_inf_nan=False)]
Files = Annotated[
    dict[Annotated[str, AfterValidator(_below_work)], Annotated[bytes | None, BeforeValidator(_decoded)]],
    BeforeValidator(_counted),
]
Items = Annotated[list[str], Field(max_length=MAX_ITEMS)]


class RunCodeRequest(BaseModel):
    """A program to run. files: what lies beside it. fetch_files: what is sent back of it."""

    code: str
    language: Name
    compile_timeout: Seconds = 10.0
    run_timeout: Seconds = 10.0
    memory_limit_MB: int = Field(-1, le=1 << 20)
    stdin: str | None = None
    files: Files = Field(default_factory=dict)
    fetch_files: Items = Field(default_factory=list)


class RunJupyterRequest(BaseModel):
    """Cells to run one after the other in a new interpreter. cell_timeout: of each cell; 0 for none."""

    cells: Items
    cell_timeout: Seconds = 0.0
    total_timeout: Seconds = 45.0
    memory_limit_MB: int = Field(-1, le=1 << 20)
    kernel: str = "python3"
    files: Files = Field(default_factory=dict)
    fetch_files: Items = Field(default_factory=list)


@dataclass(frozen=True, slots=True)
class CommandResult:
    """How a command ended.

    status: "Error" if it could not be run, through no fault of its own. return_code: negative for a signal,
    None if it was stopped at its time.
    """

    status: Literal["Finished", "Error", "TimeLimitExceeded"]
    execution_time: float | None = None
    return_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None

    @property
    def succeeded(self) -> bool:
        """Whether it ended by itself, with nothing to complain about."""
        return self.status == "Finished" and self.return_code == 0


@dataclass(frozen=True, slots=True)
class Fetched:
    """The files that were asked for. missing: a sentence for each that cannot be had."""

    files: Mapping[str, bytes]
    missing: tuple[str, ...] = ()


NOTHING = Fetched({})


def code_answer(
    compiled: CommandResult | None, ran: CommandResult | None, fetched: Fetched = NOTHING
) -> Json:
    """Make the answer to `/run_code`."""
    status, message = _verdict([each for each in (compiled, ran) if each is not None], fetched)
    return {
        "status": status,
        "message": message,
        "compile_result": None if compiled is None else asdict(compiled),
        "run_result": None if ran is None else asdict(ran),
        **_ending(fetched),
    }


def jupyter_answer(driver: CommandResult | None, cells: list[Json], fetched: Fetched = NOTHING) -> Json:
    """Make the answer to `/run_jupyter`."""
    status, message = _verdict([] if driver is None else [driver], fetched)
    return {
        "status": status,
        "message": message,
        "driver": None if driver is None else asdict(driver),
        "cells": cells,
        **_ending(fetched),
    }


def refusal(answer: Json, message: str) -> Json:
    """Say in an answer why nothing was run, or what was lost, without blaming the code."""
    return {**answer, "status": "SandboxError", "message": message}


def _verdict(results: list[CommandResult], fetched: Fetched) -> tuple[str, str]:
    errors = [result.stderr or "" for result in results if result.status == "Error"]
    if errors:
        return "SandboxError", errors[0]
    status = "Success" if all(result.succeeded for result in results) else "Failed"
    return status, "; ".join(fetched.missing)


def _ending(fetched: Fetched) -> Json:
    files = {path: base64.b64encode(data).decode("ascii") for path, data in fetched.files.items()}
    return {"executor_pod_name": os.environ.get("MY_POD_NAME"), "files": files}


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
