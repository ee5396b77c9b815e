"""`Usage`: requests, tokens and cost of a model behind an API, by the `Price` of its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

from torchrl_agentic.messages import JSON, fields_of


@dataclass(frozen=True, slots=True)
class Price:
    """Price of a model, per million tokens, in any currency.

    Args:
        prompt: Price of prompt tokens.
        completion: Price of completion tokens, reasoning included.
        cached: Price of prompt tokens that the service had in its cache; None: that of other prompt tokens.

    Raises:
        TypeError: If a price is not a number.
        ValueError: If a price is negative or not finite.
    """

    prompt: float
    completion: float
    cached: float | None = None

    def __post_init__(self) -> None:
        """Check the prices."""
        for name in ("prompt", "completion", "cached"):
            value: Any = getattr(self, name)
            if value is None and name == "cached":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name} is a price per million tokens; got {value!r}")
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} is a price per million tokens, 0 or more; got {value}")

    def of(self, prompt: int, cached: int, completion: int) -> float:
        """Return the price of a request.

        Args:
            prompt: Number of prompt tokens, cached ones included.
            cached: Number of cached prompt tokens.
            completion: Number of completion tokens.
        """
        rate = self.prompt if self.cached is None else self.cached
        return ((prompt - cached) * self.prompt + cached * rate + completion * self.completion) / 1e6


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens and cost of some requests; `a + b` is the usage of both.

    Attributes:
        requests: Number of requests that were answered.
        prompt: Number of prompt tokens.
        cached: Number of prompt tokens that the service had in its cache.
        completion: Number of completion tokens, reasoning included.
        reasoning: Number of reasoning tokens.
        cost: Price of the tokens, in the currency of the `Price`; 0.0 if no price is known.
        uncounted: Number of requests whose response reported no tokens.
        unpriced: Number of requests whose cost is unknown.
    """

    requests: int = 0
    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0
    cost: float = 0.0
    uncounted: int = 0
    unpriced: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(Usage)))

    def __sub__(self, other: Usage) -> Usage:
        return Usage(*(getattr(self, one.name) - getattr(other, one.name) for one in fields(Usage)))

    @property
    def tokens(self) -> int:
        """Number of prompt and completion tokens."""
        return self.prompt + self.completion

    @classmethod
    def of_response(cls, data: JSON, price: Price | None) -> Usage:
        """Read the usage of one answered request.

        Args:
            data: The field "usage" of a response, of any form; numbers that are missing or invalid are 0.
            price: Price of the tokens; None: the "cost" that some services report.
        """
        given = fields_of(data) or {}
        prompt, completion = _count(given, "prompt_tokens"), _count(given, "completion_tokens")
        of_prompt = fields_of(given.get("prompt_tokens_details")) or {}
        of_completion = fields_of(given.get("completion_tokens_details")) or {}
        cached = min(_count(of_prompt, "cached_tokens"), prompt)
        reasoning = _count(of_completion, "reasoning_tokens") or _count(given, "reasoning_tokens")
        is_counted = any(type(given.get(name)) is int for name in ("prompt_tokens", "completion_tokens"))
        cost = _cost(given.get("cost"))
        if price is not None:
            cost = price.of(prompt, cached, completion) if is_counted else None
        return cls(
            1,
            prompt,
            cached,
            completion,
            min(reasoning, completion),
            cost or 0.0,
            uncounted=int(not is_counted),
            unpriced=int(cost is None),
        )


def _count(data: Mapping[str, Any], name: str) -> int:
    value = data.get(name)
    return value if type(value) is int and value > 0 else 0


def _cost(value: JSON) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return cast("float", value) if 0 <= value < float("inf") else None
