"""The sizes of a model, and the parameters and floating point operations that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from minipar.config.model_config import ModelConfig
from minipar.support.errors import require_divides, require_positive
from minipar.support.options import option


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder of equal layers: attention and an MLP, or experts in every moe_every-th layer.

    gated           the MLP has three matrices (SwiGLU), otherwise two (GELU)
    bias            linears have biases
    norm_params     parameter vectors per norm: 1 for RMSNorm, 2 for LayerNorm
    positions       number of learned positions; 0: rotary embeddings
    qkv_bias        the matrices of q, k and v have biases, also if others have none
    qk_norm         each head's queries and keys are normed
    dropout         each layer has two dropouts (a parallel block has one) and keeps their masks
    parallel_block  attention and MLP share one norm as their input, and their sum goes through one dropout
    head_size       features of a head; 0: dim / num_heads
    kv_latent_dim   width of the latent of multi-head latent attention, or 0; rope_dim: its rotary features per head
    q_latent_dim    width of the latent from which latent attention computes queries; 0: it computes them from its input
    num_experts, top_k, capacity_factor, shared_dim   sizes of an MoE layer; each expert is hidden_dim wide
    dense_layers    number of layers before the first one with experts; dense_hidden_dim: width of the MLP of layers without
                    experts, or 0 for hidden_dim
    """

    name: str
    num_layers: int
    dim: int
    num_heads: int
    hidden_dim: int
    vocab_size: int
    num_kv_heads: int = option(None, "number of key/value heads; None: num_heads")
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
    kv_latent_dim: int = 0
    rope_dim: int = 0
    head_size: int = 0
    q_latent_dim: int = 0
    dense_layers: int = 0
    dense_hidden_dim: int = 0
    qkv_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
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
        if not self.head_size:
            require_divides("num_heads", self.num_heads, "dim", self.dim)
        require_divides("num_kv_heads", self.num_kv_heads, "num_heads", self.num_heads)
        counts = (
            "positions",
            "num_experts",
            "shared_dim",
            "head_size",
            "q_latent_dim",
            "dense_layers",
            "dense_hidden_dim",
        )
        if min(getattr(self, name) for name in counts) < 0 or self.capacity_factor <= 0:
            found = ", ".join(f"{name}={getattr(self, name)}" for name in (*counts, "capacity_factor"))
            raise ValueError(f"{found}; use 0 or more, and a factor above 0")
        if self.q_latent_dim and not self.kv_latent_dim:
            raise ValueError(f"q_latent_dim={self.q_latent_dim} is for kv_latent_dim above 0; leave it out")
        if self.num_experts and self.dense_layers >= self.num_layers:
            raise ValueError(
                f"dense_layers={self.dense_layers} of num_layers={self.num_layers}: no layer has experts; use fewer"
            )

        latent = self.kv_latent_dim, self.rope_dim
        if min(latent) < 0 or all(latent) != any(latent):
            raise ValueError(
                f"kv_latent_dim={self.kv_latent_dim}, rope_dim={self.rope_dim}; use two numbers above 0, or none of them"
            )
        others = self.bias or self.qkv_bias or self.qk_norm
        if self.kv_latent_dim and (others or self.num_kv_heads != self.num_heads):
            raise ValueError(
                f"kv_latent_dim={self.kv_latent_dim} with bias={self.bias} and num_kv_heads={self.num_kv_heads}: latent "
                f"attention has no biases (qkv_bias={self.qkv_bias}), no norms of heads (qk_norm={self.qk_norm}), and as "
                "many key/value heads as heads; leave these out"
            )

    @classmethod
    def of(cls, model: ModelConfig, name: str = "this model") -> ModelShape:
        """Return the sizes of a model of `minipar train`; experts without a capacity limit are assumed evenly loaded."""
        return cls(
            name, model.num_layers, model.dim, model.num_heads, model.hidden_dim, model.vocab_size, model.num_kv_heads,
            tie_embeddings=model.tie_embeddings, dropout=model.dropout > 0, num_experts=model.num_experts,
            top_k=model.top_k, capacity_factor=model.capacity_factor or 1.0, moe_every=model.moe_every,
            shared_dim=model.shared_dim, parallel_block=model.parallel_block, kv_latent_dim=model.kv_latent_dim,
            rope_dim=model.rope_dim or 0, head_size=model.head_dim, qkv_bias=model.qkv_bias, qk_norm=model.qk_norm,
        )  # fmt: skip

    @property
    def head_dim(self) -> int:
        return self.head_size or self.dim // self.num_heads

    @property
    def q_dim(self) -> int:
        """The width of all heads together: `dim`, unless `head_size` is given."""
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def core_head_dim(self) -> int:
        """The width of a head in the attention core. In latent attention keys and queries have rotary features, too."""
        return self.head_dim + self.rope_dim

    def has_experts(self, layer: int) -> bool:
        return self.num_experts > 0 and layer >= self.dense_layers and (layer + 1) % self.moe_every == 0

    @property
    def dense_width(self) -> int:
        """The width of the MLP in a layer without experts."""
        return self.dense_hidden_dim or self.hidden_dim

    @property
    def norms_per_layer(self) -> int:
        """The number of norms in a layer, and also of dropouts: two, or one in a parallel block."""
        return 1 if self.parallel_block else 2

    @cached_property
    def num_moe_layers(self) -> int:
        return sum(self.has_experts(i) for i in range(self.num_layers))

    @cached_property
    def first_moe_layer(self) -> int:
        """The first layer with experts; 0 if there is none."""
        return next((i for i in range(self.num_layers) if self.has_experts(i)), 0)

    @cached_property
    def num_params(self) -> int:
        """The number of parameters. For a GPT with tied embeddings, 12 l h^2 (1 + 13/(12 h) + (V + s)/(12 l h)) + 2 h.

        Source: Megatron-LM on clusters, arXiv:2104.04473, equation 2, which leaves out the last norm's 2 h.
        """
        layers = sum(sum(layer_elems(self, i)) for i in range(self.num_layers))
        tables = (1 if self.tie_embeddings else 2) * self.vocab_size * self.dim + self.positions * self.dim
        return layers + tables + self.norm_params * self.dim

    @cached_property
    def num_active_params(self) -> int:
        """The number of parameters that process one token; in each MoE layer only top_k experts count."""
        unused = (self.num_experts - self.top_k) * expert_elems(self) if self.num_experts else 0
        return self.num_params - self.num_moe_layers * unused


def attention_elems(shape: ModelShape) -> int:
    """Return the number of matrix elements of a layer's attention.

    In latent attention with H heads of d features, r rotary features a head, a latent of width c and a query latent of
    width z, kv_down and k_rope have D (c + r) elements, k_up and v_up 2 c H d, o H d D, and the queries' matrices
    D H (d + r) or, with z > 0, D z + z H (d + r).
    """
    if not shape.kv_latent_dim:
        return 2 * shape.dim * (shape.q_dim + shape.kv_dim)
    queries = (shape.q_latent_dim or shape.dim) * shape.num_heads * shape.core_head_dim
    return queries + shape.q_dim * (2 * shape.kv_latent_dim + shape.dim) + whole_latent_elems(shape)


def whole_latent_elems(shape: ModelShape) -> int:
    """Return the number of matrix elements of a layer's latents and k_rope, which tp does not split; 0 without latents."""
    if not shape.kv_latent_dim:
        return 0
    return shape.dim * (shape.kv_latent_dim + shape.rope_dim + shape.q_latent_dim)


def core_width(shape: ModelShape) -> int:
    """Return the multiplications per query-key pair over all heads: one per feature for scores, one for values."""
    return 2 * shape.q_dim + shape.num_heads * shape.rope_dim


def layer_elems(
    shape: ModelShape, layer: int, tp: int = 1, ep: int = 1, fold_experts: bool = False
) -> tuple[int, int]:
    """Return (dense, expert): the numbers of a layer's parameters on one rank.

    q, o and the MLP are split over tp; k and v too, but each rank has at least one head. Not split are norms (those of
    queries and keys, too), the router, the biases of o and of the MLP's last matrix, and the matrices that compute latents,
    with their norm. Experts are split over ep and then, unless `fold_experts`, over tp.
    """
    kv_dim = max(1, shape.num_kv_heads // tp) * shape.head_dim
    dim, width = shape.dim, shape.dense_width // tp
    dense = shape.norms_per_layer * shape.norm_params * dim
    if shape.kv_latent_dim:
        whole = whole_latent_elems(shape)
        dense += whole + shape.kv_latent_dim + shape.q_latent_dim + (attention_elems(shape) - whole) // tp
    else:
        dense += 2 * dim * shape.q_dim // tp + 2 * dim * kv_dim
    dense += (shape.bias or shape.qkv_bias) * (shape.q_dim // tp + 2 * kv_dim)
    dense += shape.bias * dim + shape.qk_norm * 2 * shape.head_dim
    if not shape.has_experts(layer):
        matrices = 3 if shape.gated else 2
        return dense + matrices * dim * width + (width + dim) * shape.bias, 0
    dense += dim * shape.num_experts + 3 * dim * shape.shared_dim // tp
    return dense, shape.num_experts // ep * expert_elems(shape) // (1 if fold_experts else tp)


def expert_elems(shape: ModelShape) -> int:
    return (3 if shape.gated else 2) * shape.dim * shape.hidden_dim


def dense_matmul_elems(shape: ModelShape) -> int:
    """Return the number of matrix elements of a layer without experts."""
    return attention_elems(shape) + (3 if shape.gated else 2) * shape.dim * shape.dense_width


def layer_matmul_elems(shape: ModelShape, layer: int) -> int:
    """Return the number of weight elements that multiply a token; each costs a multiplication and an addition forward."""
    if not shape.has_experts(layer):
        return dense_matmul_elems(shape)
    return (
        attention_elems(shape)
        + shape.top_k * expert_elems(shape)
        + shape.dim * (shape.num_experts + 3 * shape.shared_dim)
    )


def forward_flops_per_token(shape: ModelShape, seq_len: int) -> int:
    """Return a forward's FLOPs per token, counted without a mask.

    2 * (matrix elements that multiply a token), plus 4 s h per layer for the scores and the weighted sum of values;
    with latent attention 2 s (2 h + a r), since queries and keys have r rotary features more in each of a heads.
    """
    matrices = (
        sum(layer_matmul_elems(shape, i) for i in range(shape.num_layers)) + shape.dim * shape.vocab_size
    )
    return 2 * matrices + 2 * shape.num_layers * seq_len * core_width(shape)


def model_flops_per_token(shape: ModelShape, seq_len: int) -> int:
    """Return the FLOPs per token of a forward and a backward, which is twice a forward.

    For a GPT, 72 l h^2 (1 + s/(6 h) + V/(12 l h)).
    """
    return 3 * forward_flops_per_token(shape, seq_len)


def hardware_flops_per_token(shape: ModelShape, seq_len: int, recompute: str = "none") -> int:
    """Return the FLOPs per token, including recomputation.

    "none" recomputes nothing, "selective" the attention core, "ops" half of the layers' products, "acts" no products; every
    other value recomputes the forward of all layers.

    With full recomputation, a GPT takes 96 l h^2 (1 + s/(6 h) + V/(16 l h)), because the head is not recomputed. Selective
    recomputation adds one forward of the core, 4 s h per layer. The paper's equation has s/(3 h) where this gives s/(6 h).
    Source: arXiv:2104.04473, equation 3; arXiv:2205.05198, appendix A.
    """
    core = 2 * shape.num_layers * seq_len * core_width(shape)
    layers = forward_flops_per_token(shape, seq_len) - 2 * shape.dim * shape.vocab_size
    again = {"none": 0, "acts": 0, "selective": core, "ops": (layers - core) // 2}
    return model_flops_per_token(shape, seq_len) + again.get(recompute, layers)
