"""The sizes of a model, and the parameters and floating point operations that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

from minipar.errors import require_divides, require_positive


@dataclass(frozen=True)
class ModelShape:
    """A decoder of equal layers: attention and an MLP, or experts in every moe_every-th layer.

    num_kv_heads    None: num_heads
    gated           the MLP has three matrices (SwiGLU), otherwise two (GELU)
    bias            linears have biases
    norm_params     vectors of a norm: 1 RMSNorm, 2 LayerNorm
    positions       learned positions; 0: rotary
    dropout         two per layer, in a parallel block one, whose masks are kept
    parallel_block  attention and MLP read one norm, and their sum goes through one dropout
    num_experts, top_k, capacity_factor, shared_dim   of a mixture; each expert is hidden_dim wide
    """

    name: str
    num_layers: int
    dim: int
    num_heads: int
    hidden_dim: int
    vocab_size: int
    num_kv_heads: int | None = None
    gated: bool = True
    bias: bool = False
    norm_params: int = 1
    positions: int = 0
    tie_embeddings: bool = False
    dropout: bool = False
    num_experts: int = 0
    top_k: int = 1
    capacity_factor: float = 1.25
    moe_every: int = 1
    shared_dim: int = 0
    parallel_block: bool = False

    def __post_init__(self):
        if self.num_kv_heads is None:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        sizes = (
            "num_layers",
            "dim",
            "num_heads",
            "hidden_dim",
            "vocab_size",
            "num_kv_heads",
            "norm_params",
            "top_k",
        )
        require_positive(**{name: getattr(self, name) for name in (*sizes, "moe_every")})
        require_divides("num_heads", self.num_heads, "dim", self.dim)
        require_divides("num_kv_heads", self.num_kv_heads, "num_heads", self.num_heads)
        if min(self.positions, self.num_experts, self.shared_dim) < 0 or self.capacity_factor <= 0:
            raise ValueError(
                f"positions={self.positions}, num_experts={self.num_experts}, shared_dim={self.shared_dim}, "
                f"capacity_factor={self.capacity_factor}; use 0 or more, and a factor above 0"
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    @property
    def kv_dim(self) -> int:
        return self.num_kv_heads * self.head_dim

    def has_experts(self, layer: int) -> bool:
        return self.num_experts > 0 and (layer + 1) % self.moe_every == 0

    @property
    def norms_per_layer(self) -> int:
        """Attention's and the MLP's, or a parallel block's one; as many dropouts."""
        return 1 if self.parallel_block else 2

    @property
    def num_moe_layers(self) -> int:
        return self.num_layers // self.moe_every if self.num_experts else 0

    @property
    def num_params(self) -> int:
        """All parameters. For a GPT with tied embeddings, 12 l h^2 (1 + 13/(12 h) + (V + s)/(12 l h)) + 2 h.

        Source: Megatron-LM on clusters, arXiv:2104.04473, equation 2, which leaves out the last norm, 2 h.
        """
        layers = sum(sum(layer_elems(self, i)) for i in range(self.num_layers))
        tables = (1 if self.tie_embeddings else 2) * self.vocab_size * self.dim + self.positions * self.dim
        return layers + tables + self.norm_params * self.dim

    @property
    def num_active_params(self) -> int:
        """The parameters that a token meets: of the experts, top_k."""
        unused = (self.num_experts - self.top_k) * expert_elems(self) if self.num_experts else 0
        return self.num_params - self.num_moe_layers * unused


def layer_elems(shape: ModelShape, layer: int, tp: int = 1, ep: int = 1) -> tuple[int, int]:
    """Return (dense, expert): the elements of a layer's parameters on one rank.

    q, o and the MLP are split over tp; k and v too, but a rank has at least one head; norms, the biases of o and of the
    MLP's last matrix, and the router are whole on every rank. Experts are split over ep and then over tp.
    """
    kv_dim = max(1, shape.num_kv_heads // tp) * shape.head_dim
    dim, width = shape.dim, shape.hidden_dim // tp
    dense = 2 * dim * dim // tp + 2 * dim * kv_dim + shape.norms_per_layer * shape.norm_params * dim
    if shape.bias:
        dense += dim // tp + 2 * kv_dim + dim
    if not shape.has_experts(layer):
        matrices = 3 if shape.gated else 2
        return dense + matrices * dim * width + (width + dim) * shape.bias, 0
    dense += dim * shape.num_experts + 3 * dim * shape.shared_dim // tp
    return dense, shape.num_experts // ep * expert_elems(shape) // tp


def expert_elems(shape: ModelShape) -> int:
    return (3 if shape.gated else 2) * shape.dim * shape.hidden_dim


def layer_matmul_elems(shape: ModelShape, layer: int) -> int:
    """Return the matrix elements of a layer that multiply a token: a multiplication and an addition each, forward."""
    attention = 2 * shape.dim * (shape.dim + shape.kv_dim)
    if not shape.has_experts(layer):
        return attention + expert_elems(shape)
    return (
        attention + shape.top_k * expert_elems(shape) + shape.dim * (shape.num_experts + 3 * shape.shared_dim)
    )


def forward_flops_per_token(shape: ModelShape, seq_len: int) -> int:
    """2 * (matrix elements that multiply a token) + 4 s h per layer for the scores and the weighted sum, without a mask."""
    matrices = (
        sum(layer_matmul_elems(shape, i) for i in range(shape.num_layers)) + shape.dim * shape.vocab_size
    )
    return 2 * matrices + 4 * shape.num_layers * seq_len * shape.dim


def model_flops_per_token(shape: ModelShape, seq_len: int) -> int:
    """Forward and backward, which is twice a forward: for a GPT, 72 l h^2 (1 + s/(6 h) + V/(12 l h))."""
    return 3 * forward_flops_per_token(shape, seq_len)


def hardware_flops_per_token(shape: ModelShape, seq_len: int, recompute: str = "none") -> int:
    """Operations per token with recomputation: of the attention core for "selective", else one more forward of all layers.

    For a GPT, full recomputation: 96 l h^2 (1 + s/(6 h) + V/(16 l h)); the head is not computed again. Selective: one
    forward of the core, 4 s h per layer; the paper's equation, with s/(3 h) for s/(6 h), has three times as much.
    Source: arXiv:2104.04473, equation 3; arXiv:2205.05198, appendix A.
    """
    core = 4 * shape.num_layers * seq_len * shape.dim
    layers = forward_flops_per_token(shape, seq_len) - 2 * shape.dim * shape.vocab_size
    return model_flops_per_token(shape, seq_len) + {"none": 0, "selective": core}.get(recompute, layers)
