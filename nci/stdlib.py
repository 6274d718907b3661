"""The documentation of this machine's Python standard library in; a corpus with queries, as a BEIR folder, out.

Every Python carries thousands of docstrings, so a demonstration needs no download. Sources are parsed, never run;
only modules written in C, from a fixed list, are imported, because their docstrings are nowhere else. A sentence taken
out of a docstring is a query for the rest of it. No torch; knows nothing of indexes.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import os
import random
import re
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from importlib.machinery import ExtensionFileLoader
from itertools import chain, islice
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from nci.errors import DataError
from nci.records import Document, Qrels, Query

SPLITS = ("train", "dev", "test", "test-unseen")
_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "encodings", "pydoc_data", "sitecustomize"}
# Module in C -> the public name its contents go by; built-ins go by their bare names.
_IN_C = {
    "builtins": "",
    "posix": "os",
    **{f"_{name}": name for name in re.findall(r"\w+", """
        ast bisect bz2 codecs collections contextvars csv ctypes curses datetime decimal functools hashlib heapq
        io json locale lzma operator queue random signal socket sqlite3 ssl stat statistics struct symtable
        thread tracemalloc warnings weakref""")},
    "_blake2": "hashlib",
    "_sre": "re",
    **{name: name for name in re.findall(r"\w+", """
        array atexit binascii cmath errno faulthandler fcntl gc grp itertools marshal math mmap pwd pyexpat resource
        select sys syslog termios time unicodedata zlib""")},
}  # fmt: skip
_LONGEST_TITLE = 120
_SENTENCE = re.compile(r".+?(?:(?<!e\.g)(?<!i\.e)(?<!etc)(?<! vs)[.!?](?=\s+[\"'(`]?[A-Z])|\Z)", re.DOTALL)
_NOT_PROSE = re.compile(r"^(?:\s|>>>|\.\.|[-*+@:|=~#<\[{(\d])|\S {3,}\S|--?>|::", re.MULTILINE)
_CALL = re.compile(r"[\w.]+\(.*")
# A sentence that leans on the one before it asks for nothing by itself.
_LEANING = re.compile(r"(?:It|Its|This|These|They|Those|That|Otherwise|However|See|Also|Note|Then|Such|Example)\b")
_SMALL = {"a", "an", "the", "of", "to", "for", "in", "on", "and", "or", "is", "as", "by", "with", "this", "from"}


class Examples(NamedTuple):
    """Documents, the queries taken out of them, and per split which query asks for which document."""

    documents: list[Document]
    queries: list[Query]
    qrels: dict[str, Qrels]


def collect(limit: int | None = None) -> list[Document]:
    """Modules, classes, functions and methods with their docstrings, in an order that depends on the Python alone.

    Args:
        limit: Stop after this many.
    """
    return list(islice(_distinct(chain(_from_sources(), _from_c())), limit))


def _distinct(entries: Iterable[Document]) -> Iterator[Document]:
    """The first of each name: one may be defined in both branches of an `if`, or in Python and again in C."""
    seen: set[str] = set()
    for entry in entries:
        if entry.text and entry.doc_id not in seen:
            seen.add(entry.doc_id)
            yield entry


def make_dataset(out: Path | str, *, seed: int = 0, limit: int | None = None) -> Path:
    """Writes corpus.jsonl, queries.jsonl and qrels/<split>.tsv; the same Python gives the same bytes."""
    out = Path(out)
    examples = make_examples(collect(limit), seed=seed)
    if not examples.documents:
        raise DataError(f"no sources of the standard library in {_library()}: install Python with its library")
    (out / "qrels").mkdir(parents=True, exist_ok=True)
    _write(out / "corpus.jsonl", ({"_id": d.doc_id, "title": d.title, "text": d.text} for d in examples.documents))
    _write(out / "queries.jsonl", ({"_id": query_id, "text": text} for query_id, text in examples.queries))
    for split, qrels in examples.qrels.items():
        pairs = (f"{query_id}\t{doc_id}\t{grade}" for query_id, row in qrels.items() for doc_id, grade in row.items())
        _write(out / "qrels" / f"{split}.tsv", ["query-id\tcorpus-id\tscore", *pairs])
    return out


def _write(path: Path, rows: Iterable[dict[str, str] | str]) -> None:
    lines = (row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows)
    staged = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    staged.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")
    staged.replace(path)


def _library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _from_sources() -> Iterator[Document]:
    root = _library()
    modules: dict[str, Path] = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        # Folders such as site-packages and lib-dynload are no identifiers.
        if parts and all(p.isidentifier() and not p.startswith("_") and p not in _SKIPPED for p in parts):
            modules[".".join(parts)] = path
    for name in sorted(modules):
        try:
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(modules[name].read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue
        yield Document(name, ast.get_docstring(tree) or "", name)
        yield from _definitions(tree, name, in_class=False)


def _definitions(node: ast.AST, prefix: str, *, in_class: bool) -> Iterator[Document]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If | ast.Try | ast.ExceptHandler):
            yield from _definitions(child, prefix, in_class=in_class)
        elif isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            doc = ast.get_docstring(child) or ""
            if not _is_public(child.name, doc):
                continue
            name = f"{prefix}.{child.name}"
            if isinstance(child, ast.ClassDef):
                yield Document(name, doc, name)
                yield from _definitions(child, name, in_class=True)
            else:
                yield Document(name, doc, _titled(name, _signature(child, in_class=in_class)))


def _is_public(name: str, doc: str) -> bool:
    """Private names are out, and so are dunder methods whose docstring only says what they are."""
    return not name.startswith("_") or (name.startswith("__") and name.endswith("__") and len(doc.split()) >= 10)


def _signature(function: ast.FunctionDef | ast.AsyncFunctionDef, *, in_class: bool) -> str:
    decorators = {ast.unparse(each).split(".")[-1] for each in function.decorator_list}
    if decorators & {"property", "cached_property", "setter", "getter"}:
        return ""
    arguments = function.args
    for each in ast.walk(arguments):
        if isinstance(each, ast.arg):
            each.annotation = None
    if in_class and "staticmethod" not in decorators:
        (arguments.posonlyargs or arguments.args)[:1] = []
    return f"({ast.unparse(arguments)})"


def _titled(name: str, signature: str) -> str:
    title = " ".join(f"{name}{signature}".split())
    # A default printed with its address differs from run to run.
    return title if len(title) <= _LONGEST_TITLE and " at 0x" not in title else name


def _from_c() -> Iterator[Document]:
    for module_name, public in sorted(_IN_C.items()):
        module = _c_module(module_name)
        if module is None:
            continue
        homes = {module_name, public}
        if public:
            yield Document(public, _doc(module), public)
        for name, value in sorted(vars(module).items()):
            # The running program may have replaced a hook such as sys.excepthook; Python keeps its own in dunders.
            value = vars(module).get(f"__{name}__", value)
            # Aliases and what was only imported from elsewhere (or put there by the running program) are left out.
            home = getattr(value, "__module__", None)
            if name.startswith("_") or getattr(value, "__name__", None) != name or home not in homes:
                continue
            doc_id = f"{public}.{name}" if public else name
            if inspect.isbuiltin(value):
                yield Document(doc_id, _doc(value), _titled(doc_id, _c_signature(value)))
            elif isinstance(value, type):
                yield Document(doc_id, _doc(value), doc_id)
                for method_name in sorted(each for each in vars(value) if not each.startswith("_")):
                    method = getattr(value, method_name, None)
                    if inspect.isroutine(method):
                        method_id = f"{doc_id}.{method_name}"
                        yield Document(method_id, _doc(method), _titled(method_id, _c_signature(method)))


def _c_module(name: str) -> ModuleType | None:
    """The module if it really is in C: a Python file of that name, for instance in the current folder, is never run."""
    try:
        spec = importlib.util.find_spec(name)
        in_c = spec is not None and (spec.origin == "built-in" or isinstance(spec.loader, ExtensionFileLoader))
        return importlib.import_module(name) if in_c else None
    except (ImportError, ValueError):
        return None


def _doc(value: object) -> str:
    doc = value.__doc__
    return inspect.cleandoc(doc) if isinstance(doc, str) else ""


def _c_signature(value: object) -> str:
    # inspect.signature would evaluate the defaults, which fails for some; the text is all that is wanted here.
    signature = getattr(value, "__text_signature__", None) or ""
    return re.sub(r"^\(\$\w+(?:, /)?(?:, )?", "(", signature)


def make_examples(documents: Sequence[Document], *, seed: int = 0) -> Examples:
    """Takes sentences out of the documents and deals them to the splits.

    A docstring of several sentences gives its first; one of four or more gives up to two later ones as well. A query is
    unlike any other sentence of the corpus, and is not left in its document.
    """
    rng = random.Random(seed)
    split = [_blocks(document.text) for document in documents]
    often = Counter(_squeezed(piece) for blocks in split for block in blocks for piece in block)
    rest: list[Document] = []
    queries: list[Query] = []
    asked: dict[str, list[str]] = {}
    for document, blocks in zip(documents, split, strict=True):
        taken, text = _take(document, blocks, often, rng)
        rest.append(Document(document.doc_id, text, document.title))
        for sentence in taken:
            queries.append(Query(f"q{len(queries) + 1}", sentence))
            asked.setdefault(document.doc_id, []).append(queries[-1].query_id)
    return Examples(rest, queries, _deal(asked, rng))


def _blocks(text: str) -> list[list[str]]:
    """Paragraphs, each as its sentences; code, lists and tables are one piece each."""
    paragraphs = [each.strip("\n").rstrip() for each in re.split(r"\n\s*\n", text) if each.strip()]
    return [
        [each] if _NOT_PROSE.search(each) else [" ".join(found.split()) for found in _SENTENCE.findall(each)]
        for each in paragraphs
    ]


def _squeezed(text: str) -> str:
    return " ".join(text.lower().split())


def _take(
    document: Document, blocks: list[list[str]], often: Counter[str], rng: random.Random
) -> tuple[list[str], str]:
    """The sentences that become queries, and the text without them."""
    prose = [s for block in blocks for s in block if not _NOT_PROSE.search(s) and not _CALL.fullmatch(s)]
    pieces = sum(len(block) for block in blocks)
    good = [s for s in prose if _asks(s, document) and often[_squeezed(s)] == 1]
    first = [s for s in good if s == prose[0]]
    later = [s for s in good if s != prose[0] and len(s.split()) >= 6 and not _LEANING.match(s)]
    later = rng.sample(later, min(len(later), 0 if pieces < 4 else 1 if pieces < 7 else 2))
    taken: list[str] = []
    text = document.text
    for sentence in [*first, *sorted(later, key=prose.index)]:
        chosen = {*taken, sentence}
        left = [[s for s in block if s not in chosen] for block in blocks]
        rebuilt = "\n\n".join(" ".join(block) for block in left if block)
        # Not in it a second time, inside another sentence; and something to find must stay.
        if re.search(r"\w{3}", rebuilt) and not any(_squeezed(s) in _squeezed(rebuilt) for s in chosen):
            taken, text = [*taken, sentence], rebuilt
    return taken, text


def _asks(sentence: str, document: Document) -> bool:
    """Whether a sentence is one that somebody could type, and more than the name of what it describes."""
    words = re.findall(r"[a-z]+", sentence.lower())
    name = set(re.findall(r"[A-Z]?[a-z]+|[A-Z]+", document.doc_id))
    return (
        3 <= len(sentence.split()) <= 40
        and sentence[0].isalpha()
        and not sentence.endswith((":", ","))
        and sum(letter.isalpha() or letter == " " for letter in sentence) >= 0.8 * len(sentence)
        and not _CALL.match(sentence)
        and not {word for word in words if word not in _SMALL} <= {part.lower() for part in name}
    )


def _deal(asked: dict[str, list[str]], rng: random.Random) -> dict[str, Qrels]:
    """A tenth of the asked documents unseen, dev a twentieth of the queries, a tenth of the documents in test."""
    order = list(asked)
    rng.shuffle(order)
    unseen = len(order) // 10
    dev = unseen + sum(map(len, asked.values())) // 20
    several = [doc_id for doc_id in order[dev:] if len(asked[doc_id]) > 1]
    test = set(several[: len(order) // 10])
    home: dict[str, str] = {}
    for place, doc_id in enumerate(order):
        held = "test-unseen" if place < unseen else "dev" if place < dev else "test" if doc_id in test else "train"
        held_out = asked[doc_id] if held in ("train", "test-unseen") else [rng.choice(asked[doc_id])]
        home.update({query_id: held if query_id in held_out else "train" for query_id in asked[doc_id]})
    qrels: dict[str, Qrels] = {split: {} for split in SPLITS}
    for doc_id, query_ids in asked.items():
        for query_id in query_ids:
            qrels[home[query_id]][query_id] = {doc_id: 1}
    return qrels
