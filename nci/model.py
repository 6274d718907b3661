"""The network: a query encoder and the prefix-aware weight-adaptive (PAWA) decoder, as one Hugging Face model.

In: word pieces of queries and the documents they should find. Out: log p(d | q), the training loss, or the pieces that
search needs (encoder states, content scores, child probabilities). The tree is attached with `bind`; the model saves and
loads like any other and knows nothing of files beyond that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast, overload

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedModel, T5EncoderModel
from transformers.utils import ModelOutput

from nci.encoders import pool_tokens, token_states
from nci.head import Head
from nci.layers import Stack
from nci.lean import make_lean
from nci.losses import consistency_loss, path_loss
from nci.model_config import NCIConfig
from nci.tables import TreeTables
from nci.trie import Trie

_CLOSED = -1e4  # the score of what a query may not choose


@dataclass
class NCIOutput(ModelOutput):  # type: ignore[misc]
    """What `forward` returns; `log_probs` is log p(d | q) of each row's own document."""

    loss: Tensor | None = None
    path_loss: Tensor | None = None
    consistency: Tensor | None = None
    log_probs: Tensor | None = None


class NCIModel(PreTrainedModel):  # type: ignore[misc]
    """Encoder + PAWA decoder."""

    config_class = NCIConfig
    base_model_prefix = "nci"
    main_input_name = "input_ids"

    def __init__(self, config: NCIConfig) -> None:
        super().__init__(config)
        d = config.d_model
        encoder_config = AutoConfig.for_model(**config.encoder)
        self.encoder: nn.Module = (
            T5EncoderModel(encoder_config)
            if encoder_config.model_type in ("t5", "mt5")
            else AutoModel.from_config(encoder_config)
        )
        make_lean(self.encoder)
        if getattr(self.encoder, "pooler", None) is not None:
            self.encoder.pooler = None  # a head of its own that nothing here reads
        width = encoder_config.hidden_size
        self.bridge = nn.Identity() if width == d else nn.Linear(width, d, bias=False)
        self.embedding = nn.Embedding(config.vocabulary, d)
        self.decoder = Stack(config.decoder_layers, d, config.heads, config.d_ff, config.dropout, cross=True)
        self.adapter = (
            Stack(config.adapter_layers, d, config.heads, config.d_ff, config.dropout, cross=False)
            if config.adapter_layers
            else None
        )
        self.adapter_start = (
            (nn.Linear(width, d, bias=False) if config.adapter_start == "query" else nn.Embedding(1, d))
            if self.adapter is not None
            else None
        )
        self.head = Head(config)
        weights = torch.tensor([config.kappa, config.lexical]).log()
        self.anchor_weights = nn.Parameter(weights) if config.anchor != "none" else None  # log kappa, log lexical
        self.tree: TreeTables | None = None
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=1.0)
        elif isinstance(module, nn.RMSNorm | nn.LayerNorm) and module.weight is not None:
            nn.init.ones_(module.weight)
        elif isinstance(module, Head):
            module.reset()

    def bind(
        self,
        trie: Trie,
        vectors: NDArray[np.floating] | None = None,
        seen: NDArray[np.bool_] | None = None,
        bias: NDArray[np.float32] | None = None,
        moves: NDArray[np.floating] | None = None,
    ) -> None:
        """Attach the tree and, in leaf order, document vectors (documents, width), which are seen, score biases, moves."""
        if self.config.normalise != "children":
            trie = trie.with_end_token(self.config.values)
        self.tree = TreeTables(trie, self.config, vectors, seen, bias, moves).to(self.device)

    @property
    def tables(self) -> TreeTables:
        assert self.tree is not None, "bind(trie, vectors) comes before the first use"
        return self.tree

    # ---- the query side

    def encode(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Encoder states (batch, tokens, encoder width) and the pooled query vectors, of length 1."""
        states = token_states(self.encoder, input_ids, attention_mask)
        return states, self.pool(states, attention_mask)

    def pool(self, states: Tensor, attention_mask: Tensor) -> Tensor:
        """Query vectors of length 1 from encoder states."""
        return F.normalize(pool_tokens(states, attention_mask, self.config.pooling).float(), dim=-1)

    def memories(self, states: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of the decoder's cross-attention, one pair per layer."""
        return self.decoder.memories(self.bridge(states))

    def document_scores(
        self, query_vectors: Tensor, lexical: Tensor | None = None, late: Tensor | None = None, choosing: bool = False
    ) -> Tensor:
        """s(q, d) of every document: (batch, documents) in leaf order; or that by which late interaction chooses some."""
        assert self.anchor_weights is not None and self.tables.vectors is not None
        weights = self.config.chosen_by if choosing else None
        kappa, weight = weights or self.anchor_weights.float().exp()
        similar = query_vectors.float() @ self.tables.vectors.T
        if self.tables.moves is not None and not choosing:
            similar = similar + query_vectors.float() @ self.tables.moves.T
        scores = kappa * similar
        if lexical is not None:
            scores = scores + weight * lexical.float()
        if late is not None:
            scores = scores + self.config.late * late
        if self.tables.bias is not None and not choosing:
            scores = scores + self.tables.bias
        return cast(Tensor, scores)

    def anchors(
        self,
        query_vectors: Tensor | None,
        lexical: Tensor | None = None,
        closed: Tensor | None = None,
        late: Tensor | None = None,
    ) -> Tensor | None:
        """A_c(q) of every node: (batch, nodes); none where the model has no anchor.

        `closed` (batch,) marks queries that compete among the seen documents only.
        """
        if self.anchor_weights is None:
            return None
        assert query_vectors is not None
        with torch.autocast(query_vectors.device.type, enabled=False):
            if self.tables.sum is not None:
                scores = self.document_scores(query_vectors, lexical, late)
                if closed is not None and self.tables.seen is not None:
                    # Finite, so that a node without any seen document still has a gradient.
                    scores = scores.masked_fill(closed.unsqueeze(1) & ~self.tables.seen, _CLOSED)
                return cast(Tensor, self.tables.sum(scores))
            assert self.tables.means is not None
            kappa = self.anchor_weights.float()[0].exp()
            return self.tables.log_sizes + kappa * (query_vectors.float() @ self.tables.means.T)

    # ---- the tree side

    def adapter_states(self, tokens: Tensor, query_vectors: Tensor | None = None) -> Tensor | None:
        """a_i after every prefix of token sequences (rows, positions) that begin with the start token."""
        if self.adapter is None or self.adapter_start is None:
            return None
        inputs = self.embedding(tokens)  # (rows, positions, d)
        if isinstance(self.adapter_start, nn.Linear):
            assert query_vectors is not None
            first = self.adapter_start(query_vectors.to(inputs.dtype) * query_vectors.shape[-1] ** 0.5)
        else:
            first = self.adapter_start.weight.to(inputs.dtype).expand(len(tokens), -1)
        return cast(Tensor, self.adapter(torch.cat([first.unsqueeze(1), inputs[:, 1:]], dim=1)))

    def child_edges(self, nodes: Tensor, adapter: Tensor | None, level: int) -> tuple[Tensor, Tensor, Tensor]:
        """Vectors (nodes, fanout, d) of the edges below nodes of one level, their child nodes, and which are real."""
        child, real = self.tables.children_of(nodes)
        first = level * self.config.values
        tokens = torch.arange(first, first + self.config.values, device=nodes.device)
        w = self.head.columns(self.embedding.weight[tokens], tokens, adapter)  # (nodes or 1, values, d)
        value = (self.tables.token[child] - first).clamp(0, self.config.values - 1)
        w = w.expand(len(nodes), -1, -1).gather(1, value.unsqueeze(-1).expand(-1, -1, w.shape[-1]))
        means = self.tables.content[child] if self.tables.content is not None else None
        return self.head.edges(w, means), child, real

    def columns_of(self, level: int) -> Tensor:
        """Tokens in the softmax at a level, for the normalisers that know no children."""
        device, config = self.embedding.weight.device, self.config
        end = torch.full((1,), config.end_token, device=device)
        if config.normalise == "vocabulary":
            return torch.arange(config.end_token + 1, device=device)
        if level >= config.positions:
            return end
        return torch.cat([torch.arange(level * config.values, (level + 1) * config.values, device=device), end])

    def child_log_probs(
        self,
        h: Tensor,
        nodes: Tensor,
        owner: Tensor | None,
        adapter: Tensor | None,
        level: int,
        anchors: Tensor | None = None,
        query: Tensor | None = None,
        closed: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """log p(child | q, prefix) of all children: (rows, fanout), with child nodes and which are real.

        Args:
            h: (rows, d) decoder states.
            nodes: (distinct,) prefix nodes of this level, `owner` (rows,) the place of each row's node among them;
                none where every row has a node of its own.
            adapter: (distinct, d) adapter states of these prefixes.
            anchors: (queries, nodes of the tree), `query` (rows,) the query of each row; none where row i is query i.
        """
        z = self.head.project(h)
        if self.config.normalise != "children":
            tokens = self.columns_of(level)
            w = self.head.columns(self.embedding.weight[tokens], tokens, adapter)
            all_columns = _score(z, w, owner).float().log_softmax(-1)
            column_of = torch.full((self.config.vocabulary,), -1, dtype=torch.long, device=h.device)
            column_of[tokens] = torch.arange(len(tokens), device=h.device)
            child, real = self.tables.children_of(nodes if owner is None else nodes[owner])
            column = column_of[self.tables.token[child]].clamp(min=0)
            return all_columns.gather(1, column).masked_fill(~real, -torch.inf), child, real
        edges, child, real = self.child_edges(nodes, adapter, level)
        logits = _score(z, edges, owner).float()
        if owner is not None:
            child, real = child[owner], real[owner]
        if closed is not None and self.tables.seen_nodes is not None:
            logits = logits.masked_fill(closed.unsqueeze(1) & ~self.tables.seen_nodes[child], _CLOSED)
        if self.head.bias is not None:
            # index_select and gather: on a GPU the gradient of bias[child] adds up equal places one after the other
            logits = logits + self.head.bias.index_select(0, child.flatten()).view_as(child)
        if anchors is not None:
            logits = logits + (anchors.gather(1, child) if query is None else anchors[query.unsqueeze(1), child])
        return logits.masked_fill(~real, -torch.inf).log_softmax(-1), child, real

    def path_children(
        self,
        memories: list[tuple[Tensor, Tensor]],
        mask: Tensor,
        documents: Tensor,
        query_vectors: Tensor | None,
        anchors: Tensor | None = None,
        closed: Tensor | None = None,
        positions: int | None = None,
    ) -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor]:
        """log p of all children of the nodes along each row's path, and these children, per level; states h_i; the path."""
        nodes = self.tables.path_nodes[documents]  # (rows, positions + 1)
        nodes = nodes[:, : 1 + (positions or int((nodes > 0).sum(1).max()))]
        target = nodes[:, 1:]
        prefix = torch.where(target >= 0, nodes[:, :-1], 0)  # an ended id goes on at the root, masked later
        tokens = self.tables.token[prefix]
        h = self.decoder(self.embedding(tokens), memories, mask)
        rows = torch.arange(len(nodes), device=h.device)
        alone = self.config.adapter_start == "query" or h.is_cuda  # where counting distinct prefixes would be a wait
        if alone:
            group, a = rows, self.adapter_states(tokens, query_vectors)
        else:  # documents of one leaf cluster, the deepest and so the largest prefix node, share their adapter states
            _, group = torch.unique(prefix.max(1).values, return_inverse=True)
            a = self.adapter_states(tokens[_first(group)])
        out = []
        for level in range(target.shape[1]):
            owner: Tensor | None
            if level == 0 and self.config.adapter_start == "learned":  # all are at the root
                distinct, owner, first = prefix[:1, 0], torch.zeros_like(rows), rows[:1]
            elif alone:
                distinct, owner, first = prefix[:, level], None, rows
            else:
                distinct, owner = torch.unique(prefix[:, level], return_inverse=True)
                first = _first(owner)
            adapter = (
                None if a is None else a[:, level] if alone and level else a[:, level].index_select(0, group[first])
            )
            log_probs, child, _ = self.child_log_probs(
                h[:, level], distinct, owner, adapter, level, anchors, closed=closed
            )
            out.append((log_probs, child))
        return out, h, target

    def path_log_probs(
        self,
        memories: list[tuple[Tensor, Tensor]],
        mask: Tensor,
        documents: Tensor,
        query_vectors: Tensor | None,
        anchors: Tensor | None,
        closed: Tensor | None = None,
        positions: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """log p(r_i | q, prefix) along each row's path, the decoder states h_i, and which positions are in use."""
        levels, h, target = self.path_children(
            memories, mask, documents, query_vectors, anchors, closed=closed, positions=positions
        )
        real = target >= 0
        out = []
        for level, (log_probs, child) in enumerate(levels):
            slot = (target[:, level] - child[:, 0]).clamp(min=0)
            chosen = log_probs.gather(1, slot.unsqueeze(1)).squeeze(1)
            out.append(torch.where(real[:, level], chosen, 0.0))
        return torch.stack(out, dim=1), h, real

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        documents: Tensor | None = None,
        query_vectors: Tensor | None = None,
        encoder_states: Tensor | None = None,
        lexical: Tensor | None = None,
        weights: Tensor | None = None,
        closed: Tensor | None = None,
        positions: int | None = None,
    ) -> NCIOutput:
        """Loss of a batch of (query, document) pairs: -log p(d | q) + alpha x consistency.

        Args:
            query_vectors: Vectors behind the anchor; pooled from the encoder states when not given.
            encoder_states: Stored outputs of a frozen encoder, instead of `input_ids`.
            lexical: (rows, documents) normalised lexical scores in leaf order.
            weights: (rows,) weight of each pair.
            closed: (rows,) real queries, for which documents without any query are no negatives.
            positions: Digits of the longest of the documents' ids; looked up when not given.
        """
        assert attention_mask is not None and documents is not None
        rows = len(documents)
        twice = self.training and self.config.alpha > 0
        again = 2 if twice else 1
        if encoder_states is None:
            assert input_ids is not None
            # Each pass has its own dropout, in the encoder too.
            states, own_vectors = self.encode(input_ids.repeat(again, 1), attention_mask.repeat(again, 1))
            memories = self.memories(states)
            asked = own_vectors if query_vectors is None else _repeat(query_vectors, again)
            anchors = self.anchors(asked, _repeat(lexical, again), _repeat(closed, again))
        else:  # nothing before the decoder differs between the passes
            memories = [(_repeat(k, again), _repeat(v, again)) for k, v in self.memories(encoder_states)]
            pooled = self.pool(encoder_states, attention_mask)
            anchors = _repeat(self.anchors(pooled if query_vectors is None else query_vectors, lexical, closed), again)
            own_vectors = _repeat(pooled, again)
        seen = attention_mask.repeat(again, 1)[:, None, None, :].bool()
        targets = documents.repeat(again)
        log_probs, h, real = self.path_log_probs(
            memories, seen, targets, own_vectors, anchors, _repeat(closed, again), positions
        )
        weights = _repeat(weights, again)
        loss = fit = path_loss(log_probs, real, weights)
        consistency = None
        if twice:
            consistency = consistency_loss(h * self.head.scale, documents, real[:rows], self.config.tau)
            loss = fit + self.config.alpha * consistency
        return NCIOutput(loss=loss, path_loss=fit, consistency=consistency, log_probs=log_probs.sum(1))


@overload
def _repeat(tensor: Tensor, times: int) -> Tensor: ...
@overload
def _repeat(tensor: None, times: int) -> None: ...
def _repeat(tensor: Tensor | None, times: int) -> Tensor | None:
    """The rows of a batch several times over."""
    return tensor if tensor is None or times == 1 else torch.cat([tensor] * times)


def _score(z: Tensor, columns: Tensor, owner: Tensor | None) -> Tensor:
    """Products of rows (rows, d) with the columns (distinct, n, d) of their owners; one shared owner is a plain product.

    index_select, since threads add up the gradient of columns[owner] in whatever order they come.
    """
    if len(columns) == 1:
        return z @ columns[0].T
    return torch.einsum("rd,rnd->rn", z, columns if owner is None else columns.index_select(0, owner))


def _first(owner: Tensor) -> Tensor:
    """First row of each owner."""
    rows = torch.arange(len(owner), device=owner.device)
    size = int(owner.max()) + 1
    return torch.full((size,), len(owner), device=owner.device).scatter_reduce(0, owner, rows, "amin")


AutoConfig.register(NCIConfig.model_type, NCIConfig)
AutoModel.register(NCIConfig, NCIModel)
