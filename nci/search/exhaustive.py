"""Query states -> log p of every document, by teacher forcing along every path: the slow reference for all searches."""

from __future__ import annotations

import torch
from torch import Tensor

from nci.model import NCIModel
from nci.search.plain import EncodedQueries, Found


@torch.no_grad()
def score_all(model: NCIModel, queries: EncodedQueries, *, chunk: int = 256) -> Tensor:
    """log p(d | q): (queries, documents) in leaf order."""
    documents = torch.arange(model.tables.trie.documents, device=queries.states.device)
    out = []
    for number in range(len(queries.states)):
        parts = []
        for part in torch.split(documents, chunk):
            row = torch.full((len(part),), number, device=part.device)
            memories, mask = model.memories(queries.states[row]), queries.mask[row][:, None, None, :].bool()
            vectors = queries.vectors[row] if queries.vectors is not None else None
            anchors = queries.anchors[row] if queries.anchors is not None else None
            log_probs, _, _ = model.path_log_probs(memories, mask, part, vectors, anchors)
            parts.append(log_probs.sum(1))
        out.append(torch.cat(parts))
    return torch.stack(out)


def exhaustive_search(model: NCIModel, queries: EncodedQueries, *, k: int = 10, length_penalty: float = 0.0) -> Found:
    """The k best documents of each query among all of them."""
    trie = model.tables.trie
    ended = model.config.normalise != "children"
    digits = torch.as_tensor((trie.paths >= 0).sum(1), device=queries.states.device) - int(ended)
    scores = score_all(model, queries) / (digits + 1) ** length_penalty
    top, index = scores.topk(min(k, trie.documents), dim=1)
    return Found(index, top, torch.full((len(scores),), trie.documents, device=scores.device))
