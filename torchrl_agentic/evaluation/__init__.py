"""Evaluate models with tools on tasks, compare runs, and read their folders again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrl_agentic.errors import load_lazily

if TYPE_CHECKING:
    from torchrl_agentic.evaluation.comparison import EvalComparison, ScoreChange, compare
    from torchrl_agentic.evaluation.estimates import (
        Difference,
        Estimate,
        mean_estimate,
        paired_difference,
        pass_at_k,
        pass_hat_k,
        wilson_interval,
    )
    from torchrl_agentic.evaluation.eval_folder import EvalFolderError
    from torchrl_agentic.evaluation.eval_result import EvalProgress, EvalResult, Metric
    from torchrl_agentic.evaluation.eval_run import EvalInterrupted
    from torchrl_agentic.evaluation.eval_sample import EvalSample
    from torchrl_agentic.evaluation.evaluate_model import aevaluate, evaluate
    from torchrl_agentic.evaluation.model_engine import load_model

__all__ = [
    "Difference",
    "Estimate",
    "EvalComparison",
    "EvalFolderError",
    "EvalInterrupted",
    "EvalProgress",
    "EvalResult",
    "EvalSample",
    "Metric",
    "ScoreChange",
    "aevaluate",
    "compare",
    "evaluate",
    "load_model",
    "mean_estimate",
    "paired_difference",
    "pass_at_k",
    "pass_hat_k",
    "wilson_interval",
]

__getattr__ = load_lazily(
    __name__,
    {
        "comparison": ("EvalComparison", "ScoreChange", "compare"),
        "estimates": (
            "Difference",
            "Estimate",
            "mean_estimate",
            "paired_difference",
            "pass_at_k",
            "pass_hat_k",
            "wilson_interval",
        ),
        "eval_folder": ("EvalFolderError",),
        "eval_result": ("EvalProgress", "EvalResult", "Metric"),
        "eval_run": ("EvalInterrupted",),
        "eval_sample": ("EvalSample",),
        "evaluate_model": ("aevaluate", "evaluate"),
        "model_engine": ("load_model",),
    },
)
