"""Declares "compression", "auto-split" and "unequal" of `minipar plan --view`, and `minipar links`. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
class UnequalOptions:
    """The options of `minipar plan --view unequal`, about the GPUs of the second kind."""

    gpus: int = option(0, "number of GPUs of the second kind")
    machine: str = option(
        "", "their name, or a .toml file; by default they are like the first kind, at `speed`"
    )
    speed: float = option(0.5, "without `machine`, the speed of the second kind relative to the first")


class UnequalView(PlanView):
    """The view "unequal": the best layout on GPUs of two kinds."""

    def check_request(self, asked: Asked, options: Any) -> None:
        from minipar.cost.machines import find_machine

        if not 0 < options.gpus < asked.job.gpus:
            raise ValueError(
                f"view.gpus={options.gpus} of gpus={asked.job.gpus} are of the second kind; use 1 or more, but not all"
            )
        if options.machine:
            find_machine(options.machine)
        elif not options.speed > 0:
            raise ValueError(f"view.speed={options.speed:g} is out of range; use a number above 0")


COMPRESSION = CompressionView(
    "minipar.extras.cost.compression:compression_view",
    "whether compressed gradients would pay on the winner, and what each method costs",
    CompressionOptions,
)
AUTO_SPLIT = AutoSplitView(
    "minipar.extras.cost.auto_split:auto_split_view",
    "instead of a plan, the layers and GPUs of each pipeline stage and its own layout, as Alpa chooses them",
)
UNEQUAL = UnequalView(
    "minipar.extras.cost.unequal:unequal_view",
    "the best layout on GPUs of two kinds, with the batch divided by their speed",
    UnequalOptions,
)
LINKS = Choice(
    "minipar.extras.cost.links_command:links_command",
    "measure the links between ranks, or read them from nvidia-smi, and find the widest ring",
)
