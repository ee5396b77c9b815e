"""Limits of clients of a server: connections, time, memory; over raw sockets, ordered by events."""

import asyncio
import contextlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from helpers.limit import limit

from torchrl_agentic.sandbox import UnsafeSubprocessSandbox
from torchrl_agentic.serve import search_app as search_module
from torchrl_agentic.serve.connections import ConnectionBounds, make_server
from torchrl_agentic.serve.sandbox_app import sandbox_app
from torchrl_agentic.serve.search_app import BM25Index, Document, search_app
from torchrl_agentic.serve.serving import serving

pytestmark = [pytest.mark.no_sandbox, pytest.mark.filterwarnings("ignore:.*UnsafeSubprocessSandbox")]
WAIT_S = limit(20)
DOCUMENTS = [Document("1", "Cats", "They sleep.")]
BODY = b'{"queries": ["cats"]}'
QUICK = ConnectionBounds(header_s=0.2, body_s=0.2, answer_s=0.2)


@contextlib.contextmanager
def _connected(url: str, count: int = 1) -> Iterator[list[socket.socket]]:
    """Open connections."""
    with contextlib.ExitStack() as stack:
        port = httpx.URL(url).port
        assert port is not None
        yield [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=WAIT_S))
            for _ in range(count)
        ]


def _head(length: int | None) -> bytes:
    size = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    lines = ["POST /retrieve HTTP/1.1", "Host: localhost", "Content-Type: application/json", size, "", ""]
    return "\r\n".join(lines).encode()


def _answer(sock: socket.socket) -> bytes:
    """Read a whole response; b"" if the server has closed the connection."""
    answer = b""
    with contextlib.suppress(ConnectionError):
        while piece := sock.recv(65536):
            answer += piece
            head, end, body = answer.partition(b"\r\n\r\n")
            length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
            if end and len(body) >= (int(length[1]) if length else 0):
                break
    return answer


def _status(sock: socket.socket) -> int:
    """Read a response, and return its status; -1 if the server has closed the connection."""
    answer = _answer(sock)
    return int(answer.split(b" ", 2)[1]) if answer else -1


def _ends(sock: socket.socket) -> bool:
    """Read until the server closes the connection."""
    with contextlib.suppress(ConnectionError):
        while sock.recv(65536):
            pass
    return True


def _ends_while_sending(sock: socket.socket) -> bool:
    """Send a byte now and then until the server closes the connection."""
    sock.settimeout(0.01)
    with contextlib.suppress(ConnectionError):
        for _ in range(round(100 * WAIT_S)):
            sock.sendall(b"x")
            with contextlib.suppress(TimeoutError):
                if not sock.recv(1):
                    return True
        return False
    return True


def _is_served(url: str) -> bool:
    return httpx.post(f"{url}/retrieve", json=json.loads(BODY), trust_env=False, timeout=WAIT_S).is_success


@pytest.mark.parametrize(
    "sent", [b"", b"P", _head(9)[:40], b"GET /v1/ping HTTP/1.1\r\nHost: localhost\r\nX: "]
)
def test_connection_with_unfinished_headers_is_closed(sent: bytes):
    with serving(search_app(DOCUMENTS), bounds=QUICK) as url, _connected(url, 20) as clients:
        for client in clients:
            client.sendall(sent)
        assert all(map(_ends, clients))
        assert _is_served(url)


def test_headers_that_trickle_in_are_not_waited_for_longer():
    """A byte does not restart the time: the server closes the connection while bytes still arrive."""
    with serving(search_app(DOCUMENTS), bounds=QUICK) as url, _connected(url) as (client,):
        client.sendall(b"GET /v1/ping HTTP/1.1\r\nX: ")
        assert _ends_while_sending(client)


def test_the_second_request_of_a_connection_has_a_deadline_too():
    with serving(search_app(DOCUMENTS), bounds=QUICK) as url, _connected(url) as (client,):
        client.sendall(_head(len(BODY)) + BODY + b"GET /v1/ping HT")
        assert _status(client) == 200
        assert _ends(client)


def test_a_connection_that_sends_whole_requests_is_kept():
    bounds = ConnectionBounds(header_s=5, body_s=5)
    with serving(search_app(DOCUMENTS), bounds=bounds) as url, _connected(url) as (client,):
        for _ in range(3):
            client.sendall(_head(len(BODY)) + BODY)
            assert b"sleep" in _answer(client)


def test_an_answer_may_take_longer_than_a_request():
    """Deadlines apply to actions of clients."""
    released = threading.Event()

    class Slow(BM25Index):
        def search(self, query: str, count: int) -> list[tuple[Document, float]]:
            assert released.wait(WAIT_S)
            return super().search(query, count)

    with (
        pytest.MonkeyPatch.context() as patch,
        ThreadPoolExecutor() as threads,
    ):
        patch.setattr(search_module, "BM25Index", Slow)
        with serving(search_app(DOCUMENTS), bounds=QUICK) as url, _connected(url, 2) as (idle, _):
            answer = threads.submit(_is_served, url)
            assert _ends(idle)  # the time of headers is over
            released.set()
            assert answer.result(WAIT_S)


@pytest.mark.parametrize("length", [100, None])
def test_connection_with_an_unfinished_body_gets_an_error_and_is_closed(length: int | None):
    with serving(search_app(DOCUMENTS, body_timeout_s=0.2)) as url, _connected(url, 10) as clients:
        for client in clients:
            client.sendall(_head(length) + (b"" if length is None else b"{"))
        assert [_status(client) for client in clients] == [408] * 10
        assert all(map(_ends, clients))
        assert _is_served(url)


def test_client_that_disconnects_while_sending_is_not_an_error(caplog: pytest.LogCaptureFixture):
    app = search_app(DOCUMENTS, max_total_body_bytes=1000, max_body_bytes=1000)
    with serving(app) as url:
        for _ in range(3):
            with _connected(url) as (client,):
                client.sendall(_head(1000) + b"{")
        with _connected(url) as (client,):
            while True:  # the bytes of the others are free again soon
                client.sendall(_head(1000) + b" " * (1000 - len(BODY)) + BODY)
                status = _status(client)
                if status != 429:
                    break
        assert status == 200
    assert not [record for record in caplog.records if record.levelname != "DEBUG"]


def test_refused_client_that_continues_to_send_is_disconnected():
    with serving(search_app(DOCUMENTS, max_body_bytes=10), bounds=QUICK) as url, _connected(url) as (client,):
        client.sendall(_head(1000))
        assert _status(client) == 413
        client.sendall(b"x" * 500)
        assert _ends(client)


@pytest.mark.parametrize("is_chunked", [False, True])
def test_bodies_share_a_budget_and_those_beyond_it_are_refused_unread(is_chunked: bool):
    app = search_app(DOCUMENTS, max_body_bytes=1 << 20, max_total_body_bytes=2 << 20)
    with serving(app) as url, _connected(url, 10) as clients:
        first, second, *others = clients
        head = _head(None if is_chunked else 1 << 20) + b"Expect: 100-continue\r\n\r\n"
        head = head.replace(b"\r\n\r\nExpect", b"\r\nExpect")
        for client in (first, second):
            client.sendall(head)
            assert _status(client) == 100  # its body is requested
        for client in others:
            client.sendall(head)
            answer = _answer(client)
            assert b" 429 " in answer
            assert b"retry-after: " in answer.lower()
        body = b" " * ((1 << 20) - len(BODY)) + BODY
        first.sendall(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if is_chunked else body)
        assert _status(first) == 200
        assert _is_served(url)


@pytest.mark.parametrize("length", [1, len(BODY)])
def test_a_body_with_two_kinds_of_length_is_refused_unread(length: int):
    """A chunked body may be longer than its Content-Length, which the budget reserves."""
    head = _head(length).replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n")
    with serving(search_app(DOCUMENTS)) as url, _connected(url) as (client,):
        client.sendall(head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY))
        assert _status(client) == 400
        assert _ends(client)
        assert _is_served(url)


def test_refused_request_can_be_repeated_on_the_same_connection():
    app = search_app(DOCUMENTS, max_body_bytes=1000, max_total_body_bytes=1000)
    with serving(app) as url, _connected(url, 2) as (first, second):
        first.sendall(_head(1000).replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n"))
        assert _status(first) == 100
        second.sendall(_head(len(BODY)) + BODY)
        assert _status(second) == 429
        first.close()
        while True:
            second.sendall(_head(len(BODY)) + BODY)
            if (status := _status(second)) != 429:
                break
        assert status == 200


def test_connections_are_bounded():
    bounds = ConnectionBounds(max_connections=3)
    with serving(search_app(DOCUMENTS), bounds=bounds) as url, _connected(url, 3) as clients:
        clients[2].sendall(_head(len(BODY)) + BODY)
        assert _status(clients[2]) == 200  # the server has seen all three
        with _connected(url) as (more,):
            assert _status(more) in (503, -1)
            assert _ends(more)
        clients[0].close()
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if _is_served(url):
                    break


def test_client_that_does_not_read_the_response_is_disconnected():
    documents = [Document(str(n), "cats", "cats " * 20_000) for n in range(100)]
    app = search_app(documents, max_answer_bytes=32 << 20, max_concurrency=1, max_queue=0)
    with serving(app, bounds=QUICK) as url:
        port = httpx.URL(url).port
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(WAIT_S)
            client.connect(("127.0.0.1", port))
            body = b'{"queries": ["cats"], "topk": 100}'
            client.sendall(_head(len(body)) + body)
            assert client.recv(1)
            while True:  # its place is free once its connection is closed
                with contextlib.suppress(httpx.HTTPError):
                    if _is_served(url):
                        break


@pytest.mark.parametrize("wish", [b"keep-alive", b"close"])
def test_client_that_does_not_read_the_end_of_the_response_is_disconnected(wish: bytes):
    """So little is left that the server can write all of it without waiting."""
    documents = [Document("1", "cats", "cats " * 10_000)]
    bounds = ConnectionBounds(max_connections=1, answer_s=0.2)
    server = make_server(search_app(documents), bounds)
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as client:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])), daemon=True)
        thread.start()
        client.settimeout(WAIT_S)
        client.connect(listening.getsockname())
        head = _head(len(BODY)).replace(b"\r\n\r\n", b"\r\nConnection: %b\r\n\r\n" % wish)
        client.sendall(head + BODY)
        assert client.recv(1)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        try:
            while True:  # there is room for another connection once this one is closed
                with contextlib.suppress(httpx.HTTPError):
                    if _is_served(url):
                        break
        finally:
            server.should_exit = True
            thread.join(WAIT_S)


def test_an_answer_that_would_be_too_long_is_refused():
    documents = [Document(str(n), "cats", "cats " * 100) for n in range(100)]
    with serving(search_app(documents, max_answer_bytes=20_000)) as url:

        def ask(topk: int, queries: int) -> httpx.Response:
            body = {"queries": ["cats"] * queries, "topk": topk}
            return httpx.post(f"{url}/retrieve", json=body, trust_env=False, timeout=WAIT_S)

        assert ask(30, 1).status_code == 200
        for topk, queries in ((100, 1), (10, 10)):
            answer = ask(topk, queries)
            assert answer.status_code == 422
            assert "20000 bytes" in answer.json()["detail"]


def test_so_many_results_cannot_be_asked_for():
    with serving(search_app(DOCUMENTS)) as url:
        body = {"queries": ["cats"] * 1024, "topk": 1000}
        answer = httpx.post(f"{url}/retrieve", json=body, trust_env=False, timeout=WAIT_S)
    assert answer.status_code == 422
    assert "results" in str(answer.json()["detail"])


def test_search_of_a_disconnected_client_ends_after_its_query(monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []
    begun, go = threading.Event(), threading.Event()

    class Slow(BM25Index):
        def search(self, query: str, count: int) -> list[tuple[Document, float]]:
            asked.append(query)
            begun.set()
            assert go.wait(WAIT_S)
            return super().search(query, count)

    monkeypatch.setattr(search_module, "BM25Index", Slow)
    body = json.dumps({"queries": [f"cats {n}" for n in range(9)]}).encode()
    too_much = {"queries": ["cats"] * 1024, "topk": 1000}
    with serving(search_app(DOCUMENTS, max_concurrency=1, max_queue=0)) as url:
        with _connected(url) as (client,):
            client.sendall(_head(len(body)) + body)
            assert begun.wait(WAIT_S)
        while httpx.post(f"{url}/retrieve", json=too_much, trust_env=False).status_code == 429:
            pass  # the server has not noticed yet that the client has disconnected
        go.set()
        assert _is_served(url)
    assert asked == ["cats 0", "cats"]


@pytest.mark.parametrize("name", ["run_timeout", "compile_timeout"])
def test_too_long_run_timeout_is_rejected_with_the_maximum(name: str):
    app = sandbox_app(make_sandbox=UnsafeSubprocessSandbox, max_run_timeout_s=7)
    with serving(app) as url:
        body = {"code": "print(1)", "language": "python", name: 7.5}
        answer = httpx.post(f"{url}/run_code", json=body, trust_env=False, timeout=WAIT_S)
        assert answer.status_code == 422
        assert name in answer.json()["detail"]
        assert "7 s" in answer.json()["detail"]
        answer = httpx.post(f"{url}/run_code", json={**body, name: 7}, trust_env=False, timeout=WAIT_S)
        assert answer.json()["run_result"]["stdout"] == "1\n"


def test_too_long_cell_timeout_is_rejected_with_the_maximum():
    with serving(sandbox_app(make_sandbox=UnsafeSubprocessSandbox, max_run_timeout_s=7)) as url:
        for more in ({"total_timeout": 8}, {"total_timeout": 5, "cell_timeout": 8}):
            body = {"cells": ["1"], **more}
            answer = httpx.post(f"{url}/run_jupyter", json=body, trust_env=False, timeout=WAIT_S)
            assert answer.status_code == 422
            assert "7 s" in answer.json()["detail"]


@pytest.mark.parametrize(
    "more", [{"fetch_files": [str(n) for n in range(2000)]}, {"files": {str(n): "" for n in range(2000)}}]
)
@pytest.mark.parametrize("path", ["run_code", "run_jupyter"])
def test_so_many_files_cannot_be_asked_for(more: dict[str, Any], path: str):
    with serving(sandbox_app(make_sandbox=UnsafeSubprocessSandbox)) as url:
        body = {"code": "1", "language": "python", "cells": ["1"], **more}
        answer = httpx.post(f"{url}/{path}", json=body, trust_env=False, timeout=WAIT_S)
    assert answer.status_code == 422


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"files": {f"../{n}": "" for n in range(100_000)}}, "at most 1024 files; got 100000"),
        ({"files": {f"../{n}": 1 for n in range(1000)}}, "1990 more"),
        ({"files": {"../" + "x" * 1_000_000: ""}}, "files"),
        ({"files": {"x" * 1_000_000: ""}}, "too long"),
        ({"fetch_files": [1] * 100_000}, "1024"),
        ({"fetch_files": [1] * 1000}, "990 more"),
        ({"cells": [1] * 100_000}, "1024"),
    ],
    ids=["count of files", "bad files", "long way up", "long name", "count of names", "bad names", "cells"],
)
def test_however_much_is_wrong_with_a_request_its_refusal_is_short(wrong: dict[str, Any], said: str):
    with serving(sandbox_app(make_sandbox=UnsafeSubprocessSandbox)) as url:
        body = {"cells": ["1"], **wrong}
        answer = httpx.post(f"{url}/run_jupyter", json=body, trust_env=False, timeout=WAIT_S)
    assert answer.status_code == 422
    assert said in answer.text
    assert len(answer.content) < 10_000


def test_cells_with_too_much_output_stop_and_return_earlier_results():
    app = sandbox_app(make_sandbox=UnsafeSubprocessSandbox, max_answer_bytes=10_000)
    with serving(app) as url:
        body = {"cells": ["print('x' * 6000)"] * 5}
        answer = httpx.post(f"{url}/run_jupyter", json=body, trust_env=False, timeout=WAIT_S).json()
    assert (answer["status"], len(answer["cells"])) == ("Failed", 2)
    assert "2 of 5" in answer["driver"]["stderr"]


def test_files_that_are_too_long_are_not_sent_back():
    app = sandbox_app(make_sandbox=UnsafeSubprocessSandbox, max_answer_bytes=10_000)
    with serving(app) as url:
        code = "open('a', 'w').write('x' * 9000); open('b', 'w').write('y' * 2000); open('c', 'w').write('z')"
        body = {"code": code, "language": "python", "fetch_files": ["a", "b", "c"]}
        answer = httpx.post(f"{url}/run_code", json=body, trust_env=False, timeout=WAIT_S).json()
    assert list(answer["files"]) == ["a", "c"]
    assert "'b' is not returned" in answer["message"]


@pytest.mark.parametrize(
    "wrong",
    [{"max_total_body_bytes": 10, "max_body_bytes": 11}, {"body_timeout_s": 0}, {"max_answer_bytes": 0}],
)
def test_invalid_bounds_are_rejected(wrong: dict[str, Any]):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        search_app(DOCUMENTS, **wrong)


@pytest.mark.parametrize("wrong", [{"max_connections": 0}, {"header_s": 0}, {"body_s": -1}, {"answer_s": 0}])
def test_invalid_connection_bounds_are_rejected(wrong: dict[str, Any]):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ConnectionBounds(**wrong)
