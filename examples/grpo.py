"""GRPO with tools, from a data set to a trained and evaluated model: a script to copy and change.

    python examples/grpo.py examples/grpo.yaml                     # a tiny model on two CPU cores
    python examples/grpo.py examples/grpo.yaml lr=5e-5 out=runs/b  # keys of `Settings` override the file
    python examples/grpo.py examples/grpo.yaml --resume            # continue after a crash
    torchrun --nproc-per-node 4 examples/grpo.py my.yaml           # FSDP; each process has its own engine

For a task of your own, change the data set (`train`, `test`), the tools (`agent`), and `reward`. The folder
`out` gets scalars, trajectories and checkpoints; `torchrl-agentic view runs/grpo` shows them. A run that was
killed continues bit for bit with `--resume` if `staleness: 0`, `deterministic: true` and `collector: agent`.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import random
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import pydantic
import torch
import yaml
from pydantic import PositiveInt
from tensordict import TensorDictBase
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torchrl.checkpoint import GlobalRNGState
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import Compose, InitTracker
from torchrl.envs.llm import DatasetChatEnv
from torchrl.objectives.llm import GRPOLoss
from transformers import AutoModelForCausalLM, AutoTokenizer, get_constant_schedule_with_warmup

from torchrl_agentic import PythonTool, Recorder, ToolCompose, agent_policy, evaluate, training_policy
from torchrl_agentic.collectors import AgentCollector, Task, TaskStream, Trajectory
from torchrl_agentic.dispatch import event_loop
from torchrl_agentic.engines import TransformersEngine, VLLMEngine
from torchrl_agentic.rewards import answer_reward
from torchrl_agentic.rollout import (
    Checkpoints,
    ModelState,
    TaskLoader,
    average_metrics,
    batch_metrics,
    discard_steps,
    group_batches,
    load_tasks,
    log_metrics,
    open_logger,
)
from torchrl_agentic.rollout.tiny_model import TINY
from torchrl_agentic.transforms import AnswerRewardTransform, EndTrajectory, RecordTransform, TurnTokenizer

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def agent(settings: Settings, recorder: Recorder | None = None) -> list[Any]:
    """Return the tools, and what ends a trajectory."""
    compose = ToolCompose([PythonTool(timeout=5)], parser=settings.parser, recorder=recorder)
    return [compose, EndTrajectory(max_turns=settings.max_turns, when_no_calls=True)]


def reward(trajectory: Trajectory) -> float:
    """Return 1 for a right answer that a tool helped to find, else 0; `lock_step` has its own rewards."""
    is_valid = trajectory.has_ended and trajectory.n_calls > 0
    return answer_reward(trajectory.answer, trajectory.task.answer) if is_valid else 0.0


class Settings(pydantic.BaseModel):
    """Keys of the YAML file."""

    model_config = pydantic.ConfigDict(extra="forbid")

    out: Path = Path("runs/grpo")
    model: str  # a folder, a name of the Hugging Face hub, or "tiny" for the model of this package
    noise: float = 0.0  # relative noise on the initial weights: leaves a demo something to learn
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    train: str  # data sets, as `load_tasks` reads them
    test: str
    system_prompt: str | None = None
    max_prompt_tokens: PositiveInt | None = None  # longer prompts are left out; None: by the engine's context
    parser: str = "hermes"
    collector: Literal["agent", "llm"] = "agent"  # AgentCollector, or TorchRL's LLMCollector in lock-step
    engine: Literal["transformers", "vllm"] = "transformers"
    engine_args: dict[str, Any] = {}
    temperature: pydantic.PositiveFloat = 1.0  # of the policy, when it samples and in the loss
    max_turns: PositiveInt = 8
    max_new_tokens: PositiveInt = 512
    steps: PositiveInt = 100
    prompts: PositiveInt = 16  # per step and process
    group: PositiveInt = 8  # answers per prompt
    staleness: int = 1  # largest age of a batch in steps; 0: sampling and training take turns
    deterministic: bool = False  # sample one answer at a time, so that no rounding depends on the others
    epochs: PositiveInt = 1  # passes over a batch
    minibatch: PositiveInt = 16  # trajectories per forward pass
    accumulate: PositiveInt = 1  # forward passes per optimizer step
    lr: float = 1e-6
    warmup: int = 0  # optimizer steps
    max_norm: float = 1.0
    clip: tuple[float, float] = (0.2, 0.28)
    kl: float = 0.0  # weight of the KL divergence to the initial model
    evaluate_every: PositiveInt = 20  # steps
    evaluate_tasks: PositiveInt = 128
    save_every: PositiveInt = 10
    keep: PositiveInt = 2  # checkpoints
    logger: Literal["", "tensorboard", "wandb"] = ""  # besides CSV files
    seed: int = 0


MAY_CHANGE = {"out", "steps", "test", "evaluate_every", "evaluate_tasks", "save_every", "keep", "logger"}


def read_settings() -> tuple[Settings, bool]:
    """Read the YAML file with the overrides of the command line; return also whether to resume."""
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--resume", action="store_true", help="continue the run in the folder `out`")
    options = parser.parse_intermixed_args()
    try:
        values = yaml.safe_load(options.config.read_text())
        for key, _, value in (one.partition("=") for one in options.overrides):
            values[key] = yaml.safe_load(value)
        return Settings.model_validate(values), options.resume
    except pydantic.ValidationError as error:
        parser.error("; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()))
    except (OSError, yaml.YAMLError, TypeError) as error:
        parser.error(f"{options.config}: {error}")


def load_model(settings: Settings) -> tuple[Any, Any]:
    """Return the model, in evaluation mode as GRPO wants it, and its tokenizer."""
    name = str(TINY) if settings.model == "tiny" else settings.model
    if settings.model == "tiny" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # several would wait for each other longer than they compute
    device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(name, dtype=settings.dtype).to(device).eval()
    draws = torch.Generator().manual_seed(settings.seed)
    with torch.no_grad():
        for weight in model.parameters() if settings.noise else ():
            weight += settings.noise * weight.std() * torch.randn(weight.shape, generator=draws).to(weight)
    return model, AutoTokenizer.from_pretrained(name, padding_side="left")


def engines_of(settings: Settings, model: Any, tokenizer: Any) -> tuple[Any, Any]:
    """Return the engine of this process with a copy of the weights, and a greedy one over the same copy."""
    engine: Any
    seed = settings.seed * WORLD + RANK
    if settings.engine == "vllm":
        folder = settings.out / f"initial-{RANK}"
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        args = {"dtype": settings.dtype, "seed": seed, **settings.engine_args}
        options = {"engine_args": args, "temperature": settings.temperature}
        engine = VLLMEngine.from_model(folder, tokenizer=tokenizer, **options)
        return engine, VLLMEngine(engine.llm, tokenizer=tokenizer, temperature=0.0)
    exact = {"max_concurrent": 1, "prefix_cache_tokens": 0} if settings.deterministic else {}
    copied, options = copy.deepcopy(model), {"temperature": settings.temperature, **exact}
    options |= settings.engine_args
    engine = TransformersEngine(copied, tokenizer, seed=seed, **options)
    # Keys and values of old prompts would be those of old weights.
    greedy = {**options, "temperature": 0.0, "prefix_cache_tokens": 0}
    return engine, TransformersEngine(copied, tokenizer, **greedy)


def longest_prompt(settings: Settings, engine: Any) -> int | None:
    """Return the bound on prompts: by default what leaves room for an answer in the context of the engine."""
    context = engine.context_length
    if settings.max_prompt_tokens is not None or context is None:
        return settings.max_prompt_tokens
    return context - min(settings.max_new_tokens, context // 2)


def sampled_tokens(batch: TensorDictBase) -> int:
    """Return the number of tokens that the loss counts: those that were sampled, with a log-probability."""
    counted = (row["masks", "all_assistant_mask"] & row["log_probs", "full"].isfinite() for row in batch)
    return sum(int(one.sum()) for one in counted)


def sum_over_processes(count: int, device: torch.device) -> int:
    """Return the sum of the numbers of all processes, all of which call this."""
    total = torch.tensor(count, device=device)
    if WORLD > 1:
        distributed.all_reduce(total)
    return int(total)


class Learner:
    """The model with its loss, optimizer and schedule; several processes share them by FSDP."""

    def __init__(self, settings: Settings, model: Any, tokenizer: Any) -> None:
        self.settings, self.model = settings, model
        options = {"temperature": settings.temperature}
        self.reference = training_policy(copy.deepcopy(model), tokenizer, **options) if settings.kl else None
        if WORLD > 1:
            for layer in model.model.layers:
                fully_shard(layer)
            fully_shard(model)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=0.0)
        self.scheduler = get_constant_schedule_with_warmup(self.optimizer, settings.warmup)
        self.loss = GRPOLoss(
            training_policy(model, tokenizer, **options),
            masking_strategy="rlhf",
            aggregation="none",  # `learn` divides by the tokens of an optimizer step
            clip_epsilon=settings.clip,
            kl_to_ref_coeff=settings.kl or None,
            entropy_bonus=False,
        )
        self.buffer = ReplayBuffer(
            storage=LazyStackStorage(settings.prompts * settings.group),
            sampler=SamplerWithoutReplacement(),
            batch_size=settings.minibatch,
        )

    def learn(self, batch: TensorDictBase) -> dict[str, float]:
        """Take the optimizer steps of a batch; return the means over its tokens of what the loss reports.

        The loss of a step is the sum over its sampled tokens, divided by their number in all forward passes
        and processes, however they are split. Groups with equal rewards count: leaving them out would make
        the steps of a batch larger, the fewer of its groups teach something.
        """
        settings, device = self.settings, self.model.device
        if self.reference is not None:
            with torch.no_grad():
                known = self.reference(batch.select("tokens", "masks").to(device))
            for row, other in zip(batch.tensordicts, known.tensordicts, strict=True):
                row["next", "ref_log_probs", "full"] = other["log_probs", "full"].cpu()
        self.buffer.empty()
        self.buffer.extend(batch)
        minibatches = [one for _ in range(settings.epochs) for one in self.buffer]
        sums: dict[str, float] = defaultdict(float)
        norms: list[float] = []
        for start in range(0, len(minibatches), settings.accumulate):
            passes = minibatches[start : start + settings.accumulate]
            n_tokens = sum_over_processes(sum(map(sampled_tokens, passes)), device)
            for minibatch in passes:
                found = self.loss(minibatch.to(device))
                n_padded = found.loss_objective.numel()  # TorchRL averages other figures over these
                total = found.loss_objective.sum()
                if settings.kl:
                    total = total + found.loss_kl_to_ref * n_padded
                # FSDP averages the gradients of the processes.
                (total * WORLD / max(n_tokens, 1)).backward()
                sums["loss_objective"] += found.loss_objective.sum().item()
                for name in ("kl_approx", "kl_to_ref", "clip_fraction"):
                    if (value := getattr(found, name, None)) is not None:
                        sums[name] += value.item() * n_padded
                if n := sampled_tokens(minibatch):
                    sums["ESS"] += found.ESS.item() * n
            norms.append(float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.max_norm)))
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        n_tokens = max(sum(map(sampled_tokens, minibatches)), 1)
        means = {f"loss/{name}": value / n_tokens for name, value in sums.items()}
        return {**means, "loss/gradient_norm": sum(norms) / len(norms)}


def lock_step(
    settings: Settings, tasks: Iterable[Task], model: Any, tokenizer: Any, recorder: Recorder
) -> Iterator[TensorDictBase]:
    """Yield the batches of TorchRL's `LLMCollector`, in the form of those of `AgentCollector`."""
    size = settings.prompts * settings.group
    loader, options = TaskLoader(tasks), {"batch_size": (size,), "device": model.device}
    env = DatasetChatEnv.from_dataloader(loader, repeats=settings.group, **options)
    compose, ending = agent(settings, recorder)
    turns = TurnTokenizer(tokenizer, tools=compose.tools)
    grade = AnswerRewardTransform(lambda answer, truth: answer_reward(answer, truth) > 0)
    for transform in (compose, ending, turns, grade, RecordTransform(tokens=True), InitTracker()):
        env.append_transform(transform)
    options = {"max_new_tokens": settings.max_new_tokens, "temperature": settings.temperature}
    policy = agent_policy(model, tokenizer, **options)
    collector = LLMCollector(
        env, policy=policy, dialog_turns_per_batch=size, yield_completed_trajectories=True
    )
    groups = {"group_size": settings.group, "groups_per_batch": settings.prompts, "key": "name"}
    try:
        yield from group_batches(collector, **groups)
    finally:
        collector.shutdown()


@contextlib.contextmanager
def mistakes_end_the_program() -> Iterator[None]:
    """Exit with a message instead of a traceback if what the settings name does not exist or fit."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        sys.exit(str(error))


def train(settings: Settings, *, resume: bool) -> None:
    """Train, evaluate and save, until `settings.steps` steps are done."""
    random.seed(settings.seed)
    torch.manual_seed(settings.seed + RANK)
    with mistakes_end_the_program():
        model, tokenizer = load_model(settings)
        engine, greedy = engines_of(settings, model, tokenizer)
        learner = Learner(settings, model, tokenizer)
        recorder = Recorder(settings.out / "trajectories", run=settings.out.name)
        offered = agent(settings)[0]
        prompts = {"system_prompt": settings.system_prompt}
        bound = {"max_prompt_tokens": longest_prompt(settings, engine), "tokenizer": tokenizer}
        tasks = load_tasks(settings.train, tools=offered, **prompts, **bound)
        stream = TaskStream(tasks[RANK::WORLD], seed=settings.seed)
        held_out = load_tasks(settings.test, limit=settings.evaluate_tasks, **prompts)
        held_out = held_out[RANK : len(held_out) // WORLD * WORLD : WORLD]  # each process has as many
        if not held_out:
            raise ValueError(f"{settings.test} has fewer tasks than there are processes ({WORLD})")
        bounds: Any = {"max_turns": settings.max_turns, "max_new_tokens": settings.max_new_tokens}
        collector = AgentCollector(
            Compose(*agent(settings, recorder), RecordTransform(tokens=True)),
            engine=engine,
            tokenizer=tokenizer,
            tasks=stream,
            group_size=settings.group,
            groups_per_batch=settings.prompts,
            max_staleness=settings.staleness,
            reward=reward,
            name="train",
            timeline=recorder if RANK == 0 else None,
            **bounds,
        )
        state, of_rank = ModelState(model, learner.optimizer), {f"collector-{RANK}": collector}
        parts = {"model": state, "schedule": learner.scheduler, f"random-{RANK}": GlobalRNGState(), **of_rank}
        kept = settings.model_dump(mode="json", exclude=MAY_CHANGE)
        checkpoints = Checkpoints(settings.out / "checkpoints", keep=settings.keep, settings=kept)
        start = max(checkpoints.steps(), default=0)
        if start and not resume:
            raise ValueError(f"{settings.out} holds a run: continue it with --resume, or name another out=")
        loggers: list[Any] = []
        if RANK == 0:
            discard_steps(settings.out, start)
            loggers = [open_logger(kind, settings.out, start=start) for kind in ("csv", settings.logger)]
        if start:
            checkpoints.load(parts)
            engine.version = start - 1
            collector.update_policy_weights_(state.weights())
    recorder.step = start
    batches: Any = iter(collector)
    if settings.collector == "llm":
        batches = lock_step(settings, stream, model, tokenizer, recorder)
    with contextlib.closing(recorder), collector, contextlib.closing(batches):
        for step in range(start, settings.steps):
            began = time.perf_counter()
            batch = next(batches)
            sampled = time.perf_counter()
            metrics = {**batch_metrics(batch, version=step), **learner.learn(batch)}
            collector.update_policy_weights_(state.weights())  # records the batch under this step
            recorder.step, version = step + 1, step + 1
            metrics |= {"seconds/sample": sampled - began, "seconds/train": time.perf_counter() - sampled}
            if version % settings.evaluate_every == 0 or version == settings.steps:
                tools = Compose(*agent(settings))
                result = evaluate(held_out, tools, greedy, tokenizer, scorers=reward, **bounds)
                metrics |= {"eval/failed": float(len(result.failed))}
                metrics |= {} if result.score is None else {"eval/reward": result.score}
            metrics = average_metrics(metrics)
            log_metrics(loggers, metrics, step)
            if RANK == 0:
                shown = ("reward/mean", "groups/mixed", "loss/loss_objective", "age/mean", "eval/reward")
                figures = (f"{name} {metrics[name]:.3g}" for name in shown if name in metrics)
                print(f"step {step}", *figures, flush=True)
            if version % settings.save_every == 0 or version == settings.steps:
                checkpoints.save(version, parts)
    weights = state.weights()
    if RANK == 0:
        model.save_pretrained(settings.out / "model", state_dict=weights)
        tokenizer.save_pretrained(settings.out / "model")
    for one in (greedy, engine):
        event_loop.run(one.close())


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "size_average and reduce args")  # of torch, inside of the loss
    settings, resume = read_settings()
    if WORLD > 1:
        distributed.init_process_group(timeout=timedelta(hours=2))
    train(settings, resume=resume)
