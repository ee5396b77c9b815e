"""`Sampling`: the distribution that an engine samples from; a warning if no policy can be trained on it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

TEMPERATURE = ("collector", "temperature")
"""Entry of a batch: the temperature that its tokens were sampled at, float32, [1] per row."""
_NEUTRAL: Mapping[str, Collection[Any]] = {
    "top_p": (None, 1),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "typical_p": (None, 1),
    "epsilon_cutoff": (None, 0),
    "eta_cutoff": (None, 0),
    "repetition_penalty": (None, 1),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
}
"""Options that change the distribution of the next token, with the values that leave it as it is."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """The distribution that an engine samples from.

    Attributes:
        temperature: Sampling temperature; 0: greedy.
        log_probs_at: Temperature of the log-probabilities that the engine returns.
        others: Options that change the distribution in another way than by a temperature, such as
            "top_p=0.9"; "" without any.
    """

    temperature: float = 1.0
    log_probs_at: float = 1.0
    others: str = ""

    @classmethod
    def of(cls, options: Mapping[str, Any], *, is_processed: bool) -> Sampling:
        """Return the distribution that sampling options describe.

        Args:
            options: Options of sampling, by the names of vLLM and transformers.
            is_processed: The log-probabilities are those at the sampling temperature; otherwise at 1.
        """
        temperature = options.get("temperature")
        temperature = 1.0 if temperature is None else float(temperature)
        others = (
            f"{name}={options[name]}"
            for name, neutral in _NEUTRAL.items()
            if name in options and options[name] not in neutral
        )
        at = temperature if is_processed and temperature else 1.0
        return cls(temperature, at, ", ".join(others) if temperature else "")


def sampling_of(policy: object) -> Sampling | None:
    """Return the distribution that a policy samples from; None: unknown.

    Args:
        policy: The policy, of any class; `agent_policy` and engines have it as the attribute `sampling`.
    """
    found = getattr(policy, "sampling", None)
    return found if isinstance(found, Sampling) else None


def warn_of_bias(sampling: Sampling | None) -> None:
    """Log a warning if no policy at a temperature has the distribution that tokens were sampled from.

    Call it once per collector, when the first batch for a loss is made.

    Args:
        sampling: The distribution; None: unknown.
    """
    if sampling is None:
        return
    if not sampling.temperature:
        logger.warning(
            "a batch for training was sampled at temperature 0: greedy answers do not come from the policy "
            "that a loss trains; sample at a temperature above 0"
        )
    elif sampling.others:
        logger.warning(
            "a batch for training was sampled with %s: the tokens do not come from the policy that a loss "
            "trains, so that its ratios are biased; train without these options",
            sampling.others,
        )
    elif sampling.log_probs_at != sampling.temperature:
        logger.warning(
            "a batch for training was sampled at temperature %g, but its log-probabilities are those at "
            "temperature %g; start vLLM with logprobs_mode='processed_logprobs', and tell HTTPEngine so",
            sampling.temperature,
            sampling.log_probs_at,
        )
