"""Tiny things the tests share: a tokenizer, encoders, tries, bound models, and the whole network once more in numpy.

Everything is random, made in memory, and small enough that thousands of forward passes take seconds. `Naive` is written
from the formulas of the design, one query and one prefix at a time, with digits instead of node numbers; it shares no
code with the library and reads nothing but the names and values of the weights.
"""

from __future__ import annotations

import logging
import math
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # tests started with `&`: what they start would ignore Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from tiny import make_beir, make_encoder
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from nci.cli import main
from nci.model import NCIModel
from nci.model_config import NCIConfig
from nci.records import SemanticId
from nci.search import EncodedQueries
from nci.trie import Trie

hf: Any = transformers  # its own types are incomplete
Floats = NDArray[np.float64]

WIDTH = 16
VALUES = 4
# fmt: off
WORDS = [
    "red", "green", "blue", "cat", "dog", "bird", "runs", "sleeps", "over", "under", "the", "a", "sun", "moon", "star",
    "tree",
]
# Leaves at depths 1, 2 and 3, gaps between digits, one node with a single child, leaves and clusters side by side.
PATHS: list[SemanticId] = [
    (0, 0, 1), (0, 0, 3), (0, 1), (0, 3, 0), (0, 3, 1), (0, 3, 2), (1,), (2, 1), (3, 0, 2), (3, 2, 0), (3, 2, 1),
]
# fmt: on


def bert(width: int = WIDTH, dropout: float = 0.0, layers: int = 1) -> dict[str, Any]:
    return {
        "model_type": "bert",
        "vocab_size": 4 + len(WORDS),
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "intermediate_size": 2 * width,
        "max_position_embeddings": 32,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
        "pad_token_id": 0,
    }


def t5(width: int = WIDTH, dropout: float = 0.0, layers: int = 1) -> dict[str, Any]:
    return {
        "model_type": "t5",
        "vocab_size": 4 + len(WORDS),
        "d_model": width,
        "d_kv": width // 2,
        "num_heads": 2,
        "d_ff": 2 * width,
        "num_layers": layers,
        "dropout_rate": dropout,
        "pad_token_id": 0,
    }


def mpnet(width: int = WIDTH, dropout: float = 0.0, layers: int = 1) -> dict[str, Any]:
    return bert(width, dropout, layers) | {"model_type": "mpnet", "pad_token_id": 1}


ENCODERS: dict[str, Callable[..., dict[str, Any]]] = {
    "bert": bert,
    "t5": t5,
    "t5-gated": lambda *shape: t5(*shape) | {"feed_forward_proj": "gated-gelu"},
    "mpnet": mpnet,
    "bert-relu": lambda *shape: bert(*shape) | {"hidden_act": "relu"},
}


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """Whole words, with [CLS] and [SEP] around them."""
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    words = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = WhitespaceSplit()
    words.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=32,
    )


@pytest.fixture(scope="session")
def encoder_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A tiny random BERT and its tokenizer as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(0)
    hf.BertModel(hf.AutoConfig.for_model(**bert())).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def make_trie() -> Callable[[Iterable[SemanticId]], Trie]:
    """Semantic ids in any order -> their trie."""

    def make(ids: Iterable[SemanticId]) -> Trie:
        rows = list(ids)
        paths = np.full((len(rows), max(map(len, rows))), -1, dtype=np.int32)
        for row, path in zip(paths, rows, strict=True):
            row[: len(path)] = path
        return Trie.from_paths(paths)[0]

    return make


@pytest.fixture(scope="session")
def paths() -> list[SemanticId]:
    """The ids of the standard tiny trie, in leaf order."""
    return PATHS


@pytest.fixture(scope="session")
def trie(make_trie: Callable[[Iterable[SemanticId]], Trie]) -> Trie:
    return make_trie(PATHS)


@pytest.fixture(scope="session")
def unit_vectors() -> Callable[..., NDArray[np.float32]]:
    """Random document vectors of length 1."""

    def make(documents: int = len(PATHS), width: int = WIDTH, seed: int = 5) -> NDArray[np.float32]:
        vectors = np.random.default_rng(seed).standard_normal((documents, width))
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors.astype(np.float32)

    return make


@pytest.fixture(scope="session")
def make_model(
    make_trie: Callable[[Iterable[SemanticId]], Trie], unit_vectors: Callable[..., NDArray[np.float32]]
) -> Callable[..., NCIModel]:
    """A bound model in eval mode; keyword arguments are those of NCIConfig.

    `trained` moves every weight outside the encoder away from its start value, so that no term of the logit is zero and
    no matrix is the identity; `moved` does the same inside, where biases begin at zero and weights of norms at one.
    """

    def make(
        ids: Sequence[SemanticId] = PATHS,
        *,
        encoder: str = "bert",
        encoder_width: int = WIDTH,
        encoder_dropout: float = 0.0,
        encoder_layers: int = 1,
        trained: bool = True,
        moved: bool = False,
        seed: int = 0,
        **settings: Any,
    ) -> NCIModel:
        tree = make_trie(ids)
        given: dict[str, Any] = {
            "encoder": ENCODERS[encoder](encoder_width, encoder_dropout, encoder_layers),
            "d_model": WIDTH,
            "decoder_layers": 2,
            "adapter_layers": 0 if settings.get("head") == "tied" else 1,
            "heads": 2,
            "d_ff": 24,
            "dropout": 0.0,
            "head_rank": 3,
            "kappa": 5.0,
            "lexical": 2.0,
            "positions": tree.positions,
            "values": max(VALUES, 1 + int(tree.value.max())),
            "nodes": tree.nodes,
            "d_content": encoder_width,
        }
        torch.manual_seed(seed)
        model = NCIModel(NCIConfig(**(given | settings)))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if moved if name.startswith("encoder.") else trained:
                    parameter.add_(0.3 * torch.randn_like(parameter))
        model.bind(tree, unit_vectors(tree.documents, encoder_width))
        model.eval()
        return model

    return make


@pytest.fixture(scope="session")
def batch() -> dict[str, Tensor]:
    """Three queries of different length, padded on the right."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(4, 4 + len(WORDS), (3, 6), generator=generator)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]])
    return {"input_ids": ids * mask, "attention_mask": mask}


@pytest.fixture(scope="session")
def ask() -> Callable[..., EncodedQueries]:
    """What search asks the tree with, from word pieces."""

    @torch.no_grad()
    def make(
        model: NCIModel, input_ids: Tensor, attention_mask: Tensor, lexical: Tensor | None = None
    ) -> EncodedQueries:
        states, vectors = model.encode(input_ids, attention_mask)
        return EncodedQueries(states, attention_mask, vectors, model.anchors(vectors, lexical))

    return make


class Naive:
    """The network in plain numpy: the design's formulas for one query and one prefix.

    Args:
        ids: Semantic ids in leaf order; the children of a prefix are read off them.
        vectors: (documents, width) in leaf order, where anchors or content need them.
    """

    def __init__(self, model: NCIModel, ids: Sequence[SemanticId], vectors: NDArray[np.floating] | None = None) -> None:
        self.config = model.config
        self.weights = {name: tensor.detach().double().numpy() for name, tensor in model.state_dict().items()}
        self.ids = list(ids)
        self.vectors = None if vectors is None else vectors.astype(np.float64)
        self.end = self.config.positions * self.config.values
        self.start = self.end + 1
        self.states: Floats = np.zeros((0, 0))
        self.query: Floats = np.zeros(0)
        self.lexical: Floats | None = None
        self.among: set[int] = set()

    def read(
        self,
        states: Tensor,
        seen: Tensor,
        query: Tensor,
        lexical: Tensor | None = None,
        among: Iterable[int] | None = None,
    ) -> Naive:
        """Take one query: encoder states (tokens, width), mask (tokens,), vector (width,), lexical (documents,).

        `among` are the documents it competes for, where these are not all.
        """
        self.among = set(range(len(self.ids)) if among is None else among)
        self.states = states.detach().double().numpy()[seen.numpy().astype(bool)]
        self.query = query.detach().double().numpy()
        self.lexical = None if lexical is None else lexical.double().numpy()
        return self

    # ---- pieces

    def norm(self, name: str, x: Floats) -> Floats:
        out: Floats = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * self.weights[name + ".weight"]
        return out

    def attend(self, name: str, x: Floats, memory: Floats, causal: bool) -> Floats:
        q, k, v = (
            m @ self.weights[f"{name}.{part}.weight"].T
            for m, part in ((x, "query"), (memory, "key"), (memory, "value"))
        )
        size = self.config.d_model // self.config.heads
        mixed = np.zeros_like(q)
        for row in range(len(x)):
            last = row + 1 if causal else len(memory)
            for head in range(self.config.heads):
                part = slice(head * size, (head + 1) * size)
                weights = np.exp(k[:last, part] @ q[row, part] / math.sqrt(size))
                mixed[row, part] = (weights / weights.sum()) @ v[:last, part]
        out: Floats = mixed @ self.weights[f"{name}.out.weight"].T
        return out

    def stack(self, name: str, layers: int, x: Floats, memory: Floats | None = None) -> Floats:
        for number in range(layers):
            block = f"{name}.blocks.{number}"
            y = self.norm(f"{block}.self_norm", x)
            x = x + self.attend(f"{block}.self_attention", y, y, causal=True)
            if memory is not None:
                x = x + self.attend(
                    f"{block}.cross_attention", self.norm(f"{block}.cross_norm", x), memory, causal=False
                )
            hidden = self.norm(f"{block}.ff_norm", x) @ self.weights[f"{block}.ff_in.weight"].T
            hidden = hidden * 0.5 * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2)))
            x = x + hidden @ self.weights[f"{block}.ff_out.weight"].T
        return self.norm(f"{name}.norm", x)

    def token(self, position: int, value: int) -> int:
        return position * int(self.config.values) + value

    def row(self, token: int) -> Floats:
        out: Floats = self.weights["embedding.weight"][token]
        return out

    # ---- the two states of a prefix; a prefix is a list of tokens without the start

    def decoder(self, prefix: Sequence[int]) -> Floats:
        bridge = self.weights.get("bridge.weight")
        memory = self.states if bridge is None else self.states @ bridge.T
        inputs = np.stack([self.row(self.start), *(self.row(t) for t in prefix)])
        h: Floats = self.stack("decoder", self.config.decoder_layers, inputs, memory)[-1]
        return h

    def adapter(self, prefix: Sequence[int]) -> Floats | None:
        if self.config.adapter_layers == 0:
            return None
        start = self.weights["adapter_start.weight"]
        first = start[0] if self.config.adapter_start == "learned" else start @ self.query * math.sqrt(len(self.query))
        inputs = np.stack([first, *(self.row(t) for t in prefix)])
        a: Floats = self.stack("adapter", self.config.adapter_layers, inputs)[-1]
        return a

    def w(self, token: int, a: Floats | None) -> Floats:
        """w(prefix, v) of the design's table."""
        e, head, d = self.row(token), self.config.head, self.config.d_model
        if a is None or head == "tied":
            return e
        if head == "additive":
            m = self.weights["head.mix"][token]
            if self.config.head_rank:
                m = m @ self.weights["head.narrow.weight"]
            out: Floats = e + m @ a
            return out
        if self.config.head_rank:
            gate = np.diag(self.weights["head.gate.weight"] @ a)
            matrix = np.eye(d) + self.weights["head.left"] @ gate @ self.weights["head.right"].T
        else:
            matrix = np.eye(d) + (self.weights["head.gate.weight"] @ a).reshape(d, d)
        out = matrix @ e
        return out

    def below(self, digits: SemanticId) -> list[int]:
        """Documents below a prefix of digits."""
        return [number for number, path in enumerate(self.ids) if path[: len(digits)] == digits]

    def anchor(self, digits: SemanticId) -> float:
        below = self.below(digits)
        if self.config.anchor == "none":
            return 0.0
        assert self.vectors is not None
        kappa, lexical = np.exp(self.weights["anchor_weights"])
        if self.config.anchor == "mean":
            return math.log(len(below)) + float(kappa * self.query @ self.vectors[below].mean(axis=0))
        total = 0.0
        for number in self.among.intersection(below):
            extra = 0.0 if self.lexical is None else float(lexical * self.lexical[number])
            total += math.exp(float(kappa * self.query @ self.vectors[number]) + extra)
        return math.log(total)

    def node(self, digits: SemanticId) -> int:
        """Number of a node: breadth first, siblings by digit."""
        prefixes = {path[:n] for path in self.ids for n in range(len(path) + 1)}
        return sorted(prefixes, key=lambda p: (len(p), p)).index(digits)

    # ---- log-probabilities

    def next_digits(self, digits: SemanticId) -> dict[int, float]:
        """log p(v | q, prefix) of the real children of a prefix; the softmax knows nothing else."""
        d = self.config.d_model
        prefix = [self.token(position, value) for position, value in enumerate(digits)]
        z = self.weights["head.out.weight"] @ self.decoder(prefix)
        a = self.adapter(prefix)
        logits = {}
        for value in sorted({path[len(digits)] for path in self.ids if path[: len(digits)] == digits}):
            child = (*digits, value)
            if self.among.isdisjoint(self.below(child)):
                continue
            edge = self.w(self.token(len(digits), value), a)
            if self.config.content:
                assert self.vectors is not None
                mean = self.vectors[self.below(child)].mean(axis=0)
                edge = edge + self.weights["head.content.weight"] @ (mean / np.linalg.norm(mean)) * math.sqrt(d)
            bias = float(self.weights["head.bias"][self.node(child)]) if self.config.edge_bias else 0.0
            logits[value] = float(z @ edge) / math.sqrt(d) + bias + self.anchor(child)
        return log_softmax(logits)

    def next_tokens(self, prefix: Sequence[int]) -> dict[int, float]:
        """log p(token | q, prefix) of every column, for the normalisers that know no children."""
        position, values = len(prefix), self.config.values
        if self.config.normalise == "vocabulary":
            columns = [*range(self.config.positions * values), self.end]
        else:
            columns = [self.token(position, v) for v in range(values)] if position < self.config.positions else []
            columns = [*columns, self.end]
        z = self.weights["head.out.weight"] @ self.decoder(prefix)
        a = self.adapter(prefix)
        return log_softmax({t: float(z @ self.w(t, a)) / math.sqrt(self.config.d_model) for t in columns})

    def steps(self, digits: SemanticId) -> list[float]:
        """log p of every step of one id, the end token last where there is one."""
        if self.config.normalise == "children":
            return [self.next_digits(digits[:n])[digits[n]] for n in range(len(digits))]
        tokens = [self.token(position, value) for position, value in enumerate(digits)] + [self.end]
        return [self.next_tokens(tokens[:n])[tokens[n]] for n in range(len(tokens))]


def log_softmax(logits: dict[int, float]) -> dict[int, float]:
    total = math.log(sum(math.exp(x) for x in logits.values()))
    return {name: x - total for name, x in logits.items()}


@pytest.fixture(scope="session")
def naive() -> Callable[..., Naive]:
    return Naive


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Dropout and new parameters are the same in every run of a test, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture
def as_before() -> Iterator[None]:
    """`main` sets up logging and the environment for a process of its own: afterwards they are what they were."""
    log, environment = logging.getLogger("nci"), dict(os.environ)
    handlers, level, propagate = log.handlers, log.level, log.propagate
    yield
    log.handlers, log.propagate = handlers, propagate
    log.setLevel(level)
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], as_before: None) -> Callable[..., tuple[int, str, str]]:
    """Runs a command in this process: exit code, standard output, standard error."""

    def call(*argv: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = main([str(word) for word in argv])
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def ok(run: Callable[..., tuple[int, str, str]]) -> Callable[..., str]:
    """Runs a command that must succeed; gives its standard output."""

    def call(*argv: object) -> str:
        code, out, err = run(*argv)
        assert code == 0, err
        return out

    return call


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def beir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_beir(tmp_path_factory.mktemp("data") / "beir")
