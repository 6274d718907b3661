"""The folded search: against Algorithm 2 over Python lists, against exhaustive scoring, and against itself unpruned."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Folded, assert_same, batch_of, batches, constrained, folded_search, ranked, trees
from torch import Tensor

import nci.search.plan
from nci.errors import ConfigError
from nci.model import NCIModel
from nci.records import SemanticId
from nci.search import EncodedQueries, exhaustive_search, make_plan, score_all
from nci.search.plan import MOST_FIRST_ROWS
from nci.trie import Trie

MakeModel = Callable[..., NCIModel]
MakeTrie = Callable[..., Trie]
Ask = Callable[..., EncodedQueries]
Batch = dict[str, Tensor]

# Wide enough for a level to be given fewer rows than it may need: 20 of the 120 nodes at depth 2 go on.
LOPSIDED: list[SemanticId] = [
    (a, b, *rest) for a in range(4) for b in range(30) for rest in ([(0,), (1,)] if b < 5 else [()])
]

beams = st.integers(1, 6) | st.lists(st.integers(1, 8), min_size=1, max_size=3) | st.just(40)
penalties = st.sampled_from([0.0, 0.3, 0.8, 1.0, -0.5])
models = st.fixed_dictionaries(
    {
        "head": st.sampled_from(["tied", "additive", "product"]),
        "anchor": st.sampled_from(["none", "mean", "exact"]),
        "content": st.booleans(),
        "edge_bias": st.booleans(),
        "decoder_layers": st.integers(1, 3),
        "encoder": st.sampled_from(["bert", "mpnet", "t5", "t5-gated", "bert-relu"]),
        "encoder_width": st.sampled_from([16, 8]),  # the decoder has 16: 8 needs a bridge
        "encoder_layers": st.integers(1, 2),
        "seed": st.integers(0, 9),
    }
)


def in_levels(rows: int) -> Any:
    """Decode the root and its children together where there are at most so many of these."""
    return patch.object(nci.search.plan, "MOST_FIRST_ROWS", rows)


def moved_anchors(queries: EncodedQueries, change: Tensor) -> EncodedQueries:
    """The same queries with other content scores: (queries, nodes)."""
    return EncodedQueries(queries.states, queries.mask, queries.vectors, change)


# ---- Algorithm 2


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    ids=trees(),
    model_settings=models,
    batch=batches(),
    beam=beams,
    k=st.integers(1, 16),
    length_penalty=penalties,
    merged=st.sampled_from([0, 64]),
)
def test_find_is_algorithm_2(
    make_model: MakeModel,
    ask: Ask,
    ids: list[SemanticId],
    model_settings: dict[str, Any],
    batch: Batch,
    beam: Any,
    k: int,
    length_penalty: float,
    merged: int,
) -> None:
    """On any tree, for any model that folds; with shapes fixed or pruned, root and first children together or not."""
    model = make_model(ids, moved=True, **model_settings)
    queries = ask(model, **batch)
    search = Folded(model)
    wanted = [
        constrained(model, queries, number, beam=beam, k=k, length_penalty=length_penalty)
        for number in range(len(queries.states))
    ]
    options: dict[str, Any] = {"beam": beam, "k": k, "length_penalty": length_penalty}
    for fixed, certain, least in [(False, True, 8), (True, True, 8), (True, False, 8), (True, False, 0)]:
        with in_levels(merged):
            plan = make_plan(model.tables.trie, fixed=fixed, certain=certain, least=least, **options)
        found = search(batch, queries.anchors, plan)
        for number, (best, looked_at) in enumerate(wanted):
            if not found.short[number]:
                assert_same(search.ranked(found, number), best)
                whole = fixed and not plan.cut
                assert int(found.scored[number]) == looked_at if whole else int(found.scored[number]) <= looked_at
            assert not (plan.certain and found.short[number])
        assert plan.certain or not certain


@pytest.mark.slow
@pytest.mark.parametrize("length_penalty", [0.0, 0.8])
@pytest.mark.parametrize("beam", [1, 2, [3, 1, 7], [1, 9]], ids=str)
@pytest.mark.parametrize("anchor", ["none", "mean", "exact"])
@pytest.mark.parametrize("fixed", [False, True])
def test_narrow_beams_on_the_standard_tree(
    make_model: MakeModel, ask: Ask, batch: Batch, anchor: str, beam: Any, length_penalty: float, fixed: bool
) -> None:
    model = make_model(anchor=anchor, content=True, edge_bias=True, moved=True)
    queries = ask(model, **batch)
    found = folded_search(model, batch, queries.anchors, beam=beam, k=10, length_penalty=length_penalty, fixed=fixed)
    for number in range(3):
        wanted, _ = constrained(model, queries, number, beam=beam, k=10, length_penalty=length_penalty)
        assert_same(ranked(model, found, number), wanted)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("merged", [0, 64])
def test_a_beam_that_ends_early_finds_one_document(
    make_model: MakeModel, ask: Ask, batch: Batch, fixed: bool, merged: int
) -> None:
    """All rows of all queries are dead from the second level on."""
    model = make_model([(0,), (1, 0), (1, 1, 0), (1, 1, 1, 0), (1, 1, 1, 1), (2,), (3, 3)], edge_bias=True)
    assert model.head.bias is not None
    with torch.no_grad():  # node 1 is the leaf (0,)
        model.head.bias[1] += 30.0
    search = Folded(model)
    with in_levels(merged):
        found = search(batch, None, make_plan(model.tables.trie, beam=1, k=3, fixed=fixed))
    for number in range(3):
        assert [path for path, _ in search.ranked(found, number)] == [(0,)]
    assert found.scored.tolist() == [2, 2, 2], "the two leaves below the root"


@pytest.mark.parametrize("fixed", [False, True])
def test_beam_one_dies_for_some_queries_only(make_model: MakeModel, ask: Ask, fixed: bool) -> None:
    model = make_model([(0,), (1, 0), (1, 1, 0), (1, 1, 1, 0), (1, 1, 1, 1), (2,), (3, 3)], anchor="mean")
    batch = batch_of([5] * 24)
    queries = ask(model, **batch)
    queries = moved_anchors(queries, 3 * torch.randn(24, model.tables.trie.nodes))
    search = Folded(model)
    found = search(batch, queries.anchors, make_plan(model.tables.trie, beam=1, k=2, fixed=fixed))
    lengths = set()
    for number in range(24):
        wanted, _ = constrained(model, queries, number, beam=1, k=2)
        assert_same(search.ranked(found, number), wanted)
        lengths.add(len(wanted[0][0]))
    assert {1, 4} <= lengths


@pytest.mark.parametrize("length_penalty", [0.0, 0.8])
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("encoder", ["bert", "mpnet", "t5-gated"])
def test_a_wide_beam_equals_exhaustive_search(
    make_model: MakeModel, ask: Ask, batch: Batch, encoder: str, fixed: bool, length_penalty: float
) -> None:
    ids = [*itertools.product(range(3), repeat=3), (3,), (4, 4)]
    model = make_model(ids, encoder=encoder, encoder_layers=2, moved=True, anchor="exact", decoder_layers=3)
    queries = ask(model, **batch)
    whole = exhaustive_search(model, queries, k=len(ids), length_penalty=length_penalty)
    found = folded_search(model, batch, queries.anchors, beam=99, k=99, length_penalty=length_penalty, fixed=fixed)
    for number in range(3):
        everything = ranked(model, whole, number)
        assert len(everything) == len(ids)
        assert_same(ranked(model, found, number), everything)


def test_a_search_leaves_the_table_as_it_was(make_model: MakeModel, ask: Ask, batch: Batch) -> None:
    """The decoder writes over its input, which comes from the table."""
    model = make_model(decoder_layers=3)
    search = Folded(model)
    before = {name: tensor.clone() for name, tensor in vars(search.tree.table).items()}
    plan = make_plan(model.tables.trie, beam=4, k=5)
    first, second = (search(batch, None, plan) for _ in range(2))
    assert torch.equal(first.scores, second.scores)
    for name, tensor in before.items():
        assert torch.equal(getattr(search.tree.table, name), tensor), name


@pytest.mark.parametrize("case", ["bert", "mpnet", "t5", "t5-gated", "bert-relu"])
def test_a_batch_equals_its_queries_and_padding_is_not_seen(make_model: MakeModel, batch: Batch, case: str) -> None:
    model = make_model(encoder=case, encoder_layers=2, moved=True, anchor="none")
    search = Folded(model)
    plan = make_plan(model.tables.trie, beam=3, k=6)
    together = search(batch, None, plan)
    padded = {
        "input_ids": torch.cat([batch["input_ids"], torch.full((3, 4), 7)], dim=1),
        "attention_mask": torch.cat([batch["attention_mask"], torch.zeros(3, 4).long()], dim=1),
    }
    longer = search(padded, None, plan)
    for number, length in enumerate([4, 6, 2]):
        wanted = search.ranked(together, number)
        assert_same(search.ranked(longer, number), wanted)
        alone = search({name: tensor[number : number + 1, :length] for name, tensor in batch.items()}, None, plan)
        assert_same(search.ranked(alone, 0), wanted)


# ---- the root and its children


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("beam", [1, 3, [70, 2], [5, 90]], ids=str)
@pytest.mark.parametrize("leaves", [0, 6])
def test_root_and_children_together_or_one_after_the_other(
    make_model: MakeModel, ask: Ask, batch: Batch, beam: Any, fixed: bool, leaves: int
) -> None:
    wide = MOST_FIRST_ROWS + 2
    ids = [(a, b) for a in range(wide) for b in range(2)] + [(wide + a,) for a in range(leaves)]
    model = make_model(ids, head="tied", anchor="exact", moved=True)
    queries, search = ask(model, **batch), Folded(model)
    options: dict[str, Any] = {"beam": beam, "k": 8, "fixed": fixed}
    apart = make_plan(model.tables.trie, **options)
    with in_levels(wide):
        together = make_plan(model.tables.trie, **options)
    beam_is_wide = max(beam[0] if isinstance(beam, list) else beam, MOST_FIRST_ROWS) >= wide
    assert (len(apart.first_children), len(together.first_children)) == (wide if beam_is_wide else 0, wide)
    one, two = search(batch, queries.anchors, apart), search(batch, queries.anchors, together)
    for number in range(3):
        wanted, _ = constrained(model, queries, number, beam=beam, k=8)
        assert_same(search.ranked(one, number), wanted)
        assert_same(search.ranked(two, number), wanted)
    if fixed:
        assert torch.equal(one.scored, two.scored)


# ---- fewer rows than needed


@pytest.mark.parametrize("beam", [[24, 24, 99], [4, 22, 99]], ids=str)
def test_a_level_that_is_too_narrow_says_so(make_model: MakeModel, ask: Ask, beam: Any) -> None:
    model = make_model(LOPSIDED, values=30)
    trie = model.tables.trie
    queries = ask(model, **batch_of([3, 4, 5]))
    anchors = torch.randn(3, trie.nodes)
    inner = torch.as_tensor(np.diff(trie.child_start) > 0)
    anchors[0, inner] += 10.0  # the first query wants every node that goes on
    queries = moved_anchors(queries, anchors)
    search = Folded(model)
    options: dict[str, Any] = {"beam": beam, "k": 99, "fixed": True}
    narrow, certain = (make_plan(trie, certain=c, **options) for c in (False, True))
    assert certain.certain
    assert not narrow.certain
    assert narrow.rows < certain.rows
    found = search(batch_of([3, 4, 5]), anchors, narrow)
    assert found.short.tolist() == [True, False, False]
    whole = search(batch_of([3, 4, 5]), anchors, certain)
    assert not whole.short.any()
    for number in range(3):
        wanted, _ = constrained(model, queries, number, beam=beam, k=99)
        assert_same(search.ranked(whole, number), wanted)
        if number:
            assert_same(search.ranked(found, number), wanted)
    assert len(search.ranked(found, 0)) < len(search.ranked(whole, 0)), "it needed what it did not have"


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    ids=trees(leaves=30),
    beam=beams,
    stop=st.none() | st.integers(1, 4),
    certain=st.booleans(),
    least=st.sampled_from([0, 8]),
)
def test_no_level_of_a_plan_is_larger_than_it_can_be(
    make_trie: MakeTrie, ids: list[SemanticId], beam: Any, stop: int | None, certain: bool, least: int
) -> None:
    trie = make_trie(ids)
    plan = make_plan(trie, beam=beam, k=3, stop_depth=stop, certain=certain, least=least)
    depth = min(stop or 99, trie.positions)
    assert plan.whole == (depth == trie.positions)
    levels = [level.digits for level in plan.levels]
    assert levels == list(range(1, depth + 1))[: len(levels)]
    assert plan.cut == (len(levels) < depth)
    assert not (plan.cut and (certain or least))
    wide = [beam] if isinstance(beam, int) else beam
    for number, level in enumerate(plan.levels):
        here = {path[:number] for path in ids if len(path) > number}
        below = {path[: number + 1] for path in ids if len(path) > number}
        assert level.fanout == max(len({p for p in below if p[:-1] == node}) for node in here)
        assert 1 <= level.keep <= min(wide[min(number, len(wide) - 1)], len(below))
        if not (number == 1 and plan.first_children):
            assert 1 <= level.rows <= min(wide[min(number, len(wide)) - 1] if number else 1, len(here))
    inner = [node for node in trie.children(0) if len(trie.children(node))]
    assert list(plan.first_children) == (inner if depth > 1 else [])


def test_a_search_that_is_cut_says_who_needs_more(make_model: MakeModel, ask: Ask) -> None:
    """One of 40 nodes at depth 2 goes on: hardly a query of a beam of 6 is expected to go there."""
    ids = [(a, b) for a in range(4) for b in range(10) if (a, b) != (3, 9)] + [(3, 9, 0), (3, 9, 1)]
    model = make_model(ids)
    trie, batch = model.tables.trie, batch_of([3, 4, 5])
    goes_on = next(node for node in range(5, trie.nodes) if len(trie.children(node)))
    first, *_ = trie.children(4)
    anchors = torch.zeros(3, trie.nodes)
    anchors[0, goes_on], anchors[1, goes_on] = 20.0, -20.0
    # The last query keeps that node, third of all, but has found two that none below it can beat.
    anchors[2, 4], anchors[2, first : first + 2], anchors[2, goes_on] = 40.0, 40.0, 20.0
    queries, search = moved_anchors(ask(model, **batch), anchors), Folded(model)
    plan = make_plan(trie, beam=6, k=2, fixed=True, certain=False, least=0)
    assert (plan.cut, plan.certain, plan.whole, len(plan.levels)) == (True, False, True, 2)
    found = search(batch, anchors, plan)
    assert found.short.tolist() == [True, False, False]
    for number in (1, 2):
        wanted, _ = constrained(model, queries, number, beam=6, k=2)
        assert_same(search.ranked(found, number), wanted)
    more = make_plan(trie, beam=6, k=3, fixed=True, certain=False, least=0)
    assert search(batch, anchors, more).short.tolist() == [True, False, True], "it is the third"
    kept = make_plan(trie, beam=6, k=2, fixed=True, certain=False, least=8)
    assert (kept.cut, len(kept.levels)) == (False, 3)


@pytest.mark.parametrize("beam", [0, -1, [], [3, 0]], ids=str)
def test_refuses_a_beam_without_rows(trie: Trie, beam: Any) -> None:
    with pytest.raises(ConfigError, match="--beam is at least 1"):
        make_plan(trie, beam=beam, k=1)


# ---- pruning


@pytest.mark.parametrize("length_penalty", [0.0, 0.8, -0.5])
@pytest.mark.parametrize("k", [1, 3])
def test_rows_without_hope_are_not_decoded(make_model: MakeModel, ask: Ask, k: int, length_penalty: float) -> None:
    """Three documents below the root have nearly all of the probability."""
    ids = [(n,) for n in range(3)] + [(3, *rest) for rest in itertools.product(range(3), repeat=4)]
    model = make_model(ids, edge_bias=True, moved=True)
    batch = batch_of([4, 2])
    trie = model.tables.trie
    anchors = torch.zeros(2, trie.nodes)
    anchors[:, 1:4] = 30.0
    queries, search = moved_anchors(ask(model, **batch), anchors), Folded(model)
    counts = []
    for fixed in (True, False):
        search.decoded = 0
        plan = make_plan(trie, beam=27, k=k, length_penalty=length_penalty, fixed=fixed)
        found = search(batch, anchors, plan)
        counts.append(search.decoded)
        for number in range(2):
            wanted, _ = constrained(model, queries, number, beam=27, k=k, length_penalty=length_penalty)
            assert_same(search.ranked(found, number), wanted)
    assert counts[0] == 2 * (1 + 1 + 3 + 9 + 27)
    assert counts[1] <= 2 * (1 + 1 + 3), "the node that was decoded with the root, its children at most"


def test_rows_are_dropped_query_by_query(make_model: MakeModel, ask: Ask) -> None:
    """A query that is done does not end the search of another, which decides how many rows there are."""
    ids = [(0,), *((1, *rest) for rest in itertools.product(range(2), repeat=3))]
    model = make_model(ids)
    trie = model.tables.trie
    batch = batch_of([3, 3])
    anchors = torch.zeros(2, trie.nodes)
    anchors[0, 1], anchors[1, 1] = 30.0, -30.0
    queries, search = moved_anchors(ask(model, **batch), anchors), Folded(model)
    found = search(batch, anchors, make_plan(trie, beam=9, k=1))
    assert search.decoded == 2 * (1 + 1 + 2 + 4)
    assert found.scored.tolist() == [1, 9], "rows without hope are not looked at, even where there is room for them"
    for number in range(2):
        wanted, _ = constrained(model, queries, number, beam=9, k=1)
        assert_same(search.ranked(found, number), wanted)


@pytest.mark.parametrize(
    ("ids", "chances", "length_penalty", "best"),
    [
        ([(0,), (1,), (2, 0, 0, 0, 0)], [0.5, 0.3, 0.2], 0.0, 0),
        ([(0,), (1,), (2, 0, 0, 0, 0)], [0.5, 0.3, 0.2], 1.0, 2),
        ([(0,), (1, 0, 0), (2, 0, 0, 0, 0)], [0.3, 0.6, 0.1], -1.0, 1),
    ],
    ids=["no-penalty", "the-longest-wins", "not-as-long-as-the-longest"],
)
def test_what_a_length_penalty_lifts_is_kept(
    make_model: MakeModel, ask: Ask, ids: list[SemanticId], chances: list[float], length_penalty: float, best: int
) -> None:
    """An id that is not above others in probability, but in its score; chains below the root decide nothing."""
    model = make_model(ids, edge_bias=True)
    trie, batch = model.tables.trie, batch_of([4])
    queries = moved_anchors(ask(model, **batch), torch.zeros(1, trie.nodes))
    assert queries.anchors is not None
    queries.anchors[0, 1:4] = torch.tensor(chances).log() - score_all(model, queries)[0]
    np.testing.assert_allclose(score_all(model, queries).exp(), [chances], atol=1e-5)
    search = Folded(model)
    found = search(batch, queries.anchors, make_plan(trie, beam=3, k=1, length_penalty=length_penalty))
    wanted = float(np.log(chances[best]) / (len(ids[best]) + 1) ** length_penalty)
    assert_same(search.ranked(found, 0), [(ids[best], wanted)])


# ---- whole clusters


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    ids=trees(),
    batch=batches(),
    anchor=st.sampled_from(["none", "exact"]),
    beam=beams,
    stop=st.integers(1, 4),
    length_penalty=penalties,
    fixed=st.booleans(),
)
def test_a_search_that_stops_early_finds_prefixes(
    make_model: MakeModel,
    ask: Ask,
    ids: list[SemanticId],
    batch: Batch,
    anchor: str,
    beam: Any,
    stop: int,
    length_penalty: float,
    fixed: bool,
) -> None:
    model = make_model(ids, anchor=anchor, edge_bias=True, moved=True)
    queries, search, trie = ask(model, **batch), Folded(model), model.tables.trie
    options: dict[str, Any] = {"length_penalty": length_penalty, "stop_depth": stop, "fixed": fixed}
    found = search(batch, queries.anchors, make_plan(trie, beam=beam, k=5, **options))
    whole = search(batch, queries.anchors, make_plan(trie, beam=999, k=999, **options))
    scores = score_all(model, queries)
    for number in range(len(scores)):
        wanted, _ = constrained(model, queries, number, beam=beam, k=5, length_penalty=length_penalty, stop_depth=stop)
        assert_same(search.ranked(found, number), wanted)
        everything = search.ranked(whole, number)
        assert {path for path, _ in everything} == {path[:stop] for path in ids}
        for path, score in everything:
            below = [document for document, own in enumerate(ids) if own[: len(path)] == path]
            total = float(scores[number, below].logsumexp(0))
            assert score == pytest.approx(total / (len(path) + 1) ** length_penalty, abs=1e-4)


def test_a_stop_below_all_leaves_is_no_stop(trie: Trie) -> None:
    plain = make_plan(trie, beam=5, k=3)
    assert make_plan(trie, beam=5, k=3, stop_depth=trie.positions) == plain
    assert make_plan(trie, beam=5, k=3, stop_depth=99) == plain
    assert make_plan(trie, beam=5, k=3, stop_depth=trie.positions - 1) != plain


@pytest.mark.parametrize("depth", [0, -3])
def test_refuses_to_stop_above_the_root(trie: Trie, depth: int) -> None:
    with pytest.raises(ConfigError, match="--stop-depth is at least 1"):
        make_plan(trie, beam=5, k=3, stop_depth=depth)
