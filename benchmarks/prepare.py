"""Check the preparation of data sets on real files, and time it.

NCI_DATA=FOLDER python benchmarks/prepare.py [--copies 40]

FOLDER/formats holds small real files: nq_original/, nq_simplified/, triviaqa/ and, if there, nq320k_ids/. Without NCI_DATA
nothing is checked, which the exit code 2 says.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nci.config import CorpusConfig
from nci.corpus import open_dataset
from nci.prepare import Report, beir, prepare_nq320k, prepare_triviaqa
from nci.prepare.html import read_page, tagged_text
from nci.prepare.nq import NQ320K

FAILURES: list[str] = []


def check(what: str, good: bool) -> None:
    print(f"{'ok    ' if good else 'FAILED'}  {what}")
    if not good:
        FAILURES.append(what)


def rows_of(folder: Path, pattern: str) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob(pattern)):
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else open(path, encoding="utf-8") as file:
            yield from map(json.loads, file)


def corpus(folder: Path) -> dict[str, dict[str, str]]:
    with open(folder / "corpus.jsonl", encoding="utf-8") as file:
        return {row["title"]: row for row in map(json.loads, file)}


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check_reading(report: Report, questions: int) -> None:
    """The folder as the other commands see it."""
    dataset = open_dataset(report.folder)
    assert dataset is not None
    documents = list(dataset.documents(CorpusConfig()))
    doc_ids = {document.doc_id for document in documents}
    golds = [dataset.split(split)[1] for split in ("train", "test")]
    check(f"{report.folder.name}: every document is read", len(documents) == report.documents)
    check(f"{report.folder.name}: every question is read", sum(map(len, golds)) == questions)
    found = (doc_id in doc_ids for qrels in golds for row in qrels.values() for doc_id in row)
    check(f"{report.folder.name}: every judged document is there", all(found))


def check_original(formats: Path, out: Path) -> None:
    """The original form, the simplified form made of it, and its HTML must agree."""
    report = prepare_nq320k(formats / "nq_original", out / "original", expected=None)
    rows = {split: list(rows_of(formats / "nq_original", f"nq-{split}-*")) for split in ("train", "dev")}
    check_reading(report, sum(map(len, rows.values())))
    pages = corpus(report.folder)
    for split, items in rows.items():
        path = out / "resimplified" / f"nq-{split}.jsonl"
        path.parent.mkdir(exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            for row in items:
                text = " ".join(token["token"].replace(" ", "_") for token in row["document_tokens"])
                kept = ("question_text", "example_id", "document_url")
                file.write(json.dumps({"document_text": text} | {name: row[name] for name in kept}) + "\n")
                html = read_page(tagged_text(row["document_html"]))
                shares = overlap(html.text, pages[row["document_title"]]["text"])
                check(
                    f"{row['document_title']}: words of the HTML and of the tokens, {shares:.3f} shared", shares > 0.95
                )
                same = squeezed(html.abstract) == squeezed(pages[row["document_title"]]["abstract"])
                check(f"{row['document_title']}: the abstract is the same", same)
    simple = prepare_nq320k(out / "resimplified", out / "simplified-again", expected=None)
    texts = [[row["text"] for row in corpus(folder).values()] for folder in (report.folder, simple.folder)]
    check("the simplified form gives the same texts", texts[0] == texts[1])


def squeezed(text: str) -> str:
    """Without spaces and marks, which the tokens of Natural Questions rewrite."""
    return "".join(letter for letter in text if letter.isalnum())


def overlap(one: str, other: str) -> float:
    # The menus that follow an article are in the tokens and not in what is made of the HTML.
    first, second = (
        set("".join(c if c.isalnum() else " " for c in text.partition("Retrieved from")[0]).split())
        for text in (one, other)
    )
    return len(first & second) / max(1, len(first | second))


def check_ids(folder: Path) -> None:
    """The published lists of ids have the counts that reports compare with."""
    for name, key in {"docid_to_semantic_id.tsv.gz": "documents", "nq_dev_queries.tsv.gz": "test"}.items():
        if (folder / name).exists():
            with gzip.open(folder / name, "rb") as file:
                check(f"{name} has {NQ320K[key]:,} rows", sum(1 for _ in file) == NQ320K[key])


def check_restart(src: Path, out: Path) -> None:
    """Stopped at every second record in turn, it must end with the same bytes."""
    prepare_nq320k(src, out / "whole", expected=None)
    work: Any = beir._Work
    real, steps = work._write, 0

    def falls(self: Any, *args: Any) -> None:
        nonlocal steps
        steps += 1
        if steps % 2 == 0:
            raise KeyboardInterrupt
        real(self, *args)

    work._write, beir.CHECKPOINT_RECORDS, stops = falls, 1, 0
    while not (out / "stopped").exists():
        try:
            prepare_nq320k(src, out / "stopped", expected=None)
        except KeyboardInterrupt:
            stops += 1
    work._write, beir.CHECKPOINT_RECORDS = real, 2000
    check(f"the same bytes after {stops} stops", files(out / "stopped") == files(out / "whole"))


def measure(formats: Path, out: Path, form: str, copies: int) -> None:
    """Copies of the real pages under new titles; two of three are repeated pages, as in the whole data."""
    raw = 0
    for split in ("train", "dev"):
        rows = list(rows_of(formats / form, f"*{split}*"))
        path = out / f"{form}-many" / f"nq-{split}.jsonl.gz"
        path.parent.mkdir(exist_ok=True)
        with gzip.open(path, "wt", encoding="utf-8", compresslevel=5) as file:
            for copy in range(copies):
                for place, row in enumerate(rows):
                    title = f"{split} {place} {copy // 3}"
                    row = row | {"example_id": f"{split}-{copy}-{place}", "document_title": title}
                    raw += file.write(json.dumps(row) + "\n")
    started = time.perf_counter()
    report = prepare_nq320k(out / f"{form}-many", out / f"{form}-timed", expected=None)
    seconds = time.perf_counter() - started
    questions = sum(report.queries.values())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{form}: {questions} questions, {report.documents} documents, {raw / 1e6:.0f} MB unpacked in {seconds:.1f} s: "
        f"{questions / seconds:.0f} questions/s, {raw / 1e6 / seconds:.0f} MB/s; peak of the process so far {peak:.0f} MiB; "
        f"{315_203 * seconds / questions / 60:.0f} minutes for 315,203 such questions"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copies", type=int, default=40, help="copies of the sample that are timed")
    args = parser.parse_args()
    if not os.environ.get("NCI_DATA"):
        print("NCI_DATA is not set: nothing was checked; set it to the folder that holds formats/", file=sys.stderr)
        return 2
    formats = Path(os.environ["NCI_DATA"]) / "formats"
    with tempfile.TemporaryDirectory() as name:
        out = Path(name)
        check_original(formats, out)
        report = prepare_nq320k(formats / "nq_simplified", out / "simplified")
        check_reading(report, 2)
        check("a part of the data is reported as such", len(report.differences) == 3)
        trivia = prepare_triviaqa(formats / "triviaqa", out / "triviaqa")
        check_reading(trivia, 6)
        check_ids(formats / "nq320k_ids")
        check_restart(formats / "nq_original", out)
        measure(formats, out, "nq_simplified", args.copies * 5)
        measure(formats, out, "nq_original", args.copies)
    print(f"{len(FAILURES)} checks failed" if FAILURES else "all checks passed")
    return 1 if FAILURES else 0


if __name__ == "__main__":
    sys.exit(main())
