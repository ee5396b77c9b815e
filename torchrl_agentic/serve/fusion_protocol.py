"""Requests and responses of the server that runs code: the JSON of Sandbox Fusion, and its languages."""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

from torchrl_agentic.messages import fields_of
from torchrl_agentic.sandbox import Sandbox
from torchrl_agentic.sandbox.inside.files import inside

Json: TypeAlias = dict[str, Any]
"""A JSON object."""
Name = Literal[
    "python", "cpp", "nodejs", "go", "go_test", "java", "php", "csharp", "bash", "typescript", "sql", "rust",
    "cuda", "lua", "R", "perl", "D_ut", "ruby", "scala", "julia", "pytest", "junit", "kotlin_script", "jest",
    "verilog", "python_gpu", "lean", "swift", "racket",
]  # fmt: skip
"""Languages of the protocol; not all of them run here."""


def _decoded(data: object) -> object:
    if not isinstance(data, str):
        return data
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"expected the content of a file in base64: {error}") from None


def _below_work(path: str) -> str:
    try:
        steps = inside(path)
    except PermissionError as error:
        raise ValueError(f"{error}; give paths of files relative to it") from None
    if not steps:
        raise ValueError(f"{path!r} is a folder, not a file")
    return path


MAX_ITEMS = 1024
"""Maximum number of cells of a request, of its files, and of files that it fetches."""


def _counted(files: object) -> object:
    """Check the number of files before their contents, because `max_length` is checked after them."""
    count = len(fields_of(files) or {})
    if count > MAX_ITEMS:
        raise ValueError(f"expected at most {MAX_ITEMS} files; got {count}")
    return files


Seconds = Annotated[float, Field(ge=0, le=86400, allow_inf_nan=False)]
Files = Annotated[
    dict[Annotated[str, AfterValidator(_below_work)], Annotated[bytes | None, BeforeValidator(_decoded)]],
    BeforeValidator(_counted),
]
Items = Annotated[list[str], Field(max_length=MAX_ITEMS)]


class RunCodeRequest(BaseModel):
    """A program to run.

    Attributes:
        files: Files to write beside it, by path.
        fetch_files: Paths of files to return.
    """

    code: str
    language: Name
    compile_timeout: Seconds = 10.0
    run_timeout: Seconds = 10.0
    memory_limit_MB: int = Field(-1, le=1 << 20)
    stdin: str | None = None
    files: Files = Field(default_factory=dict)
    fetch_files: Items = Field(default_factory=list)


class RunJupyterRequest(BaseModel):
    """Cells to run one after another in a new interpreter.

    Attributes:
        cell_timeout: Maximum seconds of each cell; 0 for no limit.
    """

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

    Attributes:
        status: "Finished", "TimeLimitExceeded", or "Error" if it could not be run through no fault of its
            own.
        execution_time: Its duration in seconds.
        return_code: Exit code, -n for signal n; None if it was stopped at its timeout.
        stdout: Standard output.
        stderr: Standard error.
    """

    status: Literal["Finished", "Error", "TimeLimitExceeded"]
    execution_time: float | None = None
    return_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None

    @property
    def succeeded(self) -> bool:
        """Return whether it ended by itself, with exit code 0."""
        return self.status == "Finished" and self.return_code == 0


@dataclass(frozen=True, slots=True)
class Fetched:
    """Files that were requested.

    Attributes:
        files: Their contents, by path.
        missing: A sentence for each that is not returned.
    """

    files: Mapping[str, bytes]
    missing: tuple[str, ...] = ()


NOTHING = Fetched({})


def code_answer(
    compiled: CommandResult | None, ran: CommandResult | None, fetched: Fetched = NOTHING
) -> Json:
    """Return the response to `/run_code`.

    Args:
        compiled: Result of the compilation; None if there was none.
        ran: Result of the run; None if there was none.
        fetched: Files to return.
    """
    status, message = _verdict([each for each in (compiled, ran) if each is not None], fetched)
    return {
        "status": status,
        "message": message,
        "compile_result": None if compiled is None else asdict(compiled),
        "run_result": None if ran is None else asdict(ran),
        **_ending(fetched),
    }


def jupyter_answer(driver: CommandResult | None, cells: list[Json], fetched: Fetched = NOTHING) -> Json:
    """Return the response to `/run_jupyter`.

    Args:
        driver: Result of the interpreter; None if there was none.
        cells: Results of the cells.
        fetched: Files to return.
    """
    status, message = _verdict([] if driver is None else [driver], fetched)
    return {
        "status": status,
        "message": message,
        "driver": None if driver is None else asdict(driver),
        "cells": cells,
        **_ending(fetched),
    }


def refusal(answer: Json, message: str) -> Json:
    """Change a response to an error of the sandbox, which does not blame the code.

    Args:
        answer: The response.
        message: Why nothing was run, or what was lost.
    """
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

    Attributes:
        file: File name of the program, {file} in the commands.
        run: Command that runs it.
        compile: Command that compiles it; empty for none.
        memory_flag: Option that limits the memory of its runtime to {memory} MiB, for runtimes that reserve
            far more address space than they use.
        overhead_mb: MiB that libraries of other languages may map besides.
    """

    file: str
    run: tuple[str, ...]
    compile: tuple[str, ...] = ()
    memory_flag: str | None = None
    overhead_mb: int = 64

    @property
    def needs(self) -> str:
        """The program that must be installed."""
        return (self.compile or self.run)[0]

    def command(self, file: str, memory_mb: int | None) -> tuple[str, ...]:
        """Return the command that runs a file.

        Args:
            file: Name of the file.
            memory_mb: Maximum memory in MiB; None for no limit.
        """
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
"""Languages by name. Python is not among them, because its command is that of the sandbox."""


async def languages_in(sandbox: Sandbox) -> Mapping[str, Language]:
    """Return the languages that an open sandbox has.

    Raises:
        SandboxError: If it is lost.
    """
    python = Language("main.py", (*sandbox.python_argv, "{file}"), overhead_mb=256)
    known = {PYTHON: python, **LANGUAGES}
    look = ("sh", "-c", _LOOK, "sh", *(language.needs for language in known.values()))
    there = (await sandbox.run(look)).stdout.splitlines()
    return {name: language for name, language in known.items() if language.needs in there}
