"""Malformed messages of the formats with tags: their entries and error messages."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
from helpers.check_all import check_all

from torchrl_agentic.messages import ParsedCall, ParseResult
from torchrl_agentic.parsers import Limits, ToolCallParser, get_parser

# A row is a message, its entries in order, and options. A good call is (tool, args); an error is
# "code: part of its message". Options: tools (name -> JSON Schema), rest (the text outside of all calls),
# limits.
Row = tuple[Any, ...]

SMALL = {"limits": Limits(calls=2, argument_bytes=50, depth=3)}
LONG, ODD = "k" * 600, "\U0010ffff" * 60
END = "message ends"


def schema(**properties: Any) -> dict[str, Any]:
    kinds = {key: {"type": kind} if isinstance(kind, str) else kind for key, kind in properties.items()}
    return {"type": "object", "properties": kinds}


TOOLS = {
    "tools": {
        "f": schema(
            s="string", n="integer", x="number", b="boolean", items="array", o="object",
            maybe={"anyOf": [{"type": "string"}, {"type": "null"}]},
            either={"anyOf": [{"type": "integer"}, {"type": "string"}]},
            several={"type": ["integer", "null"]},
        ),
        "g": schema(x="integer"),
    }
}  # fmt: skip


def f(**args: Any) -> tuple[str, dict[str, Any]]:
    return "f", args


def g(**args: Any) -> tuple[str, dict[str, Any]]:
    return "g", args


# Hermes


def T(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def J(args: str, name: str = '"f"') -> str:
    return T(f'{{"name": {name}, "arguments": {args}}}')


P = '{"name": "g", "arguments": {"x": 1}}'
G = g(x=1)
STRINGIFIED = '"{\\"a\\": %s}"'

HERMES: list[Row] = [
    # cut off
    ("<tool_ca", [], {"rest": "<tool_ca"}),
    ("<tool_call>", [f"unclosed: {END}"]),
    ("hm <tool_call>\n", [f"unclosed: {END}"], {"rest": "hm "}),
    ("<tool_call>\n{", [f"unclosed: {END}"]),
    ('<tool_call>\n{"na', [f"unclosed: {END}"]),
    ('<tool_call>\n{"name": "f"', [f"unclosed: {END}"]),
    ('<tool_call>\n{"name": "f", "arguments": {"a": "on', [f"unclosed: {END}"]),
    ('<tool_call>\n{"name": "f", "arguments": {"a": "on\\', [f"unclosed: {END}"]),
    ('<tool_call>\n{"name": "f", "arguments": {"a": 12', [f"unclosed: {END}"]),
    ('<tool_call>\n{"name": "f", "arguments": {"a": 1}', [f"unclosed: {END}"]),
    (f"<tool_call>\n{P}", [G]),
    (f"<tool_call>\n{P}\n", [G]),
    (f"<tool_call>\n{P}\n</tool_ca", [G], {"rest": "\n</tool_ca"}),
    (T(P) + '\n<tool_call>\n{"name": "f", "argu', [G, f"unclosed: {END}"]),
    (J('{"a": "on').replace('}\n<', '\n<'), ["invalid_json: invalid JSON"]),
    # openers and closers
    (f"{P}\n</tool_call>", [], {"rest": f"{P}\n</tool_call>"}),
    (f"<tool-call>{P}</tool-call>", []),
    (f"<TOOL_CALL>{P}</TOOL_CALL>", []),
    (f"<tool_call/>{P}", []),
    (f"<tool_call><tool_call>\n{P}\n</tool_call>", [G], {"rest": ""}),
    (f"<tool_call>\n<tool_call>\n{P}\n</tool_call>", [G], {"rest": ""}),
    (f"{T(P)}</tool_call>", [G], {"rest": "</tool_call>"}),
    (f"<tool_call>{P}<tool_call>{P}</tool_call>", [G, G], {"rest": ""}),
    (f"<tool_call>{P}</toolcall>", ["extra_data: </toolcall>"]),
    (f"<tool_call>{P}\nnow I wait", ["extra_data: now I wait"]),
    (T(""), ["empty: nothing"]),
    (f"<tool_call></tool_call>{T(P)}", ["empty: nothing", G], {"rest": ""}),
    (T(f"{P} {P}"), ["extra_data: unexpected text after the JSON"]),
    (T(f"{P};"), ["extra_data: ;"]),
    # wrong dialects
    (T("<function=f>\n<parameter=a>\n1\n</parameter>\n</function>"), ["wrong_dialect: JSON"]),
    (T('<invoke name="f"></invoke>') + T(P), ["wrong_dialect: JSON", G]),
    (T("f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>"), ["invalid_json: f"]),
    (T("f(a=1)"), ["invalid_json: f(a=1)"]),
    (T(f"```json\n{P}\n```"), ["invalid_json: ```json"]),
    (T("I add them."), ["invalid_json: I add"]),
    # malformed JSON
    (J('{"a": 1,}'), ["invalid_json: comma"]),
    (J('{"a": [1,]}'), ["invalid_json: comma"]),
    (J("{'a': 1}"), ["invalid_json: 'a'"]),
    (J("{a: 1}"), ["invalid_json: a: 1"]),
    (J('{"a" 1}'), ["invalid_json: invalid JSON"]),
    (J('{"a": 1 "b": 2}'), ["invalid_json: invalid JSON"]),
    (J('{"a": True}'), ["invalid_json: True"]),
    (J('{"a": 1} // add'), ["invalid_json: // add"]),
    (J('{"a": "x\ny"}'), ["invalid_json: control character"]),
    (J('{"a": "\\x41"}'), ["invalid_json: escape"]),
    (J('{"a": "\\u12"}'), ["invalid_json: escape"]),
    (J('{"a": 01}'), ["invalid_json: invalid JSON"]),
    (J('{"a": +1}'), ["invalid_json: +1"]),
    (J('{"a": 0x10}'), ["invalid_json: x10"]),
    (J('{"a": 1}}'), ["extra_data: }"]),
    (T('{"name": "f", "arguments": {"a": 1}'), ["invalid_json: invalid JSON"]),
    (J('{"a": NaN}'), ["invalid_json: NaN"]),
    (J('{"a": -Infinity}'), ["invalid_json: -Infinity"]),
    (J('{"a": 1e999}'), ["invalid_json: 1e999"]),
    (J('{"a": -1e999}'), ["invalid_json: -1e999"]),
    (J('{"a": ' + "1" * 5000 + "}"), ["invalid_json: too many digits"]),
    (J('{"a": ' + "[" * 201 + "]" * 201 + "}"), ["too_deep: 200"]),
    (J('{"a": ' + "[" * 9000 + "]" * 9000 + "}") + T(P), ["too_deep: 200", G]),
    (J('{"a": "\\ud800"}'), ["invalid_json: surrogate"]),
    (J('{"a": "\\udc00\\ud800"}'), ["invalid_json: surrogate"]),
    (J('{"a": "\\ud83d\\ude00"}'), [f(a="😀")]),
    (J(f'{{{ODD}: 1}}'), ["invalid_json: invalid JSON"]),
    # names
    (J("{}", "3"), ["missing_name: name"]),
    (J("{}", "null"), ["missing_name: name"]),
    (J("{}", '" "'), ["missing_name: name"]),
    (J("{}", '["f"]'), ["missing_name: name"]),
    (T("{}"), ["missing_name: name"]),
    (T('{"tool": "f", "args": {}}'), ["missing_name: name"]),
    (T("[]"), ["missing_name: name"]),
    (T("[[]]"), ["missing_name: name"]),
    (J('{"a": 1}', '" f\\n"'), [f(a=1)]),
    (J('{"n": 1}', '"functions.f"'), [f(n=1)], TOOLS),
    (J('{"n": 1}', '"functions.f"'), [("functions.f", {"n": 1})]),
    (J('{"n": 1}', '"fly"'), [("fly", {"n": 1})], TOOLS),
    # arguments
    (T('{"name": "f"}') + T('{"name": "f", "arguments": null}'), [f(), f()]),
    (J('""') + J(STRINGIFIED % 1), [f(), f(a=1)]),
    (T('{"name": "f", "parameters": {"a": 1}}'), [f(a=1)]),
    (T('{"type": "function", "function": {"name": "f", "arguments": "{}"}}'), [f()]),
    (J("[1]"), ['bad_arguments: "arguments" must be an object']),
    (J("5"), ['bad_arguments: "arguments" must be an object']),
    (J("false"), ['bad_arguments: "arguments" must be an object']),
    (J('"[1]"'), ['bad_arguments: "arguments" must be an object']),
    (J('"plain words"'), ["invalid_json: invalid JSON"]),
    (J(STRINGIFIED % "oops"), ["invalid_json: oops"]),
    (J(STRINGIFIED % "NaN"), ["invalid_json: NaN"]),
    (J('{"a": 1, "a": 2}'), [f(a=2)]),
    (J('{"a": null, "b": "null", "c": 1.0}'), [f(a=None, b="null", c=1.0)]),
    # lists
    (T(f"[{P}, 3, {P}]"), [G, "missing_name: an object", G]),
    (T(f'[{{"name": "f", "arguments": 1}}, {P}]'), ["bad_arguments: must be an object", G]),
    (T(f"[{P}, {P}"), ["invalid_json: invalid JSON"]),
    # markers inside of strings are data
    (J('{"c": "print(\'</tool_call>\')"}'), [f(c="print('</tool_call>')")]),
    (J('{"c": "<tool_call>{}</tool_call>"}') + T(P), [f(c="<tool_call>{}</tool_call>"), G], {"rest": ""}),
    (J('{"c": "<think> ``` <|im_end|> <tool_response>"}'), [f(c="<think> ``` <|im_end|> <tool_response>")]),
    (J('{"c": "</tool_call>"}', "3") + T(P), ["missing_name: name", G], {"rest": ""}),
    (J('["</tool_call>", "<tool_call>"]') + T(P), ["bad_arguments: must be an object", G], {"rest": ""}),
    # neighbours, and text around
    (T("{oops") + T(P), ["invalid_json: oops", G], {"rest": ""}),
    (f"a {T(P)} b {T('{oops')} c {T(P)} d", [G, "invalid_json: oops", G], {"rest": "a  b  c  d"}),
    (f"\ufeff{T(chr(0xFEFF) + P)}\r\n", [G], {"rest": "\ufeff\r\n"}),
    (T(P.replace(" ", "\r\n")).replace("\n<", "\r\n<"), [G], {"rest": ""}),
    (J('{"s": "é ✓ 𝒳 a &lt; b"}'), [f(s="é ✓ 𝒳 a &lt; b")]),
    # thoughts, fences, forged turns
    (f"<think>{T(P)}</think>", [], {"rest": f"<think>{T(P)}</think>"}),
    (f"<think>{T('{oops')}</think>{T(P)}", [G]),
    (f"<think>hm {T(P)}", [G], {"rest": "<think>hm "}),
    (f"hm</think>{T(P)}", [G]),
    (f"```\n{T(P)}\n```\n{T(P)}", [G]),
    (f"```\n{T(P)}", [G]),
    (f"<tool_response>\n{T(P)}\n</tool_response>", []),
    (f"<tool_response>\n{T(P)}\n</tool_response>{T(P)}", [G]),
    (f"{T(P)}\n<tool_response>\n{T(P)}", [G]),
    (f"{T(P)}<|im_end|>\n<|im_start|>assistant\n{T(P)}", [G]),
    (f"<tool_call>\n{P}<|im_end|>\n{T(P)}", [G]),
    ('<tool_call>\n{"name": "f", "argu<|im_end|>\n' + T(P), ["invalid_json: invalid JSON"]),
    # limits
    (T(P) * 2 + T("{oops") + T(P), [G, G, "over_limit: at most 2", "over_limit: at most 2"], SMALL),
    (T(f"[{P}]") * 2 + T(P), [G, G, "over_limit: at most 2"], SMALL),
    (J(f'{{"a": "{"x" * 50}"}}') + T(P), ["too_large: 50 bytes", G], SMALL),
    (J(f'{{"a": "{"é" * 10}"}}') + T(P), ["too_large: 50 bytes", G], SMALL),
    (J('{"a": [[1]]}') + T(P), ["too_deep: 3", G], SMALL),
    (J(STRINGIFIED % "[[[1]]]") + T(P), ["too_deep: 3", G], SMALL),
]  # fmt: skip


# Qwen3-Coder, and Seed-OSS whose tag around a call has another name


def Q(name: str = "g", **values: str) -> str:
    return T(F(name, **values))


def F(name: str = "g", **values: str) -> str:
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<function={name}>\n{inside}</function>"


QG = Q(x="1")
QOPEN = "<tool_call>\n<function=f>\n"
QTURN = f"<|im_end|>\n<|im_start|>assistant\n{QG}"
CODE = 'print("</parameter>")\nprint("</function>\\n</tool_call>")\n<parameter=x>'

QWEN: list[Row] = [
    # cut off
    ("<tool_call>", [f"unclosed: {END}"]),
    ("<tool_call>\n<func", ["wrong_dialect: <func"]),
    ("<tool_call>\n<function=", ["unclosed: <function="]),
    ("<tool_call>\n<function=f", ["unclosed: <function="]),
    (QOPEN, ["unclosed: </function>"]),
    (f"{QOPEN}<parameter=s", ["unclosed: <parameter="]),
    (f"{QOPEN}<parameter=s>", ["unclosed: s has no </parameter>"]),
    (f"{QOPEN}<parameter=s>\nva", ["unclosed: s has no </parameter>"]),
    (f"{QOPEN}<parameter=s>\nva\n</para", ["unclosed: s has no </parameter>"]),
    (f"{QOPEN}<parameter=s>\nva\n</parameter>", ["unclosed: </function>"]),
    (f"{QOPEN}<parameter=s>\nva\n</parameter>\n</func", ["unclosed: </"]),
    (f"{QOPEN}<parameter=s>\nva\n</parameter>\n<parameter=n>\n1", ["unclosed: n has no </parameter>"], TOOLS),
    (f"{QOPEN}</function>", [f()]),
    (f"{QOPEN}<parameter=s>\nva\n</parameter>\n</function>\n</tool_", [f(s="va")], {"rest": "\n</tool_"}),
    (f"{QG}\n{QOPEN}<parameter=s>\nva", [G, "unclosed: s has no </parameter>"], {"rest": "\n"}),
    # openers and closers
    (F(x="1"), [G], {"rest": ""}),
    (f"{F(x='1')}\n</tool_call>", [G], {"rest": ""}),
    (f"<tool_call><tool_call>\n{F(x='1')}\n</tool_call>", [G]),
    (f"<tool_call>\n<tool_call>\n{F(x='1')}\n</tool_call>", [G]),
    (f"{QG}</tool_call>", [G]),
    (f"<tool_call>\n{F(x='1')}\n<tool_call>\n{F(x='1')}\n</tool_call>", [G, G]),
    (T(f"{F(x='1')}\n{F(x='2')}"), [G, g(x=2)], {"rest": "\n"}),
    (QG.replace("<function=", "<Function="), ["wrong_dialect: <Function="]),
    (QG.replace("tool_call", "toolcall"), [G]),
    (QG.replace("function", "func"), ["wrong_dialect: <func="]),
    (QG.replace("<parameter=", "<param="), ["extra_data: <param=x>"]),
    (QG.replace("</parameter>", "</param>"), ["unclosed: x has no </parameter>"]),
    (QG.replace("</function>\n", ""), ["unclosed: </function>"]),
    (QG.replace("</function>\n", "") + f"\n{QG}", ["unclosed: </function>", G]),
    (QG.replace("</function>\n", "") + QG, ["unclosed: </function>", G]),
    (QG.replace("</parameter>\n", "") + f"\n{QG}", ["unclosed: x has no </parameter>", G], {"rest": ""}),
    (f"<function=f>\n<parameter=s>\nva\n</function>\n{F(x='1')}", ["unclosed: s has no </parameter>", G]),
    (f"{QOPEN}<function=f>\n</function>\n</tool_call>", ["extra_data: <function=f>"]),
    ("<tool_call>\n<function=f\n<parameter=s>\nva\n</parameter>\n</function>", ["unclosed: <function=f"]),
    (f"{QOPEN}<parameter=s\nva\n</parameter>\n</function>\n{QG}", ["unclosed: <parameter=s", G]),
    (f"{QOPEN}<parameter s>\nva\n</parameter>\n</function>", ["extra_data: <parameter s>"]),
    (T(""), ["empty: nothing"]),
    ("<tool_call></tool_call> and then", ["empty: nothing"], {"rest": " and then"}),
    (f"<tool_call></tool_call>{QG}", ["empty: nothing", G], {"rest": ""}),
    (f"{QG} <tool_call></tool_call> {QG}", [G, "empty: nothing", G], {"rest": "  "}),
    # wrong dialects
    (T(P), ["wrong_dialect: {"]),
    (f"{T(P)}\n{QG}", ["wrong_dialect: {", G], {"rest": "\n"}),
    (f"{T(P)} so {QG}", ["wrong_dialect: {", G], {"rest": " so "}),
    (f"{QG}{T(P)} so", [G, "wrong_dialect: {"], {"rest": " so"}),
    (T('<invoke name="f">\n</invoke>'), ["wrong_dialect: <invoke"]),
    (T("f\n<arg_key>s</arg_key>\n<arg_value>v</arg_value>"), ["wrong_dialect: <arg_key>"]),
    (T("I call f."), ["wrong_dialect: I call f."]),
    (T('<function=f>\n{"s": "va"}\n</function>'), ["wrong_dialect: its own tag"]),
    (T("<function=f>\nva\n</function>") + QG, ["extra_data: va", G]),
    # names
    (QG.replace("=g", "="), ["missing_name: <function="]),
    (QG.replace("=g", "=  "), ["missing_name: <function="]),
    (QG.replace("=x", "=") + QG, ["missing_name: <parameter=", G]),
    (QG.replace("=g", "= g ").replace("=x", "= x "), [G]),
    (Q("functions.g", x="1"), [G], TOOLS),
    (Q("fly", x="1", y="no", z="null"), [("fly", {"x": 1, "y": "no", "z": None})], TOOLS),
    (f"{QOPEN}<parameter={LONG}>\nva", ["unclosed: has no </parameter>"]),
    (f"{QOPEN}{ODD}\n</function>", ["extra_data: expecting"]),
    # values
    (Q("f", s="null", n="5", b="true"), [f(s="null", n=5, b=True)], TOOLS),
    (Q("f", s="007", n="007", x="1.5"), [f(s="007", n="007", x=1.5)], TOOLS),
    (Q("f", s="5", n=" 5 ", b="True"), [f(s="5", n=5, b=True)], TOOLS),
    (Q("f", n="five", b="1", x="true"), [f(n="five", b="1", x="true")], TOOLS),
    (Q("f", maybe="null", either="7", several="null"), [f(maybe=None, either=7, several=None)], TOOLS),
    (Q("f", maybe="x", either="007", several="x"), [f(maybe="x", either="007", several="x")], TOOLS),
    (Q("f", items='[1, "a"]', o='{"k": null}'), [f(items=[1, "a"], o={"k": None})], TOOLS),
    (Q("f", items="[1,", o="{'k': 1}"), [f(items="[1,", o={"k": 1})], TOOLS),
    (Q("f", s='{"k": 1}', items='{"k": 1}'), [f(s='{"k": 1}', items='{"k": 1}')], TOOLS),
    (Q("f", x="NaN", n="1e999"), [f(x="NaN", n="1e999")], TOOLS),
    (Q("f", n="1" * 5000, o='{"a": "\\ud800"}'), [f(n="1" * 5000, o='{"a": "\\ud800"}')], TOOLS),
    (Q("f", items="[" * 9000), [f(items="[" * 9000)], TOOLS),
    (Q("f", k='"a"', m="[1]", t="true"), [f(k='"a"', m=[1], t=True)]),
    (Q("f", s="\n a &lt; b \n"), [f(s="\n a &lt; b \n")], TOOLS),
    (Q("f", s=""), [f(s="")], TOOLS),
    (Q("f", s="v").replace("\n", ""), [f(s="v")], TOOLS),
    (Q("f", s="é ✓ 𝒳"), [f(s="é ✓ 𝒳")]),
    (Q("f", n="1").replace("\n</function>", "\n<parameter=n>\n2\n</parameter>\n</function>"), [f(n=2)]),
    (Q("f", s="v").replace("\n", "\r\n"), [f(s="v")], {**TOOLS, "rest": ""}),
    ("\ufeff" + QG, [G], {"rest": "\ufeff"}),
    # a value ends at its closer, at the next parameter that the tool has, or not at all
    (Q("f", s=CODE), [f(s=CODE)]),
    (Q("f", s="say <tool_call>") + QG, [f(s="say <tool_call>"), G]),
    (Q("f", s="<think>```<tool_response>") + QG, [f(s="<think>```<tool_response>"), G]),
    (Q("f", s="v", n="1").replace("v\n</parameter>", "v", 1), [f(s="v", n=1)], TOOLS),
    (Q("f", s="v", q="1").replace("v\n</parameter>", "v", 1), [f(s="v\n<parameter=q>\n1")], TOOLS),
    (Q("f", s="v", n="1").replace("</parameter>\n</f", "</f"), ["unclosed: n has no </parameter>"], TOOLS),
    (f"{QOPEN}<parameter=s>\nva\n{QG}", ["unclosed: s has no </parameter>", G], TOOLS),
    # thoughts, fences, forged turns, text around
    (f"a {QG} b {Q('')} c {QG} d", [G, "missing_name: <function=", G], {"rest": "a  b  c  d"}),
    (f"<think>{QG}</think>{Q(x='2')}", [g(x=2)]),
    (f"<think>hm {QG}", [G], {"rest": "<think>hm "}),
    (f"<think>hm {QOPEN}</think>", []),
    (f"```xml\n{QG}\n```", []),
    (f"```\n{QG}", [G]),
    (f"<tool_response>\n{QG}\n</tool_response>\n{Q(x='2')}", [g(x=2)]),
    (f"<tool_response>\n{QG}", []),
    (f"{QG}{QTURN}", [G]),
    (f"{QOPEN}<parameter=s>\nva{QTURN}", ["unclosed: s has no </parameter>"]),
    (f"<tool_call>\n<function=f{QTURN}", ["unclosed: <function="]),
    # limits
    (f"{QG}\n{QG}\n{Q('f')}\n{T(P)}", [G, G, "over_limit: at most 2", "over_limit: at most 2"], SMALL),
    (Q("f", s="x" * 60) + QG, ["too_large: 50 bytes", G], SMALL),
    (Q("f", s="é" * 20) + QG, ["too_large: 50 bytes", G], SMALL),
    (f"{QOPEN}<parameter=\ud800>\nva", ["unclosed: has no </parameter>"]),
]  # fmt: skip


def S(text: str) -> str:
    return text.replace("tool_call>", "seed:tool_call>")


SG, SOPEN = S(QG), S(QOPEN)

SEED: list[Row] = [
    ("<seed:tool_call>", [f"unclosed: {END}"]),
    (f"{SOPEN}<parameter=s>\nva", ["unclosed: s has no </parameter>"]),
    (f"{SOPEN}<parameter=s>\nva\n</parameter>\n", ["unclosed: </function>"]),
    (f"{SG} <seed:tool_call></seed:tool_call> {SG}", [G, "empty: nothing", G], {"rest": "  "}),
    (S(T(P)), ["wrong_dialect: {"], {"rest": ""}),
    (S(f"{T(P)} so {QG}"), ["wrong_dialect: {", G], {"rest": " so "}),
    (S(f"{Q('')}\n{QG}"), ["missing_name: <function=", G], {"rest": "\n"}),
    (f"{SG}\n{SOPEN}va\n</function>\n</seed:tool_call>", [G, "extra_data: va"], {"rest": "\n"}),
    (QG, [G]),
    (F(x="1"), [G], {"rest": ""}),
    (f"<seed:think>{SG}</seed:think>", []),
    (f"```\n{SG}\n```", []),
    (f"{SG}<seed:eos>{SG}", [G]),
    (f"{SOPEN}<parameter=s>\nva<seed:eos>\n{SG}", ["unclosed: s has no </parameter>"]),
    (S(Q("f", s="007", n="5", b="True")), [f(s="007", n=5, b=True)], TOOLS),
    (S(Q("f", s="v", n="1")).replace("v\n</parameter>", "v", 1), [f(s="v", n=1)], TOOLS),
    (S(Q("f", s='print("</parameter>", "</function>")')), [f(s='print("</parameter>", "</function>")')]),
    (S(Q("f", s="é").replace("\n", "\r\n")), [f(s="é")], {"rest": ""}),
    (f"{SG}{SG}{SG}", [G, G, "over_limit: at most 2"], {**SMALL, "rest": ""}),
]  # fmt: skip


# MiniMax M2


def N(name: str = "g", **values: str) -> str:
    inside = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in values.items())
    return f'<invoke name="{name}">\n{inside}</invoke>'


def M(*calls: str) -> str:
    return "\n".join(["<minimax:tool_call>", *calls, "</minimax:tool_call>"])


IG = N(x="1")
MOPEN = '<minimax:tool_call>\n<invoke name="f">\n'

MINIMAX: list[Row] = [
    # cut off
    ("<minimax:tool_call>\n", [f"unclosed: {END}"]),
    ('<minimax:tool_call>\n<invoke name="f', ["unclosed: <invoke"]),
    (MOPEN, ["unclosed: </invoke>"]),
    (f'{MOPEN}<parameter name="s', ["unclosed: <parameter"]),
    (f'{MOPEN}<parameter name="s">va', ["unclosed: s has no </parameter>"]),
    (f'{MOPEN}<parameter name="s">va</parameter>\n</inv', ["unclosed: </"]),
    (f'{MOPEN}<parameter name="s">va</parameter>\n</invoke>\n</mini', [f(s="va")]),
    # openers and closers
    (M(), ["empty: nothing"], {"rest": ""}),
    (f"{M()} a {M(IG)} b", ["empty: nothing", G], {"rest": " a  b"}),
    (IG, [G], {"rest": ""}),
    (f"<minimax:tool_call>{M(IG)}", [G]),
    (M(IG, N(x="2"), '<invoke name="f"></invoke>'), [G, g(x=2), f()]),
    (M(N("f", s="va").replace("</parameter>", "")), ["unclosed: s has no </parameter>"]),
    (M(N("f", s="va").replace("</parameter>", ""), IG), ["unclosed: s has no </parameter>", G]),
    (M(N("f", s="va").replace("</invoke>", "</invok>"), IG), ["unclosed: </", G]),
    (M(N("f", s="va").replace("</parameter>", "")) + "\n" + M(IG), ["unclosed: no </parameter>", G]),
    (M("va"), ["wrong_dialect: va"], {"rest": ""}),
    (M(P) + M(IG), ["wrong_dialect: {", G], {"rest": ""}),
    (M(f'<invoke name="f">\n{P}\n</invoke>', IG), ["wrong_dialect: its own tag", G]),
    (M(F(x="1")), ["wrong_dialect: <function="]),
    # names
    (M("<invoke></invoke>", IG), ["missing_name: <invoke", G]),
    (M('<invoke name=""></invoke>', IG), ["missing_name: <invoke", G]),
    (M("<invoke name=f></invoke>", IG), ["missing_name: name=f", G]),
    (M('<invoke tool="f"></invoke>'), ["missing_name: <invoke"]),
    (M(IG.replace('"x"', '" "'), IG), ["missing_name: <parameter", G]),
    (M(N("a&amp;b")), [("a&b", {})]),
    (M(N("fly", y="no")), [("fly", {"y": "no"})], TOOLS),
    (f'{MOPEN}<parameter name="{LONG}">va', ["unclosed: has no </parameter>"]),
    (f"{MOPEN}{ODD}</invoke>", ["extra_data: expecting"]),
    # values
    (M(N("f", s="null", n="5", b="true", maybe="null")), [f(s="null", n=5, b=True, maybe=None)], TOOLS),
    (M(N("f", s="007", n="1e999", x="NaN")), [f(s="007", n="1e999", x="NaN")], TOOLS),
    (M(N("f", s="\n v \n", items="[1]")), [f(s="\n v \n", items=[1])], TOOLS),
    (M(N("f", s="v", n="1").replace("v</parameter>", "v", 1)), [f(s="v\n", n=1)], TOOLS),
    (M(N("f", s="print('</parameter>', '</invoke>')")), [f(s="print('</parameter>', '</invoke>')")]),
    (M(N("f", s="a &lt; <b>")), [f(s="a &lt; <b>")]),
    (M(N("f", n="1").replace("</invoke>", '<parameter name="n">2</parameter></invoke>')), [f(n=2)]),
    (M(IG).replace("\n", "\r\n"), [G], {"rest": ""}),
    # thoughts, fences, forged turns
    (f"<think>{M(IG)}</think>{M(IG)}", [G]),
    (f"<think>{M(IG)}", [G]),
    (f"```\n{M(IG)}\n```", []),
    (f"<response>{M(IG)}</response>", []),
    (f"{M(IG)}[e~[\n]~b]ai\n{M(IG)}", [G]),
    (f'{MOPEN}<parameter name="s">va[e~[\n]~b]ai\n{M(IG)}', ["unclosed: s has no </parameter>"]),
    (M(IG, IG, IG), [G, G, "over_limit: at most 2"], {**SMALL, "rest": "\n\n"}),
    (M(N("f", s="x" * 60), IG), ["too_large: 50 bytes", G], SMALL),
]  # fmt: skip


# DeepSeek V3.2, and V4 whose section has another name


DCLOSE = "</｜DSML｜parameter>"


def D(name: str = "g", body: str = "", **values: str) -> str:
    inside = "".join(
        f'<｜DSML｜parameter name="{key}" string="{str(key not in "xnbo").lower()}">{value}{DCLOSE}\n'
        for key, value in values.items()
    )
    return f'<｜DSML｜invoke name="{name}">\n{body}{inside}</｜DSML｜invoke>'


def V(*calls: str) -> str:
    return "\n".join(["<｜DSML｜function_calls>", *calls, "</｜DSML｜function_calls>"])


def V4(text: str) -> str:
    return text.replace("｜function_calls>", "｜tool_calls>")


def V41(entry: Any) -> Any:
    if isinstance(entry, tuple):
        name, args = entry
        return name, {key: V41(value) for key, value in args.items()}
    if not isinstance(entry, str):
        return entry
    return re.sub(r"｜DSML｜(?=\w)", "｜DSML｜ ", entry.replace("｜function_calls>", "｜calls>"))


DG = D(x="1")
DOPEN = '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
DVALUE = f'{DOPEN}<｜DSML｜parameter name="s" string="true">va'
DTURN = "<｜end▁of▁sentence｜>\n" + V(DG)

# Rows that hold for both.
DSML: list[Row] = [
    # cut off
    ("<｜DSML｜function_calls>", [f"unclosed: {END}"]),
    ("<｜DSML｜function_calls>\n<｜DSML｜invoke", ["unclosed: <｜DSML｜invoke"]),
    (DOPEN, ["unclosed: </｜DSML｜invoke>"]),
    (f"{DOPEN}<｜DSML｜parameter name=", ["unclosed: <｜DSML｜parameter"]),
    (DVALUE, [f"unclosed: s has no {DCLOSE}"]),
    (f"{DVALUE}{DCLOSE}\n", ["unclosed: </｜DSML｜invoke>"]),
    (f'{DOPEN}{{"s": "va', ["unclosed: the message ends"]),
    (f'{DOPEN}{{"s": "va"}}', ["unclosed: </｜DSML｜invoke>"]),
    # openers and closers
    (V(), ["empty: nothing"], {"rest": ""}),
    (f"a {V(P)} b {V(DG)}", ["wrong_dialect: {", G], {"rest": "a  b "}),
    (V("va"), ["wrong_dialect: va"], {"rest": ""}),
    (f"<｜DSML｜function_calls>{V(DG)}", [G]),
    (DG, [G], {"rest": ""}),
    (V(D("f", s="va").replace(DCLOSE, "")), [f"unclosed: s has no {DCLOSE}"]),
    (V(D("f", s="va").replace(DCLOSE, ""), DG), [f"unclosed: s has no {DCLOSE}", G]),
    (V(D("f", "prose "), DG), ["extra_data: prose", G]),
    (V(DG, D("f", "prose ")), [G, "extra_data: prose"], {"rest": "\n"}),
    # names
    (V(D(""), DG), ["missing_name: <｜DSML｜invoke", G]),
    (V(D("f", s="va").replace('name="s" ', "")), ["missing_name: <｜DSML｜parameter"]),
    (V(D("fly", n="1")), [("fly", {"n": 1})], TOOLS),
    (f'{DOPEN}<｜DSML｜parameter name="{LONG}" string="true">va', [f"unclosed: has no {DCLOSE}"]),
    # values
    (V(D("f", s="null", n="null", items="[1]")), [f(s="null", n=None, items="[1]")]),
    (V(D("f", s="007", n="1.0", b="true")), [f(s="007", n=1.0, b=True)], TOOLS),
    (V(D("f", o='{"k": "\\ud83d\\ude00"}')), [f(o={"k": "😀"})]),
    (V(D("f", s="5").replace(' string="true"', "")), [f(s="5")], TOOLS),
    (V(D("f", n="5").replace(' string="false"', "")), [f(n=5)], TOOLS),
    # no value holds the token of the format
    (V(D("f", s=f"print('{DCLOSE}')"), DG), ["unclosed: the value of s contains ｜DSML｜", G]),
    (V(D("f", s="｜DSML｜"), DG), ["unclosed: the value of s contains ｜DSML｜", G]),
    (V(D("f", s="v", n="1").replace(f"v{DCLOSE}", "v", 1)), [f(s="v\n", n=1)]),
    (V(D("f", s="v", n="1").replace(f"v{DCLOSE}\n", "v", 1), DG), [f(s="v", n=1), G]),
    (V(D("f", s="v", q="1").replace(f"v{DCLOSE}", "v", 1), DG), ["unclosed: value of s contains", G], TOOLS),
    (V(D("f", s="v", q="1").replace(f"v{DCLOSE}", "v", 1).replace('"q"', '"s"')), ["unclosed: s contains"]),
    (V(D("f", s=f"see {DG}"), DG), ["unclosed: the value of s contains ｜DSML｜", G]),
    (f"{DVALUE}{DG}\n</｜DSML｜function_calls>", ["unclosed: the value of s contains ｜DSML｜"]),
    (f"{DVALUE}\n{DG}\n</｜DSML｜function_calls>", [f"unclosed: s has no {DCLOSE}", G]),
    (V(D("f", s="v", n="1").replace(f"v{DCLOSE}", "v", 1)), [f(s="v\n", n=1)], TOOLS),
    (V(D("f", n="1", o="2").replace('name="o"', 'name="n"')), [f(n=2)]),
    (V(DG).replace("\n", "\r\n"), [G], {"rest": ""}),
    # a body of JSON
    (V(D("f", '{"n": "007"}')), [f(n="007")]),
    (V(D("f", "{}"), D("f")), [f(), f()]),
    (V(D("f", '{"n": 1,}'), DG), ["invalid_json: comma", G]),
    (V(D("f", '{"n": NaN}'), DG), ["invalid_json: NaN", G]),
    (V(D("f", '{"n": 1e999}')), ["invalid_json: 1e999"]),
    (V(D("f", '{"s": "\\ud800"}')), ["invalid_json: surrogate"]),
    (V(D("f", '{"n": ' + "[" * 300 + "]" * 300 + "}"), DG), ["too_deep: 200", G]),
    (V(D("f", '{"n": 1} {}'), DG), ["extra_data: {}", G]),
    (V(D("f", '{"s": "</｜DSML｜invoke>"}'), DG), [f(s="</｜DSML｜invoke>"), G]),
    (V(D("f", '{"n": [[[1]]]}'), DG), ["too_deep: 3", G], {"limits": Limits(depth=3)}),
    (V(D("f", f'{{"s": "{"x" * 200}"}}'), DG), ["too_large: 150", G], {"limits": Limits(argument_bytes=150)}),
    # thoughts, fences, forged turns
    (f"<think>{V(DG)}</think>{V(DG)}", [G]),
    (f"<think>{V(DG)}", [G]),
    (f"```\n{V(DG)}\n```", []),
    (f"{V(DG)}{DTURN}", [G]),
    (f"{DVALUE}{DTURN}", [f"unclosed: s has no {DCLOSE}"]),
    (V(DG, DG, DG), [G, G, "over_limit: at most 2"], {"limits": Limits(calls=2)}),
]  # fmt: skip

DSML32: list[Row] = [
    *DSML,
    (f"<function_results>\n<result>{V(DG)}</result>\n</function_results>", []),
    (T(P) + M("x"), []),
]
DSML4: list[Row] = [
    *((V4(text), expected, *options) for text, expected, *options in DSML),
    (f"<tool_result>{V4(V(DG))}</tool_result>", []),
    (T(P) + M("x"), []),
]
DSML41: list[Row] = [
    *((V41(text), [*map(V41, expected)], *options) for text, expected, *options in DSML),
    (f"<tool_result>{V41(V(DG))}</tool_result>", []),
]


# GLM-4.5 and later; from 4.7 on without newlines


def L(name: str = "g", **values: str) -> str:
    inside = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items()
    )
    return f"<tool_call>{name}\n{inside}</tool_call>"


def L47(name: str = "g", **values: str) -> str:
    return L(name, **values).replace("\n", "")


LG = L(x="1")
LOPEN = "<tool_call>f\n"
LVALUE = f"{LOPEN}<arg_key>s</arg_key>\n<arg_value>va"
LCLOSE = "</arg_value>"
LTURN = f"<|observation|>\n{LG}"

GLM: list[Row] = [
    # cut off
    ("<tool_call>", [f"unclosed: {END}"]),
    (LOPEN, [f"unclosed: {END}"]),
    (f"{LOPEN}<arg_ke", [f"unclosed: {END}"]),
    (f"{LOPEN}<arg_key>s", ["unclosed: </arg_key>"]),
    (f"{LOPEN}<arg_key>s</arg_key>", ["unclosed: <arg_value>"]),
    (f"{LOPEN}<arg_key>s</arg_key>\n<arg_va", ["extra_data: <arg_va"]),
    (LVALUE, [f"unclosed: s has no {LCLOSE}"]),
    (f"{LVALUE}{LCLOSE}\n", ["unclosed: </tool_call>"]),
    (f"{LVALUE}{LCLOSE}\n</tool_", ["unclosed: </"]),
    # openers and closers
    ("<tool_call>f</tool_call>", [f()]),
    (L47("f", s="v", n="1") + L47(x="1"), [f(s="v", n=1), G], {**TOOLS, "rest": ""}),
    ("<tool_call></tool_call>" + LG, ["empty: the name", G], {"rest": ""}),
    ("<tool_call> \n</tool_call>", ["empty: the name"]),
    (f"<tool_call>{LG}", [G]),
    (f"<tool_call>\n{LG}", [G]),
    (f"<tool_call>f\n{LG}", ["unclosed: </tool_call>", G]),
    (f"{LVALUE}\n{LG}", [f"unclosed: s has no {LCLOSE}", G]),
    (f"{LVALUE}</tool_call>\n{LG}", [f"unclosed: s has no {LCLOSE}", G]),
    (f"{LVALUE}</tool_call>{LG}", [f"unclosed: s has no {LCLOSE}", G]),
    (f"{LVALUE}</tool_call>", [f"unclosed: s has no {LCLOSE}"], {"rest": ""}),
    (f"{LOPEN}<arg_value>va</arg_value>\n</tool_call>" + LG, ["extra_data: <arg_value>", G]),
    ("<tool_call>f<arg_value>va</arg_value></tool_call>" + LG, ["extra_data: <arg_value>", G]),
    (f"{LOPEN}<arg_key>s</arg_key>\nva\n</tool_call>" + LG, ["extra_data: <arg_value>", G]),
    (f"{LOPEN}<arg_key>s</arg_value>\n</tool_call>" + LG, ["unclosed: </arg_key>", G]),
    (LG.replace("</arg_key>", "</argkey>"), ["unclosed: </arg_key>"]),
    (LG.replace("</tool_call>", "oops</tool_call>"), ["unclosed: expecting"]),
    # wrong dialects, and names
    (f"a {T(P)} b {LG}", ["wrong_dialect: {", G], {"rest": "a  b "}),
    (T(F(x="1")), ["wrong_dialect: <function="]),
    (f"{LG}{T('<invoke name=f></invoke>')}", [G, "wrong_dialect: <invoke"]),
    (f'<tool_call>f\n{{"s": "va"}}\n</tool_call>{LG}', ["wrong_dialect: {", G]),
    (f"{T('I call f.')}{LG}", ["missing_name: I call f.", G]),
    (f"{L('', s='v')}{LG}", ["missing_name: name of the tool", G]),
    (f"{LG.replace('>x<', '> <')}{LG}", ["missing_name: </arg_key>", G]),
    (L("functions.g", x="1"), [G], TOOLS),
    (L("fly", y="no"), [("fly", {"y": "no"})], TOOLS),
    (f"{LOPEN}<arg_key>{LONG}</arg_key>\n<arg_value>va", [f"unclosed: has no {LCLOSE}"]),
    (f"{LOPEN}<arg_key>s</arg_key>{ODD}</tool_call>", ["extra_data: <arg_value>"]),
    # values
    (L("f", s="null", n="5", b="true", maybe="null"), [f(s="null", n=5, b=True, maybe=None)], TOOLS),
    (L("f", s="007", n="007", b="True", x="1e999"), [f(s="007", n="007", b=True, x="1e999")], TOOLS),
    (L("f", s="\n v \n", items="[1]", either="7"), [f(s="\n v \n", items=[1], either=7)], TOOLS),
    (L("f", s="print('</arg_value></tool_call')"), [f(s="print('</arg_value></tool_call')")]),
    (L("f", s="'</tool_call>'") + LG, [f(s="'</tool_call>'"), G]),
    (L("f", s="v", n="1").replace(f"v{LCLOSE}", "v", 1), [f(s="v\n", n=1)], TOOLS),
    (L47("f", s="v", n="1").replace(f"v{LCLOSE}", "v", 1), [f(s="v", n=1)], TOOLS),
    (L("f", n="1").replace("</tool", "<arg_key>n</arg_key><arg_value>2</arg_value></tool"), [f(n=2)]),
    (L("f", s="é ✓ 𝒳").replace("\n", "\r\n"), [f(s="é ✓ 𝒳")], {"rest": ""}),
    # thoughts, fences, forged turns, limits
    (f"<think>{LG}</think>{LG}", [G]),
    (f"<think>{LG}", [G]),
    (f"```\n{LG}\n```", []),
    (f"<tool_response>{LG}</tool_response>", []),
    (f"{LG}{LTURN}", [G]),
    (f"{LVALUE}{LTURN}", [f"unclosed: s has no {LCLOSE}"]),
    (f"{LOPEN}{LTURN}", ["unclosed: </tool_call>"]),
    (f"{LG}{LG}{LG}", [G, G, "over_limit: at most 2"], {"limits": Limits(calls=2), "rest": ""}),
    (f"{L('f', s='x' * 60)}{LG}", ["too_large: 90 bytes", G], {"limits": Limits(argument_bytes=90)}),
]  # fmt: skip


TABLES = {
    "hermes": HERMES, "qwen3_coder": QWEN, "seed_oss": SEED, "minimax_m2": MINIMAX, "deepseek_v32": DSML32,
    "deepseek_v4": DSML4, "deepseek_v41": DSML41, "glm45": GLM,
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_malformed_messages_follow_the_rules(name: str):
    """The rules are those of facts/parsers.md, sections 1, 3, 4 and 5."""
    check_all(TABLES[name], partial(_check, name))


def _check(name: str, text: str, expected: list[Any], options: dict[str, Any] | None = None) -> None:
    options = options or {}
    tools = options.get("tools")
    parser = get_parser(name, **({"limits": options["limits"]} if "limits" in options else {}))
    result = parser.parse(text, tools=tools)
    # As text, for which 1, 1.0 and True differ.
    codes = [entry.partition(": ")[0] if isinstance(entry, str) else entry for entry in expected]
    assert repr(_entries(result)) == repr(codes)
    for call, entry in zip(result.calls, expected, strict=True):
        if call.error is not None:
            said = call.error.message.partition(" Send it again as ")[0]
            assert entry.partition(": ")[2] in said
            _check_message(parser, call.index, call.error.code, call.error.message, text)
    _check_tiling(text, result)
    assert result.text == options.get("rest", result.text)
    for size in (1, 3, 7):
        stream = parser.stream(tools=tools, turn=0)
        for start in range(0, len(text), size):
            stream.feed(text[start : start + size])
        assert stream.close() == result


def _entries(result: ParseResult) -> list[Any]:
    return [call.error.code if call.error else (call.tool, dict(call.args)) for call in result.calls]


def _check_message(parser: ToolCallParser, index: int, code: str, message: str, text: str) -> None:
    """The message names the call, the reason and a correct call, in a few words."""
    assert message.startswith(f"call {index + 1} was not run: ")
    if code == "over_limit":
        assert len(message) <= 100
    else:
        assert message.endswith(f" Send it again as {parser.shape}")
    assert len(message) <= 500
    said = message.partition(" Send it again as ")[0]
    assert not any(text[at : at + 81] in said for at in range(len(text) - 80))
    message.encode("utf-8")


def _check_tiling(text: str, result: ParseResult) -> None:
    at, outside = 0, ""
    for index, call in enumerate(result.calls):
        assert call.index == index
        assert at <= call.span[0] <= call.span[1] <= len(text)
        outside += text[at : call.span[0]]
        at = call.span[1]
    assert outside + text[at:] == result.text


@pytest.mark.parametrize("name", ["qwen3_coder", "seed_oss", "glm45", "minimax_m2", "deepseek_v32"])
def test_ambiguous_value_is_not_rendered(name):
    """The markers of the format at the start, in the middle, on a line of their own and at the end."""
    parser = get_parser(name)
    markers = [
        *parser.format.openers,
        *filter(None, parser.format.section),
        parser.format.closer,
        *parser.format.turn_end,
    ]
    markers += [
        parser.format.parameter,
        parser.format.parameter_end,
        parser.render_call(ParsedCall("g", {"y": "v"}, "")),
    ]
    tools = {"f": schema(x="string", y="string")}
    written = 0
    for marker in markers:
        for value in (
            marker,
            f"a{marker}b",
            f"a\n{marker}b",
            f"a{parser.format.closer}{marker} b",
            f"a\n{marker} <b",
        ):
            args = {"x": value, "y": "z"}
            try:
                text = parser.render_call(ParsedCall("f", args, ""))
            except ValueError:
                continue
            written += 1
            assert [call.args for call in parser.parse(text, tools=tools).calls] == [args], value
    assert written
