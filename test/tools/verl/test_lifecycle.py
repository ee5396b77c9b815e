"""Tools with create, execute, calc_reward and release live as long as their trajectory, and end once."""

import asyncio
import datetime
import io
import logging
import pickle
import threading
import uuid
from typing import ClassVar

import pytest
from PIL import Image

from torchrl_agentic import ImagePart, ParsedCall, RowData, Status, ToolContext
from torchrl_agentic.dispatch import Dispatcher
from torchrl_agentic.testing import ToolContract
from torchrl_agentic.tools import LifecycleTool, Renamed
from torchrl_agentic.tools.verl import (
    BaseTool,
    OpenAIFunctionParametersSchema,
    OpenAIFunctionPropertySchema,
    OpenAIFunctionSchema,
    OpenAIFunctionToolSchema,
    ToolResponse,
    process_image,
    process_video,
    rollout_trace_op,
)
from torchrl_agentic.tools.verl.graders import Gsm8kTool

SCHEMA = OpenAIFunctionToolSchema.model_validate(
    {
        "type": "function",
        "function": {
            "name": "count",
            "description": "Count.",
            "parameters": {"type": "object", "properties": {"by": {"type": "integer", "minimum": 1}}},
        },
    }
)
KWARGS = {
    "create_kwargs": {"start": 10},
    "execute_kwargs": {"step": 2},
    "calc_reward_kwargs": {"scale": 0.5},
    "release_kwargs": {"why": "done"},
}


class Counter(BaseTool):
    """Count per trajectory, and store the requests."""

    def __init__(self):
        super().__init__({}, SCHEMA)
        self.counts, self.log = {}, []

    async def create(self, instance_id=None, start=0, **kwargs):
        self.log.append(("create", start, kwargs))
        self.counts[instance_id] = start
        return instance_id, ToolResponse(text=f"from {start}") if start else ToolResponse()

    async def execute(self, instance_id, parameters, step=1, **kwargs):
        self.counts[instance_id] += parameters.get("by", 1) * step
        self.log.append(("execute", step, sorted(kwargs)))
        return ToolResponse(text=str(self.counts[instance_id])), 0.25, {"n": self.counts[instance_id]}

    async def calc_reward(self, instance_id, scale=1.0):
        self.log.append(("calc_reward", scale))
        return self.counts[instance_id] * scale

    async def release(self, instance_id, why=None):
        self.log.append(("release", why))
        del self.counts[instance_id]


class TestLifecycleTool(ToolContract):
    def make(self):
        return LifecycleTool(Counter())

    good: ClassVar = {"by": 1}
    bad = ({"by": 0}, {"by": "x"})


def call(number, **args):
    return ParsedCall("count", args, f"c{number}")


class Typed(Counter):
    """Annotates its arguments."""

    async def create(
        self, instance_id: str, start: int, names: tuple[str, ...] = (), *, factor: float = 1.0, **kwargs
    ):
        return instance_id, ToolResponse()

    async def calc_reward(
        self, instance_id, scale: int | float = 1, unit="m", when: datetime.date | None = None
    ):
        return 0.0

    async def release(self, instance_id: str, why: str = None):  # noqa: RUF013  as people write it
        pass


def checked(tool, **kwargs):
    tool.check_row(RowData.of({"tools_kwargs": {"count": {"create_kwargs": {"start": 1}, **kwargs}}}))


@pytest.mark.parametrize(
    ("stage", "kwargs", "message"),
    [
        ("create", {"start": "x"}, r"'start' of create\(\) is annotated int; got x \(str\)"),
        ("create", {"start": True}, "annotated int; got True"),
        ("create", {"start": None}, "annotated int; got None"),
        ("create", {"start": 1, "names": "ab"}, r"annotated tuple\[str, \.\.\.\]; got ab"),
        ("create", {"start": 1, "factor": "2"}, "annotated float; got 2"),
        ("create", {"names": []}, r"create\(\) needs 'start', which the row does not have"),
        ("create", {"instance_id": "a", "start": 1}, r"create\(\) gets 'instance_id' from the trajectory"),
        ("calc_reward", {"scale": "x"}, r"annotated int \| float; got x"),
        ("calc_reward", {"skale": 1}, r"has no parameter 'skale'; parameters: scale, unit, when"),
        ("calc_reward", {"when": "soon"}, "got soon"),
        ("release", {"because": 1}, r"release\(\) has no parameter 'because'; parameters: why"),
    ],
)  # fmt: skip
def test_an_argument_of_the_row_that_does_not_fit_its_method_is_found_before_the_trajectory(
    stage, kwargs, message
):
    with pytest.raises(ValueError, match=rf"tools_kwargs: count: {stage}_kwargs: .*{message}"):
        checked(LifecycleTool(Typed()), **{f"{stage}_kwargs": kwargs})


@pytest.mark.parametrize(
    ("stage", "kwargs"),
    [
        ("create", {"start": 1, "factor": 2, "names": ["a"], "other": object()}),
        ("calc_reward", {"scale": 2, "unit": 3, "when": "2026-01-02"}),
        ("calc_reward", {"when": datetime.date(2026, 1, 2)}),
        ("execute", {"step": "untyped", "whatever": 1}),
        ("release", {"why": None}),
    ],
)
def test_an_argument_of_the_row_that_fits_or_has_no_type_is_accepted(stage, kwargs):
    checked(LifecycleTool(Typed()), **{f"{stage}_kwargs": kwargs})


def test_arguments_that_are_taken_in_one_piece_are_the_tools_own_business():
    class Whole(Counter):
        async def create(self, instance_id: str, create_kwargs: dict):
            return instance_id, ToolResponse()

    checked(LifecycleTool(Whole()), create_kwargs={"start": "x"})


def test_a_tool_that_opens_at_its_first_call_may_lack_arguments():
    """No call may come."""
    LifecycleTool(Typed(), open_at_reset=False).check_row(RowData())
    with pytest.raises(ValueError, match="needs 'start'"):
        LifecycleTool(Typed()).check_row(RowData())


def test_a_type_that_cannot_be_checked_is_accepted():
    class Odd(Counter):
        async def calc_reward(self, instance_id, scale: "NoSuchName" = 1.0):  # noqa: F821
            return 0.0

    tool = LifecycleTool(Odd())
    checked(tool, calc_reward_kwargs={"scale": "x"})


async def test_tool_that_has_checked_rows_can_be_pickled():
    tool = LifecycleTool(Gsm8kTool())
    tool.check_row(RowData())
    copy = pickle.loads(pickle.dumps(tool))
    copy.check_row(RowData())
    assert copy.name == tool.name


async def test_a_tool_is_created_once_asked_for_its_reward_once_and_released_once():
    counter = Counter()
    async with Dispatcher([LifecycleTool(counter)]).session("t") as session:
        session.data = RowData(tools_kwargs={"count": KWARGS})
        first = await session.run([call(1)])
        second = await session.run([call(2, by=3), call(3)])
    assert [result.text for result in (*first, *second)] == ["12", "18", "20"]
    assert first[0].reward == 0.25
    assert first[0].metrics == {"n": 12}
    assert session.rewards == {"count": 10.0}
    assert counter.counts == {}
    assert [entry[0] for entry in counter.log] == ["create", *["execute"] * 3, "calc_reward", "release"]
    assert counter.log[0] == ("create", 10, {"create_kwargs": {"start": 10}})
    assert counter.log[1] == ("execute", 2, ["agent_data", "execute_kwargs"])
    assert counter.log[-2:] == [("calc_reward", 0.5), ("release", "done")]


async def test_two_trajectories_of_one_name_share_nothing():
    counter = Counter()
    tool = LifecycleTool(counter)
    one, two = Dispatcher([tool]).session("0.0"), Dispatcher([tool]).session("0.0")
    for session, by in ((one, 1), (two, 5)):
        await session.run([call(1, by=by)])
    texts = [(await session.run([call(2)]))[0].text for session in (one, two)]
    assert texts == ["2", "6"]
    await one.close()
    await two.close()
    assert counter.counts == {}


async def test_create_response_is_added_to_the_first_prompt():
    async with Dispatcher([tool := LifecycleTool(Counter())]).session("t") as session:
        session.data = RowData(tools_kwargs={"count": KWARGS})
        said = await session.open([tool])
    assert [(name, result.text) for name, result in said] == [("count", "from 10")]
    async with Dispatcher([tool]).session("t") as session:
        assert await session.open([tool]) == []


class NewStyle(Counter):
    """Takes each kind of arguments as one, as later releases do."""

    async def create(self, instance_id=None, create_kwargs=None):
        return await super().create(instance_id, **(create_kwargs or {}))

    async def execute(self, instance_id, parameters, *, agent_data):
        agent_data.extra_fields["calls"] = agent_data.extra_fields.get("calls", 0) + 1
        return (
            f"{agent_data.extra_fields['calls']} {agent_data.assistant_turns} {agent_data.tool_rewards}",
            1,
            {},
        )


async def test_arguments_come_as_one_where_a_method_takes_them_so():
    target = NewStyle()
    async with Dispatcher([LifecycleTool(target)]).session("t") as session:
        session.data = RowData(tools_kwargs={"count": {"create_kwargs": {"start": 4}}})
        texts = [(await session.run([call(n)]))[0].text for n in range(2)]
    assert texts == ["1 1 []", "2 2 [1.0]"]
    assert target.log[0][1] == 4


class Blocking:
    """Has no coroutine functions, and gives no more than an id."""

    tool_schema = SCHEMA.model_dump()

    def __init__(self):
        self.threads = []

    def create(self, instance_id=None):
        self.threads.append(threading.get_ident())
        return "mine"

    def execute(self, instance_id, parameters):
        self.threads.append(threading.get_ident())
        return instance_id

    def calc_reward(self, instance_id):
        self.threads.append(threading.get_ident())

    def release(self, instance_id):
        self.threads.append(threading.get_ident())


async def test_methods_that_block_run_off_the_loop():
    target = Blocking()
    async with Dispatcher([LifecycleTool(target)]).session("t") as session:
        assert (await session.run([call(1)]))[0].text == "mine"
    assert len(target.threads) == 4
    assert threading.get_ident() not in target.threads
    assert session.rewards == {}


@pytest.mark.parametrize("how", ["raise", "hang", "cancel"])
async def test_release_runs_after_any_outcome_of_the_calls(how):
    started = asyncio.Event()

    class Failing(Counter):
        async def execute(self, instance_id, parameters, **kwargs):
            started.set()
            if how == "raise":
                raise RuntimeError("broken")
            await asyncio.Event().wait()

    counter = Failing()
    dispatcher = Dispatcher([LifecycleTool(counter)], per_call_timeout=0.05 if how == "hang" else None)
    session = dispatcher.session("t")
    turn = asyncio.create_task(session.run([call(1)]))
    await started.wait()
    if how == "cancel":
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
    else:
        assert (await turn)[0].status is {"raise": Status.CRASH, "hang": Status.TIMEOUT}[how]
    await session.close()
    await session.close()
    assert [entry[0] for entry in counter.log] == ["create", "calc_reward", "release"]


async def test_a_reward_that_fails_is_logged_and_the_release_comes_all_the_same(caplog):
    class Unsure(Counter):
        async def calc_reward(self, instance_id):
            raise KeyError("no idea")

    counter = Unsure()
    async with Dispatcher([LifecycleTool(counter)]).session("t7") as session:
        await session.run([call(1)])
    assert session.rewards == {}
    assert counter.log[-1][0] == "release"
    assert "trajectory t7" in caplog.text
    assert "no idea" in caplog.text


async def test_text_as_reward_is_ignored_and_logged_once_with_the_tool(caplog):
    class Wordy(Counter):
        async def execute(self, instance_id, parameters, **kwargs):
            return "42\n", "42\n", {}

    tool = LifecycleTool(Wordy())
    for trajectory in ("a", "b"):
        async with Dispatcher([tool]).session(trajectory) as session:
            for result in await session.run([call(1), call(2)]):
                assert (result.status, result.text, result.reward) == (Status.OK, "42\n", None)
    assert [record.getMessage() for record in caplog.records] == [
        "tool count: execute() returned a text as reward, treated as None; expected a number or None",
    ]


async def test_failing_create_affects_only_its_calls(caplog):
    class Picky(Counter):
        async def create(self, instance_id=None, image=None, **kwargs):
            if image is None:
                raise ValueError("no image")
            return await super().create(instance_id, **kwargs)

    caplog.set_level(logging.CRITICAL)
    async with Dispatcher([tool := LifecycleTool(Picky()), double]).session("t") as session:
        assert await session.open([tool]) == []
        assert isinstance(session.begin_error, ValueError)
        results = await session.run([call(1), ParsedCall("double", {"n": 2}, "c2")])
    assert [result.status for result in results] == [Status.CRASH, Status.OK]


def double(n: int) -> int:
    """Double it."""
    return 2 * n


@pytest.mark.parametrize("method", ["create", "execute", "calc_reward", "release"])
async def test_a_method_that_wants_to_end_the_program_does_not(method, caplog):
    def leave(*_, **__):
        raise SystemExit(3)

    caplog.set_level(logging.CRITICAL)
    counter = Counter()
    setattr(counter, method, leave)
    tool = LifecycleTool(counter)
    async with Dispatcher([tool, double]).session("t") as session:
        await session.open([tool])
        results = await session.run([call(1), ParsedCall("double", {"n": 2}, "c2")])
    assert results[1].text == "4"
    assert (results[0].status is Status.CRASH) == (method in ("create", "execute"))
    assert [entry[0] for entry in counter.log].count("release") == (method not in ("create", "release"))


async def test_blocking_create_delays_others_for_at_most_one_call():
    end = asyncio.Event()

    class Stuck(Counter):
        async def create(self, instance_id=None, **kwargs):
            await end.wait()
            return await super().create(instance_id, **kwargs)

    dispatcher = Dispatcher([tool := LifecycleTool(Stuck()), double], per_call_timeout=0.05)
    session = dispatcher.session("t")
    assert await session.open([tool]) == []
    results = await session.run([call(1), ParsedCall("double", {"n": 2}, "c2")])
    assert [result.status for result in results] == [Status.TIMEOUT, Status.OK]
    end.set()
    await session.close()


async def test_a_return_value_that_is_not_json_becomes_its_text_with_its_reward():
    class Odd(Counter):
        async def execute(self, instance_id, parameters, **kwargs):
            return object(), 0.5, {}

    async with Dispatcher([LifecycleTool(Odd())]).session("t") as session:
        (result,) = await session.run([call(1)])
    assert (result.status, result.text, result.reward) == (Status.OK, "<object object>", 0.5)


async def test_images_and_videos_become_parts():
    image = Image.new("RGB", (3, 2))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG")

    class Camera(Counter):
        async def execute(self, instance_id, parameters, **kwargs):
            return ToolResponse(text="look", image=[image, buffer.getvalue()], video=[b"film"]), None, {}

    result = await LifecycleTool(Camera()).run({}, ToolContext("c"))
    assert [part.kind for part in result.parts] == ["text", "image", "image", "video"]
    shown = result.parts[1]
    assert isinstance(shown, ImagePart)
    assert Image.open(io.BytesIO(shown.data)).size == (3, 2)
    assert [part.media_type for part in result.parts[1:3]] == ["image/png", "image/jpeg"]
    assert result.reward is None


async def test_media_are_opened_by_the_names_that_verl_has_for_it(tmp_path):
    Image.new("RGBA", (30, 40)).save(tmp_path / "a.png")
    (tmp_path / "a.mp4").write_bytes(b"film")

    class Shower(Counter):
        async def execute(self, instance_id, parameters, **kwargs):
            image = process_image({"image": str(tmp_path / "a.png")}, image_patch_size=16)
            video = process_video({"video": f"file://{tmp_path / 'a.mp4'}"}, 16, fps=None)
            return ToolResponse(image=[image, process_image(image)], video=[video], text="both"), 0, {}

    async with Dispatcher([LifecycleTool(Shower())]).session("t") as session:
        (result,) = await session.run([call(1)])
    assert [part.kind for part in result.parts] == ["text", "image", "image", "video"]
    assert (result.text.split("\n")[0], result.reward, result.parts[3].data) == ("both", 0.0, b"film")
    for wrong in (3, {"other": 1}):
        with pytest.raises(ValueError, match="expected the bytes of a video file"):
            process_video(wrong)
    for options in ({"fps": 2.0}, {"nframes": 8}, {"fps_max_frames": 3}):
        with pytest.raises(TypeError, match=f"takes no {next(iter(options))}: "):
            process_video(b"video", **options)


async def test_numbers_of_other_libraries_are_rewards():
    class Numpy(Counter):
        async def execute(self, instance_id, parameters, **kwargs):
            import numpy as np

            return ToolResponse(text="x"), np.float32(0.5), {}

    assert (await LifecycleTool(Numpy()).run({}, ToolContext("c"))).reward == 0.5


class NoSchema(BaseTool):
    pass


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LifecycleTool(Counter), r"Counter is a class; .* write Counter\(config, tool_schema\)"),
        (lambda: LifecycleTool(object()), r"object has no create\(\)"),
        (lambda: LifecycleTool(type("T", (Counter,), {"release": None})()), r"T has no release\(\)"),
    ],
)
def test_object_without_lifecycle_methods_is_rejected(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_a_tool_without_schema_says_how_to_give_one():
    with pytest.raises(NotImplementedError, match="NoSchema needs a tool_schema"):
        NoSchema({})
    assert NoSchema({}, SCHEMA).get_openai_tool_schema() is SCHEMA
    target = Blocking()
    target.tool_schema = None
    with pytest.raises(TypeError, match="Blocking has no schema: expected tool_schema"):
        LifecycleTool(target)


def test_a_schema_keeps_all_that_it_says():
    assert LifecycleTool(Counter()).input_schema["properties"]["by"]["minimum"] == 1
    assert LifecycleTool(Counter(), name="other").name == "other"


def test_the_classes_of_verls_schemas_nest_and_have_attributes():
    schema = OpenAIFunctionToolSchema(
        type="function",
        function=OpenAIFunctionSchema(
            name="code_interpreter",
            description="Runs code.",
            parameters=OpenAIFunctionParametersSchema(
                type="object",
                properties={
                    "code": OpenAIFunctionPropertySchema(type="string", description="The code.", enum=None)
                },
                required=["code"],
            ),
            strict=False,
        ),
    )
    assert schema.function.parameters.properties["code"].type == "string"
    assert schema.function.parameters.required == ["code"]
    assert OpenAIFunctionSchema(name="f").parameters.properties == {}
    assert LifecycleTool(BaseTool({}, schema)).spec() == {
        "type": "function",
        "function": {
            "name": "code_interpreter",
            "description": "Runs code.",
            "parameters": {
                "type": "object",
                "properties": {"code": {"type": "string", "description": "The code."}},
                "required": ["code"],
            },
            "strict": False,
        },
    }


def test_schemas_of_verls_shape_keep_every_keyword_of_json_schema():
    parameters = {
        "type": "object",
        "properties": {
            "a": {"type": ["integer", "null"], "minimum": 1, "enum": [1, 2]},
            "b": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
            "c": True,
        },
        "additionalProperties": False,
    }
    schema = OpenAIFunctionToolSchema.model_validate({"function": {"name": "f", "parameters": parameters}})
    spec = LifecycleTool(BaseTool({}, schema)).spec()["function"]
    assert spec["parameters"] == {**parameters, "properties": {**parameters["properties"], "c": {}}}
    assert "strict" not in spec


async def test_base_tool_itself_lives_and_dies():
    tool = LifecycleTool(BaseTool({}, SCHEMA))
    async with Dispatcher([tool]).session(uuid.uuid4().hex) as session:
        assert (await session.run([call(1)]))[0].status is Status.OK
    assert session.rewards == {"count": 0.0}


async def test_none_from_columnar_files_is_not_an_argument():
    """Files of columns fill up with None what only other rows have."""

    class Strict(Counter):
        async def create(self, instance_id=None, start: int = 3):
            return await super().create(instance_id, start)

    tool = LifecycleTool(Strict())
    row = RowData.of({"tools_kwargs": {"count": {"create_kwargs": {"start": None, "level": None}}}})
    tool.check_row(row)
    session = Dispatcher([tool]).session("t")
    session.data = row
    (result,) = await session.run([call(1, by=1)])
    await session.close()
    assert result.text == "4"


async def test_renamed_tool_gets_the_row_arguments_of_its_new_name():
    tool = Renamed(LifecycleTool(Counter()), "tally")
    session = Dispatcher([tool]).session("t")
    session.data = RowData.of({"tools_kwargs": {"tally": KWARGS}})
    session.data.check(session.dispatcher.bound)
    (result,) = await session.run([ParsedCall("tally", {"by": 1}, "c")])
    await session.close()
    assert result.text == "12"
    with pytest.raises(ValueError, match="no parameter 'why_not'"):
        tool.check_row(RowData.of({"tools_kwargs": {"tally": {"release_kwargs": {"why_not": 1}}}}))


def test_the_decorator_of_verl_for_traces_changes_nothing():
    async def execute(self, instance_id, parameters):
        return ToolResponse(text="done"), 0.0, {}

    assert rollout_trace_op(execute) is execute
