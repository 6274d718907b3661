"""Query states -> best documents: constrained beam search (Algorithm 2) by the model's own modules, nothing folded.

For models whose classifier depends on the query (`adapter_start=query`) or has columns that are no edges (other
normalisers), at their own speed; and the plain implementation that the fast one is compared with. Knows no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nci.layers import StackCache
from nci.model import NCIModel


@dataclass(frozen=True)
class EncodedQueries:
    """What the tree is asked with: encoder states, their mask, and the content score of every node."""

    states: Tensor  # (queries, tokens, encoder width)
    mask: Tensor  # (queries, tokens)
    vectors: Tensor | None = None  # (queries, width)
    anchors: Tensor | None = None  # (queries, nodes)
    late: Tensor | None = None  # (queries, documents) what late interaction finds in openings, before its weight
    nearer: Tensor | None = None  # (queries, documents) and in the windows behind them, before its share


@dataclass(frozen=True)
class Found:
    """Documents (numbers in leaf order, -1 where there are fewer than k), best first, and how many were scored."""

    documents: Tensor  # (queries, k)
    scores: Tensor  # (queries, k)
    scored: Tensor  # (queries,)


@torch.no_grad()
def plain_search(
    model: NCIModel,
    queries: EncodedQueries,
    *,
    beam: int | Sequence[int] = 100,
    k: int = 10,
    length_penalty: float = 0.0,
) -> Found:
    """The k best documents of each query among the leaves that the beam reaches."""
    tables, trie = model.tables, model.tables.trie
    device, batch = queries.states.device, len(queries.states)
    ends = model.config.normalise != "children"  # the last step of an id is then its end token, no digit
    document_of = torch.as_tensor(trie.first_document, device=device).long()
    inner = tables.child_start[1:] > tables.child_start[:-1]
    memories = model.memories(queries.states)
    mask = queries.mask[:, None, None, :].bool()
    cache = StackCache()

    nodes = torch.zeros(batch, 1, dtype=torch.long, device=device)  # (batch, rows)
    paths = nodes.unsqueeze(-1)  # (batch, rows, level + 1): nodes from the root on
    places = nodes.unsqueeze(-1)  # (batch, rows, level + 1): the same in the caches
    scores = torch.zeros(batch, 1, device=device)
    scored = torch.zeros(batch, dtype=torch.long, device=device)
    found: list[Tensor] = []
    found_scores: list[Tensor] = []
    cached = 1
    beams = (beam,) if isinstance(beam, int) else tuple(beam)
    for level in range(trie.positions):
        h = model.decoder.step(model.embedding(tables.token[nodes]), places, cache, memories, mask)
        log_probs, child, real = _children(model, queries, h, nodes, paths, level)
        total = scores.unsqueeze(-1) + log_probs  # (batch, rows, fanout)
        alive = real & (scores > -torch.inf).unsqueeze(-1)
        scored += (alive & ~inner[child]).sum((1, 2))
        total = total.masked_fill(~alive, -torch.inf).flatten(1)
        best, index = total.topk(min(beams[min(level, len(beams) - 1)], total.shape[1]), dim=1)
        row, node = index // child.shape[-1], child.flatten(1).gather(1, index)
        live = best > -torch.inf
        leaf = live & ~inner[node]
        digits = level if ends else level + 1
        found.append(torch.where(leaf, document_of[node], -1))
        found_scores.append(torch.where(leaf, best / (digits + 1) ** length_penalty, -torch.inf))
        if level + 1 == trie.positions:
            break
        rows = min(best.shape[1], int(inner[trie.level_start[level + 1] : trie.level_start[level + 2]].sum()))
        scores, keep = best.masked_fill(leaf, -torch.inf).topk(rows, dim=1)
        nodes, row = node.gather(1, keep), row.gather(1, keep)
        nodes = torch.where(scores > -torch.inf, nodes, 0)
        paths = torch.cat([_rows(paths, row), nodes.unsqueeze(-1)], dim=-1)
        own = cached + torch.arange(rows, device=device).expand(batch, -1)
        places = torch.cat([_rows(places, row), own.unsqueeze(-1)], dim=-1)
        cached += rows
    all_scores, all_documents = torch.cat(found_scores, dim=1), torch.cat(found, dim=1)
    top, index = all_scores.topk(min(k, all_scores.shape[1]), dim=1)
    if queries.anchors is not None and model.config.anchor == "exact":
        scored = torch.full_like(scored, trie.documents)
    return Found(all_documents.gather(1, index), top, scored)


def _rows(table: Tensor, row: Tensor) -> Tensor:
    """The chosen rows of (batch, rows, n)."""
    return table.gather(1, row.unsqueeze(-1).expand(-1, -1, table.shape[-1]))


def _children(
    model: NCIModel,
    queries: EncodedQueries,
    h: Tensor,
    nodes: Tensor,
    paths: Tensor,
    level: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """log p of the children of every row: (batch, rows, fanout), with child nodes and which are real."""
    batch, rows = nodes.shape
    query = torch.arange(batch, device=h.device).repeat_interleave(rows)
    vectors = queries.vectors[query] if queries.vectors is not None else None
    states = model.adapter_states(model.tables.token[paths.flatten(0, 1)], vectors)
    flat = nodes.flatten()
    # Rows that died stand at the root, whose children exist, so that no softmax is empty.
    log_probs, child, real = model.child_log_probs(
        h.flatten(0, 1),
        flat,
        None,
        states[:, -1] if states is not None else None,
        level,
        queries.anchors,
        query,
    )
    shape = (batch, rows, -1)
    return log_probs.view(shape), child.view(shape), real.view(shape)
