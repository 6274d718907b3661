"""Documents as a dual encoder reads them: one passage each, or several of which the best counts.

What is done with passages and pairs is `nci.contrastive`. Knows nothing of weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from nci.baselines.settings import DualSettings
from nci.contrastive_data import Passages, Tokens
from nci.encoders import TextEncoder
from nci.errors import ConfigError
from nci.records import Document
from nci.windows import places_of_pieces, room_for_text


def cut_passages(documents: Sequence[Document], encoder: TextEncoder, settings: DualSettings) -> Passages:
    """At least one passage of every document."""
    prompt, between = encoder.prompt("document"), encoder.tokenizer.sep_token or "\n"
    if settings.passage == "firstp":
        texts = [f"{each.title} {between} {each.text}" if each.title else each.text for each in documents]
        tokens = encoder.tokenize([prompt + text for text in texts], settings.max_length)
        return Passages(Tokens.of(tokens), np.arange(len(documents) + 1))
    room = room_for_text(encoder, min(settings.max_length, encoder.max_length))
    if room < 1:
        raise ConfigError(f"max_length {settings.max_length} leaves no room beside the encoder's own tokens")
    texts, counts = [], []
    for each in documents:
        spans = list(_spans(each.text or each.title, encoder, room, settings.max_passages))
        texts += [prompt + span for span in spans]
        counts.append(len(spans))
    tokens = encoder.tokenize(texts, settings.max_length)
    return Passages(Tokens.of(tokens), np.concatenate([[0], np.cumsum(counts)]))


def _spans(text: str, encoder: TextEncoder, room: int, most: int) -> Iterator[str]:
    (pieces,) = places_of_pieces(encoder, [text], most * room)
    for start in range(0, min(len(pieces), most * room), room):
        inside = pieces[start : start + room]
        yield text[inside[0][0] : inside[-1][1]]
    if not pieces:
        yield text
