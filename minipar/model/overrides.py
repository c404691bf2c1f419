"""Every point of the model that a strategy may override: its signature, who overrides it, and why.

A module keeps its points in `overrides`, one of the records below. None means the module's own function. The records have
slots: assigning a point that is not declared here raises AttributeError. Besides, strategies replace

    child modules         q, k, v, o, gate, up, down, norms, embedding, head by their cut versions     tensor_parallel
    parameters            by their shards                               tensor_parallel, expert_parallel, ZeRO, FSDP
    num_heads             of an Attention, and num_kv_heads: those that this rank computes             tensor_parallel
    deferred              of layers whose weight gradient can wait (deferrable_linear.py)              pipeline
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor, nn


@dataclass(slots=True)
class TransformerOverrides:
    """
    output             (logits, targets or None) -> logits, or the sum of cross-entropies where targets are given
                       tensor_parallel: logits [B, T, V/tp] are gathered for the caller, and never for the loss
    sequence_length    (x) -> tokens of a sample, given this stage's input
                       tensor_parallel: hidden states between stages are shards [B, T/tp, D]
    default_positions  (T, device) -> [T], where the caller gives no positions
                       context_parallel: this rank's tokens are not the first T; KeyValueCache: they follow earlier ones
    """

    output: Callable[[Tensor, Tensor | None], Tensor] | None = None
    sequence_length: Callable[[Tensor], int] | None = None
    default_positions: Callable | None = None


@dataclass(slots=True)
class BlockOverrides:
    """
    call     (forward, *args) -> its result: a wrapper around the block's whole forward
             recompute: activation checkpointing; relocate_activations: saved tensors cut over tp, or in CPU memory
    dropout  (x, site, positions, sample_ids, step) -> x
             tensor_parallel: under sequence parallelism x is this rank's tokens, whose positions are a part of those given
    """

    call: Callable | None = None
    dropout: Callable | None = None


@dataclass(slots=True)
class AttentionOverrides:
    """
    core         (q, k, v, causal=True, positions=...) -> out, all [B, heads, T, head_dim]
                 context_parallel: other ranks hold the other keys; recompute="selective": computed again in the backward
    project_qkv  (x) -> q, k, v
                 tensor_parallel: one input and three cut matrices need one sum of dx
    cache        a KeyValues, which adds the keys and values of earlier tokens
                 generation: each token is read once
    """

    core: Callable | None = None
    project_qkv: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]] | None = None
    cache: object | None = None


@dataclass(slots=True)
class MLPOverrides:
    """
    project_gate_up  (x) -> gate, up
                     tensor_parallel: one input and two cut matrices need one sum of dx
    """

    project_gate_up: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None


@dataclass(slots=True)
class MoEOverrides:
    """
    dispatch         (rows, counts) -> an object with `arrive()` and `combine(out)`: rows on their way to their experts
                     expert_parallel: by all-to-all
    pad_to_capacity  give every expert and group rows up to its capacity, used or not
                     expert_parallel: message sizes that are known before anything is routed
    gather_tokens    (x) -> the tokens that the router sees
                     tensor_parallel: under sequence parallelism each rank has some of them
    copy_input       (x) -> x, where the experts' hidden features begin to differ between ranks
                     tensor_parallel: the copy operator, whose backward is an all-reduce
    reduce_output    (y) -> the layer's output
                     tensor_parallel: summed after combining experts, one row per token and not k
    """

    dispatch: Callable | None = None
    pad_to_capacity: bool = False
    gather_tokens: Callable[[Tensor], Tensor] | None = None
    copy_input: Callable[[Tensor], Tensor] | None = None
    reduce_output: Callable[[Tensor], Tensor] | None = None


# On a parameter: the name of a function (gradient) that takes a deferred weight gradient in place of `.grad`.
# FSDP sets it, for the parameter that the gradient belongs to has been resharded meanwhile.
GRADIENT_RECEIVER = "receive_deferred_gradient"


@runtime_checkable
class GradientSync(Protocol):
    """A module around a stage that reduces gradients over replicas, as the pipeline needs it: DDP, FSDP."""

    module: nn.Module

    def no_sync(self):
        """A context whose backwards only accumulate."""

    def synchronize(self) -> None:
        """Reduce the accumulated gradients now."""
