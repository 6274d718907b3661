"""Memory and time of opening and searching an index of many documents, in a process of its own.

    python benchmarks/scale.py --documents 1000000 --out build/scale

Makes an untrained index around the embedded encoder (width 384) with random document vectors and short random texts, as
`nci index` would write it: tree by k-means, edge table, int8 vectors, BM25. Then a fresh process opens it, searches, and
says how much memory it holds. Needs about 16 bytes x documents x 384 of memory while it is being made.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from nci import store
from nci.assembly import Assembly, load_embedder
from nci.config import Config, LexicalConfig
from nci.expansion import expanded_scores
from nci.pack import DocumentFile, Parts, write_generation
from nci.tree import build_tree
from nci.trie import Trie

WORDS = [f"{first}{second}{third}" for first in "bdfglmnprst" for second in "aeiou" for third in "klmnrstvx"]

OPEN = """
import sys, time
started = time.monotonic()
import torch
import nci
imported = time.monotonic()
index = nci.load(sys.argv[1])
opened = time.monotonic()
index.search("bak bal bam", k=10, beam=10)
first = time.monotonic()
times = []
for n in range(20):
    begun = time.monotonic()
    index.search(f"bak bal {n}", k=10, beam=10)
    times.append(time.monotonic() - begun)
wanted = {"VmHWM": "at most", "VmRSS": "now", "RssAnon": "of it its own", "RssFile": "of it files"}
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(f"{len(index):,} documents, {index.trie.nodes:,} nodes: imports {imported - started:.1f} s, ", end="")
print(f"open {opened - imported:.1f} s, first query {first - opened:.2f} s, then {1000 * sorted(times)[10]:.1f} ms")
print("memory, GiB: " + ", ".join(f"{text} {int(status[name].split()[0]) / 2**20:.2f}" for name, text in wanted.items()))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--clusters", type=int, default=2000, help="random vectors lie around so many points")
    parser.add_argument("--out", type=Path, default=Path("build/scale"))
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    folder = args.out / f"{args.documents}.index"
    if not (folder / "CURRENT").exists():
        make(folder, args.documents, args.clusters)
    subprocess.run([sys.executable, "-c", OPEN, str(folder)], check=True)


def make(folder: Path, documents: int, clusters: int) -> None:
    """Write the index."""
    random = np.random.default_rng(0)
    config = Config.preset("fast")
    started = time.monotonic()
    middles = random.standard_normal((clusters, 384), dtype=np.float32)
    vectors = random.standard_normal((documents, 384), dtype=np.float32)
    vectors += 2 * middles[random.integers(0, clusters, documents)]
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    tree = build_tree(vectors, config.tree, progress=False)
    trie, order = Trie.from_paths(tree.paths)
    print(f"tree of {trie.nodes:,} nodes, {trie.positions} positions in {time.monotonic() - started:.0f} s", flush=True)
    words = random.integers(0, len(WORDS), (documents, 12))
    texts = [" ".join(WORDS[word] for word in row) for row in words]
    source = write_documents(folder.with_suffix(".source"), texts)
    encoder = load_embedder(config, config.embed.encoder)
    assembly = Assembly(config, trie, tree.values, order, vectors[order], encoder, encoder, None)
    lexical = expanded_scores(texts, [], LexicalConfig())[0].renumbered(assembly.leaf_of_row)
    assembly = Assembly(config, trie, tree.values, order, assembly.vectors, encoder, encoder, lexical)
    model = assembly.model()
    parts = Parts(source, tree, assembly, model, {})
    folder.mkdir(parents=True, exist_ok=True)
    store.publish(folder, lambda staging: write_generation(staging, parts))
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"index of {size / 2**30:.2f} GiB written after {time.monotonic() - started:.0f} s", flush=True)


def write_documents(folder: Path, texts: list[str]) -> DocumentFile:
    folder.mkdir(parents=True, exist_ok=True)
    offsets = [0]
    with (folder / "documents.jsonl").open("wb") as file:
        for number, text in enumerate(texts):
            document = {"doc_id": f"d{number}", "title": "", "text": text, "fields": {}}
            offsets.append(offsets[-1] + file.write(json.dumps(document).encode() + b"\n"))
    np.save(folder / "offsets.npy", np.array(offsets, dtype=np.int64))
    (folder / "doc_ids.json").write_text(json.dumps([f"d{number}" for number in range(len(texts))]))
    return DocumentFile(folder)


if __name__ == "__main__":
    main()
