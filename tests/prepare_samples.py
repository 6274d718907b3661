"""Small files in the schemas of Natural Questions and TriviaQA, for the tests of nci.prepare."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nci.corpus import Dataset

TABLE = '<Table> <Tr> <Td colspan="2"> box </Td> </Tr> </Table>'
FOOTER = "<Ul> <Li> Español </Li> </Ul> Edit links <Ul> <Li> About </Li> </Ul>"


def page_text(title: str, *paragraphs: str) -> str:
    """A page as the simplified form has it."""
    body = " ".join(f"<P> {words} </P>" for words in paragraphs)
    return f"{title} - wikipedia <H1> {title} </H1> Jump to : search {body} {TABLE.replace(' c', '_c')} {FOOTER}"


def simplified(number: int, title: str, *paragraphs: str) -> dict[str, Any]:
    """A line of the simplified form."""
    return {
        "document_text": page_text(title, *paragraphs),
        "long_answer_candidates": [{"start_token": 2, "top_level": True, "end_token": 9}],
        "question_text": f"question {number} about {title.lower()}",
        "annotations": [{"yes_no_answer": "NONE", "long_answer": {"start_token": -1, "end_token": -1}}],
        "document_url": f"https://en.wikipedia.org//w/index.php?title={title.replace(' ', '_')}&amp;oldid={number}",
        "example_id": number,
    }


def original(number: int, title: str, *paragraphs: str, tokens: bool = True) -> dict[str, Any]:
    """A line of the original form; without tokens it has the HTML alone."""
    row = simplified(number, title, *paragraphs)
    words = [word.replace("_", " ") if word[0] == "<" else word for word in row.pop("document_text").split()]
    row["document_tokens"] = [{"token": word, "html_token": word[0] == "<", "start_byte": 0} for word in words]
    html = "".join(f"<P>{words}</P>" for words in paragraphs)
    row["document_html"] = f"<HTML><HEAD><TITLE>{title}</TITLE></HEAD><H1>{title}</H1>{html}{TABLE}{FOOTER}</HTML>"
    row["document_title"] = title
    if not tokens:
        del row["document_tokens"]
    return row


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def questions(first: int, count: int, pages: int) -> Iterator[dict[str, Any]]:
    """Questions over a few pages, so that titles repeat."""
    for number in range(first, first + count):
        page = number * 7 % pages
        yield simplified(number, f"Page {page}", f"About page {page} .", f"More of it , seen by question {number} .")


def make_nq(folder: Path, *, shards: int = 3, per_shard: int = 5, pages: int = 6) -> Path:
    """Three train shards and one of dev."""
    for shard in range(shards):
        rows = questions(100 * shard, per_shard, pages)
        write_lines(folder / "train" / f"nq-train-{shard:02d}.jsonl.gz", rows)
    write_lines(folder / "dev" / "nq-dev-00.jsonl.gz", questions(900, 4, pages + 3))
    return folder


def make_triviaqa(folder: Path, items: Mapping[str, list[dict[str, Any]]], pages: Mapping[str, str]) -> Path:
    for part, rows in items.items():
        path = folder / "qa" / f"wikipedia-{part}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = {"Data": rows, "Domain": "Wikipedia", "Split": part, "VerifiedEval": False, "Version": 1.0}
        path.write_text(json.dumps(whole, indent=4, ensure_ascii=False), encoding="utf-8")
    for name, text in pages.items():
        path = folder / "evidence" / "wikipedia" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="")
    return folder


def trivia(number: int, question: str, *names: str) -> dict[str, Any]:
    pages = [{"DocSource": "TagMe", "Filename": name, "Title": name[:-4].replace("_", " ")} for name in names]
    return {
        "Answer": {"Aliases": ["x"], "Value": "x"},
        "EntityPages": pages,
        "Question": question,
        "QuestionId": f"tc_{number}",
        "QuestionSource": "http://www.example.org/",
    }


def corpus(folder: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / "corpus.jsonl").read_text(encoding="utf-8").split("\n") if line]


def judged(folder: Path, split: str) -> dict[str, tuple[str, list[str]]]:
    """Query id -> its text and the titles of its documents, through the reader that all commands use."""
    titles = {row["_id"]: row["title"] for row in corpus(folder)}
    queries, qrels = Dataset(folder).split(split)
    return {query.query_id: (query.text, [titles[doc_id] for doc_id in qrels[query.query_id]]) for query in queries}


def all_bytes(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
