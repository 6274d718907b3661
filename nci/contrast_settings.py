"""Settings of a contrastive training, of `nci.contrastive`; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nci.errors import ConfigError, check_least


@dataclass(frozen=True)
class ContrastSettings:
    """How an encoder is trained to tell a query's document from others. It is DPR with `refreshes=0`, else ANCE.

    Args:
        epochs: Passes over the pairs with the other documents of the batch as negatives.
        refreshes: How often hard negatives are mined afterwards, each time with the newest weights.
        refresh_epochs: Passes over the pairs after each mining.
        negatives: Hard negatives per query, drawn anew in each pass.
        depth: They are drawn from the best so many passages of documents that are not relevant.
        batch_size: Pairs per step.
        lr: Highest learning rate of each round.
        warmup: Share of a round's steps in which the learning rate rises; it falls to zero over the rest.
        temperature: Divides the cosines in the softmax.
        late: Weight of a second loss, that of late interaction between the word pieces of both; 0 leaves it out.
        late_temperature: Divides its similarities in the softmax.
        query_length: Word pieces per query in training.
        layers: Only the last so many layers are trained, without dropout, on what those below say; 0 trains all of them.
        seed: Same seed, same weights on a CPU.
        precision: auto trains in bf16 where the device has it; weights and vectors are float32 in any case.
    """

    epochs: int = 5
    refreshes: int = 0
    refresh_epochs: int = 1
    negatives: int = 4
    depth: int = 50
    batch_size: int = 128
    lr: float = 7e-5
    warmup: float = 0.1
    temperature: float = 0.03
    late: float = 0.0
    late_temperature: float = 0.02
    query_length: int = 64
    layers: int = 0
    seed: int = 0
    precision: Literal["auto", "fp32", "bf16"] = "auto"

    def __post_init__(self) -> None:
        if self.precision not in ("auto", "fp32", "bf16"):
            raise ConfigError(f"precision is one of auto, fp32, bf16; not {self.precision!r}")
        counts = ("refresh_epochs", "negatives", "depth", "batch_size", "query_length")
        check_least(self, {"epochs": 0, "refreshes": 0, "layers": 0, "seed": 0} | dict.fromkeys(counts, 1))
        if self.depth < self.negatives:
            raise ConfigError(f"depth is at least the number of negatives ({self.negatives}), not {self.depth}")
        for name, inside in {
            "lr": 0 < self.lr < 1,
            "warmup": 0 <= self.warmup <= 1,
            "temperature": 0 < self.temperature < float("inf"),
            "late": 0 <= self.late < float("inf"),
            "late_temperature": 0 < self.late_temperature < float("inf"),
        }.items():
            if not inside:
                raise ConfigError(f"{name} has an impossible value: {getattr(self, name)}")
