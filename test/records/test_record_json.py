"""A trajectory reads back unchanged; other content of a line is read or named."""

import json
import math
from pathlib import Path

import jsonschema_rs
import pytest
from helpers.record_strategies import record, records, turn
from helpers.viewer_dumps import VERL_LINE
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_agentic.messages import Status, ToolResult
from torchrl_agentic.records import (
    SCHEMA_VERSION,
    BadLine,
    Secrets,
    TokenRecord,
    TrajectoryRecord,
    json_schema,
    read_line,
    record_from_json,
    record_to_json,
)
from torchrl_agentic.records.json_dump import json_line
from torchrl_agentic.records.record_json import BODY, HEAD, summary_from_json
from torchrl_agentic.tokens.ledger import TokenLedger

NOTHING = Secrets(())


def written(made: TrajectoryRecord) -> bytes:
    return json_line(made, NOTHING, frozenset())


@settings(deadline=None)
@given(made=records())
def test_trajectory_reads_back_unchanged(made: TrajectoryRecord):
    """Through the bytes of a file, so that nothing lives on as a Python object."""
    encoded = written(made)
    assert encoded.count(b"\n") == 1
    assert encoded.endswith(b"\n")
    assert read_line(encoded) == made


@settings(deadline=None)
@given(made=records())
def test_written_records_match_the_published_schema(made: TrajectoryRecord):
    """With `json` as reader, as people's scripts use it; the validator takes no halves of surrogate pairs."""
    data = json.loads(written(made).replace(b"\\ud", b"\\u0"))
    assert [error.message for error in jsonschema_rs.validator_for(json_schema()).iter_errors(data)] == []


def test_the_schema_is_one_and_knows_all_members():
    jsonschema_rs.validator_for(json_schema())
    assert set(json_schema()["required"]) == {*HEAD, *BODY}
    assert set(json_schema()["properties"]) == {*HEAD, *BODY}
    assert json_schema()["properties"]["schema_version"]["const"] == SCHEMA_VERSION
    statuses = json_schema()["$defs"]["Status"]["enum"]
    assert statuses == [str(status) for status in Status]


TURN = {"trajectory": "t", "index": 0, "message": {"role": "user", "content": "x"}, "outcome": {}}


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"score": "high"}, "score"),
        ({"n_turns": 0}, "n_turns"),
        ({"turns": [{"trajectory": "t", "index": 0, "message": {"role": "user"}, "outcome": {}}]}, "message"),
        ({"turns": [{**TURN, "outcome": {"calls": [{"call_id": "1"}]}}]}, "calls"),
        ({"schema_version": 1}, "schema_version"),
    ],
)
def test_schema_rejects_other_records(change: dict[str, object], path: str):
    data = record_to_json(record()) | change
    assert any(path in map(str, error.instance_path) for error in jsonschema_rs.validator_for(
        json_schema()).iter_errors(json.loads(json.dumps(data))))  # fmt: skip


@settings(deadline=None)
@given(made=records())
def test_the_summary_in_a_line_is_that_of_the_whole(made: TrajectoryRecord):
    found = summary_from_json(json.loads(written(made)))
    assert found == made.summary


def test_a_line_has_the_keys_that_scripts_of_others_know():
    made = record(
        turn("42", result=ToolResult.from_text("6")), score=1.0, gts="42", step=7, extras={"acc": 1}
    )
    data = json.loads(written(made))
    assert data["input"] == "user\nWhat?"
    assert data["output"] == "assistant\n42\ntool\n6"
    assert (data["gts"], data["score"], data["step"], data["acc"], data["request_id"]) == ("42", 1, 7, 1, "r")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_lacks_are_written_as_text_and_read(value: float):
    encoded = written(record(score=value, rewards=(value,)))
    json.loads(encoded, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    found = read_line(encoded)
    assert isinstance(found, TrajectoryRecord)
    assert str(found.score) == str(found.rewards[0]) == str(value)


def deep(depth: int) -> object:
    value: object = 0
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [10**5000, deep(5000), {1, 2}, object(), b"\xff", {(1, 2): 3}, "\ud800"],
    ids=lambda one: type(one).__name__,
)
def test_value_that_json_lacks_is_replaced_alone(value: object):
    """The rest of the trajectory is written, and reads back."""
    made = record(turn("kept", result=ToolResult.from_text("6")), extras={"odd": value})
    found = read_line(written(made))
    assert isinstance(found, TrajectoryRecord)
    assert found.turns == made.turns


def test_tokens_are_kept_with_sources_and_log_probs():
    ledger = TokenLedger()
    ledger.add_prompt([1, 2])
    ledger.add_sampled([3, 4], [-0.25, math.nan])
    ledger.add_result([5], call=0)
    made = record(tokens=TokenRecord(ledger, ("a", "b", "c")))
    data = json.loads(written(made))["tokens"]
    runs = [[-2, -1, 2], [-1, -1, 2], [0, -1, 1]]
    assert data["ledger"] == {"ids": [1, 2, 3, 4, 5], "runs": runs, "log_probs": [-0.25, None]}
    assert data["texts"] == ["a", "b", "c"]
    assert read_line(written(made)) == made


def test_a_line_of_a_dump_with_texts_only_is_read():
    """As verl's trainer writes it."""
    found = record_from_json({"input": "q", "output": "a", "gts": "4", "score": 0.5, "step": 3, "acc": 1.0})
    assert [(message.role, message.text) for message in found.messages] == [("input", "q"), ("output", "a")]
    assert (found.score, found.step, found.gts, found.extras) == (0.5, 3, "4", {"acc": 1.0})
    assert found.summary.group == record_from_json({"input": "q", "output": "b"}).summary.group


def test_the_texts_of_verls_trainer_have_turns_calls_and_results():
    found = record_from_json(VERL_LINE)
    assert [(message.role, message.text.split("\n")[0]) for message in found.messages] == [
        ("system", "You are good at sums."),
        ("user", "What is 6 × 7?"),
        ("assistant", "<think>"),
        ("tool", "42.0"),
        ("assistant", "<think>"),
    ]
    ((turn, call, result),) = found.calls
    assert (turn.index, call.tool, call.args["code"]) == (0, "code_interpreter", "print(6 * 7.0)")
    assert (result.status, result.text) == (Status.OK, "42.0")
    assert len(found.turns) == 2
    assert record_from_json(record_to_json(found)).turns == found.turns


def test_results_in_a_user_section_differ_from_missing_results():
    one, two = (f'<tool_call>\n{{"name": "f", "arguments": {{"n": {n}}}}}\n</tool_call>' for n in (1, 2))
    said = (
        f"{one}\n{two}\nuser\n<tool_response>\n10\n</tool_response>\n<tool_response>\n20\n</tool_response>\n"
        f"assistant\nNow <tool_call>{{broken</tool_call>\nuser\nGo on.\nassistant\n{one}"
    )
    found = record_from_json({"input": "user\nq\nassistant\n", "output": said})
    assert [(turn.index, call.args, result.status, result.text) for turn, call, result in found.calls][
        :2
    ] == [
        (0, {"n": 1}, Status.OK, "10"),
        (0, {"n": 2}, Status.OK, "20"),
    ]
    assert [result.status for _, _, result in found.calls][2:] == [Status.MALFORMED, Status.SKIPPED]
    assert [message.text for message in found.turns[2].context] == ["Go on."]


ROLES = st.sampled_from(
    ["assistant", "tool", "user", " tool", "system", "word", "<tool_call>", "</tool_call>", "<think>"]
)


@settings(deadline=None)
@given(st.lists(ROLES | st.sampled_from(['{"name": "f", "arguments": {}}', "", "1"]), max_size=12))
def test_any_output_is_read_with_its_text(lines):
    found = record_from_json({"input": "user\nq\nassistant\n", "output": "\n".join(lines)})
    assert found.turns
    told = "\n".join(message.text for message in found.messages)
    for word in ("word", "1", '{"name"'):
        assert told.count(word) == sum(line.count(word) for line in lines)


def test_role_name_in_the_text_does_not_end_an_answer():
    said = "These are the roles:\nuser\ntool\nThat is all."
    found = record_from_json({"input": "user\nq\nassistant\n", "output": said})
    assert [message.text for message in found.messages] == ["q", said]


good = json.dumps(record_to_json(record())).encode()


@pytest.mark.parametrize(
    ("junk", "reason"),
    [
        (good[:100], "cut off after 100 bytes"),
        (b"[]", "JSON object"),
        (b"3", "JSON object"),
        (b"null", "JSON object"),
        (b"{}", "output"),
        (b"\xff\xfe", "JSON"),
        (b'{"schema_version": "3"}', "version 3"),
        (b'{"schema_version": 99}', "version 99; this package reads version 3"),
        (b'{"schema_version": 2}', "version 2; this package reads version 3"),
        (b'{"schema_version": 3}', "turns: field required"),
        (
            good.replace(
                b'"outcome": {', b'"outcome": {"calls": [{"tool": "f", "args": {}, "call_id": "1"}], '
            ),
            "1 calls and 0 results",
        ),
        (b"[" * 100_000, "more than 255 levels"),
        (b'{"output": ' + b"1" * 5000 + b"}", "digits"),
        (b"", "Expecting value"),
    ],
    ids=lambda value: repr(value[:20]),
)
def test_a_line_that_cannot_be_read_is_named_with_the_reason(junk: bytes, reason: str):
    found = read_line(junk, 7)
    assert isinstance(found, BadLine)
    assert found.number == 7
    assert reason in found.reason


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("score",), 10**400),
        (("step",), 1 << 63),
        (("turns", 0, "message", "role"), 3),
        (("turns", 0, "message", "content"), 3),
        (("turns", 0, "outcome", "calls", 0, "tool"), ["f"]),
        (("turns", 0, "outcome", "calls", 0, "args"), [1]),
        (("turns", 0, "outcome", "calls", 0, "call_id"), None),
        (("turns", 0, "outcome", "results", 0, "parts", 0, "text"), {"a": 1}),
        (("turns", 0, "outcome", "results", 0, "timing", "run_s"), None),
        (("turns", 0, "outcome", "results", 0, "timing", "queue_s"), "soon"),
    ],
    ids=lambda one: str(one)[:30],
)
def test_a_value_of_another_kind_makes_a_bad_line_and_no_record_that_others_fall_over(
    place: tuple[str | int, ...], value: object
):
    data = json.loads(written(record(turn(result=ToolResult.from_text("1")))))
    data["turns"][0]["outcome"]["results"][0]["timing"] = {"start": 1.0, "queue_s": 0.0, "run_s": 0.0}
    assert isinstance(read_line(json.dumps(data).encode()), TrajectoryRecord)
    inner = data
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    assert isinstance(read_line(json.dumps(data).encode()), BadLine)


@settings(deadline=None)
@given(junk=st.binary() | st.recursive(
    st.none() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from([*HEAD, *BODY]), inner),
).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_no_line_raises(junk: bytes):
    assert isinstance(read_line(junk), BadLine | TrajectoryRecord)


def test_invalid_utf8_is_read_with_replacements():
    found = read_line(good.replace(b"hello", b"h\xffllo"))
    assert isinstance(found, TrajectoryRecord)
    assert found.turns[0].message.text == "h\udcffllo"


def test_schema_is_part_of_the_package():
    """What people validate with is a file, which tools of other languages read too."""
    import torchrl_agentic.records as package

    path = Path(package.__file__).parent / "trajectory.schema.json"
    assert json.loads(path.read_text("utf-8")) == json_schema(), "make schema writes the file anew"
