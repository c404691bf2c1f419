"""The legal mesh sizes, alone and for a model, and how ranks of unequal speed share work. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, TypedDict

from minipar.config.context_limits import (
    ATTENTIONS,
    check_heads,
    check_length,
    length_multiple,
    ulysses_ranks,
)
from minipar.config.model_config import ModelConfig
from minipar.config.rules import EP_RANKS, GROUPS, TENSOR, View, check
from minipar.support.errors import one_of, require_divides, require_positive


class MeshSizes(TypedDict, total=False):
    """The sizes of a mesh, as keyword arguments."""

    dp: int
    """data parallel ranks; 1 if not given"""
    tp: int
    """tensor parallel ranks; 1 if not given"""
    pp: int
    """pipeline ranks; 1 if not given"""
    cp: int
    """context parallel ranks; 1 if not given"""
    ep: int
    """expert parallel ranks, inside dp x cp; 1 if not given"""


def check_mesh(world_size: int, pp: int = 1, dp: int = 1, cp: int = 1, tp: int = 1, ep: int = 1) -> None:
    """Raise ValueError, saying what would work, if `world_size` ranks cannot form a mesh of these sizes.

    They cannot if a size is not a positive int, pp*dp*cp*tp is not `world_size`, or ep does not divide dp*cp.
    """
    require_positive(world=world_size, pp=pp, dp=dp, cp=cp, tp=tp, ep=ep)
    _require_product(world_size, dict(pp=pp, dp=dp, cp=cp, tp=tp))
    check(View(dict(dp=dp, cp=cp, tp=tp, ep=ep, fold_experts=False)), (EP_RANKS,))


def _require_product(world_size: int, sizes: dict[str, int]) -> None:
    product = prod(sizes.values())
    if product == world_size:
        return
    # Suggest each axis whose size alone could be changed to fill the world.
    others = {axis: product // size for axis, size in sizes.items()}
    fits = [f"{axis}={world_size // n}" for axis, n in others.items() if world_size % n == 0]
    raise ValueError(
        " x ".join(f"{axis}={size}" for axis, size in sizes.items())
        + f" = {product} ranks, but the world has {world_size}; "
        + (f"use {one_of(fits)}, or " if fits else "no single axis would mend it: change two, or ")
        + f"start {product} ranks"
    )


def check_tensor_parallel(config: ModelConfig, tp: int, pad_vocab: bool = False) -> None:
    """Raise ValueError, naming the tp sizes that work, if a model of this config cannot be split over tp ranks."""
    check(View(vars(config) | {"tp": tp, "pad_vocab": pad_vocab}), TENSOR)


def check_context_parallel(
    config: ModelConfig,
    cp: int,
    seq_len: int | None = None,
    layout: str = "zigzag",
    attention: str = "ring",
    ulysses_size: int = 1,
    tp: int = 1,
    **options: Any,
) -> None:
    """Raise ValueError, saying what would work, if a model of this config cannot be split this way. Needs no ranks.

    seq_len  tokens per sample; None: not known yet
    """
    if attention not in ATTENTIONS:
        raise ValueError(f"attention={attention!r} is unknown; use {one_of(ATTENTIONS)}")
    if attention != "usp" and ulysses_size != 1:
        raise ValueError(f"ulysses_size={ulysses_size} is for attention='usp', not {attention!r}")
    require_divides("ulysses_size", ulysses_size, "cp", cp)
    length_multiple(cp, layout)  # raises if there is no such layout
    check_heads(config.num_heads // tp, ulysses_ranks(cp, attention, ulysses_size), options.get("pad", False))
    if attention == "all_gather":
        kv_heads = max(1, config.num_kv_heads // tp)
        require_divides(
            "heads_at_once", options.get("heads_at_once") or kv_heads, "key/value heads", kv_heads
        )
    if seq_len is not None:
        check_length(seq_len, cp, layout, ulysses_size)
    sample = {"cp": cp, "seq_len": seq_len, "cp_layout": layout, "cp_ulysses": ulysses_size}
    check(View(vars(config) | sample), GROUPS)


def shares_by_speed(total: int, speeds: Sequence[float]) -> list[int]:
    """Divide `total` units of work among workers, at least one each, so that the last to finish takes the least time.

    Each further unit goes to the worker that would be done with it first: the largest share / speed is the least possible.
    Raises ValueError if there are fewer units than workers.
    """
    if total < len(speeds):
        raise ValueError(f"{total} units of work for {len(speeds)} workers, and each needs one")
    shares = [1] * len(speeds)
    for _ in range(total - len(speeds)):
        done_s = [(share + 1) / speed for share, speed in zip(shares, speeds)]
        shares[done_s.index(min(done_s))] += 1
    return shares
