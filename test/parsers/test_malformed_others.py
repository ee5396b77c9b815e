"""Malformed messages of the formats with JSON, Python syntax or plain tags."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from helpers.check_all import check_all

from torchrl_agentic.messages import ParsedCall
from torchrl_agentic.parsers import Limits, ToolCallParser, get_parser

# A row: (message, entries) or (message, entries, tools). An entry: (tool, args) or "code: part of its text".
Row = tuple[Any, ...]

ADD = ("add", {"a": 1})
STOP = ("add", {})
P = '{"name": "add", "arguments": {"a": 1}}'
DEEP = "[" * 201 + "]" * 201
NESTED: Any = 1
for _ in range(300):
    NESTED = [NESTED]
INT = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
KNOWN = {"add": INT, "f": {"type": "object", "properties": {"c": {"type": "string"}}}}
CODE = {"python": {"type": "object", "properties": {"code": {"type": "string"}}}}
TAG = "\U000e0041"  # an unprintable character far away: ten characters as an escape

UNCLOSED = "unclosed: the message ends"
NO_NAME = "missing_name: "
BAD_ARGS = "bad_arguments: must be a"
INVALID = "invalid_json: invalid JSON"
COMMA = "invalid_json: a comma too many"
EXTRA = "extra_data: unexpected text after"
NOT_LITERAL = "not_literal: "
KEYWORD = "not_literal: expecting argument=value"
EMPTY = "empty: "

L = '{"name": "add", "parameters": {"a": 1}}'
TAGGED = f"<|python_tag|>{L}"
LLAMA: list[Row] = [
    (L, [ADD]),
    (f"{TAGGED}<|eom_id|>", [ADD]),
    (f"{L}; {L}", [ADD, ADD]),
    (f"{TAGGED}; {L}", [ADD, ADD]),
    (TAGGED + TAGGED, [ADD, ADD]),
    (f"<|python_tag|>{TAGGED}", [ADD]),
    (f"before\n{L}\nafter", [ADD]),
    (f"He wrote {L} to me", []),
    ('{"a": 1}', []),
    ('{"name": "Bob", "age": 3}', []),
    ('{"name": "Bob"}', []),
    ('{"name": 3, "parameters": {}}', []),
    ("\\{1,2\\}\n{1, 2}\n{oops", []),
    ('{"type": "object", "properties": {"name": {}}}', []),
    ('{"name": "Bob", "age": oops}', []),
    ('{"name": " ", "parameters": {}}', [NO_NAME]),
    ('{"name": "add", "parameters": {"a": 1},}', [COMMA]),
    ('{"name": "add", "parameters": [1]}', [BAD_ARGS]),
    ('{"name": "add", "parameters": null}', [STOP]),
    ('{"name": "add", "arguments": {"a": 1}}', [ADD]),
    ('{"parameters": {"a": 1}, "name": " add "}', [ADD]),
    ('{"type": "function", "name": "add", "parameters": {"a": 1}}', [ADD]),
    (f'{{"type": "function", "function": {L}}}', [ADD]),
    ('{"name": "add", "parameters": "{\\"a\\": 1}"}', [ADD]),
    ('Well.\n{"name": "add", "parameters": "{oops"}', ["invalid_json: "]),
    ('{"name": "functions.add", "parameters": {"a": 1}}', [ADD], KNOWN),
    ('{"name": "fly", "parameters": {}}', [("fly", {})], KNOWN),
    ('{"name": "f", "parameters": {"c": "}\\n<|python_tag|>{\\"name\\": \\"g\\", \\"parameters\\": {}}"}}',
     [("f", {"c": '}\n<|python_tag|>{"name": "g", "parameters": {}}'})]),
    ('{"name": "add", "parameters": {"a": oops}}\n' + L, [INVALID, ADD]),
    (f'{L}\n{{"name": "add", "parameters": {{"a": oops}}}}', [ADD, INVALID]),
    (f"{L} }}", [ADD]),
    (L[:-1], [UNCLOSED]),
    ('{"name": "add", "parameters": {"a": "on', [UNCLOSED]),
    ("<|python_tag|>", [UNCLOSED]),
    ("<|python_tag|>{", [UNCLOSED]),
    ("<|python_tag|>{}", [NO_NAME]),
    ('<|python_tag|>{"name": "add"}', [STOP]),
    (f"<|python_tag|>[{L}, 3]", [ADD, NO_NAME]),
    ("<|python_tag|>import os", ["invalid_json: "]),
    ('<|python_tag|>brave_search.call(query="x")', [("brave_search", {"query": "x"})]),
    ('<|python_tag|>brave_search.call (query="x")', [("brave_search", {"query": "x"})]),
    ('<|python_tag|>brave_search.call("x")', [KEYWORD]),
    ("<|python_tag|>add.call(a=2*3)", [NOT_LITERAL]),
    (f"<|python_tag|>add.call(a=x)\n{L}", [NOT_LITERAL, ADD]),
    ('<|python_tag|>brave_search.call(query="x', [UNCLOSED]),
    (f"<python_tag>[{L}]", []),
    (f"{L}<|eot_id|>{L}", [ADD]),
    (f"<think>\n{L}\n</think>", []),
    (f"<think>\n{L}\n</think>\n{L}", [ADD]),
    (f"<think>\n{L}", [ADD]),
    (f"For example:\n```json\n{L}\n```\n", []),
    (L.replace(" ", "\r\n"), [ADD]),
    (f"\ufeff{L}", [ADD]),
    ('{"name": "f", "parameters": {"c": "日本 😀"}}', [("f", {"c": "日本 😀"})]),
    ('{"name": "add", "parameters": {"a": ' + TAG * 60 + "}}", [INVALID]),
    ('{"name": "add", "parameters": {"a": \ud800}}', [INVALID]),
]  # fmt: skip

PYTHONIC: list[Row] = [
    ("[add(a=1)]", [ADD]),
    ("[add(a=1), add(a=1)]", [ADD, ADD]),
    ("<|python_start|>[add(a=1)]<|python_end|>", [ADD]),
    ("before\n[add(a=1)]\nafter", [ADD]),
    ("[1, 2, 3]", []),
    ("[see (a)]", []),
    ("[see (a), b]\n[x](http://y)\na[i(0)]", []),
    ("[f for f in open(x)]", [], KNOWN),
    ("[add(a=2*3)]", [NOT_LITERAL], KNOWN),
    ("[add(a=2*3)]", []),
    ("[add(1)]", [KEYWORD], KNOWN),
    ("[add(a=1, 2)]", [KEYWORD], KNOWN),
    ("[add(**k)]", [KEYWORD], KNOWN),
    ("[add(*k)]", [KEYWORD], KNOWN),
    ("[f(c=f'{x}')]", ["not_literal: f is not a literal"], KNOWN),
    ("[add(a=x)]", ["not_literal: x is not a literal"], KNOWN),
    ("[add(a=__import__('os').system('ls'))]", ["not_literal: __import__"], KNOWN),
    ("[add(a=lambda: 1)]", ["not_literal: lambda"], KNOWN),
    ("[add(a=1 if b else 2)]", [NOT_LITERAL], KNOWN),
    ("[add(a=)]", [NOT_LITERAL], KNOWN),
    ("[add(a==1)]", [NOT_LITERAL], KNOWN),
    ("[add(, a=1)]", [KEYWORD], KNOWN),
    ("[add(a=[1, , 2])]", [NOT_LITERAL], KNOWN),
    ("[add(a={1, 2})]", [NOT_LITERAL], KNOWN),
    ("[add(a={1: 2})]", [NOT_LITERAL], KNOWN),
    ("[add(a=1e999)]", ["not_literal: too large"], KNOWN),
    ("[add(a=nan)]", [NOT_LITERAL], KNOWN),
    ("[add(a=" + "1" * 5000 + ")]", ["not_literal: number"], KNOWN),
    (f"[add(a={DEEP})]", ["too_deep: nested deeper"], KNOWN),
    ("[add(a=010)]", [NOT_LITERAL], KNOWN),
    ("[add(a=٣)]", [NOT_LITERAL], KNOWN),
    (r"[f(c='\ud800')]", ["not_literal: an unpaired surrogate"], KNOWN),
    (r"[f(c='\N{no such name}')]", ["not_literal: escape"], KNOWN),
    ("[f(c='it''s')]", [NOT_LITERAL], KNOWN),
    ("[f(c='a\nb')]", ["not_literal: not closed on its line"], KNOWN),
    ("[f(c='''a\nb''')]", [("f", {"c": "a\nb"})]),
    ("[add(a=(1))]", [ADD]),
    ("[add(a=(1, 2), b=(1,), c=())]", [("add", {"a": [1, 2], "b": [1], "c": []})]),
    ("[add(a=-3, b=true, c=null, d=None)]", [("add", {"a": -3, "b": True, "c": None, "d": None})]),
    ("[add(a=2, a=1,),]", [ADD]),
    ("[add (a=1)]", [ADD], KNOWN),
    ("[functions.add(a=1)]", [ADD], KNOWN),
    ("[a.b(c=1)]", [("a.b", {"c": 1})]),
    ("[add(a=x), add(a=1)]", [NOT_LITERAL, ADD], KNOWN),
    ("[add(a=1), add(a=x)]", [ADD, NOT_LITERAL], KNOWN),
    ("[add(a=1), oops]", [ADD, NOT_LITERAL], KNOWN),
    ("[add(a=1) add(a=1)]", [EXTRA], KNOWN),
    ("[add(a=1))]", [EXTRA], KNOWN),
    ("[add(a=1))", ["unclosed: "], KNOWN),
    ("[add(a=1", [UNCLOSED], KNOWN),
    ("[add(a='x", [UNCLOSED], KNOWN),
    ("[add(a=1)", [UNCLOSED], KNOWN),
    ("[]", []),
    ("<|python_start|>[]<|python_end|>", [EMPTY]),
    ("<|python_start|>", [UNCLOSED]),
    ("<|python_start|>[add(a=1)]", [ADD]),
    ("<|python_start|>add(a=x)<|python_end|>[add(a=1)]", [NOT_LITERAL, ADD]),
    ("[f(c='<|python_end|>]')]", [("f", {"c": "<|python_end|>]"})]),
    ("<|python_start|>[f(c='<|python_end|>')]<|python_end|>", [("f", {"c": "<|python_end|>"})]),
    ("<|python_start|><|python_start|>[add(a=1)]<|python_end|>", [ADD]),
    ("[f(c='[add(a=1)]')]", [("f", {"c": "[add(a=1)]"})]),
    ("see [add(a=1)] there", []),
    ("<think>\n[add(a=1)]\n</think>", []),
    ("<think>\n[add(a=1)]", [ADD]),
    ("```python\n[add(a=1)]\n```", []),
    ("[add(a=1)]<|eot|>[add(a=1)]", [ADD]),
    ("[add(\r\n  a=1,\r\n)]\r\n", [ADD]),
    ("\ufeff[add(a=1)]", [ADD]),
    ("[f(c='日本 😀')]", [("f", {"c": "日本 😀"})]),
    (f"[add(a={TAG * 60})]", [NOT_LITERAL], KNOWN),
    (f'[{{"name": "add", "arguments": {P}}}]', []),
]  # fmt: skip


def O(body: str) -> str:  # noqa: E743
    return f"<function_calls>{body}</function_calls>"


OLMO: list[Row] = [
    (O("add(a=1)"), [ADD]),
    (O("add(a=1)\nadd(a=1)"), [ADD, ADD]),
    (O("\r\nadd(\r\n  a=1\r\n)\r\n"), [ADD]),
    (f"before {O('add(a=1)')} after", [ADD]),
    (O("add()"), [STOP]),
    (O(""), [EMPTY]),
    (O(" \n"), [EMPTY]),
    ("<function_calls>", [UNCLOSED]),
    ("<function_calls>add(a=1)", [ADD]),
    ("<function_calls>add(a='x", [UNCLOSED]),
    ("<function_calls>add(a=1)</function_call>", [UNCLOSED]),
    ("<function_call>add(a=1)</function_call>", []),
    ("add(a=1)</function_calls>", []),
    (f"<function_calls>{O('add(a=1)')}", [ADD]),
    (f"<function_calls>add(a=1)\n{O('add(a=1)')}", [ADD, ADD]),
    (O("add(a=1)") + O("add(a=1)"), [ADD, ADD]),
    (O("add(a=1"), [NOT_LITERAL]),
    (O("add(a=1))"), [EXTRA]),
    (O("add(a=1);add(a=1)"), [EXTRA]),
    (O("add"), ["not_literal: expecting '('"]),
    (O("[add(a=1)]"), [NOT_LITERAL]),
    (O(P), [NOT_LITERAL]),
    (O("I will add"), [NOT_LITERAL]),
    (O("add(a=x)\nadd(a=1)"), [NOT_LITERAL, ADD]),
    (O("add(a=1)\nadd(a=x)"), [ADD, NOT_LITERAL]),
    (O("add(a=1)") + O("add(1)"), [ADD, KEYWORD]),
    (O("add(1)") + O("add(a=1)"), [KEYWORD, ADD]),
    (O("add(a=2*3)"), [NOT_LITERAL]),
    (O("add(**{'a': 1})"), [KEYWORD]),
    (O("f(c=f'{x}')"), [NOT_LITERAL]),
    (O("f(c='a' + 'b')"), [NOT_LITERAL]),
    (O("add(a=float('inf'))"), [NOT_LITERAL]),
    (O("add(a=1e999)"), ["not_literal: too large"]),
    (O(f"add(a={DEEP})"), ["too_deep: nested deeper"]),
    (O(r"f(c='\ud800')"), ["not_literal: surrogate"]),
    (O("f(c='</function_calls>')"), [("f", {"c": "</function_calls>"})]),
    (O(f"f(c='''\n{O('add(a=1)')}''')"), [("f", {"c": f"\n{O('add(a=1)')}"})]),
    (f"<think>{O('add(a=1)')}</think>", []),
    (f"<think>{O('add(a=1)')}</think>{O('add(a=1)')}", [ADD]),
    (f"<think>{O('add(a=1)')}", [ADD]),
    (f"```\n{O('add(a=1)')}\n```", []),
    (f"{O('add(a=1)')}<|im_end|>{O('add(a=1)')}", [ADD]),
    (O("\ufeffadd(a=1)"), [ADD]),
    (O("f(c='日本 😀')"), [("f", {"c": "日本 😀"})]),
]  # fmt: skip


def F(body: str) -> str:
    return f"<|tool_call_start|>{body}<|tool_call_end|>"


FA = F("[add(a=1)]")
LFM2: list[Row] = [
    (FA, [ADD]),
    (F("[add(a=1), add(a=1)]"), [ADD, ADD]),
    (FA + FA, [ADD, ADD]),
    (f"before {FA} after", [ADD]),
    (F("[]"), [EMPTY]),
    (F(""), [EMPTY]),
    ("<|tool_call_start|>", [UNCLOSED]),
    ("<|tool_call_start|>[add(", [UNCLOSED]),
    ("<|tool_call_start|>[add(a=1)]", [ADD]),
    ("<|tool_call_start|>[add(a=1)]<|im_end|>", [ADD]),
    (F("[add(a=1)"), [NOT_LITERAL]),
    (F("[add(a=1))]"), [EXTRA]),
    (F("[add(a=1]"), [NOT_LITERAL]),
    (F(f"[{P}]"), [ADD]),
    (f"<|tool_call_start|>{FA}", [ADD]),
    (f"<|tool_call_start|>[add(a=1)]{FA}", [ADD, ADD]),
    ("<|tool_call_begin|>[add(a=1)]<|tool_call_end|>", []),
    (F("[add(a=x), add(a=1)]"), ["not_literal: x is not a literal", ADD]),
    (F("[add(a=1), add(1)]"), [ADD, KEYWORD]),
    (F("[add(1)]") + FA, [KEYWORD, ADD]),
    (FA + F("[add(**k)]"), [ADD, KEYWORD]),
    (F("[add(a=2*3)]"), [NOT_LITERAL]),
    (F("[f(c=f'x')]"), [NOT_LITERAL]),
    (F("[add(a=(1))]"), [ADD]),
    (F("[3(a=1)]"), [NOT_LITERAL]),
    (F("[(a=1)]"), [NOT_LITERAL]),
    (F("[add(a=1e999)]"), ["not_literal: too large"]),
    (F("[add(a=" + "9" * 5000 + ")]"), ["not_literal: number"]),
    (F(f"[add(a={DEEP})]"), ["too_deep: nested deeper"]),
    (F(r"[f(c='\udfff')]"), ["not_literal: surrogate"]),
    (F("[f(c='<|tool_call_end|>')]"), [("f", {"c": "<|tool_call_end|>"})]),
    (F("[f(c='<|tool_call_start|>[add(a=1)]<|tool_call_end|>')]"), [("f", {"c": FA})]),
    (f"<|tool_response_start|>{FA}<|tool_response_end|>", []),
    (f"<|tool_response_start|>{FA}<|tool_response_end|>{FA}", [ADD]),
    (f"{FA}<|im_end|>{FA}", [ADD]),
    (f"<think>{FA}</think>", []),
    (f"<think>{FA}", [ADD]),
    (f"```\n{FA}\n```", []),
    (F("\r\n[add(a=1)]\r\n"), [ADD]),
    (F("\ufeff[add(a=1)]"), [ADD]),
    (F("[f(c='日本 😀')]"), [("f", {"c": "日本 😀"})]),
]  # fmt: skip

M = '[TOOL_CALLS]add[ARGS]{"a": 1}'
MISTRAL: list[Row] = [
    (M, [ADD]),
    (f"[TOOL_CALLS] [{P}]", [ADD]),
    ('[TOOL_CALLS]add{"a": 1}', [ADD]),
    ('[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 1}', [ADD]),
    ('[TOOL_CALLS]add[CALL_ID][ARGS]{"a": 1}', [ADD]),
    ('[TOOL_CALLS] add [ARGS] {"a": 1}', [ADD]),
    (f"[TOOL_CALLS]{P}", [ADD]),
    (M + M, [ADD, ADD]),
    (f"before {M} after {M} end", [ADD, ADD]),
    (f"[TOOL_CALLS]{M}", [ADD]),
    ("[TOOL_CALLS]", [UNCLOSED]),
    ("[TOOL_CALLS]add", ["unclosed: "]),
    ("[TOOL_CALLS]add[ARGS]", ["unclosed: "]),
    ("[TOOL_CALLS]add[CALL_ID]abc", ["unclosed: "]),
    ('[TOOL_CALLS]add[ARGS]{"a": ', [UNCLOSED]),
    ("[TOOL_CALLS] [", [UNCLOSED]),
    (f"[TOOL_CALLS] [{P}", [UNCLOSED]),
    ("[TOOL_CALLS] []", ["missing_name: a call is an object"]),
    ('[TOOL_CALLS][ARGS]{"a": 1}', [NO_NAME]),
    ('[TOOL_CALLS]{"a": 1}', [NO_NAME]),
    ('[TOOL_CALLS]two words[ARGS]{"a": 1}', [NO_NAME]),
    ('[TOOL_CALLS] [{"name": "", "arguments": {}}]', [NO_NAME]),
    ("[TOOL_CALLS]add[ARGS][1]", [BAD_ARGS]),
    ('[TOOL_CALLS]add[ARGS][{"b": 1}]', [BAD_ARGS]),
    (f"[TOOL_CALLS]add{M}", ["unclosed: no arguments", ADD]),
    ("[TOOL_CALLS]add[ARGS]{oops}" + M, [INVALID, ADD]),
    (M + "[TOOL_CALLS]add[ARGS]{oops}", [ADD, INVALID]),
    (f'[TOOL_CALLS] [{{"name": "add", "arguments": {{"a": 1}},}}]{M}', [COMMA, ADD]),
    (f"[TOOL_CALLS] [{P}, 3, {P}]", [ADD, NO_NAME, ADD]),
    ('Hm. [TOOL_CALLS]{"name": "add", "arguments": "{oops"}', ["invalid_json: "]),
    ('[TOOL_CALLS]f[ARGS]{"c": "[TOOL_CALLS]add[ARGS]{}"}', [("f", {"c": "[TOOL_CALLS]add[ARGS]{}"})]),
    ("[TOOL_CALLS]<function=add>", ["unclosed: "]),
    (f"[tool_calls]{P} [TOOL_CALL]{P} TOOL_CALLS{P}", []),
    (f"[TOOL_RESULTS]{M}[/TOOL_RESULTS]", []),
    (f"[TOOL_RESULTS]{M}[/TOOL_RESULTS]{M}", [ADD]),
    (f"{M}</s>{M}", [ADD]),
    ('[TOOL_CALLS]add</s>{"a": 1}', ["unclosed: "]),
    (f"<think>{M}</think>", []),
    (f"<think>{M}</think>{M}", [ADD]),
    (f"<think>{M}", [ADD]),
    (f"```\n{M}\n```", []),
    (f"[TOOL_CALLS]\r\n\ufeff[\r\n{P}]", [ADD]),
    ('[TOOL_CALLS]\r\nadd[ARGS]\r\n\ufeff{"a": 1}\r\n', [ADD]),
    ('[TOOL_CALLS]f[ARGS]{"c": "日本 😀"}', [("f", {"c": "日本 😀"})]),
    ('[TOOL_CALLS]functions.add[ARGS]{"a": 1}', [ADD], KNOWN),
]  # fmt: skip

S, E = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
B, X, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
EOS = "<｜end▁of▁sentence｜>"


def V31(args: str = '{"a": 1}', name: str = "add") -> str:
    return f"{B}{name}{SEP}{args}{X}"


DEEPSEEK_V31: list[Row] = [
    (S + V31() + E, [ADD]),
    (S + V31() + V31() + E, [ADD, ADD]),
    (f"before {S}{V31()}{E} after", [ADD]),
    (V31(), [ADD]),
    (S + V31(), [ADD]),
    (V31() + E, [ADD]),
    (S + V31().removesuffix(X), [ADD]),
    (S + V31().removesuffix(X) + E, [ADD]),
    (S + V31().removesuffix(X) + V31() + E, [ADD, ADD]),
    (S + S + V31() + E, [ADD]),
    (S + B + V31() + E, [ADD]),
    (S, [UNCLOSED]),
    (S + E, [EMPTY]),
    (f"{S}hello{E}", ["wrong_dialect: not a call of this format"]),
    (S + P + E, ["wrong_dialect: "]),
    (B, [UNCLOSED]),
    (f"{S}{B}ad", [UNCLOSED]),
    (f"{S}{B}add{SEP}", [UNCLOSED]),
    (f'{S}{B}add{SEP}{{"a"', [UNCLOSED]),
    (f"{S}{B}{X}{E}", [NO_NAME]),
    (f'{S}{B}add{{"a": 1}}{X}{V31()}{E}', [f"missing_name: {SEP} is missing", ADD]),
    (V31(name=" "), [NO_NAME]),
    (V31(name=" add\n"), [ADD]),
    (V31(""), [STOP]),
    (V31("null"), [STOP]),
    (V31('"{\\"a\\": 1}"'), [ADD]),
    (V31("[1]"), [BAD_ARGS]),
    (V31("hello"), [INVALID]),
    (V31('{"a": 1} {"a": 1}'), [EXTRA]),
    (V31('{"a": 1}}'), [EXTRA]),
    (S + V31("{oops}") + V31() + E, [INVALID, ADD]),
    (S + V31() + V31("{oops}") + E, [ADD, INVALID]),
    (V31(f'{{"c": "{X}{E}"}}', "f"), [("f", {"c": X + E})]),
    (V31(f'{{"c": "{B}g{SEP}{{}}{X}"}}', "f"), [("f", {"c": f"{B}g{SEP}{{}}{X}"})]),
    (f'{B}function{SEP}add\n```json\n{{"a": 1}}\n```{X}', [INVALID]),
    (f'<|tool_call_begin|>add<|tool_sep|>{{"a": 1}}<|tool_call_end|> <tool_call>{P}</tool_call>', []),
    (f"<｜tool▁output▁begin｜>{V31()}<｜tool▁output▁end｜>", []),
    (S + V31() + E + EOS + S + V31() + E, [ADD]),
    (S + V31(name=f"add{EOS}") + E, ["unclosed: "]),
    (f"<think>{S}{V31()}{E}</think>", []),
    (f"<think>{S}{V31()}{E}</think>{S}{V31()}{E}", [ADD]),
    (f"<think>{S}{V31()}{E}", [ADD]),
    (f"```\n{S}{V31()}{E}\n```", []),
    (f"{S}\r\n{V31(chr(0xFEFF) + '{' + chr(13) + chr(10) + chr(34) + 'a' + chr(34) + ': 1}')}\r\n{E}", [ADD]),
    (V31('{"c": "日本 😀"}', "f"), [("f", {"c": "日本 😀"})]),
    (V31("{" + TAG * 60 + "}"), [INVALID]),
]  # fmt: skip


def V3(args: str = '{"a": 1}', name: str = "add") -> str:
    return f"{B}function{SEP}{name}\n```json\n{args}\n```{X}"


DEEPSEEK_V3: list[Row] = [
    (S + V3() + E, [ADD]),
    (f"{S}{V3()}\n{V3()}{E}", [ADD, ADD]),
    (f"before {S}{V3()}{E} after", [ADD]),
    (V3(), [ADD]),
    (S + V3().removesuffix(X), [ADD]),
    (S + V3().removesuffix(f"\n```{X}") + X + E, [ADD]),
    (S + V3().removesuffix(f"\n```{X}") + E, [ADD]),
    (S + V3().removesuffix(f"\n```{X}"), [ADD]),
    (S + V3().removesuffix(f"1}}\n```{X}"), [UNCLOSED]),
    (S + V3().removesuffix(f'{{"a": 1}}\n```{X}'), [UNCLOSED]),
    (f"{S}{B}function{SEP}add\n```", [UNCLOSED]),
    (f"{S}{B}function{SEP}", [UNCLOSED]),
    (f"{S}{B}func", [UNCLOSED]),
    (S, [UNCLOSED]),
    (S + E, [EMPTY]),
    (S + B + V3() + E, [ADD]),
    (f'{B}function{SEP}add\n{{"a": 1}}{X}{V3()}', ["missing_name: ```json is missing", ADD]),
    (f'{B}add\n```json\n{{"a": 1}}\n```{X}', [NO_NAME]),
    (V31() + V3(), [NO_NAME, ADD]),
    (V3(name=" "), [NO_NAME]),
    (V3(""), [STOP]),
    (V3("null"), [STOP]),
    (V3("[1]"), [BAD_ARGS]),
    (V3("add(a=1)"), [INVALID]),
    (V3('{"a": 1}\n{"a": 1}'), [EXTRA]),
    (V3('{"a": 1}\n```\n```json\n{}'), [EXTRA]),
    (V3("{'a': 1}") + V3(), [INVALID, ADD]),
    (V3() + V3('{"a": 1,}'), [ADD, COMMA]),
    (V3(f'{{"c": "```{X}"}}', "f"), [("f", {"c": f"```{X}"})]),
    (f"<｜tool▁outputs▁begin｜>{V3()}<｜tool▁outputs▁end｜>", []),
    (S + V3() + E + EOS + V3(), [ADD]),
    (f"<think>{S}{V3()}{E}</think>", []),
    (f"<think>{S}{V3()}{E}", [ADD]),
    (f'```json\n{{"a": 1}}\n```\n{S}{V3()}{E}', [ADD]),
    (V3().replace("\n", "\r\n"), [ADD]),
    (V3('\ufeff{"c": "日本 😀"}', "f"), [("f", {"c": "日本 😀"})]),
]  # fmt: skip

KS, KE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KB, KX, KA = "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"


def K(args: str = '{"a": 1}', ident: str = "functions.add:0") -> str:
    return f"{KB}{ident}{KA}{args}{KX}"


BAD_ID = "bad_id: functions.name:number"
KIMI: list[Row] = [
    (KS + K() + KE, [ADD]),
    (KS + K() + K(ident="functions.add:1") + KE, [ADD, ADD]),
    (KS + K() + K() + KE, [ADD, ADD]),
    (f"before {KS}{K()}{KE} after", [ADD]),
    (K(), [ADD]),
    (KS + K().removesuffix(KX) + KE, [ADD]),
    (KS + K().removesuffix(KX) + K(), [ADD, ADD]),
    (KS + KB + K() + KE, [ADD]),
    (KS + KE, [EMPTY]),
    (KS, [UNCLOSED]),
    (KS + P + KE, ["wrong_dialect: "]),
    (KB, [UNCLOSED]),
    (f"{KS}{KB}functions.add:0", [UNCLOSED]),
    (f"{KS}{KB}functions.add:0{KA}", [UNCLOSED]),
    (f'{KS}{KB}functions.add:0{KA}{{"a": 1', [UNCLOSED]),
    (K(ident="functions.add") + K(), [BAD_ID, ADD]),
    (K() + K(ident="functions.add:"), [ADD, BAD_ID]),
    (K(ident="functions.add:x"), [BAD_ID]),
    (K(ident="functions.:0"), [BAD_ID]),
    (K(ident=":0"), [BAD_ID]),
    (K(ident=""), [BAD_ID]),
    (K(ident="functions.add b:0"), [BAD_ID]),
    (K(ident="functions.add:0:1"), [BAD_ID]),
    (K(ident="functions.add:-1"), [BAD_ID]),
    (K(ident=" functions.add:0\n"), [ADD]),
    (K(ident="add:3"), [ADD]),
    (K(ident="functions.a.b:0"), [("a.b", {"a": 1})]),
    (f'{KB}functions.add:0{{"a": 1}}{KX}{K()}', [f"missing_name: {KA} is missing", ADD]),
    (f"{KB}{P}{KX}", [NO_NAME]),
    (K(""), [STOP]),
    (K("null"), [STOP]),
    (K('"{\\"a\\": 1}"'), [ADD]),
    (K("[1]"), [BAD_ARGS]),
    (K("hello"), [INVALID]),
    (K('{"a": 1}{"a": 1}'), [EXTRA]),
    (K("{oops}") + K(), [INVALID, ADD]),
    (K() + K('{"a": 1,}'), [ADD, COMMA]),
    (K(f'{{"c": "{KX}{KE}{KB}"}}', "functions.f:0"), [("f", {"c": KX + KE + KB})]),
    (f"<|tool_calls_begin|>{K().replace('call', 'CALL')}", []),
    (f"{KS}{K()}{KE}<|im_end|>{KS}{K()}{KE}", [ADD]),
    (f"<think>{KS}{K()}{KE}</think>", []),
    (f"<think>{KS}{K()}{KE}", [ADD]),
    (f"```\n{KS}{K()}{KE}\n```", []),
    (K('\r\n\ufeff{\r\n"a": 1}\r\n'), [ADD]),
    (K('{"c": "日本 😀"}', "functions.f:0"), [("f", {"c": "日本 😀"})]),
]  # fmt: skip

CH, MSG, CALL, END = "<|channel|>", "<|message|>", "<|call|>", "<|end|>"
NEXT = "<|start|>assistant"


def H(args: str = '{"a": 1}', to: str = "functions.add", channel: str = "commentary") -> str:
    return f"{CH}{channel} to={to} <|constrain|>json{MSG}{args}{CALL}"


def HT(args: str = '{"a": 1}', to: str = "functions.add") -> str:
    return f"{NEXT} to={to}{CH}commentary json{MSG}{args}{CALL}"


HARMONY: list[Row] = [
    (H(), [ADD]),
    (HT(), [ADD]),
    (f' to=functions.add{CH}commentary json{MSG}{{"a": 1}}{CALL}', [ADD]),
    (f"{H()}{NEXT}{H()}", [ADD, ADD]),
    (HT() + HT(), [ADD, ADD]),
    (f"{CH}analysis{MSG}Hm.{END}{NEXT}{H()}", [ADD]),
    (f"{CH}commentary{MSG}I will add.{END}{NEXT}{H()}", [ADD]),
    (H().removesuffix(CALL), [ADD]),
    (H().removesuffix(CALL) + END, [ADD]),
    (H().removesuffix(CALL) + NEXT + H(), [ADD, ADD]),
    ("hello", []),
    (f"{CH}final{MSG}{P}<|return|>", []),
    (f"{CH}commentary{MSG}{P}{END}", []),
    (f"{CH}final{MSG}I sent it to=functions.add{END}", []),
    (f"{CH}commentary to=assistant{MSG}{{}}{END}", []),
    (H(channel="analysis"), [ADD]),
    (H(channel="analysis") + NEXT + H(), [ADD, ADD]),
    (H(f'{{"c": "{NEXT}{H("{}")}"}}', channel="analysis"), [("add", {"c": f"{NEXT}{H('{}')}"})]),
    (f"{CH}analysis to=python code{MSG}print(1){CALL}", [("python", {"code": "print(1)"})], CODE),
    (f"{CH}analysis to=python code{MSG}print(1", [UNCLOSED], CODE),
    (f"{CH}analysis to=python code{MSG}print(1){CALL}", [INVALID]),
    (f"{CH}commentary to=functions.add", [f"unclosed: {MSG} is missing"]),
    (f'{CH}commentary to=functions.add {{"a": 1}}{CALL}', [f"unclosed: {MSG} is missing"]),
    (f"{CH}commentary to=functions.add {NEXT}{H()}", ["unclosed: ", ADD]),
    (f"{CH}commentary to=functions.add{MSG}", [UNCLOSED]),
    (f'{CH}commentary to=functions.add{MSG}{{"a": "on', [UNCLOSED]),
    (f'{MSG}{{"a": 1}}{CALL}', []),
    (H(to="functions."), [NO_NAME]),
    (H(to="add"), [ADD]),
    (H(to="functions.a.b"), [("a.b", {"a": 1})]),
    (H(""), [STOP]),
    (H("null"), [STOP]),
    (H("[1]"), [BAD_ARGS]),
    (H("add(a=1)"), [INVALID]),
    (H('{"a": 1} then'), [EXTRA]),
    (H('{"a": 1}{"a": 1}'), [EXTRA]),
    (H("{oops}") + NEXT + H(), [INVALID, ADD]),
    (H() + NEXT + H('{"a": 1,}'), [ADD, COMMA]),
    (HT("{oops}") + HT(), [INVALID, ADD]),
    (H(f'{{"c": "{CALL}{END}{NEXT}"}}', "functions.f"), [("f", {"c": CALL + END + NEXT})]),
    (f'<|start|>functions.add to=assistant{CH}commentary{MSG}{{"a": 1}}{END}', []),
    (f"<|start|>functions.add to=assistant{CH}commentary{MSG}5{END}{NEXT}{H()}", [ADD]),
    (f"{CH}final{MSG}done<|return|>{NEXT}{H()}", []),
    (f"{CH}final{MSG}done{END}<|start|>user{MSG}more{END}{NEXT}{H()}", []),
    (f'<|start|>user to=functions.add{CH}commentary{MSG}{{"a": 1}}{CALL}', []),
    ('<channel>commentary to=functions.add<message>{"a": 1}<call>', []),
    (H('\r\n\ufeff{"a":\r\n1}\r\n'), [ADD]),
    (H('{"c": "日本 😀"}', "functions.f"), [("f", {"c": "日本 😀"})]),
    (f"before{H()}after", [ADD]),
]  # fmt: skip

G = f"<|tool_call|>[{P}]"
GRANITE: list[Row] = [
    (G, [ADD]),
    (f"<tool_call>[{P}, {P}]", [ADD, ADD]),
    (f"<|tool_call|>{P}", [ADD]),
    (G + G, [ADD, ADD]),
    (f"before {G} after {G} end", [ADD, ADD]),
    (f"<|tool_call|>{G}", [ADD]),
    (f"<tool_call>{P}</tool_call>", [ADD]),
    ("<|tool_call|>", [UNCLOSED]),
    ("<|tool_call|>[", [UNCLOSED]),
    (f"<|tool_call|>[{P}", [UNCLOSED]),
    (f"<|tool_call|>[{P},", [UNCLOSED]),
    (G[:-4], [UNCLOSED]),
    ("<|tool_call|>[]", [NO_NAME]),
    ("<|tool_call|>{}", [NO_NAME]),
    ('<|tool_call|>[{"name": 3}]', [NO_NAME]),
    ('<|tool_call|>[{"name": "add"}, {"name": "add", "arguments": ""}]', [STOP, STOP]),
    (f'<|tool_call|>[{P}, "x", {P}]', [ADD, "missing_name: call 2", ADD]),
    (f'<|tool_call|>[{{"name": "add", "arguments": [1]}}, {P}]', [BAD_ARGS, ADD]),
    (f'So I add. <|tool_call|>[{P}, {{"name": "add", "arguments": "{{oops"}}]', [ADD, "invalid_json: "]),
    ('Let me see. <|tool_call|>{"name": "add", "arguments": "{oops"}', ["invalid_json: "]),
    ('<|tool_call|>[{"name": "add", "arguments": "{\\"a\\": 1}"}]', [ADD]),
    ('<|tool_call|>[{"name": "add", "parameters": {"a": 1}}]', [ADD]),
    (f'<|tool_call|>[{{"function": {P}}}]', [ADD]),
    (f"<|tool_call|>[{P},]", [COMMA]),
    ("<|tool_call|>[{oops}] " + G, [INVALID, ADD]),
    (f"{G} <|tool_call|>[{{oops}}]", [ADD, INVALID]),
    (f"<|tool_call|>[{P} {P}]", [INVALID]),
    ("<|tool_call|>hello", [INVALID]),
    ("<tool_call>\n<function=add>\n</function>", ["wrong_dialect: JSON, not XML"]),
    (f"<TOOL_CALL>[{P}] <|tool_calls|>[{P}] [{P}]", []),
    ('<|tool_call|>[{"name": "f", "arguments": {"c": "]<|tool_call|>[{}]"}}]',
     [("f", {"c": "]<|tool_call|>[{}]"})]),
    (f"{G}<|end_of_text|>{G}", [ADD]),
    (f"<think>{G}</think>", []),
    (f"<think>{G}</think>{G}", [ADD]),
    (f"<think>{G}", [ADD]),
    (f"```\n{G}\n```", []),
    (f"<|tool_call|>\r\n\ufeff[{P}]\r\n".replace(": ", ":\r\n"), [ADD]),
    ('<|tool_call|>[{"name": "f", "arguments": {"c": "日本 😀"}}]', [("f", {"c": "日本 😀"})]),
    ("<|tool_call|>[" + TAG * 60 + "]", [INVALID]),
]  # fmt: skip

G20 = f"<function_call> {P}"
GRANITE_20B: list[Row] = [
    (G20, [ADD]),
    (f"{G20} {G20}", [ADD, ADD]),
    (f"before {G20} after", [ADD]),
    (f"<function_call>[{P}, 3]", [ADD, NO_NAME]),
    (f"<function_call>{G20}", [ADD]),
    (f"{G20}</function_call>", [ADD]),
    ("<function_call>", [UNCLOSED]),
    ("<function_call> {", [UNCLOSED]),
    (G20[:-1], [UNCLOSED]),
    ("<function_call> {}", [NO_NAME]),
    ('<function_call> {"name": null, "arguments": {}}', [NO_NAME]),
    ('<function_call> {"name": "add"}', [STOP]),
    ('<function_call> {"name": "add", "arguments": 5}', [BAD_ARGS]),
    ('<function_call> {"name": "add", "parameters": {"a": 1}}', [ADD]),
    ('I will. <function_call> {"name": "add", "arguments": "{oops"}', ["invalid_json: "]),
    ('<function_call> {"name": "add", "arguments": {"a": 1},}', [COMMA]),
    ("<function_call> {oops} " + G20, [INVALID, ADD]),
    (f"{G20} <function_call> {{oops}}", [ADD, INVALID]),
    ("<function_call> add(a=1)", [INVALID]),
    ('<function_call> <invoke name="add">', ["wrong_dialect: JSON, not XML"]),
    (f"<function_calls> {P} <Function_call> {P} {P}", []),
    ('<function_call> {"name": "f", "arguments": {"c": "<function_call> {}"}}',
     [("f", {"c": "<function_call> {}"})]),
    (f"{G20}<|endoftext|>{G20}", [ADD]),
    (f"<think>{G20}</think>", []),
    (f"<think>{G20}", [ADD]),
    (f"```\n{G20}\n```", []),
    (f"<function_call>\r\n\ufeff{P}".replace(": ", ":\r\n"), [ADD]),
    ('<function_call> {"name": "f", "arguments": {"c": "日本 😀"}}', [("f", {"c": "日本 😀"})]),
]  # fmt: skip

PH = f"functools[{P}]"
PHI: list[Row] = [
    (PH, [ADD]),
    (f"functools[{P}, {P}]", [ADD, ADD]),
    (PH + PH, [ADD, ADD]),
    (f"before {PH} after", [ADD]),
    ("functools[", [UNCLOSED]),
    ("functools[{", [UNCLOSED]),
    (f"functools[{P}", [UNCLOSED]),
    (f"functools[{P},", [UNCLOSED]),
    (PH[:-3], [UNCLOSED]),
    ("functools[]", [NO_NAME]),
    ("functools[{}]", [NO_NAME]),
    (f"functools[[{P}]]", [NO_NAME]),
    (f"functools[{P}, null, {P}]", [ADD, NO_NAME, ADD]),
    (f'functools[{{"name": "add", "arguments": true}}, {P}]', [BAD_ARGS, ADD]),
    ('functools[{"name": "add", "parameters": {"a": 1}}]', [ADD]),
    ('functools[{"name": "add"}]', [STOP]),
    (f"functools[{P},]", [COMMA]),
    ("functools[{oops}]" + PH, [INVALID, ADD]),
    (PH + "functools[{oops}]", [ADD, INVALID]),
    ("functools[add(a=1)]", [INVALID]),
    (f"functools{P} functool[{P}] Functools[{P}] [{P}]", []),
    ("from functools import partial", []),
    ('functools[{"name": "f", "arguments": {"c": "a]b[0]functools[{}]"}}]',
     [("f", {"c": "a]b[0]functools[{}]"})]),
    (f"{PH}<|end|>{PH}", [ADD]),
    (f"<think>{PH}</think>", []),
    (f"<think>{PH}", [ADD]),
    (f"```\n{PH}\n```", []),
    (f"functools[\r\n{P}\r\n]".replace(": ", ":\r\n"), [ADD]),
    ('functools[{"name": "f", "arguments": {"c": "日本 😀"}}]', [("f", {"c": "日本 😀"})]),
]  # fmt: skip

Q = ("search", {"query": "q"})
TAGS: list[Row] = [
    ("<search>q</search>", [Q]),
    ("before <search> q\n</search> after", [Q]),
    ("<search>q</search><search>q</search>", [Q, Q]),
    ("<search>", ["unclosed: </search>"]),
    ("<search>q", ["unclosed: </search>"]),
    ("<search>q</searc", ["unclosed: </search>"]),
    ("<search>q</Search>", ["unclosed: </search>"]),
    ("<search>q<search>", ["unclosed: </search>"]),
    ("<search></search>", [EMPTY]),
    ("<search> \n</search><search>q</search>", [EMPTY, Q]),
    ("<search>q</search><search>", [Q, "unclosed: call 2"]),
    ("<search><search>q</search>", [Q]),
    ("<search>q</search></search>", [Q]),
    ("<Search>q</Search> <searching>q</searching> < search>q</search>", []),
    ("q</search>", []),
    ("&lt;search>q</search>", []),
    ("<search>a &lt; b</search>", [("search", {"query": "a &lt; b"})]),
    ("<search>a <b>c</b></search>", [("search", {"query": "a <b>c</b>"})]),
    (f"<search>{P}</search>", [("search", {"query": P})]),
    ("<answer>42</answer>", []),
    ("<information><search>q</search></information>", []),
    ("<information><search>q</search></information><search>q</search>", [Q]),
    ("<information><search>q</search>", []),
    ("<search>q</search><information>r</information><search>q</search>", [Q, Q]),
    ("<think><search>q</search></think>", []),
    ("<think><search>q</search></think><search>q</search>", [Q]),
    ("<think><search>q</search>", [Q]),
    ("```\n<search>q</search>\n```", []),
    ("<search>\r\nq\r\n</search>", [Q]),
    ("<search>日本 😀</search>", [("search", {"query": "日本 😀"})]),
    ("<search>" + TAG * 60, ["unclosed: </search>"]),
]  # fmt: skip


def C(code: str = "x") -> str:
    return f"```python\n{code}\n```"


def ran(code: str = "x") -> tuple[str, dict[str, str]]:
    return ("python", {"code": code})


FENCE: list[Row] = [
    (C(), [ran()]),
    (f"before\n{C()}\nafter", [ran()]),
    (f"{C()}\n{C()}", [ran(), ran()]),
    ("```py\nx\n```", [ran()]),
    ("```python", ["unclosed: "]),
    ("```python\n", ["unclosed: "]),
    ("```python\nx", ["unclosed: "]),
    ("```python\nx\n``", ["unclosed: "]),
    ("```python\nx```", ["unclosed: "]),
    ("```python\nx\n``` and more", ["unclosed: "]),
    (C(""), ["empty: no code"]),
    ("```python\n```", ["empty: no code"]),
    (C(" \n\t"), ["empty: no code"]),
    (f"{C('')}\n{C()}", ["empty: ", ran()]),
    (f"{C()}\n```python\ny", [ran(), "unclosed: call 2"]),
    ("```\nx\n```", []),
    ("```bash\nls\n```", []),
    (f"```bash\nls\n```\n{C()}", [ran()]),
    ("```pythonic\nx\n``` ", []),
    ("~~~python\nx\n~~~", []),
    ("``python\nx\n``", []),
    ("see ```python\nx\n```", []),
    ("```python x\n```", []),
    (C("print('```')"), [ran("print('```')")]),
    (C("s = '''\n```js\n'''"), [ran("s = '''\n```js\n'''")]),
    (C("def f(:\n  oops"), [ran("def f(:\n  oops")]),
    (f"<code>\n{C()}\n</code>", [ran()]),
    (f"<interpreter>\n{C()}\n</interpreter>", []),
    (f"<interpreter>\n{C()}\n</interpreter>\n{C()}", [ran()]),
    (f"<think>\n{C()}\n</think>", []),
    (f"<think>\n{C()}\n</think>\n{C()}", [ran()]),
    (f"<think>\n{C()}", [ran()]),
    (C("'日本 😀'"), [ran("'日本 😀'")]),
    ("```python\r\nx = 1\r\ny = 2\r\n```\r\n", [ran("x = 1\r\ny = 2\r")]),
    (f"\ufeff{C()}", [ran()]),
    (f"```python\n{TAG * 60}", ["unclosed: "]),
]  # fmt: skip


def A(args: str = '{"a": 1}', name: str = "add") -> str:
    return f"Action: {name}\nAction Input: {args}"


REACT: list[Row] = [
    (A(), [ADD]),
    (f"Thought: add\n{A()}\nObservation:", [ADD]),
    (f"{A()}\n{A()}", [ADD, ADD]),
    ('Action:add\n\nAction Input:{"a": 1}', [ADD]),
    ("Action:", ["unclosed: Action Input:"]),
    ("Action: ad", ["unclosed: Action Input:"]),
    ("Action: add\n", ["unclosed: "]),
    ("Action: add\nAction In", ["extra_data: expecting Action Input:"]),
    ("Action: add\nAction Input:", [UNCLOSED]),
    (A('{"a": '), [UNCLOSED]),
    (A('{"a": "on'), [UNCLOSED]),
    (A(name=""), [NO_NAME]),
    ("Action: add\nThought: no", ["extra_data: expecting Action Input:"]),
    (f"Action: add\n{A()}", ["extra_data: ", ADD]),
    ('Action Input: {"a": 1}', []),
    (f"action: add\nAction Input: {{}}\n**Action:** add\nIn Action: add\n{P}", []),
    (A("[1]"), [BAD_ARGS]),
    (A("null"), [STOP]),
    (A("hello"), [INVALID]),
    (A("hello"), [INVALID], KNOWN),
    (A("q w", "f"), ["unclosed: plain input must end with Observation:"], KNOWN),
    (A("q w\nObservation: r", "f"), [("f", {"c": "q w"})], KNOWN),
    (A('{"a": 1} and'), [EXTRA]),
    (A('{"a": 1} {"a": 1}'), [EXTRA]),
    (f"{A('{oops}')}\n{A()}", [INVALID, ADD]),
    (f"{A()}\n{A('{oops}')}", [ADD, INVALID]),
    (f"{A('{oops')}\nThought: hm\n{A()}", ["invalid_json: ", ADD]),
    (f"{A()}\nObservation: 3\n{A()}", [ADD]),
    ("Final Answer: 42", []),
    (A('{"c": "\\nObservation: 1\\nAction: g"}', "f"), [("f", {"c": "\nObservation: 1\nAction: g"})]),
    (f"<think>\n{A()}\n</think>", []),
    (f"<think>\n{A()}", [ADD]),
    (f"```\n{A()}\n```", []),
    (A().replace("\n", "\r\n") + "\r\nObservation:", [ADD]),
    (f"\ufeff{A()}", [ADD]),
    (A('{"c": "日本 😀"}', "f"), [("f", {"c": "日本 😀"})]),
    (A("{" + TAG * 60), ["unclosed: "]),
]  # fmt: skip


def W(body: str = '{"a": 1}', attributes: str = ' name="add"') -> str:
    return f"<tool{attributes}>{body}</tool>"


XML: list[Row] = [
    (W(), [ADD]),
    (f"before {W()} after {W()} end", [ADD, ADD]),
    (W(attributes=" tag='A'  name = 'add'"), [ADD]),
    ('<tool name="add"/>', [STOP]),
    (W(""), [STOP]),
    ("<tool", []),
    ("<tool ", ["unclosed: "]),
    ('<tool name="ad', ["unclosed: "]),
    ('<tool name="add">', ["unclosed: "]),
    ('<tool name="add">{"a": 1', [UNCLOSED]),
    ('<tool name="add">{"a": 1}', [UNCLOSED]),
    ('<tool name="add">{"a": 1}</tool', ["extra_data: "]),
    ('<tool name="add">{"a": 1}</tools>', ["extra_data: "]),
    (f'<tool name="add">{{"a": 1}}{W()}', ["unclosed: ", ADD]),
    (W(attributes=""), [NO_NAME]),
    (W(attributes=' tag="A"'), [NO_NAME]),
    (W(attributes=' name=""'), [NO_NAME]),
    (W(attributes=" name=add") + W(), ["unclosed: opening tag", ADD]),
    (W(attributes=' name="add'), ["unclosed: opening tag"]),
    (W("[1]"), [BAD_ARGS]),
    (W("hello"), [INVALID]),
    (W('{"a": 1} {"a": 1}'), [EXTRA]),
    (W('{"a": 1,}'), [COMMA]),
    (W("{oops}") + W(), [INVALID, ADD]),
    (W() + W("{oops}"), [ADD, INVALID]),
    (W("<a>1</a>"), [INVALID]),
    (W("{&quot;a&quot;: 1}"), [ADD]),
    (W('{"c": "a &lt; b"}', ' name="f"'), [("f", {"c": "a &lt; b"})]),
    (W('{"c": "</tool><tool name=\'g\'>"}', ' name="f"'), [("f", {"c": "</tool><tool name='g'>"})]),
    ("a <tool> is a <toolbox>, </tool or <TOOL name='add'>{}", []),
    (f"<tool_result>{W()}</tool_result>", []),
    (f"<tool_result call_id='A'>{W()}</tool_result>{W()}", [ADD]),
    (f"<think>{W()}</think>", []),
    (f"<think>{W()}</think>{W()}", [ADD]),
    (f"<think>{W()}", [ADD]),
    (f"```\n{W()}\n```", []),
    ('<tool\r\nname="add"\r\n>\r\n\ufeff{"a":\r\n1}\r\n</tool>', [ADD]),
    (W('{"c": "日本 😀"}', ' name="f"'), [("f", {"c": "日本 😀"})]),
    (W("{" + TAG * 60 + "}"), [INVALID]),
]  # fmt: skip


def J(*items: str) -> str:
    return f'{{"message": "hm", "tools": [{", ".join(items)}]}}'


JA = '{"tool": "add", "args": {"a": 1}}'
JSON_ROWS: list[Row] = [
    (J(JA), [ADD]),
    (J(JA, JA), [ADD, ADD]),
    (f"```json\n{J(JA)}\n```", [ADD]),
    (f"```json\n{J(JA)}", [ADD]),
    (f"{J(JA)} after", [ADD]),
    ("hello", []),
    ("", []),
    ('{"message": "hm"}', []),
    ("{oops}", []),
    (J(), []),
    ('{"tools": null}', []),
    (f'{{"tools": {JA}}}', [ADD]),
    ('{"tools": "f"}', [NO_NAME]),
    (J("3", JA), [NO_NAME, ADD]),
    (J(JA, "null"), [ADD, NO_NAME]),
    (J('{"args": {}}'), [NO_NAME]),
    (J('{"tool": "", "args": {}}'), [NO_NAME]),
    (J('{"tool": 3}'), [NO_NAME]),
    (J('{"tool": "add"}', '{"tool": " add ", "args": null}'), [STOP, STOP]),
    (J('{"tool": "add", "args": "{\\"a\\": 1}"}'), [ADD]),
    (J('{"tool": "add", "args": [1]}', JA), [BAD_ARGS, ADD]),
    (J('{"tool": "add", "args": "{oops"}', JA), ["invalid_json: ", ADD]),
    (J('{"tool": "add", "args": 5}'), [BAD_ARGS]),
    ('{"tools": [', [UNCLOSED]),
    (J(JA)[:-1], [UNCLOSED]),
    (J(JA)[:-6], [UNCLOSED]),
    (f'{{"tools": [{JA},]}}', [COMMA]),
    ('{"tools": [{"tool": "add", "args": {"a": NaN}}]}', ["invalid_json: NaN"]),
    ('{"tools": [{"tool": "add", "args": {"a": 1e999}}]}', ["invalid_json: too large"]),
    (J('{"tool": "add", "args": {"a": "\\ud800"}}'), ["invalid_json: surrogate"]),
    (J(f'{{"tool": "add", "args": {{"a": {DEEP}}}}}'), ["too_deep: "]),
    (J(f'{{"tool": "add", "args": {{"a": {"1" * 5000}}}}}'), ["invalid_json: digits"]),
    (J('{"tool": "f", "args": {"c": "]}```"}}'), [("f", {"c": "]}```"})]),
    (f"\ufeff{J(JA)}".replace(": ", ":\r\n"), [ADD]),
    ({"message": "hm", "tools": [{"tool": "add", "args": {"a": 1}}, None]}, [ADD, NO_NAME]),
    ({"message": "", "tools": [{"tool": "add", "args": {"a": float("nan")}}]}, ["invalid_json: "]),
    ({"content": J(JA)}, [ADD]),
]  # fmt: skip


def T(*calls: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "hm", "tool_calls": list(calls)}


def fn(arguments: Any = '{"a": 1}', name: Any = "add") -> dict[str, Any]:
    return {"id": "k", "type": "function", "function": {"name": name, "arguments": arguments}}


OPENAI: list[Row] = [
    (T(fn()), [ADD]),
    (T(fn(), fn()), [ADD, ADD]),
    ({"choices": [{"message": T(fn())}]}, [ADD]),
    (T(fn({"a": 1})), [ADD]),
    (T({"name": "add", "arguments": {"a": 1}}), [ADD]),
    (T(fn("")), [STOP]),
    (T(fn(None)), [STOP]),
    (T({"function": {"name": "add"}}), [STOP]),
    (T(fn('{"a": ')), ["invalid_json: "]),
    (T(fn('{"a": 1,}')), ["invalid_json: comma"]),
    (T(fn('{"a": 1} x')), ["bad_arguments: "]),
    (T(fn("hello")), ["invalid_json: "]),
    (T(fn("[1]")), [BAD_ARGS]),
    (T(fn([1])), [BAD_ARGS]),
    (T(fn(5)), [BAD_ARGS]),
    (T(fn('{"a": NaN}')), ["invalid_json: NaN"]),
    (T(fn('{"a": -1e999}')), ["invalid_json: too large"]),
    (T(fn('{"a": "\\ud800"}')), ["invalid_json: surrogate"]),
    (T(fn(f'{{"a": {DEEP}}}')), ["too_deep: "]),
    (T(fn({"a": float("nan")})), ["invalid_json: "]),
    (T(fn({"a": "\ud800"})), ["invalid_json: "]),
    (T(fn({"a": NESTED})), ["too_deep: "]),
    (T(fn(name="")), [NO_NAME]),
    (T(fn(name=None)), [NO_NAME]),
    (T(fn(name=["add"])), [NO_NAME]),
    (T({"id": "k", "type": "function"}), [NO_NAME]),
    (T(3, fn(), None, "x"), [NO_NAME, ADD, NO_NAME, NO_NAME]),
    (T(fn("{oops"), fn()), ["invalid_json: call 1", ADD]),
    (T(fn(), fn("{oops")), [ADD, "invalid_json: call 2"]),
    ({"content": "hm", "tool_calls": fn()}, [ADD]),
    ({"function_call": {"name": "add", "arguments": '{"a": 1}'}}, [ADD]),
    ({"function_call": {"arguments": "{}"}}, [NO_NAME]),
    ({"content": None, "tool_calls": None}, []),
    ("hello", []),
    (P, [ADD]),
    (f"[{P}, {P}]", [ADD, ADD]),
    (f"{P} and more", []),
    ('{"a": 1}', []),
    ("{oops", []),
    ('{"content": "hm", "tool_calls": [3]}', [NO_NAME]),
]  # fmt: skip


def N(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "text", "text": "hm"}, *blocks]}


def use(value: Any = (("a", 1),), name: Any = "add") -> dict[str, Any]:
    return {
        "type": "tool_use",
        "id": "k",
        "name": name,
        "input": dict(value) if type(value) is tuple else value,
    }


ANTHROPIC: list[Row] = [
    (N(use()), [ADD]),
    (N(use(), use()), [ADD, ADD]),
    (N(use({})), [STOP]),
    (N(use(None)), [STOP]),
    (N(use("")), [STOP]),
    (N({"type": "tool_use", "name": "add"}), [STOP]),
    (N(use('{"a": 1}')), [ADD]),
    (N(use("{oops")), ["invalid_json: "]),
    (N(use("hello")), ["invalid_json: "]),
    (N(use('{"a": NaN}')), ["invalid_json: NaN"]),
    (N(use('{"a": 1e999}')), ["invalid_json: too large"]),
    (N(use(f'{{"a": {DEEP}}}')), ["too_deep: "]),
    (N(use({"a": float("inf")})), ["invalid_json: "]),
    (N(use({"a": "\udfff"})), ["invalid_json: "]),
    (N(use({"a": NESTED})), ["too_deep: "]),
    (N(use([1])), [BAD_ARGS]),
    (N(use(5)), [BAD_ARGS]),
    (N(use(True)), [BAD_ARGS]),
    (N(use(name="")), [NO_NAME]),
    (N(use(name=None)), [NO_NAME]),
    (N(use(name=3)), [NO_NAME]),
    (N({"type": "tool_use"}), [NO_NAME]),
    (N(use([1]), use()), ["bad_arguments: call 1", ADD]),
    (N(use(), use("{oops")), [ADD, "invalid_json: call 2"]),
    (N({"type": "tool_result", "tool_use_id": "k", "content": [use()]}), []),
    (N(None, 3, "x"), []),
    ({"content": "hello"}, []),
    ({"content": None}, []),
    ({"content": []}, []),
    ({"content": use()}, [ADD]),
    ({"content": f"{P}"}, []),
    ("hello", []),
    ('{"type": "tool_use", "name": "add", "input": {"a": 1}}', [ADD]),
    ('{"content": [{"type": "tool_use", "name": "add", "input": [1]}]}', [BAD_ARGS]),
    ('{"type": "tool_use", "name": "add", "input": {"a": ', []),
]  # fmt: skip

TABLES: dict[str, list[Row]] = {
    "llama3_json": LLAMA, "pythonic": PYTHONIC, "olmo3": OLMO, "lfm2": LFM2, "mistral": MISTRAL,
    "deepseek_v3": DEEPSEEK_V3, "deepseek_v31": DEEPSEEK_V31, "kimi_k2": KIMI, "harmony": HARMONY,
    "granite": GRANITE, "granite-20b-fc": GRANITE_20B, "phi4_mini": PHI, "tags": TAGS, "fence": FENCE,
    "react": REACT, "xml": XML, "json": JSON_ROWS, "openai": OPENAI, "anthropic": ANTHROPIC,
}  # fmt: skip
WITHOUT_SPANS = ("json", "openai", "anthropic")

BAD_JSON = [
    ('{"a": 1,}', COMMA),
    ('{"a": [1, 2,]}', COMMA),
    ('{"a" 1}', INVALID),
    ('{"a": 1 "b": 2}', INVALID),
    ('{"a": }', INVALID),
    ('{"a"}', INVALID),
    ("{a: 1}", INVALID),
    ("{'a': 1}", INVALID),
    ('{"a": True}', INVALID),
    ('{"a": None}', INVALID),
    ('{"a": 010}', INVALID),
    ('{"a": .5}', INVALID),
    ('{"a": +1}', INVALID),
    ('{"a": 0x10}', INVALID),
    ('{"a": 1 /* one */}', INVALID),
    ('{"a": "x\ny"}', INVALID),
    ('{"a": "\\x"}', INVALID),
    ('{"a": "\\u12"}', INVALID),
    ('{"a": “x”}', INVALID),
    ('{"a": NaN}', "invalid_json: NaN is not valid JSON"),
    ('{"a": -Infinity}', "invalid_json: -Infinity is not valid JSON"),
    ('{"a": 1e999}', "invalid_json: too large"),
    ('{"a": -1e999}', "invalid_json: too large"),
    ('{"a": "\\ud800"}', "invalid_json: an unpaired surrogate"),
    ('{"\\uDFFF": 1}', "invalid_json: an unpaired surrogate"),
    ('{"a": ' + "1" * 5000 + "}", "invalid_json: too many digits"),
    (f'{{"a": {DEEP}}}', "too_deep: nested deeper"),
    ('{"a":' * 201 + "1" + "}" * 201, "too_deep: nested deeper"),
    ("[1]", BAD_ARGS),
    (f"[{P}]", BAD_ARGS),
]  # fmt: skip
WRAPPED: dict[str, Callable[[str], str]] = {
    "llama3_json": lambda args: f'{{"name": "add", "parameters": {args}}}',
    "mistral": lambda args: f"[TOOL_CALLS]add[ARGS]{args}",
    "deepseek_v3": V3,
    "deepseek_v31": V31,
    "kimi_k2": K,
    "harmony": lambda args: NEXT + H(args),
    "granite": lambda args: f'<|tool_call|>[{{"name": "add", "arguments": {args}}}]',
    "granite-20b-fc": lambda args: f'<function_call> {{"name": "add", "arguments": {args}}}',
    "phi4_mini": lambda args: f'functools[{{"name": "add", "arguments": {args}}}]',
    "react": A,
    "xml": W,
}

# A message, where its call is seen to begin, and where it is complete.
CUTS = {
    "llama3_json": (L, '"parameters":', L),
    "pythonic": ("[add(a=1)]", "[add(", "[add(a=1)]"),
    "olmo3": (O("add(a=1)"), "<function_calls>", "add(a=1)"),
    "lfm2": (FA, "<|tool_call_start|>", "[add(a=1)]"),
    "mistral": (f"[TOOL_CALLS] [{P}]", "[TOOL_CALLS]", f"[{P}]"),
    "deepseek_v3": (S + V3() + E, S, '{"a": 1}'),
    "deepseek_v31": (S + V31() + E, S, '{"a": 1}'),
    "kimi_k2": (KS + K() + KE, KS, '{"a": 1}'),
    "harmony": (H(), "to=f", '{"a": 1}'),
    "granite": (G, "<|tool_call|>", f"[{P}]"),
    "granite-20b-fc": (G20, "<function_call>", P),
    "phi4_mini": (PH, "functools[", PH),
    "tags": ("<search>q</search>", "<search>", "</search>"),
    "fence": ("```py\nx\n```", "```py", "\n```"),
    "react": (A(), "Action:", '{"a": 1}'),
    "xml": (W(), "<tool ", "</tool>"),
}


def verify(parser: ToolCallParser, message: Any, expected: list[Any], tools: Any = None) -> None:
    """Check the result against the expected entries, and against the contract of parsers."""
    result = parser.parse(message, tools=tools)
    got = [call.error.code if call.error else (call.tool, call.args) for call in result.calls]
    wanted = [entry.partition(": ")[0] if isinstance(entry, str) else entry for entry in expected]
    assert got == wanted, [call.error and call.error.message for call in result.calls]
    has_spans = parser.name not in WITHOUT_SPANS
    at, outside, block = 0, "", 0
    for number, (call, entry) in enumerate(zip(result.calls, expected, strict=True), 1):
        if has_spans:
            outside, at, before = outside + message[at : call.span[0]], call.span[1], at
            block = block if call.span == (before, before) else call.span[0]
        if call.error is None:
            continue
        said = call.error.message
        assert said.startswith(f"call {number} was not run:")
        assert entry.partition(": ")[2] in said
        assert call.error.code == "over_limit" or parser.shape in said
        assert len(said) <= 500
        said.encode()
        assert call.args == {}
        near = said.replace(parser.shape, "")
        assert not any(message[i : i + 81] in near for i in range(len(message) - 80))
        place = re.search(r"at character (\d+)", near)
        if has_spans and place:
            assert block <= int(place[1]) <= call.span[1], f"points outside the call: {said}"
    if has_spans:
        assert outside + message[at:] == result.text
    if isinstance(message, str):
        for size in (1, 3, 7):
            stream = parser.stream(tools=tools, turn=0)
            for start in range(0, len(message), size):
                stream.feed(message[start : start + size])
            assert stream.close() == result


@pytest.mark.parametrize("name", TABLES)
def test_each_attempt_becomes_a_call_or_an_error(name: str):
    check_all(TABLES[name], lambda *row: verify(get_parser(name), *row))


@pytest.mark.parametrize("name", WRAPPED)
def test_bad_json_is_an_error_among_good_neighbours(name: str):
    wrap = WRAPPED[name]

    def check(bad: str, error: str) -> None:
        verify(get_parser(name), "\n".join(map(wrap, ('{"a": 1}', bad, '{"a": 1}'))), [ADD, error, ADD])

    check_all(BAD_JSON, check)


@pytest.mark.parametrize("name", CUTS)
def test_truncated_message_gives_nothing_then_an_error_then_the_call(name: str):
    message, begins, complete = CUTS[name]
    parser = get_parser(name)
    first, last = (message.index(part) + len(part) for part in (begins, complete))
    (whole,) = parser.parse(message, tools=KNOWN | CODE).calls
    assert whole.error is None
    for cut in range(len(message)):
        calls = parser.parse(message[:cut], tools=KNOWN | CODE).calls
        assert len(calls) == (cut >= first), message[:cut]
        for call in calls:
            if call.error is not None:  # in the midst of a marker that follows
                assert call.error.code in ("unclosed", "extra_data", "wrong_dialect"), message[:cut]
            else:
                assert cut >= last
                assert (call.tool, call.args) == (whole.tool, whole.args)


SMALL = Limits(calls=2, argument_bytes=50, depth=3)
ONE: dict[str, tuple[str, dict[str, Any]]] = {
    "tags": ("search", {"query": "q"}), "fence": ("python", {"code": "x"}),
}  # fmt: skip
HUGE: dict[str, dict[str, Any]] = {"tags": {"query": "q" * 60}, "fence": {"code": "é" * 30}}


@pytest.mark.parametrize("name", [name for name in TABLES if name not in WITHOUT_SPANS])
def test_call_over_the_limits_is_an_error_in_its_place(name: str):
    parser = get_parser(name, limits=SMALL)
    tool, args = ONE.get(name, ADD)
    good = parser.render_call(ParsedCall(tool, args, "functions.add:0"))
    huge = parser.render_call(ParsedCall(tool, HUGE.get(name, {"a": "x" * 60}), "functions.add:0"))
    over = "over_limit: at most 2 calls"
    verify(parser, f"{good}\n{good}\n{good}\n{good}", [(tool, args)] * 2 + [over] * 2)
    verify(parser, f"{huge}\n{good}\n{huge}", ["too_large: at most 50 bytes", (tool, args), over])
    if name not in ONE:
        deep = parser.render_call(ParsedCall(tool, {"a": [[[[1]]]]}, "functions.add:0"))
        verify(parser, f"{deep}\n{good}", ["too_deep: nested deeper than 3", (tool, args)], KNOWN)


LIMITED = [
    ("pythonic", f"[add(a='{'x' * 25}'), add(a='{'y' * 25}')]",
     [("add", {"a": "x" * 25}), ("add", {"a": "y" * 25})]),
    ("olmo3", O(f"add(a='{'x' * 60}')\nadd(a=1)"), ["too_large: ", ADD]),
    ("granite", f"<|tool_call|>[{P}, {P}]", [ADD, ADD]),
    ("granite", '<|tool_call|>{"name":"add","arguments":"{\\"a\\":[[[1]]]}"}', ["too_deep: "]),
    ("mistral", f"{M}{M}[TOOL_CALLS]add[ARGS]{{oops}}{M}", [ADD, ADD, "over_limit: ", "over_limit: "]),
    ("lfm2", F("[add(a=1), add(a=x), add(a=1)]"), [ADD, NOT_LITERAL, "over_limit: "]),
    ("kimi_k2", K() + K(ident="add") + K("{oops"), [ADD, BAD_ID, "over_limit: call 3"]),
    ("xml", f"{W()}{W()}<tool ", [ADD, ADD, "over_limit: call 3"]),
    ("fence", f"{C('')}\n{C()}\n{C()}", ["empty: ", ran(), "over_limit: "]),
    ("harmony", HT() + HT("{oops}") + HT(), [ADD, INVALID, "over_limit: "]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "message", "expected"), LIMITED, ids=range(len(LIMITED)))
def test_a_limit_is_one_of_each_call(name: str, message: str, expected: list[Any]):
    verify(get_parser(name, limits=SMALL), message, expected)
