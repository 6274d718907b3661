"""Long texts -> what follows their opening, in windows of as much as an encoder reads at once, each under the text's heading.

An encoder reads the opening of a document only. The windows behind it are compared with queries piece by piece, too
(`nci.pieces`, `nci.search.late`). Knows nothing of vectors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nci.encoders import TextEncoder

CHARS_PER_PIECE = 16  # English has 4 to 5: as much text as can matter is tokenised, not a whole book
_HEADING = 1 / 4  # of a window at most: a longer first line is no heading


def further_windows(texts: Sequence[str], encoder: TextEncoder, most: int) -> list[list[str]]:
    """At most `most` windows of each text behind what the encoder reads of it; none where it reads all.

    A text's first line, be it a title, stands before each of its windows. An encoder whose tokenizer cannot say where its
    pieces stand in a text gives none.
    """
    room = room_for_text(encoder, encoder.max_length)
    if most < 1 or room < 1 or not encoder.tokenizer.is_fast:
        return [[] for _ in texts]
    return [list(_windows(text, encoder, room, most)) for text in texts]


def room_for_text(encoder: TextEncoder, length: int) -> int:
    """Word pieces of a text beside the encoder's prompt and special tokens: an empty text keeps these only."""
    return length - len(encoder.tokenize([encoder.prompt("document")])[0])


def places_of_pieces(encoder: TextEncoder, text: str, most: int) -> list[tuple[int, int]]:
    """Where each word piece of a text stands in it; at least `most` of them, where there are as many."""
    # not verbose: it would warn of a text that is longer than the model, which is why it is cut here
    text = text[: most * CHARS_PER_PIECE]
    found = encoder.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return list(found["offset_mapping"])


def _windows(text: str, encoder: TextEncoder, room: int, most: int) -> Iterator[str]:
    places, end = places_of_pieces(encoder, text, (most + 1) * room), text.find("\n")
    heading = sum(1 for start, _ in places if start <= end)  # its newline may be a piece, too
    if heading > _HEADING * room:
        heading = 0
    above = text[: end + 1] if heading else ""
    for start in range(room, len(places), room - heading)[:most]:
        inside = places[start : start + room - heading]
        yield above + text[inside[0][0] : inside[-1][1]]
