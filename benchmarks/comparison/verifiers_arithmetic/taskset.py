"""The questions, the reward, and the tool."""

import verifiers.v1 as vf
from arithmetic_task import SYSTEM, is_right, questions

from verifiers_arithmetic.tool_server import PythonToolset


class ArithmeticData(vf.TaskData):
    """A question and its answer."""

    answer: str


class ArithmeticTaskConfig(vf.TaskConfig):
    """The configuration of the tool's server."""

    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class ArithmeticTask(vf.Task[ArithmeticData, vf.State, ArithmeticTaskConfig]):
    """A question with a tool and a reward."""

    @classmethod
    def toolsets(cls, config: ArithmeticTaskConfig) -> list[vf.Toolset]:
        """Return the tools."""
        return [PythonToolset(config.tools)]

    @vf.reward(weight=1.0)
    async def reward(self, trace: vf.Trace) -> float:
        """Return 1.0 for a right answer."""
        return float(is_right(trace.last_reply, self.data.answer))


class ArithmeticConfig(vf.TasksetConfig):
    """The configuration of the tasks."""

    task: ArithmeticTaskConfig = ArithmeticTaskConfig()


class ArithmeticTaskset(vf.Taskset[ArithmeticTask, ArithmeticConfig]):
    """All questions."""

    def load(self) -> list[ArithmeticTask]:
        """Return one task per question."""
        return [
            ArithmeticTask(
                ArithmeticData(prompt=row["query"], system_prompt=SYSTEM, answer=row["answer"]),
                self.config.task,
            )
            for row in questions()
        ]
