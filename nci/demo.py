"""`nci demo`: an index of the standard library's documentation on this machine, beside BM25 and dense search.

Nothing is shipped and nothing is downloaded: the corpus is read from the Python that runs this, and its queries are
sentences taken out of the docstrings (see `nci.stdlib`). Returns the table as {"systems": {name: {metric: value}}}.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from nci.assembly import load_embedder
from nci.baselines.bm25 import BM25
from nci.baselines.dense import Dense
from nci.config import Config, CorpusConfig
from nci.corpus import open_dataset
from nci.errors import ConfigError, DataError
from nci.evaluate import DEFAULT_METRICS, evaluate, table
from nci.index import Index, build, snippet
from nci.stdlib import make_dataset

log = logging.getLogger("nci")

EXAMPLES = (
    "how do I copy a whole directory tree",
    "pick random elements without repetition",
    "parse a date from a string",
)
SPLITS = {"test": "documents with other training queries", "test-unseen": "documents without any training query"}


def run_demo(
    out: Path, *, preset: str = "fast", device: str | None = None, limit: int | None = None, show: bool = True
) -> dict[str, Any]:
    """Make data and index in `out`, compare, and show three searches."""
    started = time.monotonic()
    say: Callable[[str], None] = print if show else lambda _: None
    data = make_dataset(out / "data", limit=limit)
    dataset = open_dataset(data)
    if dataset is None:
        raise DataError(
            f"{data}: the documentation of this Python could not be read; it has no sources on this machine"
        )
    index = build(data, out / "stdlib.index", Config.preset(preset), device=device)
    systems = _systems(index, list(dataset.documents(CorpusConfig())))
    result: dict[str, Any] = {"documents": len(index), "systems": {}, "splits": {}}
    for split, meaning in SPLITS.items():
        queries, qrels = dataset.split(split)
        rows: dict[str, dict[str, float]] = {}
        for name, search in systems.items():
            found = search([query.text for query in queries])
            run = {q.query_id: {hit.doc_id: hit.score for hit in hits} for q, hits in zip(queries, found, strict=True)}
            rows[name] = evaluate(run, qrels)
        say(f"\n{split}: {len(queries)} held-out queries, {meaning} (%)\n{table(rows, DEFAULT_METRICS)}")
        result["splits"][split] = rows
    # The headline figures: both kinds of held-out queries together.
    sizes = {split: len(dataset.split(split)[0]) for split in SPLITS}
    for name in systems:
        result["systems"][name] = {
            metric: sum(result["splits"][s][name][metric] * sizes[s] for s in SPLITS) / sum(sizes.values())
            for metric in DEFAULT_METRICS
        }
    say(f"\nall {sum(sizes.values())} held-out queries (%)\n{table(result['systems'], DEFAULT_METRICS)}")
    for query in EXAMPLES:
        say(f"\n> {query}")
        for hit in index.search(query, k=3):
            say(f"  {hit.rank}. {hit.title}\n     {snippet(hit.text)}")
    result["seconds"] = round(time.monotonic() - started, 1)
    say(f"\n{len(index):,} documents indexed, evaluated and searched in {result['seconds']:.0f} s. Go on with:")
    say(f'  nci search {out / "stdlib.index"} "your own question"')
    say("  nci index your_documents.jsonl -o my.index")
    return result


def _systems(index: Index, documents: list[Any]) -> dict[str, Callable[[list[str]], Any]]:
    by_id = {document.doc_id: document for document in documents}
    encoder = load_embedder(index.config, index.generation / "embedder")
    dense = Dense([by_id[doc_id] for doc_id in index.doc_ids], encoder, index.vectors())
    bm25 = BM25(documents)
    untrained = {}
    with suppress(ConfigError):  # another query encoder's first weights are not part of an index
        before = index.system("untrained")
        untrained["nci untrained"] = lambda texts: before.search(texts, k=100)
    return {
        "nci": lambda texts: index.search(texts, k=100),
        **untrained,
        "dense": lambda texts: dense.search(texts, k=100),
        "bm25": lambda texts: bm25.search(texts, k=100),
    }
