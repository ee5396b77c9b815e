"""A ledger keeps its input, and its arrays never differ in length."""

import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic.codec import from_json, to_json
from torchrl_agentic.tokens.ledger import BOUNDARY, PROMPT, SAMPLED, TokenLedger

ids = st.lists(st.integers(0, 2**40), max_size=6)
log_prob = st.floats(-50, 0) | st.just(math.nan)


@st.composite
def entries(draw):
    kind = draw(st.sampled_from(["add_prompt", "add_boundary", "add_result", "add_sampled", "add_injected"]))
    tokens = draw(ids)
    if kind == "add_result":
        return kind, (tokens,), {"call": draw(st.integers(0, 9))}
    if kind == "add_sampled":
        return kind, (tokens, draw(st.none() | st.tuples(*[log_prob] * len(tokens)))), {}
    if kind == "add_injected":
        sources = st.sampled_from([PROMPT, BOUNDARY, 0, 3])
        return kind, (tokens, draw(st.tuples(*[sources] * len(tokens)))), {}
    return kind, (tokens,), {}


def filled(chosen):
    ledger = TokenLedger()
    for kind, args, options in chosen:
        getattr(ledger, kind)(*args, **options)
    return ledger


@given(st.lists(entries(), max_size=8))
def test_arrays_have_one_length_and_keep_their_prefix(chosen):
    ledger, seen = TokenLedger(), TokenLedger()
    for kind, args, options in chosen:
        getattr(ledger, kind)(*args, **options)
        arrays = ledger.ids, ledger.mask, ledger.log_probs, ledger.sources
        assert {len(one) for one in arrays} == {len(ledger)}
        assert list(ledger.ids[: len(seen)]) == list(seen.ids)
        assert list(ledger.sources[: len(seen)]) == list(seen.sources)
        seen = ledger.copy()


@given(st.lists(entries(), max_size=8))
def test_only_sampled_tokens_are_in_the_mask_and_have_log_probabilities(chosen):
    ledger = filled(chosen)
    assert ledger.mask == [source == SAMPLED for source in ledger.sources]
    assert all(math.isnan(v) for v, own in zip(ledger.log_probs, ledger.mask, strict=True) if not own)


@given(st.lists(entries(), max_size=8))
def test_spans_cover_the_ledger_without_gaps(chosen):
    ledger = filled(chosen)
    spans = list(ledger.spans())
    assert [i for span in spans for i in range(span.start, span.stop)] == list(range(len(ledger)))
    assert all(ledger.sources[i] == span.source for span in spans for i in range(span.start, span.stop))
    assert all(a.source != b.source for a, b in itertools.pairwise(spans))


@given(st.lists(entries(), max_size=8), st.none() | st.integers(0, 50))
def test_columns_are_independent_copies_of_the_first_tokens(chosen, size):
    ledger = filled(chosen)
    columns = ledger.columns(size)
    same = (columns.ids, ledger.ids), (columns.sources, ledger.sources), (columns.versions, ledger.versions)
    assert all(list(column) == list(values[:size]) for column, values in same)
    assert list(map(repr, columns.log_probs)) == list(map(repr, ledger.log_probs[:size]))
    columns.ids.append(1)
    assert ledger == filled(chosen)


@given(st.lists(entries(), max_size=8))
def test_no_token_was_sampled_behind_the_last_sampled_one(chosen):
    ledger = filled(chosen)
    stop = ledger.sampled_stop
    assert SAMPLED not in ledger.sources[stop:]
    assert stop == 0 or ledger.sources[stop - 1] == SAMPLED


@given(st.lists(entries(), max_size=8))
def test_a_ledger_survives_json(chosen):
    ledger = filled(chosen)
    assert from_json(TokenLedger, json.loads(json.dumps(to_json(ledger), allow_nan=False))) == ledger


@given(st.lists(entries(), max_size=4), st.lists(entries(), max_size=4))
def test_a_copy_goes_its_own_way(before, after):
    ledger = filled(before)
    copy, size = ledger.copy(), len(ledger)
    for kind, args, options in after:
        getattr(copy, kind)(*args, **options)
    assert len(ledger) == size
    assert copy == filled(before + after)


@pytest.mark.parametrize(
    ("act", "problem"),
    [
        (lambda one: one.add_sampled([1, 2], [-1.0]), "2 sampled tokens, but 1 log-prob"),
        (lambda one: one.add_sampled([1], [0.5]), "at most 0; got 0.5"),
        (lambda one: one.add_prompt([-1]), "from 0 on; got -1"),
        (lambda one: one.add_prompt([True]), "from 0 on; got True"),
        (lambda one: one.add_prompt([3, 1.5]), "from 0 on; got 1.5"),
        (lambda one: one.add_result([1], call=-1), "numbered from 0; got -1"),
        (lambda one: one.add_injected([1], [SAMPLED]), "PROMPT, BOUNDARY and numbers"),
        (lambda one: one.add_injected([1], [-9]), "got -9"),
        (lambda one: one.add_injected([1, 2], [0]), "2 tokens, but 1 sources"),
    ],
)
def test_rejected_tokens_change_nothing(act, problem):
    ledger = filled([("add_prompt", ([1, 2],), {})])
    with pytest.raises(ValueError, match=problem):
        act(ledger)
    assert repr(ledger) == "TokenLedger(2 prompt)"


def test_written_tokens_cannot_be_changed():
    ledger = filled([("add_prompt", ([1, 2],), {})])
    with pytest.raises(TypeError):
        ledger.ids[0] = 5


def test_repr_shows_the_token_counts():
    ledger = TokenLedger()
    ledger.add_prompt([1])
    ledger.add_sampled([2, 3])
    ledger.add_boundary([4])
    ledger.add_result([5], call=2)
    assert repr(ledger) == "TokenLedger(1 prompt, 2 sampled, 1 boundary, 1 call 2)"
