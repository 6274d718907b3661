"""Query generation, comparison and preparation from the command line: what they make, share, keep and refuse."""

from __future__ import annotations

import gzip
import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from prepare_samples import corpus, make_nq, make_triviaqa, trivia
from prepare_samples import write_lines as write_rows
from safetensors.torch import load_file
from tiny import make_beir, make_t5, tiny_flags, tiny_values, write_lines

from nci import __version__, parsers
from nci.calibrate import withheld
from nci.config import CalibrateConfig, Config, changed
from nci.corpus import open_dataset
from nci.errors import ConfigError
from nci.index import Index
from nci.pairs import first_of_each
from nci.querygen import QueryGenConfig, read_generated, write_generated
from nci.recipe import Recipe
from nci.system_checks import generated_source
from nci.systems import make, needs, seeds_of
from nci.workbench import Workbench

Nci = Callable[..., tuple[int, str, str]]
Ok = Callable[..., str]
SHORT = ("--max-source", "48", "--max-target", "8", "--device", "cpu")


@pytest.fixture
def flags(tmp_path: Path, encoder: Path) -> list[str]:
    """Of nci compare: tiny settings, a folder of its own."""
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tiny_values(encoder, train={"epochs": 0.5})))
    return ["--preset", str(tmp_path / "c.yaml"), "-o", str(tmp_path / "out"), "--quiet", "--device", "cpu"]


@pytest.fixture(scope="module")
def queries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty generated queries for each of two documents."""
    rows = [{"doc_id": f"d{i % 2}", "query": f"melody {i}"} for i in range(40)]
    return write_lines(tmp_path_factory.mktemp("generated") / "queries.jsonl", rows)


# ---- querygen


@pytest.mark.slow
def test_queries_by_a_generator_trained_here(ok: Ok, run: Nci, beir: Path, encoder: Path, tmp_path: Path) -> None:
    command = ["querygen", beir, "--encoder", encoder, "--per-document", "3", "--epochs", "0.5", *SHORT]
    command += ["--filter", "any"]
    code, out, err = run(*command, "-o", tmp_path / "g")
    assert code == 0, err
    assert "queries a second" in err
    kept, written = (read_generated(tmp_path / "g" / name) for name in (".", "all"))
    assert max(Counter(doc_id for _, doc_id in written).values()) == 3
    assert 0 < len(kept) <= len(written)
    assert out.startswith(f"{len(kept):,} queries for {len({d for _, d in kept})} of 60 documents")
    assert "training   a model that writes" in err
    assert "is complete" not in err
    file = tmp_path / "g" / "queries.jsonl"
    before = file.stat().st_mtime_ns
    again = run(*command, "-o", tmp_path / "g")
    assert (again[0], again[1], file.stat().st_mtime_ns) == (0, out, before)
    assert again[2] == f"querygen   {file} is complete\n", "nothing is loaded, written or searched"
    ok(*command[:-1], "all", "-o", tmp_path / "g")
    assert file.stat().st_mtime_ns > before
    both = read_generated(tmp_path / "g")
    ok(*command[:-2], "-o", tmp_path / "g", "--shard-size", "7")
    assert read_generated(tmp_path / "g") == written, "another size of shards writes the same"
    assert set(both) <= set(kept) <= set(written)
    assert len(both) < len(written)


@pytest.mark.slow
def test_queries_by_a_model_that_is_trained_further(ok: Ok, beir: Path, encoder: Path, tmp_path: Path) -> None:
    t5 = make_t5(tmp_path / "t5")
    command = ["querygen", beir, "--filter", "none", "--per-document", "2", *SHORT]
    ok(*command, "--generator", t5, "-o", tmp_path / "plain")
    ok(*command, "--fine-tune", t5, "--epochs", "0.5", "-o", tmp_path / "tuned")
    plain, tuned = (read_generated(tmp_path / name) for name in ("plain", "tuned"))
    assert {doc_id for _, doc_id in plain} == {doc_id for _, doc_id in tuned}
    assert plain != tuned
    ok(*command, "--generator", tmp_path / "tuned" / "generator", "-o", tmp_path / "again")
    assert read_generated(tmp_path / "again") == tuned


def test_without_training_queries_documents_speak_for_themselves(run: Nci, tmp_path: Path) -> None:
    docs = write_lines(tmp_path / "docs.jsonl", [{"id": "a", "title": "Pears", "text": "Ripe pears. Ripe plums."}])
    code, _, err = run("querygen", docs, "-o", tmp_path / "g", "--filter", "none", "--per-document", "2", *SHORT)
    assert code == 0
    assert "no generator" in err
    assert read_generated(tmp_path / "g")[0] == ("Pears", "a")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--filter", "some"], "--filter is any, all or none"),
        (["--generator", "a", "--fine-tune", "b"], "give one of them"),
        (["--per-document", "0"], "--per-document is at least 1"),
        (["--epochs", "0"], "--epochs is above 0"),
        (["--max-source", "0"], "--max-source is at least 1"),
        (["--shard-size", "0"], "--shard-size is at least 1"),
        (["--top-p", "0"], "--top-p is above 0"),
        (["--fine-tune", "nowhere"], "nowhere"),
    ],
)
def test_wrong_ways_to_generate_are_one_line(run: Nci, beir: Path, tmp_path: Path, words: list[str], said: str) -> None:
    code, _, err = run("querygen", beir, "-o", tmp_path / "g", "--device", "cpu", *words)
    assert code == 1
    assert said in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "g" / "queries.jsonl").exists()


def test_fine_tuning_needs_training_queries(run: Nci, tmp_path: Path) -> None:
    docs = write_lines(tmp_path / "docs.jsonl", [{"id": "a", "text": "Ripe pears."}])
    code, _, err = run("querygen", docs, "-o", tmp_path / "g", "--fine-tune", "t5-small", "--device", "cpu")
    assert (code, "--fine-tune needs training queries" in err) == (1, True)


# ---- generated queries in an index and in a comparison


def test_an_index_trains_on_a_file_of_queries(run: Nci, ok: Ok, beir: Path, encoder: Path, queries: Path) -> None:
    out = queries.parent / "my.index"
    ok("index", beir, "-o", out, "--generated", queries, *tiny_flags(encoder))
    assert Index(out).manifest["report"]["pairs"]["generated"] == 30, "15 a document"
    code, _, err = run("index", beir, "-o", out, "--generated", "nowhere.jsonl", *tiny_flags(encoder))
    assert (code, "nowhere.jsonl" in err, len(err.splitlines())) == (1, True, 1)


def bench_of(beir: Path, folder: Path, encoder: Path, generated: Path | Recipe | None = None) -> Workbench:
    dataset = open_dataset(beir)
    assert dataset is not None
    config = Config.from_dict(tiny_values(encoder, train={"epochs": 0.5}))
    return Workbench(dataset, folder, config, device="cpu", generated_from=generated, seeds=2)


@pytest.mark.slow
def test_every_system_takes_its_share_of_the_queries(beir: Path, tmp_path: Path, encoder: Path, queries: Path) -> None:
    bench = bench_of(beir, tmp_path, encoder, queries)
    for name, found in (("bm25+qg", False), ("bm25+qg50", True)):
        hits = make(bench, name)[0].search("36", 5)
        assert ("d0" in [hit.doc_id for hit in hits]) == found, "a document's first 15 of 20, or all of them"
    shares = {"nci": 0, "nci-qg": 30, "nci[pairs.generated=1]": 30, "nci-qg50": 40, "nci-pure": 30, "dsi": 0}
    for name, wanted in shares.items():
        index = make(bench, name)[0]
        assert isinstance(index, Index)
        assert index.manifest["report"]["pairs"].get("generated", 0) == wanted, name
    kept = first_of_each([("a", "1"), ("b", "2"), ("c", "1"), ("d", "1")], 2)
    assert list(kept) == [("a", "1"), ("b", "2"), ("c", "1")]


@pytest.mark.slow
def test_missing_queries_are_made_once(
    beir: Path, tmp_path: Path, encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = QueryGenConfig(per_document=2, max_source=48, max_target=8)
    recipe = Recipe(settings, encoder=str(encoder), epochs=0.5, keep="none")
    bench = bench_of(beir, tmp_path, encoder, recipe)
    assert len(bench.generated) > 60
    (folder,) = tmp_path.glob("querygen-*")
    assert read_generated(folder) == bench.generated
    monkeypatch.setattr("nci.workbench.make_queries", lambda *_, **__: pytest.fail("they were made again"))
    assert replace(bench, made={}).generated == bench.generated
    other = replace(recipe, settings=replace(settings, seed=1))
    assert replace(bench, generated_from=other).generated_key != bench.generated_key


@pytest.mark.parametrize(
    ("option", "names", "per_document", "wanted"),
    [
        ("auto", "bm25,nci", None, None),
        ("auto", "bm25+qg", None, 15),
        ("auto", "rrf:bm25+qg50+dense", None, 50),
        ("auto", "nci,rrf:nci-zeroed+bm25,nci-ensemble,dsi", None, None),
        ("auto", "nci,nci-qg", None, 15),
        ("auto", "few=nci-pure[tree.k=3]", None, 15),
        ("auto", "nci-pure[pairs.generated=0]", None, None),
        ("auto", "nci[pairs.generated=0.3]", None, 15),
        ("auto", "bm25+qg,nci-qg50", 7, 7),
        ("none", "bm25,nci-pure", None, None),
        ("some.jsonl", "bm25", None, Path("some.jsonl")),
    ],
)
def test_which_comparisons_make_queries(option: str, names: str, per_document: int | None, wanted: object) -> None:
    config = Config.from_dict({"embed": {"encoder": "mine"}})
    found = generated_source(option, names.split(","), config, per_document=per_document)
    if isinstance(found, Recipe):
        assert (found.settings.per_document, found.encoder) == (wanted, "mine")
    else:
        assert found == wanted


# ---- compare


def test_a_comparison_on_the_command_line(run: Nci, ok: Ok, tmp_path: Path, beir: Path, flags: list[str]) -> None:
    files = ["--json", tmp_path / "r.json", "--latex", tmp_path / "t.tex", "--plot", tmp_path / "p.png"]
    out = ok("compare", beir, "--systems", "bm25, bm25+trainq", "--split", "test,dev,test", *flags, *files)
    assert "beir: test, 12 queries" in out
    assert "beir: dev, 12 queries" in out
    assert out.count("R@k is the share") == 1
    found = json.loads((tmp_path / "r.json").read_text())
    assert (found["data"], found["split"], found["nci"]) == ("beir", "test", __version__)
    assert found["config"] == Config.preset(flags[1]).to_dict()
    assert found["preset"] == flags[1]
    assert "core" in found["device"]
    assert found["test"] == "paired bootstrap over documents, Holm-corrected over the 1 system"
    assert set(found["systems"]) == {"bm25", "bm25+trainq"}
    assert set(found["splits"]) == {"test", "dev"}
    assert (tmp_path / "t.tex").read_text().count("tabular") == 4
    assert [line for line in (tmp_path / "t.tex").read_text().splitlines() if line.startswith("% beir, dev, 12")]
    assert (tmp_path / "p.png").stat().st_size > 1000
    first = {name: [split["systems"][name]["R@1"] for split in found["splits"].values()] for name in found["systems"]}
    assert found["mean"]["systems"] == pytest.approx({name: sum(values) / 2 for name, values in first.items()})
    assert "beir: mean of R@1 on test and dev (%)" in out


@pytest.mark.slow
def test_an_ensemble_is_one_command(ok: Ok, tmp_path: Path, beir: Path, flags: list[str]) -> None:
    ok("compare", beir, "--systems", "nci-ensemble", "--seeds", "3", *flags, "--json", tmp_path / "r.json")
    found = json.loads((tmp_path / "r.json").read_text())
    assert list(found["systems"]) == ["nci-ensemble"]
    assert found["seeds"] == {"nci-ensemble": 1}
    indexes = [Index(path) for path in (tmp_path / "out" / "systems").glob("nci-*.index")]
    assert sorted(index.config.tree.seed for index in indexes) == [0, 1, 2]


def test_settings_of_indexes_and_baselines_are_flags(
    ok: Ok, tmp_path: Path, beir: Path, encoder: Path, flags: list[str]
) -> None:
    sets = ["--set", "train.epochs=0", "--set", "tree.k=3"]
    flat = ["--knn.weighting", "best", "--dual.epochs", "1", "--dual.max_length", "16", "--dual.encoder", str(encoder)]
    ok("compare", beir, "--systems", "knn,dpr,ance-maxp,nci", *flags, *sets, *flat, "--dual.refreshes", "1")
    systems = tmp_path / "out" / "systems"
    (index,) = systems.glob("nci-*.index")
    assert (Index(index).config.train.epochs, Index(index).config.tree.k) == (0, 3)
    (knn,), (dpr,) = systems.glob("knn-*"), systems.glob("dpr-*")
    assert json.loads((knn / "settings.json").read_text())["weighting"] == "best"
    settings = json.loads((dpr / "dual.json").read_text())["settings"]
    assert (settings["epochs"], settings["max_length"], settings["refreshes"], settings["passage"]) == (
        1,
        16,
        0,
        "firstp",
    )
    (maxp,) = systems.glob("ance-maxp-*")
    settings = json.loads((maxp / "dual.json").read_text())["settings"]
    assert (settings["refreshes"], settings["passage"]) == (1, "maxp")
    ok("compare", beir, "--systems", "knn", *flags)
    assert len(list(systems.glob("knn-*"))) == 2, "other settings are another system"


def test_flags_of_dense_search_on_the_command_line(
    ok: Ok, tmp_path: Path, beir: Path, encoder: Path, flags: list[str]
) -> None:
    for words in ([], ["--dense.pooling", "max"], ["--dense.max_length", "256"]):
        ok("compare", beir, "--systems", "dense", *flags, *words)
    assert len(list((tmp_path / "out" / "runs").glob("dense-0-test-*.trec"))) == 3
    assert len(list((tmp_path / "out" / "systems").glob("dense-*"))) == 2, "the first searches the index's own vectors"


def test_settings_are_changed_one_by_one() -> None:
    start = Config.preset("fast")
    config = changed(start, ["train.epochs=2", "model.anchor=none", "corpus.text_fields=[a, b]"])
    assert (config.train.epochs, config.model.anchor, config.corpus.text_fields) == (2, "none", ("a", "b"))
    assert replace(config, train=start.train, model=start.model, corpus=start.corpus) == start
    assert changed(start, ["train.encoder_lr=1e-4"]).train.encoder_lr == 1e-4, "a text to YAML"
    for wrong, said in {
        "train.epochs": "SECTION.FIELD=VALUE",
        "epochs=2": "SECTION.FIELD=VALUE",
        "train.bogus=2": "unknown setting train.bogus",
        "bogus.epochs=2": "unknown section 'bogus'",
        "train.epochs=": "^--set train.epochs=: expected a number$",
        "train.epochs=abc": "^--set train.epochs=abc: expected a number$",
        "train.epochs=-1": "^--set train.epochs is at least 0, not -1$",
        "tree.k=2.5": "^--set tree.k=2.5: expected a whole number$",
        "embed.normalise=1": "expected true or false$",
        "embed.encoder=[a]": "expected a text$",
        "corpus.text_fields=a": "expected a list or null$",
        "model.anchor=some": "^--set model.anchor is one of",
        "train.epochs=[": "is no value",
        "tree.k=1": "^--set tree.k is at least 2, not 1$",
    }.items():
        with pytest.raises(ConfigError, match=said):
            changed(start, [wrong])


def test_the_full_table_in_one_word(
    run: Nci, beir: Path, flags: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("nci.system_checks.TABLE", ("bm25", "dense-hnsw", "bm25-okapi"))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    code, _, err = run("compare", beir, *flags, "--systems", "bm25+trainq,table", "--json", tmp_path / "r.json")
    assert (code, len(err.splitlines())) == (0, 1)
    assert "dense-hnsw (pip install faiss" in err
    assert list(json.loads((tmp_path / "r.json").read_text())["systems"]) == ["bm25+trainq", "bm25", "bm25-okapi"]


# ---- mistakes


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Data sets with one thing wrong each."""
    folder = tmp_path_factory.mktemp("damaged")
    found = {name: make_beir(folder / name) for name in ("CUT", "UNJUDGED", "SCHEMA", "NODEV")}
    whole = gzip.compress((found["CUT"] / "corpus.jsonl").read_bytes())
    (found["CUT"] / "corpus.jsonl").unlink()
    (found["CUT"] / "corpus.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (found["UNJUDGED"] / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\ntest0\td1\t0\n")
    lines = [json.loads(line) for line in (found["SCHEMA"] / "corpus.jsonl").read_text().splitlines()]
    write_lines(found["SCHEMA"] / "corpus.jsonl", ({"key": row["_id"], "body_text": row["text"]} for row in lines))
    (found["NODEV"] / "qrels" / "dev.tsv").unlink()
    header, *rows = (found["NODEV"] / "qrels" / "train.tsv").read_text().splitlines()
    once = {row.split("\t")[1]: row for row in rows}  # one query of each document: none can be kept back
    (found["NODEV"] / "qrels" / "train.tsv").write_text("\n".join([header, *once.values(), ""]))
    return found


@pytest.mark.parametrize(
    ("data", "words", "said"),
    [
        ("BEIR", "--split none", 'no split "none"; there are: dev, test, train'),
        ("BEIR", "--split test,none", 'no split "none"'),
        ("BEIR", "--split ,", "at least one split"),
        ("BEIR", "--systems bogus", "there is no 'bogus'"),
        ("BEIR", "--systems rerank:bogus", "there is no 'bogus'"),
        ("BEIR", "--seeds 0", "--seeds is at least 1"),
        ("BEIR", "--jobs 0", "--jobs is at least 1"),
        ("BEIR", "--metrics Q@1", "Q@1"),
        ("BEIR", "--set epochs", "SECTION.FIELD=VALUE"),
        ("BEIR", "--systems bm25+qg --generated none", "needs generated queries"),
        ("BEIR", "--systems bm25+qg --generated nowhere.jsonl", "nowhere.jsonl"),
        ("BEIR", "--systems bm25+qg --per-document 0", "--per-document is at least 1"),
        ("BEIR", "--systems ,", "--systems names no system"),
        ("BEIR", "--systems bm25,dense,bm25", "--systems names bm25 2 times"),
        ("BEIR", "--seal.beam 0", "--seal.beam"),
        ("BEIR", "--split none --jobs 2", 'no split "none"'),
        ("BEIR", "--systems fold:bm25", "'fold' is built on nothing"),
        ("NODEV", "--systems sum:bm25+dense", "needs held-out queries"),
        ("NODEV", "--systems const:bm25", "needs held-out queries"),
        ("CUT", "", "corpus.jsonl.gz: the gzip file is cut off"),
        ("UNJUDGED", "", "no query of the split test has a relevant document"),
        ("SCHEMA", "", "corpus.jsonl, line 1"),
        ("MISSING", "", "no BEIR folder"),
    ],
)
def test_a_mistake_in_a_comparison_is_one_line(
    run: Nci, beir: Path, damaged: dict[str, Path], flags: list[str], tmp_path: Path, data: str, words: str, said: str
) -> None:
    places = {**damaged, "BEIR": beir, "MISSING": tmp_path / "missing"}
    code, out, err = run("compare", places[data], *flags, "--systems", "bm25", *words.split())
    assert (code, out) == (1, ""), err
    assert said in err
    assert len(err.splitlines()) == 1
    assert not list((tmp_path / "out").glob("runs/*.json"))


def test_mistakes_in_preparing_are_one_line(run: Nci, ok: Ok, tmp_path: Path) -> None:
    page = {"Angola.txt": "Long. " * 100}
    items = {"train": [trivia(1, "Where?", "Angola.txt")], "dev": [trivia(2, "Which?", "Angola.txt")]}
    pages = make_triviaqa(tmp_path / "triviaqa", items, page)
    ok("prepare", "triviaqa", pages, "-o", tmp_path / "short", "--max-chars", "11", "--quiet")
    assert corpus(tmp_path / "short")[0]["text"] == "Long. Long."
    source = make_nq(tmp_path / "nq")
    cut = Path(shutil.copytree(source, tmp_path / "cut"))
    shard = cut / "train" / "nq-train-01.jsonl.gz"
    shard.write_bytes(shard.read_bytes()[:-20])
    renamed = Path(shutil.copytree(source, tmp_path / "renamed"))
    write_rows(renamed / "dev" / "nq-dev-00.jsonl.gz", [{"question": "who", "id": 1, "document_text": "<H1> A </H1>"}])
    for kind, src, more, said in (
        ("nq320k", cut, [], "nq-train-01.jsonl.gz: the gzip file is cut off"),
        ("nq320k", renamed, [], '"question_text" is missing'),
        ("nq320k", source, ["--max-chars", "9"], "--max-chars cuts the pages of triviaqa"),
        ("triviaqa", pages, ["--max-chars", "0"], "--max-chars is at least 1"),
        ("bogus", source, [], "unknown data set 'bogus'"),
    ):
        code, out, err = run("prepare", kind, src, "-o", tmp_path / "out", "--quiet", *more)
        assert (code, out, len(err.splitlines())) == (1, "", 1), err
        assert said in err
        assert not (tmp_path / "out").exists()


def test_dual_encoders_train_as_many_layers_as_the_index_tunes(beir: Path, encoder: Path, tmp_path: Path) -> None:
    dataset = open_dataset(beir)
    assert dataset is not None
    config = Config.from_dict(tiny_values(encoder, tune={"epochs": 1, "layers": 1}))
    assert Workbench(dataset, tmp_path, config).settings["dual"].layers == 1
    for given in ({"layers": 0}, {"encoder": "another"}):
        assert Workbench(dataset, tmp_path, config, baselines={"dual": given}).settings["dual"].layers == 0
    untuned = Config.from_dict(tiny_values(encoder, tune={"epochs": 0, "layers": 1}))
    assert Workbench(dataset, tmp_path, untuned).settings["dual"].layers == 0
    assert parsers.compare([]).get_defaults().dual.layers is None, "as the index, where nobody says otherwise"


def test_variants_may_have_fewer_seeds_than_nci(beir: Path, tmp_path: Path, encoder: Path) -> None:
    dataset = open_dataset(beir)
    assert dataset is not None
    bench = Workbench(dataset, tmp_path, Config.from_dict(tiny_values(encoder)), seeds=3, variant_seeds=1)
    assert [seeds_of(bench, name) for name in ("nci", "nci-zeroed", "nci-pure", "dsi", "bm25")] == [3, 3, 1, 1, 1]
    bench.variant_seeds = None
    assert [seeds_of(bench, name) for name in ("nci", "nci-pure", "bm25")] == [3, 3, 1]


def test_ance_goes_on_from_dpr(beir: Path, tmp_path: Path, encoder: Path) -> None:
    """The first round is not trained twice, and mined negatives move the weights further."""
    dataset = open_dataset(beir)
    assert dataset is not None
    short = {"dual": {"epochs": 1, "refreshes": 1, "max_length": 24, "batch_size": 16}}
    bench = Workbench(dataset, tmp_path, Config.from_dict(tiny_values(encoder)), device="cpu", baselines=short)
    make(bench, "ance")
    dpr, ance = (next(tmp_path.glob(f"{name}-*")) for name in ("dpr", "ance"))
    settings = json.loads((ance / "dual.json").read_text())["settings"]
    assert (settings["encoder"], settings["epochs"], settings["refreshes"]) == (str(dpr / "encoder"), 0, 1)
    one, two = (load_file(folder / "encoder" / "model.safetensors") for folder in (dpr, ance))
    assert any(not torch.equal(one[name], two[name]) for name in one)


def test_calibration_gets_queries_of_a_generator_that_has_not_seen_what_is_withheld(
    beir: Path, tmp_path: Path, encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = open_dataset(beir)
    assert dataset is not None
    config = Config.from_dict(tiny_values(encoder, calibrate={"share": 0.3, "least": 2}))
    bench = Workbench(dataset, tmp_path, config, device="cpu", generated_from=Recipe(encoder=str(encoder)))
    told: list[list[tuple[str, str]]] = []

    def make_queries(documents: object, pairs: list[tuple[str, str]], *, out: Path, **_: object) -> Path:
        told.append(pairs)
        return write_generated(out / "queries.jsonl", [(f"made of {len(pairs)}", "d0")])

    monkeypatch.setattr("nci.workbench.make_queries", make_queries)
    hidden = withheld((doc_id for _, doc_id in bench.pairs), config.calibrate)
    assert hidden
    assert bench.held_out(config.calibrate) == bench.held_out(config.calibrate) != bench.generated
    assert told[0] == [pair for pair in bench.pairs if pair[1] not in hidden]
    assert told[1] == bench.pairs
    assert len(told) == 2
    assert bench.held_out(CalibrateConfig()) == []
    assert bench.fold.generated == bench.held_out(config.calibrate)
    assert len(told) == 2, "the fold's are the same ones"
    assert ("fold:generated queries", 0) in needs(bench, "nci-qg", 0)
    assert ("fold:generated queries", 0) not in needs(bench, "nci-qg[calibrate.share=0]", 0)
    assert needs(bench, "nci", 0) == []
