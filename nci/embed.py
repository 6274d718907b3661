"""Documents -> vectors: an iterable of documents in, one memory-mapped array out, row i for the i-th document.

Documents stream through in shards, so memory is bounded by one shard; what an interrupted run had finished is kept.
Knows how documents become the texts an encoder reads; knows nothing of trees or searches.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.lib.format import open_memmap

from nci.config import EmbedConfig, content_key
from nci.embedded import ENCODER_FILES
from nci.encoders import TextEncoder, fetch_encoder
from nci.errors import DataError
from nci.records import Document
from nci.runtime import uses_bf16
from nci.shards import Arrays, Shard, check_engine, map_shards, read_shard, rename_durably, report

VERSION = 1
"""Part of every shard's key: raise it when equal settings begin to give other vectors."""


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
    files = map_shards(
        _worker_maker(folder, config, device=device, dtype=dtype),
        _shards(documents, config.shard_size, key=content_key(VERSION, settings, dtype)),
        out / "shards",
        engine=engine,
        describe="embed" if progress else None,
        unit="doc",
        total=len(documents) if isinstance(documents, Sized) else None,
    )
    if not files:
        raise DataError("there are no documents to embed; give a corpus with at least one document")
    return _assemble(files, out / "vectors.npy")


def fingerprint(folder: Path) -> str:
    """A hash of every file in an encoder's folder that its vectors depend on; the same wherever the folder lies."""
    hashes = {}
    for path in {path for pattern in ENCODER_FILES for path in folder.rglob(pattern)}:
        with path.open("rb") as stream:
            hashes[path.relative_to(folder).as_posix()] = hashlib.file_digest(stream, "sha256").hexdigest()
    return content_key(hashes)


def _worker_maker(folder: Path, config: EmbedConfig, *, device: str, dtype: str) -> Callable[[], Callable[..., Arrays]]:
    def make_worker() -> Callable[[Sequence[str]], Arrays]:
        encoder = TextEncoder.load(
            folder,
            pooling=config.pooling,
            normalise=config.normalise,
            max_length=config.max_length,
            device=device,
            dtype="bfloat16" if uses_bf16(config.precision, device) else "float32",
        )

        def work(texts: Sequence[str]) -> Arrays:
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


def _assemble(files: Sequence[Path], target: Path) -> np.ndarray[Any, Any]:
    first = read_shard(files[0])["vectors"]
    rows = [len(first), *(len(read_shard(file)["vectors"]) for file in files[1:])]
    temporary = target.with_name(target.name + ".tmp")
    vectors = open_memmap(temporary, mode="w+", dtype=first.dtype, shape=(sum(rows), first.shape[1]))
    end = 0
    for file, count in zip(files, rows, strict=True):
        vectors[end : end + count] = read_shard(file)["vectors"]
        end += count
    vectors.flush()
    del vectors
    rename_durably(temporary, target)
    return np.load(target, mmap_mode="r")  # type: ignore[no-any-return]
