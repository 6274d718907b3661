"""A dual encoder trained on the corpus's own pairs (DPR, ANCE): documents and a folder in, exact search out.

Queries and passages are encoded apart by the same weights; a document's score is the best inner product of its
passages. The folder holds `encoder/` (readable by sentence-transformers), `vectors.npy` (float16), `starts.npy` and
`dual.json`, and counts only with `COMPLETE`, which is written last. How it is trained is `nci.contrastive`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from nci.baselines import Baseline, Shelf
from nci.baselines.dual_data import cut_passages
from nci.baselines.settings import DualSettings
from nci.contrastive import embed_all, train_encoder, weights_digest
from nci.contrastive_data import Pairs, Rows, tokenize_queries
from nci.encoders import ForeignEncoder, TextEncoder
from nci.errors import ConfigError, DataError, IndexCorruptError, IndexNotFoundError
from nci.records import Document, Hits
from nci.runtime import check_device, quiet

FORMAT = 1


class DualEncoder(Baseline):
    """Exact search with a trained encoder; made by `train` or `load`.

    Args:
        documents: What to search.
        encoder: The trained encoder.
        vectors: (passages, width), on the encoder's device.
        starts: (documents + 1,) passages `starts[i]` to `starts[i + 1]` are those of document i.
        settings: How the encoder was trained.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        encoder: TextEncoder,
        vectors: torch.Tensor,
        starts: Rows,
        settings: DualSettings,
    ) -> None:
        self._shelf = Shelf(documents, source=settings.name)
        self.encoder = encoder
        self.settings = settings
        self._vectors = vectors
        self._starts = starts

    @classmethod
    def train(
        cls,
        documents: Sequence[Document],
        pairs: Sequence[tuple[str, str]],
        *,
        out: Path,
        settings: DualSettings | None = None,
        device: str | None = None,
    ) -> DualEncoder:
        """Train on pairs of a query and a doc_id, encode the documents, write everything to `out`.

        Goes on where a killed training with the same input stopped; other contents of `out` are replaced.
        """
        settings, device = settings or DualSettings(), check_device(device)
        Shelf(documents, source=settings.name)  # refuses repeated doc_ids before anything is trained
        encoder = TextEncoder.load(settings.encoder, normalise=True, max_length=settings.max_length, device=device)
        if isinstance(encoder, ForeignEncoder):
            raise ConfigError(f"the encoder {settings.encoder} has layers beyond its transformer; take one without")
        identity = _identity(documents, pairs, settings, weights_digest(encoder))
        if _read_identity(out) != identity:
            _clear(out)
            (out / "dual.json").write_text(json.dumps(identity, indent=2) + "\n", encoding="utf-8")
        if (out / "COMPLETE").exists():
            return cls.load(out, documents, device=device)
        read, passages = Pairs.read(pairs, documents, encoder, settings), cut_passages(documents, encoder, settings)
        train_encoder(encoder, read, passages, out / "rounds", settings)
        vectors = embed_all(encoder, passages.tokens, settings, label="encode documents")
        np.save(out / "vectors.npy", vectors.half().cpu().numpy())
        np.save(out / "starts.npy", passages.starts)
        shutil.rmtree(out / "encoder", ignore_errors=True)
        (out / "encoder").mkdir()
        with quiet():
            encoder.save(out / "encoder")
        (out / "COMPLETE").touch()
        shutil.rmtree(out / "rounds", ignore_errors=True)
        return cls.load(out, documents, device=device)

    @classmethod
    def load(cls, folder: Path, documents: Sequence[Document], *, device: str | None = None) -> DualEncoder:
        """Open what `train` wrote, with the same documents in the same order."""
        if not (folder / "COMPLETE").exists():
            raise IndexNotFoundError(f"{folder} holds no trained dual encoder; train one into it first")
        identity, device = _read_identity(folder), check_device(device)
        try:
            settings = DualSettings(**identity["settings"])  # type: ignore[arg-type]
            vectors, starts = (np.load(folder / f"{name}.npy", allow_pickle=False) for name in ("vectors", "starts"))
            whole = identity["format"] == FORMAT and vectors.ndim == 2 and len(vectors) == starts[-1]
        except (OSError, ValueError, TypeError, KeyError, IndexError, EOFError) as error:
            raise IndexCorruptError(f"{folder} is damaged: {error}; train it again") from error
        if not whole:
            raise IndexCorruptError(f"{folder} is damaged or of another format than {FORMAT}; train it again")
        if identity["doc_ids"] != _digest(each.doc_id for each in documents):
            raise DataError(f"{folder} was made for other documents, or for these in another order; train it again")
        encoder = TextEncoder.load(folder / "encoder", max_length=settings.max_length, device=device)
        return cls(documents, encoder, torch.from_numpy(vectors).to(device).float(), starts, settings)

    def _answer(self, texts: list[str], k: int) -> list[Hits]:
        most = max(self.settings.query_length, self.settings.max_length)  # a long query is read whole
        vectors = embed_all(self.encoder, tokenize_queries(texts, self.encoder, most), self.settings)
        scores = (vectors @ self._vectors.T).cpu().numpy()  # (queries, passages)
        best = np.maximum.reduceat(scores, self._starts[:-1], axis=1)  # (queries, documents)
        every = np.arange(len(self._shelf))
        return [self._shelf.hits(every, row, k) for row in best]


def _identity(
    documents: Sequence[Document], pairs: Sequence[tuple[str, str]], settings: DualSettings, weights: str
) -> dict[str, object]:
    """All that decides the trained weights."""
    return {
        "format": FORMAT,
        "settings": asdict(settings),
        "weights": weights,
        "doc_ids": _digest(each.doc_id for each in documents),
        "texts": _digest([each.title, each.text] for each in documents),
        "pairs": _digest(pairs),
    }


def _digest(items: Iterable[object]) -> str:
    digest = hashlib.sha256()
    for item in items:
        digest.update(json.dumps(item).encode())
    return digest.hexdigest()


def _read_identity(folder: Path) -> dict[str, object]:
    try:
        return dict(json.loads((folder / "dual.json").read_bytes()))
    except (OSError, ValueError, TypeError):
        return {}


def _clear(folder: Path) -> None:
    (folder / "COMPLETE").unlink(missing_ok=True)  # first: what is left of the rest must not count
    for name in ("vectors.npy", "starts.npy", "dual.json"):
        (folder / name).unlink(missing_ok=True)
    for name in ("encoder", "rounds"):
        shutil.rmtree(folder / name, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
