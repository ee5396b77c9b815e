"""Promises of `as_tool` for every transform: row state, concurrency and errors."""

import asyncio
import json
import pickle
import threading
import time
import warnings

import pytest
import torch
from helpers.legacy_envs import LegacyEnv, call, calls, divide, run
from helpers.limit import limit
from tensordict import TensorDict
from torchrl.envs import Compose, TransformedEnv
from torchrl.envs.llm import ChatEnv
from torchrl.envs.llm.transforms import (
    BrowserTransform,
    ExecuteToolsInOrder,
    PythonInterpreter,
    SimpleToolTransform,
    ToolRegistry,
    XMLBlockParser,
)

from torchrl_agentic import ToolCompose, as_tool
from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.messages import Status


def interpreter(**options):
    return PythonInterpreter(persistent=True, **options)


class TestRows:
    def test_interpreters_of_two_rows_run_at_once(self, chat, tmp_path):
        """Each writes a file and waits for the other's: one after the other, neither would return."""
        chat = chat(2, as_tool(interpreter(timeout=60), name="python"))
        chat.step(*[call("python", code="pass")] * 2)
        code = (
            "import os, time\nopen({!r}, 'w').close()\nwhile not os.path.exists({!r}):\n  time.sleep(0.01)\n"
        )
        mine, yours = str(tmp_path / "a"), str(tmp_path / "b")
        chat.step(
            call("python", code=code.format(mine, yours)), call("python", code=code.format(yours, mine))
        )
        assert chat.errors() == [0, 0]

    def test_a_full_batch_starts_its_interpreters_at_once(self, monkeypatch):
        """Each waits for the other before it starts; TorchRL makes them one after the other."""
        from torchrl.envs.llm.transforms import tools

        meeting, start = threading.Barrier(2), tools.PersistentPythonProcess._start_process

        def together(self):
            meeting.wait(limit(30))
            start(self)

        monkeypatch.setattr(tools.PersistentPythonProcess, "_start_process", together)
        chat = LegacyEnv(2, as_tool(interpreter(), name="python"))
        chat.step(*[call("python", code="pass")] * 2)
        assert chat.errors() == [0, 0]
        chat.compose.close()

    def test_two_tools_of_one_transform_share_row_state_and_do_not_overlap(self, chat):
        transform = interpreter()
        chat = chat(2, as_tool(transform, name="python"), as_tool(transform, name="py"))
        both = [
            {"name": name, "arguments": {"code": code}}
            for name, code in (("python", "x = 1"), ("py", "x += 1"), ("python", "print(x)"))
        ]
        from torchrl_agentic import Message

        message = Message("assistant", None, tool_calls=both)
        assert chat.step(message, message) == [["", "", "2"]] * 2

    def test_two_tools_of_one_transform_are_closed_once(self, chat):
        class Closing(SimpleToolTransform):
            closed = 0

            def close(self):
                self.closed += 1

        transform = Closing(tools={"f": divide, "g": divide})
        chat = chat(1, as_tool(transform, name="f"), as_tool(transform, name="g"))
        chat.compose.close()
        assert transform.closed == 1

    def test_a_call_that_is_given_up_ends_nothing_of_other_tools(self, chat):
        """One thread runs all: it has started the interpreter too, which is not the hanging call's."""
        simple = SimpleToolTransform(tools={"hang": lambda: time.sleep(600)})
        chat = chat(
            1,
            as_tool(interpreter(), name="python"),
            as_tool(simple, name="hang"),
            per_call_timeout=1.5,
            max_threads=1,
        )
        chat.step(call("python", code="x = 1"))
        assert "did not finish" in chat.step(call("hang"))[0][0]
        assert chat.step(call("python", code="print(x)")) == [["1"]]

    def test_processes_started_by_a_program_end_with_it(self, chat, tmp_path):
        from helpers.legacy_envs import gone

        note = tmp_path / "pid"
        chat = chat(1, as_tool(PythonInterpreter(timeout=60), name="python"), per_call_timeout=3)
        code = (
            "import subprocess, sys\n"
            "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
            f"open({str(note)!r}, 'w').write(str(child.pid))\nchild.wait()"
        )
        chat.step(call("python", code=code))
        assert gone(int(note.read_text()))

    def test_exited_interpreter_is_replaced_and_reported_to_the_model(self, chat):
        chat = chat(2, as_tool(interpreter(), name="python"))
        chat.step(call("python", code="x = 1"), call("python", code="x = 2"))
        assert "terminated" in chat.step(call("python", code="import sys; sys.exit()"), "x")[0][0]
        first, second = chat.step(call("python", code="print(3)"), call("python", code="print(x)"))
        assert first[0].endswith("all variables from before are lost.\n3")
        assert second == ["2"]

    def test_rows_of_a_grid_are_reset_by_their_mask(self):
        compose = ToolCompose([as_tool(interpreter(), name="python")])
        env = TransformedEnv(ChatEnv(batch_size=(2, 2)), compose)
        td = env.reset(TensorDict({"query": [["a", "b"], ["c", "d"]]}, batch_size=(2, 2)))
        tool = compose["python"]

        async def everywhere(code):
            from torchrl_agentic import ToolContext

            contexts = [ToolContext(call_id="c", batch_index=row) for row in range(4)]
            return [(await tool.run({"code": code}, ctx)).text for ctx in contexts]

        asyncio.run(everywhere("x = 1"))
        td["_reset"] = torch.tensor([[[False], [True]], [[False], [False]]])
        env.reset(td)
        # TorchRL's interpreter may answer before it has read the error of the row without x.
        assert [text == "1" for text in asyncio.run(everywhere("print(x)"))] == [True, False, True, True]
        compose.close()


class TestOwnership:
    def test_a_transform_in_an_environment_is_refused(self):
        transform = interpreter()
        env = TransformedEnv(ChatEnv(batch_size=(1,)), transform)
        with pytest.raises(ValueError, match="part of an environment"):
            as_tool(transform, name="python")
        env.close()

    def test_so_is_one_in_a_compose_of_an_environment(self):
        transform = SimpleToolTransform(tools={"f": divide})
        env = TransformedEnv(ChatEnv(batch_size=(1,)), Compose(transform))
        with pytest.raises(ValueError, match="part of an environment"):
            as_tool(transform, name="f")
        env.close()

    def test_transform_that_joined_an_environment_later_is_rejected(self):
        transform = SimpleToolTransform(tools={"f": divide})
        tool = as_tool(transform, name="f")
        env = TransformedEnv(ChatEnv(batch_size=(1,)), transform)
        with pytest.raises(ValueError, match="part of an environment"):
            ToolCompose([tool])
        env.close()

    def test_two_environments_do_not_see_each_other_s_variables(self, chat):
        """Row 0 of both would be one interpreter."""
        transform = interpreter()
        first = chat(1, as_tool(transform, name="python"))
        second = chat(1, as_tool(transform, name="python"))
        first.step(call("python", code="secret = 7"))
        ((text,),) = second.step(call("python", code="print(secret)"))
        assert "in use by another environment" in text
        assert first.step(call("python", code="print(secret)")) == [["7"]]

    def test_nor_does_one_reset_the_other_s(self, chat):
        transform = interpreter()
        first = chat(1, as_tool(transform, name="python"))
        second = chat(1, as_tool(transform, name="python"))
        first.step(call("python", code="secret = 7"))
        with pytest.raises(RuntimeError, match="in use by another environment"):
            second.reset(True)
        assert first.step(call("python", code="print(secret)")) == [["7"]]

    def test_the_next_trajectory_of_a_row_takes_it_over(self, chat):
        chat = chat(1, as_tool(interpreter(), name="python"))
        for _ in range(2):
            assert chat.step(call("python", code="print('x' in dir())")) == [["False"]]
            chat.step(call("python", code="x = 1"))
            chat.reset(True)

    def test_a_row_that_keeps_something_cannot_be_branched(self, chat):
        chat = chat(2, as_tool(interpreter(), name="python"))
        chat.step(call("python", code="x = 1"), "x")
        with pytest.raises(TypeError, match="cannot copy a row"):
            chat.compose.branch(0, [1])

    @pytest.mark.parametrize("persistent", [False])
    def test_stateless_interpreter_can_be_branched(self, chat, persistent):
        chat = chat(2, as_tool(PythonInterpreter(persistent=persistent), name="python"))
        chat.step(call("python", code="x = 1"), "x")
        chat.compose.branch(0, [1])
        assert chat.step(*[call("python", code="print(1)")] * 2) == [["1"], ["1"]]

    def test_tools_of_one_transform_still_share_it_after_pickling(self):
        transform = SimpleToolTransform(tools={"f": divide, "g": divide})
        one, two = pickle.loads(pickle.dumps([as_tool(transform, name="f"), as_tool(transform, name="g")]))
        assert one.layer is two.layer
        assert one.effects.writes & two.effects.writes


class TestResults:
    def test_output_that_mentions_a_timeout_is_not_a_timeout(self):
        tool = as_tool(PythonInterpreter(), name="python")
        assert run(tool, {"code": "raise TimeoutError('timed out')"}).status is Status.ERROR

    def test_nor_is_an_error_of_a_function_that_does(self):
        simple = SimpleToolTransform(tools={"f": lambda: {"success": False, "error": "the host timed out"}})
        assert run(as_tool(simple, name="f"), {}).status is Status.ERROR

    def test_a_tuple_is_a_list_and_no_reward(self):
        """For tools of today the second item is a reward; functions of old know of none."""
        result = run(as_tool(SimpleToolTransform(tools={"f": lambda: (1, 2)}), name="f"), {})
        assert (result.text, result.reward) == ("[1, 2]", None)

    def test_response_that_is_not_json_is_shown_as_text(self):
        class Odd:
            def __str__(self):
                return "an odd thing"

        assert run(as_tool(SimpleToolTransform(tools={"f": Odd}), name="f"), {}).text == "an odd thing"


class Service:
    name = "sum"
    schema_in, schema_out = {"a": int, "b": float, "c": list, "d": object}, {"result": float}

    def __call__(self, a=0, b=0.0):
        """It takes no `**kwargs`, so that the old transform fails: it passes `_state` in any case."""
        if a < 0:
            raise ValueError("a is negative")
        return [a + b]


def services(*given, **options):
    return ExecuteToolsInOrder(ToolRegistry(given or [Service()]), XMLBlockParser(), **options)


class TestServices:
    def test_function_without_kwargs_works_and_may_return_a_list(self, chat):
        chat = chat(1, as_tool(services(), name="sum"))
        assert chat.step(call("sum", a=1, b=2)) == [["[3]"]]

    def test_exception_text_is_shown_to_the_model(self, chat, caplog):
        chat = chat(1, as_tool(services(), name="sum"))
        assert chat.step(call("sum", a=-1)) == [["Error: sum failed: a is negative"]]
        assert "service sum raised" in caplog.text

    def test_after_an_error_the_others_of_its_message_are_not_run_if_so_wanted(self, chat, caplog):
        chat = chat(2, as_tool(services(stop_on_error=True), name="sum"))
        found = chat.step(calls("sum", {"a": 1}, {"a": -1}, {"a": 2}), calls("sum", {"a": 3}))
        assert [text[:7] for text in found[0]] == ["[1.0]", "Error: ", "not run"]
        assert found[1] == ["[3.0]"]
        assert chat.step(call("sum", a=4), "x")[0] == ["[4.0]"]

    def test_otherwise_they_are(self, chat, caplog):
        chat = chat(1, as_tool(services(), name="sum"))
        assert chat.step(calls("sum", {"a": -1}, {"a": 2}))[0][1] == "[2.0]"


class TestOffers:
    def test_schema_in_is_shown_to_the_model_without_required_arguments(self):
        properties = as_tool(services(), name="sum").input_schema["properties"]
        assert properties == {
            "a": {"type": "integer"},
            "b": {"type": "number"},
            "c": {"type": "array"},
            "d": {},
        }
        assert "required" not in as_tool(services(), name="sum").input_schema

    def test_types_may_be_named(self):
        class Named(Service):
            schema_in = {"a": "int", "b": "number", "c": "Odd"}  # noqa: RUF012

        properties = as_tool(services(Named()), name="sum").input_schema["properties"]
        assert properties == {"a": {"type": "integer"}, "b": {"type": "number"}, "c": {}}

    def test_a_schema_of_its_own_making_is_kept(self):
        class Modern(Service):
            schema_in = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}  # noqa: RUF012
            description = "Adds."

        tool = as_tool(services(Modern()), name="sum")
        assert (tool.description, tool.input_schema["required"]) == ("Adds.", ["a"])

    def test_tool_schemas_are_used_which_torchrl_only_keeps(self):
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        for form in (
            {"description": "D.", "parameters": schema},
            {"type": "function", "function": {"description": "D.", "parameters": schema}},
            {"description": "D.", **schema},
        ):
            tool = as_tool(SimpleToolTransform(tools={"f": divide}, tool_schemas={"f": form}), name="f")
            assert tool.description == "D."
            assert tool.input_schema["properties"] == schema["properties"]

    def test_without_them_the_signature_of_the_function_is_read(self):
        tool = as_tool(SimpleToolTransform(tools={"f": divide}), name="f")
        assert (tool.description, tool.input_schema["required"]) == ("Divide a by b.", ["a", "b"])

    def test_given_options_take_precedence(self):
        schema = {"type": "object", "properties": {"x": {}}}
        tool = as_tool(BrowserTransform(), name="browser", description="Look.", input_schema=schema)
        assert (tool.description, tool.input_schema) == ("Look.", schema)


class TestTags:
    """TorchRL writes `[tag: A]` into its answer; here the tag is the id of the call."""

    def test_the_tag_of_an_xml_call_is_the_id_of_its_result(self, chat):
        chat = chat(1, as_tool(services(), name="sum"), parser="xml")
        said = '<tool name="sum" tag="A">{"a": 1}</tool> and <tool tag="B" name="sum">{"a": 2}</tool>'
        assert chat.step(said) == [
            ['<tool_result call_id="A">[1.0]</tool_result>', '<tool_result call_id="B">[2.0]</tool_result>']
        ]

    def test_so_is_that_of_a_json_call(self, chat):
        chat = chat(1, as_tool(services(), name="sum"), parser="json")
        said = json.dumps({"message": "", "tools": [{"tool": "sum", "args": {"a": 1}, "tag": "A"}]})
        assert json.loads(chat.step(said)[0][0]) == {"id": "A", "is_error": False, "output": "[1.0]"}

    def test_a_transform_of_one_s_own_reads_the_tag(self, chat):
        class Own:
            def _process_batch_item(self, content, index):
                return [XMLBlockParser()(content)["calls"][0].tag]

        chat = chat(1, as_tool(Own(), name="own"), parser="xml")
        assert chat.step('<tool name="own" tag="A">{}</tool>') == [
            ['<tool_result call_id="A">A</tool_result>']
        ]


def test_a_role_of_its_own_is_not_lost_in_silence():
    with pytest.warns(UserWarning, match="tool_role='observer'"):
        as_tool(PythonInterpreter(tool_name="observer"), name="python")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        as_tool(PythonInterpreter(), name="python")


def test_a_class_in_place_of_an_object_is_refused():
    with pytest.raises(TypeError, match=r"write PythonInterpreter\(\.\.\.\)"):
        as_tool(PythonInterpreter, name="python")


def test_missing_browser_raises_when_called_directly(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "playwright.async_api", None)
    tool = as_tool(BrowserTransform(), name="browser")
    with pytest.raises(InfrastructureError, match="pip install playwright"):
        run(tool, {"action": "navigate", "url": "http://127.0.0.1:9"})
    asyncio.run(tool.teardown())
