"""Small things that tests of whole stages need: an encoder folder, a BEIR folder, settings; random but seeded."""

from __future__ import annotations

import csv
import dataclasses
import gc
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing

import nci
from nci.assembly import Assembly
from nci.batches import PlanDataset
from nci.config import Config
from nci.encoders import TextEncoder
from nci.expansion import OwnScores, appended_queries, expanded_scores
from nci.lexical import LexicalScores
from nci.model import NCIModel
from nci.pairs import BatchPlan, make_pairs, write_plan
from nci.records import Document
from nci.runtime import quiet
from nci.tree import build_tree
from nci.trie import Trie

models: Any = transformers  # its own types are incomplete

TOPICS = {
    "fruit": ["apple", "pear", "plum", "cherry", "orchard", "juice", "ripe", "peel"],
    "sea": ["wave", "ship", "harbour", "sailor", "tide", "anchor", "storm", "island"],
    "music": ["violin", "song", "choir", "drum", "melody", "tune", "concert", "rhythm"],
    "space": ["rocket", "planet", "orbit", "comet", "telescope", "moon", "star", "launch"],
    "kitchen": ["oven", "bread", "flour", "knife", "recipe", "soup", "salt", "butter"],
    "law": ["court", "judge", "verdict", "appeal", "statute", "witness", "jury", "trial"],
}
# Every training ends with a full collection, which takes longer than the training where it walks over torch itself.
gc.collect()
gc.freeze()

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
PER_TOPIC = 10
WIDTH = 32


def name_of(number: int) -> str:
    """A word that only one document has."""
    return f"item{number}"


def words() -> list[str]:
    names = [name_of(number) for number in range(PER_TOPIC * len(TOPICS))]
    return [*SPECIAL, *(word for topic in TOPICS.values() for word in topic), *TOPICS, *names, "the", "of", "and"]


def make_tokenizer(*, max_length: int = 64) -> Any:
    vocabulary = {word: number for number, word in enumerate(words())}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = Lowercase()
    tokenizer.pre_tokenizer = BertPreTokenizer()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])]
    )
    return models.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", model_max_length=max_length
    )


def make_encoder(folder: Path, *, seed: int = 0, positions: int = 64, kind: str = "bert", layers: int = 1) -> Path:
    """A Hugging Face folder with a random encoder; its vectors of texts with common words are similar."""
    torch.manual_seed(seed)
    vocabulary = len(words())
    if kind == "bert":
        config = models.BertConfig(
            vocab_size=vocabulary,
            hidden_size=WIDTH,
            num_hidden_layers=layers,
            num_attention_heads=2,
            intermediate_size=WIDTH,
            max_position_embeddings=positions,
            initializer_range=0.2,
        )
        model = models.BertModel(config)
        with torch.no_grad():  # places say little beside words, or texts with common words would not be similar
            model.embeddings.position_embeddings.weight.mul_(0.05)
    elif kind == "mpnet":
        config = models.MPNetConfig(
            vocab_size=vocabulary,
            hidden_size=WIDTH,
            num_hidden_layers=layers,
            num_attention_heads=2,
            intermediate_size=WIDTH,
            max_position_embeddings=positions + 2,
            initializer_range=0.2,
        )
        model = models.MPNetModel(config)
        with torch.no_grad():
            model.embeddings.position_embeddings.weight.mul_(0.05)
    else:
        config = models.T5Config(
            vocab_size=vocabulary, d_model=WIDTH, d_ff=WIDTH, d_kv=16, num_heads=2, num_layers=layers, pad_token_id=0
        )
        model = models.T5EncoderModel(config)
    with quiet():
        model.save_pretrained(folder)
        make_tokenizer(max_length=positions).save_pretrained(folder)
    return folder


def make_t5(folder: Path) -> Path:
    """A random T5 that writes; its logits differ enough that top-k means something."""
    torch.manual_seed(0)
    config = models.T5Config(
        vocab_size=len(words()), d_model=32, d_ff=32, d_kv=16, num_heads=2, num_layers=1, num_decoder_layers=1,
        pad_token_id=0, eos_token_id=3, decoder_start_token_id=0, dropout_rate=0.0, tie_word_embeddings=False,
    )  # fmt: skip
    tokenizer = make_tokenizer()
    tokenizer.eos_token = "[SEP]"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A [SEP]", special_tokens=[("[SEP]", 3)])
    model = models.T5ForConditionalGeneration(config)
    model.generation_config.suppress_tokens = [0, 1, 2]  # a trained model would not say these
    with torch.no_grad():
        model.lm_head.weight.normal_(std=0.4)
    with quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def make_documents(count: int | None = None) -> list[Document]:
    """Documents of six topics in turn, each with a name of its own."""
    random_words = random.Random(1)
    names = list(TOPICS)
    out = []
    for number in range(count or PER_TOPIC * len(TOPICS)):
        topic = names[number % len(names)]
        text = " ".join(random_words.choices(TOPICS[topic], k=20))
        out.append(Document(f"d{number}", f"{text} {name_of(number)}", f"{topic} {name_of(number)}"))
    return out


def make_queries(documents: Iterable[Document], *, seed: int, each: int = 1) -> list[tuple[str, str]]:
    """(text, doc_id): words of the topic and, two times in three, the document's own name."""
    random_words = random.Random(seed)
    out = []
    for document in documents:
        topic, name = document.title.split()
        for _ in range(each):
            extra = [name] if random_words.random() < 2 / 3 else []
            out.append((" ".join([*random_words.choices(TOPICS[topic], k=3), *extra]), document.doc_id))
    return out


def write_lines(path: Path, rows: Iterable[Mapping[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def make_beir(folder: Path, documents: list[Document] | None = None) -> Path:
    """A BEIR folder: every second document has training queries; dev and test have twelve queries each."""
    documents = make_documents() if documents is None else documents
    splits = {
        "train": make_queries(documents[::2], seed=2, each=2),
        "dev": make_queries(documents[:12], seed=3),
        "test": make_queries(documents[12:24], seed=4),
    }
    (folder / "qrels").mkdir(parents=True)
    write_lines(folder / "corpus.jsonl", ({"_id": d.doc_id, "title": d.title, "text": d.text} for d in documents))
    queries = []
    for split, pairs in splits.items():
        rows = [(f"{split}{number}", *pair) for number, pair in enumerate(pairs)]
        queries += [{"_id": query_id, "text": text} for query_id, text, _ in rows]
        table = [("query-id", "corpus-id", "score"), *((query_id, doc_id, 1) for query_id, _, doc_id in rows)]
        if rows:
            with (folder / "qrels" / f"{split}.tsv").open("w", newline="") as stream:
                csv.writer(stream, delimiter="\t", lineterminator="\n").writerows(table)
    write_lines(folder / "queries.jsonl", queries)
    return folder


def tiny_values(encoder: Path | str, **changes: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """Settings for seconds of work; `changes` are merged into the sections of the same name."""
    values: dict[str, dict[str, object]] = {
        "embed": {"encoder": str(encoder), "max_length": 48, "shard_size": 25, "precision": "fp32"},
        "lexical": {"training": True},
        "tree": {"k": 4, "c": 4},
        "pairs": {"spans": 2, "terms": 8, "span_share": 1.0, "max_length": 16},
        "model": {"decoder_layers": 1, "heads": 2, "d_ff": 64, "head_rank": 4},
        "train": {"epochs": 1, "batch_size": 16, "decoder_lr": 2e-3, "evaluations": 1, "precision": "fp32"},
        "search": {"beam": 20, "precision": "fp32"},
        "calibrate": {"share": 0.0},  # as the presets do, it would build twice
    }
    for section, fields in changes.items():
        values[section] = {**values.get(section, {}), **fields}
    return values


def tiny_config(encoder: Path | str, **changes: Mapping[str, object]) -> Config:
    """The same as settings of the library."""
    return Config.from_dict(tiny_values(encoder, **changes))


def tiny_flags(encoder: Path | str, **changes: Mapping[str, object]) -> list[str]:
    """The same for the command line, where they change a preset; its word pieces are wider than the encoder here."""
    changes["embed"] = {"pieces": WIDTH // 2, **changes.get("embed", {})}
    return [
        f"--{section}.{name}={json.dumps(value) if isinstance(value, bool) else value}"
        for section, fields in tiny_values(encoder, **changes).items()
        for name, value in fields.items()
    ]


POSITION: dict[str, object] = {"normalise": "position", "anchor": "none", "content": False, "edge_bias": False}
"""Settings of a model whose softmax runs over a position's values, as in the authors' code."""


@dataclasses.dataclass
class Workshop:
    """A model and a plan, ready to be trained, without an index around them."""

    model: NCIModel
    plan: BatchPlan
    leaf_of_document: np.ndarray[Any, Any]
    lexical: LexicalScores | None
    config: Config

    def batch(self, number: int) -> dict[str, Any]:
        return self.dataset()[number]

    def dataset(self, **changes: Any) -> PlanDataset:
        """The batches of the plan as training reads them."""
        trie = self.model.tables.trie
        shared: dict[str, Any] = {"pad": 0, "depths": trie.depth[trie.leaves], "lexical": self.lexical}
        return PlanDataset(self.plan, self.leaf_of_document, **{**shared, **changes})


def make_workshop(folder: Path, encoder_folder: Path, **changes: Mapping[str, object]) -> Workshop:
    config = tiny_config(encoder_folder, **changes)
    documents = make_documents()
    encoder = TextEncoder.load(encoder_folder, normalise=True, max_length=48)
    vectors = encoder.encode([document.content for document in documents])
    tree = build_tree(vectors, config.tree, progress=False)
    trie, order = Trie.from_paths(tree.paths)
    rows = {document.doc_id: row for row, document in enumerate(documents)}
    real = [(text, rows[doc_id]) for text, doc_id in make_queries(documents[::2], seed=2, each=2)]
    appended = appended_queries(config.lexical, real=real, generated=())
    lexical, own = expanded_scores([document.content for document in documents], appended, config.lexical)
    plan = write_plan(
        folder / "plan",
        make_pairs(documents, config.pairs, real=real),
        lambda texts: encoder.tokenize(texts, config.pairs.max_length),
        config.pairs,
        batch_size=config.train.batch_size,
        epochs=config.train.epochs,
        words=lexical.columns,
        own_lexical=OwnScores(appended, own),
    )
    assembly = Assembly(config, trie, tree.values, order, vectors[order], encoder, encoder, None)
    model = assembly.model(seen_rows=[row for _, row in real])
    return Workshop(model, plan, assembly.leaf_of_row, lexical.renumbered(assembly.leaf_of_row), config)


def environment(**more: str) -> dict[str, str]:
    """For child processes: one thread, no network, the library and these helpers on the path."""
    folders = [str(Path(nci.__file__).parents[1]), str(Path(__file__).parent)]
    fixed = {"PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **fixed, "OMP_WAIT_POLICY": "PASSIVE", **more}


def python(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a Python process to its end; when that takes too long, its children end with it."""
    command = [sys.executable, *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, env=environment(**more), start_new_session=True
    ) as child:
        try:
            out, err = child.communicate(timeout=120)
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, child.returncode, out, err)
