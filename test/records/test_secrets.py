"""Secrets are not written, and nothing else is left out of a record because of names that the model chose."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
from helpers.chat_envs import begin, call, chat_env, step
from helpers.record_strategies import record, turn
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_agentic import Tool, ToolCompose
from torchrl_agentic.messages import Message, ToolResult
from torchrl_agentic.records import BadLine, Recorder, Secrets, TokenRecord, TrajectoryRecord, read_line
from torchrl_agentic.records.json_dump import json_line
from torchrl_agentic.tokens.ledger import TokenLedger

NAMES = ["password", "API_KEY", "api-key", "apikey", "Authorization", "client_secret", "accessToken", "token"]
NONE = frozenset[str]()


def data(made: TrajectoryRecord, secrets: Secrets | None = None, variables: frozenset[str] = NONE) -> dict:
    return json.loads(json_line(made, secrets or Secrets(), variables))


def outcome(line: dict) -> dict:
    """Return calls and results of the first turn of a line."""
    return line["turns"][0]["outcome"]


def login(secret: str, name: str = "password", *, declared: bool = True, **more: object) -> TrajectoryRecord:
    """Record a call whose argument the schema of the tool declares secret, or only its name is."""
    call = json.dumps({"name": "login", "arguments": {name: secret}})
    result = ToolResult.from_text(f"welcome, {secret}")
    made = turn(f"<tool_call>{call}</tool_call>", args={name: secret, **more}, result=result)
    return record(replace(made, secret_args={"f": (name,)} if declared else {}))


def with_tokens(made: TrajectoryRecord) -> TrajectoryRecord:
    ledger = TokenLedger()
    ledger.add_prompt([1, 2])
    return replace(made, tokens=TokenRecord(ledger, ("hunter2!",)))


@pytest.mark.parametrize("name", NAMES)
def test_an_argument_of_a_secret_name_is_left_out(name: str):
    found = data(login("hunter2!", name, user="bob"))
    assert outcome(found)["calls"][0]["args"] == {name: "[redacted]", "user": "bob"}


@pytest.mark.parametrize("name", ["max_tokens", "tokens", "key", "passwords_tried", "secretary"])
def test_values_of_other_names_are_not_secret(name: str):
    found = data(login("hunter2!", name, declared=False))
    assert outcome(found)["calls"][0]["args"] == {name: "hunter2!"}
    assert found["redactions"] == 0


@settings(deadline=None)
@given(secret=st.text(st.characters(exclude_categories=["Cs"]), min_size=6, max_size=30))
def test_a_secret_is_in_no_text_of_the_record(secret: str):
    """Neither verbatim nor escaped inside the JSON of the call."""
    made = login(secret)
    found = data(made)
    other = "\n".join(texts(data(login("[redacted]"))))  # holds some by chance, as "messag" in a key
    assert all(secret not in text or secret in other for text in texts(found))


def texts(value: object) -> list[str]:
    if isinstance(value, dict):
        return [text for item in value.values() for text in texts(item)]
    if isinstance(value, list):
        return [text for item in value for text in texts(item)]
    return [value] if isinstance(value, str) else []


@pytest.mark.parametrize("secret", ["hunter2!", 'quo"ted\\secret', "schlüssel", "line\nbreak", "emoji😀key"])
def test_a_secret_is_cut_out_of_messages_and_results(secret: str):
    found = data(login(secret))
    assert outcome(found)["results"][0]["parts"][0]["text"] == "welcome, [redacted]"
    assert found["turns"][0]["messages"][-1]["content"] == "welcome, [redacted]"
    assert '"password": "[redacted]"' in found["turns"][0]["message"]["content"]
    assert found["output"].count("[redacted]") == 2
    assert "span" not in outcome(found)["calls"][0]
    assert found["redactions"] == 5


@pytest.mark.parametrize("has_span", [True, False])
def test_a_name_that_the_model_chose_is_blanked_in_its_call_only(has_span: bool):
    """Else a model could edit its record: erase a word of its own, a result, or the tokens."""
    words = ["Delete the tests", "PASSED", "tool_call", "arguments", "hunter2!"]
    call = f"<tool_call>{json.dumps({'arguments': {'q': 'x', 'token': words}})}</tool_call>"
    said = f"Delete the tests. {call if has_span else ''}"
    made = turn(said, args={"q": "x", "token": words}, result=ToolResult.from_text("42 tests PASSED"))
    (one,) = made.outcome.calls
    span = (len(said) - len(call), len(said)) if has_span else None
    sent = {"function": {"arguments": json.dumps({"q": "x", "token": words})}}
    message = replace(made.message, tool_calls=() if has_span else (sent,))
    results = replace(made.outcome, cleaned_text="Delete the tests.", calls=(replace(one, span=span),))
    made = replace(made, message=message, outcome=results)
    found = data(with_tokens(record(made)))
    assert outcome(found)["calls"][0]["args"] == {"q": "x", "token": "[redacted]"}
    assert outcome(found)["results"][0]["parts"][0]["text"] == "42 tests PASSED"
    assert found["turns"][0]["message"]["content"].startswith("Delete the tests. ")
    assert "hunter2!" not in json.dumps([found["turns"], found["output"], found["tokens"]["texts"]])
    assert "42 tests PASSED" in found["output"]
    assert found["tokens"]["ledger"]["ids"] == [1, 2]
    assert found["redactions"] == (9 if has_span else 2)


def test_redactions_of_a_record_that_is_written_again_add_up():
    once = read_line(json_line(login("hunter2!"), Secrets(), NONE))
    assert isinstance(once, TrajectoryRecord)
    assert once.redactions == once.summary.redactions == data(once)["redactions"] == 5


@pytest.mark.parametrize(
    "secret",
    [
        {"type": "string", "writeOnly": True},
        {"type": "string", "format": "password"},
        {"anyOf": [{"type": "string", "format": "password"}, {"type": "null"}]},
        {"$ref": "#/$defs/Key"},
    ],
)
def test_the_schema_of_a_tool_declares_an_argument_secret(secret: dict, tmp_path: Path):
    class Login(Tool):
        name = "login"
        input_schema: ClassVar = {
            "type": "object",
            "properties": {"who": {"type": "object", "properties": {"pin": secret}}},
            "$defs": {"Key": {"writeOnly": True}},
        }

        async def run(self, args: dict, ctx: object) -> ToolResult:
            return ToolResult.from_text(f"welcome, {args['who']['pin']}")

    with Recorder(tmp_path / "r.jsonl") as recorder:
        env = chat_env((1,), ToolCompose([Login()], recorder=recorder))
        step(env, begin(env), call("login", who={"pin": "hunter2!"}, token="welcome"))
        env.close()
    written = (tmp_path / "r.jsonl").read_text()
    assert "hunter2!" not in written
    assert "welcome, [redacted]" in written


def test_nested_secrets_and_secrets_in_api_messages_are_redacted():
    made = turn(args={"login": [{"password": "hunter2!"}]}, result=ToolResult.from_text("hunter2!"))
    made = record(replace(made, secret_args={"f": ("password",)}))
    assert "hunter2!" not in json.dumps(data(made))
    message = Message("assistant", "", ({"function": {"arguments": {"password": "hunter2!"}}},))
    spoken = record(turn("x", args={"password": "hunter2!"}, result=ToolResult.from_text("")))
    spoken = replace(spoken, turns=(replace(spoken.turns[0], message=message),))
    assert "hunter2!" not in json.dumps(data(spoken))


def test_a_short_secret_stays_in_texts_and_goes_from_arguments():
    """Every text holds "1234" by chance."""
    found = data(login("1234"))
    assert outcome(found)["calls"][0]["args"] == {"password": "[redacted]"}
    assert outcome(found)["results"][0]["parts"][0]["text"] == "welcome, 1234"


def test_tokens_that_may_spell_a_secret_are_left_out():
    assert data(with_tokens(login("hunter2!")))["tokens"] is None
    assert data(with_tokens(login("hunter2!", "other", declared=False)))["tokens"]["texts"] == ["hunter2!"]


def test_values_of_the_environment_are_left_out_by_the_ends_of_their_names(monkeypatch: pytest.MonkeyPatch):
    """A tool that prints all variables must not write keys into a dump."""
    monkeypatch.setenv("SOME_SERVICE_API_KEY", "sk-0123456789")
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    monkeypatch.setenv("HOME_OF_KEYS", "harmless-value")
    secrets = Secrets()
    printed = "KEY=sk-0123456789 hf_0123456789 harmless-value"
    found = data(record(turn(result=ToolResult.from_text(printed))), secrets, secrets.variables())
    assert outcome(found)["results"][0]["parts"][0]["text"] == "KEY=[redacted] [redacted] harmless-value"


def test_secret_names_are_configurable(tmp_path):
    with Recorder(tmp_path / "r.jsonl", secrets=["ssn"]) as recorder:
        recorder.write(login("hunter2!", declared=False, ssn="078-05-1120"))
    found = read_line((tmp_path / "r.jsonl").read_bytes())
    assert isinstance(found, TrajectoryRecord)
    ((_, call, _),) = found.calls
    assert call.args == {"password": "hunter2!", "ssn": "[redacted]"}


def test_tools_that_are_called_like_secrets_are_still_counted():
    made = record(turn(args={"password": "hunter2!"}, result=ToolResult.from_text("")))
    outcome = made.turns[0].outcome
    calls = (replace(outcome.calls[0], tool="token"),)
    made = replace(made, turns=(replace(made.turns[0], outcome=replace(outcome, calls=calls)),))
    assert data(made)["tools"] == {"token": 1}


def test_redacted_record_reads_back():
    assert not isinstance(read_line(json_line(login("hunter2!"), Secrets(), NONE)), BadLine)


def test_secret_names_are_pickled_to_workers():
    assert pickle.loads(pickle.dumps(Secrets(["ssn"]))).is_secret("SSN")
