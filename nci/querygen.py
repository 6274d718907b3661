"""Documents -> generated queries: any generator in, `queries.jsonl` out, one {"doc_id", "query"} a line.

Every document has a seed of its own, made from its doc_id: a rerun, another order or another batch size writes the same
queries, on a CPU to the letter. Documents stream through in shards, and what an interrupted run had finished is kept.
Without a generator, titles, sentences and spans stand in. Knows nothing of how a generator works or what queries are for.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
from tqdm import tqdm

from nci.baselines import Baseline
from nci.config import PairsConfig, content_key
from nci.embed import fingerprint
from nci.encoders import fetch_encoder
from nci.errors import ConfigError, DataError
from nci.generator import Generator
from nci.pairs import document_pieces
from nci.progress import hide_bars
from nci.recipe import QueryGenConfig
from nci.records import Document
from nci.runtime import one_thread_each
from nci.seq2seq import HuggingFaceGenerator, Seq2Seq
from nci.shards import Arrays, Shard, map_shards, read_shard, rename_durably, report

log = logging.getLogger("nci")

NO_GENERATOR = (
    "no generator: titles, sentences and spans of the documents stand in for queries. They repeat the documents' words; a "
    "generator asks in the words of users, which is what finds documents without training queries. Give training queries, "
    "and one is trained here, or name a docT5query model"
)
FILE = "queries.jsonl"

_SENTENCE = re.compile(r"[^\n.!?\u3002\uff01\uff1f]+[.!?\u3002\uff01\uff1f]*")
_SPAN_TERMS = 16
_AT_ONCE = 1024  # queries searched between two movements of the bar

Write = Callable[[Sequence[Document]], list[list[str]]]


def generate_queries(
    documents: Iterable[Document],
    *,
    out: Path,
    generator: Seq2Seq | str | Path | None = None,
    settings: QueryGenConfig | None = None,
    device: str = "cpu",
) -> Path:
    """Write `out/queries.jsonl` and return it; `out/shards` holds what a rerun takes up again.

    Args:
        documents: Read once, lazily.
        out: Folder of the results.
        generator: A folder of `Generator.train`, an encoder-decoder model of Hugging Face by folder or Hub name, or one
            that is loaded. None takes titles, sentences and spans.
        settings: How many queries, and how they are drawn.
        device: "cpu" or "cuda", where the generator is loaded here.
    """
    config = settings or QueryGenConfig()
    if generator is None:
        log.warning(NO_GENERATOR)
    folder = fetch_encoder(generator) if isinstance(generator, str | Path) else None
    name = fingerprint(folder) if folder else getattr(generator, "fingerprint", "extracts")

    def make_writer() -> Write:
        if generator is None:
            return lambda items: [extracts(item, config) for item in items]
        loaded = load_generator(generator, device=device) if isinstance(generator, str | Path) else generator
        return _writer(loaded, config)

    done = [0, 0, 0.0]  # documents, queries, seconds of this run

    def make_worker() -> Callable[[Sequence[Document]], Arrays]:
        write = make_writer()

        def work(items: Sequence[Document]) -> Arrays:
            begin = time.monotonic()
            written = write(items)
            lines = [
                json.dumps({"doc_id": item.doc_id, "query": query}, ensure_ascii=False)
                for item, queries in zip(items, written, strict=True)
                for query in queries
            ]
            for place, more in enumerate((len(items), len(lines), time.monotonic() - begin)):
                done[place] += more
            text = "".join(line + "\n" for line in lines)
            return {"lines": np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8)}

        return work

    files = map_shards(
        make_worker,
        _shards(documents, config.shard_size, key=content_key(config.key, name)),
        out / "shards",
        describe="querygen",
        unit="doc",
        total=len(documents) if isinstance(documents, Sized) else None,
    )
    if not files:
        raise DataError("there are no documents to write queries for; give a corpus with at least one document")
    if done[0]:
        rate = done[1] / max(done[2], 1e-9)
        log.info("%-10s %d queries for %d documents, %.1f queries a second", "querygen", done[1], done[0], rate)
    temporary = out / (FILE + ".tmp")
    with temporary.open("wb") as stream:
        for file in files:
            stream.write(read_shard(file)["lines"].tobytes())
    rename_durably(temporary, out / FILE)
    return out / FILE


def read_generated(path: Path) -> list[tuple[str, str]]:
    """The (query, doc_id) pairs of a file of `generate_queries`, or of its folder."""
    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        raise DataError(f"{path}: there is no such file of generated queries; write one with nci querygen")
    pairs = []
    with path.open(encoding="utf-8", errors="surrogatepass") as stream:
        for number, line in enumerate(stream, 1):
            try:
                row = json.loads(line)
                query, doc_id = row["query"], row["doc_id"]
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(f'{path}:{number}: expected {{"doc_id": ..., "query": ...}}') from error
            if not isinstance(query, str) or not isinstance(doc_id, str):
                raise DataError(f"{path}:{number}: doc_id and query are texts")
            pairs.append((query, doc_id))
    return pairs


def load_generator(name: str | Path, *, device: str = "cpu") -> Seq2Seq:
    """A generator trained here, or one of Hugging Face; the folder says which."""
    folder = fetch_encoder(name)
    if (folder / "generator.json").is_file():
        return Generator.load(folder, device=device)
    return HuggingFaceGenerator.load(folder, device=device)


def source_pairs(documents: Iterable[Document], queries: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """(document text, query) for (query, doc_id): what generators are trained on. Unknown documents are left out."""
    texts = {document.doc_id: document.content for document in documents}
    return [(texts[doc_id], query) for query, doc_id in queries if doc_id in texts]


def document_seed(doc_id: str, base: int) -> int:
    """The seed of a document's queries: the same on every machine, whatever else is in the corpus."""
    digest = hashlib.sha256(f"{base}\0{doc_id}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def extracts(document: Document, config: QueryGenConfig) -> list[str]:
    """Title, sentences and spans of a document, each once, as many as queries are wanted.

    >>> extracts(Document("d", "One pear. Two pears!", "Fruit"), QueryGenConfig(per_document=3, seed=1))
    ['Fruit', 'One pear.', 'Two pears!']
    """
    seed = document_seed(document.doc_id, config.seed)
    rng = np.random.default_rng(seed)
    sentences = [" ".join(match.split()) for match in _SENTENCE.findall(document.text)]
    sentences = [sentence for sentence in sentences if any(map(str.isalnum, sentence))]
    room = max(0, config.per_document - bool(document.title.strip()))
    chosen = sorted(rng.permutation(len(sentences))[:room])
    spans = PairsConfig(spans=config.per_document, terms=_SPAN_TERMS, seed=config.seed)
    pieces = document_pieces(document, spans, number=seed)
    found = [document.title, *(sentences[i] for i in chosen), *pieces]
    cleaned = dict.fromkeys(" ".join(text.split()) for text in found)
    return [text for text in cleaned if text][: config.per_document]


def round_trip_filter(
    queries: Sequence[tuple[str, str]],
    searchers: Sequence[Baseline],
    *,
    k: int = 10,
    need: Literal["any", "all"] = "any",
) -> list[tuple[str, str]]:
    """The generated (query, doc_id) pairs that find their own document again, in their order.

    Args:
        queries: What `read_generated` returns.
        searchers: Such as dense and lexical search over the same documents.
        k: How far down the own document may be.
        need: Kept when one searcher finds it, or only when all do.
    """
    if not searchers:
        raise ConfigError("a round trip needs something to search with; give dense or lexical search, or both")
    asked = list(dict.fromkeys(queries))
    open_pairs, good = asked, set[tuple[str, str]]()
    for number, searcher in enumerate(searchers):  # the later ones see only what is still undecided
        found: list[bool] = []
        with tqdm(desc="round trip", total=len(open_pairs), unit="query", disable=hide_bars()) as bar:
            for start in range(0, len(open_pairs), _AT_ONCE):
                found += searcher.finds(open_pairs[start : start + _AT_ONCE], k).tolist()
                bar.update(len(found) - start)
        if need == "any":
            good.update(pair for pair, yes in zip(open_pairs, found, strict=True) if yes)
            open_pairs = [pair for pair, yes in zip(open_pairs, found, strict=True) if not yes]
        else:
            open_pairs = [pair for pair, yes in zip(open_pairs, found, strict=True) if yes]
            good = set(open_pairs) if number == len(searchers) - 1 else good
    kept = [pair for pair in queries if pair in good]
    share = 100 * len(kept) / max(1, len(queries))
    log.info("%-10s %d of %d queries find their document (%.1f %%)", "round trip", len(kept), len(queries), share)
    return kept


def write_generated(path: Path, queries: Iterable[tuple[str, str]]) -> Path:
    """Write (query, doc_id) pairs, filtered ones perhaps, in the form that `read_generated` takes."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8", errors="surrogatepass") as stream:
        for query, doc_id in queries:
            stream.write(json.dumps({"doc_id": doc_id, "query": query}, ensure_ascii=False) + "\n")
    rename_durably(temporary, path)
    return path


def _shards(documents: Iterable[Document], size: int, *, key: str) -> Iterator[Shard]:
    stream = iter(documents)
    while items := list(islice(stream, size)):
        digest = hashlib.sha256(key.encode())
        for item in items:
            for text in (item.doc_id, item.title, item.text):
                data = text.encode("utf-8", "surrogatepass")
                digest.update(len(data).to_bytes(8, "little"))  # so that "ab", "c" and "a", "bc" differ
                digest.update(data)
        yield Shard(digest.hexdigest(), items)


def _writer(generator: Seq2Seq, config: QueryGenConfig) -> Write:
    def alone(job: tuple[list[int], int]) -> list[list[int]]:
        row, seed = job
        return generator.sample([row], [seed], config.sampling)[0]

    def write(documents: Sequence[Document]) -> list[list[str]]:
        rows = generator.tokenize([document.content for document in documents], config.max_source)
        seeds = [document_seed(document.doc_id, config.seed) for document in documents]
        written: list[list[str]] = [[] for _ in documents]
        # longest first: what does not fit in memory fails at once, and similar lengths share a batch
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
        for start in range(0, len(order), config.batch_size):
            batch = order[start : start + config.batch_size]
            if generator.device.startswith("cuda"):
                tokens = generator.sample([rows[i] for i in batch], [seeds[i] for i in batch], config.sampling)
            else:
                # a document alone, on one thread: no bit of it depends on its neighbours or on the number of threads
                tokens = one_thread_each(alone, [(rows[i], seeds[i]) for i in batch])
            for i, texts in zip(batch, tokens, strict=True):
                written[i] = [query for query in generator.decode(texts) if query]
            report(len(batch))
        return written

    return write
