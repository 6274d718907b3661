"""The command line: what it prints, what it writes, and that every mistake is one line with the right exit code."""

from __future__ import annotations

import json
import shutil
import unicodedata
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tiny import POSITION, make_documents, python, tiny_config, tiny_flags, write_lines

import nci
from nci import cli, store
from nci.config import Config, presets
from nci.evaluate import read_run
from nci.index import Index

QUERY = "apple pear item0"


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory, encoder: Path, beir: Path) -> Path:
    out = tmp_path_factory.mktemp("index") / "my.index"
    nci.build(beir, out, tiny_config(encoder))
    return out


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory, encoder: Path, beir: Path) -> Path:
    out = tmp_path_factory.mktemp("index") / "second.index"
    nci.build(beir, out, tiny_config(encoder, tree={"seed": 1}, train={"epochs": 0}))
    return out


@pytest.fixture(scope="module")
def position(tmp_path_factory: pytest.TempPathFactory, encoder: Path, beir: Path) -> Path:
    out = tmp_path_factory.mktemp("index") / "position.index"
    nci.build(beir, out, tiny_config(encoder, model=POSITION))
    return out


Nci = Callable[..., tuple[int, str, str]]


# Index, search, evaluate, verify


@pytest.mark.slow
def test_queries_are_generated_before_an_index_is_built(
    run: Nci, encoder: Path, beir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a generator for the index, and by one for its calibration that has not seen what is withheld."""
    out, asked = tmp_path / "my.index", []

    def make(documents: Any, pairs: list[Any], *, out: Path, recipe: Any, device: str) -> None:
        asked.append((len(pairs), recipe.settings.per_document, recipe.encoder))
        write_lines(out / "queries.jsonl", [{"doc_id": "d0", "query": f"learned from {len(pairs)}"}])

    monkeypatch.setattr("nci.workbench.make_queries", make)
    flags = tiny_flags(encoder, calibrate={"share": 0.4, "least": 4}, pairs={"generated_queries": 7})
    command = ("index", beir, "-o", out, "--preset", "fast", *flags, "--generated")
    code, _, err = run(*command, "auto")
    assert code == 0, err
    (whole, *rest), (fold, *same) = asked
    assert rest == same == [7, str(encoder)]
    assert fold < whole
    assert store.read_manifest(Index(out).generation)["report"]["pairs"]["generated"] == 1
    assert run(*command, "auto")[0] == 0
    assert len(asked) == 2, "a second call finds them"


def test_queries_cannot_be_generated_without_any_to_learn_from(run: Nci, encoder: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("apple")
    code, _, err = run("index", texts, "-o", tmp_path / "my.index", *tiny_flags(encoder), "--generated", "auto")
    assert (code, len(err.splitlines())) == (1, 1)
    assert "--generated auto needs queries to learn from" in err
    assert not (tmp_path / "my.index").exists()


def test_a_data_set_is_no_place_for_an_index(run: Nci, encoder: Path, beir: Path) -> None:
    before = sorted(beir.rglob("*"))
    for generated in ([], ["--generated", "auto"]):
        code, _, err = run("index", beir, "-o", beir, *tiny_flags(encoder), *generated)
        assert (code, len(err.splitlines())) == (1, 1)
        assert "holds other files" in err
    assert sorted(beir.rglob("*")) == before


def test_from_files_to_hits(ok: Callable[..., str], run: Nci, encoder: Path, beir: Path, tmp_path: Path) -> None:
    out = tmp_path / "my.index"
    code, printed, err = run("index", beir, "-o", out, "--preset", "fast", *tiny_flags(encoder))
    assert (code, printed) == (0, "")
    assert "ready" in err
    assert f'nci search {out} "..."' in err
    config = Index(out).config
    assert config.train.alpha == Config.preset("fast").train.alpha, "flags change the preset"
    assert config.tree.k == 4
    hits = ok("search", out, QUERY, "-k", 3)
    lines = hits.splitlines()
    assert len(lines) == 6
    assert "[d0]" in lines[0]
    assert "fruit item0" in lines[0]
    assert lines[0].split()[0] == "1"
    table = ok("evaluate", out, beir, "--split", "test")
    assert "R@10" in table
    assert "12 queries of test" in table
    assert "whole (level 2)" in ok("verify", out)
    assert "whole (level 1)" in ok("verify", out, "--level", 1)


def test_a_second_run_of_the_same_command_does_nothing(run: Nci, encoder: Path, beir: Path, tmp_path: Path) -> None:
    command = ("index", beir, "-o", tmp_path / "my.index", *tiny_flags(encoder, train={"epochs": 0}))
    assert run(*command)[0] == 0
    code, _, err = run(*command)
    assert code == 0
    assert "is up to date" in err
    assert store.resolve(tmp_path / "my.index").name == "generation-000001"


def test_search_as_json(ok: Callable[..., str], index: Path, tmp_path: Path) -> None:
    written = json.loads(ok("search", index, QUERY, "-k", 4, "--json", "-"))
    assert set(written) - {"documents_scored"} == {"hits"}
    assert len(written["hits"]) == 4
    for rank, hit in enumerate(written["hits"], start=1):
        assert list(hit) == ["rank", "doc_id", "score", "title", "semantic_id", "source"]
        assert hit["rank"] == rank
        assert hit["source"] == "nci"
        assert all(isinstance(digit, int) for digit in hit["semantic_id"])
    expected = Index(index).search(QUERY, k=4)
    assert [(hit["doc_id"], hit["score"]) for hit in written["hits"]] == [(h.doc_id, h.score) for h in expected]
    printed = ok("search", index, QUERY, "-k", 4, "--json", tmp_path / "hits.json")
    assert json.loads((tmp_path / "hits.json").read_text()) == written
    assert "[d0]" in printed, "hits are printed too where the object goes to a file"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hits.json"]


def test_evaluate_as_json(ok: Callable[..., str], index: Path, beir: Path) -> None:
    written = json.loads(ok("evaluate", index, beir, "--split", "test", "--json", "-"))
    assert list(written)[:4] == ["metrics", "queries", "seconds", "documents_scored"]
    assert (written["data"], written["split"], written["indexes"]) == ("beir", "test", [str(index)])
    assert written["config"] == Index(index).config.to_dict()
    assert (written["nci"], "core" in written["device"]) == (nci.__version__, True)
    assert list(written["metrics"]) == ["R@1", "R@10", "R@100", "RR@100"]
    assert all(0 <= value <= 1 for value in written["metrics"].values())
    assert written["metrics"]["R@100"] == 1.0, "100 hits of 60 documents hold every relevant one"
    assert written["metrics"]["R@1"] <= written["metrics"]["R@10"]
    assert written["queries"] == 12
    assert written["documents_scored"] == 60
    assert written["seconds"] >= 0
    own = json.loads(ok("evaluate", index, beir, "--json", "-", "--metrics", "nDCG@10,Success@1", "-k", 10))
    assert list(own["metrics"]) == ["nDCG@10", "Success@1"]


def test_evaluate_agrees_with_its_own_run(ok: Callable[..., str], index: Path, beir: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.trec"
    written = json.loads(ok("evaluate", index, beir, "--run", path, "--json", "-"))
    from nci.corpus import Dataset
    from nci.evaluate import evaluate

    qrels = Dataset(beir).split("test")[1]
    assert evaluate(read_run(path), qrels, list(written["metrics"])) == pytest.approx(written["metrics"])


@pytest.mark.parametrize("system", ["trained", "untrained", "zeroed"])
def test_evaluate_other_systems(ok: Callable[..., str], index: Path, beir: Path, system: str) -> None:
    printed = ok("evaluate", index, beir, "--system", system)
    assert ("nci" if system == "trained" else f"nci {system}") in printed


def test_verify_as_json(ok: Callable[..., str], run: Nci, index: Path, tmp_path: Path) -> None:
    assert json.loads(ok("verify", index, "--json", "-"))["problems"] == []
    copy = Path(shutil.copytree(index, tmp_path / "my.index"))
    path = store.resolve(copy) / "vectors.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    code, out, err = run("verify", copy, "--json", "-")
    assert (code, err) == (1, "")
    assert len(json.loads(out)["problems"]) == 1
    code, out, _ = run("verify", copy, "--level", 1)
    assert code == 1
    assert "vectors.npy" in out


def test_many_queries_become_a_run(ok: Callable[..., str], index: Path, beir: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.trec"
    assert ok("search", index, "--queries", beir / "queries.jsonl", "--run", path, "-k", 20) == ""
    ids = [json.loads(line)["_id"] for line in (beir / "queries.jsonl").read_text().splitlines()]
    seen: dict[str, list[tuple[int, np.float32]]] = {}
    for line in path.read_text().splitlines():
        query_id, zero, doc_id, rank, score, tag = line.split(" ")
        assert (zero, tag) == ("Q0", "nci")
        assert doc_id.startswith("d")
        seen.setdefault(query_id, []).append((int(rank), np.float32(score)))
    assert list(seen) == ids
    for rows in seen.values():
        assert [rank for rank, _ in rows] == list(range(1, 21))
        scores = [score for _, score in rows]
        assert all(one > two for one, two in pairwise(scores))


@pytest.mark.parametrize(("name", "text"), [("q.tsv", "q1\tapple\nq2\twave\n"), ("q.txt", "apple\nwave\n")])
def test_queries_of_other_files(ok: Callable[..., str], index: Path, tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    written = json.loads(ok("search", index, "--queries", tmp_path / name, "-k", 2, "--json", "-"))
    assert len(written["queries"]) == 2
    assert all(len(result["hits"]) == 2 for result in written["queries"])
    printed = ok("search", index, "--queries", tmp_path / name, "-k", 2)
    assert "\napple\n" in printed
    assert "\nwave\n" in printed


def test_explain_shows_the_digits(ok: Callable[..., str], index: Path, second: Path) -> None:
    printed = ok("search", index, QUERY, "-k", 2, "--explain")
    assert "how it came about:" in printed
    assert "d0: log p -" in printed
    both = ok("search", index, second, QUERY, "-k", 2, "--explain")
    assert "how index 1 came to it:" in both
    assert "how index 2 came to it:" in both


@pytest.mark.parametrize(("precision", "said"), [("fp32", False), ("bf16", True), ("int8", True)])
def test_explain_says_that_search_rounds(
    ok: Callable[..., str], encoder: Path, tmp_path: Path, precision: str, said: bool
) -> None:
    corpus = write_lines(
        tmp_path / "docs.jsonl", [{"id": f"d{number}", "text": f"apple {number}"} for number in range(5)]
    )
    flags = tiny_flags(encoder, train={"epochs": 0}, search={"precision": precision})
    ok("index", corpus, "-o", tmp_path / "my.index", *flags)
    assert ("search rounds" in ok("search", tmp_path / "my.index", "apple", "--explain")) == said


@pytest.mark.parametrize("merge", ["rrf", "paper"])
def test_an_ensemble_of_two(ok: Callable[..., str], index: Path, second: Path, beir: Path, merge: str) -> None:
    hits = json.loads(ok("search", index, second, QUERY, "-k", 5, "--merge", merge, "--json", "-"))["hits"]
    from nci.index import search_many

    expected = search_many([Index(index), Index(second)], [QUERY], 5, method=merge)[0]  # type: ignore[arg-type]
    assert [(hit["doc_id"], hit["score"]) for hit in hits] == [(hit.doc_id, hit.score) for hit in expected]
    written = json.loads(ok("evaluate", index, second, beir, "--merge", merge, "--json", "-"))
    assert written["documents_scored"] == 120


def test_beam_and_penalty_reach_the_search(ok: Callable[..., str], index: Path) -> None:
    opened = Index(index)
    for flags, options in (
        (["--beam", "1"], {"beam": 1}),
        (["--length-penalty", "1"], {"length_penalty": 1.0}),
        (["--beam", "60", "--length-penalty", "0.8"], {"beam": 60, "length_penalty": 0.8}),
    ):
        hits = json.loads(ok("search", index, QUERY, "-k", 3, "--json", "-", *flags))["hits"]
        expected = opened.search(QUERY, k=3, **options)
        assert [(hit["doc_id"], hit["score"]) for hit in hits] == [(hit.doc_id, hit.score) for hit in expected]


def test_without_the_tree(ok: Callable[..., str], run: Nci, index: Path, position: Path) -> None:
    assert json.loads(ok("search", position, QUERY, "--unconstrained", "--beam", "200", "--json", "-"))["hits"]
    code, _, err = run("search", index, QUERY, "--unconstrained")
    assert code == 1
    assert "--unconstrained" in err
    assert len(err.splitlines()) == 1


# Settings


def test_printed_settings_can_be_read_again(ok: Callable[..., str], encoder: Path, tmp_path: Path) -> None:
    flags = [*tiny_flags(encoder), "--on-error", "skip", "--text-fields", "a, b", "--id-field", "key"]
    printed = ok("index", "corpus", "-o", tmp_path / "x", "--preset", "fast", *flags, "--print-config")
    config = Config.from_dict(yaml.safe_load(printed))
    assert config.corpus.on_error == "skip"
    assert config.corpus.text_fields == ("a", "b")
    assert config.corpus.id_field == "key"
    assert config.tree == tiny_config(encoder).tree
    (tmp_path / "mine.yaml").write_text(printed)
    again = ok("index", "corpus", "-o", tmp_path / "x", "--config", tmp_path / "mine.yaml", "--print-config")
    assert again == printed
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("name", presets())
def test_every_preset_can_be_printed(ok: Callable[..., str], tmp_path: Path, name: str) -> None:
    printed = ok("index", "corpus", "-o", tmp_path / "x", f"--preset={name}", "--print-config")
    assert Config.from_dict(yaml.safe_load(printed)) == Config.preset(name)


def test_a_flag_beats_the_file(ok: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("tree: {k: 7, c: 9}\n")
    printed = ok("index", "c", "-o", "x", "--config", tmp_path / "mine.yaml", "--tree.k", "5", "--print-config")
    config = Config.from_dict(yaml.safe_load(printed))
    assert (config.tree.k, config.tree.c) == (5, 9)


def test_other_columns(ok: Callable[..., str], encoder: Path, tmp_path: Path) -> None:
    rows = [{"key": d.doc_id, "name": d.title, "abstract": d.text, "body": "salt"} for d in make_documents(8)]
    corpus = write_lines(tmp_path / "docs.jsonl", rows)
    columns = ("--id-field", "key", "--title-field", "name", "--text-fields", "abstract,body")
    ok("index", corpus, "-o", tmp_path / "my.index", *columns, *tiny_flags(encoder, train={"epochs": 0}))
    document = Index(tmp_path / "my.index").document("d3")
    assert document["title"] == rows[3]["name"]
    assert rows[3]["abstract"] in document["text"]
    assert "salt" in document["text"]


def test_bad_lines_can_be_skipped(ok: Callable[..., str], run: Nci, encoder: Path, tmp_path: Path) -> None:
    corpus = write_lines(tmp_path / "docs.jsonl", ({"id": d.doc_id, "text": d.text} for d in make_documents(8)))
    with corpus.open("a") as stream:
        stream.write("{broken\n")
    flags = tiny_flags(encoder, train={"epochs": 0})
    code, _, err = run("index", corpus, "-o", tmp_path / "my.index", *flags)
    assert code == 1
    assert f"{corpus}, line 9" in err.splitlines()[-1]
    code, _, err = run("index", corpus, "-o", tmp_path / "my.index", "--on-error", "skip", *flags)
    assert code == 0
    assert "rejects.jsonl" in err
    assert len((tmp_path / "my.index" / "reports" / "rejects.jsonl").read_text().splitlines()) == 1


# Quiet


@pytest.mark.slow
def test_quiet_says_nothing_on_standard_error(encoder: Path, beir: Path, tmp_path: Path) -> None:
    flags = tiny_flags(encoder, train={"checkpoint_minutes": 0})
    result = python("-m", "nci", "index", str(beir), "-o", str(tmp_path / "my.index"), "--quiet", *flags)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.slow
def test_there_are_no_bars_where_there_is_no_terminal(encoder: Path, beir: Path, tmp_path: Path) -> None:
    flags = tiny_flags(encoder, train={"checkpoint_minutes": 0})
    result = python("-m", "nci", "index", str(beir), "-o", str(tmp_path / "my.index"), *flags)
    assert result.returncode == 0
    assert "it/s" not in result.stderr
    stages = [line.split()[0] for line in result.stderr.splitlines()]
    assert stages == ["documents", "embed", "tree", "lexical", "pairs", "train", "publish", "ready"]


def test_a_quiet_search_prints_hits_only(run: Nci, index: Path) -> None:
    code, out, err = run("search", index, QUERY, "--quiet")
    assert (code, err) == (0, "")
    assert "[d0]" in out
    assert "documents scored" in run("search", index, QUERY)[2]


# What a terminal must not see

NASTY = "\x1b[31mred\x1b[0m \x07bell \x9b31m \u202eleft\r\nnext\tline"


def tame(text: str) -> bool:
    return all(not unicodedata.category(character).startswith("C") for character in text.replace("\n", ""))


def test_titles_texts_and_queries_cannot_steer_the_terminal(
    ok: Callable[..., str], encoder: Path, tmp_path: Path
) -> None:
    rows = [{"id": f"d{number}", "title": f"{NASTY} {number}", "text": f"apple {NASTY}"} for number in range(5)]
    corpus = write_lines(tmp_path / "docs.jsonl", rows)
    ok("index", corpus, "-o", tmp_path / "my.index", *tiny_flags(encoder, train={"epochs": 0}))
    printed = ok("search", tmp_path / "my.index", "apple", "--explain")
    assert "red" in printed
    assert tame(printed)
    write_lines(tmp_path / "queries.jsonl", [{"_id": "q", "text": f"apple {NASTY}"}])
    assert tame(ok("search", tmp_path / "my.index", "--queries", tmp_path / "queries.jsonl"))
    hits = json.loads(ok("search", tmp_path / "my.index", "apple", "--json", "-"))["hits"]
    assert any("\x1b" in hit["title"] for hit in hits), "programs get the title as it is"


def test_errors_about_data_cannot_steer_the_terminal(run: Nci, encoder: Path, beir: Path, tmp_path: Path) -> None:
    data = Path(shutil.copytree(beir, tmp_path / "beir"))
    with (data / "qrels" / "train.tsv").open("a") as stream:
        stream.write("train0\t\x1b[31mnobody\t1\n")
    code, _, err = run("index", data, "-o", tmp_path / "my.index", *tiny_flags(encoder))
    assert code == 1
    assert tame(err)
    corpus = write_lines(tmp_path / "docs.jsonl", [{"id": "\x1b[31mred", "text": "apple"}])
    code, _, err = run("index", corpus, "-o", tmp_path / "other.index", *tiny_flags(encoder))
    assert code == 1
    assert tame(err)


# Mistakes


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory, index: Path) -> Path:
    copy = Path(shutil.copytree(index, tmp_path_factory.mktemp("broken") / "my.index"))
    path = store.resolve(copy) / "trie.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return copy


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory, index: Path) -> Path:
    copy = Path(shutil.copytree(index, tmp_path_factory.mktemp("newer") / "my.index"))
    old = store.resolve(copy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "FORMAT_VERSION", 99)

        def write(staging: Path) -> dict[str, object]:
            shutil.copytree(old, staging, dirs_exist_ok=True, ignore=shutil.ignore_patterns("manifest.json"))
            return {}

        store.publish(copy, write)
    return copy


@pytest.fixture(scope="module")
def places(
    tmp_path_factory: pytest.TempPathFactory, index: Path, second: Path, broken: Path, newer: Path, beir: Path
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("places")
    (folder / "file").write_text("a file")
    (folder / "broken.jsonl").write_text('{"id": "a", "text": "apple"}\n{"id": \n')
    (folder / "binary.jsonl").write_bytes(b"\xff\xfe\x00\x01")
    (folder / "empty.jsonl").write_text("")
    (folder / "docs.xyz").write_text("apple")
    (folder / "twice.jsonl").write_text('{"id": "a", "text": "apple"}\n' * 2)
    (folder / "folder").mkdir()
    (folder / "words.yaml").write_text("just words")
    (folder / "unknown.yaml").write_text("tree: {bogus: 1}")
    (folder / "queries.jsonl").write_text('{"_id": "q"}\n')
    bad = Path(shutil.copytree(beir, folder / "bad"))
    (bad / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\ntest0\td1\n")
    foreign = Path(shutil.copytree(beir, folder / "foreign"))
    (foreign / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nnobody\td1\t1\n")
    missing = folder / "missing"
    return {
        **{"INDEX": index, "SECOND": second, "BROKEN": broken, "NEWER": newer, "BEIR": beir, "BAD": bad},
        **{"FOREIGN": foreign, "FILE": folder / "file", "MISSING": missing, "HERE": folder},
    }


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("bogus", 2, "no command 'bogus'"),
        ("search", 2, ""),
        ("search INDEX", 2, "give an index and a query"),
        ("search INDEX SECOND", 2, "the query comes last"),
        ("search MISSING apple", 1, "is not an index"),
        ("search HERE apple", 1, "no CURRENT file"),
        ("search FILE apple", 1, "is not an index"),
        ("search BROKEN apple", 1, "trie.safetensors"),
        ("search NEWER apple", 1, "upgrade nci"),
        ("search http://localhost:1 apple", 1, "not part of this version"),
        ("search INDEX EMPTY", 1, "the query is empty"),
        ("search INDEX BLANK", 1, "the query is empty"),
        ("search INDEX SURROGATE", 1, "surrogate"),
        ("search INDEX apple -k 0", 1, "-k is at least 1"),
        ("search INDEX apple -k -3", 1, "-k"),
        ("search INDEX apple -k ten", 2, "k"),
        ("search INDEX apple --beam 0", 1, "--beam is at least 1"),
        ("search INDEX apple --beam wide", 2, "beam"),
        ("search INDEX apple --bogus", 2, "bogus"),
        ("search INDEX apple --merge bogus", 1, "--merge is rrf or paper"),
        ("search INDEX apple --device bogus", 1, "--device"),
        ("search INDEX apple --json MISSING/hits.json", 1, "--json"),
        ("search INDEX apple --json HERE/folder", 1, "--json"),
        ("search INDEX apple --json FILE/hits.json", 1, "--json"),
        ("search INDEX apple --json .", 1, "--json"),
        ("search INDEX --queries MISSING.jsonl", 1, "does not exist"),
        ("search INDEX --queries HERE/queries.jsonl", 1, "queries.jsonl, line 1"),
        ("search INDEX --queries BEIR/queries.jsonl --run MISSING/out.trec", 1, "--run"),
        ("search INDEX --queries BEIR/queries.jsonl --run HERE/folder", 1, "--run"),
        ("evaluate INDEX", 2, "give an index and a data set"),
        ("evaluate INDEX BEIR --split bogus", 1, 'no split "bogus"; there are: dev, test, train'),
        ("evaluate INDEX HERE", 1, "no BEIR folder"),
        ("evaluate INDEX MISSING", 1, "no BEIR folder"),
        ("evaluate INDEX BAD", 1, "test.tsv, line 2"),
        ("evaluate INDEX FOREIGN", 1, "nobody"),
        ("evaluate MISSING BEIR", 1, "is not an index"),
        ("evaluate BROKEN BEIR", 1, "trie.safetensors"),
        ("evaluate INDEX BEIR --metrics bogus", 1, "'bogus' is no metric"),
        ("evaluate INDEX BEIR --system bogus", 1, "--system"),
        ("evaluate INDEX BEIR -k 0", 1, "-k"),
        ("evaluate INDEX BEIR --json MISSING/x.json", 1, "--json"),
        ("verify MISSING", 1, "is not an index"),
        ("verify NEWER", 1, "upgrade nci"),
        ("verify INDEX --level 7", 1, "--level is 1 or 2"),
        ("verify INDEX --level high", 2, "level"),
        ("verify", 2, ""),
        ("index BEIR", 2, "out"),
        ("index MISSING.jsonl -o OUT", 1, "cannot be read"),
        ("index HERE/broken.jsonl -o OUT", 1, "broken.jsonl, line 2"),
        ("index HERE/binary.jsonl -o OUT", 1, "binary.jsonl, line 1"),
        ("index HERE/empty.jsonl -o OUT", 1, "empty"),
        ("index HERE/twice.jsonl -o OUT", 1, "twice.jsonl, line 2"),
        ("index HERE/docs.xyz -o OUT", 1, "unknown format"),
        ("index HERE/folder -o OUT", 1, "neither corpus.jsonl"),
        ("index BEIR -o FILE/my.index", 1, "FILE"),
        ("index BEIR -o OUT --preset bogus", 1, "no preset 'bogus'"),
        ("index BEIR -o OUT --config MISSING.yaml", 1, "no preset"),
        ("index BEIR -o OUT --config HERE/words.yaml", 1, "not a settings file"),
        ("index BEIR -o OUT --config HERE/unknown.yaml", 1, "tree.bogus"),
        ("index BEIR -o OUT --config fast", 1, "expected a .yaml file"),
        ("index BEIR -o OUT --config HERE/words.yaml --preset fast", 1, "exclude each other"),
        ("index BEIR -o OUT --tree.k 1", 1, "--tree.k"),
        ("index BEIR -o OUT --tree.k many", 2, "tree.k"),
        ("index BEIR -o OUT --tree.bogus 1", 2, "tree.bogus"),
        ("index BEIR -o OUT --model.head bogus", 2, "model.head"),
        ("index BEIR -o OUT --model.head tied", 1, "--model.adapter_layers"),
        ("index BEIR -o OUT --on-error bogus", 1, "--on-error"),
        ("index BEIR -o OUT --engine bogus", 1, "--engine"),
        ("index BEIR -o OUT --device bogus", 1, "--device"),
        ("index BEIR -o OUT --embed.encoder MISSING", 1, "no such folder"),
        ("index BEIR -o OUT --embed.encoder HERE", 1, "config.json"),
    ],
)
def test_a_mistake_is_one_line_and_an_exit_code(
    run: Nci, places: dict[str, Path], tmp_path: Path, encoder: Path, command: str, code: int, said: str
) -> None:
    names = {**places, "OUT": tmp_path / "out.index"}
    special = {"EMPTY": "", "BLANK": " \n", "SURROGATE": "\ud800"}
    argv = []
    for word in command.split():
        first, slash, rest = word.partition("/")
        stem, dot, suffix = first.partition(".")
        found = names.get(stem)
        argv.append(special.get(word, f"{found}{dot}{suffix}{slash}{rest}" if found else word))
    if argv[0] == "index" and "--embed.encoder" not in argv and "-o" in argv and "--config" not in argv:
        argv += tiny_flags(encoder, train={"epochs": 0})[:1]
    got, out, err = run(*argv)
    assert got == code, err
    assert "Traceback" not in out + err
    assert (str(names[said]) if said in names else said) in err
    stages = ("documents ", "calibrate ", "embed ", "tree ", "lexical ")
    lines = [line for line in err.splitlines() if not line.startswith(stages)]
    assert len(lines) == 1, err
    assert lines[0].startswith("nci")
    assert not (tmp_path / "out.index" / "CURRENT").exists()


@pytest.mark.slow
def test_exit_codes_of_a_real_process(tmp_path: Path) -> None:
    for argv, code in ((["--help"], 0), (["--version"], 0), ([], 2), (["bogus"], 2)):
        result = python("-m", "nci", *argv)
        assert result.returncode == code
        assert "Traceback" not in result.stderr
    result = python("-m", "nci", "search", str(tmp_path / "missing"), "apple")
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", list(cli.COMMANDS))
def test_every_command_explains_itself(ok: Callable[..., str], command: str) -> None:
    printed = ok(command, "--help")
    assert f"nci {command}" in printed
    assert "--quiet" in printed


def test_help_and_version(ok: Callable[..., str], run: Nci) -> None:
    for word in ("--help", "-h", "help"):
        assert all(command in ok(word) for command in cli.COMMANDS)
    assert ok("--version") == f"{nci.__version__}\n"
    assert run()[0] == 2


def test_a_stopped_command_says_how_to_go_on(run: Nci, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("nci.index.search_many", stop)
    code, _, err = run("search", index, QUERY)
    assert code == 130
    assert "Traceback" not in err
    assert "stopped" in err


def test_a_failed_json_leaves_no_file_behind(run: Nci, index: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    assert run("search", index, QUERY, "--json", tmp_path / "folder")[0] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
