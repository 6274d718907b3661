"""Find and load a text encoder: a name in, texts -> vectors out.

Reads folders of sentence-transformers and plain Hugging Face encoders with torch and transformers alone;
sentence-transformers itself (seconds to import) is loaded only for folders with modules that are not understood here.
A folder never touches the network. Knows nothing of documents, shards or indexes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor
from tqdm import tqdm
from transformers import AutoConfig, AutoModel, AutoModelForTextEncoding, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING

from nci.embedded import ENCODER_FILES, HUB, find_embedded, how_to_install
from nci.errors import ConfigError, MissingModelError, MissingPackageError
from nci.lean import make_lean
from nci.progress import hide_bars
from nci.runtime import quiet

Pooling = Literal["mean", "cls", "max", "lasttoken"]
Vectors = NDArray[np.float32]

_POOLING_FLAGS: dict[Pooling, str] = {
    "mean": "pooling_mode_mean_tokens",
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
_PROMPT_NAMES = {"query": ("query",), "document": ("document", "passage", "corpus")}
_MASKED_ALIKE = ("bert", "roberta", "xlm-roberta")  # encoders whose layers all take the same mask
_BLOCK = 8192  # texts tokenised at once: enough for sorting by length to pay, little enough for any corpus
_UNLIMITED = 10**6  # transformers writes "no limit" as a number without meaning
CHARS_PER_PIECE = 16  # English has 4 to 5: as much text as can matter is tokenised, not a whole book


def find_encoder(name: str | Path) -> Path | str:
    """Where an encoder is: a folder on this machine, or a name on the Hugging Face Hub. Downloads nothing."""
    if isinstance(name, str) and name in HUB:
        if (embedded := find_embedded(name)) is not None:
            return embedded
        from huggingface_hub import try_to_load_from_cache

        if _is_offline() and not isinstance(try_to_load_from_cache(HUB[name], "model.safetensors"), str):
            raise MissingModelError(how_to_install(name))
        return HUB[name]
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if isinstance(name, Path) or not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name):
        kinds = "give minilm, mpnet, a folder or a Hub name"
        raise MissingModelError(f"encoder {str(name)!r}: there is no such folder; {kinds}")
    return name


def fetch_encoder(name: str | Path) -> Path:
    """The folder of an encoder; a Hub name is downloaded first, or read from the Hub's cache."""
    found = find_encoder(name)
    if isinstance(found, Path):
        return found
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(found, allow_patterns=list(ENCODER_FILES), local_files_only=_is_offline()))
    except Exception as error:  # every HTTP library beneath has errors of its own
        advice = f"encoder {found!r}: no such folder here, and the Hub did not give it; check the name and the network"
        raise MissingModelError(how_to_install(str(name)) if name in HUB else advice) from error


def wide_mask(config: Any, mask: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """A mask (batch, tokens) of what is read, in the form that an encoder with weights of some type takes as it is.

    From one of two dimensions transformers would make this one itself, after asking the device, and waiting for the answer,
    whether it is all ones.
    """
    if config.model_type in _MASKED_ALIKE and config._attn_implementation == "sdpa":
        return mask.bool()[:, None, None, :].expand(-1, -1, mask.shape[1], -1)
    if config.model_type == "mpnet":  # adds it to the logits
        nothing = torch.finfo(dtype).min
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask.bool(), nothing)[:, None, None, :]
    return mask.long()


def token_states(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """States (batch, tokens, width) of an encoder; keeps gradients, and on a GPU nothing in it waits or is copied.

    MPNet of transformers 5.17 makes its positions wherever tensors are made by default, and copies them: there no CUDA graph
    could be recorded.
    """
    if ids.device.type == "cpu":
        return cast(Tensor, model(input_ids=ids, attention_mask=mask.long()).last_hidden_state)
    with ids.device:
        wide = wide_mask(model.config, mask, model.dtype)
        return cast(Tensor, model(input_ids=ids, attention_mask=wide).last_hidden_state)


def pool_tokens(hidden: Tensor, attention_mask: Tensor, pooling: Pooling) -> Tensor:
    """One vector per text from the vectors of its tokens; keeps gradients, sums in at least float32."""
    precise = torch.promote_types(hidden.dtype, torch.float32)
    if pooling in ("mean", "max"):
        mask = attention_mask.unsqueeze(-1)  # (batch, tokens, 1)
        if pooling == "max":
            return hidden.masked_fill(mask == 0, float("-inf")).amax(dim=1).to(precise)  # (batch, width)
        return (hidden * mask.to(hidden.dtype)).sum(dim=1, dtype=precise) / mask.sum(dim=1).clamp(min=1)
    if pooling not in ("cls", "lasttoken"):
        raise ConfigError(f"--embed.pooling is auto, {', '.join(_POOLING_FLAGS)}; not {pooling!r}")
    places = torch.arange(1, hidden.shape[1] + 1, device=hidden.device)
    # the first real token has the largest mask/place, the last one the largest mask*place: no side of padding assumed
    rank = attention_mask / places if pooling == "cls" else attention_mask * places
    return hidden[torch.arange(len(hidden), device=hidden.device), rank.argmax(dim=1)].to(precise)


@dataclass(frozen=True)
class EncoderSettings:
    """What a folder says about its encoder. `plain` is False when only sentence-transformers can run it."""

    pooling: Pooling = "mean"
    normalise: bool = False
    max_length: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    transformer: str = ""
    plain: bool = True


def read_settings(folder: Path) -> EncoderSettings:
    """Settings of a sentence-transformers folder; the defaults for a plain Hugging Face folder."""
    if not (folder / "modules.json").is_file():
        return EncoderSettings()
    modules = json.loads((folder / "modules.json").read_bytes())
    kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
    inputs = _read_json(folder / modules[0]["path"] / "sentence_bert_config.json")
    outputs = _read_json(folder / "config_sentence_transformers.json")
    pooling = _read_pooling(folder / modules[1]["path"]) if kinds[1:2] == ["Pooling"] else None
    return EncoderSettings(
        pooling=pooling or "mean",
        normalise=kinds[-1] == "Normalize",
        max_length=inputs.get("max_seq_length"),
        prompts={role: prompt or "" for role, prompt in (outputs.get("prompts") or {}).items()},
        default_prompt_name=outputs.get("default_prompt_name"),
        transformer=modules[0]["path"],
        plain=kinds in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])
        and pooling is not None
        and not inputs.get("do_lower_case")
        and inputs.get("transformer_task", "feature-extraction") == "feature-extraction",
    )


class TextEncoder:
    """Hugging Face `model` and `tokenizer`, and a pooling: `encode` turns texts into vectors."""

    def __init__(self, model: Any, tokenizer: Any, settings: EncoderSettings, *, max_length: int) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.settings = settings
        self.max_length = max_length
        ends = (tokenizer.eos_token_id, tokenizer.sep_token_id, tokenizer.unk_token_id, tokenizer.pad_token_id)
        self._filler: int = next((token for token in ends if token is not None), 0)

    @classmethod
    def load(
        cls,
        name: str | Path,
        *,
        pooling: Literal["auto", "mean", "cls", "max", "lasttoken"] = "auto",
        normalise: bool | None = None,
        max_length: int | None = None,
        device: str = "cpu",
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    ) -> TextEncoder:
        """Load "minilm", "mpnet", a folder or a Hub name.

        Args:
            name: What `find_encoder` takes.
            pooling: "auto" takes what the folder says, else mean.
            normalise: Scale vectors to length 1; None takes what the folder says.
            max_length: Word pieces that are read, at most the model's positions; None takes what the folder says.
            device: "cpu", "cuda", "cuda:1".
            dtype: Number format of the weights; vectors are float32 in any case.
        """
        folder = fetch_encoder(name)
        settings = read_settings(folder)
        if not settings.plain:
            if pooling != "auto":
                raise ConfigError(f"--embed.pooling {pooling}: the encoder in {folder} has its own pooling; use auto")
            return ForeignEncoder(_run_foreign(folder, max_length, device, dtype), settings, normalise=normalise)
        model, tokenizer = _load_plain(folder / settings.transformer, dtype)
        chosen = replace(
            settings,
            pooling=settings.pooling if pooling == "auto" else pooling,
            normalise=settings.normalise if normalise is None else normalise,
        )
        said = int(tokenizer.model_max_length)
        length = max_length or settings.max_length or (said if said < _UNLIMITED else 512)
        return cls(model.to(device).eval(), tokenizer, chosen, max_length=min(length, _position_limit(model)))

    @property
    def width(self) -> int:
        """Length of a vector."""
        return int(self.model.config.hidden_size)

    def tokenize(self, texts: Sequence[str], max_length: int | None = None) -> list[list[int]]:
        """Token ids of each text with special tokens, cut to `max_length`, not padded, never empty."""
        limit = min(max_length or self.max_length, self.max_length)
        # Tokenising a whole book to keep its first page can cost more than the forward pass. All of it is read only
        # where the opening gave fewer pieces than there is room for (long runs of blanks).
        openings = [_opening(text, limit * CHARS_PER_PIECE) for text in texts]
        rows = self._token_ids(openings, limit)
        short = [i for i, row in enumerate(rows) if len(row) < limit and len(openings[i]) < len(texts[i])]
        for i, row in zip(short, self._token_ids([texts[i] for i in short], limit), strict=True):
            rows[i] = row
        return [row or [self._filler] for row in rows]

    def pad(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Token ids and attention mask of a batch, on the model's device, padded on the right to its longest row."""
        longest = max(map(len, rows))
        pad = self.tokenizer.pad_token_id or 0
        ids = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows])  # (batch, tokens)
        mask = (torch.arange(longest) < torch.tensor([len(row) for row in rows])[:, None]).long()
        return ids.to(self.model.device), mask.to(self.model.device)

    @torch.inference_mode()
    def encode(
        self,
        texts: Sequence[str],
        *,
        role: Literal["query", "document"] | None = None,
        batch_size: int = 32,
        progress: str | Callable[[int], object] | None = None,
    ) -> Vectors:
        """Vectors of the texts, in their order.

        Args:
            texts: Any number, empty ones included.
            role: Puts the encoder's own prompt for queries or documents before each text, where it has one.
            batch_size: Texts per forward pass; similar lengths share a batch.
            progress: Label of a progress bar, or a function that is told how many more texts are done.
        """
        prompt = self.prompt(role)
        out = np.empty((len(texts), self.width), dtype=np.float32)  # (texts, width)
        label = progress if isinstance(progress, str) else None
        with tqdm(desc=label, total=len(texts), unit="text", disable=hide_bars(bool(label))) as bar:
            advance = progress if callable(progress) else bar.update
            for start in range(0, len(texts), _BLOCK):
                block = [prompt + text for text in texts[start : start + _BLOCK]]
                for places, vectors in self._encode_block(block, batch_size):
                    scaled = torch.nn.functional.normalize(vectors, dim=-1) if self.settings.normalise else vectors
                    out[start + places] = scaled.float().cpu().numpy()
                    advance(len(places))
        return out

    def prompt(self, role: Literal["query", "document"] | None) -> str:
        """The text this encoder wants before a query or a document; for None, before any text."""
        names = _PROMPT_NAMES[role] if role else (self.settings.default_prompt_name or "",)
        return next((self.settings.prompts[name] for name in names if name in self.settings.prompts), "")

    def save(self, folder: Path) -> None:
        """Write a folder that `load` and sentence-transformers both read."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        prompts = {"prompts": dict(self.settings.prompts), "default_prompt_name": self.settings.default_prompt_name}
        modules = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
        files = {
            "modules.json": [
                {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
                for i, (kind, path) in enumerate(modules[: 3 if self.settings.normalise else 2])
            ],
            "1_Pooling/config.json": {"word_embedding_dimension": self.width}
            | {flag: name == self.settings.pooling for name, flag in _POOLING_FLAGS.items()},
            "sentence_bert_config.json": {"max_seq_length": self.max_length, "do_lower_case": False},
            "config_sentence_transformers.json": prompts,
        }
        (folder / "1_Pooling").mkdir(exist_ok=True)
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def _token_ids(self, texts: list[str], limit: int) -> list[list[int]]:
        if not texts:
            return []
        return list(self.tokenizer(texts, truncation=True, max_length=limit, return_attention_mask=False)["input_ids"])

    def states(self, texts: Sequence[str], batch_size: int) -> Iterator[tuple[NDArray[np.intp], Tensor, Tensor]]:
        """Of texts as they are, batch by batch: their places, states (batch, tokens, width) and mask (batch, tokens)."""
        rows = self.tokenize(texts)
        # longest first: what does not fit in memory fails at once, not after hours
        order = np.argsort([-len(row) for row in rows], kind="stable")
        for places in np.split(order, range(batch_size, len(order), batch_size)):
            ids, mask = self.pad([rows[i] for i in places])
            yield places, token_states(self.model, ids, mask), mask

    def _encode_block(self, texts: list[str], batch_size: int) -> Iterator[tuple[NDArray[np.intp], Tensor]]:
        for places, states, mask in self.states(texts, batch_size):
            yield places, pool_tokens(states, mask, self.settings.pooling)


class ForeignEncoder(TextEncoder):
    """An encoder with modules beyond transformer, pooling and scaling (Dense, ...), run by sentence-transformers."""

    def __init__(self, runner: Any, settings: EncoderSettings, *, normalise: bool | None) -> None:
        # whatever scaling the folder asks for, its own modules do
        settings = replace(settings, normalise=bool(normalise))
        super().__init__(runner[0].auto_model, runner.tokenizer, settings, max_length=runner.max_seq_length)
        self._runner = runner

    @property
    def width(self) -> int:
        """Length of a vector."""
        return int(self._runner.encode([""]).shape[1])  # the method that says it has changed its name

    def save(self, folder: Path) -> None:
        """Write a folder that `load` and sentence-transformers both read."""
        self._runner.save_pretrained(str(folder), create_model_card=False)

    def _encode_block(self, texts: list[str], batch_size: int) -> Iterator[tuple[NDArray[np.intp], Tensor]]:
        # an empty prompt, because the texts have theirs already
        options = {"prompt": "", "batch_size": batch_size, "convert_to_tensor": True, "show_progress_bar": False}
        yield np.arange(len(texts)), self._runner.encode(texts, **options)


def _opening(text: str, chars: int) -> str:
    parts = text[:chars].rsplit(None, 1)  # without the last word, which may be cut in two
    return parts[0] if len(parts) == 2 and len(text) > chars else text


def _run_foreign(folder: Path, max_length: int | None, device: str, dtype: str) -> Any:
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise MissingPackageError(f"the encoder in {folder} needs: pip install sentence-transformers") from error
    weights = {"dtype": getattr(torch, dtype), "use_safetensors": True}
    with quiet():
        runner = SentenceTransformer(str(folder), device=device, local_files_only=True, model_kwargs=weights)
    if max_length:
        runner.max_seq_length = min(max_length, _position_limit(runner[0].auto_model))
    return runner.eval()


def _load_plain(folder: Path, dtype: str) -> tuple[Any, Any]:
    local: dict[str, Any] = {"local_files_only": True}
    try:
        with quiet():
            config = AutoConfig.from_pretrained(folder, **local)
            # T5 and its kin are encoder and decoder; this class loads the encoder half alone
            known = type(config) in MODEL_FOR_TEXT_ENCODING_MAPPING
            if config.is_encoder_decoder and not known:
                raise ValueError(f"{config.model_type} has no encoder that can be used alone")
            tokenizer = AutoTokenizer.from_pretrained(folder, **local)
            local |= {"config": config, "dtype": getattr(torch, dtype), "use_safetensors": True}
            loader = AutoModelForTextEncoding if known else AutoModel
            model, loading = loader.from_pretrained(folder, output_loading_info=True, **local)
        if missing := sorted(key for key in loading["missing_keys"] if "pooler" not in key):  # a pooler is not used
            raise ValueError(f"the weights are incomplete, {missing[0]} is missing")
    except (OSError, ValueError, SafetensorError) as error:
        reason = str(error).strip().partition("\n")[0]
        expected = "expected a Hugging Face folder with config.json, a tokenizer and model.safetensors"
        raise MissingModelError(f"no encoder could be read from {folder}: {reason}; {expected}") from error
    make_lean(model)
    return model, tokenizer


def _position_limit(model: Any) -> int:
    # relative positions, as in T5, have no end; RoBERTa and its kin count from padding_idx + 1
    positions = getattr(model.config, "max_position_embeddings", None) or _UNLIMITED
    padding = getattr(getattr(model, "embeddings", None), "padding_idx", None)
    return int(positions) - (0 if padding is None else int(padding) + 1)


def _is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}


def _read_pooling(folder: Path) -> Pooling | None:
    config = _read_json(folder / "config.json")
    if "pooling_mode" in config:  # a name or names; older versions wrote one flag for each
        said = config["pooling_mode"] if isinstance(config["pooling_mode"], list) else [config["pooling_mode"]]
    else:
        names = {flag: name for name, flag in _POOLING_FLAGS.items()}
        said = [names.get(flag) for flag, on in config.items() if flag.startswith("pooling_mode_") and on] or ["mean"]
    usable = len(said) == 1 and said[0] in _POOLING_FLAGS and config.get("include_prompt", True)
    return said[0] if usable else None


def _read_json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_bytes())) if path.is_file() else {}
