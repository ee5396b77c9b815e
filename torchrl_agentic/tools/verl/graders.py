"""Tools that check an answer against the data set's: `Gsm8kTool` for numbers, `Geo3kTool` for mathematics."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from torchrl_agentic.errors import ToolError
from torchrl_agentic.messages import JSON
from torchrl_agentic.tools.verl.base_tool import BaseTool, OpenAIFunctionToolSchema, ToolResponse

STEP_PENALTY = -0.05
"""The reward of a call that is no improvement on the one before."""
# A sign counts only where no digit or letter precedes it: in "3-4" it is a minus between two numbers.
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:,\d{3})*(?:\.\d+)?(?:[eE][+-]?\d+)?|\d+(?:\.\d+)?")


def numbers(text: str) -> list[Decimal]:
    """Give the numbers of a text, in their order; commas may part thousands. NaN: one beyond all bounds."""
    return [_decimal(found.replace(",", "")) for found in _NUMBER.findall(text.replace("−", "-"))]


def _decimal(text: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation:
        return Decimal("NaN")


def same_number(answer: str, truth: str) -> bool:
    """Whether the last number of an answer is that of the truth: `#### 1,000.0` and `1000` are one.

    Behind `####`, nothing else counts.
    """
    found, wanted = (numbers(text.rpartition("####")[2])[-1:] for text in (answer, truth))
    return bool(wanted) and found == wanted


def same_mathematics(answer: str, truth: str) -> bool:
    r"""Whether what stands in the last `\boxed{…}`, or else all of it, is the same number or text."""
    found, wanted = boxed(answer), boxed(truth)
    if _plain(found) == _plain(wanted):
        return True
    numbers = [_as_number(_plain(text)) for text in (found, wanted)]
    return numbers[0] is not None and numbers[0] == numbers[1]


def boxed(text: str) -> str:
    r"""Give what stands in the last `\boxed{…}` of a text, or the text if there is none."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return text
    depth, begin = 0, start + len("\\boxed")
    for index in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[begin + 1 : index]
    return text[begin + 1 :]


def _plain(text: str) -> str:
    text = re.sub(r"\\(?:left|right|displaystyle|[,;!])|\$|\s", "", text)
    text = re.sub(r"\\[dt]?frac\{?(-?[\d.]+)\}?\{?(-?[\d.]+)\}?", r"\1/\2", text)
    return re.sub(r"\^?\{?\\(?:circ|degree)\}?|°", "", text).rstrip(".").replace("−", "-")


def _as_number(text: str) -> Decimal | None:
    numerator, slash, denominator = text.replace(",", "").partition("/")
    try:
        value = Decimal(numerator)
        return value / Decimal(denominator) if slash else value
    except ArithmeticError:
        return None


class _AnswerTool(BaseTool):
    """Keeps the best score of each trajectory; `create_kwargs` holds its `ground_truth`."""

    def __init__(
        self, config: Mapping[str, Any] | None = None, tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(config or {}, tool_schema)
        self._truths: dict[str, str] = {}
        self._scores: dict[str, float] = {}

    async def create(
        self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """Begin. ground_truth: the right answer, a text or a number.

        Raises:
            ValueError: there is none.
        """
        if ground_truth is None:
            raise ValueError(
                f"{self.name} needs the right answer: give the data set's rows "
                f'tools_kwargs: {{"{self.name}": {{"create_kwargs": {{"ground_truth": …}}}}}}'
            )
        made, said = await super().create(instance_id)
        self._truths[made], self._scores[made] = str(ground_truth), 0.0
        return made, said

    async def execute(
        self, instance_id: str, parameters: dict[str, JSON], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, JSON]]:
        """Score an answer: 1 if it is right, else 0. The reward is 0 where that is better than before."""
        answer = parameters.get("answer")
        if answer is None:
            raise ToolError("give your answer as 'answer'")
        score = float(self.is_right(str(answer), self._truths[instance_id]))
        reward = 0.0 if score > self._scores[instance_id] else STEP_PENALTY
        self._scores[instance_id] = score
        return ToolResponse(text=f"Current parsed answer={answer} reward={score}"), reward, {"score": score}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Give the score of the last answer."""
        return self._scores[instance_id]

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Forget the trajectory."""
        self._truths.pop(instance_id, None)
        self._scores.pop(instance_id, None)

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Say what the model is told."""
        name, form = self.told()
        return OpenAIFunctionToolSchema.model_validate(
            {
                "function": {
                    "name": name,
                    "description": "Check an answer to the problem. Call it again with a better one.",
                    "parameters": {
                        "type": "object",
                        "properties": {"answer": {"type": "string", "description": form}},
                        "required": ["answer"],
                    },
                }
            }
        )

    @abstractmethod
    def told(self) -> tuple[str, str]:
        """Give the name of the tool, and the form that answers have."""

    @abstractmethod
    def is_right(self, answer: str, truth: str) -> bool:
        """Compare."""


class Gsm8kTool(_AnswerTool):
    """`calc_gsm8k_reward`: compares numbers, however they are written; for `LifecycleTool`."""

    def told(self) -> tuple[str, str]:
        """Give the name of the tool, and the form that answers have."""
        return "calc_gsm8k_reward", "The answer: a number, behind '#### ' or alone."

    def is_right(self, answer: str, truth: str) -> bool:
        """Compare the numbers."""
        return same_number(answer, truth)


class Geo3kTool(_AnswerTool):
    r"""`calc_geo3k_reward`: compares what stands in `\boxed{…}`; for `LifecycleTool`."""

    def told(self) -> tuple[str, str]:
        """Give the name of the tool, and the form that answers have."""
        return "calc_geo3k_reward", "The answer, in \\boxed{} or alone."

    def is_right(self, answer: str, truth: str) -> bool:
        """Compare the mathematics."""
        return same_mathematics(answer, truth)
