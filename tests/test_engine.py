"""Texts in, documents out: order, modes, precisions, clusters, what does not fit into memory, what is no query."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from nci.errors import ConfigError, DataError, NciError
from nci.lexical import LexicalScores
from nci.model import NCIModel
from nci.records import SemanticId
from nci.search import Engine, Ranking, exhaustive_search, make_plan, plain_search, score_all
from nci.search.backend import Backend, _recorded, choose_precision
from nci.search.content import DocumentVectors
from nci.search.engine import is_out_of_memory
from nci.search.plan import Plan
from nci.trie import Trie

MakeModel = Callable[..., NCIModel]
MakeEngine = Callable[..., Engine]
Vectors = Callable[..., NDArray[np.float32]]

CASES: dict[str, dict[str, Any]] = {
    "additive-exact": {"head": "additive", "anchor": "exact", "content": True, "edge_bias": True},
    "product-mean": {"head": "product", "anchor": "mean", "edge_bias": True},
    "tied": {"head": "tied"},
    "product-query": {"head": "product", "adapter_start": "query", "anchor": "exact"},
    "additive-position": {"head": "additive", "normalise": "position"},
}
FOLDED = ["additive-exact", "product-mean", "tied"]
TEXTS = ["red cat", "the dog runs over the blue bird under a tree", "moon", "a star sleeps"]
DOCUMENTS = [
    "red red cat", "green dog", "blue bird", "cat runs", "dog sleeps", "bird over tree", "sun moon", "star tree",
    "under the tree", "moon star", "dog cat bird",
]  # fmt: skip
ATOMIC: list[SemanticId] = [(n,) for n in range(9)]


@pytest.fixture
def make_engine(make_model: MakeModel, tokenizer: Any, unit_vectors: Vectors) -> MakeEngine:
    """An engine in float32; keyword arguments that it does not know are those of the model."""

    def make(ids: Sequence[SemanticId] | None = None, **options: Any) -> Engine:
        names = ("lexical", "embedder", "prompt", "max_length", "precision")
        own = {name: options.pop(name) for name in names if name in options}
        model = make_model(*([] if ids is None else [ids]), **options)
        vectors = DocumentVectors(unit_vectors(model.tables.trie.documents))
        trie = model.tables.trie if model.config.normalise == "children" else without_end(model)
        return Engine.for_model(model, tokenizer, trie, vectors=vectors, **{"precision": "fp32", **own})

    return make


def without_end(model: NCIModel) -> Trie:
    """The tree of the index; a model with an end token is bound to a longer one."""
    paths = model.tables.trie.paths[:, :-1].copy()
    paths[paths == model.config.values] = -1
    return Trie.from_paths(paths)[0]


def assert_equal(found: Sequence[Ranking], wanted: Sequence[Ranking], atol: float = 1e-4) -> None:
    for one, two in zip(found, wanted, strict=True):
        assert one.documents.tolist() == two.documents.tolist()
        np.testing.assert_allclose(one.scores, two.scores, atol=atol)
        assert one.scored == two.scored


# ---- rankings


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("batch_size", [1, 3, 32])
def test_answers_in_the_order_of_the_texts(make_engine: MakeEngine, case: str, batch_size: int) -> None:
    engine = make_engine(**CASES[case])
    assert (engine.backend is not None) == (engine.edges is not None) == engine.model.config.foldable
    together = engine.search(TEXTS, k=4, beam=2, batch_size=batch_size)
    alone = [engine.search([text], k=4, beam=2)[0] for text in TEXTS]
    assert_equal(together, alone)
    assert len({tuple(r.scores) for r in together}) == len(TEXTS)
    for ranking in together:
        assert 0 < len(ranking.documents) <= 4
        assert (np.diff(ranking.scores) <= 0).all()


@pytest.mark.parametrize("length_penalty", [0.0, 0.8])
@pytest.mark.parametrize("case", CASES)
def test_a_wide_beam_equals_exhaustive_search(make_engine: MakeEngine, case: str, length_penalty: float) -> None:
    engine = make_engine(**CASES[case], moved=True)
    options: dict[str, Any] = {"k": 11, "beam": 11, "length_penalty": length_penalty}
    found = engine.search(TEXTS, **options)
    whole = engine.search(TEXTS, **options, mode="exhaustive")
    for one, two in zip(found, whole, strict=True):
        assert one.documents.tolist() == two.documents.tolist()
        np.testing.assert_allclose(one.scores, two.scores, atol=1e-4)
        assert len(one.documents) == two.scored == 11


def test_modes_agree_with_wide_beams(make_engine: MakeEngine) -> None:
    engine = make_engine(normalise="position")
    found = {mode: engine.search(TEXTS, k=11, beam=400, mode=mode) for mode in ("beam", "exhaustive", "unconstrained")}
    for one, two, three in zip(*found.values(), strict=True):
        assert one.documents.tolist() == two.documents.tolist() == three.documents.tolist()
        np.testing.assert_allclose(one.scores, two.scores, atol=1e-4)
        np.testing.assert_allclose(one.scores, three.scores, atol=1e-4)
    with pytest.raises(ConfigError, match="mode is one of beam, unconstrained, exhaustive"):
        engine.search(TEXTS, k=1, beam=1, mode="fast")  # type: ignore[arg-type]


def test_a_model_that_is_not_bound_is_bound_when_needed(make_engine: MakeEngine) -> None:
    """As an index opens it: the folded search reads the table alone."""
    engine = make_engine(anchor="exact")
    wanted = engine.search(TEXTS, k=11, beam=11)
    engine.model.tree = None
    fresh = Engine(**{name: getattr(engine, name) for name in Engine.__dataclass_fields__})
    assert_equal(fresh.search(TEXTS, k=11, beam=11), wanted)
    assert fresh.model.tree is None
    assert_equal(fresh.search(TEXTS, k=11, beam=11, mode="exhaustive"), wanted)


@pytest.mark.parametrize("case", ["additive-exact", "product-mean"])
def test_reads_lexical_scores_and_stored_vectors(make_engine: MakeEngine, unit_vectors: Vectors, case: str) -> None:
    """Untrained, the ranking of an exact anchor is the sum of both content scores."""
    stored = unit_vectors(4, seed=11)

    class Stored:
        def encode(self, texts: Sequence[str], *, role: str) -> NDArray[np.float32]:
            assert role == "query"
            return 3 * stored[[TEXTS.index(text) for text in texts]]

    exact = case == "additive-exact"
    lexical = LexicalScores.build(DOCUMENTS) if exact else None
    anchor = "exact" if exact else "mean"
    engine = make_engine(anchor=anchor, trained=False, kappa=5.0, lexical=lexical, embedder=Stored())
    with torch.no_grad():
        weights = engine.model.anchor_weights
        assert weights is not None
        weights.copy_(torch.tensor([5.0, 2.0]).log())
    found = engine.search(TEXTS, k=11, beam=11)
    assert_equal(found, engine.search(TEXTS, k=11, beam=11, mode="exhaustive"))
    if lexical is not None:
        flat = 5.0 * stored @ unit_vectors().T + 2.0 * lexical.normalised(TEXTS)
        for ranking, scores in zip(found, flat, strict=True):
            assert ranking.documents.tolist() == np.argsort(-scores).tolist()
            assert ranking.scored == 11


def test_zeroed_engine_is_the_content_score_alone(make_engine: MakeEngine, unit_vectors: Vectors) -> None:
    engine = make_engine(anchor="exact", content=True, edge_bias=True)
    before = [r.documents.tolist() for r in engine.search(TEXTS, k=11, beam=11)]
    vectors = engine.encode(TEXTS).vectors
    assert vectors is not None
    order = np.argsort(-(vectors.numpy() @ unit_vectors().T), axis=1)
    for mode in ("beam", "exhaustive"):
        zeroed = [r.documents.tolist() for r in engine.zeroed().search(TEXTS, k=11, beam=11, mode=mode)]
        assert zeroed == order.tolist()
    assert before != order.tolist()
    assert before == [r.documents.tolist() for r in engine.search(TEXTS, k=11, beam=11)], "the engine itself stays"
    with pytest.raises(ConfigError, match="anchor"):
        make_engine().zeroed()


@pytest.mark.parametrize("case", ["additive-exact", "product-query", "tied", "additive-position"])
def test_explain_splits_the_score(make_engine: MakeEngine, case: str) -> None:
    engine = make_engine(**CASES[case])
    model = engine.model
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
    assert engine.explain("red cat", []) == []


def test_cuts_long_queries_and_adds_its_prompt(make_engine: MakeEngine) -> None:
    short = make_engine(max_length=4)
    assert short.encode([TEXTS[1], "red"]).mask.sum(1).tolist() == [4, 3]
    assert_equal(short.search(["red cat dog"], k=5, beam=5), short.search(["red cat bird"], k=5, beam=5))
    plain, prompted = make_engine(), make_engine(prompt="the ")
    assert_equal(plain.search(["the red"], k=5, beam=5), prompted.search(["red"], k=5, beam=5))
    torch.testing.assert_close(plain.encode(["the red"]).states, prompted.encode(["red"]).states)


# ---- k, beam


def test_a_beam_that_is_smaller_than_k_finds_fewer(make_engine: MakeEngine) -> None:
    engine = make_engine(ATOMIC, head="tied")
    assert len(engine.search(["red"], k=7, beam=2)[0].documents) == 2
    assert len(engine.search(["red"], k=7, beam=7)[0].documents) == 7


@pytest.mark.parametrize("case", CASES)
def test_k_larger_than_the_corpus_finds_everything(make_engine: MakeEngine, case: str) -> None:
    for ranking in make_engine(**CASES[case]).search(TEXTS, k=1000, beam=1000):
        assert sorted(ranking.documents) == list(range(11))
        assert np.exp(ranking.scores).sum() < 1.001


@pytest.mark.parametrize("case", FOLDED)
def test_a_beam_per_level(make_engine: MakeEngine, case: str) -> None:
    engine = make_engine(**CASES[case])
    for beam in ([3, 1, 7], (2, 5), [1]):
        plain = make_engine(**CASES[case])
        plain.edges = None
        found, wanted = (e.search(TEXTS, k=11, beam=beam) for e in (engine, plain))
        for one, two in zip(found, wanted, strict=True):
            assert one.documents.tolist() == two.documents.tolist()
            np.testing.assert_allclose(one.scores, two.scores, atol=1e-4)
    narrow, wide = (engine.search(TEXTS, k=11, beam=beam) for beam in ([1, 99], [99]))
    assert all(len(a.documents) < len(b.documents) for a, b in zip(narrow, wide, strict=True))


@pytest.mark.parametrize("beam", [0, [], [2, 0]], ids=str)
def test_refuses_a_beam_without_rows(make_engine: MakeEngine, beam: Any) -> None:
    with pytest.raises(ConfigError, match="--beam is at least 1"):
        make_engine().search(["red"], k=1, beam=beam)


# ---- whole clusters


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8, 11, 99])
@pytest.mark.parametrize("stop", [1, 2])
@pytest.mark.parametrize("case", FOLDED)
def test_whole_clusters_until_they_hold_k_documents(make_engine: MakeEngine, case: str, stop: int, k: int) -> None:
    engine = make_engine(**CASES[case])
    trie = engine.trie
    ids = [trie.semantic_id(document) for document in range(trie.documents)]
    probabilities = score_all(engine.reference, engine.encode(TEXTS)).exp().numpy()
    for ranking, p in zip(engine.search(TEXTS, k=k, beam=99, stop_depth=stop), probabilities, strict=True):
        clusters: dict[SemanticId, list[int]] = {}
        for document, path in enumerate(ids):
            clusters.setdefault(path[:stop], []).append(document)
        order = sorted(clusters.values(), key=lambda members: -p[members].sum())
        wanted: list[int] = []
        scores: list[float] = []
        for members in order:
            if len(wanted) < k:
                wanted += members
                scores += [float(np.log(p[members].sum()))] * len(members)
        assert ranking.documents.tolist() == wanted
        np.testing.assert_allclose(ranking.scores, scores, atol=1e-4)


def test_a_stop_below_all_leaves_is_the_plain_search(make_engine: MakeEngine) -> None:
    engine = make_engine(**CASES["additive-exact"])
    options: dict[str, Any] = {"k": 6, "beam": 3, "length_penalty": 0.8}
    for stop in (3, 4, 100):
        assert_equal(engine.search(TEXTS, stop_depth=stop, **options), engine.search(TEXTS, **options))


def test_refuses_stops_that_cannot_be(make_engine: MakeEngine) -> None:
    for depth in (0, -1):
        with pytest.raises(ConfigError, match="--stop-depth is at least 1"):
            make_engine().search(["red"], k=1, beam=1, stop_depth=depth)
    for engine, mode in ((make_engine(**CASES["product-query"]), "beam"), (make_engine(), "exhaustive")):
        with pytest.raises(ConfigError, match="--stop-depth needs"):
            engine.search(["red"], k=1, beam=1, stop_depth=1, mode=mode)  # type: ignore[arg-type]


# ---- precision


@pytest.mark.parametrize("vnni", [False, True])
def test_what_auto_means(monkeypatch: pytest.MonkeyPatch, vnni: bool) -> None:
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: vnni)
    assert choose_precision("auto", "cpu") == ("int8" if vnni else "fp32")
    for device in ("cuda", "cuda:1"):
        assert choose_precision("auto", device) == "bf16"
        assert choose_precision("int8", device) == "bf16", "an index that was told to use int8 on its CPUs"
    for precision, device in itertools.product(("fp32", "bf16"), ("cpu", "cuda")):
        assert choose_precision(precision, device) == precision
    assert choose_precision("int8", "cpu") == "int8"
    with pytest.raises(ConfigError, match="one of auto, fp32, bf16, int8; not 'fp16'"):
        choose_precision("fp16", "cpu")


@pytest.mark.parametrize("case", FOLDED)
@pytest.mark.parametrize(("precision", "mean", "largest"), [("bf16", 0.05, 0.3), ("int8", 0.1, 0.7)])
def test_rounded_searches_rank_nearly_alike(
    make_engine: MakeEngine, precision: str, mean: float, largest: float, case: str
) -> None:
    """Networks of width 16 and random weights, whose scores have a deviation of 2 to 6: wide ones are rounded less."""
    ids = [(a, b) for a in range(4) for b in range(6)]
    texts = [f"{a} {b}" for a, b in itertools.permutations(["red", "cat", "dog", "moon", "tree", "over"], 2)]
    exact, rounded = (make_engine(ids, **CASES[case], precision=p) for p in ("fp32", precision))
    errors, first, clear = [], [], []
    for one, two in zip(*(engine.search(texts, k=24, beam=24) for engine in (rounded, exact)), strict=True):
        assert sorted(one.documents) == sorted(two.documents) == list(range(24))
        scores = dict(zip(two.documents.tolist(), two.scores.tolist(), strict=True))
        errors += [abs(scores[d] - s) for d, s in zip(one.documents.tolist(), one.scores.tolist(), strict=True)]
        first.append(one.documents[0] == two.documents[0])
        clear.append(two.scores[0] - two.scores[1] > 6 * mean)
    assert 1e-4 < np.mean(errors) < mean, "rounded, but not much"
    assert max(errors) < largest
    assert sum(first) >= 28
    assert all(same for same, gap in zip(first, clear, strict=True) if gap)
    assert sum(clear) >= 5


# ---- threads


@pytest.mark.parametrize(("case", "encoder"), [("additive-exact", "mpnet"), ("product-mean", "t5-gated")])
def test_batches_on_several_threads(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, case: str, encoder: str
) -> None:
    engine = make_engine(**CASES[case], encoder=encoder)
    texts = [" ".join(words) for n in (1, 2, 3) for words in itertools.permutations(["red", "cat", "dog", "moon"], n)]
    wanted = engine.search(texts, k=5, beam=4, batch_size=4)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for _ in range(3):
            assert_equal(make_engine(**CASES[case], encoder=encoder).search(texts, k=5, beam=4, batch_size=4), wanted)
        assert torch.get_num_threads() == 3, "the caller's number of threads is given back"
        small_memory(monkeypatch, MemoryError(), 0)
        with pytest.raises(NciError, match="--beam"):
            engine.search(texts, k=5, beam=4, batch_size=4)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


# ---- memory


def small_memory(monkeypatch: pytest.MonkeyPatch, error: BaseException, most: int) -> list[int]:
    """A backend where only so many queries fit; the batches that it was asked for."""
    sizes: list[int] = []
    whole = Backend.search

    def search(self: Backend, ids: Tensor, *others: Any) -> Any:
        sizes.append(len(ids))
        if len(ids) > most:
            raise error
        return whole(self, ids, *others)

    monkeypatch.setattr(Backend, "search", search)
    return sizes


NO_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried"),
    MemoryError(),
]


@pytest.mark.parametrize("error", NO_MEMORY, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("most", [1, 2, 3])
def test_a_batch_that_does_not_fit_is_split(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, error: BaseException, most: int
) -> None:
    engine = make_engine(**CASES["additive-exact"])
    texts = [*TEXTS, "red", "the cat sleeps", "dog dog dog"]
    wanted = engine.search(texts, k=5, beam=4)
    sizes = small_memory(monkeypatch, error, most)
    assert_equal(engine.search(texts, k=5, beam=4), wanted)
    assert sizes[0] == 7
    assert sum(size for size in sizes if size <= most) == 7


def test_a_batch_of_an_unfolded_model_is_split_too(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(**CASES["product-query"])
    wanted = engine.search(TEXTS, k=5, beam=4)

    def small(model: NCIModel, queries: Any, **options: Any) -> Any:
        if len(queries.states) > 1:
            raise MemoryError
        return plain_search(model, queries, **options)

    monkeypatch.setattr("nci.search.engine.plain_search", small)
    assert_equal(engine.search(TEXTS, k=5, beam=4), wanted)


@pytest.mark.parametrize("error", NO_MEMORY, ids=lambda e: type(e).__name__)
def test_a_query_that_does_not_fit_alone_says_what_to_do(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    engine = make_engine()
    small_memory(monkeypatch, error, 0)
    with pytest.raises(NciError, match="more memory than there is; use a smaller --beam") as caught:
        engine.search(TEXTS, k=5, beam=4)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("no")])
def test_other_errors_pass_through(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    engine = make_engine()
    sizes = small_memory(monkeypatch, error, 0)
    with pytest.raises(type(error)) as caught:
        engine.search(TEXTS, k=5, beam=4)
    assert caught.value is error
    assert sizes == [4], "tried once"
    assert not is_out_of_memory(error)


def test_what_was_too_narrow_is_searched_again(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the fixed shapes of a GPU: 20 of the 120 nodes at depth 2 go on, and some queries want more of them."""
    ids = [(a, b, *rest) for a in range(4) for b in range(30) for rest in ([(0,), (1,)] if b < 5 else [()])]
    engine = make_engine(ids, edge_bias=True, anchor="exact", kappa=9.0)
    inner = torch.as_tensor(np.diff(engine.trie.child_start) > 0)
    assert engine.edges is not None
    with torch.no_grad():
        engine.edges.bias[inner] += 6.0
    options: dict[str, Any] = {"k": 99, "beam": [24, 24, 99], "batch_size": 32}
    texts = [f"{a} {b}" for a, b in itertools.permutations(["red", "cat", "dog", "moon", "tree"], 2)]
    wanted = engine.search(texts, **options)
    plans: list[Plan] = []
    shorts: list[Tensor] = []

    def fixed(self: Engine, *, certain: bool, **settings: Any) -> Plan:
        plans.append(make_plan(self.trie, fixed=True, certain=certain, **settings))
        return plans[-1]

    whole = Backend.search

    def search(self: Backend, *given: Any) -> Any:
        found = whole(self, *given)
        shorts.append(found.short)
        return found

    monkeypatch.setattr(Engine, "_plan", fixed)
    monkeypatch.setattr(Backend, "search", search)
    found = engine.search(texts, **options)
    assert [plan.certain for plan in plans] == [False, True]
    assert 0 < int(shorts[0].sum()) < len(texts), "some queries, not all"
    assert len(shorts[1]) == int(shorts[0].sum())
    assert_equal(found, wanted)


# ---- what is no query


@pytest.mark.parametrize("case", ["additive-exact", "product-query"])
@pytest.mark.parametrize("text", ["", "  \n", "\x00", "red \ud800", 5, None, b"red"])
def test_refuses_what_is_no_query(make_engine: MakeEngine, text: Any, case: str) -> None:
    with pytest.raises(DataError, match="query"):
        make_engine(**CASES[case]).search(["red", text], k=1, beam=1)


@pytest.mark.parametrize("length", [10_000, 100_000])
@pytest.mark.parametrize("case", ["additive-exact", "product-query"])
def test_long_queries_are_cut(make_engine: MakeEngine, case: str, length: int) -> None:
    """The encoder reads 32 word pieces, the lexical score what stands in the first 10,000 characters."""
    engine = make_engine(**CASES[case], lexical=LexicalScores.build(DOCUMENTS), max_length=32)
    filler, words = "zz " * length, "green dog"

    def scores(text: str) -> list[float]:
        ranking = engine.search([text], k=11, beam=11)[0]
        assert len(ranking.documents) == 11
        return [float(score) for _, score in sorted(zip(ranking.documents, ranking.scores, strict=True))]

    plain = scores(filler[:length])
    inside, outside = (scores((filler[:before] + words + filler)[:length]) for before in (9_990, 10_001))
    assert len(words) < 10
    assert inside != pytest.approx(plain, abs=1e-3)
    assert outside == pytest.approx(plain, abs=1e-6)


def test_unknown_words_and_one_word(make_engine: MakeEngine) -> None:
    engine = make_engine(**CASES["additive-exact"], lexical=LexicalScores.build(DOCUMENTS))
    for ranking in engine.search(["zzz qqq", "!", "\U0001f600", "red\x00cat"], k=3, beam=3):
        assert len(ranking.documents) == 3
        assert np.isfinite(ranking.scores).all()


def test_no_texts_no_rankings(make_engine: MakeEngine) -> None:
    assert make_engine().search([], k=1, beam=1) == []


def test_exhaustive_search_is_what_the_engine_calls(make_engine: MakeEngine) -> None:
    engine = make_engine(**CASES["tied"])
    whole = exhaustive_search(engine.reference, engine.encode(TEXTS), k=5)
    for ranking, documents in zip(engine.search(TEXTS, k=5, beam=1, mode="exhaustive"), whole.documents, strict=True):
        assert ranking.documents.tolist() == documents.tolist()


@pytest.mark.parametrize(("longest", "wanted"), [(1, 16), (16, 16), (17, 32), (300, 512), (513, 1024), (1025, 1536)])
def test_queries_on_a_gpu_have_few_lengths(longest: int, wanted: int) -> None:
    assert _recorded(longest) == wanted
