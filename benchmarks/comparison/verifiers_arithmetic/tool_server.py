"""The tool, as a server of the Model Context Protocol, which verifiers starts for each conversation."""

import verifiers.v1 as vf
from arithmetic_task import python


class PythonToolset(vf.Toolset[vf.ToolsetConfig]):
    """The tool of the task."""

    TOOL_PREFIX = None

    @vf.tool(name="python")
    async def run_python(self, code: str) -> str:
        """Run Python code. Variables stay from call to call. Print what you want to see."""
        return await python(code)


if __name__ == "__main__":
    PythonToolset.run()
