"""What a turn costs, counted: no message is read, however long the conversation; each is held once."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.chat_envs import begin
from helpers.processes import run_program
from helpers.ragged_batches import CALL, history, prompts, token_env, token_policy, uneven, uneven_env
from tensordict import NonTensorData, lazy_stack
from torchrl.data.llm import History
from torchrl.envs import Transform
from torchrl.modules.llm.policies import ChatHistory

from torchrl_agentic import EndTrajectory
from torchrl_agentic.testing import ScriptedPolicy
from torchrl_agentic.transforms import history as border


def lengthened(td, messages):
    """Return a root whose prompts have more messages, of a user and of the assistant in turns."""
    pair = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    rows = [row.extended(pair * (messages // 2)) for row in border.prompts(td)]
    border.set_prompts(td, rows)
    return td


def long_answer(chat):
    """Answer with a text that no other message has."""
    return f"{chat[0].content}, {len(chat)}: {'.' * 1000} {CALL}"


def turn(env, policy, td):
    return env.step_mdp(env.step(policy(td)))


class TestTurns:
    @pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "history"])
    @pytest.mark.parametrize("lazy", [True, False])
    def test_no_message_is_made_as_a_tensordict(self, tokens, lazy, monkeypatch):
        made, make = [], border.as_tensordict
        env = (token_env if tokens else lambda _, ends: uneven_env((2,), ends))(2, EndTrajectory(max_turns=9))
        policy = token_policy if tokens else ScriptedPolicy(uneven)
        td = turn(env, policy, begin(env))
        td = td.to_lazystack(0) if lazy else td

        def counted(message, *args, **kwargs):
            made.append(message)
            return make(message, *args, **kwargs)

        monkeypatch.setattr(border, "as_tensordict", counted)
        for _ in range(3):
            td = turn(env, policy, td)
        assert made == []
        assert td["history"].prompt[0, 0].content == "q0"
        assert made  # the count sees what reads a message

    def test_a_thousand_turns_cost_as_much_per_turn_as_ten(self):
        """Counted in a process of its own: after torch.compile was used, `sys.setprofile` can hang."""
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        done = run_program([sys.executable, __file__], env=environment, stdout=subprocess.PIPE, check=True)
        ten, thousand = map(int, done.stdout.split()[-2:])
        assert 1000 < thousand <= 1.2 * ten


class TestMemory:
    def rollout(self, turns, rows=4):
        env, policy = uneven_env((rows,)), ScriptedPolicy(long_answer)
        return env.rollout(turns, policy, auto_reset=False, tensordict=begin(env))

    def test_a_rollout_holds_each_message_once(self):
        found = self.rollout(10)
        steps = [step for row in found.unbind(0) for step in row.unbind(0)]
        held = {
            id(message)
            for step in steps
            for part in ("prompt", "full")
            for message in border.prompts(step, part)[0].messages
        }
        held |= {id(message) for step in steps for message in border.prompts(step["next"])[0].messages}
        assert len(held) == 4 * (1 + 2 * 10)

    def test_a_pickle_grows_with_the_messages_and_holds_each_once(self):
        """With each message once per step, three times the turns would be nine times the size."""
        short, long = (len(pickle.dumps(self.rollout(turns)["next", "history"])) for turns in (10, 30))
        assert long < 3.5 * short

    def test_what_is_unpickled_shares_messages(self):
        found = pickle.loads(pickle.dumps(self.rollout(5)))
        last = border.prompts(found[:, -1]["next"])[0].messages
        first = border.prompts(found[:, 0]["next"])[0].messages
        assert all(one is other for one, other in zip(first, last, strict=False))


class TestBadInput:
    def test_a_message_that_was_read_is_locked(self):
        found = history(["a"])
        with pytest.raises(RuntimeError, match="locked"):
            found[0, 0].content = "z"
        with pytest.raises(RuntimeError, match="locked"):
            found[0, 0].update_(History(role="tool", content="z"))
        assert found.content == [["a"]]
        assert history(["b"]).role == [["user"]]

    def test_a_message_that_someone_unlocked_is_theirs(self):
        found = history(["a"])
        message = found[0, 0].unlock_()
        message.content = "z"
        assert found.content == [["a"]]
        assert found[0, 0].content == "a"

    def test_a_stack_that_someone_locks_and_unlocks_leaves_the_messages_locked(self):
        found = history(["a"], ["b"])
        found[:, 0].lock_().unlock_()
        with pytest.raises(RuntimeError, match="locked"):
            found[0, 0].update_(History(role="tool", content="z"))
        assert found.role == [["user"], ["user"]]

    @pytest.mark.parametrize(
        "source", ["given", "read as a message", "read as a field", "taken from a history"]
    )
    def test_a_list_in_the_content_that_someone_changes_is_not_the_conversation_s(self, source):
        given = [{"type": "text", "text": "a"}]
        found = border.as_history([[{"role": "user", "content": given}]])
        (row,) = border.conversations(found)
        changed = {
            "given": lambda: given,
            "read as a message": lambda: row.messages[0].read().content,
            "read as a field": lambda: row.messages[0]["content"],
            "taken from a history": lambda: found[0, 0].content,
        }[source]()
        changed[0]["text"] = "z"
        changed.append("more")
        assert border.conversations(found)[0].messages[0].read().content == [{"type": "text", "text": "a"}]
        assert found[0, 0].content == [{"type": "text", "text": "a"}]

    def test_a_stack_taken_from_a_history_can_be_changed_without_it(self):
        td = turn(uneven_env(), ScriptedPolicy(uneven), begin(uneven_env()))
        taken = td["history"].prompt[0]
        before, copied = prompts(td), td.clone(False)
        taken.clone().append(History(role="user", content="x"))
        copied["history"].prompt.extend(history(["x"], ["y"]), dim=-1)
        assert prompts(td) == before

    @pytest.mark.parametrize("kind", ["history", "list of messages"])
    def test_a_transform_that_writes_plain_histories_is_read(self, kind):
        class Foreign(Transform):
            def _step(self, td, next_td):
                rows = [
                    [History(role=m.role, content=m.content) for m in (one.read() for one in row.messages)]
                    for row in border.prompts(next_td)
                ]
                rows = [lazy_stack([*row, History(role="user", content="more")]) for row in rows]
                chat = next_td["history"]
                chat.prompt = lazy_stack(rows) if kind == "history" else lazy_stack(list(rows))
                return next_td.set("history", chat)

        env = uneven_env((2,), Foreign())
        td, policy = begin(env), ScriptedPolicy(lambda chat: CALL)
        for _ in range(2):
            td = turn(env, policy, td)
        assert prompts(td) == [[q, CALL, "ok", "more", CALL, "ok", "more"] for q in ("q0", "q1")]

    def test_a_prompt_that_is_a_plain_list_is_refused_with_the_remedy(self):
        env = uneven_env()
        td = begin(env)
        td["history"] = ChatHistory(prompt=NonTensorData([{"role": "user"}]).expand(2), batch_size=(2,))
        with pytest.raises((TypeError, RuntimeError), match="as_history"):
            ScriptedPolicy(uneven)(td)

    def test_a_policy_that_returns_its_own_history_class_is_read(self):
        class Own(History):
            pass

        env = uneven_env()
        td = begin(env)
        rows = zip(border.prompts(td), (CALL, "hm"), strict=True)
        full = [
            lazy_stack([Own(role=m["role"], content=m["content"]) for m in [*row.messages, answer]])
            for row, answer in ((row, {"role": "assistant", "content": text}) for row, text in rows)
        ]
        td["history"] = ChatHistory(prompt=td["history"].prompt, full=lazy_stack(full), batch_size=(2,))
        td = env.step_mdp(env.step(td))
        assert prompts(td) == [["q0", CALL, "ok"], ["q1", "hm"]]


def calls_of_a_turn(messages):
    """Count the Python functions that a turn of four rows runs, behind so many messages."""
    env = uneven_env((4,), EndTrajectory(max_turns=9))
    policy = ScriptedPolicy([[CALL] * 9] * 4)
    td = lengthened(turn(env, policy, begin(env)), messages)
    td = turn(env, policy, td)
    count = 0

    def on_event(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(on_event)
    turn(env, policy, td)
    sys.setprofile(None)
    return count


if __name__ == "__main__":
    calls_of_a_turn(20)  # what is made once
    print(calls_of_a_turn(20), calls_of_a_turn(2000))
