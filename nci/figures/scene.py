"""What figures are drawn from: index folders, a data set, files of queries. What one figure needs is made when asked.

Groups of similar queries are those of two files, or chosen from one file or the split: the most similar pair of queries
without a common relevant document, and the pair that is most similar in itself and least to the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nci.assembly import load_embedder
from nci.corpus import Dataset, read_queries
from nci.errors import ConfigError, DataError, NciError
from nci.index import Index, load
from nci.records import Hits, Qrels, Query

FOUND = 50  # documents retrieved per query of a group
_MOST = 2000  # queries that are compared with each other
_PER_GROUP = 3  # more would not be readable


class CannotDrawError(NciError):
    """One figure cannot be drawn; the message says why, and the others still can."""


@dataclass
class Scene:
    """Everything a figure may ask for.

    Args:
        folders: Index folders; learning curves are of all of them, everything else of the first.
        dataset: A BEIR folder, where there is one.
        splits: Names of the qrels whose queries are asked, together.
        files: One or two files of queries for the groups; none takes them from the splits.
    """

    folders: Sequence[str]
    dataset: Dataset | None = None
    splits: Sequence[str] = ("test",)
    files: Sequence[str] = ()
    device: str = "cpu"

    def __post_init__(self) -> None:
        if len(self.files) > 2:
            raise ConfigError(f"--queries are one or two files, not {len(self.files)}")
        for name, queries in zip(self.files, self._given, strict=True):
            if not queries:
                raise DataError(f"--queries {name}: holds no queries; expected queries.jsonl, .tsv or .txt")
        if self.dataset is not None and not self._judged[0]:
            raise DataError(f"{self.dataset.folder}: no query of {self.split} has a relevant document")

    @property
    def name(self) -> str:
        """What titles call the index."""
        return Path(self.folders[0]).resolve().name

    @property
    def split(self) -> str:
        return ",".join(self.splits)

    @property
    def asked(self) -> str:
        """Where the groups of queries come from, for titles."""
        return f"queries of {' and '.join(Path(name).name for name in self.files) or self.split}"

    @cached_property
    def index(self) -> Index:
        return load(self.folders[0], device=self.device)

    @cached_property
    def _given(self) -> list[list[Query]]:
        return [read_queries(name) for name in self.files]

    @cached_property
    def _judged(self) -> tuple[list[Query], Qrels]:
        assert self.dataset is not None
        queries: dict[str, Query] = {}
        qrels: Qrels = {}
        for name in self.splits:
            found, judged = self.dataset.split(name)
            queries |= {query.query_id: query for query in found}
            for query_id, grades in judged.items():
                qrels[query_id] = {**qrels.get(query_id, {}), **grades}
        return list(queries.values()), qrels

    def judged(self) -> tuple[list[Query], Qrels]:
        """Queries of the splits and their judgements."""
        if self.dataset is None:
            raise CannotDrawError("needs queries with judgements: give --data DATA, a BEIR folder")
        return self._judged

    def trained_on(self) -> dict[str, int]:
        """How many training queries of the data set name each document."""
        self.judged()
        assert self.dataset is not None
        if "train" not in self.dataset.splits():
            raise CannotDrawError(f"needs qrels/train.tsv, which {self.dataset.folder} does not have")
        counts: dict[str, int] = {}
        for grades in self.dataset.split("train")[1].values():
            for doc_id in (doc_id for doc_id, grade in grades.items() if grade > 0):
                counts[doc_id] = counts.get(doc_id, 0) + 1
        return counts

    @cached_property
    def groups(self) -> list[list[Query]]:
        """Two groups of similar queries; the id of a query is its name, such as A-1."""
        if len(self.files) == 2:
            groups = [[query.text for query in queries[:_PER_GROUP]] for queries in self._given]
        else:
            groups = self._chosen()
        return [
            [Query(f"{letter}-{number}", text) for number, text in enumerate(group, 1)]
            for letter, group in zip("AB", groups, strict=True)
        ]

    def _chosen(self) -> list[list[str]]:
        if self.files:
            queries, qrels = self._given[0], Qrels()
        elif self.dataset is not None:
            queries, qrels = self._judged
        else:
            raise CannotDrawError("needs queries: give --data DATA, or --queries with one or two files")
        chosen = [queries[i] for i in spread(len(queries), _MOST)]
        embedder = load_embedder(self.index.config, self.index.generation / "embedder", self.device)
        vectors = embedder.encode([query.text for query in chosen], role="query")
        keys = [{f"text {query.text}", *(f"document {d}" for d in _relevant(qrels, query))} for query in chosen]
        return [[chosen[a].text, chosen[b].text] for a, b in similar_pairs(vectors, keys)]

    @cached_property
    def found(self) -> dict[str, Hits]:
        """What each query of the groups retrieves; scores are logarithms of probabilities."""
        queries = [query for group in self.groups for query in group]
        hits = self.index.search([query.text for query in queries], FOUND, length_penalty=0.0)
        return {query.query_id: each for query, each in zip(queries, hits, strict=True)}

    def group_numbers(self) -> list[dict[str, str]]:
        """Which queries the groups are of, for JSON."""
        return [dict(group) for group in self.groups]


def spread(count: int, most: int) -> list[int]:
    """All of `count` places, or `most` of them, evenly spread."""
    return np.linspace(0, count - 1, min(count, most)).astype(int).tolist() if count else []


def similar_pairs(vectors: NDArray[np.floating], keys: Sequence[set[str]]) -> list[tuple[int, int]]:
    """Two pairs of rows: each similar in itself, unlike each other; the rows of a pair have no key in common.

    Args:
        vectors: (queries, width); only their directions count.
        keys: What two queries of a pair must not share, such as a relevant document.
    """
    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)
    similarity = (unit @ unit.T).astype(np.float64)  # (queries, queries)
    allowed = np.triu(np.ones(similarity.shape, bool), 1)
    rows_of: dict[str, list[int]] = {}
    for row, names in enumerate(keys):
        for name in names:
            rows_of.setdefault(name, []).append(row)
    for rows in rows_of.values():
        allowed[np.ix_(rows, rows)] = False
    first = _best(np.where(allowed, similarity, -np.inf))
    near = similarity[list(first)].max(axis=0)  # (queries,)
    allowed[list(first)] = allowed[:, list(first)] = False
    return [first, _best(np.where(allowed, similarity - (near[:, None] + near[None, :]) / 2, -np.inf))]


def _best(scores: NDArray[np.float64]) -> tuple[int, int]:
    if not scores.size or not np.isfinite(scores).any():
        raise CannotDrawError("needs two pairs of different queries, and there are too few; give --queries A.txt B.txt")
    row, column = divmod(int(scores.argmax()), scores.shape[1])
    return row, column


def _relevant(qrels: Mapping[str, Mapping[str, int]], query: Query) -> list[str]:
    return [doc_id for doc_id, grade in qrels.get(query.query_id, {}).items() if grade > 0]
