"""Several systems on a data set: the table, what is kept, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import make_beir, make_documents, tiny_values, write_lines

from nci.baselines.dense import Dense
from nci.compare import Result, compare, kept_runs, latency_ms, search_all
from nci.config import Config
from nci.corpus import open_dataset
from nci.errors import ConfigError, DataError
from nci.evaluate import evaluate, per_query
from nci.names import leaves, parts_of
from nci.overall import overall
from nci.recipe import Recipe
from nci.records import Hit
from nci.system_checks import check, table_names
from nci.systems import key, make, needs
from nci.workbench import Workbench


@pytest.fixture(scope="module")
def workbench(tmp_path_factory: pytest.TempPathFactory, encoder: Path) -> Workbench:
    folder = tmp_path_factory.mktemp("compare")
    dataset = open_dataset(make_beir(folder / "data"))
    assert dataset is not None
    config = Config.from_dict(tiny_values(encoder, train={"epochs": 0.5}))
    return Workbench(dataset, folder / "systems", config, device="cpu", seeds=2)


NAMES = [
    "bm25",
    "bm25-okapi",
    "bm25+trainq",
    "dense",
    "dense-hnsw",
    "knn",
    "nci",
    "nci-untrained",
    "nci-zeroed",
    "nci-ensemble",
    "rrf:bm25+trainq+dense",
    "sum:bm25+trainq+dense",
    "const:bm25+trainq",
    "bert-bruteforce",
    "bert-faiss",
]


@pytest.fixture(scope="module")
def result(workbench: Workbench) -> Result:
    return compare(workbench, NAMES, "test", workbench.folder.parent)


def test_every_system_is_a_row(result: Result, workbench: Workbench) -> None:
    assert list(result.systems) == NAMES
    assert result.queries == 12
    assert result.reference == "nci"
    assert result.seeds == {name: 2 if name in ("nci", "nci-untrained", "nci-zeroed") else 1 for name in NAMES}
    assert set(result.p_values) == set(NAMES) - {"nci"}
    assert all(ms > 0 for ms in result.latency_ms.values())
    assert all(size > 0 for size in result.index_bytes.values())


def test_how_many_documents_every_system_scores(result: Result, workbench: Workbench) -> None:
    every, seen, scored = len(workbench.documents), len(workbench.seen), result.documents_scored
    exact = ("dense", "nci", "nci-untrained", "nci-zeroed", "bert-bruteforce", "bert-faiss")
    assert {name: scored[name] for name in exact} == dict.fromkeys(exact, every)
    assert (scored["knn"], scored["nci-ensemble"]) == (seen, 2 * every)
    assert scored["rrf:bm25+trainq+dense"] == pytest.approx(scored["bm25+trainq"] + every, abs=0.1)
    assert scored["const:bm25+trainq"] == scored["bm25+trainq"]
    queries = workbench.dataset.split("test")[0]
    words = [set(query.text.lower().split()) for query in queries]
    texts = [set(document.content.lower().split()) for document in workbench.documents]
    shared = sum(bool(asked & text) for asked in words for text in texts) / len(words)
    assert 0 < shared <= scored["bm25"] <= every, "those with a word of the query"
    assert 0 < scored["dense-hnsw"] <= 2 * every
    lines = [line.split() for line in result.text().splitlines() if line.startswith("knn ")]
    assert lines[1][3] == f"{seen:,}"


def test_what_settings_may_be_chosen_by(result: Result, workbench: Workbench) -> None:
    """R@1 of withheld queries, of what is fitted on them: fusions here, since the indexes of this bench are not calibrated."""
    fitted = {name for name in NAMES if name.startswith(("sum:", "const:"))}
    assert set(result.withheld) == fitted
    for name in fitted:
        system = make(workbench, name)[0]
        assert result.withheld[name] == system.withheld
        assert 0 < result.withheld[name] <= 1
        (line,) = (line.split() for line in result.text().splitlines()[len(NAMES) + 3 :] if line.startswith(f"{name} "))
        assert line[5] == f"{100 * result.withheld[name]:.2f}"
    assert "withheld: R@1 of the queries that its weights were fitted on" in result.notes()


@pytest.mark.slow
def test_a_calibrated_index_says_what_it_found_of_withheld_queries(tmp_path: Path, encoder: Path) -> None:
    dataset = open_dataset(make_beir(tmp_path / "data"))
    assert dataset is not None
    config = Config.from_dict(tiny_values(encoder, calibrate={"share": 0.3, "least": 5}))
    bench = Workbench(dataset, tmp_path / "systems", config, device="cpu", seeds=2)
    file = tmp_path / "rows.jsonl"
    result = compare(bench, ["nci", "nci-zeroed", "bm25"], "test", tmp_path, append=file)
    found = [make(bench, "nci", seed)[0].manifest["report"]["calibration"]["found"] for seed in range(2)]  # type: ignore[attr-defined]
    assert all(min(one["queries"].values()) > 0 for one in found), "of both kinds of documents"
    wanted = sum(one["after"][kind] for one in found for kind in ("seen", "unseen")) / 4
    assert result.withheld == {"nci": pytest.approx(wanted)}, "zeroed was not calibrated by itself"
    rows = {row["row"]: row["withheld"] for row in map(json.loads, file.read_text().splitlines())}
    assert rows == {"nci": pytest.approx(wanted), "nci-zeroed": None, "bm25": None}
    again = compare(bench, ["nci", "nci-zeroed", "bm25"], "test", tmp_path)
    assert again.as_json() == result.as_json()


def test_a_row_is_what_the_system_finds(result: Result, workbench: Workbench) -> None:
    queries, qrels = workbench.dataset.split("test")
    for name in ("bm25", "bm25+trainq", "dense"):
        run, scored = search_all(make(workbench, name)[0], queries)
        assert result.documents_scored[name] == pytest.approx(scored, abs=0.05)
        assert result.systems[name] == pytest.approx(evaluate(run, qrels, list(result.systems[name])), abs=1e-9)
    first, second = (search_all(make(workbench, "nci", seed)[0], queries)[0] for seed in range(2))
    wanted = [evaluate(run, qrels, ["R@1", "RR@100"]) for run in (first, second)]
    assert first != second, "each seed has a tree of its own"
    for metric in ("R@1", "RR@100"):
        values = [row[metric] for row in wanted]
        assert result.systems["nci"][metric] == pytest.approx(sum(values) / 2)
        assert result.spread["nci"][metric] == pytest.approx(abs(values[0] - values[1]) / 2**0.5)


def test_training_queries_help_where_they_are(workbench: Workbench) -> None:
    plain, more = (make(workbench, name)[0] for name in ("bm25", "bm25+trainq"))
    text, doc_id = workbench.pairs[0]
    assert {hit.doc_id: hit.score for hit in more.search(text, 60)}[doc_id] > {
        hit.doc_id: hit.score for hit in plain.search(text, 60)
    }[doc_id]


def test_a_second_call_builds_and_searches_nothing(
    result: Result, workbench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nci.compare.make", lambda *_: pytest.fail("it was made again"))
    again = compare(workbench, NAMES, "test", workbench.folder.parent)
    assert again.as_json() == result.as_json()


def test_a_ranking_without_its_facts_is_made_again(result: Result, workbench: Workbench) -> None:
    runs = workbench.folder.parent / "runs"
    (facts,) = runs.glob("bm25-0-test-*.json")
    whole = json.loads(facts.read_text())
    facts.unlink()
    again = compare(workbench, ["bm25"], "test", workbench.folder.parent)
    assert again.systems["bm25"] == result.systems["bm25"]
    assert json.loads(facts.read_text())["index_bytes"] == whole["index_bytes"]


def test_other_data_or_settings_are_other_systems(workbench: Workbench, tmp_path: Path) -> None:
    assert len({key(workbench, name, seed) for name in ("dsi", "nci", "nci-zeroed") for seed in (0, 1)}) == 6
    queries = write_lines(tmp_path / "queries.jsonl", [{"doc_id": "d0", "query": "a"}])
    beam = replace(workbench.config, search=replace(workbench.config.search, beam=7))
    others = {
        "generated queries": replace(workbench, generated_from=queries),
        "ways to generate them": replace(workbench, generated_from=Recipe()),
        "settings of the index": replace(workbench, config=beam),
        "settings of a baseline": replace(workbench, baselines={"dual": {"lr": 1e-4}}),
        "how BM25 reads": replace(workbench, baselines={"bm25": {"runs": True}}),
    }
    changes = {
        "bm25": {"how BM25 reads"},
        "bm25-okapi": set(),
        "bm25+trainq": {"how BM25 reads"},
        "bm25+qg": {"generated queries", "ways to generate them", "how BM25 reads"},
        "nci": {"settings of the index"},
        "nci-ensemble": {"settings of the index"},
        "nci-qg": {"generated queries", "ways to generate them", "settings of the index"},
        "nci-pure": {"generated queries", "ways to generate them", "settings of the index"},
        "dsi": {"settings of the index"},
        "dpr": {"settings of a baseline"},
        "rrf:bm25+dpr": {"settings of a baseline", "how BM25 reads"},
        "rerank:nci-qg": {"generated queries", "ways to generate them", "settings of the index"},
    }
    for name, wanted in changes.items():
        assert {what for what, other in others.items() if key(other, name) != key(workbench, name)} == wanted, name


@pytest.mark.parametrize("version", ["LEXICAL_VERSION", "CALIBRATION_VERSION"])
def test_other_scores_are_other_indexes(workbench: Workbench, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    before = {name: key(workbench, name) for name in ("nci", "nci-zeroed", "nci-ensemble", "bm25")}
    monkeypatch.setattr(f"nci.systems.{version}", 99)
    assert [name for name, old in before.items() if key(workbench, name) == old] == ["bm25"]


def test_the_mean_of_two_splits(result: Result, workbench: Workbench) -> None:
    both = overall([result, compare(workbench, NAMES, "dev", workbench.folder.parent, timed=result)])
    runs = {
        split: [per_query(run, workbench.dataset.split(split)[1], "R@1") for run in found]
        for split in both.splits
        for found in [kept_runs(workbench, "nci", split, workbench.folder.parent)]
    }
    seeds = [sum(sum(found[seed].values()) / 12 for found in runs.values()) / 2 for seed in range(2)]
    assert both.splits == ("test", "dev")
    assert both.systems["nci"] == pytest.approx(sum(seeds) / 2)
    assert both.spread["nci"] == pytest.approx(abs(seeds[0] - seeds[1]) / 2**0.5)
    assert both.tests["bm25"].difference == pytest.approx(both.systems["nci"] - both.systems["bm25"])
    assert list(both.tests) == [name for name in NAMES if name != "nci"]
    assert set(both.spread) == {"nci", "nci-untrained", "nci-zeroed"}
    assert json.loads(json.dumps(both.as_json()))["tests"]["bm25"]["p_value"] == both.tests["bm25"].p_value
    lines = {line.split()[0]: line.split() for line in both.text().splitlines()[2:]}
    assert list(lines) == NAMES
    assert lines["bm25"][1] == f"{100 * both.systems['bm25']:.2f}"
    assert lines["bm25"][3] == f"{100 * both.tests['bm25'].difference:+.2f}"
    assert lines["bm25"][-1] == f"{both.tests['bm25'].corrected:.4f}"
    assert len(lines["nci"]) == 3, "it is not tested against itself"


def test_the_texts_show_every_system(result: Result) -> None:
    text, latex = result.text(), result.latex()
    for name in NAMES:
        assert sum(line.startswith(name + " ") for line in text.splitlines()) == 2
    assert latex.count(r"\\") == len(NAMES) + 2
    best = max(row["R@1"] for row in result.systems.values())
    assert rf"\textbf{{{100 * best:.2f}}}" in latex
    assert "Success@k" in result.notes()
    assert "Success@k" not in text, "once for all splits"
    assert "baselines run as their libraries do" in result.notes()


def test_what_the_columns_mean_is_said(result: Result) -> None:
    test = f"paired bootstrap over documents, Holm-corrected over the {len(NAMES) - 1} systems"
    assert result.as_json()["test"] == test
    assert f"p: {test}." in result.notes()
    (row,) = [line for line in result.text().splitlines() if line.startswith("nci-ensemble ") and "merged" in line]
    assert row.split()[4:6] == ["2", "merged"]
    assert result.merged == {"nci-ensemble": 2}
    assert result.text().startswith("data: test, 12 queries")


def test_latex_says_what_it_is_of(result: Result) -> None:
    lines = result.latex(["R@1", "RR@100"]).splitlines()
    assert lines[0] == f"% data, test, 12 queries (%); p: {result.test}"
    assert lines[1] == r"\begin{tabular}{lrrrr}"
    assert lines[2] == r"\multicolumn{5}{l}{data, test, 12 queries (\%)} \\"
    assert lines[3] == r"system & R@1 & RR@100 & R@1 $\pm$ & $p$ against nci \\ \hline"
    cells = {cells[0]: cells for line in lines[4:-1] if (cells := line.removesuffix(r" \\").split(" & "))}
    assert cells["nci"][3:] == [f"{100 * result.spread['nci']['R@1']:.2f}", "--"]
    assert cells["dense"][3:] == ["--", f"{result.p_values['dense']:.4f}"]
    alone = Result("test", 1, "bm25", {"bm25": {"R@1": 0.5}}, data="a_b").latex(["R@1"]).splitlines()
    assert alone[:3] == [
        "% a_b, test, 1 queries (%)",
        r"\begin{tabular}{lr}",
        r"\multicolumn{2}{l}{a\_b, test, 1 queries (\%)} \\",
    ]
    assert alone[3] == r"system & R@1 \\ \hline"


def test_flags_of_dense_search_are_heeded(workbench: Workbench, result: Result, encoder: Path) -> None:
    """Without any the index's own vectors are searched, with one those of its own settings."""
    own = replace(workbench, baselines={"dense": {"max_length": 3}}, made={})
    for name in ("dense", "dense-hnsw"):
        assert key(own, name) != key(workbench, name)
        assert key(own, f"rrf:bm25+{name}") != key(workbench, f"rrf:bm25+{name}")
        assert needs(workbench, name, 0) == [("untrained index", 0)]
        assert needs(own, name, 0) == []
        changed, usual = (make(bench, name)[0] for bench in (own, workbench))
        texts = [query.text for query in workbench.dataset.split("test")[0]]
        scores = [[hit.score for hits in each.search(texts, 5) for hit in hits] for each in (changed, usual)]
        assert scores[0] != pytest.approx(scores[1], abs=1e-3), name
    settings = replace(own.settings["dense"], similarity="cosine", backend="numpy")
    wanted = Dense.build(own.documents, out=own.folder / "alone", settings=settings)
    found = make(own, "dense")[0]
    assert settings.max_length == 3
    assert [hit.doc_id for hit in found.search("apple pear", 5)] == [
        hit.doc_id for hit in wanted.search("apple pear", 5)
    ]


def test_paired_values_are_means_over_seeds(result: Result, workbench: Workbench) -> None:
    from nci.significance import document_groups, holm, paired_bootstrap

    queries, qrels = workbench.dataset.split("test")
    values = [per_query(search_all(make(workbench, "nci", s)[0], queries)[0], qrels, "R@1") for s in range(2)]
    mean = {query_id: (values[0][query_id] + values[1][query_id]) / 2 for query_id in values[0]}
    dense = per_query(search_all(make(workbench, "dense")[0], queries)[0], qrels, "R@1")
    plain = paired_bootstrap(mean, dense, groups=document_groups(qrels)).p_value
    assert plain <= result.p_values["dense"] <= 1
    assert holm({"dense": plain}) == {"dense": plain}
    alone = compare(workbench, ["nci", "dense"], "test", workbench.folder.parent)
    assert alone.p_values == {"dense": pytest.approx(plain)}


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["nothing"], "there is no 'nothing'"),
        (["dense", "bm25", "bm25"], "--systems names bm25 2 times"),
        ([], "names no system; give one or more"),
        (["rrf:bm25+nothing"], "there is no 'nothing'"),
        (["max:bm25+dense"], "'max'"),
        (["rrf:bm25"], "two systems"),
        (["sum:bm25+bm25"], "two systems"),
        (["const:"], "there is no ''"),
        (["const:bm25+dense"], "there is no 'bm25\\+dense'"),
        (["const:rerank:const:rerank:const:bm25"], "const:bm25 is inside of two others"),
        (["rerank:nothing"], "there is no 'nothing'"),
        (["rerank:"], "there is no ''"),
        (["bm25+qg"], "generated queries"),
        (["rrf:bm25+qg50+dense"], "generated queries"),
    ],
)
def test_refuses_names_that_stand_for_nothing(workbench: Workbench, names: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        compare(workbench, names, "test", workbench.folder.parent)


def test_a_missing_split_is_named(workbench: Workbench) -> None:
    with pytest.raises(DataError, match='no split "other"'):
        compare(workbench, ["bm25"], "other", workbench.folder.parent)


def test_needs_training_queries(tmp_path: Path, encoder: Path) -> None:
    data = make_beir(tmp_path / "data", make_documents(12))
    (data / "qrels" / "train.tsv").unlink()
    dataset = open_dataset(data)
    assert dataset is not None
    bench = Workbench(dataset, tmp_path / "systems", Config.from_dict(tiny_values(encoder)))
    for name in ("bm25+trainq", "rerank:bm25", "rrf:bm25+dpr", "const:bm25"):
        with pytest.raises(ConfigError, match="needs training queries"):
            compare(bench, [name], "dev", tmp_path)
    assert compare(bench, ["bm25", "sum:bm25+bm25-okapi"], "dev", tmp_path).queries == 12, "nothing can be withheld"


def test_parts_of() -> None:
    assert parts_of("rrf:bm25+trainq+dense") == ["bm25+trainq", "dense"]
    assert parts_of("sum:dense+bm25+qg") == ["dense", "bm25+qg"]
    assert parts_of("rerank:rrf:bm25+dense") == ["rrf:bm25+dense"]
    assert parts_of("const:rrf:bm25+trainq+dense") == ["rrf:bm25+trainq+dense"]
    assert parts_of("rrf:const:bm25+trainq+dense") == ["const:bm25+trainq", "dense"]
    assert parts_of("bm25+trainq") == []
    assert leaves("rrf:rerank:bm25+qg+dense") == ["bm25+qg", "dense"]


def test_the_table_leaves_out_what_needs_a_missing_package(
    workbench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, absent = table_names()
    assert (len(names), absent) == (21, [])
    bench = replace(workbench, generated_from=Recipe())
    for name in names:
        check(bench, name)
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None if package == "faiss" else object())
    assert table_names() == ([name for name in names if name != "dense-hnsw"], ["dense-hnsw"])


def test_latency_is_of_one_query_at_a_time() -> None:
    asked: list[Any] = []

    class Slow:
        def search(self, queries: Any, k: int = 10) -> list[Hit]:
            asked.append(queries)
            return []

    assert latency_ms(Slow(), ["a", "b"]) >= 0  # type: ignore[arg-type]
    assert asked == ["a", "a", "b"]
    assert latency_ms(Slow(), []) == 0  # type: ignore[arg-type]
    assert search_all(Slow(), []) == ({}, 0.0)  # type: ignore[arg-type]
