"""Re-ranking: scores against the model called pair by pair, order by hand, training that learns and repeats itself."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch

from nci.baselines import Searcher
from nci.baselines.bm25 import BM25
from nci.baselines.rerank import CrossEncoder, Rerank, RerankSettings
from nci.errors import ConfigError, DataError, IndexNotFoundError, MissingModelError
from nci.records import Document, Hit, Hits
from nci.runtime import quiet

TINY = RerankSettings(max_length=48, precision="fp32", batch_size=8, negatives=3, lr=3e-3, epochs=40, depth=12)


def make_classifier(folder: Path, labels: int) -> Path:
    """A random model for sequence classification, as others have trained one."""
    torch.manual_seed(3)
    encoder = tiny.make_encoder(folder / "encoder", seed=3)
    config = tiny.models.BertConfig.from_pretrained(encoder, num_labels=labels)
    with quiet():
        tiny.models.BertForSequenceClassification(config).save_pretrained(folder / "model")
        tiny.make_tokenizer().save_pretrained(folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_classifier(tmp_path_factory.mktemp("classifier"), labels=1)


class Fixed:
    """A searcher that gives some documents in one order, whatever is asked."""

    def __init__(self, doc_ids: list[str]) -> None:
        self.doc_ids = doc_ids
        self.asked: list[int] = []

    def search(self, queries: Any, k: int = 10) -> Any:
        self.asked.append(k)
        hits = Hits((Hit(rank, doc_id, -float(rank)) for rank, doc_id in enumerate(self.doc_ids[:k], 1)), 50)
        return hits if isinstance(queries, str) else [hits for _ in queries]


class Length:
    """Stands in for a model: the longer the document, the better; remembers what it read."""

    def __init__(self) -> None:
        self.read: list[tuple[str, str]] = []

    def score(self, pairs: list[tuple[str, str]], *, batch_size: int) -> Any:
        self.read += pairs
        return np.array([len(text) for _, text in pairs], np.float32)


# ---- scores


@pytest.mark.parametrize("labels", [1, 2])
def test_scores_are_those_of_the_model_pair_by_pair(tmp_path: Path, labels: int) -> None:
    folder = make_classifier(tmp_path, labels)
    documents = tiny.make_documents(30)
    pairs = [("apple pear" if i % 2 else "ship", "word " * (i % 5) + each.content) for i, each in enumerate(documents)]
    found = CrossEncoder.load(folder, precision="fp32").score(pairs, batch_size=7)
    model = tiny.models.BertForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = tiny.models.AutoTokenizer.from_pretrained(folder)
    for (query, text), score in zip(pairs, found, strict=True):
        with torch.no_grad():
            (logits,) = model(**tokenizer(query, text, return_tensors="pt")).logits.tolist()
        assert score == pytest.approx(logits[0] if labels == 1 else logits[1] - logits[0], abs=1e-5)
    assert np.ptp(found) > 0.01


def test_long_texts_are_cut_to_what_the_model_can_read(classifier: Path) -> None:
    model = CrossEncoder.load(classifier, max_length=500, precision="fp32")  # the model has 64 positions
    long = "apple " * 30
    cut = model.score([(long, "ship " * 2000), (long, "ship " * 40), ("ship " * 2000, long)], batch_size=3)
    assert cut[0] == pytest.approx(cut[1], abs=1e-6)
    assert np.isfinite(cut).all()
    short = CrossEncoder.load(classifier, max_length=8, precision="fp32")
    text = "ship wave tide anchor storm moon star comet"
    cut = short.score([("apple", text), ("apple", text + " orbit"), ("apple", text[:9])], batch_size=3)
    assert cut[0] == pytest.approx(cut[1], abs=1e-6) != pytest.approx(cut[2], abs=1e-6)


def test_what_is_no_cross_encoder_is_refused(encoder: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingModelError, match="classifier"):
        CrossEncoder.load(encoder)
    with pytest.raises(MissingModelError, match="nowhere"):
        CrossEncoder.load(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="not 3"):
        CrossEncoder.load(make_classifier(tmp_path, labels=3))
    torch.manual_seed(0)
    assert CrossEncoder.load(encoder, fresh=True).model.config.num_labels == 1
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in encoder.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    with pytest.raises(MissingModelError, match=r"layer\.1"):
        CrossEncoder.load(broken, fresh=True)


# ---- order


def test_hits_are_ordered_by_the_model_and_the_rest_keep_their_places() -> None:
    lengths = {"a": 3, "b": 9, "c": 5, "d": 99, "e": 1, "f": 9}
    documents = [Document(doc_id, "x" * length, "t") for doc_id, length in lengths.items()]
    base, model = Fixed(["a", "c", "f", "b", "e", "d"]), Length()
    chosen = RerankSettings(depth=4)
    rerank: Searcher = Rerank(documents, base, model, settings=chosen, name="rerank:fixed")  # type: ignore[arg-type]
    found = rerank.search("q", k=10)
    # b and f tie and go by doc_id; d, the longest, lies beyond the depth and was not read.
    assert [hit.doc_id for hit in found] == ["b", "f", "c", "a", "e", "d"]
    assert [hit.rank for hit in found] == [1, 2, 3, 4, 5, 6]
    assert [hit.score for hit in found][:4] == [11, 11, 7, 5]
    assert [hit.score for hit in found] == sorted((hit.score for hit in found), reverse=True)
    assert found[3].score > found[4].score > found[5].score
    assert {hit.source for hit in found} == {"rerank:fixed"}
    assert found[0].title == "t"
    assert found.documents_scored == 54, "50 by the other system, and four were read"
    assert model.read == [("q", "t\n" + "x" * lengths[doc_id]) for doc_id in ("a", "c", "f", "b")]
    assert rerank.search("q", k=2) == found[:2]
    assert rerank.search(["q", "r"], k=5) == [found[:5], found[:5]]
    assert base.asked == [10, 4, 5]
    assert rerank.search([]) == []
    assert Rerank(documents, Fixed([]), model).search("q") == []  # type: ignore[arg-type]


def test_a_low_score_keeps_the_rest_below(classifier: Path) -> None:
    documents = tiny.make_documents(20)
    model = CrossEncoder.load(classifier, precision="fp32")
    base = Fixed([document.doc_id for document in documents])
    for bias in (100.0, -100.0):
        with torch.no_grad():
            model.model.classifier.bias.fill_(bias)
        hits = Rerank(documents, base, model, settings=RerankSettings(depth=5)).search("apple", k=20)
        assert [hit.doc_id for hit in hits[5:]] == [document.doc_id for document in documents[5:]]
        assert all(above.score > below.score for above, below in itertools.pairwise(hits[4:]))


# ---- training


def right(searcher: Searcher, pairs: list[tuple[str, str]]) -> float:
    found = searcher.search([query for query, _ in pairs], k=1)
    return float(np.mean([hits[0].doc_id == doc_id for hits, (_, doc_id) in zip(found, pairs, strict=True)]))


@pytest.fixture(scope="module")
def lesson() -> tuple[list[Document], list[tuple[str, str]]]:
    documents = tiny.make_documents(6)  # one of each topic
    return documents, [(f"{topic} {name}", each.doc_id) for each in documents for topic, name in [each.title.split()]]


@pytest.fixture(scope="module")
def trained(
    lesson: tuple[list[Document], list[tuple[str, str]]], encoder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Rerank, Path]:
    documents, pairs = lesson
    out = tmp_path_factory.mktemp("trained") / "rerank"
    base = Fixed([document.doc_id for document in documents])
    return Rerank.train(documents, pairs, base=base, out=out, settings=with_encoder(encoder)), out


def with_encoder(encoder: Path, **changes: Any) -> RerankSettings:
    return dataclasses.replace(TINY, encoder=str(encoder), **changes)


def test_training_learns_its_pairs(
    lesson: tuple[list[Document], list[tuple[str, str]]], trained: tuple[Rerank, Path]
) -> None:
    documents, pairs = lesson
    rerank, out = trained
    assert right(Fixed([document.doc_id for document in documents]), pairs) == pytest.approx(1 / 6)
    assert right(rerank, pairs) == 1
    loaded = Rerank.load(out, documents, base=Fixed([document.doc_id for document in documents]))
    queries = [query for query, _ in pairs]
    for a, b in zip(loaded.search(queries), rerank.search(queries), strict=True):
        assert [hit.doc_id for hit in a] == [hit.doc_id for hit in b]
        assert [hit.score for hit in a] == pytest.approx([hit.score for hit in b], abs=1e-5)
    # What was trained here is a model for sequence classification like any other.
    assert CrossEncoder.load(out, precision="fp32").model.config.num_labels == 1
    assert not rerank.model.model.training
    assert rerank.index_bytes == sum(4 * weight.numel() for weight in rerank.model.model.parameters())


def test_a_seed_decides(lesson: tuple[list[Document], list[tuple[str, str]]], encoder: Path, tmp_path: Path) -> None:
    documents, pairs = lesson
    base = BM25(documents)
    weights = [
        Rerank.train(
            documents, pairs, base=base, out=tmp_path / str(run), settings=with_encoder(encoder, epochs=2, seed=seed)
        ).model.model.state_dict()
        for run, seed in enumerate((0, 0, 1))
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not torch.equal(weights[0]["classifier.weight"], weights[2]["classifier.weight"])


def test_every_step_is_adam_on_its_own_batch(
    lesson: tuple[list[Document], list[tuple[str, str]]], encoder: Path, tmp_path: Path
) -> None:
    documents, pairs = lesson
    chosen = with_encoder(encoder, epochs=2, batch_size=2, negatives=2)
    base = Fixed([document.doc_id for document in documents])
    trained = Rerank.train(documents, pairs, base=base, out=tmp_path, settings=chosen).model.model.state_dict()

    torch.manual_seed(chosen.seed)
    model = CrossEncoder.load(encoder, max_length=48, precision="fp32", fresh=True)
    groups = Rerank(documents, base, model, settings=chosen)._groups(pairs)
    rng = np.random.default_rng(chosen.seed)
    optimiser = torch.optim.AdamW(model.model.parameters(), lr=0.0, weight_decay=0.01)
    model.model.train()
    for step in range(6):  # the first step is the warm-up, then the rate falls from its peak to 0
        if step % 3 == 0:
            order = rng.permutation(6)
        optimiser.param_groups[0]["lr"] = chosen.lr * (6 - step) / 5 if step else chosen.lr
        losses = []
        batch = [list(groups[i].draw(2, rng)) for i in order[2 * (step % 3) :][:2]]
        for logits in model.logits([pair for group in batch for pair in group]).view(2, 3):
            losses.append(torch.logsumexp(logits, 0) - logits[0])
        weights = list(model.model.parameters())
        slopes = torch.autograd.grad(torch.stack(losses).mean(), weights, allow_unused=True)
        length = torch.sqrt(sum((slope**2).sum() for slope in slopes if slope is not None))  # type: ignore[arg-type]
        for weight, slope in zip(weights, slopes, strict=True):
            weight.grad = None if slope is None else slope * min(1.0, 1 / float(length))
        optimiser.step()
    for name, value in model.model.state_dict().items():
        if name.endswith(("key.bias", "classifier.bias")):  # no slope but rounding, which Adam makes large
            continue
        torch.testing.assert_close(trained[name], value, atol=1e-4, rtol=1e-3)


def test_wrong_documents_come_from_the_searcher_and_are_never_right(encoder: Path) -> None:
    documents = tiny.make_documents(10)
    base = Fixed(["d3", "d1", "d4", "d5", "d9"])
    rerank = Rerank(documents, base, Length(), settings=RerankSettings(depth=4))  # type: ignore[arg-type]
    groups = rerank._groups([("q", "d1"), ("q", "d3"), ("r", "d9")])
    texts = {document.content: document.doc_id for document in documents}
    rng = np.random.default_rng(0)
    drawn = [[texts[text] for _, text in group.draw(2, rng)] for group in groups for _ in range(40)]
    assert [rows[0] for rows in drawn] == ["d1"] * 40 + ["d3"] * 40 + ["d9"] * 40
    # d1 and d3 are both right for q, so that only two wrong hits are left.
    assert {frozenset(rows[1:]) for rows in drawn[:80]} == {frozenset({"d4", "d5"})}
    assert {name for rows in drawn[80:] for name in rows[1:]} == {"d3", "d1", "d4", "d5"}
    assert all(len(set(rows)) == 3 for rows in drawn)
    filled = [[texts[text] for _, text in groups[0].draw(6, rng)] for _ in range(40)]
    assert all(len(rows) == 7 and {"d4", "d5"} <= set(rows) and not {"d1", "d3"} & set(rows[1:]) for rows in filled)
    assert {name for rows in filled for name in rows} == {f"d{i}" for i in range(10)} - {"d3"}
    assert [query for query, _ in groups[2].draw(1, rng)] == ["r", "r"]


def test_the_loss_is_the_cross_entropy_of_the_right_document(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = tiny.make_documents(8)
    seen: list[tuple[torch.Tensor, float]] = []
    real = torch.nn.functional.cross_entropy

    def spy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = real(logits, target)
        seen.append((logits.detach().clone(), loss.item()))
        return loss

    monkeypatch.setattr(torch.nn.functional, "cross_entropy", spy)
    pairs = [("apple", "d0"), ("ship", "d1"), ("song", "d2")]
    chosen = with_encoder(encoder, epochs=1, batch_size=2, negatives=4)
    Rerank.train(documents, pairs, base=BM25(documents), out=tmp_path, settings=chosen)
    assert sorted(len(logits) for logits, _ in seen) == [1, 2]
    for logits, loss in seen:
        assert logits.shape[1] == 5
        shares = np.exp(logits.double().numpy())
        assert loss == pytest.approx(-np.log(shares[:, 0] / shares.sum(axis=1)).mean(), abs=1e-5)


def test_mistakes_are_named(encoder: Path, tmp_path: Path) -> None:
    documents = tiny.make_documents(3)
    chosen = with_encoder(encoder, epochs=1)
    with pytest.raises(DataError, match="there are none"):
        Rerank.train(documents, [], base=BM25(documents), out=tmp_path, settings=chosen)
    with pytest.raises(DataError, match="'gone'"):
        Rerank.train(documents, [("q", "gone")], base=BM25(documents), out=tmp_path, settings=chosen)
    with pytest.raises(DataError, match="more documents"):
        Rerank.train(documents[:1], [("q", "d0")], base=BM25(documents[:1]), out=tmp_path, settings=chosen)
    with pytest.raises(DataError, match="'d2'"):
        Rerank(documents[:2], Fixed(["d2"]), Length()).search("q")  # type: ignore[arg-type]
    with pytest.raises(IndexNotFoundError, match="COMPLETE"):
        Rerank.load(tmp_path, documents, base=BM25(documents))
    with pytest.raises(ConfigError, match="-k"):
        Rerank(documents, Fixed([]), Length()).search("q", k=0)  # type: ignore[arg-type]
    for wrong in ({"depth": 0}, {"negatives": 0}, {"lr": 0.0}, {"max_length": 3}, {"precision": "fp8"}):
        with pytest.raises(ConfigError, match="rerank"):
            RerankSettings(**wrong)
