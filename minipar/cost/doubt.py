"""The uncertainty ("doubt") of a predicted time: the spread of errors on published runs held out from fitting."""

from __future__ import annotations

from minipar.cost.layout import Job, Layout
from minipar.cost.models import ModelShape

# For each kind of layout: the fraction of a prediction, with default parameters, that the next run stays within with a
# probability of 80 %. With n held-out runs that is the ceil(0.8 (n + 1))-th smallest error (split conformal prediction,
# arXiv:2107.07511, section 1): the fewer runs, the wider. It takes four runs; a kind with fewer gets the largest fraction
# of dense models. `python -m benchmarks.planner.fit` computes SPREADS and PROGRAM_SPREADS.
SPREADS = {"ZeRO-3": 0.16, "tp or pp": 0.08, "data parallel": 0.21, "cp": 0.21, "mixture": 0.44}
# The same for predictions with parameters fitted to the run's program, for each program with four or more held-out runs,
# dense or of mixtures.
PROGRAM_SPREADS = {
    "megatron-2021": 0.04,
    "composer": 0.06,
    "megatron-core, mixture": 0.32,
    "kempnerforge": 0.22,
}

# The machines of dense runs. Other machines are assumed to reach the same fractions of their data-sheet rates.
COMPARED = ("a100-40gb", "a100-80gb", "h100", "h200")

MIXTURE = "mixture"


# The largest doubt with which two layouts of one job are compared.
WIDEST = max(spread for key, spread in {**SPREADS, **PROGRAM_SPREADS}.items() if MIXTURE not in key)


def kind_of(shape: ModelShape, layout: Layout) -> str:
    """Return the kind of a layout, by which errors are summarized.

    It is "mixture" for a model with experts, else `dense_kind`.
    """
    return MIXTURE if shape.num_experts else dense_kind(layout)


def dense_kind(layout: Layout) -> str:
    """Return the first that holds of "cp", "ZeRO-3", "tp or pp" and "data parallel"."""
    if layout.cp > 1:
        return "cp"
    if layout.zero == 3:
        return "ZeRO-3"
    return "tp or pp" if layout.tp * layout.pp > 1 else "data parallel"


def spread_key(program: str, shape: ModelShape) -> str:
    """Return the key of PROGRAM_SPREADS for a program and a model."""
    return f"{program}, {MIXTURE}" if shape.num_experts else program


def doubt(job: Job, layout: Layout) -> float:
    """Return the relative error that the predicted time of a layout stays within, for four runs of five.

    A known program with enough runs has a fraction of its own. A single GPU sends no messages, so only the prediction of
    its arithmetic can be wrong: it uses the fraction for tp or pp.
    """
    key = spread_key(job.program, job.shape)
    if key in PROGRAM_SPREADS:
        return PROGRAM_SPREADS[key]
    kind = kind_of(job.shape, layout)
    return SPREADS["tp or pp" if job.gpus == 1 and kind != MIXTURE else kind]


def comparison_doubt(job: Job, layout: Layout) -> float:
    """Return the doubt of a layout's time beside that of another layout of the same job.

    How well a program runs its experts changes both times, so a mixture has the doubt of a dense model.
    """
    if job.shape.num_experts:
        return PROGRAM_SPREADS.get(job.program, SPREADS[dense_kind(layout)])
    return doubt(job, layout)
