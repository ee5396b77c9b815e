"""Contract of tensordict with our histories and tokens: what reads, copies, joins, stores and writes them."""

import copy
import inspect
import io
import pickle

import pytest
import tensordict
import torch
from helpers.ragged_batches import (
    CALL,
    history,
    owner,
    prompts,
    ragged,
    relies_on,
    texts,
    token_lengths,
    token_step,
    tokenizer,
)
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, lazy_stack
from torchrl.data.llm import History

from torchrl_agentic import AgentHistory
from torchrl_agentic.transforms import history as border
from torchrl_agentic.transforms.history import Conversation
from torchrl_agentic.transforms.token_rows import TokenRows, read_rows

LONG, SHORT = ["q0", CALL, "ok", CALL, "ok"], ["q1", "hm", "hm"]


@pytest.fixture
def batch():
    """A dense batch, [2], whose rows have five and three messages."""
    return ragged()


@pytest.fixture(scope="module")
def tokens():
    """A dense batch, [2], with tokens."""
    return token_step()["next"]


def overridden():
    """Yield the methods of our classes that replace one of tensordict."""
    kinds = {"ValueStack": LazyStackedTensorDict, "Conversation": LazyStackedTensorDict}
    for name, base in {**kinds, "TokenRows": LazyStackedTensorDict, "AgentHistory": History}.items():
        for method, ours in sorted(vars(owner(name)).items()):
            theirs = inspect.getattr_static(base, method, None)
            is_ours = inspect.isfunction(ours) and ours.__module__.startswith("torchrl_agentic")
            if is_ours and inspect.isfunction(theirs) and not method.startswith("__"):
                yield pytest.param(ours, theirs, id=f"{name}.{method}")


class TestOverrides:
    @pytest.mark.parametrize(("ours", "theirs"), list(overridden()))
    def test_an_override_takes_each_argument_of_the_method_that_it_replaces(self, ours, theirs):
        mine = inspect.signature(ours).parameters.values()
        if any(one.kind is one.VAR_KEYWORD for one in mine):
            return
        kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        wanted = {one.name for one in inspect.signature(theirs).parameters.values() if one.kind not in kinds}
        missing = wanted - {one.name for one in mine}
        assert not missing, f"tensordict {tensordict.__version__} passes {missing} to {ours.__qualname__}"

    @pytest.mark.parametrize(
        "name",
        [
            "_set_str", "_set_tuple", "_set_at_str", "_set_at_tuple", "_get_str", "_apply_nest", "_clone",
            "_select", "_exclude", "_erase_names", "_has_names", "_check_dim_name", "_set_names",
            "_propagate_lock", "_propagate_unlock", "_lock_parents_weakrefs", "_new_lazy_unsafe", "_key_list",
            "_has_exclusive_keys", "_memmap_",
        ],
    )  # fmt: skip
    def test_a_private_method_that_we_replace_exists_in_tensordict(self, name):
        """Otherwise nothing calls ours any more, and the messages are copied one by one again."""
        assert hasattr(LazyStackedTensorDict, name), f"tensordict {tensordict.__version__} has no {name}"


class TestReading:
    @relies_on("Conversation._get_str", "Conversation.__getitem__")
    @pytest.mark.parametrize(
        ("read", "expected"),
        [
            (lambda h: h.content, [["a", "b"], ["c"]]),
            (lambda h: h.role, [["user", "user"], ["user"]]),
            (lambda h: h.is_complete, [[True, True], [True]]),
            (lambda h: h[0].content, ["a", "b"]),
            (lambda h: h[-1].content, ["c"]),
            (lambda h: h[0][1].content, "b"),
            (lambda h: h[0, 1].content, "b"),
            (lambda h: h[0, -1].role, "user"),
            (lambda h: h[..., -1].content, ["b", "c"]),
            (lambda h: h[:, -1].content, ["b", "c"]),
            (lambda h: h[:, 0].role, ["user", "user"]),
            (lambda h: h[1:].content, [["c"]]),
            (lambda h: h[0][1:].content, ["b"]),
            (lambda h: h[0][..., :-1].content, ["a"]),
            (lambda h: h[0, :1].content, ["a"]),
            (lambda h: h[torch.tensor([1, 0])].content, [["c"], ["a", "b"]]),
            (lambda h: h[torch.tensor([False, True])].content, [["c"]]),
            (lambda h: h[[1]].content, [["c"]]),
            (lambda h: h[[1, 0]].content, [["c"], ["a", "b"]]),
            (lambda h: h[0][[1, 0]].content, ["b", "a"]),
            (lambda h: h[0][torch.tensor([1])].content, ["b"]),
            (lambda h: h[0][torch.tensor([True, False])].content, ["a"]),
            (lambda h: h[0][None].content, [["a", "b"]]),
            (lambda h: h.unsqueeze(0).content, [[["a", "b"], ["c"]]]),
            (lambda h: [row.content for row in h.unbind(0)], [["a", "b"], ["c"]]),
            (lambda h: [row.content for row in h], [["a", "b"], ["c"]]),
            (lambda h: len(h), 2),
            (lambda h: h.shape, (2, -1)),
            (lambda h: h[0].shape, (2,)),
            (lambda h: h[0][:0].shape, (0,)),
        ],
    )  # fmt: skip
    def test_a_history_is_indexed_as_torchrl_s(self, read, expected):
        assert read(history(["a", "b"], ["c"])) == expected

    @relies_on("Conversation.__getitem__", "AgentHistory.around")
    @pytest.mark.parametrize("index", [0, slice(0, 1), ..., [0], torch.tensor([0]), (0, 0), (..., -1)])
    def test_whatever_is_taken_from_a_history_is_of_its_class(self, index):
        assert type(history(["a", "b"], ["c"])[index]) is AgentHistory

    @relies_on("Conversation._get_str")
    def test_to_dict_and_tolist_return_plain_values(self):
        found = history(["a", "b"], ["c"])
        assert found[0, 0].to_dict()["content"] == "a"
        assert found.to_dict()["content"] == [["a", "b"], ["c"]]
        assert [message["content"] for message in found[0].tolist(tolist_first=True)] == ["a", "b"]
        assert [[one["role"] for one in row] for row in found.tolist()] == [["user", "user"], ["user"]]

    @relies_on("Conversation._get_str")
    def test_to_dict_of_a_batch_holds_the_fields(self, batch):
        found = batch.to_dict()["history"]["prompt"]
        assert found["content"] == [LONG, SHORT]

    @relies_on("Conversation.__getitem__")
    def test_a_chat_template_takes_ragged_rows(self, batch):
        rendered = batch["history"].prompt.apply_chat_template(
            tokenizer=tokenizer(), add_generation_prompt=False
        )
        assert [text.count("<|im_start|>assistant") for text in rendered] == [2, 2]

    @relies_on("Conversation._get_str")
    def test_assistant_masks_mark_what_the_assistant_said(self, batch):
        found = batch["history"].prompt.apply_chat_template(
            tokenizer=tokenizer(),
            add_generation_prompt=False,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenize=True,
            chat_template_name="qwen",
        )
        ids, mask = found[1]["input_ids"], found[1]["assistant_masks"]
        assert "hm" in tokenizer().decode(ids[mask.bool()])
        assert "q1" not in tokenizer().decode(ids[mask.bool()])

    @relies_on("ValueStack.tensordicts")
    @pytest.mark.parametrize(
        "read", [lambda td: td, lambda td: td["history"].prompt[0]], ids=["batch", "row"]
    )
    def test_it_is_printed(self, batch, read):
        assert "NonTensorStack" in repr(read(batch)) or "AgentHistory" in repr(read(batch))

    @relies_on("Conversation._apply_nest")
    def test_equal_batches_are_equal_and_others_are_not(self, batch):
        assert (batch == batch.clone()).all()
        found = history(["a"], ["b"]) == history(["a"], ["c"])
        assert found.content.tolist() == [[True], [False]]

    @relies_on("TokenRows._get_str")
    def test_tokens_are_read_padded_nested_as_lists_and_by_row(self, tokens):
        long, short = token_lengths(tokens)
        assert long > short
        key = ("tokens", "prompt")
        assert tokens.get(key, as_padded_tensor=True).shape == (2, long)
        assert [len(one) for one in tokens.get(key, as_list=True)] == [long, short]
        assert [len(one) for one in tokens.get(key, as_nested_tensor=True).unbind()] == [long, short]
        with pytest.raises(RuntimeError, match="nested tensors, padded tensors or return lists"):
            tokens[key]


class TestCopies:
    @relies_on("ValueStack._clone", "Conversation._clone")
    @pytest.mark.parametrize(
        "copied",
        [
            lambda td: td.clone(),
            lambda td: td.clone(False),
            lambda td: td.copy(),
            copy.copy,
            copy.deepcopy,
            lambda td: td.to_lazystack(0),
            lambda td: td.to("cpu"),
            lambda td: pickle.loads(pickle.dumps(td)),
        ],
        ids=[
            "clone",
            "shallow",
            "copy",
            "copy.copy",
            "deepcopy",
            "lazy",
            "cpu",
            "pickle",
        ],
    )
    def test_writing_to_a_copy_leaves_the_original(self, batch, copied):
        found = copied(batch)["history"].prompt
        found.extend(history(["x"], ["y"]), dim=-1)
        assert texts(found) == [[*LONG, "x"], [*SHORT, "y"]]
        assert prompts(batch) == [LONG, SHORT]

    @relies_on("ValueStack._select", "ValueStack._exclude")
    def test_select_and_exclude_reach_the_fields_of_messages(self, batch):
        selected = batch.select(("history", "prompt", "content"))
        assert selected["history"].prompt.content == [LONG, SHORT]
        assert "role" not in border.prompts(selected)[0].messages[0]
        assert "role" in border.prompts(batch)[0].messages[0]
        excluded = batch.exclude(("history", "prompt", "content"))
        assert "content" not in border.prompts(excluded)[0].messages[0]

    @relies_on("ValueStack._select")
    def test_select_and_exclude_reach_tokens(self, tokens):
        assert token_lengths(tokens.select(("tokens", "prompt"))) == token_lengths(tokens)
        assert "prompt" not in set(tokens.exclude(("tokens", "prompt"))["tokens"].keys())
        assert "tokens" not in set(tokens.exclude("tokens").keys())

    @relies_on("ValueStack._clone")
    def test_a_clone_of_tokens_has_its_own_tensors_and_a_shallow_one_shares_them(self, tokens):
        pointer = tokens[0]["tokens", "prompt"].data_ptr()
        assert tokens.clone()[0]["tokens", "prompt"].data_ptr() != pointer
        assert tokens.clone(False)[0]["tokens", "prompt"].data_ptr() == pointer

    @relies_on("ValueStack.__getstate__", "ValueStack.__setstate__")
    @pytest.mark.parametrize("make", [ragged, lambda: token_step()["next"]], ids=["history", "tokens"])
    def test_pickle_and_torch_save_keep_classes_and_lengths(self, make):
        td, file = make(), io.BytesIO()
        torch.save(td, file)
        file.seek(0)
        for found in (pickle.loads(pickle.dumps(td)), torch.load(file, weights_only=False)):
            assert prompts(found) == prompts(td)
            assert type(found["history"].prompt) is AgentHistory
            if "tokens" in set(td.keys()):
                assert token_lengths(found) == token_lengths(td)

    @relies_on("ValueStack._memmap_")
    def test_memmap_and_back(self, batch, tokens, tmp_path):
        batch.memmap(tmp_path / "history")
        assert TensorDict.load_memmap(tmp_path / "history")["history"].prompt.content == [LONG, SHORT]
        tokens.memmap(tmp_path / "tokens")
        assert token_lengths(TensorDict.load_memmap(tmp_path / "tokens")) == token_lengths(tokens)

    @relies_on("Conversation.to", "ValueStack.device")
    @pytest.mark.parametrize("device", ["cpu", "meta"])
    def test_to_a_device_says_the_device_everywhere_and_keeps_the_text(self, batch, tokens, device):
        moved = batch.to(device)
        assert moved["history"].prompt.content == [LONG, SHORT]
        assert moved["history"].prompt[0, 0].device == moved["done"].device == torch.device(device)
        assert batch.device is None
        assert tokens.to(device)[0]["tokens", "prompt"].device == torch.device(device)

    @relies_on("Conversation._apply_nest")
    def test_consolidate_keeps_ragged_rows(self, batch, tokens):
        assert prompts(batch.consolidate()) == [LONG, SHORT]
        assert prompts(batch.to_lazystack(0).consolidate()) == [LONG, SHORT]
        assert token_lengths(tokens.consolidate()) == token_lengths(tokens)


class TestJoining:
    @relies_on("ValueStack._new_lazy_unsafe", "ValueStack.__new__")
    @pytest.mark.parametrize("lazy", [True, False])
    def test_unbound_rows_are_stacked_again(self, batch, lazy):
        rows = batch.to_lazystack(0).unbind(0) if lazy else batch.unbind(0)
        assert prompts(lazy_stack(rows)) == [LONG, SHORT]
        assert prompts(lazy_stack(rows[::-1])) == [SHORT, LONG]

    @relies_on("ValueStack.__new__")
    @pytest.mark.parametrize("stack", [torch.stack, lazy_stack, LazyStackedTensorDict.maybe_dense_stack])
    def test_steps_of_equal_length_are_stacked(self, stack):
        found = stack([history(["a", "b"], ["c", "d"]), history(["e", "f"], ["g", "h"])])
        assert found.content == [[["a", "b"], ["c", "d"]], [["e", "f"], ["g", "h"]]]
        assert [texts(row) for row in found.unbind(0)] == found.content

    @relies_on("ValueStack.__new__")
    @pytest.mark.parametrize("dim", [0, 1])
    @pytest.mark.parametrize("stack", [lazy_stack, LazyStackedTensorDict.maybe_dense_stack])
    def test_steps_of_unequal_length_are_stacked(self, stack, dim):
        found = stack([ragged(1), ragged(2)], dim)
        last = found[1] if dim == 0 else found[:, 1]
        assert prompts(last) == [LONG, SHORT]
        assert found.batch_size == (2, 2)

    @relies_on("TokenRows._get_str")
    @pytest.mark.parametrize("dim", [0, 1])
    def test_steps_with_tokens_are_stacked(self, tokens, dim):
        found = lazy_stack([tokens, token_step(1)["next"]], dim)
        first = found[0] if dim == 0 else found[:, 0]
        assert token_lengths(first) == token_lengths(tokens)

    def test_torch_stack_of_ragged_batches_is_refused_by_tensordict(self, batch, tokens):
        """It compares shapes, and -1 differs from itself; `lazy_stack` and rollouts stack them."""
        for td in (batch, tokens):
            with pytest.raises(RuntimeError, match="shapes of the tensors to stack"):
                torch.stack([td, td])

    @relies_on("ValueStack.__new__")
    def test_cat_of_equal_and_unequal_lengths(self, batch, tokens):
        assert texts(torch.cat([history(["a"], ["b"]), history(["c"])])) == [["a"], ["b"], ["c"]]
        assert texts(torch.cat([history(["a", "b"], ["c"]), history(["d"])])) == [["a", "b"], ["c"], ["d"]]
        assert prompts(torch.cat([batch, ragged(1)])) == [LONG, SHORT, LONG[:3], SHORT[:2]]
        assert token_lengths(torch.cat([tokens, tokens])) == token_lengths(tokens) * 2

    @relies_on("ValueStack.__new__")
    @pytest.mark.parametrize(
        "index", [0, -1, slice(1, 2), [1], torch.tensor([1, 0]), torch.tensor([True, False])]
    )
    def test_a_batch_is_indexed(self, batch, tokens, index):
        rows = [[LONG, SHORT][i] for i in torch.arange(2)[index].reshape(-1).tolist()]
        lengths = [token_lengths(tokens)[i] for i in torch.arange(2)[index].reshape(-1).tolist()]
        assert prompts(batch[index]) == rows
        assert prompts(batch.to_lazystack(0)[index]) == rows
        found = tokens[index]
        assert token_lengths(found if found.batch_dims else found.unsqueeze(0)) == lengths

    def test_reshape_and_view_flatten_a_batch(self, batch, tokens):
        assert prompts(batch.reshape(-1)) == prompts(batch.view(-1)) == [LONG, SHORT]
        grid = lazy_stack([ragged(1), ragged(2)])
        assert prompts(grid.reshape(-1)) == [LONG[:3], SHORT[:2], LONG, SHORT]
        assert prompts(batch.to_lazystack(0).reshape(2, 1)) == [LONG, SHORT]
        assert token_lengths(tokens.reshape(-1)) == token_lengths(tokens)

    def test_a_dense_batch_of_ragged_rows_takes_no_other_shape(self, batch):
        """tensordict computes the number of messages as the product of the shape; a lazy stack has none."""
        with pytest.raises(AssertionError, match="invalid shape"):
            batch.reshape(2, 1)

    @relies_on("ValueStack.__new__")
    def test_a_batch_of_two_dimensions(self):
        td = ragged(shape=(2, 2))
        assert prompts(td) == [LONG, SHORT, ["q2", *LONG[1:]], ["q3", "hm", "hm"]]
        assert td["history"].prompt[1, 0, 0].content == "q2"
        assert prompts(td[1]) == prompts(td)[2:]
        assert prompts(td[:, 1]) == [SHORT, ["q3", "hm", "hm"]]
        assert prompts(td.clone()) == prompts(pickle.loads(pickle.dumps(td))) == prompts(td)
        assert prompts(td.transpose(0, 1)) == [prompts(td)[i] for i in (0, 2, 1, 3)]


class TestWriting:
    @relies_on("AgentHistory.append", "AgentHistory._extended", "Conversation.extended")
    @pytest.mark.parametrize("inplace", [True, False])
    def test_append(self, inplace):
        first = history(["a", "b"], ["c"])
        found = first.append(history(["x", "y"])[0], inplace=inplace, dim=-1)
        assert texts(found) == [["a", "b", "x"], ["c", "y"]]
        assert texts(first) == (texts(found) if inplace else [["a", "b"], ["c"]])
        row = first[0].append(History(role="user", content="z"), inplace=inplace)
        assert row.content[-1] == "z"
        assert type(row) is type(found) is AgentHistory

    @relies_on("AgentHistory.extend", "AgentHistory._extended")
    @pytest.mark.parametrize("inplace", [True, False])
    def test_extend(self, inplace):
        first = history(["a", "b"], ["c"])
        found = first.extend(history(["x"], ["y", "z"]), inplace=inplace, dim=-1)
        assert texts(found) == [["a", "b", "x"], ["c", "y", "z"]]
        assert texts(first) == (texts(found) if inplace else [["a", "b"], ["c"]])

    def test_tokens_that_a_policy_wrote_as_a_dense_tensordict_are_read_row_by_row(self):
        """Not only lazy stacks: a padded policy writes tensors of the whole batch."""
        dense = TensorDict({"prompt": torch.arange(4).reshape(2, 2)}, [2])
        rows = read_rows(TensorDict({"tokens": dense}, [2]), "tokens")
        assert [row.tensors["prompt"].tolist() for row in rows] == [[0, 1], [2, 3]]

    @relies_on("ValueStack.update", "TokenRows._updated")
    @pytest.mark.parametrize("lazy", [True, False])
    def test_update_takes_rows_of_other_lengths(self, batch, tokens, lazy):
        other = ragged(1)
        batch, other = (td.to_lazystack(0) if lazy else td for td in (batch, other))
        assert prompts(batch.update(other)) == [LONG[:3], SHORT[:2]]
        shorter = token_step(1)["next"]
        assert token_lengths(tokens.clone().update(shorter)) == token_lengths(shorter)

    @relies_on("Conversation._apply_nest", "Conversation._shown")
    def test_update_in_place_changes_that_batch_alone(self):
        one, two = (TensorDict({"history": history([text])}, batch_size=(1,)) for text in "ab")
        other = border.as_history([[{"role": "tool", "content": "x"}]])
        shared = one.clone(False)
        one.update_(TensorDict({"history": other}, batch_size=(1,)))
        assert one["history"].content == [["x"]]
        assert one["history"].role == [["tool"]]
        assert one["history"][0, 0].content == "x"
        assert (shared["history"].content, two["history"].content) == ([["a"]], [["b"]])
        assert shared["history"].role == two["history"].role == history(["c"]).role == [["user"]]

    @relies_on("AgentHistory.where", "Conversation.where", "TokenRows.where")
    @pytest.mark.parametrize("lazy", [True, False])
    def test_where_takes_whole_rows(self, batch, tokens, lazy):
        mask, other = torch.tensor([True, False]), ragged(1)
        batch, other = (td.to_lazystack(0) if lazy else td for td in (batch, other))
        assert prompts(batch.where(mask, other)) == [LONG, SHORT[:2]]
        found = history(["a", "b"], ["c"]).where(mask, history(["x"], ["y", "z"]))
        assert texts(found) == [["a", "b"], ["y", "z"]]
        shorter = token_step(1)["next"]
        lengths = [token_lengths(tokens)[0], token_lengths(shorter)[1]]
        assert token_lengths(tokens.where(mask, shorter)) == lengths

    @relies_on("ValueStack._propagate_lock", "AgentHistory._replaced")
    def test_a_locked_batch_is_read_and_not_written(self, batch):
        batch.lock_()
        assert batch["history"].prompt.content == [LONG, SHORT]
        with pytest.raises(RuntimeError, match="locked"):
            batch["history"].prompt.extend(history(["x"], ["y"]), dim=-1)
        with pytest.raises(RuntimeError, match="locked"):
            batch.update(ragged(1))
        batch.unlock_()
        batch["history"].prompt.extend(history(["x"], ["y"]), dim=-1)
        assert prompts(batch) == [[*LONG, "x"], [*SHORT, "y"]]

    @relies_on("Conversation._set_str", "ValueStack._write")
    def test_fields_of_all_messages_are_set(self):
        found = history(["a", "b"], ["c"])
        row, before = found[0], found.clone()
        row.content = ["x", "y"]
        assert row.content == ["x", "y"]
        assert texts(before) == [["a", "b"], ["c"]]

    @relies_on("ValueStack.__setitem__")
    def test_rows_of_equal_length_are_set_by_index(self):
        found, kept = history(["a"], ["b"]), history(["a"], ["b"])
        shared = found.clone(False)
        found[0] = history(["x"])[0]
        assert texts(found) == [["x"], ["b"]]
        assert texts(shared) == texts(kept)

    def test_rows_of_unequal_length_are_refused_by_tensordict(self, batch):
        with pytest.raises(ValueError, match="Cannot expand"):
            batch[0] = batch[1]

    @relies_on("ValueStack._thawed")
    def test_a_batch_around_values_is_a_tensordict(self, batch, tokens):
        inner = border.inner(batch["history"].prompt)
        assert all(type(row) is Conversation for row in inner.unbind(0))
        assert type(tokens.get("masks")) is TokenRows
        assert isinstance(tokens.get("masks"), TensorDictBase)
