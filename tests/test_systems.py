"""Systems with settings of their own and rows with names of their own: what they mean, share, keep and refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import POSITION, tiny_values

from nci.compare import check_names, compare, split_names
from nci.config import Config
from nci.corpus import open_dataset
from nci.errors import ConfigError
from nci.index import Index
from nci.jobs import in_order
from nci.names import INDEXES, config_of, kind_of, labelled, leaves, one_name, parts_of
from nci.querygen_steps import Recipe
from nci.systems import Unconstrained, key, make, needs, seeds_of
from nci.workbench import Workbench

Nci = Callable[..., tuple[int, str, str]]
Ok = Callable[..., str]
FREE = ",".join(f"model.{name}={str(value).lower()}" for name, value in POSITION.items())
TIED = "nci[model.head=tied,model.adapter_layers=0]"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, beir: Path, encoder: Path) -> Workbench:
    dataset = open_dataset(beir)
    assert dataset is not None
    config = Config.from_dict(tiny_values(encoder, train={"epochs": 0.5}))
    return Workbench(dataset, tmp_path_factory.mktemp("systems"), config, device="cpu", seeds=2, variant_seeds=1)


# ---- names


def test_names_are_split_outside_of_brackets() -> None:
    text = f"bm25, few={TIED},,rrf:bm25+trainq+{TIED},nci[corpus.text_fields=[a, b],tree.k=3]"
    names = ["bm25", f"few={TIED}", f"rrf:bm25+trainq+{TIED}", "nci[corpus.text_fields=[a, b],tree.k=3]"]
    assert split_names(text) == names
    assert labelled(names[1]) == ("few", TIED)
    assert labelled(names[2]) == (names[2], names[2])
    assert parts_of(names[2]) == ["bm25+trainq", TIED]
    assert leaves("rerank:nci[train.decoder_lr=1.0e+3]") == ["nci[train.decoder_lr=1.0e+3]"]
    assert [kind_of(name) for name in ("nci[a.b=c:d]", "sum:nci+bm25", "bm25+qg")] == ["nci", "sum", "bm25+qg"]


def test_settings_come_after_what_the_name_changes() -> None:
    start = Config()
    pure = config_of(start, "nci-pure[model.content=true,train.alpha=0.15]")
    assert (pure.model.anchor, pure.model.content, pure.model.edge_bias, pure.train.alpha) == (
        "none",
        True,
        False,
        0.15,
    )
    longer = INDEXES["nci-pure"].longer * start.train.epochs
    assert (pure.train.epochs, config_of(start, "nci-pure[train.epochs=3]").train.epochs) == (longer, 3)
    slow, fast = (replace(start, train=replace(start.train, encoder_lr=rate)) for rate in (2e-5, 2e-4))
    assert [config_of(each, "dsi").train.encoder_lr for each in (slow, fast)] == [1e-4, 2e-4]
    assert config_of(slow, "nci").train.encoder_lr == 2e-5
    assert config_of(start, "nci") == replace(start, pairs=replace(start.pairs, generated=0.0))


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("nci[train.alpha=0]", "nci"),
        ("nci[model.adapter_layers=1, tree.k=3]", "nci[tree.k=3]"),
        ("nci[tree.k=3,tree.c=4]", "nci[tree.k=3,tree.c=4]"),
        ("nci[tree.c=4,tree.k=3]", "nci[tree.k=3,tree.c=4]"),
        ("nci-zeroed[train.alpha=0.10]", "nci-zeroed[train.alpha=0.1]"),
        ("nci-pure[model.anchor=none]", "nci-pure"),
        ("rrf:bm25+nci[tree.k=30]", "rrf:bm25+nci"),
        ("bm25", "bm25"),
    ],
)
def test_one_name_for_all_that_mean_the_same(name: str, wanted: str) -> None:
    assert one_name(Config(), name) == wanted


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "train.encoder_lr": st.floats(1e-7, 1, exclude_max=True),
            "model.encoder": st.none() | st.sampled_from(["minilm", "null", "12", "a: b", "with space"]),
            "corpus.text_fields": st.lists(st.sampled_from(["a", "no", "c d"]), min_size=1),
            "model.dropout": st.sampled_from([0.0, 0.25, 1e-5]),
            "train.tensorboard": st.booleans(),
        },
    )
)
def test_the_one_name_has_the_same_settings(values: dict[str, Any]) -> None:
    changes = ",".join(
        f"{name}={yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix('...' + chr(10)).strip()}"
        for name, value in values.items()
    )
    start = replace(Config(), model=replace(Config().model, query_vector="stored"))
    name = f"nci[{changes}]" if changes else "nci"
    short = one_name(start, name)
    assert config_of(start, short) == config_of(start, name)
    assert one_name(start, short) == short
    for field, value in values.items():
        section, _, key_ = field.partition(".")
        assert config_of(start, name).to_dict()[section][key_] == value


# ---- what they are made of


@pytest.mark.slow
def test_an_index_with_other_settings_is_another_one(bench: Workbench) -> None:
    usual, other, zeroed = (make(bench, name)[0] for name in ("nci", TIED, TIED.replace("nci", "nci-zeroed")))
    assert isinstance(usual, Index)
    assert isinstance(other, Index)
    assert isinstance(zeroed, Index)
    assert (usual.config.model.head, other.config.model.head) == ("additive", "tied")
    assert zeroed.folder == other.folder != usual.folder
    queries, _ = bench.dataset.split("test")
    assert other.run(queries, 10) != zeroed.run(queries, 10)
    names = ["nci", TIED, TIED.replace("nci", "nci-zeroed"), "nci[train.alpha=0.1]", f"rrf:bm25+{TIED}", "rrf:bm25+nci"]
    assert len({key(bench, name) for name in names}) == len(names)
    assert key(bench, TIED, 0) != key(bench, TIED, 1)


def test_search_without_the_tree(bench: Workbench) -> None:
    names = [f"nci[{FREE}]", f"nci-unconstrained[{FREE}]"]
    within, without = (make(bench, name)[0] for name in names)
    assert isinstance(within, Index)
    assert isinstance(without, Unconstrained)
    queries, _ = bench.dataset.split("test")
    texts = [query.text for query in queries]
    wanted = within.search(texts, 5, mode="unconstrained")
    assert without.search(texts, 5) == wanted
    assert [hit.doc_id for hit in without.search(texts[0], 5)] == [hit.doc_id for hit in wanted[0]]
    assert wanted != within.search(texts, 5)
    assert needs(bench, names[1], 0) == [(names[0], 0)]


def test_a_model_without_anchors_is_trained_once_to_be_searched_with_and_without_its_tree(bench: Workbench) -> None:
    names = [f"{kind}[model.normalise=position,train.epochs=0.5]" for kind in ("nci-pure", "nci-pure-unconstrained")]
    within, without = (make(bench, name)[0] for name in names)
    assert isinstance(within, Index)
    assert isinstance(without, Unconstrained)
    assert without._index.folder == within.folder
    assert needs(bench, names[1], 0) == [(names[0], 0)]
    assert key(bench, names[0]) != key(bench, names[1])


def test_who_waits_for_whom_and_how_often(bench: Workbench) -> None:
    generating = replace(bench, generated_from=Recipe())
    zeroed = "nci-zeroed[tree.k=3]"
    assert needs(generating, zeroed, 1) == [("nci[tree.k=3]", 1)]
    assert needs(generating, "nci-qg[tree.k=3]", 0) == [("generated queries", 0)]
    order = in_order(bench, [(f"rrf:bm25+{zeroed}", 0)])
    assert order == [("bm25", 0), ("nci[tree.k=3]", 0), (zeroed, 0), (f"rrf:bm25+{zeroed}", 0)]
    assert [seeds_of(bench, name) for name in ("nci", "nci[tree.k=3]", zeroed, "rrf:nci[tree.k=3]+bm25")] == [
        2,
        1,
        1,
        1,
    ]


# ---- rows


@pytest.mark.slow
def test_rows_have_names_and_may_share_a_system(bench: Workbench, tmp_path: Path) -> None:
    epochs = bench.config.train.epochs
    specs = ["bm25", "plain=nci", f"again=nci[train.epochs={epochs}]", f"tied={TIED}", "tree.k=nci[tree.k=4]"]
    rows = check_names(bench, specs)
    assert rows == {
        "bm25": "bm25",
        "plain": "nci",
        "again": "nci",
        "tied": one_name(bench.config, TIED),
        "tree.k": "nci",
    }
    append = tmp_path / "results.jsonl"
    result = compare(bench, specs, "test", tmp_path, append=append)
    assert list(result.systems) == list(rows)
    assert result.reference == "plain"
    assert result.systems["plain"] == result.systems["again"]
    assert result.seeds == {"bm25": 1, "plain": 2, "again": 2, "tied": 1, "tree.k": 2}
    assert len(list((tmp_path / "runs").glob("*.trec"))) == 1 + 2 + 1
    lines = [json.loads(line) for line in append.read_text().splitlines()]
    assert [line["row"] for line in lines] == list(rows)
    assert [line["system"] for line in lines] == list(rows.values())
    for line in lines:
        assert (line["data"], line["split"]) == (bench.dataset.folder.name, "test")
        assert (line["metrics"], line["seeds"]) == (result.systems[line["row"]], result.seeds[line["row"]])
        assert line["spread"] == result.spread.get(line["row"])
        assert line["seconds"] >= 0
    keys = {line["row"]: line["key"] for line in lines}
    assert keys["plain"] == keys["again"] == keys["tree.k"]
    assert len(set(keys.values())) == len(set(rows.values())), "other settings, another key"
    before = append.read_bytes()
    compare(bench, specs, "test", tmp_path, append=append)
    assert append.read_bytes() == before, "a second call adds nothing"


def test_a_row_is_added_as_soon_as_it_is_finished(
    bench: Workbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nci import compare as module

    def killed_later(bench: Workbench, name: str, seed: int = 0) -> Any:
        return make(bench, name, seed) if name == "bm25" else pytest.fail("killed")

    monkeypatch.setattr(module, "make", killed_later)
    with pytest.raises(pytest.fail.Exception, match="killed"):
        compare(bench, ["bm25", "nci"], "test", tmp_path, append=tmp_path / "results.jsonl")
    assert json.loads((tmp_path / "results.jsonl").read_text())["row"] == "bm25"


@pytest.mark.slow
def test_a_comparison_with_everything(ok: Ok, beir: Path, tmp_path: Path, encoder: Path) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tiny_values(encoder, train={"epochs": 0.5})))
    flags = ["--preset", tmp_path / "c.yaml", "-o", tmp_path / "out", "--quiet", "--device", "cpu"]
    files = ["--json", tmp_path / "r.json", "--append", tmp_path / "all.jsonl", "--tradeoff", tmp_path / "t.png"]
    systems = f"bm25,few=nci[tree.k=3,tree.c=3],none=nci-zeroed[tree.k=3,tree.c=3],knn,free=nci-unconstrained[{FREE}]"
    out = ok("compare", beir, "--systems", systems, "--split", "test,dev", *flags, *files)
    assert sum(line.startswith("few ") for line in out.splitlines()) == 5, (
        "two lines for each split, one for their mean"
    )
    found = json.loads((tmp_path / "r.json").read_text())
    rows = ["bm25", "few", "none", "knn", "free"]
    assert list(found["systems"]) == list(found["rows"]) == rows
    assert found["rows"]["none"] == "nci-zeroed[tree.k=3,tree.c=3]"
    assert len((tmp_path / "all.jsonl").read_text().splitlines()) == 2 * len(rows)
    assert (tmp_path / "t.png").stat().st_size > 1000
    assert (tmp_path / "t.svg").exists()
    assert (found["tradeoff"]["seen"], found["tradeoff"]["unseen"]) == ("test", "dev")
    for row, curve in found["tradeoff"]["systems"].items():
        assert curve["operating"]["seen"] == pytest.approx(found["splits"]["test"]["systems"][row]["R@1"])
        assert curve["operating"]["unseen"] == pytest.approx(found["splits"]["dev"]["systems"][row]["R@1"])
    assert found["tradeoff"]["systems"]["knn"]["constants"] == [0.0], "it knows trained documents only"
    ends = found["tradeoff"]["systems"]["few"]["seen"]
    assert 0 < ends[0] <= 0.5, "only trained documents are first: those of every second query"
    assert 0 < ends[-1] <= 0.5, "only the others are"


# ---- mistakes


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--systems bm25[tree.k=3]", "bm25 has no settings in brackets"),
        ("--systems nci-ensemble[tree.k=3]", "nci-ensemble has no settings"),
        ("--systems nci[tree.k=1]", "--systems tree.k is at least 2"),
        ("--systems nci[tree.k]", "--systems tree.k: expected SECTION.FIELD=VALUE"),
        ("--systems nci[]", "expected SECTION.FIELD=VALUE"),
        ("--systems nci[tree.bogus=3]", "unknown setting tree.bogus"),
        ("--systems nci[train.epochs=many]", "--systems train.epochs=many: expected a number"),
        ("--systems nci[tree.k=3,bm25", "settings stand in brackets at its end"),
        ("--systems nci[tree.k=3]x", "settings stand in brackets at its end"),
        ("--systems nci[model.head=tied]", "a tied head has 0 adapter layers"),
        ("--systems bogus[tree.k=3]", "there is no 'bogus[tree.k=3]'"),
        ("--systems rrf:bm25+bm25[tree.k=3]", "bm25 has no settings"),
        ("--systems few=", "there is no ''"),
        ("--systems =bm25", "a row has no name"),
        ("--systems a=bm25,a=dense", "names a 2 times"),
        ("--systems nci-unconstrained", "model.normalise=position"),
        ("--systems nci,bm25 --bm25.stemmer klingon", "not 'klingon'"),
        ("--systems bm25 --bm25.b 2", "b between 0 and 1"),
        ("--systems bm25 --tradeoff t.png", "--tradeoff needs two splits"),
        ("--systems bm25 --split test,dev --tradeoff t.txt", "--tradeoff t.txt: expected a name that ends in .png"),
        ("--systems bm25 --append no/such/folder.jsonl", "--append no/such/folder.jsonl: cannot be written"),
    ],
)
def test_a_mistake_is_one_line(run: Nci, beir: Path, tmp_path: Path, encoder: Path, words: str, said: str) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tiny_values(encoder)))
    code, out, err = run(
        "compare", beir, "--preset", tmp_path / "c.yaml", "-o", tmp_path / "out", "--device", "cpu", *words.split()
    )
    assert (code, out, len(err.splitlines())) == (1, "", 1), err
    assert said in err
    assert not (tmp_path / "out").exists()


def test_every_index_is_checked_by_name(bench: Workbench) -> None:
    for kind in INDEXES:
        changes = FREE if kind.endswith("unconstrained") else "tree.iterations=3"
        generating = replace(bench, generated_from=Recipe())
        assert check_names(generating, [f"row={kind}[{changes}]"])["row"].startswith(kind)
    with pytest.raises(ConfigError, match="needs generated queries"):
        check_names(bench, ["row=nci-qg50[tree.k=3]"])
    with pytest.raises(ConfigError, match="would be nci by another name"):
        check_names(bench, ["row=nci-qg[pairs.generated=0]"])
