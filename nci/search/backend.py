"""A folded model on one device: token ids in, nodes out. Chooses precision and kernels; on a GPU a whole search is recorded.

Knows no texts beyond those that the lexical score reads, and nothing of tokenizers, documents or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

import torch
from torch import Tensor

from nci.errors import ConfigError
from nci.graphs import Recorder
from nci.model import NCIModel
from nci.search.content import Content
from nci.search.core import Nodes, find
from nci.search.fold import EdgeTable
from nci.search.late import Asked
from nci.search.linear import Precision
from nci.search.network import Network
from nci.search.ops import SearchTree, TorchOps
from nci.search.plan import Plan
from nci.trie import Trie

LENGTHS = (16, 32, 64, 128, 256, 512)  # and what 512 divides


def choose_precision(asked: str, device: str) -> Precision:
    """What `auto` means here: bf16 on a GPU, int8 on a CPU with instructions for it, float32 elsewhere.

    int8 is a CPU's: an index that was told to use it is searched in bf16 on a GPU.
    """
    on_cpu = device == "cpu"
    if asked == "auto":
        return "int8" if on_cpu and torch.cpu._is_vnni_supported() else "fp32" if on_cpu else "bf16"
    if asked == "int8" and not on_cpu:
        return "bf16"
    if asked not in ("fp32", "bf16", "int8"):
        raise ConfigError(f"--search.precision is one of auto, fp32, bf16, int8; not {asked!r}")
    return asked  # type: ignore[return-value]


class Backend:
    """The network, the tree and, where the model has one, the content score.

    Args:
        content: Anchors; none where the model has none.
    """

    def __init__(
        self,
        model: NCIModel,
        trie: Trie,
        edges: EdgeTable,
        content: Content | None,
        *,
        precision: Precision,
        device: str,
    ) -> None:
        self.device, self.trie, self.content, self.precision = device, trie, content, precision
        self.on_gpu = device != "cpu"
        self.network = Network(model, precision=precision, device=device, ops=_ops(device))
        # A CPU reads the mapped table as it is; a GPU has it in the precision of the network.
        self.tree = SearchTree.on(device, trie, edges, self.network.dtype if self.on_gpu else None)
        self.recorder = Recorder(device) if self.on_gpu else None
        self.one_at_a_time = Lock()

    def pad(self, ids: Sequence[Sequence[int]], *, pad: int, most: int) -> tuple[Tensor, Tensor]:
        """Token ids and lengths on the host; for a GPU with as many queries and tokens as a recording has.

        Args:
            most: Tokens that the encoder can read.
        """
        count, longest = len(ids), max(map(len, ids))
        if self.on_gpu:
            count = 1 << (count - 1).bit_length()
            longest = max(longest, min(most, _recorded(longest)))
        table, lengths = padded(ids, pad=pad, count=count, longest=longest)
        return (table.pin_memory(), lengths.pin_memory()) if self.on_gpu else (table, lengths)

    @torch.inference_mode()
    def search(
        self, ids: Tensor, lengths: Tensor, texts: Sequence[str], plan: Plan, asked: Tensor | None = None
    ) -> Nodes:
        """The best nodes of each query, on the host; what comes behind the last text is padding.

        Args:
            texts: What the lexical part of the content score reads.
            asked: Vectors for the content score, where they are not the encoder's own.
        """
        words = None
        if self.content is not None:
            words = self.content.words([*texts, *[""] * (len(ids) - len(texts))])
        more = {"words": words, "asked": asked}
        given = {name: tensor for name, tensor in more.items() if tensor is not None}
        if self.recorder is None:
            return self._search(plan, ids, lengths, **given).first(len(texts))

        def recorded(ids: Tensor, lengths: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
            return (self._search(plan, ids, lengths, **dict(zip(given, others, strict=True))).packed(),)

        key = (plan, tuple(ids.shape), *given)
        with self.one_at_a_time:  # a recording has one place for its inputs and one for its results
            (found,) = self.recorder.run(key, recorded, ids, lengths, *given.values())
            table = found.cpu()
        return Nodes.unpacked(table, plan.rows * len(ids)).first(len(texts))

    def _search(
        self, plan: Plan, ids: Tensor, lengths: Tensor, words: Tensor | None = None, asked: Tensor | None = None
    ) -> Nodes:
        states, vectors = self.network.encode(ids, lengths)
        memory = self.network.memory(states, lengths)
        anchors = None
        if self.content is not None:
            mask = torch.arange(ids.shape[1], device=ids.device) < lengths.unsqueeze(1)
            anchors = self.content.anchors(vectors if asked is None else asked, words, Asked(states, ids, mask))
        return find(self.network, self.tree, plan, memory, anchors)


def padded(
    ids: Sequence[Sequence[int]], *, pad: int, count: int | None = None, longest: int | None = None
) -> tuple[Tensor, Tensor]:
    """Token ids (count, longest) and lengths, padded on the right; by default as small as they can be."""
    table = torch.full((count or len(ids), longest or max(map(len, ids))), pad, dtype=torch.long)
    lengths = torch.ones(len(table), dtype=torch.long)
    for row, tokens in enumerate(ids):
        table[row, : len(tokens)] = torch.as_tensor(tokens)
        lengths[row] = len(tokens)
    return table, lengths


def _ops(device: str) -> TorchOps:
    if device == "cpu":
        return TorchOps()
    try:
        from nci.search.kernels import TritonOps
    except ImportError:  # a build of PyTorch without Triton
        return TorchOps()
    return TritonOps()


def _recorded(longest: int) -> int:
    """Tokens of the shape that queries of so many are padded to."""
    return next((length for length in LENGTHS if length >= longest), -(-longest // LENGTHS[-1]) * LENGTHS[-1])
