"""Long context: ring against all-gather and torch's fused attention, zigzag against contiguous, flash against plain."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import minipar
from benchmarks.harness import Row, Times, on_cuda, race, row, run, worlds
from minipar.comm import Comm
from minipar.context import ring_attention
from minipar.model import flash_attention, plain_attention
from minipar.model.flash import AttentionKernel
from minipar.model.mask import Mask
from minipar.support.live_bytes import counted_bytes

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64  # four query heads per key/value head, as in Llama 3


def rows(quick: bool = False) -> list[Row]:
    """Race forward and backward of one attention layer, in float32 with one thread per rank."""
    rounds, tokens = (3, 2048) if quick else (9, 4096)
    found = []
    for p in worlds():
        for causal in (True, False):
            times = run(_race_ring, tokens, causal, rounds, world_size=p)
            kind = "causal" if causal else "full"
            found.append(row(f"ring vs gather + fused, {kind}, {p}", times, 1.0, f"{tokens} tokens"))
    found.append(_flash_row(2048 if quick else 4096, 3 if quick else 5))
    if on_cuda():
        return [*found, *_fused_rows(tokens, rounds)]
    found.append(_balance_row(rounds))
    return found if quick else [*found, _long_row()]


def _race_ring(world: Comm, tokens: int, causal: bool, rounds: int) -> Times:
    """Race the ring (zigzag where causal) against attention to all-gathered keys that uses only keys that a query sees."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(world.rank)
    own = tokens // world.size
    q, k, v = (
        torch.randn(1, heads, own, HEAD_DIM, generator=generator).to(world.device).requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    dy = torch.randn_like(q)
    layout = "zigzag" if causal else "contiguous"

    def ours() -> None:
        ring_attention(world, q, k, v, causal, layout).backward(dy)

    def theirs() -> None:
        keys, values = _Gather.apply(torch.stack((k, v)), world).unbind()  # type: ignore[no-untyped-call]
        if not causal:
            F.scaled_dot_product_attention(q, keys, values, enable_gqa=True).backward(dy)
            return
        seen = (world.rank + 1) * own
        mask = torch.ones(own, seen, dtype=torch.bool, device=world.device).tril(world.rank * own)
        out = F.scaled_dot_product_attention(
            q, keys[:, :, :seen], values[:, :, :seen], attn_mask=mask, enable_gqa=True
        )
        out.backward(dy)

    return race(world, ours, theirs, rounds)


class _Gather(torch.autograd.Function):
    """gloo's all-gather, and its reduce-scatter for the gradients: [2, B, H, N/P, d] -> [2, B, H, N, d]."""

    @staticmethod
    def forward(ctx: Any, kv: Tensor, world: Comm) -> Tensor:
        ctx.world = world
        parts: Tensor = world.all_gather(kv[None], algorithm="native")
        return parts.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        parts = grad.unflatten(3, (ctx.world.size, -1)).permute(3, 0, 1, 2, 4, 5)
        return ctx.world.reduce_scatter(parts.contiguous(), algorithm="native")[0], None


def _balance_row(rounds: int) -> Row:
    times = run(_race_layouts, rounds, world_size=4)
    return row("zigzag vs contiguous, emulated, 4", times, 1.1 * 4 / 7, "4/7 = 0.57 by counting")


def _race_layouts(world: Comm, rounds: int, whole_block_s: float = 0.05) -> Times:
    """Race layouts with emulated compute: a rank sleeps as long as a block takes, so 4 ranks compute at once on 2 cores."""
    q, k, v = (torch.randn(1, 1, 128, 4, device=world.device) for _ in range(3))

    def emulate(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> None:
        time.sleep(whole_block_s * mask.count() / 128**2)

    block = AttentionKernel(emulate, emulate)
    return race(
        world,
        partial(ring_attention, world, q, k, v, True, "zigzag", impl=block),
        partial(ring_attention, world, q, k, v, True, "contiguous", impl=block),
        rounds,
    )


def _flash_row(tokens: int, rounds: int) -> Row:
    peaks, times = run(_race_flash, tokens, rounds, world_size=1)[0]
    note = f"{tokens} tokens; peak memory {peaks[0] >> 20} MB against {peaks[1] >> 20}: {peaks[0] / peaks[1]:.3f}, "
    return row("flash vs plain, both plain torch", [times], 1.0, note + "at most 0.125")


def _race_flash(world: Comm, tokens: int, rounds: int) -> tuple[list[int], Times]:
    torch.set_num_threads(1)

    def step(attention: Callable[..., Any]) -> None:
        q, k, v = (
            torch.randn(1, 4, tokens, HEAD_DIM, device=world.device).requires_grad_() for _ in range(3)
        )
        attention(q, k, v).sum().backward()

    peaks = []
    for attention in (flash_attention, plain_attention):
        with counted_bytes(world.device) as memory:
            step(attention)
        peaks.append(memory.peak)
    return peaks, race(world, partial(step, flash_attention), partial(step, plain_attention), rounds)


def _fused_rows(tokens: int, rounds: int) -> Iterator[Row]:
    """Race our tiles in plain torch, and the kernels that "auto" chooses, against torch's scaled_dot_product_attention."""
    for impl in ("tiled", "auto"):
        times = run(_race_fused, tokens, impl, rounds, world_size=1)
        yield row(f"flash, impl={impl}, vs torch's", times, note=f"{tokens} tokens, bfloat16")


def _race_fused(world: Comm, tokens: int, impl: str, rounds: int) -> Times:
    q, k, v = (
        torch.randn(1, HEADS, tokens, HEAD_DIM, dtype=torch.bfloat16, device=world.device).requires_grad_()
        for _ in range(3)
    )

    def theirs() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    return race(world, lambda: flash_attention(q, k, v, impl=impl).sum().backward(), theirs, rounds)


def _long_row() -> Row:
    """Time attention over 32k tokens with 8 heads on 4 ranks, and add up the peak memory of the processes."""
    minipar.shutdown()
    seconds, resident, counted = zip(*run(_long, 1 << 15, world_size=4, timeout_s=300))
    note = (
        f"{sum(resident) / 2**30:.2f} GB resident in all, {sum(counted) / 2**30:.2f} of it tensors; at most 4"
    )
    return Row("32k tokens on 4 ranks", max(seconds), float("nan"), sum(resident) / 4e9, 1.0, note)


def _long(world: Comm, tokens: int) -> tuple[float, int, int]:
    torch.set_num_threads(1)
    heads = 8
    start_s = time.perf_counter()
    with counted_bytes(world.device) as memory:
        q, k, v = (
            torch.randn(1, heads, tokens // world.size, 16, device=world.device).requires_grad_()
            for _ in range(3)
        )
        ring_attention(world, q, k, v, layout="zigzag").sum().backward()
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return time.perf_counter() - start_s, resident, memory.peak
