"""Context parallelism by all-gather: every rank all-gathers keys and values, and attends with its own queries.

This is simpler than a ring and sends no more bytes; but no computation overlaps the first all-gather, and each rank holds
the keys and values of the whole sequence. Gathering `heads_at_once` key/value heads at a time bounds this memory, and
overlaps every all-gather except the first with the attention of the previous heads. Each rank saves only its own keys and
values; the backward gathers them again, and reduce-scatters their gradients.

    forward    2 N h_kv (P-1)/P elements sent per rank         h_kv = kv heads * head_dim, for each sample
    backward   4 N h_kv (P-1)/P                                the gradients in float32 or wider

Source: Llama 3, arXiv:2407.21783, section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Iterator
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
from minipar.model.mask import Mask, TokenRun, indices
from minipar.support.errors import require_divides
from minipar.support.staging import to_device
from minipar.support.trace import span


def all_gather_attention(
    comm: Comm,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = True,
    layout: str = "contiguous",
    positions: Tensor | None = None,
    seq_len: int | None = None,
    impl: str = "auto",
    heads_at_once: int | None = None,
) -> Tensor:
    """Compute this rank's part of attention over a split sequence; arguments as in `ring_attention`.

    heads_at_once  key/value heads gathered at a time; None: all. For each sample a rank then holds 2 * 2 * N * head_dim
                   * heads_at_once elements: the keys and values of the current heads and of the next ones

    Raises ValueError if heads_at_once does not divide the key/value heads.
    """
    check_shapes(q, k, v)
    require_divides("heads_at_once", heads_at_once or k.shape[1], "key/value heads", k.shape[1])
    length, p = q.shape[2] * comm.size, comm.size
    keys = tuple(run for r in range(p) for run in local_runs(length, r, p, layout))
    # Zigzag keys are sorted into sequence order: the mask then has fewer, larger regions.
    runs, keys = (keys, (TokenRun(0, length),)) if layout == "zigzag" else (None, keys)
    mask = Mask(local_runs(length, comm.rank, p, layout), keys, causal, positions, seq_len)
    q, k, v = autocast.cast(q, k, v)
    gathered = KeyValueGather(comm, mask, choose(impl, q, mask), runs, heads_at_once or k.shape[1])
    y: Tensor = _AllGatherAttention.apply(q, k, v, gathered)  # type: ignore[no-untyped-call]
    return y


class KeyValueGather(NamedTuple):
    """The all-gather of keys and values, and the reduce-scatter of their gradients, by chunks of heads.

    mask  which of the gathered keys this rank's queries see
    runs  None, or the token runs in gathered order: keys are then sorted into sequence order
    """

    comm: Comm
    mask: Mask
    kernel: AttentionKernel
    runs: tuple[TokenRun, ...] | None
    heads_at_once: int

    def chunks(self, k: Tensor, v: Tensor) -> list[Tensor]:
        """Split k and v by heads into chunks of [2, B, heads_at_once, N/P, head_dim]."""
        return list(torch.split(torch.stack((k, v)), self.heads_at_once, dim=2))

    def gathered(self, k: Tensor, v: Tensor) -> Iterator[Tensor]:
        """Yield the keys and values of each chunk of heads, of all tokens, while the next chunk is being gathered."""
        chunks = self.chunks(k, v)
        arriving = [self._start(chunks[0])]
        for i in range(len(chunks)):
            kv = self._whole(arriving.pop())
            if i + 1 < len(chunks):
                arriving.append(self._start(chunks[i + 1]))
            yield kv

    def _start(self, kv: Tensor) -> Pending:
        handle: Pending = self.comm.all_gather(kv[None], async_op=True)
        return handle

    def _whole(self, handle: Pending) -> Tensor:
        """Wait for gathered chunks [P, 2, B, heads, N/P, head_dim] and join them: [2, B, heads, N, head_dim]."""
        kv: Tensor = handle.wait().permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
        if self.runs is None:
            return kv
        return kv.index_select(3, to_device(self._arrived().argsort(), kv.device))

    def start_reduce_scatter(self, dkv: Tensor) -> Pending:
        """Start to reduce-scatter the gradients of keys and values: each rank receives the sum for its own tokens."""
        if self.runs is not None:
            dkv = dkv.index_select(3, to_device(self._arrived(), dkv.device))
        parts = torch.unflatten(dkv, 3, (self.comm.size, -1)).permute(3, 0, 1, 2, 4, 5)
        reducing: Pending = self.comm.reduce_scatter(parts.contiguous(), async_op=True)
        return reducing

    def _arrived(self) -> Tensor:
        """Return the sequence index of each gathered token, in gathered order."""
        assert self.runs is not None
        return indices(self.runs)

    def query_heads(self, x: Tensor, chunk: int, num_kv_heads: int) -> Tensor:
        """Return a view of the heads of x [B, H, ...] that attend to this chunk of the key/value heads."""
        heads = x.shape[1] // num_kv_heads * self.heads_at_once
        return x[:, chunk * heads : (chunk + 1) * heads]


class _AllGatherAttention(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: KeyValueGather) -> Tensor:
        out, lse = empty_attention(q)
        for i, kv in enumerate(g.gathered(k, v)):
            with span(g.comm.trace, "compute", "forward"):
                views = (g.query_heads(x, i, k.shape[1]) for x in (out, lse, q))
                g.kernel.forward_(*views, *kv, g.mask)
        out = out.to(q.dtype)
        ctx.g = g
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        g = ctx.g
        dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        reducing, reduced = None, []
        for i, kv in enumerate(g.gathered(k, v)):
            dkv = torch.zeros(kv.shape, dtype=lse.dtype, device=kv.device)
            with span(g.comm.trace, "compute", "backward"):
                dq_i, *others = (g.query_heads(x, i, k.shape[1]) for x in (dq, q, out, lse, dout))
                g.kernel.backward_(dq_i, *dkv, others[0], *kv, *others[1:], g.mask)
            if reducing is not None:  # one at a time, so that only one chunk's gradients are held
                reduced.append(reducing.wait()[0])
            reducing = g.start_reduce_scatter(dkv)
        assert reducing is not None
        dk, dv = torch.cat([*reduced, reducing.wait()[0]], dim=2)
        return *(grad.to(x.dtype) for grad, x in zip((dq, dk, dv), (q, k, v))), None
