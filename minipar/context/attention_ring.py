"""The function `ring_attention`: keys and values go around a ring, while each rank attends to the block that it holds.

Adds to `simple/ring_attention.py`: communication overlapped with compute, kernels and tiles, zigzag and striped layouts,
documents.

Every rank keeps its queries. In step s rank r holds the keys and values of rank r - s: it sends them to rank r + 1 while it
attends to them and merges the result by log-sum-exp (`minipar.model.lse_merge`). Besides its own keys and values, a rank
never holds more than two blocks.

Backward sends the blocks around once more. The gradient of a block follows it: each rank adds its part, and the last rank
sends the sum to the block's owner, which adds its own part. So each gradient is sent P - 1 times, as in a reduce-scatter.

    forward    2 N h_kv (P-1)/P elements sent per rank         h_kv = kv heads * head_dim, for each sample
    backward   4 N h_kv (P-1)/P                                the gradients in float32 or wider

A block that is wholly masked is sent on, and nothing is computed on it. Any layout works: the mask follows from the
tokens' indices in the whole sequence.

Source: arXiv:2310.01889, section 3 and appendix A.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from minipar.comm import Comm
from minipar.comm.transport.stream import Pending
from minipar.context.token_layout import local_runs
from minipar.model import autocast
from minipar.model.flash import AttentionKernel, check_shapes, choose
from minipar.model.lse_merge import empty_attention
from minipar.model.mask import Mask
from minipar.support.trace import span


def ring_attention(
    comm: Comm,
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
    impl       the implementation that computes a block, as in `flash_attention`; or an AttentionKernel

    Sends and receives B times the elements given at the top of this file, whatever the mask. Saves q, k, v, out and one
    log-sum-exp per query and head.
    Raises ValueError if shapes do not fit each other, or if the layout would not give this rank N/P tokens.
    """
    check_shapes(q, k, v)
    length = q.shape[2] * comm.size
    queries = local_runs(length, comm.rank, comm.size, layout)

    def mask_of(source: int) -> Mask:
        return Mask(queries, local_runs(length, source, comm.size, layout), causal, positions, seq_len)

    ring = Ring(comm, mask_of, choose(impl, q, mask_of(comm.rank)))
    return ring.attend(q, k, v)


class Ring(NamedTuple):
    """The Comm of the ring, the mask between this rank's queries and each rank's keys, and the kernel for one block."""

    comm: Comm
    mask_of: Callable[[int], Mask]
    kernel: AttentionKernel

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return attention of this rank's queries over all ranks' keys, for any mask; see `ring_attention`.

        q, out  [B, H, T, head_dim]      k, v  [B, H/g, S, head_dim]    S is the same on every rank, T need not be
        """
        out: Tensor = _RingAttention.apply(*autocast.cast(q, k, v), self)  # type: ignore[no-untyped-call]
        return out

    def source(self, step: int) -> int:
        """Return the rank whose keys and values this rank holds in this step."""
        return (self.comm.rank - step) % self.comm.size

    def start_shift(self, x: Tensor, kind: str = "ring_attention") -> Pending:
        """Start to send x to the right and receive as much from the left; the handle's `wait()` returns what arrives."""
        comm = self.comm
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        exchange = partial(comm.exchange, x, right, x.shape, x.dtype, left, out=torch.empty_like(x))
        arriving: Pending = comm.custom(kind, exchange, async_op=True)
        return arriving


class _RingAttention(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
        out, lse = empty_attention(q)
        kv = torch.stack((k, v))  # one message per step
        for step in range(ring.comm.size):
            arriving = ring.start_shift(kv) if step < ring.comm.size - 1 else None
            with span(ring.comm.trace, "compute", "forward"):
                ring.kernel.forward_(out, lse, q, *kv, ring.mask_of(ring.source(step)))
            kv = kv.new_empty(0) if arriving is None else arriving.wait()  # the last block is freed at once
        out = out.to(q.dtype)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        ring, size = ctx.ring, ctx.ring.comm.size
        kv, dq = torch.stack((k, v)), torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        own_dkv = torch.zeros(kv.shape, dtype=lse.dtype, device=kv.device)
        grads_arriving = None
        for step in range(size):
            arriving = ring.start_shift(kv) if step < size - 1 else None
            dkv = own_dkv if step == 0 else torch.zeros_like(own_dkv)
            with span(ring.comm.trace, "compute", "backward"):
                mask = ring.mask_of(ring.source(step))
                ring.kernel.backward_(dq, *dkv, q, *kv, out, lse, dout, mask)
            if step > 0:  # add the earlier ranks' dK and dV of this block, then pass the sum on
                if grads_arriving is not None:
                    dkv.add_(grads_arriving.wait())
                grads_arriving = ring.start_shift(dkv, "ring_attention_gradients")
            kv = kv.new_empty(0) if arriving is None else arriving.wait()  # the last block is freed at once
        if grads_arriving is not None:
            own_dkv.add_(grads_arriving.wait())
        dk, dv = own_dkv
        return *(grad.to(x.dtype) for grad, x in zip((dq, dk, dv), (q, k, v))), None
