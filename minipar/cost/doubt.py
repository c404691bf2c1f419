"""The doubt of a prediction: the spread of its errors on published runs that were held out from fitting."""

from __future__ import annotations

from minipar.cost.layout import Job, Layout

# 80 % of the held-out runs of a kind of layout are within this fraction of the prediction for an unknown program.
# Kinds with fewer than five runs have the largest. `python -m minipar.extras.cost.fit` computes these numbers, and
# those of programs.
SPREADS = {"ZeRO-3": 0.13, "tp or pp": 0.04, "data parallel": 0.13, "cp": 0.13}
# The same by program, for programs with five held-out runs or more, predicted by their own numbers.
PROGRAM_SPREADS = {"megatron-2021": 0.03, "composer": 0.08}

# The machines of these runs. On others, the fractions of data-sheet rates that programs reach are taken to be the same.
COMPARED = ("a100-40gb", "a100-80gb", "h100")


def kind_of(layout: Layout) -> str:
    """Return "cp", "ZeRO-3", "tp or pp" or "data parallel": the first of them that the layout has."""
    if layout.cp > 1:
        return "cp"
    if layout.zero == 3:
        return "ZeRO-3"
    return "tp or pp" if layout.tp * layout.pp > 1 else "data parallel"


def doubt(job: Job, layout: Layout) -> float:
    """Return the fraction by which the seconds of a layout may be too high or too low, for four runs of five.

    A known program with enough runs has its own. A single GPU sends no messages: it has the doubt of arithmetic, which is
    that of tp and pp.
    """
    if job.program in PROGRAM_SPREADS:
        return PROGRAM_SPREADS[job.program]
    return SPREADS["tp or pp" if job.gpus == 1 else kind_of(layout)]
