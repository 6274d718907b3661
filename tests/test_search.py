"""Search against a literal Algorithm 2 over Python lists, against exhaustive scoring, and folded against unfolded."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from nci.errors import ConfigError, DataError
from nci.lexical import LexicalScores
from nci.model import NCIModel
from nci.records import SemanticId
from nci.search import (
    EdgeTable,
    EncodedQueries,
    Engine,
    Found,
    beam_search,
    exhaustive_search,
    fold,
    score_all,
    unconstrained_search,
)

MakeModel = Callable[..., NCIModel]
MakeNaive = Callable[..., Any]
Vectors = Callable[..., NDArray[np.float32]]
Ask = Callable[..., EncodedQueries]
Batch = dict[str, Tensor]
Ranked = list[tuple[SemanticId, float]]

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


def algorithm_2(
    f: Callable[[SemanticId], dict[int, float]],
    is_leaf: Callable[[SemanticId], bool],
    *,
    beam: int,
    steps: int,
    k: int,
    digits: Callable[[SemanticId], int] = len,
    length_penalty: float = 0.0,
) -> tuple[Ranked, int]:
    """Constrained beam search as the paper prints it, and how many leaves were looked at.

    Args:
        f: prefix -> {next token: log p}.
        steps: The paper's n; one more round than digits, in which the last leaves are noted.
        digits: Digits of an id, the m of the length penalty.
    """
    result_ids: Ranked = []
    looked_at = 0
    b: Ranked = [((), 0.0)]
    for _ in range(steps + 1):
        candidates: Ranked = []
        for prefix, sum_log_prob in b:
            if is_leaf(prefix):
                result_ids.append((prefix, sum_log_prob / (digits(prefix) + 1) ** length_penalty))
            else:
                for token, log_prob in f(prefix).items():
                    candidates.append(((*prefix, token), sum_log_prob + log_prob))
                    looked_at += is_leaf((*prefix, token))
        b = sorted(candidates, key=lambda pair: -pair[1])[:beam]
    return sorted(result_ids, key=lambda pair: -pair[1])[:k], looked_at


def constrained(
    model: NCIModel, queries: EncodedQueries, number: int, *, beam: int, k: int, length_penalty: float
) -> tuple[Ranked, int]:
    """Algorithm 2 over the steps that the teacher-forced model gives to every id."""
    trie = model.tables.trie
    row = torch.full((trie.documents,), number)
    mask = queries.mask[row][:, None, None, :].bool()
    vectors = None if queries.vectors is None else queries.vectors[row]
    anchors = None if queries.anchors is None else queries.anchors[row]
    with torch.no_grad():
        log_probs, _, _ = model.path_log_probs(
            model.memories(queries.states[row]), mask, torch.arange(trie.documents), vectors, anchors
        )
    ids = [trie.semantic_id(document) for document in range(trie.documents)]
    after: dict[SemanticId, dict[int, float]] = {}
    for path, steps in zip(ids, log_probs.tolist(), strict=True):
        for n, digit in enumerate(path):
            after.setdefault(path[:n], {})[digit] = steps[n]
    ends = model.config.normalise != "children"
    return algorithm_2(
        after.__getitem__,
        set(ids).__contains__,
        beam=beam,
        steps=max(map(len, ids)),
        k=k,
        digits=lambda path: len(path) - ends,
        length_penalty=length_penalty,
    )


def ranked(model: NCIModel, found: Found, number: int) -> Ranked:
    """One query's results as ids; what is not there is marked alike in both tensors."""
    trie = model.tables.trie
    documents, scores = found.documents[number].tolist(), found.scores[number].tolist()
    assert [d >= 0 for d in documents] == [s > -np.inf for s in scores]
    assert not np.isnan(scores).any()
    return [(trie.semantic_id(d), s) for d, s in zip(documents, scores, strict=True) if d >= 0]


def assert_same(found: Ranked, wanted: Ranked, atol: float = 1e-4) -> None:
    assert [path for path, _ in found] == [path for path, _ in wanted]
    np.testing.assert_allclose([s for _, s in found], [s for _, s in wanted], atol=atol)


def tables(model: NCIModel) -> list[EdgeTable | None]:
    """All ways to search this model: by its own head and, where possible, by a folded table."""
    return [None, fold(model)] if model.config.foldable else [None]


# ---- Algorithm 2


@pytest.mark.parametrize("length_penalty", [0.0, 0.8, 1.0])
@pytest.mark.parametrize("beam", [1, 2, 10])
@pytest.mark.parametrize("case", CASES)
def test_beam_search_is_algorithm_2(
    make_model: MakeModel, ask: Ask, batch: Batch, case: str, beam: int, length_penalty: float
) -> None:
    model = make_model(**CASES[case])
    queries = ask(model, **batch)
    for edges in tables(model):
        found = beam_search(model, queries, edges=edges, beam=beam, k=10, length_penalty=length_penalty)
        for number in range(3):
            wanted, looked_at = constrained(model, queries, number, beam=beam, k=10, length_penalty=length_penalty)
            assert_same(ranked(model, found, number), wanted)
            exact = model.config.anchor == "exact"  # its anchors have read every document
            assert int(found.scored[number]) == (model.tables.trie.documents if exact else looked_at)


@pytest.mark.parametrize("case", ["tied", "additive-exact", "product-query", "additive-position"])
@pytest.mark.parametrize("beam", [1, 2, 3])
@pytest.mark.parametrize("name", TRIES)
def test_trees_of_any_shape(make_model: MakeModel, ask: Ask, batch: Batch, name: str, beam: int, case: str) -> None:
    model = make_model(TRIES[name], **CASES[case])
    queries = ask(model, **batch)
    for edges, length_penalty in itertools.product(tables(model), (0.0, 1.0)):
        found = beam_search(model, queries, edges=edges, beam=beam, k=5, length_penalty=length_penalty)
        for number in range(3):
            wanted, _ = constrained(model, queries, number, beam=beam, k=5, length_penalty=length_penalty)
            assert_same(ranked(model, found, number), wanted)


def test_a_length_penalty_changes_the_order(make_model: MakeModel, ask: Ask, batch: Batch) -> None:
    model = make_model(TRIES["uneven"])
    queries = ask(model, **batch)
    orders = [beam_search(model, queries, beam=20, k=7, length_penalty=x).documents.tolist() for x in (0.0, 1.0)]
    assert orders[0] != orders[1]


@pytest.mark.parametrize("folded", [False, True])
def test_a_beam_that_ends_early_finds_one_document(make_model: MakeModel, ask: Ask, batch: Batch, folded: bool) -> None:
    """All rows are dead from the second level on."""
    model = make_model(TRIES["uneven"], edge_bias=True)
    queries = ask(model, **batch)
    assert model.head.bias is not None
    with torch.no_grad():  # node 1 is the leaf (0,)
        model.head.bias[1] += 30.0
    edges = fold(model) if folded else None
    found = beam_search(model, queries, edges=edges, beam=1, k=3)
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
    for edges in tables(model):
        found = beam_search(model, queries, edges=edges, beam=1, k=2)
        for number in range(24):
            wanted, _ = constrained(model, queries, number, beam=1, k=2, length_penalty=0.0)
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
    for edges in tables(model):
        found = beam_search(model, queries, edges=edges, beam=len(ids), k=len(ids), length_penalty=length_penalty)
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
        one = beam_search(model, queries, beam=beam, k=11)
        two = beam_search(model, queries, edges=edges, beam=beam, k=11)
        assert torch.equal(one.documents, two.documents)
        torch.testing.assert_close(one.scores, two.scores, atol=1e-4, rtol=0)
        assert torch.equal(one.scored, two.scored)


def test_chunks_do_not_change_the_table(make_model: MakeModel) -> None:
    model = make_model(content=True, edge_bias=True)
    small, large = fold(model, chunk=1), fold(model)
    torch.testing.assert_close(small.vectors, large.vectors, atol=1e-5, rtol=1e-5)
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


def test_edge_table_on_disk(tmp_path: Path, make_model: MakeModel) -> None:
    table = fold(make_model(edge_bias=True))
    nodes, file = len(table.bias), tmp_path / "edges.safetensors"
    table.save(file)
    again = EdgeTable.load(file, nodes=nodes, d_model=16)
    assert torch.equal(again.vectors, table.vectors)
    assert torch.equal(again.bias, table.bias)
    for wrong in ({"nodes": nodes + 1, "d_model": 16}, {"nodes": nodes, "d_model": 8}):
        with pytest.raises(DataError, match="does not fit"):
            EdgeTable.load(file, **wrong)
    save_file({"vectors": table.vectors}, file)
    with pytest.raises(DataError, match="does not fit"):
        EdgeTable.load(file, nodes=nodes, d_model=16)


# ---- without the tree


SMALL: list[SemanticId] = [(0,), (1, 0), (1, 2), (2, 1)]  # of all strings of at most two digits 0, 1, 2


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
    for edges in tables(model):
        together = beam_search(model, ask(model, **batch), edges=edges, beam=3, k=6)
        longer = beam_search(model, ask(model, **padded), edges=edges, beam=3, k=6)
        assert torch.equal(longer.documents, together.documents)
        torch.testing.assert_close(longer.scores, together.scores, atol=1e-4, rtol=0)
        for number, length in enumerate([4, 6, 2]):
            alone = {name: tensor[number : number + 1, :length] for name, tensor in batch.items()}
            found = beam_search(model, ask(model, **alone), edges=edges, beam=3, k=6)
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
    for edges in tables(model):
        found = beam_search(model, queries, edges=edges, beam=beam, k=10)
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
    for edges in tables(model):
        found = beam_search(model, queries, edges=edges, beam=5, k=3)
        for number in range(3):
            result = ranked(model, found, number)
            assert [p[: len(path)] for p, _ in result] == [path]
            if model.config.normalise == "children":
                assert result[0][1] == pytest.approx(0.0, abs=1e-6)
    assert exhaustive_search(model, queries, k=3).documents.tolist() == [[0]] * 3


# ---- texts


TEXTS = ["red cat", "the dog runs over the blue bird under a tree", "moon", "a star sleeps"]
DOCUMENTS = [
    "red red cat", "green dog", "blue bird", "cat runs", "dog sleeps", "bird over tree", "sun moon", "star tree",
    "under the tree", "moon star", "dog cat bird",
]  # fmt: skip


def assert_rankings(engine: Engine, texts: Sequence[str], **kwargs: Any) -> None:
    """Texts together equal each text alone, whatever the batches."""
    together = engine.search(texts, **kwargs)
    for number, text in enumerate(texts):
        alone = engine.search([text], **kwargs)[0]
        assert together[number].documents.tolist() == alone.documents.tolist()
        np.testing.assert_allclose(together[number].scores, alone.scores, atol=1e-4)
        assert together[number].scored == alone.scored


@pytest.mark.parametrize("case", ["additive-exact", "product-query", "additive-position"])
@pytest.mark.parametrize("batch_size", [1, 3, 32])
def test_engine_answers_in_the_order_of_the_texts(
    make_model: MakeModel, tokenizer: Any, case: str, batch_size: int
) -> None:
    engine = Engine.for_model(make_model(**CASES[case]), tokenizer)
    assert (engine.edges is not None) == engine.model.config.foldable
    assert_rankings(engine, TEXTS, k=4, beam=2, batch_size=batch_size)
    for ranking in engine.search(TEXTS, k=4, beam=2, batch_size=batch_size):
        assert 0 < len(ranking.documents) <= 4
        assert (np.diff(ranking.scores) <= 0).all()


def test_engine_modes_agree_with_wide_beams(make_model: MakeModel, tokenizer: Any) -> None:
    engine = Engine.for_model(make_model(normalise="position"), tokenizer)
    found = {mode: engine.search(TEXTS, k=11, beam=400, mode=mode) for mode in ("beam", "exhaustive", "unconstrained")}
    for one, two, three in zip(*found.values(), strict=True):
        assert one.documents.tolist() == two.documents.tolist() == three.documents.tolist()
        np.testing.assert_allclose(one.scores, two.scores, atol=1e-4)
        np.testing.assert_allclose(one.scores, three.scores, atol=1e-4)


def test_engine_keeps_a_beam_that_is_smaller_than_k(make_model: MakeModel, tokenizer: Any) -> None:
    engine = Engine.for_model(make_model(TRIES["atomic"], head="tied"), tokenizer)
    assert 1 <= len(engine.search(["red"], k=7, beam=2)[0].documents) < 7
    assert len(engine.search(["red"], k=7, beam=7)[0].documents) == 7


def test_engine_reads_lexical_scores_and_stored_vectors(
    make_model: MakeModel, tokenizer: Any, unit_vectors: Vectors
) -> None:
    """Untrained, the ranking is the sum of both content scores."""
    stored = unit_vectors(4, seed=11)

    class Stored:
        def encode(self, texts: Sequence[str], *, role: str) -> NDArray[np.float32]:
            assert role == "query"
            return 3 * stored[[TEXTS.index(text) for text in texts]]

    lexical = LexicalScores.build(DOCUMENTS)
    model = make_model(anchor="exact", trained=False, kappa=5.0, lexical=2.0)
    engine = Engine.for_model(model, tokenizer, lexical=lexical, embedder=Stored())
    flat = 5.0 * stored @ unit_vectors().T + 2.0 * lexical.normalised(TEXTS)
    for ranking, scores in zip(engine.search(TEXTS, k=11, beam=11), flat, strict=True):
        assert ranking.documents.tolist() == np.argsort(-scores).tolist()
        assert ranking.scored == 11


def test_zeroed_engine_is_the_content_score_alone(make_model: MakeModel, tokenizer: Any, unit_vectors: Vectors) -> None:
    engine = Engine.for_model(make_model(anchor="exact", content=True, edge_bias=True), tokenizer)
    vectors = engine.encode(TEXTS).vectors
    assert vectors is not None
    order = np.argsort(-(vectors.numpy() @ unit_vectors().T), axis=1)
    zeroed = [r.documents.tolist() for r in engine.zeroed().search(TEXTS, k=11, beam=11)]
    assert zeroed == order.tolist()
    assert zeroed != [r.documents.tolist() for r in engine.search(TEXTS, k=11, beam=11)]
    with pytest.raises(ConfigError, match="anchor"):
        Engine.for_model(make_model(), tokenizer).zeroed()


@pytest.mark.parametrize("case", ["additive-exact", "product-query", "tied-position"])
def test_explain_splits_the_score(make_model: MakeModel, tokenizer: Any, case: str) -> None:
    model = make_model(**CASES[case])
    engine = Engine.for_model(model, tokenizer)
    ranking = engine.search(["red cat"], k=11, beam=11)[0]
    explained = engine.explain("red cat", ranking.documents.tolist())
    scores = engine.encode(["red cat"])
    for document, score, parts in zip(ranking.documents, ranking.scores, explained, strict=True):
        assert len(parts["digits"]) == len(model.tables.trie.semantic_id(int(document)))
        assert sum(parts["digits"]) == pytest.approx(score, abs=1e-4)
        if model.config.anchor == "none":
            assert parts["content"] is None
        else:
            assert scores.vectors is not None
            wanted = model.document_scores(scores.vectors)[0, document]
            assert parts["content"] == pytest.approx(float(wanted.detach()), abs=1e-4)


def test_engine_cuts_long_queries_and_adds_its_prompt(make_model: MakeModel, tokenizer: Any) -> None:
    model = make_model()
    short = Engine.for_model(model, tokenizer, max_length=4)
    assert short.encode([TEXTS[1], "red"]).mask.sum(1).tolist() == [4, 3]
    plain, prompted = Engine.for_model(model, tokenizer), Engine.for_model(model, tokenizer, prompt="the ")
    torch.testing.assert_close(plain.encode(["the red"]).states, prompted.encode(["red"]).states)


@pytest.mark.parametrize("text", ["", "  \n", "\x00", "red \ud800", 5, None])
def test_engine_refuses_what_is_no_query(make_model: MakeModel, tokenizer: Any, text: Any) -> None:
    engine = Engine.for_model(make_model(), tokenizer)
    with pytest.raises(DataError, match="query"):
        engine.search(["red", text], k=1, beam=1)


def test_no_texts_no_rankings(make_model: MakeModel, tokenizer: Any) -> None:
    assert Engine.for_model(make_model(), tokenizer).search([], k=1, beam=1) == []
