"""The small records that travel between stages: documents and queries in, hits and runs out.

Knows nothing of files, models or trees.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

Qrels = dict[str, dict[str, int]]
"""Relevance judgements: query id -> {doc_id: grade}."""

Run = dict[str, dict[str, float]]
"""A ranking per query: query id -> {doc_id: score}, higher is better."""

SemanticId = tuple[int, ...]
"""A document's path in the tree, one digit per position."""


@dataclass(frozen=True, slots=True)
class Document:
    """One document of the corpus; `fields` holds what is kept for display only."""

    doc_id: str
    text: str
    title: str = ""
    fields: Mapping[str, object] = field(default_factory=dict)

    @property
    def content(self) -> str:
        """Title and text as one string: what encoders and lexical search read."""
        return f"{self.title}\n{self.text}" if self.title else self.text


class Query(NamedTuple):
    """One query with the user's own id."""

    query_id: str
    text: str


class Hit(NamedTuple):
    """One search result. `source` says which tier found it: "nci", "live" or the name of an ensemble member."""

    rank: int
    doc_id: str
    score: float
    title: str = ""
    text: str = ""
    semantic_id: SemanticId = ()
    source: str = "nci"


class Hits(list[Hit]):
    """The hits of one query, best first.

    Args:
        hits: The hits.
        documents_scored: How many documents were looked at to find them; one that several parts score counts for each.
    """

    def __init__(self, hits: Iterable[Hit] = (), documents_scored: int = 0) -> None:
        super().__init__(hits)
        self.documents_scored = documents_scored
