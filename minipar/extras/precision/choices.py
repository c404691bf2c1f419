"""The choices fp8, mxfp8, mxfp4 and nvfp4 of `--products`, and which configurations they refuse. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from minipar.config.context_limits import local_ranges
from minipar.config.rules import Rule, check, view_of
from minipar.support.errors import divisors, one_of
from minipar.support.options import option
from minipar.support.registry import Choice

GRADIENTS = "format of the gradients dy; x and w are e4m3"
SCALE = "a block's power of two: floor, as the specification says, cuts off the largest numbers; ceil none"


@dataclass(frozen=True)
class Fp8Options:
    """The options of fp8, which has one scale per tensor."""

    gradients: Literal["e4m3", "e5m2"] = option("e5m2", GRADIENTS)


@dataclass(frozen=True)
class MXOptions:
    """The options of formats in which the elements of a block share a power of two as their scale."""

    scale: Literal["floor", "ceil"] = option("floor", SCALE)


@dataclass(frozen=True)
class MXFP8Options(MXOptions):
    """The options of MXFP8."""

    gradients: Literal["e4m3", "e5m2"] = option("e4m3", GRADIENTS)


# What a run must meet to multiply in a format.
FORMAT = (
    Rule(
        lambda v: v.num_experts > 0,
        "products={products}: num_experts={num_experts}: experts multiply in one grouped product",
        "; use 0",
    ),
    Rule(
        lambda v: v.kv_latent_dim and v.tp > 1,
        "products={products}: kv_latent_dim={kv_latent_dim} with tp={tp}: latents are not cut by tp",
        "; use tp=1",
    ),
    Rule(
        lambda v: v.tp_layout != "1d",
        "products={products}: tp_layout={tp_layout} multiplies blocks of matrices",
        "; use tp_layout=1d",
    ),
    Rule(
        lambda v: v.tp_chunked,
        "products={products}: tp_chunked multiplies a part of the tokens at a time",
        "; leave it out",
    ),
    Rule(
        lambda v: v.compile != "none",
        "products={products}: compile={compile} would take rounding into the graph of a block",
        "; use compile=none",
    ),
    Rule(
        lambda v: v.tp > v.num_kv_heads,
        "products={products}: tp={tp} ranks share num_kv_heads={num_kv_heads}, and each has a term of their gradient, "
        "which is rounded as a sum",
        lambda v: f"; use tp={one_of(divisors(v.num_kv_heads))}",
    ),
    Rule(
        lambda v: v.format.scales_tensors and (v.microbatches > 1 or v.num_slices > 1),
        lambda v: (
            f"products={v.products} scales a tensor by its largest number, which a part of the batch does not know, and "
            + (f"microbatches={v.microbatches}" if v.microbatches > 1 else f"schedule={v.schedule}")
        ),
        "; use microbatches=1 and a schedule without slices, or mxfp8 or mxfp4",
    ),
    Rule(
        lambda v: v.format.scales_tensors and v.steps_locally,
        "products={products} scales a tensor by the largest number of all replicas, and those of compress={compress} "
        "differ",
        "; use mxfp8 or mxfp4",
    ),
)


class FewBits(Choice):
    """An (emulated) format of the operands of matrix products.

    block           number of elements that share a scale; 1: the format has no blocks
    scales_tensors  whether the format has a scale per tensor, for which all ranks must know the tensor's largest element
    """

    implementation = "minipar.extras.precision.rounded_products:install"
    unpriced = ""

    def __init__(self, help: str, block: int, scales_tensors: bool, options: type | None = None):
        super().__init__(help=help, options=options)
        self.block, self.scales_tensors = block, scales_tensors

    def check(self, config: Any) -> None:
        of = f"products={config.products}"
        slices = config.choice("schedule").arguments(config).get("sizes") or ()
        local = config.choice("compress").steps_locally
        check(view_of(config, format=self, num_slices=len(slices), steps_locally=local), FORMAT)
        self._check_features(config, of)
        self._check_tokens(config, of, slices)

    def _check_features(self, config: Any, of: str) -> None:
        """Raise ValueError if tp would split a block of a matrix."""
        model = config.model
        heads = {f"{n} * head_dim": getattr(model, n) * model.head_dim for n in ("num_heads", "num_kv_heads")}
        sizes = {"dim": model.dim, **heads, "hidden_dim": model.hidden_dim}
        for name, size in sizes.items():
            if config.tp > 1 and size % (config.tp * self.block):
                raise ValueError(
                    f"{of} rounds {self.block} features together, and tp={config.tp} would cut some of {name}={size}; "
                    f"use a model in which that is a multiple of {config.tp * self.block}, or tp=1"
                )

    def _check_tokens(self, config: Any, of: str, slices: Sequence[int]) -> None:
        """Raise ValueError if cp or the schedule's slices would split a block of a sample's tokens."""
        layout = config.cp_layout, config.cp_ulysses
        runs = [
            run for rank in range(config.cp) for run in local_ranges(config.seq_len, rank, config.cp, *layout)
        ]
        start = 0
        for size in slices:
            runs.append(range(start, start := start + size))
        for run in runs:
            whole = run.start % self.block == 0 and (len(run) % self.block == 0 or run.stop == config.seq_len)
            if self.block > 1 and not (whole and run.step == 1):
                cp = f"cp={config.cp} with cp_layout={config.cp_layout}"
                cut = cp if config.cp > 1 else f"schedule={config.schedule}"
                raise ValueError(
                    f"{of} rounds {self.block} tokens of a sample together, and {cut} cuts seq_len={config.seq_len} inside "
                    "such a block; use contiguous or zigzag, and more tokens"
                )


FP8 = FewBits("of 8-bit floats, a scale a tensor", 1, True, Fp8Options)
MXFP8 = FewBits("of 8-bit floats, a power of two for 32", 32, False, MXFP8Options)
MXFP4 = FewBits("of 4-bit floats, a power of two for 32", 32, False, MXOptions)
NVFP4 = FewBits("of 4-bit floats, a scale for 16 and a scale a tensor", 16, True)
