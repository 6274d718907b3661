"""The paper's presets hold the paper's values, and its model runs from end to end on tiny encoders."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import make_beir, make_encoder

from nci.config import Config, EmbedConfig, ModelConfig, PairsConfig, SearchConfig, TreeConfig
from nci.index import Index
from nci.pipeline import build

SIZES = {"small": (6, 3, 512, 8, 2048), "base": (12, 6, 768, 12, 3072), "large": (24, 12, 1024, 16, 4096)}


@pytest.mark.parametrize("size", SIZES)
def test_the_values_of_the_paper(size: str) -> None:
    encoder_layers, decoder_layers, d_model, heads, d_ff = SIZES[size]
    config = Config.preset(f"paper-{size}")
    assert config.embed == EmbedConfig(encoder="bert-base-uncased", pooling="cls", normalise=False, max_length=512)
    assert config.tree == TreeConfig(k=30, c=30, ids="semantic", backend="sklearn", iterations=300)
    assert config.pairs == PairsConfig(
        real=1, spans=10, terms=64, span_share=1, generated=1, generated_queries=15, sampling="pair", max_length=64
    )
    assert config.model == ModelConfig(
        encoder=f"t5-{size}",
        encoder_layers=encoder_layers,
        d_model=d_model,
        decoder_layers=decoder_layers,
        adapter_layers=4,
        heads=heads,
        d_ff=d_ff,
        dropout=0.1,
        head="product",
        head_rank=64,
        adapter_start="query",
        normalise="vocabulary",
        anchor="none",
        content=False,
        edge_bias=False,
    )
    assert (config.train.encoder_lr, config.train.decoder_lr) == (2e-4, 1e-4)
    assert (config.train.alpha, config.train.tau, config.train.batch_size) == (0.15, 1.0, 16)
    assert not config.train.freeze_encoder
    assert not config.train.freeze_embeddings
    assert not config.train.spare_unseen
    assert config.search == SearchConfig(beam=100, length_penalty=0.8)


def test_the_paper_presets_note_where_the_code_differs() -> None:
    for size in SIZES:
        text = (Path(__file__).parent.parent / "nci" / "configs" / f"paper-{size}.yaml").read_text()
        assert text.count("code:") >= 10


def test_light_is_what_the_dataclasses_say_with_tuning_calibration_and_word_pieces() -> None:
    light, plain = Config.preset("light"), Config()
    assert (light.embed.pieces, plain.embed.pieces) == (128, 0)
    assert (light.tune.epochs > 0, light.lexical.training, light.calibrate.share) == (True, True, 0.1)
    assert light.train.encoder_lr < plain.train.encoder_lr, "what was tuned moves slowly"
    train = dataclasses.replace(light.train, encoder_lr=plain.train.encoder_lr)
    same: dict[str, Any] = {"tune": plain.tune, "lexical": plain.lexical, "calibrate": plain.calibrate, "train": train}
    same["embed"] = dataclasses.replace(light.embed, pieces=0)
    assert dataclasses.replace(light, **same) == plain
    for name in ("default", "light", "fast"):
        assert Config.preset(name).model.anchor == "exact"


def test_default_is_light_with_a_larger_encoder_of_which_the_last_layers_are_tuned() -> None:
    default, light = Config.preset("default"), Config.preset("light")
    assert (default.embed.encoder, light.embed.encoder) == ("mpnet", "minilm")
    assert (default.tune.layers, light.tune.layers) == (4, 0)
    embed = dataclasses.replace(default.embed, encoder="minilm", precision="fp32")
    tune = dataclasses.replace(default.tune, epochs=5, layers=0)
    train = dataclasses.replace(default.train, epochs=6, evaluations=5)
    assert dataclasses.replace(default, embed=embed, tune=tune, train=train) == light


def test_the_paper_model_from_end_to_end(tmp_path: Path) -> None:
    """T5 encoder, other document encoder, product head, adapter started by the query, whole vocabulary, end token."""
    preset = Config.preset("paper-small")
    bert, t5 = make_encoder(tmp_path / "bert"), make_encoder(tmp_path / "t5", kind="t5")
    model = replace(
        preset.model, encoder=str(t5), encoder_layers=1, d_model=32, heads=2, d_ff=64, decoder_layers=1, head_rank=4
    )
    config = replace(
        preset,
        embed=replace(preset.embed, encoder=str(bert), max_length=16),
        tree=replace(preset.tree, k=4, c=4),
        pairs=replace(preset.pairs, max_length=16, spans=1, terms=8),
        model=model,
        train=replace(preset.train, epochs=1.0, evaluations=1),
    )
    build(make_beir(tmp_path / "beir"), tmp_path / "my.index", config)
    index = Index(tmp_path / "my.index")
    assert index.verify(2) == []
    assert not index.engine.model.config.foldable
    everything = index.search("apple item0", k=len(index), beam=10 * len(index))
    assert len(everything) == len(index)
    exhaustive = index.search("apple item0", k=len(index), mode="exhaustive")
    assert [hit.doc_id for hit in everything] == [hit.doc_id for hit in exhaustive]
    free = index.search("apple item0", k=5, beam=50, mode="unconstrained")
    assert {hit.doc_id for hit in free} <= set(index.doc_ids)
