"""Search: requests and results have the form of Search-R1 and verl; failing services give INFRA."""

import asyncio
import json
import pickle
from pathlib import Path

import pytest
from fakes.scripted import Reply, scripted_server

from torchrl_agentic import Status
from torchrl_agentic.dispatch import Dispatcher
from torchrl_agentic.messages import ParsedCall
from torchrl_agentic.serve.access import Access
from torchrl_agentic.serve.search_app import Document, search_app
from torchrl_agentic.testing.servers.embedded import serving
from torchrl_agentic.tools import SearchTool
from torchrl_agentic.tools.service import Patience

QUICK = Patience(deadline_s=3, tries=2, first_s=0.01)


def _found(*contents: str) -> list[dict]:
    return [{"document": {"contents": text}, "score": 1.0} for text in contents]


async def _search(queries: list[str], *replies: Reply, **options):
    async with scripted_server(replies) as server:
        tool = SearchTool(f"{server.url}/retrieve", enable_global_rate_limit=False, patience=QUICK, **options)
        dispatcher = Dispatcher([tool])
        async with dispatcher.session("t") as session:
            (result,) = await session.run([ParsedCall("search", {"query_list": queries}, "c1")])
        await dispatcher.close()
        return result, server


async def test_results_are_grouped_by_query_and_numbered():
    reply = Reply(body={"result": [_found("Paris\nA city.", "France\nA country."), _found()]})
    result, server = await _search(["capital of France", "nothing"], reply, topk=2)
    assert server.requests == [
        ("/retrieve", {"queries": ["capital of France", "nothing"], "topk": 2, "return_scores": True})
    ]
    shown = json.loads(result.text)["result"]
    first, second = shown.split("\n---\n")
    assert first == "Doc 1 (Title: Paris)\nA city.\n\nDoc 2 (Title: France)\nA country."
    assert second == "No search results found."
    assert result.metrics == {
        "query_count": 2, "status": "success", "total_results": 2, "api_request_error": None
    }  # fmt: skip


async def test_documents_without_scores_are_read_too():
    result, _ = await _search(["x"], Reply(body={"result": [[{"contents": "T\nbody"}]]}))
    assert "Doc 1 (Title: T)\nbody" in json.loads(result.text)["result"]


@pytest.mark.parametrize(
    "body",
    [
        {},
        [],
        "text",
        {"result": 3},
        {"result": []},
        {"result": [3]},
        {"result": [[3]]},
        {"result": [[{"document": 1}]]},
    ],
    ids=str,
)
async def test_unexpected_response_gives_infra(body):
    result, _ = await _search(["x"], Reply(body=body))
    assert result.status is Status.INFRA


@pytest.mark.parametrize("status", [400, 404, 422, 500, 503])
async def test_failing_service_gives_infra(status):
    result, _ = await _search(["x"], Reply(status, b"oh no"))
    assert result.status is Status.INFRA
    assert "oh no" in result.text


@pytest.mark.parametrize(("queries", "says"), [([""], "empty"), (["a"] * 17, "at most 16")])
async def test_invalid_queries_are_errors_for_the_model(queries, says):
    result, server = await _search(queries, Reply())
    assert result.status is Status.ERROR
    assert says in result.text
    assert server.requests == []


async def test_no_query_at_all_does_not_reach_it():
    result, _ = await _search([], Reply())
    assert result.status is Status.INVALID_ARGS


async def test_long_results_lose_their_middle_and_stay_json():
    reply = Reply(body={"result": [_found("T\n" + "x" * 50_000)]})
    result, _ = await _search(["x"], reply, output_max_chars=1000)
    assert len(json.loads(result.text)["result"]) <= 1100
    assert result.meta is not None
    assert result.meta["truncated"]


async def test_calls_beyond_the_limit_wait_and_that_counts_as_waiting():
    gate = asyncio.Event()
    inside = 0
    most = 0

    async def answer(path: str, data: dict) -> Reply:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        if inside == 2:
            gate.set()
        await gate.wait()
        await asyncio.sleep(0.01)
        inside -= 1
        return Reply(body={"result": [_found("a\nb")]})

    async with scripted_server(answer) as server:
        tool = SearchTool(server.url, rate_limit=2, enable_global_rate_limit=False)
        dispatcher = Dispatcher([tool])
        async with dispatcher.session("t") as session:
            calls = [ParsedCall("search", {"query_list": ["x"]}, f"c{number}") for number in range(6)]
            results = await session.run(calls)
        await dispatcher.close()
    assert [result.status for result in results] == [Status.OK] * 6
    assert most == 2
    timings = [result.timing for result in results if result.timing is not None]
    assert timings[-1].queue_s > timings[0].queue_s


@pytest.mark.parametrize("bad", [{"topk": 0}, {"timeout": 0}, {"rate_limit": 0}, {"num_workers": -1}])
def test_invalid_numbers_are_rejected(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        SearchTool("http://localhost:8000/retrieve", **bad)


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://x"])
def test_a_url_is_needed(url):
    with pytest.raises(ValueError, match="retrieval_service_url"):
        SearchTool(url)


TOKEN = "correct-horse-battery-staple"


@pytest.mark.parametrize("how", ["file", "header"])
@pytest.mark.parametrize("is_known", [True, False])
async def test_a_server_that_wants_a_token_is_sent_it(tmp_path: Path, is_known: bool, how: str):
    token = TOKEN if is_known else TOKEN[::-1]
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text(token)
    options = {"token_file": path} if how == "file" else {"headers": {"Authorization": f"Bearer {token}"}}
    documents = [Document("1", "Cats", "They sleep.")]
    with serving(search_app(documents, access=Access(token=TOKEN))) as url:
        tool = SearchTool(f"{url}/retrieve", enable_global_rate_limit=False, patience=QUICK, **options)
        dispatcher = Dispatcher([pickle.loads(pickle.dumps(tool))])
        async with dispatcher.session("t") as session:
            (result,) = await session.run([ParsedCall("search", {"query_list": ["cats"]}, "c1")])
        await dispatcher.close()
    assert result.status is (Status.OK if is_known else Status.INFRA)
    assert ("They sleep." in result.text) == is_known
    assert token not in result.text


def test_client_rejects_a_token_file_that_others_can_read(tmp_path: Path):
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        SearchTool("http://localhost:1/retrieve", token_file=path)
