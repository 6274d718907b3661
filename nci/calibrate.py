"""Trained model + queries it has not seen -> the weights of the parts of its score.

Training sees queries of some documents only, and weighs the parts as suits those. Here the queries of a tenth of the documents
are withheld from a first build; afterwards nine numbers are fitted on them and on `dev`, documents with and without training
queries counting the same: the weights of dense and lexical similarity and of late interaction, what windows behind the opening
of long documents count in the latter, a constant for documents without any query, what often asked ones are ahead of the
others, what hubs are behind them (`nci.hubs`), how far documents move towards their queries (`nci.rocchio`), and a factor on
what the decoder says. That build has more documents without queries than the index will have, which would hold the constant
down: each of them counts as fewer. Knows no stages and no files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nci.anchors import TreeSum
from nci.config import CalibrateConfig, SearchConfig
from nci.hubs import ContentParts, find_hubs, in_batches, read_content
from nci.model import NCIModel
from nci.search import Engine

_AT_ONCE = 2**24  # numbers of the edges that are computed together
_QUERIES = 256  # read together at most
_MOST, _ENOUGH = 4000, 1000  # queries: more make no difference; so many are not worth waiting for more
_KEPT_BACK = 2  # times as many documents give one query as give all of theirs
_LEAST_SHARE = 0.05  # of further windows: less is none
_WORTH = 2.0  # nats by which documents that move must make the queries likelier: chance alone gains a half
_QUICK, _HELD = 2**25, 2**27  # numbers per query and node: a minute on a CPU; as many as memory has, times a handful


@dataclass(frozen=True)
class Calibration:
    """The fitted numbers, and what they changed.

    Args:
        kappa: Weight of the dense similarity.
        lexical: Weight of the lexical score.
        unseen: Added to the content score of documents without any training query.
        residual: Factor on the decoder's part of every logit.
        popular: Times log(1 + its training queries), added to the content score of every other document.
        late: Weight of late interaction; 0 where there is none.
        hubs: Times `find_hubs`, added to the content score of every document.
        moves: Times `query_means`, added to the vectors of documents.
        further: What a better window behind the opening of a document counts in late interaction, a share.
        drawn_by: The weights that hubs are found with: dense, lexical, late, moves, further.
        found: R@1 of seen and unseen documents, before and after, and how many queries there were.
    """

    kappa: float
    lexical: float
    unseen: float
    residual: float
    popular: float = 0.0
    late: float = 0.0
    hubs: float = 0.0
    moves: float = 0.0
    further: float = 0.0
    drawn_by: Sequence[float] = (0.0, 0.0, 0.0, 0.0, 0.0)
    found: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        further = f" (further windows {self.further:.2f})" if self.further else ""
        late = f", word pieces {self.late:.2f}{further}" if self.late else ""
        weights = f"dense {self.kappa:.2f}, BM25 {self.lexical:.2f}{late}, decoder {self.residual:.2f}"
        r1 = [
            f"{kind} {100 * self.found['before'][kind]:.1f} -> {100 * self.found['after'][kind]:.1f} ({count:,})"
            for kind, count in self.found.get("queries", {}).items()
        ]
        changed = f"; R@1 {', '.join(r1)}" if r1 else ""
        priors = (
            f"unseen {self.unseen:+.2f}, often asked {self.popular:+.2f}, hubs {self.hubs:+.2f}, moved {self.moves:.2f}"
        )
        return f"{weights}, {priors}{changed}"

    @property
    def reads_queries(self) -> bool:
        """Whether documents move, in the score or in that by which hubs are found."""
        return bool(self.moves or self.drawn_by[3])

    @torch.no_grad()
    def apply(self, model: NCIModel) -> None:
        """Give a trained model these weights; the constant is the documents' bias, see `bias`."""
        assert model.anchor_weights is not None
        if model.config.late:  # which documents it compares stays as it was when the weights were fitted
            model.config.chosen_by = model.anchor_weights.exp().tolist()
            model.config.late, model.config.further = self.late, self.further
        model.anchor_weights.copy_(torch.tensor([self.kappa, self.lexical]).log())
        model.head.out.weight.mul_(self.residual)
        if model.head.bias is not None:
            model.head.bias.mul_(self.residual)

    def bias(self, counts: NDArray[np.integer], hubs: NDArray[np.floating] | None = None) -> NDArray[np.float32]:
        """(documents,) what is added to the content score of each, given its number of training queries and `find_hubs`."""
        prior = np.where(counts > 0, self.popular * np.log1p(counts), self.unseen)
        return (prior if hubs is None else prior + self.hubs * hubs).astype(np.float32)


def withheld(doc_ids: Iterable[str], config: CalibrateConfig) -> set[str]:
    """The documents, of those with training queries, whose queries are withheld; the same whatever their order."""
    ordered = sorted(set(doc_ids), key=lambda doc_id: _lot(doc_id, config.seed))
    return set(ordered[: round(config.share * len(ordered))])


def kept_back(
    pairs: Iterable[tuple[str, str]], dev: Iterable[tuple[str, str]], config: CalibrateConfig
) -> frozenset[str]:
    """Training queries in place of those that `dev` has not: one each of some documents that have others.

    Without any query of a document with training queries, nothing would hold the others back.

    Args:
        pairs: Queries and doc_ids, without those of withheld documents.
        dev: The same of `dev`; where enough of them ask for a document of `pairs`, nothing is kept back.
    """
    queries: dict[str, set[str]] = {}
    for text, doc_id in pairs:
        queries.setdefault(doc_id, set()).add(text)
    if sum(doc_id in queries for _, doc_id in dev) >= config.least:
        return frozenset()
    several = sorted((each for each in queries if len(queries[each]) > 1), key=lambda each: _lot(each, config.seed))
    chosen = several[: round(_KEPT_BACK * config.share * len(queries))]
    return frozenset(min(queries[each], key=lambda text: _lot(text, config.seed)) for each in chosen)


def _lot(text: str, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}\0{text}".encode("utf-8", "surrogatepass")).digest()


def fewer_unseen(documents: int, seen: int, finally_seen: int) -> float:
    """What a document without queries counts in a build that withholds some: as many as the index will have for one of them.

    Both are taken for each document with queries. At least a half: where the index has hardly any now, others will be added.

    Args:
        documents: All of them.
        seen: How many have queries in the build.
        finally_seen: The same in the index.

    >>> round(fewer_unseen(100, 72, 80), 2), fewer_unseen(100, 90, 100)
    (0.64, 0.5)
    """
    if not 0 < seen < documents:
        return 1.0
    return max(0.5, (documents - finally_seen) / finally_seen * seen / (documents - seen))


@dataclass(frozen=True)
class Evidence:
    """Everything about some queries that the weights combine. Children are those of the nodes on the way to the target."""

    dense: Tensor  # (queries, documents) cosine
    lexical: Tensor | None  # (queries, documents) as a share of the highest
    late: Tensor | None  # (queries, documents) above the worst candidate
    children: Tensor  # (queries, positions, fanout) nodes
    residual: Tensor  # (queries, positions, fanout) what the decoder says of these; -inf where there is none
    own: Tensor  # (queries, positions) which of them is on the way to the target; -1 behind its end
    targets: Tensor  # (queries,) leaves
    counts: Tensor  # (documents,) training queries of each, as floats
    moves: Tensor | None = None  # (queries, documents) by which the cosine changes if documents move all the way
    nearer: Tensor | None = None  # (queries, documents) by how much a window behind the opening is nearer
    hubs: Tensor | None = None  # (documents,)

    @property
    def unseen(self) -> Tensor:
        """(documents,) 1 where a document has no training query."""
        return (self.counts == 0).float()

    def scores(self, weights: Tensor) -> Tensor:
        """Content scores (queries, documents).

        `weights`: log kappa, log lexical, constant, factor, lead of the popular, log late, lead of hubs, how far they move,
        log odds of the share of further windows.
        """
        prior = weights[2] * self.unseen + weights[4] * self.counts.log1p()
        prior = prior if self.hubs is None else prior + weights[6] * self.hubs
        late = 0.0 if self.late is None else weights[5].exp()
        moves = 0.0 if self.moves is None else weights[7]
        further = 0.0 if self.nearer is None else weights[8].sigmoid()
        content = ContentParts(self.dense, self.lexical, self.late, self.moves, self.nearer)
        return content.scores(weights[0].exp(), weights[1].exp(), late, moves, further) + prior

    def log_probs(self, weights: Tensor, tree_sum: TreeSum, fewer: float = 1.0) -> Tensor:
        """log p of each query's target: (queries,); only the siblings along its path count.

        `fewer`: What an unseen document counts that is not the target.
        """
        scores, own = self.scores(weights), self.targets.unsqueeze(1)
        scores = (scores + np.log(fewer) * self.unseen).scatter(1, own, scores.gather(1, own))
        anchors = tree_sum(scores).gather(1, self.children.flatten(1)).view_as(self.residual)
        there = self.residual > -torch.inf
        logits = anchors + weights[3] * self.residual.masked_fill(~there, 0.0)
        logits = logits.masked_fill(~there, -torch.inf)
        chosen = logits.log_softmax(2).gather(2, self.own.clamp(min=0).unsqueeze(2)).squeeze(2)
        return torch.where(self.own >= 0, chosen, 0.0).sum(1)


@torch.no_grad()
def gather(
    engine: Engine,
    texts: Sequence[str],
    targets: NDArray[np.integer],
    counts: NDArray[np.integer],
    moves: NDArray[np.float32] | None = None,
) -> Evidence:
    """Read some queries with a trained model, a few at a time; what is found stays on the model's device."""
    model, trie = engine.reference, engine.trie
    leaves = torch.as_tensor(targets, device=model.device).long()
    step = max(1, min(_QUERIES, _AT_ONCE // (int(np.diff(trie.child_start).max()) * model.config.d_model)))
    towards = None if moves is None else torch.as_tensor(moves, device=model.device)
    contents: list[ContentParts] = []
    children, residual, own = [], [], []
    for batch in in_batches(texts, step):
        queries, content = read_content(engine, texts[batch], towards)
        contents.append(content)
        levels, _, path = model.path_children(
            model.memories(queries.states),
            queries.mask[:, None, None, :].bool(),
            leaves[batch],
            queries.vectors,
            positions=trie.positions,
        )
        # Probabilities without the anchors: as logits, they are off by what all children of a node have in common.
        residual.append(torch.stack([log_probs.float() for log_probs, _ in levels], dim=1))
        children.append(torch.stack([child for _, child in levels], dim=1))
        own.append(torch.where(path >= 0, path - children[-1][:, :, 0], -1))
    dense, lexical, late, changes, nearer = (
        None if parts[0] is None else torch.cat(cast("tuple[Tensor, ...]", parts))
        for parts in zip(*contents, strict=True)
    )
    return Evidence(
        cast(Tensor, dense),
        lexical,
        late,
        torch.cat(children),
        torch.cat(residual),
        torch.cat(own),
        leaves,
        torch.as_tensor(counts, device=model.device).float(),
        changes,
        nearer,
    )


def how_many(nodes: int) -> int:
    """Queries that weights are fitted on, at most: as many as a tree of this size leaves time and memory for.

    >>> [how_many(nodes) for nodes in (2_400, 30_000, 130_000, 1_100_000)]
    [4000, 1118, 1000, 122]
    """
    return max(1, min(_MOST, max(_QUICK // nodes, min(_ENOUGH, _HELD // nodes))))


def fit(
    engine: Engine,
    texts: Sequence[str],
    targets: NDArray[np.integer],
    counts: NDArray[np.integer],
    *,
    known: Sequence[tuple[str, int]] = (),
    moves: NDArray[np.float32] | None = None,
    fewer: float = 1.0,
) -> tuple[Calibration, NDArray[np.float32]]:
    """The weights under which the queries' own documents are likeliest, seen and unseen documents counting the same.

    Beside them `find_hubs` of each document, by the weights that were the best without it.

    Args:
        engine: Searches with the trained model.
        targets: The leaf that each text should find.
        counts: (documents,) in leaf order, how many training queries each has in this build.
        known: These queries, and the leaves that they ask for.
        moves: `query_means` of these; without them no document moves.
        fewer: What an unseen document counts beside others, `fewer_unseen`.
    """
    drawn = np.random.default_rng(0).permutation(len(texts))[: how_many(engine.trie.nodes)]
    chosen = sorted(drawn.tolist(), key=lambda i: len(texts[i]))  # those of one length together, since they are padded
    evidence = gather(engine, [texts[i] for i in chosen], np.asarray(targets)[chosen], counts, moves)
    assert engine.model.anchor_weights is not None
    late = engine.model.config.late if evidence.late is not None else 1.0
    others = torch.tensor([0.0, 1.0, 0.0, float(np.log(late)), 0.0, 0.0, 0.0])
    start = torch.cat([engine.model.anchor_weights.detach().float().cpu(), others]).to(evidence.dense.device)
    tree_sum = TreeSum(engine.trie).to(start.device)
    first = _likeliest(evidence, start, tree_sum, fewer)
    drawn_by = (first.kappa, first.lexical, first.late, first.moves, first.further)
    hubs = find_hubs(engine, known, drawn_by, moves)
    evidence = replace(evidence, hubs=torch.as_tensor(hubs, device=start.device))
    return replace(_likeliest(evidence, start, tree_sum, fewer), drawn_by=drawn_by), hubs


def _likeliest(evidence: Evidence, start: Tensor, tree_sum: TreeSum, fewer: float) -> Calibration:
    """The best weights for some evidence. Documents move only where the queries say clearly enough that they should."""
    found, value = _fit(evidence, start, tree_sum, fewer)
    if evidence.moves is None:
        return found
    stay, without = _fit(replace(evidence, moves=None), start, tree_sum, fewer)
    return found if found.moves > 0 and without - value > _WORTH else stay


def _fit(evidence: Evidence, start: Tensor, tree_sum: TreeSum, fewer: float) -> tuple[Calibration, float]:
    """The best weights, and how unlikely all queries are by them, in nats, as if all of them counted the same.

    `start` is where the search for the weights begins, and what it is drawn back to.
    """
    new = evidence.unseen[evidence.targets] > 0  # (queries,)
    share = torch.where(new, 0.5 / new.sum().clamp(min=1), 0.5 / (~new).sum().clamp(min=1))
    # Fewer than there are where those of one kind are few and count for many.
    queries = share.sum() / share.square().sum()
    free = torch.ones_like(start)
    if bool(new.all() | (~new).all()):  # queries of one kind do not say how far it should be ahead of the other
        free[[2, 4, 7] if bool(new[0]) else 2] = 0
    change = torch.zeros_like(start).requires_grad_(True)
    optimiser = torch.optim.LBFGS([change], max_iter=60, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        own = evidence.log_probs(start + free * change, tree_sum, fewer)
        # As much as one query would say if all counted the same: it matters where there are few, of one kind at least.
        value = change.square().sum() / 2 / queries - (own * share).sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimiser.step(loss)  # type: ignore[arg-type, no-untyped-call]
    value = float(loss().detach() * queries)
    fitted = (start + free * change).detach()
    kappa, lexical, late = (float(fitted[place].exp()) for place in (0, 1, 5))
    unseen, residual, popular, hubs, moves = (float(fitted[place]) for place in (2, 3, 4, 6, 7))
    late = late if evidence.late is not None else 0.0
    further = float(fitted[8].sigmoid()) if evidence.nearer is not None else 0.0
    further = further if further > _LEAST_SHARE else 0.0
    return Calibration(kappa, lexical, unseen, max(0.0, residual), popular, late, hubs, moves, further), value


def found_first(
    engine: Engine, texts: Sequence[str], targets: NDArray[np.integer], search: SearchConfig
) -> NDArray[np.bool_]:
    """(texts,) whether a search puts the leaf that each text should find first."""
    penalty, at_once = search.length_penalty, search.batch_size
    rankings = engine.search(list(texts), k=1, beam=search.beam, length_penalty=penalty, batch_size=at_once)
    return np.array([ranking.documents[0] == leaf for ranking, leaf in zip(rankings, targets, strict=True)])


def compared(
    calibration: Calibration, before: NDArray[np.bool_], after: NDArray[np.bool_], new: NDArray[np.bool_]
) -> Calibration:
    """The calibration with what it changed: of some queries, whether their documents were found and are, and are unseen."""
    kinds = {"seen": ~new, "unseen": new}
    found: dict[str, Any] = {"queries": {kind: int(chosen.sum()) for kind, chosen in kinds.items()}}
    for name, first in (("before", before), ("after", after)):
        found[name] = {
            kind: round(float(first[chosen].mean()), 4) if chosen.any() else 0.0 for kind, chosen in kinds.items()
        }
    return replace(calibration, found=found)
