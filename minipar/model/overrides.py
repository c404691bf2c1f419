"""Every point of the model that a strategy may override: its signature, which strategy overrides it, and why.

A module keeps its override points in `overrides`, one of the records below. None means the module's own function. The
records have slots: assigning a point that is not declared here raises AttributeError. Strategies also replace

    child modules         q, k, v, o, gate, up, down, norms, embedding, head, by sharded ones          tensor_parallel
    parameters            by their shards                                     tensor_parallel, expert_parallel, FSDP
    param.data            by views of flat buckets                                                     ZeRO
    num_heads             of an Attention, and num_kv_heads, by the heads that this rank computes      tensor_parallel
    deferred              of a layer, by a queue for its weight gradients (deferrable_linear.py)       pipeline
    forward               of a unit, by itself between two hooks                                       FSDP
    compile               of a unit, by a refusal: torch.compile cannot trace the hooks                FSDP
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor, nn


@dataclass(slots=True)
class TransformerOverrides:
    """Override points of a `Transformer`.

    output             (logits, targets or None) -> logits, or the sum of cross-entropies where targets are given
                       tensor_parallel: logits [B, T, V/tp] are gathered for the caller, and never for the loss
    whole_shape        (x) -> the shape in one process of the hidden states that are this stage's input
                       tensor_parallel: on a grid of ranks, stages exchange blocks [B/R, T, D/C]
    sequence_length    (x) -> tokens per sample, given this stage's input
                       tensor_parallel: under sequence parallelism, stages exchange shards [B, T/tp, D]
    default_positions  (T, device) -> [T], each token's index in its sample: its position where the caller gives none
                       context_parallel: this rank's tokens are not the first T
                       cache.py, pipeline: the tokens follow earlier ones, of the text or of the sample
    run_blocks         (blocks, x, *args) -> x, all of the stage's blocks one after another, each called with x and args
                       recompute="every:N": N of them under one activation checkpoint
    """

    output: Callable[[Tensor, Tensor | None], Tensor] | None = None
    whole_shape: Callable[[Tensor], tuple[int, ...]] | None = None
    sequence_length: Callable[[Tensor], int] | None = None
    default_positions: Callable | None = None
    run_blocks: Callable | None = None


@dataclass(slots=True)
class BlockOverrides:
    """Override points of a `Block`.

    call               (forward, *args) -> forward's result: a wrapper around the block's whole forward
                       recompute: activation checkpointing; relocate_activations: saved tensors sharded over tp, or in
                       CPU memory
    dropout            (x, site, indices, sample_ids, step) -> x
                       tensor_parallel: under sequence parallelism x holds this rank's tokens, and `indices` those of all
                       tp ranks
    attention_and_mlp  (x, positions) -> attention(x) + mlp(x), of a parallel block
                       tensor_parallel: one sum of dx for q, k, v, gate and up, and one of the outputs of o and down
    """

    call: Callable | None = None
    dropout: Callable | None = None
    attention_and_mlp: Callable[[Tensor, Tensor], Tensor] | None = None


@dataclass(slots=True)
class AttentionOverrides:
    """Override points of an `Attention`.

    core         (q, k, v, causal=True, positions=...) -> out, all [B, heads, T, head_dim]
                 context_parallel: other ranks hold the other keys; recompute="selective": recomputed in the backward
    project_qkv  (x) -> q, k, v
                 tensor_parallel: the three sharded matrices have one input, so one reduction of dx suffices
    positions    (positions) -> those of the samples that this rank's q, k and v hold
                 tensor_parallel: on a grid of ranks, a rank has some of the samples
    cache        an object as KeyValueCache, whose `extend` prepends the keys and values of earlier tokens
                 cache.py: generation reads each token once; pipeline: a slice of a sample sees the slices before it
    """

    core: Callable | None = None
    project_qkv: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]] | None = None
    positions: Callable[[Tensor], Tensor] | None = None
    cache: object | None = None


@dataclass(slots=True)
class MLPOverrides:
    """Override points of a `SwiGLU`.

    project_gate_up  (x) -> gate, up
                     tensor_parallel: the two sharded matrices have one input, so one reduction of dx suffices
    """

    project_gate_up: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None


@dataclass(slots=True)
class MoEOverrides:
    """Override points of an `MoE`.

    dispatch         (rows, counts) -> an object whose `through(experts)` returns the experts' outputs in the order of
                     `rows`; `experts` maps rows sorted by expert, and the rows per expert, to as many rows
                     expert_parallel: by all-to-all
    dispatch_tokens  (x, weight, plan) -> an object whose `through(experts)` returns each token's weighted sum: in place of
                     `dispatch`, which has a row for each choice
                     expert_parallel: one row for each node that a token uses
    pad_to_capacity  give every expert `capacity` rows per group, used or not
                     expert_parallel: message sizes are known before routing
    gather_tokens    (x) -> all tokens, for the router and the experts
                     tensor_parallel: under sequence parallelism each rank has T/tp tokens of a sample
    copy_input       (x) -> x, on the experts' input and on the weights of their outputs
                     tensor_parallel: the copy operator, whose backward is an all-reduce, as each rank has F/tp features
    reduce_output    (y) -> the layer's output
                     tensor_parallel: summed over tp after combining experts, one row per token instead of k
    """

    dispatch: Callable | None = None
    dispatch_tokens: Callable | None = None
    pad_to_capacity: bool = False
    gather_tokens: Callable[[Tensor], Tensor] | None = None
    copy_input: Callable[[Tensor], Tensor] | None = None
    reduce_output: Callable[[Tensor], Tensor] | None = None


# Name of an attribute of a parameter: a function (gradient) that receives a deferred weight gradient in place of `.grad`.
# FSDP sets it, since the parameter may be resharded by the time its deferred gradient is computed.
GRADIENT_RECEIVER = "receive_deferred_gradient"


@runtime_checkable
class GradientSync(Protocol):
    """The methods that the pipeline calls on a wrapper which reduces a stage's gradients over replicas: DDP, FSDP."""

    module: nn.Module

    def no_sync(self):
        """Return a context in which backwards accumulate gradients without reducing them."""

    def synchronize(self) -> None:
        """Reduce the accumulated gradients now."""
