"""Texts -> the words that BM25 counts: lower case, stop words out, stems. Needs PyStemmer alone and knows no documents."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, Protocol

from nci.errors import ConfigError, MissingPackageError

_WORD = re.compile(r"(?u)\b\w\w+\b")
_SIGNS = "\u30a0\u30fb\u0e3f"  # of the same blocks, but no letters
UNSPACED = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\u0e00-\u0e7f"
"""Blocks of Chinese, Japanese, Korean and Thai, where blanks do not part words, or rarely: each character stands for one."""
_RUN = re.compile(rf"(?u)(?![{_SIGNS}])[{UNSPACED}]|[^\W_{UNSPACED}]+")
# Lucene's list, which bm25s uses for English too: kept here so that an index reads the same whatever bm25s does later.
# fmt: off
_STOPWORDS = frozenset({
    "a", "an", "and", "are", "as", "at", "be", "but", "by", "for", "if", "in", "into", "is", "it", "no", "not",
    "of", "on", "or", "such", "that", "the", "their", "then", "there", "these", "they", "this", "to", "was",
    "will", "with",
})
# fmt: on


class _Stemmer(Protocol):
    def stemWords(self, words: list[str]) -> list[str]: ...


@dataclass(frozen=True)
class Analyser:
    """How a text becomes words: lower case, stop words out, stems.

    Args:
        stemmer: A Snowball algorithm by name ("english", "german", ...), or None to keep words as they are.
        stopwords: "en" for the 33 English stop words of Lucene, or None to keep them all.
        runs: Every run of letters and digits is a word, be it one letter: snake_case is two; in Chinese, Japanese, Korean
            and Thai every character is one. Else as bm25s has it.

    >>> Analyser(runs=True).words(["{{castle_name}} -v 5", "東京塔"]), Analyser().words(["{{castle_name}} -v 5", "東京塔"])
    ([['castl', 'name', 'v', '5'], ['東', '京', '塔']], [['castle_nam'], ['東京塔']])
    """

    stemmer: str | None = "english"
    stopwords: Literal["en"] | None = "en"
    runs: bool = False

    def __post_init__(self) -> None:
        if self.stopwords not in ("en", None):
            raise ConfigError(f'stopwords is "en" or None, not {self.stopwords!r}')
        self._stemmer()

    def _stemmer(self) -> _Stemmer | None:
        if self.stemmer is None:
            return None
        try:
            import Stemmer  # type: ignore[import-not-found]
        except ImportError as error:
            raise MissingPackageError("stemming needs PyStemmer: pip install PyStemmer") from error
        try:
            stemmer: _Stemmer = Stemmer.Stemmer(self.stemmer)
        except KeyError as error:
            known = ", ".join(Stemmer.algorithms())
            raise ConfigError(f"stemmer is None or one of {known}; not {self.stemmer!r}") from error
        return stemmer

    def words(self, texts: Sequence[str]) -> list[list[str]]:
        """The words of each text, in order, repeated as often as they occur."""
        stopwords = _STOPWORDS if self.stopwords else frozenset[str]()
        # A stemmer object is not safe to share between threads, and a new one costs a microsecond.
        stemmer = self._stemmer()
        find = (_RUN if self.runs else _WORD).findall
        split = [[word for word in find(text.lower()) if word not in stopwords] for text in texts]
        if stemmer is None:
            return split
        different = list(set(chain.from_iterable(split)))
        stems = dict(zip(different, stemmer.stemWords(different), strict=True))
        return [[stems[word] for word in words] for words in split]
