"""Answers are compared as numbers where they are numbers."""

import pytest

from torchrl_agentic.rollout import answer_reward


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("#### 220000.0", "220000", True),
        ("The answer is 220,000.", "220000", True),
        ("The answer is 42.", "42", True),
        ("The answer is 421.", "42", False),
        ("42 is wrong, it is 43.", "42", False),
        ("It is -3.", "-3", True),
        ("It is 3.", "-3", False),
        ("10-3 = 7", "7", True),
        ("10-7", "-7", False),
        ("84 and 72.", "84 and 72", True),
        ("72 and 84.", "84 and 72", False),
        ("72", "84 and 72", False),
        ("<think>It is 5.</think>It is 4.", "4", True),
        ("It is Paris, of course.", "paris", True),
        ("It is Rome.", "Paris", False),
        ("", "4", False),
        ("1.50", "1.5", True),
        ("1e3", "1000", True),
    ],
)
def test_equivalent_answers_are_correct(text, answer, right):
    assert answer_reward(text, answer) == float(right)
