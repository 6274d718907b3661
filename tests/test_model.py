"""The network against `Naive` (numpy, one prefix at a time): every switch, tying, tokens, masks, losses, saving."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from reference import folded_search
from scipy.special import log_softmax
from torch import Tensor

from nci.anchors import node_means
from nci.config import Config, EmbedConfig, ModelConfig
from nci.errors import ConfigError
from nci.losses import consistency_loss
from nci.model import NCIModel, _score
from nci.model_config import NCIConfig
from nci.records import SemanticId
from nci.search import EncodedQueries, exhaustive_search, plain_search, score_all
from nci.trie import Trie

MakeModel = Callable[..., NCIModel]
MakeNaive = Callable[..., Any]
Vectors = Callable[..., NDArray[np.float32]]
Ask = Callable[..., EncodedQueries]
Batch = dict[str, Tensor]

HEADS = [("tied", 0), ("additive", 3), ("additive", 0), ("product", 3), ("product", 0)]
DOCUMENTS = torch.tensor([4, 6, 1])  # ids of three, one and three digits
# For loss tests: one document twice, ids of one to three digits.
MIXED = torch.tensor([6, 2, 6])


def step_log_probs(
    model: NCIModel, batch: Batch, documents: Tensor, lexical: Tensor | None = None, closed: Tensor | None = None
) -> NDArray[Any]:
    """log p of every step of each row's own id: (rows, positions), zero where the id has ended."""
    with torch.no_grad():
        states, vectors = model.encode(**batch)
        mask = batch["attention_mask"][:, None, None, :].bool()
        anchors = model.anchors(vectors, lexical, closed)
        log_probs, _, _ = model.path_log_probs(model.memories(states), mask, documents, vectors, anchors, closed)
    return log_probs.numpy()


def assert_equals_numpy(
    model: NCIModel,
    naive: MakeNaive,
    ids: list[SemanticId],
    batch: Batch,
    documents: Tensor = DOCUMENTS,
    vectors: NDArray[np.float32] | None = None,
    lexical: Tensor | None = None,
) -> None:
    found = step_log_probs(model, batch, documents, lexical)
    reference = naive(model, ids, vectors)
    with torch.no_grad():
        states, query = model.encode(**batch)
    for row, document in enumerate(documents.tolist()):
        words = None if lexical is None else lexical[row]
        steps = reference.read(states[row], batch["attention_mask"][row], query[row], words).steps(ids[document])
        np.testing.assert_allclose(found[row, : len(steps)], steps, atol=2e-4)
        assert not found[row, len(steps) :].any()


# ---- the logit, end to end


@pytest.mark.parametrize("normalise", ["children", "position", "vocabulary"])
@pytest.mark.parametrize("adapter_start", ["learned", "query"])
@pytest.mark.parametrize(("head", "rank"), HEADS)
def test_path_probabilities_equal_numpy(
    make_model: MakeModel,
    naive: MakeNaive,
    paths: list[SemanticId],
    batch: Batch,
    head: str,
    rank: int,
    adapter_start: str,
    normalise: str,
) -> None:
    model = make_model(head=head, head_rank=rank, adapter_start=adapter_start, normalise=normalise)
    assert_equals_numpy(model, naive, paths, batch)


@pytest.mark.parametrize("anchor", ["none", "mean", "exact", "exact+lexical"])
@pytest.mark.parametrize(("content", "edge_bias"), [(False, True), (True, False), (True, True)])
@pytest.mark.parametrize("head", ["tied", "additive", "product"])
def test_every_term_of_the_logit_equals_numpy(
    make_model: MakeModel,
    naive: MakeNaive,
    paths: list[SemanticId],
    batch: Batch,
    unit_vectors: Vectors,
    head: str,
    content: bool,
    edge_bias: bool,
    anchor: str,
) -> None:
    model = make_model(head=head, anchor=anchor.removesuffix("+lexical"), content=content, edge_bias=edge_bias)
    lexical = torch.rand(3, len(paths)) if anchor.endswith("lexical") else None
    assert_equals_numpy(model, naive, paths, batch, vectors=unit_vectors(), lexical=lexical)


@pytest.mark.parametrize("encoder", ["bert", "t5"])
@pytest.mark.parametrize("d_model", [8, 16, 24])
def test_encoders_of_any_kind_and_width(
    make_model: MakeModel,
    naive: MakeNaive,
    paths: list[SemanticId],
    batch: Batch,
    unit_vectors: Vectors,
    encoder: str,
    d_model: int,
) -> None:
    for adapter_start in ("learned", "query"):
        model = make_model(
            encoder=encoder, d_model=d_model, anchor="exact", content=True, edge_bias=True, adapter_start=adapter_start
        )
        assert isinstance(model.bridge, torch.nn.Identity) == (d_model == 16)
        assert_equals_numpy(model, naive, paths, batch, vectors=unit_vectors())


def test_rows_of_one_cluster_and_repeated_documents(
    make_model: MakeModel, naive: MakeNaive, paths: list[SemanticId], batch: Batch
) -> None:
    """Rows share adapter states where their prefixes are the same; each must still be its own."""
    model = make_model()
    six = {name: tensor.repeat(2, 1) for name, tensor in batch.items()}
    for documents in ([0, 1, 0, 1, 2, 6], [6, 6, 6, 6, 6, 6], [10, 9, 8, 7, 6, 5], [3, 4, 5, 3, 4, 5]):
        assert_equals_numpy(model, naive, paths, six, torch.tensor(documents))


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_encode_pools_to_unit_vectors_of_real_tokens(make_model: MakeModel, batch: Batch, pooling: str) -> None:
    model = make_model(pooling=pooling)
    states, vectors = model.encode(**batch)
    for row, length in enumerate([4, 6, 2]):
        pooled = states[row, :length].mean(0) if pooling == "mean" else states[row, 0]
        torch.testing.assert_close(vectors[row], pooled / pooled.norm())


# ---- probabilities


@pytest.mark.parametrize("anchor", ["none", "mean", "exact"])
@pytest.mark.parametrize("adapter_start", ["learned", "query"])
@pytest.mark.parametrize("head", ["tied", "additive", "product"])
def test_documents_share_one_unit_of_probability(
    make_model: MakeModel, ask: Ask, batch: Batch, head: str, adapter_start: str, anchor: str
) -> None:
    model = make_model(head=head, adapter_start=adapter_start, anchor=anchor, content=True, edge_bias=True)
    total = score_all(model, ask(model, **batch)).exp().sum(1)
    np.testing.assert_allclose(total.numpy(), 1.0, atol=1e-4)


@pytest.mark.parametrize("normalise", ["position", "vocabulary"])
def test_other_normalisers_leave_probability_to_strings_that_are_no_id(
    make_model: MakeModel, ask: Ask, batch: Batch, normalise: str
) -> None:
    model = make_model(normalise=normalise)
    total = score_all(model, ask(model, **batch)).exp().sum(1)
    assert (total < 0.99).all()


@pytest.mark.parametrize("normalise", ["position", "vocabulary"])
def test_columns_are_the_documented_ones(make_model: MakeModel, normalise: str) -> None:
    model = make_model(normalise=normalise)  # 3 positions of 4 values, the end is token 12, the start 13
    assert (model.config.end_token, model.config.start_token, model.config.vocabulary) == (12, 13, 14)
    columns = [model.columns_of(level).tolist() for level in range(4)]
    if normalise == "vocabulary":
        assert columns == [list(range(13))] * 4
    else:
        assert columns == [[0, 1, 2, 3, 12], [4, 5, 6, 7, 12], [8, 9, 10, 11, 12], [12]]


def test_the_end_of_the_longest_ids_is_certain(make_model: MakeModel, batch: Batch) -> None:
    found = step_log_probs(make_model(normalise="position"), batch, DOCUMENTS)
    assert found[0, 3] == found[2, 3] == 0.0
    assert found[1, 1] < -1e-3, "an id of one digit has to end against three other values"


def test_children_of_a_narrow_node_are_masked(make_model: MakeModel, trie: Trie) -> None:
    model = make_model(edge_bias=True)
    nodes = torch.tensor([n for n in range(trie.level_start[1], trie.level_start[2]) if trie.children(n)])
    h = torch.randn(len(nodes), 16)
    adapter = torch.randn(len(nodes), 16)
    log_probs, child, real = model.child_log_probs(h, nodes, torch.arange(len(nodes)), adapter, 1)
    assert log_probs.shape == (len(nodes), trie.fanout)
    narrow = 0
    for row, node in enumerate(nodes.tolist()):
        children = list(trie.children(node))
        narrow += len(children) < trie.fanout
        assert real[row].tolist() == [slot < len(children) for slot in range(trie.fanout)]
        assert child[row, : len(children)].tolist() == children
        assert torch.isneginf(log_probs[row, len(children) :]).all()
        assert torch.isfinite(log_probs[row, : len(children)]).all()
        assert float(log_probs[row].exp().sum().detach()) == pytest.approx(1.0, abs=1e-5)
    assert narrow


def test_an_only_child_is_certain(make_model: MakeModel, batch: Batch) -> None:
    found = step_log_probs(make_model(anchor="exact"), batch, torch.tensor([7, 7, 8]))  # (2, 1) and (3, 0, 2)
    assert not found[:2, 1].any()
    assert found[2, 2] == 0.0


# ---- tokens are pairs (position, value), and one table holds them


def test_tokens_are_position_times_values_plus_value(make_model: MakeModel, trie: Trie) -> None:
    model = make_model()
    token = model.tables.token.tolist()
    assert token[0] == model.config.start_token
    for node in range(1, trie.nodes):
        assert token[node] == (int(trie.depth[node]) - 1) * 4 + int(trie.value[node])
    with_end = make_model(normalise="position")
    ends = with_end.tables.token[torch.tensor(with_end.tables.trie.leaves).long()]
    assert (ends == with_end.config.end_token).all()


@pytest.mark.parametrize("position", [0, 1, 2])
def test_the_same_value_at_another_position_has_another_row(make_model: MakeModel, batch: Batch, position: int) -> None:
    """Only the step at this position, and through the decoder's input the later ones, follow the row of its token."""
    ids = [(1, 1, 1), (1, 1, 2), (1, 2, 0), (2, 0, 0), (2, 0, 1)]
    model = make_model(ids)
    documents = torch.zeros(3, dtype=torch.long)  # (1, 1, 1): value 1 at every position
    before = step_log_probs(model, batch, documents)
    with torch.no_grad():
        model.embedding.weight[position * 4 + 1] += 1.0
    changed = np.abs(step_log_probs(model, batch, documents) - before).max(axis=0) > 1e-5
    assert changed.tolist() == [n >= position for n in range(3)]


def test_input_and_head_are_one_parameter(make_model: MakeModel, batch: Batch) -> None:
    ids = [(0, 0), (0, 1), (1, 0), (1, 1)]
    model = make_model(ids, head="tied")
    tables = [name for name, tensor in model.state_dict().items() if tensor.shape == (model.config.vocabulary, 16)]
    assert tables == ["embedding.weight"]
    documents = torch.zeros(3, dtype=torch.long)
    before = step_log_probs(model, batch, documents)
    with torch.no_grad():
        model.embedding.weight[0] += 0.5  # (0, 0): a column of the root, and the input below it
    as_column, as_input = np.abs(step_log_probs(model, batch, documents) - before).max(axis=0)
    assert as_column > 1e-3
    assert as_input > 1e-3
    with torch.no_grad():
        model.embedding.weight[0] -= 0.5
        model.embedding.weight[4] += 0.5  # (1, 0): never an input, only a column of the second position
    changed = np.abs(step_log_probs(model, batch, documents) - before).max(axis=0)
    assert changed[0] < 1e-5
    assert changed[1] > 1e-3


def test_both_uses_follow_a_change_of_the_table(
    make_model: MakeModel, naive: MakeNaive, paths: list[SemanticId], batch: Batch
) -> None:
    """A second table that merely starts as a copy of the first would no longer agree."""
    for settings in ({"head": "tied"}, {"head": "additive"}, {"head": "product", "normalise": "vocabulary"}):
        model = make_model(**settings)
        with torch.no_grad():
            model.embedding.weight.copy_(torch.randn_like(model.embedding.weight))
        assert_equals_numpy(model, naive, paths, batch)


def test_gradient_reaches_the_table_from_both_sides(make_model: MakeModel, batch: Batch) -> None:
    ids = [(0, 0), (0, 1), (1, 0), (1, 1)]
    model = make_model(ids, head="tied")
    model(**batch, documents=torch.zeros(3, dtype=torch.long)).loss.backward()
    assert model.embedding.weight.grad is not None
    used = model.embedding.weight.grad.abs().amax(1) > 0
    # Columns: the values of both positions, of which 2 and 3 have no node. Inputs: the start token and (0, 0).
    assert used.nonzero().flatten().tolist() == [0, 1, 4, 5, model.config.start_token]


# ---- switches


@pytest.mark.parametrize("normalise", ["children", "vocabulary"])
@pytest.mark.parametrize("head", ["additive", "product"])
def test_pawa_without_layers_is_the_tied_head(make_model: MakeModel, batch: Batch, head: str, normalise: str) -> None:
    plain = make_model(head="tied", normalise=normalise)
    pawa = make_model(head=head, adapter_layers=0, normalise=normalise)
    missing = pawa.load_state_dict(plain.state_dict(), strict=False)
    assert not missing.unexpected_keys
    assert all(name.startswith("head.") for name in missing.missing_keys)
    np.testing.assert_array_equal(step_log_probs(pawa, batch, DOCUMENTS), step_log_probs(plain, batch, DOCUMENTS))


@pytest.mark.parametrize("head", ["additive", "product"])
def test_only_a_query_start_lets_the_adapter_see_the_query(make_model: MakeModel, head: str) -> None:
    tokens = torch.tensor([[13, 0, 4], [13, 0, 4]])
    queries = torch.nn.functional.normalize(torch.randn(2, 16), dim=-1)
    by_query = make_model(head=head, adapter_start="query").adapter_states(tokens, queries)
    learned = make_model(head=head, adapter_start="learned").adapter_states(tokens, queries)
    assert by_query is not None
    assert learned is not None
    assert ((by_query[0] - by_query[1]).abs().amax(-1) > 1e-3).all()
    torch.testing.assert_close(learned[0], learned[1])
    assert make_model(head="tied").adapter_states(tokens) is None


def test_adapter_states_depend_on_the_prefix(make_model: MakeModel) -> None:
    states = make_model().adapter_states(torch.tensor([[13, 0, 4], [13, 1, 4]]))
    assert states is not None
    torch.testing.assert_close(states[0, 0], states[1, 0])
    assert ((states[0] - states[1])[1:].abs().amax(-1) > 1e-3).all()


def test_foldable_only_where_the_classifier_depends_on_the_prefix_alone() -> None:
    for start, normalise in itertools.product(("learned", "query"), ("children", "position", "vocabulary")):
        config = NCIConfig(adapter_start=start, normalise=normalise)
        assert config.foldable == (start == "learned" and normalise == "children")


# ---- anchors


@pytest.mark.parametrize("lexical", [False, True])
@pytest.mark.parametrize("head", ["tied", "additive", "product"])
def test_an_untrained_index_with_an_exact_anchor_is_flat_search(
    make_model: MakeModel,
    ask: Ask,
    batch: Batch,
    paths: list[SemanticId],
    unit_vectors: Vectors,
    head: str,
    lexical: bool,
) -> None:
    model = make_model(head=head, anchor="exact", content=True, edge_bias=True, trained=False, kappa=20.0, lexical=10.0)
    words = torch.rand(3, len(paths)) if lexical else None
    queries = ask(model, **batch, lexical=words)
    assert queries.vectors is not None
    flat = 20.0 * queries.vectors.double().numpy() @ unit_vectors().astype(np.float64).T
    if words is not None:
        flat = flat + 10.0 * words.double().numpy()
    order, wanted = np.argsort(-flat, axis=1), np.sort(log_softmax(flat, axis=1), axis=1)[:, ::-1]
    size = len(paths)
    for found in (
        plain_search(model, queries, beam=size, k=size),
        folded_search(model, batch, queries.anchors, beam=size, k=size),
        exhaustive_search(model, queries, k=size),
    ):
        np.testing.assert_array_equal(found.documents.numpy(), order)
        np.testing.assert_allclose(found.scores.numpy(), wanted, atol=1e-3)


def test_mean_anchor_is_log_size_plus_weighted_similarity_to_the_mean(
    make_model: MakeModel, paths: list[SemanticId], trie: Trie, unit_vectors: Vectors
) -> None:
    model = make_model(anchor="mean", kappa=7.0, trained=False)
    queries = torch.nn.functional.normalize(torch.randn(2, 16), dim=-1)
    anchors = model.anchors(queries)
    assert anchors is not None
    vectors = unit_vectors().astype(np.float64)
    prefixes = sorted({path[:n] for path in paths for n in range(len(path) + 1)}, key=lambda p: (len(p), p))
    assert anchors.shape == (2, len(prefixes)) == (2, trie.nodes)
    for node, prefix in enumerate(prefixes):
        below = [number for number, path in enumerate(paths) if path[: len(prefix)] == prefix]
        mean = vectors[below].mean(axis=0)
        wanted = np.log(len(below)) + 7.0 * queries.double().numpy() @ mean
        np.testing.assert_allclose(anchors[:, node].detach().numpy(), wanted, atol=1e-4)


def test_no_anchor_no_scores(make_model: MakeModel) -> None:
    model = make_model(anchor="none")
    assert model.anchors(torch.randn(1, 16)) is None
    assert model.anchor_weights is None
    assert model.tables.vectors is None


def test_anchor_weights_are_trained(make_model: MakeModel, batch: Batch, paths: list[SemanticId]) -> None:
    model = make_model(anchor="exact", trained=False, kappa=5.0, lexical=2.0)
    assert model.anchor_weights is not None
    np.testing.assert_allclose(model.anchor_weights.exp().detach().numpy(), [5.0, 2.0], atol=1e-5)
    model(**batch, documents=DOCUMENTS, lexical=torch.rand(3, len(paths))).loss.backward()
    assert model.anchor_weights.grad is not None
    assert (model.anchor_weights.grad.abs() > 1e-6).all()


@pytest.mark.parametrize("anchor", ["none", "mean", "exact"])
def test_out_starts_at_zero_with_an_anchor_and_as_identity_without(make_model: MakeModel, anchor: str) -> None:
    model = make_model(anchor=anchor, trained=False)
    assert torch.equal(model.head.out.weight, torch.eye(16) if anchor == "none" else torch.zeros(16, 16))


def test_content_vectors_are_unit_means(make_model: MakeModel, trie: Trie, unit_vectors: Vectors) -> None:
    content = make_model(content=True).tables.content
    assert content is not None
    means = node_means(trie, unit_vectors())
    np.testing.assert_allclose(content.numpy(), means / np.linalg.norm(means, axis=1, keepdims=True), atol=1e-5)


# ---- the loss


@pytest.mark.parametrize("normalise", ["children", "position", "vocabulary"])
def test_loss_is_the_mean_negative_log_probability(make_model: MakeModel, batch: Batch, normalise: str) -> None:
    model = make_model(normalise=normalise, alpha=0.7)
    steps = step_log_probs(model, batch, DOCUMENTS).sum(axis=1)
    with torch.no_grad():
        out = model(**batch, documents=DOCUMENTS)
        weighted = model(**batch, documents=DOCUMENTS, weights=torch.tensor([1.0, 0.0, 3.0]))
    np.testing.assert_allclose(out.log_probs.numpy(), steps, atol=1e-5)
    assert float(out.loss) == pytest.approx(-steps.mean(), abs=1e-5)
    assert out.consistency is None, "a single pass in eval mode"
    assert float(weighted.loss) == pytest.approx(-(steps[0] + 3 * steps[2]) / 4, abs=1e-5)


@pytest.mark.parametrize("alpha", [0.15, 2.0])
def test_training_loss_adds_alpha_times_consistency(make_model: MakeModel, batch: Batch, alpha: float) -> None:
    model = make_model(alpha=alpha, dropout=0.2, encoder_dropout=0.2).train()
    with torch.no_grad():
        out = model(**batch, documents=MIXED)
    assert float(out.consistency) > 0.1
    assert float(out.loss) == pytest.approx(float(out.path_loss) + alpha * float(out.consistency), abs=1e-5)
    assert len(out.log_probs) == 6
    assert float(out.path_loss) == pytest.approx(-float(out.log_probs.mean()), abs=1e-5)


@pytest.mark.parametrize("tau", [0.5, 1.0])
@pytest.mark.parametrize("normalise", ["children", "position"])
def test_consistency_reads_scaled_decoder_states(
    make_model: MakeModel, batch: Batch, tau: float, normalise: str
) -> None:
    """Without dropout the passes are the same, and z = d^-1/2 h can be had from a single one."""
    model = make_model(alpha=1.0, tau=tau, normalise=normalise)
    with torch.no_grad():
        states, vectors = model.encode(**batch)
        mask = batch["attention_mask"][:, None, None, :].bool()
        _, h, real = model.path_log_probs(model.memories(states), mask, MIXED, vectors, None)
        wanted = consistency_loss((h * 16**-0.5).repeat(2, 1, 1), MIXED, real, tau)
        out = model.train()(**batch, documents=MIXED)
    assert float(out.consistency) == pytest.approx(float(wanted), abs=1e-5)


def test_the_two_passes_differ_by_dropout_only(make_model: MakeModel, batch: Batch) -> None:
    with torch.no_grad():
        still = make_model(alpha=1.0)
        alone = still(**batch, documents=DOCUMENTS)
        twice = still.train()(**batch, documents=DOCUMENTS)
        np.testing.assert_allclose(twice.log_probs[:3], alone.log_probs, atol=1e-5)
        np.testing.assert_allclose(twice.log_probs[3:], alone.log_probs, atol=1e-5)
        assert float(twice.path_loss) == pytest.approx(float(alone.loss), abs=1e-5)
        for where in ({"dropout": 0.3}, {"encoder_dropout": 0.3}):
            out = make_model(alpha=1.0, **where).train()(**batch, documents=DOCUMENTS)
            assert (out.log_probs[:3] - out.log_probs[3:]).abs().min() > 1e-4, where


def test_no_second_pass_without_alpha(make_model: MakeModel, batch: Batch) -> None:
    with torch.no_grad():
        out = make_model(alpha=0.0, dropout=0.1).train()(**batch, documents=DOCUMENTS)
    assert out.consistency is None
    assert len(out.log_probs) == 3
    assert torch.equal(out.loss, out.path_loss)


def test_training_with_alpha_brings_the_passes_together(make_model: MakeModel, batch: Batch) -> None:
    """The paths are left out of the loss by a great alpha: what remains must fall."""
    model = make_model(alpha=100.0, dropout=0.1).train()
    optimiser = torch.optim.Adam([p for n, p in model.named_parameters() if n.startswith("decoder.")], lr=3e-3)
    seen = []
    for _ in range(25):
        optimiser.zero_grad()
        out = model(**batch, documents=DOCUMENTS)
        out.loss.backward()
        optimiser.step()
        seen.append(float(out.consistency.detach()))
    assert np.mean(seen[-5:]) < 0.7 * np.mean(seen[:5])


@pytest.mark.parametrize("settings", [{}, {"anchor": "exact"}, {"anchor": "mean"}, {"adapter_start": "query"}], ids=str)
def test_stored_encoder_states_give_the_same_loss(
    make_model: MakeModel, batch: Batch, settings: dict[str, Any]
) -> None:
    model = make_model(**settings)
    mask = batch["attention_mask"]
    with torch.no_grad():
        states, vectors = model.encode(**batch)
        states = states * mask.unsqueeze(-1)  # stored states of padding are zero
        one = model(**batch, documents=DOCUMENTS)
        two = model(attention_mask=mask, encoder_states=states, query_vectors=vectors, documents=DOCUMENTS)
        model.config.alpha = 0.5
        model.train()
        three = model(attention_mask=mask, encoder_states=states, query_vectors=vectors, documents=DOCUMENTS)
    np.testing.assert_allclose(two.log_probs, one.log_probs, atol=1e-5)
    assert float(two.loss) == pytest.approx(float(one.loss), abs=1e-5)
    np.testing.assert_allclose(three.log_probs, torch.cat([one.log_probs] * 2), atol=1e-5)


def test_the_gradient_of_shared_columns_does_not_depend_on_threads() -> None:
    generator = torch.Generator().manual_seed(0)
    columns = torch.randn(30, 30, 384, generator=generator, requires_grad=True)
    owner = torch.randint(0, 30, (64,), generator=generator)
    z = torch.randn(64, 384, generator=generator)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = [torch.autograd.grad(_score(z, columns, owner).sin().sum(), columns)[0] for _ in range(30)]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(found[0], other) for other in found)


def test_given_query_vectors_stand_behind_the_anchor(make_model: MakeModel, batch: Batch) -> None:
    model = make_model(anchor="exact", trained=False)  # nothing but the anchor speaks
    vectors = torch.nn.functional.normalize(torch.randn(3, 16), dim=-1)
    with torch.no_grad():
        out = model(**batch, documents=DOCUMENTS, query_vectors=vectors)
        wanted = model.document_scores(vectors).log_softmax(1)[torch.arange(3), DOCUMENTS]
    np.testing.assert_allclose(out.log_probs, wanted, atol=1e-4)


def test_a_query_start_beside_stored_vectors_of_another_width(
    make_model: MakeModel, batch: Batch, trie: Trie, unit_vectors: Vectors
) -> None:
    """Settings that name two encoders are refused, or the adapter starts from the one that the model holds."""
    try:
        Config(
            embed=EmbedConfig(encoder="wide"),
            model=ModelConfig(encoder="narrow", query_vector="stored", adapter_start="query"),
        )
    except ConfigError:
        return
    model = make_model(anchor="exact", adapter_start="query", d_content=24)
    model.bind(trie, unit_vectors(trie.documents, 24))
    stored = torch.tensor(unit_vectors(3, 24, seed=8))
    with torch.no_grad():
        out = model(**batch, documents=DOCUMENTS, query_vectors=stored)
    assert torch.isfinite(out.loss)


# Documents 0, 1 (a whole cluster), 6 (a leaf below the root), 9 and 10 (a cluster) have no query.
SEEN = np.array([False, False, True, True, False, True, False, True, True, False, False])


@pytest.mark.parametrize("anchor", ["none", "mean", "exact", "exact+lexical"])
@pytest.mark.parametrize("adapter_start", ["learned", "query"])
def test_closed_queries_compete_among_seen_documents_only(
    make_model: MakeModel,
    naive: MakeNaive,
    paths: list[SemanticId],
    batch: Batch,
    trie: Trie,
    unit_vectors: Vectors,
    anchor: str,
    adapter_start: str,
) -> None:
    model = make_model(
        anchor=anchor.removesuffix("+lexical"), adapter_start=adapter_start, content=True, edge_bias=True
    )
    model.bind(trie, unit_vectors(), SEEN)
    lexical = torch.rand(3, len(paths)) if anchor.endswith("lexical") else None
    documents, closed = torch.tensor([3, 8, 5]), torch.tensor([True, True, False])
    found = step_log_probs(model, batch, documents, lexical, closed)
    reference = naive(model, paths, unit_vectors())
    with torch.no_grad():
        states, query = model.encode(**batch)
        loss = model(**batch, documents=documents, lexical=lexical, closed=closed).loss
    for row, document in enumerate(documents.tolist()):
        reference.read(
            states[row],
            batch["attention_mask"][row],
            query[row],
            None if lexical is None else lexical[row],
            np.flatnonzero(SEEN).tolist() if closed[row] else None,
        )
        steps = reference.steps(paths[document])
        np.testing.assert_allclose(found[row, : len(steps)], steps, atol=2e-4)
    assert float(loss) == pytest.approx(-found.sum() / 3, abs=1e-4)


@pytest.mark.parametrize("anchor", ["none", "exact"])
def test_closed_queries_give_unseen_documents_no_gradient(
    make_model: MakeModel, batch: Batch, trie: Trie, unit_vectors: Vectors, anchor: str
) -> None:
    model = make_model(anchor=anchor, edge_bias=True, alpha=0.5, dropout=0.1)
    model.bind(trie, unit_vectors(), SEEN)
    model.train()(**batch, documents=torch.tensor([2, 3, 7]), closed=torch.ones(3, dtype=torch.bool)).loss.backward()
    assert model.head.bias is not None
    assert model.head.bias.grad is not None
    assert torch.isfinite(model.head.bias.grad).all()
    for node in range(1, trie.nodes):
        if not SEEN[trie.first_document[node] : trie.last_document[node]].any():
            assert model.head.bias.grad[node] == 0
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_closed_means_nothing_where_all_documents_count_as_seen(make_model: MakeModel, batch: Batch) -> None:
    model = make_model(anchor="exact")
    closed = torch.ones(3, dtype=torch.bool)
    one, two = step_log_probs(model, batch, DOCUMENTS), step_log_probs(model, batch, DOCUMENTS, closed=closed)
    np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("normalise", ["children", "position", "vocabulary"])
@pytest.mark.parametrize("head", ["tied", "additive", "product"])
def test_bf16_training_stays_finite(make_model: MakeModel, batch: Batch, head: str, normalise: str) -> None:
    extra = {"anchor": "exact", "content": True, "edge_bias": True} if normalise == "children" else {}
    model = make_model(head=head, normalise=normalise, alpha=0.15, dropout=0.1, encoder_dropout=0.1, **extra).train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(**batch, documents=MIXED)
    assert torch.isfinite(out.loss)
    assert out.loss.dtype == torch.float32
    out.loss.backward()
    without = [name for name, p in model.named_parameters() if p.grad is None]
    assert not without, "every parameter takes part"
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_bf16_is_close_to_full_precision(make_model: MakeModel, batch: Batch) -> None:
    model = make_model(anchor="exact", content=True, edge_bias=True)
    with torch.no_grad():
        full = model(**batch, documents=DOCUMENTS)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            short = model(**batch, documents=DOCUMENTS)
    np.testing.assert_allclose(short.log_probs.float(), full.log_probs, atol=0.2)


# ---- saving


@pytest.mark.parametrize(
    "settings",
    [
        {"head": "tied"},
        {"head": "additive", "anchor": "exact", "content": True, "edge_bias": True},
        {"head": "product", "head_rank": 0, "adapter_start": "query", "normalise": "vocabulary"},
        {"encoder": "t5", "d_model": 8, "anchor": "mean", "adapter_layers": 2},
    ],
    ids=str,
)
def test_save_and_load(
    tmp_path: Path, make_model: MakeModel, batch: Batch, paths: list[SemanticId], unit_vectors: Vectors,
    make_trie: Callable[[Iterable[SemanticId]], Trie], settings: dict[str, Any],
) -> None:  # fmt: skip
    model = make_model(**settings, alpha=0.3, tau=0.9, pooling="cls")
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    auto: Any = transformers.AutoModel
    for again in (NCIModel.from_pretrained(tmp_path), auto.from_pretrained(tmp_path)):
        assert isinstance(again, NCIModel)
        assert again.tree is None, "the tree is no part of the model's file"
        again.bind(make_trie(paths), unit_vectors())
        again.eval()
        expected, found = model.state_dict(), again.state_dict()
        assert list(expected) == list(found)
        assert all(torch.equal(expected[name], found[name]) for name in expected)
        with torch.no_grad():
            one, two = model(**batch, documents=DOCUMENTS), again(**batch, documents=DOCUMENTS)
        assert torch.equal(one.log_probs, two.log_probs)


def test_config_survives(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "encoder": {"model_type": "bert", "hidden_size": 16},
        "pooling": "cls",
        "d_model": 8,
        "decoder_layers": 3,
        "adapter_layers": 2,
        "heads": 4,
        "d_ff": 20,
        "dropout": 0.25,
        "head": "product",
        "head_rank": 5,
        "adapter_start": "query",
        "normalise": "position",
        "anchor": "mean",
        "score": "dense+bm25",
        "kappa": 3.0,
        "lexical": 4.0,
        "query_vector": "stored",
        "content": True,
        "edge_bias": True,
        "positions": 5,
        "values": 7,
        "nodes": 99,
        "d_content": 12,
        "alpha": 0.3,
        "tau": 2.0,
    }
    NCIConfig(**given).save_pretrained(tmp_path)
    auto: Any = transformers.AutoConfig
    for again in (NCIConfig.from_pretrained(tmp_path), auto.from_pretrained(tmp_path)):
        assert isinstance(again, NCIConfig)
        assert {name: getattr(again, name) for name in given} == given


def test_same_seed_same_model(make_model: MakeModel) -> None:
    one, two, other = make_model(seed=1), make_model(seed=1), make_model(seed=2)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.embedding.weight, other.embedding.weight)


def test_the_tree_must_be_bound_first(make_model: MakeModel) -> None:
    model = make_model()
    model.tree = None
    with pytest.raises(AssertionError, match="bind"):
        _ = model.tables
