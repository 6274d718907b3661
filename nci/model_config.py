"""Shape of the network as Hugging Face stores it: numbers and switches, no tensors."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig


class NCIConfig(PreTrainedConfig):  # type: ignore[misc]
    """Shape of the network; the switches are explained in `nci.config.ModelConfig`.

    `late` is 0 where an index has no word pieces, `further` where it has none behind the openings of documents. `chosen_by`
    are the weights of dense and lexical similarity by which late interaction chooses its candidates, where calibration has
    changed those of the score.
    """

    model_type = "nci"

    def __init__(
        self,
        encoder: dict[str, Any] | None = None,
        pooling: str = "mean",
        d_model: int = 384,
        decoder_layers: int = 2,
        adapter_layers: int = 1,
        heads: int = 6,
        d_ff: int = 1536,
        dropout: float = 0.1,
        head: str = "additive",
        head_rank: int = 16,
        adapter_start: str = "learned",
        normalise: str = "children",
        anchor: str = "none",
        score: str = "dense",
        kappa: float = 20.0,
        lexical: float = 10.0,
        late: float = 0.0,
        further: float = 0.0,
        chosen_by: list[float] | None = None,
        query_vector: str = "trained",
        content: bool = False,
        edge_bias: bool = False,
        positions: int = 1,
        values: int = 30,
        nodes: int = 1,
        d_content: int = 384,
        alpha: float = 0.0,
        tau: float = 1.0,
        **kwargs: Any,
    ) -> None:
        given = {k: v for k, v in locals().items() if k not in ("self", "kwargs", "__class__")}
        for name, value in given.items():
            setattr(self, name, value)
        super().__init__(**kwargs)

    @property
    def end_token(self) -> int:
        return int(self.positions * self.values)

    @property
    def start_token(self) -> int:
        return self.end_token + 1

    @property
    def vocabulary(self) -> int:
        """Tokens (position, value), then the end and the start token."""
        return self.end_token + 2

    @property
    def foldable(self) -> bool:
        return bool(self.adapter_start == "learned" and self.normalise == "children")
