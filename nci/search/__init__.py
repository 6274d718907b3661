"""Search: texts or query states in, numbers of documents out.

plan        tree and beam -> rows per level
core        the beam search, for CPU and GPU, over `network`, `ops` (PyTorch) or `kernels` (Triton)
content     content scores of all nodes
engine      texts in, documents out: tokenises, batches, records CUDA graphs, splits what does not fit
plain, exhaustive, unconstrained    the model's own modules: references, and what cannot be folded
"""

from nci.search.engine import Engine, Ranking
from nci.search.exhaustive import exhaustive_search, score_all
from nci.search.fold import EdgeTable, fold
from nci.search.plain import EncodedQueries, Found, plain_search
from nci.search.plan import Plan, make_plan
from nci.search.unconstrained import unconstrained_search

__all__ = [
    "EdgeTable",
    "EncodedQueries",
    "Engine",
    "Found",
    "Plan",
    "Ranking",
    "exhaustive_search",
    "fold",
    "make_plan",
    "plain_search",
    "score_all",
    "unconstrained_search",
]
