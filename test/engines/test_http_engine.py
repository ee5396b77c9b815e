"""`HTTPEngine` beside servers of both kinds, that behave and misbehave."""

import asyncio
import itertools
import json
from pathlib import Path
from typing import ClassVar

import aiohttp
import pytest
import torch
from fakes.token_server import STOP, TokenServer, answer_of
from fakes.web import page, raw, stalling
from tensordict import TensorDict

from torchrl_agentic.engines import EnginePressure, HTTPEngine
from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.testing import EngineContract
from torchrl_agentic.tools.service import Patience

SOON = Patience(tries=3, first_s=0.001, longest_s=0.002)
WEIGHTS = {"model.norm.weight": torch.ones(2)}
KINDS = ("vllm", "sglang")
COMMANDS = {
    "vllm": ["/pause", "/collective_rpc", "/resume"],
    "sglang": ["/pause_generation", "/update_weights_from_disk", "/continue_generation"],
}
PATHS = {"vllm": "/inference/v1/generate", "sglang": "/generate"}


class Tokenizer:
    """As much of a tokenizer as an engine needs."""

    eos_token_id, pad_token_id, pad_token = STOP, 0, "<pad>"

    def __len__(self):
        return 100


def engine_of(server, **options):
    return HTTPEngine(
        server.url("/"), kind=server.kind, tokenizer=Tokenizer(), **{"patience": SOON, **options}
    )


class Model(torch.nn.Module):
    """A module with the weights of a checkpoint, which no engine may call."""

    def __init__(self):
        super().__init__()
        self.model = torch.nn.ModuleDict({"norm": torch.nn.RMSNorm(2)})


class HTTPEngineContract(EngineContract):
    other_weights = (Model(), TensorDict(WEIGHTS), list(WEIGHTS.items()))
    prompts: ClassVar = [[5, 6, 7, 8], [5, 6, 7, 9], [1, 3, 4, 5]]
    stop_ids: ClassVar = {STOP}
    max_tokens = 32
    too_long: ClassVar = [5] * 64
    weights: ClassVar = WEIGHTS
    server: ClassVar[dict]

    async def make(self):
        server = await TokenServer(**self.server).__aenter__()
        engine = engine_of(server, max_concurrent=4)
        close = engine.close

        async def close_both():
            await close()
            await server.__aexit__(None, None, None)

        engine.close = close_both
        return engine


class TestVLLM(HTTPEngineContract):
    server: ClassVar = {"kind": "vllm"}


class TestSGLang(HTTPEngineContract):
    server: ClassVar = {"kind": "sglang"}


class TestSGLangIncremental(HTTPEngineContract):
    server: ClassVar = {"kind": "sglang", "is_incremental": True}


PROMPT = [5, 6, 7, 8]
WHOLE = answer_of(PROMPT)


def response(kind, ids, log_probs, finish="stop"):
    """A response as the server writes it, right or wrong."""
    if kind == "vllm":
        content = None if log_probs is None else {"content": [{"logprob": each} for each in log_probs]}
        return {"choices": [{"token_ids": ids, "logprobs": content, "finish_reason": finish}]}
    pairs = [[each, 0, None] for each in log_probs or ()]
    meta = {
        "output_token_logprobs": pairs,
        "completion_tokens": len(ids),
        "finish_reason": {"type": finish},
    }
    return {"output_ids": ids, "meta_info": meta}


def json_page(data, status="200 OK", headers=None):
    return page(json.dumps(data).encode(), "application/json", status, headers)


def in_turn(*acts):
    """A handler that does one after the other, and the last for ever."""
    left = itertools.chain(acts, itertools.repeat(acts[-1]))

    async def act(visit):
        await next(left)(visit)

    return act


async def sample_from(kind, *acts, stream=False, **options):
    """Sample from a server that answers with these handlers; return the result and the number of visits."""
    async with TokenServer(kind) as server:
        ours = server.acts[PATHS[kind]]
        server.acts[PATHS[kind]] = in_turn(*(ours if act is None else act for act in acts))
        engine = engine_of(server, **options)
        pieces = []
        try:
            found = await engine.sample(
                PROMPT, max_tokens=32, key="a", on_ids=pieces.extend if stream else None
            )
        except Exception as error:
            error.visits = len(server.visits)
            raise
        finally:
            await engine.close()
        assert pieces == (list(found.ids) if stream else [])
        return found, len(server.visits)


WRONG = {
    "ids outside the vocabulary": (([5, 100, 2], [-1, -1, -1]), "sampled id 100; the vocabulary has 100"),
    "negative ids": (([5, -1, 2], [-1, -1, -1]), "sampled id -1"),
    "texts for ids": ((["a", "b"], [-1, -1]), "not integers"),
    "no ids": (([], []), "sampled no tokens"),
    "too many ids": (([5] * 40 + [2], [-1] * 41), "sampled 41 tokens; at most 32"),
    "fewer log-probs": (([5, 6, 2], [-1, -1]), "2 log-probabilities of 3 tokens"),
    "no log-probs": (([5, 6, 2], None), "0 log-probabilities of 3 tokens"),
    "log-probs that are not numbers": (([5, 2], [-1, None]), "not finite"),
    "infinite log-probs": (([5, 2], [-1, float("-inf")]), "no JSON|not finite"),
    "infinite log-probs of both signs": (([5, 2], [float("inf"), float("-inf")]), "not finite"),
    "a log-prob beyond floats": (([5, 2], [-1, -(10**400)]), "not finite"),
    "a log-prob beyond 32-bit floats": (([5, 2], [-1, -1e39]), "not finite"),
    "another stop token": (([5, 6], [-1, -1]), "stopped at id 6, which is not one of the stop ids"),
    "an unknown finish": (([5, 6], [-1, -1], "tired"), "ended a request with 'tired'"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", WRONG)
async def test_a_wrong_answer_is_an_error_that_says_what_is_wrong(kind, wrong):
    given, message = WRONG[wrong]
    with pytest.raises(InfrastructureError, match=message):
        await sample_from(kind, json_page(response(kind, *given)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("owner", "name"), [(aiohttp.ClientSession, "request"), (aiohttp.ClientResponse, "read")]
)
async def test_a_connection_error_that_aiohttp_does_not_wrap_is_one_of_the_server(
    kind, owner, name, monkeypatch
):
    method, errors = getattr(owner, name), [ConnectionResetError("Connection lost")]

    def break_off(*args, **options):
        if errors:
            raise errors.pop()
        return method(*args, **options)

    monkeypatch.setattr(owner, name, break_off)
    found, _ = await sample_from(kind, None, None)
    assert found.ids == WHOLE
    errors += [ConnectionResetError("Connection lost") for _ in range(SOON.tries)]
    with pytest.raises(InfrastructureError, match="cannot be reached: Connection lost"):
        await sample_from(kind, *[None] * SOON.tries)


@pytest.mark.parametrize("kind", KINDS)
async def test_log_probs_that_are_rounded_above_0_are_0(kind):
    found, _ = await sample_from(kind, json_page(response(kind, [5, 6, 2], [1e-7, -1, 0])))
    assert list(found.log_probs) == [0.0, -1.0, 0.0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("body", [b"<html>login</html>", b"[]", b"{}", b"3", b'{"text": "hello"}', b""])
async def test_an_answer_of_another_server_is_an_error_that_shows_it(kind, body):
    with pytest.raises(InfrastructureError, match=r"no JSON|no answer with token ids"):
        await sample_from(kind, page(body, "application/json"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "failure",
    [
        page(b"overloaded", status="503 Service Unavailable", headers={"Retry-After": "0"}),
        page(b"slow down", status="429 Too Many Requests", headers={"Retry-After": "0"}),
        page(b"oops", status="500 Internal Server Error"),
        raw(b""),
        raw(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"),
        raw(b"garbage\r\n\r\n"),
    ],
    ids=["503", "429", "500", "closed", "cut", "garbage"],
)
async def test_a_request_that_fails_is_made_again(kind, stream, failure):
    found, visits = await sample_from(kind, failure, None, stream=stream)
    assert (found.ids, found.finish, visits) == (WHOLE, "stop", 2)
    with pytest.raises(InfrastructureError) as caught:
        await sample_from(kind, failure, stream=stream)
    assert caught.value.visits == SOON.tries


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_that_does_not_answer_in_time_is_tried_again(kind):
    patience = Patience(tries=100_000, first_s=0.001, longest_s=0.002)
    found, visits = await sample_from(kind, stalling(), None, timeout=1.0, patience=patience)
    assert found.ids == WHOLE
    assert visits > 1


async def test_a_server_that_is_not_there_is_an_error():
    async with TokenServer("vllm") as server:
        engine = engine_of(server)
    with pytest.raises(InfrastructureError, match="cannot be reached"):
        await engine.sample(PROMPT, max_tokens=32, key="a")
    await engine.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("status", ["400 Bad Request", "401 Unauthorized", "404 Not Found"])
async def test_a_refused_request_is_a_value_error_with_the_text_of_the_server(kind, status):
    with pytest.raises(ValueError, match=f"{status[:3]}: such a prompt") as caught:
        await sample_from(kind, page(b"such a prompt", status=status))
    assert caught.value.visits == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("end", [b"Content-Length: 9999\r\n\r\n", b"Connection: close\r\n\r\n"])
@pytest.mark.parametrize("cut", [b"", b'data: {"choices": [{"tok', b"data: {}"[:-2]])
async def test_a_stream_that_breaks_off_keeps_what_it_has_and_can_be_resumed(kind, end, cut):
    piece = response(kind, WHOLE[:3], [-1, -2, -3])
    piece["choices" if kind == "vllm" else "meta_info"] = (
        [{**piece["choices"][0], "finish_reason": None}]
        if kind == "vllm"
        else {**piece["meta_info"], "finish_reason": None}
    )
    event = b"data: " + json.dumps(piece).encode() + b"\n\n"
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n" + end
    found, visits = await sample_from(kind, raw(head, event, cut), None, stream=True)
    assert (found.ids, found.log_probs, found.finish) == (WHOLE[:3], [-1, -2, -3], "aborted")
    assert visits == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("code", "error", "tries"),
    [(400, ValueError, 1), (500, InfrastructureError, 3), (None, InfrastructureError, 3)],
)
async def test_an_error_in_a_stream_is_the_error_of_its_code(kind, code, error, tries):
    event = json.dumps({"error": {"message": "no memory", "code": code}}).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    with pytest.raises(error, match="no memory") as caught:
        await sample_from(kind, raw(head, b"data: ", event, b"\n\n"), stream=True)
    assert caught.value.visits == tries


@pytest.mark.parametrize("kind", KINDS)
async def test_the_server_gets_ids_stop_ids_headers_and_no_pad_token(kind):
    async with TokenServer(kind) as server:
        engine = engine_of(
            server,
            stop_token_ids=[7],
            temperature=0.5,
            top_p=0.9,
            api_key="secret",
            headers={"X-Team": "rl"},
            sampling={"min_p": 0.1},
        )
        await engine.sample(PROMPT, max_tokens=32, key="task/3")
        await engine.close()
    (visit,) = server.visits
    body = json.loads(visit.body)
    params = body["sampling_params"]
    assert body["input_ids" if kind == "sglang" else "token_ids"] == PROMPT
    assert params["max_new_tokens" if kind == "sglang" else "max_tokens"] == 32
    assert params["stop_token_ids"] == [STOP, 7]
    assert params["logit_bias"] == {"0": -100.0}
    assert (params["temperature"], params["top_p"], params["min_p"]) == (0.5, 0.9, 0.1)
    assert visit.headers["authorization"] == "Bearer secret"
    assert visit.headers["x-session-id"] == "task/3"
    assert visit.headers["x-team"] == "rl"


@pytest.mark.parametrize("kind", KINDS)
async def test_an_update_loads_a_folder_of_weights_while_the_server_is_paused(kind):
    async with TokenServer(kind) as server:
        engine = engine_of(server)
        assert await engine.update(WEIGHTS) == 1
        (folder, names) = server.loaded[0]
        assert names == ["tensors.safetensors"]
        assert [visit.path.partition("?")[0] for visit in server.visits] == COMMANDS[kind]
        assert not Path(folder).exists()
        await engine.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_no_request_begins_during_an_update(kind):
    async with TokenServer(kind) as server:
        engine = engine_of(server)
        load = COMMANDS[kind][1]
        loading, go_on, ours = asyncio.Event(), asyncio.Event(), server.acts[load]

        async def slow(visit):
            loading.set()
            await go_on.wait()
            await ours(visit)

        server.acts[load] = slow
        update = asyncio.create_task(engine.update(WEIGHTS))
        await loading.wait()
        late = asyncio.create_task(engine.sample(PROMPT, max_tokens=32, key="late"))
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert not any(visit.path == PATHS[kind] for visit in server.visits)
        go_on.set()
        assert await update == 1
        assert (await late).version == 1
        await engine.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_an_update_goes_on_if_its_caller_is_cancelled(kind):
    async with TokenServer(kind) as server:
        engine = engine_of(server)
        update = asyncio.create_task(engine.update(WEIGHTS))
        while not server.is_paused.is_set():
            await asyncio.sleep(0)
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
        assert (await engine.sample(PROMPT, max_tokens=32, key="a")).version == 1
        assert len(server.loaded) == 1
        await engine.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_after_a_failed_update_requests_fail_until_one_succeeds(kind):
    async with TokenServer(kind) as server:
        engine = engine_of(server)
        load = COMMANDS[kind][1]
        ours = server.acts[load]
        server.acts[load] = json_page({"success": False, "message": "other shapes"}, "400 Bad Request")
        with pytest.raises(InfrastructureError, match="other shapes"):
            await engine.update(WEIGHTS)
        with pytest.raises(InfrastructureError, match="other shapes"):
            await engine.sample(PROMPT, max_tokens=32, key="a")
        server.acts[load] = ours
        assert await engine.update(WEIGHTS) == 1
        assert (await engine.sample(PROMPT, max_tokens=32, key="a")).finish == "stop"
        await engine.close()


async def test_a_server_without_commands_for_updates_says_what_it_needs():
    async with TokenServer("vllm") as server:
        del server.acts["/pause"]
        engine = engine_of(server)
        with pytest.raises(InfrastructureError, match="VLLM_SERVER_DEV_MODE=1"):
            await engine.update(WEIGHTS)
        assert (await engine.sample(PROMPT, max_tokens=32, key="a")).version == 0
        await engine.close()


async def test_update_weights_replaces_the_commands_of_the_server_and_waits_for_requests():
    async with TokenServer("vllm") as server:
        seen = []

        async def update_weights(weights):
            seen.append((weights, server.running))

        engine = engine_of(server, update_weights=update_weights)
        began = asyncio.Event()
        running = asyncio.create_task(
            engine.sample(PROMPT, max_tokens=32, key="a", on_ids=lambda _: began.set())
        )
        await began.wait()
        assert await engine.update("checkpoint-7") == 1
        assert seen == [("checkpoint-7", 0)]
        assert ((await running).finish, (await running).version) == ("stop", 0)
        assert [visit.path for visit in server.visits] == [PATHS["vllm"]]
        await engine.close()


async def test_a_cancelled_request_ends_in_the_server():
    async with TokenServer("vllm") as server:
        engine, began = engine_of(server), asyncio.Event()
        task = asyncio.create_task(
            engine.sample(PROMPT, max_tokens=32, key="a", on_ids=lambda _: began.set())
        )
        await began.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        while server.running:
            await asyncio.sleep(0.001)
        assert server.cancelled == 1
        await engine.close()


async def test_no_more_requests_run_than_max_concurrent():
    async with TokenServer("vllm") as server:
        most, ours = 0, server.acts[PATHS["vllm"]]

        async def count(visit):
            nonlocal most
            most = max(most, server.running + 1)
            await ours(visit)

        server.acts[PATHS["vllm"]] = count
        engine = engine_of(server, max_concurrent=2)
        await asyncio.gather(*(engine.sample(PROMPT, max_tokens=32, key=str(n)) for n in range(8)))
        assert most == 2
        await engine.close()


async def test_requests_at_once_get_a_connection_each_which_later_ones_use_again():
    size = 40  # more than one HTTP client takes
    async with TokenServer("vllm") as server:
        ours, all_came = server.acts[PATHS["vllm"]], asyncio.Event()

        async def wait_for_all(visit):
            if len(server.visits) == size:
                all_came.set()
            await all_came.wait()
            await ours(visit)

        server.acts[PATHS["vllm"]] = wait_for_all
        engine = engine_of(server, max_concurrent=size)
        for _ in range(2):
            await asyncio.gather(*(engine.sample(PROMPT, max_tokens=32, key=str(n)) for n in range(size)))
            assert server.connections == size
        await engine.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "openai"}, "kind is one of 'vllm', 'sglang'"),
        ({"max_concurrent": 0}, "max_concurrent"),
        ({"timeout": 0}, "timeout"),
        ({"context_length": -1}, "context_length"),
        ({"vocab_size": 0}, "vocab_size"),
    ],
)
def test_wrong_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        HTTPEngine("http://127.0.0.1:1", **{"kind": "vllm", "tokenizer": Tokenizer(), **options})


async def test_a_prompt_that_leaves_no_room_reaches_no_server():
    engine = HTTPEngine("http://127.0.0.1:1", kind="vllm", tokenizer=Tokenizer(), context_length=8)
    with pytest.raises(ValueError, match="9 tokens and leaves no room in the context of 8"):
        await engine.sample([5] * 9, max_tokens=1, key="a")


def test_answers_under_a_constraint_are_not_resumed():
    engine = HTTPEngine("http://x", kind="sglang", tokenizer=Tokenizer(), sampling={"regex": "a+"})
    assert not engine.can_resume
    assert HTTPEngine("http://x", kind="sglang", tokenizer=Tokenizer()).can_resume


async def test_a_check_succeeds_if_the_server_is_healthy_and_says_why_not():
    async with TokenServer("vllm") as server:
        engine = engine_of(server)
        await engine.check()
        server.acts["/health"] = page(b"no", status="503 Service Unavailable")
        with pytest.raises(InfrastructureError, match="health responded with 503"):
            await engine.check()
    with pytest.raises(InfrastructureError, match="cannot be reached"):
        await engine.check()
    await engine.close()
    with pytest.raises(InfrastructureError, match="the engine is closed"):
        await engine.check()


METRICS = {
    "sglang": b"sglang:token_usage 0.5\nsglang:num_queue_reqs 1\nsglang:num_running_reqs 2\n",
    "vllm": b"vllm:kv_cache_usage_perc 0.5\nvllm:num_requests_waiting 1\nvllm:num_requests_running 2\n",
}


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_the_pressure_is_that_of_the_metrics_of_the_server(kind):
    async with TokenServer(kind) as server:
        server.acts["/metrics"] = page(METRICS[kind], "text/plain")
        engine = engine_of(server)
        assert await engine.pressure() == EnginePressure(0.5, waiting=1, running=2, preempted=0)
        await engine.close()
        with pytest.raises(InfrastructureError, match="closed"):
            await engine.pressure()


@pytest.mark.asyncio
async def test_a_server_without_metrics_has_no_known_pressure_and_one_line_says_so(caplog):
    caplog.set_level("INFO")
    async with TokenServer("sglang") as server:
        engine = engine_of(server)
        assert await engine.pressure() is None
        server.acts["/metrics"] = page(b"process_cpu_seconds_total 3", "text/plain")
        assert await engine.pressure() is None
        assert caplog.text.count("says nothing about the KV cache") == 1
        await engine.close()


@pytest.mark.asyncio
async def test_metrics_that_fail_are_an_infrastructure_error():
    async with TokenServer("vllm") as server:
        server.acts["/metrics"] = page(b"", "text/plain", "503 Service Unavailable")
        engine = engine_of(server)
        with pytest.raises(InfrastructureError, match="metrics responded with 503"):
            await engine.pressure()
    with pytest.raises(InfrastructureError, match="cannot be reached"):
        await engine.pressure()
    await engine.close()
