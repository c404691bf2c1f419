"""Declares "compression", "auto-split" and "scaling" of `minipar plan --view`, and `minipar links`. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minipar.config.check_paths import require_picture
from minipar.cost.plan_command import Asked, PlanView
from minipar.support.options import option
from minipar.support.registry import Choice


@dataclass(frozen=True)
class CompressionOptions:
    """The options of `minipar plan --view compression`."""

    method: str = option("auto", "a method of --compress; auto: every method that the layout can use")


class CompressionView(PlanView):
    """The `minipar plan` view that estimates the cost of compressed gradients, and says whether compression pays."""

    def check_request(self, asked: Asked, options: Any) -> None:
        from minipar.extras.cost.compression import check_method

        check_method(options.method)


class AutoSplitView(PlanView):
    """The `minipar plan` view that searches for stages with unequal meshes, in place of the usual plan."""

    replaces_plan = True

    def check_request(self, asked: Asked, options: Any) -> None:
        if asked.explain or asked.run:
            raise ValueError(
                "view=auto-split searches for stages of unequal meshes; leave out --explain and --run"
            )


@dataclass(frozen=True)
class ScalingOptions:
    """The options of `minipar plan --view scaling`."""

    picture: Path | None = option(None, "a .png, .svg or .pdf file for the curves; none: only the table")


class ScalingView(PlanView):
    """The `minipar plan` view that shows a layout's weak and strong scaling."""

    def check_request(self, asked: Asked, options: Any) -> None:
        if options.picture is not None:
            require_picture("view.picture", options.picture)


COMPRESSION = CompressionView(
    "minipar.extras.cost.compression:compression_view",
    "whether compressed gradients would pay on the winner, and what each method costs",
    CompressionOptions,
)
AUTO_SPLIT = AutoSplitView(
    "minipar.extras.cost.auto_split:auto_split_view",
    "instead of a plan, the layers and GPUs of each pipeline stage and its own layout, as Alpa chooses them",
)
SCALING = ScalingView(
    "minipar.extras.cost.scaling:scaling_view",
    "the winner's weak and strong scaling, to 16,384 GPUs",
    ScalingOptions,
)
LINKS = Choice(
    "minipar.extras.cost.links_command:links_command",
    "measure the links between ranks, or read them from nvidia-smi or NCCL, and find the widest ring",
)
