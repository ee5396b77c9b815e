"""`evaluate`: run a model with tools on tasks, score every trajectory, and save each sample at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, cast

from torchrl_agentic.collectors.agent_collector import AgentCollector
from torchrl_agentic.dispatch import event_loop
from torchrl_agentic.engines.base import ChatEngine, ContextExceeded, Engine
from torchrl_agentic.engines.duck_typed_engine import EngineWrapper, ensure_engine
from torchrl_agentic.engines.usage import Usage
from torchrl_agentic.engines.vllm_engine import is_vllm
from torchrl_agentic.errors import check_above_zero, check_count
from torchrl_agentic.evaluation.eval_result import EvalHook, EvalProgress, EvalResult, checked_pass_at
from torchrl_agentic.evaluation.eval_run import EvalMeter, EvalRun, answer_score, is_metered
from torchrl_agentic.evaluation.eval_sample import digest_of, task_digest
from torchrl_agentic.evaluation.model_engine import engine_of
from torchrl_agentic.messages import JSON, Message
from torchrl_agentic.parsers import with_tools_message
from torchrl_agentic.rollout.load_tasks import load_tasks
from torchrl_agentic.tensors import leaves
from torchrl_agentic.trajectory.score import Scorer
from torchrl_agentic.trajectory.task import Task, check_tool_names
from torchrl_agentic.transforms import ToolCompose

DEFAULT_SCORER = "answer"
MODEL_CONCURRENCY = 16
"""Number of samples that a transformers model works on at once by default."""


def evaluate(
    tasks: Any,
    tools: Any,
    engine: Any,
    tokenizer: Any = None,
    *,
    scorers: Scorer | Mapping[str, Scorer] | Sequence[Scorer] | None = None,
    epochs: int = 1,
    pass_at: int | Sequence[int] = (1,),
    out: str | Path | None = None,
    resume: bool = False,
    limit: int | None = None,
    name: str = "eval",
    max_in_flight: int | Literal["auto"] = "auto",
    max_turns: int = 8,
    max_new_tokens: int = 512,
    max_trajectory_tokens: int | None = None,
    temperature: float | None = None,
    parser: str | None = None,
    tool_choice: Literal["auto", "required"] | None = None,
    trajectory_timeout: float | None = None,
    retries: int = 1,
    engine_retries: int = 3,
    fail_above: float = 0.5,
    max_total_tokens: int | None = None,
    max_cost: float | None = None,
    scorer_engines: Sequence[Any] = (),
    tokenizer_options: Mapping[str, Any] | None = None,
    progress: EvalHook | None = None,
    settings: Mapping[str, JSON] | None = None,
) -> EvalResult:
    """Run a model with tools on all tasks, and score its trajectories.

    Trajectories advance independently, over the loop of `AgentCollector`, while scorers run. A trajectory
    ends with a message without tool calls, with a tool that stops it, or at a bound. A sample that fails is
    counted and listed, and does not end the evaluation.

    With `out`, each sample is on the disk when it has ended. After a crash, the same call with `resume=True`
    takes only the missing samples; failed ones are taken again, or only scored again if a scorer failed.

    ::

        result = evaluate(tasks, [PythonTool()], model, tokenizer, epochs=4, pass_at=(1, 4), out="run")
        print(result)

    Args:
        tasks: `Task` objects, rows, a file, or another source of `load_tasks`.
        tools: Tools that the model may call; or a `ToolCompose`, or the `Compose` of one with other
            transforms, as `AgentCollector` takes them.
        engine: An `Engine` or `ChatEngine`, which stays open; or a transformers model, vLLM's `AsyncLLM` or
            `LLM`, or TorchRL's `AsyncVLLM`.
        tokenizer: Tokenizer of the model; None for a `ChatEngine`.
        scorers: Functions of a finished `Trajectory` that return a number, a bool or a `Score`, sync or
            async: one, or several by name. None: `answer_reward`, for tasks with a right answer. If one
            raises, its sample counts as failed.
        epochs: Number of samples per task.
        pass_at: The k of pass@k and pass^k, at most `epochs`. A score of 1 or more passes.
        out: Folder for the results, which `torchrl-agentic view` and `report` read; None: nothing is saved,
            and the samples keep their trajectories.
        resume: Whether `out` may hold a part of this evaluation.
        limit: Number of tasks, from the first; None: all.
        name: Name of the evaluation.
        max_in_flight: Number of trajectories that run at once, or "auto" to keep the engine busy.
        max_turns: Upper bound on the model's messages in a trajectory.
        max_new_tokens: Upper bound on the tokens of one message.
        max_trajectory_tokens: Upper bound on the tokens of a trajectory; None: the context of the engine.
            With an engine of messages, it is checked by the usage that each response reports, so that the
            tool results of the last turn may exceed it.
        temperature: Sampling temperature of a model, 1.0 by default; an engine has its own.
        parser: Format in which the model calls tools, if `tools` is a list. None: "hermes"; for an engine
            of messages, "openai".
        tool_choice: Constraint on tool calls, as in `agent_policy`; only models of vLLM.
        trajectory_timeout: Seconds that a trajectory and its scores may take; None: no limit.
        retries: Number of times that a failed trajectory is begun again.
        engine_retries: Number of times that a request is made again after an InfrastructureError.
        fail_above: Share of failed samples above which no more are taken; 1.0: all are taken. Below 1.0, the
            evaluation also stops if all of the first samples failed.
        max_total_tokens: Number of tokens of prompts and answers after which no more samples are taken;
            running ones are finished.
        max_cost: Cost after which no more samples are taken, in the currency of the engine's prices. Also,
            none are taken after responses without a known cost.
        scorer_engines: Engines that scorers ask, such as that of a `ModelJudge`: their tokens and cost count
            for the result and the limits, and not for the samples. They have `usage`, as `OpenAIEngine` has.
        tokenizer_options: Additional arguments of `ChatEncoder`.
        progress: Called with an `EvalProgress` at the beginning and after each sample, from one thread at a
            time.
        settings: Additional settings that must be equal for an evaluation to be resumed, as JSON.

    Returns:
        The result, whole or not: see `EvalResult.is_whole`.

    Raises:
        EvalInterrupted: After Ctrl-C, with the result so far.
        EvalFolderError: If `out` holds another evaluation, or this one and `resume` is False.
        EngineUnusable: If the engine refuses every request, before any sample has ended.
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, a task is invalid, or the engine can never know the tokens
            or the cost that a limit is about.
    """
    check_count("epochs", epochs, optional=False)
    check_count("limit", limit)
    check_count("retries", retries, optional=False, least=0)
    check_count("max_total_tokens", max_total_tokens)
    check_above_zero("max_cost", max_cost)
    if isinstance(cast("object", fail_above), bool) or not 0.0 <= fail_above <= 1.0:
        raise ValueError(f"fail_above is a share from 0.0 to 1.0; got {fail_above!r}")
    if resume and out is None:
        raise ValueError("resume=True continues the evaluation in a folder: pass out=")
    if progress is not None and not callable(progress):
        raise TypeError(f"progress is a function of an EvalProgress; got {type(progress).__name__}")
    every = load_tasks(tasks)
    wanted = every[:limit]
    by_name = _named(scorers)
    ks = checked_pass_at(pass_at, epochs)
    is_engine = isinstance(engine, Engine | ChatEngine) and not is_vllm(engine)
    if is_engine:
        engine = ensure_engine(engine)
        if temperature is not None:
            raise ValueError("an engine has a temperature of its own: set it there, not in evaluate()")
    takes_messages = is_engine and not isinstance(engine, Engine)
    limits = {
        "max_total_tokens": max_total_tokens,
        "max_cost": max_cost,
        "max_trajectory_tokens": max_trajectory_tokens,
    }
    reading = tuple(name for name, value in limits.items() if value is not None)
    metering = [_metering(one) for one in scorer_engines]
    _check_limits(engine if is_engine else None, metering, reading)
    transforms = tools
    if not _is_transform(tools):
        transforms = ToolCompose(
            tools, parser or ("openai" if takes_messages else "hermes"), tokenizer=tokenizer
        )
    elif parser is not None:
        raise ValueError(f"the ToolCompose has a parser already: leave out parser={parser!r}")
    compose = next((item for item in leaves(transforms) if isinstance(item, ToolCompose)), None)
    if compose is None:
        raise TypeError(
            f"tools is a list of tools, a ToolCompose, or a Compose with one; got {type(tools).__name__}"
        )
    check_tool_names(wanted, [tool.name for tool in compose.tools])
    options = dict(tokenizer_options or {})
    has_tokens = not (takes_messages or options.get("use_inference_chat_template", False))
    shows_tools = takes_messages or tokenizer is None or "tools" in (tokenizer.chat_template or "")
    if not shows_tools:
        options.setdefault("tools", ())
    described: dict[str, JSON] = {
        "engine": engine.describe() if is_engine else _describe_model(engine),
        "temperature": temperature,
        "sampling": _sampling_of(engine) if is_engine else {},
        "max_turns": max_turns,
        "max_new_tokens": max_new_tokens,
        "max_trajectory_tokens": max_trajectory_tokens,
        "parser": compose.parser.name,
        "tools": {tool.name: digest_of([tool.input_schema, tool.description]) for tool in compose.tools},
        "scorers": list(by_name),
        **(settings or {}),
    }
    meter = EvalMeter(name, max_total_tokens, max_cost, reading=reading)
    run = EvalRun(
        wanted,
        by_name,
        epochs,
        ks,
        meter=meter,
        fail_above=fail_above,
        name=name,
        settings=described,
        has_tokens=has_tokens,
        progress=progress,
    )
    before = Usage()
    if out is not None:
        decode = tokenizer.decode if has_tokens and tokenizer is not None else None
        known = {task.name: task_digest(task) for task in every}
        before = run.open(out, resume=resume, known=known, decode=decode)
    made = None
    try:
        concurrent = MODEL_CONCURRENCY if max_in_flight == "auto" else max_in_flight
        made = engine_of(
            engine,
            tokenizer,
            max_concurrent=concurrent,
            temperature=1.0 if temperature is None else temperature,
            constraint={"tool_choice": tool_choice, "parser": compose.parser, "tools": compose.tools},
        )
        meter.begin(made, metering, before)
        asked = made
        if takes_messages and isinstance(made, ChatEngine) and max_trajectory_tokens is not None:
            asked = BoundedChat(made, max_trajectory_tokens)

        def shown(task: Task) -> Task:
            if shows_tools:
                return replace(task)
            return replace(task, messages=with_tools_message(task.messages, compose.tools, compose.parser))

        collector = AgentCollector(
            transforms,
            engine=asked,
            tokenizer=tokenizer,
            tasks=run.admitted(shown),
            max_in_flight=max_in_flight,
            max_staleness=None,
            max_turns=max_turns,
            max_new_tokens=max_new_tokens,
            max_trajectory_tokens=None if takes_messages else max_trajectory_tokens,
            reward=run.score,
            trajectory_timeout=trajectory_timeout,
            on_failure="replace",
            max_replacements=retries,
            max_failures=None,
            engine_retries=engine_retries,
            tokenizer_options=options,
            failure_hook=run.fail,
        )
        return run.collect(collector)
    finally:
        run.close()
        if made is not None and made is not engine:
            event_loop.run(made.close())


async def aevaluate(
    tasks: Any,
    tools: Any,
    engine: Any,
    tokenizer: Any = None,
    *,
    progress: EvalHook | None = None,
    **options: Any,
) -> EvalResult:
    """Run `evaluate` on a thread, without blocking the event loop.

    If the awaiting task is cancelled, the evaluation ends after its next sample.

    Args:
        tasks: As in `evaluate`.
        tools: As in `evaluate`.
        engine: As in `evaluate`.
        tokenizer: As in `evaluate`.
        progress: As in `evaluate`; called on that thread, or on the event loop of this package.
        options: Additional arguments of `evaluate`.
    """
    is_cancelled = threading.Event()

    def follow(state: EvalProgress) -> None:
        if progress is not None:
            progress(state)
        if is_cancelled.is_set():
            raise _Cancelled

    def run() -> EvalResult:
        return evaluate(tasks, tools, engine, tokenizer, progress=follow, **options)

    try:
        return await asyncio.to_thread(run)
    except asyncio.CancelledError:
        is_cancelled.set()
        raise


class _Cancelled(Exception):
    """The task that awaits an evaluation was cancelled."""


class BoundedChat(EngineWrapper, ChatEngine):  # pyright: ignore[reportIncompatibleVariableOverride]
    """A `ChatEngine` that bounds the tokens of a trajectory, by the usage that responses report.

    The tokens of a message are known only by the next response. So a request is refused once the latest
    response has reached the bound, and an answer may take what the bound leaves; tool results between them
    may exceed it.

    Args:
        engine: A `ChatEngine` with `conversation_tokens`, such as `OpenAIEngine`.
        max_tokens: Upper bound on the tokens of a trajectory, prompt and answers together.
    """

    def __init__(self, engine: ChatEngine, max_tokens: int) -> None:
        check_count("max_trajectory_tokens", max_tokens, optional=False)
        super().__init__(engine)
        self._max_tokens = max_tokens

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]],
        max_tokens: int,
        key: str,
    ) -> Message:
        """Return the next message of the model; see `ChatEngine.chat`.

        Raises:
            ContextExceeded: If the latest response of the trajectory has reached the bound.
        """
        left = self._max_tokens - (self.target.conversation_tokens(key) or 0)
        if left <= 0:
            raise ContextExceeded(f"{key} has reached max_trajectory_tokens={self._max_tokens}")
        bound = min(max_tokens, left)
        return await self.target.chat(messages, tools=tools, max_tokens=bound, key=key)


def _named(scorers: Scorer | Mapping[str, Scorer] | Sequence[Scorer] | None) -> dict[str, Scorer]:
    """Return the scorers by name."""
    if scorers is None:
        return {DEFAULT_SCORER: answer_score}
    given: Any = scorers
    if isinstance(given, str):
        raise TypeError(
            "a scorer is a function of a Trajectory, such as torchrl_agentic.rewards.numeric_match(); "
            f"got {given!r}"
        )
    found: dict[str, Any] = {}
    if isinstance(given, Mapping):
        found.update(cast("Mapping[str, Any]", given))
    else:
        for scorer in cast("Sequence[Any]", given) if isinstance(given, Sequence) else [given]:
            name = str(getattr(scorer, "name", "") or getattr(scorer, "__name__", type(scorer).__name__))
            if name in found:
                raise ValueError(f"two scorers are named {name!r}: pass a mapping from names to scorers")
            found[name] = scorer
    if not found:
        raise ValueError("there are no scorers; leave out scorers= to compare with the right answer")
    for name, scorer in found.items():
        if not callable(scorer):
            raise TypeError(f"scorer {name!r} is a function of a Trajectory; got {type(scorer).__name__}")
    return found


def _metering(item: Any) -> Engine | ChatEngine:
    """Return one of the `scorer_engines`; raise TypeError if it does not count its usage."""
    engine = ensure_engine(item)
    if engine.usage is None:
        raise TypeError(f"scorer_engines are engines with a usage; {engine.describe()} has none")
    return engine


def _check_limits(
    engine: Engine | ChatEngine | None, metering: Sequence[Engine | ChatEngine], given: Sequence[str]
) -> None:
    """Raise ValueError for a limit on tokens or cost that no engine reports.

    Args:
        engine: The engine of the trajectories; None: a model.
        metering: The engines of scorers.
        given: Names of the limits that are set.
    """
    is_counted = engine is not None and is_metered(engine)
    priced = [*metering, *((engine,) if engine is not None and is_counted else ())]
    if "max_cost" in given and not any(one.may_know_cost for one in priced):
        name = "a model" if engine is None else engine.describe()
        raise ValueError(
            f"max_cost needs an engine that knows its cost, and {name} does not: give a price, as "
            "OpenAIEngine(..., price=Price(...)) or 'price:' of a YAML file, or leave out max_cost"
        )
    if engine is None or isinstance(engine, Engine):
        return
    if "max_total_tokens" in given and not is_counted:
        raise ValueError(
            f"max_total_tokens needs an engine that counts its tokens: {engine.describe()} has no usage and "
            "usage_of"
        )
    if "max_trajectory_tokens" in given and engine.conversation_tokens("") is None:
        raise ValueError(
            "max_trajectory_tokens needs an engine that takes tokens, or knows those of its conversations: "
            f"{engine.describe()} has no conversation_tokens"
        )


def _is_transform(tools: Any) -> bool:
    from torchrl.envs import Transform

    return isinstance(tools, Transform)


def _describe_model(model: Any) -> str:
    """Return the class of a model, and its name or path if it has one."""
    path: Any = getattr(getattr(model, "config", None), "name_or_path", None)
    return f"{type(model).__name__} {path if isinstance(path, str) else ''}".strip()


def _sampling_of(engine: Engine | ChatEngine) -> JSON:
    """Return the sampling options of an engine as JSON; a resumed evaluation must have the same ones."""
    if not isinstance(engine, Engine):
        return dict(engine.sampling)
    return {} if engine.sampling is None else asdict(engine.sampling)
