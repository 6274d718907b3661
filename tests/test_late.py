"""Late interaction: against a double loop over pieces, in every search, in an index, and what calibration makes of it."""

from __future__ import annotations

import copy
import dataclasses
import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tiny import make_encoder, tiny_config
from torch import Tensor

import nci
from nci import store
from nci.anchors import TreeSum
from nci.calibrate import Calibration, Evidence, fit, gather
from nci.errors import DataError, IndexCorruptError
from nci.index import Index
from nci.lexical import LexicalScores
from nci.model import NCIModel
from nci.pieces import UNIT, PieceVectors, Windows
from nci.rocchio import query_means
from nci.search import Engine, score_all
from nci.search import late as late_module
from nci.search.content import DocumentVectors
from nci.search.late import Asked, LateScores
from nci.structure import check_structure

Floats = NDArray[np.float64]
MakeModel = Callable[..., NCIModel]
MakeEngine = Callable[..., Engine]
Vectors = Callable[..., NDArray[np.float32]]

SPECIAL = [0, 1, 2]
VOCABULARY = 9


def random_pieces(lengths: Sequence[int], wide: int, width: int, seed: int = 0) -> PieceVectors:
    """Documents of given lengths, in an order that is not the one of their codes."""
    rng = np.random.default_rng(seed)
    sizes = np.array(lengths, np.int64)
    units = rng.standard_normal((sum(lengths), width))
    codes = np.rint(UNIT * units / np.linalg.norm(units, axis=1, keepdims=True)).astype(np.int8)
    projection = rng.standard_normal((wide, width)).astype(np.float32)
    pieces = PieceVectors(codes, np.cumsum(sizes) - sizes, sizes, projection)
    return pieces.in_order(rng.permutation(len(lengths)))


def random_queries(lengths: Sequence[int], wide: int, seed: int = 0) -> Asked:
    """Queries of given lengths; what stands behind their ends is larger than anything before."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    mask = torch.arange(shape[1]) < torch.tensor(lengths).unsqueeze(1)
    states = torch.randn(*shape, wide, generator=generator)
    states[~mask] *= 100
    return Asked(states, torch.randint(0, VOCABULARY, shape, generator=generator), mask)


def by_hand(pieces: PieceVectors, query: int, asked: Asked, document: int) -> float:
    """late(q, d), one pair of pieces at a time."""
    tokens = [t for t in range(asked.ids.shape[1]) if asked.mask[query, t]]
    tokens = [t for t in tokens if int(asked.ids[query, t]) not in SPECIAL] or tokens
    best = []
    for token in tokens:
        piece: Floats = asked.states[query, token].double().numpy() @ pieces.projection.astype(np.float64)
        piece /= np.linalg.norm(piece)
        first = int(pieces.first[document])
        rows = range(first, first + int(pieces.lengths[document]))
        best.append(max(float(piece @ pieces.codes[row].astype(np.float64)) / UNIT for row in rows))
    return sum(best) / len(best)


def all_by_hand(pieces: PieceVectors, asked: Asked) -> Floats:
    """(queries, documents)"""
    return np.array([[by_hand(pieces, q, asked, d) for d in range(len(pieces))] for q in range(len(asked.ids))])


def with_windows(opening: PieceVectors, counts: Sequence[int], seed: int) -> PieceVectors:
    """Windows of one to four pieces behind the openings of some documents."""
    rng = np.random.default_rng(seed)
    number, lengths = np.array(counts, np.int64), rng.integers(1, 5, sum(counts))
    units = rng.standard_normal((lengths.sum(), opening.codes.shape[1]))
    codes = np.rint(UNIT * units / np.linalg.norm(units, axis=1, keepdims=True)).astype(np.int8)
    return dataclasses.replace(opening, further=Windows(codes, lengths, np.cumsum(number) - number, number))


def windows_of(pieces: PieceVectors, document: int) -> list[PieceVectors]:
    """Each window of a document as a document of its own."""
    if pieces.further is None:
        return []
    each = np.split(np.asarray(pieces.further.codes), np.cumsum(pieces.further.lengths)[:-1])
    first = int(pieces.further.first[document])
    some = each[first : first + int(pieces.further.counts[document])]
    return [PieceVectors(codes, np.array([0]), np.array([len(codes)]), pieces.projection) for codes in some]


def nearer_by_hand(pieces: PieceVectors, asked: Asked) -> NDArray[np.float64]:
    """By how much the best window of each document is nearer than its opening: (queries, documents)."""
    opening, found = all_by_hand(pieces, asked), np.zeros((len(asked.ids), len(pieces)))
    for document in range(len(pieces)):
        for one in windows_of(pieces, document):
            found[:, document] = np.maximum(found[:, document], all_by_hand(one, asked)[:, 0] - opening[:, document])
    return found


def scores_of(pieces: PieceVectors, candidates: int = 100) -> LateScores:
    return LateScores(pieces, SPECIAL, candidates=candidates, device="cpu")


# ---- one similarity for a query and a document


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    documents=st.lists(st.integers(1, 6), min_size=1, max_size=7),
    queries=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    width=st.integers(1, 6),
    more=st.integers(0, 5),
    seed=st.integers(0, 999),
    data=st.data(),
)
def test_it_is_the_mean_of_the_best_cosines(
    documents: list[int], queries: list[int], width: int, more: int, seed: int, data: st.DataObject
) -> None:
    pieces, asked = random_pieces(documents, width + more, width, seed), random_queries(queries, width + more, seed)
    row = st.lists(st.integers(0, len(documents) - 1), min_size=3, max_size=3)
    chosen = torch.tensor(data.draw(st.lists(row, min_size=len(queries), max_size=len(queries))))
    found = scores_of(pieces).compare(asked, chosen)
    wanted = np.take_along_axis(all_by_hand(pieces, asked), chosen.numpy(), axis=1)
    np.testing.assert_allclose(found.numpy(), wanted, atol=2e-5)


@pytest.fixture
def some() -> tuple[PieceVectors, Asked]:
    return random_pieces([4, 1, 7, 2, 5, 3], 8, 5), random_queries([6, 2, 4], 8)


def test_special_tokens_and_padding_do_not_count(some: tuple[PieceVectors, Asked]) -> None:
    pieces, asked = some
    everything = torch.arange(6).expand(3, -1)
    ids = torch.tensor([[2, 7, 8, 5, 6, 1], [4, 5, 9, 9, 9, 9], [2, 3, 1, 1, 9, 9]])
    asked = asked._replace(ids=ids)
    found = scores_of(pieces).compare(asked, everything)
    np.testing.assert_allclose(found.numpy(), all_by_hand(pieces, asked), atol=1e-5)
    states = asked.states.clone()
    states[0, [0, 5]] = states[1, 2:] = states[2, [0, 2, 3, 4, 5]] = torch.randn(8)
    torch.testing.assert_close(scores_of(pieces).compare(asked._replace(states=states), everything), found)
    states[2, 1] = torch.randn(8)
    changed = scores_of(pieces).compare(asked._replace(states=states), everything)
    assert (changed - found).abs().amax(1).gt(1e-3).tolist() == [False, False, True]


def test_a_query_of_special_tokens_alone_is_compared_by_these(some: tuple[PieceVectors, Asked]) -> None:
    pieces, asked = some
    ids = asked.ids.clone()
    ids[1] = torch.tensor([0, 2, 5, 5, 5, 5])  # two tokens, and what stands behind the end
    asked = asked._replace(ids=ids)
    found = scores_of(pieces).compare(asked, torch.arange(6).expand(3, -1))
    assert found.isfinite().all()
    np.testing.assert_allclose(found.numpy(), all_by_hand(pieces, asked), atol=1e-5)
    assert found[1].std() > 1e-3


def test_a_document_that_says_the_query_has_the_highest() -> None:
    """Itself as a document: 1, but for the rounding of codes; nothing can be above."""
    asked = random_queries([4, 4, 4], 5)._replace(ids=torch.full((3, 4), 7))
    codes = np.rint(UNIT * torch.nn.functional.normalize(asked.states, dim=-1).numpy()).astype(np.int8)
    first = np.array([0, 4, 8])
    pieces = PieceVectors(codes.reshape(12, 5), first, np.full(3, 4), np.eye(5, dtype=np.float32))
    found = scores_of(pieces).compare(asked, torch.arange(3).expand(3, -1))
    assert found.diagonal().tolist() == pytest.approx([1.0] * 3, abs=0.01)
    assert found.argmax(1).tolist() == [0, 1, 2]


@pytest.mark.parametrize("at_once", [1, 2 * 6 * 7 * 5, 2**27])
def test_many_queries_at_once_change_nothing(
    some: tuple[PieceVectors, Asked], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way of a GPU, which pads every document to the longest and takes as many queries as fit: on this device."""
    pieces, asked = some
    monkeypatch.setattr(late_module, "_NUMBERS_AT_ONCE", at_once)
    scores = scores_of(pieces)
    calls = []
    one = scores._best
    scores._best = lambda *given: calls.append(len(given[0])) or one(*given)  # type: ignore[method-assign, func-returns-value]
    chosen = torch.stack([torch.randperm(6) for _ in range(3)])
    wanted = scores.compare(asked, chosen)
    alone = 6 if at_once == 1 else 1  # a document at a time where two are too many
    assert calls == [1, 1, 1] * alone
    calls.clear()
    scores.device = "elsewhere"
    torch.testing.assert_close(scores.compare(asked, chosen), wanted)
    assert calls == {1: [1, 1, 1] * 6, 420: [2, 1], 2**27: [3]}[at_once]


# ---- above the worst candidate


@pytest.mark.parametrize("candidates", [1, 3, 6, 50])
def test_only_candidates_are_compared_and_the_worst_gets_nothing(
    some: tuple[PieceVectors, Asked], candidates: int
) -> None:
    pieces, asked = some
    scores = torch.randn(3, 6)
    chosen, above, nearer = scores_of(pieces, candidates).best(scores, asked)
    assert nearer is None
    count = min(candidates, 6)
    assert chosen.shape == above.shape == (3, count)
    wanted = all_by_hand(pieces, asked)
    for query in range(3):
        best = np.argsort(-scores[query].numpy())[:count]
        assert set(chosen[query].tolist()) == set(best.tolist())
        mine = wanted[query, chosen[query].numpy()]
        np.testing.assert_allclose(above[query].numpy(), mine - mine.min(), atol=1e-5)
        assert float(above[query].min()) == 0.0


# ---- in every search

TEXTS = ["red cat", "the dog runs over the blue bird under a tree", "moon", "a star sleeps"]
DOCUMENTS = [
    "red red cat", "green dog", "blue bird", "cat runs", "dog sleeps", "bird over tree", "sun moon", "star tree",
    "under the tree", "moon star", "dog cat bird",
]  # fmt: skip
LENGTHS = [3, 1, 2, 5, 2, 3, 4, 1, 3, 2, 6]
WINDOWS = [2, 0, 3, 1, 0, 0, 1, 2, 0, 1, 3]  # behind each opening, where there are any
CASES: dict[str, dict[str, Any]] = {
    "folded": {"head": "additive", "content": True, "edge_bias": True},
    "by its modules": {"head": "product", "adapter_start": "query"},
}


@pytest.fixture
def make_engine(make_model: MakeModel, tokenizer: Any, unit_vectors: Vectors) -> MakeEngine:
    return engine_maker(make_model, tokenizer, unit_vectors)


def engine_maker(make_model: MakeModel, tokenizer: Any, unit_vectors: Vectors) -> MakeEngine:
    """An engine in float32 whose documents have random pieces; keyword arguments are those of the model."""

    def make(
        *, candidates: int = 5, lexical: bool = True, bias: bool = True, windows: Sequence[int] = (), **options: Any
    ) -> Engine:
        model = make_model(**{"anchor": "exact", "late": 6.0, **options})
        documents = model.tables.trie.documents
        pieces = random_pieces(LENGTHS, 16, 5)
        added = np.linspace(-1, 1, documents).astype(np.float32) if bias else None
        vectors = DocumentVectors(unit_vectors(documents), bias=added)
        model.bind(model.tables.trie, vectors.values, bias=added)
        return Engine.for_model(
            model,
            tokenizer,
            model.tables.trie,
            vectors=vectors,
            lexical=LexicalScores.build(DOCUMENTS) if lexical else None,
            pieces=with_windows(pieces, windows, seed=4) if windows else pieces,
            candidates=candidates,
            precision="fp32",
        )

    return make


def read(engine: Engine, text: str) -> tuple[Asked, Tensor]:
    """One query as the encoder reads it, alone, and its vector."""
    ids = torch.tensor(engine.tokenizer([text])["input_ids"])
    with torch.no_grad():
        states, vector = engine.model.encode(ids, torch.ones_like(ids))
    return Asked(states, ids, torch.ones_like(ids).bool()), vector[0]


def content_by_hand(engine: Engine, text: str, choosing: Sequence[float] | None = None) -> Floats:
    """(documents,) kappa cos + lambda bm25 + bias + late, by the design's formula."""
    asked, vector = read(engine, text)
    model, vectors, pieces = engine.model, engine.vectors, engine.pieces
    assert model.anchor_weights is not None
    assert vectors is not None
    assert pieces is not None
    assert engine.lexical is not None
    cosines = np.asarray(vectors.values, np.float64) @ vector.double().numpy()
    words = engine.lexical.normalised([text])[0].astype(np.float64)
    kappa, weight = model.anchor_weights.detach().double().exp().tolist()
    first, second = choosing or (kappa, weight)
    chosen = np.argsort(-(first * cosines + second * words))[: engine.candidates]
    similar = np.array([by_hand_in(engine, pieces, asked, document) for document in chosen])
    late = np.zeros(len(cosines))
    late[chosen] = similar - similar.min()
    for document, opening in zip(chosen, similar, strict=True):
        best = max((by_hand_in(engine, one, asked, 0) for one in windows_of(pieces, document)), default=opening)
        late[document] += model.config.further * max(0.0, best - opening)
    bias = 0.0 if vectors.bias is None else vectors.bias
    out: Floats = kappa * cosines + weight * words + bias + model.config.late * late
    return out


def by_hand_in(engine: Engine, pieces: PieceVectors, asked: Asked, document: int) -> float:
    """late(q, d) with the special tokens of the engine's tokenizer, and those it puts around a text; not unknown words."""
    around = engine.tokenizer("")["input_ids"]
    special = torch.tensor([*engine.tokenizer.all_special_ids, *around])
    special = special[special != engine.tokenizer.unk_token_id]
    ids = torch.where(torch.isin(asked.ids, special), SPECIAL[0], VOCABULARY)
    return by_hand(pieces, 0, asked._replace(ids=ids), document)


@pytest.mark.parametrize("candidates", [5, 100])
@pytest.mark.parametrize("chosen_by", [None, [0.5, 9.0]], ids=str)
@pytest.mark.parametrize("more", [{}, {"windows": WINDOWS, "further": 0.7}], ids=["openings", "windows"])
@pytest.mark.parametrize("case", CASES)
def test_the_content_score_has_it(
    make_engine: MakeEngine, case: str, candidates: int, chosen_by: list[float] | None, more: dict[str, Any]
) -> None:
    engine = make_engine(**CASES[case], **more, candidates=candidates, chosen_by=chosen_by)
    for text in TEXTS:
        wanted = content_by_hand(engine, text, chosen_by)
        found = [parts["content"] for parts in engine.explain(text, range(11))]
        np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_calibrated_weights_do_not_choose_the_candidates(make_engine: MakeEngine) -> None:
    """And neither does the bias: with other weights other documents are compared."""
    same, other = (make_engine(chosen_by=weights) for weights in (None, [0.1, 9.0]))
    late = [engine.encode(TEXTS).late for engine in (same, other)]
    assert late[0] is not None
    assert late[1] is not None
    assert ((late[0] > 0) != (late[1] > 0)).any()
    for part in (late[0], late[1]):
        assert (part.gt(0).sum(1) == 4).all(), "five are compared, the worst of them gets nothing"
    plain = make_engine(bias=False).encode(TEXTS).late
    torch.testing.assert_close(plain, late[0])


@pytest.mark.parametrize("lexical", [True, False])
@pytest.mark.parametrize("more", [{}, {"windows": WINDOWS, "further": 0.7}], ids=["openings", "windows"])
@pytest.mark.parametrize("case", CASES)
def test_every_search_has_it(make_engine: MakeEngine, case: str, lexical: bool, more: dict[str, Any]) -> None:
    engine = make_engine(**CASES[case], **more, lexical=lexical, chosen_by=[2.0, 1.0])
    fast = engine.search(TEXTS, k=11, beam=11)
    whole = engine.search(TEXTS, k=11, beam=11, mode="exhaustive")
    without = dataclasses.replace(engine, pieces=None).search(TEXTS, k=11, beam=11)
    assert (engine.backend is not None) == (case == "folded")
    for one, two, three in zip(fast, whole, without, strict=True):
        assert one.documents.tolist() == two.documents.tolist()
        np.testing.assert_allclose(one.scores, two.scores, atol=1e-4)
        assert np.abs(np.sort(one.scores) - np.sort(three.scores)).max() > 1e-2
    for batch_size in (1, 3):
        for one, two in zip(fast, engine.search(TEXTS, k=11, beam=11, batch_size=batch_size), strict=True):
            assert one.documents.tolist() == two.documents.tolist()
            np.testing.assert_allclose(one.scores, two.scores, atol=1e-4)


def test_without_a_weight_or_pieces_there_is_none(make_engine: MakeEngine) -> None:
    assert make_engine().late is not None
    assert make_engine(late=0.0).late is None
    assert make_engine(late=0.0).encode(TEXTS).late is None
    assert dataclasses.replace(make_engine(), pieces=None).late is None


# ---- calibration


def evidence_of(engine: Engine, texts: Sequence[str]) -> Evidence:
    documents = engine.trie.documents
    return gather(engine, texts, np.zeros(len(texts), int), np.ones(documents, int))


def many_texts(count: int) -> list[str]:
    words = sorted({word for text in DOCUMENTS for word in text.split()})
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(words, 3)) for _ in range(count)]


def test_the_weight_grows_where_pieces_alone_know_the_answer(make_engine: MakeEngine) -> None:
    engine = make_engine(candidates=11, lexical=False, bias=False, trained=False)
    texts = many_texts(80)
    evidence = evidence_of(engine, texts)
    assert evidence.late is not None
    found, _ = fit(engine, texts, evidence.late.argmax(1).numpy(), np.ones(11, int))
    assert found.late > 1.5 * engine.model.config.late
    assert found.kappa < 0.8 * 5.0
    # and the other way round, where they know nothing
    found, _ = fit(engine, texts, evidence.dense.argmax(1).numpy(), np.ones(11, int))
    assert found.kappa > 1.5 * 5.0
    assert found.late < 0.8 * engine.model.config.late


def test_without_pieces_no_weight_is_fitted(make_engine: MakeEngine) -> None:
    engine = make_engine(late=0.0)
    texts = many_texts(20)
    evidence = evidence_of(engine, texts)
    assert evidence.late is None
    found, _ = fit(engine, texts, evidence.dense.argmax(1).numpy(), np.ones(11, int))
    assert found.late == 0.0
    found.apply(engine.model)
    assert (engine.model.config.late, engine.model.config.chosen_by) == (0.0, None)


def log_probs(engine: Engine, weights: Sequence[float], counts: NDArray[np.integer]) -> Tensor:
    """log p of every document under some weights, (texts, documents), one target after the other."""
    found = []
    for leaf in range(engine.trie.documents):
        evidence = gather(engine, TEXTS, np.full(len(TEXTS), leaf), counts)
        found.append(evidence.log_probs(torch.tensor(weights).float(), TreeSum(engine.trie)))
    return torch.stack(found, dim=1)


def test_the_evidence_gives_the_probabilities_of_the_model(make_engine: MakeEngine) -> None:
    engine = make_engine(bias=False)
    assert engine.model.anchor_weights is not None
    start = engine.model.anchor_weights.tolist()
    found = log_probs(engine, [*start, 0.0, 1.0, 0.0, np.log(6.0)], np.ones(11, int))
    torch.testing.assert_close(found, score_all(engine.reference, engine.encode(TEXTS)), atol=1e-3, rtol=1e-4)
    other = log_probs(engine, [*start, 0.0, 1.0, 0.0, np.log(3.0)], np.ones(11, int))
    assert (found - other).abs().max() > 0.1


def test_an_applied_calibration_searches_as_it_was_fitted(make_engine: MakeEngine) -> None:
    """Which documents are compared stays as it was."""
    engine = make_engine(bias=False)
    counts = np.arange(11) % 3
    calibration = Calibration(kappa=0.2, lexical=9.0, unseen=1.5, residual=0.4, popular=0.7, late=13.0)
    wanted = log_probs(engine, [np.log(0.2), np.log(9.0), 1.5, 0.4, 0.7, np.log(13.0)], counts)
    assert engine.model.anchor_weights is not None
    before = engine.model.anchor_weights.exp().tolist()
    model = copy.deepcopy(engine.model)
    calibration.apply(model)
    assert model.config.chosen_by == pytest.approx(before)
    assert model.config.late == 13.0
    assert model.anchor_weights is not None
    assert model.anchor_weights.exp().tolist() == pytest.approx([0.2, 9.0])
    assert engine.vectors is not None
    vectors = dataclasses.replace(engine.vectors, bias=calibration.bias(counts))
    options = {"vectors": vectors, "lexical": engine.lexical, "pieces": engine.pieces, "candidates": engine.candidates}
    other = Engine.for_model(model, engine.tokenizer, engine.trie, precision="fp32", **options)
    for ranking, row in zip(other.search(TEXTS, k=11, beam=11), wanted, strict=True):
        np.testing.assert_allclose(ranking.scores, row[ranking.documents].numpy(), atol=1e-3)
    model.config.chosen_by = None
    again = dataclasses.replace(other)
    moved = [
        np.abs(ranking.scores - row[ranking.documents].numpy()).max()
        for ranking, row in zip(again.search(TEXTS, k=11, beam=11), wanted, strict=True)
    ]
    assert max(moved) > 1e-2, "chosen by the new weights they would be others"


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_documents_move_after_candidates_are_chosen(make_engine: MakeEngine, precision: Any) -> None:
    """Which documents are compared piece by piece was fitted without moves, and stays."""
    engine, counts = make_engine(bias=False), np.ones(11, int)
    moves = query_means(engine, [(TEXTS[0], 2), (TEXTS[1], 7), (TEXTS[2], 7), (TEXTS[0], 4)])
    evidence = gather(engine, TEXTS, np.zeros(len(TEXTS), int), counts, moves)
    weights = torch.tensor([np.log(2.0), np.log(9.0), 0.0, 0.0, 0.0, np.log(13.0), 0.0, 3.0]).float()
    wanted = evidence.scores(weights).log_softmax(1)
    model = copy.deepcopy(engine.model)
    Calibration(kappa=2.0, lexical=9.0, unseen=0.0, residual=0.0, late=13.0, moves=3.0).apply(model)
    assert engine.vectors is not None
    vectors = dataclasses.replace(engine.vectors, moves=DocumentVectors(3.0 * moves))
    options = {"vectors": vectors, "lexical": engine.lexical, "pieces": engine.pieces, "candidates": engine.candidates}
    other = Engine.for_model(model, engine.tokenizer, engine.trie, precision=precision, **options)
    for ranking, row in zip(other.search(TEXTS, k=11, beam=11), wanted, strict=True):
        np.testing.assert_allclose(
            ranking.scores, row[ranking.documents].numpy(), atol=1e-3 if precision == "fp32" else 0.5
        )
    other.model.bind(other.trie, np.asarray(vectors.values, np.float32), moves=3.0 * moves)
    for ranking, row in zip(other.search(TEXTS, k=11, beam=11, mode="exhaustive"), wanted, strict=True):
        np.testing.assert_allclose(ranking.scores, row[ranking.documents].numpy(), atol=1e-3)


def test_the_line_names_word_pieces() -> None:
    said = str(Calibration(13.394, 10.002, 0.072, 0.4477, -1.688, 21.756))
    assert (
        said == "dense 13.39, BM25 10.00, word pieces 21.76, decoder 0.45, "
        "unseen +0.07, often asked -1.69, hubs +0.00, moved 0.00"
    )
    assert "pieces" not in str(Calibration(13.394, 10.002, 0.072, 0.4477, -1.688))


# ---- an index that has them

QUERIES = ["apple pear item0", "wave ship", "the wave of item13", "law", "unknown words only", "item7 choir"]
PIECES = {"embed": {"pieces": 8}, "search": {"candidates": 7}}


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory, encoder: Path, beir: Path) -> Callable[..., Path]:
    def build(**changes: Any) -> Path:
        folder = tmp_path_factory.mktemp("index") / "my.index"
        nci.build(beir, folder, tiny_config(encoder, **changes))
        return folder

    return build


@pytest.fixture(scope="module")
def folder(make: Callable[..., Path]) -> Path:
    return make(**PIECES)


@pytest.fixture(scope="module")
def index(folder: Path) -> Index:
    return Index(folder)


def assert_exact(index: Index) -> None:
    """Fast search finds what a search of all documents finds, but for documents that are as good as each other."""
    fast, whole = index.search(QUERIES, k=60, beam=60), index.search(QUERIES, k=60, mode="exhaustive")
    for one, two in zip(fast, whole, strict=True):
        assert [hit.score for hit in one] == pytest.approx([hit.score for hit in two], abs=1e-3)
        scores = {hit.doc_id: hit.score for hit in two}
        assert len(scores) == 60
        assert [scores[hit.doc_id] for hit in one] == pytest.approx([hit.score for hit in one], abs=1e-3)


def test_fast_search_equals_exhaustive_search(index: Index) -> None:
    assert index.engine.late is not None
    assert index.engine.late.candidates == 7
    assert index.engine.model.config.late == 30.0
    assert_exact(index)
    plain = copy.copy(index)
    plain.engine = dataclasses.replace(index.engine, pieces=None)
    differ = [a.score != pytest.approx(b.score, abs=1e-2) for a, b in zip(*_best(index, plain), strict=True)]
    assert any(differ)


def _best(*indexes: Index) -> list[list[Any]]:
    return [[hits[0] for hits in index.search(QUERIES, k=1, beam=60)] for index in indexes]


def test_explain_has_the_pieces_of_each_document(index: Index) -> None:
    """The score of every document by hand; the pieces of an index are those of its documents, in its own order."""
    engine = index.engine
    wanted = content_by_hand(engine, QUERIES[0])
    parts = engine.explain(QUERIES[0], range(60))
    np.testing.assert_allclose([part["content"] for part in parts], wanted, atol=1e-3)
    assert engine.pieces is not None
    for number in range(0, 60, 7):
        text = " ".join([index.document(number)["title"], index.document(number)["text"]])
        tokens = engine.tokenizer([text], truncation=True, max_length=48)["input_ids"][0]
        assert engine.pieces.lengths[number] == len(tokens)
    line, late = index.explain(QUERIES[0], index.doc_ids), engine.model.config.late
    try:
        engine.model.config.late = 1.0
        assert index.explain(QUERIES[0], index.doc_ids) != line
        changed = [part["content"] for part in engine.explain(QUERIES[0], range(60))]
        np.testing.assert_allclose(changed, content_by_hand(engine, QUERIES[0]), atol=1e-3)
    finally:
        engine.model.config.late = late
    gained = wanted - np.array(changed)
    assert (np.abs(gained) > 1e-2).sum() == 6, "seven are compared, the worst of them gets nothing"


def test_the_pieces_are_those_of_the_documents_themselves(index: Index) -> None:
    """Leaf by leaf: the codes in the index against the stored encoder, one document at a time."""
    from nci.encoders import TextEncoder

    pieces = index.engine.pieces
    assert pieces is not None
    assert isinstance(pieces.codes, np.memmap)
    encoder = TextEncoder.load(index.generation / "embedder", max_length=48)
    for number in range(60):
        stored = index.document(number)
        row = encoder.tokenize([nci.Document(stored["doc_id"], stored["text"], stored["title"]).content])
        with torch.no_grad():
            states = encoder.model(input_ids=torch.tensor(row)).last_hidden_state[0].numpy()
        small = states @ pieces.projection
        first = int(pieces.first[number])
        codes = pieces.codes[first : first + int(pieces.lengths[number])]
        assert np.abs(UNIT * small / np.linalg.norm(small, axis=1, keepdims=True) - codes).max() < 0.55


def test_it_is_whole_and_can_be_moved(folder: Path, index: Index, tmp_path: Path) -> None:
    assert index.verify(2) == []
    wanted = index.search(QUERIES, k=5)
    copied = Path(shutil.copytree(folder, tmp_path / "my.index"))
    shutil.rmtree(copied / "build")
    moved = nci.load(copied.rename(tmp_path / "elsewhere"), paranoid=True)
    assert moved.search(QUERIES, k=5) == wanted
    assert moved.verify(2) == []
    bare = Path(shutil.copytree(store.resolve(tmp_path / "elsewhere"), tmp_path / "bare"))
    assert nci.load(bare).search(QUERIES, k=5) == wanted


@pytest.fixture
def unchecked(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the generation that is opened without a look at its checksums."""
    monkeypatch.setattr(store, "check", lambda *_, **__: None)
    return Path(shutil.copytree(store.resolve(folder), tmp_path / "generation"))


def test_pieces_of_another_index_are_found(unchecked: Path) -> None:
    """As many pieces, but of fewer documents."""
    assert check_structure(Index(unchecked)) == []
    lengths = np.load(unchecked / "pieces" / "lengths.npy")
    np.save(unchecked / "pieces" / "lengths.npy", np.append(lengths[:-2], lengths[-2:].sum()))
    assert check_structure(Index(unchecked)) == ["pieces: expected those of 60 documents, found 59"]
    assert [problem for problem in Index(unchecked).verify(1) if "pieces/lengths.npy" in problem]


def test_pieces_that_do_not_fit_or_are_missing_are_one_line(unchecked: Path) -> None:
    lengths = np.load(unchecked / "pieces" / "lengths.npy")
    np.save(unchecked / "pieces" / "lengths.npy", lengths[:-1])
    with pytest.raises(DataError, match="do not fit; build the index again"):
        Index(unchecked)
    (unchecked / "pieces" / "lengths.npy").unlink()
    with pytest.raises(IndexCorruptError, match="nci verify") as caught:
        Index(unchecked)
    assert "\n" not in str(caught.value)


def test_int8_finds_nearly_the_same(folder: Path, index: Index) -> None:
    small = Index(folder)
    small.engine = dataclasses.replace(small.engine, precision="int8", candidates=60)
    exact = dataclasses.replace(index.engine, candidates=60)
    for one, two in zip(*(e.search(QUERIES, k=60, beam=60) for e in (small.engine, exact)), strict=True):
        scores = [dict(zip(r.documents.tolist(), r.scores.tolist(), strict=True)) for r in (one, two)]
        assert max(abs(scores[0][d] - scores[1][d]) for d in scores[1]) < 1.0


def test_zeroed_and_untrained_systems_have_it(index: Index) -> None:
    for name in ("zeroed", "untrained"):
        other = index.system(name)
        assert other.engine.late is not None
        assert other.engine.model.config.late == 30.0
        assert other.engine.late.candidates == 7
        assert_exact(other)


@pytest.mark.slow
def test_an_index_without_pieces_has_no_part_of_it(make: Callable[..., Path], tmp_path: Path) -> None:
    other = make_encoder(tmp_path / "other", seed=3)
    changes: list[dict[str, Any]] = [
        {},
        {"embed": {"pieces": 8}, "model": {"anchor": "none"}},
        {"embed": {"pieces": 8}, "model": {"anchor": "mean"}},
        {"embed": {"pieces": 8}, "model": {"encoder": str(other), "query_vector": "stored"}},
    ]
    for change in changes:
        built = Index(make(**change, train={"epochs": 0.5}))
        assert not (built.generation / "pieces").exists()
        assert built.engine.model.config.late == 0
        assert built.engine.pieces is None
        assert built.engine.late is None
        assert built.search("apple", k=2)
        assert built.verify(2) == []


@pytest.mark.slow
def test_vectors_of_the_stored_encoder_choose_the_candidates(make: Callable[..., Path]) -> None:
    index = Index(make(**PIECES, model={"query_vector": "stored"}))
    assert index.engine.late is not None
    assert index.engine.embedder is not None
    assert_exact(index)


@pytest.mark.slow
def test_a_calibrated_index_has_the_fitted_weight(make: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="nci")
    index = Index(make(**PIECES, calibrate={"share": 0.4, "least": 4}))
    report = index.manifest["report"]["calibration"]
    config = index.engine.model.config
    assert config.late == pytest.approx(report["late"])
    assert config.late > 0
    assert config.late != 30.0
    assert index.engine.model.anchor_weights is not None
    weights = index.engine.model.anchor_weights.exp().tolist()
    assert len(config.chosen_by) == 2
    assert config.chosen_by != pytest.approx(weights, rel=1e-3)
    assert any(f"word pieces {report['late']:.2f}" in record.getMessage() for record in caplog.records)
    assert index.verify(2) == []
    assert_exact(index)
    for name in ("zeroed", "untrained"):
        other = index.system(name)
        assert (other.engine.model.config.late, other.engine.model.config.chosen_by) == (config.late, config.chosen_by)
        assert other.engine.late is not None
        assert other.engine.model.anchor_weights is not None
        assert other.engine.model.anchor_weights.exp().tolist() == pytest.approx(weights)
        assert_exact(other)
