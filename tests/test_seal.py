"""SEAL: the index of n-grams against counting by hand, decoding against a plain beam search, scores against the formula."""

from __future__ import annotations

import itertools
import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import make_documents, make_encoder, make_queries, words
from tokenizers import Tokenizer
from tokenizers.models import BPE, WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import BertPreTokenizer, ByteLevel
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from torch import Tensor

from nci.baselines import ngrams, seal
from nci.baselines.ngrams import Intervals, Ngram, NgramIndex, ngram_weights, score_documents, sort_by_doubling
from nci.baselines.seal import HuggingFaceDecoder, Seal, SealSettings, write_ngrams
from nci.baselines.seal_training import training_pairs
from nci.errors import ConfigError, DataError, IndexCorruptError, IndexNotFoundError, MissingModelError
from nci.records import Document
from nci.runtime import quiet

models: Any = transformers  # its own types are incomplete

VOCABULARY = 4
DOCUMENTS = st.lists(st.lists(st.integers(0, VOCABULARY - 1), max_size=9), min_size=1, max_size=6)
NGRAMS = st.lists(st.integers(0, VOCABULARY), min_size=1, max_size=4)  # one token is in no document


def naive_places(documents: Sequence[Sequence[int]], ngram: Sequence[int]) -> list[tuple[int, int]]:
    """(document, place) of every occurrence."""
    return [
        (number, start)
        for number, row in enumerate(documents)
        for start in range(len(row) - len(ngram) + 1)
        if list(row[start : start + len(ngram)]) == list(ngram)
    ]


@pytest.fixture(params=[1, 3, 1024], ids=["all kept", "some kept", "none kept"])
def kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """From how many occurrences on continuations are kept: both ways to find them must agree."""
    monkeypatch.setattr(ngrams, "_LARGE", request.param)
    return int(request.param)


class TestIndex:
    @given(documents=DOCUMENTS, asked=st.lists(NGRAMS, min_size=1, max_size=8))
    @settings(max_examples=150, deadline=None)
    def test_counts_and_documents_equal_counting_by_hand(
        self, documents: list[list[int]], asked: list[list[int]]
    ) -> None:
        index = NgramIndex.build(documents)
        assert (len(index), index.total) == (len(documents), sum(map(len, documents)))
        for ngram in asked:
            places = naive_places(documents, ngram)
            found = index.find(ngram)
            assert index.count(ngram) == found.counts[0] == len(places)
            assert index.documents(found.low[0], found.high[0]).tolist() == sorted({number for number, _ in places})

    @pytest.mark.usefixtures("kept")
    def test_continuations_equal_counting_by_hand(self) -> None:
        random = np.random.default_rng(0)
        for _ in range(40):
            documents = [random.integers(0, 3, random.integers(0, 12)).tolist() for _ in range(5)]
            index = NgramIndex.build(documents)
            for depth in range(4):
                asked = list(itertools.product(range(3), repeat=depth))
                rows = index.root(len(asked))
                for place in range(depth):
                    rows = index.refine(rows, np.array([ngram[place] for ngram in asked]))
                for _ in range(2):  # the second time from what was kept
                    found = index.continuations(rows)
                    got = list(
                        zip(found.row.tolist(), found.token.tolist(), found.children.counts.tolist(), strict=True)
                    )
                    expected = [
                        (row, token, count)
                        for row, ngram in enumerate(asked)
                        for token in range(3)
                        if (count := len(naive_places(documents, [*ngram, token])))
                    ]
                    assert got == expected
                    assert found.children.depth == depth + 1
                    for row, token, low, high in zip(found.row, found.token, *found.children[:2], strict=True):
                        child = index.refine(rows.take(np.array([row])), int(token))
                        assert (child.low[0], child.high[0]) == (low, high)

    def test_no_ngram_crosses_the_end_of_a_document(self) -> None:
        index = NgramIndex.build([[1, 2], [], [3]])
        assert [index.count(ngram) for ngram in ([1, 2], [2, 3], [2], [-1], [2, -1], [9])] == [1, 0, 1, 0, 0, 0]
        assert not len(index.continuations(index.find([1, 2])).row)

    def test_what_is_kept_has_a_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ngrams, "_LARGE", 1)
        monkeypatch.setattr(ngrams, "_KEPT", 6)
        index = NgramIndex.build([[0, 1, 2, 0, 2, 1, 1, 0]] * 3)
        for first in (0, 1, 2, 0, 1, 2):
            index.continuations(index.find([first]))
            assert sum(len(each[0]) for each in index._large.values()) == index._kept <= 6
        assert index._large

    @given(st.lists(st.integers(0, 3), min_size=1, max_size=40))
    def test_both_sorts_give_the_suffix_array(self, tokens: list[int]) -> None:
        array = np.array(tokens, np.int32)
        expected = sorted(range(len(tokens)), key=lambda start: tokens[start:])
        assert sort_by_doubling(array).tolist() == ngrams.suffix_array(array).tolist() == expected

    def test_works_without_pydivsufsort(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rows = np.random.default_rng(1).integers(0, 70_000, (20, 30)).tolist()
        expected = NgramIndex.build(rows).suffixes
        monkeypatch.setitem(sys.modules, "pydivsufsort", None)
        found = NgramIndex.build(rows).suffixes
        assert found.dtype == np.int32
        assert (found == expected).all()

    def test_saves_and_loads_without_reading_everything(self, tmp_path: Path) -> None:
        index = NgramIndex.build([[5, 6, 7], [6, 7]])
        index.save(tmp_path)
        loaded = NgramIndex.load(tmp_path)
        assert isinstance(loaded.suffixes, np.memmap)
        assert (loaded.count([6, 7]), loaded.count([7, 6]), len(loaded)) == (2, 0, 2)
        np.save(tmp_path / "ends.npy", np.array([3]))
        with pytest.raises(IndexCorruptError, match="build it again"):
            NgramIndex.load(tmp_path)
        (tmp_path / "tokens.npy").unlink()
        with pytest.raises(IndexCorruptError, match=r"tokens\.npy"):
            NgramIndex.load(tmp_path)

    @pytest.mark.parametrize("documents", [[], [[1, -1]]], ids=["no documents", "negative"])
    def test_refuses_what_has_no_ngrams(self, documents: list[list[int]]) -> None:
        with pytest.raises(DataError):
            NgramIndex.build(documents)


def naive_scores(
    documents: Sequence[Sequence[int]], found: Sequence[Ngram], power: float, repetition: float, most: int
) -> dict[int, float]:
    """One document after the other, one n-gram after the other, by the definition."""
    total = sum(map(len, documents))
    weighted = []
    for ngram in found:
        count, p = len(naive_places(documents, ngram.tokens)), math.exp(ngram.log_p)
        ratio = math.log(p * (1 - count / total) / (count / total * (1 - p)))
        if ratio > 0 and count <= most:
            weighted.append((ratio, ngram.tokens))
    weighted.sort(key=lambda pair: -pair[0])
    scores = {}
    for number, row in enumerate(documents):
        taken: set[int] = set()
        brought: set[int] = set()
        score = 0.0
        for weight, tokens in weighted:
            spans = [
                set(range(start, start + len(tokens)))
                for document, start in naive_places(documents, tokens)
                if document == number
            ]
            if not any(span.isdisjoint(taken) for span in spans):
                continue
            new = len(set(tokens) - brought) / len(set(tokens))
            score += weight**power * (1 - repetition + repetition * new)
            taken |= set().union(*spans)
            brought |= set(tokens)
        if score:
            scores[number] = score
        assert taken <= set(range(len(row)))
    return scores


def as_found(index: NgramIndex, tokens: Sequence[int], log_p: float) -> Ngram:
    interval = index.find(tokens)
    return Ngram(tuple(tokens), log_p, int(interval.low[0]), int(interval.high[0]))


class TestScores:
    @given(
        documents=st.lists(st.lists(st.integers(0, 4), min_size=2, max_size=9), min_size=2, max_size=5),
        data=st.data(),
        power=st.sampled_from([1.0, 2.0]),
        repetition=st.sampled_from([0.0, 0.8, 1.0]),
        most=st.sampled_from([2, 100]),
    )
    @settings(max_examples=150, deadline=None)
    def test_equal_the_definition(
        self, documents: list[list[int]], data: st.DataObject, power: float, repetition: float, most: int
    ) -> None:
        index = NgramIndex.build(documents)
        inside = sorted(
            {tuple(row[i:j]) for row in documents for i in range(len(row)) for j in range(i + 1, len(row) + 1)}
        )
        chosen = data.draw(st.lists(st.sampled_from(inside), unique=True, max_size=8))
        # no two weights are equal, or the order of a tie would decide
        found = [as_found(index, tokens, -0.2 - 0.137 * n - 0.01 * n * n) for n, tokens in enumerate(chosen)]
        found = [ngram for ngram in found if ngram.high - ngram.low < index.total]
        rows, scores = score_documents(index, found, power=power, repetition=repetition, max_occurrences=most)
        expected = naive_scores(documents, found, power, repetition, most)
        assert rows.tolist() == sorted(expected)
        assert scores == pytest.approx([expected[row] for row in sorted(expected)])

    def test_weight_is_the_log_of_the_ratio_of_the_odds(self) -> None:
        weights = ngram_weights(np.log([0.5, 0.01, 0.001]), np.array([10, 10, 10]), 1000)
        assert weights == pytest.approx([math.log(0.5 * 0.99 / (0.01 * 0.5)), 0.0, 0.0], abs=1e-12)
        assert np.isfinite(ngram_weights(np.array([0.0, -1e4]), np.array([1, 7]), 7)).all()

    def test_overlap_repetition_and_frequency_by_hand(self) -> None:
        documents = [[1, 2, 3], [1, 2, 9, 2, 3], [2, 8, 8, 8, 8, 8], [7] * 20]
        index = NgramIndex.build(documents)
        strong, weak = as_found(index, [1, 2], -0.1), as_found(index, [2, 3], -0.5)
        w = ngram_weights(np.array([-0.1, -0.5]), np.array([2, 2]), index.total)
        rows, scores = score_documents(index, [weak, strong], power=1, repetition=0.5, max_occurrences=10)
        # in the first document the weak one only occurs across the strong one; in the second its 2 is known already
        assert rows.tolist() == [0, 1]
        assert scores == pytest.approx([w[0], w[0] + w[1] * (1 - 0.5 * 0.5)])
        assert not len(score_documents(index, [weak, strong], power=1, repetition=0.5, max_occurrences=1)[0])

    def test_an_ngram_that_counts_stands_in_the_way_wherever_it_is(self) -> None:
        index = NgramIndex.build([[1, 2, 3, 9, 2, 3], [7] * 20])
        # the second counts at its later place; its earlier one, half under the first, still bars the third
        found = [as_found(index, tokens, log_p) for tokens, log_p in (([1, 2], -0.01), ([2, 3], -0.1), ([3, 9], -1.5))]
        w = ngram_weights(np.array([-0.01, -0.1]), np.array([1, 2]), index.total)
        _, scores = score_documents(index, found, power=1, repetition=0, max_occurrences=10)
        assert scores == pytest.approx([w.sum()])


@dataclass
class Past:
    """What the stand-in remembers: the query and the tokens of each row."""

    rows: list[tuple[str, tuple[int, ...]]]

    def select(self, rows: Tensor) -> Past:
        return Past([self.rows[row] for row in rows.tolist()])


class StandIn:
    """A model whose log-probabilities are a fixed random function of query and prefix; it rules some tokens out."""

    device = "cpu"
    start_piece = 0

    def __init__(self, vocabulary: int = VOCABULARY, *, ruled_out: float = 0.1) -> None:
        self.vocabulary, self.ruled_out = vocabulary, ruled_out

    def start(self, texts: Sequence[str]) -> Past:
        return Past([(text, ()) for text in texts])

    def step(self, state: Past, tokens: Tensor) -> Tensor:
        state.rows = [(text, (*past, token)) for (text, past), token in zip(state.rows, tokens.tolist(), strict=True)]
        return torch.stack([self.next(text, past[1:]) for text, past in state.rows])

    def next(self, text: str, prefix: Sequence[int]) -> Tensor:
        random = np.random.default_rng([*text.encode(), 255, *prefix])
        scores = torch.from_numpy(random.normal(size=self.vocabulary) * 2)
        scores[torch.from_numpy(random.random(self.vocabulary) < self.ruled_out)] = -math.inf
        return scores.log_softmax(-1) if torch.isfinite(scores).any() else scores


def naive_beams(
    model: StandIn, documents: Sequence[Sequence[int]], query: str, beam: int, length: int
) -> dict[tuple[int, ...], float]:
    beams: dict[tuple[int, ...], float] = {(): 0.0}
    everything = {}
    for _ in range(length):
        grown = {
            (*prefix, token): total + float(model.next(query, prefix)[token])
            for prefix, total in beams.items()
            for token in range(model.vocabulary)
            if naive_places(documents, [*prefix, token])
        }
        best = sorted((-total, ngram) for ngram, total in grown.items() if total > -math.inf)[:beam]
        beams = {ngram: -total for total, ngram in best}
        everything.update(beams)
    return everything


class TestDecoding:
    @given(
        documents=DOCUMENTS, queries=st.lists(st.text("ab", max_size=3), min_size=1, max_size=3), beam=st.integers(1, 5)
    )
    @settings(max_examples=120, deadline=None)
    def test_equals_plain_beam_search_and_never_leaves_the_corpus(
        self, documents: list[list[int]], queries: list[str], beam: int
    ) -> None:
        model, index = StandIn(), NgramIndex.build(documents)
        found = write_ngrams(model, index, queries, beam=beam, length=4)
        assert len(found) == len(queries)
        for query, own in zip(queries, found, strict=True):
            for ngram in own:
                assert ngram.high - ngram.low == len(naive_places(documents, ngram.tokens)) > 0
            expected = naive_beams(model, documents, query, beam, 4)
            assert {ngram.tokens for ngram in own} == set(expected)
            assert len(own) == len(expected)
            assert [ngram.log_p for ngram in own] == pytest.approx([expected[ngram.tokens] for ngram in own])

    def test_ties_go_to_the_first(self) -> None:
        model = StandIn()
        model.next = lambda text, prefix: torch.full((VOCABULARY,), -1.0)  # type: ignore[method-assign]
        (found,) = write_ngrams(model, NgramIndex.build([[3, 2, 1, 0]]), ["q"], beam=2, length=1)
        assert [ngram.tokens for ngram in found] == [(0,), (1,)]

    def test_an_index_without_tokens_and_no_queries(self) -> None:
        assert write_ngrams(StandIn(), NgramIndex.build([[], []]), ["q"], beam=2, length=3) == [[]]


def word_tokenizer() -> Any:
    """Whole words and the mark, with the end that T5 puts behind a text."""
    vocabulary = {word: n for n, word in enumerate(["<pad>", "</s>", "<unk>", "|", *words()[4:]])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = Lowercase()
    tokenizer.pre_tokenizer = BertPreTokenizer()
    tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return models.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=64
    )


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random T5 and its tokenizer as a folder."""
    path = tmp_path_factory.mktemp("t5")
    tokenizer = word_tokenizer()
    torch.manual_seed(0)
    config = models.T5Config(
        vocab_size=len(tokenizer), d_model=32, d_ff=64, d_kv=16, num_heads=2, num_layers=1, decoder_start_token_id=0
    )
    model = models.T5ForConditionalGeneration(config)
    with quiet(), torch.no_grad():
        model.lm_head.weight.mul_(20)  # far from uniform, or every n-gram would be as likely as the next
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
    return path


class TestHuggingFace:
    def test_steps_equal_whole_forward_passes(self, t5: Path) -> None:
        decoder = HuggingFaceDecoder.load(t5)
        state = decoder.start(["apple pear", "court judge verdict appeal"])
        sources = torch.tensor([0, 1])
        prefixes = torch.full((2, 1), decoder.start_piece)
        random = torch.Generator().manual_seed(1)
        for rows in ([1, 0, 1], [2, 2, 1, 0], [3]):
            got = decoder.step(state, prefixes[:, -1])
            read = decoder.tokenizer(["apple pear", "court judge verdict appeal"], padding=True, return_tensors="pt")
            with torch.no_grad():
                whole = decoder.model(
                    input_ids=read["input_ids"][sources],
                    attention_mask=read["attention_mask"][sources],
                    decoder_input_ids=prefixes,
                ).logits[:, -1]
            torch.testing.assert_close(got, whole.log_softmax(-1), atol=1e-4, rtol=1e-4)
            chosen = torch.tensor(rows)
            state = state.select(chosen)
            new = torch.randint(4, 20, (len(rows), 1), generator=random)
            sources, prefixes = sources[chosen], torch.cat([prefixes[chosen], new], dim=1)

    def test_a_folder_without_such_a_model(self, tmp_path: Path) -> None:
        with pytest.raises(MissingModelError):
            HuggingFaceDecoder.load(make_encoder(tmp_path))

    def test_writes_ngrams_of_the_corpus(self, t5: Path) -> None:
        documents = make_documents()
        decoder = HuggingFaceDecoder.load(t5)
        system = Seal(documents, decoder, decoder.tokenizer, settings=SealSettings(beam=6, length=5))
        rows = decoder.tokenizer([seal.content(each) for each in documents], add_special_tokens=False)["input_ids"]
        queries = ["apple", "the court of item3", ""]
        for own in system.ngrams(queries):
            assert {len(ngram.tokens) for ngram in own} == {1, 2, 3, 4, 5}
            for ngram in own:
                assert len(naive_places(rows, ngram.tokens)) == ngram.high - ngram.low > 0


class TestTargets:
    def pairs(self, documents: list[Document], queries: list[tuple[str, str]], **changes: Any) -> list[tuple[str, str]]:
        chosen = SealSettings(**{"length": 4, "spans": 5, "unsupervised": 2, "source_words": 6, **changes})
        tokenizer = word_tokenizer()
        index = seal.index_documents(documents, tokenizer, chosen.max_tokens)
        return training_pairs(documents, queries, tokenizer, index, chosen)

    def test_targets_are_ngrams_of_the_right_document(self) -> None:
        documents = make_documents(12)
        queries = make_queries(documents, seed=1)
        tokenizer = word_tokenizer()
        found = self.pairs(documents, queries)
        assert len(found) == 12 * (1 + 5 + 2)
        asked: dict[str, set[str]] = {}
        for query, doc_id in queries:
            asked.setdefault(query, set()).add(doc_id)
        for source, target in found:
            ids = tokenizer(target, add_special_tokens=False)["input_ids"]
            assert 1 <= len(ids) <= 4
            holders = {
                each.doc_id
                for each in documents
                if naive_places([tokenizer(seal.content(each), add_special_tokens=False)["input_ids"]], ids)
            }
            wanted = asked.get(source) or {each.doc_id for each in documents if source in each.text}
            assert holders & wanted
        titles = Counter(target.strip() for _, target in found if target.startswith(" |"))
        assert all(titles[f"| {each.title} |"] >= 2 for each in documents)  # for its query and for a part of it

    def test_likely_targets_share_rare_words_with_the_query(self) -> None:
        # `apple` is everywhere, `item7` is rare
        text = " ".join(["apple"] * 30 + ["item7"] + ["plum"] * 30)
        documents = [Document("a", text), Document("b", "apple " * 40)]
        queries = [("apple item7", "a")]

        def share(word: str, **changes: Any) -> float:
            targets = [t for _, t in self.pairs(documents, queries, spans=200, unsupervised=0, **changes)]
            return sum(word in target for target in targets) / len(targets)

        assert share("item7", temperature=0.02) > 0.95
        assert share("item7", temperature=100.0) < 0.2  # 4 of 61 starts

    def test_tokenizers_that_hear_blanks(self) -> None:
        # as BART's: a word after a blank is another token than the same word at the start of a text
        bytes_ = Tokenizer(BPE(unk_token=None))
        bytes_.pre_tokenizer = ByteLevel(add_prefix_space=False)
        documents = make_documents(8)
        trainer = BpeTrainer(vocab_size=400, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
        bytes_.train_from_iterator([seal.content(each) for each in documents], trainer)
        tokenizer = models.PreTrainedTokenizerFast(tokenizer_object=bytes_, pad_token="<pad>")
        chosen = SealSettings(length=5, spans=5, unsupervised=2)
        index = seal.index_documents(documents, tokenizer, None)
        found = training_pairs(documents, make_queries(documents, seed=1), tokenizer, index, chosen)
        for _, target in found:
            assert index.count(tokenizer(target, add_special_tokens=False)["input_ids"]) > 0

    def test_the_seed_decides(self) -> None:
        documents = make_documents(6)
        queries = make_queries(documents, seed=1)
        assert self.pairs(documents, queries) == self.pairs(documents, queries)
        for part in ({"unsupervised": 0}, {"spans": 1, "length": 40}):  # of the latter, only parts of documents vary
            assert self.pairs(documents, queries, **part) != self.pairs(documents, queries, **part, seed=1)

    def test_only_what_is_indexed_is_asked_for(self) -> None:
        documents = [Document("a", "apple pear plum cherry")]
        found = self.pairs(documents, [("plum", "a")], max_tokens=2, spans=50)
        assert {target for _, target in found} <= {" apple pear", " pear"}
        assert seal.index_documents(documents * 2, word_tokenizer(), 2).total == 4

    def test_empty_documents_and_unknown_ones(self) -> None:
        documents = [Document("a", ""), Document("b", "", "apple")]
        assert self.pairs(documents, [("x", "a")]) == []
        with pytest.raises(DataError, match='"c"'):
            self.pairs(documents, [("x", "c")])


class Fixed(StandIn):
    """Likes the tokens of the query, whatever came before."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(len(tokenizer))
        self.tokenizer = tokenizer

    def next(self, text: str, prefix: Sequence[int]) -> Tensor:
        scores = torch.zeros(self.vocabulary)
        scores[self.tokenizer(text, add_special_tokens=False)["input_ids"]] = 6.0
        return scores.log_softmax(-1)


class TestSearch:
    def system(self, documents: list[Document], **changes: Any) -> Seal:
        tokenizer = word_tokenizer()
        return Seal(documents, Fixed(tokenizer), tokenizer, settings=SealSettings(beam=4, length=3, **changes))

    def test_finds_the_document_that_says_it(self) -> None:
        documents = make_documents()
        system = self.system(documents, queries_at_once=2)
        queries = [document.title for document in documents[:5]]
        found = system.search(queries, k=3)
        assert [hits[0].doc_id for hits in found] == [document.doc_id for document in documents[:5]]
        assert found == [system.search(query, k=3) for query in queries]
        for hits in found:
            assert [hit.rank for hit in hits] == [1, 2, 3]
            assert {hit.source for hit in hits} == {"seal"}
            assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
        assert system.search([]) == []

    def test_ties_in_the_order_of_doc_ids(self) -> None:
        documents = [Document(name, "apple pear") for name in "cab"] + [Document("d", "plum " * 9)]
        assert [hit.doc_id for hit in self.system(documents).search("apple", k=2)] == ["a", "b"]

    def test_a_mark_alone_finds_nothing(self) -> None:
        documents = [Document("a", "plum " * 9, "apple"), Document("b", "pear " * 9)]
        system = self.system(documents)
        mark = word_tokenizer().convert_tokens_to_ids("|")
        silence = torch.full((len(word_tokenizer()),), -math.inf)
        only_mark = silence.index_fill(0, torch.tensor([mark]), -0.01)
        system._decoder.next = lambda text, prefix: silence if prefix else only_mark  # type: ignore[attr-defined]
        ((ngram,),) = system.ngrams(["|"])
        assert ngram.tokens == (mark,)
        assert system.search("|") == []

    def test_bad_requests(self) -> None:
        system = self.system(make_documents(3))
        with pytest.raises(ConfigError, match="-k"):
            system.search("apple", k=0)
        with pytest.raises(DataError, match="of 3 documents, not of 2"):
            Seal(make_documents(2), system._decoder, word_tokenizer(), index=system.index)

    @pytest.mark.parametrize(
        "wrong",
        [
            {"beam": 0},
            {"length": 0},
            {"power": 0.0},
            {"repetition": 1.5},
            {"max_tokens": 0},
            {"epochs": 0},
            {"spans": 0},
        ],
        ids=str,
    )
    def test_settings_name_the_flag(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=f"--seal.{next(iter(wrong))}"):
            SealSettings(**wrong)


class TestTraining:
    @pytest.mark.slow
    def test_small_model_from_an_encoder(self, encoder: Path, tmp_path: Path) -> None:
        documents = make_documents(12)
        queries = make_queries(documents, seed=2, each=2)
        chosen = SealSettings(encoder=str(encoder), length=4, spans=4, epochs=12, batch_size=16, beam=8)
        system = Seal.train(documents, queries, out=tmp_path / "a", settings=chosen)
        asked = [query for query, _ in queries]
        start = torch.tensor([system._decoder.start_piece])
        first = system._decoder.step(system._decoder.start(asked[:1]), start)[0]
        assert torch.isfinite(first[4:]).all()  # every word has a chance, also those in no target
        found = system.search(asked, k=12)
        right = sum(bool(hits) and hits[0].doc_id == doc_id for hits, (_, doc_id) in zip(found, queries, strict=True))
        assert right / len(queries) > 0.5  # by chance 1 in 12; a third of the queries do not name their document
        assert Seal.load(tmp_path / "a", documents).search(asked, k=12) == found
        with pytest.raises(DataError, match="other documents"):
            Seal.load(tmp_path / "a", [replace(documents[0], text="new"), *documents[1:]])
        (tmp_path / "a" / "COMPLETE").unlink()
        with pytest.raises(IndexNotFoundError):
            Seal.load(tmp_path / "a", documents)
        again = Seal.train(documents, queries, out=tmp_path / "a", settings=chosen)
        assert again.search(asked, k=12) == found

    @pytest.mark.slow
    def test_a_model_by_folder(self, t5: Path, tmp_path: Path) -> None:
        documents = make_documents(6)
        queries = make_queries(documents, seed=2, each=2)
        chosen = SealSettings(model=str(t5), length=4, spans=4, batch_size=8, beam=6, learning_rate=3e-3)
        asked = [query for query, _ in queries]
        as_it_is = Seal.train(documents, [], out=tmp_path / "a", settings=replace(chosen, epochs=0))
        decoder = HuggingFaceDecoder.load(t5)
        assert as_it_is.ngrams(asked) == Seal(documents, decoder, decoder.tokenizer, settings=chosen).ngrams(asked)
        trained = Seal.train(documents, queries, out=tmp_path / "b", settings=replace(chosen, epochs=8))

        def likely(system: Seal) -> float:
            return float(np.mean([max(ngram.log_p for ngram in own) for own in system.ngrams(asked)]))

        assert likely(trained) > likely(as_it_is)
        assert trained.search(asked) == Seal.load(tmp_path / "b", documents).search(asked)


def test_intervals_take_keeps_the_order() -> None:
    rows = Intervals(np.array([1, 2, 3]), np.array([4, 6, 8]), 2)
    assert rows.take(np.array([2, 0])).counts.tolist() == [5, 3]
