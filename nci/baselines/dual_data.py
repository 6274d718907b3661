"""Documents as a dual encoder reads them: one passage each, or several of which the best counts.

What is done with passages and pairs is `nci.contrastive`. Knows nothing of weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from nci.contrastive_data import ContrastSettings, Passages, Tokens
from nci.errors import ConfigError
from nci.records import Document

if TYPE_CHECKING:
    from nci.encoders import TextEncoder

_CHARS_PER_PIECE = 16  # English has 4 to 5: as much text as can matter is tokenised, not a whole book


@dataclass(frozen=True)
class DualSettings(ContrastSettings):
    """How a dual encoder is trained. With `refreshes=0` it is DPR, with more it is ANCE.

    Args:
        encoder: "minilm", a folder or a Hub name; the folder of a trained one goes on from there (with epochs 0).
        epochs: Passes over the pairs with the other documents of the batch as negatives.
        refreshes: How often hard negatives are mined afterwards, each time with the newest weights.
        refresh_epochs: Passes over the pairs after each mining.
        negatives: Hard negatives per query, drawn anew in each pass.
        depth: They are drawn from the best so many passages of documents that are not relevant.
        batch_size: Pairs per step.
        lr: Highest learning rate of each round.
        warmup: Share of a round's steps in which the learning rate rises; it falls to zero over the rest.
        temperature: Divides the cosines in the softmax.
        passage: firstp reads the start of "title [SEP] text", maxp the text in passages, of which the best one counts.
        max_length: Word pieces per passage.
        max_passages: Passages per document with maxp; what comes after them is not read.
        query_length: Word pieces per query.
        seed: Same seed, same weights on a CPU.
        precision: auto trains in bf16 where the device has it; weights and vectors are float32 in any case.
    """

    encoder: str = "minilm"
    passage: Literal["firstp", "maxp"] = "firstp"
    max_length: int = 256
    max_passages: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.passage not in ("firstp", "maxp"):
            raise ConfigError(f"passage is one of firstp, maxp; not {self.passage!r}")
        for name in ("max_length", "max_passages"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is at least 1, not {getattr(self, name)}")

    @property
    def name(self) -> str:
        """The method these settings amount to."""
        return "ance" if self.refreshes else "dpr"


def cut_passages(documents: Sequence[Document], encoder: TextEncoder, settings: DualSettings) -> Passages:
    """At least one passage of every document."""
    prompt, between = encoder.prompt("document"), encoder.tokenizer.sep_token or "\n"
    if settings.passage == "firstp":
        texts = [f"{each.title} {between} {each.text}" if each.title else each.text for each in documents]
        tokens = encoder.tokenize([prompt + text for text in texts], settings.max_length)
        return Passages(Tokens.of(tokens), np.arange(len(documents) + 1))
    # An empty text keeps prompt and special tokens only: what they leave is the room for the passage.
    room = min(settings.max_length, encoder.max_length) - len(encoder.tokenize([prompt])[0])
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
    text = text[: most * room * _CHARS_PER_PIECE]
    # not verbose: it would warn of a text that is longer than the model, which is why it is cut here
    found = encoder.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    pieces = found["offset_mapping"]
    for start in range(0, min(len(pieces), most * room), room):
        inside = pieces[start : start + room]
        yield text[inside[0][0] : inside[-1][1]]
    if not pieces:
        yield text
