from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nci.errors import DataError
from nci.records import Document
from nci.stdlib import SPLITS, collect, make_dataset, make_examples


class Folder(NamedTuple):
    path: Path
    documents: dict[str, dict[str, str]]
    queries: dict[str, str]
    asks_for: dict[str, dict[str, str]]
    seconds: float


def squeezed(text: str) -> str:
    return " ".join(text.lower().split())


def make_library(
    root: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], *, in_c: dict[str, str] | None = None
) -> None:
    """Makes a folder the whole standard library."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.setattr("nci.stdlib._library", lambda: root)
    monkeypatch.setattr("nci.stdlib._IN_C", in_c or {})


@pytest.fixture(scope="module")
def collected() -> list[Document]:
    return collect()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    path = tmp_path_factory.mktemp("stdlib")
    start = time.perf_counter()
    assert make_dataset(path) == path
    seconds = time.perf_counter() - start
    documents = [json.loads(line) for line in (path / "corpus.jsonl").open(encoding="utf-8")]
    queries = [json.loads(line) for line in (path / "queries.jsonl").open(encoding="utf-8")]
    asks_for: dict[str, dict[str, str]] = {}
    for split in SPLITS:
        header, *rows = (path / "qrels" / f"{split}.tsv").read_text(encoding="utf-8").splitlines()
        assert header == "query-id\tcorpus-id\tscore"
        cells = [row.split("\t") for row in rows]
        assert all(score == "1" for _, _, score in cells)
        asks_for[split] = {query_id: doc_id for query_id, doc_id, _ in cells}
    assert len({row["_id"] for row in documents}) == len(documents)
    return Folder(path, {d["_id"]: d for d in documents}, {q["_id"]: q["text"] for q in queries}, asks_for, seconds)


@pytest.mark.slow
def test_counts_and_time(folder: Folder) -> None:
    assert 5000 <= len(folder.documents) <= 8000
    sizes = {split: len(pairs) for split, pairs in folder.asks_for.items()}
    total = len(folder.queries)
    assert total == sum(sizes.values()) > 2500
    assert sizes["train"] > 0.7 * total
    assert 0.04 * total < sizes["dev"] < 0.06 * total
    asked = {doc_id for pairs in folder.asks_for.values() for doc_id in pairs.values()}
    assert 0.09 < sizes["test"] / len(asked) <= 0.1
    assert 0.09 < len(set(folder.asks_for["test-unseen"].values())) / len(asked) <= 0.1
    assert folder.seconds < 15


@pytest.mark.slow
def test_familiar_entries_are_there(folder: Folder) -> None:
    titles = {doc_id: row["title"] for doc_id, row in folder.documents.items()}
    assert titles["shutil.copyfile"] == "shutil.copyfile(src, dst, *, follow_symlinks=True)"
    assert titles["str.join"] == "str.join(iterable, /)"
    assert titles["os.getcwd"] == "os.getcwd()"
    assert titles["math.isclose"] == "math.isclose(a, b, *, rel_tol=1e-09, abs_tol=0.0)"
    assert titles["pathlib.PurePath.suffix"] == "pathlib.PurePath.suffix"
    assert {"collections.OrderedDict.move_to_end", "heapq", "itertools.chain", "len", "dict.update"} <= titles.keys()


@pytest.mark.slow
def test_private_names_and_tests_are_not(folder: Folder) -> None:
    parts = {part for doc_id in folder.documents for part in doc_id.split(".")}
    assert not {part for part in parts if part.startswith("_") and not part.endswith("__")} - {"_thread"}
    assert not {"idlelib", "lib2to3", "turtledemo", "site-packages"} & parts
    assert not any(doc_id.startswith("test.") for doc_id in folder.documents)
    assert not any(" at 0x" in row["title"] for row in folder.documents.values())


@pytest.mark.slow
def test_no_query_is_left_in_its_document(folder: Folder) -> None:
    for pairs in folder.asks_for.values():
        for query_id, doc_id in pairs.items():
            row = folder.documents[doc_id]
            assert row["text"].strip()
            assert squeezed(folder.queries[query_id]) not in squeezed(f"{row['title']}\n{row['text']}")


@pytest.mark.slow
def test_queries_are_distinct_sentences_of_the_docstring(folder: Folder, collected: list[Document]) -> None:
    assert max(Counter(map(squeezed, folder.queries.values())).values()) == 1
    assert all(3 <= len(text.split()) <= 40 for text in folder.queries.values())
    before = {document.doc_id: squeezed(document.text) for document in collected}
    for pairs in folder.asks_for.values():
        for query_id, doc_id in pairs.items():
            assert squeezed(folder.queries[query_id]) in before[doc_id]


@pytest.mark.slow
def test_splits_are_disjoint_and_seen_means_seen(folder: Folder) -> None:
    seen = set(folder.asks_for["train"].values())
    assert set().union(*folder.asks_for.values()) == folder.queries.keys()
    assert sum(map(len, folder.asks_for.values())) == len(folder.queries)
    assert set(folder.asks_for["test"].values()) <= seen
    assert seen.isdisjoint(folder.asks_for["test-unseen"].values())
    assert set(folder.asks_for["test"].values()).isdisjoint(folder.asks_for["dev"].values())


@pytest.mark.slow
def test_same_python_same_bytes_in_another_process(folder: Folder, tmp_path: Path) -> None:
    code = "import sys; from nci.stdlib import make_dataset; make_dataset(sys.argv[1])"
    environment = os.environ | {"PYTHONHASHSEED": "12345"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env=environment)
    files = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    assert len(files) == 2 + len(SPLITS)
    for name in files:
        assert (tmp_path / name).read_bytes() == (folder.path / name).read_bytes()


@pytest.mark.slow
def test_another_seed_deals_otherwise() -> None:
    documents = collect(limit=300)
    first, same, other = (make_examples(documents, seed=seed).qrels for seed in (0, 0, 1))
    assert first == same != other


def test_a_replaced_hook_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_library(tmp_path, monkeypatch, {}, in_c={"sys": "sys"})
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    before = collect()
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    assert collect() == before
    assert "sys.excepthook" in {document.doc_id for document in before}


@pytest.mark.slow
def test_nothing_of_the_library_is_run() -> None:
    code = (
        "import sys, nci.stdlib\n"
        "nci.stdlib.collect()\n"
        "print({'this', 'antigravity', 'turtle', 'tkinter', 'asyncio', 'torch', 'numpy'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.slow
def test_a_python_file_named_like_a_c_module_is_never_run(tmp_path: Path) -> None:
    for name in ("array", "_csv", "unicodedata", "_queue"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('run')")
    code = "import sys; from nci.stdlib import collect; sys.path.insert(0, sys.argv[1]); print(len(collect()) > 1000)"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


@pytest.mark.slow
def test_limit_stops_early(collected: list[Document]) -> None:
    assert collect(limit=25) == collected[:25]
    assert collect(limit=0) == []


def test_what_is_read_from_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = '''
    """A module."""
    raise SystemExit("never run")
    if True:
        def both(a: int, /, b: str = "x", *args: int, c=1, **more) -> None:
            """One branch."""
    else:
        def both():
            """The other."""
    def _private():
        """Hidden."""
    def bare(): pass
    class Thing:
        """A class."""
        class Inner:
            def method(self, x): """Deep."""
        @property
        def size(self): """How big."""
        @staticmethod
        def still(x): """Static."""
        async def wait(self): """Waits."""
        def __len__(self): """Length."""
        def __call__(self, x): """Ten words at least are needed for this method to count."""
        def long(self, {arguments}): """Too long."""
    '''.format(arguments=", ".join(f"argument_{i}" for i in range(20)))
    lines = source.strip("\n").splitlines()
    files = {
        "pkg/__init__.py": "\n".join(line[4:] for line in lines),
        "pkg/mod.py": '"""In a package."""',
        "pkg/test/inner.py": '"""A test."""',
        "pkg/_hidden.py": '"""Hidden."""',
        "site-packages/other.py": '"""Installed."""',
        "broken.py": "def (",
        "null.py": "\0",
    }
    make_library(tmp_path, monkeypatch, files)
    ast.parse(files["pkg/__init__.py"])
    assert [(document.doc_id, document.title, document.text) for document in collect()] == [
        ("pkg", "pkg", "A module."),
        ("pkg.both", "pkg.both(a, /, b='x', *args, c=1, **more)", "One branch."),
        ("pkg.Thing", "pkg.Thing", "A class."),
        ("pkg.Thing.Inner.method", "pkg.Thing.Inner.method(x)", "Deep."),
        ("pkg.Thing.size", "pkg.Thing.size", "How big."),
        ("pkg.Thing.still", "pkg.Thing.still(x)", "Static."),
        ("pkg.Thing.wait", "pkg.Thing.wait()", "Waits."),
        ("pkg.Thing.__call__", "pkg.Thing.__call__(x)", "Ten words at least are needed for this method to count."),
        ("pkg.Thing.long", "pkg.Thing.long", "Too long."),
        ("pkg.mod", "pkg.mod", "In a package."),
    ]


def test_an_empty_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_library(tmp_path / "lib", monkeypatch, {"bare.py": "x = 1"})
    with pytest.raises(DataError, match="lib"):
        make_dataset(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "query", "rest"),
    [
        ("Copy a file to\na place. Links are followed.", "Copy a file to a place.", "Links are followed."),
        ("Copy files e.g. from Rome\n\n>>> copy()", "Copy files e.g. from Rome", ">>> copy()"),
        ("copy(src, dst)\n\nMove the bytes over. Done.", "Move the bytes over.", "copy(src, dst)\n\nDone."),
        ("Only one sentence here.", None, "Only one sentence here."),
        ("Shutil copy. It repeats its name.", None, "Shutil copy. It repeats its name."),
        ("Move all bytes. Then move all bytes.", None, "Move all bytes. Then move all bytes."),
        ("- a list is no sentence\n- nor this", None, "- a list is no sentence\n- nor this"),
        ("Known to everybody here. Mine.", None, "Known to everybody here. Mine."),
    ],
)
def test_which_sentence_is_taken(text: str, query: str | None, rest: str) -> None:
    other = Document("other", "known to  everybody HERE.")
    documents, queries, qrels = make_examples([Document("shutil.copy", text, "title"), other])
    assert [each.text for each in queries] == ([query] if query else [])
    assert documents == [Document("shutil.copy", rest, "title"), other]
    assert qrels["train"] == ({"q1": {"shutil.copy": 1}} if query else {})


PIECES = [
    "Alpha beta gamma delta one two.",
    "Epsilon zeta eta theta iota kappa!",
    "See the other long thing over there.",
    "Move all bytes.",
    "Mine is here",
    "alpha beta",
    ">>> x",
    ": ",
    "\n\n",
]


@settings(deadline=None)
@given(st.lists(st.lists(st.sampled_from(PIECES), max_size=9), max_size=5), st.integers(0, 3))
def test_examples_keep_their_promises_on_any_text(pieces: list[list[str]], seed: int) -> None:
    before = [Document(f"d{i}", " ".join(each) or "x") for i, each in enumerate(pieces)]
    documents, queries, qrels = make_examples(before, seed=seed)
    texts = {document.doc_id: document.text for document in documents}
    assert [document.doc_id for document in documents] == [document.doc_id for document in before]
    assert len({squeezed(query.text) for query in queries}) == len(queries)
    home = [(query_id, doc_id) for split in SPLITS for query_id, row in qrels[split].items() for doc_id in row]
    assert sorted(query_id for query_id, _ in home) == sorted(query.query_id for query in queries)
    for query_id, doc_id in home:
        assert squeezed(dict(queries)[query_id]) not in squeezed(texts[doc_id])
        assert texts[doc_id].strip()
