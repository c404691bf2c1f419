"""Tensor parallelism of the whole model: how each of its layers is split.

    embedding            rows                                   one all-reduce forward
    attention            q, k, v by heads; o to match           one all-reduce forward, one backward
    mlp                  gate, up by features; down to match    one all-reduce forward, one backward
    parallel block       attention and mlp as above, together   one all-reduce forward, one backward
    experts              each expert like an mlp                one all-reduce forward, two backward
    head                 rows; the loss over split logits       one all-reduce backward
    norms                whole on every rank

A layer therefore needs four all-reduces of B*T*D elements: the operations between a column-parallel and a row-parallel
matrix act on each feature, or each head, separately, and need no communication.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from torch import Tensor, nn

from minipar.comm import Comm
from minipar.errors import one_of
from minipar.mesh import place_whole
from minipar.model.attention import Attention
from minipar.model.block import Block
from minipar.model.deferrable_linear import TiedHead
from minipar.model.mlp import SwiGLU
from minipar.model.moe import MoE
from minipar.model.norm import RMSNorm
from minipar.model.transformer import Transformer
from minipar.tensor_parallel.limits import check_tensor_parallel
from minipar.tensor_parallel.parallel_linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    project_together,
    sum_together,
)
from minipar.tensor_parallel.sequence import (
    SequenceParallelDropout,
    SequenceParallelLength,
    SequenceParallelRMSNorm,
)
from minipar.tensor_parallel.shards import replicate_parameter
from minipar.tensor_parallel.split_experts import split_experts
from minipar.tensor_parallel.vocab import VocabParallelEmbedding, VocabParallelOutput, VocabParallelTiedHead


def tensor_parallel(
    model: Transformer,
    comm,
    sequence_parallel: bool = False,
    chunked: bool = False,
    pad_vocab: bool = False,
    algorithm: str = "auto",
) -> Transformer:
    """Turn the one-process model, or a pipeline stage of it, into this rank's shard of it, in place; returns the model.

    comm               the tp ranks; each calls this with the same model
    sequence_parallel  between the split matrices each rank holds its own tokens: see `sequence.py`. Hidden states
                       between stages are then shards [B, T/tp, D], and tp must divide T
    chunked            sequence parallelism's communication in chunks, overlapped with the products: see `chunked.py`
    pad_vocab          where tp does not divide the vocabulary, split it as if it were padded to a multiple of tp. The
                       padding is not stored: the last rank has fewer rows, and no logit needs a mask
    algorithm          of the collectives, as in `Comm.using`

    `model.loss` never gathers the logits; `model(tokens)` does, and returns [B, T, V]. Gradients are already summed over
    tp when autograd accumulates them. Every parameter has a placement; see `full_state_dict`.

    Sends, per layer and microbatch, 8(tp-1)/tp * B*T*D elements; with `sequence_parallel`, whose backward gathers the
    inputs of column-parallel matrices again, 10(tp-1)/tp * B*T*D, and an all-reduce of the norms' 2 D gradients. With
    `parallel_block`, half of each, where the layer has no experts: 4, 5 and D. Where tp exceeds the key/value heads, the
    ranks that share a head sum its gradients.
    Raises ValueError, before anything is changed, where tp does not divide a dimension to be split, `chunked` is given
    without `sequence_parallel`, a block holds a layer that cannot be split, or the model is already in data parallelism.
    """
    if chunked and not sequence_parallel:
        raise ValueError(
            "chunked=True needs sequence_parallel=True: it is its gathers that are cut in pieces"
        )
    check_tensor_parallel(model.config, comm.size, pad_vocab)
    require_not_wrapped(model)
    _require_known_layers(model)
    comm = comm.using(algorithm) if algorithm != "auto" else comm
    _warn_if_padded(model.config.vocab_size, comm)
    place_whole(model)
    plan = TensorParallelPlan(comm, sequence_parallel, chunked)
    if model.first:
        model.embedding = VocabParallelEmbedding.from_embedding(
            model.embedding, comm, sequence_parallel, uneven=True
        )
    for block in model.layers.values():
        shard_block(block, plan)
    if model.last:
        model.norm = shard_norm(model.norm, plan)
        model.head = shard_head(model.head, plan)
        model.overrides.output = VocabParallelOutput(model.config.vocab_size, comm)
    if sequence_parallel:
        model.overrides.sequence_length = SequenceParallelLength(model.first, comm)
    return model


@dataclass(frozen=True)
class TensorParallelPlan:
    """The ranks over which layers are split, and how activations between the split matrices are held and sent."""

    comm: Comm
    sequence_parallel: bool
    chunked: bool

    def column(self, linear: nn.Module, **options) -> ColumnParallelLinear:
        return ColumnParallelLinear.from_linear(
            linear, self.comm, sequence_parallel=self.sequence_parallel, chunked=self.chunked, **options
        )

    def row(self, linear: nn.Module) -> RowParallelLinear:
        return RowParallelLinear.from_linear(
            linear, self.comm, sequence_parallel=self.sequence_parallel, chunked=self.chunked
        )


def shard_block(block: Block, plan: TensorParallelPlan) -> None:
    """Replace each layer of a block by this rank's shard of it."""
    for name, layer in list(block.named_children()):
        setattr(block, name, PARALLELIZE_BY_TYPE[type(layer)](layer, plan))
    if block.mlp_norm is None and isinstance(block.mlp, SwiGLU):
        block.overrides.attention_and_mlp = partial(attention_and_mlp, block.attention, block.mlp)
    if plan.sequence_parallel:
        block.overrides.dropout = SequenceParallelDropout(block, plan.comm)


def shard_attention(attention: Attention, plan: TensorParallelPlan) -> nn.Module:
    """Give each rank num_heads/tp query heads and the key/value heads that these read.

    Where there are fewer key/value heads than ranks, several ranks hold the same one.
    """
    kv_shards = min(plan.comm.size, attention.num_kv_heads)
    attention.q = plan.column(attention.q)
    attention.k = plan.column(attention.k, num_shards=kv_shards)
    attention.v = plan.column(attention.v, num_shards=kv_shards)
    attention.o = plan.row(attention.o)
    attention.overrides.project_qkv = partial(project_together, (attention.q, attention.k, attention.v))
    attention.num_heads //= plan.comm.size
    attention.num_kv_heads //= kv_shards
    return attention


def shard_mlp(mlp: SwiGLU, plan: TensorParallelPlan) -> nn.Module:
    """Give each rank the same features of gate and up, which are multiplied elementwise, and of down's input."""
    mlp.gate, mlp.up, mlp.down = plan.column(mlp.gate), plan.column(mlp.up), plan.row(mlp.down)
    mlp.overrides.project_gate_up = partial(project_together, (mlp.gate, mlp.up))
    return mlp


def attention_and_mlp(attention: Attention, mlp: SwiGLU, x: Tensor, positions: Tensor) -> Tensor:
    """Compute attention(x) + mlp(x) of one input with one sum over ranks forward and one, of dx, backward."""
    columns = (attention.q, attention.k, attention.v, mlp.gate, mlp.up)
    q, k, v, gate, up = project_together(columns, x)
    terms = attention.attend(q, k, v, positions), mlp.activate(gate, up)
    return sum_together((attention.o, mlp.down), terms)


def shard_norm(norm: RMSNorm, plan: TensorParallelPlan) -> nn.Module:
    replicate_parameter(norm.weight)
    return SequenceParallelRMSNorm(norm, plan.comm) if plan.sequence_parallel else norm


def shard_moe(moe: MoE, plan: TensorParallelPlan) -> nn.Module:
    return split_experts(moe, plan.comm, plan.sequence_parallel)


# The function that splits each type of layer: add a line to support another type.
PARALLELIZE_BY_TYPE = MappingProxyType(
    {Attention: shard_attention, SwiGLU: shard_mlp, MoE: shard_moe, RMSNorm: shard_norm}
)


def shard_head(head: nn.Module, plan: TensorParallelPlan) -> nn.Module:
    if isinstance(head, TiedHead):
        return VocabParallelTiedHead(plan.comm, plan.sequence_parallel)
    return plan.column(head, uneven=True)


def _warn_if_padded(vocab_size: int, comm) -> None:
    if vocab_size % comm.size and comm.rank == 0:
        padded = -(-vocab_size // comm.size) * comm.size
        warnings.warn(
            f"vocab_size={vocab_size} is cut over tp={comm.size} as if padded to {padded}", stacklevel=3
        )


def _require_known_layers(model: Transformer) -> None:
    for number, block in model.layers.items():
        for name, layer in block.named_children():
            if type(layer) not in PARALLELIZE_BY_TYPE:
                kinds = one_of(kind.__name__ for kind in PARALLELIZE_BY_TYPE)
                what = f"layers.{number}.{name} is a {type(layer).__name__}"
                raise ValueError(f"{what}, for which there is no cut; use {kinds}")


def require_not_wrapped(model: Transformer) -> None:
    for name, parameter in model.named_parameters():
        placement = getattr(parameter, "placement", None)
        if placement is not None and (placement.flat is not None or "dp" in placement.replicated):
            raise ValueError(
                f"{name} is in data parallelism already; cut over tp first, then wrap what is left of it"
            )
