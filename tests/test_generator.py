"""The offline generator: its pointer against a formula, its cache against whole targets, its sampling, its training."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import TOPICS, make_documents, make_encoder, name_of, python
from torch import Tensor

from nci.encoders import TextEncoder
from nci.errors import ConfigError, DataError, MissingModelError
from nci.generator import Generator, GeneratorConfig
from nci.pointer import Network
from nci.seq2seq import IGNORED, Batches, Sampling, fit, pad_rows

FRUIT, SEA = TOPICS["fruit"], TOPICS["sea"]
# Targets are words of the source in another order, and its name, which no other source has.
PAIRS = [
    (f"{FRUIT[0]} {FRUIT[1]} {name_of(0)}", f"{name_of(0)} {FRUIT[1]}"),
    (f"{SEA[0]} {SEA[1]} {SEA[2]} {name_of(1)}", f"{name_of(1)} {SEA[2]} {SEA[0]}"),
    (f"{SEA[3]} {FRUIT[4]} {name_of(2)}", f"{name_of(2)} {SEA[3]} the"),
    (f"{FRUIT[5]} {SEA[5]} {SEA[6]} {FRUIT[2]} {name_of(3)}", f"{name_of(3)}"),
]
TINY = GeneratorConfig(
    decoder_layers=1, dropout=0.0, max_source=48, max_target=8, epochs=80, batch_size=4, encoder_lr=3e-3, decoder_lr=3e-3,
    precision="fp32",
)  # fmt: skip
GREEDY = Sampling(count=1, max_target=8, top_k=1, top_p=1.0, temperature=1.0)


@pytest.fixture(scope="module")
def trained(encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "generator"
    Generator.train(PAIRS, encoder=encoder, out=out, settings=TINY)
    return out


@pytest.fixture(scope="module")
def generator(trained: Path) -> Generator:
    return Generator.load(trained)


@pytest.fixture(scope="module")
def untrained(encoder: Path) -> Generator:
    """Random weights large enough that nothing is uniform; its softmax knows few pieces."""
    texts = TextEncoder.load(encoder)
    torch.manual_seed(5)
    known = torch.tensor([3, 4, 5, 6, 20, 21, 30])  # [SEP] is 3
    network = Network(texts.model, known, torch.tensor([0, 1, 2, 3]), layers=2, dropout=0.0, max_target=8)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if not name.startswith("encoder."):
                parameter.add_(0.3 * torch.randn_like(parameter))
        network.bias[0] += 4  # texts end before they must
    return Generator(network, texts, TINY, fingerprint="random")


def write(generator: Generator, sources: list[str], sampling: Sampling, seeds: list[int] | None = None) -> Any:
    seeds = seeds or list(range(len(sources)))
    found = generator.sample(generator.tokenize(sources), seeds, sampling)
    return [generator.decode(rows) for rows in found]


def naive_probabilities(generator: Generator, source: str, prefix: list[int]) -> Tensor:
    """The mixture for one source and one prefix, from the formula, places one by one; no cache, no padding."""
    network = generator.network
    (row,) = generator.tokenize([source])
    ids = torch.tensor([row])
    with torch.no_grad():
        states = network.encoder(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        inputs = network.embed(torch.tensor([prefix]), 0)
        h = network.decoder(inputs, network.decoder.memories(states))[0, -1]
        words = network.encoder.get_input_embeddings().weight
        logits = {int(v): float(words[v] @ network.out(h) + network.bias[i]) for i, v in enumerate(network.vocabulary)}
        total = sum(math.exp(x) for x in logits.values())
        gate = 1 / (1 + math.exp(-float(network.gate(h))))
        query = network.pointer_query(h)
        places = [i for i, piece in enumerate(row) if piece not in network.blocked.tolist()]
        scores = {i: math.exp(float(query @ network.pointer_key(states[0, i])) / math.sqrt(len(h))) for i in places}
    gate = gate if places else 0.0
    out = torch.zeros(len(words), dtype=torch.float64)
    for piece, logit in logits.items():
        out[piece] += (1 - gate) * math.exp(logit) / total
    for place, score in scores.items():
        out[row[place]] += gate * score / sum(scores.values())
    return out


# ---- probabilities


def test_a_step_gives_the_formulas_probabilities(untrained: Generator) -> None:
    texts = ["apple pear wave", "the choir of item7 and the drum item7", ""]  # of different length: padding is inside
    state = untrained.start(texts)
    prefixes = [[untrained.start_piece] for _ in texts]
    for token in (20, 4, 33):
        scores = untrained.step(state, torch.tensor([prefix[-1] for prefix in prefixes]))
        for row, text in enumerate(texts):
            expected = naive_probabilities(untrained, text, prefixes[row])
            torch.testing.assert_close(scores[row].exp().double(), expected, atol=1e-6, rtol=1e-4)
            prefixes[row].append(token + row)
        torch.testing.assert_close(scores.exp().sum(-1), torch.ones(3))


def test_the_pointer_says_what_only_the_source_has(untrained: Generator) -> None:
    (name,) = untrained.tokenize(["item7"])[0][1:-1]
    assert name not in untrained.network.vocabulary
    with_name, without = untrained.step(
        untrained.start(["wave item7", "wave ship"]), torch.full((2,), untrained.start_piece)
    )[:, name]
    assert with_name > math.log(1e-4)
    assert without == -math.inf


def test_special_pieces_are_neither_copied_nor_said(untrained: Generator) -> None:
    scores = untrained.step(untrained.start(["zzz unknown apple"]), torch.tensor([untrained.start_piece]))
    assert (scores[0, :3] == -math.inf).all()  # padding, unknown, start
    assert scores[0, untrained.end_piece] > -math.inf


def test_cached_steps_equal_the_whole_target(untrained: Generator) -> None:
    rows = untrained.tokenize(["apple pear wave", "choir item7 drum drum"])
    targets = [[4, 20, 21, 3], [30, 5, 3]]
    ids, mask = pad_rows(rows, 0)
    labels, real = pad_rows(targets, IGNORED)
    inputs, _ = pad_rows([[untrained.start_piece, *row[:-1]] for row in targets], 0)
    with torch.no_grad():
        loss = untrained.network(ids, mask, inputs, labels, torch.arange(2))["loss"]
    state = untrained.start(["apple pear wave", "choir item7 drum drum"])
    total = 0.0
    for place in range(labels.shape[1]):
        scores = untrained.step(state, inputs[:, place])
        total -= sum(float(scores[row, labels[row, place]]) for row in range(2) if real[row, place])
    assert float(loss) == pytest.approx(total / 7, rel=1e-5)


def test_targets_of_one_source_share_its_row(untrained: Generator) -> None:
    rows = untrained.tokenize(["apple pear wave", "choir item7 drum drum"])
    ids, mask = pad_rows(rows, 0)
    inputs = torch.tensor([[2, 4], [2, 20], [2, 5]])
    labels = torch.tensor([[4, 3], [20, 3], [5, 30]])
    owners = torch.tensor([0, 1, 1])
    with torch.no_grad():
        shared = untrained.network(ids, mask, inputs, labels, owners)["loss"]
        apart = untrained.network(ids[owners], mask[owners], inputs, labels, torch.arange(3))["loss"]
    assert float(shared) == pytest.approx(float(apart), rel=1e-6)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_selected_rows_go_on_as_if_alone(untrained: Generator, data: st.DataObject) -> None:
    """Any reordering, repetition or loss of rows at any step, against each row decoded from the start."""
    texts = ["apple pear wave", "choir item7 drum drum", "moon"]
    state = untrained.start(texts)
    rows = [(number, [untrained.start_piece]) for number in range(3)]
    for _ in range(data.draw(st.integers(1, 4))):
        chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=6))
        state = state.select(torch.tensor(chosen))
        rows = [(rows[i][0], list(rows[i][1])) for i in chosen]
        scores = untrained.step(state, torch.tensor([prefix[-1] for _, prefix in rows]))
        for row, (number, prefix) in enumerate(rows):
            alone = untrained.start([texts[number]])
            for token in prefix:
                expected = untrained.step(alone, torch.tensor([token]))
            torch.testing.assert_close(scores[row], expected[0], atol=1e-4, rtol=1e-4)
            prefix.append(data.draw(st.sampled_from([4, 5, 20, 30])))


def test_a_selected_state_leaves_the_old_one_alone(untrained: Generator) -> None:
    first = torch.tensor([untrained.start_piece])
    expected = untrained.start(["apple pear"])
    untrained.step(expected, first)
    state = untrained.start(["apple pear"])
    untrained.step(state, first)
    branch = state.select(torch.tensor([0, 0]))
    untrained.step(branch, torch.tensor([4, 5]))
    assert state.cache.keys[0].shape[2] == 1
    torch.testing.assert_close(untrained.step(state, torch.tensor([20])), untrained.step(expected, torch.tensor([20])))


def test_more_steps_than_places_are_refused(untrained: Generator) -> None:
    state = untrained.start(["apple"])
    for _ in range(8):
        untrained.step(state, torch.tensor([4]))
    with pytest.raises(ConfigError, match="at most 8 tokens"):
        untrained.step(state, torch.tensor([4]))


# ---- sampling


@settings(max_examples=200, deadline=None)
@given(
    tenths=st.lists(st.integers(-80, 80), min_size=1, max_size=8, unique=True),
    top_k=st.integers(0, 9),
    top_p=st.floats(0.05, 1.0),
    temperature=st.floats(0.2, 3.0),
    draw=st.floats(0, 1, exclude_max=True),
)
def test_pick_is_inverse_sampling_of_the_cut_distribution(
    tenths: list[int], top_k: int, top_p: float, temperature: float, draw: float
) -> None:
    scores = [tenth / 10 for tenth in tenths]
    order = sorted(range(len(scores)), key=lambda i: -scores[i])[: top_k or None]
    weights = [math.exp(scores[i] / temperature) for i in order]
    total, before = sum(weights), 0.0
    kept: list[tuple[int, float]] = []
    for index, weight in zip(order, weights, strict=True):
        if kept and before / total >= top_p - 1e-9:
            break
        kept.append((index, weight))
        before += weight
    sampling = Sampling(1, 1, top_k, top_p, temperature)
    picked = int(sampling.pick(torch.tensor([scores], dtype=torch.float64), torch.tensor([draw], dtype=torch.float64)))
    assert picked in order
    reached, place = 0.0, draw * sum(weight for _, weight in kept)
    acceptable = set()  # at an edge, rounding may decide either way
    for index, weight in kept:
        if reached - 1e-6 <= place <= reached + weight + 1e-6 * (1 + weight):
            acceptable.add(index)
        reached += weight
    nearly = min(abs(sum(weights[:n]) / total - top_p) for n in range(len(weights) + 1)) < 1e-6
    assert picked in acceptable or nearly


def test_picks_have_the_right_frequencies() -> None:
    chances = torch.tensor([0.5, 0.3, 0.15, 0.05])
    draws = torch.rand(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for sampling, expected in (
        (Sampling(1, 1, 0, 1.0, 1.0), [0.5, 0.3, 0.15, 0.05]),
        (Sampling(1, 1, 2, 1.0, 1.0), [0.625, 0.375, 0, 0]),
        (Sampling(1, 1, 0, 0.79, 1.0), [0.625, 0.375, 0, 0]),
        (Sampling(1, 1, 0, 0.81, 1.0), [50 / 95, 30 / 95, 15 / 95, 0]),
        (Sampling(1, 1, 0, 1.0, 0.5), [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]),
    ):
        picked = sampling.pick(chances.double().log().expand(20_000, 4), draws)
        shares = torch.bincount(picked, minlength=4) / 20_000
        torch.testing.assert_close(shares, torch.tensor(expected), atol=0.012, rtol=0)
        assert [bool(share) for share in shares] == [bool(share) for share in expected]


def test_draws_are_the_seeds_and_do_not_depend_on_how_many_are_wanted() -> None:
    few, many = Sampling(3, 8, 0, 1.0, 1.0), Sampling(7, 8, 0, 1.0, 1.0)
    assert torch.equal(few.draws(11), many.draws(11)[:3])
    assert not torch.equal(few.draws(11), few.draws(12))
    assert torch.equal(few.draws(2**62), few.draws(2**62))


def test_samples_follow_the_models_probabilities(untrained: Generator) -> None:
    """The first pieces of many samples against the distribution of one step, the end forbidden."""
    count = 4000
    (found,) = untrained.sample(untrained.tokenize(["wave item7 moon"]), [1], Sampling(count, 1, 0, 1.0, 1.0))
    chances = untrained.step(untrained.start(["wave item7 moon"]), torch.tensor([untrained.start_piece]))[0].exp()
    chances[untrained.end_piece] = 0
    shares = torch.bincount(torch.tensor([row[0] for row in found]), minlength=len(chances)) / count
    torch.testing.assert_close(shares, chances / chances.sum(), atol=0.03, rtol=0)


def test_samples_are_what_their_own_draws_pick(untrained: Generator) -> None:
    """Every text again, alone and from its start at each piece; texts end at different places."""
    sources = ["wave item7 moon", "song"]
    sampling = Sampling(12, 5, 9, 0.99, 1.5)
    found = untrained.sample(untrained.tokenize(sources), [3, 4], sampling)
    lengths = set()
    for source, seed, texts in zip(sources, [3, 4], found, strict=True):
        for text, draws in zip(texts, sampling.draws(seed), strict=True):
            expected: list[int] = []
            while len(expected) < 5 and expected[-1:] != [untrained.end_piece]:
                scores = naive_probabilities(untrained, source, [untrained.start_piece, *expected]).log()
                if not expected:
                    scores[untrained.end_piece] = -math.inf
                expected.append(int(sampling.pick(scores[None], draws[None, len(expected)])))
            assert text == [piece for piece in expected if piece != untrained.end_piece]
            lengths.add(len(text))
    assert len(lengths) > 2


def test_a_sample_does_not_depend_on_its_neighbours(untrained: Generator) -> None:
    sources = ["wave item7 moon", "the apple and the pear of item3 item4", "song"]
    sampling = Sampling(6, 8, 20, 0.95, 1.0)
    together = write(untrained, sources, sampling, [5, 6, 7])
    assert together == [write(untrained, [source], sampling, [5 + i])[0] for i, source in enumerate(sources)]
    assert len({tuple(texts) for texts in together}) == 3
    assert write(untrained, sources, sampling, [8, 9, 10]) != together


def test_samples_end_with_the_end_and_never_begin_with_it(untrained: Generator) -> None:
    found = untrained.sample(untrained.tokenize(["wave"] * 5), list(range(5)), Sampling(40, 8, 0, 1.0, 1.0))
    lengths = {len(row) for rows in found for row in rows}
    assert min(lengths) == 1
    assert max(lengths) <= 8
    assert all(untrained.end_piece not in row for rows in found for row in rows)
    (short,) = untrained.sample(untrained.tokenize(["wave"]), [0], Sampling(40, 2, 0, 1.0, 1.0))
    assert max(map(len, short)) == 2


# ---- training


def test_training_learns_its_pairs(generator: Generator, trained: Path) -> None:
    assert [texts[0] for texts in write(generator, [source for source, _ in PAIRS], GREEDY)] == [t for _, t in PAIRS]
    curve = (trained / "training" / "curve.csv").read_text().splitlines()
    losses = [float(line.split(",")[2]) for line in curve[1:]]
    assert losses[-1] < 0.3 < 1.5 < losses[0]


@pytest.mark.slow
def test_what_was_copied_in_training_is_copied_from_new_sources(encoder: Path, tmp_path: Path) -> None:
    """The target is always the name at the end; the names of the test were never seen as targets."""
    pairs = [(f"{d.text} {name_of(n)}", name_of(n)) for n, d in enumerate(make_documents()[:40])]
    out = Generator.train(
        pairs, encoder=encoder, out=tmp_path, settings=dataclasses.replace(TINY, epochs=15, batch_size=8)
    )
    new = [(d.text, name_of(n)) for n, d in enumerate(make_documents()) if n >= 40]
    piece = out.encoder.tokenizer.convert_tokens_to_ids(new[0][1])
    assert piece not in out.network.vocabulary
    found = write(out, [source for source, _ in new], GREEDY)
    assert sum(texts[0].split()[0] == name for texts, (_, name) in zip(found, new, strict=True)) >= 0.7 * len(new)


def test_a_rerun_loads_and_another_seed_trains_anew(trained: Path, encoder: Path) -> None:
    stamp = (trained / "decoder.safetensors").stat().st_mtime_ns
    again = Generator.train(PAIRS, encoder=encoder, out=trained, settings=TINY)
    assert (trained / "decoder.safetensors").stat().st_mtime_ns == stamp
    assert again.fingerprint == Generator.load(trained).fingerprint
    assert not [*(trained / "training").glob("checkpoint-*")]


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"seed": 1}, {"epochs": 2.0}, {"pieces": "all"}])
def test_other_settings_are_other_work(encoder: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    short = dataclasses.replace(TINY, epochs=1)
    first = Generator.train(PAIRS, encoder=encoder, out=tmp_path, settings=short)
    second = Generator.train(PAIRS, encoder=encoder, out=tmp_path, settings=dataclasses.replace(short, **change))
    assert first.fingerprint != second.fingerprint
    third = Generator.train(PAIRS[:3], encoder=encoder, out=tmp_path, settings=short)
    assert third.fingerprint not in (first.fingerprint, second.fingerprint)
    fourth = Generator.train(PAIRS, encoder=encoder, out=tmp_path, settings=short)
    assert fourth.fingerprint == first.fingerprint


def test_all_pieces_can_be_said_where_that_is_asked_for(encoder: Path, tmp_path: Path) -> None:
    settings = dataclasses.replace(TINY, epochs=1, pieces="all")
    generator = Generator.train(PAIRS, encoder=encoder, out=tmp_path, settings=settings)
    scores = generator.step(generator.start(["wave"]), torch.tensor([generator.start_piece]))[0]
    assert (scores > -math.inf).sum() == len(scores) - 3  # all but padding, unknown and start


@pytest.mark.parametrize("freeze", [True, False])
def test_word_vectors_are_trained_only_where_asked(encoder: Path, tmp_path: Path, freeze: bool) -> None:
    settings = dataclasses.replace(TINY, epochs=1, freeze_embeddings=freeze)
    generator = Generator.train(PAIRS, encoder=encoder, out=tmp_path, settings=settings)
    before = TextEncoder.load(encoder).model.get_input_embeddings().weight
    assert torch.equal(before, generator.encoder.model.get_input_embeddings().weight) == freeze


def test_an_encoder_without_a_rate_stays_as_it_is(encoder: Path, tmp_path: Path) -> None:
    for rate in (0.0, 1e-3):
        settings = dataclasses.replace(TINY, epochs=1, encoder_lr=rate)
        generator = Generator.train(PAIRS, encoder=encoder, out=tmp_path / str(rate), settings=settings)
        before, after = TextEncoder.load(encoder).model, generator.encoder.model
        same = [torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True)]
        assert all(same) == (rate == 0)


KILLED = """
import dataclasses, os, sys
from pathlib import Path
from nci.generator import Generator
from nci.train import Curve
import test_generator as t

saved = Curve.on_save
def on_save(self, args, state, control, **kwargs):
    saved(self, args, state, control, **kwargs)
    if state.global_step == 5:
        os._exit(9)
Curve.on_save = on_save
settings = dataclasses.replace(t.TINY, epochs=10, dropout=0.1, checkpoint_minutes=0.0)
Generator.train(t.PAIRS, encoder=Path(sys.argv[1]), out=Path(sys.argv[2]), settings=settings)
"""


@pytest.mark.slow
def test_a_killed_training_ends_with_the_same_weights(encoder: Path, tmp_path: Path) -> None:
    settings = dataclasses.replace(TINY, epochs=10, dropout=0.1)
    whole = Generator.train(PAIRS, encoder=encoder, out=tmp_path / "whole", settings=settings)
    threads = str(torch.get_num_threads())  # sums come out differently with another number
    assert python("-c", KILLED, str(encoder), str(tmp_path / "killed"), OMP_NUM_THREADS=threads).returncode == 9
    assert (tmp_path / "killed" / "training" / "checkpoint-5" / "COMPLETE").exists()
    with pytest.raises(MissingModelError, match="no generator could be read"):
        Generator.load(tmp_path / "killed")
    resumed = Generator.train(PAIRS, encoder=encoder, out=tmp_path / "killed", settings=settings)
    for name, tensor in whole.network.state_dict().items():
        assert torch.equal(tensor, resumed.network.state_dict()[name]), name


def test_saved_and_loaded_generators_are_equal(generator: Generator, tmp_path: Path) -> None:
    generator.save(tmp_path)
    again = Generator.load(tmp_path)
    assert again.config == generator.config
    for name, tensor in generator.network.state_dict().items():
        assert torch.equal(tensor, again.network.state_dict()[name]), name
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".bin", ".pt", ".pkl")]


@pytest.mark.slow
def test_an_encoder_without_a_start_token_works_too(tmp_path: Path) -> None:
    """T5's tokenizer ends texts and does not begin them; its padding is what the decoder begins with."""
    folder = make_encoder(tmp_path / "t5", kind="t5")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["post_processor"]["single"] = tokenizer["post_processor"]["single"][1:]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    generator = Generator.train(PAIRS, encoder=folder, out=tmp_path / "out", settings=TINY)
    assert (generator.start_piece, generator.end_piece) == (0, 3)
    assert [texts[0] for texts in write(generator, [source for source, _ in PAIRS], GREEDY)] == [t for _, t in PAIRS]


# ---- batches


def test_batches_hold_every_pair_once_an_epoch_and_share_sources() -> None:
    sources = [[2, 4, 3], [2, 4, 3], [2, 5, 6, 3], [2, 4, 3], [2, 7, 3]]
    targets = [[10, 3], [11, 12, 3], [13, 1, 3], [14, 3], [15, 3]]
    rates = dataclasses.replace(TINY, epochs=2, batch_size=3).rates
    batches = Batches(sources, targets, rates, pad=0, start=2, ignored={1}, shared=2)
    seen = []
    for item in range(len(batches)):
        batch = batches[item]
        for row, owner in enumerate(batch["source_rows"].tolist()):
            source = batch["input_ids"][owner][batch["attention_mask"][owner].bool()].tolist()
            label = [piece for piece in batch["labels"][row].tolist() if piece != IGNORED]
            inputs = batch["decoder_input_ids"][row].tolist()
            seen.append((tuple(source), tuple(label)))
            assert inputs[0] == 2
            if label == [13, 3]:  # what must not be said is still read
                assert inputs[:3] == [2, 13, 1]
    expected = [(tuple(s), tuple(p for p in t if p != 1)) for s, t in zip(sources, targets, strict=True)]
    assert sorted(seen) == sorted(2 * expected)
    assert max(len(batches[item]["input_ids"]) for item in range(len(batches))) <= 3
    assert "source_rows" not in Batches(sources, targets, rates, pad=0)[0]


def test_fit_forgets_checkpoints_of_other_work(encoder: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "KEY").write_text("other")
    generator = Generator.train(
        PAIRS, encoder=encoder, out=tmp_path / "g", settings=dataclasses.replace(TINY, epochs=1)
    )
    batches = Batches([[2, 4, 3]], [[4, 3]], generator.config.rates, pad=0, start=2, shared=2)
    fit(generator.network, batches, generator.config.rates, out=tmp_path, key="mine", device="cpu")
    assert not (tmp_path / "checkpoint-3").exists()
    assert (tmp_path / "KEY").read_text() == "mine"
    assert not generator.network.training


# ---- mistakes


def test_mistakes_are_said(encoder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing to train a generator on"):
        Generator.train([], encoder=encoder, out=tmp_path)
    with pytest.raises(MissingModelError, match="no generator could be read"):
        Generator.load(tmp_path)
    mistakes: list[dict[str, Any]] = [
        {"pieces": "some"},
        {"decoder_layers": 0},
        {"max_target": 1},
        {"epochs": 0},
        {"dropout": 1.0},
    ]
    for wrong in mistakes:
        with pytest.raises(ConfigError):
            GeneratorConfig(**wrong)
