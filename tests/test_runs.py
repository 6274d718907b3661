"""The scripts in runs/: every row of the paper's tables is settings of an index, and all steps run, tiny, from end to end."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import prepare_samples as samples
import pytest
import torch
import yaml
from tiny import (
    POSITION,
    environment,
    make_beir,
    make_documents,
    make_encoder,
    make_queries,
    make_tokenizer,
    models,
    tiny_values,
    write_lines,
)
from tokenizers.processors import TemplateProcessing

from nci import store
from nci.cli import COMMANDS, main
from nci.config import Config
from nci.names import INDEXES, config_of, labelled
from nci.querygen import QueryGenConfig, generate_queries, read_generated
from nci.runtime import quiet
from nci.systems import MAKERS

RUNS = Path(__file__).parent.parent / "runs"
SCRIPTS = {
    name: (RUNS / f"{name}.sh").read_text(encoding="utf-8")
    for name in ("nq320k", "triviaqa", "table", "ablations", "paper")
}
DOCS = (RUNS.parent / "docs" / "reproduce.md").read_text(encoding="utf-8")
DOCUMENTS = make_documents(24)
BY_ID = {document.doc_id: document for document in DOCUMENTS}
# how each kind of row differs from the paper's model
CHANGES: dict[str, dict[str, object]] = {
    **{row: {} for row in ("small", "base", "large", "ensemble", "unconstrained")},
    "no-generated": {"pairs.generated": 0.0},
    "no-documents": {"pairs.span_share": 0.0},
    "no-pawa": {"model.head": "tied", "model.adapter_layers": 0},
    "no-semantic": {"tree.ids": "random"},
    "no-regularisation": {"train.alpha": 0.0},
    **{f"layers-{layers}": {"model.adapter_layers": layers} for layers in (1, 2, 6, 8)},
    **{f"alpha-{alpha}": {"train.alpha": alpha} for alpha in (0.1, 0.2, 0.3)},
}

# the same for the rows of ablations.sh, from an index that is tuned, calibrated and regularised
ABLATIONS: dict[str, dict[str, object]] = {
    "base": {},
    **{row: CHANGES[row] for row in ("no-generated", "no-documents", "no-pawa", "no-semantic", "no-regularisation")},
    **{row: {f"model.{name}": value for name, value in POSITION.items()} for row in ("constrained", "unconstrained")},
    "layers-0": CHANGES["no-pawa"],
    "layers-1": {},
    **{f"layers-{layers}": {"model.adapter_layers": layers} for layers in (2, 4, 6, 8)},
    **{f"alpha-{alpha}": {"train.alpha": alpha} for alpha in (0, 0.1, 0.15, 0.2, 0.3)},
}
OURS: dict[str, dict[str, object]] = {
    "nci-generated": {"pairs.generated": 0.3, "lexical.generated": 15},
    "nci-no-documents": CHANGES["no-documents"],
    "no-lexical": {"model.score": "dense"},
    "no-lexical-queries": {"lexical.training": False},
    "no-rarity": {"lexical.rarity": 0},
    "no-pieces": {"embed.pieces": 0},
    "no-tuning": {"tune.epochs": 0, "tune.refreshes": 0},
    "no-calibration": {"calibrate.share": 0},
}


def script(name: str, *arguments: Path | str, **chosen: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(RUNS / f"{name}.sh"), *map(str, arguments)]
    variables = environment(PYTHON=sys.executable, **chosen)
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)


def expected(name: str) -> dict[str, list[str]]:
    """The paper's values as a script has them: row -> values."""
    tables = re.findall(r"^EXPECTED(?:_BASELINES)?='\n(.*?)'", SCRIPTS[name], re.M | re.S)
    return {words[0]: words[1:] for table in tables for line in table.splitlines() if (words := line.split())}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models: an encoder of documents, one of queries, a generator; and files as they are downloaded."""
    root = tmp_path_factory.mktemp("runs")
    return {
        "encoder": make_encoder(root / "bert"),
        "t5": make_encoder(root / "t5", kind="t5"),
        "generator": make_generator(root / "generator"),
        "nq320k": make_nq(root / "nq"),
        "triviaqa": make_triviaqa(root / "triviaqa"),
    }


def make_generator(folder: Path) -> Path:
    tokenizer = make_tokenizer()
    tokenizer.eos_token = "[SEP]"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A [SEP]", special_tokens=[("[SEP]", 3)])
    torch.manual_seed(0)
    config = models.T5Config(
        vocab_size=len(tokenizer), d_model=32, d_ff=32, d_kv=16, num_heads=2, num_layers=1,
        pad_token_id=0, eos_token_id=3, decoder_start_token_id=0,
    )  # fmt: skip
    model = models.T5ForConditionalGeneration(config)
    model.generation_config.suppress_tokens = [0, 1, 2]
    with quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def make_nq(folder: Path) -> Path:
    def rows(pairs: list[tuple[str, str]], first: int) -> Iterator[dict[str, Any]]:
        for number, (text, doc_id) in enumerate(pairs, start=first):
            page = BY_ID[doc_id]
            yield {**samples.simplified(number, page.title, page.text[:30], page.text), "question_text": text}

    samples.write_lines(folder / "nq-train-00.jsonl.gz", rows(make_queries(DOCUMENTS, seed=2, each=2), 0))
    samples.write_lines(folder / "nq-dev-00.jsonl.gz", rows(make_queries(DOCUMENTS[:12], seed=3), 900))
    return folder


def make_triviaqa(folder: Path) -> Path:
    names = {document.doc_id: document.title.replace(" ", "_") + ".txt" for document in DOCUMENTS}
    ids = list(names)
    parts = {
        part: [
            samples.trivia(1000 * seed + number, text, names[doc_id], names[ids[number - 1]])  # two pages each
            for number, (text, doc_id) in enumerate(make_queries(DOCUMENTS, seed=seed))
        ]
        for part, seed in (("train", 1), ("dev", 2))
    }
    return samples.make_triviaqa(folder, parts, {names[d.doc_id]: d.text for d in DOCUMENTS})


def flat(values: dict[str, dict[str, object]]) -> dict[str, object]:
    return {f"{section}.{name}": value for section, fields in values.items() for name, value in fields.items()}


# ---- what the scripts say


@pytest.mark.slow
@pytest.mark.parametrize("row", CHANGES)
def test_a_row_is_the_papers_model_with_one_thing_changed(row: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["bash", "-c", 'source "$0" && flags_of "$1"', str(RUNS / "paper.sh"), row]
    flags = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()
    assert main(["index", "DATA", "-o", "OUT", "--preset", "paper-base", *flags, "--print-config"]) == 0
    settings, preset = flat(yaml.safe_load(capsys.readouterr().out)), flat(Config.preset("paper-base").to_dict())
    assert {name: value for name, value in settings.items() if value != preset[name]} == CHANGES[row]


@pytest.mark.parametrize("name", ["nq320k", "triviaqa"])
def test_the_papers_values_are_whole(name: str) -> None:
    rows = expected(name)
    trained = {row for row in rows if row.removeprefix("ft-") in CHANGES}
    assert trained >= set(CHANGES) - {"small"}
    assert set(rows) - trained <= {*MAKERS, *INDEXES}  # the baselines are systems of nci compare
    for row, values in rows.items():
        assert len(values) == 4
        recall = [float(value) for value in values[:3] if value != "-"]
        assert recall == sorted(recall)
        assert 0 < recall[0] < 100
        assert row not in trained or len(recall) == 3
        assert row not in trained or f"| `{row}` | " in DOCS
        assert row not in trained or f" {', '.join(values)} |" in DOCS


def test_every_flag_in_the_scripts_and_their_page_exists(capsys: pytest.CaptureFixture[str]) -> None:
    known = "--standalone --nproc_per_node --nnodes --additional-suffix "  # of torchrun, of split
    for command in COMMANDS:
        with pytest.raises(SystemExit):
            main([command, "--help"])
        known += capsys.readouterr().out
    for flag in set(re.findall(r"(?<![\w-])--[a-z][\w.-]+", "\n".join([*SCRIPTS.values(), DOCS]))):
        assert re.search(rf"{re.escape(flag)}\b", known), flag


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({"ROWS": "base no-such"}, "there is no row no-such; there are: base large"),
        ({"ROWS": "layers-0"}, "there is no row layers-0"),
        ({"GPUS": "3"}, "BATCH * GPUS is 48, which does not divide 128"),
    ],
)
def test_what_is_chosen_wrong_is_said_before_anything_is_made(
    chosen: dict[str, str], said: str, tmp_path: Path
) -> None:
    (tmp_path / "src").mkdir()
    result = script("triviaqa", tmp_path / "src", tmp_path / "out", **chosen)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"triviaqa.sh: {said}")
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["nq320k", "triviaqa", "table", "ablations"])
def test_the_folders_are_asked_for(name: str, tmp_path: Path) -> None:
    for arguments in ([], [tmp_path], [tmp_path / "nothing", tmp_path / "out"]):
        result = script(name, *arguments)
        assert result.returncode == 2
        assert result.stderr.startswith(f"{name}.sh: give the folder of the d")
    assert not [*tmp_path.iterdir()]


def test_a_table_that_fails_leaves_no_text(tmp_path: Path) -> None:
    make_beir(tmp_path / "data" / "one")
    result = script("table", tmp_path / "data", tmp_path / "out", SYSTEMS="bogus")
    assert result.returncode == 1
    assert "there is no 'bogus'" in result.stderr
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]


def test_a_table_needs_an_interpreter_with_the_library(tmp_path: Path) -> None:
    make_beir(tmp_path / "data" / "one")
    (tmp_path / "python").write_text("#!/bin/sh\necho no such module >&2\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    command = ["bash", str(RUNS / "table.sh"), str(tmp_path / "data"), str(tmp_path / "out")]
    chosen = environment(PYTHON=str(tmp_path / "python"))
    result = subprocess.run(command, env=chosen, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, len(result.stderr.splitlines())) == (1, "", 1)
    assert f"table.sh: {tmp_path}/python cannot import nci" in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_table_needs_data(tmp_path: Path) -> None:
    result = script("table", tmp_path, tmp_path / "out")
    assert result.returncode == 1
    assert f"there is no BEIR folder in {tmp_path}" in result.stderr


@pytest.mark.parametrize("epochs", ["", "12"])
@pytest.mark.parametrize("row", [*ABLATIONS, *OURS])
def test_an_ablation_changes_one_thing(row: str, epochs: str) -> None:
    function = re.search(r"^system_of\(\).*?^}", SCRIPTS["ablations"], re.M | re.S)
    assert function is not None
    asked = ["bash", "-uc", f'{function[0]}\nEPOCHS={epochs}\nsystem_of "$0"', row]
    label, name = labelled(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())
    start = Config.preset("light")  # as the script starts from
    start = dataclasses.replace(start, train=dataclasses.replace(start.train, alpha=0.5))
    usual = flat(config_of(start, "nci-pure" if row in ABLATIONS else "nci").to_dict())
    wanted: dict[str, object] = (
        {**ABLATIONS[row], **({"train.epochs": 12} if epochs else {})} if row in ABLATIONS else OURS[row]
    )
    wanted = {field: value for field, value in wanted.items() if value != usual[field]}  # nci-pure has no anchors
    settings = flat(config_of(start, name).to_dict())
    assert {field: value for field, value in settings.items() if value != usual[field]} == wanted
    assert label == row
    assert row in SCRIPTS["ablations"].split("ROWS:-")[2].split("}")[0].split()


@pytest.mark.parametrize(
    ("chosen", "code", "said"),
    [
        ({"ROWS": "no-pawa no-such", "DATASETS": "one"}, 2, "there is no row no-such"),
        ({"DATASETS": "one two"}, 1, "there is no BEIR folder"),
        ({"DATASETS": "one", "EPOCHS": "many"}, 2, "EPOCHS is a number, not many"),
    ],
)
def test_ablations_that_cannot_be_made(chosen: dict[str, str], code: int, said: str, tmp_path: Path) -> None:
    make_beir(tmp_path / "data" / "one")
    result = script("ablations", tmp_path / "data", tmp_path / "out", **chosen)
    assert (result.returncode, result.stdout) == (code, "")
    assert result.stderr.startswith(f"ablations.sh: {said}")
    assert not (tmp_path / "out").exists()


# ---- all of it, tiny


@pytest.mark.slow
def test_nq320k_from_files_to_an_ensemble_on_two_processes(folders: dict[str, Path], tmp_path: Path) -> None:
    """The generator is fine-tuned, two models of different trees are trained by two processes each, and merged."""
    out = tmp_path / "out"
    chosen = {"QUICK": "1", "GPUS": "2", "ROWS": "ft-ensemble", "BASELINES": "", "GENERATOR": str(folders["generator"])}
    chosen |= {"ENCODER": str(folders["encoder"]), "T5": str(folders["t5"])}
    result = script("nq320k", folders["nq320k"], out, **chosen)
    assert result.returncode == 0, result.stderr[-3000:]
    first, second = out / "index" / "ft-base", out / "index" / "ft-base-seed1"
    for seed, index in enumerate((first, second)):
        manifest = store.read_manifest(store.resolve(index))
        assert set(manifest["seeds"].values()) == {seed}
        assert manifest["config"]["train"]["accumulation"] == 1  # 2 processes x 16 queries are a step of 32
        assert manifest["report"]["pairs"]["generated"] == len(read_generated(out / "generated-ft.jsonl")) > 0
    (vectors,) = first.glob("build/embed-*/vectors.npy")
    assert vectors.samefile(second / "build" / vectors.parent.name / "vectors.npy")  # embedded once
    measured = json.loads((out / "results" / "ft-ensemble.json").read_text())
    assert measured["queries"] == 12
    recall = f"{100 * measured['metrics']['R@1']:.2f}"
    assert f"| ft-ensemble | {recall} (72.78) |" in result.stdout
    assert "| base | - (65.86) |" in result.stdout
    assert (out / "table.md").read_text() == result.stdout[-len((out / "table.md").read_text()) :]
    again = script("nq320k", folders["nq320k"], out, **chosen)
    assert again.returncode == 0
    assert again.stderr.count("== ") == 1  # the table, and nothing is made again


@pytest.mark.slow
def test_a_generator_that_cannot_be_read_leaves_no_queries(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    chosen = {"QUICK": "1", "ROWS": "base", "GENERATOR": str(tmp_path / "empty")}
    result = script("triviaqa", folders["triviaqa"], tmp_path / "out", **chosen)
    assert result.returncode == 2
    assert f"triviaqa.sh: no queries were written; {tmp_path}/out/generated/part-*.log say why" in result.stderr
    assert "nci querygen: " in (tmp_path / "out" / "generated" / "part-0.log").read_text()
    assert not [*(tmp_path / "out").glob("generated.jsonl*")]


@pytest.mark.slow
def test_triviaqa_from_files_to_a_row_and_a_baseline(folders: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    chosen = {"QUICK": "1", "ROWS": "no-semantic", "BASELINES": "bm25+qg", "GENERATOR": "own"}
    chosen |= {"ENCODER": str(folders["encoder"]), "T5": str(folders["t5"])}
    result = script("triviaqa", folders["triviaqa"], out, **chosen)
    assert result.returncode == 0, result.stderr[-3000:]
    settings = store.read_manifest(store.resolve(out / "index" / "no-semantic"))["config"]
    assert (settings["tree"]["ids"], settings["train"]["accumulation"]) == ("random", 2)
    measured = json.loads((out / "results" / "no-semantic.json").read_text())["metrics"]
    assert set(measured) == {"Success@1", "Success@5", "Success@20", "Success@100", "Rprec", "R@5", "R@20", "R@100"}
    assert measured["Success@100"] == measured["R@100"] == 1.0  # there are fewer documents
    assert "(93.07) | 100.00 (95.80) |" in result.stdout
    assert "| bm25+qg | " in result.stdout
    assert "| bm25+qg | - " not in result.stdout


@pytest.mark.slow
def test_parts_of_a_corpus_get_the_queries_of_the_whole(folders: dict[str, Path], tmp_path: Path) -> None:
    """Which is why several GPUs may share the work."""
    generator, few = folders["generator"], QueryGenConfig(per_document=2, max_source=32, max_target=8)
    parts = [DOCUMENTS[:10], DOCUMENTS[10:]]
    whole = generate_queries(DOCUMENTS, generator=generator, out=tmp_path / "whole", settings=few)
    written = [
        generate_queries(part, generator=generator, out=tmp_path / str(number), settings=few)
        for number, part in enumerate(parts)
    ]
    assert b"".join(path.read_bytes() for path in written) == whole.read_bytes()


@pytest.mark.slow
def test_a_table_for_every_data_set(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "data" / "no-data").mkdir(parents=True)
    make_beir(tmp_path / "data" / "one")
    settings = tmp_path / "tiny.yaml"
    settings.write_text(yaml.safe_dump(tiny_values(folders["encoder"])))
    chosen = {"QUICK": "1", "PRESET": str(settings), "SYSTEMS": "bm25,nci"}
    result = script("table", tmp_path / "data", tmp_path / "out", **chosen)
    assert result.returncode == 0, result.stderr[-3000:]
    made = {path.name for path in (tmp_path / "out" / "one").iterdir()}
    assert {"table.txt", "table.json", "table.tex", "table.png"} <= made
    assert set(json.loads((tmp_path / "out" / "one" / "table.json").read_text())["systems"]) == {"bm25", "nci"}
    assert {*(tmp_path / "out").iterdir()} == {tmp_path / "out" / "one", tmp_path / "out" / "summary.md"}
    values = json.loads((tmp_path / "out" / "one" / "table.json").read_text())["systems"]
    cells = {name: f"{100 * row['R@1']:.1f}" for name, row in values.items()}
    best = max(values, key=lambda name: values[name]["R@1"])
    lines = (tmp_path / "out" / "summary.md").read_text().splitlines()
    assert lines[0] == "| R@1 | one |"
    assert f"| `{best}` | **{cells[best]}** |" in lines
    assert all(f"| `{name}` | {cell} |" in lines for name, cell in cells.items() if cell != cells[best])


@pytest.mark.slow
def test_tables_beside_each_other(folders: dict[str, Path], tmp_path: Path) -> None:
    """Two data sets at once; one that fails is said, and does not take the other with it."""
    for name in ("one", "two"):
        qrels = make_beir(tmp_path / "data" / name) / "qrels"
        shutil.copy(qrels / "dev.tsv", qrels / "test-unseen.tsv")
    settings = tmp_path / "tiny.yaml"
    settings.write_text(yaml.safe_dump(tiny_values(folders["encoder"], train={"epochs": 0.5})))
    chosen = {"BESIDE": "1", "SEEDS": "1", "JOBS": "1", "PRESET": str(settings), "SYSTEMS": "bm25,nci,const:bm25"}
    chosen["COMPARE_FLAGS"] = "--bm25.runs true --bm25.stemmer null"
    result = script("table", tmp_path / "data", tmp_path / "out", **chosen)
    assert result.returncode == 0, result.stderr[-3000:]
    lexical = json.loads((tmp_path / "out" / "one" / "table.json").read_text())["baselines"]["bm25"]
    assert lexical == {"k1": 0.9, "b": 0.4, "stemmer": None, "stopwords": "en", "runs": True}
    summary = (tmp_path / "out" / "summary.md").read_text()
    assert summary.startswith("| R@1 | one | two |\n")
    assert "\n\n| mean of R@1 | one | two |\n" in summary
    mean = json.loads((tmp_path / "out" / "two" / "table.json").read_text())["mean"]
    _, means, withheld = (
        part.splitlines() for part in re.split(r"^\| (?:mean of R@1|withheld) \|", summary, flags=re.M)
    )
    (first, second, _) = (line for line in means if line.startswith("| `"))
    # both data sets are the same, and so are both p-values: Holm doubles them
    p = min(1.0, 2 * mean["tests"]["bm25"]["p_value"])
    assert first == "| `bm25` |" + f" {100 * mean['systems']['bm25']:.2f}, p {p:.4f} |" * 2
    assert second == "| `nci` |" + f" {100 * mean['systems']['nci']:.2f} |" * 2
    found = json.loads((tmp_path / "out" / "two" / "table.json").read_text())["splits"]["test"]["withheld"]
    cell = f"{100 * found['const:bm25']:.2f}"
    assert found.keys() == {"const:bm25"}, "nothing else is fitted here"
    assert withheld[0] == " one | two | mean |"
    assert withheld[2:] == [f"| `const:bm25` | {cell} | {cell} | **{cell}** |"]
    assert (tmp_path / "out" / "one" / "tradeoff.png").stat().st_size > 1000
    (tmp_path / "data" / "two" / "queries.jsonl").write_text("{")
    shutil.rmtree(tmp_path / "out" / "two")
    result = script("table", tmp_path / "data", tmp_path / "out", **chosen)
    assert result.returncode == 1
    assert "queries.jsonl" in result.stderr
    assert (tmp_path / "out" / "summary.md").read_text().startswith("| R@1 | one |\n")


@pytest.mark.slow
def test_ablations_that_fail_leave_no_table(folders: dict[str, Path], tmp_path: Path) -> None:
    make_beir(tmp_path / "data" / "one")
    (tmp_path / "wrong.yaml").write_text("train: {epochs: -1}")
    chosen = {"QUICK": "1", "DATASETS": "one", "PRESET": str(tmp_path / "wrong.yaml")}
    result = script("ablations", tmp_path / "data", tmp_path / "out", **chosen)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.count("--train.epochs is at least 0") == 2
    assert result.stderr.endswith("ablations.sh: not all rows were made: see above; ROWS names those to make\n")
    assert not [*(tmp_path / "out" / "one").iterdir()]


@pytest.mark.slow
def test_ablations_beside_the_papers(folders: dict[str, Path], tmp_path: Path) -> None:
    """Main rows with two seeds, some ablations, what they are worth; a second run adds nothing."""
    data, out = make_beir(tmp_path / "data" / "one"), tmp_path / "out"
    shutil.copy(data / "qrels" / "dev.tsv", data / "qrels" / "test-unseen.tsv")
    settings = tmp_path / "tiny.yaml"
    settings.write_text(yaml.safe_dump(tiny_values(folders["encoder"], train={"epochs": 0.5})))
    queries = write_lines(tmp_path / "queries.jsonl", [{"doc_id": f"d{n}", "query": f"melody {n}"} for n in range(60)])
    chosen = {"DATASETS": "one two", "SEEDS": "2", "JOBS": "2", "PRESET": str(settings), "GENERATED": str(queries)}
    chosen |= {
        "ROWS": "base no-generated no-pawa layers-0 alpha-0.15 no-regularisation constrained unconstrained no-pieces"
    }
    chosen |= {"BESIDE": "1", "EPOCHS": "1"}
    shutil.copytree(data, tmp_path / "data" / "two")
    result = script("ablations", tmp_path / "data", out, **chosen)
    assert result.returncode == 0, result.stderr[-3000:]
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert {line["data"] for line in lines} == {"one", "two"}
    lines = [line for line in lines if line["data"] == "one"]
    rows = {(line["row"], line["split"]): line for line in lines}
    main = ["nci", "nci-zeroed", "nci-pure"]
    assert set(rows) == {(row, split) for row in [*main, *chosen["ROWS"].split()] for split in ("test", "test-unseen")}
    assert len(rows) == len(lines)
    assert [rows[row, "test"]["seeds"] for row in [*main, "no-pawa", "constrained"]] == [2, 2, 2, 1, 1]
    assert rows["layers-0", "test"]["system"] == rows["no-pawa", "test"]["system"]
    assert rows["no-regularisation", "test"]["system"] == rows["base", "test"]["system"] == "nci-pure[train.epochs=1]"
    effects = (out / "effects.md").read_text()
    assert effects in result.stdout
    gains = [
        100 * (rows["base", split]["metrics"]["R@1"] - rows["no-pawa", split]["metrics"]["R@1"])
        for split in ("test", "test-unseen")
    ]
    places = [place for place in effects.splitlines()[0].split(" | ") if place.startswith(("one ", "two "))]
    assert sorted(places) == ["one test", "one test-unseen", "two test", "two test-unseen"]
    each = [gains[place.endswith("unseen")] for place in places]  # both have the same data
    cells = " | ".join(f"{gain:+.2f}" for gain in each)
    wrong = [place for place, gain in zip(places, each, strict=True) if gain < 0]
    assert f"| prefix-aware weights | +2.50 | {cells} | {', '.join(wrong)} |" in effects
    assert "| constrained beam search | +0.21 |" in effects
    assert "| regularisation | +0.79 |" in effects
    assert "| our generative part | - |" in effects
    assert "semantic ids" not in effects
    made = {path.name for path in (out / "one").iterdir()}
    assert {f"{table}.{kind}" for table in ("main", "paper", "ours") for kind in ("txt", "json")} <= made
    assert {"tradeoff.png", "tradeoff.svg"} <= made
    assert json.loads((out / "one" / "paper.json").read_text())["reference"] == "base"
    assert json.loads((out / "one" / "ours.json").read_text())["reference"] == "nci"
    before = (out / "results.jsonl").read_bytes()
    assert script("ablations", tmp_path / "data", out, **{**chosen, "DATASETS": "one"}).returncode == 0
    assert (out / "results.jsonl").read_bytes() == before
    result = script(
        "ablations", tmp_path / "data", out, **{**chosen, "EPOCHS": "0.5", "ROWS": "base", "DATASETS": "one"}
    )
    assert result.returncode == 0, result.stderr[-3000:]
    cells = {line.split(" | ")[0]: line.split(" | ") for line in (out / "effects.md").read_text().splitlines() if line}
    place = cells["| R@1 by which a part helps"].index("one test")
    assert cells["| prefix-aware weights"][place] == "-", "a base of half an epoch is not compared with rows of one"
    assert cells["| our generative part"][place] != "-"
