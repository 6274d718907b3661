"""Quality of an index on the benchmarks in the folder named by NCI_DATA (BEIR folders), beside BM25 and dense search.

    NCI_DATA=/path/to/data python benchmarks/quality.py --data squad --preset fast --out build/quality

Rows: the trained index; the same index untrained; the same with its generative part zeroed; flat dense search with the
same encoder; BM25. `test` and `test-unseen` are scored once, at the end; nothing here is chosen by them.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from nci.assembly import load_embedder
from nci.baselines import Searcher
from nci.baselines.bm25 import BM25
from nci.baselines.dense import Dense
from nci.config import Config, CorpusConfig
from nci.corpus import open_dataset
from nci.errors import ConfigError
from nci.evaluate import DEFAULT_METRICS, evaluate, table
from nci.index import build


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="squad", help="names of data sets, separated by commas")
    parser.add_argument("--preset", default="fast", help="a preset or a .yaml file")
    parser.add_argument("--splits", default="test,test-unseen")
    parser.add_argument("--out", default="build/quality")
    parser.add_argument("--device", default=None)
    args = parser.parse_args()
    root = os.environ.get("NCI_DATA")
    if not root:
        print("NCI_DATA is not set: name the folder that holds the benchmark data sets; nothing was measured")
        return
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("nci").setLevel(logging.INFO)
    for name in args.data.split(","):
        dataset = open_dataset(Path(root) / name)
        if dataset is None:
            sys.exit(f"{Path(root) / name} is no BEIR folder")
        started = time.monotonic()
        label = f"{name}-{Path(args.preset).stem}"
        index = build(dataset.folder, Path(args.out) / f"{label}.index", args.preset, device=args.device)
        seconds = time.monotonic() - started
        by_id = {document.doc_id: document for document in dataset.documents(CorpusConfig())}
        documents = [by_id[doc_id] for doc_id in index.doc_ids]
        systems: dict[str, Searcher] = {"nci": index}
        for other in ("untrained", "zeroed"):
            with suppress(ConfigError):  # not every model has such a row
                systems[f"nci {other}"] = index.system(other)
        systems |= {
            "dense": Dense(documents, load_embedder(index.config, index.generation / "embedder"), index.vectors()),
            "bm25": BM25(documents),
        }
        print(
            f"\n{name}: {len(index):,} documents, preset {args.preset}, built in {seconds:.0f} s, load {os.getloadavg()}"
        )
        result: dict[str, object] = {"config": Config.preset(args.preset).to_dict(), "seconds": seconds}
        for split in args.splits.split(","):
            queries, qrels = dataset.split(split)
            rows = {}
            for row, system in systems.items():
                found = system.search([query.text for query in queries], k=100)
                pairs = zip(queries, found, strict=True)
                rows[row] = evaluate({q.query_id: {h.doc_id: h.score for h in hits} for q, hits in pairs}, qrels)
            print(f"\n{split}, {len(queries)} queries (%)\n{table(rows, DEFAULT_METRICS)}", flush=True)
            result[split] = rows
        path = Path(args.out) / f"{label}.json"
        path.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
