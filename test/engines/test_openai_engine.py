"""`OpenAIEngine` over a server on this machine that answers by a script, and misbehaves by it."""

import asyncio
import json
import sys

import pytest
from fakes.chat_server import (
    STREAM_HEAD,
    ChatServer,
    call,
    completion,
    event,
    failure,
    pieces_of,
)
from fakes.web import page, raw, stalling
from helpers.chat_worlds import adder, ask, engine_of, rollout_of
from helpers.limit import limit

from torchrl_agentic import (
    InfrastructureError,
    MissingExtra,
    RateLimiter,
    Status,
    ToolCompose,
    evaluate,
)
from torchrl_agentic.collectors import AgentCollector
from torchrl_agentic.collectors.rollout_loop import CollectorError
from torchrl_agentic.engines import ContextExceeded, EngineUnusable, OpenAIEngine, Price, Usage
from torchrl_agentic.engines import openai_engine as module
from torchrl_agentic.records import Recorder, read_records
from torchrl_agentic.testing import ChatEngineContract

KEY = "sk-secret-0123456789"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def answering(body, number):
    """Call a tool once, with an id that the service repeats in each turn; then answer."""
    if body["messages"][-1]["role"] == "tool":
        return completion("5", [call("add", {"a": 5, "b": 0})] if len(body["messages"]) < 4 else ())
    return completion(None, [call("add", {"a": 2, "b": 3})])


@pytest.mark.parametrize("stream", [False, True])
class TestContract(ChatEngineContract):
    tools = (TOOL,)

    @pytest.fixture(autouse=True)
    async def serve(self, stream):
        async with ChatServer(answering) as server:
            self.options = {"stream": stream, "max_concurrent": 4}
            self.server = server
            yield

    async def make(self):
        return engine_of(self.server, **self.options)


# What is sent


async def test_a_request_has_the_form_of_the_api_and_only_the_options_that_were_given():
    async with ChatServer([completion("hi")]) as server:
        engine = engine_of(server, model="m", temperature=0.5, extra_body={"min_p": 0.1}, api_key=KEY)
        messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
        await engine.chat(messages, tools=[TOOL], max_tokens=7, key="a")
        await engine.close()
    assert server.bodies == [
        {
            "model": "m",
            "messages": messages,
            "tools": [TOOL],
            "max_tokens": 7,
            "temperature": 0.5,
            "min_p": 0.1,
            "stream": False,
        }
    ]
    assert server.visits[0].headers["authorization"] == f"Bearer {KEY}"


async def test_seeds_differ_between_trajectories_and_turns_and_repeat_with_the_program():
    async def seeds(seed):
        async with ChatServer([completion("hi")]) as server:
            engine = engine_of(server, seed=seed)
            for key, turns in (("t/0.0@c0", 1), ("t/0.1@c0", 1), ("t/0.0@c0", 3)):
                await ask(engine, key, [{"role": "user", "content": "x"}] * turns)
            await engine.close()
        return [body["seed"] for body in server.bodies]

    first = await seeds(1)
    assert len(set(first)) == 3
    assert await seeds(1) == first
    assert not set(await seeds(2)) & set(first)


async def test_a_model_that_wants_another_name_for_the_bound_gets_it():
    async def script(visit):
        body = json.loads(visit.body)
        if "max_tokens" in body:
            text = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
            await failure("400 Bad Request", text, param="max_tokens")(visit)
        else:
            await page(json.dumps(completion("hi")).encode(), "application/json")(visit)

    async with ChatServer([script]) as server:
        engine = engine_of(server)
        assert [(await ask(engine)).text for _ in range(2)] == ["hi", "hi"]
        await engine.close()
    assert ["max_tokens" in body for body in server.bodies] == [True, False, False]


async def test_a_service_that_streams_without_usage_is_asked_without_it():
    def script(body, number):
        if "stream_options" in body:
            return failure("400 Bad Request", "Unrecognized request argument: stream_options")
        return completion("hi", usage=None)

    async with ChatServer(script) as server:
        engine = engine_of(server, stream=True)
        assert [(await ask(engine)).text for _ in range(2)] == ["hi", "hi"]
        await engine.close()
    assert ["stream_options" in body for body in server.bodies] == [True, False, False]
    assert engine.usage == Usage(requests=2, uncounted=2, unpriced=2)


async def test_images_of_messages_and_of_tools_are_sent_as_urls():
    from io import BytesIO

    from PIL import Image

    from torchrl_agentic import ImagePart, ToolResult, tool

    buffer = BytesIO()
    Image.new("RGB", (2, 2), "red").save(buffer, "PNG")

    @tool
    def look() -> ToolResult:
        """Look at the picture."""
        return ToolResult((ImagePart(buffer.getvalue()),))

    async with ChatServer([completion(None, [call("look", {}, "c7")]), completion("red")]) as server:
        compose = ToolCompose([look], parser="openai", media=True)
        (found,) = await rollout_of(server, ["which color?"], compose=compose)
    said, answer, shown = server.bodies[1]["messages"][1:]
    assert (said["tool_calls"][0]["id"], answer["tool_call_id"]) == ("c7", "c7")
    assert isinstance(answer["content"], str)
    assert shown["role"] == "user"
    assert shown["content"][1]["image_url"]["url"].startswith("data:image/png;base64,")
    assert found.answer == "red"


# What is read


async def test_parallel_calls_run_with_their_ids_and_their_results_go_back_under_them():
    calls = [call("add", {"a": 1, "b": 2}, "x1"), call("add", {"a": 3, "b": 4}, "x2")]
    async with ChatServer([completion(None, calls), completion("done")]) as server:
        (found,) = await rollout_of(server, ["go"])
    assert [one.call_id for one in found.turns[0].outcome.calls] == ["x1", "x2"]
    assert server.bodies[1]["messages"][1:] == [
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "x1", "content": "3"},
        {"role": "tool", "tool_call_id": "x2", "content": "7"},
    ]
    assert (found.answer, found.reason, found.ledger) == ("done", "no_calls", None)


async def test_ids_that_a_service_repeats_or_leaves_out_become_unique():
    script = [
        completion(None, [call("add", {"a": 1, "b": 2}, "x"), call("add", {"a": 1, "b": 2}, "x")]),
        completion(None, [call("add", {"a": 1, "b": 2}, "x"), call("add", {"a": 1, "b": 2}, None)]),
        completion("done"),
    ]
    async with ChatServer(script) as server:
        (found,) = await rollout_of(server, ["go"])
    ids = [one.call_id for turn in found.turns for one in turn.outcome.calls]
    assert ids == ["x", "x_2", "x_3", "call_1_1"]
    sent = server.bodies[2]["messages"]
    assert [one["tool_call_id"] for one in sent if one["role"] == "tool"] == ids
    assert [one["id"] for message in sent for one in message.get("tool_calls", ())] == ids


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_kept_apart_from_the_text_and_in_the_record(name, stream, tmp_path):
    reply = completion("it is 5", **{name: "2 and 3, hm"})
    async with ChatServer([reply]) as server:
        compose = ToolCompose([adder()], parser="openai", recorder=(recorder := Recorder(tmp_path)))
        (found,) = await rollout_of(server, ["go"], compose=compose, stream=stream)
    recorder.close()
    (record,) = read_records(tmp_path)
    for message in (found.messages[-1], record.turns[0].message):
        assert (message.text, message.reasoning) == ("it is 5", "2 and 3, hm")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("given", "name"),
    [("auto", "reasoning"), ("auto", "reasoning_content"), ("thoughts", "reasoning"), (None, "reasoning")],
)
async def test_reasoning_goes_back_to_the_service(given: str | None, name: str, stream: bool):
    """By default in a tool loop, under the service's own name; always under a name that is asked for."""
    reply = completion(None, [call("add", {"a": 1, "b": 2})], **{name: "hm"})
    async with ChatServer([reply, completion("3"), completion("4")]) as server:
        engine = engine_of(server, reasoning_field=given, stream=stream)
        first = [{"role": "user", "content": "go"}]
        asked = await ask(engine, messages=first)
        called = {
            "role": "assistant",
            "content": None,
            "tool_calls": list(asked.tool_calls),
            "reasoning_content": "hm",
        }
        first += [called, {"role": "tool", "content": "3", "tool_call_id": asked.tool_calls[0]["id"]}]
        await ask(engine, messages=first)
        await ask(engine, messages=[*first, {"role": "user", "content": "and now?"}])
        await engine.close()
    key = name if given == "auto" else given
    sent = [body["messages"][1] for body in server.bodies[1:]]
    added = [{field: text for field, text in one.items() if text == "hm"} for one in sent]
    assert added[0] == ({} if key is None else {key: "hm"})
    assert added[1] == ({key: "hm"} if given == "thoughts" else {})


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_is_counted_for_the_engine_and_for_each_trajectory(stream):
    usage = {
        "prompt_tokens": 1000,
        "completion_tokens": 100,
        "prompt_tokens_details": {"cached_tokens": 600},
        "completion_tokens_details": {"reasoning_tokens": 40},
    }
    async with ChatServer([completion("hi", usage=usage)]) as server:
        engine = engine_of(server, price=Price(2.0, 10.0, cached=0.5), stream=stream)
        for key in ("a", "b", "a"):
            await ask(engine, key)
        await engine.close()
    each = Usage(1, 1000, 600, 100, 40, (400 * 2.0 + 600 * 0.5 + 100 * 10.0) / 1e6)
    assert engine.usage_of("b") == each
    assert engine.usage_of("a") == each + each
    assert engine.usage.cost == pytest.approx(3 * each.cost)
    assert engine.usage_of("c") == Usage()


async def test_the_length_of_a_conversation_is_that_of_its_latest_request():
    usages = [{"prompt_tokens": 10, "completion_tokens": 5}, {"prompt_tokens": 30, "completion_tokens": 7}]
    async with ChatServer([*(completion("hi", usage=one) for one in usages), completion("hi")]) as server:
        engine = engine_of(server)
        assert engine.conversation_tokens("a") == 0
        lengths = []
        for key in ("a", "a", "b"):
            await ask(engine, key)
            lengths.append(engine.conversation_tokens(key))
        assert (lengths, engine.conversation_tokens("a")) == ([15, 37, 17], 37)
        await engine.close()


@pytest.mark.parametrize(
    ("options", "may"),
    [
        ({"base_url": "http://127.0.0.1:9/v1"}, True),
        ({"base_url": "https://api.openai.com/v1"}, False),
        ({"base_url": "https://api.openai.com/v1", "price": Price(1, 2)}, True),
    ],
)
def test_the_cost_of_openai_is_known_only_by_a_price(options, may):
    assert OpenAIEngine("m", api_key=KEY, **options).may_know_cost == may


async def test_a_bound_on_the_tokens_of_a_trajectory_is_enforced_by_the_usage_of_responses():
    def script(body, number):
        used = {"prompt_tokens": 100 * len(body["messages"]), "completion_tokens": 20}
        return completion(None, [call("add", {"a": 1, "b": number})], usage=used)

    async with ChatServer(script) as server:
        engine = engine_of(server)
        compose = ToolCompose([adder()], parser="openai")
        tasks = [{"query": "go", "answer": "1"}]
        result = await asyncio.to_thread(
            evaluate, tasks, compose, engine, max_turns=9, max_trajectory_tokens=450, max_new_tokens=200
        )
        await engine.close()
    (sample,) = result.samples
    assert (sample.reason, sample.n_calls) == ("max_trajectory_tokens", 3)
    assert sample.trajectory.truncated
    assert [len(body["messages"]) for body in server.bodies] == [1, 3, 5], "120, 320 and 520 tokens"
    assert [body["max_tokens"] for body in server.bodies] == [200, 200, 130]


async def test_the_usage_of_old_trajectories_is_forgotten(monkeypatch):
    monkeypatch.setattr(module, "USAGES_KEPT", 2)
    async with ChatServer([completion("hi")]) as server:
        engine = engine_of(server)
        for key in ("a", "b", "a", "c"):
            await ask(engine, key)
        await engine.close()
    assert [engine.usage_of(key).requests for key in "abc"] == [2, 0, 1]


# Many at once


async def test_forty_questions_with_tools_are_asked_at_the_same_time():
    """The server answers nobody before all forty ask it, so that a queue of requests would never end."""

    def script(body, number):
        first, last = body["messages"][0]["content"], body["messages"][-1]
        if last["role"] == "tool":
            return completion(last["content"])
        return completion(None, [call("add", {"a": int(first), "b": 1}, "c")])

    async with ChatServer(script, crowd=40) as server:
        found = await rollout_of(server, [str(number) for number in range(40)], max_concurrent=40)
    assert server.peak == 40
    assert [one.answer for one in found] == [str(number + 1) for number in range(40)]


async def test_no_more_requests_run_than_max_concurrent():
    async with ChatServer([completion("hi")], crowd=3) as server:
        engine = engine_of(server, max_concurrent=3)
        await asyncio.gather(*(ask(engine, str(number)) for number in range(10)))
        await engine.close()
    assert (server.peak, len(server.bodies)) == (3, 10)


# Failures that pass


@pytest.mark.parametrize(
    "act",
    [
        failure("500 Internal Server Error", "boom"),
        failure("502 Bad Gateway", "boom"),
        failure("408 Request Timeout", "late"),
        page(b'{"choices": [{"mess', "application/json"),
        page(b"[" * 100_000, "application/json"),
        page(b'{"choices": []}', "application/json"),
        page(b'{"choices": [{"message": {"content": 5}}]}', "application/json"),
        page(b'{"choices": "none"}', "application/json"),
        page(b"null", "application/json"),
        page(b"\xff\xfe", "application/json"),
        page(b"upstream went away", "text/plain"),
        page(b'{"error": {"message": "no worker", "code": 502}}', "application/json"),
        page(json.dumps(completion("half", finish="error")).encode(), "application/json"),
        raw(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"),
        raw(b""),
    ],
    ids=range(15),
)
async def test_a_failure_that_passes_costs_nothing_but_a_retry(act):
    async with ChatServer([act, act, completion("hi")]) as server:
        engine = engine_of(server)
        assert (await ask(engine)).text == "hi"
        await engine.close()
    assert (len(server.bodies), engine.usage.requests) == (3, 1)


@pytest.mark.parametrize(
    "rest",
    [
        b"",
        b"data: {nonsense\n\n",
        event({"error": {"message": "worker died", "code": 500}}),
        event({"choices": [{"index": 0, "delta": "x"}]}),
        event({"choices": [{"index": 0, "delta": {}, "finish_reason": "abort"}]}),
    ],
    ids=range(5),
)
async def test_a_stream_that_breaks_off_is_asked_for_again_and_its_pieces_are_dropped(rest):
    half = raw(STREAM_HEAD, *map(event, pieces_of(completion("good bye"))[:3]), rest)
    async with ChatServer([half, completion("hi")]) as server:
        engine = engine_of(server, stream=True)
        assert (await ask(engine)).text == "hi"
        await engine.close()
    assert len(server.bodies) == 2


async def test_a_service_that_keeps_failing_is_an_infrastructure_error_after_the_retries():
    async with ChatServer([failure("500 Internal Server Error", "boom")]) as server:
        engine = engine_of(server, retries=2)
        with pytest.raises(InfrastructureError, match="responded with 500: boom"):
            await ask(engine)
        await engine.close()
    assert len(server.bodies) == 3


async def test_a_service_that_goes_down_is_an_infrastructure_error():
    async with ChatServer([completion("hi")]) as server:
        engine = OpenAIEngine("m", base_url=server.base_url, retries=1, backoff_s=0.001)
        await ask(engine)
    with pytest.raises(InfrastructureError, match="cannot be reached"):
        await ask(engine)
    await engine.close()


async def test_a_service_that_was_never_reached_ends_a_run_at_once():
    async with ChatServer([completion("hi")]) as server:
        url = server.base_url
    engine = OpenAIEngine("m", base_url=url, retries=1, backoff_s=0.001)
    with pytest.raises(EngineUnusable, match=r"cannot be reached.*check base_url and that the server runs"):
        await ask(engine)
    await engine.close()


def test_the_options_of_sampling_can_be_read():
    options = {"temperature": 0.2, "seed": 3, "extra_body": {"top_k": 5}}
    assert OpenAIEngine("m", api_key="k", **options).sampling == {"temperature": 0.2, "seed": 3, "top_k": 5}
    assert OpenAIEngine("m", api_key="k").sampling == {}


@pytest.mark.parametrize("act", [stalling(), stalling(STREAM_HEAD, b"data: {")], ids=["silent", "half"])
async def test_a_try_that_takes_too_long_ends(act):
    async with ChatServer([act]) as server:
        engine = engine_of(server, retries=1, timeout=0.05)
        with pytest.raises(InfrastructureError, match=r"did not answer within 0\.05 s"):
            await ask(engine)
        await engine.close()
    assert len(server.bodies) <= 2  # a try may end before its request has arrived


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_without_end_is_given_up(stream, monkeypatch):
    monkeypatch.setattr(module, "MAX_RESPONSE_BYTES", 100_000)
    kind = b"text/event-stream" if stream else b"application/json"
    endless = raw(
        b"HTTP/1.1 200 OK\r\nContent-Type: " + kind + b"\r\nConnection: close\r\n\r\n", b"x" * 200_000
    )
    async with ChatServer([endless]) as server:
        engine = engine_of(server, stream=stream)
        with pytest.raises(InfrastructureError, match="sent more than 100,000 bytes"):
            await ask(engine)
        await engine.close()


# An overloaded service


async def test_one_429_holds_all_requests_of_the_engine_back_as_long_as_the_service_asks():
    """A clock that the test moves: the second request must not be sent while the pause of the first lasts."""
    now, timers = [0.0], []
    limiter = RateLimiter(
        max_concurrent=8, clock=lambda: now[0], call_later=lambda s, act: timers.append((now[0] + s, act))
    )
    busy = failure("429 Too Many Requests", "slow down", {"Retry-After": "0.01"})
    async with ChatServer([busy, completion("hi")]) as server:
        engine = engine_of(server, limiter=limiter)
        first = asyncio.create_task(ask(engine, "a"))
        async with asyncio.timeout(limit(10)):
            while limiter.stats().overloads == 0:
                await asyncio.sleep(0.001)
        second = asyncio.create_task(ask(engine, "b"))
        async with asyncio.timeout(limit(10)):
            while limiter.stats().waiting < 2:
                await asyncio.sleep(0.001)
        assert limiter.stats().paused_s > 0
        assert len(server.bodies) == 1
        now[0] = 1.0
        for _, act in timers[:]:
            act()
        assert [one.text for one in await asyncio.gather(first, second)] == ["hi", "hi"]
        await engine.close()
    assert len(server.bodies) == 3


async def test_overloads_do_not_count_as_failures_but_end_too():
    busy = failure("429 Too Many Requests", "slow down", {"Retry-After-Ms": "1"})
    async with ChatServer([*[busy] * 6, completion("hi")]) as server:
        engine = engine_of(server, retries=0)
        assert (await ask(engine)).text == "hi"
        await engine.close()
    async with ChatServer([busy]) as server:
        engine = engine_of(server, retries=0)
        with pytest.raises(InfrastructureError, match="responded with 429: slow down"):
            await ask(engine)
        await engine.close()
    assert len(server.bodies) == module.BUSY_TRIES


# A service that refuses everything


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (failure("401 Unauthorized", f"Incorrect API key provided: {KEY}"), "check api_key"),
        (failure("402 Payment Required", "Insufficient Balance"), "no credit"),
        (failure("403 Forbidden", "not yours"), "may use this model"),
        (failure("404 Not Found", "no such model"), "check model and base_url, which usually ends in /v1"),
        (failure("429 Too Many Requests", "You exceeded", code="insufficient_quota"), "no credit"),
        (failure("400 Bad Request", "must be at most 2", param="temperature"), "check the options"),
        (page(b"<html>Welcome</html>", "text/html"), "web page"),
    ],
    ids=["key", "payment", "forbidden", "model", "quota", "option", "website"],
)
async def test_a_mistake_in_the_settings_ends_a_run_at_once_and_never_shows_the_key(act, says, caplog):
    async with ChatServer([act]) as server:
        engine = engine_of(server, api_key=KEY, max_concurrent=1)
        with pytest.raises(EngineUnusable, match=says) as raised:
            await rollout_of(server, ["a", "b"], engine=engine)
        assert len(server.bodies) <= 2  # those that had begun, none of them twice

        def collect():
            with AgentCollector(
                ToolCompose([adder()], parser="openai"),
                engine=engine,
                tokenizer=None,
                tasks=[{"query": str(n)} for n in range(1000)],
                on_failure="replace",
            ) as collector:
                list(collector.trajectories())

        with pytest.raises(CollectorError) as collected:
            await asyncio.to_thread(collect)
        assert isinstance(collected.value.__cause__, EngineUnusable)
        assert len(server.bodies) < 10
        await engine.close()
    shown = [str(raised.value), repr(raised.value), str(collected.value), repr(engine), caplog.text]
    assert not any(KEY in text for text in shown)
    assert raised.value.__cause__ is None


async def test_one_request_that_is_refused_is_an_error_of_its_conversation_and_many_are_one_of_the_engine():
    bad = failure("400 Bad Request", "invalid image", param="messages.[0].content")
    async with ChatServer([bad, completion("hi"), bad]) as server:
        engine = engine_of(server)
        with pytest.raises(ValueError, match="responded with 400: invalid image"):
            await ask(engine)
        assert (await ask(engine)).text == "hi"
        for _ in range(module.REFUSALS_IN_A_ROW - 1):
            with pytest.raises(ValueError, match="invalid image"):
                await ask(engine)
        with pytest.raises(EngineUnusable, match="invalid image"):
            await ask(engine)
        await engine.close()


# Conversations that end


async def test_a_conversation_that_is_too_long_ends_truncated():
    too_long = failure(
        "400 Bad Request",
        "This model's maximum context length is 50 tokens. However, your messages resulted in 60 tokens.",
        code="context_length_exceeded",
    )
    async with ChatServer([completion(None, [call("add", {"a": 1, "b": 2})]), too_long]) as server:
        (found,) = await rollout_of(server, ["go"])
        engine = engine_of(server)
        with pytest.raises(ContextExceeded, match="maximum context length"):
            await ask(engine)
        await engine.close()
    assert (found.reason, found.truncated, found.n_calls) == ("max_trajectory_tokens", True, 1)
    assert not found.messages[-1].is_complete


@pytest.mark.parametrize(
    "words",
    [
        "This model's maximum context length is 120 tokens and your request has 100 input tokens",
        "the model's maximum context length of 120 tokens: 100 tokens from the input messages and 64 tokens",
        "maximum context length is 120 tokens. You requested 164 (100 in the messages, 64 in the completion)",
        "This model supports at most 20 completion tokens, whereas you provided 64.",
        "max_tokens=64 cannot be greater than max_model_len=20. Please request fewer output tokens.",
    ],
    ids=range(5),
)
async def test_a_bound_that_the_context_does_not_leave_is_lowered(words):
    def script(body, number):
        if body["max_tokens"] > 20:
            return failure("400 Bad Request", words, code=400, param="max_tokens")
        return completion("hi", finish="length")

    async with ChatServer(script) as server:
        engine = engine_of(server)
        found = await ask(engine, max_tokens=64)
        await engine.close()
    assert [body["max_tokens"] for body in server.bodies] == [64, 20]
    assert (found.text, found.is_complete) == ("hi", False)


async def test_a_service_that_takes_no_bound_at_all_is_not_asked_forever():
    def script(body, number):
        return failure("400 Bad Request", f"supports at most {body['max_tokens'] - 1} completion tokens")

    async with ChatServer(script) as server:
        engine = engine_of(server)
        with pytest.raises(ValueError, match="completion tokens"):
            await ask(engine, max_tokens=64)
        await engine.close()
    assert len(server.bodies) == 1 + module.MAX_LOWERINGS


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (completion(None, refusal="I will not."), "I will not."),
        (completion("Well", finish="content_filter"), "content_filter"),
        (failure("400 Bad Request", "against our policy", code="content_filter"), "against our policy"),
        (failure("403 Forbidden", "your input was flagged"), "flagged"),
    ],
    ids=["refusal", "filtered", "policy", "moderation"],
)
async def test_a_refusal_ends_a_trajectory_and_is_in_the_record(reply, says, tmp_path):
    async with ChatServer([reply]) as server:
        compose = ToolCompose([adder()], parser="openai", recorder=(recorder := Recorder(tmp_path)))
        (found,) = await rollout_of(server, ["go"], compose=compose)
    recorder.close()
    (record,) = read_records(tmp_path)
    assert (found.reason, found.terminated, record.termination_reason) == ("refused", True, "refused")
    for message in (found.messages[-1], record.turns[-1].message):
        assert says in message.refusal


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("finish", "refusal"),
    [("content_filter", None), ("content_filter: RECITATION", None), ("SAFETY", None), ("sensitive", None),
     ("content-filter", None), ("stop", "I will not.")],
)  # fmt: skip
async def test_a_refused_answer_runs_no_call_and_is_not_cut_off(finish, refusal, stream):
    reply = completion("so", [call("add", {"a": 2, "b": 3})], finish=finish, refusal=refusal)
    async with ChatServer([reply, completion("never asked for")]) as server:
        (found,) = await rollout_of(server, ["go"], stream=stream)
    assert (found.reason, found.terminated, found.truncated, found.is_cut) == ("refused", True, False, False)
    assert (found.n_calls, len(server.bodies)) == (0, 1)
    assert found.messages[-1].refusal == refusal or finish in found.messages[-1].refusal
    assert [span.status for span in found.spans if span.cause == "engine"] == ["refused"]


@pytest.mark.parametrize("finish", ["MAX_TOKENS", "model_context_window_exceeded"])
async def test_other_names_of_a_bound_are_known(finish):
    async with ChatServer([completion("so", [call("add", {"a": 2, "b": 3})], finish=finish)]) as server:
        (found,) = await rollout_of(server, ["go"])
    assert (found.reason, found.is_cut, found.n_calls) == ("max_new_tokens", True, 0)


@pytest.mark.parametrize("finish", ["error", "network_error", "insufficient_system_resource"])
async def test_an_answer_that_the_service_could_not_complete_is_asked_for_again(finish):
    async with ChatServer([completion("so", finish=finish), completion("5")]) as server:
        (found,) = await rollout_of(server, ["go"])
    assert (found.answer, found.reason, len(server.bodies)) == ("5", "no_calls", 2)


@pytest.mark.parametrize("stream", [False, True])
async def test_half_a_call_never_runs_when_the_answer_was_cut_off(stream):
    half = completion("so", [call("add", '{"a": 1, "b"')], finish="length")
    async with ChatServer([half]) as server:
        (found,) = await rollout_of(server, ["go"], stream=stream)
    assert (found.n_calls, found.messages[-1].is_complete) == (0, False)
    assert found.messages[-1].tool_calls[0]["function"]["arguments"] == '{"a": 1, "b"'


@pytest.mark.parametrize(
    "item",
    [
        call("add", '{"a": 1, "b"'),
        call("add", "nonsense"),
        call("", {"a": 1}),
        "add",
        {"id": "c1", "type": "function", "function": None},
        {"id": 5, "function": {"name": ["add"], "arguments": 7}},
    ],
    ids=range(6),
)
async def test_a_call_that_cannot_be_read_is_answered_and_the_conversation_goes_on(item):
    """Servers read the arguments of earlier calls for their template: nonsense must not go back to them."""
    async with ChatServer([completion(None, [item]), completion("sorry")]) as server:
        (found,) = await rollout_of(server, ["go"])
    (result,) = found.turns[0].outcome.results
    assert result.status is Status.MALFORMED
    assert (found.answer, found.reason) == ("sorry", "no_calls")
    said, answer = server.bodies[1]["messages"][1:]
    (sent,) = said["tool_calls"]
    assert isinstance(json.loads(sent["function"]["arguments"]), dict)
    assert sent["function"]["name"]
    assert answer["tool_call_id"] == sent["id"] == found.turns[0].outcome.calls[0].call_id


# Rules of engines


async def test_no_loss_is_fed():
    async with ChatServer([completion("hi")]) as server:
        engine = engine_of(server)

        def iterate():
            with AgentCollector(
                ToolCompose([adder()], parser="openai"), engine=engine, tokenizer=None, tasks=[{"query": "x"}]
            ) as collector:
                next(iter(collector))

        with pytest.raises(TypeError, match="no tokens to train on, since the engine takes messages"):
            await asyncio.to_thread(iterate)
        await engine.close()
    assert server.bodies == []


async def test_weights_are_refused():
    async with ChatServer([completion("hi")]) as server:
        engine = engine_of(server)
        with pytest.raises(ValueError, match="cannot be updated"):
            await engine.update({"w": 1})
        assert engine.version == 0
        await engine.close()


async def test_one_engine_serves_several_event_loops():
    async with ChatServer([completion("hi")]) as server:
        engine = engine_of(server)
        assert (await ask(engine)).text == "hi"
        (found,) = await rollout_of(server, ["go"], engine=engine)
        assert found.answer == "hi"
        await engine.close()


async def test_a_client_of_the_caller_is_used_and_stays_open():
    import openai

    async with ChatServer([failure("500 Internal Server Error", "boom"), completion("hi")]) as server:
        client = openai.AsyncOpenAI(base_url=server.base_url, api_key=KEY)
        engine = OpenAIEngine("m", client=client, retries=1, backoff_s=0.001)
        assert (await ask(engine)).text == "hi"
        await engine.close()
        assert not client.is_closed()
        await client.close()
    assert len(server.bodies) == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"api_key": "k", "client": object()}, "client= has its own"),
        ({"base_url": "127.0.0.1:8000"}, "base_url is a URL such as"),
        ({"max_concurrent": 0}, "max_concurrent must be 1"),
        ({"model": ""}, "model is the name"),
        ({"retries": -1}, "retries must be 0"),
        ({"timeout": 0}, "timeout must be above 0"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_wrong_arguments_are_errors(options, says):
    with pytest.raises(ValueError, match=says):
        OpenAIEngine(**{"model": "m", **options})


def test_a_key_of_the_environment_is_for_openai_and_not_for_another_url(monkeypatch):
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ValueError, match="OPENAI_API_KEY"):
        OpenAIEngine("m")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    assert repr(OpenAIEngine("m")) == "OpenAIEngine('m', base_url='https://api.openai.com/v1')"

    async def sent():
        async with ChatServer([completion("hi")]) as server:
            engine = OpenAIEngine("m", base_url=server.base_url)
            await ask(engine)
            await engine.close()
            return server.visits[0].headers["authorization"]

    assert KEY not in asyncio.run(sent())


def test_a_secret_in_the_url_is_not_shown():
    engine = OpenAIEngine("m", base_url=f"https://user:{KEY}@example.com/v1?key={KEY}")
    assert repr(engine) == "OpenAIEngine('m', base_url='https://example.com/v1')"


def test_without_the_client_the_error_names_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(MissingExtra, match=r"pip install 'torchrl-agentic\[openai\]'"):
        OpenAIEngine("m", base_url="http://127.0.0.1:1/v1")
