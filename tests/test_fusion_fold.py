"""What `sum:` and `const:` are fitted on: systems made without the queries of some documents, and these queries."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from tiny import TOPICS, make_beir, make_documents, tiny_config, tiny_values

from nci.baselines.bm25 import BM25
from nci.baselines.fusion import FusionSettings, ScoreFusion
from nci.calibrate import withheld
from nci.config import CalibrateConfig
from nci.corpus import open_dataset
from nci.index import Index
from nci.jobs import in_order
from nci.names import parts_of
from nci.recipe import Recipe
from nci.systems import SHARED, key, make, needs
from nci.training_data import split_pairs
from nci.workbench import Workbench

SUM = "sum:bm25+bm25+trainq"
Pairs = list[tuple[str, str]]


def bench_of(data: Path, folder: Path, encoder: Path, *, share: float = 0.3, recipe: Recipe | None = None) -> Workbench:
    dataset = open_dataset(data)
    assert dataset is not None
    config = tiny_config(encoder, train={"epochs": 0.5}, calibrate={"share": share, "least": 1})
    return Workbench(dataset, folder, config, device="cpu", generated_from=recipe)


@pytest.fixture
def bench(beir: Path, tmp_path: Path, encoder: Path) -> Workbench:
    return bench_of(beir, tmp_path / "systems", encoder)


def bm25_of(bench: Workbench, pairs: Pairs) -> BM25:
    more: dict[str, list[str]] = {}
    for query, doc_id in pairs:
        more.setdefault(doc_id, []).append(query)
    return BM25(bench.documents, extra=more)


def settings_of(bench: Workbench, name: str) -> FusionSettings:
    system = make(bench, name)[0]
    assert isinstance(system, ScoreFusion)
    return system.settings


# ---- the fold


def test_a_fold_lacks_the_queries_of_some_documents(bench: Workbench) -> None:
    fold, hidden = bench.fold, withheld(bench.seen, CalibrateConfig(share=0.3))
    assert len(hidden) == 9
    assert fold.pairs == [pair for pair in bench.pairs if pair[1] not in hidden]
    assert fold.seen == bench.seen - hidden
    assert sorted(fold.pairs + bench.withheld) == sorted(bench.pairs)
    assert {doc_id for _, doc_id in bench.withheld} == hidden
    assert fold.documents is bench.documents
    assert len({bench.data_key, fold.data_key, fold.fold.data_key}) == 3
    assert fold.fold.seen < fold.seen
    assert key(fold, "knn") != key(bench, "knn")


def test_without_dev_a_fold_lacks_some_queries_of_other_documents_too(tmp_path: Path, encoder: Path) -> None:
    data = make_beir(tmp_path / "data")
    (data / "qrels" / "dev.tsv").unlink()
    bench = bench_of(data, tmp_path / "systems", encoder, share=0.1)
    fold = bench.fold
    assert len(fold.kept_back) == 5 == round(2 * 0.1 * len(fold.seen))
    assert fold.seen == bench.seen - fold.hidden
    others = [pair for pair in bench.withheld if pair[1] not in fold.hidden]
    assert {query for query, _ in others} == fold.kept_back
    assert {doc_id for _, doc_id in others} <= fold.seen
    found = settings_of(bench, SUM)
    assert set(found.weights) == {"bm25", "bm25+trainq"}


@pytest.mark.parametrize(("share", "documents"), [(0.0, 3), (0.1, 3), (0.5, 15)])
def test_a_tenth_is_withheld_where_the_settings_say_nothing(
    beir: Path, tmp_path: Path, encoder: Path, share: float, documents: int
) -> None:
    assert len(bench_of(beir, tmp_path, encoder, share=share).fold.hidden) == documents


def test_a_query_of_a_hidden_document_is_unknown_altogether(beir: Path, tmp_path: Path, encoder: Path) -> None:
    data = make_beir(tmp_path / "data")
    hidden = sorted(bench_of(data, tmp_path, encoder).fold.hidden)[0]
    (query, _), *_ = [line for line in _rows(data, "train") if line[1] == hidden]
    other = next(
        line[1] for line in _rows(data, "train") if line[1] not in bench_of(data, tmp_path, encoder).fold.hidden
    )
    with (data / "qrels" / "train.tsv").open("a") as stream:
        stream.write(f"{query}\t{other}\t1\n")
    bench = bench_of(data, tmp_path, encoder)
    asked = {text for text, doc_id in bench.pairs if doc_id == hidden}
    assert asked.isdisjoint(text for text, _ in bench.fold.pairs)
    assert {doc_id for text, doc_id in bench.withheld if text in asked} == {hidden, other}
    assert other in bench.fold.seen, "by its other queries"


def _rows(data: Path, split: str) -> Pairs:
    lines = (data / "qrels" / f"{split}.tsv").read_text().splitlines()[1:]
    return [(line.split("\t")[0], line.split("\t")[1]) for line in lines]


def test_where_nothing_can_be_withheld_there_is_no_fold(tmp_path: Path, encoder: Path) -> None:
    bench = bench_of(make_beir(tmp_path / "data", make_documents(6)), tmp_path / "systems", encoder, share=0.1)
    assert bench.fold is bench
    assert bench.withheld == []
    assert set(needs(bench, SUM, 0)) == {("bm25", 0), ("bm25+trainq", 0)}
    assert set(settings_of(bench, SUM).weights) == {"bm25", "bm25+trainq"}


# ---- what is fitted


def test_weights_are_fitted_where_the_queries_are_unknown(bench: Workbench, tmp_path: Path) -> None:
    """BM25 over training queries has seen the withheld ones, and would take it all."""
    rest = [pair for pair in bench.pairs if pair[1] not in bench.fold.hidden]
    asked = split_pairs(bench.dataset, "dev") + [pair for pair in bench.pairs if pair[1] in bench.fold.hidden]
    plain, seen = bm25_of(bench, []), {doc_id for _, doc_id in rest}

    def fitted(pairs: Pairs, name: str) -> FusionSettings:
        systems = {"bm25": plain, "bm25+trainq": bm25_of(bench, pairs)}
        return ScoreFusion.train(systems, asked, out=tmp_path / name, seen=seen, fewer=bench.fewer_unseen).settings

    found = settings_of(bench, SUM)
    assert found == fitted(rest, "fold")
    assert found.weights["bm25"] > 0.3
    assert fitted(bench.pairs, "full").weights["bm25"] == 0


def test_the_numbers_are_used_with_systems_that_know_everything(bench: Workbench, tmp_path: Path) -> None:
    queries = [query for query, _ in bench.withheld]
    for name in (SUM, "const:bm25+trainq"):
        system, size = make(bench, name)
        parts = {part: make(bench, part)[0] for part in parts_of(name)}
        by_hand = ScoreFusion(parts, settings=settings_of(bench, name), seen={doc_id for _, doc_id in bench.pairs})
        found = system.search(queries, 5)
        assert found == by_hand.search(queries, 5)
        assert {hit.source for hits in found for hit in hits} == {name}
        assert size == sum(make(bench, part)[1] for part in parts)
        in_fold = {part: make(bench.fold, part)[0] for part in parts}
        assert found != ScoreFusion(in_fold, settings=settings_of(bench, name), seen=bench.seen).search(queries, 5)


def test_one_constant_for_one_system(bench: Workbench) -> None:
    """Documents without training queries are held back by those with; the constant brings them forward."""
    assert settings_of(bench, "const:bm25+trainq").weights == {"bm25+trainq": 1.0}
    assert settings_of(bench, "const:bm25+trainq").unseen > 0.05
    mixed = [f"{seen} {unseen}" for seen in TOPICS["fruit"] for unseen in TOPICS["sea"]]
    plain, moved = (make(bench, name)[0].search(mixed, 60) for name in ("bm25+trainq", "const:bm25+trainq"))
    assert [hits[0].doc_id for hits in plain] != [hits[0].doc_id for hits in moved]
    for before, after in zip(plain, moved, strict=True):
        for known in (True, False):
            kept = [[hit.doc_id for hit in hits if (hit.doc_id in bench.seen) == known] for hits in (before, after)]
            assert kept[0] == kept[1], "among each other they stay as they were"
        places = [[hit.doc_id not in bench.seen for hit in hits] for hits in (before, after)]
        assert places[1] >= places[0], "those without queries come no later"


def test_what_knows_no_queries_is_the_same_in_the_fold(bench: Workbench) -> None:
    assert make(bench.fold, "bm25") is make(bench, "bm25")
    assert make(bench, "fold:bm25+trainq") is make(bench.fold, "bm25+trainq")
    assert make(bench, "bm25+trainq") is not make(bench.fold, "bm25+trainq")


def test_a_second_call_fits_nothing(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    found = settings_of(bench, SUM)
    again = replace(bench, made={})
    monkeypatch.setattr(ScoreFusion, "train", lambda *_, **__: pytest.fail("it was fitted again"))
    monkeypatch.setattr(Workbench, "fold", property(lambda _: pytest.fail("systems were made for fitting")))
    assert settings_of(again, SUM) == found
    monkeypatch.undo()
    other = replace(bench, config=replace(bench.config, calibrate=CalibrateConfig(share=0.5)))
    assert key(other, SUM) != key(bench, SUM)
    assert key(other, "const:bm25") != key(bench, "const:bm25")
    assert key(other, "rrf:bm25+bm25+trainq") == key(bench, "rrf:bm25+bm25+trainq")


# ---- several processes


def test_systems_of_the_fold_are_jobs(beir: Path, tmp_path: Path, encoder: Path) -> None:
    bench = bench_of(beir, tmp_path, encoder, recipe=Recipe())
    composed = ("rerank:bm25+qg", "rrf:dense+nci-qg", "rerank:sum:nci-qg+knn")
    names = ["sum:bm25+ance", "const:ance", *(f"const:{name}" for name in composed)]
    order = in_order(bench, [(name, 0) for name in names])
    assert len(set(order)) == len(order)
    for place, task in enumerate(order):
        assert set(needs(bench, *task)) <= set(order[:place])
    made = [name for name, _ in order]
    assert set(made) >= {
        "fold:ance",
        "fold:dpr",
        "fold:rerank:bm25+qg",
        "fold:bm25+qg",
        "fold:nci-qg",
        "fold:rrf:dense+nci-qg",
    }
    assert {name for name in made if name.endswith("generated queries")} == SHARED.keys() - {"untrained index"}
    assert not {"fold:bm25", "fold:dense", "fold:untrained index"} & set(made)
    assert made.index("fold:ance") < min(made.index("sum:bm25+ance"), made.index("const:ance"))


@pytest.mark.slow
def test_an_index_in_the_fold_has_not_seen_what_is_withheld(bench: Workbench) -> None:
    make(bench, "sum:nci+bm25")
    folded, whole = (make(each, "nci")[0] for each in (bench.fold, bench))
    assert isinstance(folded, Index)
    assert isinstance(whole, Index)
    real = [index.manifest["report"]["pairs"]["real"] for index in (folded, whole)]
    assert real == [len(bench.fold.pairs), len(bench.pairs)] == [42, 60]
    assert folded.manifest["report"]["dev"].keys() == whole.manifest["report"]["dev"].keys()
    assert folded.folder != whole.folder


@pytest.mark.slow
def test_two_processes_fit_what_one_does(ok: Callable[..., str], beir: Path, tmp_path: Path, encoder: Path) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tiny_values(encoder, train={"epochs": 0.5})))
    names = "sum:bm25+knn,const:knn,const:dense,rrf:const:bm25+trainq+dense"
    flags = ["--preset", tmp_path / "c.yaml", "--quiet", "--device", "cpu", "--split", "dev,test", "--systems", names]
    for out, more in (("two", ["--jobs", "2", "--tradeoff", tmp_path / "t.png"]), ("one", [])):
        ok("compare", beir, *flags, "-o", tmp_path / out, "--json", tmp_path / f"{out}.json", *more)
    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two"))
    for name, row in one["systems"].items():
        assert two["systems"][name] == pytest.approx(row), name
    assert list(two["tradeoff"]["systems"]) == names.split(",")
    assert len(list((tmp_path / "two" / "systems").glob("knn-*"))) == 2
    assert len(list((tmp_path / "two" / "systems").glob("untrained-*"))) == 1
