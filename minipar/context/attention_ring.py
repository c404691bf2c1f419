"""Ring attention: keys and values travel around the ring while each rank attends to the ones it has.

`simple/ring_attention.py`, plus communication behind compute, kernels and tiles, zigzag and striped layouts, documents.

Every rank keeps its queries. In step s rank r holds the keys and values of rank r - s; it merges them into its result by
their log-sum-exps (`minipar.model.lse_merge`) while they are already on their way to rank r + 1. No rank ever holds more
than two blocks of keys and values.

Backward they travel once more. The gradient of a block follows it around: each rank adds its part, and after the
last rank it is sent home, where the owner's own part waits for it. So it moves P - 1 times, as in a reduce-scatter.

    forward    2 N h_kv (P-1)/P elements sent by a rank        h_kv = kv heads * head_dim, for each sample
    backward   4 N h_kv (P-1)/P                                the gradients in float32 or wider

A block of which nothing is seen is passed on without being computed. Works wherever the layout has put the tokens: what is
seen is decided by their places in the whole sequence.

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
from minipar.model.lse_merge import no_keys
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
    """This rank's part of the attention of a sequence whose tokens are split over `comm`.

    q, out     [B, H, N/P, head_dim]      this rank's tokens, as `layout` has it: see `layout.py`
    k, v       [B, H/g, N/P, head_dim]
    positions  None, or of the documents' tokens here, [N/P] or [B, N/P]
    seq_len    where the sequence is padded, its length without: keys beyond are not seen
    impl       what computes a block, as in `flash_attention`; or a AttentionKernel of one's own

    Sends and receives B times what is said above, whatever the mask. Keeps q, k, v, out and a number a query.
    Raises ValueError where shapes do not fit, or N/P is not what the layout cuts.
    """
    check_shapes(q, k, v)
    length = q.shape[2] * comm.size
    queries = local_runs(length, comm.rank, comm.size, layout)

    def mask_of(source: int) -> Mask:
        return Mask(queries, local_runs(length, source, comm.size, layout), causal, positions, seq_len)

    return _RingAttention.apply(q, k, v, Ring(comm, mask_of, choose(impl, q, mask_of(comm.rank))))


class Ring(NamedTuple):
    """The ranks, what this rank's queries see of each rank's keys, and what computes a block."""

    comm: object
    mask_of: Callable[[int], Mask]
    kernel: AttentionKernel

    def source(self, step: int) -> int:
        """Whose keys are here in this step."""
        return (self.comm.rank - step) % self.comm.size

    def pass_on(self, x: Tensor, kind: str = "ring_attention"):
        """Send x to the right and receive as much from the left, meanwhile; a handle whose `wait()` gives that."""
        comm = self.comm
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        exchange = partial(comm.exchange, x, right, x.shape, x.dtype, left, out=torch.empty_like(x))
        return comm.custom(kind, exchange, async_op=True)


class _RingAttention(Function):
    @staticmethod
    def forward(ctx, q, k, v, ring):
        out, lse = no_keys(q)
        kv = torch.stack((k, v))  # one message a step
        for step in range(ring.comm.size):
            arriving = ring.pass_on(kv) if step < ring.comm.size - 1 else None
            with span(ring.comm.trace, "compute", "forward"):
                ring.kernel.attend_(out, lse, q, *kv, ring.mask_of(ring.source(step)))
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
            arriving = ring.pass_on(kv) if step < size - 1 else None
            dkv = torch.zeros(kv.shape, dtype=lse.dtype, device=kv.device)
            with span(ring.comm.trace, "compute", "backward"):
                mask = ring.mask_of(ring.source(step))
                ring.kernel.attend_backward_(dq, *dkv, q, *kv, out, lse, dout, mask)
            if step == 0:
                own = dkv
            else:  # what the ranks before have found for this block comes after it, and goes on with it
                dkv = dkv if grads_arriving is None else dkv.add_(grads_arriving.wait())
                grads_arriving = ring.pass_on(dkv, "ring_attention_gradients")
            kv = arriving.wait() if arriving else None
        dk, dv = own if grads_arriving is None else own.add_(grads_arriving.wait())
        return *(grad.to(x.dtype) for grad, x in zip((dq, dk, dv), (q, k, v))), None
