"""Every point of the model that a strategy may override: its signature, which strategy overrides it, and why.

A module keeps its override points in `overrides`, one of the records below. None means the module's own function. The
records have slots: assigning a point that is not declared here raises AttributeError. Strategies also replace:

    child modules         (q, k, v, o, q_norm, k_norm, kv_down, k_rope, kv_norm, gate, up, down, norms, embedding, head)
                          replaced with sharded or replicated modules                                  tensor_parallel
    parameters            replaced with their shards                          tensor_parallel, expert_parallel, FSDP
    param.data            replaced with views of flat buckets                                                  ZeRO
    num_heads             and num_kv_heads of an `Attention`:
                          replaced with the numbers of heads that this rank computes                   tensor_parallel
    deferred              of a layer: replaced with a queue for its weight gradients (deferrable_linear.py)    pipeline
    forward               of an FSDP unit: replaced with the same function between two hooks                   FSDP
    compile               of an FSDP unit: replaced with an error, since torch.compile cannot trace the hooks  FSDP
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

# Maps rows sorted by expert, and the number of rows per expert, to the experts' outputs, one per row.
ExpertFunction = Callable[[Tensor, Tensor | Sequence[int]], Tensor]


@dataclass(slots=True)
class TransformerOverrides:
    """Override points of a `Transformer`.

    output             (logits, targets or None) -> logits, or the sum of cross-entropies where targets are given
                       tensor_parallel: logits [B, T, V/tp] are gathered if the caller wants logits, not for the loss
    whole_shape        (x) -> the shape that this stage's input, hidden states, would have in one process
                       tensor_parallel: on a grid of ranks, stages exchange blocks [B/R, T, D/C]
    sequence_length    (x) -> tokens per sample, given this stage's input
                       tensor_parallel: under sequence parallelism, stages exchange shards [B, T/tp, D]
    default_positions  (T, device) -> [T], each token's index in its sample; used where the caller gives no positions
                       context_parallel: this rank's tokens are not the first T
                       cache.py, pipeline: the tokens follow earlier tokens of the sequence
                       inference: [B, T], as each row is a token of some request
    run_blocks         (blocks, x, *args) -> x, the output of the stage's last block; each block is called with x and args
                       recompute="every:N": every N blocks under one activation checkpoint
    """

    output: Callable[[Tensor, Tensor | None], Tensor] | None = None
    whole_shape: Callable[[Tensor], tuple[int, ...]] | None = None
    sequence_length: Callable[[Tensor], int] | None = None
    default_positions: Callable[[int, torch.device], Tensor] | None = None
    run_blocks: Callable[..., Tensor] | None = None


@dataclass(slots=True)
class BlockOverrides:
    """Override points of a `Block`.

    call               (forward, *args) -> forward's result: a wrapper around the block's whole forward
                       recompute: activation checkpointing; relocate_activations: saved tensors sharded over tp, or in
                       CPU memory
    dropout            (x, site, indices, sample_ids, step) -> x
                       tensor_parallel: under sequence parallelism x holds this rank's tokens, but `indices` covers the
                       tokens of all tp ranks
    attention_and_mlp  (x, positions) -> attention(x) + mlp(x), in a parallel block
                       tensor_parallel: one all-reduce of dx for q, k, v, gate and up, and one of the outputs of o and down
    """

    call: Callable[..., Tensor] | None = None
    dropout: Callable[[Tensor, int, Tensor, Tensor, int], Tensor] | None = None
    attention_and_mlp: Callable[[Tensor, Tensor], Tensor] | None = None


class AttentionCore(Protocol):
    """Attention on q, k and v [B, heads, T, head_dim]. Gets `positions` where samples hold documents."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, positions: Tensor | None = None
    ) -> Tensor: ...


class CachedKeys(Protocol):
    """A cache of earlier tokens' keys and values, such as `KeyValueCache`."""

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append these keys and values; return those of all tokens so far."""


@dataclass(slots=True)
class AttentionOverrides:
    """Override points of an `Attention`.

    core         (q, k, v, causal=True, positions=...) -> out, all [B, heads, T, head_dim]
                 context_parallel: other ranks hold the other keys; recompute="selective": recomputed in the backward
                 inference: the keys of each token's own request, gathered from blocks
    project_qkv  (x) -> q, k, v; in a `LatentAttention`, q and the latents
                 tensor_parallel: the three sharded matrices have one input, so one reduction of dx suffices; latents are
                 not split
    positions    (positions) -> the positions of the samples in this rank's q, k and v
                 tensor_parallel: on a grid of ranks, a rank has only some of the samples
    cache        prepends the keys and values of earlier tokens
                 cache.py: generation processes each token once; pipeline: a slice of a sample sees the slices before it
    absorbed     a `LatentAttention` gives `core` and `cache` the latents themselves, as keys and values of a single head
                 cache.py, inference: so that the cache holds nothing but latents
    """

    core: AttentionCore | None = None
    project_qkv: Callable[[Tensor], tuple[Tensor, ...]] | None = None
    positions: Callable[[Tensor], Tensor] | None = None
    cache: CachedKeys | None = None
    absorbed: bool = False


@dataclass(slots=True)
class MLPOverrides:
    """Override points of a `SwiGLU`.

    project_gate_up  (x) -> gate, up
                     tensor_parallel: the two sharded matrices have one input, so one reduction of dx suffices
    """

    project_gate_up: Callable[[Tensor], tuple[Tensor, ...]] | None = None


class Dispatched(Protocol):
    """Rows, or tokens, on their way to the experts."""

    def through(self, experts: ExpertFunction) -> Tensor:
        """Return the experts' outputs, sent back to the rank from which the rows came."""


@dataclass(slots=True)
class MoEOverrides:
    """Override points of an `MoE`.

    dispatch         (rows, counts) -> a `Dispatched`, whose `through(experts)` returns outputs in the order of `rows`
                     expert_parallel: sends the rows by all-to-all
    dispatch_tokens  (x, weight, plan) -> a `Dispatched`, whose `through(experts)` returns each token's weighted sum. It
                     replaces `dispatch`, which sends one row for each choice
                     inference: every ep rank has all tokens, and sends no rows
    pad_to_capacity  give every expert `capacity` rows per group, used or not
                     expert_parallel: message sizes are then known before routing
    gather_tokens    (x) -> all tokens, for the router and the experts
                     tensor_parallel: under sequence parallelism each rank has T/tp tokens of a sample
    copy_input       (x) -> x, on the experts' input and on the weights of their outputs
                     tensor_parallel: the copy operator, whose backward is an all-reduce, as each rank has F/tp features;
                     or the tokens' features that this rank sends
    reduce_output    (y) -> the layer's output
                     tensor_parallel: summed over tp after combining experts, one row per token instead of k
    """

    dispatch: Callable[[Tensor, Tensor], Dispatched] | None = None
    dispatch_tokens: Callable[[Tensor, Tensor, Any], Dispatched] | None = None
    pad_to_capacity: bool = False
    gather_tokens: Callable[[Tensor], Tensor] | None = None
    copy_input: Callable[[Tensor], Tensor] | None = None
    reduce_output: Callable[[Tensor], Tensor] | None = None


# Attribute of a parameter: a function that is called with the deferred weight gradient, which is then not added to `.grad`.
# FSDP sets the attribute, since the parameter may be resharded by the time its deferred gradient is computed.
GRADIENT_RECEIVER = "receive_deferred_gradient"


class BeforeAdding(NamedTuple):
    """A hook of a parameter that must also run before a deferred gradient is added to `.grad`."""

    call: Callable[[Tensor], None]

    def __call__(self, gradient: Tensor) -> None:
        self.call(gradient)


@runtime_checkable
class GradientSync(Protocol):
    """The methods that the pipeline calls on DDP or FSDP, which reduce a stage's gradients over replicas.

    It declares no attributes, only methods: from Python 3.12 on, isinstance() does not find submodules of an `nn.Module`.
    """

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backwards accumulate gradients without reducing them."""

    def synchronize(self) -> None:
        """Reduce the accumulated gradients now."""


@runtime_checkable
class Resharding(Protocol):
    """The method that the pipeline calls on FSDP when it turns to another stage."""

    def reshard(self) -> None:
        """Free the unsharded parameters; they are gathered again when they are used."""
