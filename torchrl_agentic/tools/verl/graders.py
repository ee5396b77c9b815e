"""Tools that compare an answer with the right one: `Gsm8kTool` for numbers, `Geo3kTool` for mathematics."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, ClassVar

from torchrl_agentic.errors import ToolError
from torchrl_agentic.messages import JSON
from torchrl_agentic.tools.verl.base_tool import BaseTool, OpenAIFunctionToolSchema, ToolResponse

STEP_PENALTY = -0.05
"""Reward of a call whose answer does not score higher than the one before."""
# A sign counts only where no digit or letter precedes it: in "3-4" it is a minus between two numbers.
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:,\d{3})*(?:\.\d+)?(?:[eE][+-]?\d+)?|\d+(?:\.\d+)?")


def numbers(text: str) -> list[Decimal]:
    """Return the numbers in a text, in order; commas may separate thousands. NaN: a number out of range."""
    return [_decimal(found.replace(",", "")) for found in _NUMBER.findall(text.replace("−", "-"))]


def _decimal(text: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation:
        return Decimal("NaN")


def same_number(answer: str, truth: str) -> bool:
    """Return whether the last numbers of two texts are equal, as in `#### 1,000.0` and `1000`.

    In a text with `####`, only the part after the last `####` counts.

    Args:
        answer: Answer of the model.
        truth: The right answer.
    """
    found, wanted = (numbers(text.rpartition("####")[2])[-1:] for text in (answer, truth))
    return bool(wanted) and found == wanted


def same_mathematics(answer: str, truth: str) -> bool:
    r"""Return whether two texts have the same number or expression in their last `\boxed{…}`.

    Args:
        answer: Answer of the model; all of it counts if it has no `\boxed{…}`.
        truth: The right answer, likewise.
    """
    found, wanted = boxed(answer), boxed(truth)
    found, wanted = _plain(found), _plain(wanted)
    if found == wanted:
        return bool(wanted)
    numbers = [_as_number(text) for text in (found, wanted)]
    return numbers[0] is not None and numbers[0] == numbers[1]


def boxed(text: str) -> str:
    r"""Return the content of the last `\boxed{…}` of a text, or the text if there is none."""
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
        value = Decimal(numerator) / Decimal(denominator) if slash else Decimal(numerator)
        return value if value.is_finite() else None
    except ArithmeticError:
        return None


class _AnswerTool(BaseTool):
    """Keeps the last score of each trajectory; its `create_kwargs` have the `ground_truth`.

    Attributes:
        function_name: Name of the tool for the model.
        form: Description of an answer for the model.
    """

    function_name: ClassVar[str]
    form: ClassVar[str]

    @staticmethod
    @abstractmethod
    def is_right(answer: str, truth: str) -> bool:
        """Return whether an answer equals the right one."""

    def __init__(
        self, config: Mapping[str, Any] | None = None, tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(config or {}, tool_schema)
        self._truths: dict[str, str] = {}
        self._scores: dict[str, float] = {}

    async def create(
        self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """Start an instance with the right answer.

        Args:
            instance_id: Id of the instance; None: a new one.
            ground_truth: The right answer, a text or a number.
            kwargs: Other arguments of the row, which are ignored.

        Raises:
            ValueError: If there is no right answer.
        """
        if ground_truth is None or not str(ground_truth).strip():
            raise ValueError(
                f"{self.name} needs the right answer: add to the data set's rows "
                f'tools_kwargs: {{"{self.name}": {{"create_kwargs": {{"ground_truth": …}}}}}}'
            )
        made, said = await super().create(instance_id)
        self._truths[made], self._scores[made] = str(ground_truth), 0.0
        return made, said

    async def execute(
        self, instance_id: str, parameters: dict[str, JSON], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, JSON]]:
        """Score an answer: 1 if it is right, else 0. The reward is 0 if the score is higher than before."""
        answer = parameters.get("answer")
        if answer is None:
            raise ToolError("pass your answer as the argument 'answer'")
        score = float(self.is_right(str(answer), self._truths[instance_id]))
        reward = 0.0 if score > self._scores[instance_id] else STEP_PENALTY
        self._scores[instance_id] = score
        return ToolResponse(text=f"Current parsed answer={answer} reward={score}"), reward, {"score": score}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Return the score of the last answer."""
        return self._scores[instance_id]

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Remove the instance."""
        self._truths.pop(instance_id, None)
        self._scores.pop(instance_id, None)

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Return the schema that the model reads."""
        return OpenAIFunctionToolSchema.model_validate(
            {
                "function": {
                    "name": self.function_name,
                    "description": "Check an answer to the problem. If it is wrong, check a better one.",
                    "parameters": {
                        "type": "object",
                        "properties": {"answer": {"type": "string", "description": self.form}},
                        "required": ["answer"],
                    },
                }
            }
        )


class Gsm8kTool(_AnswerTool):
    """`calc_gsm8k_reward`: compares numbers in any notation; for `LifecycleTool`."""

    function_name = "calc_gsm8k_reward"
    form = "The answer: a number, alone or after '#### '."
    is_right = staticmethod(same_number)


class Geo3kTool(_AnswerTool):
    r"""`calc_geo3k_reward`: compares the content of `\boxed{…}`; for `LifecycleTool`."""

    function_name = "calc_geo3k_reward"
    form = "The answer, alone or in \\boxed{}."
    is_right = staticmethod(same_mathematics)
