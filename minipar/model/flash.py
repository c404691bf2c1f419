"""Flash attention: exact attention that never stores the score matrix, in plain torch.

Scores are computed one tile at a time and discarded. In the forward, each tile of queries keeps a running maximum m, sum l
and output o, and rescales l and o whenever the maximum grows (online softmax):

    m' = max(m, max_j s_j)      l' = exp(m - m') l + sum_j exp(s_j - m')      o' = exp(m - m') o + sum_j exp(s_j - m') v_j
    at the end   out = o / l    lse = m + log l

In the backward, the scores are recomputed, and lse, one number per query, turns them directly into probabilities:

    P = exp(S - lse)     dv = P^T dout     dP = dout v^T     dS = P * (dP - delta)     dq = dS k     dk = dS^T q
    delta = sum over features of dout * out, which equals the sum over keys of P * dP; minus dlse if lse has a gradient

Keeps q, k, v, out and lse, which are linear in the length; the score matrix is quadratic. Costs 2 matrix products forward
and 5 backward; plain attention costs 2 and 4. Fully hidden tiles are skipped, so causal attention costs about half.

Source: FlashAttention-2, arXiv:2307.08691, algorithms 1 and 2; arXiv:2205.14135.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from minipar.model import autocast, fused
from minipar.model.lse_merge import empty_attention, merge_
from minipar.model.mask import Mask, single_process_mask
from minipar.support.errors import one_of, require_divides
from minipar.support.staging import to_device

IMPLEMENTATIONS = ("tiled", "fused", "auto")
TILE_ELEMS = 1 << 18  # scores per tile: few enough for a CPU cache, enough to outweigh a call's overhead
MIN_TILE_SIDE = 32  # minimum number of queries and keys in a tile, however many heads there are


@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = True, return_lse: Literal[False] = False,
    impl: str = "tiled", positions: Tensor | None = None, mask: Mask | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = True, *, return_lse: Literal[True],
    impl: str = "tiled", positions: Tensor | None = None, mask: Mask | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = True,
    return_lse: bool = False,
    impl: str = "tiled",
    positions: Tensor | None = None,
    mask: Mask | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute softmax(q k^T / sqrt(head_dim)) v in memory linear in the length; with `return_lse`, return lse too.

    q, out     [B, H, T, head_dim]
    k, v       [B, H/g, S, head_dim]    each head serves g consecutive query heads
    lse        [B, H, T]                of the scaled scores, in float32 or wider; gradients flow through it too
    positions  None, or [T] or [B, T]   each token's position in its document; a token sees only its own document
    mask       replaces `causal` and `positions` where q and k are parts of a sequence
    impl       "tiled": this file's loops. "fused": torch's kernels. "auto": fused where a kernel supports the inputs

    A query that sees no key gets out = 0 and lse = -inf, and passes no gradient on.
    Raises ValueError if shapes do not fit, or if "fused" has no kernel for these inputs.
    """
    check_shapes(q, k, v)
    q, k, v = autocast.cast(q, k, v)
    mask = mask or single_process_mask(q.shape[2], k.shape[2], causal, positions)
    kernel = choose(impl, q, mask)
    out, lse = _Flash.apply(q, k, v, mask, kernel)  # type: ignore[no-untyped-call]
    return (out, lse) if return_lse else out


class AttentionKernel(NamedTuple):
    """An implementation of attention over a block of keys: its forward and its backward.

    forward_   (out, lse, q, k, v, mask)
    backward_  (dq, dk, dv, q, k, v, out, lse, dout, mask)
    """

    forward_: Callable[..., None]
    backward_: Callable[..., None]


def choose(impl: str | AttentionKernel, q: Tensor, mask: Mask) -> AttentionKernel:
    """Return the kernel named `impl`, or `impl` itself if it is one; raise ValueError if no kernel fits these inputs."""
    if isinstance(impl, AttentionKernel):
        return impl
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl={impl!r} is unknown; use {one_of(IMPLEMENTATIONS)}")
    reason = fused.unsupported_reason(q, mask)
    if impl == "fused" and reason:
        raise ValueError(f"impl='fused' has no kernel for {reason}; use 'tiled' or 'auto'")
    if impl == "tiled" or reason:
        return AttentionKernel(forward_, backward_)
    return AttentionKernel(fused.forward_, fused.backward_)


class _Flash(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Mask, kernel: AttentionKernel
    ) -> tuple[Tensor, Tensor]:
        out, lse = empty_attention(q)
        kernel.forward_(out, lse, q, k, v, mask)
        out = out.to(q.dtype)
        ctx.mask, ctx.kernel = mask, kernel
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        dq, dk, dv = (
            torch.zeros_like(x, dtype=lse.dtype, memory_format=torch.contiguous_format) for x in (q, k, v)
        )
        if dlse is None:
            ctx.kernel.backward_(dq, dk, dv, q, k, v, out, lse, dout, ctx.mask)
        else:  # fused kernels take no gradient of lse
            backward_(dq, dk, dv, q, k, v, out, lse, dout, ctx.mask, dlse)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


@autocast.without_autocast
def forward_(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> None:
    """Merge attention over the keys of k into (out, lse), in place."""
    tile = _Tiling(q, k)
    all_q, all_k, all_v = tile.queries(q) * tile.scale, tile.keys(k), tile.keys(v)
    for rows, blocks in mask.tiles(tile.side):
        if blocks:
            place, numbers = out[:, :, rows], lse[:, :, rows]
            part_out, part_lse = _attend_rows(all_q[:, :, rows].flatten(1, 2), all_k, all_v, blocks, tile)
            merge_(place, numbers, part_out.view(place.shape), part_lse.view(numbers.shape))


def _attend_rows(
    q: Tensor, k: Tensor, v: Tensor, blocks: Iterable[tuple[slice, Tensor | None]], tile: _Tiling
) -> tuple[Tensor, Tensor]:
    """Run the online softmax of one tile of queries [G, g*R, head_dim] over its tiles of keys."""
    running_max = q.new_full((*q.shape[:2], 1), -torch.inf)
    total, out = torch.zeros_like(running_max), torch.zeros_like(q)
    for cols, hidden in blocks:
        scores = tile.hide(torch.bmm(q, k[:, cols].transpose(1, 2)), hidden)
        new_max = torch.maximum(running_max, scores.amax(-1, keepdim=True))
        finite = new_max.masked_fill(new_max == -torch.inf, 0.0)  # nothing seen so far: exp(-inf - 0) = 0
        weights, correction = scores.sub_(finite).exp_(), (running_max - finite).exp_()
        total.mul_(correction).add_(weights.sum(-1, keepdim=True))
        out.mul_(correction).baddbmm_(weights, v[:, cols])
        running_max = new_max
    return out.div_(total.masked_fill(total == 0, 1.0)), running_max + total.log()


@autocast.without_autocast
def backward_(
    dq: Tensor, dk: Tensor, dv: Tensor, q: Tensor, k: Tensor, v: Tensor,
    out: Tensor, lse: Tensor, dout: Tensor, mask: Mask, dlse: Tensor | None = None,
) -> None:  # fmt: skip
    """Add the gradients from this block of keys to dq, dk and dv; `out` and `lse` are the results over all keys."""
    tile = _Tiling(q, k)
    all_q, all_k, all_v = tile.queries(q) * tile.scale, tile.keys(k), tile.keys(v)
    all_dout = tile.queries(dout)
    all_dk, all_dv = dk.view(all_k.shape), dv.view(all_v.shape)
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    all_delta = tile.queries((delta if dlse is None else delta - dlse)[..., None])
    # For a query that sees no key, lse = inf makes every weight exp(s - inf) = 0.
    all_lse = tile.queries(lse.masked_fill(lse == -torch.inf, torch.inf)[..., None])
    for rows, blocks in mask.tiles(tile.side):
        q, dout, lse, delta = (x[:, :, rows].flatten(1, 2) for x in (all_q, all_dout, all_lse, all_delta))
        for cols, hidden in blocks:
            dk, dv, k, v = (x[:, cols] for x in (all_dk, all_dv, all_k, all_v))
            tile_dq = _backward_tile(dk, dv, q, dout, lse, delta, k, v, hidden, tile)
            place = dq[:, :, rows]
            place.add_(tile_dq.view(place.shape), alpha=tile.scale)


def _backward_tile(
    dk: Tensor, dv: Tensor, q: Tensor, dout: Tensor, lse: Tensor, delta: Tensor,
    k: Tensor, v: Tensor, hidden: Tensor | None, tile: _Tiling,
) -> Tensor:  # fmt: skip
    """Return one tile's dq, not yet multiplied by tile.scale; add the tile's dk and dv to `dk` and `dv`."""
    scores = tile.hide(torch.bmm(q, k.transpose(1, 2)), hidden)
    weights = scores.sub_(lse).exp_()
    dv.baddbmm_(weights.transpose(1, 2), dout)
    dscores = torch.bmm(dout, v.transpose(1, 2)).sub_(delta).mul_(weights)
    dk.baddbmm_(dscores.transpose(1, 2), q)
    return torch.bmm(dscores, k)


class _Tiling:
    """Tile size and tensor layout: a batch of G = B*H/g matrices, whose rows are the queries of g heads each.

    side  number of queries, and of keys, per tile: a tile has about TILE_ELEMS scores
    """

    def __init__(self, q: Tensor, k: Tensor):
        self.batch, num_heads, _, head_dim = q.shape
        self.num_kv_heads = k.shape[1]
        self.group = num_heads // self.num_kv_heads
        self.dtype = torch.promote_types(q.dtype, torch.float32)
        self.scale = 1 / math.sqrt(head_dim)
        self.side = max(MIN_TILE_SIDE, math.isqrt(TILE_ELEMS // max(1, self.batch * num_heads)))

    def queries(self, x: Tensor) -> Tensor:
        """Reshape [B, H, T, f] -> [G, g, T, f]."""
        return x.to(self.dtype).reshape(self.batch * self.num_kv_heads, self.group, *x.shape[2:])

    def keys(self, x: Tensor) -> Tensor:
        """Reshape [B, H/g, S, f] -> [G, S, f]."""
        return x.to(self.dtype).reshape(self.batch * self.num_kv_heads, *x.shape[2:])

    def hide(self, scores: Tensor, hidden: Tensor | None) -> Tensor:
        """Set scores [G, g*R, C] to -inf where `hidden`, [R, C] or [B, 1, R, C], is True; in place."""
        if hidden is not None:
            shape = (self.batch, self.num_kv_heads * self.group, -1, scores.shape[-1])
            scores.view(shape).masked_fill_(to_device(hidden, scores.device), -torch.inf)
        return scores


def check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless q is [B, H, T, head_dim] and k and v are both [B, H/g, S, head_dim]."""
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape:
        raise ValueError(f"{shapes}: use q [B, H, T, head_dim], and k and v alike, [B, H/g, S, head_dim]")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"{shapes}: use the same batch and head_dim for all")
    require_divides("key/value heads", k.shape[1], "query heads", q.shape[1])
