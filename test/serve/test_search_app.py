"""The search server: documents, results and responses; over real HTTP."""

import json
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.limit import limit
from helpers.processes import run_program

from torchrl_agentic.errors import MissingExtra
from torchrl_agentic.serve.search_app import BM25Index, Document, read_documents, search_app, tokenize
from torchrl_agentic.serve.serving import serving

pytestmark = pytest.mark.no_sandbox
DOCUMENTS = [
    Document("1", "Paris", "Paris is the capital of France. Paris lies on the Seine."),
    Document("2", "Rome", "Rome is the capital of Italy."),
    Document("3", "Cats", "A cat sleeps for most of the day."),
    Document("4", "Zürich", "Zürich liegt an der Limmat. Grüße!"),
    Document("5", "東京", "東京は日本の首都です。"),
    Document("6", "Москва", "Столица России."),
    Document("7", "R2D2", "A robot; model 7 of 9."),
]


@pytest.fixture(scope="module")
def http() -> Generator[httpx.Client]:
    with (
        serving(search_app(DOCUMENTS)) as url,
        httpx.Client(base_url=url, timeout=limit(30), trust_env=False) as client,
    ):
        yield client


def _found(http: httpx.Client, query: str, **more: Any) -> list[str]:
    answer = http.post("/retrieve", json={"queries": [query], "return_scores": True, **more})
    assert answer.status_code == 200, answer.text
    (found,) = answer.json()["result"]
    return [each["document"]["id"] for each in found]


def test_each_query_has_its_own_list_in_the_wire_format(http: httpx.Client):
    body = {"queries": ["Seine", "Italy", "xyzzy"], "topk": 1, "return_scores": True}
    result = http.post("/retrieve", json=body).json()["result"]
    assert [[each["document"]["id"] for each in found] for found in result] == [["1"], ["2"], []]
    assert result[0][0]["document"]["contents"].split("\n")[0] == "Paris"
    assert result[0][0]["score"] > 0


def test_without_scores_only_documents_are_returned(http: httpx.Client):
    result = http.post("/retrieve", json={"queries": ["Italy"], "topk": 1}).json()["result"]
    assert result == [[{"id": "2", "contents": "Rome\nRome is the capital of Italy."}]]


def test_most_relevant_document_comes_first(http: httpx.Client):
    assert _found(http, "capital Paris")[:2] == ["1", "2"]
    assert _found(http, "the capital of Italy")[0] == "2"


def test_documents_without_a_common_word_are_not_returned(http: httpx.Client):
    assert _found(http, "cat", topk=7) == ["3"]
    assert _found(http, "") == []
    assert _found(http, "xyzzy !?") == []


def test_more_than_there_are_can_be_asked_for(http: httpx.Client):
    assert sorted(_found(http, "a the of is", topk=1000)) == ["1", "2", "3", "7"]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("zürich", "4"),
        ("ZÜRICH", "4"),
        ("Zu\u0308rich", "4"),  # the same, decomposed
        ("GRÜSSE", "4"),
        ("首都", "5"),
        ("東", "5"),
        ("россии", "6"),
        ("７", "7"),  # a digit of full width, alone
    ],
)
def test_words_are_found_however_they_are_written(http: httpx.Client, query: str, expected: str):
    assert _found(http, query)[0] == expected


def test_a_request_that_says_no_number_gets_that_of_the_server():
    documents = [Document(str(number), "same", "same words") for number in range(9)]
    with serving(search_app(documents, topk=4)) as url:
        answer = httpx.post(f"{url}/retrieve", json={"queries": ["words"], "topk": None}, trust_env=False)
    assert len(answer.json()["result"][0]) == 4


@pytest.mark.parametrize("documents", [[], [Document("1", "", "")], [Document("1", "!", "?")]])
def test_server_without_documents_finds_nothing(documents: list[Document]):
    assert BM25Index(documents).search("anything", 3) == []


@pytest.mark.parametrize(
    "body",
    [
        "{}",
        '{"queries": "Paris"}',
        '{"queries": [1]}',
        '{"queries": ["a"], "topk": 0}',
        "[",
        "",
        json.dumps({"queries": ["a"] * 2000}),
        json.dumps({"queries": ["a"], "topk": 10**9}),
    ],
)
def test_invalid_body_is_rejected(http: httpx.Client, body: str):
    answer = http.post("/retrieve", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["msg"]


def test_the_server_answers_a_ping(http: httpx.Client):
    assert http.get("/v1/ping").json() == "pong"


def test_invalid_number_is_rejected_in_the_constructor():
    with pytest.raises(ValueError, match="topk must be"):
        search_app([], topk=0)


def test_words_are_split_at_everything_else():
    assert tokenize("don't re-use C3PO, naïve_x 東京!") == [
        "don",
        "t",
        "re",
        "use",
        "c3po",
        "naïve_x",
        "東",
        "京",
    ]


def test_the_text_files_of_a_folder_are_read_with_their_titles(tmp_path: Path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "a.md").write_text("\n# The title #1\n\nText.\nMore.\n")
    (tmp_path / "deep" / "b.txt").write_text("First line\nSecond line\n")
    (tmp_path / "deep" / "er" / "c.TXT").write_text("only one line")
    (tmp_path / "long.txt").write_text("word " * 100 + "\nmore")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "skipped.bin").write_bytes(b"\xff")
    found = {document.id: document for document in read_documents(tmp_path)}
    assert list(found) == ["a.md", "deep/b.txt", "deep/er/c.TXT", "long.txt"]
    assert (found["a.md"].title, found["a.md"].text) == ("The title #1", "Text.\nMore.")
    assert found["deep/b.txt"].contents == "First line\nSecond line"
    assert found["deep/er/c.TXT"].contents == "c\nonly one line"
    assert found["long.txt"].title == "long"


def test_a_file_that_is_not_utf_8_is_named(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"a\.txt is not UTF-8: .* at byte 3"):
        read_documents(tmp_path)


def test_lines_of_json_are_read_in_both_forms(tmp_path: Path):
    path = tmp_path / "corpus.jsonl"
    lines = ['{"id": 7, "contents": "T\\nx\\ny"}', "", '{"title": "Ü", "text": "z"}', '{"text": "alone"}']
    path.write_text("\n".join(lines), "utf-8")
    assert read_documents(path) == [
        Document("7", "T", "x\ny"),
        Document("3", "Ü", "z"),
        Document("4", "", "alone"),
    ]


def test_bad_lines_are_named_with_their_numbers(tmp_path: Path):
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b'{"text": "ok"}\n{"text": 1}\n\n[]\n{oops\n{"name": "x"}\n\xff\n' + b"1\n" * 3)
    with pytest.raises(ValueError, match="corpus") as raised:
        read_documents(path)
    said = str(raised.value)
    assert "line 2: 'text' must be text; got int" in said
    assert 'line 4: expected an object with "contents", or "title" and "text"; got list' in said
    assert "line 5: " in said
    assert 'line 6: expected "contents", or "title" and "text"; got name' in said
    assert "and 3 more" in said


def test_a_line_that_is_nested_too_deep_is_a_bad_one(tmp_path: Path):
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"text": "ok"}\n{"text": "t", "more": ' + "[" * 500 + "]" * 500 + "}\n")
    with pytest.raises(ValueError, match="line 2: nested more than 200 levels deep"):
        read_documents(path)


def test_other_files_are_refused(tmp_path: Path):
    (tmp_path / "a.pdf").write_text("x")
    with pytest.raises(ValueError, match=r"expected a folder of \.txt"):
        read_documents(tmp_path / "a.pdf")
    with pytest.raises(FileNotFoundError):
        read_documents(tmp_path / "missing.jsonl")


def test_a_server_without_bm25s_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(MissingExtra, match=r"torchrl-agentic\[serve\]"):
        search_app(DOCUMENTS)


def test_neither_server_loads_torch_and_importing_them_loads_no_web_framework():
    code = """
import sys
import torchrl_agentic.serve.sandbox_app, torchrl_agentic.serve.search_app, torchrl_agentic.cli.servers
assert not {"torch", "starlette", "uvicorn", "bm25s"} & set(sys.modules), "at import"
torchrl_agentic.serve.search_app.search_app([])
assert "torch" not in sys.modules, "at construction"
"""
    run_program([sys.executable, "-c", code], check=True, timeout=60)
