"""Ring attention: blocks of keys and values are sent around a ring while each rank attends to the block that it holds.

`simple/ring_attention.py`, plus communication overlapped with compute, kernels and tiles, zigzag and striped layouts,
documents.

Every rank keeps its queries. In step s rank r holds the keys and values of rank r - s: it sends them to rank r + 1 while it
attends to them and merges the result by log-sum-exp (`minipar.model.lse_merge`). Besides its own keys and values, a rank
never holds more than two blocks.

Backward sends the blocks around once more. The gradient of a block follows it: each rank adds its part, and the last rank
sends the sum to the block's owner, which adds its own part. So it is sent P - 1 times, as in a reduce-scatter.

    forward    2 N h_kv (P-1)/P elements sent per rank         h_kv = kv heads * head_dim, for each sample
    backward   4 N h_kv (P-1)/P                                the gradients in float32 or wider

A block that is wholly masked is sent on, and nothing is computed on it. Any layout works: the mask follows from the
tokens' indices in the whole sequence.

Source: arXiv:2310.01889, section 3 and appendix A.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from minipar.context.token_layout import local_runs
from minipar.model.flash import AttentionKernel, check_shapes, choose
from minipar.model.lse_merge import empty_attention
from minipar.model.mask import Mask
from minipar.trace import span


def ring_attention(
    comm,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = True,
    layout: str = "contiguous",
    positions: Tensor | None = None,
    seq_len: int | None = None,
    impl: str | AttentionKernel = "auto",
) -> Tensor:
    """Compute this rank's part of attention over a sequence whose tokens are split over `comm`.

    q, out     [B, H, N/P, head_dim]      this rank's tokens, in the order of `layout`: see `token_layout.py`
    k, v       [B, H/g, N/P, head_dim]
    positions  None, or the position of each of this rank's tokens in its document, [N/P] or [B, N/P]
    seq_len    None, or the length of the sequence without its padding: later keys are masked
    impl       what computes a block, as in `flash_attention`; or an AttentionKernel

    Sends and receives B times the elements given at the top of this file, whatever the mask. Saves q, k, v, out and one
    log-sum-exp per query and head.
    Raises ValueError where shapes do not fit, or N/P is not what the layout cuts.
    """
    check_shapes(q, k, v)
    length = q.shape[2] * comm.size
    queries = local_runs(length, comm.rank, comm.size, layout)

    def mask_of(source: int) -> Mask:
        return Mask(queries, local_runs(length, source, comm.size, layout), causal, positions, seq_len)

    return _RingAttention.apply(q, k, v, Ring(comm, mask_of, choose(impl, q, mask_of(comm.rank))))


class Ring(NamedTuple):
    """The Comm of the ring, the mask between this rank's queries and each rank's keys, and the kernel for one block."""

    comm: object
    mask_of: Callable[[int], Mask]
    kernel: AttentionKernel

    def source(self, step: int) -> int:
        """Return the rank whose keys and values this rank holds in this step."""
        return (self.comm.rank - step) % self.comm.size

    def start_shift(self, x: Tensor, kind: str = "ring_attention"):
        """Start to send x to the right and receive as much from the left; return a handle whose `wait()` returns that."""
        comm = self.comm
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        exchange = partial(comm.exchange, x, right, x.shape, x.dtype, left, out=torch.empty_like(x))
        return comm.custom(kind, exchange, async_op=True)


class _RingAttention(Function):
    @staticmethod
    def forward(ctx, q, k, v, ring):
        out, lse = empty_attention(q)
        kv = torch.stack((k, v))  # one message per step
        for step in range(ring.comm.size):
            arriving = ring.start_shift(kv) if step < ring.comm.size - 1 else None
            with span(ring.comm.trace, "compute", "forward"):
                ring.kernel.forward_(out, lse, q, *kv, ring.mask_of(ring.source(step)))
            kv = arriving.wait() if arriving else None
        out = out.to(q.dtype)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        ring, size = ctx.ring, ctx.ring.comm.size
        kv, dq = torch.stack((k, v)), torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        own = grads_arriving = None
        for step in range(size):
            arriving = ring.start_shift(kv) if step < size - 1 else None
            dkv = torch.zeros(kv.shape, dtype=lse.dtype, device=kv.device)
            with span(ring.comm.trace, "compute", "backward"):
                mask = ring.mask_of(ring.source(step))
                ring.kernel.backward_(dq, *dkv, q, *kv, out, lse, dout, mask)
            if step == 0:
                own = dkv
            else:  # add the earlier ranks' dK and dV of this block, then pass the sum on
                dkv = dkv if grads_arriving is None else dkv.add_(grads_arriving.wait())
                grads_arriving = ring.start_shift(dkv, "ring_attention_gradients")
            kv = arriving.wait() if arriving else None
        dk, dv = own if grads_arriving is None else own.add_(grads_arriving.wait())
        return *(grad.to(x.dtype) for grad, x in zip((dq, dk, dv), (q, k, v))), None
