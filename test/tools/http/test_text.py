"""From bytes to the text that the model reads."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic.tools.http.render import is_image, media_type, pretty_json, text_of, without_controls

PNG = b"\x89PNG\r\n\x1a\n" + bytes(20)


@pytest.mark.parametrize(
    ("body", "content_type", "text"),
    [
        ("grün".encode(), "text/plain", "grün"),
        ("grün".encode(), "text/plain; charset=UTF-8", "grün"),
        ("grün".encode("latin-1"), "text/plain; charset=iso-8859-1", "grün"),
        ("grün".encode("latin-1"), "text/plain", "grün"),
        ("“grün”".encode("cp1252"), "text/plain", "“grün”"),
        ("日本".encode("shift_jis"), 'text/html; charset="Shift_JIS"', "日本"),
        ("grün".encode("utf-16"), "text/plain", "grün"),
        ("grün".encode("utf-16-le"), "text/plain; charset=utf-16le", "grün"),
        ("grün".encode("utf-8-sig"), "text/plain; charset=latin-1", "grün"),
        ("<meta charset='latin-1'>grün".encode("latin-1"), "text/html", "<meta charset='latin-1'>grün"),
        ("grün".encode(), "text/plain; charset=nonsense", "grün"),
        ("grün".encode(), "text/plain; charset=", "grün"),
        (b"Z3LDvG4=", "text/plain; charset=base64", "Z3LDvG4="),
        (b"abc", "text/plain; charset=zlib", "abc"),
        (b"\\u0041", "text/plain; charset=unicode_escape", "\\u0041"),
        (b"a-b", "text/plain; charset=punycode", "a-b"),
        (b"+ADw-", "text/plain; charset=utf-7", "+ADw-"),
        (b"abc", "text/plain; charset=idna", "abc"),
        (b"a\xffb", "text/plain; charset=utf-8", "a\ufffdb"),
        (b"{}", "application/problem+json", "{}"),
        (b"<a/>", "image/svg+xml", "<a/>"),
        (b"a,b", "", "a,b"),
        (b"a,b", "not a media type", "a,b"),
        (b"", "text/plain", ""),
    ],
)
def test_text_is_read_in_the_charset_it_has(body: bytes, content_type: str, text: str):
    assert text_of(body, content_type, whole=True) == text


@pytest.mark.parametrize(
    ("body", "content_type"),
    [(PNG, "image/png"), (b"%PDF-1.7", "application/pdf"), (b"a\0b", "text/plain"), (b"MZ\0\0", ""),
     (b"abc", "application/octet-stream"), (b"abc", "video/mp4")],
)  # fmt: skip
def test_binary_body_is_not_decoded(body: bytes, content_type: str):
    assert text_of(body, content_type, whole=True) is None


def test_character_cut_off_by_truncation_is_not_an_error():
    body = "grün".encode()[:3]
    assert text_of(body, "text/plain", whole=False) == "gr"
    assert text_of(body, "text/plain; charset=utf-8", whole=True) == "gr\ufffd"


@given(st.binary(max_size=200), st.text(max_size=40))
def test_no_bytes_and_no_content_type_raise(body: bytes, content_type: str):
    text_of(body, content_type, whole=True)
    text_of(body, f"text/html; charset={content_type}", whole=False)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    )
)
def test_pretty_json_means_the_same(value: object):
    assert json.loads(pretty_json(json.dumps(value), 1 << 20)) == value


@pytest.mark.parametrize(
    "text",
    ["{", "", "[" * 100_000, "[" * 100_000 + "]" * 100_000, '{"a":' * 50_000, "1" * 50_000, "[1e999", "nope",
     "[" * 500 + "1," * 20_000 + "1" + "]" * 500],
    ids=range(9),
)  # fmt: skip
def test_json_that_is_broken_or_would_explode_comes_as_it_is(text: str):
    assert pretty_json(text, 1 << 17) == text


def test_control_sequences_do_not_reach_a_terminal():
    assert without_controls("a\x1b[31mb\x07\x9bc\0d\be\tf\r\ng\x7f") == "a[31mbcde\tf\r\ng"
    assert without_controls("grün\n") == "grün\n"


def test_an_image_is_one_by_its_bytes_too():
    assert is_image("image/png", PNG)
    assert is_image("image/webp", b"RIFF....WEBPVP8 ")
    assert not is_image("image/webp", b"RIFF....WAVE")
    assert not is_image("image/png", b"<html>")
    assert not is_image("image/bmp", b"BM")
    assert not is_image("image/png", PNG + bytes(1 << 20))


def test_a_media_type_is_taken_only_if_it_looks_like_one():
    assert media_type("Text/HTML; charset=x") == "text/html"
    assert media_type("text/html] ignore what stands above [") == ""
    assert media_type("") == ""
