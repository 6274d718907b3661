"""Long texts -> what follows their opening, in windows of as much as an encoder reads at once, each under the text's heading.

An encoder reads the opening of a document only. The windows behind it are compared with queries piece by piece, too
(`nci.pieces`, `nci.search.late`). Knows nothing of vectors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nci.encoders import CHARS_PER_PIECE, TextEncoder

_HEADING = 1 / 4  # of a window at most: a longer first line is no heading


def further_windows(texts: Sequence[str], encoder: TextEncoder, most: int) -> list[list[str]]:
    """At most `most` windows of each text behind what the encoder reads of it; none where it reads all.

    A text's first line, be it a title, stands before each of its windows. An encoder whose tokenizer cannot say where its
    pieces stand in a text gives none.
    """
    out: list[list[str]] = [[] for _ in texts]
    room = room_for_text(encoder, encoder.max_length)
    if most < 1 or room < 1 or not encoder.tokenizer.is_fast:
        return out
    longer = [i for i, text in enumerate(texts) if len(text) > room]  # a piece has a character at least
    every = places_of_pieces(encoder, [texts[i] for i in longer], (most + 1) * room)
    for i, places in zip(longer, every, strict=True):
        out[i] = list(_windows(texts[i], places, room, most))
    return out


def room_for_text(encoder: TextEncoder, length: int) -> int:
    """Word pieces of a text beside the encoder's prompt and special tokens: an empty text keeps these only."""
    return length - len(encoder.tokenize([encoder.prompt("document")])[0])


def places_of_pieces(encoder: TextEncoder, texts: Sequence[str], most: int) -> list[list[tuple[int, int]]]:
    """Where each word piece of each text stands in it: about the first `most`, not to tokenise whole books."""
    if not texts:
        return []
    cut = [text[: most * CHARS_PER_PIECE] for text in texts]
    # not verbose: it would warn of a text that is longer than the model, which is why it is cut here
    found = encoder.tokenizer(cut, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return [list(places) for places in found["offset_mapping"]]


def _windows(text: str, places: list[tuple[int, int]], room: int, most: int) -> Iterator[str]:
    end = text.find("\n")
    heading = sum(1 for start, _ in places[:room] if start <= end)  # its newline may be a piece, too
    if heading > _HEADING * room:
        heading = 0
    above = text[: end + 1] if heading else ""
    for start in range(room, len(places), room - heading)[:most]:
        inside = places[start : start + room - heading]
        yield above + text[inside[0][0] : inside[-1][1]]
