"""`PromptLength`: count the tokens of the first prompt of a task."""

# TensorDict border: TorchRL annotates few results.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torchrl.envs.transforms import Transform

from torchrl_agentic.messages import StoredMessage
from torchrl_agentic.tensors import leaves
from torchrl_agentic.tokens.writer import ChatEncoder
from torchrl_agentic.tools.base import Tool
from torchrl_agentic.tools.row_data import RowData
from torchrl_agentic.trajectory.task import Task
from torchrl_agentic.transforms import ToolCompose, TurnTokenizer


class PromptLength:
    """Counts the tokens of the first prompt of a task as a collector encodes it, with the schemas of tools.

    Args:
        tokenizer: Tokenizer of the model; None if a `TurnTokenizer` is among the transforms.
        tools: A list of tools; or a `ToolCompose`, or the `Compose` of one with other transforms.
        tokenizer_options: Further arguments of `ChatEncoder`; not with a `TurnTokenizer`, which has its own.

    Raises:
        TypeError: If `tools` is neither, or `tokenizer` is not a tokenizer.
        ValueError: If there is no tokenizer, or options for a `TurnTokenizer`.
    """

    def __init__(
        self, tokenizer: Any, tools: Any, tokenizer_options: Mapping[str, Any] | None = None
    ) -> None:
        shown: dict[str, Any] = {}
        found = list(leaves(tools)) if isinstance(tools, Transform) else []
        compose = next((one for one in found if isinstance(one, ToolCompose)), None)
        writer = next((one for one in found if isinstance(one, TurnTokenizer)), None)
        if compose is not None:
            shown = {"tools": compose.tools, "tool_role": compose.stage.tool_role}
        elif not found:
            if isinstance(tools, Tool | str | Mapping) or not isinstance(tools, Iterable):
                raise TypeError(f"tools is a list of tools or a ToolCompose; got {type(tools).__name__}")
            shown = {"tools": list(tools)}
        if writer is not None:
            if tokenizer_options:
                raise ValueError(
                    f"the TurnTokenizer decides {', '.join(sorted(tokenizer_options))}: set it there"
                )
            self._encoder = writer.chat_encoder
        elif tokenizer is None:
            raise ValueError("max_prompt_tokens= needs tokenizer=, the tokenizer of the model")
        else:
            self._encoder = ChatEncoder(tokenizer, **{**shown, **(tokenizer_options or {})})

    def __call__(self, task: Task) -> int:
        """Return the number of tokens of the first prompt of a task.

        Raises:
            Exception: If the chat template rejects the messages; templates raise any type.
        """
        chat = [StoredMessage(message).for_template() for message in task.messages]
        names = RowData.of(task.data).selection_at(0)
        return len(self._encoder.encode_chat(chat, tools=names))
