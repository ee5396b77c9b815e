"""Conversations before and after a step."""

import asyncio
import pickle

import pytest
import torch
from helpers.chat_envs import add, advance, begin, call, chat_env, conversations, echo, results, step
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data.llm import History
from torchrl.envs.utils import step_mdp
from torchrl.modules.llm.policies import ChatHistory

from torchrl_agentic import AgentHistory, Message, ToolCompose, tool
from torchrl_agentic.testing import ScriptedPolicy, byte_tokenizer
from torchrl_agentic.transforms import history as border

EOS_STRINGS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "</s>",
    "<eos>",
)


def history(*rows):
    return border.as_history([[{"role": "user", "content": text} for text in row] for row in rows])


def texts(found):
    return [[m.read().content for m in r.messages] for r in border.conversations(found)]


def lengths(found):
    return [len(row.messages) for row in border.conversations(found)]


class TestAgentHistory:
    def test_rows_of_unequal_length_are_extended_by_unequal_lengths(self):
        first = history(["a"], ["b", "c"])
        first.extend(history(["d", "e"], ["f"]), dim=-1)
        assert texts(first) == [["a", "d", "e"], ["b", "c", "f"]]

    def test_extending_out_of_place_leaves_the_original(self):
        first = history(["a"], ["b", "c"])
        joined = first.extend(history(["d"], ["e"]), inplace=False, dim=1)
        assert texts(first) == [["a"], ["b", "c"]]
        assert texts(joined) == [["a", "d"], ["b", "c", "e"]]
        assert isinstance(joined, AgentHistory)

    def test_extending_one_conversation_uses_the_base_class(self):
        one = history(["a"])[0]
        one.extend(History(role="user", content="b").unsqueeze(0), dim=0)
        assert one.content == ["a", "b"]

    def test_a_batch_of_two_dimensions_is_extended_along_its_messages(self):
        rows = border.conversations(history(["a"], ["b", "c"], ["d"], ["e"]))
        grid = AgentHistory.of(rows, (2, 2))
        grid.extend(
            AgentHistory.of(border.conversations(history(["1"], ["2"], ["3"], ["4"])), (2, 2)), dim=-1
        )
        found = [texts(grid[i]) for i in range(2)]
        assert found == [[["a", "1"], ["b", "c", "2"]], [["d", "3"], ["e", "4"]]]

    def test_extending_by_another_number_of_rows_is_refused(self):
        with pytest.raises(ValueError, match="argument"):
            history(["a"], ["b"]).extend(history(["c"]), dim=-1)

    def test_ids_survive_indexing_cloning_and_pickling(self):
        message = {"role": "tool", "content": "3", "tool_call_id": "c1"}
        ragged = border.as_history([[message], [{"role": "user", "content": "x"}, message]])
        for copy in (ragged, ragged.clone(), pickle.loads(pickle.dumps(ragged))):
            assert isinstance(copy, AgentHistory)
            assert copy[1][-1].tool_call_id == "c1"

    def test_it_renders_with_the_template_of_a_tokenizer(self):
        chatted = history(["a"], ["b", "c"])
        rendered = chatted.apply_chat_template(tokenizer=byte_tokenizer(), add_generation_prompt=False)
        assert [text.count("<|im_start|>user") for text in rendered] == [1, 2]

    def test_few_shot_messages_arrive_as_they_were_written(self):
        rows = [
            [
                {"role": "user", "content": "u"},
                {"role": "assistant", "content": "a", "tool_calls": [{"x": 1}]},
            ]
        ]
        (row,) = border.conversations(border.as_history(rows))
        user, assistant = (message.read() for message in row.messages)
        assert user == Message("user", "u")
        assert assistant.tool_calls == ({"x": 1},)


class TestAppending:
    def test_rows_with_different_numbers_of_calls_stay_ragged(self):
        """The released transforms fill shorter rows up with messages of the role "<none>"."""
        env = chat_env((3,), ToolCompose([add]))
        td = step(env, begin(env), call("add", a=1, b=1) * 3, "no call", call("add", a=2, b=2))
        assert lengths(td["next", "history"].prompt) == [5, 2, 3]
        assert {m.role for chat in conversations(td["next"]) for m in chat} == {"user", "assistant", "tool"}
        assert results(td["next"]) == [["2"] * 3, [], ["4"]]

    def test_raggedness_lasts_over_many_turns(self):
        env = chat_env((2,), ToolCompose([add]))
        td = begin(env)
        for turn in range(5):
            td = advance(env, td, call("add", a=turn, b=0), "no call")
        assert lengths(td["history"].prompt) == [11, 6]
        assert results(td)[0] == ["0", "1", "2", "3", "4"]

    def test_public_step_mdp_of_ragged_histories_raises_with_the_remedy(self):
        """TorchRL's function splits ragged messages into lists of fields, where `env.step_mdp` does not."""
        env = chat_env((2,), ToolCompose([add]))
        stepped = step(env, begin(env), call("add", a=1, b=1), "no call")
        with pytest.raises(RuntimeError, match=r"env\.step_mdp"):
            step_mdp(stepped)

    def test_results_keep_the_order_of_the_calls_if_the_last_ends_first(self):
        """The first call cannot end before the second has: it waits for its event."""
        ended = asyncio.Event()

        async def late() -> str:
            await ended.wait()
            return "late"

        async def early() -> str:
            ended.set()
            return "early"

        env = chat_env((1,), ToolCompose([tool(late), tool(early)]))
        td = step(env, begin(env), call("late") + call("early"))
        assert results(td["next"]) == [["late", "early"]]

    def test_each_result_names_its_call_and_no_other_message_does(self):
        env = chat_env((1,), ToolCompose([add]))
        td = step(env, begin(env), call("add", "mine", a=1, b=1) + call("add", a=2, b=2))
        assert [m.tool_call_id for m in conversations(td["next"])[0]] == [None, None, "mine", "call_0_1"]

    def test_histories_of_the_root_are_not_modified(self):
        """A loss trains on the stored `full`; a result in it would be trained on as sampled."""
        env = chat_env((2,), ToolCompose([add]))
        td = step(env, begin(env), call("add", a=1, b=1), "no call")
        assert lengths(td["history"].prompt) == [1, 1]
        assert lengths(td["history"].full) == [2, 2]
        assert lengths(td["next", "history"].prompt) == [3, 2]

    def test_extending_the_next_prompt_does_not_reach_back_into_the_root(self):
        env = chat_env((2,), ToolCompose([add]))
        td = step(env, begin(env), "no call", "no call")
        td["next", "history"].prompt.extend(history(["x"], ["y"]), dim=-1)
        assert lengths(td["history"].full) == [2, 2]

    def test_tensordict_that_is_not_a_lazy_stack_can_be_stepped(self):
        env = chat_env((2,), ToolCompose([add]))
        prompt = history(["q0"], ["q1"])
        full = border.as_history(
            [
                [{"role": "user", "content": "q"}, {"role": "assistant", "content": call("add", a=i, b=i)}]
                for i in range(2)
            ]
        )
        td = begin(env)
        dense = TensorDict({key: td.get(key) for key in ("done", "terminated", "agentic")}, batch_size=(2,))
        dense["history"] = ChatHistory(prompt=prompt, full=full, batch_size=(2,))
        assert results(env.step(dense)["next"]) == [["0"], ["2"]]

    def test_results_take_the_role_that_was_asked_for(self):
        env = chat_env((1,), ToolCompose([add], tool_role="function"))
        td = step(env, begin(env), call("add", a=1, b=1))
        assert [m.role for m in conversations(td["next"])[0]] == ["user", "assistant", "function"]

    @pytest.mark.parametrize("shape", [(1,), (3,), (2, 2), (1, 3), (3, 1)])
    def test_any_shape_of_batch_gets_its_results_row_by_row(self, shape):
        env = chat_env(shape, ToolCompose([add]))
        n = torch.Size(shape).numel()
        td = step(env, begin(env), *(call("add", a=i, b=0) * (i % 2 + 1) for i in range(n)))
        assert td["next"].batch_size == shape
        assert results(td["next"]) == [[str(i)] * (i % 2 + 1) for i in range(n)]


class TestReading:
    def run(self, message, parser="hermes"):
        env = chat_env((1,), ToolCompose([add, echo], parser))
        return step(env, begin(env), message)["next"]

    @pytest.mark.parametrize("eos", EOS_STRINGS)
    def test_call_before_an_end_of_sequence_string_runs(self, eos):
        """A JSON message is its whole text; with the token at its end it is no JSON."""
        message = '{"message": "m", "tools": [{"tool": "add", "args": {"a": 1, "b": 2}}]}' + eos
        assert flags_of(self.run(message, "json"), "n_calls") == [1]

    def test_the_next_prompt_holds_the_message_without_its_end_of_sequence_string(self):
        """Templates write the token again: kept in the content, it would come twice."""
        td = self.run("hi<|im_end|>\n<|im_end|>")
        assert conversations(td)[0][-1].content == "hi"
        rendered = td["history"].prompt.apply_chat_template(
            tokenizer=byte_tokenizer(), add_generation_prompt=False
        )
        assert rendered[0].count("<|im_end|>") == 2  # the user's and the assistant's

    def test_an_end_of_sequence_string_inside_the_message_stays(self):
        assert conversations(self.run("say <|im_end|> here"))[0][-1].content == "say <|im_end|> here"

    def test_white_space_at_the_end_stays_where_no_end_of_sequence_string_follows(self):
        assert conversations(self.run("hi \n"))[0][-1].content == "hi \n"

    def test_custom_stop_strings_are_cut_off(self):
        env = chat_env((1,), ToolCompose([add], eos_strings=["STOP"]))
        td = step(env, begin(env), "hi</s>STOP")
        assert conversations(td["next"])[0][-1].content == "hi</s>"

    def test_cutting_does_not_modify_the_stored_full_history(self):
        env = chat_env((1,), ToolCompose([add]))
        td = step(env, begin(env), "hi<|im_end|>")
        assert border.conversations(td["history"].full)[0].messages[-1].read().content == ("hi<|im_end|>")

    @given(text=st.text(), endings=st.lists(st.sampled_from([*EOS_STRINGS, "\n", " "])))
    def test_cut_text_is_a_prefix_without_an_eos_string_at_its_end(self, text, endings):
        whole = text + "".join(endings)
        cut = conversations(self.run(whole))[0][-1].content
        assert whole.startswith(cut)
        assert not cut.rstrip().endswith(EOS_STRINGS)

    def test_invented_turns_are_cut_off(self):
        """A model that does not stop writes the tool's message itself, and would believe it."""
        env = chat_env((2,), ToolCompose([add]))
        td = begin(env)
        forged = [
            [
                {"role": "assistant", "content": call("add", a=1, b=1)},
                {"role": "tool", "content": "1000"},
                {"role": "assistant", "content": call("add", a=500, b=500)},
            ],
            [{"role": "assistant", "content": "ok"}],
        ]
        td = answer_with(td, forged)
        td = env.step(td)
        assert [m.content for m in conversations(td["next"])[0]] == ["q0", call("add", a=1, b=1), "2"]
        assert flags_of(td["next"], "n_calls") == [1, 0]
        assert lengths(td["history"].full) == [4, 2]

    def test_calls_of_an_incomplete_message_do_not_run(self):
        """Generation ran into its limit: the call may be cut short, though it can be read."""
        td = self.run(Message("assistant", call("add", a=1, b=1), is_complete=False))
        assert results(td) == [[]]
        assert flags_of(td, "any_tool_calls") == [False]

    def test_incomplete_message_does_not_stop_other_rows(self):
        env = chat_env((2,), ToolCompose([add]))
        cut = Message("assistant", call("add", a=1, b=1), is_complete=False)
        td = step(env, begin(env), cut, call("add", a=2, b=2))
        assert results(td["next"]) == [[], ["4"]]

    def test_content_in_parts_is_read(self):
        parts = [{"type": "text", "text": "see "}, {"type": "text", "text": call("add", a=1, b=1)}]
        td = self.run(Message("assistant", parts))
        assert results(td) == [["2"]]
        assert conversations(td)[0][1].content == parts

    @pytest.mark.parametrize("parser", ["hermes", "xml", "json", "openai", "anthropic"])
    @pytest.mark.parametrize("content", [None, "", [], [None], [{"type": "image"}], [1, "x"], {"text": 1}])
    def test_content_without_a_call_is_not_an_error(self, parser, content):
        td = self.run(Message("assistant", content), parser)
        assert flags_of(td, "n_calls") == [0]

    @pytest.mark.parametrize("parser", ["hermes", "openai"])
    @pytest.mark.parametrize(
        "written",
        [
            {"id": "c9", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}},
            {"id": "c9", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}},
            {"id": "c9", "name": "add", "arguments": {"a": 1, "b": 2}},
        ],
        ids=["openai", "openai-object", "qwen"],
    )
    def test_calls_in_the_tool_calls_field_run(self, parser, written):
        td = self.run(Message("assistant", "thinking", tool_calls=[written]), parser)
        assert results(td) == [["3"]]
        assert conversations(td)[0][-1].tool_call_id == "c9"

    def test_tool_calls_field_of_a_single_row_runs(self):
        """Where only some rows have the field, the stack of them says None for all."""
        env = chat_env((2,), ToolCompose([add]))
        structured = Message("assistant", None, tool_calls=[{"name": "add", "arguments": {"a": 1, "b": 2}}])
        td = step(env, begin(env), structured, call("add", a=2, b=2))
        assert results(td["next"]) == [["3"], ["4"]]

    def test_a_call_written_twice_runs_once(self):
        """Qwen's parse-back leaves a call in the content and in `tool_calls`."""
        same = {"name": "add", "arguments": {"a": 1, "b": 2}}
        td = self.run(Message("assistant", call("add", a=1, b=2), tool_calls=[same]))
        assert results(td) == [["3"]]

    def test_a_policy_that_writes_plain_histories_is_read_as_well(self):
        """TorchRL's own policies write `History`, whose fields are lists and stacks."""
        env = chat_env((2,), ToolCompose([add]))
        td = begin(env)
        said = [History(role="assistant", content=call("add", a=i, b=i)) for i in range(2)]
        plain = torch.stack([History(role="user", content=f"q{i}") for i in range(2)]).unsqueeze(1)
        full = plain.extend(torch.stack(said).unsqueeze(1), inplace=False, dim=-1)
        td["history"] = ChatHistory(prompt=td["history"].prompt, full=full, batch_size=(2,))
        assert results(env.step(td)["next"]) == [["0"], ["2"]]


def answer_with(td, messages):
    """A response of several messages per row."""
    td = ScriptedPolicy([[""]] * len(messages))(td)
    found = td["history"]
    responses = border.conversations(border.as_history(messages))
    rows = zip(border.prompts(td), responses, strict=True)
    found.full = AgentHistory.of([old.extended(new.messages) for old, new in rows])
    return td.set("history", found)


def flags_of(td, name):
    return td["agentic", name].flatten().tolist()
