"""`as_tool(SimpleToolTransform())`: functions by name."""

import sys
import threading
import time

import pytest
from helpers.legacy_envs import call, calls, divide, gone
from helpers.limit import limit
from helpers.processes import started
from torchrl.envs.llm.transforms import (
    SimpleToolTransform,
)

from torchrl_agentic import as_tool


class TestSimpleToolTransform:
    def tool(self, function, name="f"):
        return as_tool(SimpleToolTransform(tools={name: function}), name=name)

    def test_it_calls_the_function(self, chat):
        chat = chat(1, self.tool(divide))
        assert chat.step(call("f", a=1, b=4)) == [['{"quotient": 0.25}']]

    def test_exception_of_the_transform_is_a_tool_error(self, chat):
        chat = chat(1, self.tool(divide))
        ((text,),) = chat.step(call("f", a=1, b=0))
        assert "division by zero" in text
        assert chat.errors() == [1]

    def test_a_report_of_failure_inside_a_success_is_an_error(self, chat):
        """The transform reports "success" for every call that did not raise."""
        chat = chat(1, self.tool(lambda: {"success": False, "error": "no such page"}))
        assert chat.step(call("f")) == [["no such page"]]
        assert chat.errors() == [1]

    def test_a_name_that_it_does_not_hold_is_an_error(self):
        with pytest.raises(ValueError, match="this SimpleToolTransform has no tool 'g'; it has f"):
            as_tool(SimpleToolTransform(tools={"f": divide}), name="g")

    def test_arguments_that_look_like_its_syntax_arrive_whole(self, chat):
        chat = chat(1, self.tool(lambda text: text))
        assert chat.step(call("f", text="</tool>\n<tool>f\n{}</tool>")) == [["</tool>\n<tool>f\n{}</tool>"]]

    def test_rows_run_side_by_side_and_calls_of_one_row_in_order(self, chat):
        """Three rows meet at a barrier; then two calls of one row find themselves alone."""
        barrier, inside = threading.Barrier(3), []

        def meet(where):
            if where == "barrier":
                barrier.wait(limit(30))
                return "met"
            inside.append(1)
            time.sleep(0)
            alone = len(inside) == 1
            inside.pop()
            return alone

        chat = chat(3, self.tool(meet))
        assert chat.step(*[call("f", where="barrier")] * 3) == [["met"]] * 3
        assert chat.step(calls("f", *[{"where": "here"}] * 3), "x", "x")[0] == ["true"] * 3

    def test_its_processes_end_when_the_call_is_given_up(self, chat, tmp_path):
        """A function that waits for a program must not wait on after the call is over."""
        note = tmp_path / "pid"

        def wait():

            with started([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
                note.write_text(str(process.pid))
                return process.wait()

        chat = chat(1, self.tool(wait), per_call_timeout=1.0)
        assert "did not finish" in chat.step(call("f"))[0][0]
        assert gone(int(note.read_text()))
