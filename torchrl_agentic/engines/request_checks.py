"""Checks of requests that all engines share."""

from __future__ import annotations

from torchrl_agentic.errors import InfrastructureError


def check_request(n_prompt: int, max_tokens: int, context_length: int | None = None) -> int:
    """Check the sizes of a request, and return how many tokens may be sampled.

    Args:
        n_prompt: Number of token ids of the prompt.
        max_tokens: Upper bound on the number of sampled ids.
        context_length: Number of tokens that the model takes, prompt and answer together; None: no bound.

    Returns:
        `max_tokens`, or what the prompt leaves of the context if that is less.

    Raises:
        ValueError: If the prompt is empty or leaves no room, or `max_tokens` is below 1.
    """
    if n_prompt < 1:
        raise ValueError("the prompt has no token ids; an engine needs at least one")
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be 1 or more; got {max_tokens}")
    if context_length is None:
        return max_tokens
    if n_prompt >= context_length:
        raise ValueError(
            f"the prompt has {n_prompt} tokens and leaves no room in the context of {context_length}; "
            "bound the trajectory with max_trajectory_tokens"
        )
    return min(max_tokens, context_length - n_prompt)


def closed_error(engine: object) -> InfrastructureError:
    """Return the error of a request to an engine that was closed."""
    return InfrastructureError(f"the {type(engine).__name__} was closed; make a new one")
