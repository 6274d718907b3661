"""nci: a neural corpus indexer. One model is the search index.

>>> import nci
>>> index = nci.build(["a green apple", "a red car"], "my.index")  # doctest: +SKIP
>>> index.search("fruit", k=1)  # doctest: +SKIP
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

# Two OpenMP threads that spin on shared cores collapse; this must be set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "0.1.0"

if TYPE_CHECKING:
    from nci.config import Config
    from nci.errors import NciError
    from nci.index import Index, build, load
    from nci.records import Document, Hit, Hits

_WHERE = {
    "Config": "nci.config",
    "Document": "nci.records",
    "Hit": "nci.records",
    "Hits": "nci.records",
    "Index": "nci.index",
    "NciError": "nci.errors",
    "build": "nci.index",
    "load": "nci.index",
}
__all__ = ["Config", "Document", "Hit", "Hits", "Index", "NciError", "build", "load"]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    """Public names are imported when first used, so that `import nci` and `nci --help` stay fast."""
    if name not in _WHERE:
        raise AttributeError(f"module 'nci' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_WHERE[name]), name)
