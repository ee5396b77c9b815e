"""`as_tool(ExecuteToolsInOrder())`: the services of a registry."""

import torch
from helpers.legacy_envs import call
from torchrl.envs.llm.transforms import (
    ExecuteToolsInOrder,
    ToolRegistry,
    XMLBlockParser,
)

from torchrl_agentic import StopTool, as_tool


class Search:
    name = "search"
    schema_in, schema_out = {"query": str}, {"results": list}

    def __init__(self):
        self.states = []

    def __call__(self, query, _state=None, **kwargs):
        self.states.append(_state)
        if query == "nothing":
            return {"error": "not found"}
        if query == "raise":
            raise ValueError("a bug")
        return {"results": [query, 1, None]}


class TestExecuteToolsInOrder:
    def make(self, service, **options):
        return ExecuteToolsInOrder(ToolRegistry([service]), XMLBlockParser(), **options)

    def test_the_service_answers_with_json(self, chat):
        chat = chat(1, as_tool(self.make(Search()), name="search"))
        assert chat.step(call("search", query="x")) == [['{"results": ["x", 1, null]}']]

    def test_an_error_in_its_answer_is_an_error(self, chat):
        chat = chat(1, as_tool(self.make(Search()), name="search"))
        chat.step(call("search", query="nothing"))
        assert chat.errors() == [1]

    def test_exception_of_the_transform_affects_only_its_row(self, chat, caplog):
        chat = chat(2, as_tool(self.make(Search()), name="search"))
        found = chat.step(call("search", query="raise"), call("search", query="x"))
        assert chat.errors() == [1, 0]
        assert found[1] == ['{"results": ["x", 1, null]}']

    def test_response_that_is_not_json_does_not_fail_the_batch(self, chat, caplog):
        """The released transform loses all rows to it."""

        class Odd(Search):
            def __call__(self, **kwargs):
                return {"x": object()}

        chat = chat(2, as_tool(self.make(Odd()), name="search"), StopTool())
        found = chat.step(call("search", query="x"), call("stop"))
        assert "<object object>" in found[0][0]
        assert chat.errors() == [0, 0]
        assert found[1] == ["[stop] done"]

    def test_a_service_that_is_not_registered_is_an_error_that_says_so(self, chat):
        chat = chat(1, as_tool(self.make(Search()), name="serch"))
        assert "no service named 'serch'" in chat.step(call("serch", query="x"))[0][0]

    def test_it_gets_the_state_of_its_row_where_it_is_asked_for(self, chat):
        search = Search()
        chat = chat(2, as_tool(self.make(search), name="search", wants_state=True), pass_state_to_tools=True)
        chat.td["level"] = torch.tensor([[1], [2]])
        chat.step(*[call("search", query="x")] * 2)
        assert sorted(state["level"].item() for state in search.states) == [1, 2]
        assert all("history" not in set(state.keys()) for state in search.states)

    def test_without_state_it_gets_an_empty_one_as_before(self, chat):
        search = Search()
        chat = chat(1, as_tool(self.make(search), name="search"))
        chat.step(call("search", query="x"))
        assert search.states == [{}]

    def test_a_transform_that_passes_no_state_passes_none(self, chat):
        class Plain(Search):
            def __call__(self, query):
                return {"results": query}

        chat = chat(1, as_tool(self.make(Plain(), pass_state_to_tools=False), name="search"))
        assert chat.step(call("search", query="x")) == [['{"results": "x"}']]
