"""Roll out a policy in a chat environment, one trajectory per row."""

# TensorDict border: TensorDict and TorchRL annotate few results.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchrl.envs import EnvBase

from torchrl_agentic.messages import Message
from torchrl_agentic.rollout.scripted import add_answers
from torchrl_agentic.tokens import media
from torchrl_agentic.tokens.ledger import TokenLedger
from torchrl_agentic.transforms import history as border
from torchrl_agentic.transforms.turn_tokenizer import TOKENS, read_ledger


def media_of(td: TensorDictBase, kind: Literal["image", "video"] = "image") -> list[list[Any]]:
    """Return all images or videos of each row's ("history", "prompt"), in the order of their placeholders.

    ("tokens", "prompt") holds their placeholders already, so a transformers model takes
    `processor.image_processor(images=media_of(td)[row])` beside the ids. An engine that inserts the
    placeholders itself, as vLLM does, takes the rendered text and these images instead.

    Args:
        td: A batch, [*B].
        kind: "image" or "video".

    Returns:
        A list per row, rows counted through the flattened batch. Images that came as data are opened as
        `PIL.Image` in RGB, videos that came as data are bytes; paths, URLs and objects are unchanged.

    Raises:
        MissingExtra: If an image must be opened and Pillow is not installed.
    """
    chats = [
        [message.for_template() for message in conversation.messages] for conversation in border.prompts(td)
    ]
    return [[media.opened(part, kind) for part in media.parts_of(chat, kind)] for chat in chats]


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A finished conversation.

    Attributes:
        messages: All messages.
        has_ended: The trajectory terminated, rather than being cut off after the last turn.
        ledger: Its tokens, if the environment has a `TurnTokenizer`.
    """

    messages: tuple[Message, ...]
    has_ended: bool
    ledger: TokenLedger | None

    @property
    def answer(self) -> str:
        """Return the text of the last message if it is the model's, else ""."""
        last = self.messages[-1]
        return last.text if last.role == "assistant" else ""


def rollout(
    env: EnvBase,
    policy: Callable[[TensorDictBase], TensorDictBase],
    chats: Sequence[Sequence[Message]],
    *,
    max_turns: int = 8,
) -> list[Trajectory]:
    """Run a policy in each row of a chat environment until all rows are done.

    Rows that are done are not passed to the policy again.

    Args:
        env: The environment.
        policy: The policy, such as an `agent_policy`.
        chats: First messages of each row, as many lists as the environment has rows.
        max_turns: Number of turns after which unfinished rows are cut off. `EndTrajectory` decides which rows
            have ended.

    Returns:
        One trajectory per row.

    Raises:
        ValueError: If there are more or fewer conversations than rows.
    """
    if len(chats) != env.batch_size.numel():
        raise ValueError(f"{len(chats)} conversations for {env.batch_size.numel()} rows")
    first = border.as_history([[{"role": m.role, "content": m.content} for m in chat] for chat in chats])
    td = env.reset(TensorDict({}, batch_size=env.batch_size).set("query", first))
    found: list[Trajectory | None] = [None] * len(chats)
    for turn in range(1, max_turns + 1):
        step = env.step(_answered(policy, td, [one is None for one in found]))
        following = step.get("next")
        over = following.get("done").reshape(len(chats), -1).any(-1).tolist()
        ending = [i for i, done in enumerate(over) if found[i] is None and (done or turn == max_turns)]
        if ending:
            rows, conversations = border.leaves(following)[1], border.prompts(following)
            for index in ending:
                found[index] = _trajectory(rows[index], conversations[index])
        if all(found):
            break
        td = env.step_mdp(step)
    return [one for one in found if one is not None]


def _answered(
    policy: Callable[[TensorDictBase], TensorDictBase], td: TensorDictBase, is_open: Sequence[bool]
) -> TensorDictBase:
    """Run the policy on the rows that are open; the others get an empty answer."""
    if all(is_open):
        return policy(td)
    rows = border.leaves(td)[1]
    answered = policy(lazy_stack([row for row, is_next in zip(rows, is_open, strict=True) if is_next]))
    answers = iter(border.leaves(answered)[1])
    return lazy_stack(
        [next(answers) if is_next else _silent(row) for row, is_next in zip(rows, is_open, strict=True)]
    )


def _silent(row: TensorDictBase) -> TensorDictBase:
    stack = add_answers(lazy_stack([row.exclude("log_probs")]), [Message("assistant", "")])
    answered = border.leaves(stack)[1][0]
    prompt = answered.get(TOKENS, None)
    if prompt is not None:
        answered.set(("tokens", "full"), prompt).set(("tokens", "response"), prompt[:0])
    return answered


def _trajectory(row: TensorDictBase, conversation: Any) -> Trajectory:
    messages = tuple(message.read() for message in conversation.messages)
    ledger = read_ledger(row) if row.get(TOKENS, None) is not None else None
    ended = row.get("terminated", None)
    return Trajectory(messages, ended is not None and bool(ended.any()), ledger)


def chats_of(queries: Sequence[str], system_prompt: str | None = None) -> list[list[Message]]:
    """Return conversations that begin with one question each.

    Args:
        queries: The questions.
        system_prompt: Text of a system message in front of each question; None: no system message.
    """
    system = [] if system_prompt is None else [Message("system", system_prompt)]
    return [[*system, Message("user", query)] for query in queries]
