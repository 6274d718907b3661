"""Hugging Face `generate` held to the tree, to compare with: texts in, semantic ids out.

A T5 of the same size with random weights, the id tokens appended to its vocabulary, beam search by the library with its
key-value cache, and `prefix_allowed_tokens_fn` over nested dictionaries: what one gets without writing a search. Its
encoder has the decoder's heads, since one configuration serves both. bf16 on a GPU, float32 on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, GenerationConfig, T5ForConditionalGeneration

from nci.bench.shapes import WORD_PIECES, HashTokenizer, Shape, id_values, nested_dicts, walk
from nci.errors import ConfigError
from nci.records import SemanticId
from nci.trie import Trie

START, END, FIRST = WORD_PIECES, WORD_PIECES + 1, WORD_PIECES + 2  # behind the tokens of texts
_PADDING = 0


class HfGenerate:
    """The system "hf-generate".

    Args:
        trie: All semantic ids.
        shape: Size of the network; the adapter has no counterpart here.
        beam: Prefixes kept per query.
        device: Where the network runs.
        length: Tokens per query.
        seed: Of the random weights.
    """

    name = "hf-generate"

    def __init__(
        self, trie: Trie, shape: Shape, *, beam: int, device: str = "cpu", length: int = 32, seed: int = 0
    ) -> None:
        if beam < 2:
            raise ConfigError(f"--beam is at least 2 for hf-generate, since one beam is no beam search; not {beam}")
        self.beam, self.device, self.positions = beam, device, trie.positions
        self.values = id_values(trie)
        self.tokenizer = HashTokenizer(WORD_PIECES, length)
        self.root = nested_dicts(trie, values=self.values, first=FIRST, end=END)
        config = shape.t5(
            FIRST + self.positions * self.values,
            decoder_start_token_id=START,
            eos_token_id=END,
            pad_token_id=_PADDING,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = T5ForConditionalGeneration(config)
        dtype = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
        self.model = model.to(device, dtype).eval()

    @torch.inference_mode()
    def search(self, texts: list[str], k: int) -> list[list[SemanticId]]:
        """The best k ids of each text; at most as many as the beam is wide, fewer where it found fewer."""
        input_ids, mask = (tensor.to(self.device) for tensor in self.tokenizer(texts))
        returned = min(k, self.beam)
        settings = GenerationConfig(
            num_beams=self.beam,
            num_return_sequences=returned,
            max_new_tokens=self.positions + 1,  # the end token is one
            do_sample=False,
            early_stopping=True,
            decoder_start_token_id=START,
            eos_token_id=END,
            pad_token_id=_PADDING,
        )
        found = self.model.generate(
            input_ids=input_ids,
            attention_mask=mask,
            generation_config=settings,
            prefix_allowed_tokens_fn=self._allowed,
            # The library makes a cache of as many layers as the encoder has, too few for a deeper decoder.
            past_key_values=EncoderDecoderCache(DynamicCache(), DynamicCache()),
        )
        ids = [self._semantic_id(tokens) for tokens in found.tolist()]
        groups = [ids[i : i + returned] for i in range(0, len(ids), returned)]
        return [list(dict.fromkeys(each for each in group if each is not None)) for group in groups]

    def _allowed(self, _: int, tokens: Tensor) -> list[Any]:
        """Tokens that may follow a prefix; a path that is none, which fills a beam wider than the tree, can only end."""
        node = walk(self.root, tokens.tolist()[1:])
        return list(node) if node else [END]

    def _semantic_id(self, tokens: list[int]) -> SemanticId | None:
        """The id behind a returned sequence, or None where it is no whole path of the tree."""
        path = tokens[1 : tokens.index(END)] if END in tokens else tokens[1:]
        node = walk(self.root, path)
        return tuple((token - FIRST) % self.values for token in path) if node and END in node else None
