"""Searches by the model's own modules against Algorithm 2 over Python lists and against each other; folding."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from reference import algorithm_2, assert_same, constrained, folded_search, ranked
from safetensors.torch import load_file, save_file
from torch import Tensor

from nci.errors import ConfigError, DataError
from nci.model import NCIModel
from nci.records import SemanticId
from nci.search import (
    EdgeTable,
    EncodedQueries,
    Found,
    exhaustive_search,
    fold,
    plain_search,
    score_all,
    unconstrained_search,
)

MakeModel = Callable[..., NCIModel]
MakeNaive = Callable[..., Any]
Vectors = Callable[..., NDArray[np.float32]]
Ask = Callable[..., EncodedQueries]
Batch = dict[str, Tensor]

CASES: dict[str, dict[str, Any]] = {
    "tied": {"head": "tied"},
    "additive-exact": {"head": "additive", "anchor": "exact", "content": True, "edge_bias": True},
    "product-mean": {"head": "product", "anchor": "mean", "edge_bias": True},
    "additive-full": {"head": "additive", "head_rank": 0, "content": True},
    "product-query": {"head": "product", "adapter_start": "query", "anchor": "exact"},
    "additive-query": {"head": "additive", "adapter_start": "query", "edge_bias": True},
    "tied-position": {"head": "tied", "normalise": "position"},
    "additive-position": {"head": "additive", "normalise": "position"},
    "product-query-vocabulary": {"head": "product", "adapter_start": "query", "normalise": "vocabulary"},
    "projected-t5": {"head": "additive", "encoder": "t5", "d_model": 8, "anchor": "mean"},
}
TRIES: dict[str, list[SemanticId]] = {
    "two-by-two-by-two": list(itertools.product(range(2), repeat=3)),
    "uneven": [(0,), (1, 0), (1, 1, 0), (1, 1, 1, 0), (1, 1, 1, 1), (2,), (3, 3)],
    "chain": [(2, 0, 1, 3, 0)],
    "atomic": [(n,) for n in range(9)],
}


def ways(model: NCIModel, batch: Batch, queries: EncodedQueries) -> list[Callable[..., Found]]:
    """All ways to search this model: by its own modules and, where possible, folded."""
    plain: Callable[..., Found] = functools.partial(plain_search, model, queries)
    folded: Callable[..., Found] = functools.partial(folded_search, model, batch, queries.anchors)
    return [plain, folded] if model.config.foldable else [plain]


# ---- Algorithm 2


@pytest.mark.parametrize("length_penalty", [0.0, 0.8, 1.0])
@pytest.mark.parametrize("beam", [1, 2, 10, [3, 1, 7]], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_plain_search_is_algorithm_2(
    make_model: MakeModel, ask: Ask, batch: Batch, case: str, beam: Any, length_penalty: float
) -> None:
    model = make_model(**CASES[case])
    queries = ask(model, **batch)
    found = plain_search(model, queries, beam=beam, k=10, length_penalty=length_penalty)
    for number in range(3):
        wanted, looked_at = constrained(model, queries, number, beam=beam, k=10, length_penalty=length_penalty)
        assert_same(ranked(model, found, number), wanted)
        exact = model.config.anchor == "exact"  # its anchors have read every document
        assert int(found.scored[number]) == (model.tables.trie.documents if exact else looked_at)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["tied", "additive-exact", "product-query", "additive-position"])
@pytest.mark.parametrize("beam", [1, 2, 3])
@pytest.mark.parametrize("name", TRIES)
def test_trees_of_any_shape(make_model: MakeModel, ask: Ask, batch: Batch, name: str, beam: int, case: str) -> None:
    model = make_model(TRIES[name], **CASES[case])
    queries = ask(model, **batch)
    for search, length_penalty in itertools.product(ways(model, batch, queries), (0.0, 1.0)):
        found = search(beam=beam, k=5, length_penalty=length_penalty)
        for number in range(3):
            wanted, _ = constrained(model, queries, number, beam=beam, k=5, length_penalty=length_penalty)
            assert_same(ranked(model, found, number), wanted)


def test_a_length_penalty_changes_the_order(make_model: MakeModel, ask: Ask, batch: Batch) -> None:
    model = make_model(TRIES["uneven"])
    queries = ask(model, **batch)
    orders = [plain_search(model, queries, beam=20, k=7, length_penalty=x).documents.tolist() for x in (0.0, 1.0)]
    assert orders[0] != orders[1]


def test_a_beam_that_ends_early_finds_one_document(make_model: MakeModel, ask: Ask, batch: Batch) -> None:
    """All rows are dead from the second level on."""
    model = make_model(TRIES["uneven"], edge_bias=True)
    queries = ask(model, **batch)
    assert model.head.bias is not None
    with torch.no_grad():  # node 1 is the leaf (0,)
        model.head.bias[1] += 30.0
    found = plain_search(model, queries, beam=1, k=3)
    for number in range(3):
        assert [path for path, _ in ranked(model, found, number)] == [(0,)]
        assert found.documents[number, 1:].tolist() == [-1] * (found.documents.shape[1] - 1)
    assert found.scored.tolist() == [2, 2, 2], "the two leaves below the root"


@torch.no_grad()
def test_beam_one_dies_for_some_queries_only(make_model: MakeModel, unit_vectors: Vectors) -> None:
    model = make_model(TRIES["uneven"], anchor="mean")
    vectors = torch.tensor(unit_vectors(24, seed=1))
    queries = EncodedQueries(torch.randn(24, 5, 16), torch.ones(24, 5).long(), vectors, model.anchors(vectors))
    lengths = set()
    found = plain_search(model, queries, beam=1, k=2)
    for number in range(24):
        wanted, _ = constrained(model, queries, number, beam=1, k=2)
        assert_same(ranked(model, found, number), wanted)
        lengths.add(len(wanted[0][0]))
    assert 1 in lengths
    assert max(lengths) > 2


# ---- exhaustive search


@pytest.mark.parametrize("length_penalty", [0.0, 0.8])
@pytest.mark.parametrize("name", ["standard", *TRIES])
@pytest.mark.parametrize("case", CASES)
def test_a_wide_beam_equals_exhaustive_search(
    make_model: MakeModel,
    ask: Ask,
    batch: Batch,
    paths: list[SemanticId],
    case: str,
    name: str,
    length_penalty: float,
) -> None:
    ids = TRIES.get(name, paths)
    model = make_model(ids, **CASES[case])
    queries = ask(model, **batch)
    whole = exhaustive_search(model, queries, k=len(ids), length_penalty=length_penalty)
    assert whole.scored.tolist() == [len(ids)] * 3
    for search in ways(model, batch, queries):
        found = search(beam=len(ids), k=len(ids), length_penalty=length_penalty)
        for number in range(3):
            everything = ranked(model, whole, number)
            assert len(everything) == len(ids)
            assert_same(ranked(model, found, number), everything)


@pytest.mark.parametrize("case", ["additive-exact", "product-query-vocabulary"])
def test_exhaustive_scores_equal_numpy(
    make_model: MakeModel,
    naive: MakeNaive,
    ask: Ask,
    batch: Batch,
    paths: list[SemanticId],
    unit_vectors: Vectors,
    case: str,
) -> None:
    model = make_model(**CASES[case])
    queries = ask(model, **batch)
    scores = score_all(model, queries, chunk=4)
    assert scores.shape == (3, len(paths))
    torch.testing.assert_close(score_all(model, queries), scores, atol=1e-5, rtol=1e-5)
    assert queries.vectors is not None
    reference = naive(model, paths, unit_vectors())
    for number in (0, 2):
        reference.read(queries.states[number], queries.mask[number], queries.vectors[number])
        wanted = [sum(reference.steps(path)) for path in paths]
        np.testing.assert_allclose(scores[number].numpy(), wanted, atol=3e-4)


# ---- folding


@pytest.mark.slow
@pytest.mark.parametrize("anchor", ["none", "mean", "exact"])
@pytest.mark.parametrize(("content", "edge_bias"), list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize(
    ("head", "rank", "layers"),
    [("tied", 3, 0), ("additive", 3, 1), ("additive", 0, 2), ("product", 3, 2), ("product", 0, 1)],
)
def test_folded_search_equals_unfolded(
    make_model: MakeModel,
    ask: Ask,
    batch: Batch,
    head: str,
    rank: int,
    layers: int,
    content: bool,
    edge_bias: bool,
    anchor: str,
) -> None:
    model = make_model(
        head=head, head_rank=rank, adapter_layers=layers, content=content, edge_bias=edge_bias, anchor=anchor
    )
    queries = ask(model, **batch)
    edges = fold(model, chunk=2)
    assert not edges.vectors[0].any()
    assert edges.vectors.shape == (model.tables.trie.nodes, 16)
    for beam in (2, 11):
        one, two = (search(beam=beam, k=11) for search in ways(model, batch, queries))
        for number in range(3):
            assert_same(ranked(model, two, number), ranked(model, one, number))


def test_chunks_do_not_change_the_table(make_model: MakeModel) -> None:
    model = make_model(content=True, edge_bias=True)
    small, large = fold(model, chunk=1), fold(model)
    for name in ("vectors", "states", "asks"):
        torch.testing.assert_close(getattr(small, name), getattr(large, name), atol=1e-5, rtol=1e-5)
    assert model.head.bias is not None
    assert torch.equal(large.bias, model.head.bias)
    assert make_model().head.bias is None
    assert not fold(make_model()).bias.any()


@pytest.mark.parametrize("settings", [{"adapter_start": "query"}, {"normalise": "position"}], ids=str)
def test_refuses_to_fold_what_depends_on_the_query(make_model: MakeModel, settings: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="fold"):
        fold(make_model(**settings))


def test_refuses_to_fold_in_training(make_model: MakeModel) -> None:
    with pytest.raises(AssertionError, match="eval"):
        fold(make_model().train())


def test_a_table_without_edges_keeps_the_states(make_model: MakeModel) -> None:
    table = fold(make_model(edge_bias=True))
    assert table.vectors.any()
    assert table.bias.any()
    empty = table.without_edges()
    assert not empty.vectors.any()
    assert not empty.bias.any()
    assert torch.equal(empty.states, table.states)
    assert torch.equal(empty.asks, table.asks)
    assert table.vectors.any(), "the table itself stays"


def test_edge_table_on_disk(tmp_path: Path, make_model: MakeModel) -> None:
    model = make_model(edge_bias=True)
    table, trie, file = fold(model), model.tables.trie, tmp_path / "edges.safetensors"
    sizes = {"nodes": trie.nodes, "inner": trie.nodes - trie.documents, "d_model": 16}
    table.save(file)
    again = EdgeTable.load(file, **sizes)
    for name in ("vectors", "states", "asks"):
        stored = getattr(again, name)
        assert stored.dtype == torch.bfloat16
        assert torch.equal(stored, getattr(table, name).bfloat16())
    assert torch.equal(again.bias, table.bias), "float32, as it was"
    for name in sizes:
        with pytest.raises(DataError, match="does not fit"):
            EdgeTable.load(file, **{**sizes, name: sizes[name] + 1})
    tensors = load_file(file)
    for name in tensors:
        save_file({other: tensor for other, tensor in tensors.items() if other != name}, file)
        with pytest.raises(DataError, match="does not fit"):
            EdgeTable.load(file, **sizes)


# ---- without the tree


SMALL: list[SemanticId] = [(0,), (1, 0), (1, 2), (2, 1)]  # of all strings of at most two digits 0, 1, 2


@pytest.mark.slow
@pytest.mark.parametrize("length_penalty", [0.0, 0.8])
@pytest.mark.parametrize("adapter_start", ["learned", "query"])
@pytest.mark.parametrize("head", ["tied", "additive", "product"])
@pytest.mark.parametrize("normalise", ["position", "vocabulary"])
def test_unconstrained_search_equals_all_strings(
    make_model: MakeModel,
    naive: MakeNaive,
    ask: Ask,
    batch: Batch,
    normalise: str,
    head: str,
    adapter_start: str,
    length_penalty: float,
) -> None:
    model = make_model(SMALL, values=3, normalise=normalise, head=head, adapter_start=adapter_start)
    queries = ask(model, **batch)
    reference, end = naive(model, SMALL), 2 * 3
    meaning = {tuple(n * 3 + v for n, v in enumerate(path)): path for path in SMALL}
    assert queries.vectors is not None
    for number in range(3):
        reference.read(queries.states[number], queries.mask[number], queries.vectors[number])
        one = EncodedQueries(*(t[number : number + 1] for t in (queries.states, queries.mask, queries.vectors)))
        next_tokens = functools.cache(reference.next_tokens)
        for beam in (1, 3, 1000):
            strings, _ = algorithm_2(
                next_tokens,
                lambda prefix: prefix[-1:] == (end,),
                beam=beam,
                steps=3,
                k=10**6,
                digits=lambda string: len(string) - 1,
                length_penalty=length_penalty,
            )
            wanted = [((*meaning[s[:-1]], 3), score) for s, score in strings if s[:-1] in meaning]
            found = unconstrained_search(model, one, beam=beam, k=4, length_penalty=length_penalty)
            assert found.documents.shape == found.scores.shape == (1, 4)
            assert_same(ranked(model, found, 0), wanted, atol=3e-4)
            assert found.scored.tolist() == [len(wanted)]
            if beam == 1000:
                assert len(wanted) == len(SMALL)
                assert len(strings) > len(SMALL), "most strings are no id"


def test_unconstrained_search_of_several_queries(make_model: MakeModel, ask: Ask, batch: Batch) -> None:
    model = make_model(normalise="position")
    queries = ask(model, **batch)
    wide = unconstrained_search(model, queries, beam=400, k=11)
    whole = exhaustive_search(model, queries, k=11)
    assert torch.equal(wide.documents, whole.documents)
    torch.testing.assert_close(wide.scores, whole.scores, atol=1e-4, rtol=0)
    narrow = unconstrained_search(model, queries, beam=2, k=11)
    assert (narrow.scored < 11).all()


def test_unconstrained_search_needs_an_end_token(make_model: MakeModel, ask: Ask, batch: Batch) -> None:
    model = make_model()
    with pytest.raises(ConfigError, match="normalise"):
        unconstrained_search(model, ask(model, **batch))


# ---- batches, padding, special trees


@pytest.mark.parametrize("case", CASES)
def test_a_batch_equals_its_queries_and_padding_is_not_seen(
    make_model: MakeModel, ask: Ask, batch: Batch, case: str
) -> None:
    model = make_model(**CASES[case])
    padded = {
        "input_ids": torch.cat([batch["input_ids"], torch.full((3, 4), 7)], dim=1),
        "attention_mask": torch.cat([batch["attention_mask"], torch.zeros(3, 4).long()], dim=1),
    }
    together = plain_search(model, ask(model, **batch), beam=3, k=6)
    longer = plain_search(model, ask(model, **padded), beam=3, k=6)
    assert torch.equal(longer.documents, together.documents)
    torch.testing.assert_close(longer.scores, together.scores, atol=1e-4, rtol=0)
    for number, length in enumerate([4, 6, 2]):
        alone = {name: tensor[number : number + 1, :length] for name, tensor in batch.items()}
        found = plain_search(model, ask(model, **alone), beam=3, k=6)
        assert_same(ranked(model, found, 0), ranked(model, together, number))
        assert found.scored[0] == together.scored[number]


@pytest.mark.parametrize("anchor", ["none", "mean", "exact"])
@pytest.mark.parametrize("beam", [1, 4, 50])
def test_atomic_ids_are_one_softmax(make_model: MakeModel, ask: Ask, batch: Batch, beam: int, anchor: str) -> None:
    ids = [(n,) for n in range(40)]
    model = make_model(ids, head="tied", anchor=anchor, edge_bias=True)
    assert model.config.values == 40
    queries = ask(model, **batch)
    wanted = score_all(model, queries)
    np.testing.assert_allclose(wanted.exp().sum(1), 1.0, atol=1e-4)
    top = wanted.topk(min(beam, 10), dim=1)
    for search in ways(model, batch, queries):
        found = search(beam=beam, k=10)
        assert torch.equal(found.documents, top.indices)
        torch.testing.assert_close(found.scores, top.values, atol=1e-4, rtol=0)
        assert found.scored.tolist() == [40] * 3


@pytest.mark.parametrize("path", [(0,), (0, 0), (3, 1, 2)])
@pytest.mark.parametrize("case", ["tied", "additive-exact", "product-query", "additive-position"])
def test_a_single_document_is_always_found(
    make_model: MakeModel, ask: Ask, batch: Batch, case: str, path: SemanticId
) -> None:
    model = make_model([path], **CASES[case])
    queries = ask(model, **batch)
    for search in ways(model, batch, queries):
        found = search(beam=5, k=3)
        for number in range(3):
            result = ranked(model, found, number)
            assert [p[: len(path)] for p, _ in result] == [path]
            if model.config.normalise == "children":
                assert result[0][1] == pytest.approx(0.0, abs=1e-6)
    assert exhaustive_search(model, queries, k=3).documents.tolist() == [[0]] * 3
