"""Texts in, numbers of documents out: tokenises queries, cuts them into batches, asks the tree.

The same engine serves a finished index and the search of `dev` during training. Knows no doc_ids and no files.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nci.encoders import TextEncoder
from nci.errors import ConfigError, DataError, MemoryFullError
from nci.lexical import LexicalScores
from nci.model import NCIModel
from nci.pieces import PieceVectors, special_pieces
from nci.runtime import one_thread_each
from nci.search.backend import Backend, choose_precision, padded
from nci.search.content import Content, DocumentVectors
from nci.search.exhaustive import exhaustive_search
from nci.search.fold import EdgeTable, fold
from nci.search.late import Asked, LateScores
from nci.search.plain import EncodedQueries, Found, plain_search
from nci.search.plan import Plan, make_plan
from nci.search.unconstrained import unconstrained_search
from nci.trie import Trie

Mode = Literal["beam", "unconstrained", "exhaustive"]
Beam = int | Sequence[int]
MAX_QUERY_CHARS = 10_000
_CPU_BATCH, _GPU_BATCH = 16, 256
FEW = 8  # queries at which a launch costs more than the work in it


class Ranking(NamedTuple):
    """Documents of one query, best first, and how many documents were scored to find them."""

    documents: NDArray[np.int64]  # (hits,)
    scores: NDArray[np.float32]  # (hits,)
    scored: int


@dataclass
class Engine:
    """A model in eval mode, its tree, and what turns texts into its inputs.

    Args:
        model: Weights; bound to the tree when a search needs the modules themselves.
        tokenizer: The encoder's tokenizer.
        trie: The tree of the index.
        vectors: Document vectors in leaf order, where the model has an anchor or content vectors.
        edges: Folded edge table, where the model allows one.
        lexical: Lexical scores in leaf order, where the content score has them.
        pieces: Word pieces of the documents in leaf order, where the content score has late interaction.
        candidates: Documents per query whose pieces are compared.
        embedder: The stored encoder, where the query vector comes from it.
        prompt: What the encoder wants before a query.
        max_length: Word pieces of a query that are read.
        precision: auto, fp32, bf16 or int8.
        device: Where to search.
    """

    model: NCIModel
    tokenizer: Any
    trie: Trie
    vectors: DocumentVectors | None = None
    edges: EdgeTable | None = None
    lexical: LexicalScores | None = None
    pieces: PieceVectors | None = None
    candidates: int = 100
    embedder: TextEncoder | None = None
    prompt: str = ""
    max_length: int = 64
    precision: str = "auto"
    device: str = "cpu"

    @classmethod
    def for_model(cls, model: NCIModel, tokenizer: Any, trie: Trie, **kwargs: Any) -> Engine:
        """An engine for a bound model, whose edge table is folded now."""
        edges = fold(model.eval()) if model.config.foldable else None
        return cls(model, tokenizer, trie, edges=edges, device=str(model.device), **kwargs)

    @cached_property
    def backend(self) -> Backend | None:
        """The fast search; none where the model cannot be folded."""
        precision = choose_precision(self.precision, self.device)
        if self.edges is None:
            return None
        content = None
        if self.model.config.anchor != "none":
            assert self.vectors is not None
            content = Content(
                self.model, self.trie, self.vectors, self.lexical, self.late, precision=precision, device=self.device
            )
        return Backend(self.model, self.trie, self.edges, content, precision=precision, device=self.device)

    @property
    def rounds(self) -> bool:
        """Whether search computes with fewer digits than `explain` does."""
        return self.edges is not None and choose_precision(self.precision, self.device) != "fp32"

    @cached_property
    def late(self) -> LateScores | None:
        """Late interaction, where the content score has it."""
        if self.pieces is None or not self.model.config.late:
            return None
        precision = choose_precision(self.precision, self.device)
        special = special_pieces(self.tokenizer)
        pieces = self.pieces if self.model.config.further else replace(self.pieces, further=None)
        return LateScores(pieces, special, candidates=self.candidates, device=self.device, precision=precision)

    @cached_property
    def reference(self) -> NCIModel:
        """The model itself, bound to the tree: what plain and exhaustive searches and explanations ask."""
        if self.model.tree is None:
            if self.vectors is None:
                self.model.bind(self.trie)
            else:
                moves = None if self.vectors.moves is None else np.asarray(self.vectors.moves.values, np.float32)
                values = np.asarray(self.vectors.values, np.float32)
                self.model.bind(self.trie, values, bias=self.vectors.bias, moves=moves)
        return self.model.to(self.device).eval()  # type: ignore[arg-type, no-any-return]

    def search(
        self,
        texts: Sequence[str],
        *,
        k: int,
        beam: Beam,
        length_penalty: float = 0.0,
        mode: Mode = "beam",
        batch_size: int = 0,
        stop_depth: int | None = None,
    ) -> list[Ranking]:
        """The best documents of each text, in the order of the texts.

        Args:
            beam: Prefixes kept per level; one number, or one per level.
            batch_size: Queries at a time; 0 takes what suits the device.
            stop_depth: Stop after so many digits, and return the documents of whole clusters, at least k where there are.
        """
        if mode not in get_args(Mode):
            raise ConfigError(f"mode is one of {', '.join(get_args(Mode))}; not {mode!r}")
        if stop_depth is not None and (mode != "beam" or self.edges is None):
            raise ConfigError("--stop-depth needs the constrained search of an index with a folded model")
        cleaned = [clean_query(text) for text in texts]
        tokens = self.tokenise(cleaned)
        order = sorted(range(len(cleaned)), key=lambda i: len(tokens[i]))
        options: dict[str, Any] = {"k": k, "beam": beam, "length_penalty": length_penalty}
        fast = mode == "beam" and self.backend is not None

        def at_once(texts: list[str], tokens: list[list[int]]) -> list[Ranking]:
            if fast:
                return self._fast(texts, tokens, stop_depth=stop_depth, **options)
            return self._slow(texts, tokens, mode=mode, **options)

        def search(chosen: list[int]) -> Iterator[tuple[int, Ranking]]:
            found = in_pieces(at_once, [cleaned[i] for i in chosen], [tokens[i] for i in chosen])
            return zip(chosen, found, strict=True)

        size = batch_size or (_gpu_batch(self.trie.documents) if fast and self.device != "cpu" else _CPU_BATCH)
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        mapped = one_thread_each(search, batches) if fast and self.device == "cpu" else map(search, batches)
        out = dict(pair for pairs in mapped for pair in pairs)
        return [out[i] for i in range(len(texts))]

    def tokenise(self, texts: list[str]) -> list[list[int]]:
        """Word pieces of each text, as many as are read."""
        if not texts:
            return []
        ids = self.tokenizer([self.prompt + text for text in texts], truncation=True, max_length=self.max_length)
        return ids["input_ids"]  # type: ignore[no-any-return]

    # ---- the folded search

    def _fast(
        self,
        texts: list[str],
        tokens: list[list[int]],
        *,
        k: int,
        beam: Beam,
        length_penalty: float,
        stop_depth: int | None,
    ) -> list[Ranking]:
        assert self.backend is not None
        settings: dict[str, Any] = {"beam": beam, "k": k, "length_penalty": length_penalty, "stop_depth": stop_depth}
        plan = self._plan(certain=False, least=0 if len(texts) <= FEW else 8, **settings)
        found = self._at_once(texts, tokens, plan)
        short = [i for i, one in enumerate(found) if one.short]
        if short:
            certain = self._plan(certain=True, least=8, **settings)
            longer = self._at_once([texts[i] for i in short], [tokens[i] for i in short], certain)
            for i, one in zip(short, longer, strict=True):
                found[i] = one
        return [self._ranking(one, plan) for one in found]

    def _plan(self, *, certain: bool, least: int, **settings: Any) -> Plan:
        assert self.backend is not None
        fixed = self.backend.on_gpu
        key = (certain, least, *(tuple(v) if isinstance(v, Sequence) else v for v in settings.values()))
        if key not in self._plans:
            self._plans[key] = make_plan(self.trie, fixed=fixed, certain=certain or not fixed, least=least, **settings)
        return self._plans[key]

    @cached_property
    def _plans(self) -> dict[Any, Plan]:
        return {}

    def _at_once(self, texts: list[str], tokens: list[list[int]], plan: Plan) -> list[_One]:
        assert self.backend is not None
        ids, lengths = self.backend.pad(tokens, pad=int(self.tokenizer.pad_token_id or 0), most=self.max_length)
        found = self.backend.search(ids, lengths, texts, plan, self.stored_vectors(texts, len(lengths)))
        arrays = [part.numpy() for part in (found.nodes, found.scores, found.scored, found.short)]
        return [_One(*one) for one in zip(*arrays, strict=True)]

    def stored_vectors(self, texts: Sequence[str], rows: int) -> Tensor | None:
        """Vectors of the stored encoder, where the anchor reads them."""
        if self.embedder is None:
            return None
        vectors = torch.as_tensor(self.embedder.encode(texts, role="query"), device=self.device)
        return torch.nn.functional.pad(torch.nn.functional.normalize(vectors, dim=-1), (0, 0, 0, rows - len(texts)))

    def _ranking(self, found: _One, plan: Plan) -> Ranking:
        assert self.backend is not None
        content = self.backend.content
        scored = self.trie.documents if content is not None and content.exact else int(found.scored)
        real = found.nodes >= 0
        nodes, scores = found.nodes[real], found.scores[real]
        first, last = self.trie.first_document[nodes], self.trie.last_document[nodes]
        if plan.whole:
            return Ranking(first.astype(np.int64), scores, scored)
        sizes = last - first
        enough = int(np.searchsorted(np.cumsum(sizes), plan.k)) + 1  # clusters, best first, until they hold k
        members = [np.arange(a, b, dtype=np.int64) for a, b in zip(first[:enough], last[:enough], strict=True)]
        return Ranking(np.concatenate(members), np.repeat(scores[:enough], sizes[:enough]), scored)

    # ---- by the model's own modules

    def _slow(
        self, texts: list[str], _: list[list[int]], *, k: int, beam: Beam, length_penalty: float, mode: Mode
    ) -> list[Ranking]:
        queries = self.encode(texts)
        model = self.reference
        if mode == "exhaustive":
            found = exhaustive_search(model, queries, k=k, length_penalty=length_penalty)
        elif mode == "unconstrained":
            wide = beam if isinstance(beam, int) else max(beam)
            found = unconstrained_search(model, queries, beam=wide, k=k, length_penalty=length_penalty)
        else:
            found = plain_search(model, queries, beam=beam, k=k, length_penalty=length_penalty)
        return rankings(found)

    @torch.inference_mode()
    def encode(self, texts: Sequence[str]) -> EncodedQueries:
        """Everything about some queries that does not depend on the beam, by the model's own modules."""
        model = self.reference
        queries, vectors, asked = self._read(texts)
        lexical = late = nearer = both = None
        if self.lexical is not None:
            lexical = torch.as_tensor(self.lexical.normalised(texts), device=self.device)
        if self.late is not None:
            first = model.document_scores(asked, lexical, choosing=True)
            found = self.late.best(first, queries)
            late, both = (found.spread(first, each) for each in (found.above, found.together(model.config.further)))
            nearer = None if found.nearer is None else found.spread(first, found.nearer)
        anchors = model.anchors(asked, lexical, late=both)
        return EncodedQueries(queries.states, queries.mask.long(), vectors, anchors, late, nearer)

    @torch.inference_mode()
    def query_vectors(self, texts: Sequence[str]) -> Tensor:
        """The vectors (texts, width) that are compared with those of documents, by the model's own modules."""
        stored = self.stored_vectors(texts, len(texts))
        return (self._read(texts)[1] if stored is None else stored).float()

    def _read(self, texts: Sequence[str]) -> tuple[Asked, Tensor, Tensor]:
        """States of some queries, their vectors, and those that the anchor reads."""
        tokens = self.tokenise(list(texts))
        # Padded here: a tokenizer that pads remembers it, and would pad the queries of other threads, too.
        ids, lengths = padded(tokens, pad=int(self.tokenizer.pad_token_id or 0))
        mask = (torch.arange(ids.shape[1]) < lengths.unsqueeze(1)).to(self.device)
        states, vectors = self.reference.encode(ids.to(self.device), mask.long())
        stored = self.stored_vectors(texts, len(texts))
        return Asked(states, ids.to(self.device), mask), vectors, vectors if stored is None else stored

    @torch.inference_mode()
    def explain(self, text: str, documents: Sequence[int]) -> list[dict[str, Any]]:
        """For each document the log-probability of every digit of its id and, where there is one, its content score."""
        if not documents:
            return []
        queries, model = self.encode([clean_query(text)]), self.reference
        rows = torch.zeros(len(documents), dtype=torch.long, device=self.device)
        numbers = torch.as_tensor(list(documents), device=self.device)
        vectors = queries.vectors[rows] if queries.vectors is not None else None
        anchors = queries.anchors[rows] if queries.anchors is not None else None
        mask = queries.mask[rows][:, None, None, :].bool()
        log_probs, _, real = model.path_log_probs(model.memories(queries.states[rows]), mask, numbers, vectors, anchors)
        leaves = torch.as_tensor(model.tables.trie.leaves, device=numbers.device).long()[numbers]
        return [
            {
                "digits": log_probs[i][real[i]].tolist(),
                "content": None if anchors is None else float(anchors[i, leaves[i]]),
            }
            for i in range(len(documents))
        ]

    def zeroed(self) -> Engine:
        """The same engine without what the decoder learned: content scores alone."""
        if self.model.config.anchor == "none":
            raise ConfigError("--system zeroed needs an index with an anchor: without one nothing is left")
        model = copy.copy(self.model)  # all weights shared but those of the head
        model._modules = dict(self.model._modules)
        model.head = copy.deepcopy(self.model.head)
        torch.nn.init.zeros_(model.head.out.weight)
        if model.head.bias is not None:
            torch.nn.init.zeros_(model.head.bias)
        other = replace(self, model=model, edges=None if self.edges is None else self.edges.without_edges())
        other.late = self.late  # its codes may fill much of a GPU
        return other


def _gpu_batch(documents: int) -> int:
    """Queries at a time such that one number per query and document stays below half a gigabyte."""
    return max(8, min(_GPU_BATCH, 2**27 // documents))


class _One(NamedTuple):
    """`Nodes` of one query, on the host."""

    nodes: NDArray[np.int64]
    scores: NDArray[np.float32]
    scored: np.int64
    short: np.bool_


def rankings(found: Found) -> list[Ranking]:
    """One ranking per query."""
    documents, scores = found.documents.cpu().numpy(), found.scores.float().cpu().numpy()
    real = np.isfinite(scores) & (documents >= 0)
    return [
        Ranking(documents[row][real[row]], scores[row][real[row]], int(scored))
        for row, scored in enumerate(found.scored.tolist())
    ]


def in_pieces(
    search: Callable[[list[str], list[list[int]]], list[Ranking]], texts: list[str], tokens: list[list[int]]
) -> list[Ranking]:
    """Search a batch; what does not fit into the memory is cut in half and tried again."""
    try:
        return search(texts, tokens)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        if len(texts) == 1:
            raise MemoryFullError("one query needs more memory than there is; use a smaller --beam") from error
    # Outside the handler: the error holds the frames, and with them the tensors that filled the memory.
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    half = len(texts) // 2
    return in_pieces(search, texts[:half], tokens[:half]) + in_pieces(search, texts[half:], tokens[half:])


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed; PyTorch has an error of its own for that on a GPU only."""
    said = ("allocate memory", "out of memory", "ALLOC_FAILED")
    known = isinstance(error, torch.OutOfMemoryError | MemoryError | MemoryFullError)
    return known or any(words in str(error) for words in said)


def is_query(text: str) -> bool:
    """Whether a text can be searched for."""
    try:
        return bool(clean_query(text))
    except DataError:
        return False


def clean_query(text: str) -> str:
    """The text a model may see; refuses what cannot be a query."""
    if not isinstance(text, str):
        raise DataError(f"a query is a string, not {type(text).__name__}")
    text = text.replace("\x00", " ").strip()[:MAX_QUERY_CHARS]
    if not text:
        raise DataError("the query is empty; type at least one word")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError("the query holds a lone surrogate, which is no character; send valid Unicode") from error
    return text
