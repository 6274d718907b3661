"""What searches are compared with: Algorithm 2 over Python lists; and the folded search of a model, ready to be called.

Also random trees and batches of queries for property tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from nci.model import NCIModel
from nci.records import SemanticId
from nci.search import EncodedQueries, Found, fold, make_plan
from nci.search.core import Nodes, find
from nci.search.linear import Precision
from nci.search.network import Network
from nci.search.ops import SearchTree, TorchOps
from nci.search.plan import Plan

Ranked = list[tuple[SemanticId, float]]
Batch = dict[str, Tensor]
Beam = int | Sequence[int]
VOCABULARY = 20  # word pieces of the tiny encoders, of which 4 are special


def algorithm_2(
    f: Callable[[SemanticId], dict[int, float]],
    is_leaf: Callable[[SemanticId], bool],
    *,
    beam: Beam,
    steps: int,
    k: int,
    digits: Callable[[SemanticId], int] = len,
    length_penalty: float = 0.0,
) -> tuple[Ranked, int]:
    """Constrained beam search as the paper prints it, and how many leaves were looked at.

    Args:
        f: prefix -> {next token: log p}.
        beam: One number, or one per step, of which the last goes on.
        steps: The paper's n; one more round than digits, in which the last leaves are noted.
        digits: Digits of an id, the m of the length penalty.
    """
    beams = [beam] if isinstance(beam, int) else list(beam)
    result_ids: Ranked = []
    looked_at = 0
    b: Ranked = [((), 0.0)]
    for step in range(steps + 1):
        candidates: Ranked = []
        for prefix, sum_log_prob in b:
            if is_leaf(prefix):
                result_ids.append((prefix, sum_log_prob / (digits(prefix) + 1) ** length_penalty))
            else:
                for token, log_prob in f(prefix).items():
                    candidates.append(((*prefix, token), sum_log_prob + log_prob))
                    looked_at += is_leaf((*prefix, token))
        b = sorted(candidates, key=lambda pair: -pair[1])[: beams[min(step, len(beams) - 1)]]
    return sorted(result_ids, key=lambda pair: -pair[1])[:k], looked_at


def constrained(
    model: NCIModel,
    queries: EncodedQueries,
    number: int,
    *,
    beam: Beam,
    k: int,
    length_penalty: float = 0.0,
    stop_depth: int | None = None,
) -> tuple[Ranked, int]:
    """Algorithm 2 over the steps that the teacher-forced model gives to every id, or to its first `stop_depth` digits."""
    trie = model.tables.trie
    row = torch.full((trie.documents,), number)
    mask = queries.mask[row][:, None, None, :].bool()
    vectors = None if queries.vectors is None else queries.vectors[row]
    anchors = None if queries.anchors is None else queries.anchors[row]
    with torch.no_grad():
        log_probs, _, _ = model.path_log_probs(
            model.memories(queries.states[row]), mask, torch.arange(trie.documents), vectors, anchors
        )
    ids = [trie.semantic_id(document)[:stop_depth] for document in range(trie.documents)]
    after: dict[SemanticId, dict[int, float]] = {}
    for path, steps in zip(ids, log_probs.tolist(), strict=True):
        for n, digit in enumerate(path):
            after.setdefault(path[:n], {})[digit] = steps[n]
    ends = model.config.normalise != "children"
    return algorithm_2(
        after.__getitem__,
        set(ids).__contains__,
        beam=beam,
        steps=max(map(len, ids)),
        k=k,
        digits=lambda path: len(path) - ends,
        length_penalty=length_penalty,
    )


def ranked(model: NCIModel, found: Found, number: int) -> Ranked:
    """One query's results as ids; what is not there is marked alike in both tensors."""
    trie = model.tables.trie
    documents, scores = found.documents[number].tolist(), found.scores[number].tolist()
    assert [d >= 0 for d in documents] == [s > -np.inf for s in scores]
    assert not np.isnan(scores).any()
    return [(trie.semantic_id(d), s) for d, s in zip(documents, scores, strict=True) if d >= 0]


def assert_same(found: Ranked, wanted: Ranked, atol: float = 1e-4) -> None:
    assert [path for path, _ in found] == [path for path, _ in wanted]
    np.testing.assert_allclose([s for _, s in found], [s for _, s in wanted], atol=atol)


class Folded:
    """The folded search of a bound model, with the number of rows that it has decoded."""

    def __init__(self, model: NCIModel, *, ops: TorchOps | None = None, precision: Precision = "fp32") -> None:
        self.trie = model.tables.trie
        self.network = Network(model, precision=precision, device="cpu", ops=ops or TorchOps())
        self.tree = SearchTree.on("cpu", self.trie, fold(model))
        self.decoded = 0
        step = self.network.step

        def counted(x: Tensor, *args: Any) -> Tensor:
            self.decoded += len(x)
            return step(x, *args)

        self.network.step = counted  # type: ignore[method-assign, assignment]

    def __call__(self, batch: Batch, anchors: Tensor | None, plan: Plan) -> Nodes:
        lengths = batch["attention_mask"].sum(1)
        with torch.inference_mode():
            states, _ = self.network.encode(batch["input_ids"], lengths)
            memory = self.network.memory(states, lengths)
        return find(self.network, self.tree, plan, memory, anchors)

    def path(self, node: int) -> SemanticId:
        """The digits from the root to a node."""
        path: list[int] = []
        while node:
            path.insert(0, int(self.trie.value[node]))
            node = int(self.trie.parent[node])
        return tuple(path)

    def ranked(self, found: Nodes, number: int) -> Ranked:
        """One query's results as ids or, above the leaves, prefixes."""
        nodes, scores = found.nodes[number].tolist(), found.scores[number].tolist()
        assert [node >= 0 for node in nodes] == [s > -np.inf for s in scores]
        assert not np.isnan(scores).any()
        return [(self.path(node), s) for node, s in zip(nodes, scores, strict=True) if node >= 0]


def folded_search(model: NCIModel, batch: Batch, anchors: Tensor | None, **options: Any) -> Found:
    """Documents by the folded search; `options` are those of `make_plan`."""
    found = Folded(model)(batch, anchors, make_plan(model.tables.trie, **options))
    first = torch.as_tensor(model.tables.trie.first_document).long()
    return Found(first[found.nodes.clamp(min=0)].where(found.nodes >= 0, -1), found.scores, found.scored)


# ---- random inputs


def _ids(tree: list[Any], gap: int) -> list[SemanticId]:
    out: list[SemanticId] = []
    for number, below in enumerate(tree):
        digit = number * gap
        out += [(digit,)] if below is None else [(digit, *rest) for rest in _ids(below, gap)]
    return out


def trees(leaves: int = 14) -> st.SearchStrategy[list[SemanticId]]:
    """Ids of random trees: leaves at several depths, chains, roots with leaves only, gaps between digits."""
    below: st.SearchStrategy[Any] = st.recursive(
        st.none(), lambda inner: st.lists(inner, min_size=1, max_size=5), max_leaves=leaves
    )
    return st.builds(_ids, st.lists(below, min_size=1, max_size=8), st.integers(1, 2))


def batch_of(lengths: Sequence[int], seed: int = 0) -> Batch:
    """Random word pieces of queries of these lengths, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, VOCABULARY, (len(lengths), max(lengths)), generator=generator)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def batches() -> st.SearchStrategy[Batch]:
    return st.builds(batch_of, st.lists(st.integers(1, 7), min_size=1, max_size=3), st.integers(0, 99))
