"""Answers are compared as numbers where they are numbers, else as letters or whole words."""

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
        ("So \\boxed{4}, since 2 + 2 is not 5", "4", True),
        ("4? <answer>5</answer>", "4", False),
        ("I do not know", "no", False),
        ("Paris is the capital.", "Paris", True),
        ("It is not Paris.", "Paris", False),
        ("It is Paris, London, Rome or Madrid", "Paris", False),
        ("It is Paris, London, Rome or Madrid", "Rome", False),
        ("Paris? <answer>It is Rome.</answer>", "Paris", False),
        ("Paris? <answer>It is Rome.</answer>", "Rome", True),
        (r"\boxed{\text{Paris}}", "Paris", True),
        (r"\boxed{Paris, London, Rome}", "Paris", False),
        ("答案是巴黎。", "巴黎", True),
        ("I am not certain; maybe B.", "A", False),
        ("I am not certain; maybe B.", "B", True),
        ("**(A)**", "A", True),
        ("A is right, not B.", "A", True),
        ("A, B, C or D", "B", False),
        ("A bird in the hand", "A", False),
        ("I think so", "I", False),
        ("the answer is a", "A", False),
        ("#### B", "A", False),
        ("C++", "C", False),
    ],
)
def test_equivalent_answers_are_correct(text, answer, right):
    assert answer_reward(text, answer) == float(right)


def test_an_empty_answer_is_a_mistake():
    with pytest.raises(ValueError, match="right answer is empty"):
        answer_reward("no idea", " ")
