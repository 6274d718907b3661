"""Long texts -> what follows their opening, in windows of as much as an encoder reads at once, each under the text's heading.

An encoder reads the opening of a document only. Word pieces of the windows behind it are compared with queries, too
(`nci.pieces`, `nci.search.late`). Knows nothing of vectors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nci.encoders import TextEncoder

_CHARS_PER_PIECE = 16  # English has 4 to 5: as much text as can matter is tokenised, not a whole book
_HEADING = 1 / 4  # of a window at most: a longer first line is no heading


def further_windows(texts: Sequence[str], encoder: TextEncoder, most: int) -> list[list[str]]:
    """At most `most` windows of each text behind what the encoder reads of it; none where it reads all.

    A text's first line, be it a title, stands before each of its windows. An encoder whose tokenizer cannot say where its
    pieces stand in a text gives none.
    """
    prompt = encoder.prompt("document")
    # an empty text keeps prompt and special tokens only: what they leave is the room for the text
    room = encoder.max_length - len(encoder.tokenize([prompt])[0])
    if most < 1 or room < 1 or not texts or not encoder.tokenizer.is_fast:
        return [[] for _ in texts]
    cut = [text[: (most + 1) * room * _CHARS_PER_PIECE] for text in texts]
    return [list(_windows(text, *_places(encoder, text), room, most)) for text in cut]


def _places(encoder: TextEncoder, text: str) -> tuple[list[tuple[int, int]], int]:
    """Where each piece of a text stands in it, and how many pieces its first line has."""
    # not verbose: it would warn of a text that is longer than the model, which is why it is cut here
    found = encoder.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    places = list(found["offset_mapping"])
    end = text.find("\n")
    return places, sum(1 for start, _ in places if start < end)


def _windows(text: str, places: list[tuple[int, int]], heading: int, room: int, most: int) -> Iterator[str]:
    heading = heading if heading <= _HEADING * room else 0
    above = text[: places[heading - 1][1]] + "\n" if heading else ""
    starts = range(room, len(places), room - heading)
    for start in starts[:most]:
        inside = places[start : start + room - heading]
        yield above + text[inside[0][0] : inside[-1][1]]
