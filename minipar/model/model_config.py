"""The sizes and switches of a model, checked on construction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from minipar.errors import divisors, one_of, require_divides, require_positive
from minipar.model.moe_config import MoEConfig
from minipar.options import check_types, option, with_option_table

Attention = Literal["fused", "plain", "flash"]


@with_option_table
@dataclass(frozen=True)
class ModelConfig(MoEConfig):
    """The sizes of a Llama-style Transformer; the defaults make a byte-level model of 0.87 M parameters.

    Raises ValueError where a size is impossible or sizes do not fit each other.
    """

    vocab_size: int = option(256, "tokens there are")
    dim: int = option(128, "features of the residual stream")
    num_layers: int = option(4, "blocks")
    num_heads: int = option(4, "query heads")
    num_kv_heads: int | None = option(
        None, "key and value heads, each serving num_heads / num_kv_heads query heads; None: num_heads"
    )
    hidden_dim: int | None = option(
        None,
        "width of the SwiGLU; None: 8/3 dim, so that it has the weights of a 4 dim MLP, in multiples of 16",
    )
    max_seq_len: int = option(256, "longest sequence")
    norm_eps: float = option(1e-5, "added to the mean square in RMSNorm")
    rope_theta: float = option(10000.0, "base of the rotary embeddings' wavelengths")
    tie_embeddings: bool = option(False, "the head multiplies by the embedding's rows")
    dropout: float = option(0.0, "on what each block's attention and MLP add to the residual stream")
    attention: Attention = option("fused", "which function computes attention: same numbers, different cost")
    documents: bool = option(
        False, "samples hold documents: positions start anew with each, and no token reads another document's"
    )
    parallel_block: bool = option(
        False,
        "attention and MLP read one norm and are added together, as in GPT-J and PaLM: half of tp's sums",
    )
    moe_every: int = option(2, "with experts, every moe_every-th layer has a mixture in place of its SwiGLU")

    def __post_init__(self):
        check_types(self)
        if self.num_kv_heads is None:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if self.hidden_dim is None:
            object.__setattr__(self, "hidden_dim", -(-8 * self.dim // 48) * 16)
        sizes = (
            "vocab_size",
            "dim",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "hidden_dim",
            "max_seq_len",
            "moe_every",
        )
        require_positive(**{name: getattr(self, name) for name in sizes})
        require_divides("num_heads", self.num_heads, "dim", self.dim)
        require_divides("num_kv_heads", self.num_kv_heads, "num_heads", self.num_heads)
        self._check_head_dim()
        self._check_reals()
        super().__post_init__()

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer has experts: with moe_every=2, as in Switch, layers 1, 3, 5 ... do."""
        return self.num_experts > 0 and (layer + 1) % self.moe_every == 0

    def _check_head_dim(self):
        if self.head_dim % 2:
            fits = [h for h in divisors(self.dim) if self.dim // h % 2 == 0]
            advice = f"use num_heads={one_of(fits)}" if fits else "use an even dim"
            raise ValueError(
                f"num_heads={self.num_heads} gives dim={self.dim} an odd head_dim={self.head_dim}, "
                f"and rotary embeddings turn pairs of features; {advice}"
            )

    def _check_reals(self):
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} is not a probability below 1; use 0 <= dropout < 1")
        for name in ("norm_eps", "rope_theta"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} is not positive; use {name} > 0")
