"""Trained model + queries it has not seen -> the weights of the parts of its score.

Training sees queries of some documents only, and weighs the parts as suits those. Here the queries of a tenth of the
documents are withheld from a first build; afterwards five numbers are fitted on them and on `dev`, documents with and
without training queries counting the same: the weights of dense and lexical similarity, a constant for documents without
any query, what often asked ones are ahead of the others, and a factor on what the decoder says. Knows no stages and no files.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nci.anchors import TreeSum
from nci.config import CalibrateConfig
from nci.layers import StackCache
from nci.model import NCIModel
from nci.search import EncodedQueries, Engine
from nci.trie import Trie

log = logging.getLogger("nci")

_AT_ONCE = 2**24  # numbers per query and node that are computed together
_MOST = 4000  # queries: more make no difference
_HELD = 2**27  # numbers per query and node that are kept; fitting needs a handful of their like


@dataclass(frozen=True)
class Calibration:
    """The fitted numbers, and what they changed.

    Args:
        kappa: Weight of the dense similarity.
        lexical: Weight of the lexical score.
        unseen: Added to the content score of documents without any training query.
        residual: Factor on the decoder's part of every logit.
        popular: Times log(1 + its training queries), added to the content score of every other document.
        found: R@1 of seen and unseen documents, before and after, and how many queries there were.
    """

    kappa: float
    lexical: float
    unseen: float
    residual: float
    popular: float = 0.0
    found: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        weights = f"dense {self.kappa:.2f}, BM25 {self.lexical:.2f}, decoder {self.residual:.2f}"
        r1 = [
            f"{kind} {100 * self.found['before'][kind]:.1f} -> {100 * self.found['after'][kind]:.1f} ({count:,})"
            for kind, count in self.found.get("queries", {}).items()
        ]
        changed = f"; R@1 {', '.join(r1)}" if r1 else ""
        return f"{weights}, unseen {self.unseen:+.2f}, often asked {self.popular:+.2f}{changed}"

    @torch.no_grad()
    def apply(self, model: NCIModel) -> None:
        """Give a trained model these weights; the constant is the documents' bias, see `bias`."""
        assert model.anchor_weights is not None
        model.anchor_weights.copy_(torch.tensor([self.kappa, self.lexical]).log())
        model.head.out.weight.mul_(self.residual)
        if model.head.bias is not None:
            model.head.bias.mul_(self.residual)

    def bias(self, counts: NDArray[np.integer]) -> NDArray[np.float32]:
        """(documents,) what is added to the content score of each, given how many training queries it has."""
        return np.where(counts > 0, self.popular * np.log1p(counts), self.unseen).astype(np.float32)


def withheld(doc_ids: Iterable[str], config: CalibrateConfig) -> set[str]:
    """The documents, of those with training queries, whose queries are withheld; the same whatever their order."""

    def lot(doc_id: str) -> bytes:
        return hashlib.sha256(f"{config.seed}\0{doc_id}".encode("utf-8", "surrogatepass")).digest()

    ordered = sorted(set(doc_ids), key=lot)
    return set(ordered[: round(config.share * len(ordered))])


@dataclass(frozen=True)
class Evidence:
    """Everything about some queries that the weights combine."""

    dense: Tensor  # (queries, documents) cosine
    lexical: Tensor | None  # (queries, documents) as a share of the highest
    residual: Tensor  # (queries, nodes) what the decoder says of the edge into each node
    targets: Tensor  # (queries,) leaves
    counts: Tensor  # (documents,) training queries of each, as floats

    @property
    def unseen(self) -> Tensor:
        """(documents,) 1 where a document has no training query."""
        return (self.counts == 0).float()

    def scores(self, weights: Tensor) -> Tensor:
        """Content scores (queries, documents); `weights`: log kappa, log lexical, constant, factor, lead of the popular."""
        prior = weights[2] * self.unseen + weights[4] * self.counts.log1p()
        total = weights[0].exp() * self.dense + prior
        return total if self.lexical is None else total + weights[1].exp() * self.lexical


@torch.no_grad()
def gather(engine: Engine, texts: Sequence[str], targets: NDArray[np.integer], counts: NDArray[np.integer]) -> Evidence:
    """Read some queries with a trained model, a few at a time; what is found stays on the model's device."""
    model, trie = engine.reference, engine.trie
    assert model.tables.vectors is not None
    step = max(1, _AT_ONCE // max(trie.nodes * 8, 1))
    dense, lexical, residual = [], [], []
    for start in range(0, len(texts), step):
        part = list(texts[start : start + step])
        queries = engine.encode(part)
        stored = engine.stored_vectors(part, len(part))
        asked = queries.vectors if stored is None else stored
        assert asked is not None
        dense.append(asked.float() @ model.tables.vectors.T)
        residual.append(residuals(model, queries))
        if engine.lexical is not None:
            lexical.append(torch.as_tensor(engine.lexical.normalised(part), device=model.device))
    return Evidence(
        torch.cat(dense),
        torch.cat(lexical) if lexical else None,
        torch.cat(residual),
        torch.as_tensor(targets, device=model.device).long(),
        torch.as_tensor(counts, device=model.device).float(),
    )


@torch.no_grad()
def residuals(model: NCIModel, queries: EncodedQueries) -> Tensor:
    """What the decoder adds to the logit of every edge: (queries, nodes); the decoder runs once per inner node."""
    trie, tables, device = model.tables.trie, model.tables, queries.states.device
    batch = len(queries.states)
    memories, mask = model.memories(queries.states), queries.mask[:, None, None, :].bool()
    inner = np.diff(trie.child_start) > 0
    place = np.cumsum(inner) - 1  # (nodes,) in the order in which inner nodes enter the cache
    out = torch.zeros(batch, trie.nodes, device=device)
    cache = StackCache()
    for level in range(trie.positions):
        start, stop = trie.level_start[level : level + 2]
        nodes = np.arange(start, stop)[inner[start:stop]]
        if not len(nodes):
            break
        paths = [nodes]
        for _ in range(level):
            paths.append(trie.parent[paths[-1]].astype(np.int64))
        path = torch.as_tensor(np.stack(paths[::-1], axis=1), device=device).long()  # (nodes of the level, level + 1)
        ancestors = torch.as_tensor(place[path.cpu().numpy()], device=device)
        tokens = tables.token[path]
        inputs = model.embedding(tokens[:, -1]).expand(batch, -1, -1)
        h = model.decoder.step(inputs, ancestors.expand(batch, -1, -1), cache, memories, mask)
        adapter = model.adapter_states(tokens)
        edges, child, real = model.child_edges(path[:, -1], adapter[:, -1] if adapter is not None else None, level)
        logits = torch.einsum("brd,rfd->brf", model.head.project(h), edges)
        out[:, child[real]] = logits[:, real].float()
    return out if model.head.bias is None else out + model.head.bias


class Paths:
    """The softmax along the tree as a function of the weights."""

    def __init__(self, trie: Trie, device: torch.device | str = "cpu") -> None:
        self.sum = TreeSum(trie).to(device)
        self.trie = trie
        self.parent = torch.tensor(trie.parent, device=device).long()
        self.parent[0] = 0
        self.nodes = torch.tensor(
            trie.path_nodes, device=device
        ).long()  # (documents, positions + 1), -1 behind the end

    def log_probs(self, evidence: Evidence, weights: Tensor) -> Tensor:
        """log p(c | parent) of every node: (queries, nodes); 0 at the root."""
        logits = self.sum(evidence.scores(weights)) + weights[3] * evidence.residual
        siblings = self.parent.expand(len(logits), -1)[:, 1:]
        below = logits[:, 1:]
        empty = logits.new_full(logits.shape, -torch.inf)
        peak = empty.scatter_reduce(1, siblings, below.detach(), "amax")
        peak = torch.where(peak.isinf(), 0.0, peak)
        total = torch.zeros_like(peak).scatter_add(1, siblings, (below - peak.gather(1, siblings)).exp())
        normaliser = peak + total.clamp(min=1e-30).log()
        return torch.cat([logits[:, :1] * 0, below - normaliser.gather(1, siblings)], dim=1)

    def documents(self, log_probs: Tensor) -> Tensor:
        """log p(d): (queries, documents)."""
        out = log_probs.new_zeros(len(log_probs), len(self.nodes))
        for column in self.nodes.T[1:]:
            out += torch.where(column >= 0, log_probs[:, column.clamp(min=0)], 0.0)
        return out

    def of_targets(self, log_probs: Tensor, targets: Tensor) -> Tensor:
        """log p of each query's own document: (queries,)."""
        path = self.nodes[targets][:, 1:]
        return torch.where(path >= 0, log_probs.gather(1, path.clamp(min=0)), 0.0).sum(1)


def fit(engine: Engine, texts: Sequence[str], targets: NDArray[np.integer], counts: NDArray[np.integer]) -> Calibration:
    """The weights under which the queries' own documents are likeliest, seen and unseen documents counting the same.

    Args:
        engine: Searches with the trained model.
        targets: The leaf that each text should find.
        counts: (documents,) in leaf order, how many training queries each has in this build.
    """
    chosen = np.random.default_rng(0).permutation(len(texts))[: max(1, min(_MOST, _HELD // engine.trie.nodes))]
    evidence = gather(engine, [texts[i] for i in chosen], np.asarray(targets)[chosen], counts)
    device = evidence.dense.device
    paths = Paths(engine.trie, device)
    new = evidence.unseen[evidence.targets] > 0  # (queries,)
    share = torch.where(new, 0.5 / new.sum().clamp(min=1), 0.5 / (~new).sum().clamp(min=1))
    assert engine.model.anchor_weights is not None
    start = torch.cat([engine.model.anchor_weights.detach().float().cpu(), torch.tensor([0.0, 1.0, 0.0])]).to(device)
    weights = start.clone().requires_grad_(True)
    optimiser = torch.optim.LBFGS([weights], max_iter=60, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        own = paths.of_targets(paths.log_probs(evidence, weights), evidence.targets)
        # As much as one query in all would say: it matters only where there are few.
        prior = (weights - start).square().sum() / (2 * len(own))
        value = prior - (own * share).sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimiser.step(loss)  # type: ignore[arg-type, no-untyped-call]
    fitted = weights.detach()
    fitted[3] = fitted[3].clamp(min=0.0)
    found: dict[str, Any] = {"queries": {"seen": int((~new).sum()), "unseen": int(new.sum())}}
    for name, value in (("before", start), ("after", fitted)):
        first = paths.documents(paths.log_probs(evidence, value)).argmax(1) == evidence.targets
        found[name] = {"seen": _share(first[~new]), "unseen": _share(first[new])}
    kappa, lexical, unseen, residual, popular = (float(x) for x in [*fitted[:2].exp(), *fitted[2:]])
    return Calibration(kappa, lexical, unseen, residual, popular, found)


def _share(found: Tensor) -> float:
    return round(float(found.float().mean()), 4) if len(found) else 0.0
