"""Queries of a data set or of the caller -> pairs with corpus rows: what to train on, and what to select by. No torch."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from nci.corpus import Dataset
from nci.errors import DataError
from nci.records import Query

log = logging.getLogger("nci")

TrainingQueries = Sequence[tuple[str, str]]
"""Pairs of a query and the doc_id it should find."""


@dataclass(frozen=True)
class TrainingData:
    """Everything with queries in it; documents are rows of the corpus. `dev` is as much of `all_dev` as training asks."""

    real: list[tuple[str, int]] = field(default_factory=list)
    generated: list[tuple[str, int]] = field(default_factory=list)
    dev: list[tuple[Query, list[int]]] = field(default_factory=list)
    all_dev: list[tuple[Query, list[int]]] = field(default_factory=list)

    @property
    def seen_rows(self) -> list[int]:
        """Documents with at least one real query."""
        return sorted({row for _, row in self.real})

    def without(
        self, rows: Collection[int] = (), texts: Collection[str] = ()
    ) -> tuple[TrainingData, list[tuple[str, int]]]:
        """The same without the real queries of some documents and without some others, and all those queries."""
        held = [(text, row) for text, row in self.real if row in rows or text in texts]
        left = [(text, row) for text, row in self.real if row not in rows and text not in texts]
        return replace(self, real=left), held


def split_pairs(dataset: Dataset | None, split: str) -> list[tuple[str, str]]:
    """Queries of a split, each with every document that is relevant to it; none where there is no such split."""
    if dataset is None or split not in dataset.splits():
        return []
    queries, qrels = dataset.split(split)
    return [(query.text, doc_id) for query in queries for doc_id, grade in qrels[query.query_id].items() if grade > 0]


def training_data(
    dataset: Dataset | None,
    rows: Mapping[str, int],
    *,
    queries: TrainingQueries | None = None,
    generated: TrainingQueries = (),
    dev_queries: int,
    skip_unknown: bool,
) -> TrainingData:
    """Real queries from the caller, else from `qrels/train.tsv`; dev queries from `qrels/dev.tsv`.

    Args:
        rows: Corpus row of each doc_id.
        skip_unknown: Leave out queries whose document is not in the corpus, instead of refusing them.
    """
    dropped = 0

    def row(doc_id: str, where: str) -> int | None:
        nonlocal dropped
        if doc_id not in rows:
            if not skip_unknown:
                todo = "put it there, or leave such queries out with --on-error skip"
                raise DataError(f'{where} names the document "{doc_id}", which is not in the corpus; {todo}')
            dropped += 1
        return rows.get(doc_id)

    def known(pairs: TrainingQueries, where: str) -> list[tuple[str, int]]:
        return [(text, found) for text, doc_id in pairs if (found := row(doc_id, where)) is not None]

    def judged_dev() -> list[tuple[Query, list[int]]]:
        if dataset is None or "dev" not in dataset.splits():
            return []
        found, qrels = dataset.split("dev")
        relevant = [[doc_id for doc_id, grade in qrels[query.query_id].items() if grade > 0] for query in found]
        rows_of = [[r for doc_id in each if (r := row(doc_id, "qrels/dev.tsv")) is not None] for each in relevant]
        return [(query, each) for query, each in zip(found, rows_of, strict=True) if each]

    where = "qrels/train.tsv" if queries is None else "a training query"
    real = known(split_pairs(dataset, "train") if queries is None else queries, where)
    dev = judged_dev()
    data = TrainingData(real, known(generated, "a generated query"), dev[:dev_queries], dev)
    if dropped:
        log.warning("%d judgements name documents that are not in the corpus: left out", dropped)
    return data
