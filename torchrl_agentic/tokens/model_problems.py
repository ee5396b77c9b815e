"""Find what is likely wrong with a model: its end tokens, its chat template, its sampling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torchrl_agentic.parsers.base import ToolCallParser
from torchrl_agentic.parsers.control_tokens import control_tokens_of
from torchrl_agentic.tokens.writer import ChatEncoder, end_ids


def model_problems(
    tokenizer: Any,
    *,
    encoder: ChatEncoder | None = None,
    parser: ToolCallParser | None = None,
    stop_token_ids: Sequence[int] = (),
    generation_config: Any = None,
    temperature: float | None = None,
) -> list[str]:
    """Return what is likely wrong with a model, a line each.

    Args:
        tokenizer: The tokenizer of the model.
        encoder: Encoder of its conversations; None: one is made of the tokenizer, to see whether it can be.
        parser: Format of its calls; None: their end is not checked.
        stop_token_ids: Ids that end an answer besides `eos_token` and those of the encoder.
        generation_config: The model's, a mapping or an object of transformers; None: unknown.
        temperature: Sampling temperature; None: unknown.
    """
    lines: list[str] = []
    if encoder is None:
        try:
            encoder = ChatEncoder(tokenizer, stop_token_ids=stop_token_ids)
        except (ValueError, TypeError) as error:
            lines.append(f"chat template: {' '.join(str(error).split())}")
    if encoder is None:
        try:
            encoder = ChatEncoder(tokenizer, stop_token_ids=stop_token_ids, use_inference_chat_template=True)
        except (ValueError, TypeError):
            return lines  # the line above says why
    stops = {*encoder.stop_token_ids, *stop_token_ids}
    lines += _missing_ends(tokenizer, parser, stops, end_ids(generation_config, tokenizer), encoder)
    if not encoder.template.writes_calls:
        lines.append(
            "chat template: it leaves out tool calls that a message has apart from its text, so a model does "
            "not see the calls of a given history, and no SFT data can be made of them"
        )
    if temperature is not None and temperature != 1:
        lines.append(
            f"temperature: the engine samples at {temperature:g}; train at the same one, with "
            f"training_policy(..., temperature={temperature:g}), or the ratios of the loss are biased"
        )
    return lines


def _missing_ends(
    tokenizer: Any,
    parser: ToolCallParser | None,
    stops: set[int],
    of_model: Sequence[int],
    encoder: ChatEncoder,
) -> Iterator[str]:
    """Yield a line for tokens that end answers of the model, and one for those of the parser."""
    if missing := [one for one in of_model if one not in stops]:
        yield (
            "end ids: by its generation_config the model also ends answers with "
            f"{_named(tokenizer, missing)}; give stop_token_ids={missing}, or an answer "
            "goes on behind them"
        )
    if parser is None:
        return
    source = encoder.template.source
    missing = [
        index
        for index, text in control_tokens_of(tokenizer).items()
        if text in parser.stop and text in source and index not in {*stops, *of_model, tokenizer.pad_token_id}
    ]
    if missing:
        yield (
            f"end ids: the format {parser.name!r} ends answers with {_named(tokenizer, missing)}; give "
            f"stop_token_ids={missing}, without which the model may write on behind its calls"
        )


def _named(tokenizer: Any, ids: Sequence[int]) -> str:
    return ", ".join(f"{tokenizer.convert_ids_to_tokens(one)!r} (id {one})" for one in ids)
