"""The sizes and switches of a model, checked on construction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from minipar.config.moe_config import MoEConfig
from minipar.support.errors import divisors, one_of, require_divides, require_positive
from minipar.support.options import check_types, option, with_option_table

Attention = Literal["fused", "plain", "flash"]


class DerivedSize(int):
    """A size that was not given: `replace(config, dim=64)` derives it anew, where it keeps one that was."""


@with_option_table
@dataclass(frozen=True)
class ModelConfig(MoEConfig):
    """The sizes of a Llama-style Transformer; the defaults make a byte-level model of 0.87 M parameters.

    Raises ValueError if a size is impossible or sizes do not fit each other.
    """

    vocab_size: int = option(256, "number of different tokens")
    dim: int = option(128, "features of the residual stream", common=True)
    num_layers: int = option(4, "number of blocks", common=True)
    num_heads: int = option(4, "number of query heads", common=True)
    num_kv_heads: int = option(
        None, "number of key/value heads; num_heads / num_kv_heads query heads share each; None: num_heads"
    )
    head_dim: int = option(None, "features of a head; None: dim / num_heads")
    qkv_bias: bool = option(False, "add a bias to queries, keys and values, as Qwen2 does")
    qk_norm: bool = option(False, "norm each head's queries and keys before they are rotated, as Qwen3 does")
    kv_latent_dim: int = option(
        0,
        "width of the latent from which multi-head latent attention (MLA) computes keys and values; 0: no MLA",
    )
    rope_dim: int = option(
        None, "with MLA, additional features per head that are rotated by position; None: half of head_dim"
    )
    hidden_dim: int = option(
        None,
        "width of the SwiGLU; None: 8/3 dim, for as many weights as an MLP of width 4 dim, rounded to a multiple of 16",
    )
    max_seq_len: int = option(256, "longest sequence", common=True)
    norm_eps: float = option(1e-5, "added to the mean square in RMSNorm")
    rope_theta: float = option(10000.0, "base of the rotary embeddings' wavelengths")
    rope_scaling: tuple[float, ...] | None = option(
        None,
        "longer wavelengths, for longer texts: one factor (linear), or Llama 3.1's factor, its low and its high frequency "
        "factor, and the length that it was trained on before: 8 1 4 8192",
    )
    tie_embeddings: bool = option(False, "use the embedding's weight as the head's weight")
    dropout: float = option(
        0.0, "dropout probability of what each block's attention and MLP add to the residual stream"
    )
    attention: Attention = option("fused", "which function computes attention: same numbers, different cost")
    documents: bool = option(
        False,
        "samples contain documents: positions restart in each, and tokens attend only to their own document; training cuts "
        "each sample into about 4, at places drawn from the seed and the step",
    )
    parallel_block: bool = option(
        False,
        "attention and MLP have one norm as input and their sum is added, as in GPT-J and PaLM: half of tp's all-reduces",
    )
    moe_every: int = option(2, "with experts, every moe_every-th layer has a mixture instead of its SwiGLU")

    def __post_init__(self) -> None:
        check_types(self)
        if self.num_kv_heads is None:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        is_derived = self.head_dim is None or isinstance(self.head_dim, DerivedSize)
        if is_derived:
            require_positive(dim=self.dim, num_heads=self.num_heads)
            require_divides("num_heads", self.num_heads, "dim", self.dim)
            object.__setattr__(self, "head_dim", self.dim // self.num_heads)
        if self.hidden_dim is None:
            object.__setattr__(self, "hidden_dim", -(-8 * self.dim // 48) * 16)
        sizes = (
            "vocab_size",
            "dim",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "hidden_dim",
            "max_seq_len",
            "moe_every",
        )
        require_positive(**{name: getattr(self, name) for name in sizes})
        require_divides("num_kv_heads", self.num_kv_heads, "num_heads", self.num_heads)
        self._check_head_dim()
        self._check_latent()
        self._check_reals()
        super().__post_init__()  # which makes plain numbers of all
        if is_derived:
            object.__setattr__(self, "head_dim", DerivedSize(self.head_dim))

    @property
    def cache_elems(self) -> int:
        """The elements that a layer's cache holds per token: keys and values, or a latent and a rotary key."""
        if self.kv_latent_dim:
            return self.kv_latent_dim + self.rope_dim
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def core_width(self) -> int:
        """The multiplications that a pair of a query and a key costs in all heads: for its score and the weighted sum."""
        return self.num_heads * (2 * self.head_dim + (self.rope_dim if self.kv_latent_dim else 0))

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer has experts: with moe_every=2, as in Switch, layers 1, 3, 5 ... do."""
        return self.num_experts > 0 and (layer + 1) % self.moe_every == 0

    def _check_head_dim(self) -> None:
        if self.head_dim % 2 and self.head_dim * self.num_heads != self.dim:
            raise ValueError(
                f"head_dim={self.head_dim} is odd, and rotary embeddings turn pairs of features; use an even head_dim"
            )
        if self.head_dim % 2:
            fits = [h for h in divisors(self.dim) if self.dim // h % 2 == 0]
            advice = f"use num_heads={one_of(fits)}" if fits else "use an even dim"
            raise ValueError(
                f"num_heads={self.num_heads} gives dim={self.dim} an odd head_dim={self.head_dim}, "
                f"and rotary embeddings turn pairs of features; {advice}"
            )

    def _check_latent(self) -> None:
        if self.kv_latent_dim < 0:
            raise ValueError(
                f"kv_latent_dim={self.kv_latent_dim} is negative; use 0 for attention without a latent"
            )
        if not self.kv_latent_dim:
            if self.rope_dim is not None:
                raise ValueError(f"rope_dim={self.rope_dim} is for kv_latent_dim above 0; leave it out")
            return
        if self.num_kv_heads != self.num_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} with kv_latent_dim={self.kv_latent_dim}: every head has its own keys "
                f"and values of the latent; use num_kv_heads={self.num_heads}"
            )
        own = {"head_dim": self.dim // self.num_heads, "qkv_bias": False, "qk_norm": False}
        for name, only in own.items():
            if (found := getattr(self, name)) != only:
                raise ValueError(
                    f"{name}={found} with kv_latent_dim={self.kv_latent_dim} is not in latent attention; use {name}={only}"
                )
        if self.rope_dim is None:
            object.__setattr__(self, "rope_dim", -(-self.head_dim // 4) * 2)
        if self.rope_dim < 2 or self.rope_dim % 2:
            raise ValueError(
                f"rope_dim={self.rope_dim}: rotary embeddings turn pairs of features; use an even number above 0"
            )

    def _check_reals(self) -> None:
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} is not a probability below 1; use 0 <= dropout < 1")
        for name in ("norm_eps", "rope_theta"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} is not positive; use {name} > 0")
        if self.rope_scaling is not None:
            object.__setattr__(self, "rope_scaling", tuple(self.rope_scaling))
            self._check_rope_scaling()

    def _check_rope_scaling(self) -> None:
        scaling = list(self.rope_scaling or ())
        if (
            len(scaling) not in (1, 4)
            or min(scaling) <= 0
            or (len(scaling) == 4 and scaling[1] >= scaling[2])
        ):
            raise ValueError(
                f"rope_scaling={scaling}; use one positive factor, or four: a factor, a low frequency factor below the "
                "high one, and a length, such as 8 1 4 8192"
            )
