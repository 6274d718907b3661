"""Windows behind the opening of long documents: their texts, their pieces, what they count, and an index that has them."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_late import (
    WINDOWS,
    MakeEngine,
    engine_maker,
    many_texts,
    nearer_by_hand,
    random_pieces,
    random_queries,
    windows_of,
    with_windows,
)
from tiny import make_documents, tiny_config
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import nci
from nci.calibrate import Calibration, fit, gather
from nci.config import EmbedConfig, ModelConfig
from nci.embed import embed_documents
from nci.encoders import TextEncoder
from nci.errors import ConfigError, DataError
from nci.hubs import find_hubs
from nci.index import Index
from nci.making import Making
from nci.pieces import PieceVectors, encode_pieces, find_projection
from nci.records import Document
from nci.search.late import LateScores
from nci.structure import check_structure
from nci.training_data import TrainingData
from nci.windows import further_windows

ALPHABET = {letter: place for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
LENGTH = 12  # word pieces that the encoder reads at once, two of them around the text


@pytest.fixture
def make_engine(make_model: Any, tokenizer: Any, unit_vectors: Any) -> MakeEngine:
    return engine_maker(make_model, tokenizer, unit_vectors)


@pytest.fixture(scope="module")
def reader(encoder: Path) -> TextEncoder:
    return TextEncoder.load(encoder, max_length=LENGTH)


def words(count: int, start: int = 0) -> list[str]:
    every = sorted({word for document in make_documents() for word in document.text.split()})
    return [every[(start + place) % len(every)] for place in range(count)]


def tokens(reader: TextEncoder, text: str) -> list[int]:
    return list(reader.tokenizer(text, add_special_tokens=False)["input_ids"])


# ---- texts


@settings(max_examples=60, deadline=None, derandomize=True)
@given(count=st.integers(0, 60), title=st.integers(0, 5), most=st.integers(0, 8))
def test_opening_and_windows_are_the_whole_text_once(reader: TextEncoder, count: int, title: int, most: int) -> None:
    heading = " ".join(words(title, 40))
    text = Document("a", " ".join(words(count)), heading).content
    (found,) = further_windows([text], reader, most)
    above = tokens(reader, heading)
    above = above if len(above) <= (LENGTH - 2) / 4 else []
    opening = reader.tokenize([text])[0][1:-1]
    behind = [tokens(reader, window) for window in found]
    assert all(window[: len(above)] == above for window in behind)
    assert all(len(window) <= LENGTH - 2 for window in behind)
    every, read = tokens(reader, text), [*opening, *(t for window in behind for t in window[len(above) :])]
    assert read == every[: len(read)]
    assert len(found) <= most
    assert len(found) == most or read == every, "all of it, if windows are left"


def test_a_long_first_line_is_no_heading(reader: TextEncoder) -> None:
    line, rest = words(9), words(20, 20)
    (found,) = further_windows(["\n".join([" ".join(line), " ".join(rest)])], reader, 9)
    assert found[0].split() == [*line, *rest][10:20]


def test_a_tokenizer_that_reads_newlines(reader: TextEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of bytes: the newline behind a heading is a piece, and no window is longer than what is read."""
    bytewise = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab=ALPHABET, merges=[])))
    bytewise.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    monkeypatch.setattr(reader, "tokenizer", bytewise)
    text = "a\n" + "0123456789" * 5
    (found,) = further_windows([text], reader, 9)
    assert found[:2] == ["a\n901234567", "a\n890123456"]
    assert all(len(tokens(reader, window)) < LENGTH for window in found)
    assert "".join([text[: LENGTH - 1], *(window[2:] for window in found)]) == text


def test_prompts_leave_less_room(reader: TextEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    text = " ".join(words(20))
    assert [len(tokens(reader, window)) for window in further_windows([text], reader, 9)[0]] == [10]
    monkeypatch.setattr(TextEncoder, "prompt", lambda self, role: {"document": "the of "}[role])
    assert [len(tokens(reader, window)) for window in further_windows([text], reader, 9)[0]] == [8, 4]


def test_a_tokenizer_that_knows_no_places_gives_none(reader: TextEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(reader.tokenizer), "is_fast", False)
    assert further_windows([" ".join(words(50)), "moon"], reader, 9) == [[], []]


# ---- pieces


def long_documents() -> list[Document]:
    """Every third is read at once."""
    documents = make_documents()
    return [
        dataclasses.replace(each, text=" ".join(each.text.split()[:4] if not i % 3 else words(14 + i % 17, 3 * i)))
        for i, each in enumerate(documents)
    ]


def test_pieces_of_windows_are_those_of_their_texts(reader: TextEncoder) -> None:
    texts = [document.content for document in long_documents()]
    projection = find_projection(reader, texts, 8)
    told: list[int] = []
    plain = encode_pieces(reader, texts, projection)
    found = encode_pieces(reader, texts, projection, windows=3, batch_size=7, progress=told.append)
    assert sum(told) == len(texts), "windows are not counted as documents"
    np.testing.assert_allclose(found["vectors"], plain["vectors"], atol=1e-5)
    np.testing.assert_array_equal(found["lengths"], plain["lengths"])
    assert np.abs(found["codes"].astype(int) - plain["codes"]).max() <= 1
    windows = further_windows(texts, reader, 2)
    assert found["further_counts"].tolist() == [len(each) for each in windows]
    assert set(found["further_counts"].tolist()) >= {0, 1, 2}
    alone = [encode_pieces(reader, each, projection)["codes"] for each in windows if each]
    assert found["further_lengths"].tolist() == [len(t) for each in windows for t in reader.tokenize(each)]
    assert np.abs(found["further_codes"].astype(int) - np.concatenate(alone)).max() <= 1


def test_shards_with_and_without_long_documents(tmp_path: Path, encoder: Path) -> None:
    config = EmbedConfig(encoder=str(encoder), max_length=LENGTH, shard_size=10, pieces=8, windows=3)
    short = [dataclasses.replace(each, title="", text="moon star") for each in make_documents()[:10]]
    documents = [*short, *long_documents()[10:30], *short]
    embed_documents(documents, tmp_path, config)
    further = PieceVectors.load(tmp_path / "pieces").further
    assert further is not None
    assert further.counts[:10].sum() == further.counts[30:].sum() == 0
    assert further.counts[10:30].sum() == len(further.lengths) > 10
    assert further.lengths.sum() == len(further.codes) > 100
    embed_documents(short, tmp_path / "short", config)
    assert PieceVectors.load(tmp_path / "short" / "pieces").further is None
    embed_documents(documents, tmp_path, dataclasses.replace(config, windows=1))
    assert PieceVectors.load(tmp_path / "pieces").further is None, "what other settings left is not read"


def test_a_tokenizer_without_places_is_told(
    tmp_path: Path, encoder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PreTrainedTokenizerFast, "is_fast", False)
    config = EmbedConfig(encoder=str(encoder), max_length=LENGTH, pieces=8, windows=3)
    embed_documents(long_documents(), tmp_path, config)
    assert PieceVectors.load(tmp_path / "pieces").further is None
    assert "cannot cut texts into windows" in caplog.text
    caplog.clear()
    embed_documents(long_documents(), tmp_path, dataclasses.replace(config, windows=1))
    assert "cannot cut texts into windows" not in caplog.text


def test_they_are_kept_in_any_order(tmp_path: Path) -> None:
    counts = [2, 0, 3, 0, 1]
    pieces = with_windows(random_pieces([3, 1, 2, 4, 2], 6, 4), counts, seed=1)
    order = np.array([3, 0, 4, 2, 1])
    moved = pieces.in_order(order)
    moved.save(tmp_path)
    again = PieceVectors.load(tmp_path)
    assert again.further is not None
    assert again.further.counts.tolist() == [counts[i] for i in order]
    for place, number in enumerate(order):
        mine, wanted = windows_of(again, place), windows_of(pieces, number)
        assert len(mine) == len(wanted) == counts[number]
        for one, two in zip(mine, wanted, strict=True):
            np.testing.assert_array_equal(one.codes, two.codes)
    np.testing.assert_array_equal(
        again.further.codes, np.concatenate([each.codes for n in order for each in windows_of(pieces, n)])
    )


@pytest.mark.parametrize(
    ("name", "cut"), [("codes", np.s_[:-1]), ("codes", np.s_[:, :-1]), ("lengths", np.s_[:-1]), ("counts", np.s_[:-1])]
)
def test_windows_that_do_not_fit_are_refused(tmp_path: Path, name: str, cut: Any) -> None:
    with_windows(random_pieces([3, 1, 2], 6, 4), [2, 0, 1], seed=1).save(tmp_path)
    file = tmp_path / "further" / f"{name}.npy"
    np.save(file, np.load(file)[cut])
    with pytest.raises(DataError, match="build the index again"):
        PieceVectors.load(tmp_path)


def test_numbers_that_make_no_sense() -> None:
    with pytest.raises(ConfigError, match=r"--embed\.windows"):
        EmbedConfig(windows=0)
    for share in (-0.1, 1.5):
        with pytest.raises(ConfigError, match=r"--model\.further is a share"):
            ModelConfig(further=share)


def test_what_another_number_of_windows_redoes(encoder: Path) -> None:
    """All pieces; not the tuning of the encoder; nothing where no pieces are kept."""

    def keys(**embed: int) -> tuple[str, str]:
        making = Making(None, "corpus", tiny_config(encoder, embed=embed), engine="local", device="cpu")  # type: ignore[arg-type]
        return making.tune_key(TrainingData()), making.embed_key(TrainingData())

    one, four = keys(pieces=8, windows=1), keys(pieces=8, windows=4)
    assert one[0] == four[0]
    assert one[1] != four[1]
    assert keys(pieces=0, windows=1) == keys(pieces=0, windows=4)


# ---- what they count


@pytest.mark.parametrize("counts", [[2, 0, 3, 0, 1, 0], [0, 0, 0, 5, 0, 0], [4, 0, 0, 0, 0, 0], [1] * 6], ids=str)
@pytest.mark.parametrize("device", ["cpu", "elsewhere"])
def test_a_document_gains_by_the_best_of_its_windows(counts: list[int], device: str) -> None:
    """On a CPU, and the way of a GPU on this device."""
    asked = random_queries([6, 2, 4], 8)
    pieces = with_windows(random_pieces([4, 1, 7, 2, 5, 3], 8, 5), counts, seed=2)
    wanted = nearer_by_hand(pieces, asked)
    assert (wanted > 0).any()
    assert (wanted[:, np.array(counts) == 0] == 0).all()
    late = LateScores(pieces, [0, 1, 2], candidates=6, device="cpu")
    assert late.windows is not None
    late.device = late.windows.late.device = device
    chosen, above, nearer = late.best(torch.randn(3, 6), asked)
    assert nearer is not None
    np.testing.assert_allclose(nearer.numpy(), np.take_along_axis(wanted, chosen.numpy(), axis=1), atol=2e-5)
    plain = LateScores(dataclasses.replace(pieces, further=None), [0, 1, 2], candidates=6, device="cpu")
    torch.testing.assert_close(
        above, plain.best(torch.zeros(3, 6).scatter(1, chosen, -torch.arange(6.0).expand(3, -1)), asked).above
    )


def test_candidates_without_any_window_gain_nothing() -> None:
    asked = random_queries([3, 2], 8)
    pieces = with_windows(random_pieces([4, 1, 7, 2], 8, 5), [0, 0, 0, 2], seed=2)
    late = LateScores(pieces, [0, 1, 2], candidates=2, device="cpu")
    scores = torch.tensor([[3.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0]])
    _, _, nearer = late.best(scores, asked)
    assert nearer is not None
    assert nearer[0].tolist() == [0.0, 0.0]


def test_int8_finds_nearly_the_same() -> None:
    asked = random_queries([6, 2, 4], 20)
    pieces = with_windows(random_pieces([4, 1, 7, 2, 5, 3], 20, 16), [2, 1, 0, 4, 1, 3], seed=3)
    scores = torch.randn(3, 6)
    small, exact = (
        LateScores(pieces, [0, 1, 2], precision=precision, candidates=6, device="cpu").best(scores, asked).nearer
        for precision in ("int8", "fp32")
    )
    assert small is not None
    assert exact is not None
    torch.testing.assert_close(small, exact, atol=0.02, rtol=0)
    assert not torch.equal(small, exact), "codes are rounded"


def test_windows_do_not_count_where_the_share_is_none(make_engine: MakeEngine) -> None:
    some, none = make_engine(windows=WINDOWS, further=0.5), make_engine(windows=WINDOWS, further=0.0)
    assert some.late is not None
    assert none.late is not None
    assert (some.late.windows is None, none.late.windows is None) == (False, True)
    assert none.encode(["moon"]).nearer is None


@pytest.mark.parametrize("share", [0.2, 1.0])
def test_the_evidence_gives_the_scores_of_the_model(make_engine: MakeEngine, share: float) -> None:
    engine, texts = make_engine(windows=WINDOWS, further=share, bias=False), many_texts(9)
    evidence = gather(engine, texts, np.zeros(9, int), np.ones(11, int))
    assert evidence.nearer is not None
    start = engine.model.anchor_weights.tolist()  # type: ignore[union-attr]
    odds = torch.logit(torch.tensor(share), eps=1e-6).item()
    weights = torch.tensor([*start, 0.0, 0.0, 0.0, np.log(6.0), 0.0, 0.0, odds]).float()
    wanted = [[part["content"] for part in engine.explain(text, range(11))] for text in texts]
    np.testing.assert_allclose(evidence.scores(weights).numpy(), wanted, atol=1e-3)


def test_the_share_is_what_the_queries_say(make_engine: MakeEngine) -> None:
    """Asked for the document whose window is nearest, it is large; where windows are noise, it is small."""
    engine, texts = make_engine(windows=WINDOWS, further=1.0, candidates=11), many_texts(300)
    evidence = gather(engine, texts, np.zeros(300, int), np.ones(11, int))
    assert evidence.late is not None
    assert evidence.nearer is not None
    best = (evidence.late + evidence.nearer).argmax(1).numpy()
    found, _ = fit(engine, texts, best, np.ones(11, int))
    assert found.further > 0.75
    assert found.drawn_by[4] > 0.75
    found, _ = fit(engine, texts, (evidence.late - evidence.nearer).argmax(1).numpy(), np.ones(11, int))
    assert found.further < 0.25


def test_hubs_are_found_with_windows(make_engine: MakeEngine) -> None:
    engine, known = make_engine(windows=WINDOWS, further=1.0), [(text, i % 11) for i, text in enumerate(many_texts(30))]
    weights = (1.0, 1.0, 6.0, 0.0)
    none, some = (find_hubs(engine, known, (*weights, share)) for share in (0.0, 1.0))
    assert np.abs(none - some).max() > 1e-2


def test_documents_need_not_move_for_hubs_to_be_found_by_moves() -> None:
    """The pipeline reads training queries where either does."""
    assert Calibration(1.0, 1.0, 0.0, 1.0, moves=0.2).reads_queries
    assert Calibration(1.0, 1.0, 0.0, 1.0, drawn_by=(1.0, 1.0, 1.0, 0.2, 0.0)).reads_queries
    assert not Calibration(1.0, 1.0, 0.0, 1.0, drawn_by=(1.0, 1.0, 1.0, 0.0, 0.7), further=0.7).reads_queries


def test_the_line_names_them() -> None:
    said = str(Calibration(13.394, 10.002, 0.072, 0.4477, -1.688, 21.756, further=0.333))
    assert "word pieces 21.76 (further windows 0.33), decoder" in said


# ---- an index


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory, encoder: Path) -> Callable[..., Path]:
    """Documents whose queries ask for words behind the opening."""
    documents = [
        {"id": f"d{i}", "title": f"item{i}", "text": " ".join([*["the of"] * 6, *words(9, 5 * i)])} for i in range(40)
    ]
    queries = [(" ".join(words(3, 5 * i + shift)), f"d{i}") for i in range(40) for shift in (0, 2, 4, 5)]

    def build(**changes: Any) -> Path:
        folder = tmp_path_factory.mktemp("index") / "my.index"
        config = tiny_config(encoder, **{"embed": {"pieces": 8, "max_length": LENGTH, "windows": 3}, **changes})
        nci.build(documents, folder, config, queries=queries)
        return folder

    return build


@pytest.mark.slow
def test_calibration_says_what_they_count(make: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="nci")
    folder = make(calibrate={"share": 0.4, "least": 4}, model={"score": "dense"})
    index = Index(folder)
    report = index.manifest["report"]["calibration"]
    further = index.engine.model.config.further
    assert further == pytest.approx(report["further"])
    assert further > 0.55, "the queries ask for what stands there"
    assert any("further windows " in record.getMessage() for record in caplog.records)
    assert (index.generation / "pieces" / "further" / "codes.npy").exists()
    assert index.verify(2) == []
    asked = [" ".join(words(3, 5 * i + 1)) for i in range(0, 40, 7)]
    for system in (index, index.system("zeroed"), index.system("untrained")):
        assert system.engine.model.config.further == further
        fast, whole = system.search(asked, k=40, beam=40), system.search(asked, k=40, mode="exhaustive")
        for one, two in zip(fast, whole, strict=True):
            assert [hit.score for hit in one] == pytest.approx([hit.score for hit in two], abs=1e-3)
    without = dataclasses.replace(index.engine.pieces, further=None)  # type: ignore[type-var]
    plain = dataclasses.replace(index.engine, pieces=without).search(asked, k=40, beam=40)
    differ = [
        abs(a.scores - b.scores).max() for a, b in zip(plain, index.engine.search(asked, k=40, beam=40), strict=True)
    ]
    assert max(differ) > 1e-2
    assert [p for p in index.verify(1) if "pieces/further" in p] == []
    (index.generation / "pieces" / "further").rename(folder / "gone")
    assert [problem for problem in index.verify(1) if "pieces/further" in problem]
    index.engine.pieces = without
    assert "pieces/further: is missing, though the model reads it" in check_structure(index)


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.0, 0.0])
def test_without_calibration_they_count_as_the_settings_say(make: Callable[..., Path], share: float) -> None:
    index = Index(make(model={"further": share}))
    assert index.engine.model.config.further == share
    assert index.engine.late is not None
    assert (index.engine.late.windows is not None) == (share > 0)
    assert (index.generation / "pieces" / "further").exists() == (share > 0)
    assert index.verify(2) == []
