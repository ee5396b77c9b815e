"""Checks of requests, and finish reasons, that all engines share."""

from __future__ import annotations

from collections.abc import Mapping

from torchrl_agentic.engines.base import Finish
from torchrl_agentic.errors import InfrastructureError, check_count

FINISHES: Mapping[str, Finish] = {
    "stop": "stop",
    "length": "length",
    "repetition": "length",
    "abort": "aborted",
}
"""The finish of an answer by the finish reason of vLLM or SGLang."""


def check_request(n_prompt: int, max_tokens: int, context_length: int | None = None) -> int:
    """Check the sizes of a request, and return how many tokens may be sampled.

    Args:
        n_prompt: Number of token ids of the prompt.
        max_tokens: Upper bound on the number of sampled ids.
        context_length: Number of tokens that the model takes, prompt and answer together; None: no bound.

    Returns:
        `max_tokens`, or what the prompt leaves of the context if that is less.

    Raises:
        TypeError: If `max_tokens` is not a number.
        ValueError: If the prompt is empty or leaves no room, or `max_tokens` is below 1 or not whole.
    """
    if type(max_tokens) is not int or max_tokens < 1:
        check_count("max_tokens", max_tokens, optional=False)
    if n_prompt < 1:
        raise ValueError("the prompt has no token ids; an engine needs at least one")
    if context_length is None:
        return int(max_tokens)
    if n_prompt >= context_length:
        raise ValueError(
            f"the prompt has {n_prompt} tokens and leaves no room in the context of {context_length}; "
            "bound the trajectory with max_trajectory_tokens"
        )
    return min(int(max_tokens), context_length - n_prompt)


def closed_error(engine: object) -> InfrastructureError:
    """Return the error of a request to an engine that was closed."""
    return InfrastructureError(f"the {type(engine).__name__} was closed; make a new one")
