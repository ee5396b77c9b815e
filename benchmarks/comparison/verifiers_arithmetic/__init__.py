"""The task as a taskset of verifiers; docs/comparison.md has its command."""

from verifiers_arithmetic.taskset import ArithmeticTaskset

__all__ = ["ArithmeticTaskset"]
