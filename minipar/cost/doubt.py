"""The uncertainty ("doubt") of a predicted time: the spread of errors on published runs held out from fitting."""

from __future__ import annotations

from minipar.cost.layout import Job, Layout

# For each kind of layout: 80 % of the held-out runs lie within this fraction of a prediction with the default parameters,
# which are not fitted to the run's training program. A kind with fewer than five runs gets the largest of these fractions.
# `python -m minipar.extras.cost.fit` computes SPREADS and PROGRAM_SPREADS.
SPREADS = {"ZeRO-3": 0.13, "tp or pp": 0.04, "data parallel": 0.13, "cp": 0.13}
# The same for predictions with parameters fitted to the run's program, for each program with five or more held-out runs.
PROGRAM_SPREADS = {"megatron-2021": 0.03, "composer": 0.08}

# The machines of these runs. Other machines are assumed to reach the same fractions of their data-sheet rates.
COMPARED = ("a100-40gb", "a100-80gb", "h100")


def kind_of(layout: Layout) -> str:
    """Return "cp", "ZeRO-3", "tp or pp" or "data parallel": the first of them that the layout has."""
    if layout.cp > 1:
        return "cp"
    if layout.zero == 3:
        return "ZeRO-3"
    return "tp or pp" if layout.tp * layout.pp > 1 else "data parallel"


def doubt(job: Job, layout: Layout) -> float:
    """Return the relative error that the predicted time of a layout stays within, for four runs of five.

    A known program with enough runs has a fraction of its own. A single GPU sends no messages, so only the prediction of
    its arithmetic can be wrong: it uses the fraction for tp or pp.
    """
    if job.program in PROGRAM_SPREADS:
        return PROGRAM_SPREADS[job.program]
    return SPREADS["tp or pp" if job.gpus == 1 else kind_of(layout)]
