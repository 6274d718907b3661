"""What is measured: sizes of networks, trees, ids and questions, and texts as tokens for networks that were never trained.

In: a name, a number of documents, or files. Out: shapes, a `Trie`, paths, texts, token tensors. Knows no systems.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import T5Config

from nci.errors import ConfigError, DataError
from nci.trie import Trie

WORD_PIECES = 32128  # T5's vocabulary
_RESERVED = 2  # padding and end of text


@dataclass(frozen=True)
class Shape:
    """Size of a network; T5's own, with half as many decoder layers as encoder layers, as in the paper's code."""

    name: str
    encoder_layers: int
    decoder_layers: int
    width: int
    heads: int
    d_ff: int
    adapter_layers: int
    encoder_heads: int | None = None  # where they are not those of the decoder

    def t5(self, vocabulary: int, **changes: Any) -> T5Config:
        """A T5 of this size; `changes` are fields of its configuration."""
        heads = changes.pop("num_heads", self.heads)
        return T5Config(
            **{
                "vocab_size": vocabulary,
                "d_model": self.width,
                "d_ff": self.d_ff,
                "d_kv": self.width // heads,
                "num_heads": heads,
                "num_layers": self.encoder_layers,
                "num_decoder_layers": self.decoder_layers,
                **changes,
            }
        )


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("minilm", 6, 2, 384, 6, 1536, adapter_layers=1, encoder_heads=12),
        Shape("small", 6, 3, 512, 8, 2048, adapter_layers=4),
        Shape("base", 12, 6, 768, 12, 3072, adapter_layers=4),
        Shape("large", 24, 12, 1024, 16, 4096, adapter_layers=4),
    )
}


class HashTokenizer:
    """Words to tokens without a vocabulary file: every text becomes exactly `length` real tokens.

    A short text is repeated and a long one cut, so that figures are for queries of one known length. A text is taken
    apart once and remembered: what is measured is search, not this stand-in for a tokenizer.
    """

    def __init__(self, vocabulary: int = WORD_PIECES, length: int = 32) -> None:
        self.vocabulary, self.length = vocabulary, length
        self.known: dict[str, Tensor] = {}

    def __call__(self, texts: list[str]) -> tuple[Tensor, Tensor]:
        """Token ids and a mask of ones, both (texts, length)."""
        if not texts:
            return torch.empty(0, self.length, dtype=torch.long), torch.empty(0, self.length, dtype=torch.long)
        input_ids = torch.stack([self._tokens(text) for text in texts])
        return input_ids, torch.ones_like(input_ids)

    def _tokens(self, text: str) -> Tensor:
        if text not in self.known:
            words = text.split() or [""]
            ids = [_RESERVED + zlib.crc32(word.encode()) % (self.vocabulary - _RESERVED) for word in words]
            self.known[text] = torch.tensor((ids * -(-self.length // len(ids)))[: self.length])
        return self.known[text]


def synthetic_trie(documents: int, k: int = 30, c: int = 30) -> Trie:
    """The tree that hierarchical k-means would give on perfectly even data, level by level without any path.

    Clusters of more than c documents are split into k, smaller ones into their documents; a cluster of one is a leaf.

    >>> synthetic_trie(5, k=2, c=2).paths.tolist()
    [[0, 0, 0], [0, 0, 1], [0, 1, -1], [1, 0, -1], [1, 1, -1]]
    """
    if documents < 1 or k < 2 or c < 1:
        raise ConfigError(
            f"a tree needs at least 1 document, k of 2 and c of 1, not documents={documents}, k={k}, c={c}"
        )
    size, first = np.array([documents], np.int32), np.zeros(1, np.int32)  # of each node of the level
    values, parents, counts = [np.array([-1], np.int32)], [np.array([-1], np.int32)], []
    firsts, lasts = [first], [size]
    nodes = 1
    parts = np.where(size > c, np.minimum(size, k), size)  # children of each node: the root has some even when alone
    while True:
        counts.append(parts)
        total = int(parts.sum())
        if not total:
            break
        start = np.cumsum(parts, dtype=np.int32) - parts
        parent = np.repeat(np.arange(len(parts), dtype=np.int32), parts)
        digit = np.arange(total, dtype=np.int32) - start[parent]
        share, rest = np.divmod(size, np.maximum(parts, 1))  # the first `rest` children hold one document more
        first = first[parent] + digit * share[parent] + np.minimum(digit, rest[parent])
        size = share[parent] + (digit < rest[parent])
        values.append(digit)
        parents.append(parent + np.int32(nodes - len(parts)))
        firsts.append(first)
        lasts.append(first + size)
        nodes += total
        parts = np.where(size > c, np.minimum(size, k), np.where(size > 1, size, 0))
    children = np.concatenate(counts)
    child_start = np.empty(nodes + 1, np.int32)
    child_start[0] = 1
    np.cumsum(children, out=child_start[1:])
    child_start[1:] += 1
    first_document = np.concatenate(firsts).astype(np.int32, copy=False)
    leaf = np.flatnonzero(children == 0)
    leaves = np.empty(documents, np.int32)
    leaves[first_document[leaf]] = leaf
    return Trie(
        child_start=child_start,
        value=np.concatenate(values),
        parent=np.concatenate(parents),
        first_document=first_document,
        last_document=np.concatenate(lasts).astype(np.int32, copy=False),
        leaves=leaves,
    )


def id_values(trie: Trie) -> int:
    """Values per position: one more than the largest digit."""
    return int(trie.value.max()) + 1


def nested_dicts(trie: Trie, *, values: int, first: int, end: int) -> dict[int, Any]:
    """The tree as dictionaries of tokens, as Python programs keep it: each leaf goes on with the token `end` alone.

    The token of a value at a position is first + position x values + value.
    """
    token = (first + (trie.depth - 1) * values + trie.value).tolist()
    parent = trie.parent.tolist()
    dicts: list[dict[int, Any]] = [{} for _ in range(trie.nodes)]
    for node in range(1, trie.nodes):
        dicts[parent[node]][token[node]] = dicts[node]
    for leaf in trie.leaves.tolist():
        dicts[leaf][end] = {}
    return dicts[0]


def walk(root: dict[int, Any], tokens: list[int]) -> dict[int, Any] | None:
    """The dictionary behind a sequence of tokens, or None where the tree has no such path."""
    node: dict[int, Any] | None = root
    for token in tokens:
        node = node.get(token) if node is not None else None
    return node


def read_ids(path: Path) -> NDArray[np.int32]:
    """Semantic ids from lines `number<TAB>3-14-2-0`, in the order of the file: (documents, positions), padded with -1."""
    ids: list[list[int]] = []
    for number, line in _lines(path):
        try:
            digits = [int(digit) for digit in line.split("\t")[1].split("-")]
        except (IndexError, ValueError) as error:
            raise DataError(
                f"{path}:{number}: expected a number, a tab and digits like 3-14-2-0, not {line!r}"
            ) from error
        ids.append(digits)
    if not ids:
        raise DataError(f"{path} holds no ids: expected lines of a number, a tab and digits like 3-14-2-0")
    paths = np.full((len(ids), max(map(len, ids))), -1, np.int32)
    for row, digits in zip(paths, ids, strict=True):
        row[: len(digits)] = digits
    return paths


def read_questions(path: Path) -> list[str]:
    """The first column of a file of tab-separated lines."""
    questions = [line.split("\t")[0] for _, line in _lines(path)]
    if not questions:
        raise DataError(f"{path} holds no questions: expected one a line, before the first tab")
    return questions


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not empty, with their numbers; a name that ends in .gz is compressed."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line.rstrip("\n")
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise DataError(f"{path} cannot be read: {error}; expected tab-separated text, plain or as .gz") from error
