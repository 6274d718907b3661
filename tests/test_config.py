"""Settings: every preset loads, nothing impossible gets in, and no torch is needed to find that out."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tiny import python

from nci import config as config_module
from nci.config import Config, TrainConfig, content_key, presets
from nci.errors import ConfigError

KINDS: dict[str, Any] = {f.name: f.default_factory for f in dataclasses.fields(Config)}
FIELDS = [(section, f.name) for section, kind in KINDS.items() for f in dataclasses.fields(kind)]


def hint(section: str, name: str) -> Any:
    return get_type_hints(KINDS[section])[name]


def kinds_of(section: str, name: str) -> tuple[Any, ...]:
    found = hint(section, name)
    return (found,) if get_origin(found) is Literal else (get_args(found) or (found,))


# Presets


def test_there_are_presets() -> None:
    assert {"fast", "light", "default"} <= set(presets())


@pytest.mark.parametrize("name", presets())
def test_preset_loads_and_says_only_known_things(name: str) -> None:
    config = Config.preset(name)
    path = config_module.PRESETS / f"{name}.yaml"
    assert Config.preset(str(path)) == config
    assert Config.from_dict(config.to_dict()) == config
    written = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    for section, values in written.items():
        for key, value in (values or {}).items():
            assert config.to_dict()[section][key] == value, f"{section}.{key} is not what {path.name} says"


def test_unknown_preset_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no preset 'faster'; there are: .*fast"):
        Config.preset("faster")
    with pytest.raises(ConfigError, match=r"no preset 'missing.yaml'"):
        Config.preset("missing.yaml")


@pytest.mark.parametrize("text", ["tree: [1, 2", "- tree", "tree: 5", "tree: {k: thirty}", "just words"])
def test_what_is_no_settings_file_is_a_config_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        Config.preset(str(path))


def test_an_empty_file_and_an_empty_section_are_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "mine.yml"
    path.write_text("")
    assert Config.preset(str(path)) == Config()
    path.write_text("tree:\n")
    assert Config.preset(str(path)) == Config()


# Round trip


def changed(section: str, name: str) -> Config:
    """Defaults with one field changed to another possible value."""
    values = Config().to_dict()
    special: dict[str, dict[str, object]] = {
        "model.head": {"model": {"head": "tied", "adapter_layers": 0}},
        "model.adapter_layers": {"model": {"adapter_layers": 2}},
        "model.encoder": {"model": {"encoder": "other", "query_vector": "stored"}},
        "model.normalise": {
            "model": {"normalise": "position", "anchor": "none", "content": False, "edge_bias": False},
        },
        "tree.ids": {"tree": {"ids": "random"}},
        "train.warmup": {"train": {"warmup": 0.5}},
        "tune.refreshes": {"tune": {"epochs": 1, "refreshes": 2}},
        "tune.lr": {"tune": {"lr": 0.5}},
        "calibrate.share": {"calibrate": {"share": 0.5}},
        "lexical.b": {"lexical": {"b": 0.5}},
        "model.dropout": {"model": {"dropout": 0.5}},
        "model.further": {"model": {"further": 0.5}},
    }
    if f"{section}.{name}" in special:
        for part, fields in special[f"{section}.{name}"].items():
            values[part] |= fields
        return Config.from_dict(values)
    now = values[section][name]
    for kind in kinds_of(section, name):
        if get_origin(kind) is Literal:
            values[section][name] = next(value for value in get_args(kind) if value != now)
        elif get_origin(kind) is tuple:
            values[section][name] = ["a", "b"]
        elif kind is bool:
            values[section][name] = not now
        elif kind in (int, float):
            values[section][name] = (now or 0) + 3
        elif kind is str:
            values[section][name] = "other"
        else:
            continue
        return Config.from_dict(values)
    raise AssertionError(f"no other value known for {section}.{name}")


@pytest.mark.parametrize(("section", "name"), FIELDS)
def test_any_changed_field_survives_json_and_changes_the_key(section: str, name: str) -> None:
    before, after = Config(), changed(section, name)
    assert getattr(getattr(after, section), name) != getattr(getattr(before, section), name)
    assert Config.from_dict(json.loads(json.dumps(after.to_dict()))) == after
    assert content_key(after) != content_key(before)
    assert content_key(getattr(after, section)) != content_key(getattr(before, section))


@given(st.integers(2, 10**6), st.floats(0, 100), st.lists(st.text(max_size=5), max_size=3), st.text(max_size=8))
def test_round_trip(k: int, epochs: float, fields: list[str], encoder: str) -> None:
    config = Config.from_dict(
        {
            "tree": {"k": k},
            "train": {"epochs": epochs},
            "corpus": {"text_fields": fields},
            "embed": {"encoder": encoder},
        }
    )
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.corpus.text_fields == tuple(fields)


def test_key_is_stable_and_tells_kinds_apart() -> None:
    assert content_key(Config(), "a", 1) == content_key(Config.from_dict({}), "a", 1)
    assert content_key({"a": 1, "b": 2}) == content_key({"b": 2, "a": 1})
    distinct = [(1,), ("1",), (1.5,), (True,), (None,), ("a", "b"), ("ab",), (["a", "b"],), (["b", "a"],)]
    assert len({content_key(*parts) for parts in distinct}) == len(distinct)


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().tree.k = 3  # type: ignore[misc]


# What is refused


def test_unknown_names_are_errors_that_list_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown section 'trees'.*tree"):
        Config.from_dict({"trees": {}})
    with pytest.raises(ConfigError, match=r"unknown setting tree\.depth.*max_depth"):
        Config.from_dict({"tree": {"depth": 3}})


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("corpus", "max_line_bytes", 0),
        ("corpus", "max_text_chars", -1),
        ("embed", "max_length", 2),
        ("tune", "max_length", 1),
        ("embed", "batch_size", 0),
        ("embed", "shard_size", 0),
        ("tree", "k", 1),
        ("tree", "c", 0),
        ("tree", "iterations", 0),
        ("tree", "points_per_centroid", 0),
        ("tree", "max_depth", 1),
        ("pairs", "real", -0.1),
        ("pairs", "span_share", -1),
        ("pairs", "generated", -1),
        ("pairs", "spans", -1),
        ("pairs", "terms", 0),
        ("pairs", "max_length", 2),
        ("pairs", "real", math.inf),
        ("model", "encoder_layers", 0),
        ("model", "d_model", 0),
        ("model", "d_model", -8),
        ("model", "decoder_layers", 0),
        ("model", "adapter_layers", 9),
        ("model", "heads", 0),
        ("model", "heads", -1),
        ("model", "d_ff", 0),
        ("model", "dropout", 1.0),
        ("model", "dropout", -0.1),
        ("model", "head_rank", -1),
        ("model", "kappa", 0),
        ("model", "lexical", -1),
        ("model", "kappa", math.nan),
        ("train", "epochs", -1),
        ("train", "epochs", math.nan),
        ("train", "epochs", math.inf),
        ("train", "batch_size", 0),
        ("train", "accumulation", 0),
        ("train", "encoder_lr", -1e-5),
        ("train", "decoder_lr", -1e-5),
        ("train", "warmup", 1.0),
        ("train", "weight_decay", -0.1),
        ("train", "max_grad_norm", -1.0),
        ("train", "alpha", -0.1),
        ("train", "tau", 0),
        ("train", "evaluations", -1),
        ("train", "dev_queries", 0),
        ("train", "checkpoint_minutes", -1),
        ("search", "beam", 0),
        ("search", "batch_size", -1),
        ("search", "length_penalty", math.nan),
    ],
)
def test_impossible_numbers_name_their_flag(section: str, name: str, value: float) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_dict({section: {name: value}})
    assert f"--{section}." in str(caught.value)
    assert name in str(caught.value)


@pytest.mark.parametrize(("section", "name"), [f for f in FIELDS if get_origin(hint(*f)) is Literal])
def test_a_word_that_is_no_choice_names_its_flag(section: str, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_dict({section: {name: "bogus"}})
    message = str(caught.value)
    assert f"--{section}.{name}" in message or f"--{name.replace('_', '-')}" in message
    assert "bogus" in message


@pytest.mark.parametrize(
    ("values", "flags"),
    [
        ({"pairs": {"real": 0, "span_share": 0, "generated": 0}}, ["--pairs.real", "span_share", "generated"]),
        ({"model": {"head": "tied"}}, ["--model.head", "--model.adapter_layers"]),
        ({"model": {"adapter_layers": 0}}, ["--model.head", "--model.adapter_layers"]),
        ({"model": {"normalise": "position", "anchor": "none", "edge_bias": False}}, ["--model.content"]),
        ({"model": {"normalise": "vocabulary", "anchor": "none", "content": False}}, ["--model.edge_bias"]),
        (
            {"model": {"normalise": "position", "content": False, "edge_bias": False}},
            ["--model.anchor", "--model.normalise"],
        ),
        ({"tree": {"ids": "atomic"}}, ["--tree.ids", "--model.head"]),
        ({"model": {"encoder": "other"}}, ["--model.encoder", "--model.query_vector"]),
    ],
)
def test_settings_that_exclude_each_other_name_both_flags(values: dict[str, Any], flags: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_dict(values)
    assert all(flag in str(caught.value) for flag in flags)


def test_the_paper_s_kind_of_model_is_possible() -> None:
    model = {"normalise": "vocabulary", "anchor": "none", "content": False, "edge_bias": False, "head": "product"}
    assert Config.from_dict({"model": model | {"adapter_start": "query"}}).model.normalise == "vocabulary"
    same = {"embed": {"encoder": "a"}, "model": {"encoder": "a"}}
    assert Config.from_dict(same).model.query_vector == "trained"
    assert TrainConfig(epochs=0.5).epochs == 0.5


# Imports


def test_importing_the_settings_loads_neither_torch_nor_numpy() -> None:
    script = "import sys, nci, nci.config, nci.errors, nci.records, nci.cli; print(*sys.modules)"
    loaded = set(python("-c", script).stdout.split())
    assert "nci.config" in loaded
    assert not loaded & {"torch", "transformers", "numpy", "jsonargparse", "faiss"}


def test_help_is_fast_and_loads_no_torch() -> None:
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        result = python("-X", "importtime", "-m", "nci", "--help")
        seconds.append(time.perf_counter() - started)
    assert result.returncode == 0
    assert "usage: nci" in result.stdout
    assert not [line for line in result.stderr.splitlines() if line.split("|")[-1].strip() in ("torch", "numpy")]
    assert min(seconds) < 0.5, f"nci --help took {min(seconds):.2f} s in {sys.executable}"
