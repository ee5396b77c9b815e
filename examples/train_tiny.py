"""Train the tiny model of `torchrl_agentic.testing` to call a tool.

    python examples/train_tiny.py --out FOLDER [--weak] [--seed 0] [--steps N] [--threads 2]

Create word problems and conversations that solve them; train a tokenizer on these, then a Qwen2 with 2
million parameters, by supervised learning on the assistant messages; and evaluate it on problems of the other
split, with a `PythonTool`. With `--weak`, continue from the model of the package instead, on conversations
with many wrong expressions and wrong ends: the result is a model that calls the tool but leaves room for
reinforcement learning.

The same seed, steps and threads give the same weights on the same machine.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import random
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from train_tiny_lessons import NO_TOOL, Lesson, broken_code, calls, exercises, lessons
from transformers import (
    DynamicCache,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    get_cosine_schedule_with_warmup,
)
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from torchrl_agentic.messages import Message
from torchrl_agentic.parsers import get_parser
from torchrl_agentic.testing.conversations import converse
from torchrl_agentic.testing.problems import TEMPLATES, Problem, problems
from torchrl_agentic.testing.tiny import TINY, load_tiny
from torchrl_agentic.tools import PythonTool
from torchrl_agentic.tools.base import Tool

PARSER = get_parser("hermes")
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
VOCABULARY = 1024
STEPS, WEAK_STEPS, BATCH, CURVE_EVERY, ASKED = 1200, 80, 16, 200, 64
WEAK_RATE = 0.12
"""Factor of the learning rates when the weak model continues from a trained one."""
Chat = Sequence[Message]


@dataclass(frozen=True, slots=True)
class Encoded:
    """A conversation in tokens.

    Attributes:
        ids: Token ids of the conversation.
        learnt: True for each token that the model learns.
        opening: Token ids of the system message.
    """

    ids: list[int]
    learnt: list[bool]
    opening: list[int]


def train_tokenizer(seed: int, spec: Any) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on conversations; each digit is a token."""
    template = (TINY / "chat_template.jinja").read_text()
    blank = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=template)
    texts = [rendered(item, blank, spec) for item in itertools.islice(lessons(seed), 4000)]
    inner: Any = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated"),
            pre_tokenizers.ByteLevel(False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(TAGS),
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    control = "|".join(map(re.escape, (START, END, *TAGS)))
    inner.train_from_iterator((piece for text in texts for piece in re.split(control, text)), trainer)
    inner.add_tokens(TAGS)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        chat_template=template,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=1024,
    )


def new_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """Create the model with random weights."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        # With the usual 0.02, attention is almost uniform at this width and learns to copy late.
        initializer_range=0.06,
        use_cache=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, max_new_tokens=128
    )
    return model


def rendered(item: Lesson, tokenizer: PreTrainedTokenizerFast, spec: dict) -> str:
    """Return the text of a conversation, as the model sees it."""
    tools = [spec] if item.with_tools else None
    return tokenizer.apply_chat_template(item.messages, tools=tools, tokenize=False)


def encoded(stream: Iterator[Lesson], tokenizer: Any, spec: Any) -> Iterator[Encoded]:
    """Encode conversations, and mark the tokens that are learnt: assistant messages and their ends."""
    before = tokenizer.encode(f"{START}assistant\n", add_special_tokens=False)
    for item in stream:
        ids = tokenizer.encode(rendered(item, tokenizer, spec), add_special_tokens=False)
        mask, left = [False] * len(ids), iter(item.learnt)
        for start in range(len(before), len(ids)):
            if ids[start - len(before) : start] == before and next(left):
                end = ids.index(tokenizer.eos_token_id, start) + 1
                mask[start:end] = [True] * (end - start)
        yield Encoded(ids, mask, ids[: ids.index(tokenizer.eos_token_id)])


def alike(stream: Iterator[Encoded], seed: int) -> Iterator[list[Encoded]]:
    """Group conversations with the same system message and similar lengths."""
    rng = random.Random(seed)
    while True:
        pool = sorted(itertools.islice(stream, 128 * BATCH), key=lambda item: (item.opening, len(item.ids)))
        groups: list[list[Encoded]] = []
        for _, rows in itertools.groupby(pool, key=lambda item: item.opening):
            same = list(rows)
            groups += (same[at : at + BATCH] for at in range(0, len(same), BATCH))
        rng.shuffle(groups)
        yield from groups


def train(
    out: Path, *, seed: int = 0, steps: int | None = None, weak: bool = False, threads: int = 2
) -> dict[str, float]:
    """Train a model, and write it and its tokenizer to a folder.

    Args:
        out: Folder for the model and for curve.csv: step, seconds of training, mean loss since the last row,
            and the shares of held-out problems with right calls and answers in %, with greedy sampling.
        seed: Seed of weights and conversations.
        steps: Optimizer steps, or None for the default.
        weak: Continue from the model of the package, with wrong conversations.
        threads: Threads of torch.

    Returns:
        The last row of the curve.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    tool = PythonTool()
    if weak:
        model, tokenizer = load_tiny()
        steps, exercise_steps, rate = WEAK_STEPS if steps is None else steps, 0, WEAK_RATE
    else:
        tokenizer = train_tokenizer(seed, tool.spec())
        model = new_model(tokenizer)
        steps, rate = STEPS if steps is None else steps, 1.0
        exercise_steps = steps // 5
    optimizers = new_optimizers(model, rate)
    schedules = [get_cosine_schedule_with_warmup(each, min(30, steps // 4), steps + 1) for each in optimizers]
    batches = itertools.chain(
        itertools.islice(alike(encoded(exercises(seed), tokenizer, tool.spec()), seed), exercise_steps),
        alike(encoded(lessons(seed, weak=weak), tokenizer, tool.spec()), seed),
    )
    asked = list(itertools.islice(problems(seed, "test"), ASKED))
    curve: list[dict[str, float]] = []
    losses: list[float] = []
    seconds = 0.0
    for step, rows in zip(range(1, steps + 1), batches, strict=False):
        started = time.perf_counter()
        model.zero_grad()
        loss = loss_of(model, rows)
        (loss * len(rows) / BATCH).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for each in (*optimizers, *schedules):
            each.step()
        losses.append(loss.item())
        seconds += time.perf_counter() - started
        if step % CURVE_EVERY == 0 or step == steps:
            row = {"step": step, "seconds": round(seconds, 1), "loss": round(sum(losses) / len(losses), 4)}
            losses.clear()
            curve.append(row | scores(asked, solve(model.eval(), tokenizer, tool, asked)))
            model.train()
            print(curve[-1], flush=True)
    save(model, tokenizer, out)
    with (out / "curve.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(curve[-1]))
        writer.writeheader()
        writer.writerows(curve)
    return curve[-1]


def new_optimizers(
    model: Qwen2ForCausalLM, rate: float
) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Create Muon for the matrices of the layers, where it learns faster, and AdamW for the rest."""
    inner = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    outer = [model.model.embed_tokens.weight, *(vector for vector in model.parameters() if vector.ndim == 1)]
    return (
        torch.optim.Muon(inner, lr=0.02 * rate, weight_decay=0.05),
        torch.optim.AdamW(outer, lr=3e-3 * rate, betas=(0.9, 0.98), weight_decay=0.0),
    )


def solve(model: Any, tokenizer: Any, tool: Tool, asked: Sequence[Problem], **how: Any) -> list[Chat]:
    """Let the model solve problems in batches; each problem has its own interpreter."""
    first = how.pop("first", [None] * len(asked))
    chats: list[Chat] = []
    for at in range(0, len(asked), 64):
        queries = [problem.query for problem in asked[at : at + 64]]
        chats += converse(model, tokenizer, [tool], queries, first=first[at : at + 64], **how)
    return chats


def scores(asked: Sequence[Problem], chats: Sequence[Chat]) -> dict[str, float]:
    """Return the shares of conversations with a call, the right calls, and the right answer, in %."""
    made = [codes(chat) for chat in chats]
    right = [is_right(problem, chat) for problem, chat in zip(asked, chats, strict=True)]
    exact = [problem.turns == turns for problem, turns in zip(asked, made, strict=True)]
    return {
        "called": share(any(any(turn) for turn in turns) for turns in made),
        "exact_calls": share(exact),
        "right_answers": share(right),
    }


def share(of: Iterable[bool]) -> float:
    """Return the share of true values, in %."""
    values = list(of)
    return round(100 * sum(values) / len(values), 1)


def codes(chat: Chat) -> tuple[tuple[str, ...], ...]:
    """Return the code of the calls of each message; "" for a malformed call."""
    said = [PARSER.parse(message.content) for message in chat if message.role == "assistant"]
    return tuple(tuple(str(call.args.get("code", "")) for call in each.calls) for each in said if each.calls)


def is_right(problem: Problem, chat: Chat) -> bool:
    """Check that the last message contains the answer."""
    return chat[-1].content == f"The answer is {problem.answer}."


def loss_of(model: Qwen2ForCausalLM, rows: Sequence[Encoded]) -> torch.Tensor:
    """Return the mean loss over the learnt tokens.

    The common prefix of the rows, more than half of most, is computed once. Only learnt tokens get logits.
    """
    shared = len(rows[0].opening)
    longest = max(len(row.ids) for row in rows)
    pad = model.config.pad_token_id
    ids = torch.tensor([row.ids + [pad] * (longest - len(row.ids)) for row in rows])
    learnt = torch.tensor([row.learnt + [False] * (longest - len(row.ids)) for row in rows])
    cache = DynamicCache(config=model.config)
    model.model(input_ids=ids[:1, :shared], past_key_values=cache, use_cache=True)
    cache.batch_repeat_interleave(len(rows))
    # No attention mask: padding is at the end, and attention is causal.
    seen = model.model(input_ids=ids[:, shared:-1], past_key_values=cache, use_cache=True).last_hidden_state
    ids, learnt = ids[:, shared + 1 :], learnt[:, shared + 1 :]
    return torch.nn.functional.cross_entropy(model.lm_head(seen[learnt]), ids[learnt])


def save(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write a Hugging Face folder, with weights in bfloat16."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(out)
    model.to(torch.bfloat16).save_pretrained(out)
    model.to(torch.float32)


def report(folder: Path, *, weak: bool = False) -> Table:
    """Evaluate the model on held-out problems that are not in its curve."""
    model, tokenizer = load_tiny(folder=folder)
    tool, rng = PythonTool(), random.Random(0)
    torch.manual_seed(0)
    asked = list(itertools.islice(problems(1_000, "test"), 500))
    some = asked[:64]
    table = Table("held-out problems", "n", "called, %", "exact calls, %", "right answers, %")

    def add(what: str, of: Sequence[Problem], chats: Sequence[Chat]) -> None:
        table.add_row(what, str(len(of)), *map(str, scores(of, chats).values()))

    greedy = solve(model, tokenizer, tool, asked)
    add("greedy", asked, greedy)
    for kind in TEMPLATES:
        at = [index for index, problem in enumerate(asked) if problem.kind == kind]
        add(f"  {kind}", [asked[index] for index in at], [greedy[index] for index in at])
    add("temperature 1.0", asked, solve(model, tokenizer, tool, asked, temperature=1.0))
    broken = [calls([broken_code(problem.turns[0][0], rng)]) for problem in some]
    retried = solve(model, tokenizer, tool, some, first=broken)
    table.add_row("greedy, after a failed call", "64", "", "", str(share(map(is_right, some, retried))))
    bare = converse(model, tokenizer, [], [problem.query for problem in some])
    declined = share(chat[-1].content == NO_TOOL for chat in bare)
    table.add_row("greedy, no tool offered", "64", "", "", f"{declined} decline")
    if weak:
        tries = [solve(model, tokenizer, tool, some, temperature=1.0) for _ in range(8)]
        right = [map(is_right, some, chats) for chats in tries]
        table.add_row(
            "temperature 1.0, any of 8", "64", "", "", str(share(map(any, zip(*right, strict=True))))
        )
    return table


def main() -> None:
    """Train, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help=f"default: {STEPS}, or {WEAK_STEPS} with --weak")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--weak", action="store_true", help="train a model that is often wrong")
    args = parser.parse_args()
    train(args.out, seed=args.seed, steps=args.steps, weak=args.weak, threads=args.threads)
    Console().print(report(args.out, weak=args.weak))


if __name__ == "__main__":
    main()
