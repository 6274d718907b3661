"""Search: query states in, numbers of documents out."""

from nci.search.beam import EncodedQueries, Found, beam_search
from nci.search.engine import Engine, Ranking
from nci.search.exhaustive import exhaustive_search, score_all
from nci.search.fold import EdgeTable, fold
from nci.search.unconstrained import unconstrained_search

__all__ = [
    "EdgeTable",
    "EncodedQueries",
    "Engine",
    "Found",
    "Ranking",
    "beam_search",
    "exhaustive_search",
    "fold",
    "score_all",
    "unconstrained_search",
]
