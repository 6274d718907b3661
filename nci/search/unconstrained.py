"""Query states -> best documents by beam search that does not know the tree: the paper's ablation.

Works with the normalisers that have an end token. Strings that are no id take beam slots and are dropped at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nci.errors import ConfigError
from nci.model import NCIModel
from nci.search.plain import EncodedQueries, Found


@torch.no_grad()
def unconstrained_search(
    model: NCIModel, queries: EncodedQueries, *, beam: int = 100, k: int = 10, length_penalty: float = 0.0
) -> Found:
    """The k best documents among the strings that the beam ends."""
    config, trie = model.config, model.tables.trie
    if config.normalise == "children":
        raise ConfigError(
            "--unconstrained needs an index trained with --model.normalise position or vocabulary: "
            "this one knows only the real children of a node"
        )
    device, batch = queries.states.device, len(queries.states)
    memories = model.memories(queries.states)
    mask = queries.mask[:, None, None, :].bool()
    tokens = torch.full((batch, 1, 1), config.start_token, device=device)  # (batch, rows, level + 1)
    scores = torch.zeros(batch, 1, device=device)
    known = {trie.semantic_id(number)[:-1]: number for number in range(trie.documents)}
    results: list[dict[int, float]] = [{} for _ in range(batch)]
    for level in range(config.positions + 1):
        rows = tokens.shape[1]
        flat = tokens.flatten(0, 1)
        query = torch.arange(batch, device=device).repeat_interleave(rows)
        repeated = [(keys[query], values[query]) for keys, values in memories]
        h = model.decoder(model.embedding(flat), repeated, mask[query])[:, -1]
        vectors = queries.vectors[query] if queries.vectors is not None else None
        states = model.adapter_states(flat, vectors)
        columns = model.columns_of(level)
        w = model.head.columns(model.embedding.weight[columns], columns, states[:, -1] if states is not None else None)
        logits = torch.einsum("rd,rcd->rc", model.head.project(h), w.expand(len(h), -1, -1)).float()
        total = (scores.flatten().unsqueeze(1) + logits.log_softmax(-1)).view(batch, -1)
        best, index = total.topk(min(beam, total.shape[1]), dim=1)
        row, token = index // len(columns), columns[index % len(columns)]
        ended = token == config.end_token
        _collect(results, known, tokens, row, ended, best, level, config.values, length_penalty)
        scores = best.masked_fill(ended, -torch.inf)
        tokens = torch.cat([tokens.gather(1, row.unsqueeze(-1).expand(-1, -1, level + 1)), token.unsqueeze(-1)], dim=-1)
        if bool(ended.all()):
            break
    documents = torch.full((batch, k), -1, device=device)
    top = torch.full((batch, k), -torch.inf, device=device)
    for number, result in enumerate(results):
        for place, (document, score) in enumerate(sorted(result.items(), key=lambda pair: -pair[1])[:k]):
            documents[number, place], top[number, place] = document, score
    return Found(documents, top, torch.tensor([len(r) for r in results], device=device))


def _collect(
    results: list[dict[int, float]],
    known: dict[tuple[int, ...], int],
    tokens: Tensor,
    row: Tensor,
    ended: Tensor,
    best: Tensor,
    level: int,
    values: int,
    length_penalty: float,
) -> None:
    """Note the ended strings that are ids: each digit must stand at its own position."""
    for number, place in ended.nonzero().tolist():
        score = float(best[number, place])
        digits = [int(t) - position * values for position, t in enumerate(tokens[number, row[number, place], 1:])]
        document = known.get(tuple(digits)) if all(0 <= digit < values for digit in digits) else None
        if document is not None and score > float("-inf"):
            results[number][document] = score / (level + 1) ** length_penalty
