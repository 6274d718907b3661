"""Documents -> vectors: an iterable of documents in, one memory-mapped array out, row i for the i-th document.

Documents stream through in shards, so memory is bounded by one shard; what an interrupted run had finished is kept.
Knows how documents become the texts an encoder reads; knows nothing of trees or searches.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from nci.config import EmbedConfig, content_key
from nci.embedded import ENCODER_FILES
from nci.encoders import ForeignEncoder, TextEncoder, fetch_encoder
from nci.errors import DataError
from nci.pieces import encode_pieces, find_projection
from nci.records import Document
from nci.runtime import uses_bf16
from nci.shards import (
    Arrays,
    Shard,
    check_engine,
    map_shards,
    read_shard,
    rename_durably,
    report,
    shard_rows,
    write_rows,
)

log = logging.getLogger("nci")

VERSION = 1
"""Part of every shard's key: raise it when equal settings begin to give other vectors."""

_SAMPLE = 1024  # documents, the first ones, whose word pieces say how those of all are made smaller


def embed_documents(
    documents: Iterable[Document],
    out: Path,
    config: EmbedConfig,
    *,
    engine: str = "local",
    device: str = "cpu",
    dtype: Literal["float32", "float16"] = "float32",
    progress: bool = True,
) -> np.ndarray[Any, Any]:
    """Write `out/vectors.npy` and return it memory-mapped, read only: (documents, width).

    Where word pieces are kept too, `out/pieces` is a folder that `PieceVectors.load` reads.
    A rerun encodes only shards whose documents, settings or encoder have changed, or whose file is missing or damaged.

    Args:
        documents: Read once, lazily.
        out: Folder for `vectors.npy` and, in `shards/`, what a rerun takes up again.
        config: Which encoder, and how.
        engine: Where shards are encoded.
        device: "cpu" or "cuda".
        dtype: Number format on disk.
        progress: Show a bar over the documents, on a terminal.
    """
    check_engine(engine)
    folder = fetch_encoder(config.encoder)
    settings = dataclasses.replace(config, encoder=fingerprint(folder))
    key = content_key(VERSION, settings, dtype)
    total = len(documents) if isinstance(documents, Sized) else None
    projection = None
    if config.pieces:
        stream = iter(documents)
        sample = list(islice(stream, _SAMPLE))
        documents = chain(sample, stream)
        key = content_key(key, [document.content for document in sample])
        projection = _projection(folder, config, [d.content for d in sample], out, key=key, device=device)
    files = map_shards(
        _worker_maker(folder, config, projection, device=device, dtype=dtype),
        _shards(
            documents, max(1, config.shard_size // config.windows if config.pieces else config.shard_size), key=key
        ),
        out / "shards",
        engine=engine,
        describe="embed" if progress else None,
        unit="doc",
        total=total,
    )
    if not files:
        raise DataError("there are no documents to embed; give a corpus with at least one document")
    if projection is not None:
        (out / "pieces").mkdir(exist_ok=True)
        np.save(out / "pieces" / "projection.npy", projection, allow_pickle=False)
        for name in ("codes", "lengths"):
            _assemble(files, name, out / "pieces" / f"{name}.npy")
        further = out / "pieces" / "further"
        shutil.rmtree(further, ignore_errors=True)  # of other settings
        if config.windows > 1 and any(shard_rows(file, "further_codes") for file in files):
            further.mkdir()
            for name in ("codes", "lengths", "counts"):
                _assemble(files, f"further_{name}", further / f"{name}.npy")
    return _assemble(files, "vectors", out / "vectors.npy")


def fingerprint(folder: Path) -> str:
    """A hash of every file in an encoder's folder that its vectors depend on; the same wherever the folder lies."""
    hashes = {}
    for path in {path for pattern in ENCODER_FILES for path in folder.rglob(pattern)}:
        with path.open("rb") as stream:
            hashes[path.relative_to(folder).as_posix()] = hashlib.file_digest(stream, "sha256").hexdigest()
    return content_key(hashes)


def _load(folder: Path, config: EmbedConfig, device: str) -> TextEncoder:
    return TextEncoder.load(
        folder,
        pooling=config.pooling,
        normalise=config.normalise,
        max_length=config.max_length,
        device=device,
        dtype="bfloat16" if uses_bf16(config.precision, device) else "float32",
    )


def _projection(
    folder: Path, config: EmbedConfig, texts: Sequence[str], out: Path, *, key: str, device: str
) -> NDArray[np.float32] | None:
    """What makes vectors of word pieces smaller, found once and kept; none where an encoder has no such vectors."""
    file = out / f"projection-{key}.npy"
    if not file.exists() and texts:
        encoder = _load(folder, config, device)
        if isinstance(encoder, ForeignEncoder):
            log.warning("the encoder %s has layers beyond its transformer: no vectors of word pieces are kept", folder)
            return None
        found = find_projection(encoder, texts, min(config.pieces, encoder.width))
        out.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(".tmp")
        with temporary.open("wb") as stream:
            np.save(stream, found, allow_pickle=False)
        rename_durably(temporary, file)
    return np.load(file, allow_pickle=False) if texts else None


def _worker_maker(
    folder: Path, config: EmbedConfig, projection: NDArray[np.float32] | None, *, device: str, dtype: str
) -> Callable[[], Callable[..., Arrays]]:
    def make_worker() -> Callable[[Sequence[str]], Arrays]:
        encoder = _load(folder, config, device)
        if projection is not None and config.windows > 1 and not encoder.tokenizer.is_fast:
            log.warning("the tokenizer of %s cannot cut texts into windows: only their openings are read", folder)

        def work(texts: Sequence[str]) -> Arrays:
            if projection is not None:
                found = encode_pieces(
                    encoder, texts, projection, batch_size=config.batch_size, windows=config.windows, progress=report
                )
                return found | {"vectors": found["vectors"].astype(dtype, copy=False)}
            vectors = encoder.encode(texts, role="document", batch_size=config.batch_size, progress=report)
            return {"vectors": vectors.astype(dtype, copy=False)}

        return work

    return make_worker


def _shards(documents: Iterable[Document], size: int, *, key: str) -> Iterator[Shard]:
    stream = iter(documents)
    while texts := [document.content for document in islice(stream, size)]:
        digest = hashlib.sha256(key.encode())
        for text in texts:
            data = text.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "little"))  # so that "ab", "c" and "a", "bc" differ
            digest.update(data)
        yield Shard(digest.hexdigest(), texts)


def _assemble(files: Sequence[Path], name: str, target: Path) -> np.ndarray[Any, Any]:
    """The arrays of one name in all shards, one below the other."""
    first, rows = read_shard(files[0], name)[name], sum(shard_rows(file, name) for file in files)
    temporary = target.with_name(target.name + ".tmp")
    parts = (read_shard(file, name)[name] for file in files)
    write_rows(temporary, parts, (rows, *first.shape[1:]), first.dtype)
    rename_durably(temporary, target)
    return np.load(target, mmap_mode="r")  # type: ignore[no-any-return]
