"""A rollout from a YAML file: which conversations, which tools, which limits."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeGuard, TypeVar, cast

import pydantic
import yaml

from torchrl_agentic.limits import ClusterRateLimiter, Limiter, RateLimiter
from torchrl_agentic.messages import Message
from torchrl_agentic.repl import repl_in
from torchrl_agentic.rollout.ask import Question
from torchrl_agentic.rollout.replay import Conversation
from torchrl_agentic.sandbox import Sandbox, default_sandbox
from torchrl_agentic.tools import (
    FileEditTool,
    FileReadTool,
    FileWriteTool,
    HttpTool,
    PythonTool,
    SandboxFusionTool,
    SearchTool,
    ShellTool,
    StopTool,
)

Options = dict[str, Any]
_TOOLS: dict[str, tuple[Callable[[Callable[[], Sandbox], Options], Any], tuple[str, ...]]] = {
    "python": (
        lambda sandbox, options: PythonTool(repl_in(sandbox()), **options),
        ("name", "description", "timeout", "output_max_chars"),
    ),
    "shell": (lambda sandbox, options: ShellTool(sandbox(), **options), ("output_max_chars",)),
    "file_read": (lambda sandbox, options: FileReadTool(sandbox(), **options), ()),
    "file_write": (lambda sandbox, options: FileWriteTool(sandbox(), **options), ()),
    "file_edit": (lambda sandbox, options: FileEditTool(sandbox(), **options), ()),
    "stop": (lambda sandbox, options: StopTool(**options), ()),
    "sandbox_fusion": (
        lambda sandbox, options: SandboxFusionTool(**options),
        (
            "sandbox_fusion_url",
            "name",
            "description",
            "num_workers",
            "rate_limit",
            "default_timeout",
            "default_language",
            "enable_global_rate_limit",
            "memory_limit_mb",
            "fetch_files",
            "jupyter",
            "cap_output",
            "output_max_chars",
        ),
    ),
    "http": (
        lambda sandbox, options: HttpTool(**options),
        (
            "allowed_hosts",
            "timeout",
            "max_response_bytes",
            "methods",
            "ports",
            "max_redirects",
            "html",
            "output_max_chars",
            "name",
        ),
    ),
    "search": (
        lambda sandbox, options: SearchTool(**options),
        (
            "retrieval_service_url",
            "name",
            "description",
            "topk",
            "num_workers",
            "rate_limit",
            "timeout",
            "enable_global_rate_limit",
            "max_queries",
            "output_max_chars",
        ),
    ),
}
"""What makes each tool, and the options it takes."""


class ConfigError(ValueError):
    """A file that does not say what it should; the message names the file and what was expected."""


class ModelConfig(pydantic.BaseModel):
    """Which model is asked, and how: see `rollout.ask`.

    path: a Hugging Face folder or name, or "tiny", which comes with the package. rows: how many questions at
    a time.
    """

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    path: str
    engine: Literal["transformers", "vllm"] = "transformers"
    rows: pydantic.PositiveInt = 16
    max_turns: pydantic.PositiveInt = 8
    max_new_tokens: pydantic.PositiveInt = 512
    temperature: pydantic.NonNegativeFloat = 1.0
    mode: Literal["tokens", "history"] = "tokens"
    tool_choice: Literal["auto", "required"] | None = None
    seed: int = 0


class RolloutConfig(pydantic.BaseModel):
    """What a YAML file for `torchrl-agentic rollout` holds: conversations to replay, or questions to ask.

    conversations, questions and the files of functions are relative to the YAML file, `out` to the working
    folder. system_prompt: before each question that is a text.

    tools: one entry each: `python`, `shell`, `file_read`, `file_write`, `file_edit`, `stop`,
    `sandbox_fusion`, `search`, `http`, with options or without, or `function: "file.py:name"`. limits: tool
    name → the arguments of `RateLimiter`; with a `name`, those of `ClusterRateLimiter`.
    """

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    conversations: list[str] = []
    questions: list[str] = []
    model: ModelConfig | None = None
    system_prompt: str | None = None
    parser: str = "hermes"
    tools: list[str | dict[str, Any]] = ["python", "stop"]
    limits: dict[str, dict[str, float | str]] = {}
    per_call_timeout: float | None = 30.0
    per_turn_timeout: float | None = None
    out: str = "rollouts/rollout.jsonl"

    @pydantic.model_validator(mode="after")
    def _asks_or_replays(self) -> RolloutConfig:
        if bool(self.questions) != (self.model is not None):
            raise ValueError("questions are put to a model: give both, or conversations to replay")
        if self.conversations and self.questions:
            raise ValueError("give conversations to replay, or questions and a model, not both")
        return self


def load_config(path: Path, model: ModelConfig | None = None) -> RolloutConfig:
    """Read a YAML file, or take a file of conversations as the only thing that is said.

    model: is asked instead of that in the file; a file that is no YAML holds questions then.

    Raises:
        ConfigError: it is missing, no YAML, or says something else than `RolloutConfig` has.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    if path.suffix not in (".yaml", ".yml"):
        name = [path.name]
        return RolloutConfig(questions=name, model=model) if model else RolloutConfig(conversations=name)
    try:
        data = yaml.safe_load(path.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: no YAML: {error}") from None
    if model is not None and isinstance(data, dict):
        data = {**data, "model": model.model_dump()}
    try:
        return RolloutConfig.model_validate(data)
    except pydantic.ValidationError as error:
        known = ", ".join(RolloutConfig.model_fields)
        mistakes = "; ".join(
            f"{_place(item['loc'])}: {item['msg']}" for item in error.errors(include_url=False)
        )
        raise ConfigError(f"{path}: {mistakes} (keys: {known})") from None


def _place(location: tuple[int | str, ...]) -> str:
    return ".".join(map(str, location)) or "the file"


def make_tools(config: RolloutConfig, folder: Path) -> list[Any]:
    """Make the tools that a configuration names.

    Raises:
        ConfigError: an entry names no tool, or its options do not fit.
    """
    sandbox = functools.cache(default_sandbox)  # one for all, so that they share their files
    return [_make_tool(entry, folder, sandbox) for entry in config.tools]


def _make_tool(entry: str | Mapping[str, Any], folder: Path, sandbox: Callable[[], Sandbox]) -> Any:
    if isinstance(entry, str):
        entry = {entry: None}
    if len(entry) != 1:
        raise ConfigError(
            f"tools: an entry names one tool, e.g. 'python: {{timeout: 10}}'; got {list(entry)}"
        )
    kind, options = next(iter(entry.items()))
    if kind == "function":
        return _load(str(options), folder)
    if kind in _TOOLS and not isinstance(options, dict | None):
        raise ConfigError(f"tools: {kind}: expected options, e.g. {{name: …}}; got {options!r}")
    if kind not in _TOOLS:
        raise ConfigError(f"tools: no tool {kind!r}; known: {', '.join([*_TOOLS, 'function'])}")
    make, known_options = _TOOLS[kind]
    try:
        return make(sandbox, cast("Options", options or {}))
    except (TypeError, ValueError) as error:
        known = ", ".join(known_options) or "none"
        raise ConfigError(f"tools: {kind}: {error} (options: {known})") from None


def _load(reference: str, folder: Path) -> Any:
    """Load a function from `file.py:name` or `package.module:name`."""
    place, _, name = reference.partition(":")
    try:
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(place).stem, folder / place)
            if spec is None or spec.loader is None:
                raise ImportError("no Python file")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
        return getattr(module, name)
    except Exception as error:  # whatever the user's file does when it is run
        raise ConfigError(f"tools: function {reference!r}: {type(error).__name__}: {error}") from error


def make_limits(config: RolloutConfig) -> dict[str, Limiter]:
    """Make the limiters that a configuration names.

    Raises:
        ConfigError: arguments that the limiter refuses.
    """
    limits: dict[str, Limiter] = {}
    for tool, arguments in config.limits.items():
        try:
            kind = ClusterRateLimiter if "name" in arguments else RateLimiter
            limits[tool] = kind(**cast("dict[str, Any]", arguments))
        except (TypeError, ValueError, OSError) as error:
            raise ConfigError(f"limits: {tool}: {error}") from None
    return limits


def load_conversations(config: RolloutConfig, folder: Path) -> list[Conversation]:
    """Read the conversations: JSON lines, one JSON object, or a list of them, each with "messages".

    Raises:
        ConfigError: a file is missing or none of these; the message names file and line.
    """
    found: list[Conversation] = []
    for path, place, item in _read(config.conversations, folder):
        conversation = _conversation(place, item, f"{path.stem}-{len(found)}")
        found.append(_renamed(conversation, found))
    if not found:
        raise ConfigError(f"no conversations in {', '.join(config.conversations)}")
    return found


def load_questions(config: RolloutConfig, folder: Path) -> list[Question]:
    """Read the questions: JSON lines, or JSON, each with "query" or "messages", and perhaps "answer", "name".

    Raises:
        ConfigError: a file is missing or none of these; the message names file and line.
    """
    found: list[Question] = []
    for path, place, item in _read(config.questions, folder):
        question = _question(place, item, f"{path.stem}-{len(found)}", config.system_prompt)
        found.append(_renamed(question, found))
    if not found:
        raise ConfigError(f"no questions in {', '.join(config.questions)}")
    return found


def _question(place: str, item: Any, name: str, system_prompt: str | None) -> Question:
    fields = item if isinstance(item, dict) else {}
    query, messages, answer = fields.get("query"), fields.get("messages"), fields.get("answer")
    if isinstance(query, str):
        system = [] if system_prompt is None else [Message("system", system_prompt)]
        asked = (*system, Message("user", query))
    elif messages and _are_messages(messages):
        asked = tuple(Message(m["role"], m.get("content")) for m in messages)
    else:
        raise ConfigError(f'{place}: expected {{"query": "…"}} or {{"messages": [{{"role", "content"}}, …]}}')
    if not isinstance(answer, str | int | float | None):
        raise ConfigError(f"{place}: an answer is a text or a number; got {answer!r}")
    return Question(str(fields.get("name", name)), asked, None if answer is None else str(answer))


def _are_messages(messages: Any) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(messages, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages
    )


Named = TypeVar("Named", Conversation, Question)


def _renamed(item: Named, others: Sequence[Named]) -> Named:
    """Give an item with a name that no other one has."""
    names = {other.name for other in others}
    copies = (f"{item.name} ({n})" for n in itertools.count(2))
    name = item.name
    while name in names:
        name = next(copies)
    return dataclasses.replace(item, name=name)


def _read(names: Sequence[str], folder: Path) -> Iterator[tuple[Path, str, Any]]:
    """Give what files hold: the file, the place in it, the item."""
    for name in names:
        path = folder / name
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: {error}") from None
        for place, item in _items(path, text):
            yield path, place, item


def _items(path: Path, text: str) -> list[tuple[str, Any]]:
    if path.suffix == ".jsonl":  # one object a line; in JSON, nothing but a newline ends one
        lines = enumerate(text.split("\n"), 1)
        return [(f"{path}, line {n}", _json(f"{path}, line {n}", line)) for n, line in lines if line.strip()]
    whole = _json(str(path), text)
    return [
        (f"{path}, item {n}", item) for n, item in enumerate(whole if isinstance(whole, list) else [whole])
    ]


def _json(place: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: no JSON: {error}") from None


def _conversation(place: str, item: Any, name: str) -> Conversation:
    messages = item.get("messages") if isinstance(item, dict) else None
    if not _are_messages(messages):
        raise ConfigError(f'{place}: expected {{"messages": [{{"role", "content"}}, …]}}')
    try:
        return Conversation.of(
            str(item.get("name", name)),
            [
                Message(m["role"], m.get("content"), tuple(m.get("tool_calls") or ()), m.get("tool_call_id"))
                for m in messages
            ],
        )
    except ValueError as error:
        raise ConfigError(f"{place}: {error}") from None
