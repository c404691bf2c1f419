"""The choices "2d", "2.5d" and "3d" of `--tp-layout`. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minipar.config.choices import TensorLayout
from minipar.extras.tensor_grids.limits import check_grid, grid_shape
from minipar.support.errors import divisors, require_divides
from minipar.support.options import option


@dataclass(frozen=True)
class DepthOptions:
    """The options of "2.5d", in which the tp ranks form several square grids of ranks."""

    depth: int = option(2, "number of squares of ranks, each with a part of the samples")


class Grid(TensorLayout):
    """A choice of `--tp-layout` that arranges the tp ranks in a grid or a cube."""

    implementation = "minipar.extras.tensor_grids.grid_model:cut_stage"
    unpriced = ""

    def __init__(self, name: str, help: str, options: type | None = None):
        super().__init__(help=help, options=options)
        self.name = name

    def check(self, config: Any) -> None:
        layout, depth = config.tp_layout, depth_of(config)
        if layout == "2.5d" and depth < 2:
            raise ValueError(
                f"tp_layout.depth={depth} with tp_layout=2.5d: it has several squares of ranks; use 2 or more, or "
                "tp_layout=2d"
            )
        check_grid(config.model, config.tp, layout, depth)
        rows, _ = grid_shape(config.tp, layout, depth)
        for samples, microbatches in zip(config.dp_samples, config.dp_microbatches):
            require_divides(
                f"tp_layout={layout}'s rows of ranks",
                rows,
                "samples (batch_size/dp/microbatches)",
                samples // microbatches,
            )
        for name in ("sequence_parallel", "partition_activations"):
            if getattr(config, name):
                raise ValueError(
                    f"{name}=True is for tp_layout=1d, where ranks hold whole activations, and tp_layout={layout} cuts "
                    "them; use one of the two"
                )

    def variants(self, config: Any) -> list[dict[str, Any]]:
        """Return each set of options with which a run's tp ranks form this layout, with two or more ranks per side."""
        depths = divisors(config.tp)[1:] if self.options else [1]
        found = []
        for depth in depths:
            try:
                _, side = grid_shape(config.tp, self.name, depth)
            except ValueError:
                continue
            if side > 1:
                found.append({"depth": depth} if self.options else {})
        return found

    def ranks_of_heads(self, config: Any) -> int:
        return grid_shape(config.tp, config.tp_layout, depth_of(config))[1]


def depth_of(config: Any) -> int:
    """Return the number of squares of ranks, which is 1 except in 2.5d."""
    return int(getattr(config.options.get("tp_layout"), "depth", 1))


SQUARE = Grid("2d", "over a square of ranks")
SQUARES = Grid("2.5d", "over several squares of ranks, each with some of the samples", DepthOptions)
CUBE = Grid("3d", "over a cube of ranks")
