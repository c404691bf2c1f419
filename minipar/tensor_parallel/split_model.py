"""Tensor parallelism of the whole model: how each of its layers is split.

    embedding            rows                                   one all-reduce forward
    attention            q, k, v by heads; o to match           one all-reduce forward, one backward
    mlp                  gate, up by features; down to match    one all-reduce forward, one backward
    parallel block       attention and mlp as above, together   one all-reduce forward, one backward
    experts              each expert like an mlp                one all-reduce forward, two backward
    head                 rows; the loss over split logits       one all-reduce backward
    norms                whole on every rank
    norms of q and k     whole; each rank's own heads           one all-reduce backward, of head_dim elements

A layer therefore needs four all-reduces of B*T*D elements. The operations between a column-parallel and a row-parallel
matrix need no communication, since they act on each feature, or each head, separately.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from torch import Tensor, nn

from minipar.comm import Comm, autograd
from minipar.config.train_config import TrainConfig
from minipar.mesh import place_whole
from minipar.model.attention import Attention
from minipar.model.block import Block
from minipar.model.deferrable_linear import Linear, TiedHead
from minipar.model.latent_attention import LatentAttention
from minipar.model.mlp import SwiGLU
from minipar.model.moe import MoE
from minipar.model.norm import RMSNorm
from minipar.model.transformer import Transformer
from minipar.tensor_parallel.before_split import checked
from minipar.tensor_parallel.by_plan import Plan, split_by_plan
from minipar.tensor_parallel.parallel_linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    project_together,
    sum_together,
)
from minipar.tensor_parallel.sequence import (
    TOKEN_DIM,
    SequenceParallelDropout,
    SequenceParallelLength,
    SequenceParallelLinear,
    SequenceParallelRMSNorm,
)
from minipar.tensor_parallel.shards import keep_parameters, replicate_parameter, shard_parameter
from minipar.tensor_parallel.split_experts import split_experts
from minipar.tensor_parallel.vocab import VocabParallelEmbedding, VocabParallelOutput, VocabParallelTiedHead

ModelT = TypeVar("ModelT", bound=nn.Module)


def tensor_parallel(
    model: ModelT,
    comm: Comm,
    sequence_parallel: bool = False,
    chunked: bool = False,
    pad_vocab: bool = False,
    algorithm: str = "auto",
    plan: Plan | str | None = None,
) -> ModelT:
    """Turn the one-process model, or a stage of it, into this rank's shard, in place; return it.

    comm               the tp ranks; each calls this with the same model
    sequence_parallel  between the split matrices each rank holds its own tokens: see `sequence.py`. Hidden states
                       between stages are then shards [B, T/tp, D], and tp must divide T
    chunked            sequence parallelism's communication in chunks, overlapped with the products: see `chunked.py`
    pad_vocab          where tp does not divide the vocabulary, split it as if it were padded to a multiple of tp. The
                       padding is not stored: the last rank has fewer rows, and no logit needs a mask
    algorithm          the algorithm of the collectives, as in `Comm.using`
    plan               for a model that is not minipar's Transformer: which modules are split, and how; see `by_plan.py`.
                       "llama" and "gpt2" are plans for Hugging Face's models

    `model.loss` never gathers the logits; `model(tokens)` does, and returns [B, T, V]. Gradients are already summed over
    tp when autograd accumulates them. Every parameter has a placement; see `full_state_dict`. The parameters stay the same
    objects, so an optimizer may be made before or after.

    Sends, per layer and microbatch, 8(tp-1)/tp * B*T*D elements. With `sequence_parallel`, the backward gathers the inputs
    of column-parallel matrices again: it sends 10(tp-1)/tp * B*T*D, and an all-reduce of the norms' 2 D gradients. A
    parallel block without experts sends half of each: 4 for the 8, 5 for the 10, and D for the 2 D. Where tp exceeds the
    number of key/value heads, the ranks that share a head sum its gradients. Norms of queries and keys have an all-reduce
    each, of head_dim elements. Latent attention also sends what `shared_latents` sends and, with `sequence_parallel`, an
    all-reduce of the gradients of kv_down, k_rope and kv_norm.
    Raises ValueError, before anything is changed, where ranks have other weights or another plan, tp does not divide a
    dimension to be split, `chunked` is given without `sequence_parallel`, a block holds a layer that cannot be split, the
    model is already in data parallelism, or it is of another class and has no plan.
    """
    options = {"sequence_parallel": sequence_parallel, "chunked": chunked, "pad_vocab": pad_vocab}
    before = checked(model, comm, plan, tuple(PARALLELIZE_BY_TYPE), **options)
    comm = comm.using(algorithm) if algorithm != "auto" else comm
    if plan is not None:
        split_by_plan(model, comm, plan)
    else:
        assert isinstance(model, Transformer)
        split_transformer(model, TensorParallelPlan(comm, sequence_parallel, chunked))
    keep_parameters(model, before)
    return model


def split_transformer(model: Transformer, how: TensorParallelPlan) -> None:
    """Replace each layer of the model, or of a stage of it, by this rank's shard of it."""
    place_whole(model)
    if model.first:
        model.embedding = VocabParallelEmbedding.from_embedding(
            model.embedding, how.comm, how.sequence_parallel, uneven=True
        )
    for block in model.layers.values():
        assert isinstance(block, Block)
        shard_block(block, how)
    if model.last:
        model.norm = shard_norm(model.norm, how)
        model.head = shard_head(model.head, how)
        model.overrides.output = VocabParallelOutput(model.config.vocab_size, how.comm)
    if how.sequence_parallel:
        model.overrides.sequence_length = SequenceParallelLength(model.first, how.comm)


def cut_stage(stage: Transformer, tp: Comm, config: TrainConfig) -> None:
    """Apply `tensor_parallel` to a stage with the options of a run. `--tp-layout 1d` loads this function."""
    tensor_parallel(stage, tp, config.sequence_parallel, config.tp_chunked, config.pad_vocab)


@dataclass(frozen=True)
class TensorParallelPlan:
    """The ranks that layers are split over, and how activations between the split matrices are stored and sent."""

    comm: Comm
    sequence_parallel: bool
    chunked: bool

    def column(self, linear: Linear, **options: Any) -> ColumnParallelLinear:
        return ColumnParallelLinear.from_linear(
            linear, self.comm, sequence_parallel=self.sequence_parallel, chunked=self.chunked, **options
        )

    def row(self, linear: Linear) -> RowParallelLinear:
        return RowParallelLinear.from_linear(
            linear, self.comm, sequence_parallel=self.sequence_parallel, chunked=self.chunked
        )


def shard_block(block: Block, plan: TensorParallelPlan) -> None:
    """Replace each layer of a block by this rank's shard of it."""
    for name, layer in list(block.named_children()):
        setattr(block, name, PARALLELIZE_BY_TYPE[type(layer)](layer, plan))
    if block.mlp_norm is None and isinstance(block.mlp, SwiGLU):
        columns = [
            m for m in block.modules() if isinstance(m, ColumnParallelLinear)
        ]  # q, k, v (of latent attention, q alone), gate, up
        rows = [m for m in block.modules() if isinstance(m, RowParallelLinear)]  # o, down
        others = partial(latents_of, block.attention, plan)
        block.overrides.attention_and_mlp = partial(
            attention_and_mlp, block.attention, block.mlp, columns, rows, others
        )
    if plan.sequence_parallel:
        block.overrides.dropout = SequenceParallelDropout(block, plan.comm)


def shard_attention(attention: Attention, plan: TensorParallelPlan) -> nn.Module:
    """Give each rank num_heads/tp query heads, and the key/value heads that its query heads attend to.

    Where there are fewer key/value heads than ranks, several ranks hold the same head.
    """
    kv_shards = min(plan.comm.size, attention.num_kv_heads)
    attention.q = plan.column(attention.q)
    attention.k = plan.column(attention.k, num_shards=kv_shards)
    attention.v = plan.column(attention.v, num_shards=kv_shards)
    attention.o = plan.row(attention.o)
    if attention.q_norm is not None and attention.k_norm is not None:
        attention.q_norm = shard_norm(attention.q_norm, plan, of_heads=True)
        attention.k_norm = shard_norm(attention.k_norm, plan, of_heads=True)
    attention.overrides.project_qkv = partial(project_together, (attention.q, attention.k, attention.v))
    attention.num_heads //= plan.comm.size
    attention.num_kv_heads //= kv_shards
    return attention


def shard_latent_attention(attention: LatentAttention, plan: TensorParallelPlan) -> nn.Module:
    """Give each rank num_heads/tp heads: their rows of q, k_up and v_up, and their columns of o.

    Every head uses the whole latent, so every rank computes it: kv_down, kv_norm and k_rope are on every rank.
    With sequence parallelism a rank computes those of its own tokens, and gathers them.
    """
    attention.q = plan.column(attention.q)
    for matrix in (attention.k_up, attention.v_up):
        matrix.weight = shard_parameter(matrix.weight, 0, plan.comm.rank, plan.comm.size)
        matrix.out_features //= plan.comm.size
    attention.o = plan.row(attention.o)
    attention.kv_down = shard_replica(attention.kv_down, plan)
    attention.k_rope = shard_replica(attention.k_rope, plan)
    attention.kv_norm = shard_norm(attention.kv_norm, plan)
    attention.overrides.project_qkv = lambda x: (attention.q(x), *shared_latents(attention, plan, x))
    attention.num_heads //= plan.comm.size
    attention.num_kv_heads //= plan.comm.size
    return attention


def shared_latents(attention: LatentAttention, plan: TensorParallelPlan, x: Tensor) -> tuple[Tensor]:
    """Return the latents of all tokens [B, T, c + r], which are the same on every rank and serve each rank's own heads.

    x         [B, T, D], or with sequence parallelism [B, T/tp, D]
    backward  the sum over ranks of the latents' gradients, each of which comes from a rank's own heads

    Sends 2(tp-1)/tp * B*T*(c + r) elements backward; with sequence parallelism half of that forward and half backward.
    """
    latents = attention.latents(x)
    if plan.sequence_parallel:
        return (autograd.all_gather(plan.comm, latents, dim=TOKEN_DIM),)
    return (autograd.copy(plan.comm, latents),)


def latents_of(attention: Attention, plan: TensorParallelPlan, x: Tensor) -> tuple[Tensor, ...]:
    """Return attention's inputs besides the products of its column-parallel matrices: latents, if it has any."""
    return shared_latents(attention, plan, x) if isinstance(attention, LatentAttention) else ()


def shard_replica(linear: Linear, plan: TensorParallelPlan) -> Linear:
    """Mark a matrix as unsharded: every rank has all of it."""
    replicate_parameter(linear.weight)
    return SequenceParallelLinear(linear, plan.comm) if plan.sequence_parallel else linear


def shard_mlp(mlp: SwiGLU, plan: TensorParallelPlan) -> nn.Module:
    """Give each rank the same range of features of gate, of up (they are multiplied elementwise) and of down's input."""
    mlp.gate = plan.column(mlp.gate)
    mlp.up = plan.column(mlp.up)
    mlp.down = plan.row(mlp.down)
    mlp.overrides.project_gate_up = partial(project_together, (mlp.gate, mlp.up))
    return mlp


def attention_and_mlp(
    attention: Attention,
    mlp: SwiGLU,
    columns: Sequence[ColumnParallelLinear],
    rows: Sequence[RowParallelLinear],
    others: Callable[[Tensor], tuple[Tensor, ...]],
    x: Tensor,
    positions: Tensor,
) -> Tensor:
    """Compute attention(x) + mlp(x) with one sum over ranks in the forward, and one of dx in the backward.

    columns  the matrices that multiply x
    rows     the matrices that multiply the results
    others   attention's other inputs: see `latents_of`
    """
    *qkv, gate, up = project_together(columns, x)
    return sum_together(rows, (attention.attend((*qkv, *others(x)), positions), mlp.activate(gate, up)))


def shard_norm(norm: RMSNorm, plan: TensorParallelPlan, of_heads: bool = False) -> RMSNorm:
    """Mark a norm's weight as unsharded, and sum its gradient where each rank norms its own tokens or its own heads."""
    replicate_parameter(norm.weight)
    return SequenceParallelRMSNorm(norm, plan.comm) if plan.sequence_parallel or of_heads else norm


def shard_moe(moe: MoE, plan: TensorParallelPlan) -> nn.Module:
    return split_experts(moe, plan.comm, plan.sequence_parallel)


# The function that splits each type of layer: add a line to support another type.
PARALLELIZE_BY_TYPE: Mapping[type[nn.Module], Callable[[Any, TensorParallelPlan], nn.Module]] = (
    MappingProxyType(
        {
            Attention: shard_attention,
            LatentAttention: shard_latent_attention,
            SwiGLU: shard_mlp,
            MoE: shard_moe,
            RMSNorm: shard_norm,
        }
    )
)


def shard_head(head: TiedHead | Linear, plan: TensorParallelPlan) -> TiedHead | Linear:
    if isinstance(head, TiedHead):
        return VocabParallelTiedHead(plan.comm, plan.sequence_parallel)
    return plan.column(head, uneven=True)
