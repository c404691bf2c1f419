"""The choice "delayed" of `--compress`: gradients applied some steps after they were computed. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minipar.config.choices import Averaging
from minipar.support.options import option


@dataclass(frozen=True)
class DelayedOptions:
    """The options of delayed gradients."""

    delay: int = option(1, "number of steps after which gradients are applied; 0: at once, as without it")


class Delayed(Averaging):
    """Gradients that are applied `delay` steps later. Every mesh has the numbers of one process with the same delay."""

    begins_anew = True
    kept = ("delay",)

    def check(self, config: Any) -> None:
        of, delay = f"compress={config.compress}", config.options["compress"].delay
        if delay < 0:
            raise ValueError(f"compress.delay={delay} is out of range; use 0 or more")
        if config.zero in (1, 2):
            raise ValueError(
                f"{of} keeps the gradients that DDP or FSDP has reduced, and with zero={config.zero} the optimizer reduces "
                "them; use zero=0 or 3"
            )
        if config.mixed_precision:
            raise ValueError(f"{of} has no master weights, and dtype={config.dtype} needs them; use float32")
        if config.offload != "none":
            raise ValueError(
                f"{of} keeps gradients beside the optimizer's states, and offload={config.offload} moves these away; use "
                "offload=none"
            )


DELAYED = Delayed(
    "minipar.extras.asynchrony.delayed:DelayedAveraging",
    "full gradients, applied some steps later",
    DelayedOptions,
)
