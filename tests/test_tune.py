from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tiny import make_documents, make_encoder, make_queries
from torch import Tensor

from nci import contrastive, tune
from nci.config import EmbedConfig, TuneConfig
from nci.contrastive import Mined, embed, embed_all, kept_tokens, late_scores, mine, read
from nci.contrastive_data import Batch, ContrastSettings, Passages, Tokens, split_epoch
from nci.embed import embed_documents
from nci.encoders import ForeignEncoder, TextEncoder, read_settings
from nci.errors import ConfigError, DataError, NciError
from nci.pieces import special_pieces
from nci.records import Document
from nci.runtime import quiet

DOCUMENTS = make_documents(24)
SEEN, UNSEEN = DOCUMENTS[:16], DOCUMENTS[16:]
PAIRS = make_queries(SEEN, seed=2, each=2)
GENERATED = make_queries(UNSEEN, seed=7, each=3)
EMBED = EmbedConfig(max_length=32)


def tuned(
    encoder: Path,
    out: Path,
    *,
    documents: list[Document] = DOCUMENTS,
    pairs: list[tuple[str, str]] = PAIRS,
    generated: list[tuple[str, str]] | None = None,
    share: float = 1.0,
    reading: EmbedConfig = EMBED,
    **changes: Any,
) -> Path:
    settings: dict[str, Any] = {"epochs": 1, "batch_size": 8, "lr": 2e-3, "negatives": 2, "generated": share}
    return tune.tune_encoder(
        documents,
        pairs,
        encoder=encoder,
        out=out,
        config=TuneConfig(**(settings | changes)),
        embed=reading,
        generated=generated or (),
        device="cpu",
    )


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def first_hits(folder: Path, pairs: list[tuple[str, str]]) -> float:
    """R@1 by the vectors that search would use."""
    encoder = TextEncoder.load(folder, normalise=True, max_length=32)
    stored = encoder.encode([document.content for document in DOCUMENTS], role="document")
    asked = encoder.encode([text for text, _ in pairs], role="query")
    best = (asked @ stored.T).argmax(axis=1)
    return float(np.mean([DOCUMENTS[row].doc_id == doc_id for row, (_, doc_id) in zip(best, pairs, strict=True)]))


# ---- what comes out


@pytest.mark.slow
@pytest.mark.parametrize("refreshes", [0, 2])
def test_more_documents_are_found_first(encoder: Path, tmp_path: Path, refreshes: int) -> None:
    held_out = [pair for pair in make_queries(DOCUMENTS, seed=9, each=6) if "item" in pair[0]]
    pairs = make_queries(DOCUMENTS, seed=3, each=6)
    folder = tuned(encoder, tmp_path / "out", pairs=pairs, epochs=4, refreshes=refreshes)
    assert first_hits(folder, held_out) > first_hits(encoder, held_out) + 0.2


@pytest.mark.slow
def test_generated_queries_teach_documents_without_real_ones(encoder: Path, tmp_path: Path) -> None:
    held_out = [pair for pair in make_queries(UNSEEN, seed=9, each=6) if "item" in pair[0]]
    generated = make_queries(UNSEEN, seed=3, each=8)
    without, beside = (
        first_hits(tuned(encoder, tmp_path / str(share), generated=generated, share=share, epochs=4), held_out)
        for share in (0.0, 1.0)
    )
    assert beside > without + 0.2


# ---- late interaction


def close_scores(folder: Path, pairs: list[tuple[str, str]]) -> torch.Tensor:
    """Late interaction of the texts of pairs with all documents."""
    encoder = TextEncoder.load(folder, normalise=True, max_length=32)
    texts, contents = [text for text, _ in pairs], [document.content for document in DOCUMENTS]
    special = torch.tensor(special_pieces(encoder.tokenizer))
    with torch.no_grad():
        (asked,), seen = (
            read(encoder, Tokens.of(encoder.tokenize(part)), np.arange(len(part)), at_once=size)
            for part, size in ((texts, len(texts)), (contents, 7))
        )
        return late_scores(asked, seen, special)


def test_late_scores_are_means_of_the_best_cosines(encoder: Path) -> None:
    reader = TextEncoder.load(encoder, max_length=32)
    special = special_pieces(reader.tokenizer)

    def pieces(text: str, *, query: bool) -> NDArray[np.float32]:
        (row,) = reader.tokenize([text])
        ids, mask = reader.pad([row])
        with torch.no_grad():
            states = reader.model(input_ids=ids, attention_mask=mask).last_hidden_state[0].numpy()
        kept = [place for place, token in enumerate(row) if not (query and token in special)]
        return states[kept] / np.linalg.norm(states[kept], axis=1, keepdims=True)

    found = close_scores(encoder, PAIRS[:5]).numpy()
    for (text, _), scores in zip(PAIRS[:5], found, strict=True):
        asked = pieces(text, query=True)
        wanted = [(asked @ pieces(each.content, query=False).T).max(1).mean() for each in DOCUMENTS]
        np.testing.assert_allclose(scores, wanted, atol=1e-5)


@pytest.mark.slow
def test_a_second_loss_teaches_late_interaction(encoder: Path, tmp_path: Path) -> None:
    rows = torch.tensor([[document.doc_id for document in DOCUMENTS].index(doc_id) for _, doc_id in PAIRS])

    def likely(folder: Path) -> float:
        scores = close_scores(folder, PAIRS) / 0.02
        return float(scores.log_softmax(1).gather(1, rows.unsqueeze(1)).mean())

    without, beside = (likely(tuned(encoder, tmp_path / str(late), late=late, epochs=8)) for late in (0.0, 1.0))
    assert beside > without + 0.05


@pytest.mark.parametrize("normalise", [True, False])
def test_stored_vectors_are_those_that_were_trained(
    monkeypatch: pytest.MonkeyPatch, encoder: Path, tmp_path: Path, normalise: bool
) -> None:
    original = TextEncoder.load(encoder)
    prompts = {"query": "of ", "document": "the "}
    original.settings = dataclasses.replace(original.settings, pooling="cls", prompts=prompts)
    (tmp_path / "original").mkdir()
    with quiet():
        original.save(tmp_path / "original")
    passages: list[Passages] = []
    trained: list[TextEncoder] = []

    def record(*arguments: Any) -> None:
        contrastive.train_encoder(*arguments)
        trained.append(arguments[0])
        passages.append(arguments[2])

    monkeypatch.setattr(tune, "train_encoder", record)
    long = [dataclasses.replace(SEEN[0], text=SEEN[0].text * 2), *SEEN[1:]]  # more than max_length
    reading = EmbedConfig(encoder=str(tmp_path / "out"), max_length=12, normalise=normalise)
    folder = tuned(tmp_path / "original", tmp_path / "out", documents=long, reading=reading)
    expected = embed_all(trained[0], passages[0].tokens, ContrastSettings(precision="fp32")).numpy()
    vectors = embed_documents(long, tmp_path / "vectors", reading, progress=False)
    if not normalise:
        assert not np.allclose(vectors, expected, atol=1e-3)
        vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    said = read_settings(folder)
    assert (said.pooling, said.normalise, dict(said.prompts)) == ("cls", normalise, prompts)
    assert not np.allclose(TextEncoder.load(tmp_path / "original").encode(["ship"]), trained[0].encode(["ship"]))


def test_without_epochs_the_encoder_is_left_alone(encoder: Path, tmp_path: Path) -> None:
    assert tuned(encoder, tmp_path / "out", epochs=0, pairs=[]) == encoder
    assert not (tmp_path / "out").exists()


# ---- which documents are negatives


@pytest.mark.slow
def test_documents_without_pairs_have_no_influence(encoder: Path, tmp_path: Path) -> None:
    rounds = {"refreshes": 2, "epochs": 1}
    corpus = tuned(encoder, tmp_path / "corpus", **rounds)
    alone = tuned(encoder, tmp_path / "alone", documents=SEEN, **rounds)
    assert weights(corpus) == weights(alone)
    beside = tuned(encoder, tmp_path / "beside", generated=GENERATED, **rounds)
    assert weights(corpus) != weights(beside)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_mined_negatives_have_pairs_of_their_own(
    monkeypatch: pytest.MonkeyPatch, encoder: Path, tmp_path: Path, share: float
) -> None:
    mined: list[Mined] = []

    def record(*arguments: Any, **options: Any) -> Mined:
        mined.append(mine(*arguments, **options))
        return mined[-1]

    monkeypatch.setattr(contrastive, "mine", record)
    tuned(encoder, tmp_path / "out", refreshes=1, generated=GENERATED, share=share)
    covered = len(DOCUMENTS) if share else len(SEEN)
    assert set(mined[1].candidates.ravel().tolist()) == {-1, *range(covered)}


def test_a_share_of_the_generated_queries_is_drawn_by_seed() -> None:
    generated = [(f"q{number}", "d0") for number in range(2000)]

    def drawn(share: float, seed: int = 0) -> list[tuple[str, str]]:
        return tune._draw(generated, TuneConfig(generated=share, seed=seed))

    assert (drawn(0.0), drawn(1.0)) == ([], generated)
    assert 150 < len(drawn(0.1)) < 250
    assert drawn(0.1) == drawn(0.1) != drawn(0.1, seed=1)
    assert {drawn(2.5).count(pair) for pair in generated[:20]} == {2, 3}


# ---- same input, same weights


@pytest.mark.slow
def test_the_same_seed_gives_the_same_weights(encoder: Path, tmp_path: Path) -> None:
    def bits(name: str, **changes: Any) -> bytes:
        torch.manual_seed(len(name))  # the state of others must not matter
        return weights(tuned(encoder, tmp_path / name, refreshes=1, generated=GENERATED, share=0.5, **changes))

    first = bits("a")
    assert bits("again") == first
    assert len({first, bits("seed", seed=1), bits("lr", lr=1e-3), bits("more", negatives=3)}) == 4


@pytest.mark.slow
@pytest.mark.parametrize("late", [0.0, 1.0])
def test_what_is_not_kept_for_the_gradients_is_read_again_with_the_same_result(
    monkeypatch: pytest.MonkeyPatch, encoder: Path, tmp_path: Path, late: float
) -> None:
    passes: list[bool] = []
    real = contrastive.token_states

    def counted(*given: Any) -> Tensor:
        passes.append(torch.is_grad_enabled())
        return real(*given)

    monkeypatch.setattr(contrastive, "token_states", counted)
    found = []
    for keep in (float("inf"), 300.0, 0.0):
        monkeypatch.setattr(contrastive, "kept_tokens", lambda encoder, bf16, keep=keep: keep)
        passes.clear()
        found.append((weights(tuned(encoder, tmp_path / str(keep), refreshes=1, late=late)), sum(passes)))
    (whole, once), (partly, more), (nothing, most) = found
    assert whole == partly == nothing
    assert once < more < most


def test_a_sixth_of_the_memory_is_kept(monkeypatch: pytest.MonkeyPatch, encoder: Path) -> None:
    reader = TextEncoder.load(encoder)
    reader.model.config.num_hidden_layers, reader.model.config.hidden_size = 6, 384
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 6 * 2**20}.__getitem__)
    assert kept_tokens(reader, bf16=True) == pytest.approx(2**32 / (160 * 6 * 384))
    reader.model.config.num_hidden_layers = 12
    assert kept_tokens(reader, bf16=True) == pytest.approx(2**32 / (160 * 12 * 384))


def test_a_part_that_is_read_again_leaves_room_for_the_others(monkeypatch: pytest.MonkeyPatch, encoder: Path) -> None:
    reader, again = TextEncoder.load(encoder), []
    tokens = Tokens.of([[5] * 40, [5] * 12, [5] * 12])
    real = contrastive.checkpoint

    def counted(*given: Any, **options: Any) -> Any:
        again.append(given[0].args[1].shape[1])  # of a partial: model, ids, mask
        return real(*given, **options)

    monkeypatch.setattr(contrastive, "checkpoint", counted)
    read(reader, tokens, np.arange(3), at_once=1, keep=30)
    assert again == [40]


def test_a_killed_run_goes_on_after_its_last_round(
    monkeypatch: pytest.MonkeyPatch, encoder: Path, tmp_path: Path
) -> None:
    whole = tuned(encoder, tmp_path / "whole", refreshes=2)
    real, rounds = contrastive.train_round, []

    def dying(*arguments: Any, number: int) -> None:
        rounds.append(number)
        real(*arguments, number=number)
        if rounds == [0, 1, 2]:
            raise KeyboardInterrupt

    monkeypatch.setattr(contrastive, "train_round", dying)
    out = tmp_path / "killed"
    with pytest.raises(KeyboardInterrupt):
        tuned(encoder, out, refreshes=2)
    assert not out.exists()
    with monkeypatch.context() as patch:
        patch.setattr(tune.os, "replace", lambda *_: 1 / 0)  # killed again, when all is trained
        with pytest.raises(ZeroDivisionError):
            tuned(encoder, out, refreshes=2)
    assert rounds == [0, 1, 2, 2]
    assert tuned(encoder, out, refreshes=2) == out
    assert rounds == [0, 1, 2, 2]
    assert {path.name: path.read_bytes() for path in whole.rglob("*.*") if path.is_file()} == {
        path.name: path.read_bytes() for path in out.rglob("*.*") if path.is_file()
    }
    assert (out / "COMPLETE").read_text() == (whole / "COMPLETE").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["killed", "whole"]


def test_only_what_has_changed_is_tuned_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rounds: list[int] = []
    monkeypatch.setattr(contrastive, "train_round", lambda *_, number: rounds.append(number))
    encoder, out = make_encoder(tmp_path / "encoder"), tmp_path / "out"
    unseen = [*SEEN, dataclasses.replace(UNSEEN[0], text="ship"), *UNSEEN[1:]]
    seen = [dataclasses.replace(SEEN[0], text="ship"), *DOCUMENTS[1:]]
    out.mkdir()  # an empty folder will do
    for changes, times in (
        ({}, 1),
        ({"documents": unseen}, 0),
        ({"documents": seen}, 1),
        ({"pairs": PAIRS[1:]}, 1),
        ({"pairs": PAIRS[1:], "generated": GENERATED, "share": 0.0}, 1),
        ({"generated": GENERATED}, 1),
        ({"reading": EmbedConfig(max_length=16)}, 1),
        ({"reading": EmbedConfig(max_length=16, batch_size=3)}, 0),
        ({"reading": EmbedConfig(max_length=16, pooling="cls")}, 1),
    ):
        rounds.clear()
        assert tuned(encoder, out, **changes) == out  # type: ignore[arg-type]
        assert len(rounds) == times, changes
    rounds.clear()
    (make_encoder(tmp_path / "other", seed=1) / "model.safetensors").replace(encoder / "model.safetensors")
    tuned(encoder, out)
    assert rounds == [0]


# ---- batches


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 9), st.integers(0, 5))
def test_an_epoch_has_every_pair_once(lengths: list[int], batch_size: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    batches = split_epoch(np.array(lengths), len(lengths), batch_size, random)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
    assert max(map(len, batches)) <= batch_size
    assert len(batches) == -(-len(lengths) // batch_size)


def test_batches_have_documents_of_similar_length_but_not_of_one() -> None:
    random = np.random.default_rng(0)
    of_document = random.integers(8, 257, 3000)
    documents = np.repeat(np.arange(3000), 4)
    lengths = of_document[documents]
    batches = split_epoch(lengths, 3000, 32, random)
    assert sum(len(batch) * int(lengths[batch].max()) for batch in batches) < 1.25 * lengths.sum()
    few = split_epoch(lengths[:400], 100, 32, random)  # 100 documents with 4 pairs each
    different = [len(set(documents[batch].tolist())) / len(batch) for batch in few]
    assert np.mean(different) > 0.75
    assert [batch.tolist() for batch in batches] != [batch.tolist() for batch in split_epoch(lengths, 3000, 32, random)]


def test_columns_by_length_mean_the_same() -> None:
    nothing = [np.array([3, 0]), np.array([2]), np.array([], np.int64)]
    batch = Batch.make(np.array([1, 4, 1]), nothing, [frozenset({1, 3}), frozenset({4}), frozenset({1})], np.arange(5))
    lengths = np.array([5, 9, 7, 9, 2])
    ordered = batch.by_length(lengths)
    assert ordered.passages.tolist() == [1, 3, 2, 0, 4]
    assert ordered.passages[ordered.targets].tolist() == [1, 4, 1]
    for row in range(3):
        assert set(ordered.passages[ordered.forbidden[row]]) == set(batch.passages[batch.forbidden[row]])


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_padding_changes_no_vector(tmp_path: Path, kind: str) -> None:
    model = TextEncoder.load(make_encoder(tmp_path, kind=kind), normalise=True)
    texts = ["ship", "the wave and the tide of the storm", "", "ripe pear"]
    tokens = Tokens.of(model.tokenize(texts))
    expected = np.concatenate([model.encode([text]) for text in texts])
    for at_once in (1, 3, 4):
        found = embed(model, tokens, np.array([2, 1, 3, 0]), at_once=at_once).detach().numpy()
        np.testing.assert_allclose(found, expected[[2, 1, 3, 0]], atol=1e-6)
    ids, mask = tokens.padded(np.array([1, 0]), 9)
    theirs, their_mask = model.pad([tokens[1].tolist(), tokens[0].tolist()])
    assert np.where(mask, ids, 0).tolist() == theirs.tolist()
    assert mask.tolist() == their_mask.bool().tolist()
    assert set(ids[~mask].tolist()) == {9}


# ---- mistakes


def test_wrong_input_is_refused_and_nothing_is_written(
    monkeypatch: pytest.MonkeyPatch, encoder: Path, tmp_path: Path
) -> None:
    def refused(error: type[NciError], said: str, **changes: Any) -> None:
        with pytest.raises(error, match=said):
            tuned(encoder, tmp_path / "out", **changes)
        assert not list(tmp_path.iterdir())

    refused(DataError, "'gone'", pairs=[*PAIRS, ("pear", "gone")])
    refused(DataError, "'gone'", generated=[("pear", "gone")])
    refused(DataError, "there are none", pairs=[])
    refused(DataError, "there are none", pairs=[], generated=GENERATED, share=0.0)
    refused(DataError, "same doc_id", documents=[*DOCUMENTS, DOCUMENTS[0]])
    monkeypatch.setattr(TextEncoder, "load", lambda *_, **__: object.__new__(ForeignEncoder))
    refused(ConfigError, "layers beyond")


def test_no_other_folder_is_overwritten(tmp_path: Path) -> None:
    encoder = make_encoder(tmp_path / "mine" / "encoder")
    before = weights(encoder)
    for out in (encoder, encoder.parent):
        with pytest.raises(ConfigError, match="another folder"):
            tuned(encoder, out)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("precious")
    for out in (tmp_path / "out", tmp_path / "out" / "notes.txt"):
        with pytest.raises(ConfigError, match="something else"):
            tuned(encoder, out)
    assert weights(encoder) == before
    assert (tmp_path / "out" / "notes.txt").read_text() == "precious"
